"""The prefix cache under tiering: what finished requests leave, as whole pages in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from qevict_tiers.observer import PrefixCut
from sglang_qevict.arguments import refusing
from sglang_qevict.runtime import runtime

__all__ = ["TieredRadixCache", "create_cache"]

_MATCHED = "_kv_tiering_matched"
"""An attribute of SGLang's requests: pages that the last match found, known on the host."""

_CUT = "_kv_tiering_cut"
"""Another: why, and by how many tokens, the last match is shorter than what the tree has."""

_LEAF_WINDOWS, _MAX_LEAVES = 64, 32
"""Windows that one leaf may have, which is what is evicted at once; but a request is not split into
more leaves, since every split walks the tree."""


class TieredRadixCache(UnifiedRadixCache):
    """A tree that a request's pages enter when it has finished, and not before.

    So nothing is re-pointed or shared under a decode in flight: a request's pages are its
    own, or shared, from its first token to its last. What enters has a copy in every layer
    (``TierManager.publish``), so that a match is whole wherever it ends.
    """

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish what a finished request may leave of its tokens ``[0, up_to)``."""
        state = runtime.require_state()
        if not req.finished():
            return
        row, start = req.kv.req_pool_idx, req.kv.cache_protected_len
        up_to = min(up_to, state.publishable_tokens(row)) // self.page_size * self.page_size
        if up_to <= start:
            return
        first, last = start // self.page_size, up_to // self.page_size
        before = state.pages(row, range(first, last))
        super().checkpoint(req, up_to=up_to, **kwargs)
        last = req.kv.cache_protected_len // self.page_size
        # Where the tree had these tokens already, the row has its pages now, not its own.
        after = state.pages(row, range(first, last))
        own, found = torch.stack([before[: last - first], after]).tolist()
        adopted = [a == b for a, b in zip(own, found, strict=True)]
        new = adopted.index(True) if any(adopted) else len(own)
        assert all(adopted[new:]), "the tree took pages from the middle of a row"
        state.raise_kept(row, first, found[:new])
        if new < len(own):
            state.publish(row, first + new, own[new:])
            self._bound_leaves(req, first + new, last)

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        """SGLang's match, shortened to what the request can use."""
        result = super().match_prefix(params)
        state, req = runtime.state, params.req
        if state is None or req is None:
            return result
        setattr(req, _MATCHED, ())
        setattr(req, _CUT, None)
        if not result.device_prefix_len:
            return result
        matched = result.device_prefix_len // self.page_size
        prompt = len(req.origin_input_ids) + len(req.output_ids)
        left = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
        pages = self._pages_to(result.last_device_node, matched)
        usable = state.ledger.usable_pages(pages, prompt, prompt + left)
        setattr(req, _MATCHED, pages[:usable])
        if usable == matched:
            return result
        setattr(req, _CUT, (self._cut(pages, usable, prompt), (matched - usable) * self.page_size))
        key = params.key
        limited = RadixKey(
            key.token_ids,
            key.extra_key,
            is_bigram=key.is_bigram,
            limit=usable * self.page_size,
            cache_salt=key.cache_salt,
        )
        return super().match_prefix(
            MatchPrefixParams(key=limited, cow_mamba=params.cow_mamba, req=req)
        )

    def matched_pages(self, req: Any) -> Sequence[int]:
        """Pages of the prefix that a request is about to reuse: what its last match found."""
        count = req.prefix_len // self.page_size
        pages: Sequence[int] = getattr(req, _MATCHED, ())
        assert count <= len(pages), "a request reuses more than its last match found"
        return pages[:count]

    def prefix_cut(self, req: Any) -> tuple[PrefixCut, int] | None:
        """Why, and by how many tokens, a request reuses less than the tree has; None if it
        doesn't."""
        return getattr(req, _CUT, None)

    @staticmethod
    def _cut(pages: Sequence[int], usable: int, prompt_tokens: int) -> PrefixCut:
        ledger = runtime.require_state().ledger
        is_short = prompt_tokens <= ledger.claims.budget.config.min_context
        short = is_short and usable == ledger.kept.num_full(pages)
        return PrefixCut.SHORT_PROMPT if short else PrefixCut.ROOM

    def _pages_to(self, node: Any, count: int) -> list[int]:
        """The first so many pages on the way to a node (waits for the device)."""
        locations = self.path_device_indices(node)[: count * self.page_size : self.page_size]
        pages: list[int] = (locations // self.page_size).tolist()
        return pages

    def evict_until(self, enough: Callable[[], bool]) -> None:
        """Evict unlocked leaves in the tree's order until it is enough, or none is left."""
        if tokens := self.evictable_size():
            self.evict_for_alloc(
                EvictParams(num_tokens=tokens), allocation_reclaim_satisfied=enough
            )

    def supports_fast_match_prefix(self) -> bool:
        """False: waiting requests needn't be matched on every scheduling pass."""
        return False

    def _bound_leaves(self, req: Any, start: int, end: int) -> None:
        """Split what was just inserted, so that it can be evicted piece by piece from its end."""
        tokens = req.full_untruncated_fill_ids
        leaf = max(_LEAF_WINDOWS, -(-(end - start) // _MAX_LEAVES))
        first = (start // leaf + 1) * leaf
        for boundary in range(first, end, leaf):
            self.touch_prefix(
                RadixKey(
                    tokens,
                    req.extra_key,
                    limit=boundary * self.page_size,
                    cache_salt=req.cache_salt,
                )
            )

    def _drain_device_frees(self, device_frees: dict[Any, list[torch.Tensor]]) -> None:
        """What is evicted from the tree is kept no longer."""
        for locations in device_frees.get(BASE_COMPONENT_TYPE, ()):
            runtime.require_state().drop(locations)
        super()._drain_device_frees(device_frees)


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
