"""Random lives of requests: claims hold at every allocation, and nothing is left behind."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine import MiniEngine, Text
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_tiers.config import PrefillScores, PrefixReuse, Promotion, TieringConfig
from qevict_tiers.ledger import Counter

GEOMETRY = WindowGeometry(num_q_heads=2, num_kv_heads=1, head_dim=64, window=4)


class Kernels(TorchMemory, ReferenceKernels):
    """The reference."""


class RequestLives(RuleBasedStateMachine):
    """Start, extend, decode, mix, finish, reuse, abort, retract, resume, evict and flush in any
    order."""

    engine: MiniEngine

    @initialize(
        promote=st.sampled_from(Promotion),
        scores=st.sampled_from(PrefillScores),
        q=st.sampled_from([Fraction(0), Fraction(7, 10), Fraction(1)]),
        exact=st.sampled_from([None, 48]),
        full_layers=st.sampled_from([frozenset[int](), frozenset({1})]),
        reuse=st.sampled_from([PrefixReuse.CODES, PrefixReuse.CODES, PrefixReuse.OFF]),
        fixed_shapes=st.booleans(),
    )
    def make(
        self,
        promote: Promotion,
        scores: PrefillScores,
        q: Fraction,
        exact: int | None,
        full_layers: frozenset[int],
        reuse: PrefixReuse,
        fixed_shapes: bool,
    ) -> None:
        config = TieringConfig(
            budget=Fraction(3, 4) if full_layers else Fraction(1, 2),
            quant_fraction=q,
            window=4,
            route_every=5,
            sink=2,
            local=6,
            min_context=40,
            promote=promote,
            prefill_scores=scores,
            exact_prefill_tokens=exact,
            full_layers=full_layers,
            prefix_reuse=reuse,
        )
        self.engine = MiniEngine(
            lambda g, r: Kernels(g, r),
            config,
            GEOMETRY,
            kv_tokens=260,
            context=160,
            rows=4,
            fixed_shapes=fixed_shapes,
        )
        self.names = 0
        self.retracted: list[tuple[int, int, Text]] = []

    def decoding(self) -> list[int]:
        return [n for n, r in self.engine.running.items() if r.prompt <= r.stored < 150]

    def prefilling(self) -> list[int]:
        return [n for n, r in self.engine.running.items() if r.stored < r.prompt]

    @rule(
        # Around min_context, and the lengths from which a routing interval ends there.
        prompt=st.one_of(st.integers(1, 120), st.sampled_from([25, 30, 35, 40, 41, 42])),
        chunk=st.integers(1, 130),
        text=st.builds(
            Text, st.integers(1, 2), st.sampled_from([0, 30, 61, 120]), st.sampled_from([0, 0, 1])
        ),
    )
    def start(self, prompt: int, chunk: int, text: Text) -> None:
        self.names += 1
        self.admit(self.names, prompt, chunk, text)

    @precondition(lambda self: self.retracted)
    @rule(chunk=st.integers(1, 130))
    def resume(self, chunk: int) -> None:
        name, prompt, text = self.retracted.pop()
        self.admit(name, prompt, chunk, text)

    def admit(self, name: int, prompt: int, chunk: int, text: Text) -> None:
        # Like SGLang, one unfinished prompt at a time.
        if self.prefilling() or not (tokens := self.engine.first_chunk(prompt, chunk, text)):
            return
        cached = self.engine.start(name, prompt, text)
        assert cached <= prompt - 1
        if self.engine.config.prefix_reuse is PrefixReuse.OFF:
            assert cached == 0
        self.engine.extend({name: tokens})

    @precondition(lambda self: self.prefilling())
    @rule(chunk=st.integers(1, 64), mixed=st.booleans())
    def extend(self, chunk: int, mixed: bool) -> None:
        decode = self.decoding() if mixed else []
        if decode and not self.engine.can_decode(decode):
            decode = []
        (name,) = self.prefilling()
        if tokens := self.engine.next_chunk(name, chunk):
            self.engine.extend({name: tokens}, decode)

    @precondition(lambda self: self.decoding())
    @rule(steps=st.integers(1, 12))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            names = self.decoding()
            # Pressure: SGLang retracts requests until the rest fits.
            while names and not self.engine.can_decode(names):
                request = self.engine.running[names.pop()]
                self.retracted.append((request.name, request.stored, request.text))
                self.engine.finish(request.name)
            if names:
                self.engine.decode(names)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data(), publish=st.booleans())
    def finish_or_abort(self, data: st.DataObject, publish: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.running)))
        self.engine.finish(name, publish)

    @rule(leaves=st.integers(1, 8))
    def evict(self, leaves: int) -> None:
        for _ in range(leaves):
            self.engine.evict()

    @rule()
    def flush(self) -> None:
        for name in list(self.engine.running):
            self.engine.finish(name)
        self.engine.flush()

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert self.engine.problems() == []

    @invariant()
    def codes_are_made_once(self) -> None:
        counts = self.engine.manager.counters.read()
        made_for_views = counts[Counter.QUANTIZED] - counts[Counter.CODED_FOR_REUSE]
        assert counts[Counter.DEMOTED] == made_for_views + counts[Counter.CODES_REUSED]

    @invariant()
    def a_promotion_by_rank_is_physical_where_full_copies_are_rebuilt(self) -> None:
        counts = self.engine.manager.counters.read()
        if self.engine.config.promote is not Promotion.DEQUANTIZE:
            assert counts[Counter.PROMOTED] == 0
        elif self.engine.config.prefix_reuse is PrefixReuse.OFF:
            assert counts[Counter.PROMOTED] == counts[Counter.RANK_PROMOTED]
        else:
            # A window that belongs to a reused prefix stays coded, however it ranks.
            assert counts[Counter.PROMOTED] <= counts[Counter.RANK_PROMOTED]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in list(self.engine.running):
            self.engine.finish(name, publish=True)
        assert self.engine.problems() == []
        while self.engine.evict():
            pass
        assert self.engine.problems() == []
        assert self.engine.manager.arena.used_bytes == 0
        assert self.engine.state.ledger.total_bytes == 0


TestRequestLives = RequestLives.TestCase
TestRequestLives.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_requests_that_outgrow_the_memory_are_retracted_and_start_anew() -> None:
    config = TieringConfig(
        budget=Fraction(1, 2), window=4, route_every=5, sink=2, local=6, min_context=40
    )
    engine = MiniEngine(
        lambda g, r: Kernels(g, r), config, GEOMETRY, kv_tokens=260, context=160, rows=4
    )
    waiting = [(name, 60) for name in range(4)]
    retracted = 0
    for _ in range(400):
        while waiting and (tokens := engine.first_chunk(waiting[0][1], 64)):
            name, prompt = waiting.pop(0)
            engine.start(name, prompt)
            while tokens:
                engine.extend({name: tokens})
                tokens = engine.next_chunk(name, 64)
        names = list(engine.running)
        while names and not engine.can_decode(names):
            name = names.pop()
            waiting.append((name, engine.running[name].stored))
            engine.finish(name)
            retracted += 1
        engine.decode(names)
        for name in names:
            if engine.running[name].stored == 155:
                engine.finish(name)
        assert engine.problems() == []
        if not engine.running and not waiting:
            break
    assert not engine.running
    assert not waiting
    assert retracted > 0
    assert engine.manager.arena.used_bytes == 0
