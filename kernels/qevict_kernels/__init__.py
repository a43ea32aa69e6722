"""Attention over full-precision and INT2/INT4-coded KV windows; independent of any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qevict_kernels.interface import AttentionKernels
    from qevict_kernels.layout import WindowGeometry
    from qevict_kernels.rope import RotaryTable

__all__ = ["make_kernels"]


def make_kernels(
    geometry: WindowGeometry, rotary: RotaryTable, device: torch.device
) -> AttentionKernels:
    """The production kernels for a device.

    Raises ``NotImplementedError`` for a device that has none.
    """
    if device.type == "cpu":
        from qevict_kernels.memory import TorchMemory
        from qevict_kernels.numba import NumbaKernels

        class CpuKernels(NumbaKernels, TorchMemory):
            """numba for tokens, attention and codes, torch for moves of whole copies."""

        return CpuKernels(geometry, rotary)
    raise NotImplementedError(f"there are no kernels for device {device.type!r} yet")
