"""The tiered KV pool and its allocator, as SGLang builds them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from qevict_kernels.memory import arena_memory
from qevict_tiers.observer import Shortage
from sglang_qevict.admission import TieredPrefillBudget
from sglang_qevict.fairness import FairPrefillBudget
from sglang_qevict.runtime import runtime

__all__ = ["TieredAllocator", "TieredKVPool"]


class TieredKVPool(MHATokenToKVPool):
    """Windows in one arena instead of one buffer a layer.

    SGLang addresses tokens logically (``page * W + offset``); where a window really lies
    only the tier manager knows. So nobody but the ``qevict`` backend can read it.
    """

    def _create_buffers(self) -> None:
        plan = runtime.require_plan()
        self.storage = arena_memory(plan.arena_bytes, self.device)
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        self.k_scale_buffer = self.v_scale_buffer = None

    def get_kv_size_bytes(self) -> int:
        """Bytes of windows and tables together, for SGLang's log."""
        return runtime.require_plan().total_bytes

    def get_kv_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """Always raises: tiered windows are not one buffer."""
        raise RuntimeError(
            "only the attention backend qevict reads and writes tiered KV windows, but this model "
            "wants a buffer of its own: drop --kv-tiering, or serve another model"
        )

    get_key_buffer = get_value_buffer = set_kv_buffer = get_kv_buffer


class TieredAllocator(PagedTokenToKVPoolAllocator):
    """Logical pages, gated by the claims of their requests.

    ``size`` and ``available_size`` stay purely logical, as SGLang's leak check wants them;
    what fits in bytes is asked where SGLang decides about requests.
    """

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> TieredPrefillBudget:
        """Admission control of one prefill pass."""
        state = runtime.require_state()
        budget = TieredPrefillBudget if state.turns is None else FairPrefillBudget
        return budget(
            self,
            tree_cache,
            state.ledger,
            observer=state.observer,
            num_mixed_decode_tokens=num_mixed_decode_tokens,
        )

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, **limits: Any
    ) -> int | None:
        """What a request may generate alone on an empty server; None if its prompt can't fit."""
        logical = super().max_new_tokens_for_memory(input_tokens, max_new_tokens, **limits)
        if logical is None:
            return None
        state = runtime.require_state()
        return state.ledger.max_new_tokens(input_tokens, logical, terms=state.coming_in)

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Any = None,
        spec_algorithm: Any = None,
    ) -> bool:
        """Whether these requests can decode their next token, in pages and in bytes.

        What is kept for reuse makes room first.
        """
        state = runtime.require_state()
        if not super().check_decode_capacity(
            num_tokens=num_tokens,
            tree_cache=tree_cache,
            requests=requests,
            spec_algorithm=spec_algorithm,
        ):
            state.observer.fell_short(Shortage.PAGES)
            return False
        rows = (request.kv.req_pool_idx for request in requests or ())
        if not state.can_decode(rows, tree_cache.evict_until):
            state.observer.fell_short(Shortage.BYTES)
            return False
        return True

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle check: what is wrong with claims, copies and views."""
        return runtime.require_state().check_when_changed()
