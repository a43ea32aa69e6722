"""The spill store: records are written behind and read by threads of its own.

No call waits for the medium. ``put`` and ``get`` give a ``concurrent.futures.Future`` at once: a
decode step polls ``done()``, whoever has time calls ``result(timeout)``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.medium import Medium, OneLine
from qevict_tiers.spill.records import (
    Payload,
    Reading,
    ReadStatus,
    Record,
    SpillCounters,
    SpillUsage,
    WriteStatus,
    as_bytes,
)

__all__ = ["SpillStore"]

logger = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
"""Payload bytes that are written in one call of the medium, unless one record is larger."""

BATCH_RECORDS = 256

PART_KEYS = 4
"""At least so many keys of a ``get`` are read by one reader, if there are as many."""

_WRITE_COUNTERS = {
    WriteStatus.WRITTEN: "written",
    WriteStatus.DISK_FULL: "dropped_disk_full",
    WriteStatus.TOO_LARGE: "dropped_too_large",
    WriteStatus.ERROR: "dropped_write_error",
}

_READ_COUNTERS = {
    ReadStatus.HIT: "hits",
    ReadStatus.MISS: "misses",
    ReadStatus.CORRUPT: "corrupt",
    ReadStatus.ERROR: "read_errors",
    ReadStatus.LATE: "late",
    ReadStatus.BUSY: "busy",
    ReadStatus.WRONG_SIZE: "wrong_size",
}


@dataclass(eq=False, slots=True)
class _Group:
    """The records of one ``put``; its future is done when none is left."""

    future: Future[int]
    left: int
    stored: int = 0

    def resolve(self) -> None:
        self.future.set_result(self.stored)


@dataclass(eq=False, slots=True)
class _Put:
    """One record on its way to the medium."""

    record: Record
    size: int
    group: _Group
    readers: int = 0
    """Reads that copy from the caller's buffer just now."""
    stored: bool | None = None
    """How it ended, if it has."""


@dataclass(eq=False, slots=True)
class _Delete:
    keys: Sequence[SpillKey] | None
    """None: everything."""
    future: Future[None]

    def resolve(self) -> None:
        self.future.set_result(None)


@dataclass(eq=False, slots=True)
class _Flush:
    future: Future[None]

    def resolve(self) -> None:
        self.future.set_result(None)


class _Wanted(NamedTuple):
    """One key of a ``get``."""

    place: int
    key: SpillKey
    into: memoryview | None
    queued: _Put | None
    """The record, if it is on its way to the medium still."""


@dataclass(eq=False, slots=True)
class _Reads:
    """One ``get``; its future is done when no part of it is left."""

    future: Future[list[Reading]]
    readings: list[Reading]
    deadline: float
    parts: int = 0


class SpillStore:
    """Put, get, contains and delete, in batches, over one medium; bounded and never waiting.

    ``queue_bytes`` bounds the payloads that wait to be written: what comes beyond is dropped and
    counted. ``max_reads`` bounds the keys being read: what is asked beyond is BUSY.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        queue_bytes: int = 64 << 20,
        max_reads: int = 1024,
        readers: int = 4,
    ) -> None:
        self.medium = medium
        self.counters: SpillCounters = medium.counters
        self.queue_bytes = queue_bytes
        self.max_reads = max_reads
        # Held for looks at tables only, never while the medium works or bytes are copied.
        self._lock = threading.Condition()
        self._queue: deque[_Put | _Delete | _Flush] = deque()
        # The last change of each key that the medium doesn't know of yet, and how many times
        # everything was deleted that it doesn't know of.
        self._pending: dict[SpillKey, _Put | _Delete] = {}
        self._clears = 0
        self._queued_bytes = 0
        self._queued_records = 0
        self._reading = 0
        self._closed = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._warn = OneLine()
        self._writer = threading.Thread(target=self._write_behind, name="spill-writer", daemon=True)
        self._readers = [
            threading.Thread(target=self._run_jobs, name=f"spill-reader-{n}", daemon=True)
            for n in range(readers)
        ]
        for thread in (self._writer, *self._readers):
            thread.start()

    # For callers. None of these waits for the medium, but ``close``.

    def put(self, records: Sequence[Record]) -> Future[int]:
        """Write records behind. The result is how many of them the store has then.

        The payloads belong to the store, and must not change, until the future is done. A record
        whose key is there already is not written again.

        Raises ``ValueError`` for a payload that is not contiguous bytes in host memory.
        """
        sized = [(record, as_bytes(record.payload).nbytes) for record in records]
        group = _Group(_future(), len(sized))
        counts = Counter(put=len(sized))
        with self._lock:
            for record, size in sized:
                refusal = self._refusal(record.key, size)
                if refusal is None:
                    self._enqueue(_Put(record, size, group))
                else:
                    counts[refusal] += 1
                    group.left -= 1
                    group.stored += refusal == "duplicate"
            done = group.left == 0
            self._lock.notify_all()
        self.counters.add(**counts)
        if done:
            group.resolve()
        return group.future

    def get(
        self,
        keys: Sequence[SpillKey],
        into: Sequence[Payload | None] | None = None,
        deadline_seconds: float | None = None,
    ) -> Future[list[Reading]]:
        """Read records; one reading each, in the order of the keys.

        With ``into``, a payload is read into the writable buffer given for its key, which must
        have its size, and which belongs to the store until the future is done. What has not been
        begun after ``deadline_seconds`` is LATE.
        """
        now = time.monotonic()
        deadline = float("inf") if deadline_seconds is None else now + deadline_seconds
        buffers = [None if x is None else as_bytes(x) for x in into or [None] * len(keys)]
        reads = _Reads(_future(), [Reading(ReadStatus.MISS)] * len(keys), deadline)
        wanted = []
        with self._lock:
            for place, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                if self._deleted(key):
                    continue
                if self._closed or self._reading == self.max_reads:
                    status = ReadStatus.ERROR if self._closed else ReadStatus.BUSY
                    reads.readings[place] = Reading(status)
                    continue
                change = self._pending.get(key)
                queued = change if isinstance(change, _Put) else None
                if queued:
                    queued.readers += 1
                wanted.append(_Wanted(place, key, buffer, queued))
                self._reading += 1
        # A part for each reader, of neighbouring keys: those lie together.
        size = max(-(-len(wanted) // len(self._readers)), PART_KEYS)
        parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        reads.parts = len(parts)
        self.counters.add(asked=len(keys))
        asked = {one.place for one in wanted}
        self._count_readings([r for i, r in enumerate(reads.readings) if i not in asked])
        if not parts:
            reads.future.set_result(reads.readings)
        for part in parts:
            self._jobs.put(partial(self._read_part, reads, part))
        return reads.future

    def contains(self, keys: Sequence[SpillKey]) -> Future[list[bool]]:
        """Which of the keys the store has, those on their way to the medium included.

        Done at once where the medium has an index in memory.
        """
        future: Future[list[bool]] = _future()
        if self.medium.contains_blocks:
            self._jobs.put(partial(self._answer_contains, list(keys), future))
        else:
            self._answer_contains(keys, future)
        return future

    def delete(self, keys: Sequence[SpillKey]) -> Future[None]:
        """Forget these: from now on they are not found, and done when the medium has done it."""
        return self._delete(list(keys))

    def clear(self) -> Future[None]:
        """Forget everything, as ``delete`` does."""
        return self._delete(None)

    def flush(self) -> Future[None]:
        """Done when everything that was put or deleted before has reached the medium."""
        flush = _Flush(_future())
        with self._lock:
            if self._closed:
                flush.resolve()
            else:
                self._queue.append(flush)
            self._lock.notify_all()
        return flush.future

    def usage(self) -> SpillUsage:
        """What the store holds now."""
        with self._lock:
            waiting = (self._queued_records, self._queued_bytes, self._reading)
        return SpillUsage(*self.medium.usage(), *waiting)

    def close(self, timeout_seconds: float = 10) -> None:
        """End the threads and let go of the medium; nothing is taken any more.

        What waits to be written is written if the medium persists, for up to ``timeout_seconds``,
        and dropped otherwise. A medium that hangs is left as it is.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            dropped = [] if self.medium.persists else self._drop_queue()
            self._lock.notify_all()
        _resolve(dropped)
        until = time.monotonic() + timeout_seconds
        self._writer.join(timeout_seconds)
        for _ in self._readers:
            self._jobs.put(None)
        for thread in self._readers:
            thread.join(max(until - time.monotonic(), 0.1))
        if self._writer.is_alive() or any(thread.is_alive() for thread in self._readers):
            with self._lock:
                dropped = self._drop_queue()
            _resolve(dropped)
            self._warn("hangs", "the spill store's disk hangs; it is left as it is")
        else:
            self.medium.close()

    # Under the lock.

    def _refusal(self, key: SpillKey, size: int) -> str | None:
        """The counter of why a record is not queued, if so."""
        if self._closed:
            return "dropped_closed"
        if size > self.queue_bytes:
            return "dropped_too_large"
        if isinstance(self._pending.get(key), _Put):
            return "duplicate"
        if not self._deleted(key) and not self.medium.contains_blocks:
            (there,) = self.medium.contains([key])
            if there:
                return "duplicate"
        if self._queued_bytes + size > self.queue_bytes:
            return "dropped_queue_full"
        return None

    def _deleted(self, key: SpillKey) -> bool:
        """Whether the medium may have a record that counts as deleted."""
        change = self._pending.get(key)
        return isinstance(change, _Delete) or (change is None and self._clears > 0)

    def _enqueue(self, change: _Put) -> None:
        self._pending[change.record.key] = change
        self._queue.append(change)
        self._queued_bytes += change.size
        self._queued_records += 1

    def _drop_queue(self) -> list[_Group | _Delete | _Flush]:
        """Give up on all that waits; what is to be resolved without the lock."""
        waiting = list(self._queue)
        self._queue.clear()
        puts = [change for change in waiting if isinstance(change, _Put)]
        self.counters.add(dropped_closed=len(puts))
        groups = [self._finish(put, stored=False) for put in puts]
        others = [change for change in waiting if not isinstance(change, _Put)]
        return [group for group in groups if group] + others

    def _finish(self, put: _Put, stored: bool) -> _Group | None:
        """A record has left the queue; its group, if that is done, to be resolved without the
        lock. A buffer that is being read is not the caller's yet."""
        put.stored = stored
        self._queued_bytes -= put.size
        self._queued_records -= 1
        if self._pending.get(put.record.key) is put:
            del self._pending[put.record.key]
        return self._released(put) if put.readers == 0 else None

    def _released(self, put: _Put) -> _Group | None:
        group = put.group
        group.left -= 1
        group.stored += bool(put.stored)
        return group if group.left == 0 else None

    # The writer's thread.

    def _delete(self, keys: list[SpillKey] | None) -> Future[None]:
        delete = _Delete(keys, _future())
        with self._lock:
            if self._closed:
                delete.resolve()
                return delete.future
            if keys is None:
                self._clears += 1
                self._pending.clear()
            else:
                self._pending.update(dict.fromkeys(keys, delete))
            self._queue.append(delete)
            self._lock.notify_all()
        return delete.future

    def _write_behind(self) -> None:
        while (work := self._next_work()) is not None:
            if isinstance(work, list):
                self._write_batch(work)
            elif isinstance(work, _Delete):
                self._apply_delete(work)
            else:
                work.resolve()

    def _next_work(self) -> list[_Put] | _Delete | _Flush | None:
        """Records to write together, or one other thing to do; None once closed."""
        with self._lock:
            while not self._queue:
                if self._closed:
                    return None
                self._lock.wait()
            first = self._queue.popleft()
            if not isinstance(first, _Put):
                return first
            batch, batch_bytes = [first], first.size
            while self._queue and len(batch) < BATCH_RECORDS:
                change = self._queue[0]
                if not isinstance(change, _Put) or batch_bytes + change.size > BATCH_BYTES:
                    break
                self._queue.popleft()
                batch.append(change)
                batch_bytes += change.size
            return batch

    def _write_batch(self, batch: list[_Put]) -> None:
        began = time.monotonic_ns()
        with self._lock:
            wanted = [put for put in batch if self._pending.get(put.record.key) is put]
        try:
            statuses = self.medium.write([put.record for put in wanted])
        except Exception as error:  # a thread's end would silently end all writing
            self._warn("write", "spilling fails, windows are dropped instead: %r", error)
            statuses = [WriteStatus.ERROR] * len(wanted)
        written = dict(zip(map(id, wanted), statuses, strict=True))
        counts = Counter(_WRITE_COUNTERS[status] for status in statuses)
        counts["superseded"] = len(batch) - len(wanted)
        counts["write_nanoseconds"] = time.monotonic_ns() - began
        stored = [written.get(id(put)) is WriteStatus.WRITTEN for put in batch]
        counts["written_bytes"] = sum(
            put.size for put, there in zip(batch, stored, strict=True) if there
        )
        with self._lock:
            done = [self._finish(put, there) for put, there in zip(batch, stored, strict=True)]
        self.counters.add(**counts)
        _resolve(done)

    def _apply_delete(self, delete: _Delete) -> None:
        try:
            if delete.keys is None:
                self.medium.clear()
            else:
                self.medium.delete(delete.keys)
        except Exception as error:
            self._warn("delete", "records of the spill store could not be deleted: %r", error)
        with self._lock:
            if delete.keys is None:
                self._clears -= 1
            for key in delete.keys or ():
                if self._pending.get(key) is delete:
                    del self._pending[key]
        delete.resolve()

    # The readers' threads.

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _answer_contains(self, keys: Sequence[SpillKey], future: Future[list[bool]]) -> None:
        with self._lock:
            known = [
                False if self._deleted(key) else (key in self._pending) or None for key in keys
            ]
        unknown = [key for key, answer in zip(keys, known, strict=True) if answer is None]
        try:
            answers = iter(self.medium.contains(unknown))
        except Exception as error:
            self._warn("contains", "the spill store can't be asked what it has: %r", error)
            answers = iter([False] * len(unknown))
        future.set_result([next(answers) if answer is None else answer for answer in known])

    def _read_part(self, reads: _Reads, part: list[_Wanted]) -> None:
        began = time.monotonic_ns()
        if time.monotonic() > reads.deadline:
            readings = [Reading(ReadStatus.LATE)] * len(part)
        else:
            readings = self._readings(part)
        self._count_readings(readings)
        self.counters.add(
            read_nanoseconds=time.monotonic_ns() - began,
            hits_in_queue=sum(
                one.queued is not None and reading.status is ReadStatus.HIT
                for one, reading in zip(part, readings, strict=True)
            ),
        )
        freed: list[_Group | None] = []
        with self._lock:
            for one, reading in zip(part, readings, strict=True):
                reads.readings[one.place] = reading
                if one.queued:
                    one.queued.readers -= 1
                    if one.queued.readers == 0 and one.queued.stored is not None:
                        freed.append(self._released(one.queued))
            self._reading -= len(part)
            reads.parts -= 1
            done = reads.parts == 0
        _resolve(freed)
        if done:
            reads.future.set_result(reads.readings)

    def _readings(self, part: list[_Wanted]) -> list[Reading]:
        of_medium = [one for one in part if one.queued is None]
        try:
            found = self.medium.read(
                [one.key for one in of_medium], [one.into for one in of_medium]
            )
        except Exception as error:
            self._warn("read", "the spill store can't be read: %r", error)
            found = [Reading(ReadStatus.ERROR)] * len(of_medium)
        answers = iter(found)
        return [
            next(answers) if one.queued is None else _copied(one.queued.record, one.into)
            for one in part
        ]

    def _count_readings(self, readings: Sequence[Reading]) -> None:
        counts = Counter(_READ_COUNTERS[reading.status] for reading in readings)
        hits = [reading.payload for reading in readings if reading.payload is not None]
        self.counters.add(**counts, hit_bytes=sum(payload.nbytes for payload in hits))


def _future() -> Future[Any]:
    """A future that can't be cancelled: its thread would find no place for the result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _resolve(done: Sequence[_Group | _Delete | _Flush | None]) -> None:
    """Make futures done; not under the lock, since callbacks run here."""
    for one in done:
        if one is not None:
            one.resolve()


def _copied(record: Record, into: memoryview | None) -> Reading:
    """A reading of a record that waits to be written; its buffer is the caller's soon again."""
    payload = as_bytes(record.payload)
    if into is None:
        into = memoryview(bytearray(payload))
    elif into.nbytes != payload.nbytes:
        return Reading(ReadStatus.WRONG_SIZE)
    else:
        into[:] = payload
    return Reading(ReadStatus.HIT, into, record.contents)
