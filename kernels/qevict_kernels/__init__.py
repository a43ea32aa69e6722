"""Attention over full-precision and INT2/INT4-coded KV windows; independent of any engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from qevict_kernels.interface import AttentionKernels
    from qevict_kernels.layout import WindowGeometry
    from qevict_kernels.rope import RotaryTable

logger = logging.getLogger(__name__)

__all__ = ["make_kernels", "scratch_bytes"]


def make_kernels(
    geometry: WindowGeometry,
    rotary: RotaryTable,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionKernels:
    """The production kernels for a device, and for windows of a dtype.

    Raises ``NotImplementedError`` for a device that has none.
    """
    if device.type == "cpu":
        from qevict_kernels.memory import TorchMemory
        from qevict_kernels.numba import NumbaKernels

        class CpuKernels(NumbaKernels, TorchMemory):
            """numba for tokens, attention and codes, torch for moves of whole copies."""

        return CpuKernels(geometry, rotary)
    if device.type == "cuda":
        return _cuda_kernels(geometry, rotary, device, dtype)
    raise NotImplementedError(f"there are no kernels for device {device.type!r} yet")


def _cuda_kernels(
    geometry: WindowGeometry, rotary: RotaryTable, device: torch.device, dtype: torch.dtype
) -> AttentionKernels:
    """Triton's, with FlashInfer's prefill where it can be had."""
    from qevict_kernels.flashinfer import FlashInferKernels
    from qevict_kernels.triton import TritonKernels

    try:
        kernels = FlashInferKernels(geometry, rotary, device)
        kernels.try_out(dtype)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.info("KV tiering prefills with Triton alone, without FlashInfer: %s", error)
        return TritonKernels(geometry, rotary, device)
    return kernels


def scratch_bytes(geometry: WindowGeometry, device: torch.device, batch: int, columns: int) -> int:
    """Bytes that ``reserve`` of a device's kernels takes (see ``AttentionKernels``)."""
    if device.type != "cuda":
        return 0
    from qevict_kernels.triton.decode import MAX_SPLITS, scratch_numbers

    return 4 * sum(scratch_numbers(geometry, MAX_SPLITS, batch, columns))
