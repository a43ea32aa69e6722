"""The routing policy: a pure function from scores to tiers (QEvict, arXiv 2608.05326, alg. 1).

It knows neither memory nor engine. Higher scores mean more attention received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple

import torch

from qevict_kernels.transfers import to_device
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion

__all__ = ["Limits", "Routed", "Tier", "rank_windows", "route"]


class Tier(IntEnum):
    """What a view sees of one window in one layer."""

    NONE = 0
    """No such window (yet)."""
    FULL = 1
    """Full precision."""
    CODED = 2
    """INT2 or INT4 codes that take part in attention."""
    EVICTED = 3
    """Gone."""


class Routed(NamedTuple):
    """What a routing event decides, for windows ``[L, B, N]``.

    tiers: uint8, ``Tier`` from now on. outranked: bool, candidates that rank below the first
    ``max_full``; without ``Promotion.DEQUANTIZE`` they may be FULL nevertheless, or coded and
    not outranked.
    """

    tiers: torch.Tensor
    outranked: torch.Tensor


@dataclass(frozen=True)
class Limits:
    """What a routing event may keep of the windows of each row.

    history_start, history_end: int64 ``[B]``, half-open range of windows between sink and
    local. shared: int64 ``[B]``, leading windows that belong to a reused prefix. max_full,
    max_coded: int64 ``[B]``, ``K_f`` and ``K_q``. coded_per_full: coded windows that take
    the bytes of one FULL window.
    """

    history_start: torch.Tensor
    history_end: torch.Tensor
    shared: torch.Tensor
    max_full: torch.Tensor
    max_coded: torch.Tensor
    coded_per_full: Fraction

    @classmethod
    def of(
        cls, budgets: Sequence[WindowBudget], tokens: Sequence[int], shared: torch.Tensor
    ) -> Limits:
        """The limits of rows of these budgets and so many tokens, on the device of ``shared``.

        Budgets may differ in nothing but their bytes.
        """
        start, end, full, coded = to_device(cls.numbers(budgets, tokens), shared.device)
        return cls(
            history_start=start,
            history_end=end,
            shared=shared,
            max_full=full,
            max_coded=coded,
            coded_per_full=cls.coded_per_full_of(budgets[0]),
        )

    @staticmethod
    def numbers(budgets: Sequence[WindowBudget], tokens: Sequence[int]) -> list[list[int]]:
        """``history_start``, ``history_end``, ``max_full``, ``max_coded`` of rows."""
        rows = list(zip(budgets, tokens, strict=True))
        histories = [budget.history(n) for budget, n in rows]
        capacities = [budget.capacities(n) for budget, n in rows]
        return [
            [start for start, _ in histories],
            [end for _, end in histories],
            [limit.full for limit in capacities],
            [limit.coded for limit in capacities],
        ]

    @staticmethod
    def coded_per_full_of(budget: WindowBudget) -> Fraction:
        """Coded windows that take the bytes of one FULL window."""
        return Fraction(budget.charged_full_bytes, budget.coded_bytes)


def rank_windows(scores: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Windows in order of rank: candidates first, by score, the newer first among equals.

    ``scores``: float32 ``[..., N]``; ``candidates``: bool, same shape. Returns int64
    ``[..., N]``, the window at each rank.
    """
    keys = torch.where(candidates, scores, torch.full_like(scores, -torch.inf))
    newest_first = torch.flip(keys, dims=(-1,))
    order = torch.sort(newest_first, dim=-1, descending=True, stable=True).indices
    return keys.shape[-1] - 1 - order


def route(
    scores: torch.Tensor,
    tiers: torch.Tensor,
    limits: Limits,
    promote: Promotion,
    at_hand: torch.Tensor | None = None,
) -> Routed:
    """The tiers of all windows after a routing event.

    Candidates are the FULL and coded windows of the history, except shared FULL ones: their
    copies are paid for by the prefix they belong to, and stay. The first ``max_full`` in
    rank order become FULL, the next ``max_coded`` coded, the rest evicted. Of a shared
    window no FULL copy can be made. Without ``Promotion.DEQUANTIZE`` only a window that still
    has its original (is FULL), or whose original is ``at_hand``, can be FULL; so FULL is taken
    by the first ``max_full`` that can be, and coded by the first ``max_coded`` of the others.
    What FULL leaves unused goes to further coded windows, ``coded_per_full`` for each.

    ``scores``: float32 ``[L, B, N]``; ``tiers``: uint8 ``[L, B, N]`` (``Tier``); ``at_hand``:
    bool ``[B, N]``, or None for no window. Windows outside the history keep their tier.
    """
    window = torch.arange(scores.shape[-1], device=scores.device)
    start, end = limits.history_start[:, None], limits.history_end[:, None]
    private = window >= limits.shared[:, None]
    full = tiers == Tier.FULL
    candidates = (window >= start) & (window < end) & ((full & private) | (tiers == Tier.CODED))

    order = rank_windows(scores, candidates)
    ranked_candidate = torch.gather(candidates, -1, order)
    can_be_full = private.expand_as(full) if promote is Promotion.DEQUANTIZE else full
    if at_hand is not None:
        can_be_full = can_be_full | (at_hand & private)
    eligible = ranked_candidate & torch.gather(can_be_full, -1, order)
    max_full = limits.max_full[:, None]
    to_full = eligible & (eligible.cumsum(-1) <= max_full)
    rest = ranked_candidate & ~to_full
    unused = max_full - to_full.sum(-1, keepdim=True)
    extra = unused * limits.coded_per_full.numerator // limits.coded_per_full.denominator
    to_coded = rest & (rest.cumsum(-1) <= limits.max_coded[:, None] + extra)

    ranked = torch.full_like(tiers, Tier.EVICTED)
    ranked.masked_fill_(to_full, Tier.FULL).masked_fill_(to_coded, Tier.CODED)
    routed = torch.empty_like(tiers).scatter_(-1, order, ranked)
    # In rank order a window's index is its rank.
    below = ranked_candidate & (window >= max_full)
    outranked = torch.empty_like(candidates).scatter_(-1, order, below)
    return Routed(torch.where(candidates, routed, tiers), outranked)
