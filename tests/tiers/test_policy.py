"""Routing against a transcription of the algorithm with plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from qevict_tiers.config import Promotion
from qevict_tiers.policy import Limits, Tier, route

CODED_PER_FULL = Fraction(7, 2)


def brute_force(
    scores: list[float],
    tiers: list[int],
    start: int,
    end: int,
    shared: int,
    max_full: int,
    max_coded: int,
    promote: Promotion,
    at_hand: Sequence[int] = (),
) -> list[int]:
    """Sort candidates by score, the newer first among equals; fill FULL, then coded."""
    ranked = sorted(
        (
            w
            for w in range(start, end)
            if tiers[w] == Tier.CODED or (tiers[w] == Tier.FULL and w >= shared)
        ),
        key=lambda w: (-scores[w], -w),
    )
    after = list(tiers)
    full = 0
    rest = []
    for window in ranked:
        has_original = tiers[window] == Tier.FULL
        can_return = promote is Promotion.DEQUANTIZE or window in at_hand
        may_be_full = has_original or (can_return and window >= shared)
        if may_be_full and full < max_full:
            after[window] = Tier.FULL
            full += 1
        else:
            rest.append(window)
    # The bytes of FULL windows that are not there hold further codes.
    max_coded += int((max_full - full) * CODED_PER_FULL)
    for place, window in enumerate(rest):
        after[window] = Tier.CODED if place < max_coded else Tier.EVICTED
    return [int(x) for x in after]


def is_candidate(row: dict[str, Any]) -> torch.Tensor:
    """Which windows of an event are ranked."""
    window, tiers = torch.arange(len(row["tiers"])), torch.tensor(row["tiers"])
    pinned = (tiers == Tier.FULL) & (window < row["shared"])
    in_history = (window >= row["start"]) & (window < row["end"])
    return in_history & (tiers != Tier.EVICTED) & ~pinned


def limits(*rows: dict[str, Any]) -> Limits:
    """Limits of several rows from their dictionaries."""

    def column(name: str, default: int | None = None) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows])

    return Limits(
        column("start"),
        column("end"),
        column("shared", 0),
        column("max_full"),
        column("max_coded"),
        CODED_PER_FULL,
    )


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
        "shared": draw(st.integers(0, n)),
        "max_full": draw(st.integers(0, n)),
        "max_coded": draw(st.integers(0, n)),
        "at_hand": draw(st.lists(st.integers(0, n - 1), max_size=4)),
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
    at_hand = torch.zeros((len(rows), width), dtype=torch.bool)
    for b, row in enumerate(rows):
        at_hand[b, row["at_hand"]] = True
    after, outranked = route(scores, tiers, limits(*rows), promote, at_hand)
    for b, row in enumerate(rows):
        n = len(row["scores"])
        assert after[0, b, :n].tolist() == brute_force(**row, promote=promote)
        assert (after[0, b, n:] == Tier.NONE).all()
        # By rank alone, whatever still has its original.
        expected = is_candidate(row)
        places = torch.nonzero(expected)[:, 0].tolist()
        best = sorted(places, key=lambda w, row=row: (-row["scores"][w], -w))
        expected[best[: row["max_full"]]] = False
        assert torch.equal(outranked[0, b, :n], expected)
        assert not outranked[0, b, n:].any()


def test_layers_are_routed_each_by_its_own_scores() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]]])
    tiers = torch.full((2, 1, 3), Tier.FULL, dtype=torch.uint8)
    one_each = limits({"start": 0, "end": 3, "max_full": 1, "max_coded": 1})
    after = route(scores, tiers, one_each, Promotion.ALIAS).tiers
    assert after.tolist() == [
        [[Tier.FULL, Tier.CODED, Tier.EVICTED]],
        [[Tier.EVICTED, Tier.CODED, Tier.FULL]],
    ]


def test_an_evicted_window_never_returns_whatever_its_score() -> None:
    scores = torch.tensor([[[9.0, 1.0]]])
    tiers = torch.tensor([[[Tier.EVICTED, Tier.CODED]]], dtype=torch.uint8)
    all_of_two = limits({"start": 0, "end": 2, "max_full": 2, "max_coded": 2})
    for promote in Promotion:
        after = route(scores, tiers, all_of_two, promote).tiers
        assert after[0, 0, 0] == Tier.EVICTED


def test_a_reused_prefix_stays_coded_as_far_as_the_bytes_of_full_windows_reach() -> None:
    scores = torch.tensor([[[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]])
    coded = torch.full((1, 1, 6), Tier.CODED, dtype=torch.uint8)
    row = {"start": 0, "end": 6, "shared": 6, "max_full": 1, "max_coded": 1}
    for promote in Promotion:
        after = route(scores, coded, limits(row), promote).tiers
        # 1 + 3.5 windows fit: no FULL copy can be made of what the prefix has as codes.
        assert after[0, 0].tolist() == [Tier.CODED] * 4 + [Tier.EVICTED] * 2
    full = torch.full((1, 1, 6), Tier.FULL, dtype=torch.uint8)
    assert torch.equal(route(scores, full, limits(row), Promotion.ALIAS).tiers, full)
