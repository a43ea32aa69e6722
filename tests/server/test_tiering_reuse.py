"""Prefix reuse as clients see it: turns, branches, salts, bursts, and nothing left behind."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.harness import Server, ServerPool
from server.tiering import (
    EVERYTHING_FULL,
    TIERED,
    answer,
    ask,
    assert_idle,
    assert_same_up_to_a_near_tie,
    cached,
    prompts,
    report,
)

pytestmark = pytest.mark.server


def test_turns_of_one_conversation_reuse_prompt_and_answer(tiered: Server) -> None:
    document, *questions = prompts([3000, 20, 20, 20])
    turn = document
    for number, question in enumerate(questions):
        turn = turn + question
        result = ask(tiered, turn, tokens=30)
        known = len(turn) - len(question)
        # Whole windows of all that was there before; the last token of an answer has no KV yet.
        assert cached(result) == (0 if number == 0 else (known - 1) // 8 * 8)
        turn = turn + result["output_ids"]


def test_branches_of_one_prefix_share_its_copies(tiered: Server) -> None:
    prefix, *branches = prompts([2000, 40, 48, 56], start=5_000)
    ask(tiered, prefix + branches[0])
    alone = report(tiered)["bytes"]["claimed"]
    together = [prefix + branch for branch in branches[1:]]
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda prompt: ask(tiered, prompt), together))
    assert [cached(result) for result in results] == [2000, 2000]
    new_pages = sum((len(prompt) + 7) // 8 - 250 for prompt in together)
    assert report(tiered)["bytes"]["claimed"] <= alone + new_pages * alone // 200


def test_tenants_with_different_salts_or_keys_share_nothing(tiered: Server) -> None:
    (prompt,) = prompts([900], start=8_000)
    ways: list[dict[str, str]] = [
        {},
        {"cache_salt": "a", "extra_key": "bc"},
        {"cache_salt": "ab", "extra_key": "c"},
        {"cache_salt": "abc"},
        {"extra_key": "abc"},
    ]
    for way in ways:
        assert cached(ask(tiered, prompt, **way)) == 0
    for way in ways:
        assert cached(ask(tiered, prompt, **way)) == 896


def test_a_request_is_answered_beside_others_as_alone_after_the_same_warming(
    tiered: Server,
) -> None:
    document, question, *others = prompts([2000, 24, 700, 30, 1500], start=12_000)
    ask(tiered, document)
    alone = answer(tiered, document + question, 24)
    tiered.flush_cache()
    ask(tiered, document)
    with ThreadPoolExecutor(len(others) + 1) as threads:
        found = threads.submit(answer, tiered, document + question, 24)
        for other in others:
            threads.submit(ask, tiered, other, 40)
        among = found.result()
    assert_same_up_to_a_near_tie(alone, among)


def test_a_short_prompt_is_answered_from_its_cached_prefix_as_without(tiered: Server) -> None:
    (prompt,) = prompts([200], start=16_000)
    cold = answer(tiered, prompt, 24)
    warm = answer(tiered, prompt, 24)
    assert cached(ask(tiered, prompt)) == 192
    assert_same_up_to_a_near_tie(cold, warm)


def test_short_prompts_reuse_what_a_long_one_left_once_one_of_them_has_ended(
    tiered: Server,
) -> None:
    system, document, *questions = prompts([304, 600, 20, 20, 20], start=16_500)
    ask(tiered, system + document)
    found = [cached(ask(tiered, system + question)) for question in questions]
    assert found == [8, 304, 304]
    assert cached(ask(tiered, system + document)) == 896


def test_samples_of_one_prompt_reuse_it(tiered: Server) -> None:
    (prompt,) = prompts([800], start=17_000)
    sampling = {"n": 3, "temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    samples = tiered.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert [cached(sample) for sample in samples] == [792] * 3


def test_twins_in_one_batch_leave_one_copy(tiered: Server) -> None:
    first, second = prompts([700, 100], start=18_000)
    twins = [first + second] * 3
    tiered.generate_many(twins, max_new_tokens=8, ignore_eos=True)
    assert report(tiered)["kept_pages"] == 100
    assert cached(ask(tiered, first + second)) == 792


@pytest.mark.slow
def test_a_long_prompt_in_chunks_after_a_short_one(servers: ServerPool) -> None:
    """Nothing is sized by the first requests: the longest comes after, then reuses itself."""
    server = servers.get(*TIERED, "--chunked-prefill-size", "1024")
    (warm_up, longest) = prompts([500, 7500], start=50_000)
    ask(server, warm_up)
    cold, warm = (ask(server, longest, tokens=16) for _ in range(2))
    assert (cached(cold), cached(warm)) == (0, 7496)
    assert len(warm["output_ids"]) == 16
    assert_idle(server)


@pytest.mark.slow
def test_a_burst_over_few_prefixes_into_a_full_pool(servers: ServerPool) -> None:
    """Each of 30 requests ends, nothing leaks, and the cache gives way before any request does."""
    server = servers.get(*TIERED, "--max-total-tokens", "2500")
    documents = prompts([1000] * 5, start=20_000)
    tails = prompts([20 + turn for turn in range(30)], start=26_000)
    asked = [documents[turn % 5] + tails[turn] for turn in range(30)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda prompt: ask(server, prompt, 16), asked))
    assert all(len(result["output_ids"]) == 16 for result in results)
    assert sum(map(cached, results)) > 0
    assert "Retract requests" not in server.log_text()
    found = report(server)["bytes"]
    assert found["claimed"] <= found["arena"]
    assert_idle(server)


@pytest.mark.slow
def test_without_reuse_every_request_computes_its_own_prompt(servers: ServerPool) -> None:
    server = servers.get(*TIERED, "--kv-tiering-prefix-reuse", "off")
    (prompt,) = prompts([900], start=30_000)
    assert [cached(ask(server, prompt)) for _ in range(2)] == [0, 0]
    assert report(server)["kept_pages"] == 0
    assert_idle(server)


@pytest.mark.slow
def test_at_budget_one_a_reused_prefix_is_as_good_as_new(servers: ServerPool) -> None:
    server = servers.get(*TIERED, *EVERYTHING_FULL)
    (prompt,) = prompts([1500], start=32_000)
    cold, warm = (answer(server, prompt, 24) for _ in range(2))
    assert cached(ask(server, prompt)) == 1496
    assert_same_up_to_a_near_tie(cold, warm)
    assert_idle(server)


@pytest.mark.slow
def test_later_turns_about_a_document_start_four_times_faster(tiered: Server) -> None:
    seconds: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for repeat in range(3):
        turn, *questions = prompts([3000, 20, 20], start=40_000 + 3_100 * repeat)
        for number in (1, 2, 3):
            start = time.perf_counter()
            result = ask(tiered, turn, tokens=1)
            seconds[number].append(time.perf_counter() - start)
            if number < 3:
                turn = turn + result["output_ids"] + questions[number - 1]
    first, *later = (statistics.median(seconds[number]) for number in (1, 2, 3))
    print(f"first turn {first:.2f} s, then {later[0]:.2f} s and {later[1]:.2f} s")
    assert first >= 4 * max(later)
