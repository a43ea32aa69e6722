"""The simulator against the real tiering state, and against plain lists for windows of a token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import WITHOUT_STORE
from mini_engine import MiniEngine, Request, Text
from qevict_kernels.interface import FullArena
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, PrefillScores, Promotion, TieringConfig
from qevict_tiers.policy import Tier
from qevict_tiers.simulator import Event, Recording, SimulatedBudget, SimulatedConfig, simulate

# -- against the real path ----------------------------------------------------------------

HEADS = Heads(1, 1, 64)
DOCUMENT = Text(document=1, tokens=160)


class LosslessKernels(TorchMemory, ReferenceKernels):
    """The reference with codes that lose nothing: a record is the number of an original kept apart.

    So attention differs from that of a model without tiers by what is evicted, and by nothing else.
    """

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        super().__init__(geometry, rotary)
        shape = (0, geometry.num_kv_heads, geometry.window, geometry.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> torch.Tensor:
        """Keep the originals."""
        keep = full_slots >= 0
        source, target = full_slots[keep].long(), coded_slots[keep].long()
        numbers = torch.arange(len(source), dtype=torch.int32) + len(self.keys)
        coded[target, 0, :4] = numbers[:, None].view(torch.uint8)
        self.keys = torch.cat([self.keys, full.keys[source].float()])
        self.values = torch.cat([self.values, full.values[source].float()])
        return torch.zeros_like(keep)

    def _coded_windows(
        self, coded: torch.Tensor, slots: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = coded[slots.long(), 0, :4].contiguous().view(torch.int32)[:, 0].long()
        return self.keys[numbers], self.values[numbers]


def make_engine(**options: object) -> MiniEngine:
    chosen: dict[str, Any] = {
        "budget": Fraction(2, 5),
        "quant_fraction": Fraction(2, 5),
        "min_context": 112,
        "local": 16,
        **options,
    }
    return MiniEngine(
        LosslessKernels,
        TieringConfig(**chosen),
        HEADS,
        kv_tokens=1600,
        context=320,
    )


def record(engine: MiniEngine, name: int, prompt: int, text: Text, total: int) -> Recording:
    """Dense attention of all tokens of a request over all, from what the engine will draw."""
    request, layers = Request(name, prompt, text), []
    for layer in range(engine.num_layers):
        queries = [engine._draw(request, layer, position)[0] for position in range(total)]
        query, keys = torch.cat(queries).float(), request.keys[layer][:, 0].float()
        future = torch.ones(total, total).triu(1).bool()
        logits = (query @ keys.T * HEADS.head_dim**-0.5).masked_fill(future, -math.inf)
        layers.append(logits.softmax(-1))
    return Recording(torch.stack(layers), prompt)


def assert_serves_as_simulated(
    engine: MiniEngine, name: int, events: list[Event], steps: int
) -> None:
    """Decode a prefilled request so many steps; after each, its views are those of the events."""
    request, views = engine.running[name], engine.manager.views
    upcoming = iter([*events, None])
    current, following = next(upcoming), next(upcoming)
    assert current is not None
    assert current.tokens == request.stored
    # What was ranked has decayed since, by a power of two.
    gathered = views.score[:, request.row] / float(engine.config.score_decay)
    for _ in range(steps + 1):
        count = current.tiers.shape[1]
        tiers = engine.tiers(name)
        assert torch.equal(tiers[:, :count], current.tiers), current.tokens
        assert (tiers[:, count:] == Tier.FULL).all()
        assert torch.equal(views.outranked[:, request.row, :count], current.outranked)
        # Sums of some hundred float32 masses of at most 1, in different order.
        torch.testing.assert_close(gathered[:, :count], current.scores, rtol=1e-4, atol=1e-5)
        if following is not None and following.tokens == request.stored:
            gathered = views.score[:, request.row].clone()
            current, following = following, next(upcoming)
        engine.decode([name])
    assert following is None


@pytest.mark.parametrize("promote", WITHOUT_STORE)
@pytest.mark.parametrize("text", [Text(), DOCUMENT], ids=["alone", "reuse"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "prefill_scores": PrefillScores.ALL,
            "quant_fraction": Fraction(7, 10),
            "route_every": 5,
            "budget": Fraction(3, 10),
        },
        {"budget": Fraction(7, 10), "full_layers": frozenset({1})},
        {"score_decay": Fraction(1, 2)},
    ],
    ids=["last-queries", "all-queries", "full-layers", "decay"],
)
def test_tiers_ranks_and_scores_are_those_of_the_tier_manager_event_by_event(
    promote: Promotion, text: Text, options: dict[str, object]
) -> None:
    engine = make_engine(promote=promote, **options)
    prompt, steps = 197, 60
    recording = record(engine, 2, prompt, text, prompt + steps)
    if text == DOCUMENT:
        engine.start(1, 180, text)
        engine.extend({1: 180})
        engine.finish(1, publish=True)
    cached = engine.start(2, prompt, text)
    assert cached == text.tokens
    engine.extend({2: prompt - cached})
    budget = engine.plan.budget
    events = simulate(recording, budget, shared=cached // engine.geometry.window)
    assert len(events) == 1 + (steps - 1) // engine.config.route_every
    assert {Tier.FULL, Tier.CODED, Tier.EVICTED} == set(events[-1].tiers.unique().tolist())
    # Something moved later on, and what was evicted would have gathered more.
    assert (events[-1].tiers[:, : events[0].tiers.shape[1]] != events[0].tiers).any()
    blind = simulate(recording, budget, shared=cached // engine.geometry.window, renormalize=False)
    assert not torch.allclose(blind[-1].scores, events[-1].scores, rtol=1e-3)
    assert_serves_as_simulated(engine, 2, events, steps - 1)


# -- against plain lists ------------------------------------------------------------------


class Case(NamedTuple):
    """A request, and the rule it is routed by."""

    config: SimulatedConfig
    full_bytes: int
    coded_bytes: int
    recording: Recording
    shared: int
    renormalize: bool

    def simulate(self) -> list[Event]:
        layers = self.recording.mass.shape[0]
        budget = SimulatedBudget(self.config, layers, self.full_bytes, self.coded_bytes)
        return simulate(self.recording, budget, shared=self.shared, renormalize=self.renormalize)


class Transcription:
    """Algorithm 1 for one layer of a case, window by window, with plain numbers.

    Scores are added up in float32, in the order of the queries, so that they are equal to the bit.
    """

    def __init__(self, case: Case, layer: int) -> None:
        self.case, self.config = case, case.config
        self.mass = case.recording.mass[layer].tolist()
        self.prompt, self.total = case.recording.prompt_tokens, case.recording.total_tokens
        windows = self.count(self.total)
        self.score = [np.float32(0)] * windows
        self.tier = [Tier.FULL] * windows
        if self.prompt > self.config.min_context:
            for window in range(case.shared):
                if window * self.config.window >= self.config.sink:
                    self.tier[window] = Tier.CODED

    def count(self, tokens: int) -> int:
        return math.ceil(tokens / self.config.window)

    def events(self) -> Iterator[tuple[int, list[np.float32], list[Tier], list[bool]]]:
        """Tokens, scores, tiers and what is outranked at each event."""
        c = self.config
        start = 0 if c.prefill_scores is PrefillScores.ALL else self.prompt - 32
        start = max(start, self.case.shared * c.window, 0)
        for position in range(start, self.total):
            generated = position - self.prompt
            due = generated >= 0 and generated % c.route_every == 0
            if due and position > c.min_context:
                yield self.event(position)
            self.gather(self.mass[position - self.total])

    def gather(self, row: list[float]) -> None:
        width = self.config.window
        seen = {
            w: np.float32(sum(row[w * width : (w + 1) * width]))
            for w, tier in enumerate(self.tier)
            if tier != Tier.EVICTED
        }
        total = np.float32(sum(seen.values()))
        for w, mass in seen.items():
            if self.case.renormalize and total > 0:
                mass /= total
            self.score[w] += mass

    def event(self, tokens: int) -> tuple[int, list[np.float32], list[Tier], list[bool]]:
        c, shared, n = self.config, self.case.shared, self.count(tokens)
        scores = list(self.score[:n])
        history = [
            w for w in range(n) if w * c.window >= c.sink and (w + 1) * c.window <= tokens - c.local
        ]
        k_full, k_coded = self.capacities(n, len(history))
        ranked = sorted(
            (
                w
                for w in history
                if self.tier[w] == Tier.CODED or (self.tier[w] == Tier.FULL and w >= shared)
            ),
            key=lambda w: (-scores[w], -w),
        )
        can_be_full = [
            w
            for w in ranked
            if w >= shared and (self.tier[w] == Tier.FULL or c.promote is Promotion.DEQUANTIZE)
        ]
        to_full = can_be_full[:k_full]
        rest = [w for w in ranked if w not in to_full]
        unused = (k_full - len(to_full)) * self.charged()
        k_coded += unused // self.case.coded_bytes
        for place, w in enumerate(rest):
            self.tier[w] = Tier.CODED if place < k_coded else Tier.EVICTED
        for w in to_full:
            self.tier[w] = Tier.FULL
        return tokens, scores, self.tier[:n], [w in ranked[k_full:] for w in range(n)]

    def charged(self) -> int:
        """Bytes of a FULL window, with the codes that are kept beside it."""
        shadow = self.case.coded_bytes if self.config.promote is Promotion.DEQUANTIZE else 0
        return self.case.full_bytes + shadow

    def capacities(self, windows: int, history: int) -> tuple[int, int]:
        c, full, coded = self.config, self.case.full_bytes, self.case.coded_bytes
        left = max(Fraction(0), (c.budget * windows - (windows - history)) * full)
        k_full = math.floor((1 - c.quant_fraction) * left / self.charged())
        k_coded = math.floor(c.quant_fraction * left / coded)
        if k_full + k_coded < history:
            return k_full, k_coded
        # All of it fits: FULL as far as the bytes reach.
        if history * full <= left:
            return history, 0
        fits = [f for f in range(history + 1) if f * self.charged() + (history - f) * coded <= left]
        return max(fits, default=0), history - max(fits, default=0)


@st.composite
def cases(draw: st.DrawFn, window: int) -> Case:
    config = SimulatedConfig(
        window=window,
        budget=draw(st.sampled_from([Fraction(1, 2), Fraction(3, 5), Fraction(9, 10)])),
        quant_fraction=draw(st.sampled_from([Fraction(0), Fraction(7, 10), Fraction(1)])),
        route_every=draw(st.integers(1, 5)),
        sink=draw(st.integers(0, 2)),
        local=draw(st.integers(1, 3)),
        min_context=12,
        promote=draw(st.sampled_from(Promotion)),
        prefill_scores=draw(st.sampled_from(PrefillScores)),
    )
    full_bytes = draw(st.integers(2, 20))
    prompt = draw(st.integers(1, 40))
    total = prompt + draw(st.integers(1, 25))
    shared = draw(st.integers(0, (prompt - 1) // window))
    # Few distinct masses, so that ties are common; whole 64ths, whose sums are exact.
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 5]))
    drawn = random.integers(0, levels, (2, total, total), endpoint=True)
    mass = torch.tensor(drawn / 64, dtype=torch.float32).tril()
    return Case(
        config,
        full_bytes,
        draw(st.integers(1, full_bytes - 1)),
        Recording(mass, prompt),
        shared,
        draw(st.booleans()),
    )


@pytest.mark.parametrize("window", [1, 2])
@settings(deadline=None)
@given(data=st.data())
def test_events_equal_the_algorithm_with_plain_lists_for_small_windows(
    window: int, data: st.DataObject
) -> None:
    case = data.draw(cases(window))
    simulated = case.simulate()
    for layer in range(2):
        expected = list(Transcription(case, layer).events())
        assert [event.tokens for event in simulated] == [event[0] for event in expected]
        for event, (_, scores, tiers, outranked) in zip(simulated, expected, strict=True):
            assert event.scores[layer].tolist() == [float(score) for score in scores]
            assert event.tiers[layer].tolist() == tiers
            assert event.outranked[layer].tolist() == outranked


# -- by hand ------------------------------------------------------------------------------

TOKENS = SimulatedConfig(
    window=1,
    budget=Fraction(1, 2),
    quant_fraction=Fraction(0),
    route_every=1,
    sink=0,
    local=1,
    min_context=3,
)


def rule(config: SimulatedConfig = TOKENS, layers: int = 1, coded_bytes: int = 2) -> WindowBudget:
    return SimulatedBudget(config, layers, full_window_bytes=8, coded_window_bytes=coded_bytes)


def spread(prompt: int, total: int, queries: int | None = None, layers: int = 1) -> Recording:
    """Every query attends to itself alone."""
    return Recording(torch.eye(total)[-(queries or total) :].repeat(layers, 1, 1), prompt)


def test_without_renormalization_the_mass_of_evicted_windows_is_lost_with_it_shared_out() -> None:
    mass = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1 / 2, 1 / 2, 0, 0, 0, 0],
            [1 / 4, 1 / 4, 1 / 2, 0, 0, 0],
            [1 / 4, 1 / 2, 1 / 4, 0, 0, 0],
            [1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 0],
            [0, 0, 0, 0, 0, 1],
        ]
    )
    recording = Recording(mass[None], prompt_tokens=4)
    for renormalize, last in (
        (False, [2.25, 1.25, 0.75, 0.125, 0.125]),
        # Half of what the fifth query gives goes to windows 1 and 2, which are evicted then.
        (True, [2.5, 1.25, 0.75, 0.25, 0.25]),
    ):
        first, second = simulate(recording, rule(), renormalize=renormalize)
        assert first.scores[0].tolist() == [2.0, 1.25, 0.75, 0.0]
        # Four tokens' bytes halved are two FULL windows: the local one, and one of history.
        assert first.tiers[0].tolist() == [Tier.FULL, Tier.EVICTED, Tier.EVICTED, Tier.FULL]
        assert second.tokens == 5
        assert second.scores[0].tolist() == last


def test_a_query_that_sees_nothing_of_what_it_attends_to_scores_nothing() -> None:
    mass = torch.eye(6)
    mass[4] = torch.tensor([1.0, 0, 0, 0, 0, 0])  # window 0 is the oldest of three equals
    _, second = simulate(Recording(mass[None], prompt_tokens=4), rule())
    assert second.scores[0].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_of_windows_with_equal_scores_the_newer_rank_first(promote: Promotion) -> None:
    config = SimulatedConfig(
        window=1,
        budget=Fraction(1, 2),
        quant_fraction=Fraction(1, 2),
        sink=1,
        local=1,
        min_context=3,
        promote=promote,
    )
    (event,) = simulate(spread(10, 10), rule(config))
    assert event.scores[0].tolist() == [1.0] * 10
    # 3 windows' bytes are left to history, 12 to each kind: one FULL of 8 (with its codes 10).
    kept = [Tier.CODED] * 6 + [Tier.FULL]
    assert event.tiers[0].tolist() == [Tier.FULL, Tier.EVICTED, *kept, Tier.FULL]
    assert event.outranked[0].tolist() == [False, *[True] * 7, False, False]


def test_a_request_that_stays_short_is_never_routed_and_one_that_grows_is_at_a_multiple() -> None:
    config = SimulatedConfig(window=1, sink=0, local=1, min_context=20, route_every=8)
    assert simulate(spread(5, 21), rule(config)) == []
    assert [event.tokens for event in simulate(spread(5, 40), rule(config))] == [21, 29, 37]
    everything = SimulatedConfig(window=1, budget=Fraction(1), min_context=40)
    assert simulate(spread(50, 70), rule(everything)) == []


def test_queries_before_the_scoring_span_and_narrow_floats_change_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    mass = (torch.randint(0, 8, (2, 90, 90), generator=random) / 8).tril()
    mass[:, :48] = 0.25 * torch.ones(48, 90).tril()
    config = SimulatedConfig(window=1, budget=Fraction(1, 2), sink=2, local=4, min_context=20)
    budget = rule(config, layers=2)
    everything = simulate(Recording(mass, 80), budget)
    assert len(everything) == 2
    for least in (mass[:, 48:], mass[:, 48:].bfloat16(), mass[:, 48:].double()):
        for event, other in zip(everything, simulate(Recording(least, 80), budget), strict=True):
            assert event.scores.dtype == other.scores.dtype == torch.float32
            assert all(torch.equal(a, b) for a, b in zip(event[1:], other[1:], strict=True))


def test_given_bytes_make_the_rule_of_the_geometry_that_has_them() -> None:
    served = WindowBudget(TieringConfig(), TieringConfig().geometry(Heads(9, 3, 64)), 30)
    given = SimulatedBudget(TieringConfig(), 30, served.full_bytes, served.coded_bytes)
    for tokens in (513, 1000, 4096):
        assert given.capacities(tokens) == served.capacities(tokens)
        assert given.history(tokens) == served.history(tokens)


# -- what is refused ----------------------------------------------------------------------


def test_windows_of_any_size_are_simulated_but_not_served() -> None:
    assert SimulatedConfig(window=1).window == 1
    with pytest.raises(ValueError, match=r"one of 4, 8, 16, 32, got 1"):
        TieringConfig(window=1)
    with pytest.raises(ValueError, match="window must be 1 or more tokens, got 0"):
        SimulatedConfig(window=0)
    with pytest.raises(ValueError, match="local must be 1 or more, got 0"):
        SimulatedConfig(window=1, local=0)


@pytest.mark.parametrize("coded_bytes", [0, 8, 9])
def test_coded_windows_that_save_nothing_are_refused(coded_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"below full_window_bytes = 8, got {coded_bytes}"):
        rule(coded_bytes=coded_bytes)


def test_floors_that_do_not_fit_are_refused_as_in_serving() -> None:
    with pytest.raises(ValueError, match="raise --kv-tiering-budget"):
        rule(SimulatedConfig(window=1, budget=Fraction(1, 5), min_context=40))


@pytest.mark.parametrize(
    ("mass", "prompt", "message"),
    [
        (torch.eye(6), 4, r"\[layers, queries, tokens\], got torch.float32 \[6, 6\]"),
        (torch.eye(6).long()[None], 4, r"got torch.int64 \[1, 6, 6\]: record one row"),
        (torch.eye(6)[None], 0, "from 1 to the 6 tokens of mass, got 0"),
        (torch.eye(6)[None], 7, "from 1 to the 6 tokens of mass, got 7"),
        (torch.eye(6)[None, 5:], 4, "the 2 decoded tokens, .* got 1: record every decode step"),
        (torch.eye(7, 6)[None], 4, "at most one for each of 6 tokens, got 7"),
        (-torch.eye(6)[None], 4, "layer 0 has negative numbers or NaN: record probabilities"),
        (torch.eye(6)[None] * math.nan, 4, "layer 0 has negative numbers or NaN"),
        (torch.eye(6)[None, :5].flip(2), 4, "layer 0 reaches tokens after the query"),
        (torch.stack([torch.eye(6)[1:], torch.eye(6)[:5].roll(2, 1)]), 4, "layer 1 reaches"),
    ],
)
def test_what_is_no_recording_is_refused_with_value_and_remedy(
    mass: torch.Tensor, prompt: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Recording(mass, prompt)


def test_a_recording_that_does_not_fit_its_rule_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"has 2 layers, the budget rule 1: make the rule for"):
        simulate(spread(4, 6, layers=2), rule())
    with pytest.raises(ValueError, match=r"stands at 1, but .* from 0 on: record the last 6"):
        simulate(spread(4, 6, queries=5), rule())
    with pytest.raises(ValueError, match=r"from 0 to 3 windows, .* of 4 tokens .*, got 4"):
        simulate(spread(4, 6), rule(), shared=4)
    with pytest.raises(ValueError, match=r"from 0 to 3 windows, .* got -1"):
        simulate(spread(4, 6), rule(), shared=-1)
    assert simulate(spread(4, 6, queries=5), rule(), shared=1)
