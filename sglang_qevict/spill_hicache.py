"""Spilled records in one of SGLang's HiCache storage backends.

A backend keeps pages of one size under string keys. A record is its header and its payload, cut
into pages; the header is the one of the local store, so that only verified bytes are served here
too. Backends with SGLang's newer interface take pages from a host pool, of which ``RecordPages``
has what they use; the others (``file``, and ``dynamic`` without ``interface_v1``) take tensors.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

from qevict_tiers.spill.format import FormatError, Frame, RecordHeader, checksum, frame_bytes
from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.medium import Medium
from qevict_tiers.spill.records import (
    Reading,
    ReadStatus,
    Record,
    SpillCounters,
    WriteStatus,
    as_bytes,
)

__all__ = ["HiCacheMedium", "RecordPages"]

POOLED = {
    *("hf3fs", "mooncake", "nixl", "npu_memcache", "eic", "simm", "mori", "tensorcast"),
    "seaweedfs",
}
"""Backends with SGLang's newer interface, as its cache controller has them (0.5.23)."""

BATCH_PAGES = 32
MISS, CORRUPT = Reading(ReadStatus.MISS), Reading(ReadStatus.CORRUPT)


class RecordPages:
    """Host memory for ``num_pages`` pages, as storage backends expect of a host KV pool.

    A page counts as one token, in halves where a backend wants keys and values apart.
    """

    layout = "layer_first"
    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.kv_buffer = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
        self.size_per_token = page_bytes

    def get_size_per_token(self) -> int:
        """Bytes of a page."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Bytes of half a page."""
        return self.size_per_token // 2

    def get_data_page(self, index: int | torch.Tensor, flat: bool = True) -> torch.Tensor:
        """One page."""
        page: torch.Tensor = self.kv_buffer[int(index)]
        return page if flat else page.view(2, -1)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for a page."""
        return torch.empty(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int | torch.Tensor, data: torch.Tensor) -> None:
        """Fill one page."""
        self.kv_buffer[int(index)] = data

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Addresses and sizes of both halves of each page."""
        half = self.size_per_token // 2
        starts = [self.kv_buffer[int(index)].data_ptr() for index in indices]
        addresses = [address for start in starts for address in (start, start + half)]
        return addresses, [half] * len(addresses)


class HiCacheMedium(Medium):
    """Records in the storage backend ``name`` of SGLang, with its extra configuration.

    ``page_bytes`` should hold a whole record (its bytes and 320 for the header), so that one is
    read and written at once. The backend has its own bound and eviction. It can't delete: what
    was deleted, or cleared, may be found again after a restart with ``persist``, under a key that
    names its content and its tenant.

    Raises ``ValueError`` for a backend that SGLang doesn't have or that refuses its configuration.
    """

    contains_blocks = True

    def __init__(
        self,
        name: str,
        extra_config: Mapping[str, Any],
        page_bytes: int,
        *,
        persist: bool = False,
    ) -> None:
        self.counters = SpillCounters()
        self.persists = persist
        self._page_bytes = page_bytes + page_bytes % 2
        self._pooled = name in POOLED or bool(extra_config.get("interface_v1"))
        # Keys of a store that is not to persist are never found by another one.
        self._generation = 0 if persist else secrets.randbits(63)
        # Keys name the rank already: to the backend, each is the only one.
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name="qevict-spill",
            extra_config=dict(extra_config),
        )
        # One half for the writer, one for whichever reader has the turn.
        self._pool = RecordPages(2 * BATCH_PAGES if self._pooled else 1, self._page_bytes)
        self._turns = (threading.Lock(), threading.Lock())
        try:
            self._backend: HiCacheStorage = StorageBackendFactory.create_backend(
                name, config, self._pool
            )
            self._backend.register_mem_pool_host(self._pool)
        except (ValueError, ImportError, RuntimeError, OSError) as error:
            raise ValueError(f"--kv-tiering-spill-backend {name} can't be used: {error}") from error

    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        pages = [self._pages(record) for record in records]
        written = iter(self._set(list(chain.from_iterable(pages))))
        stored = [all(next(written) for _ in group) for group in pages]
        self.counters.add(medium_written_bytes=self._page_bytes * sum(map(len, pages)))
        return [WriteStatus.WRITTEN if ok else WriteStatus.ERROR for ok in stored]

    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        there = [key for key, found in zip(keys, self.contains(keys), strict=True) if found]
        first = dict(zip(there, self._get([self._name(key, 0) for key in there]), strict=True))
        rest = {key: self._rest(key, page) for key, page in first.items() if page is not None}
        more = iter(self._get(list(chain.from_iterable(rest.values()))))
        pages = {key: [first[key], *(next(more) for _ in names)] for key, names in rest.items()}
        return [
            self._reading(key, pages[key], buffer) if key in pages else MISS
            for key, buffer in zip(keys, into, strict=True)
        ]

    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        names = [self._name(key, 0) for key in keys]
        found: list[bool] = []
        while len(found) < len(names):
            # How many there are in a row, from the first.
            run = self._backend.batch_exists(names[len(found) :])
            found += [True] * run
            if len(found) < len(names):
                found.append(False)
        return found

    def delete(self, keys: Sequence[SpillKey]) -> None:
        self.counters.add(reclaim_errors=len(keys))

    def clear(self) -> None:
        self._generation = secrets.randbits(63)

    def close(self) -> None:
        close = getattr(self._backend, "close", None)  # not all backends have one
        if close is not None:
            close()

    def usage(self) -> tuple[int, int, int]:
        return -1, -1, -1

    def _name(self, key: SpillKey, page: int) -> str:
        return f"{self._generation:016x}-{key.hex()}-{page}"

    def _pages(self, record: Record) -> list[tuple[str, torch.Tensor]]:
        """A record's pages under their names; the last one is filled up with zeros."""
        payload = as_bytes(record.payload)
        header = RecordHeader(
            self._generation, record.key, payload.nbytes, checksum(payload), record.contents
        ).packed()
        count = -(-(len(header) + payload.nbytes) // self._page_bytes)
        data = torch.zeros(count, self._page_bytes, dtype=torch.uint8)
        flat = data.view(-1).numpy().data
        flat[: len(header)] = header
        flat[len(header) : len(header) + payload.nbytes] = payload
        return [(self._name(record.key, page), data[page]) for page in range(count)]

    def _rest(self, key: SpillKey, first: torch.Tensor) -> list[str]:
        """Names of a record's further pages, by its header; none where that is damaged."""
        data = first.numpy().data
        try:
            size = frame_bytes(Frame.RECORD, data) + RecordHeader.unpacked(data).payload_bytes
        except FormatError:
            return []
        return [self._name(key, page) for page in range(1, -(-size // self._page_bytes))]

    def _reading(
        self, key: SpillKey, pages: Sequence[torch.Tensor | None], into: memoryview | None
    ) -> Reading:
        found = [page for page in pages if page is not None]
        if len(found) < len(pages):
            return MISS
        data = (found[0] if len(found) == 1 else torch.cat(found)).numpy().data
        try:
            start = frame_bytes(Frame.RECORD, data)
            header = RecordHeader.unpacked(data)
        except FormatError:
            return CORRUPT
        payload = data[start : start + header.payload_bytes]
        expected = (self._generation, key, payload.nbytes, checksum(payload))
        if header[:4] != expected:
            return CORRUPT
        if into is None:
            return Reading(ReadStatus.HIT, payload, header.contents)
        if into.nbytes != payload.nbytes:
            return Reading(ReadStatus.WRONG_SIZE)
        into[:] = payload
        return Reading(ReadStatus.HIT, into, header.contents)

    # The two interfaces of backends.

    def _set(self, pages: Sequence[tuple[str, torch.Tensor]]) -> list[bool]:
        if not self._pooled:
            return [bool(self._backend.set(name, data)) for name, data in pages]
        done: list[bool] = []
        with self._turns[0]:
            while len(done) < len(pages):
                batch = pages[len(done) : len(done) + BATCH_PAGES]
                indices = torch.arange(len(batch))
                for index, (_, data) in enumerate(batch):
                    self._pool.set_from_flat_data_page(index, data)
                done += self._backend.batch_set_v1([name for name, _ in batch], indices)
        return done

    def _get(self, names: Sequence[str]) -> list[torch.Tensor | None]:
        if not self._pooled:
            room = self._pool.get_dummy_flat_data_page
            return [self._backend.get(name, room()) for name in names]
        found: list[torch.Tensor | None] = []
        with self._turns[1]:
            while len(found) < len(names):
                batch = names[len(found) : len(found) + BATCH_PAGES]
                indices = torch.arange(BATCH_PAGES, BATCH_PAGES + len(batch))
                answers = self._backend.batch_get_v1(list(batch), indices)
                found += [
                    self._pool.get_data_page(index).clone() if ok else None
                    for index, ok in zip(indices, answers, strict=True)
                ]
        return found
