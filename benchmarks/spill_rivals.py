"""Other places for spilled records, behind the same interface as the local one.

``FilesMedium`` keeps one file a record, ``LmdbMedium`` a memory-mapped B+ tree, ``RocksMedium``
RocksDB with FIFO compaction, its own way to bound a cache. The first two evict by least recent
use and check an XXH3 sum; RocksDB checks CRC32C of its blocks itself.
"""

from __future__ import annotations

import errno
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import xxhash
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompactionStyle,
    DBCompressionType,
    FifoCompactOptions,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from qevict_tiers.spill.keys import Kind, SpillKey
from qevict_tiers.spill.medium import Medium
from qevict_tiers.spill.records import (
    Contents,
    Reading,
    ReadStatus,
    Record,
    SpillCounters,
    WriteStatus,
    as_bytes,
)

__all__ = ["FilesMedium", "LmdbMedium", "RocksMedium"]

_SUM_BYTES = 8
_CONTENTS = Contents(Kind.ORIGINAL, 8, 0)
MISS, CORRUPT = Reading(ReadStatus.MISS), Reading(ReadStatus.CORRUPT)


class _Rival(Medium):
    """What they have in common: a bound, least recent use, a checksum before the payload."""

    persists = True
    contains_blocks = False

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.directory = directory
        self.size_bytes = size_bytes
        self.counters = SpillCounters()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._bytes = 0
        directory.mkdir(parents=True, exist_ok=True)

    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        return [key in self._sizes for key in keys]

    def usage(self) -> tuple[int, int, int]:
        return len(self._sizes), self._bytes, -1

    def clear(self) -> None:
        self.delete([SpillKey(key) for key in self._sizes])

    def _enter(self, key: bytes, size: int) -> None:
        self._bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size

    def _coldest(self, room: int) -> Iterator[bytes]:
        """Keys to take out, coldest first, until there is so much room."""
        while self._sizes and self._bytes + room > self.size_bytes:
            key, size = self._sizes.popitem(last=False)
            self._bytes -= size
            yield key


def _framed(record: Record) -> bytes:
    payload = as_bytes(record.payload)
    return xxhash.xxh3_64_digest(payload) + bytes(payload)


def _reading(data: bytes | memoryview | None) -> Reading:
    if data is None:
        return MISS
    payload = memoryview(data)[_SUM_BYTES:]
    if xxhash.xxh3_64_digest(payload) != bytes(data[:_SUM_BYTES]):
        return CORRUPT
    return Reading(ReadStatus.HIT, payload, _CONTENTS)


class FilesMedium(_Rival):
    """One file a record, written under another name and renamed."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        super().__init__(directory, size_bytes)
        for path in directory.iterdir():
            self._enter(bytes.fromhex(path.name), path.stat().st_size)

    def _path(self, key: bytes) -> Path:
        return self.directory / key.hex()

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        statuses = []
        for record in records:
            size = _SUM_BYTES + as_bytes(record.payload).nbytes
            for key in self._coldest(size):
                self._path(key).unlink()
            torn = self.directory / "new"
            try:
                torn.write_bytes(_framed(record))
                torn.rename(self._path(record.key))
                self._enter(record.key, size)
                statuses.append(WriteStatus.WRITTEN)
            except OSError:
                statuses.append(WriteStatus.DISK_FULL)
        return statuses

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        readings = []
        for key in keys:
            try:
                readings.append(_reading(self._path(key).read_bytes()))
                self._sizes.move_to_end(key)
            except (FileNotFoundError, KeyError):
                readings.append(MISS)
        return readings

    def delete(self, keys: Sequence[SpillKey]) -> None:
        for key in keys:
            self._bytes -= self._sizes.pop(key, 0)
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        pass


class LmdbMedium(_Rival):
    """LMDB without syncing: a killed process leaves the last commit, a power failure may not.

    Sizes are in a table of their own, so that opening doesn't read the values.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        super().__init__(directory, size_bytes)
        self._environment = lmdb.open(
            str(directory),
            map_size=size_bytes,
            max_dbs=2,
            sync=False,
            metasync=False,
            readahead=False,
            meminit=False,
        )
        self._values = self._environment.open_db(b"values")
        self._table = self._environment.open_db(b"sizes")
        # A value takes whole pages in one piece. What is deleted is free two commits later, and
        # in fragments, so the map must be larger than what is kept.
        self.size_bytes = size_bytes * 8 // 10
        with self._environment.begin(db=self._table) as transaction:
            for key, size in transaction.cursor():
                self._enter(key, int.from_bytes(size))

    @staticmethod
    def _pages(record: Record) -> int:
        """Bytes of the pages that a record takes."""
        return -(-(_SUM_BYTES + as_bytes(record.payload).nbytes + 16) // 4096) * 4096

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        gone = list(self._coldest(sum(map(self._pages, records))))
        try:
            with self._environment.begin(write=True) as transaction:
                for key in gone:
                    transaction.delete(key, db=self._values)
                    transaction.delete(key, db=self._table)
            with self._environment.begin(write=True) as transaction:
                for record in records:
                    size = self._pages(record).to_bytes(8)
                    transaction.put(record.key, _framed(record), db=self._values)
                    transaction.put(record.key, size, db=self._table)
        except (lmdb.Error, OSError):
            return [WriteStatus.DISK_FULL] * len(records)
        for record in records:
            self._enter(record.key, self._pages(record))
        return [WriteStatus.WRITTEN] * len(records)

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        with self._environment.begin(db=self._values) as transaction:
            values = [transaction.get(key) for key in keys]
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return [_reading(value) for value in values]

    def delete(self, keys: Sequence[SpillKey]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key in keys:
                transaction.delete(key, db=self._values)
                transaction.delete(key, db=self._table)
                self._bytes -= self._sizes.pop(key, 0)

    def close(self) -> None:
        self._environment.close()


class RocksMedium(_Rival):
    """RocksDB as a cache: no log, FIFO compaction, values in the tables."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        super().__init__(directory, size_bytes)
        options = Options(raw_mode=True)
        options.set_compaction_style(DBCompactionStyle.fifo())
        fifo = FifoCompactOptions()
        fifo.max_table_files_size = size_bytes
        options.set_fifo_compaction_options(fifo)
        options.set_compression_type(DBCompressionType.none())
        options.set_write_buffer_size(min(16 << 20, size_bytes // 8))
        options.set_max_write_buffer_number(3)
        tables = BlockBasedOptions()
        tables.set_block_cache(Cache(8 << 20))
        tables.set_bloom_filter(10, False)
        options.set_block_based_table_factory(tables)
        self._database = Rdict(str(directory), options, access_type=AccessType.read_write())
        unlogged = WriteOptions()
        unlogged.disable_wal = True
        self._database.set_write_options(unlogged)

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        batch = WriteBatch(raw_mode=True)
        for record in records:
            batch.put(bytes(record.key), bytes(as_bytes(record.payload)))
        try:
            self._database.write(batch)
        except Exception as error:
            full = "No space" in str(error) or getattr(error, "errno", 0) == errno.ENOSPC
            return [WriteStatus.DISK_FULL if full else WriteStatus.ERROR] * len(records)
        return [WriteStatus.WRITTEN] * len(records)

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        return [self._read(bytes(key)) for key in keys]

    def _read(self, key: bytes) -> Reading:
        try:
            value = self._database.get(key)
        except Exception as error:
            return CORRUPT if "orrupt" in str(error) else Reading(ReadStatus.ERROR)
        return MISS if value is None else Reading(ReadStatus.HIT, memoryview(value), _CONTENTS)

    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        return [self._database.get(bytes(key)) is not None for key in keys]

    def delete(self, keys: Sequence[SpillKey]) -> None:
        for key in keys:
            self._database.delete(bytes(key))

    def close(self) -> None:
        self._database.flush()
        self._database.close()

    def destroy(self) -> None:
        shutil.rmtree(self.directory)
