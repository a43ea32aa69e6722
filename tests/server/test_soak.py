"""A mixed load, minute after minute, with aborts, flushes and retractions: nothing grows.

`make soak` runs an hour of it; the tests three minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from server.harness import Server
from server.tiering import TIERED, assert_idle, report, wait_until_idle
from sglang_qevict import stress

MINUTES = float(os.environ.get("QEVICT_SOAK_MINUTES", "3"))
ROUND_SECONDS = 40.0 if MINUTES >= 10 else 12.0

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    # What is under way at a round's end may take as long as the round.
    pytest.mark.timeout(60 * (3 * MINUTES + 15)),
]

MIX = Path(__file__).parents[2] / "configs" / "stress" / "soak.yaml"


class Held(NamedTuple):
    """What a process holds while the server idles."""

    name: str
    rss_bytes: int
    files: int
    threads: int


def test_nothing_grows_under_a_mixed_load(tmp_path: Path) -> None:
    flags = (
        # Too little for all that is sent, and SGLang admits as if answers were short.
        *("--max-total-tokens", "3000", "--schedule-conservativeness", "0.01"),
        *("--chunked-prefill-size", "512", "--enable-mixed-chunk"),
        *("--kv-tiering-ssd-dir", str(tmp_path / "ssd"), "--kv-tiering-ssd-size", "256M"),
    )
    with Server(*TIERED, *flags, log_path=tmp_path / "server.log") as server:
        held, totals, end = [], Counter[str](), time.monotonic() + 60 * MINUTES
        while time.monotonic() < end or len(held) < 6:
            checks = report(server)["checks"]
            totals.update(_serve_a_round(server, tmp_path / "report", seed=len(held)))
            wait_until_idle(server)
            # The server has looked at every copy, reference and view, and its log tells of nothing.
            assert report(server)["checks"] > checks
            server.assert_clean()
            if len(held) % 2:
                assert_idle(server)  # flushes
            held.append(_held_by(server))
            _tell(held)
        found = report(server)
    print(dict(totals))
    assert totals["aborted"] > 0
    assert totals["retractions"] > 0
    assert totals["done"] > totals["aborted"]
    assert found["counters"]["evicted_coded"] > 0
    assert found["spill"]["recalls"]["windows"] > 0
    _assert_flat(held)


def _serve_a_round(server: Server, directory: Path, seed: int) -> dict[str, int]:
    """Totals of one run of the mix, in which nothing failed."""
    status = stress.run(MIX, server.url, None, directory, seed=seed, seconds=ROUND_SECONDS)
    assert status == 0, server.log_tail()
    totals = json.loads((directory / "report.json").read_text())["totals"]
    assert totals["cut"] == 0
    return {name: totals[name] for name in ("done", "aborted", "retractions", "output_tokens")}


def _held_by(server: Server) -> dict[int, Held]:
    held = {}
    for process in server.processes():
        with process.oneshot():
            held[process.pid] = Held(
                process.info["name"],
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
            )
    return held


def _tell(rounds: Sequence[dict[int, Held]]) -> None:
    for one in rounds[-1].values():
        print(f"{len(rounds):3} {one.name:24} {one.rss_bytes / 2**20:8.1f} MiB "
              f"{one.files:4} files {one.threads:4} threads")  # fmt: skip


def _assert_flat(rounds: Sequence[dict[int, Held]]) -> None:
    """The last third of the rounds ends with no more than the third before it."""
    assert len(rounds) >= 6
    third = len(rounds) // 3
    before, last = rounds[-2 * third : -third], rounds[-third:]
    assert {pid for held in rounds for pid in held} == set(rounds[0]), "processes came or went"
    for pid, one in rounds[0].items():
        files, threads = (
            [max(getattr(held[pid], what) for held in part) for part in (before, last)]
            for what in ("files", "threads")
        )
        assert files[1] <= files[0] + 2, one.name
        assert threads[1] <= threads[0], one.name
        rss = [statistics.median(held[pid].rss_bytes for held in part) for part in (before, last)]
        assert rss[1] <= 1.02 * rss[0] + (4 << 20), (one.name, rss)
