"""Faults in a real server: which cost time only, and which end it, at once and with the reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.harness import Server, ServerPool
from server.tiering import (
    RANKS,
    TIERED,
    ask,
    assert_consensus,
    assert_idle,
    cached,
    prompts,
    ranks_env,
    report,
    wait_for,
    wait_for_writes,
)
from server_side import Faults, inject, install

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

SEVERAL_RANKS = ("--tp", str(RANKS))


class FaultyServer(Server):
    """A tiered server into which faults can be injected."""

    def __init__(self, directory: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self._side = install(directory / "plugin")
        super().__init__(
            *TIERED,
            *flags,
            log_path=directory / "server.log",
            env={**(env or {}), **self._side},
        )

    def inject(self, **faults: Any) -> None:
        """From now on this goes wrong, and nothing else."""
        inject(self._side, Faults(**faults))


def served(server: Server, prompt: Sequence[int], tokens: int = 16) -> dict[str, Any]:
    """SGLang's answer, of the length that was asked for."""
    result = ask(server, prompt, tokens)
    assert len(result["output_ids"]) == tokens
    return result


# --- what ends the server ---


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_a_routing_event_that_fails_ends_the_server_with_its_reason(
    ranks: int, tmp_path: Path
) -> None:
    """With several ranks one fails, and the others wait for it; all are gone nevertheless."""
    flags, env = (SEVERAL_RANKS, ranks_env()) if ranks > 1 else ((), None)
    with (
        FaultyServer(tmp_path, *flags, env=env) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        asked: list[Future[Any]] = [
            threads.submit(served, server, prompt, 4000) for prompt in prompts([700, 600, 40])
        ]
        wait_for(lambda: report(server)["counters"]["demoted"])
        server.inject(rank=ranks - 1, routing_fails=True)
        # Clients are told by the connection's end.
        for one in asked:
            with pytest.raises(httpx.TransportError):
                one.result(timeout=60)
        assert server.wait(30) != 0  # and it left no process behind
        log = server.log_text()
    assert "Scheduler hit an exception" in log
    assert "RuntimeError: injected: this routing event fails" in log


# --- what costs time only ---


def test_a_rank_that_routes_slowly_decides_as_the_others(tmp_path: Path) -> None:
    with FaultyServer(tmp_path, *SEVERAL_RANKS, env=ranks_env()) as server:
        document, *questions = prompts([700, 20, 30, 40, 50], start=2_000)
        served(server, document)
        server.inject(rank=1, routing_seconds=0.03)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda q: served(server, document + q, 40), questions))
        assert [cached(one) for one in found] == [696] * 4
        assert_consensus(server)


def test_a_rank_without_memory_for_originals_makes_all_compute(tmp_path: Path) -> None:
    ssd = ("--kv-tiering-ssd-dir", str(tmp_path / "ssd"))
    with FaultyServer(tmp_path, *SEVERAL_RANKS, *ssd, env=ranks_env()) as server:
        one, other = prompts([900, 900], start=4_000)
        served(server, one)
        server.flush_cache()
        server.inject(rank=1, no_memory=True)
        # All ranks have it on the disk, one can't read it.
        assert cached(served(server, one)) == 0
        served(server, other)
        server.flush_cache()
        server.inject()
        # One rank has not written it.
        assert cached(served(server, other)) == 0
        assert cached(served(server, one + other[:40])) > 0
        assert "no memory for originals" in server.log_text()
        assert_consensus(server)


def test_a_slow_disk_delays_a_recall_by_less_than_computing_takes_and_nobody_else(
    tmp_path: Path,
) -> None:
    slow = 30.0
    ssd = ("--kv-tiering-ssd-dir", str(tmp_path / "ssd"))
    with FaultyServer(tmp_path, *ssd) as server:
        known, *others = prompts([900, 900, 700, 50], start=8_000)
        served(server, known)
        wait_for_writes(server, 120)
        server.flush_cache()
        server.inject(disk_seconds=slow)
        for prompt in (known, *others):
            began = time.monotonic()
            assert cached(served(server, prompt)) == 0
            # Any wait for the disk would take as long as the disk does.
            assert time.monotonic() - began < slow
        assert report(server)["spill"]["usage"]["queued_records"] > 0
        server.inject()
        wait_for_writes(server, 120)
        assert_idle(server)


def test_a_disk_that_fails_costs_the_tier_alone_and_is_told_once(tmp_path: Path) -> None:
    ssd = ("--kv-tiering-ssd-dir", str(tmp_path / "ssd"))
    with FaultyServer(tmp_path, *ssd) as server:
        known, other, last = prompts([900, 900, 900], start=12_000)
        served(server, known)
        wait_for_writes(server, 120)
        server.flush_cache()
        server.inject(disk_fails=True)
        assert cached(served(server, known)) == 0
        served(server, other)
        wait_for_writes(server, 120)
        counters = report(server)["spill"]["counters"]
        assert counters["read_errors"] > 0
        assert counters["dropped_write_error"] > 0
        for what in ("spilling fails", "the spill store can't be read"):
            assert server.log_text().count(what) == 1
        server.inject()
        served(server, last)
        wait_for_writes(server, 120)
        assert report(server)["spill"]["counters"]["written"] > counters["written"]
        assert_idle(server)


# --- what one request gets wrong ---


def test_requests_that_are_wrong_are_told_so_and_another_one_goes_on(servers: ServerPool) -> None:
    server = servers.get(*TIERED)
    (prompt,) = prompts([600], start=16_000)
    wrong: list[dict[str, Any]] = [
        {"sampling_params": {"max_new_tokens": -1}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"ebnf": "root ::= ("}},
        {"sampling_params": {"json_schema": "{"}},
        {"sampling_params": {"regex": "("}},
        {"input_ids": [10**7]},
        {"input_ids": [-1]},
        {"input_ids": []},
        {"input_ids": [1] * 20_000},
        {"cache_salt": 7},
        {"extra_key": [1]},
    ]
    with ThreadPoolExecutor(1) as thread:
        going_on = thread.submit(served, server, prompt, 400)
        wait_for(lambda: report(server)["requests"])
        for one in wrong:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8}, **one}
            response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
            assert 400 <= response.status_code < 500, (str(one)[:100], response.text)
        assert report(server)["requests"] == 1
        going_on.result()
    assert_idle(server)
