"""Memory moves in plain torch, shared by backends that need nothing faster."""

from __future__ import annotations

import torch

from qevict_kernels.interface import FullArena

__all__ = ["TorchMemory"]


class TorchMemory:
    """``copy_slots`` and ``store`` of ``AttentionKernels``, exact on any device; no scratch."""

    def reserve(self, batch: int, columns: int) -> None:
        """Nothing."""

    def copy_slots(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of ``slots`` where the source is not negative."""
        moves = sources >= 0
        slots[targets[moves].to(torch.int64)] = slots[sources[moves].to(torch.int64)]

    def store(
        self,
        full: FullArena,
        full_slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write new tokens into FULL windows where the slot is not negative."""
        kept = full_slots >= 0
        slots, places = full_slots[kept].to(torch.int64), offsets[kept].to(torch.int64)
        full.keys[slots, :, places] = keys[kept]
        full.values[slots, :, places] = values[kept]
