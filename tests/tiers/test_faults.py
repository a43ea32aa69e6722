"""What goes wrong costs the request that it happens to no more than time, and others nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from faults import FailingStore, Ranks
from mini_engine import SMALL, MemoryStore, MiniEngine, Text
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.observer import Observer
from qevict_tiers.spill.records import Reading, ReadStatus
from qevict_tiers.views import Views
from sglang_qevict import spill as spill_module
from sglang_qevict.spill import Recall, SpillTier


class _Kernels(TorchMemory, ReferenceKernels):
    """The reference, which needs no compilation."""


DOCUMENT = Text(document=1, tokens=160)
PROMPT = 176


def make_engine(
    store: MemoryStore | None,
    observer: Observer | None = None,
    check: bool = False,
    **options: Any,
) -> MiniEngine:
    return MiniEngine(
        _Kernels,
        TieringConfig(**{**SMALL, **options}),
        Heads(2, 1, 64),
        kv_tokens=1500,
        context=320,
        check=check,
        store=store,
        watch=observer and (lambda plan, rows: observer),
    )


def serve(engine: MiniEngine, name: int, prompt: int = PROMPT, steps: int = 24) -> int:
    """A request about the document from its prompt to its end; returns its cached tokens."""
    cached = engine.start(name, prompt, DOCUMENT)
    while engine.running[name].stored < prompt:
        engine.extend({name: prompt})
    for _ in range(steps):
        engine.decode([name])
    engine.finish(name, publish=True)
    return cached


def spill_of(engine: MiniEngine) -> SpillTier:
    assert isinstance(engine.state.spill, SpillTier)
    return engine.state.spill


def drop_all(engine: MiniEngine) -> None:
    """Nothing is kept for reuse any more."""
    while engine.evict():
        pass


def assert_nothing_is_left(engine: MiniEngine) -> None:
    assert engine.problems() == []
    drop_all(engine)
    assert engine.problems() == []
    assert engine.manager.arena.used_bytes == engine.state.ledger.total_bytes == 0
    spill = spill_of(engine)
    assert (spill._rows, spill._prefetched, spill._taken) == ({}, {}, [])


# --- a disk that fails ---


@pytest.mark.parametrize("promote", [Promotion.ALIAS, Promotion.RESTORE])
def test_a_disk_that_fails_and_delays_at_random_spoils_no_answer(promote: Promotion) -> None:
    engine = make_engine(FailingStore(seed=0, share=0.1), check=True, promote=promote)
    cached = []
    for name in range(1, 9):
        cached.append(serve(engine, name))
        if name % 2:
            drop_all(engine)
    # Some of it was recalled at times, nothing at others; codes in memory were reused.
    assert any(0 < tokens < 160 for tokens in cached)
    assert {0, 160} <= set(cached)
    # The dense oracle knows what each view should have seen.
    assert engine.worst_error < 0.05
    assert_nothing_is_left(engine)


class _Hangs(MemoryStore):
    """Takes records, and never answers."""

    def contains(self, keys: Sequence[Any]) -> Future[Any]:
        return Future()

    def get(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


def test_a_disk_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "_LOOKUP_SECONDS", 0.01)
    engine = make_engine(_Hangs(), promote=Promotion.RESTORE)
    # What memory has is reused all the same.
    assert [serve(engine, name) for name in (1, 2)] == [0, 160]
    assert_nothing_is_left(engine)


# --- no memory on the host ---


def test_without_memory_for_originals_requests_go_on_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    engine = make_engine(store, check=True, promote=Promotion.RESTORE)
    serve(engine, 1)
    written = len(store.records)
    with monkeypatch.context() as patch:
        patch.setattr(spill_module.torch, "empty", _no_memory)
        assert serve(engine, 2, PROMPT + 8) == 0
    assert len(store.records) == written
    assert spill_of(engine).counters.no_memory > 1
    told = [line for line in caplog.messages if "no memory for originals" in line]
    assert len(told) == 1
    assert serve(engine, 3, PROMPT + 8) == 160
    assert spill_of(engine).counters.requests == {Recall.NO_ROOM: 1, Recall.RECALLED: 1}
    assert engine.worst_error < 0.05
    assert_nothing_is_left(engine)


_empty = torch.empty


def _no_memory(shape: Any, *args: Any, **options: Any) -> torch.Tensor:
    if isinstance(shape, tuple) and len(shape) == 3 and options.get("dtype") is torch.uint8:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return _empty(shape, *args, **options)


# --- one rank of several ---


class _Unreadable(MemoryStore):
    """Has everything, and can read nothing."""

    def get(self, keys: Sequence[Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([Reading(ReadStatus.ERROR)] * len(keys))
        return future


@pytest.mark.parametrize("fault", ["no memory", "no reads", "no records", "nothing"])
def test_where_one_rank_fails_all_compute(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Had they not agreed, they would have launched prompts of different lengths."""
    ranks = Ranks(2)
    stores = [MemoryStore(), _Unreadable() if fault == "no reads" else MemoryStore()]
    engines = [make_engine(store) for store in stores]
    for rank, engine in enumerate(engines):
        monkeypatch.setattr(spill_of(engine), "_least", partial(ranks.least, rank))

    def on_all(name: int, prompt: int) -> list[int]:
        with ThreadPoolExecutor(2) as threads:
            work = [partial(serve, engine, name, prompt) for engine in engines]
            return list(threads.map(ranks.run, work))

    assert on_all(1, PROMPT) == [0, 0]
    for engine in engines:
        drop_all(engine)
    if fault == "no memory":
        monkeypatch.setattr(spill_of(engines[1]), "_buffer", lambda windows: None)
    if fault == "no records":
        stores[1].records.clear()
    assert on_all(2, PROMPT + 8) == ([160, 160] if fault == "nothing" else [0, 0])
    assert ranks.decisions >= 2
    one, other = (torch.stack(engine.outputs[2][-48:]) for engine in engines)
    assert torch.equal(one, other)
    for engine in engines:
        assert_nothing_is_left(engine)


# --- routing ---


class _Stumbles(Observer):
    """Fails before or after the routing event of a number."""

    def __init__(self, number: int, after: bool) -> None:
        self._left, self._after = number, after

    @contextmanager
    def routing(self, views: Views, *args: Any) -> Iterator[None]:
        self._left -= 1
        if not self._left and not self._after:
            raise OSError("injected")
        yield
        if not self._left:
            raise OSError("injected")


@pytest.mark.parametrize("after", [False, True])
def test_an_exception_in_a_routing_event_ends_the_launch(after: bool) -> None:
    """Nobody catches it: what a half-done event leaves is not what was claimed."""
    engine = make_engine(None, _Stumbles(4, after))
    engine.start(1, PROMPT, DOCUMENT)
    engine.extend({1: PROMPT})  # an event in each of two layers
    for _ in range(16):  # the third event comes with the ninth token
        engine.decode([1])
    with pytest.raises(OSError, match="injected"):
        engine.decode([1])
