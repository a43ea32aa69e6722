"""Tenants and budgets of requests, in a scheduler in miniature and where SGLang's is hooked."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler

from mini_engine import SMALL, MiniEngine, Text, Waiting
from qevict_kernels import make_kernels
from qevict_tiers.config import BudgetLimits, Heads, TieringConfig
from qevict_tiers.policy import Tier
from sglang_qevict import hooks
from sglang_qevict.state import TieringState


def make_engine(
    tenants: dict[str, dict[str, float]] | None = None, kv_tokens: int = 1200, **options: Any
) -> MiniEngine:
    keywords = {name: options.pop(name) for name in ("rows", "check", "context") if name in options}
    if tenants is not None:
        options["tenants"] = json.dumps(tenants)
    return MiniEngine(
        lambda g, r: make_kernels(g, r, torch.device("cpu")),
        TieringConfig(**{**SMALL, **options}),
        Heads(4, 2, 64),
        kv_tokens=kv_tokens,
        **{"context": 640, **keywords},
    )


def serve(engine: MiniEngine, *waiting: Waiting, steps: int = 9) -> None:
    """Requests from their prompts to their ends, one after the other; each leaves its windows."""
    for one in waiting:
        while not (chunks := engine.admit([one], 10_000)):
            pytest.fail(f"{one} was not admitted by an idle engine")
        engine.extend(chunks)
        for _ in range(steps):
            assert engine.can_decode([one.name])
            engine.decode([one.name])
        engine.finish(one.name, publish=True)


def held(engine: MiniEngine, tenant: str) -> int:
    """Bytes that a tenant holds."""
    tenancy = engine.state.ledger.tenancy
    assert tenancy is not None
    return int(tenancy.held[engine.state.tenants.number(tenant)])


def document(number: int, tokens: int) -> Text:
    """A text that nobody else begins with."""
    return Text(number, tokens, salt=number)


# --- whose turn it is ---


def test_a_flood_that_came_first_does_not_keep_a_small_tenant_waiting() -> None:
    engine = make_engine({"*": {"cap": 0.5}}, rows=16)
    flood = [Waiting(name, 300, tenant="flood", new=100) for name in range(1, 20)]
    small = [Waiting(name, 100, tenant="small", new=8) for name in range(20, 23)]
    admitted = engine.admit([*flood, *small], 1 << 20)
    assert {one.name for one in small} <= set(admitted)
    assert 1 in admitted
    engine.extend({1: 300})  # segmented or not, one prompt after the other
    assert engine.problems() == []


def test_one_at_its_cap_waits_though_bytes_are_free() -> None:
    capped, free = make_engine({"flood": {"cap": 0.4}}, rows=16), make_engine({}, rows=16)
    flood = [Waiting(name, 100, tenant="flood") for name in range(1, 17)]
    admitted = {engine: engine.admit(flood, 1 << 20) for engine in (capped, free)}
    assert 0 < len(admitted[capped]) < len(admitted[free])
    engine = capped
    ledger = engine.state.ledger
    for name in admitted[capped]:
        engine.extend({name: 100})
    assert held(engine, "flood") <= 0.4 * ledger.capacity_bytes
    assert ledger.total_bytes < 0.5 * ledger.capacity_bytes
    assert engine.admit(flood[len(admitted[capped]) :], 1 << 20) == {}
    assert engine.admit([Waiting(99, 100, tenant="else")], 1 << 20) == {99: 100}


def test_a_floor_is_kept_free_from_requests_and_lent_to_what_is_kept() -> None:
    engine = make_engine({"sure": {"floor": 0.5}}, rows=16)
    serve(engine, *(Waiting(n, 150, document(n, 150), tenant="other") for n in range(1, 19)))
    capacity = engine.state.ledger.capacity_bytes
    assert held(engine, "other") > 0.6 * capacity
    flood = [Waiting(name, 110, tenant="other") for name in range(20, 40)]
    admitted = engine.admit(flood, 1 << 20)
    for name in admitted:
        engine.extend({name: 110})
    # What was left is evicted for those, but they don't get what belongs to the other.
    least = engine.state.ledger.tenancy.least
    assert 0.3 * capacity < least.sum() <= 0.5 * capacity
    sure = [Waiting(name, 110, tenant="sure") for name in range(40, 60)]
    admitted = engine.admit(sure, 1 << 20)
    assert len(admitted) >= 2
    for name in admitted:
        engine.extend({name: 110})
    assert least[engine.state.tenants.number("sure")] > 0.3 * capacity
    assert engine.problems() == []


# --- who gives way ---


def fill(engine: MiniEngine, tenants: list[str]) -> None:
    """Leave texts of 160 tokens, each tenant's oldest first, until the engine is full."""
    for number, tenant in enumerate(tenants, 100):
        serve(engine, Waiting(number, 160, document(number, 160), tenant=tenant))


def test_leaves_of_who_holds_more_than_its_share_go_first_whatever_their_age() -> None:
    engine = make_engine({})
    fill(engine, ["small", "small"])
    before = held(engine, "small")
    fill(engine, ["flood"] * 20)
    assert held(engine, "small") == before
    # In the cache's own order the oldest would be gone long since.
    stock = make_engine()
    fill(stock, ["small", "small", *["flood"] * 20])
    keys = [Text(n, 160, n) for n in (100, 101)]
    assert [engine.start(300 + i, 170, text) for i, text in enumerate(keys)] == [160, 160]
    assert [stock.start(300 + i, 170, text) for i, text in enumerate(keys)] == [0, 0]


def test_a_tenant_at_its_floor_loses_nothing_to_others() -> None:
    engine = make_engine({"sure": {"floor": 0.2}, "flood": {"weight": 100}})
    fill(engine, ["sure"] * 5)
    capacity = engine.state.ledger.capacity_bytes
    fill(engine, ["flood"] * 20)
    # Its share beside such a weight is its floor; it loses what is above, by whole leaves.
    page = engine.num_layers * engine.plan.budget.full_bytes
    assert 0.2 * capacity - page <= held(engine, "sure") <= 0.2 * capacity + page
    assert engine.problems() == []


def test_a_tenant_keeps_no_more_than_its_cap() -> None:
    engine = make_engine({"low": {"cap": 0.45}})
    fill(engine, ["low"] * 8)
    serve(engine, Waiting(99, 120, tenant="else"))
    assert 0.3 < held(engine, "low") / engine.state.ledger.capacity_bytes <= 0.45


def test_who_holds_most_of_its_share_is_retracted_first() -> None:
    engine = make_engine({"small": {"floor": 0.1}}, kv_tokens=560, rows=4)
    waiting = [Waiting(n, 116, tenant="small" if n == 3 else "flood") for n in range(1, 5)]
    for one in waiting:
        engine.extend(engine.admit([one], 1 << 20))
    assert list(engine.running) == [1, 2, 3, 4]
    turns, state = engine.state.turns, engine.state
    assert turns is not None
    lost = []
    for _ in range(420):
        names = list(engine.running)
        while not engine.can_decode(names):
            requests = [as_running(engine, name, waiting[name - 1]) for name in names]
            # As SGLang: who has generated least goes first, the newest among equals.
            order = turns.keep_order(requests, list(range(len(names))))
            lost.append(names.pop(order[-1]))
            engine.finish(lost[-1])
        engine.decode(names)
        if len(engine.running) < 3:
            break
    assert lost == [4, 2]
    assert 3 in engine.running
    assert state.check_integrity() == []


def as_running(engine: MiniEngine, name: int, asked: Waiting) -> Any:
    """As much of SGLang's request as is looked at while it runs."""
    request = engine._waiting_request(asked)
    request.kv = SimpleNamespace(req_pool_idx=engine.running[name].row)
    return request


def test_victims_are_the_same_whatever_the_ranks_hold_of_them() -> None:
    """Ranks see other heads, so other windows stay; what is decided must not depend on it."""
    histories = []
    for shift in (0, 300):  # other keys and values, hence other scores and tiers
        engine = make_engine({"a": {"floor": 0.2}, "b": {"cap": 0.5}, "*": {"weight": 3}}, rows=8)
        history: list[Any] = []
        drop = engine.state.drop
        engine.state.drop = lambda locations, drop=drop, history=history: (  # type: ignore[method-assign]
            history.append(locations.tolist()), drop(locations)
        )  # fmt: skip
        for turn in range(24):
            tenants = ("a", "b", "c", "c")
            waiting = [
                Waiting(
                    1 + shift + 4 * turn + i,
                    120 + 17 * ((turn + i) % 5),
                    Text(1 + shift + turn % 7, 96, salt=i),
                    tenant=tenant,
                )
                for i, tenant in enumerate(tenants)
            ]
            admitted = engine.admit(waiting, 1 << 20)
            history.append([(name - shift, tokens) for name, tokens in admitted.items()])
            if admitted:
                engine.extend(admitted)
            for _ in range(3):
                names = [n for n, r in engine.running.items() if r.stored >= r.prompt]
                while names and not engine.can_decode(names):
                    engine.finish(names.pop())
                if names:
                    engine.decode(names)
            for name in list(engine.running)[:2]:
                engine.finish(name, publish=True)
            history.append(engine.state.ledger.total_bytes)
        assert engine.problems() == []
        histories.append(history)
    assert histories[0] == histories[1]
    assert any(isinstance(entry, list) and entry for entry in histories[0])


# --- budgets of requests ---

LIMITS = BudgetLimits(Fraction(3, 10), Fraction(1))


def bytes_seen(engine: MiniEngine, name: int) -> int:
    """Bytes of the windows that a request sees."""
    tiers, budget = engine.tiers(name), engine.plan.budget
    full, coded = ((tiers == tier).sum() for tier in (Tier.FULL, Tier.CODED))
    return int(full * budget.full_bytes + coded * budget.coded_bytes)


@pytest.mark.parametrize("own", [None, Fraction(1, 2), Fraction(7, 10), Fraction(1)])
def test_a_request_holds_the_bytes_that_it_asked_for_beside_others(own: Fraction | None) -> None:
    engine = make_engine(kv_tokens=3000, check=True, budget_limits=LIMITS)
    waiting = [Waiting(1, 250), Waiting(2, 250, budget=own)]
    admitted = engine.admit(waiting, 1 << 20)
    assert list(admitted) == [1, 2]
    engine.extend(admitted)
    for _ in range(16):
        assert engine.can_decode([1, 2])
        engine.decode([1, 2])
    for name, budget in ((1, Fraction(3, 10)), (2, own or Fraction(3, 10))):
        windows = engine.plan.budget.num_windows(engine.running[name].stored)
        everything = engine.num_layers * windows * engine.plan.budget.full_bytes
        share = bytes_seen(engine, name) / everything
        # By whole windows; and one that came after the last event.
        assert budget - Fraction(1, 25) <= share <= min(1, budget + Fraction(1, windows))
    assert engine.worst_error < 0.02
    assert engine.problems() == []


def test_claims_are_those_of_the_own_budget() -> None:
    engine = make_engine(kv_tokens=3000, budget_limits=LIMITS)
    for name, own in ((1, None), (2, Fraction(1))):
        engine.extend(engine.admit([Waiting(name, 400, budget=own)], 1 << 20))
        engine.decode([name])
    ledger = engine.state.ledger
    rows = [engine.running[name].row for name in (1, 2)]
    claims = [ledger.claim_of(row) for row in rows]
    assert claims[1] == engine.plan.claims.at(Fraction(1)).decode_bytes(
        400, 401, ledger.sharing(rows[1])
    )
    assert claims[1] > 2 * claims[0]


def test_a_request_that_keeps_everything_reuses_what_is_full_alone() -> None:
    engine = make_engine(kv_tokens=4000, budget_limits=LIMITS)
    text, everything = Text(1, 300), Fraction(1)
    serve(engine, Waiting(1, 310, text))
    # One that is routed leaves codes, and no more than the sink FULL.
    assert engine.start(2, 310, text, terms=engine.state.terms.make(everything)) == 8
    engine.extend({2: 302})
    engine.finish(2, publish=True)
    assert engine.start(3, 310, text, terms=engine.state.terms.make(everything)) == 296
    engine.extend({3: 14})
    assert (engine.tiers(3) == Tier.FULL).all()
    # The others reuse what it left as well.
    assert engine.start(4, 310, text) == 296
    assert engine.problems() == []


def test_pages_suffice_for_the_least_budget_that_a_request_may_have() -> None:
    plain, limited = (
        make_engine(kv_tokens=3000, budget=Fraction(3, 5), budget_limits=limits)
        for limits in (None, BudgetLimits(Fraction(3, 10), Fraction(3, 5)))
    )
    assert limited.plan.num_pages > 1.8 * plain.plan.num_pages
    assert limited.plan.arena_bytes + limited.plan.table_bytes == plain.plan.total_bytes


# --- where SGLang is hooked ---


def test_sglang_asks_in_the_order_that_turns_rely_on() -> None:
    """The queue is put in order when the adder is made; it must not be read before that."""
    import inspect

    source = inspect.getsource(Scheduler._get_new_batch_prefill_raw)
    made, chunk, loop = (
        source.index(text)
        for text in (
            "adder = self.get_prefill_adder_class()(",
            "self.policy.shortest_prefill_chunk_limit(",
            "for req in self.waiting_queue:",
        )
    )
    assert source.index("self.policy.calc_priority(") < made < chunk < loop
    assert "waiting_queue_len=len(self.waiting_queue)" in source[made:chunk]
    for hooked in (
        PrefillAdder._swa_new_tokens,
        SchedulePolicy.shortest_prefill_chunk_limit,
        ScheduleBatch._get_decode_retraction_order,
    ):
        assert callable(hooked)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> TieringState:
    engine = make_engine({"low": {"cap": 0.1}, "*": {}}, kv_tokens=4000)
    monkeypatch.setattr(hooks.runtime, "state", engine.state)
    return engine.state


def waiting_request(state: TieringState, tokens: int, tenant: str) -> Any:
    request = SimpleNamespace(
        origin_input_ids=range(tokens),
        output_ids=[],
        routing_key=tenant,
        sampling_params=SimpleNamespace(custom_params=None),
    )
    state.terms.take_in(request)
    return request


def test_a_tenant_that_comes_anew_reopens_a_full_batch(state: TieringState) -> None:
    flood = [waiting_request(state, 100, "flood") for _ in range(3)]
    batch, scheduler = SimpleNamespace(batch_is_full=True), SimpleNamespace(waiting_queue=flood)
    hooks.get_new_batch_prefill(scheduler, batch)
    batch.batch_is_full = True
    flood.append(waiting_request(state, 100, "flood"))
    hooks.get_new_batch_prefill(scheduler, batch)
    assert batch.batch_is_full
    flood.append(waiting_request(state, 100, "small"))
    hooks.get_new_batch_prefill(scheduler, batch)
    assert not batch.batch_is_full


def test_a_long_prompt_leaves_half_of_a_pass_to_tenants_that_hold_less(
    state: TieringState,
) -> None:
    ledger = state.ledger
    assert ledger.tenancy is not None
    long = waiting_request(state, 4000, "flood")
    tenant = state.terms.of(long).tenant
    ledger.tenancy.claimed[tenant] = ledger.capacity_bytes // 2
    small = [waiting_request(state, tokens, "small") for tokens in (61, 100, 200)]
    own = waiting_request(state, 50, "flood")

    def limit(*waiting: Any, tokens: int = 512) -> int | None:
        return hooks.chunk_limit(None, None, long, waiting, tokens, 8)

    assert limit() is None
    assert limit(own) is None
    assert limit(small[0]) == 512 - 64
    assert limit(own, *small) == 512 - 64 - 104
    assert limit(small[2], tokens=256) is None
    assert hooks.chunk_limit(128, None, long, small[:1], 512, 8) == 128
    # Who holds more of its share leaves nothing to those who hold less of theirs.
    ledger.tenancy.claimed[state.terms.of(small[0]).tenant] = ledger.capacity_bytes
    assert limit(small[0]) is None


def test_others_are_judged_behind_one_that_waits_for_its_cap(state: TieringState) -> None:
    from sglang_qevict.fairness import FairPrefillBudget

    pages = SimpleNamespace(
        page_size=8,
        available_size=lambda: 1 << 30,
        supports_mamba=lambda: False,
        evictable_size=lambda: 0,
        matched_pages=lambda request: (),
    )
    budget = FairPrefillBudget(pages, pages, state.ledger)
    adder = SimpleNamespace(memory_budget=budget, tree_cache=pages)
    told: list[Any] = []

    def judge(adder: Any, request: Any) -> AddReqResult:
        tokens = len(request.origin_input_ids)
        fits, _ = budget.check_prefill(
            extend_input_len=tokens,
            total_tokens=tokens + 9,
            max_new_tokens=1,
            input_tokens=tokens,
            chunk_limit=None,
        )
        told.append((state.tenants.names[budget.terms.tenant], fits))
        if fits:
            budget.reserve(tokens, 1)
        return AddReqResult.CONTINUE if fits else AddReqResult.NO_TOKEN

    lengths = {"low": 110, "small": 100}
    queue = [
        waiting_request(state, lengths[tenant], tenant)
        for tenant in ("low",) * 6 + ("small",) + ("low",) * 2
    ]
    hooks.get_new_batch_prefill(
        SimpleNamespace(waiting_queue=queue), SimpleNamespace(batch_is_full=False)
    )
    results = Counter(hooks.add_one_req(judge, adder, request) for request in queue)
    assert ("small", True) in told
    # The first of those that wait for their cap is passed over, the next ones end the pass.
    refused = told.count(("low", False))
    assert refused >= 2
    assert results[AddReqResult.NO_TOKEN] == refused - 1


def test_a_custom_label_names_the_tenant_where_shares_are_given_without_metrics() -> None:
    def routing_key(tenants: str | None) -> str | None:
        args = SimpleNamespace(
            enable_metrics=False,
            schedule_policy="fcfs",
            tokenizer_metrics_allowed_custom_labels=["team"],
            _kv_tiering=TieringConfig(tenants=tenants),
        )
        result = SimpleNamespace(routing_key=None)
        hooks.create_tokenized_object(
            result,
            SimpleNamespace(server_args=args),
            SimpleNamespace(custom_labels={"team": "red"}),
        )
        return result.routing_key

    assert routing_key('{"red": {"floor": 0.1}}') == "red"
    assert routing_key(None) is None


def test_a_budget_beyond_the_limits_gets_our_sentence(state: TieringState) -> None:
    request = waiting_request(state, 100, "small")
    request.sampling_params.custom_params = {"kv_tiering_budget": 0.9}
    request.sampling_params.max_new_tokens = 4
    request.to_finish = None
    told = []
    request.set_finish_with_abort = told.append
    sized = []
    hooks.init_req_max_new_tokens(lambda *_: sized.append(state.coming_in), None, request)
    assert len(told) == 1
    assert told[0].startswith("KV tiering: all requests of this server have the budget 0.3, but")
    assert sized == [state.terms.of(request)]
