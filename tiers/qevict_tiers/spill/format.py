"""The bytes on disk: four kinds of frames, each a fixed prefix and a msgpack body.

    prefix (24 bytes, little endian)                               body
    magic (8) | version u16 | flags u16 | body bytes u32 | checksum u64 | msgpack

The checksum is XXH3 (64 bit) over the prefix before it and the body. ``docs/spill.md`` says where
the frames stand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgpack
import xxhash

from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.records import Contents

__all__ = [
    "BLOCK_BYTES",
    "PREFIX_BYTES",
    "FileHeader",
    "FormatError",
    "Frame",
    "IndexEntry",
    "RecordHeader",
    "SegmentHeader",
    "SegmentIndex",
    "aligned",
    "checksum",
    "frame_bytes",
    "is_leftover",
]

VERSION = 1
BLOCK_BYTES = 4096
"""Headers of file and segments take one block; what is written begins at the start of one."""
RECORD_ALIGNMENT = 64
RECORD_HEADER_BYTES = 320
"""At most what a record's header takes."""
INDEX_ENTRY_BYTES, INDEX_FIXED_BYTES = 80, 128
"""At most what an index takes for each record, and besides."""
INDEX_LENGTH_BYTES = 8
"""A segment ends with so many bytes that say how long the index before them is."""
PERSISTENT = 1
"""Flag of a file that is to outlive its process."""

_PREFIX = struct.Struct("<8sHHI")
_CHECKSUM = struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size


class Frame(Enum):
    """Kinds of frames, by their magic."""

    FILE = b"QEVSPILL"
    SEGMENT = b"QEVSEGMT"
    RECORD = b"QEVRECRD"
    INDEX = b"QEVINDEX"


class FormatError(ValueError):
    """Bytes that are no frame, or not the one that was expected."""


def checksum(*parts: bytes | memoryview) -> int:
    """XXH3, 64 bit, of the parts one after the other."""
    return xxhash.xxh3_64_intdigest(parts[0] if len(parts) == 1 else b"".join(parts))


def aligned(size: int, alignment: int = BLOCK_BYTES) -> int:
    """``size`` rounded up."""
    return -(-size // alignment) * alignment


def _pack(frame: Frame, body: object, flags: int = 0) -> bytes:
    packed: bytes = msgpack.packb(body)
    prefix = _PREFIX.pack(frame.value, VERSION, flags, len(packed))
    return prefix + _CHECKSUM.pack(checksum(prefix, packed)) + packed


def frame_bytes(frame: Frame, data: bytes | memoryview) -> int:
    """Bytes of the frame that ``data`` begins with, from its prefix alone, unverified.

    Raises ``FormatError`` where no frame of this kind begins.
    """
    if len(data) < PREFIX_BYTES:
        raise FormatError("too short")
    magic, version, _, body_bytes = _PREFIX.unpack_from(data)
    if magic != frame.value:
        raise FormatError(f"no {frame.name.lower()} frame")
    if version != VERSION:
        raise FormatError(f"version {version} of the format, this is {VERSION}")
    return PREFIX_BYTES + int(body_bytes)


def _unpack(frame: Frame, data: bytes | memoryview) -> tuple[Any, int]:
    """Body and flags of the frame that ``data`` begins with, verified."""
    data = memoryview(data)
    end = frame_bytes(frame, data)
    if end > len(data):
        raise FormatError("cut off")
    prefix, body = data[: _PREFIX.size], data[PREFIX_BYTES:end]
    if _CHECKSUM.unpack_from(data, _PREFIX.size) != (checksum(prefix, body),):
        raise FormatError("wrong checksum")
    try:
        return msgpack.unpackb(body), _PREFIX.unpack(prefix)[2]
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise FormatError(str(error)) from error


def is_leftover(data: bytes | memoryview) -> bool:
    """Whether a file that begins so, of any version, should have ended with its process."""
    magic, _, flags, _ = _PREFIX.unpack_from(data)
    return bool(magic == Frame.FILE.value and not flags & PERSISTENT)


class FileHeader(NamedTuple):
    """The first block of a file."""

    fingerprint: bytes
    segment_bytes: int
    persistent: bool

    def packed(self) -> bytes:
        """A whole block."""
        body = {"fingerprint": self.fingerprint, "segment_bytes": self.segment_bytes}
        flags = PERSISTENT * self.persistent
        return _pack(Frame.FILE, body, flags).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def unpacked(cls, data: bytes | memoryview) -> FileHeader:
        """Raises ``FormatError``."""
        body, flags = _unpack(Frame.FILE, data)
        return cls(body["fingerprint"], body["segment_bytes"], bool(flags & PERSISTENT))


class SegmentHeader(NamedTuple):
    """The first block of a segment that is in use.

    generation: a random number; records of another one are left over from an earlier use.
    sequence: segments in the order in which they were begun.
    """

    fingerprint: bytes
    region: int
    generation: int
    sequence: int

    def packed(self) -> bytes:
        """A whole block."""
        return _pack(Frame.SEGMENT, self._asdict()).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def unpacked(cls, data: bytes | memoryview) -> SegmentHeader:
        """Raises ``FormatError``."""
        return cls(**_unpack(Frame.SEGMENT, data)[0])


class RecordHeader(NamedTuple):
    """What stands before a payload."""

    generation: int
    key: SpillKey
    payload_bytes: int
    payload_checksum: int
    contents: Contents

    def packed(self) -> bytes:
        """The frame."""
        body = self._asdict() | {"contents": self.contents.packed()}
        return _pack(Frame.RECORD, body)

    @classmethod
    def unpacked(cls, data: bytes | memoryview) -> RecordHeader:
        """Raises ``FormatError``."""
        body = _unpack(Frame.RECORD, data)[0]
        return cls(
            body["generation"],
            SpillKey(body["key"]),
            body["payload_bytes"],
            body["payload_checksum"],
            Contents.unpacked(body["contents"]),
        )


class IndexEntry(NamedTuple):
    """Where a record lies, from the start of its segment, and how it was used."""

    key: SpillKey
    offset: int
    header_bytes: int
    payload_bytes: int
    used: int
    read: bool


class SegmentIndex(NamedTuple):
    """The records of a sealed segment. Ends at the segment's last byte, its length behind it."""

    generation: int
    entries: Sequence[IndexEntry]

    def packed(self) -> bytes:
        """The frame and its length."""
        frame = _pack(Frame.INDEX, self._asdict())
        return frame + _CHECKSUM.pack(len(frame))

    @staticmethod
    def length(tail: bytes | memoryview) -> int:
        """Bytes of the frame whose length ``tail`` is; 0 where there is none."""
        return int(_CHECKSUM.unpack(tail)[0])

    @classmethod
    def unpacked(cls, data: bytes | memoryview) -> SegmentIndex:
        """Raises ``FormatError``."""
        body = _unpack(Frame.INDEX, data)[0]
        return cls(body["generation"], [IndexEntry(*entry) for entry in body["entries"]])
