"""Capacity and admission: what a memory holds, and which prefills fit into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import ClaimLedger, Prompt
from qevict_tiers.config import TieringConfig
from sglang_qevict.admission import TieredPrefillBudget, project_running
from sglang_qevict.capacity import CapacityPlan, describe, plan_capacity
from sglang_qevict.pool import TieredAllocator
from sglang_qevict.runtime import runtime

GEOMETRY = WindowGeometry(num_q_heads=4, num_kv_heads=2, head_dim=64)
LAYERS = 3
TOKEN_BYTES = LAYERS * GEOMETRY.full_window_bytes // 8


def make_plan(
    tokens: int = 16_384,
    chunk_tokens: int | None = 2048,
    context_tokens: int = 8192,
    max_running_requests: int | None = 8,
    **options: Any,
) -> CapacityPlan:
    budget = WindowBudget(TieringConfig(**options), GEOMETRY, LAYERS)
    return plan_capacity(
        budget, tokens * TOKEN_BYTES, context_tokens, chunk_tokens, max_running_requests, 64
    )


# --- capacity ---


def test_windows_and_tables_together_are_stocks_bytes() -> None:
    plan = make_plan()
    assert plan.total_bytes == 16_384 * TOKEN_BYTES
    assert plan.arena_bytes + plan.table_bytes == plan.total_bytes
    assert plan.table_bytes > 0


@given(
    budget=st.sampled_from(["0.2", "0.35", "1"]),
    tokens=st.integers(2_000, 100_000),
    context_tokens=st.integers(512, 32_768),
    requests=st.integers(1, 256),
)
def test_a_plan_gives_more_tokens_the_smaller_the_budget_and_never_more_bytes(
    budget: str, tokens: int, context_tokens: int, requests: int
) -> None:
    plan = make_plan(tokens, None, context_tokens, requests, budget=Fraction(budget))
    assert 1 <= plan.num_rows <= requests
    assert plan.arena_bytes <= plan.total_bytes
    assert plan.max_tokens <= tokens / Fraction(budget)
    assert plan.max_windows * 8 >= context_tokens


@pytest.mark.parametrize("tokens", [1, 100, 500])
@pytest.mark.parametrize("requests", [1, 200])
def test_a_memory_that_is_too_small_is_refused_with_what_suffices(
    tokens: int, requests: int
) -> None:
    with pytest.raises(ValueError, match=r"got \d\.\d MiB .* needs [0-9.]+ MiB") as error:
        make_plan(tokens=tokens, max_running_requests=requests)
    text = str(error.value)
    for remedy in ("--max-total-tokens", "--mem-fraction-static", "--kv-tiering-min-context"):
        assert remedy in text
    needed = float(text.partition("needs ")[2].partition(" MiB")[0]) * 2**20
    make_plan(tokens=int(needed / TOKEN_BYTES), max_running_requests=requests)
    with pytest.raises(ValueError, match="needs"):
        make_plan(tokens=int(0.7 * needed / TOKEN_BYTES), max_running_requests=requests)


def test_the_log_line_tells_what_is_on_and_what_it_gives() -> None:
    plan = make_plan()
    line = describe(plan)
    assert line.startswith("KV tiering is on: budget 0.2, q 0.7, windows of 8, K2V2 codes")
    assert f"{plan.max_tokens} logical tokens (stock 16384)" in line


@pytest.mark.parametrize("chunk_tokens", [None, -1])
def test_without_chunks_every_prompt_is_routed_once(chunk_tokens: int | None) -> None:
    claims = make_plan(chunk_tokens=chunk_tokens).claims
    assert claims.is_exact(8192)
    assert claims.chunk_limit(8192, 0) == 8192
    assert claims.routing_point(8192, 8192) == 8192


@pytest.mark.parametrize(("chunk_tokens", "segment"), [(4, 8), (8, 8), (12, 16), (2048, 2048)])
def test_routing_points_of_long_prompts_are_whole_windows_and_at_least_a_chunk(
    chunk_tokens: int, segment: int
) -> None:
    claims = make_plan(chunk_tokens=chunk_tokens, exact_prefill_tokens=512).claims
    assert claims.segment_tokens == segment


# --- admission ---


@dataclass
class _Pages:
    """As much of SGLang's allocator and tree as a prefill budget asks."""

    page_size: int = 8
    free: int = 1 << 30

    def available_size(self) -> int:
        return self.free

    def supports_mamba(self) -> bool:
        return False

    def evictable_size(self) -> int:
        return 0


@dataclass
class Scheduler:
    """A scheduler that asks a fresh budget in each pass, with one ledger through all."""

    plan: CapacityPlan
    ledger: ClaimLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = ClaimLedger(self.plan.claims, self.plan.arena_bytes)

    def new_pass(self) -> TieredPrefillBudget:
        pages = _Pages()
        return TieredPrefillBudget(pages, pages, self.ledger)

    def running(self, row: int, prompt: int, stored: int) -> None:
        self.ledger.admit(row, Prompt(prompt, whole=True))
        self.ledger.advance(row, stored)
        self.ledger.launched(row)


def ask(
    budget: TieredPrefillBudget,
    tokens: int,
    new: int = 16,
    start: int = 0,
    limit: int | None = None,
) -> tuple[bool, int | None]:
    """Whether a request may start; as SGLang does, reserve for one that may."""
    verdict = budget.check_prefill(
        extend_input_len=tokens - start,
        total_tokens=tokens - start + new,
        max_new_tokens=new,
        input_tokens=tokens,
        swa_host_hit_length=0,
        chunk_limit=limit,
    )
    if verdict[0] and verdict[1] != 0:
        budget.reserve(tokens - start, new)
    return verdict


def test_a_prompt_is_admitted_whole_where_it_fits() -> None:
    budget = Scheduler(make_plan()).new_pass()
    assert ask(budget, 1000) == (True, None)
    assert ask(budget, 1000, limit=2048) == (True, 2048)


def test_requests_are_admitted_until_their_claims_fill_the_arena() -> None:
    plan = make_plan(tokens=4096)
    budget = Scheduler(plan).new_pass()
    admitted = 0
    while ask(budget, 400)[0]:
        admitted += 1
    claim = max(
        plan.claims.prefill_bytes(Prompt(400, whole=True)), plan.claims.decode_bytes(400, 416)
    )
    assert admitted == plan.arena_bytes // claim


def test_running_requests_leave_less_room() -> None:
    scheduler = Scheduler(make_plan(tokens=4096))
    assert ask(scheduler.new_pass(), 1500)[0]
    for row in range(8):
        scheduler.running(row, 400, 410)
    assert not ask(scheduler.new_pass(), 1500)[0]
    for row in range(8):
        scheduler.ledger.remove(row)
    assert ask(scheduler.new_pass(), 1500)[0]


def test_growth_that_sglang_expects_of_running_requests_is_kept_free() -> None:
    plan = make_plan(tokens=4096)
    scheduler = Scheduler(plan)
    scheduler.running(1, 100, 101)
    assert ask(scheduler.new_pass(), 400, new=8)[0]
    grown = scheduler.new_pass()
    grown.final_tokens[1] = 20_000
    assert not ask(grown, 400, new=8)[0]


def test_a_request_that_does_not_fit_reserves_nothing() -> None:
    budget = Scheduler(make_plan(tokens=4096)).new_pass()
    assert not ask(budget, 8000, new=8000)[0]
    assert ask(budget, 400) == (True, None)


def test_a_long_prompt_stops_at_its_first_routing_point() -> None:
    budget = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512)).new_pass()
    assert ask(budget, 512, limit=4096) == (True, 4096)
    assert ask(budget, 1000, limit=4096) == (True, 256)


@pytest.mark.parametrize("limit", [100, 4096])
def test_a_pass_admits_one_unfinished_prompt_and_then_whole_ones_only(limit: int) -> None:
    budget = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512)).new_pass()
    assert ask(budget, 1000, limit=limit) == (True, min(limit, 256))
    assert ask(budget, 1000, limit=limit) == (True, 0)
    assert ask(budget, 96, limit=limit) == (True, limit)


def test_the_next_chunk_ends_at_a_routing_point_whatever_the_load_left_of_the_last() -> None:
    scheduler = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512))
    scheduler.ledger.admit(1, Prompt(1000, whole=False))
    start = 0
    for left, expected in ((96, 96), (256, 160), (256, 256), (256, 256), (256, 232)):
        scheduler.ledger.advance(1, start)
        chunk = scheduler.new_pass().fit_chunk(
            extend_input_len=1000 - start, max_new_tokens=8, chunk_limit=left
        )
        assert chunk is not None
        start += min(chunk, 1000 - start)
        assert min(chunk, expected) == expected
    assert start == 1000


def test_an_unfinished_prompt_that_goes_on_keeps_others_from_being_cut() -> None:
    scheduler = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512))
    scheduler.ledger.admit(1, Prompt(1000, whole=False))
    scheduler.ledger.advance(1, 256)
    budget = scheduler.new_pass()
    budget.fit_chunk(extend_input_len=744, max_new_tokens=8, chunk_limit=4096)
    assert ask(budget, 1000, limit=4096) == (True, 0)


def test_remaining_tokens_are_what_bytes_allow_where_pages_allow_more() -> None:
    scheduler = Scheduler(make_plan(tokens=4096))
    budget = scheduler.new_pass()
    free = budget.remaining_total
    assert free < _Pages().free
    scheduler.running(1, 500, 501)
    assert budget.remaining_total < free


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 6000), min_size=1, max_size=20),
    new=st.integers(1, 2000),
    chunk_tokens=st.sampled_from([8, 64, 512, 2048]),
)
def test_what_is_admitted_fits_now_and_once_it_has_grown(
    prompts: list[int], new: int, chunk_tokens: int
) -> None:
    plan = make_plan(tokens=6000, chunk_tokens=chunk_tokens, exact_prefill_tokens=1024)
    budget = Scheduler(plan).new_pass()
    now = grown = 0
    for tokens in prompts:
        fits, limit = ask(budget, tokens, new, limit=1 << 20)
        if fits and limit:
            whole = limit >= tokens
            now += plan.claims.prefill_bytes(Prompt(tokens, whole=whole))
            grown += plan.claims.decode_bytes(tokens, tokens + new)
    assert max(now, grown) <= plan.arena_bytes


def test_growth_is_read_from_the_running_batch_of_sglangs_adder() -> None:
    request = SimpleNamespace(
        kv=SimpleNamespace(holds_kv=True, req_pool_idx=3),
        origin_input_ids=[0] * 100,
        output_ids=[0] * 7,
    )
    gone = SimpleNamespace(kv=SimpleNamespace(holds_kv=False, req_pool_idx=None))
    budget = Scheduler(make_plan()).new_pass()
    adder = SimpleNamespace(
        memory_budget=budget,
        running_batch=SimpleNamespace(reqs=[request, gone]),
        _get_running_request_total_token_offset=lambda _: 40.7,
    )
    project_running(adder)
    assert budget.final_tokens == {3: 147}


# --- intake ---


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An allocator of a small arena, without the pool that SGLang would build around it."""
    scheduler = Scheduler(make_plan(tokens=2048))
    monkeypatch.setattr(runtime, "state", SimpleNamespace(ledger=scheduler.ledger))
    monkeypatch.setattr(
        TieredAllocator.__mro__[1],
        "max_new_tokens_for_memory",
        lambda self, input_tokens, max_new_tokens, **limits: max_new_tokens,
    )
    return object.__new__(TieredAllocator)


def test_a_prompt_that_can_never_fit_is_turned_away_at_intake(allocator: Any) -> None:
    assert allocator.max_new_tokens_for_memory(100_000, 8) is None
    assert allocator.max_new_tokens_for_memory(100, 8) == 8


def test_an_answer_is_cut_to_what_the_empty_server_could_hold(allocator: Any) -> None:
    ledger = runtime.require_state().ledger

    def fits(new: int) -> bool:
        return ledger.claims.peak_bytes(100, 100 + new) <= ledger.capacity_bytes

    cut = allocator.max_new_tokens_for_memory(100, 1_000_000)
    assert 0 < cut < 1_000_000
    assert fits(cut)
    assert not fits(cut + 8)  # within one routing interval
