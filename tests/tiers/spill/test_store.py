"""The store's threads: nothing waits, what is refused is counted, buffers come back in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.medium import Medium
from qevict_tiers.spill.records import (
    Reading,
    ReadStatus,
    Record,
    SpillCounters,
    WriteStatus,
    as_bytes,
)
from qevict_tiers.spill.store import SpillStore
from spill_cases import adds_up, is_right, key, keys, payload, record, records

SIZE = 1000
SOON = 20


class Gate:
    """Closed, it holds whoever comes."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.arrived = threading.Semaphore(0)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        self.arrived.release()
        assert self._open.wait(SOON)


class DictMedium(Medium):
    """Records in a dict, behind a gate for writes and one for reads."""

    def __init__(self, persists: bool = True, contains_blocks: bool = False) -> None:
        self.persists = persists
        self.contains_blocks = contains_blocks
        self.counters = SpillCounters()
        self.records: dict[SpillKey, tuple[bytes, Any]] = {}
        self.batches: list[int] = []
        self.writing, self.reading = Gate(), Gate()
        self.error: Exception | None = None
        self.closed = False

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        self.writing()
        if self.error:
            raise self.error
        self.batches.append(len(records))
        for name, data, contents in records:
            self.records[name] = (bytes(as_bytes(data)), contents)
        return [WriteStatus.WRITTEN] * len(records)

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        self.reading()
        if self.error:
            raise self.error
        readings = []
        for name, buffer in zip(keys, into, strict=True):
            if name not in self.records:
                readings.append(Reading(ReadStatus.MISS))
                continue
            data, contents = self.records[name]
            target = memoryview(bytearray(len(data))) if buffer is None else buffer
            target[:] = data
            readings.append(Reading(ReadStatus.HIT, target, contents))
        return readings

    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        return [name in self.records for name in keys]

    def delete(self, keys: Sequence[SpillKey]) -> None:
        self.writing()
        for name in keys:
            self.records.pop(name, None)

    def clear(self) -> None:
        self.writing()
        self.records.clear()

    def close(self) -> None:
        self.closed = True

    def usage(self) -> tuple[int, int, int]:
        return len(self.records), sum(len(data) for data, _ in self.records.values()), 0


@pytest.fixture
def medium() -> DictMedium:
    return DictMedium()


@pytest.fixture
def store(medium: DictMedium) -> Iterator[SpillStore]:
    made = SpillStore(medium, queue_bytes=10 * SIZE, max_reads=8, readers=2)
    yield made
    medium.writing.open()
    medium.reading.open()
    made.close()


def done(future: Future[Any]) -> Any:
    return future.result(SOON)


def held(store: SpillStore, medium: DictMedium, number: int = 99) -> Future[int]:
    """Keep the writer in the medium, with one record."""
    medium.writing.close()
    while medium.writing.arrived.acquire(blocking=False):
        pass
    future = store.put([record(number, SIZE)])
    assert medium.writing.arrived.acquire(timeout=SOON)
    return future


def test_records_come_back_in_any_kind_of_buffer(store: SpillStore) -> None:
    given = [
        payload(0, SIZE),
        bytearray(payload(1, SIZE)),
        memoryview(payload(2, SIZE)),
        np.frombuffer(payload(3, SIZE), np.uint16).reshape(2, -1),
        torch.frombuffer(bytearray(payload(4, SIZE)), dtype=torch.uint8).reshape(10, 100),
    ]
    assert (
        done(store.put([Record(key(n), x, record(n).contents) for n, x in enumerate(given)])) == 5
    )
    into = [torch.empty(SIZE, dtype=torch.uint8), None, np.empty(SIZE, np.uint8), None, None]
    assert all(map(is_right, done(store.get(keys(range(5)), into)), range(5)))
    assert into[0].numpy().tobytes() == payload(0, SIZE)
    assert into[2].tobytes() == payload(2, SIZE)
    assert adds_up(store.counters)


def test_a_payload_that_is_not_bytes_in_host_memory_is_refused(store: SpillStore) -> None:
    contents = record(0).contents
    with pytest.raises(ValueError, match="uint8 tensor on the CPU"):
        store.put([Record(key(0), torch.zeros(4), contents)])
    with pytest.raises(ValueError, match="contiguous"):
        store.put([Record(key(0), np.zeros((4, 4), np.uint8)[:, ::2], contents)])
    assert done(store.contains([key(0)])) == [False]


def test_a_put_never_waits_and_drops_what_the_queue_has_no_room_for(
    store: SpillStore, medium: DictMedium
) -> None:
    first = held(store, medium)
    began = time.monotonic()
    second = store.put(records(range(20), SIZE))
    third = store.put(records(range(20, 30), SIZE))
    assert time.monotonic() - began < 1
    assert not second.done()
    assert done(third) == 0
    # One record of the ten is in the medium.
    assert store.counters.dropped_queue_full == 11 + 10
    assert store.usage()[3:5] == (10, 10 * SIZE)
    medium.writing.open()
    assert (done(first), done(second)) == (1, 9)
    assert set(medium.records) == set(keys([99, *range(9)]))
    assert adds_up(store.counters)
    assert store.usage()[3:] == (0, 0, 0)


def test_what_waits_to_be_written_is_found_and_read(store: SpillStore, medium: DictMedium) -> None:
    held(store, medium)
    store.put(records(range(3), SIZE))
    assert done(store.contains(keys(range(4)))) == [True, True, True, False]
    readings = done(store.get(keys(range(3)), [None, bytearray(SIZE), bytearray(5)]))
    assert is_right(readings[0], 0)
    assert is_right(readings[1], 1)
    assert readings[2].status is ReadStatus.WRONG_SIZE
    assert store.counters.hits_in_queue == 2
    assert adds_up_after(store, medium)


def adds_up_after(store: SpillStore, medium: DictMedium) -> bool:
    medium.writing.open()
    medium.reading.open()
    done(store.flush())
    return adds_up(store.counters)


def test_a_key_names_its_content_and_is_written_once(store: SpillStore, medium: DictMedium) -> None:
    held(store, medium)
    again = [store.put([record(n, SIZE)]) for n in (1, 1, 99)]
    medium.writing.open()
    assert [done(future) for future in again] == [1, 1, 1]
    assert done(store.put([record(1, SIZE)])) == 1
    assert store.counters.duplicate == 3
    assert store.counters.written == 2
    assert adds_up(store.counters)


def test_a_delete_counts_at_once_and_a_later_put_counts_again(
    store: SpillStore, medium: DictMedium
) -> None:
    done(store.put(records([1, 2, 3], SIZE)))
    held(store, medium)
    queued = store.put([record(4, SIZE)])
    deleted = store.delete(keys([1, 4]))
    assert done(store.contains(keys(range(1, 5)))) == [False, True, True, False]
    assert done(store.get([key(1), key(4)]))[0].status is ReadStatus.MISS
    again = store.put([record(1, SIZE)])
    assert done(store.contains([key(1)])) == [True]
    medium.writing.open()
    assert (done(queued), done(deleted), done(again)) == (0, None, 1)
    assert set(medium.records) == set(keys([1, 2, 3, 99]))
    assert store.counters.superseded == 1
    assert store._pending == {}
    assert adds_up(store.counters)


def test_a_clear_counts_at_once_and_takes_what_waits(store: SpillStore, medium: DictMedium) -> None:
    done(store.put(records([1, 2], SIZE)))
    held(store, medium)
    store.put([record(3, SIZE)])
    cleared = store.clear()
    store.put([record(2, SIZE)])
    assert done(store.contains(keys(range(1, 4)))) == [False, True, False]
    assert [r.status for r in done(store.get(keys([1, 3])))] == [ReadStatus.MISS] * 2
    medium.writing.open()
    done(cleared)
    done(store.flush())
    assert set(medium.records) == {key(2)}
    assert store._pending == {}
    assert adds_up(store.counters)


def test_a_read_can_be_polled_and_waited_for(store: SpillStore, medium: DictMedium) -> None:
    done(store.put(records(range(4), SIZE)))
    medium.reading.close()
    reading = store.get(keys(range(4)))
    assert not reading.done()
    with pytest.raises(TimeoutError):
        reading.result(0.05)
    assert store.usage().reading == 4
    medium.reading.open()
    assert all(map(is_right, done(reading), range(4)))
    assert store.usage().reading == 0


def test_what_is_not_begun_by_its_deadline_is_late(medium: DictMedium) -> None:
    store = SpillStore(medium, readers=1)
    done(store.put(records(range(8), SIZE)))
    medium.reading.close()
    first = store.get(keys(range(4)))
    assert medium.reading.arrived.acquire(timeout=SOON)
    second = store.get(keys(range(4, 8)), deadline_seconds=0.01)
    time.sleep(0.05)
    medium.reading.open()
    assert all(map(is_right, done(first), range(4)))
    assert [reading.status for reading in done(second)] == [ReadStatus.LATE] * 4
    assert store.counters.late == 4
    assert adds_up(store.counters)
    store.close()


def test_reads_beyond_the_bound_are_busy(store: SpillStore, medium: DictMedium) -> None:
    done(store.put(records(range(10), SIZE)))
    medium.reading.close()
    first = store.get(keys(range(6)))
    second = store.get(keys(range(10)))
    third = done(store.get([key(0)]))
    assert third[0].status is ReadStatus.BUSY
    medium.reading.open()
    assert all(map(is_right, done(first), range(6)))
    statuses = [reading.status for reading in done(second)]
    assert statuses == [ReadStatus.HIT] * 2 + [ReadStatus.BUSY] * 8
    assert adds_up(store.counters)


def test_a_buffer_is_given_back_only_when_nobody_reads_it(
    store: SpillStore, medium: DictMedium
) -> None:
    held(store, medium)
    put = store.put([record(0, SIZE)])
    medium.reading.close()
    # One reader has both: it is held in the medium before it copies the second.
    reading = store.get([key(50), key(0)])
    assert medium.reading.arrived.acquire(timeout=SOON)
    medium.writing.open()
    done(store.flush())
    assert key(0) in medium.records
    assert not put.done()
    medium.reading.open()
    assert is_right(done(reading)[1], 0)
    assert done(put) == 1


def test_a_failing_medium_is_counted_and_logged_once(
    store: SpillStore, medium: DictMedium, caplog: pytest.LogCaptureFixture
) -> None:
    medium.error = OSError("broken")
    for start in range(0, 12, 4):
        assert done(store.put(records(range(start, start + 4), SIZE))) == 0
        assert done(store.get([key(start)]))[0].status is ReadStatus.ERROR
    assert store.counters.dropped_write_error == 12
    assert sorted(line.message.split(",")[0].split(":")[0] for line in caplog.records) == [
        "spilling fails",
        "the spill store can't be read",
    ]
    medium.error = None
    assert done(store.put(records(range(4), SIZE))) == 4
    assert adds_up(store.counters)


def test_a_medium_that_hangs_holds_nobody(store: SpillStore, medium: DictMedium) -> None:
    held(store, medium)
    medium.reading.close()
    store.get(keys(range(8)))
    waits = []
    for number in range(1000):
        began = time.monotonic()
        store.put([record(number, SIZE)])
        store.get([key(number)])
        store.contains([key(number)])
        store.delete([key(number)])
        waits.append(time.monotonic() - began)
    assert np.quantile(waits, 0.9) < 0.05
    assert store.counters.dropped_queue_full + store.counters.busy > 0


def test_close_writes_what_waits_if_it_is_to_persist(store: SpillStore, medium: DictMedium) -> None:
    held(store, medium)
    put = store.put(records(range(3), SIZE))
    threading.Timer(0.1, medium.writing.open).start()
    store.close()
    assert done(put) == 3
    assert medium.closed
    assert len(medium.records) == 4
    assert done(store.put([record(5)])) == 0
    assert done(store.get([key(1)]))[0].status is ReadStatus.ERROR
    done(store.delete([key(1)]))
    done(store.flush())
    assert adds_up(store.counters)


def test_close_drops_what_waits_otherwise_and_leaves_what_hangs() -> None:
    medium = DictMedium(persists=False)
    store = SpillStore(medium, readers=1)
    held(store, medium)
    put = store.put(records(range(3), SIZE))
    began = time.monotonic()
    store.close(timeout_seconds=0.1)
    assert time.monotonic() - began < 2
    assert done(put) == 0
    assert not medium.closed
    assert store.counters.dropped_closed == 3
    medium.writing.open()
    store._writer.join(SOON)
    assert not store._writer.is_alive()
    assert adds_up(store.counters)


def test_contains_of_a_slow_medium_does_not_wait(medium: DictMedium) -> None:
    slow = DictMedium(contains_blocks=True)
    store = SpillStore(slow, readers=1)
    done(store.put(records(range(2), SIZE)))
    slow.reading.close()
    store.get([key(0)])
    answer = store.contains(keys(range(3)))
    assert not answer.done()
    slow.reading.open()
    assert done(answer) == [True, True, False]
    store.close()


def test_callers_cannot_cancel_what_threads_work_on(store: SpillStore, medium: DictMedium) -> None:
    put = held(store, medium)
    assert not put.cancel()
    medium.writing.open()
    assert done(put) == 1


def test_callbacks_may_use_the_store(store: SpillStore, medium: DictMedium) -> None:
    answers: list[Future[list[bool]]] = []
    put = held(store, medium)
    put.add_done_callback(lambda _: answers.append(store.contains([key(99)])))
    medium.writing.open()
    done(put)
    done(store.flush())
    assert done(answers[0]) == [True]


def test_records_are_written_in_batches(store: SpillStore, medium: DictMedium) -> None:
    held(store, medium)
    for number in range(9):
        store.put([record(number, SIZE)])
    medium.writing.open()
    done(store.flush())
    assert medium.batches == [1, 9]
