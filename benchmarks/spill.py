"""The spill store beside plain reads and writes of the same sizes on the same disk.

Both sides go through the page cache, in one run and in turns: the plain side writes the same bytes
to one file with ``pwrite`` and reads them with ``preadv``, in the same batches, and neither waits
for the disk on a write. A turn ends with ``fdatasync`` of both files, whose time is counted.

write_share   write-behind through the store: MiB/s from the first ``put`` to the last future and
              the sync, over plain's
recall_share  runs of 32 neighbouring windows (256 tokens) in random order, eight runs asked for at
              a time, over the same reads by four plain threads; all in the page cache
cold_share    the same after the pages of both files were given up, so that the disk is read
put_us        time that a ``put`` of one batch takes its caller, 99th percentile
pause_ms      delay of a thread that wakes every millisecond (a decode step), 99th percentile,
              while the store writes and reads; ``quiet_ms``: while it does nothing
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from qevict_tiers.spill.keys import KeySpace, Kind, SpillKey
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.records import Contents, Reading, ReadStatus, Record, as_bytes
from qevict_tiers.spill.store import SpillStore
from report import (
    Column,
    Row,
    Target,
    begin,
    parser,
    print_table,
    print_targets,
    spread,
    write_json,
)
from sglang_qevict.foreign_load import ForeignLoad
from spill_stores import Pauses, forget_pages

SIZES = {"32K": 32 << 10, "256K": 256 << 10, "1M": 1 << 20}
RUN = 32
READERS = 4

COLUMNS = (
    Column("size", "record", "s"),
    Column("write_mib_s", "write MiB/s", ".0f"),
    Column("plain_write_mib_s", "plain", ".0f"),
    Column("write_share", "share", ".0%"),
    Column("recall_mib_s", "recall MiB/s", ".0f"),
    Column("plain_recall_mib_s", "plain", ".0f"),
    Column("recall_share", "share", ".0%"),
    Column("cold_mib_s", "cold MiB/s", ".0f"),
    Column("plain_cold_mib_s", "plain", ".0f"),
    Column("cold_share", "share", ".0%"),
    Column("put_us", "put us", ".0f"),
    Column("quiet_ms", "quiet ms", ".2f"),
    Column("pause_ms", "pause ms", ".2f"),
    Column("spread", "spread", ".0%"),
    Column("foreign_cores", "others", ".2f"),
)
TARGETS = tuple(
    Target(key, 0.8, {"size": size})
    for size in SIZES
    for key in ("write_share", "recall_share", "cold_share")
)


class Plain:
    """One file, read and written without any bookkeeping."""

    def __init__(self, path: Path, size: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.size = size
        self.pool = ThreadPoolExecutor(READERS)

    def write(self, records: list[Record]) -> None:
        """All records behind each other, in batches as the store makes them."""
        step = max((8 << 20) // self.size, 1)
        for start in range(0, len(records), step):
            batch = [as_bytes(record.payload) for record in records[start : start + step]]
            count = os.pwritev(self.fd, batch, start * self.size)
            assert count == len(batch) * self.size
        os.fdatasync(self.fd)

    def read(self, runs: list[int]) -> None:
        """Runs of records, by the number of their first."""

        def one(first: int) -> None:
            views = [np.empty(self.size, np.uint8).data for _ in range(RUN)]
            count = os.preadv(self.fd, views, first * self.size)
            assert count == RUN * self.size

        list(self.pool.map(one, runs))

    def close(self) -> None:
        """Let go of the file."""
        self.pool.shutdown()
        os.close(self.fd)


def records_of(count: int, size: int) -> list[Record]:
    """Records of random bytes, two of them never alike."""
    noise = np.random.default_rng(0).integers(0, 256, size + 64 * count, dtype=np.uint8)
    return [
        Record(
            SpillKey(hashlib.blake2b(b"%d" % n, digest_size=32).digest()),
            noise[64 * n : 64 * n + size],
            Contents(Kind.ORIGINAL, 8, 8 * n),
        )
        for n in range(count)
    ]


def put_all(store: SpillStore, records: list[Record], waits: list[float]) -> None:
    """Write records, a run at a time, as fast as the queue takes them."""
    futures: list[Future[int]] = []
    waiting = 0
    for start in range(0, len(records), RUN):
        batch = records[start : start + RUN]
        size = sum(as_bytes(record.payload).nbytes for record in batch)
        while waiting + size > store.queue_bytes:
            done = futures.pop(0)
            done.result()
            waiting -= size
        began = time.perf_counter()
        futures.append(store.put(batch))
        waits.append(time.perf_counter() - began)
        waiting += size
    assert sum(future.result() for future in futures) <= len(records)
    assert store.counters.dropped_queue_full == 0


def recall(store: SpillStore, records: list[Record], runs: list[int]) -> None:
    """Read runs of records, so many at once that no reader is idle."""
    under_way: list[Future[list[Reading]]] = []
    for first in runs:
        if len(under_way) == 2 * READERS:
            check(under_way.pop(0).result())
        under_way.append(store.get([record.key for record in records[first : first + RUN]]))
    for future in under_way:
        check(future.result())


def check(readings: list[Reading]) -> None:
    """All of them must be there."""
    assert all(reading.status is ReadStatus.HIT for reading in readings)


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def verify(store: SpillStore, records: list[Record]) -> None:
    """What is read is what was written, before anything is timed."""
    store.put(records).result()
    readings = store.get([record.key for record in records]).result()
    for record, reading in zip(records, readings, strict=True):
        assert reading.payload is not None
        assert np.array_equal(np.frombuffer(reading.payload, np.uint8), record.payload)
    store.clear().result()


def measure(name: str, total: int, turns: int, root: Path) -> Row:
    """One size."""
    size = SIZES[name]
    records = records_of(total // size // RUN * RUN, size)
    mib = len(records) * size / 2**20
    space = KeySpace("benchmark", "uint8", 8)
    times: dict[str, list[float]] = {}
    waits: list[float] = []

    def timed(what: str, work: Callable[[], None]) -> None:
        times.setdefault(what, []).append(seconds(work))

    with Pauses() as quiet:
        time.sleep(1)
    for turn in range(turns):
        medium = LocalMedium(root / "store", space, 2 * total + (64 << 20), segment_bytes=64 << 20)
        store = SpillStore(medium, readers=READERS)
        plain = Plain(root / "plain", size)
        verify(store, records[:RUN])
        runs = list(range(0, len(records), RUN))
        random.Random(turn).shuffle(runs)

        def write_store(store: SpillStore = store, medium: LocalMedium = medium) -> None:
            put_all(store, records, waits)
            fd = os.open(medium._file.path, os.O_RDONLY)
            os.fdatasync(fd)
            os.close(fd)

        with Pauses() as pauses:
            timed("write", write_store)
        timed("plain_write", lambda plain=plain: plain.write(records))  # type: ignore[misc]
        for what in ("recall", "cold"):
            if what == "cold":
                forget_pages(root)
            timed(what, lambda store=store, runs=runs: recall(store, records, runs))  # type: ignore[misc]
            timed("plain_" + what, lambda plain=plain, runs=runs: plain.read(runs))  # type: ignore[misc]
        store.close()
        plain.close()
        (root / "plain").unlink()
    row: Row = {f"{key}_mib_s": mib / statistics.median(value) for key, value in times.items()}
    for what in ("write", "recall", "cold"):
        pairs = zip(times["plain_" + what], times[what], strict=True)
        row[what + "_share"] = statistics.median(plain / ours for plain, ours in pairs)
    row["put_us"] = float(np.quantile(waits, 0.99)) * 1e6
    row["quiet_ms"] = float(np.quantile(quiet.delays, 0.99)) * 1e3
    row["pause_ms"] = float(np.quantile(pauses.delays, 0.99)) * 1e3
    return {"size": name, "spread": spread(times["write"]), **row}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--directory", type=Path, help="on the disk to measure (default: /tmp)")
    options_of.add_argument("--total", type=int, default=512, help="MiB of each turn")
    options_of.add_argument("--turns", type=int, default=5)
    options_of.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = options_of.parse_args()
    if options.quick:
        options.total, options.turns = 128, 3
    machine = begin(options)
    rows = []
    for name in options.sizes:
        load = ForeignLoad()
        with tempfile.TemporaryDirectory(prefix="spill-", dir=options.directory) as root:
            rows.append(measure(name, options.total << 20, options.turns, Path(root)))
        rows[-1]["foreign_cores"] = load.cores()
        print_table(rows[-1:], COLUMNS)
    print_table(rows, COLUMNS)
    print_targets(rows, TARGETS)
    write_json(options.json, machine, rows)


if __name__ == "__main__":
    main()
