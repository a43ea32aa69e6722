"""The memory of arenas, and moves within it in plain torch for backends that need no more."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from qevict_kernels.interface import FullArena

__all__ = ["TorchMemory", "arena_memory"]


def arena_memory(num_bytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Zeros for an arena, uint8 ``[num_bytes]``; in huge pages where the CPU's kernel grants them.

    A step reads windows that lie anywhere: in small pages most of them cost a walk through the
    page tables. All of it is taken at once. Raises ``MemoryError``, or what torch raises for
    other devices.
    """
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for an arena of {num_bytes / 2**20:,.0f} MiB") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


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
