"""Records whose bytes follow from their number, and files that fail on purpose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from qevict_tiers.spill.file import SpillFile
from qevict_tiers.spill.keys import KeySpace, Kind, SpillKey
from qevict_tiers.spill.records import Contents, Reading, ReadStatus, Record, SpillCounters

MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
"""Where files are quick."""

SPACE = KeySpace(model="tests", dtype="bfloat16", window=8)


def key(number: int) -> SpillKey:
    return SpillKey(hashlib.blake2b(b"%d" % number, digest_size=32).digest())


def payload(number: int, size: int = 1000) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(size)


def record(number: int, size: int = 1000) -> Record:
    return Record(key(number), payload(number, size), Contents(Kind.ORIGINAL, 8, 8 * number))


def records(numbers: Sequence[int], size: int = 1000) -> list[Record]:
    return [record(number, size) for number in numbers]


def keys(numbers: Sequence[int]) -> list[SpillKey]:
    return [key(number) for number in numbers]


def is_right(reading: Reading, number: int) -> bool:
    """Whether a reading is a hit with exactly the record of that number."""
    if reading.status is not ReadStatus.HIT:
        return False
    assert reading.payload is not None
    size = reading.payload.nbytes
    return (
        bytes(reading.payload) == payload(number, size)
        and reading.contents == record(number).contents
    )


def adds_up(counters: SpillCounters) -> bool:
    """Whether each record and each key that came ended in exactly one counter."""
    c = counters
    ends = (c.written, c.duplicate, c.superseded, c.dropped_queue_full, c.dropped_disk_full)
    ends += (c.dropped_write_error, c.dropped_too_large, c.dropped_closed)
    reads = (c.hits, c.misses, c.corrupt, c.read_errors, c.late, c.busy, c.wrong_size)
    return c.put == sum(ends) and c.asked == sum(reads)


class Crash(BaseException):
    """The process is gone: nothing after this is written."""


class CrashingFile(SpillFile):
    """Writes so many times more, then part of a write, then never again."""

    def __init__(self, path: Path, *, create: bool) -> None:
        super().__init__(path, create=create)
        self.writes_left: int | None = None
        self.part = 0.5
        """Of the bytes of the last write."""

    def _count(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise Crash

    def write(self, views: Sequence[bytes | memoryview], offset: int) -> None:
        try:
            self._count()
        except Crash:
            if self.writes_left == -1:
                data = b"".join(views)
                super().write([data[: int(len(data) * self.part)]], offset)
            raise
        super().write(views, offset)

    def truncate(self, size: int) -> None:
        self._count()
        super().truncate(size)


class FailingFile(SpillFile):
    """Calls hooks before each read and write; they may raise, or wait."""

    before_write: Callable[[], None] = staticmethod(lambda: None)
    before_read: Callable[[], None] = staticmethod(lambda: None)

    def write(self, views: Sequence[bytes | memoryview], offset: int) -> None:
        self.before_write()
        super().write(views, offset)

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        self.before_read()
        super().read(views, offset)
