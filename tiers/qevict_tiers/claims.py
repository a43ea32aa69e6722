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

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import SCORING_SPAN_TOKENS, PrefillScores
from qevict_tiers.kept import UNLIMITED, KeptPages, OwnedPages
from qevict_tiers.observer import PromptRouting
from qevict_tiers.tenancy import Needs, Tenancy

__all__ = ["PRIVATE", "ClaimLedger", "Gives", "Prompt", "RowClaims", "Sharing", "Terms"]


@dataclass(frozen=True)
class Prompt:
    """How a prompt is prefilled.

    tokens: its length (generated tokens included when a retracted request resumes).
    whole: what is not shared is attended in one chunk, so that its staging is one layer deep.
    """

    tokens: int
    whole: bool


class Sharing(NamedTuple):
    """What a row has of a reused prefix, and what it may leave for others; in windows.

    shared: its leading windows, whose copies are claimed by the prefix. publishable: its
    leading windows that may be kept when it ends, so that all of them may have codes.
    """

    shared: int = 0
    publishable: int = 0

    @property
    def least(self) -> Sharing:
        """The same without leaving anything."""
        return Sharing(self.shared)


PRIVATE = Sharing()
"""Neither shares nor leaves anything."""


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

    def at(self, budget: Fraction) -> RowClaims:
        """The same for a request whose budget is another."""
        return replace(self, budget=self.budget.at(budget))

    def is_exact(self, prompt_tokens: int) -> bool:
        """True if a prompt is routed only once, after its last token, if at all."""
        at_most = max(self.exact_prefill_tokens, self.chunk_tokens)
        return self.budget.keeps_everything or prompt_tokens <= at_most

    def prompt_routing(self, prompt_tokens: int) -> PromptRouting:
        """How a prompt is routed by its end."""
        if not self.budget.is_tiered(prompt_tokens):
            return PromptRouting.NEVER
        is_exact = self.is_exact(prompt_tokens)
        return PromptRouting.WHOLE if is_exact else PromptRouting.SEGMENTS

    def needs_one_chunk(self, prompt_tokens: int) -> bool:
        """True if a prompt may not be divided."""
        is_too_long = prompt_tokens > self.exact_prefill_tokens and not self.budget.keeps_everything
        return is_too_long and prompt_tokens <= self.chunk_tokens

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

    def was_routed(self, prompt_tokens: int, stored_tokens: int) -> bool:
        """True if a row that has launched so many tokens was routed: else all its own is FULL."""
        omega = self.budget.config.route_every
        events = max(0, stored_tokens - 1 - prompt_tokens) // omega
        return self.budget.is_tiered(prompt_tokens + events * omega)

    def is_unrouted(self, prompt_tokens: int, start: int) -> bool:
        """True if a row is not routed before its token ``start`` is attended: else all its own
        windows are FULL then."""
        if start >= prompt_tokens:
            return not self.was_routed(prompt_tokens, start + 1)
        if self.is_exact(prompt_tokens):
            return True
        return not self.budget.is_tiered(start // self.segment_tokens * self.segment_tokens)

    def request_full_bytes(self, tokens: int, shared: int = 0) -> int:
        """Bytes of a request that is FULL in every layer, less its shared windows."""
        budget = self.budget
        return budget.num_layers * max(0, budget.num_windows(tokens) - shared) * budget.full_bytes

    def prefill_bytes(self, prompt: Prompt, sharing: Sharing = PRIVATE) -> int:
        """Claim of a request from its admission until its prompt is done."""
        budget, n = self.budget, prompt.tokens
        first_decode = self.decode_bytes(n, n, sharing)
        if not budget.is_tiered(n):
            return max(self.request_full_bytes(n, sharing.shared), first_decode)
        windows = budget.num_windows(n)
        staged = max(0, windows - sharing.shared) * budget.full_bytes
        unrouted = budget.num_full_layers * staged
        made = self._held_codes(windows, budget.capacities(n).coded, sharing)
        one_layer = staged + made * budget.coded_bytes
        coded = self._held_codes(windows, self._coded_windows(n), sharing)
        routed = self._layer_bytes(windows, self._routed_full_windows(n), coded, sharing)
        if prompt.whole:
            peak = unrouted + one_layer + (budget.num_tiered_layers - 1) * routed
        elif self.is_exact(n):
            peak = unrouted + one_layer + (budget.num_tiered_layers - 1) * max(staged, routed)
        else:
            peak = unrouted + budget.num_tiered_layers * self._segmented_layer_bytes(n, sharing)
        return max(peak, first_decode)

    def least_prefill_bytes(self, prompt_tokens: int, sharing: Sharing = PRIVATE) -> int:
        """`prefill_bytes` in the leanest way that this prompt may take."""
        start = sharing.shared * self.budget.config.window
        whole = prompt_tokens - start <= min(
            self.chunk_tokens, self.chunk_limit(prompt_tokens, start)
        )
        return self.prefill_bytes(Prompt(prompt_tokens, whole), sharing)

    def decode_bytes(
        self, prompt_tokens: int, stored_tokens: int, sharing: Sharing = PRIVATE
    ) -> int:
        """Claim of a request that is about to decode the token after ``stored_tokens``.

        It covers all steps through the next routing event, which is this very step's if
        it is due.
        """
        return self.bytes_through(self.next_event(prompt_tokens, stored_tokens), sharing)

    def next_event(self, prompt_tokens: int, stored_tokens: int) -> int:
        """Length at the routing event that comes next, before or after the token to be decoded."""
        omega = self.budget.config.route_every
        events = max(1, -(-(stored_tokens - prompt_tokens) // omega))
        return prompt_tokens + events * omega

    def growing_bytes(
        self,
        prompt_tokens: int,
        stored_tokens: int,
        final_tokens: int,
        sharing: Sharing = PRIVATE,
    ) -> int:
        """The most that a request claims while it decodes from one length to another.

        Claims grow with the length, except that up to its first routing a request is FULL
        altogether: the interval beyond ``min_context`` may take more than any length after it.
        """
        final = max(stored_tokens, final_tokens)
        crossing = min(final, max(stored_tokens, self.budget.config.min_context + 1))
        return max(
            self.decode_bytes(prompt_tokens, final, sharing),
            self.decode_bytes(prompt_tokens, crossing, sharing),
        )

    @cached_property
    def bytes_through(self) -> Callable[[int, Sharing], int]:
        """Claim of a request of some ``Sharing`` through its event at a length (`next_event`)."""
        # Asked again and again, of few different lengths.
        return lru_cache(maxsize=1 << 14)(self._interval_bytes)

    def _interval_bytes(self, next_event: int, sharing: Sharing) -> int:
        """Claim from just after one routing event to just after the next, at ``next_event``."""
        budget = self.budget
        last_event = next_event - budget.config.route_every
        if not budget.is_tiered(next_event):
            # Nothing is routed then, and the token after it may open a window.
            return self.request_full_bytes(next_event + 1, sharing.shared)
        windows = budget.num_windows
        growth = windows(next_event) - windows(last_event)
        if budget.is_tiered(last_event):
            before = self._routed_full_windows(last_event) + growth
            coded = max(self._coded_windows(last_event), self._coded_windows(next_event))
        else:
            before, coded = windows(next_event), self._coded_windows(next_event)
        # The token after the event may open a window.
        most = windows(next_event) + 1
        full = max(before, self._routed_full_windows(next_event) + 1)
        held = self._held_codes(most, coded, sharing)
        tiered_layer = self._layer_bytes(most, full, held, sharing)
        untiered_layer = self._layer_bytes(most, most, 0, sharing)
        return budget.num_tiered_layers * tiered_layer + budget.num_full_layers * untiered_layer

    def peak_bytes(self, prompt_tokens: int, final_tokens: int, sharing: Sharing = PRIVATE) -> int:
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
            self.growing_bytes(prompt_tokens, prompt_tokens, final, sharing),
            *(self.least_prefill_bytes(tokens, sharing) for tokens in lengths),
        )
        return most + self.request_full_bytes(budget.config.route_every + budget.config.window)

    def _held_codes(self, windows: int, seen: int, sharing: Sharing) -> int:
        """Coded copies that a row of so many windows holds in one layer, if it sees ``seen``."""
        private = max(0, windows - sharing.shared)
        publishable = min(private, max(0, sharing.publishable - sharing.shared))
        return publishable + min(seen, private - publishable)

    def _layer_bytes(self, windows: int, full: int, coded: int, sharing: Sharing) -> int:
        """Bytes of a row of so many windows that holds these copies of its own in one layer."""
        private = max(0, windows - sharing.shared)
        return min(full, private) * self.budget.full_bytes + coded * self.budget.coded_bytes

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

    def _segmented_layer_bytes(self, prompt_tokens: int, sharing: Sharing) -> int:
        """Peak of one tiered layer of a prompt that is routed segment by segment."""
        budget, segment = self.budget, self.segment_tokens
        last = (prompt_tokens - 1) // segment * segment
        first_routed = (budget.config.min_context // segment + 1) * segment
        # It grows from one routed segment to the next; the last one may be shorter.
        ends = {min(first_routed, prompt_tokens), last or prompt_tokens, prompt_tokens}
        return max(self._segment_bytes(end, sharing) for end in ends)

    def _segment_bytes(self, end: int, sharing: Sharing) -> int:
        """Bytes of one tiered layer just before the segment that ends there is routed."""
        budget = self.budget
        start = (end - 1) // self.segment_tokens * self.segment_tokens
        full, coded = budget.num_windows(end), 0
        if budget.is_tiered(start):
            full += self._routed_full_windows(start) - budget.num_windows(start)
            coded = self._coded_windows(start)
        if budget.is_tiered(end):
            coded = max(coded, self._coded_windows(end))
        windows = budget.num_windows(end)
        held = self._held_codes(windows, coded, sharing)
        return self._layer_bytes(windows, full, held, sharing)


class Terms(NamedTuple):
    """What a request is held to: the formulas of its own budget, and the tenant that it is for."""

    claims: RowClaims
    tenant: int = 0


_LIMIT_WINDOWS = 16
"""What a row may leave is lowered by so many windows at a time."""


@dataclass
class _Row:
    """``claim`` is granted; ``next_claim`` is what the row's next token will need.

    granted, wanted: the routing events through which the two last (``RowClaims.next_event``),
    None in the prompt.
    launched: whether what was granted is under way, so that no more than the next is needed.
    least: ``next_claim`` if the row left nothing to others.
    """

    terms: Terms
    prompt: Prompt
    sharing: Sharing
    pages: list[int]
    stored: int = 0
    granted: int | None = None
    wanted: int | None = None
    launched: bool = False
    claim: int = 0
    next_claim: int = 0
    least: int = 0

    @property
    def is_unlimited(self) -> bool:
        """True if all that it will have may be left."""
        return self.sharing.publishable == UNLIMITED


Gives = Callable[[int], bool]
"""Whether something may be taken from a tenant."""


class ClaimLedger:
    """The claims of all rows that hold KV, and of the pages that are kept for reuse.

    ``claims``: of requests that ask for no budget of their own. ``tenancy``: what tenants hold, if
    they are told from each other. ``version`` changes with every claim.
    """

    def __init__(
        self,
        claims: RowClaims,
        capacity_bytes: int,
        num_pages: int,
        tenancy: Tenancy | None = None,
    ) -> None:
        self.terms = Terms(claims)
        self.capacity_bytes = capacity_bytes
        self.tenancy = tenancy
        self.kept = (
            KeptPages(claims.budget, num_pages)
            if tenancy is None
            else OwnedPages(claims.budget, num_pages, tenancy)
        )
        self.version = 0
        self._rows: dict[int, _Row] = {}
        self._claimed = 0
        self._least = 0

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    @property
    def claims(self) -> RowClaims:
        """The formulas of requests that ask for no budget of their own."""
        return self.terms.claims

    @property
    def total_bytes(self) -> int:
        """Sum of all granted claims: no more is in use, whatever is under way."""
        return self._claimed + self.kept.num_bytes

    @property
    def least_bytes(self) -> int:
        """What all claim once every row has launched its next token, at the least: if nothing
        were kept that no row shares, and rows left nothing."""
        return self._least + self.kept.locked_bytes

    def allowance(self, terms: Terms) -> int:
        """Bytes that a request can have at most, on an empty server."""
        if self.tenancy is None:
            return self.capacity_bytes
        return self.tenancy.allowance(terms.tenant)

    def givers(self, *, must: bool) -> tuple[Gives | None, ...]:
        """From whom room is made for others, in this order; None: from anybody.

        ``must``: from anybody in the end. What follows another tenant's prefix goes before it, so
        that those who should not give way can be in the way of those who should.
        """
        if self.tenancy is None:
            return (None,)
        return (*self.tenancy.givers, None) if must else self.tenancy.givers

    def keeps_floors(self) -> bool:
        """Whether rows leave room for what tenants have been promised."""
        return self.tenancy is None or self.tenancy.keeps_floors()

    def admit(
        self,
        row: int,
        prompt: Prompt,
        publishable: int = 0,
        pages: Sequence[int] = (),
        terms: Terms | None = None,
    ) -> None:
        """A row starts its prefill, with kept pages that it shares; they stay kept with it."""
        terms = terms or self.terms
        self.kept.lock(pages)
        state = _Row(terms, prompt, Sharing(len(pages), publishable), list(pages))
        self._rows[row] = state
        if self.tenancy is not None:
            self.tenancy.rows[terms.tenant] += 1
        self._reckon(state)

    def terms_of(self, row: int) -> Terms:
        """What a row is held to."""
        return self._rows[row].terms

    def claims_of(self, row: int) -> RowClaims:
        """The formulas of a row's budget."""
        return self._rows[row].terms.claims

    def claim_of(self, row: int) -> int:
        """Bytes that a row claims, or will for its next token, whichever is more."""
        state = self._rows[row]
        return max(state.claim, state.next_claim)

    def prompt_tokens(self, row: int) -> int:
        """Length of the prompt of a row."""
        return self._rows[row].prompt.tokens

    def sharing(self, row: int) -> Sharing:
        """What a row shares and may leave."""
        return self._rows[row].sharing

    def publishable(self, row: int) -> int:
        """Leading windows of a row that may be kept if it ends now: none within its prompt."""
        state = self._rows[row]
        return state.sharing.publishable if state.stored >= state.prompt.tokens else 0

    def usable_pages(
        self,
        pages: Sequence[int],
        prompt_tokens: int,
        final_tokens: int,
        terms: Terms | None = None,
    ) -> int:
        """How many of the kept pages that match its prompt a request can use.

        One that is never routed, since it is short or its budget is everything, sees nothing but
        FULL windows, whatever its prefix: as without reuse. And a request must not lock so much
        of a prefix that it can't grow as it may.
        """
        terms = terms or self.terms
        usable, allowance = len(pages), self.allowance(terms)
        if not terms.claims.budget.is_tiered(prompt_tokens):
            usable = self.kept.num_full(pages)

        def is_too_much(count: int) -> bool:
            peak = terms.claims.peak_bytes(prompt_tokens, final_tokens, Sharing(count))
            return self.kept.bytes_of(pages[:count]) + peak > allowance

        if not usable or not is_too_much(usable):
            return usable
        # Where the whole is too much, what fits is from the beginning on.
        return bisect.bisect_left(range(1, usable + 1), True, key=is_too_much)

    def max_new_tokens(
        self, prompt_tokens: int, limit: int, shared: int = 0, terms: Terms | None = None
    ) -> int | None:
        """How much a request may generate on an empty server, up to a limit; None if its prompt
        can't fit.

        ``shared``: the leading windows of its prompt that it shall be able to share with others.
        """
        terms = terms or self.terms
        locked, allowance = self.kept.most_bytes(shared), self.allowance(terms)

        def is_too_much(new_tokens: int) -> bool:
            final_tokens = prompt_tokens + new_tokens
            peak = terms.claims.peak_bytes(prompt_tokens, final_tokens, Sharing(shared))
            return locked + peak > allowance

        if not is_too_much(limit):
            return limit
        if is_too_much(0):
            return None
        return bisect.bisect_left(range(1, limit + 1), True, key=is_too_much)

    def was_routed(self, row: int) -> bool:
        """True if a row was routed by the launch under way at the latest."""
        state = self._rows[row]
        return state.terms.claims.was_routed(state.prompt.tokens, state.stored)

    def advance(self, row: int, stored_tokens: int) -> None:
        """The next launch brings a row to ``stored_tokens``: what it needs is granted."""
        state = self._rows[row]
        state.stored = stored_tokens
        state.launched = False
        state.granted = state.wanted
        self._set(state, state.next_claim, state.next_claim, state.least)

    def launched(self, row: int) -> None:
        """The launch that ``advance`` announced is under way: the one after it counts now."""
        state = self._rows[row]
        if state.stored >= state.prompt.tokens:
            state.launched = True
            event = state.terms.claims.next_event(state.prompt.tokens, state.stored)
            if event != state.wanted:
                state.wanted = event
                self._reckon(state)

    def limit_publishing(
        self, excess: Callable[[], int], gives: Gives | None = None
    ) -> list[tuple[int, int]]:
        """Let rows leave less until ``excess`` bytes are none, or all leave nothing.

        Those that leave less already come first, then the newest; with ``gives`` only those of
        tenants for which it holds, for as long as it does. Returns the rows and how many windows
        they may still leave. The bytes are free once the copies are dropped, which must be before
        the next launch.
        """
        limited = []
        newest_first = list(reversed(self._rows.items()))
        for row, state in sorted(newest_first, key=lambda item: item[1].is_unlimited):
            if state.next_claim == state.least or not _may_take(gives, state.terms.tenant):
                continue
            if excess() <= 0:
                break
            shared = state.sharing.shared
            tokens = max(state.stored, state.prompt.tokens)
            windows = self.claims.budget.num_windows(tokens)
            # By pieces, so that this is not done for every token.
            pieces = [*range(shared, min(windows, state.sharing.publishable), _LIMIT_WINDOWS)]

            def too_much(most: int, state: _Row = state, shared: int = shared) -> bool:
                state.sharing = Sharing(shared, most)
                self._reckon(state)
                return excess() > 0 and _may_take(gives, state.terms.tenant)

            # The more it leaves, the more is claimed: the most that is not too much.
            fitting = bisect.bisect_left(pieces, True, key=too_much)
            most = pieces[max(0, fitting - 1)] if pieces else shared
            too_much(most)
            limited.append((row, most))
        return limited

    def require_room(self) -> None:
        """Raises ``RuntimeError`` if more was granted than there is."""
        if self.total_bytes > self.capacity_bytes:
            raise RuntimeError(
                f"KV tiering granted {self.total_bytes} bytes of {self.capacity_bytes}, which is a "
                "fault of its own: please report it, with the server's flags and its log"
            )

    def total_if_decoded(self, rows: Iterable[int]) -> int:
        """Sum of all claims if these rows decode their next token."""
        growth = (self._rows[row].next_claim - self._rows[row].claim for row in rows)
        return self.total_bytes + sum(growth)

    def projected_bytes(self, final_tokens: Mapping[int, int]) -> int:
        """``least_bytes`` at the most that all rows will claim on their way to these lengths.

        A row whose prompt is not done may still take what that takes while others grow.
        """
        return self.kept.locked_bytes + sum(amount for _, amount in self._projected(final_tokens))

    def projected_needs(self, final_tokens: Mapping[int, int]) -> Needs:
        """What tenants need, ``projected_bytes`` as they grow."""
        assert self.tenancy is not None
        needs = self.tenancy.needs
        np.copyto(needs.grown, self.tenancy.locked)
        for tenant, amount in self._projected(final_tokens):
            needs.grown[tenant] += amount
        return needs

    def _projected(self, final_tokens: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """The tenant of each row, and the most that it will claim on its way."""
        for row, state in self._rows.items():
            grown = state.terms.claims.growing_bytes(
                state.prompt.tokens,
                max(state.prompt.tokens, state.stored),
                final_tokens.get(row, 0),
                state.sharing.least,
            )
            yield state.terms.tenant, max(state.least, grown)

    def remove(self, row: int) -> None:
        """A row gives up its KV."""
        if state := self._rows.pop(row, None):
            self._set(state, 0, 0, 0)
            if self.tenancy is not None:
                self.tenancy.rows[state.terms.tenant] -= 1
            self.kept.unlock(state.pages)

    def clear(self) -> None:
        """Forget all rows and pages."""
        self._rows.clear()
        self._claimed = self._least = 0
        self.version += 1
        self.kept.clear()
        if self.tenancy is not None:
            self.tenancy.clear()

    def check_tenants(self) -> list[str]:
        """What is wrong with what tenants are said to hold; empty when nothing is."""
        tenancy = self.tenancy
        if tenancy is None:
            return []
        sums = {
            "requests": (int(tenancy.rows.sum()), len(self)),
            "claimed bytes": (int(tenancy.claimed.sum()), sum(map(self.claim_of, self))),
            "least bytes": (int(tenancy.least.sum()), self._least),
            "kept bytes": (int(tenancy.kept.sum()), self.kept.num_bytes),
            "locked bytes": (int(tenancy.locked.sum()), self.kept.locked_bytes),
        }
        return [
            f"tenants have {found} {what}, all have {expected}"
            for what, (found, expected) in sums.items()
            if found != expected
        ]

    def _reckon(self, state: _Row) -> None:
        """Compute a row's claims anew."""
        claim = self._claim(state, state.granted, state.sharing)
        next_claim = self._claim(state, state.wanted, state.sharing)
        if state.launched and next_claim < claim:
            state.granted, claim = state.wanted, next_claim
        self._set(state, claim, next_claim, self._claim(state, state.wanted, state.sharing.least))

    def _set(self, state: _Row, claim: int, next_claim: int, least: int) -> None:
        self._claimed += claim - state.claim
        self._least += least - state.least
        if self.tenancy is not None:
            tenant, before = state.terms.tenant, max(state.claim, state.next_claim)
            self.tenancy.claimed[tenant] += max(claim, next_claim) - before
            self.tenancy.least[tenant] += least - state.least
        state.claim, state.next_claim, state.least = claim, next_claim, least
        self.version += 1

    def _claim(self, state: _Row, event: int | None, sharing: Sharing) -> int:
        if event is None:
            return state.terms.claims.prefill_bytes(state.prompt, sharing)
        return state.terms.claims.bytes_through(event, sharing)


def _may_take(gives: Gives | None, tenant: int) -> bool:
    return gives is None or gives(tenant)
