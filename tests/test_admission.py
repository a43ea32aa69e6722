"""Capacity and admission: what a memory holds, and which prefills fit into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qevict_kernels import scratch_bytes
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import ClaimLedger, Prompt, Sharing
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.kept import Keep
from sglang_qevict.admission import Continued, TieredPrefillBudget, project_running
from sglang_qevict.capacity import CapacityPlan, describe, plan_capacity
from sglang_qevict.pool import TieredAllocator
from sglang_qevict.runtime import runtime

HEADS = Heads(4, 2, 64)
LAYERS = 3
TOKEN_BYTES = LAYERS * TieringConfig().geometry(HEADS).full_window_bytes // 8


def make_plan(
    tokens: int = 16_384,
    chunk_tokens: int | None = 2048,
    context_tokens: int = 8192,
    max_running_requests: int | None = 8,
    mixes_chunks: bool = False,
    **options: Any,
) -> CapacityPlan:
    config = TieringConfig(**options)
    budget = WindowBudget(config, config.geometry(HEADS), LAYERS)
    return plan_capacity(
        budget,
        tokens * TOKEN_BYTES,
        context_tokens,
        chunk_tokens,
        max_running_requests,
        64,
        mixes_chunks=mixes_chunks,
    )


# --- capacity ---


def test_windows_and_tables_together_are_stocks_bytes() -> None:
    plan = make_plan()
    assert plan.total_bytes == 16_384 * TOKEN_BYTES
    assert plan.arena_bytes + plan.table_bytes == plan.total_bytes
    assert plan.table_bytes > 0


def test_what_kernels_keep_for_each_request_is_part_of_the_tables() -> None:
    config = TieringConfig()
    geometry = config.geometry(HEADS)
    budget = WindowBudget(config, geometry, LAYERS)
    sizes = (1 << 30, 8192, 2048, 8, 64)
    cpu, cuda = (plan_capacity(budget, *sizes, torch.device(name)) for name in ("cpu", "cuda"))
    # SGLang keeps one row more, for padding.
    kept = scratch_bytes(geometry, torch.device("cuda"), 9, cuda.max_windows)
    # Fewer pages take smaller tables.
    assert 0.8 * kept < cpu.arena_bytes - cuda.arena_bytes <= kept


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


@pytest.mark.parametrize(
    ("chunk", "mixes", "left"),
    [(2048, False, 2048), (2048, True, 2040), (20, True, 8), (8, True, 8)],
)
def test_prompts_are_planned_with_what_decoding_requests_leave_of_a_chunk(
    chunk: int, mixes: bool, left: int
) -> None:
    assert make_plan(chunk_tokens=chunk, mixes_chunks=mixes).claims.chunk_tokens == left


def test_only_requests_that_can_run_take_of_a_chunk() -> None:
    plan = make_plan(max_running_requests=2048, mixes_chunks=True)
    assert plan.num_rows < 2048
    assert plan.claims.chunk_tokens == (2048 - plan.num_rows) // 8 * 8


@pytest.mark.parametrize("chunk", [512, 16_384])
def test_with_the_whole_budget_a_long_prompt_takes_chunks_of_any_size(chunk: int) -> None:
    claims = make_plan(budget=Fraction(1), chunk_tokens=chunk).claims
    for prompt in (600, 7_000, 15_000):
        assert claims.chunk_limit(prompt, 8) == prompt - 8
        assert not claims.needs_one_chunk(prompt)


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
    assert line.startswith(
        "KV tiering is on: preset balanced, budget 0.2, quant-fraction 0.95, windows of 8, "
        "4-bit keys and values ("
    )
    assert f"{plan.max_tokens} tokens of context (stock 16384): room for" in line
    assert "contexts of 4096 tokens (stock 4), but at most 8 requests at once;" in line


def test_the_log_line_names_the_limit_of_requests_only_where_it_binds() -> None:
    line = describe(make_plan(max_running_requests=32, value_bits=2))
    assert "KV tiering is on: preset custom," in line
    assert "4-bit keys and 2-bit values (" in line
    assert "at most" not in line


@pytest.mark.parametrize("chunk_tokens", [None, -1])
def test_without_chunks_every_prompt_is_routed_once(chunk_tokens: int | None) -> None:
    claims = make_plan(chunk_tokens=chunk_tokens).claims
    assert claims.is_exact(8192)
    assert claims.chunk_limit(8192, 0) == 8192
    assert claims.routing_point(8192, 8192) == 8192


@pytest.mark.parametrize("chunk_tokens", [8, 64, 2048, 8192])
@pytest.mark.parametrize("tokens", [1000, 4096, 100_000])
def test_routing_points_of_long_prompts_are_whole_windows_and_leave_room_for_the_rest(
    tokens: int, chunk_tokens: int
) -> None:
    plan = make_plan(tokens, chunk_tokens, max_running_requests=2)
    segment = plan.claims.segment_tokens
    assert segment % 8 == 0
    assert 8 <= segment <= chunk_tokens
    assert plan.claims.request_full_bytes(segment) <= plan.arena_bytes / 2


def test_exact_prompts_that_do_not_fit_are_refused_with_what_they_need() -> None:
    make_plan(tokens=4096, exact_prefill_tokens=2500)
    with pytest.raises(ValueError, match=r"exact-prefill-tokens 6000: .* takes \d\.\d MiB until"):
        make_plan(tokens=4096, exact_prefill_tokens=6000)


@pytest.mark.parametrize(
    ("tenants", "name"),
    [
        ({"low": {"cap": 0.02}}, "low"),
        ({"a": {"floor": 0.5}, "b": {"floor": 0.48}}, "*"),
        ({"*": {"cap": 0.02}}, "*"),
    ],
)
def test_a_tenant_that_could_never_be_served_is_refused_by_name(
    tenants: dict[str, dict[str, float]], name: str
) -> None:
    with pytest.raises(ValueError, match=r"^--kv-tiering-tenants leaves ") as error:
        make_plan(tenants=json.dumps(tenants))
    assert f" leaves {name!r} " in str(error.value)
    assert "raise its cap, lower the floors of others" in str(error.value)


def test_prompts_are_exact_up_to_half_of_what_any_tenant_may_have() -> None:
    everything, half = make_plan(), make_plan(tenants='{"a": {"cap": 0.5}}')
    assert half.arena_bytes == everything.arena_bytes
    exact = everything.claims.exact_prefill_tokens
    assert half.claims.exact_prefill_tokens == pytest.approx(exact / 2, abs=8)
    assert half.claims.segment_tokens <= everything.claims.segment_tokens


# --- claims ---

SMALL_PLANS = st.builds(
    lambda tokens, chunk, budget, q, omega: make_plan(
        tokens,
        chunk,
        max_running_requests=2,
        budget=Fraction(budget),
        quant_fraction=Fraction(q),
        route_every=omega,
    ),
    tokens=st.sampled_from([1000, 1500, 3000, 8192]),
    chunk=st.sampled_from([8, 64, 512, 2048, 8192, None]),
    budget=st.sampled_from(["0.2", "0.5", "0.9", "1"]),
    q=st.sampled_from(["0", "0.7", "1"]),
    omega=st.sampled_from([1, 5, 8]),
)


@settings(max_examples=200, deadline=None)
@given(
    plan=SMALL_PLANS,
    prompt=st.integers(1, 8000),
    growth=st.integers(0, 8000),
    share=st.floats(0, 1),
    phase=st.integers(0, 8),
)
def test_the_peak_covers_every_claim_on_the_way_wherever_a_request_starts_anew(
    plan: CapacityPlan, prompt: int, growth: int, share: float, phase: int
) -> None:
    claims, final = plan.claims, prompt + growth
    again = prompt + int(share * growth)
    stored = min(final, again + phase)
    peak = claims.peak_bytes(prompt, final)
    assert claims.least_prefill_bytes(again) <= peak
    assert claims.decode_bytes(again, stored) <= peak
    assert claims.decode_bytes(again, final) <= peak


@settings(max_examples=60, deadline=None)
@given(plan=SMALL_PLANS, lengths=st.lists(st.integers(1, 3000), min_size=2, max_size=8))
def test_no_more_is_granted_than_there_is_however_requests_grow(
    plan: CapacityPlan, lengths: list[int]
) -> None:
    ledger = ClaimLedger(plan.claims, plan.arena_bytes, plan.num_pages)
    stored: dict[int, int] = {}
    for row, tokens in enumerate(lengths, 1):
        whole = Prompt(tokens, whole=True)
        promised = ledger.total_if_decoded(stored)
        if promised + plan.claims.prefill_bytes(whole) <= ledger.capacity_bytes:
            ledger.admit(row, whole)
            ledger.advance(row, tokens)
            ledger.launched(row)
            stored[row] = tokens
    for _ in range(600):
        while stored and ledger.total_if_decoded(stored) > ledger.capacity_bytes:
            retracted, _ = stored.popitem()
            ledger.remove(retracted)
        for row in stored:
            stored[row] += 1
            ledger.advance(row, stored[row])
        ledger.require_room()
        for row in stored:
            ledger.launched(row)
            assert ledger.total_bytes <= ledger.capacity_bytes


def test_a_grant_beyond_the_memory_is_an_error() -> None:
    plan = make_plan(tokens=2048)
    ledger = ClaimLedger(plan.claims, plan.arena_bytes, plan.num_pages)
    for row in range(8):
        ledger.admit(row, Prompt(500, whole=True))
    with pytest.raises(RuntimeError, match=f"bytes of {plan.arena_bytes}"):
        ledger.require_room()


# --- admission ---


@dataclass
class FreePages:
    """As much of SGLang's allocator and tree as a prefill budget asks: pages without end."""

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
        self.ledger = ClaimLedger(self.plan.claims, self.plan.arena_bytes, self.plan.num_pages)

    def new_pass(self) -> TieredPrefillBudget:
        pages = FreePages()
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
        limit = tokens - start if verdict[1] is None else verdict[1]
        truncated = limit < tokens - start
        budget.reserve(min(limit, tokens - start), 0 if truncated else new)
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
        budget = scheduler.new_pass()
        budget.continued = Continued(row=1, prompt_tokens=1000)
        chunk = budget.fit_chunk(extend_input_len=1000 - start, max_new_tokens=8, chunk_limit=left)
        assert chunk is not None
        start += min(chunk, 1000 - start)
        assert min(chunk, expected) == expected
    assert start == 1000


def test_an_unfinished_prompt_keeps_pages_for_its_later_passes() -> None:
    scheduler = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512))
    budget = scheduler.new_pass()
    assert ask(budget, 1000, new=16, limit=4096) == (True, 256)
    assert min(budget.total_offset, budget.current_offset) >= 1000 + 16
    scheduler.ledger.admit(1, Prompt(1000, whole=False))
    scheduler.ledger.advance(1, 256)
    for limit, chunk in ((4096, 256), (4, None)):
        budget = scheduler.new_pass()
        budget.continued = Continued(row=1, prompt_tokens=1000)
        assert budget.fit_chunk(extend_input_len=744, max_new_tokens=16, chunk_limit=limit) == chunk
        if chunk:
            budget.reserve(chunk, 0, is_chunked_continuation=True)
        assert min(budget.total_offset, budget.current_offset) >= 744 + 16


def test_what_a_prompt_takes_until_its_last_pass_counts_while_others_grow() -> None:
    plan = make_plan(tokens=2048, chunk_tokens=256)
    claims, long, short, new = plan.claims, 1000, 100, 280
    assert not claims.needs_one_chunk(long)
    prefill = claims.prefill_bytes(Prompt(long, whole=False))
    grown = claims.growing_bytes(short, short, short + new)
    # Room for it now, and for both when all have grown, but not for what comes in between.
    arena = prefill + grown - 64
    assert claims.decode_bytes(short, short) + prefill <= arena
    assert claims.growing_bytes(long, long, long + 8) + grown <= arena
    scheduler = Scheduler(replace(plan, arena_bytes=arena))
    scheduler.running(1, short, short)
    budget = scheduler.new_pass()
    budget.final_tokens[1] = short + new
    assert not ask(budget, long, new=8, limit=256)[0]
    # And the other way round.
    scheduler = Scheduler(replace(plan, arena_bytes=arena))
    scheduler.ledger.admit(1, Prompt(long, whole=False))
    scheduler.ledger.advance(1, 256)
    budget = scheduler.new_pass()
    budget.final_tokens[1] = long + 8
    assert not ask(budget, short, new=new)[0]
    assert ask(budget, short, new=8)[0]


def test_an_unfinished_prompt_that_goes_on_keeps_others_from_being_cut() -> None:
    scheduler = Scheduler(make_plan(chunk_tokens=256, exact_prefill_tokens=512))
    scheduler.ledger.admit(1, Prompt(1000, whole=False))
    scheduler.ledger.advance(1, 256)
    budget = scheduler.new_pass()
    budget.continued = Continued(row=1, prompt_tokens=1000)
    budget.fit_chunk(extend_input_len=744, max_new_tokens=8, chunk_limit=4096)
    assert ask(budget, 1000, limit=4096) == (True, 0)


@pytest.mark.parametrize(("left", "expected"), [(-1, None), (0, None), (7, None), (23, 16)])
def test_a_prompt_in_progress_goes_on_by_whole_windows_or_waits(
    left: int, expected: int | None
) -> None:
    budget = Scheduler(make_plan(chunk_tokens=256)).new_pass()
    budget.continued = Continued(row=1, prompt_tokens=1000)
    assert budget.fit_chunk(extend_input_len=744, max_new_tokens=8, chunk_limit=left) == expected
    assert budget.fit_chunk(extend_input_len=7, max_new_tokens=8, chunk_limit=7) == 7


def test_a_prompt_in_progress_uses_its_whole_chunk_however_few_bytes_are_left() -> None:
    scheduler = Scheduler(make_plan(tokens=4096))
    for row in range(8):
        scheduler.running(row, 500, 501)
    budget = scheduler.new_pass()
    assert budget.remaining_total < 2048
    assert budget.available_chunk_tokens(2048) == 2048


def test_a_prompt_that_only_fits_in_one_chunk_waits_for_a_whole_one() -> None:
    plan = make_plan(tokens=3000, chunk_tokens=2048)
    assert plan.claims.needs_one_chunk(2000)
    budget = Scheduler(plan).new_pass()
    assert ask(budget, 2000, limit=1999) == (True, 0)
    assert ask(budget, 2000, limit=2048) == (True, 2048)


def test_remaining_tokens_are_what_bytes_allow_where_pages_allow_more() -> None:
    scheduler = Scheduler(make_plan(tokens=4096))
    budget = scheduler.new_pass()
    free = budget.remaining_total
    assert free < FreePages().free
    scheduler.running(1, 500, 501)
    assert budget.remaining_total < free


@settings(max_examples=50, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 6000), min_size=1, max_size=20),
    new=st.integers(1, 2000),
    chunk_tokens=st.sampled_from([8, 64, 512, 2048]),
)
def test_what_is_admitted_is_never_retracted_if_it_grows_as_foreseen(
    prompts: list[int], new: int, chunk_tokens: int
) -> None:
    plan = make_plan(tokens=6000, chunk_tokens=chunk_tokens, exact_prefill_tokens=1024)
    scheduler = Scheduler(plan)
    budget, ledger = scheduler.new_pass(), scheduler.ledger
    admitted = []
    for row, tokens in enumerate(prompts):
        fits, limit = ask(budget, tokens, new, limit=1 << 20)
        if fits and limit:
            admitted.append((row, Prompt(tokens, whole=limit >= tokens)))
    for row, prompt in admitted:
        ledger.admit(row, prompt)
        ledger.advance(row, prompt.tokens)
    ledger.require_room()
    rows = [row for row, _ in admitted]
    for step in range(new):
        for row, prompt in admitted:
            ledger.advance(row, prompt.tokens + step)
            ledger.launched(row)
        assert ledger.total_if_decoded(rows) <= ledger.capacity_bytes


@given(
    prompt=st.integers(1, 1500),
    before=st.integers(0, 800),
    growth=st.integers(0, 800),
    options=st.sampled_from(
        [{}, {"budget": Fraction(1)}, {"window": 16}, {"route_every": 3}, {"quant_fraction": 0}]
    ),
)
def test_no_claim_on_the_way_exceeds_what_growing_was_said_to_take(
    prompt: int, before: int, growth: int, options: dict[str, Any]
) -> None:
    claims = make_plan(**options).claims
    start = prompt + before
    foreseen = claims.growing_bytes(prompt, start, start + growth)
    most = max(claims.decode_bytes(prompt, n) for n in range(start, start + growth + 1))
    # Where a window begins in its interval, and whether the protected ones straddle one more,
    # shifts claims by a window in each layer.
    assert most <= foreseen + 2 * LAYERS * claims.budget.full_bytes
    assert foreseen <= most


def test_the_last_chunk_of_a_prompt_reserves_what_it_may_generate() -> None:
    """Whoever shares that chunk is admitted beside what the prompt is going to take."""
    plan = make_plan(tokens=4096, chunk_tokens=2048)

    def admitted_beside(new: int) -> int:
        scheduler = Scheduler(plan)
        scheduler.ledger.admit(9, Prompt(400, whole=False))
        scheduler.ledger.advance(9, 200)
        budget = scheduler.new_pass()
        budget.continued = Continued(row=9, prompt_tokens=400)
        budget.fit_chunk(extend_input_len=200, max_new_tokens=new, chunk_limit=2048)
        budget.reserve(200, new, is_chunked_continuation=True)
        count = 0
        while ask(budget, 100)[0]:
            count += 1
        return count

    assert admitted_beside(new=200) < admitted_beside(new=1)


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


@settings(max_examples=200, deadline=None)
@given(
    plan=SMALL_PLANS,
    prompt=st.integers(2, 8000),
    share=st.floats(0, 1),
    new=st.integers(1, 2000),
    full=st.integers(0, 80),
)
def test_an_idle_server_admits_what_it_lets_reuse_a_prefix(
    plan: CapacityPlan, prompt: int, share: float, new: int, full: int
) -> None:
    scheduler = Scheduler(plan)
    ledger = scheduler.ledger
    pages = list(range(1, min(plan.num_pages, int(share * (prompt - 1)) // 8) + 1))
    ledger.kept.keep(pages[:full], Keep.FULL)
    ledger.kept.keep(pages[full:], Keep.CODES)
    usable = ledger.usable_pages(pages, prompt, prompt + new)
    if not usable:
        return
    budget = scheduler.new_pass()
    budget.prefix = pages[:usable]
    fits, limit = ask(budget, prompt, new, start=8 * usable, limit=plan.claims.chunk_tokens)
    assert fits
    assert limit is None or limit > 0


def test_a_prefix_stays_paid_for_when_the_row_that_locked_it_is_preempted_in_the_same_pass() -> (
    None
):
    scheduler = Scheduler(make_plan(tokens=4096))
    ledger, pages = scheduler.ledger, list(range(1, 151))
    ledger.kept.keep(pages, Keep.CODES)
    ledger.admit(1, Prompt(1300, whole=True), pages=pages)
    budget = scheduler.new_pass()
    budget.prefix = pages
    assert ask(budget, 1300, start=1200)[0]
    budget.prefix = ()
    with_prefix = budget.remaining_total
    ledger.remove(1)
    freed = budget.remaining_total
    ledger.kept.drop(pages)
    assert budget.remaining_total > freed >= with_prefix


# --- intake ---


@pytest.fixture
def intake(monkeypatch: pytest.MonkeyPatch) -> Callable[[CapacityPlan], TieredAllocator]:
    """Makes an allocator without the pool that SGLang would build around it."""
    monkeypatch.setattr(
        TieredAllocator.__mro__[1],
        "max_new_tokens_for_memory",
        lambda self, input_tokens, max_new_tokens, **limits: max_new_tokens,
    )

    def make(plan: CapacityPlan) -> TieredAllocator:
        ledger = ClaimLedger(plan.claims, plan.arena_bytes, plan.num_pages)
        state = SimpleNamespace(ledger=ledger, coming_in=ledger.terms)
        monkeypatch.setattr(runtime, "state", state)
        allocator: TieredAllocator = object.__new__(TieredAllocator)
        return allocator

    return make


Intake = Callable[[CapacityPlan], TieredAllocator]


def test_a_prompt_that_can_never_fit_is_turned_away_at_intake(intake: Intake) -> None:
    allocator = intake(make_plan(tokens=2048))
    assert allocator.max_new_tokens_for_memory(100_000, 8) is None
    assert allocator.max_new_tokens_for_memory(100, 8) == 8


def test_an_answer_is_cut_to_what_the_empty_server_could_hold(intake: Intake) -> None:
    plan = make_plan(tokens=2048)
    cut = intake(plan).max_new_tokens_for_memory(100, 1_000_000)
    assert cut is not None
    assert 0 < cut < 1_000_000
    assert plan.claims.peak_bytes(100, 100 + cut) <= plan.arena_bytes
    assert plan.claims.peak_bytes(100, 101 + cut) > plan.arena_bytes


@pytest.mark.parametrize("prompt_tokens", [400, 700, 1500, 3000])
@pytest.mark.parametrize("budget", ["0.2", "0.5", "1"])
@pytest.mark.parametrize("tokens", [4000, 6000])
def test_an_answer_of_no_stated_length_leaves_room_for_the_whole_prompt_as_a_prefix(
    prompt_tokens: int, budget: str, tokens: int
) -> None:
    plan = make_plan(tokens, budget=Fraction(budget))
    ledger = ClaimLedger(plan.claims, plan.arena_bytes, plan.num_pages)
    alone = ledger.max_new_tokens(prompt_tokens, 1_000_000)
    beside = ledger.max_new_tokens(prompt_tokens, 1_000_000, prompt_tokens // 8)
    assert alone is not None
    assert beside is not None
    assert 0 < beside <= alone
    pages = list(range(1, prompt_tokens // 8 + 1))
    everything = plan.budget.keeps_everything
    short = prompt_tokens <= plan.budget.config.min_context
    # As a long request leaves its prompt, and as one does that was never routed.
    for most_full in (1, 65):
        num_full = len(pages) if everything else min(most_full, len(pages))
        ledger.kept.clear()
        ledger.kept.keep(pages[:num_full], Keep.FULL)
        ledger.kept.keep(pages[num_full:], Keep.CODES)
        usable = ledger.usable_pages(pages, prompt_tokens, prompt_tokens + beside)
        assert usable == (num_full if short else len(pages))


@given(
    tokens=st.sampled_from([3000, 6000]),
    budget=st.sampled_from(["0.2", "0.5"]),
    prompt=st.integers(600, 8000),
    new=st.integers(0, 20_000),
    match=st.integers(1, 1000),
    full=st.integers(0, 65),
)
@settings(max_examples=60, deadline=None)
def test_a_match_is_cut_to_the_longest_beginning_that_fits(
    tokens: int, budget: str, prompt: int, new: int, match: int, full: int
) -> None:
    plan = make_plan(tokens, budget=Fraction(budget))
    ledger = ClaimLedger(plan.claims, plan.arena_bytes, plan.num_pages)
    allowed = ledger.max_new_tokens(prompt, new)
    if allowed is None:
        return
    pages = list(range(1, min(match, (prompt - 1) // 8, plan.num_pages) + 1))
    ledger.kept.keep(pages[:full], Keep.FULL)
    ledger.kept.keep(pages[full:], Keep.CODES)

    def fits(count: int) -> bool:
        peak = plan.claims.peak_bytes(prompt, prompt + allowed, Sharing(count))
        return ledger.kept.bytes_of(pages[:count]) + peak <= plan.arena_bytes

    usable = ledger.usable_pages(pages, prompt, prompt + allowed)
    assert fits(usable)
    assert usable == len(pages) or not fits(usable + 1)


@pytest.mark.parametrize("tokens", [2000, 3000, 8192])
@pytest.mark.parametrize("chunk_tokens", [8, 512, 2048, 8192, None])
@pytest.mark.parametrize("budget", ["0.2", "0.35"])
def test_the_longest_prompt_is_never_shorter_than_stocks(
    intake: Intake, tokens: int, chunk_tokens: int | None, budget: str
) -> None:
    plan = make_plan(
        tokens, chunk_tokens, max_running_requests=1, budget=Fraction(budget), context_tokens=32_768
    )
    assert intake(plan).max_new_tokens_for_memory(tokens - 8, 1) == 1


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=SMALL_PLANS, prompt=st.integers(1, 8000), new=st.integers(1, 8000), share=st.floats(0, 1)
)
def test_what_intake_took_is_admitted_by_an_idle_server_at_any_length(
    intake: Intake, plan: CapacityPlan, prompt: int, new: int, share: float
) -> None:
    accepted = intake(plan).max_new_tokens_for_memory(prompt, new)
    if not accepted:
        return
    again = prompt + int(share * accepted)
    chunk = plan.claims.chunk_tokens
    fits, limit = ask(
        Scheduler(plan).new_pass(), again, max(1, accepted - (again - prompt)), limit=chunk
    )
    assert fits
    assert limit is not None
    assert limit > 0
