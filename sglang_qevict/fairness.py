"""Tenants take turns: whose request is admitted next, whose is retracted first.

Only where an operator has given shares (``--kv-tiering-tenants``). What is decided follows from
``Tenancy``; here it is put in the places where SGLang decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from qevict_tiers.claims import ClaimLedger
from qevict_tiers.kept import OwnedPages
from qevict_tiers.observer import Wait
from qevict_tiers.tenancy import Demand, Needs
from sglang_qevict.admission import Candidate, TieredPrefillBudget
from sglang_qevict.terms import RequestTerms

__all__ = ["FairPrefillBudget", "Turns"]

_LOOKED_AT = 8
"""Waiting requests of each tenant that a pass orders; what is behind them keeps its place there."""


class FairPrefillBudget(TieredPrefillBudget):
    """The budget of one pass where tenants have shares.

    A request is admitted if all that are there leave each tenant's floor to it, and if its own
    tenant stays within its cap: now, and once everybody has grown as far as SGLang expects.
    """

    def __init__(
        self, allocator: Any, tree_cache: Any, ledger: ClaimLedger, **options: Any
    ) -> None:
        super().__init__(allocator, tree_cache, ledger, **options)
        assert ledger.tenancy is not None
        assert isinstance(ledger.kept, OwnedPages)
        self._tenancy, self._kept = ledger.tenancy, ledger.kept
        self._new = self._tenancy.nothing()
        self._projection: tuple[tuple[int, int], Needs] | None = None
        self._stands_aside = False
        self._passed_over: set[int] = set()

    @property
    def needs(self) -> Needs:
        """What tenants need with what this pass has admitted so far; not to be changed."""
        key = (self._ledger.version, len(self.final_tokens))
        if self._projection is None or self._projection[0] != key:
            self._projection = key, self._ledger.projected_needs(self.final_tokens)
        return Needs(*(a + b for a, b in zip(self._projection[1], self._new, strict=True)))

    def passes_over(self) -> bool:
        """Whether others may be admitted although the candidate was not.

        It waits for its own tenant, or for a chunk that is whole. But once for each tenant: that
        its second request waits as well is as good as known, and to look at each of a flood would
        take too long.
        """
        stands_aside, self._stands_aside = self._stands_aside, False
        if not stands_aside or self.terms.tenant in self._passed_over:
            return False
        self._passed_over.add(self.terms.tenant)
        return True

    def _admit(self, candidate: Candidate) -> None:
        super()._admit(candidate)
        self._new.add(self._demand(candidate))

    def _lack(self, candidate: Candidate) -> Wait | None:
        needs = self.needs
        needs.add(self._demand(candidate))
        locked = self._kept.owned_to_lock(self._locked.union(self.prefix))
        needs.now[:] += locked
        needs.grown[:] += locked
        return self._tenancy.lack(self.terms.tenant, needs)

    def _wait(self, wait: Wait) -> None:
        super()._wait(wait)
        self._stands_aside = wait in (Wait.CAP, Wait.CHUNK)
        if wait is Wait.CHUNK:
            # Or another would take the next chunks from it.
            self._has_truncated = True

    def _demand(self, candidate: Candidate) -> Demand:
        return Demand(self.terms.tenant, candidate.prefill, candidate.grown)


class Turns:
    """Puts SGLang's queue, its chunks and its victims in the order that shares give."""

    def __init__(self, ledger: ClaimLedger, terms: RequestTerms) -> None:
        assert ledger.tenancy is not None
        self._ledger, self._tenancy, self._terms = ledger, ledger.tenancy, terms
        self._waiting: list[Any] = []

    def begin(self, waiting: list[Any], running_batch: Any) -> None:
        """A scheduling pass is about to begin.

        SGLang makes none while it finds its batch full, until a request has left it. A tenant
        that comes anew is let in to see whether there is room for it.
        """
        self._waiting = waiting
        tenants = frozenset(self._terms.of(request).tenant for request in waiting)
        if not tenants <= self._tenancy.waiting:
            running_batch.batch_is_full = False
        self._tenancy.waiting = tenants

    def order(self, adder: Any) -> None:
        """Put what waits in the order of turns, for SGLang's new ``PrefillAdder``.

        What a request needs is reckoned as if it shared nothing.
        """
        budget, waiting = adder.memory_budget, self._waiting
        if not isinstance(budget, FairPrefillBudget) or len(self._tenancy.waiting) < 2:
            return
        seen: Counter[int] = Counter()
        places, demands = [], []
        for place, request in enumerate(waiting):
            claims, tenant = self._terms.of(request)
            seen[tenant] += 1
            if seen[tenant] > _LOOKED_AT:
                continue
            tokens = len(request.origin_input_ids) + len(request.output_ids)
            final = tokens + adder._swa_new_tokens(request)
            now = claims.least_prefill_bytes(tokens)
            grown = claims.growing_bytes(tokens, tokens, final)
            places.append(place)
            demands.append(Demand(tenant, now, grown))
        first = [places[turn] for turn in self._tenancy.turns(demands, budget.needs)]
        rest = sorted(set(range(len(waiting))).difference(first))
        waiting[:] = [waiting[place] for place in (*first, *rest)]

    def is_last(self, request: Any) -> bool:
        """Whether nobody waits behind a request."""
        return bool(self._waiting) and self._waiting[-1] is request

    def chunk_limit(
        self, request: Any, waiting: Sequence[Any], tokens: int, page: int
    ) -> int | None:
        """Tokens of a pass of ``tokens`` that the prompt in progress may have; None: all.

        Up to half are left to whole prompts of tenants that hold less of their share.
        """
        usage = cache(self._tenancy.usage)
        mine, left = usage(self._terms.of(request).tenant), 0
        for other in waiting:
            if usage(self._terms.of(other).tenant) >= mine:
                continue
            wanted = len(other.origin_input_ids) + len(other.output_ids)
            wanted = -(-wanted // page) * page
            if left + wanted > tokens // 2:
                break
            left += wanted
        return (tokens - left) // page * page if left else None

    def keep_order(self, requests: Sequence[Any], order: Sequence[int]) -> list[int]:
        """Places of running requests, those that SGLang retracts first at the end.

        ``order``: SGLang's own, which each tenant's keep among themselves.
        """
        places = list(reversed(order))
        candidates = [self._candidate(requests[place]) for place in places]
        victims = [places[victim] for victim in self._tenancy.victims(candidates)]
        return victims[::-1]

    def _candidate(self, request: Any) -> tuple[int, int]:
        row = request.kv.req_pool_idx
        claim = self._ledger.claim_of(row) if row in self._ledger else 0
        return self._terms.of(request).tenant, claim
