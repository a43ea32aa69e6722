"""Numbers that come late, and the line in the log, on a device that answers when it likes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monitoring.test_metrics import make_engine, serve
from sglang_qevict import late
from sglang_qevict.late import LateReader, Stopwatch
from sglang_qevict.logs import TierFields, extend_decode_line


class Event:
    """A CUDA event that is done when the test says so."""

    done = False

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.timing
        assert end.timing
        return 250.0


class OnDevice(torch.Tensor):
    """A tensor of the host that says it is not."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(type="cuda")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(late, "_pinned_like", lambda like: torch.empty(like.shape).double())
    Event.done = False
    yield
    Event.done = False


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).as_subclass(OnDevice)


def test_on_an_accelerator_one_reads_what_has_arrived(accelerator: None) -> None:
    reader = LateReader[str]()
    assert reader.read(numbers(1, 2), "first") is None
    # Still under way: nothing new is asked for, nothing is waited for.
    assert reader.read(numbers(3, 4), "second") is None
    Event.done = True
    assert reader.read(numbers(5, 6), "third") == ([1, 2], "first")
    assert reader.read(numbers(7, 8), "fourth") == ([5, 6], "third")


def test_an_idle_device_is_waited_for(accelerator: None) -> None:
    reader = LateReader[str]()
    assert reader.read(numbers(1), "first") is None
    assert reader.read(numbers(2), "second", wait=True) == ([2], "second")


def test_on_a_cpu_numbers_are_there() -> None:
    assert LateReader[str]().read(torch.tensor([1.0, 2.0]), "now") == ([1, 2], "now")


def test_a_stopwatch_counts_pieces_that_are_done(accelerator: None) -> None:
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with watch.measure():
            pass
    assert watch.seconds == 0
    Event.done = True
    assert watch.seconds == 0.5


def test_the_decode_line_ends_with_what_the_tiers_hold(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(None)
    serve(engine)
    reporter = logging.getLogger("sglang.srt.managers.scheduler_components.metrics_reporter")
    for _ in range(2):
        # A second time, as for a state that replaces another: it is told of once.
        extend_decode_line(engine.state)
    try:
        with caplog.at_level(logging.INFO, reporter.name):
            reporter.info("Decode batch, #running-req: 2, #queue-req: 0")
            reporter.info("Prefill batch, #new-seq: 1")
    finally:
        for added in [x for x in reporter.filters if isinstance(x, TierFields)]:
            reporter.removeFilter(added)
    layers = engine.state.report()["layers"]
    line, other = caplog.messages
    assert other == "Prefill batch, #new-seq: 1"
    assert line.startswith("Decode batch, #running-req: 2, #queue-req: 0, #full-window: ")
    for tier in ("full", "coded", "evicted"):
        assert f"#{tier}-window: {sum(layers[tier])}," in line
    used = engine.manager.arena.used_bytes / engine.manager.arena.capacity_bytes
    assert f"kv used: {used:.2f}, kv claimed: " in line
    assert line.count("kv used") == 1
