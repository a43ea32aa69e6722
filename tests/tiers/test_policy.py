"""Routing against a transcription of the algorithm with plain lists."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from qevict_tiers.config import Promotion
from qevict_tiers.policy import Tier, route


def brute_force(
    scores: list[float],
    tiers: list[int],
    start: int,
    end: int,
    max_full: int,
    max_coded: int,
    promote: Promotion,
) -> list[int]:
    """Sort candidates by score, the newer first among equals; fill FULL, then coded."""
    ranked = sorted(
        (w for w in range(start, end) if tiers[w] in (Tier.FULL, Tier.CODED)),
        key=lambda w: (-scores[w], -w),
    )
    after = list(tiers)
    full = 0
    rest = []
    for window in ranked:
        may_be_full = promote is Promotion.DEQUANTIZE or tiers[window] == Tier.FULL
        if may_be_full and full < max_full:
            after[window] = Tier.FULL
            full += 1
        else:
            rest.append(window)
    for place, window in enumerate(rest):
        after[window] = Tier.CODED if place < max_coded else Tier.EVICTED
    return [int(x) for x in after]


def is_candidate(row: dict[str, Any]) -> torch.Tensor:
    """Which windows of an event are ranked."""
    window, tiers = torch.arange(len(row["tiers"])), torch.tensor(row["tiers"])
    return (window >= row["start"]) & (window < row["end"]) & (tiers != Tier.EVICTED)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 24))
    start = draw(st.integers(0, n))
    return {
        # Few distinct scores, so that ties are common.
        "scores": draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=n, max_size=n)),
        "tiers": draw(st.lists(st.sampled_from([1, 2, 3]), min_size=n, max_size=n)),
        "start": start,
        "end": draw(st.integers(start, n)),
        "max_full": draw(st.integers(0, n)),
        "max_coded": draw(st.integers(0, n)),
    }


@given(rows=st.lists(events(), min_size=1, max_size=4), promote=st.sampled_from(Promotion))
def test_route_equals_brute_force_for_rows_of_unequal_length(
    rows: list[dict[str, Any]], promote: Promotion
) -> None:
    width = max(len(row["scores"]) for row in rows)
    scores = torch.full((1, len(rows), width), 9.0)
    tiers = torch.zeros((1, len(rows), width), dtype=torch.uint8)
    for b, row in enumerate(rows):
        n = len(row["scores"])
        scores[0, b, :n] = torch.tensor(row["scores"])
        tiers[0, b, :n] = torch.tensor(row["tiers"], dtype=torch.uint8)
    columns = [
        torch.tensor([row[k] for row in rows]) for k in ("start", "end", "max_full", "max_coded")
    ]
    after, outranked = route(scores, tiers, *columns, promote)
    for b, row in enumerate(rows):
        n = len(row["scores"])
        assert after[0, b, :n].tolist() == brute_force(**row, promote=promote)
        assert (after[0, b, n:] == Tier.NONE).all()
        # By rank alone, whatever still has its original.
        ranked = torch.tensor(brute_force(**{**row, "promote": Promotion.DEQUANTIZE}))
        assert torch.equal(outranked[0, b, :n], is_candidate(row) & (ranked != Tier.FULL))
        assert not outranked[0, b, n:].any()


def test_layers_are_routed_each_by_its_own_scores() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]]])
    tiers = torch.full((2, 1, 3), Tier.FULL, dtype=torch.uint8)
    one = torch.tensor([1])
    after = route(
        scores, tiers, torch.tensor([0]), torch.tensor([3]), one, one, Promotion.ALIAS
    ).tiers
    assert after.tolist() == [
        [[Tier.FULL, Tier.CODED, Tier.EVICTED]],
        [[Tier.EVICTED, Tier.CODED, Tier.FULL]],
    ]


def test_an_evicted_window_never_returns_whatever_its_score() -> None:
    scores = torch.tensor([[[9.0, 1.0]]])
    tiers = torch.tensor([[[Tier.EVICTED, Tier.CODED]]], dtype=torch.uint8)
    two = torch.tensor([2])
    for promote in Promotion:
        after = route(scores, tiers, torch.tensor([0]), two, two, two, promote).tiers
        assert after[0, 0, 0] == Tier.EVICTED
