"""What running requests may come to need, in bytes, from lengths alone.

The host never asks the device what is in use. Each row has a *claim*: an upper bound of
the bytes its copies take from now through its next routing event. The sum of all claims
is kept within the arena before every launch, so an allocation inside a forward pass
cannot fail. All ranks of a tensor-parallel group compute the same numbers.

A row passes through these phases::

    prefill            FULL staging of what is not routed yet
    short              up to ``min_context`` tokens: everything FULL
    tiered             FULL and coded windows by the budget, routed every Omega tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import SCORING_SPAN_TOKENS, PrefillScores

__all__ = ["ClaimLedger", "Prompt", "RowClaims"]


@dataclass(frozen=True)
class Prompt:
    """How a prompt is prefilled.

    tokens: its length (generated tokens included when a retracted request resumes).
    whole: it is attended in one chunk, so that its staging is one layer deep.
    """

    tokens: int
    whole: bool


@dataclass(frozen=True)
class RowClaims:
    """The claim formulas of one budget, and the way in which a prompt is prefilled.

    Prompts of up to ``exact_prefill_tokens`` are prefilled in any chunks, FULL in all
    layers, and routed once, after their last token. Longer ones that a chunk of
    ``chunk_tokens`` can hold are routed once too, but in one chunk, so that only one layer
    at a time is FULL. The longest are routed at every multiple of ``segment_tokens``.
    """

    budget: WindowBudget
    exact_prefill_tokens: int
    segment_tokens: int
    chunk_tokens: int

    def is_exact(self, prompt_tokens: int) -> bool:
        """True if a prompt is routed only once, after its last token."""
        return prompt_tokens <= max(self.exact_prefill_tokens, self.chunk_tokens)

    def needs_one_chunk(self, prompt_tokens: int) -> bool:
        """True if a prompt may not be divided."""
        return self.exact_prefill_tokens < prompt_tokens <= self.chunk_tokens

    def routing_point(self, prompt_tokens: int, end: int) -> int | None:
        """``end`` if a row must be routed after a chunk of its prompt that ends there.

        A chunk never crosses a routing point (``chunk_limit``), so its end is the only one.
        """
        is_segment_end = not self.is_exact(prompt_tokens) and end % self.segment_tokens == 0
        if self.budget.is_tiered(end) and (end == prompt_tokens or is_segment_end):
            return end
        return None

    def score_start(self, segment_end: int) -> int:
        """First prompt position whose query scores, for the prompt or segment that ends there."""
        if self.budget.config.prefill_scores is PrefillScores.ALL:
            return 0
        return max(0, segment_end - SCORING_SPAN_TOKENS)

    def chunk_limit(self, prompt_tokens: int, start: int) -> int:
        """Tokens that a chunk from ``start`` may have, to end at a routing point at most."""
        if self.is_exact(prompt_tokens):
            return prompt_tokens - start
        segment = self.segment_tokens
        return min(prompt_tokens, (start // segment + 1) * segment) - start

    def is_due(self, prompt_tokens: int, stored_tokens: int) -> bool:
        """True if a row must be routed before the token after ``stored_tokens`` is decoded."""
        generated = stored_tokens - prompt_tokens
        return (
            generated > 0
            and generated % self.budget.config.route_every == 0
            and self.budget.is_tiered(stored_tokens)
        )

    def request_full_bytes(self, tokens: int) -> int:
        """Bytes of a request that is FULL in every layer."""
        budget = self.budget
        return budget.num_layers * budget.num_windows(tokens) * budget.full_bytes

    def prefill_bytes(self, prompt: Prompt) -> int:
        """Claim of a request from its admission until its prompt is done."""
        budget, n = self.budget, prompt.tokens
        first_decode = self.decode_bytes(n, n)
        if not budget.is_tiered(n):
            return max(self.request_full_bytes(n), first_decode)
        staged = budget.num_windows(n)
        unrouted = budget.num_full_layers * staged * budget.full_bytes
        one_layer = staged * budget.full_bytes + budget.capacities(n).coded * budget.coded_bytes
        if prompt.whole:
            others = (budget.num_tiered_layers - 1) * self._routed_layer_bytes(n)
            peak = unrouted + one_layer + others
        elif self.is_exact(n):
            peak = (
                unrouted + (budget.num_tiered_layers - 1) * staged * budget.full_bytes + one_layer
            )
        else:
            peak = unrouted + budget.num_tiered_layers * self._segmented_layer_bytes(n)
        return max(peak, first_decode)

    def least_prefill_bytes(self, prompt_tokens: int) -> int:
        """`prefill_bytes` in the leanest way that this prompt may take."""
        whole = prompt_tokens <= self.chunk_tokens
        return self.prefill_bytes(Prompt(prompt_tokens, whole))

    def decode_bytes(self, prompt_tokens: int, stored_tokens: int) -> int:
        """Claim of a request that is about to decode the token after ``stored_tokens``.

        It covers all steps through the next routing event, which is this very step's if
        it is due.
        """
        omega = self.budget.config.route_every
        events = max(1, -(-(stored_tokens - prompt_tokens) // omega))
        return self._bytes_through(prompt_tokens + events * omega)

    def growing_bytes(self, prompt_tokens: int, stored_tokens: int, final_tokens: int) -> int:
        """The most that a request claims while it decodes from one length to another.

        Claims grow with the length, except that up to its first routing a request is FULL
        altogether: the interval beyond ``min_context`` may take more than any length after it.
        """
        final = max(stored_tokens, final_tokens)
        crossing = min(final, max(stored_tokens, self.budget.config.min_context + 1))
        return max(
            self.decode_bytes(prompt_tokens, final), self.decode_bytes(prompt_tokens, crossing)
        )

    @cached_property
    def _bytes_through(self) -> Callable[[int], int]:
        # Asked several times a step for each request, of few different lengths.
        return lru_cache(maxsize=1 << 14)(self._interval_bytes)

    def _interval_bytes(self, next_event: int) -> int:
        """Claim from just after one routing event to just after the next, at ``next_event``."""
        budget = self.budget
        last_event = next_event - budget.config.route_every
        if not budget.is_tiered(next_event):
            # Nothing is routed then, and the token after it may open a window.
            return self.request_full_bytes(next_event + 1)
        windows = budget.num_windows
        growth = windows(next_event) - windows(last_event)
        if budget.is_tiered(last_event):
            before = self._routed_full_windows(last_event) + growth
            coded = max(self._coded_windows(last_event), self._coded_windows(next_event))
        else:
            before, coded = windows(next_event), self._coded_windows(next_event)
        # The token after the event may open a window.
        full = max(before, self._routed_full_windows(next_event) + 1)
        tiered_layer = full * budget.full_bytes + coded * budget.coded_bytes
        untiered_layer = (windows(next_event) + 1) * budget.full_bytes
        return budget.num_tiered_layers * tiered_layer + budget.num_full_layers * untiered_layer

    def peak_bytes(self, prompt_tokens: int, final_tokens: int) -> int:
        """An upper bound of all claims on the way from a prompt to a length.

        A request may be retracted at any length between and prefilled anew from there, its
        routing events then counted from another start: hence the windows of one interval, and
        one more, in each layer on top.
        """
        budget, final = self.budget, max(prompt_tokens, final_tokens)
        # Claims grow with the length, apart from the lengths where the way changes.
        short = budget.config.min_context
        ends = (short, self.exact_prefill_tokens, self.chunk_tokens)
        lengths = {prompt_tokens, final, *(n for n in ends if prompt_tokens < n < final)}
        most = max(
            self.growing_bytes(prompt_tokens, prompt_tokens, final),
            *(self.least_prefill_bytes(tokens) for tokens in lengths),
        )
        return most + self.request_full_bytes(budget.config.route_every + budget.config.window)

    def _routed_full_windows(self, tokens: int) -> int:
        """FULL windows of one tiered layer just after an event at ``tokens``."""
        start, end = self.budget.history(tokens)
        protected = self.budget.num_windows(tokens) - (end - start)
        return protected + self.budget.capacities(tokens).full

    def _coded_windows(self, tokens: int) -> int:
        """Coded copies of one tiered layer just after an event, shadow codes included."""
        limits = self.budget.capacities(tokens)
        has_shadows = self.budget.charged_full_bytes > self.budget.full_bytes
        return limits.coded + (limits.full if has_shadows else 0)

    def _routed_layer_bytes(self, tokens: int) -> int:
        return (
            self._routed_full_windows(tokens) * self.budget.full_bytes
            + self._coded_windows(tokens) * self.budget.coded_bytes
        )

    def _segmented_layer_bytes(self, prompt_tokens: int) -> int:
        """Peak of one tiered layer of a prompt that is routed segment by segment."""
        budget, segment = self.budget, self.segment_tokens
        last = (prompt_tokens - 1) // segment * segment
        first_routed = (budget.config.min_context // segment + 1) * segment
        # It grows from one routed segment to the next; the last one may be shorter.
        ends = {min(first_routed, prompt_tokens), last or prompt_tokens, prompt_tokens}
        return max(self._segment_bytes(end) for end in ends)

    def _segment_bytes(self, end: int) -> int:
        """Bytes of one tiered layer just before the segment that ends there is routed."""
        budget = self.budget
        start = (end - 1) // self.segment_tokens * self.segment_tokens
        full, coded = budget.num_windows(end), 0
        if budget.is_tiered(start):
            full += self._routed_full_windows(start) - budget.num_windows(start)
            coded = self._coded_windows(start)
        if budget.is_tiered(end):
            coded = max(coded, self._coded_windows(end))
        return full * budget.full_bytes + coded * budget.coded_bytes


@dataclass
class _Row:
    """``claim`` is granted; ``next_claim`` is what the row's next token will need."""

    prompt: Prompt
    stored: int
    claim: int
    next_claim: int


class ClaimLedger:
    """The claims of all rows that hold KV."""

    def __init__(self, claims: RowClaims, capacity_bytes: int) -> None:
        self.claims = claims
        self.capacity_bytes = capacity_bytes
        self._rows: dict[int, _Row] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def total_bytes(self) -> int:
        """Sum of all granted claims: no more is in use, whatever is under way."""
        return sum(row.claim for row in self._rows.values())

    @property
    def promised_bytes(self) -> int:
        """Sum of all claims once every row has launched its next token."""
        return sum(row.next_claim for row in self._rows.values())

    def admit(self, row: int, prompt: Prompt) -> None:
        """A row starts its prefill."""
        claim = self.claims.prefill_bytes(prompt)
        self._rows[row] = _Row(prompt, 0, claim, claim)

    def prompt_tokens(self, row: int) -> int:
        """Length of the prompt of a row."""
        return self._rows[row].prompt.tokens

    def advance(self, row: int, stored_tokens: int) -> None:
        """The next launch brings a row to ``stored_tokens``: what it needs is granted."""
        state = self._rows[row]
        state.stored = stored_tokens
        state.claim = state.next_claim

    def launched(self, row: int) -> None:
        """The launch that ``advance`` announced is under way: the one after it counts now."""
        state = self._rows[row]
        if state.stored >= state.prompt.tokens:
            state.next_claim = self.claims.decode_bytes(state.prompt.tokens, state.stored)
            state.claim = min(state.claim, state.next_claim)

    def require_room(self) -> None:
        """Raises ``RuntimeError`` if more was granted than there is."""
        if self.total_bytes > self.capacity_bytes:
            raise RuntimeError(
                f"KV tiering granted {self.total_bytes} bytes of {self.capacity_bytes}"
            )

    def total_if_decoded(self, rows: Iterable[int]) -> int:
        """Sum of all claims if these rows decode their next token."""
        growth = (self._rows[row].next_claim - self._rows[row].claim for row in rows)
        return self.total_bytes + sum(growth)

    def projected_bytes(self, final_tokens: Mapping[int, int]) -> int:
        """Sum of the most that all rows will claim on their way to these lengths."""
        return sum(
            self.claims.growing_bytes(
                state.prompt.tokens,
                max(state.prompt.tokens, state.stored),
                final_tokens.get(row, 0),
            )
            for row, state in self._rows.items()
        )

    def remove(self, row: int) -> None:
        """A row gives up its KV."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
