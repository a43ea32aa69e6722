"""What windows are ranked by: sums of attention, sums that decay, and other signals."""

from __future__ import annotations

import contextlib
import io
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mini_engine import SMALL, MiniEngine
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_tiers.config import Heads, PrefillScores, TieringConfig
from qevict_tiers.policy import Tier
from qevict_tiers.scores import AttentionScorer, DecayedScorer, Ranking, ValueScorer, scorer_of
from qevict_tiers.simulator import Event, Recording, SimulatedBudget, SimulatedConfig, simulate

EVENT = Ranking(slice(0, 2), [1, 0], [16, 12])


class Kernels(TorchMemory, ReferenceKernels):
    """The reference."""


# -- attention that decays ------------------------------------------------------------------


def test_by_default_routing_ranks_what_attention_has_gathered_and_nothing_is_copied() -> None:
    gathered = torch.rand(2, 2, 5)
    scorer = scorer_of(TieringConfig())
    assert type(scorer) is AttentionScorer
    assert scorer.rank(gathered, EVENT) is gathered
    assert scorer.decay == 1


def test_the_options_ask_for_a_decay() -> None:
    scorer = scorer_of(TieringConfig(score_decay=Fraction(3, 4)))
    assert scorer == DecayedScorer(0.75)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_is_from_0_to_1(decay: float) -> None:
    with pytest.raises(ValueError, match=r"^decay must be from 0 .* got"):
        DecayedScorer(decay)


PROMPT, TOTAL, EVERY = 60, 100, 5


def recording() -> Recording:
    mass = torch.rand(2, TOTAL, TOTAL, generator=torch.Generator().manual_seed(1)).tril()
    return Recording(mass / mass.sum(-1, keepdim=True), PROMPT)


def simulated(decay: Fraction, **options: Any) -> list[Event]:
    """Events of a request of which nothing is ever evicted."""
    config = SimulatedConfig(
        budget=Fraction(9, 10), quant_fraction=Fraction(1), window=2, route_every=EVERY, sink=2,
        local=4, min_context=10, score_decay=decay, prefill_scores=PrefillScores.ALL,
    )  # fmt: skip
    budget = SimulatedBudget(config, 2, full_window_bytes=16, coded_window_bytes=4)
    events = simulate(recording(), budget, renormalize=False, **options)
    assert not any((event.tiers == Tier.EVICTED).any() for event in events)
    return events


@pytest.mark.parametrize("decay", [Fraction(0), Fraction(1, 2), Fraction(9, 10), Fraction(1)])
def test_a_score_is_the_sum_of_what_intervals_gave_each_weighed_by_its_age(decay: Fraction) -> None:
    events, source = simulated(decay), recording()
    starts = [0, *(event.tokens for event in events)]
    for number, event in enumerate(events):
        expected = torch.zeros(2, TOTAL // 2, dtype=torch.float64)
        for age in range(number + 1):
            start, end = starts[number - age], starts[number - age + 1]
            interval = source.by_window(start, end, 2, TOTAL // 2).double().sum(1)
            expected += float(decay) ** age * interval
        found = event.scores.double()
        # Sums of at most 100 masses in float32.
        torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-5, atol=1e-6)


def test_a_decay_of_one_changes_no_bit() -> None:
    for event, other in zip(
        simulated(Fraction(1)), simulated(Fraction(1), scorer=DecayedScorer(1.0)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(event[1:], other[1:], strict=True))


def make_engine(**options: Any) -> MiniEngine:
    return MiniEngine(
        lambda g, r: Kernels(g, r),
        TieringConfig(**SMALL | options),
        Heads(2, 1, 64),
        kv_tokens=1600,
        context=400,
    )


def test_scores_decay_once_at_each_event_of_their_own_row() -> None:
    """A step gives a mass of 1 to what a row sees, so the sum tells how often it decayed."""
    engine, decay = make_engine(score_decay=Fraction(1, 4)), 0.25
    prompts = {1: 200, 2: 171}
    for name, prompt in prompts.items():
        engine.start(name, prompt)
        engine.extend({name: prompt})
    # The last 32 queries of the prompt, then its routing.
    sums = dict.fromkeys(prompts, 32 * decay)
    for step in range(30):
        names = [1, 2] if step % 3 else [1]
        for name in names:
            generated = engine.running[name].stored - prompts[name]
            if generated and generated % 8 == 0:
                sums[name] *= decay
            sums[name] += 1
        engine.decode(names)
        for name, expected in sums.items():
            found = engine.manager.views.score[:, engine.running[name].row].sum(-1)
            torch.testing.assert_close(found, torch.full((2,), expected), rtol=1e-4, atol=0)


# -- other signals --------------------------------------------------------------------------


class LeastFirst:
    """The windows that attention cares least for."""

    decay = 1.0

    def rank(self, gathered: torch.Tensor, event: Ranking) -> torch.Tensor:
        return -gathered


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_the_tier_manager_ranks_by_the_scorer_that_it_was_given(fixed_shapes: bool) -> None:
    engine = MiniEngine(
        lambda g, r: Kernels(g, r), TieringConfig(**SMALL), Heads(2, 1, 64), kv_tokens=1600,
        context=400, fixed_shapes=fixed_shapes,
    )  # fmt: skip
    engine.manager.scorer = LeastFirst()
    engine.start(1, 300)
    engine.extend({1: 300})
    start, end = engine.plan.budget.history(300)
    tiers = engine.tiers(1)[:, start:end]
    scores = engine.manager.views.score[:, engine.running[1].row, start:end]
    for tier, score in zip(tiers, scores, strict=True):
        full, coded, gone = (score[tier == x] for x in (Tier.FULL, Tier.CODED, Tier.EVICTED))
        assert len(full)
        assert full.max() <= coded.min()
        assert coded.max() <= gone.min()


def test_values_weigh_attention_by_the_mean_norm_of_each_windows_tokens() -> None:
    first = torch.tensor([[[1.0, -1.0]], [[2.0, 0.0]], [[0.0, 4.0]]])  # norms 2, 2, 4
    second = torch.ones(4, 2, 2)
    second[2:, 1] = -5  # of two heads
    scorer = ValueScorer.of({0: [first, second], 1: [second, first]}, window=2)
    assert scorer.norms.tolist() == [[[2, 4], [2, 6]], [[2, 6], [2, 4]]]
    gathered = torch.ones(2, 2, 1)
    gathered[1, 0] = 3
    # Rows in the order of the event, and no more windows than it has.
    assert scorer.rank(gathered, EVENT).tolist() == [[[2], [2]], [[6], [2]]]
    one_layer = Ranking(slice(1, 2), [0], [12])
    assert scorer.rank(torch.ones(1, 1, 2), one_layer).tolist() == [[[2, 6]]]


def test_of_two_windows_with_equal_attention_that_with_larger_values_stays() -> None:
    config = SimulatedConfig(
        window=1, budget=Fraction(1, 2), quant_fraction=Fraction(0), sink=0, local=1, min_context=3
    )
    budget = SimulatedBudget(config, 1, full_window_bytes=8, coded_window_bytes=2)
    attention = Recording(torch.full((1, 8, 8), 1 / 8).tril(), 8)
    values = torch.ones(8, 1, 4)
    values[[2, 5]] = 3.0
    scorer = ValueScorer.of({0: [values]}, 1)
    (event,) = simulate(attention, budget, renormalize=False, scorer=scorer)
    kept = (event.tiers[0] == Tier.FULL).nonzero()[:, 0].tolist()
    assert kept == [0, 2, 5, 7]  # 7 is local; of the others 0 has had attention for longest


def test_the_example_of_the_documentation_runs_and_says_what_it_says_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scores.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = re.findall(r"# prints (.*)", code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().splitlines() == said


# -- float32 --------------------------------------------------------------------------------

STEPS = 1_250_000
Floats = npt.NDArray[np.float32]


def one_by_one(masses: Floats) -> float:
    """The sum as kernels make it."""
    return float(np.add.accumulate(masses)[-1])


def by_events(masses: Floats, decay: float = 1.0) -> float:
    """The sum of what intervals of eight steps gave, each added to a float32 total."""
    total = np.float32(0)
    for gathered in masses.reshape(-1, 8).sum(-1, dtype=np.float32):
        total = total * np.float32(decay) + gathered
    return float(total)


def test_a_million_float32_steps_can_rank_two_windows_wrongly_and_a_decay_prevents_it() -> None:
    """Beyond 65,536 a score has steps of 1/128. Of 12.49 such steps 12 arrive, of 24.51 25."""
    steady = np.full(STEPS, 12.49 / 128, np.float32)
    pulsed = np.tile(np.array([0, 24.51 / 128], np.float32), STEPS // 2)
    exact = [masses.sum(dtype=np.float64) for masses in (steady, pulsed)]
    assert exact[0] > 1.015 * exact[1]
    assert one_by_one(steady) < one_by_one(pulsed)
    assert by_events(steady) > by_events(pulsed)
    # Decayed, scores stay below 8 * .2 / .001, where steps are of 1/8192 at most.
    assert by_events(steady, 0.999) > 1.015 * by_events(pulsed, 0.999)
