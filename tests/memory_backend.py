"""A HiCache storage backend of one's own, for the factory's ``dynamic``: tensors in a dict."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig


class MemoryBackend(HiCacheStorage):
    def __init__(self, config: HiCacheStorageConfig, more: dict[str, Any]) -> None:
        self.pages: dict[str, torch.Tensor] = {}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return target_location.copy_(self.pages[key]) if key in self.pages else None

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        return [self.get(key, room) for key, room in zip(keys, target_locations, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self.pages.setdefault(key, value.clone())
        return True

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        return key in self.pages
