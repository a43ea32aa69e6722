"""The local store's file: bound, order of eviction, recovery, and what may go wrong with a disk."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from qevict_tiers.spill.file import DirectoryInUse
from qevict_tiers.spill.format import BLOCK_BYTES
from qevict_tiers.spill.keys import KeySpace
from qevict_tiers.spill.local import LocalMedium, segment_bytes_for
from qevict_tiers.spill.records import ReadStatus, WriteStatus
from spill_cases import SPACE, FailingFile, is_right, key, keys, payload, record, records

SEGMENT_BYTES = 64 << 10
SIZE_BYTES = 8 * SEGMENT_BYTES + 2 * BLOCK_BYTES
SIZE = 5000

Open = Callable[..., LocalMedium]


@pytest.fixture
def opened(directory: Path) -> Open:
    return partial(
        LocalMedium, directory, SPACE, SIZE_BYTES, segment_bytes=SEGMENT_BYTES, persist=True
    )


def found(medium: LocalMedium, numbers: range) -> list[int]:
    """Numbers of the records that are there and right; any other reading must be a miss."""
    right = []
    for number, reading in zip(
        numbers, medium.read(keys(numbers), [None] * len(numbers)), strict=True
    ):
        if is_right(reading, number):
            right.append(number)
        else:
            assert reading.status is ReadStatus.MISS
    return right


def file_of(medium: LocalMedium) -> Path:
    return medium._file.path


def kill(medium: LocalMedium) -> None:
    """As the end of a process would leave it."""
    medium._directory_lock.close()
    medium._file.close()


def test_what_was_written_is_read_into_the_buffers_that_are_given(opened: Open) -> None:
    medium = opened()
    medium.write(records(range(20), SIZE))
    buffers = [memoryview(bytearray(SIZE)) for _ in range(20)]
    order = random.Random(0).sample(range(20), 20)
    readings = medium.read(keys(order), buffers)
    assert all(map(is_right, readings, order))
    assert all(bytes(buffer) == payload(n, SIZE) for n, buffer in zip(order, buffers, strict=True))
    (reading,) = medium.read([key(0)], [memoryview(bytearray(SIZE - 1))])
    assert reading.status is ReadStatus.WRONG_SIZE


def test_the_file_never_exceeds_its_bound_and_the_oldest_goes_first(opened: Open) -> None:
    medium = opened()
    for start in range(0, 400, 7):
        medium.write(records(range(start, start + 7), SIZE))
        status = medium._file.status()
        assert max(status.st_size, status.st_blocks * 512) <= SIZE_BYTES
        assert medium.check_integrity() == []
    left = found(medium, range(406))
    # An unbroken run of the newest, that fills all segments but the free one and a part of one.
    assert left == list(range(left[0], 406))
    assert len(left) * SIZE >= 6 / 8 * SIZE_BYTES * 0.85
    assert medium.counters.evicted == 406 - len(left)


def test_what_is_read_outlives_what_is_not(opened: Open) -> None:
    medium = opened()
    hot = [3, 11, 12]
    for start in range(0, 700, 7):
        medium.write(records(range(start, start + 7), SIZE))
        medium.read(keys(hot), [None] * len(hot))
    assert [n for n in found(medium, range(700)) if n < 100] == hot
    assert medium.counters.moved > 0
    # Once they are not read any more, they go like all others.
    medium.write(records(range(700, 1000), SIZE))
    medium.write(records(range(1000, 1300), SIZE))
    assert min(found(medium, range(1300))) > 700


def test_a_segment_of_hot_records_keeps_its_hottest_quarter(opened: Open) -> None:
    medium = opened()
    medium.write(records(range(60), SIZE))
    first = [n for n in range(60) if medium._index[key(n)].segment is medium._index[key(0)].segment]
    medium.read(keys(first), [None] * len(first))
    medium.read([key(4)], [None])
    medium.write(records(range(60, 95), SIZE))
    kept = [n for n in first if medium.contains([key(n)])[0]]
    # The last read: 4, and then from the end.
    assert kept == sorted([4, *first[-(len(kept) - 1) :]])
    assert len(kept) * SIZE <= SEGMENT_BYTES / 4


def test_records_survive_a_restart_with_their_heat(opened: Open) -> None:
    medium = opened()
    medium.write(records(range(60), SIZE))
    medium.read([key(0)], [None])
    medium.close()
    medium = opened()
    assert medium.counters.recovered == 60
    assert medium.counters.rejected_records == medium.counters.rejected_segments == 0
    medium.write(records(range(60, 110), SIZE))
    left = found(medium, range(110))
    assert 0 in left
    assert 1 not in left


def test_a_killed_process_loses_nothing_that_was_written(opened: Open) -> None:
    medium = opened()
    medium.write(records(range(30), SIZE))
    medium.delete(keys(range(10, 14)))
    kill(medium)
    medium = opened()
    assert found(medium, range(30)) == [*range(10), *range(14, 30)]


def test_without_persistence_nothing_is_left_by_close_or_by_a_kill(
    opened: Open, directory: Path
) -> None:
    medium = opened(persist=False)
    medium.write(records(range(5)))
    medium.close()
    assert list(directory.iterdir()) == []
    medium = opened(persist=False)
    medium.write(records(range(5)))
    left = file_of(medium)
    kill(medium)
    other = KeySpace(model="another", dtype="bfloat16", window=8)
    LocalMedium(directory, other, SIZE_BYTES, segment_bytes=SEGMENT_BYTES, persist=True)
    assert not left.exists()


def test_a_persistent_store_does_not_take_what_was_not_to_persist(opened: Open) -> None:
    medium = opened(persist=False)
    medium.write(records(range(5)))
    kill(medium)
    assert found(opened(), range(5)) == []


def test_files_are_their_owners_alone(opened: Open, directory: Path) -> None:
    before = os.umask(0)
    try:
        medium = opened()
        medium.write(records(range(5)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {0o600}
    assert b"%d" % os.getpid() == (directory / "lock").read_bytes()


def test_a_link_in_the_place_of_the_file_is_not_followed(opened: Open, directory: Path) -> None:
    victim = directory.with_name("victim")
    victim.write_bytes(b"precious")
    directory.mkdir()
    (directory / f"{SPACE.fingerprint.hex()[:16]}.spill").symlink_to(victim)
    medium = opened()
    assert medium.counters.rejected_files == 1
    medium.write(records(range(5)))
    assert found(medium, range(5)) == list(range(5))
    assert victim.read_bytes() == b"precious"


def test_a_second_store_on_a_directory_is_refused(opened: Open, directory: Path) -> None:
    medium = opened()
    message = f"--kv-tiering-ssd-dir {directory} is in use by process {os.getpid()}: stop it"
    with pytest.raises(DirectoryInUse, match=message):
        opened()
    medium.close()
    opened().close()


def test_another_models_file_is_counted_and_left_alone(opened: Open, directory: Path) -> None:
    other = KeySpace(model="another", dtype="bfloat16", window=8)
    medium = LocalMedium(directory, other, SIZE_BYTES, segment_bytes=SEGMENT_BYTES, persist=True)
    medium.write(records(range(5)))
    medium.close()
    bytes_before = file_of(medium).read_bytes()
    medium = opened()
    assert medium.counters.rejected_files == 1
    assert found(medium, range(5)) == []
    medium.write(records(range(100), SIZE))
    medium.close()
    (theirs,) = set(directory.iterdir()) - {file_of(medium)}
    assert theirs.read_bytes() == bytes_before


def test_another_models_file_under_this_ones_name_is_not_served(
    opened: Open, directory: Path
) -> None:
    other = KeySpace(model="another", dtype="bfloat16", window=8)
    medium = LocalMedium(directory, other, SIZE_BYTES, segment_bytes=SEGMENT_BYTES, persist=True)
    medium.write(records(range(5)))
    medium.close()
    file_of(medium).rename(directory / f"{SPACE.fingerprint.hex()[:16]}.spill")
    medium = opened()
    assert medium.counters.rejected_files == 1
    assert found(medium, range(5)) == []


def test_another_version_of_the_format_is_not_read(opened: Open) -> None:
    medium = opened()
    medium.write(records(range(5)))
    medium.close()
    with file_of(medium).open("r+b") as file:
        file.seek(8)
        file.write(b"\x02")
    medium = opened()
    assert medium.counters.rejected_files == 1
    assert found(medium, range(5)) == []


def test_a_smaller_bound_keeps_what_fits(opened: Open, directory: Path) -> None:
    medium = opened()
    medium.write(records(range(60), SIZE))
    medium.close()
    bound = SIZE_BYTES - 3 * SEGMENT_BYTES
    medium = LocalMedium(directory, SPACE, bound, segment_bytes=SEGMENT_BYTES, persist=True)
    assert 0 < len(found(medium, range(60))) < 60
    assert file_of(medium).stat().st_size <= bound
    assert medium.check_integrity() == []
    medium.write(records(range(60, 100), SIZE))
    assert medium.check_integrity() == []


@pytest.mark.parametrize("scanned", [False, True])
def test_every_flipped_bit_is_noticed(opened: Open, scanned: bool) -> None:
    medium = opened()
    medium.write(records(range(40), SIZE))
    kill(medium) if scanned else medium.close()
    path = file_of(medium)
    sound = path.read_bytes()
    generator = random.Random(scanned)
    lost = 0
    for _ in range(60):
        offset = generator.randrange(len(sound))
        flipped = bytearray(sound)
        flipped[offset] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        medium = opened()
        readings = medium.read(keys(range(40)), [None] * 40)
        wrong = [r.status for n, r in enumerate(readings) if not is_right(r, n)]
        assert set(wrong) <= {ReadStatus.MISS, ReadStatus.CORRUPT}
        counters = medium.counters
        noticed = counters.rejected_files + counters.rejected_segments + counters.rejected_records
        assert noticed + wrong.count(ReadStatus.CORRUPT) > 0 or not wrong
        assert len(found(medium, range(40))) == 40 - len(wrong)
        lost += len(wrong)
        assert medium.check_integrity() == []
        kill(medium)
    assert lost > 30


def test_garbage_in_the_place_of_the_file_is_rejected(opened: Open, directory: Path) -> None:
    directory.mkdir()
    path = directory / f"{SPACE.fingerprint.hex()[:16]}.spill"
    path.write_bytes(random.Random(0).randbytes(300_000))
    medium = opened()
    assert medium.counters.rejected_files == 1
    medium.write(records(range(5)))
    assert found(medium, range(5)) == list(range(5))


def test_records_on_a_full_disk_are_dropped(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    medium = opened(file_type=FailingFile)
    file = medium._file
    assert isinstance(file, FailingFile)
    medium.write(records(range(10), SIZE))

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file.before_write = full
    for start in range(10, 40, 10):
        statuses = medium.write(records(range(start, start + 10), SIZE))
        assert statuses == [WriteStatus.DISK_FULL] * 10
    assert found(medium, range(40)) == list(range(10))
    assert [r.message for r in caplog.records if "full" in r.message] == [
        f"the disk of {medium.directory} is full: windows are dropped that would be spilled"
    ]
    file.before_write = lambda: None
    assert medium.write(records(range(10, 20), SIZE)) == [WriteStatus.WRITTEN] * 10
    assert found(medium, range(40)) == list(range(20))
    assert medium.check_integrity() == []


@contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A tmpfs of so many bytes; skips where nothing may be mounted."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", name]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def test_a_disk_that_fills_up_within_a_batch_keeps_what_fits() -> None:
    with small_disk(1 << 20) as disk:
        medium = LocalMedium(disk / "spill", SPACE, 64 << 20, segment_bytes=4 << 20, persist=True)
        statuses = medium.write(records(range(100), 32 << 10))
        written = statuses.count(WriteStatus.WRITTEN)
        assert 20 < written < 32
        assert statuses.count(WriteStatus.DISK_FULL) == 100 - written
        right = [i for i, status in enumerate(statuses) if status is WriteStatus.WRITTEN]
        assert found(medium, range(100)) == right
        kill(medium)
        medium = LocalMedium(disk / "spill", SPACE, 64 << 20, segment_bytes=4 << 20, persist=True)
        assert set(right) <= set(found(medium, range(100)))
        medium.clear()
        assert WriteStatus.DISK_FULL not in medium.write(records(range(20), 32 << 10))
        medium.close()


def test_a_store_starts_on_a_disk_without_any_room() -> None:
    with small_disk(64 << 10) as disk:
        (disk / "spill").mkdir()
        with pytest.raises(OSError, match="No space"):
            (disk / "filler").write_bytes(bytes(1 << 20))
        medium = LocalMedium(disk / "spill", SPACE, 64 << 20)
        assert medium.write(records(range(3))) == [WriteStatus.DISK_FULL] * 3
        (disk / "filler").unlink()
        assert medium.write(records(range(3))) == [WriteStatus.WRITTEN] * 3
        medium.close()


def test_a_file_that_cannot_be_changed_is_left_and_another_one_used(tmp_path: Path) -> None:
    open_store = partial(
        LocalMedium, tmp_path, SPACE, SIZE_BYTES, segment_bytes=SEGMENT_BYTES, persist=True
    )
    medium = open_store()
    medium.write(records(range(5)))
    path = file_of(medium)
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode:
        medium.close()
        pytest.skip("needs the right to make a file immutable")
    try:
        # While it is open: reads go on, writes and deletions fail and are counted.
        assert found(medium, range(5)) == list(range(5))
        medium.delete([key(0)])
        assert medium.counters.reclaim_errors + medium.counters.deleted >= 1
        assert found(medium, range(5)) == [1, 2, 3, 4]
        kill(medium)
        medium = open_store()
        assert medium.counters.rejected_files == 1
        assert found(medium, range(5)) == []
        medium.write(records(range(5, 10)))
        assert found(medium, range(10)) == list(range(5, 10))
        medium.close()
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_a_directory_removed_while_it_is_used_is_made_again(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    medium = opened()
    medium.write(records(range(5)))
    shutil.rmtree(directory)
    assert found(medium, range(5)) == list(range(5))
    assert medium.write(records(range(5, 10))) == [WriteStatus.WRITTEN] * 5
    assert medium.counters.lost == 5
    assert found(medium, range(10)) == list(range(5, 10))
    assert file_of(medium).exists()
    assert sum("was removed" in line.message for line in caplog.records) == 1
    with pytest.raises(DirectoryInUse):
        opened()
    medium.close()


def test_a_record_larger_than_a_segment_is_refused(opened: Open) -> None:
    medium = opened()
    statuses = medium.write([record(0), record(1, SEGMENT_BYTES), record(2)])
    assert statuses == [WriteStatus.WRITTEN, WriteStatus.TOO_LARGE, WriteStatus.WRITTEN]
    assert found(medium, range(3)) == [0, 2]


def test_emptying_the_store_gives_the_disk_its_bytes_back(opened: Open) -> None:
    for empty in (LocalMedium.clear, lambda medium: medium.delete(keys(range(60)))):
        medium = opened(persist=False)
        medium.write(records(range(60), SIZE))
        empty(medium)
        assert medium.usage() == (0, 0, 0)
        assert medium._index == {}
        assert medium._segments == {}
        assert medium.counters.deleted == 60
        medium.write(records(range(60), SIZE))
        assert found(medium, range(60)) == list(range(60))
        medium.close()


def test_neighbours_are_read_with_one_call(opened: Open) -> None:
    medium = opened(file_type=FailingFile)
    medium.write(records(range(8), SIZE))
    medium.write(records(range(20, 22), SIZE))
    calls = []
    file = medium._file
    assert isinstance(file, FailingFile)
    file.before_read = lambda: calls.append(1)
    assert found(medium, range(8)) == list(range(8))
    assert len(calls) == 1


def test_a_failing_read_says_so_and_keeps_the_record(opened: Open) -> None:
    medium = opened(file_type=FailingFile)
    medium.write(records(range(2)))
    file = medium._file
    assert isinstance(file, FailingFile)

    def broken() -> None:
        raise OSError(errno.EIO, "Input/output error")

    file.before_read = broken
    readings = medium.read(keys(range(3)), [None] * 3)
    assert [r.status for r in readings] == [ReadStatus.ERROR, ReadStatus.ERROR, ReadStatus.MISS]
    file.before_read = lambda: None
    assert found(medium, range(3)) == [0, 1]


def test_segments_are_between_8_and_256_mib_and_at_most_1024() -> None:
    assert segment_bytes_for(64 << 20) == 8 << 20
    assert segment_bytes_for(4 << 30) == 64 << 20
    assert segment_bytes_for(100 << 30) == 256 << 20
    assert segment_bytes_for(2 << 40) == 2 << 30


def test_a_bound_of_too_few_segments_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="--kv-tiering-ssd-size must be at least 4 segments"):
        LocalMedium(directory, SPACE, 3 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
