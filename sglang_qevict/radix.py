"""The prefix cache under tiering: requests publish when they finish, or not at all."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_qevict.arguments import refusing

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
    """The cache for SGLang's ``--radix-cache-backend qevict``.

    Raises ``ValueError`` for a model for which SGLang disables the cache itself: it would
    then admit requests with ``ignore_eos`` without asking for their claims.
    """
    with refusing(context.server_args):
        if context.disable_radix_cache:
            raise ValueError(
                "--kv-tiering qevict admits requests through the prefix cache, which SGLang "
                "disables for this model: drop --kv-tiering, or serve another model"
            )
    return create_unified_radix_cache(context, cache_class=TieredRadixCache)
