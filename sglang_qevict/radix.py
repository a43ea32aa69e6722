"""The prefix cache under tiering: requests publish when they finish, or not at all."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

__all__ = ["TieredRadixCache", "create_cache"]


class TieredRadixCache(UnifiedRadixCache):
    """A tree that a running request's pages never enter.

    So nothing is re-pointed or shared under a decode in flight: a request's pages are its
    own from its first token to its last.
    """

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publishes nothing: windows of a request end with it."""

    def supports_fast_match_prefix(self) -> bool:
        """False: waiting requests needn't be matched on every scheduling pass."""
        return False


def create_cache(context: Any) -> Any:
    """The cache for SGLang's ``--radix-cache-backend qevict``."""
    return create_unified_radix_cache(context, cache_class=TieredRadixCache)
