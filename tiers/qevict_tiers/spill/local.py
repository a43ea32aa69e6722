"""Records on a local disk: one file per model, divided into segments that are written in order.

When the bytes are used up, the oldest segment makes room: what was read since it was written is
moved, hottest first, to the segment being written, up to a quarter of it; the rest is evicted.
Space is used again in place. ``docs/spill.md`` describes the file, its recovery and the order.
"""

from __future__ import annotations

import errno
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qevict_tiers.spill.file import DirectoryLock, SpillFile
from qevict_tiers.spill.format import (
    BLOCK_BYTES,
    INDEX_ENTRY_BYTES,
    INDEX_FIXED_BYTES,
    INDEX_LENGTH_BYTES,
    PREFIX_BYTES,
    RECORD_ALIGNMENT,
    RECORD_HEADER_BYTES,
    FileHeader,
    FormatError,
    Frame,
    IndexEntry,
    RecordHeader,
    SegmentHeader,
    SegmentIndex,
    aligned,
    checksum,
    frame_bytes,
    is_leftover,
)
from qevict_tiers.spill.keys import KeySpace, SpillKey
from qevict_tiers.spill.medium import Medium, OneLine
from qevict_tiers.spill.records import (
    Contents,
    Reading,
    ReadStatus,
    Record,
    SpillCounters,
    WriteStatus,
    as_bytes,
)

__all__ = ["LocalMedium", "segment_bytes_for"]

logger = logging.getLogger(__name__)

MIN_SEGMENTS = 4
MOVED_SHARE = 4
"""One part in so many of a segment may be records moved from the one that makes room for it."""
READ_BYTES = 8 << 20
"""Neighbouring records are read together up to so many bytes."""
SCAN_BYTES = 1 << 20
_SUFFIX, _NAMES = ".spill", 8
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def segment_bytes_for(size_bytes: int) -> int:
    """Segments of 8 to 256 MiB, 64 of them if possible and 1,024 at most."""
    wish = min(max(size_bytes // 64, 8 << 20), 256 << 20)
    return aligned(max(wish, size_bytes // 1024))


@dataclass(eq=False, slots=True)
class _Segment:
    """One use of a region of the file, from its header to its eviction."""

    region: int
    start: int
    """Where it begins in the file."""
    generation: int
    sequence: int
    end: int = BLOCK_BYTES
    """Where the next record goes, from the start."""
    keys: list[SpillKey] = field(default_factory=list)
    """Of all records ever written into it, in order."""
    live: int = 0
    live_bytes: int = 0
    indexed: bool = False
    """Whether its index is on disk, and right."""


@dataclass(eq=False, slots=True)
class _Entry:
    """Where a record lies, from the start of its segment."""

    segment: _Segment
    offset: int
    header_bytes: int
    payload_bytes: int
    used: int
    """When it was written or read last, in ticks."""
    read: bool = False
    """Whether it was read since it was written to this segment."""

    @property
    def start(self) -> int:
        return self.segment.start + self.offset

    @property
    def size(self) -> int:
        return aligned(self.header_bytes + self.payload_bytes, RECORD_ALIGNMENT)

    @property
    def padding_bytes(self) -> int:
        return self.size - self.header_bytes - self.payload_bytes


class _Wanted(NamedTuple):
    """A record that is being read."""

    entry: _Entry
    key: SpillKey
    into: memoryview | None = None
    place: int = 0


class _Item(NamedTuple):
    """A record that is being written, or written again."""

    key: SpillKey
    payload: memoryview
    contents: Contents
    moved: _Entry | None = None
    """Where it lies now, if it is moved."""

    @property
    def room(self) -> int:
        """At most the bytes that it takes in a segment, its entry in the index included."""
        size = aligned(RECORD_HEADER_BYTES + self.payload.nbytes, RECORD_ALIGNMENT)
        return size + INDEX_ENTRY_BYTES


class LocalMedium(Medium):
    """The records of one ``KeySpace`` in a directory of which it has the only use.

    ``size_bytes`` bounds the file, headers and indexes included. With ``persist``, records are
    there again after a restart; without, the file is removed at start and close.

    Raises ``ValueError`` for a size of fewer than four segments, ``DirectoryInUse``, and
    ``OSError`` where the directory can't be used at all.
    """

    contains_blocks = False

    def __init__(
        self,
        directory: Path,
        space: KeySpace,
        size_bytes: int,
        *,
        persist: bool = False,
        segment_bytes: int | None = None,
        file_type: type[SpillFile] = SpillFile,
    ) -> None:
        self.directory = directory
        self.persists = persist
        self.counters = SpillCounters()
        self._fingerprint = space.fingerprint
        self._size_bytes = size_bytes
        self._segment_bytes = aligned(segment_bytes or segment_bytes_for(size_bytes))
        self._file_type = file_type
        self._warn = OneLine()
        self._rejected: set[Path] = set()
        if self._num_regions < MIN_SEGMENTS:
            raise ValueError(
                f"--kv-tiering-ssd-size must be at least {MIN_SEGMENTS} segments of "
                f"{self._segment_bytes} bytes, got {size_bytes}"
            )
        # Held for looks at tables only. The writer's thread changes them; a reader notes uses
        # and takes out what it found corrupted.
        self._lock = threading.Lock()
        self._index: dict[SpillKey, _Entry] = {}
        self._segments: dict[int, _Segment] = {}
        self._active: _Segment | None = None
        self._payload_bytes = 0
        self._tick = 0
        self._sequence = 0
        self._directory_lock = self._own_directory()
        self._file = self._open()
        if persist:
            self._recover()

    # What the store calls.

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        self._watch_file()
        items = [_Item(key, as_bytes(payload), contents) for key, payload, contents in records]
        return self._append(items)

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        wanted = []
        with self._lock:
            file = self._file
            for place, (key, buffer) in enumerate(zip(keys, into, strict=True)):
                entry = self._index.get(key)
                if entry is not None:
                    self._tick += 1
                    entry.used, entry.read = self._tick, True
                    wanted.append(_Wanted(entry, key, buffer, place))
        readings = [Reading(ReadStatus.MISS)] * len(keys)
        for run in _runs(wanted):
            for one, reading in zip(run, self._read_run(file, run), strict=True):
                readings[one.place] = reading
        return readings

    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def delete(self, keys: Sequence[SpillKey]) -> None:
        gone = [entry for key in keys if (entry := self._forget(key)) is not None]
        self.counters.add(deleted=len(gone))
        for entry in gone:
            self._erase(entry)
        if not self._index and self._file.status().st_size > self._start_of(1):
            self._start_over()

    def clear(self) -> None:
        self.counters.add(deleted=len(self._index))
        self._start_over()

    def close(self) -> None:
        if self.persists:
            for segment in self._segments.values():
                self._seal(segment)
        else:
            try:
                self._file.unlink()
            except OSError as error:
                self._warn("erase", "%s can't be removed: %s", self._file.path, error)
        self._directory_lock.close()
        self._file.close()

    def usage(self) -> tuple[int, int, int]:
        with self._lock:
            return len(self._index), self._payload_bytes, self._file.allocated_bytes()

    # Reading.

    def _read_run(self, file: SpillFile, run: Sequence[_Wanted]) -> list[Reading]:
        """Read records that follow each other in the file, with one call."""
        headers = [memoryview(bytearray(one.entry.header_bytes)) for one in run]
        payloads = [_buffer(one.entry.payload_bytes, one.into) for one in run]
        views: list[memoryview] = []
        for one, header, payload in zip(run, headers, payloads, strict=True):
            padding = memoryview(bytearray(one.entry.padding_bytes))
            views += (header, payload, padding)
        try:
            file.read(views, run[0].entry.start)
        except OSError as error:
            self._warn("read", "spilled windows can't be read from %s: %s", file.path, error)
            return [Reading(ReadStatus.ERROR)] * len(run)
        return [
            self._verified(one, header, payload)
            for one, header, payload in zip(run, headers, payloads, strict=True)
        ]

    def _verified(self, one: _Wanted, header: memoryview, payload: memoryview) -> Reading:
        contents = _verify(header, payload, one.key, one.entry.segment.generation)
        if contents is not None:
            if one.into is not None and one.into is not payload:
                return Reading(ReadStatus.WRONG_SIZE)
            return Reading(ReadStatus.HIT, payload, contents)
        # Overwritten since it was looked up, or damaged.
        if self._forget(one.key, one.entry) is None:
            return Reading(ReadStatus.MISS)
        self._warn("corrupt", "a spilled window in %s is damaged and not used", self._file.path)
        return Reading(ReadStatus.CORRUPT)

    def _forget(self, key: SpillKey, expected: _Entry | None = None) -> _Entry | None:
        """Take a record out of the tables; None where it isn't there, or not as expected."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None or (expected is not None and entry is not expected):
                return None
            del self._index[key]
            self._detach(entry)
            return entry

    def _detach(self, entry: _Entry) -> None:
        entry.segment.live -= 1
        entry.segment.live_bytes -= entry.size
        self._payload_bytes -= entry.payload_bytes

    # Writing.

    def _append(self, items: Sequence[_Item]) -> list[WriteStatus]:
        """Write records into the active segment, and into new ones as they fill up."""
        statuses: list[WriteStatus] = []
        while len(statuses) < len(items):
            rest = items[len(statuses) :]
            fitting = self._fitting(rest, self._segment_bytes - INDEX_FIXED_BYTES)
            try:
                if rest[0].room > self._largest_room:
                    statuses.append(WriteStatus.TOO_LARGE)
                elif fitting:
                    statuses += self._write_run(rest[:fitting])
                else:
                    self._begin_segment()
            except OSError as error:
                statuses += [self._failure(error)] * len(rest)
        return statuses

    @property
    def _movable_bytes(self) -> int:
        """What may be moved into a segment when it begins."""
        return self._segment_bytes // MOVED_SHARE

    @property
    def _largest_room(self) -> int:
        """What a record may take, so that any segment has room for it when it begins."""
        return self._segment_bytes - INDEX_FIXED_BYTES - 2 * BLOCK_BYTES - self._movable_bytes

    def _fitting(self, items: Sequence[_Item], stop: int) -> int:
        """How many of the records, from the first, fit into the active segment before ``stop``."""
        if self._active is None:
            return 0
        room = stop - self._active.end - len(self._active.keys) * INDEX_ENTRY_BYTES
        for count, item in enumerate(items):
            room -= item.room
            if room < 0 or item.room > self._largest_room:
                return count
        return len(items)

    def _write_run(self, items: Sequence[_Item]) -> list[WriteStatus]:
        """Write records behind each other, one by one where not all of them can be."""
        try:
            self._write_together(items)
        except OSError as error:
            if len(items) == 1:
                return [self._failure(error)]
            return [status for item in items for status in self._write_run([item])]
        return [WriteStatus.WRITTEN] * len(items)

    def _write_together(self, items: Sequence[_Item]) -> None:
        segment = self._active
        assert segment is not None
        views: list[bytes | memoryview] = []
        entries: list[_Entry] = []
        offset = segment.end
        for key, payload, contents, _ in items:
            header = RecordHeader(
                segment.generation, key, payload.nbytes, checksum(payload), contents
            ).packed()
            entry = _Entry(segment, offset, len(header), payload.nbytes, used=0)
            entries.append(entry)
            views += (header, payload, bytes(entry.padding_bytes))
            offset += entry.size
        # Whole blocks, so that nothing has to be read before it is written over.
        end = min(aligned(offset), self._segment_bytes)
        views.append(bytes(end - offset))
        self._write(views, segment.start + segment.end)
        with self._lock:
            segment.end = end
            for item, entry in zip(items, entries, strict=True):
                self._attach(item, entry)

    def _attach(self, item: _Item, entry: _Entry) -> None:
        """Enter a written record, unless one that was moved has been forgotten meanwhile."""
        segment = entry.segment
        segment.keys.append(item.key)
        if item.moved is None:
            self._tick += 1
            entry.used = self._tick
        elif self._index.get(item.key) is item.moved:
            entry.used = item.moved.used
        else:
            return
        self._enter(item.key, entry)

    def _enter(self, key: SpillKey, entry: _Entry) -> None:
        old = self._index.get(key)
        if old is not None:
            self._detach(old)
        self._index[key] = entry
        entry.segment.live += 1
        entry.segment.live_bytes += entry.size
        self._payload_bytes += entry.payload_bytes

    def _write(self, views: Sequence[bytes | memoryview], offset: int) -> None:
        self._file.write(views, offset)
        self.counters.add(medium_written_bytes=sum(len(view) for view in views))

    def _failure(self, error: OSError) -> WriteStatus:
        if error.errno in _DISK_FULL:
            self._warn(
                "full",
                "the disk of %s is full: windows are dropped that would be spilled",
                self.directory,
            )
            return WriteStatus.DISK_FULL
        self._warn("write", "windows can't be spilled to %s: %s", self.directory, error)
        return WriteStatus.ERROR

    # Segments.

    @property
    def _num_regions(self) -> int:
        # The file's header and the lock take a block each.
        return (self._size_bytes - 2 * BLOCK_BYTES) // self._segment_bytes

    def _start_of(self, region: int) -> int:
        return BLOCK_BYTES + region * self._segment_bytes

    def _begin_segment(self) -> None:
        """Seal the active segment and begin another one, for which the oldest may make room.

        One region is free at any time, so that what is moved has a place to go.
        """
        if self._active is not None:
            self._seal(self._active)
            self._active = None
        free = self._free_regions()
        region = free[0]
        segment = _Segment(region, self._start_of(region), secrets.randbits(63), self._sequence + 1)
        header = SegmentHeader(self._fingerprint, region, segment.generation, segment.sequence)
        if self._file.status().st_size < BLOCK_BYTES:
            head = FileHeader(self._fingerprint, self._segment_bytes, self.persists)
            self._write([head.packed()], 0)
        self._write([header.packed()], segment.start)
        self._sequence = segment.sequence
        self._segments[region] = self._active = segment
        if len(free) == 1:
            self._make_room()

    def _free_regions(self) -> list[int]:
        return [region for region in range(self._num_regions) if region not in self._segments]

    def _make_room(self) -> None:
        """Free a region: the emptiest, if all its records can be moved, or the oldest."""
        sealed = [x for x in self._segments.values() if x is not self._active]
        movable = self._movable_bytes if self._active else 0
        victim = min(sealed, key=lambda segment: segment.live_bytes)
        if victim.live_bytes > movable:
            victim = min(sealed, key=lambda segment: segment.sequence)
        with self._lock:
            live = self._live(victim)
        keep = live if victim.live_bytes <= movable else _hottest(live, movable)
        self._move(keep)
        evicted = [x for key, x in live if self._forget(key, x) is not None]
        self.counters.add(
            evicted=len(evicted), evicted_bytes=sum(entry.payload_bytes for entry in evicted)
        )
        self._retire(victim)

    def _live(self, segment: _Segment) -> list[tuple[SpillKey, _Entry]]:
        """A segment's records that are still in the index, in the order of writing."""
        entries = {key: self._index.get(key) for key in segment.keys}
        return [(k, entry) for k, entry in entries.items() if entry and entry.segment is segment]

    def _move(self, keep: Sequence[tuple[SpillKey, _Entry]]) -> None:
        """Write records again, into the active segment, as far as they are sound and fit."""
        items: list[_Item] = []
        size = 0
        for run in _runs([_Wanted(entry, key) for key, entry in keep]):
            for one, reading in zip(run, self._read_run(self._file, run), strict=True):
                self.counters.add(damaged=reading.status is ReadStatus.CORRUPT)
                if reading.payload is not None and reading.contents is not None:
                    items.append(_Item(one.key, reading.payload, reading.contents, one.entry))
                    size += one.entry.size
            if size > READ_BYTES:
                self._write_moved(items)
                items, size = [], 0
        self._write_moved(items)

    def _write_moved(self, items: Sequence[_Item]) -> None:
        items = items[: self._fitting(items, BLOCK_BYTES + self._movable_bytes)]
        if not items:
            return
        for item, status in zip(items, self._write_run(items), strict=True):
            if status is WriteStatus.WRITTEN:
                self.counters.add(moved=1, moved_bytes=item.payload.nbytes)

    def _retire(self, segment: _Segment) -> None:
        """Free a segment's region, on disk too."""
        self._segments.pop(segment.region, None)
        if not self._zero(segment.start, PREFIX_BYTES):
            self.counters.add(reclaim_errors=1)

    def _seal(self, segment: _Segment) -> None:
        """Write a segment's index at its end."""
        with self._lock:
            entries = [
                IndexEntry(key, x.offset, x.header_bytes, x.payload_bytes, x.used, x.read)
                for key, x in self._live(segment)
            ]
        packed = SegmentIndex(segment.generation, entries).packed()
        try:
            self._write([packed], segment.start + self._segment_bytes - len(packed))
            segment.indexed = True
        except OSError as error:
            # It will be scanned instead.
            self._failure(error)

    def _erase(self, entry: _Entry) -> None:
        """Write down that a record is gone, in the index first: it must not name what isn't."""
        segment = entry.segment
        if segment.live == 0 and segment is not self._active:
            if segment.region in self._segments:
                self._retire(segment)
            return
        if segment.indexed:
            end = segment.start + self._segment_bytes
            segment.indexed = not self._zero(end - INDEX_LENGTH_BYTES, INDEX_LENGTH_BYTES)
        if segment.indexed or not self._zero(entry.start, PREFIX_BYTES):
            self.counters.add(reclaim_errors=1)

    def _zero(self, offset: int, size: int) -> bool:
        try:
            self._write([bytes(size)], offset)
        except OSError as error:
            self._warn("erase", "%s can't be changed: %s", self._file.path, error)
            return False
        return True

    def _start_over(self) -> None:
        """Forget all records and give the disk its bytes back."""
        segments = list(self._segments.values())
        self._forget_all()
        for segment in segments:
            self._retire(segment)
        try:
            self._file.truncate(0)
        except OSError as error:
            self._warn("erase", "%s can't be changed: %s", self._file.path, error)

    def _forget_all(self) -> None:
        with self._lock:
            self._index.clear()
            self._segments.clear()
            self._payload_bytes = 0
        self._active = None

    # The directory and what is found there.

    def _own_directory(self) -> DirectoryLock:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DirectoryLock(self.directory)

    def _open(self) -> SpillFile:
        """The file of this key space: what is there of a persistent one, or an empty one."""
        name = self._fingerprint.hex()[:16]
        names = [name + _SUFFIX, *(f"{name}-{n}{_SUFFIX}" for n in range(1, _NAMES))]
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            self._look_at(path, own=path.name in names)
        for path in map(self.directory.joinpath, names):
            try:
                return self._file_type(path, create=True)
            except OSError as error:
                self._reject(path, error)
        raise PermissionError(f"--kv-tiering-ssd-dir {self.directory} has no file that can be used")

    def _look_at(self, path: Path, own: bool) -> None:
        """Remove what a store without persistence left when it was killed, or this one would not
        use; count and leave what belongs to others."""
        try:
            file = self._file_type(path, create=False)
            head = _read_block(file, 0)
            if is_leftover(head) or (own and not self.persists):
                file.unlink()
            elif not own:
                raise FormatError("it belongs to another model or setting")
        except (OSError, FormatError) as error:
            self._reject(path, error)

    def _reject(self, path: Path, error: Exception) -> None:
        if path in self._rejected:
            return
        self._rejected.add(path)
        self.counters.add(rejected_files=1)
        logger.warning("%s is left alone: %s", path, error)

    def _watch_file(self) -> None:
        """Begin anew where somebody removed the file, so that its bytes are given back."""
        if self._file.status().st_nlink:
            return
        self._warn("lost", "%s was removed: the spill store begins anew", self._file.path)
        self.counters.add(lost=len(self._index))
        self._forget_all()
        if not self._directory_lock.in_place():
            self._directory_lock = self._own_directory()
        self._file = self._open()

    # Recovery.

    def _recover(self) -> None:
        """Enter what is sound in the file; make the rest free."""
        size = self._file.status().st_size
        try:
            if not self._adopt(FileHeader.unpacked(_read_block(self._file, 0))):
                self._start_over()
                return
        except FormatError as error:
            if size:
                self._reject(self._file.path, error)
                self._start_over()
            return
        self._file.truncate(min(size, self._start_of(self._num_regions)))
        regions = range(min(-(-size // self._segment_bytes), self._num_regions))
        found = [segment for region in regions if (segment := self._find_segment(region))]
        for segment in sorted(found, key=lambda segment: segment.sequence):
            self._segments[segment.region] = segment
            self._sequence = segment.sequence
            if not self._load_index(segment):
                self._scan(segment)
                self._seal(segment)
        self.counters.add(recovered=len(self._index))
        if not self._free_regions():
            self._make_room()

    def _adopt(self, header: FileHeader) -> bool:
        """Take over a file's segment size; False where its bound leaves too few of them."""
        if header.fingerprint != self._fingerprint:
            raise FormatError("it belongs to another model or setting")
        own, self._segment_bytes = self._segment_bytes, header.segment_bytes
        if self._num_regions >= MIN_SEGMENTS:
            return True
        self._segment_bytes = own
        return False

    def _find_segment(self, region: int) -> _Segment | None:
        start = self._start_of(region)
        block = _read_block(self._file, start)
        if not any(block[:PREFIX_BYTES]):
            return None
        try:
            header = SegmentHeader.unpacked(block)
            if (header.fingerprint, header.region) != (self._fingerprint, region):
                raise FormatError("a segment of another file")
        except FormatError:
            self.counters.add(rejected_segments=1)
            return None
        return _Segment(region, start, header.generation, header.sequence)

    def _load_index(self, segment: _Segment) -> bool:
        """Enter the records of a sealed segment; False where its index isn't there or right."""
        end = segment.start + self._segment_bytes - INDEX_LENGTH_BYTES
        tail = _read(self._file, end, INDEX_LENGTH_BYTES)
        length = SegmentIndex.length(tail)
        if not 0 < length < self._segment_bytes - BLOCK_BYTES:
            return False
        try:
            index = SegmentIndex.unpacked(_read(self._file, end - length, length))
        except FormatError:
            self.counters.add(rejected_segments=1)
            return False
        if index.generation != segment.generation:
            return False
        for found in index.entries:
            segment.keys.append(found.key)
            self._tick = max(self._tick, found.used)
            self._enter(found.key, _Entry(segment, *found[1:]))
        segment.indexed = True
        return True

    def _scan(self, segment: _Segment) -> None:
        """Enter the records of a segment that has no index: each is read and verified."""
        position = BLOCK_BYTES
        while (position := self._next_record(segment, position)) < self._segment_bytes:
            head = _read(self._file, segment.start + position, RECORD_HEADER_BYTES)
            position += PREFIX_BYTES
            try:
                header = RecordHeader.unpacked(head)
                header_bytes = frame_bytes(Frame.RECORD, head)
            except FormatError:
                self.counters.add(rejected_records=1)
                continue
            if header.generation != segment.generation:
                continue
            offset = position - PREFIX_BYTES
            entry = _Entry(segment, offset, header_bytes, header.payload_bytes, self._tick + 1)
            payload = _read(self._file, entry.start + header_bytes, header.payload_bytes)
            if checksum(payload) != header.payload_checksum:
                self.counters.add(rejected_records=1)
                continue
            self._tick += 1
            segment.keys.append(header.key)
            self._enter(header.key, entry)
            position = offset + entry.size

    def _next_record(self, segment: _Segment, position: int) -> int:
        """Where the next record's frame begins, from ``position`` on; the end if nowhere."""
        magic = Frame.RECORD.value
        window = len(magic)
        while position < self._segment_bytes:
            found = bytes(_read(self._file, segment.start + position, window)).find(magic)
            if found >= 0:
                return position + found
            position += window - len(magic) + 1
            window = SCAN_BYTES
        return self._segment_bytes

    # For tests and idle checks.

    def check_integrity(self) -> list[str]:
        """What is wrong with the tables; nothing if all is well."""
        wrong = []
        with self._lock:
            for segment in self._segments.values():
                live = self._live(segment)
                if len(live) != segment.live:
                    wrong.append(f"{segment.live} records counted in region {segment.region}")
                if sum(entry.size for _, entry in live) != segment.live_bytes:
                    wrong.append(f"{segment.live_bytes} bytes counted in region {segment.region}")
            if sum(segment.live for segment in self._segments.values()) != len(self._index):
                wrong.append("records in the index that no segment has")
            if sum(x.payload_bytes for x in self._index.values()) != self._payload_bytes:
                wrong.append(f"{self._payload_bytes} payload bytes counted")
            if len(self._segments) >= self._num_regions:
                wrong.append("no region is free")
            if self._file.status().st_size > self._size_bytes:
                wrong.append("the file is larger than its bound")
        return wrong


def _runs(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Records in the order of the file, those together that follow each other without a gap."""
    run: list[_Wanted] = []
    size = 0
    for one in sorted(wanted, key=lambda one: one.entry.start):
        size += one.entry.size
        follows = run and run[-1].entry.start + run[-1].entry.size == one.entry.start
        if run and not (follows and size <= READ_BYTES):
            yield run
            run, size = [], one.entry.size
        run.append(one)
    if run:
        yield run


def _hottest(live: Sequence[tuple[SpillKey, _Entry]], room: int) -> list[tuple[SpillKey, _Entry]]:
    """Those that were read since they were written, the last read first, as far as they fit."""
    kept = []
    for key, entry in sorted(live, key=lambda one: one[1].used, reverse=True):
        room -= entry.size
        if not entry.read or room < 0:
            break
        kept.append((key, entry))
    return kept


def _verify(
    header: memoryview, payload: memoryview, key: SpillKey, generation: int
) -> Contents | None:
    """What a record's bytes mean, if header and payload are right and the ones that were asked
    for; None otherwise."""
    try:
        found = RecordHeader.unpacked(header)
    except FormatError:
        return None
    expected = (generation, key, payload.nbytes, checksum(payload))
    return found.contents if found[:4] == expected else None


def _buffer(size: int, into: memoryview | None) -> memoryview:
    """Room for a payload: what was given, if it has the size."""
    if into is not None and into.nbytes == size:
        return into
    return np.empty(size, dtype=np.uint8).data


def _read(file: SpillFile, offset: int, size: int) -> memoryview:
    buffer = _buffer(size, None)
    file.read([buffer], offset)
    return buffer


def _read_block(file: SpillFile, offset: int) -> memoryview:
    return _read(file, offset, BLOCK_BYTES)
