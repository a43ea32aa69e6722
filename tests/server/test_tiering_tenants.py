"""Tenants with shares, and requests with budgets of their own, on real servers."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from qevict_tiers.config import Heads, TieringConfig
from server import tiering
from server.harness import Server, ServerPool
from server.tiering import TIERED, assert_idle, prompts, report

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


def ask(server: Server, tenant: str, prompt: list[int], tokens: int) -> float:
    """Seconds that a tenant's request takes."""
    began = time.monotonic()
    result = tiering.ask(server, prompt, tokens, routing_key=tenant)
    assert len(result["output_ids"]) == tokens
    return time.monotonic() - began


# --- a flood ---

CAP = 0.4
_FLOODERS, _SMALL_REQUESTS = 24, 30


@contextmanager
def flood(server: Server, tenant: str) -> Iterator[None]:
    """Within, so many requests of short prompts and long answers are always there."""
    ended = threading.Event()
    asked = prompts([100] * _FLOODERS, start=20_000)

    def again(prompt: list[int]) -> None:
        while not ended.is_set():
            ask(server, tenant, prompt, 200)

    with ThreadPoolExecutor(_FLOODERS) as threads:
        futures = [threads.submit(again, prompt) for prompt in asked]
        try:
            # Until it has as much as it gets.
            time.sleep(10)
            yield
        finally:
            ended.set()
            for future in futures:
                future.result()


def first_token_seconds(server: Server, start: int) -> list[float]:
    """Times to the first token of two small tenants, each of which asks and waits in turn."""

    def one(number: int) -> list[float]:
        asked = prompts([480] * (_SMALL_REQUESTS // 2), start=start + 10_000 * number)
        seconds = []
        for prompt in asked:
            seconds.append(ask(server, f"small {number}", prompt, 1))
            time.sleep(0.4)
        return seconds

    with ThreadPoolExecutor(2) as threads:
        return [one_of for found in threads.map(one, range(2)) for one_of in found]


def test_small_tenants_hardly_notice_a_flood(servers: ServerPool) -> None:
    server = servers.get(
        *TIERED, "--max-total-tokens", "6000", "--context-length", "1024",
        "--chunked-prefill-size", "512", "--kv-tiering-tenants", f'{{"flood": {{"cap": {CAP}}}}}',
    )  # fmt: skip
    alone = first_token_seconds(server, start=40_000)
    most, seen = 0.0, 0
    with flood(server, "flood"):
        stop = threading.Event()

        def watch() -> None:
            nonlocal most, seen
            while not stop.wait(0.3):
                found = report(server)
                share = found["tenants"].get("flood")
                if share:
                    held = share["bytes"] + share["reuse_bytes"]
                    most = max(most, held / found["bytes"]["arena"])
                    seen = max(seen, share["requests"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        beside = first_token_seconds(server, start=70_000)
        stop.set()
        watcher.join()
    ratio = np.percentile(beside, 99) / np.percentile(alone, 99)
    print(
        f"p99 of {np.percentile(alone, 99):.2f} s alone, {np.percentile(beside, 99):.2f} s beside "
        f"a flood: {ratio:.2f} times; the flood had {seen} requests and {most:.2f} of the bytes"
    )
    assert ratio <= 2
    # It ran, and had what it may have.
    assert seen > 1
    assert 0.1 < most <= CAP + 0.02
    assert_idle(server)


# --- budgets of requests ---


def share_seen(server: Server, prompt: list[int], budget: float | None) -> float:
    """The median share of its full-precision bytes that a request sees while it runs alone."""
    params = {} if budget is None else {"kv_tiering_budget": budget}
    sampling = {
        "temperature": 0, "max_new_tokens": 100, "ignore_eos": True, "custom_params": params
    }  # fmt: skip
    geometry = TieringConfig().geometry(Heads(9, 3, 64))
    shares = []
    with ThreadPoolExecutor(1) as threads:
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = threads.submit(server.post, "/generate", body)
        while not answer.done():
            layers = {tier: sum(counts) for tier, counts in report(server)["layers"].items()}
            if everything := sum(layers.values()):
                held = layers["full"] * geometry.full_window_bytes
                held += layers["coded"] * geometry.coded_window_bytes
                shares.append(held / (everything * geometry.full_window_bytes))
            time.sleep(0.1)
        assert len(answer.result()["output_ids"]) == 100
    assert len(shares) > 10
    return statistics.median(shares)


@pytest.fixture
def limited(servers: ServerPool) -> Server:
    return servers.get(*TIERED, "--kv-tiering-budget-limits", "0.15-0.6")


@pytest.mark.parametrize("budget", [None, 0.15, 0.4, 0.6])
def test_a_request_sees_the_share_of_its_bytes_that_it_asks_for(
    limited: Server, budget: float | None
) -> None:
    (prompt,) = prompts([1500], start=5000)
    expected = budget or 0.2
    limited.flush_cache()
    share = share_seen(limited, prompt, budget)
    print(f"asked for {expected}, saw {share:.3f}")
    # By whole windows.
    assert expected - 0.02 <= share <= expected + 0.001
    assert_idle(limited)


@pytest.mark.parametrize("asked", [0.1, 0.7, -1, "0.3", True, [0.3]])
def test_other_budgets_get_400_and_one_sentence(limited: Server, asked: Any) -> None:
    (prompt,) = prompts([50])
    sampling = {"max_new_tokens": 4, "custom_params": {"kv_tiering_budget": asked}}
    with pytest.raises(httpx.HTTPStatusError) as error:
        limited.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    response = error.value.response
    assert response.status_code == 400
    assert (
        "kv_tiering_budget must be a number from 0.15 to 0.6 on this server, got" in response.text
    )
    assert limited.generate(prompt, max_new_tokens=4)["output_ids"]


def test_a_chat_may_have_a_budget_too(limited: Server) -> None:
    assert limited.chat("What is 2 + 2?", custom_params={"kv_tiering_budget": 0.5}, max_tokens=8)
    with pytest.raises(httpx.HTTPStatusError) as error:
        limited.chat("What is 2 + 2?", custom_params={"kv_tiering_budget": 0.9}, max_tokens=8)
    assert error.value.response.status_code == 400
    assert "kv_tiering_budget must be" in error.value.response.text
