"""Spilled records in SGLang's own storage backends: file, hf3fs (its mock client) and dynamic."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from qevict_tiers.spill.records import ReadStatus, WriteStatus
from qevict_tiers.spill.store import SpillStore
from sglang_qevict.spill_hicache import HiCacheMedium
from spill_cases import is_right, key, keys, records

PAGE_BYTES = 4096
SOON = 30

Open = Callable[..., HiCacheMedium]


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """The hf3fs backend sets handlers of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=["file", "hf3fs", "dynamic"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "pages"))
    config = tmp_path / "hf3fs.json"
    prefix = str(tmp_path / "pages")
    config.write_text(
        json.dumps({"file_path_prefix": prefix, "file_size": 8 << 20, "numjobs": 2, "entries": 4})
    )
    monkeypatch.setenv("SGLANG_HICACHE_HF3FS_CONFIG_PATH", str(config))
    extra = {
        "file": {},
        "hf3fs": {"use_mock_hf3fs_client": True},
        "dynamic": {
            "backend_name": "memory",
            "module_path": "memory_backend",
            "class_name": "MemoryBackend",
        },
    }[request.param]
    return partial(HiCacheMedium, request.param, extra, PAGE_BYTES)


@pytest.mark.parametrize("size", [1, 3000, 20_000])
def test_records_of_one_and_of_several_pages_come_back(opened: Open, size: int) -> None:
    medium = opened()
    assert medium.contains(keys(range(3))) == [False] * 3
    assert medium.write(records(range(0, 80, 2), size)) == [WriteStatus.WRITTEN] * 40
    assert medium.contains(keys(range(6))) == [True, False] * 3
    order = random.Random(0).sample(range(80), 80)
    buffers = [memoryview(bytearray(size)) if n % 3 else None for n in order]
    for number, reading in zip(order, medium.read(keys(order), buffers), strict=True):
        right = is_right(reading, number)
        assert right if number % 2 == 0 else reading.status is ReadStatus.MISS
    (reading,) = medium.read([key(0)], [memoryview(bytearray(size + 1))])
    assert reading.status is ReadStatus.WRONG_SIZE
    medium.close()


def test_the_store_works_on_it(opened: Open) -> None:
    store = SpillStore(opened())
    assert store.put(records(range(10))).result(SOON) == 10
    assert store.contains(keys(range(11))).result(SOON) == [True] * 10 + [False]
    assert all(map(is_right, store.get(keys(range(10))).result(SOON), range(10)))
    store.clear().result(SOON)
    assert store.contains(keys(range(10))).result(SOON) == [False] * 10
    store.delete([key(0)]).result(SOON)
    assert store.counters.reclaim_errors == 1
    store.close()


def test_another_run_finds_only_what_was_to_persist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "pages"))
    for persist in (False, True):
        HiCacheMedium("file", {}, PAGE_BYTES, persist=persist).write(records(range(3)))
        medium = HiCacheMedium("file", {}, PAGE_BYTES, persist=persist)
        assert medium.contains(keys(range(3))) == [persist] * 3


def test_flipped_bits_and_lost_pages_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "pages"))
    medium = HiCacheMedium("file", {}, PAGE_BYTES)
    medium.write(records(range(4), 7000))
    generator = random.Random(0)
    pages = sorted((tmp_path / "pages").glob("*.bin"))
    assert len(pages) == 8
    for number in range(4):
        (page,) = [p for p in pages if f"{key(number).hex()}-0" in p.name]
        data = bytearray(page.read_bytes())
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        page.write_bytes(data)
    assert [r.status for r in medium.read(keys(range(4)), [None] * 4)] == [ReadStatus.CORRUPT] * 4
    for page in pages:
        if page.name.split("-")[2].startswith("1"):
            page.unlink()
    readings = medium.read(keys(range(4)), [None] * 4)
    assert {r.status for r in readings} <= {ReadStatus.MISS, ReadStatus.CORRUPT}


@pytest.mark.parametrize("name", ["lmcache", "dynamic", "nonsense"])
def test_a_backend_that_cannot_be_made_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-tiering-spill-backend {name} can't be used: "):
        HiCacheMedium(name, {}, PAGE_BYTES)
