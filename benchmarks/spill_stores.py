"""Which store should hold spilled windows: ours, LMDB, RocksDB, or a file for each record.

Each store gets the same records, in the same batches, in a process of its own, through the page
cache; none waits for the disk on a write. Needs ``pip install 'sglang-qevict[bench-spill]'``.

fill_mib_s     writing until the bound is reached
steady_mib_s   writing three times the bound more, so that as much is evicted
read_mib_s     random reads of single records, from the page cache
cold_mib_s     the same after the file's pages were given up
recover_ms     opening again after kill -9, up to the first answer
cpu_s_gib      processor seconds for each GiB written (steady state), and read
amplification  bytes that the process gave to write calls, over the payloads
pause_ms       delay of another Python thread that wakes every millisecond, while writing: the 99th
               percentile
flips          of 20 copies with four bits flipped each: those that served a wrong record, those
               whose process died, and the share of records that the others still served
full           what is served after four times the disk's size was written to a disk of 64 MiB
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qevict_tiers.spill.keys import KeySpace, Kind, SpillKey
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.medium import Medium
from qevict_tiers.spill.records import Contents, ReadStatus, Record, WriteStatus
from report import Column, Row, begin, parser, print_table, write_json

STORES = ("segments", "lmdb", "rocksdb", "files")
SIZES = {"32K": 32 << 10, "256K": 256 << 10, "1M": 1 << 20}
BATCH_BYTES = 8 << 20
FLIPS = 20
TMPFS_BYTES = 64 << 20
PATIENCE_SECONDS = 300

COLUMNS = (
    Column("store", "store", "s"),
    Column("size", "record", "s"),
    Column("fill_mib_s", "fill MiB/s", ".0f"),
    Column("steady_mib_s", "steady MiB/s", ".0f"),
    Column("read_mib_s", "read MiB/s", ".0f"),
    Column("cold_mib_s", "cold MiB/s", ".0f"),
    Column("write_cpu_s_gib", "write CPU s/GiB", ".2f"),
    Column("read_cpu_s_gib", "read CPU s/GiB", ".2f"),
    Column("recover_ms", "recover ms"),
    Column("lost_share", "lost by kill", ".1%"),
    Column("amplification", "write amp.", ".2f"),
    Column("pause_ms", "pause ms"),
    Column("flips", "flips: wrong/died/found", "s"),
    Column("full", "full disk", "s"),
)


def make(store: str, directory: Path, bound: int) -> Medium:
    """A store on a directory, with what an earlier one left there."""
    if store == "segments":
        space = KeySpace("benchmark", "uint8", 8)
        segment = min(8 << 20, bound // 16)
        return LocalMedium(directory, space, bound, persist=True, segment_bytes=segment)
    from spill_rivals import FilesMedium, LmdbMedium, RocksMedium

    rivals: dict[str, Callable[[Path, int], Medium]] = {
        "lmdb": LmdbMedium,
        "rocksdb": RocksMedium,
        "files": FilesMedium,
    }
    return rivals[store](directory, bound)


NOISE = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)


def record(number: int, size: int) -> Record:
    """A record whose bytes follow from its number."""
    key = SpillKey(hashlib.blake2b(b"%d" % number, digest_size=32).digest())
    start = (number * 104729 * 64) % (len(NOISE) - size)
    return Record(key, NOISE[start : start + size], Contents(Kind.ORIGINAL, 8, 8 * number))


def batches(numbers: range, size: int) -> Iterator[list[Record]]:
    """Records in the batches that the write-behind queue makes."""
    step = max(BATCH_BYTES // size, 1)
    for start in range(0, len(numbers), step):
        yield [record(number, size) for number in numbers[start : start + step]]


class Rate(NamedTuple):
    """How fast so many bytes were handled."""

    mib_s: float
    cpu_s_gib: float

    @classmethod
    def of(cls, num_bytes: int, wall: float, cpu: float) -> Rate:
        """By the seconds of clock and processors."""
        return cls(num_bytes / wall / 2**20, cpu / max(num_bytes, 1) * 2**30)


def write(medium: Medium, numbers: range, size: int) -> Rate:
    """Write records in batches."""
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in batches(numbers, size):
        medium.write(batch)
    return Rate.of(len(numbers) * size, time.perf_counter() - wall, time.process_time() - cpu)


def read(medium: Medium, numbers: list[int], size: int) -> tuple[Rate, int, int]:
    """Read records one by one: how fast, how many were found, and how many were wrong."""
    found = wrong = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for number in numbers:
        (reading,) = medium.read([record(number, size).key], [None])
        if reading.status is ReadStatus.HIT:
            found += 1
            assert reading.payload is not None
            wrong += not np.array_equal(
                np.frombuffer(reading.payload, np.uint8), record(number, size).payload
            )
    rate = Rate.of(found * size, time.perf_counter() - wall, time.process_time() - cpu)
    return rate, found, wrong


class Pauses(threading.Thread):
    """Wakes every millisecond and keeps the delays."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.delays: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            began = time.perf_counter()
            time.sleep(0.001)
            self.delays.append(time.perf_counter() - began - 0.001)

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def __enter__(self) -> Pauses:
        self.start()
        return self


def written_by_process() -> int:
    """Bytes that this process gave to write calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def forget_pages(directory: Path) -> None:
    """Give up the page cache of a directory's files."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# Parts that run in a process of their own.


def speed(store: str, directory: Path, bound: int, size: int) -> Row:
    """Fill, evict, read."""
    medium = make(store, directory, bound)
    fill = bound * 8 // 10 // size
    before = written_by_process()
    with Pauses() as pauses:
        fill_speed = write(medium, range(fill), size)
        steady_speed = write(medium, range(fill, 4 * fill), size)
    recent = random.Random(0).sample(range(4 * fill - fill // 2, 4 * fill), min(fill // 2, 2000))
    read_speed, found, wrong = read(medium, recent, size)
    assert found, f"{store} kept nothing"
    assert not wrong, f"{store} served {wrong} of {found} records wrong"
    written = written_by_process() - before
    medium.close()
    forget_pages(directory)
    medium = make(store, directory, bound)
    cold_speed, _, _ = read(medium, recent, size)
    return {
        "fill_mib_s": fill_speed.mib_s,
        "steady_mib_s": steady_speed.mib_s,
        "write_cpu_s_gib": steady_speed.cpu_s_gib,
        "read_mib_s": read_speed.mib_s,
        "read_cpu_s_gib": read_speed.cpu_s_gib,
        "cold_mib_s": cold_speed.mib_s,
        "amplification": written / (4 * fill * size),
        "pause_ms": float(np.quantile(pauses.delays, 0.99)) * 1e3,
    }


def die(store: str, directory: Path, bound: int, size: int) -> Row:
    """Write, then be killed."""
    medium = make(store, directory, bound)
    write(medium, range(bound * 6 // 10 // size), size)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def build(store: str, directory: Path, bound: int, size: int) -> Row:
    """Write, and close."""
    medium = make(store, directory, bound)
    write(medium, range(bound * 8 // 10 // size), size)
    medium.close()
    return {}


def recover(store: str, directory: Path, bound: int, size: int) -> Row:
    """Open what a killed process left."""
    forget_pages(directory)
    began = time.perf_counter()
    medium = make(store, directory, bound)
    medium.read([record(0, size).key], [None])
    took = time.perf_counter() - began
    count = bound * 6 // 10 // size
    _, found, wrong = read(medium, list(range(count)), size)
    assert not wrong
    return {"recover_ms": took * 1e3, "lost_share": 1 - found / count}


def verify(store: str, directory: Path, bound: int, size: int) -> Row:
    """Read everything that may be there."""
    medium = make(store, directory, bound)
    _, found, wrong = read(medium, list(range(bound * 8 // 10 // size)), size)
    return {"found": found, "wrong": wrong}


def overfill(store: str, directory: Path, bound: int, size: int) -> Row:
    """Write four times what the disk holds, with a bound far beyond it."""
    medium = make(store, directory, bound)
    count = 4 * TMPFS_BYTES // size
    dropped = sum(
        status is not WriteStatus.WRITTEN
        for batch in batches(range(count), size)
        for status in medium.write(batch)
    )
    _, found, wrong = read(medium, list(range(count)), size)
    return {"found": found * size / TMPFS_BYTES, "wrong": wrong, "dropped": dropped / count}


PARTS = {part.__name__: part for part in (speed, build, die, recover, verify, overfill)}


def apart(part: str, store: str, directory: Path, bound: int, size: int) -> Row | str:
    """Run a part in a forked process: what it returned, or how it died."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            theirs.send(PARTS[part](store, directory, bound, size))
        except Exception as error:
            theirs.send(f"{type(error).__name__}: {error}"[:60])

    process = context.Process(target=run)
    process.start()
    theirs.close()
    if not ours.poll(PATIENCE_SECONDS):
        process.kill()
        process.join()
        return "hangs"
    try:
        answer: Row | str = ours.recv()
    except EOFError:
        process.join()
        assert process.exitcode is not None
        answer = signal.Signals(-process.exitcode).name
    process.join()
    return answer


def flips(store: str, directory: Path, bound: int, size: int) -> str:
    """Records served wrong / processes dead / share of the records still found."""
    sound = apart("verify", store, directory, bound, size)
    assert isinstance(sound, dict), sound
    wrong = died = found = 0
    generator = random.Random(1)
    copy = directory.with_name("flipped")
    for _ in range(FLIPS):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy)
        files = [path for path in copy.rglob("*") if path.is_file() and path.stat().st_size]
        # Four bits at a time, half of them in the first two pages of a file: the metadata.
        for _ in range(4):
            path = generator.choices(files, [p.stat().st_size for p in files])[0]
            end = path.stat().st_size if generator.random() < 0.5 else 8192
            with path.open("r+b") as file:
                offset = generator.randrange(min(end, path.stat().st_size))
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ (1 << generator.randrange(8))]))
        seen = apart("verify", store, copy, bound, size)
        if isinstance(seen, str):
            died += 1
        else:
            wrong += int(seen["wrong"] > 0)
            found += seen["found"]
    shutil.rmtree(copy, ignore_errors=True)
    return f"{wrong} / {died} / {found / FLIPS / sound['found']:.0%}"


def full_disk(store: str, size: int) -> str:
    """On a small tmpfs; needs the right to mount one."""
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", name]
        if subprocess.run(mount, capture_output=True).returncode:
            return "(no right to mount)"
        try:
            seen = apart("overfill", store, Path(name) / "store", 8 * TMPFS_BYTES, size)
        finally:
            subprocess.run(["umount", name], check=True)
    if isinstance(seen, str):
        return seen
    return f"{seen['dropped']:.0%} dropped, {seen['found']:.0%} of disk served"


def measure(store: str, name: str, options: argparse.Namespace) -> Row:
    """One row."""
    size = SIZES[name]
    bound = options.bound << 20
    root = Path(tempfile.mkdtemp(prefix="spill-", dir=options.directory))
    row: Row = {"store": store, "size": name}
    try:
        row |= checked(apart("speed", store, root / "speed", bound, size))
        apart("die", store, root / "killed", bound, size)
        row |= checked(apart("recover", store, root / "killed", bound, size))
        if name == "256K":
            shutil.rmtree(root / "speed")
            apart("build", store, root / "small", 8 << 20, size)
            row["flips"] = flips(store, root / "small", 8 << 20, size)
            row["full"] = full_disk(store, size)
    finally:
        shutil.rmtree(root)
    return row


def checked(row: Row | str) -> dict[str, Any]:
    """A row, or what went wrong in its place."""
    return row if isinstance(row, dict) else {"full": row}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--directory", type=Path, help="on the disk to measure (default: /tmp)")
    options_of.add_argument("--bound", type=int, default=256, help="MiB that a store may take")
    options_of.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    options_of.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = options_of.parse_args()
    logging.disable(logging.WARNING)
    machine = begin(options)
    sizes = ["256K"] if options.quick else options.sizes
    rows = []
    for name in sizes:
        for store in options.stores:
            rows.append(measure(store, name, options))
            print(rows[-1], flush=True)
    print_table(rows, COLUMNS)
    write_json(options.json, machine, rows)


if __name__ == "__main__":
    main()
