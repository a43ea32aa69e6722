"""Stores in processes that are killed, compete, or go on for long."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from qevict_tiers.spill.file import DirectoryInUse
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.records import ReadStatus
from qevict_tiers.spill.store import SpillStore
from spill_cases import SPACE, FailingFile, is_right, key, keys, record, records

SEGMENT_BYTES = 1 << 20
SIZE_BYTES = 16 * SEGMENT_BYTES + 8192
SIZES = (4 << 10, 32 << 10, 200 << 10)
SOON = 60

fork = multiprocessing.get_context("fork")


def open_medium(directory: Path, **options: object) -> LocalMedium:
    arguments = {"segment_bytes": SEGMENT_BYTES, "persist": True} | options
    return LocalMedium(directory, SPACE, SIZE_BYTES, **arguments)  # type: ignore[arg-type]


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def write_for_ever(directory: Path, first: int, begun: threading.Event) -> None:
    """Put, read and delete without end."""
    store = SpillStore(open_medium(directory))
    for start in range(first, first + 10**9, 5):
        numbers = range(start, start + 5)
        store.put([record(number, size_of(number)) for number in numbers]).result()
        store.get(keys(range(start - 40, start - 35))).result()
        store.delete([key(start + 1)]).result()
        begun.set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_and_no_torn_record_is_served(directory: Path) -> None:
    generator = random.Random(4)
    first, recovered = 0, 0
    doubtful: set[int] = set()
    for _ in range(20):
        begun = fork.Event()
        process = fork.Process(target=write_for_ever, args=(directory, first, begun))
        process.start()
        assert begun.wait(SOON)
        time.sleep(generator.uniform(0, 1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        medium = open_medium(directory)
        recovered += medium.counters.recovered
        found = [n for n in range(first + 5000) if medium.contains([key(n)])[0]]
        for number in found:
            (reading,) = medium.read([key(number)], [None])
            assert is_right(reading, number)
            assert reading.payload is not None
            assert reading.payload.nbytes == size_of(number)
        # What was deleted, and known to be, is not there again; the last one may be.
        doubtful |= {number for number in found if number > max(found) - 10}
        assert [n for n in found if n % 5 == 1 and n not in doubtful] == []
        status = medium._file.status()
        assert max(status.st_size, status.st_blocks * 512) <= SIZE_BYTES
        assert medium.check_integrity() == []
        first = max(found, default=first) // 5 * 5 + 100
        # Its space serves again.
        numbers = [number for number in range(first, first + 25) if number % 5 != 1]
        fresh = [record(number, size_of(number)) for number in numbers]
        assert {status.value for status in medium.write(fresh)} == {"written"}
        first += 100
        medium._directory_lock.close()
        medium._file.close()
    assert recovered > 100


def hold(directory: Path, ready: threading.Event, end: threading.Event) -> None:
    medium = open_medium(directory)
    ready.set()
    end.wait(SOON)
    medium.close()


def test_a_second_process_is_refused_and_told_who_has_the_directory(directory: Path) -> None:
    ready, end = fork.Event(), fork.Event()
    process = fork.Process(target=hold, args=(directory, ready, end))
    process.start()
    assert ready.wait(SOON)
    with pytest.raises(DirectoryInUse, match=f"is in use by process {process.pid}: stop it, or"):
        open_medium(directory)
    end.set()
    process.join(SOON)
    open_medium(directory).close()


def test_a_disk_that_stalls_delays_no_call_and_drops_what_it_cannot_take(directory: Path) -> None:
    medium = open_medium(directory, file_type=FailingFile)
    store = SpillStore(medium, queue_bytes=1 << 20)
    store.put(records(range(20), 32 << 10)).result(SOON)
    file = medium._file
    assert isinstance(file, FailingFile)
    file.before_write = file.before_read = partial(time.sleep, 5)
    began = time.monotonic()
    for number in range(20, 220):
        store.put([record(number, 32 << 10)])
        store.contains([key(number)])
    read = store.get(keys(range(20)))
    assert time.monotonic() - began < 4
    assert store.counters.dropped_queue_full > 100
    with pytest.raises(TimeoutError):
        read.result(0.1)
    late = store.get(keys(range(4)), deadline_seconds=0.5)
    file.before_write = file.before_read = lambda: None
    assert all(map(is_right, read.result(SOON), range(20)))
    assert [reading.status for reading in late.result(SOON)] == [ReadStatus.LATE] * 4
    store.flush().result(SOON)
    assert store.put([record(500)]).result(SOON) == 1
    store.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_rounds_leave_nothing_behind(directory: Path) -> None:
    store = SpillStore(open_medium(directory, persist=False))
    process = psutil.Process()

    def rounds(numbers: range) -> tuple[int, int, int]:
        for start in range(numbers.start, numbers.stop, 50):
            some = range(start, start + 50)
            puts = [store.put([record(number, size_of(number))]) for number in some]
            # Half of them are read from the queue, or from the disk, whichever it is by then.
            early = [store.get([key(number)]) for number in some[::2]]
            assert sum(put.result(SOON) for put in puts) == 50
            late = [store.get([key(number)]) for number in some[1::2]]
            for number, reading in zip([*some[::2], *some[1::2]], early + late, strict=True):
                assert is_right(reading.result(SOON)[0], number)
            deletes = [store.delete([key(number)]) for number in some]
            assert not any(store.contains([key(n) for n in some]).result(SOON))
            deletes[-1].result(SOON)
        gc.collect()
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    before = rounds(range(1000))
    after = rounds(range(1000, 11_000))
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8 << 20
    medium = store.medium
    assert isinstance(medium, LocalMedium)
    usage = store.usage()
    assert usage._replace(file_bytes=0) == (0, 0, 0, 0, 0, 0)
    assert usage.file_bytes <= 2 * SEGMENT_BYTES
    assert medium._index == {}
    assert store._pending == {}
    assert len(store._queue) == 0
    assert medium.check_integrity() == []
    store.close()
    assert list(directory.iterdir()) == []
    assert [x.name for x in threading.enumerate() if x.name.startswith("spill-")] == []
