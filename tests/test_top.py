"""``sglang-qevict top`` on pages of metrics that the project's own exporter wrote."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console

from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter
from sglang_qevict import cli
from sglang_qevict.live import top
from sglang_qevict.live.top import Between, Problem, Scrape, frame, metrics_url

LABELS = {"model_name": "org/a-model", "tp_rank": "0", "dp_rank": "0"}


class _Server:
    """The metrics of a made-up server; ``set`` and ``count`` as ``Exporter`` has them."""

    def __init__(self, **labels: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = {**LABELS, **labels}
        self.exporter = Exporter(self.labels, self.registry)
        # SGLang's gauges have a colon in their names.
        self.running = Gauge("sglang:num_running_reqs", "x", [*LABELS], registry=self.registry)

    def page(self) -> str:
        return generate_latest(self.registry).decode()

    def scrape(self, at: float) -> Scrape:
        return Scrape.parse(self.page(), at)


def _shown(pair: Between, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(frame(pair, "http://host/metrics", width))
    return console.export_text()


def _line(shown: str, name: str) -> str:
    (line,) = [line for line in shown.splitlines() if f"│ {name} " in line]
    return line


def test_a_frame_shows_levels_as_they_are_and_counters_as_rates() -> None:
    server = _Server()
    set_, count = server.exporter.set, server.exporter.count
    set_(table.ARENA_BYTES, 3 << 20, "used")
    set_(table.ARENA_BYTES, 1 << 30, "free")
    set_(table.LOGICAL_WINDOWS, 1234, "coded")
    set_(table.LEDGER_BYTES, 5 << 10, "shadow")
    count(table.DEMOTIONS, 100)
    before = server.scrape(10.0)
    count(table.DEMOTIONS, 90)
    count(table.EVICTIONS, 4, "coded")
    server.running.labels(*server.labels.values()).set(7)
    shown = _shown(Between(before, server.scrape(12.0)), width=60)
    assert "a-model" in shown
    assert "3.0 MiB" in _line(shown, "used")
    assert "1.0 GiB" in _line(shown, "free")
    assert " 1,234 " in _line(shown, "coded")
    assert "5.0 KiB" in _line(shown, "shadow")
    assert "45 windows/s" in _line(shown, "demoted to codes")
    assert "2.0 windows/s" in _line(shown, "evicted, were coded")
    assert "0 windows/s" in _line(shown, "evicted, were FULL")
    assert " 7 " in _line(shown, "running")


def test_an_ssd_tier_has_a_panel_and_no_such_tier_has_none() -> None:
    server = _Server()
    before = server.scrape(0.0)
    assert "SSD tier" not in _shown(Between(before, before))
    server.exporter.set(table.SPILL_FILE_BYTES, 5 << 20)
    server.exporter.set(table.SPILL_BYTES, 3 << 20, "stored")
    server.exporter.set(table.SPILL_BYTES, float("nan"), "queued")
    server.exporter.count(table.SPILL_WRITTEN_BYTES, 0)
    server.exporter.count(table.SPILL_RECALLS, 0, "recalled")
    server.exporter.count(table.SPILL_RECALLS, 7, "late")
    before = server.scrape(10.0)
    server.exporter.count(table.SPILL_WRITTEN_BYTES, 2 << 20)
    server.exporter.count(table.SPILL_RECALLS, 4, "recalled")
    shown = _shown(Between(before, server.scrape(12.0)), width=60)
    assert "3.0 MiB" in _line(shown, "stored")
    assert " - " in _line(shown, "waiting to be written")
    assert "1.0 MiB/s" in _line(shown, "written")
    assert "2.0 requests/s" in _line(shown, "requests recalled")
    assert "0 requests/s" in _line(shown, "read too late")


def test_churn_is_the_mean_of_what_was_observed_between_the_scrapes() -> None:
    server = _Server()
    buckets = [0.0] * (len(table.CHURN.buckets) + 1)
    buckets[3] = 10
    server.exporter.gather(table.CHURN, buckets, 9.0)
    before = server.scrape(0.0)
    assert Between(before, server.scrape(1.0)).mean(table.CHURN) is None
    buckets[3] = 14
    server.exporter.gather(table.CHURN, buckets, 9.2)
    assert Between(before, server.scrape(1.0)).mean(table.CHURN) == pytest.approx(0.05)


def test_a_server_that_was_started_again_shows_no_rate_from_before() -> None:
    old, new = _Server(), _Server()
    old.exporter.count(table.DEMOTIONS, 1000)
    new.exporter.count(table.DEMOTIONS, 5)
    pair = Between(old.scrape(0.0), new.scrape(1.0))
    assert pair.rate(table.DEMOTIONS.name) is None
    assert " - " in _line(_shown(pair, width=60), "demoted to codes")


def test_replicas_are_summed_and_ranks_of_a_group_are_not() -> None:
    pages = []
    for tp, dp, number in (("0", "0", 1), ("1", "0", 10), ("0", "1", 100), ("1", "1", 1000)):
        server = _Server(tp_rank=tp, dp_rank=dp)
        server.exporter.set(table.REQUESTS, number)
        pages.append(server.page())
    scrape = Scrape.parse("\n".join(pages), 0.0)
    assert scrape.total(table.REQUESTS.name) == 101
    assert "sum of 2 replicas" in _shown(Between(scrape, scrape), width=200)


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_a_frame_fits_its_terminal_and_shows_all_kinds_of_the_ledger(width: int) -> None:
    server = _Server()
    server.exporter.set(table.LOGICAL_WINDOWS, 1_234_567, "full")
    server.exporter.set(table.LOGICAL_BYTES, 99.9 * 2**30, "full")
    scrape = server.scrape(0.0)
    shown = _shown(Between(scrape, scrape), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "1,234,567" in shown
    assert "99.9 GiB" in shown
    for kind in table.LEDGER_BYTES.labels[0].values:
        assert kind in shown


def test_a_server_without_some_of_the_metrics_is_shown_without_them() -> None:
    page = f'{table.REQUESTS.name}{{tp_rank="0"}} 3\n'
    scrape = Scrape.parse(page, 0.0)
    assert " - " in _line(_shown(Between(scrape, scrape), 60), "running")


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost:30000", "http://localhost:30000/metrics"),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000/metrics"),
        ("https://host/", "https://host/metrics"),
        ("http://host/prefix/metrics?a=b", "http://host/prefix/metrics?a=b"),
        ("[::1]:30000", "http://[::1]:30000/metrics"),
    ],
)
def test_addresses_in_the_ways_in_which_people_write_them(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize("address", ["http://", "host:port", "ftp://host", "", "http://[::1"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(Problem, match="is no address of a server: give one like"):
        metrics_url(address)


# -- the command ------------------------------------------------------------------------------

Answer = Callable[[str, str | None], tuple[int, str]]
"""From path and authorization to status and body."""


@contextmanager
def _serving(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers["Authorization"])
            with suppress(BrokenPipeError):  # who asked may have gone
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _sglang(api_key: str | None) -> Answer:
    """Metrics for everybody, anything else for those who have the key: as SGLang answers."""
    page = _Server().page()

    def answer(path: str, authorization: str | None) -> tuple[int, str]:
        if path == "/metrics":
            return 200, page
        return (401 if api_key and authorization != f"Bearer {api_key}" else 200), "{}"

    return answer


@pytest.mark.parametrize("key", [None, "right"])
def test_once_prints_a_frame(key: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with _serving(_sglang("right")) as url:
        options = ["--api-key", key] if key else []
        assert cli.main(["top", url, "--once", "--interval", "0.1", *options]) == 0
    printed = capsys.readouterr()
    assert "a-model" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda *_: (200, "# HELP a b\n# TYPE a gauge\na 1\n"), "has no metrics of an SGLang"),
        (lambda *_: (200, "sglang:num_running_reqs 1\n"), "is a server without tiers: start it"),
        (lambda *_: (200, "<html>"), "answers with something that is no page of metrics"),
        (lambda *_: (404, ""), "start the server with --enable-metrics"),
        (lambda *_: (500, ""), "answers with status 500, not with metrics"),
        (lambda *_: (401, ""), "wants another key: give the one of the server by --api-key"),
    ],
)
def test_what_is_no_tiered_server_ends_with_one_sentence(
    answer: Answer, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _serving(answer) as url:
        assert cli.main(["top", url, "--once"]) == 1
    _one_sentence(capsys, told)


def test_a_wrong_key_is_told_although_metrics_are_open(capsys: pytest.CaptureFixture[str]) -> None:
    with _serving(_sglang("right")) as url:
        assert cli.main(["top", url, "--once", "--api-key", "wrong"]) == 1
    _one_sentence(capsys, "refuses this key: give the one of the server's --api-key")


def test_where_nothing_listens_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with _serving(_sglang(None)) as url:
        pass
    assert cli.main(["top", url]) == 1
    _one_sentence(capsys, f"nothing answers at {url}/metrics")


def test_a_server_that_is_too_slow_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "_TIMEOUT_SECONDS", 0.1)
    goes_on = threading.Event()

    def answer(path: str, authorization: str | None) -> tuple[int, str]:
        goes_on.wait(10)
        return 404, ""

    with _serving(answer) as url:
        assert cli.main(["top", url]) == 1
        goes_on.set()
    _one_sentence(capsys, "did not answer in 0.1 s")


def test_without_a_terminal_only_one_frame_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with _serving(_sglang(None)) as url:
        assert cli.main(["top", url]) == 1
    _one_sentence(capsys, "top needs a terminal: --once prints one frame anywhere")


def test_in_a_terminal_it_goes_on_through_a_pause_of_the_server_until_q() -> None:
    """Frames come until the server fails, then the trouble is told, then frames come again."""
    healthy, answers = _sglang(None), iter([True, True, False, *[True] * 1000])

    def answer(path: str, authorization: str | None) -> tuple[int, str]:
        return healthy(path, authorization) if next(answers) else (500, "")

    ours, its = os.openpty()
    os.set_blocking(ours, False)
    with _serving(answer) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_qevict.cli", "top", url, "--interval", "0.3"],
            stdin=its,
            stdout=its,
            stderr=its,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "50"},
        )
        _read_until(ours, "bytes for windows")
        _read_until(ours, "answers with status 500, not with metrics")
        _read_until(ours, "q ends")
        os.write(ours, b"q")
        assert process.wait(60) == 0


def _read_until(terminal: int, words: str) -> None:
    seen, deadline = "", time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < deadline, seen
        with suppress(BlockingIOError):
            seen += os.read(terminal, 1 << 16).decode(errors="replace")
        time.sleep(0.02)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9", "soon"])
def test_an_interval_that_is_none_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["top", "--interval", seconds])
    assert exit_.value.code == 2
    assert "argument --interval" in capsys.readouterr().err


def _one_sentence(capsys: pytest.CaptureFixture[str], told: str) -> None:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert printed.err.startswith("sglang-qevict: ")
    assert printed.err.count("\n") == 1
