"""The numbers of a policy, against cases computed by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from qevict_tiers.diagnostics import (
    Place,
    Selection,
    agreement,
    future_missed_mass,
    mass_by_place,
    oracle,
    returns,
    selection_churn,
    selections,
)
from qevict_tiers.policy import Tier
from qevict_tiers.simulator import Recording, SimulatedBudget, SimulatedConfig, simulate

F, C, E = Tier.FULL, Tier.CODED, Tier.EVICTED


def selection(
    tokens: int, tiers: list[Tier], ranked: list[int], history: tuple[int, int] | None = None
) -> Selection:
    """One layer; ``ranked``: numbers of windows. Everything is history unless told."""
    marks = torch.zeros(1, len(tiers), dtype=torch.bool)
    marks[0, ranked] = True
    return Selection(
        tokens, torch.tensor([tiers], dtype=torch.uint8), history or (0, len(tiers)), marks
    )


# Two queries after a prompt of eight tokens, windows of two: each row sums to 1.
MASS = torch.tensor(
    [[
        [.10, .10, .05, .15, .20, .00, .10, .10, .20, .00],
        [.00, .05, .25, .05, .05, .10, .00, .20, .10, .20],
    ]]
)  # fmt: skip
RECORDING = Recording(MASS, 8)
# Window 0 is a sink, window 3 local; 1 and 2 are the history.
ONLY = selection(8, [F, C, E, F], [], history=(1, 3))


def test_mass_by_place_sums_a_steps_attention_over_the_windows_of_each_tier() -> None:
    shares = mass_by_place(RECORDING, [ONLY], window=2)
    expected = torch.empty(1, 2, 4)
    expected[0, :, Place.PROTECTED] = torch.tensor([0.10 + 0.10 + 0.10 + 0.10 + 0.20, 0.55])
    expected[0, :, Place.FULL] = 0.0
    expected[0, :, Place.CODED] = torch.tensor([0.20, 0.30])
    expected[0, :, Place.EVICTED] = torch.tensor([0.20, 0.15])
    torch.testing.assert_close(shares, expected)


def test_mass_by_place_follows_the_selection_of_each_step() -> None:
    second = selection(9, [F, E, F, F, F], [], history=(1, 3))
    shares = mass_by_place(RECORDING, [ONLY, second], window=2)
    torch.testing.assert_close(shares[0, 0, Place.EVICTED], torch.tensor(0.20))
    torch.testing.assert_close(shares[0, 1, Place.EVICTED], torch.tensor(0.30))
    torch.testing.assert_close(shares[0, 1, Place.FULL], torch.tensor(0.15))


def test_future_missed_mass_is_the_mean_over_later_queries() -> None:
    def missed(**options: object) -> float:
        return future_missed_mass(RECORDING, [ONLY], 2, **options).item()  # type: ignore[arg-type]

    assert missed() == pytest.approx((0.20 + 0.15) / 2)
    assert missed(horizon=1) == pytest.approx(0.20)
    # Of .40 and .45 that the history gets.
    assert missed(of_history=True) == pytest.approx(0.35 / 0.85)
    # The coded window switched off is missed, too.
    assert missed(kept=[F]) == pytest.approx((0.40 + 0.45) / 2)


def test_future_missed_mass_of_an_event_after_the_last_query_is_undefined() -> None:
    last = selection(10, [F, E, E, F, F], [], history=(1, 3))
    found = future_missed_mass(RECORDING, [ONLY, last], 2)[0]
    assert found[0] == pytest.approx(0.175)
    assert math.isnan(found[1])


def test_a_window_comes_back_that_ranked_full_before_and_was_out_in_between() -> None:
    everything = [F] * 4
    events = [
        selection(8, everything, [0, 1]),
        selection(9, everything, [1, 2]),
        selection(10, everything, [0, 2]),  # 0 comes back; 2 stays
        selection(11, everything, [0, 1]),  # 1 comes back; 0 stays
        selection(12, everything, [3, 1]),  # 3 is new
        selection(13, everything, []),
    ]
    rates = returns(events)[0]
    assert rates[:5].tolist() == [0, 0, 0.5, 0.5, 0]
    assert math.isnan(rates[5])


def test_windows_that_are_new_between_events_do_not_come_back() -> None:
    events = [selection(8, [F] * 2, [1]), selection(16, [F] * 4, [3]), selection(24, [F] * 6, [1])]
    assert returns(events)[0].tolist() == [0, 0, 1]


def test_churn_is_the_jaccard_distance_of_what_is_kept() -> None:
    events = [
        selection(8, [F, C, E, C], []),
        selection(9, [C, F, E, C], []),  # tiers changed, nothing left
        selection(10, [F, E, C, C], []),  # 1 left, 2 came: two of four in common
    ]
    assert selection_churn(events)[0].tolist() == [0, 0.5]
    # FULL alone: {0} -> {1} -> {0}.
    assert selection_churn(events, kept=[F])[0].tolist() == [1, 1]


def test_churn_leaves_out_what_is_no_choice() -> None:
    events = [
        selection(32, [F, E, C, F], [], history=(1, 3)),
        selection(40, [F, E, C, E, F], [], history=(1, 4)),  # 3 was local before
    ]
    assert selection_churn(events)[0].tolist() == [0]


def test_nothing_kept_twice_is_no_churn() -> None:
    events = [selection(8, [E, E], []), selection(9, [E, E], [])]
    assert selection_churn(events)[0].tolist() == [0]


def test_agreement_of_scores() -> None:
    one = torch.tensor([[3.0, 0.0, 4.0], [1.0, 2.0, 3.0]])
    other = torch.tensor([[4.0, 0.0, 3.0], [2.0, 4.0, 6.0]])
    found = agreement(one, other, top=1)
    assert found.cosine.tolist() == pytest.approx([24 / 25, 1])
    assert found.top.tolist() == [0, 1]


# -- on a simulated policy ----------------------------------------------------------------

CONFIG = SimulatedConfig(
    budget=Fraction(1, 4), quant_fraction=Fraction(0), window=1, route_every=1, sink=0, local=1,
    min_context=4,
)  # fmt: skip
BUDGET = SimulatedBudget(CONFIG, 1, full_window_bytes=16, coded_window_bytes=4)


def alternating() -> Recording:
    """After a prompt of eight tokens, with room for one, tokens 0 and 1 overtake each other."""
    rows = torch.eye(12)
    for query, first, second in [*((q, 0.1, 0.05) for q in range(2, 8)), (8, 0, 0.9), (9, 0.9, 0)]:
        rows[query, :2] = torch.tensor([first, second])
        rows[query, query] -= first + second
    return Recording(rows[None], 8)


def test_an_oracle_brings_back_what_a_two_tier_policy_has_lost() -> None:
    recording = alternating()
    events = simulate(recording, BUDGET)
    true = oracle(recording, BUDGET, events)
    kept = selections(events, BUDGET)
    assert [s.tokens for s in true] == [s.tokens for s in kept]
    # By hand: K_f at so many tokens, and the first windows by the attention up to there.
    sums = recording.mass[0].double().cumsum(0)
    for found in true:
        full = BUDGET.capacities(found.tokens).full
        start, end = found.history
        order = sorted(range(start, end), key=lambda w: (-sums[found.tokens - 1, w].item(), -w))
        assert found.ranked[0].nonzero().flatten().tolist() == sorted(order[:full])
    assert [found.ranked[0].nonzero().flatten().tolist() for found in true[:3]] == [[0], [1], [0]]
    assert returns(true)[0, :3].tolist() == [0, 0, 1]
    # Two tiers can't have back what they have evicted.
    assert returns(kept).sum() == 0


def test_ranks_of_a_simulated_policy_are_what_has_room() -> None:
    events = simulate(alternating(), BUDGET)
    for found, event in zip(selections(events, BUDGET), events, strict=True):
        start, end = found.history
        full = (event.tiers[0, start:end] == F).sum()
        assert found.ranked[0].sum() == full
        assert not found.ranked[0, end:].any()
