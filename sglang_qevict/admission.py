"""Admission of prefills by claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from qevict_tiers.claims import ClaimLedger, Prompt, Sharing, Terms
from qevict_tiers.observer import Observer, Wait

__all__ = ["Candidate", "TieredPrefillBudget", "consider", "continue_prompt", "project_running"]


_Limit = TypeVar("_Limit", int, int | None)


@dataclass(frozen=True)
class Candidate:
    """What a request that this pass may admit takes, in bytes: now, and at most as all grow.

    One whose prompt takes several passes may still be in it while others have grown.
    """

    prefill: int = 0
    grown: int = 0

    def __add__(self, other: Candidate) -> Candidate:
        return Candidate(self.prefill + other.prefill, self.grown + other.grown)


class Continued(NamedTuple):
    """The prompt in progress whose next chunk comes first in a pass."""

    row: int
    prompt_tokens: int


class TieredPrefillBudget(PrefillBudget):
    """SGLang's token budget, and on top of it the bytes that requests may come to need.

    A request is admitted if the claims of all rows, its own prefill included, fit the
    arena, and if they still fit while everybody grows as far as SGLang expects. What is kept
    for reuse does not count unless a row shares it: it makes room before the launch.
    """

    def __init__(
        self,
        allocator: Any,
        tree_cache: Any,
        ledger: ClaimLedger,
        *,
        observer: Observer | None = None,
        num_mixed_decode_tokens: int = 0,
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.terms = ledger.terms
        self.final_tokens: dict[int, int] = {}
        self.continued: Continued | None = None
        self.prefix: Sequence[int] = ()
        self._ledger = ledger
        self._observer = observer or Observer()
        self._locked: set[int] = set()
        self._candidate = Candidate()
        self._admitted = Candidate()
        self._truncates = False
        self._has_truncated = False
        self._candidate_tokens = 0
        self._projected: tuple[tuple[int, int], int] | None = None

    @rank_consensus(same_results=True)
    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        chunk_limit: int | None,
        **others: Any,
    ) -> tuple[bool, int | None]:
        """Whether a request may start its prefill, and how long its first chunk may be."""
        if total_tokens >= self._free_page_tokens:
            self._wait(Wait.PAGES)
            return False, None
        claims = self.terms.claims
        start = input_tokens - extend_input_len
        limit = self._chunk_limit(input_tokens, start, chunk_limit)
        truncated = limit is not None and self.ceil_paged_tokens(extend_input_len) > limit
        if truncated and (self._has_truncated or claims.needs_one_chunk(input_tokens)):
            # SGLang can carry one unfinished prompt from pass to pass, not two; and some
            # prompts wait for a pass that has a whole chunk left.
            self._wait(Wait.CHUNK)
            return True, 0
        self._truncates = truncated
        sharing = Sharing(len(self.prefix))
        self._candidate_tokens = total_tokens
        prefill = claims.prefill_bytes(Prompt(input_tokens, whole=not truncated), sharing)
        final_tokens = input_tokens + max_new_tokens
        grown = claims.growing_bytes(input_tokens, input_tokens, final_tokens, sharing)
        self._candidate = Candidate(prefill, max(prefill, grown) if truncated else grown)
        if wait := self._lack(self._candidate):
            self._wait(wait)
            return False, None
        return True, limit

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        """How long the next chunk of the prompt in progress may be."""
        assert self.continued is not None
        prompt = self.continued.prompt_tokens
        limit = self._chunk_limit(prompt, prompt - extend_input_len, chunk_limit)
        self._has_truncated = limit < extend_input_len
        if not self._has_truncated:
            return limit
        limit = limit // self.page_size * self.page_size
        self._hold(extend_input_len - limit + max_new_tokens)
        return limit if limit > 0 else None

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        """How much of a chunk the prompt in progress may use: its bytes are claimed already."""
        available = min(chunk_limit, int(self._free_page_tokens))
        return available if available >= self.page_size else chunk_limit

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        is_chunked_continuation: bool = False,
        **others: Any,
    ) -> None:
        """Account for a request that was admitted."""
        super().reserve(
            extend_input_len,
            max_new_tokens,
            is_chunked_continuation=is_chunked_continuation,
            **others,
        )
        if is_chunked_continuation:
            assert self.continued is not None
            row, prompt_tokens = self.continued
            self.final_tokens[row] = prompt_tokens + max_new_tokens
        else:
            if self._truncates:
                self._has_truncated = True
                self._hold(self._candidate_tokens - extend_input_len - self.page_size)
            self._locked.update(self.prefix)
            self._admit(self._candidate)

    @property
    def remaining_total(self) -> int:
        """Tokens that may still be promised: what pages and what bytes allow, the lesser."""
        budget = self._ledger.claims.budget
        page_bytes = budget.num_layers * budget.full_bytes * budget.config.budget
        ledger = self._ledger
        needed = ledger.least_bytes + ledger.kept.bytes_to_lock(self._locked)
        free = ledger.capacity_bytes - needed - self._admitted.prefill
        return min(self._free_page_tokens, int(free / page_bytes) * self.page_size)

    @property
    def _free_page_tokens(self) -> int:
        """Tokens that may still be promised by pages alone."""
        return super().remaining_total

    def _admit(self, candidate: Candidate) -> None:
        """The candidate is admitted."""
        self._admitted += candidate

    def _wait(self, wait: Wait) -> None:
        """The candidate is not admitted."""
        self._observer.waited(wait)

    def _hold(self, tokens: int) -> None:
        """Keep pages for what a prompt needs in later passes.

        A chunk that ends at a routing point leaves room in its pass, where others must not take
        them.
        """
        self.total_offset += self.ceil_paged_tokens(tokens)
        self.current_offset += self.ceil_paged_tokens(tokens)

    def _lack(self, candidate: Candidate) -> Wait | None:
        """What there is no room for, or None."""
        ledger, admitted = self._ledger, self._admitted
        now = ledger.least_bytes + admitted.prefill + candidate.prefill
        later = self._projected_bytes() + admitted.grown + candidate.grown
        # Asked anew each time: a pass may preempt a row that shared these pages.
        locked = ledger.kept.bytes_to_lock(self._locked.union(self.prefix))
        if now + locked > ledger.capacity_bytes:
            return Wait.BYTES
        return Wait.GROWTH if later + locked > ledger.capacity_bytes else None

    def _projected_bytes(self) -> int:
        """What all rows claim as they grow; the same for each candidate, unless a row goes."""
        key = (self._ledger.version, len(self.final_tokens))
        if self._projected is None or self._projected[0] != key:
            self._projected = key, self._ledger.projected_bytes(self.final_tokens)
        return self._projected[1]

    def _chunk_limit(self, prompt: int, start: int, limit: _Limit) -> int | _Limit:
        """SGLang's limit, shortened so that a chunk ends at a routing point at most."""
        ours = self._ledger.claims.chunk_limit(prompt, start)
        if ours >= prompt - start:
            return limit
        return ours if limit is None else min(limit, ours)


def project_running(adder: Any) -> None:
    """Tell the budget of a new pass how far SGLang expects running requests to grow.

    ``adder``: SGLang's ``PrefillAdder``, just constructed.
    """
    budget = adder.memory_budget
    if not isinstance(budget, TieredPrefillBudget) or adder.running_batch is None:
        return
    for request in adder.running_batch.reqs:
        if request.kv.holds_kv:
            growth = adder._get_running_request_total_token_offset(request)
            held = len(request.origin_input_ids) + len(request.output_ids)
            budget.final_tokens[request.kv.req_pool_idx] = held + max(0, int(growth))


def consider(adder: Any, request: Any, terms: Terms) -> None:
    """Tell the budget of a pass the next candidate's terms, and which kept pages it would share."""
    budget = adder.memory_budget
    if isinstance(budget, TieredPrefillBudget):
        budget.terms = terms
        budget.prefix = adder.tree_cache.matched_pages(request)


def continue_prompt(adder: Any, request: Any) -> None:
    """Tell the budget of a pass which prompt in progress is about to get its next chunk."""
    if isinstance(adder.memory_budget, TieredPrefillBudget):
        adder.memory_budget.continued = Continued(
            request.kv.req_pool_idx, len(request.full_untruncated_fill_ids)
        )
