"""Random lives of requests: claims hold at every allocation, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faults import FailingStore
from mini_engine import MemoryStore, MiniEngine, Text, Waiting
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_tiers.config import (
    BudgetLimits,
    Heads,
    PrefillScores,
    PrefixReuse,
    Promotion,
    TieringConfig,
)
from qevict_tiers.ledger import Counter

HEADS = Heads(2, 1, 64)

SHARES = (
    '{"a": {"floor": 0.3}, "b": {"cap": 0.6}}',
    '{"a": {"weight": 3, "floor": 0.1}, "*": {"cap": 0.8}}',
)


class Kernels(TorchMemory, ReferenceKernels):
    """The reference."""


class RequestLives(RuleBasedStateMachine):
    """Start, extend, decode, mix, finish, reuse, abort, retract, resume, evict and flush in any
    order, for several tenants and with several budgets."""

    engine: MiniEngine

    @initialize(
        promote=st.sampled_from(Promotion),
        scores=st.sampled_from(PrefillScores),
        q=st.sampled_from([Fraction(0), Fraction(7, 10), Fraction(1)]),
        exact=st.sampled_from([None, 48]),
        full_layers=st.sampled_from([frozenset[int](), frozenset({1})]),
        reuse=st.sampled_from([PrefixReuse.CODES, PrefixReuse.CODES, PrefixReuse.OFF]),
        fixed_shapes=st.booleans(),
        store=st.one_of(
            st.none(), st.builds(MemoryStore), st.builds(FailingStore, st.integers(0, 9))
        ),
        tenants=st.sampled_from([None, None, *SHARES]),
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
        store: MemoryStore | None,
        tenants: str | None,
    ) -> None:
        least = Fraction(7, 10) if full_layers else Fraction(2, 5)
        config = TieringConfig(
            budget=Fraction(3, 4) if full_layers else Fraction(1, 2),
            budget_limits=BudgetLimits(least, Fraction(1)),
            tenants=tenants,
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
            HEADS,
            kv_tokens=260,
            context=160,
            rows=4,
            fixed_shapes=fixed_shapes,
            store=store if reuse is PrefixReuse.CODES else None,
        )
        self.names = 0
        self.retracted: list[Waiting] = []
        self.asked: dict[int, Waiting] = {}

    def decoding(self) -> list[int]:
        return [n for n, r in self.engine.running.items() if r.prompt <= r.stored < 150]

    def prefilling(self) -> list[int]:
        return [n for n, r in self.engine.running.items() if r.stored < r.prompt]

    @rule(
        requests=st.lists(
            st.tuples(
                # Around min_context, and the lengths from which a routing interval ends there.
                st.one_of(st.integers(1, 120), st.sampled_from([25, 30, 35, 40, 41, 42])),
                st.builds(
                    Text,
                    st.integers(1, 2),
                    st.sampled_from([0, 30, 61, 120]),
                    st.sampled_from([0, 0, 1]),
                ),
                st.just(1),
                st.sampled_from(["a", "b", "c"]),
                st.sampled_from([None, None, Fraction(7, 10), Fraction(1)]),
            ),
            min_size=1,
            max_size=3,
        ),
        chunk=st.integers(1, 200),
    )
    def arrive(self, requests: list[tuple[Any, ...]], chunk: int) -> None:
        first = self.names + 1
        self.names += len(requests)
        waiting = [Waiting(first + i, *request) for i, request in enumerate(requests)]
        self.asked |= {one.name: one for one in waiting}
        self.prefill(waiting, chunk)

    @precondition(lambda self: self.retracted)
    @rule(chunk=st.integers(1, 130))
    def resume(self, chunk: int) -> None:
        waiting = self.retracted
        admitted = self.prefill(waiting, chunk)
        self.retracted = [request for request in waiting if request.name not in admitted]

    @precondition(lambda self: self.prefilling())
    @rule(chunk=st.integers(1, 64), mixed=st.booleans())
    def go_on(self, chunk: int, mixed: bool) -> None:
        self.prefill([], chunk, mixed)

    def prefill(
        self, waiting: Sequence[Waiting], chunk: int, mixed: bool = False
    ) -> dict[int, int]:
        decode = self.decoding() if mixed else []
        chunks = self.engine.admit(waiting, chunk)
        assert len(self.prefilling()) - len(chunks) <= 1
        for request in waiting:
            if request.name in chunks:
                cached = self.engine.running[request.name].stored
                assert cached <= request.prompt - 1
                if self.engine.config.prefix_reuse is PrefixReuse.OFF:
                    assert cached == 0
        if chunks:
            if decode and not self.engine.can_decode(decode):
                decode = []
            self.engine.extend(chunks, decode)
        # Like SGLang, which asserts it: one unfinished prompt at a time.
        assert len(self.prefilling()) <= 1
        return chunks

    @precondition(lambda self: self.decoding())
    @rule(steps=st.integers(1, 12))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            names = self.decoding()
            # Pressure: SGLang retracts requests until the rest fits.
            while names and not self.engine.can_decode(names):
                request = self.engine.running[names.pop()]
                asked = self.asked[request.name]
                self.retracted.append(asked._replace(prompt=request.stored))
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
        if self.engine.config.promote is Promotion.ALIAS:
            assert counts[Counter.PROMOTED] == 0
        elif (
            self.engine.config.promote is Promotion.DEQUANTIZE
            and self.engine.config.prefix_reuse is PrefixReuse.OFF
        ):
            assert counts[Counter.PROMOTED] == counts[Counter.RANK_PROMOTED]
        else:
            # A window that belongs to a reused prefix, or was not read in time, stays coded.
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
        lambda g, r: Kernels(g, r), config, HEADS, kv_tokens=260, context=160, rows=4
    )
    waiting = [Waiting(name, 60) for name in range(4)]
    retracted = 0
    for _ in range(400):
        while chunks := engine.admit(waiting, 64):
            waiting = [request for request in waiting if request.name not in chunks]
            engine.extend(chunks)
        names = list(engine.running)
        while names and not engine.can_decode(names):
            name = names.pop()
            waiting.append(Waiting(name, engine.running[name].stored))
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
