"""Tensor parallelism: ranks route by their own heads, and decide alike what enters and leaves.

SGLang's rank consensus checker stops the server where ranks differ in what they match, insert
and evict, and in what tiering admits, claims, keeps and drops (``TieringState``).
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.harness import Server, ServerPool
from server.tiering import (
    EVERYTHING_FULL,
    RANKS,
    TIERED,
    answer,
    assert_consensus,
    assert_same_up_to_a_near_tie,
    prompts,
    ranks_env,
    report,
)

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


def _three_ranks(servers: ServerPool, *flags: str) -> Server:
    return servers.get(*TIERED, "--tp", str(RANKS), *flags, env=ranks_env())


def test_at_budget_one_three_ranks_answer_as_one(servers: ServerPool) -> None:
    asked = prompts([10, 200, 700, 1500], start=44_000)
    alone = servers.get(*TIERED, *EVERYTHING_FULL)
    one = [answer(alone, prompt, 24) for prompt in asked]
    server = _three_ranks(servers, *EVERYTHING_FULL)
    three = [answer(server, prompt, 24) for prompt in asked]
    assert_consensus(server)
    for expected, found in zip(one, three, strict=True):
        assert_same_up_to_a_near_tie(expected, found)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        (
            *("--kv-tiering-tenants", '{"tenant 0": {"floor": 0.2}, "*": {"cap": 0.7}}'),
            *("--kv-tiering-budget-limits", "0.15-0.5"),
        ),
    ],
    ids=["one for all", "tenants and budgets"],
)
def test_ranks_agree_through_reuse_aborts_and_retraction(
    servers: ServerPool, flags: tuple[str, ...]
) -> None:
    server = _three_ranks(
        servers,
        *flags,
        # SGLang expects answers to be short and admits more than fit once they have grown.
        *("--max-total-tokens", "1300", "--schedule-conservativeness", "0.01"),
        # Each request's tables stay small beside so few windows.
        *("--context-length", "1024"),
        *("--chunked-prefill-size", "256", "--enable-mixed-chunk"),
    )
    documents = prompts([600, 300, 100], start=46_000)
    draw = random.Random(0)

    def ask(turn: int) -> str:
        prompt = documents[turn % 3] + prompts([10 + turn], start=48_000 + 100 * turn)[0]
        length = (8, 40, 120)[turn % 3]
        sampling: dict[str, Any] = {
            "temperature": 0, "max_new_tokens": length, "min_new_tokens": length
        }  # fmt: skip
        if flags and turn % 4 == 1:
            sampling["custom_params"] = {"kv_tiering_budget": 0.5}
        salt = f"tenant {turn % 3 % 2}"
        body = {
            "input_ids": prompt, "sampling_params": sampling, "cache_salt": salt,
            "routing_key": salt,
        }  # fmt: skip
        timeout = patience[turn]
        try:
            response = httpx.post(f"{server.url}/generate", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            return "aborted"
        assert len(response.json()["output_ids"]) == length
        return "reused" if response.json()["meta_info"]["cached_tokens"] else "computed"

    patience = [draw.uniform(0.5, 5) if turn % 5 == 4 else 600 for turn in range(50)]
    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(ask, range(len(patience))))
    assert {"aborted", "computed"} <= set(ended)
    assert [ask(2), ask(2)][1] == "reused"
    assert report(server)["counters"]["demoted"] > 0
    assert "Retract requests" in server.log_text()
    assert_consensus(server)
