"""The routing policy: a pure function from scores to tiers (QEvict, arXiv 2608.05326, alg. 1).

It knows neither memory nor engine. Higher scores mean more attention received.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from qevict_tiers.config import Promotion

__all__ = ["Routed", "Tier", "rank_windows", "route"]


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
    ``max_full``; with ``Promotion.ALIAS`` they may be FULL nevertheless, or coded and not
    outranked.
    """

    tiers: torch.Tensor
    outranked: torch.Tensor


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
    history_start: torch.Tensor,
    history_end: torch.Tensor,
    max_full: torch.Tensor,
    max_coded: torch.Tensor,
    promote: Promotion,
) -> Routed:
    """The tiers of all windows after a routing event.

    Candidates are the FULL and coded windows of the history. The first ``max_full`` in
    rank order become FULL, the next ``max_coded`` coded, the rest evicted. With
    ``Promotion.ALIAS`` only a window that still has its original (is FULL) can be FULL,
    so that FULL is taken by the first ``max_full`` originals, and coded by the first
    ``max_coded`` of the others.

    ``scores``: float32 ``[L, B, N]``; ``tiers``: uint8 ``[L, B, N]`` (``Tier``);
    ``history_start``, ``history_end``: int64 ``[B]``, half-open range of windows between
    sink and local; ``max_full``, ``max_coded``: int64 ``[B]``. Windows outside the
    history keep their tier.
    """
    window = torch.arange(scores.shape[-1], device=scores.device)
    in_history = (window >= history_start[:, None]) & (window < history_end[:, None])
    full = tiers == Tier.FULL
    candidates = in_history & (full | (tiers == Tier.CODED))

    order = rank_windows(scores, candidates)
    ranked_candidate = torch.gather(candidates, -1, order)
    eligible = ranked_candidate
    if promote is Promotion.ALIAS:
        eligible = ranked_candidate & torch.gather(full, -1, order)
    to_full = eligible & (eligible.cumsum(-1) <= max_full[:, None])
    rest = ranked_candidate & ~to_full
    to_coded = rest & (rest.cumsum(-1) <= max_coded[:, None])

    ranked = torch.full_like(tiers, Tier.EVICTED)
    ranked.masked_fill_(to_full, Tier.FULL).masked_fill_(to_coded, Tier.CODED)
    routed = torch.empty_like(tiers).scatter_(-1, order, ranked)
    # In rank order a window's index is its rank.
    below = ranked_candidate & (window >= max_full[:, None])
    outranked = torch.empty_like(candidates).scatter_(-1, order, below)
    return Routed(torch.where(candidates, routed, tiers), outranked)
