"""Attention that wavers as much as it can: scores under which routing moves the most windows.

No text does this. It is the worst case for the ledger (``ledger.ledger_bound``), for tests and
``benchmarks/ledger_churn.py``.
"""

from __future__ import annotations

import torch

from qevict_tiers.policy import Tier, rank_windows

__all__ = ["rotated"]

_APART = 64.0
"""Between scores: more than the attention of an interval can add."""


def rotated(
    scores: torch.Tensor, tiers: torch.Tensor, history: tuple[int, int], by: int
) -> torch.Tensor:
    """Scores of the same windows, where the first ``by`` rank last and the others move up.

    With ``by`` at ``K_f`` every event has an altogether new set of windows for FULL: a Jaccard
    distance of 1 to the one before. Windows that were not in ``history`` rank below it, so that
    eviction, which is for ever, takes those that have just aged out of local, and what oscillates
    stays.

    ``scores``: float32 ``[L, N]``, as they ranked at the last event; ``tiers``: uint8 ``[L, N]``
    (``Tier``) since then; ``history``: half-open range of that event. Returns float32 ``[L, N]``.
    """
    window = torch.arange(scores.shape[-1], device=scores.device)
    was_ranked = (window >= history[0]) & (window < history[1])
    ring = was_ranked & ((tiers == Tier.FULL) | (tiers == Tier.CODED))
    rank = rank_windows(scores, ring).argsort(-1)
    size = ring.sum(-1, keepdim=True)
    turned = (rank - by) % size.clamp(min=1)
    return -_APART * torch.where(ring, turned, scores.shape[-1]).float()
