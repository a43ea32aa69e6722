"""The prefix cache under tiering: what finished requests leave, as whole pages in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    zero_match_result,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from qevict_tiers.claims import Terms
from qevict_tiers.observer import PrefixCut
from sglang_qevict.arguments import refusing
from sglang_qevict.runtime import runtime
from sglang_qevict.spill import SpilledRequest
from sglang_qevict.state import MayGo

__all__ = ["TieredRadixCache", "create_cache"]

_MATCHED = "_kv_tiering_matched"
"""An attribute of SGLang's requests: pages that the last match found, known on the host."""

_SPILLED = "_kv_tiering_spilled"
"""The same: what the SSD tier has and gets of the request."""

_RECALLED = "_kv_tiering_recalled"
"""The same: token locations of its own, for the prefix that the SSD tier has read for it."""

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._may_go: MayGo | None = None
        self._first_pages: dict[Any, int] = {}
        super().__init__(*args, **kwargs)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish what a finished request may leave of its tokens ``[0, up_to)``."""
        state = runtime.require_state()
        if not req.finished():
            return
        row, start = req.kv.req_pool_idx, req.kv.cache_protected_len
        state.finish(row, min(up_to, state.launched_tokens(row)))
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
        setattr(req, _RECALLED, None)
        matched = result.device_prefix_len // self.page_size
        pages = self._pages_to(result.last_device_node, matched) if matched else []
        prompt = len(req.origin_input_ids) + len(req.output_ids)
        left = max(0, req.sampling_params.max_new_tokens - len(req.output_ids))
        terms = state.terms.of(req)
        usable = state.ledger.usable_pages(pages, prompt, prompt + left, terms)
        if recalled := self._to_recall(req, params.key, prompt, usable, terms):
            nothing = zero_match_result(self, result, extra_key=req.extra_key)
            return nothing._replace(host_hit_length=recalled * self.page_size)
        setattr(req, _MATCHED, pages[:usable])
        if usable == matched:
            return result
        cut = self._cut(pages, usable, prompt, terms)
        setattr(req, _CUT, (cut, (matched - usable) * self.page_size))
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

    def _to_recall(self, req: Any, key: RadixKey, prompt: int, usable: int, terms: Terms) -> int:
        """How many windows to read from the SSD tier, instead of what memory has."""
        state = runtime.require_state()
        if req.skip_radix_cache_insert:
            return 0
        spilled = getattr(req, _SPILLED, None)
        if spilled is None:
            budget, usual = (c.budget.config.budget for c in (terms.claims, state.claims))
            spilled = state.spill.request(
                req.cache_salt,
                req.extra_key,
                lambda start, stop: _tokens(req, start, stop),
                made="" if budget == usual else f"budget {budget}",
                # An adapter's files may be others when the next server begins.
                is_lasting=req.lora_id is None,
            )
            if spilled is None:
                return 0
            setattr(req, _SPILLED, spilled)
        windows = len(key) // self.page_size
        # Segments are routed before their prompt's end is known; what is recalled can't be.
        if not windows or not terms.claims.is_exact(prompt):
            return 0
        return state.spill.find(spilled, windows, usable)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Read what a match promised from the SSD tier, into pages of the request's own.

        Returns the tokens that are there, all or none, and the node of the tree that they follow.
        """
        req, tokens = params.req, params.host_hit_length
        allocator = self.token_to_kv_pool_allocator
        self._free_tokens(tokens)
        spill, spilled = runtime.require_state().spill, getattr(req, _SPILLED)
        locations = allocator.alloc(tokens)
        # Asked on every rank, whatever came of the allocation.
        if spill.read(spilled, tokens // self.page_size, wanted=locations is not None):
            setattr(req, _RECALLED, locations)
            return tokens, req.last_node
        if locations is not None:
            allocator.free(locations)
        return 0, req.last_node

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Where a request's prefix lies: on the tree's way, or in pages of its own."""
        recalled: torch.Tensor | None = getattr(req, _RECALLED, None)
        if recalled is not None:
            return recalled[: req.prefix_len]
        found: torch.Tensor = super().prefix_device_indices(req)
        return found

    def load_back_is_cache_owned(self) -> bool:
        """False: pages of a recalled prefix are the request's own until it finishes."""
        return False

    def spilled(self, req: Any) -> SpilledRequest | None:
        """What the SSD tier has and gets of a request."""
        return getattr(req, _SPILLED, None)

    def matched_pages(self, req: Any) -> Sequence[int]:
        """Pages of the prefix that a request is about to share: what its last match found."""
        if getattr(req, _RECALLED, None) is not None:
            return ()
        count = req.prefix_len // self.page_size
        pages: Sequence[int] = getattr(req, _MATCHED, ())
        assert count <= len(pages), "a request reuses more than its last match found"
        return pages[:count]

    def prefix_cut(self, req: Any) -> tuple[PrefixCut, int] | None:
        """Why, and by how many tokens, a request reuses less than the tree has; None if it
        doesn't."""
        return getattr(req, _CUT, None)

    @staticmethod
    def _cut(pages: Sequence[int], usable: int, prompt_tokens: int, terms: Terms) -> PrefixCut:
        kept = runtime.require_state().ledger.kept
        is_full = not terms.claims.budget.is_tiered(prompt_tokens)
        only_full = is_full and usable == kept.num_full(pages)
        return PrefixCut.SHORT_PROMPT if only_full else PrefixCut.ROOM

    def _pages_to(self, node: Any, count: int) -> list[int]:
        """The first so many pages on the way to a node (waits for the device)."""
        locations = self.path_device_indices(node)[: count * self.page_size : self.page_size]
        pages: list[int] = (locations // self.page_size).tolist()
        return pages

    def evict_until(self, enough: Callable[[], bool], may_go: MayGo | None = None) -> None:
        """Evict unlocked leaves in the tree's order until it is enough, or none is left.

        ``may_go``: of the first page of a leaf, asked when its turn comes; others are passed over.
        """
        if tokens := self.evictable_size():
            self._may_go = may_go
            try:
                super().evict_for_alloc(
                    EvictParams(num_tokens=tokens), allocation_reclaim_satisfied=enough
                )
            finally:
                self._may_go = None

    def evict_for_alloc(self, params: EvictParams, **options: Any) -> EvictResult:
        """SGLang needs so many logical tokens more: tenants give them as they give bytes."""
        if runtime.require_state().ledger.tenancy is None:
            return super().evict_for_alloc(params, **options)
        before = self.token_to_kv_pool_allocator.available_size()
        return EvictResult(num_tokens_evicted=self._free_tokens(before + params.num_tokens))

    def _free_tokens(self, tokens: int) -> int:
        """Evict until so many logical tokens are free; returns how many were evicted."""
        state, allocator = runtime.require_state(), self.token_to_kv_pool_allocator
        before = allocator.available_size()
        for gives in state.ledger.givers(must=True):
            self.evict_until(lambda: allocator.available_size() >= tokens, state.may_go(gives))
        return int(allocator.available_size() - before)

    def _evict_device_leaf(self, node_id: Any, tracker: Any) -> Any:
        """Of the walk over leaves: this one goes, unless it may not."""
        if self._may_go is not None and not self._may_go(self._first_page(node_id)):
            return None
        self._first_pages.pop(node_id, None)
        return super()._evict_device_leaf(node_id, tracker)

    def _first_page(self, node_id: Any) -> int:
        """The first page of a node, or one before it that the same request left.

        The first time that a node is asked for waits for the device.
        """
        page = self._first_pages.get(node_id)
        if page is None:
            (path,) = self.tree_core.collect_path_info([node_id])
            locations = self.tree_core.collect_full_device_indices(node_id, path[-1].parent_id)
            page = self._first_pages[node_id] = int(locations[0]) // self.page_size
        return page

    def reset(self) -> None:
        """Everything was flushed."""
        self._first_pages.clear()
        super().reset()

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


def _tokens(req: Any, start: int, stop: int) -> list[int]:
    """Tokens of a request of SGLang's, as far as it has them."""
    prompt = len(req.origin_input_ids)
    generated = req.output_ids[max(0, start - prompt) : max(0, stop - prompt)]
    return [*req.origin_input_ids[start:stop], *generated]


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
    cache = create_unified_radix_cache(context, cache_class=TieredRadixCache)
    runtime.require_state().spill.decide_with(cache.attn_tp_group)
    return cache
