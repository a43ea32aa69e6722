"""What tiering costs and does, in bytes and counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion

__all__ = ["Copies", "Counter", "Counters", "LedgerBound", "LedgerBytes", "ledger_bound"]


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
    """Physical promotions: coded windows whose FULL copy was rebuilt or restored (never with
    ``alias``)."""
    QUANTIZED = 5
    """Windows whose codes were made."""
    CODES_REUSED = 6
    """Demotions that found codes from before."""
    NON_FINITE = 7
    """FULL windows that were to be coded, but were evicted: their code would have decoded to
    NaN, because of NaN, infinity or a range beyond the format of the parameters."""
    RANK_PROMOTED = 8
    """Rank promotions: windows among the first ``K_f`` that ranked below at the event before,
    whether they could get a FULL copy or not."""
    CODED_FOR_REUSE = 9
    """Windows whose codes were made only because their page may be reused: no view sees them."""


class Counters:
    """Running totals on the KV device (int64), so that counting needs no synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(len(Counter), dtype=torch.int64, device=device)

    def add(self, counter: Counter, amount: torch.Tensor | int) -> None:
        """Add ``amount`` to a counter."""
        self.totals[counter] += amount

    def read(self) -> dict[Counter, int]:
        """All totals (waits for the device)."""
        return dict(zip(Counter, self.totals.tolist(), strict=True))


class Copies(NamedTuple):
    """Copies of one layer each, by kind.

    coded: shadows included. shadow: codes beside a FULL copy. unseen_full, unseen_coded: those
    that no request sees, part of ``full`` and ``coded``.
    """

    full: int
    coded: int
    shadow: int
    unseen_full: int
    unseen_coded: int


@dataclass(frozen=True)
class LedgerBytes:
    """Bytes by kind; each byte is in one of them.

    full: FULL copies. codes, params, alignment: records of coded windows. shadow: whole records
    kept beside a FULL copy. reuse: copies that no request sees, kept for those to come. tables:
    where copies lie and what views see.
    """

    full: int
    codes: int
    params: int
    alignment: int
    shadow: int
    reuse: int
    tables: int

    @classmethod
    def of(cls, geometry: WindowGeometry, copies: Copies, tables: int) -> LedgerBytes:
        """The bytes of so many copies, and of tables."""
        layout = geometry.record
        records = (copies.coded - copies.shadow - copies.unseen_coded) * geometry.num_kv_heads
        return cls(
            full=(copies.full - copies.unseen_full) * geometry.full_window_bytes,
            codes=records * layout.code_bytes,
            params=records * layout.param_bytes,
            alignment=records * layout.alignment_bytes,
            shadow=copies.shadow * geometry.coded_window_bytes,
            reuse=copies.unseen_full * geometry.full_window_bytes
            + copies.unseen_coded * geometry.coded_window_bytes,
            tables=tables,
        )


class LedgerBound(NamedTuple):
    """The most bytes that codes can take.

    total: all records, whoever sees them. shadow: those of them beside a FULL copy.
    """

    total: int
    shadow: int


def ledger_bound(budget: WindowBudget, tokens: int, *, publishes: bool) -> LedgerBound:
    """The most that codes of one request take just after its routing event at a length.

    Whatever its attention does, over all layers; codes of a reused prefix are not its own.
    ``publishes``: whether all its windows may be kept for others, so that evicted ones keep their
    codes. With ``H`` windows of history, in each routed layer::

        total   M_q * H                                     if it publishes, else
                M_q * min(H, K_q + K_f)                     dequantize: each FULL one has codes
                M_q * min(H, K_q + floor(K_f * M_f / M_q))  else: no original is left
        shadow  M_q * min(H, K_f)                           dequantize, else 0

    With ``dequantize`` attention that wavers reaches both. In the other modes a window keeps its
    original as long as FULL has room, so there ``K_q`` it is wherever ``W`` divides
    ``route_every``. Tables do not depend on attention (``TierManager.table_bytes``).
    """
    if not budget.is_tiered(tokens):
        return LedgerBound(0, 0)
    start, end = budget.history(tokens)
    limits, history = budget.capacities(tokens), end - start
    record_bytes = budget.num_tiered_layers * budget.coded_bytes
    if budget.config.promote is Promotion.DEQUANTIZE:
        shadows, seen = min(history, limits.full), limits.coded + limits.full
    else:
        shadows, seen = 0, limits.coded + limits.full * budget.full_bytes // budget.coded_bytes
    held = history if publishes else min(history, seen)
    return LedgerBound(record_bytes * held, record_bytes * shadows)
