"""What a spill store takes and gives: records, readings, counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from qevict_tiers.spill.keys import Kind, SpillKey

__all__ = [
    "Contents",
    "Payload",
    "ReadStatus",
    "Reading",
    "Record",
    "SpillCounters",
    "SpillUsage",
    "WriteStatus",
    "as_bytes",
]

Payload = bytes | bytearray | memoryview | np.ndarray[Any, Any] | torch.Tensor
"""Contiguous bytes in host memory, of any shape and dtype that has a buffer (torch: uint8)."""


def as_bytes(payload: Payload) -> memoryview:
    """The bytes of a payload as a flat view; nothing is copied.

    Raises ``ValueError`` for bytes that are not contiguous or not in host memory.
    """
    if isinstance(payload, torch.Tensor):
        if payload.device.type != "cpu" or payload.dtype is not torch.uint8:
            raise ValueError(
                f"a payload is a uint8 tensor on the CPU, got {payload.dtype} on {payload.device}; "
                "use .view(torch.uint8)"
            )
        payload = payload.detach().numpy()
    view = payload.data if isinstance(payload, np.ndarray) else memoryview(payload)
    if not view.c_contiguous:
        raise ValueError("a payload must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a record's bytes mean: ``num_tokens`` tokens from ``first_position`` on."""

    kind: Kind
    num_tokens: int
    first_position: int

    def packed(self) -> list[Any]:
        """As msgpack writes it."""
        return [self.kind.value, self.num_tokens, self.first_position]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> Contents:
        """What ``packed`` gave."""
        kind, num_tokens, first_position = packed
        return cls(Kind(kind), num_tokens, first_position)


class Record(NamedTuple):
    """The bytes of one window for a span of layers."""

    key: SpillKey
    payload: Payload
    contents: Contents


class ReadStatus(Enum):
    """How a read ended; bytes come with HIT only."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"
    """It was there, but its checksum or header was wrong; it is forgotten."""
    ERROR = "error"
    """The disk, or the backend, failed."""
    LATE = "late"
    """Its deadline had passed before the read began."""
    BUSY = "busy"
    """Too many reads were under way already."""
    WRONG_SIZE = "wrong-size"
    """The buffer that was given does not have the record's size."""


class Reading(NamedTuple):
    """What came of one key. With HIT, bytes whose checksum was right; else nothing."""

    status: ReadStatus
    payload: memoryview | None = None
    contents: Contents | None = None


class WriteStatus(Enum):
    """What became of one record in the medium."""

    WRITTEN = "written"
    DISK_FULL = "disk-full"
    TOO_LARGE = "too-large"
    ERROR = "error"


@dataclass(slots=True)
class SpillCounters:
    """What a store did since it began: events, or bytes and nanoseconds where the name says so.

    Each record that is put ends in exactly one of written, duplicate, superseded and dropped_*;
    each key that is asked for in exactly one of hits, misses, corrupt, read_errors, late, busy
    and wrong_size.
    """

    put: int = 0
    """Records given to ``put``."""
    written: int = 0
    """Records that reached the medium."""
    written_bytes: int = 0
    """Their payloads."""
    write_nanoseconds: int = 0
    """Time the writer spent in the medium."""
    duplicate: int = 0
    """Records that were there, or on their way, already: a key names its content."""
    superseded: int = 0
    """Records deleted, or cleared, while they waited to be written."""
    dropped_queue_full: int = 0
    """Records refused because the queue was full: back-pressure."""
    dropped_disk_full: int = 0
    dropped_write_error: int = 0
    dropped_too_large: int = 0
    """Records larger than a segment, or than the queue."""
    dropped_closed: int = 0
    """Records that were put, or still waited, when the store was closed."""

    asked: int = 0
    """Keys given to ``get``."""
    hits: int = 0
    hit_bytes: int = 0
    hits_in_queue: int = 0
    """Those of ``hits`` that were served from the queue of writes."""
    misses: int = 0
    corrupt: int = 0
    read_errors: int = 0
    late: int = 0
    busy: int = 0
    wrong_size: int = 0
    read_nanoseconds: int = 0
    """Time the readers spent in the medium, all together."""

    deleted: int = 0
    """Records taken out by ``delete`` or ``clear``."""
    evicted: int = 0
    """Records that made room for newer ones."""
    evicted_bytes: int = 0
    moved: int = 0
    """Records that were kept from a segment that made room, and written again."""
    moved_bytes: int = 0
    damaged: int = 0
    """Records that were to be moved, but had a wrong checksum or header; they are forgotten."""
    medium_written_bytes: int = 0
    """All bytes that were written, headers, padding, indexes and moves included."""
    reclaim_errors: int = 0
    """Records whose deletion could not be written down: they may be found after a restart."""
    lost: int = 0
    """Records that went with their file while the store ran."""

    recovered: int = 0
    """Records found at the start."""
    rejected_records: int = 0
    """Torn, corrupted or foreign records at the start."""
    rejected_segments: int = 0
    """Segments, or indexes of segments, with a wrong header at the start."""
    rejected_files: int = 0
    """Files of spill stores that could not be used at the start: unreadable, another version or
    model, somebody else's."""

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **amounts: int) -> None:
        """Add to counters by name; from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def read(self) -> dict[str, int]:
        """All of them by name, as of one moment."""
        with self._lock:
            names = [counter.name for counter in fields(self) if counter.name != "_lock"]
            return {name: getattr(self, name) for name in names}


class SpillUsage(NamedTuple):
    """What a store holds now.

    records, payload_bytes: in the medium; -1 where it can't say.
    file_bytes: that its files take, free space inside included; -1 where it can't say.
    queued_records, queued_bytes: waiting to be written.
    reading: keys being read, or waiting for it.
    """

    records: int
    payload_bytes: int
    file_bytes: int
    queued_records: int
    queued_bytes: int
    reading: int
