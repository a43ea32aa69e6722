"""The local store against a set of what should be there, with crashes at every write."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.records import ReadStatus, WriteStatus
from spill_cases import MEMORY, SPACE, Crash, CrashingFile, is_right, key, keys, record

SEGMENT_BYTES = 32 << 10
SIZE_BYTES = 6 * SEGMENT_BYTES + 8192
NUMBERS = st.integers(0, 60)
SIZES = (1, 700, 3000, 9000)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class LocalStore(RuleBasedStateMachine):
    """``there``: must be found. ``maybe``: may be found, after a crash. The rest must not."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY))
        self.there: set[int] = set()
        self.maybe: set[int] = set()
        self.medium = self.opened()

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    def opened(self) -> LocalMedium:
        return LocalMedium(
            self.directory,
            SPACE,
            SIZE_BYTES,
            persist=True,
            segment_bytes=SEGMENT_BYTES,
            file_type=CrashingFile,
        )

    def found(self) -> set[int]:
        answers = self.medium.contains(keys(range(61)))
        return {number for number, there in enumerate(answers) if there}

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=12, unique=True))
    def put(self, numbers: list[int]) -> None:
        fresh = [number for number in numbers if number not in self.found()]
        before = self.medium.counters.evicted
        statuses = self.medium.write([record(number, size_of(number)) for number in fresh])
        assert statuses == [WriteStatus.WRITTEN] * len(fresh)
        # What is gone was evicted, and counted; it may be of the same batch.
        gone = (self.there | self.maybe | set(fresh)) - self.found()
        sure = (self.there | set(fresh)) & gone
        assert len(sure) <= self.medium.counters.evicted - before <= len(gone)
        self.there = (self.there | set(fresh)) - gone
        self.maybe -= gone | set(fresh)

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=20))
    def get(self, numbers: list[int]) -> None:
        readings = self.medium.read(keys(numbers), [None] * len(numbers))
        for number, reading in zip(numbers, readings, strict=True):
            if number in self.there:
                assert is_right(reading, number)
            elif number in self.maybe:
                assert reading.status is ReadStatus.MISS or is_right(reading, number)
            else:
                assert reading.status is ReadStatus.MISS

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=12))
    def delete(self, numbers: list[int]) -> None:
        self.medium.delete(keys(numbers))
        self.there -= set(numbers)
        self.maybe -= set(numbers)

    @rule()
    def clear(self) -> None:
        self.medium.clear()
        self.there, self.maybe = set(), set()

    @rule()
    def restart(self) -> None:
        self.medium.close()
        self.medium = self.opened()
        self.maybe &= self.found()

    @rule()
    def killed_between_writes(self) -> None:
        self.abandon()
        self.medium = self.opened()
        self.maybe &= self.found()

    @rule(
        numbers=st.lists(NUMBERS, min_size=1, max_size=12, unique=True),
        writes=st.integers(0, 6),
        part=st.floats(0, 1),
        delete=st.booleans(),
    )
    def killed_in_a_write(self, numbers: list[int], writes: int, part: float, delete: bool) -> None:
        file = self.medium._file
        assert isinstance(file, CrashingFile)
        file.writes_left, file.part = writes, part
        try:
            if delete:
                self.medium.delete(keys(numbers))
            else:
                fresh = [number for number in numbers if number not in self.found()]
                self.medium.write([record(number, size_of(number)) for number in fresh])
        except Crash:
            pass
        # Whatever this may have written, evicted or deleted is in doubt.
        self.maybe |= set(numbers)
        if delete:
            self.there -= set(numbers)
        self.abandon()
        self.medium = self.opened()
        found = self.found()
        assert found <= self.there | self.maybe
        # An eviction may have been under way, a deletion takes nothing else.
        if delete:
            assert self.there <= found
        for number in found:
            assert is_right(self.medium.read([key(number)], [None])[0], number)
        self.there &= found
        self.maybe &= found

    def abandon(self) -> None:
        """What a kill does: descriptors are closed, and nothing else happens."""
        self.medium._directory_lock.close()
        self.medium._file.close()

    @invariant()
    @precondition(lambda self: hasattr(self, "medium"))
    def tables_agree(self) -> None:
        assert self.medium.check_integrity() == []
        assert self.there <= self.found() <= self.there | self.maybe


TestLocalStore = LocalStore.TestCase
TestLocalStore.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_a_machine_that_serves_another_record_is_noticed(directory: Path) -> None:
    medium = LocalMedium(directory, SPACE, SIZE_BYTES, segment_bytes=SEGMENT_BYTES)
    medium.write([record(1), record(2)])
    medium._index[key(1)] = medium._index[key(2)]
    (reading,) = medium.read([key(1)], [None])
    assert reading.status is ReadStatus.CORRUPT
    medium._index.pop(key(2))
    medium.close()
