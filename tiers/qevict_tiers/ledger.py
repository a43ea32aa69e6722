"""What tiering costs and does, in bytes and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from qevict_kernels.layout import WindowGeometry

__all__ = ["Counter", "Counters", "LedgerBytes"]


class Counter(IntEnum):
    """What routing counts, in windows (one layer each) unless said otherwise."""

    ROUTED = 0
    """Candidates that were ranked."""
    DEMOTED = 1
    """FULL windows that became coded."""
    EVICTED_FULL = 2
    """FULL windows that were evicted."""
    EVICTED_CODED = 3
    """Coded windows that were evicted."""
    PROMOTED = 4
    """Coded windows whose FULL copy was rebuilt."""
    QUANTIZED = 5
    """Windows whose codes were made."""
    CODES_REUSED = 6
    """Demotions that found codes from before."""
    NON_FINITE = 7
    """Windows quantised with NaN or infinity in them."""


class Counters:
    """Running totals on the KV device (int64), so that counting needs no synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._totals = torch.zeros(len(Counter), dtype=torch.int64, device=device)

    def add(self, counter: Counter, amount: torch.Tensor | int) -> None:
        """Add ``amount`` to a counter."""
        self._totals[counter] += amount

    def read(self) -> dict[Counter, int]:
        """All totals (waits for the device)."""
        return dict(zip(Counter, self._totals.tolist(), strict=True))


@dataclass(frozen=True)
class LedgerBytes:
    """Bytes by kind. ``codes``, ``params`` and ``alignment`` together are the ledger's records."""

    full: int
    codes: int
    params: int
    alignment: int
    tables: int

    @property
    def records(self) -> int:
        """Bytes of all coded records."""
        return self.codes + self.params + self.alignment

    @classmethod
    def of(
        cls, geometry: WindowGeometry, num_full: int, num_coded: int, tables: int
    ) -> LedgerBytes:
        """The bytes of so many FULL and coded windows of one layer each."""
        records = num_coded * geometry.num_kv_heads
        layout = geometry.record
        return cls(
            full=num_full * geometry.full_window_bytes,
            codes=records * layout.code_bytes,
            params=records * layout.param_bytes,
            alignment=records * layout.alignment_bytes,
            tables=tables,
        )
