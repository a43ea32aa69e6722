"""Which tenant holds how much, whose turn it is, and who gives way first.

Nothing here knows an engine. Tenants are numbers; all follows from claims, from pages kept and from
the order in which requests came, so that every rank of a tensor-parallel group decides alike.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qevict_tiers.observer import Wait
from qevict_tiers.shares import Share, fair_shares

__all__ = ["Amounts", "Demand", "Needs", "Tenancy"]

Amounts = npt.NDArray[np.int64]
"""Something of each tenant, by number: int64 ``[tenants]``."""


class Demand(NamedTuple):
    """What a request of a tenant asks for: bytes now, and bytes at most as it grows."""

    tenant: int
    now: int
    grown: int


class Needs(NamedTuple):
    """What tenants need: bytes now, bytes once all have grown, requests at once."""

    now: Amounts
    grown: Amounts
    rows: Amounts

    def copy(self) -> Needs:
        """The same, to be changed."""
        return Needs(*(part.copy() for part in self))

    def add(self, demand: Demand) -> None:
        """One request more."""
        self.now[demand.tenant] += demand.now
        self.grown[demand.tenant] += demand.grown
        self.rows[demand.tenant] += 1


class Tenancy:
    """What tenants hold of the arena, against their shares.

    ``shares``: by number. ``claimed``, ``least``, ``kept``, ``locked``: bytes of each tenant, kept
    up to date by the ledger of claims: what its requests claim, the least that they could; the
    pages that it left, and those of them that requests share. ``rows``: its requests that hold a
    claim. ``waiting``: tenants whose requests wait.

    A tenant is *over its share* if it holds more than is fair among those who are there: who hold
    something, or wait. It is *above its floor* if it holds more than that; nobody else takes
    anything from one who isn't.
    """

    def __init__(self, shares: Sequence[Share], capacity_bytes: int, num_rows: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._shares = shares
        self._bytes = _Bounds.of(shares, capacity_bytes)
        self._requests = _Bounds.of(shares, num_rows)
        # Any tenant may run one request.
        np.maximum(self._requests.caps, 1, out=self._requests.caps)
        self.claimed, self.least, self.kept, self.locked, self.rows = self._amounts(5)
        self.waiting: frozenset[int] = frozenset()
        self._fair = lru_cache(maxsize=64)(self._fair_shares)

    def clear(self) -> None:
        """Nobody holds anything."""
        for part in (self.claimed, self.least, self.kept, self.locked, self.rows):
            part.fill(0)

    @property
    def held(self) -> Amounts:
        """Bytes that each tenant's requests claim and that are kept of what it left."""
        return self.claimed + self.kept

    @property
    def needs(self) -> Needs:
        """The least that tenants need as they are: growth is not counted."""
        least = self.least + self.locked
        return Needs(least, least.copy(), self.rows.copy())

    def nothing(self) -> Needs:
        """No tenant needs anything."""
        return Needs(*self._amounts(3))

    # -- who is over what -----------------------------------------------------------------

    def share(self, tenant: int) -> int:
        """Bytes that are fair for a tenant among those who are there, itself included."""
        there = set(np.flatnonzero(self.held).tolist()) | self.waiting | {tenant}
        return self._fair(tuple(sorted(there)))[tenant]

    def usage(self, tenant: int) -> Fraction:
        """What a tenant holds, over what is fair."""
        held = int(self.claimed[tenant] + self.kept[tenant])
        return Fraction(held, max(1, self.share(tenant)))

    def is_over_share(self, tenant: int) -> bool:
        """Whether a tenant holds more than is fair."""
        return bool(self.claimed[tenant] + self.kept[tenant] > self.share(tenant))

    def is_above_floor(self, tenant: int) -> bool:
        """Whether a tenant holds more than its floor."""
        return bool(self.claimed[tenant] + self.kept[tenant] > self._bytes.floors[tenant])

    def beyond_cap(self, tenant: int) -> int:
        """Bytes that a tenant holds beyond its cap; negative below it."""
        return int(self.claimed[tenant] + self.kept[tenant] - self._bytes.caps[tenant])

    def over_caps(self) -> list[int]:
        """Tenants that hold more than their caps."""
        tenants: list[int] = np.flatnonzero(self.held > self._bytes.caps).tolist()
        return tenants

    @property
    def givers(self) -> tuple[Callable[[int], bool], ...]:
        """Whom to take from, in this order, each time for as long as it holds."""
        return self.is_over_share, self.is_above_floor

    def leaves_something(self, gives: Callable[[int], bool]) -> bool:
        """Whether any of the tenants that give has left pages that no request shares."""
        return any(gives(tenant) for tenant in np.flatnonzero(self.kept > self.locked).tolist())

    def allowance(self, tenant: int) -> int:
        """Bytes that a tenant can have at most, on a server without any other."""
        return self._bytes.allowance(tenant)

    # -- admission ----------------------------------------------------------------------------

    def keeps_floors(self) -> bool:
        """Whether what requests need now leaves everybody's floor."""
        return self._bytes.have_room(self.least + self.locked)

    def lack(self, tenant: int, needs: Needs) -> Wait | None:
        """Why a request of a tenant must wait if all need this then, itself included; or None."""
        if any(
            need[tenant] > bounds.caps[tenant]
            for need, bounds in zip(needs, self._all_bounds, strict=True)
        ):
            return Wait.CAP
        for need, wait in ((needs.now, Wait.BYTES), (needs.grown, Wait.GROWTH)):
            if int(need.sum()) > self.capacity_bytes:
                return wait
        for need, bounds in zip(needs, self._all_bounds, strict=True):
            if not bounds.have_room(need):
                return Wait.FLOORS
        return None

    def turns(self, demands: Sequence[Demand], needs: Needs) -> list[int]:
        """Places of ``demands`` in the order in which they take their turns.

        Beside what is needed already, those come first that stay within a floor, then those of
        the tenants that would have the least of their share, last those beyond a cap. Each
        tenant's own stay in their order.
        """
        needs = needs.copy()

        def key(place: int) -> tuple[int, Fraction]:
            tenant = demands[place].tenant
            after = needs.copy()
            after.add(demands[place])
            most = max(int(after.now[tenant]), int(after.grown[tenant]))
            return self._class_of(tenant, after), Fraction(most, max(1, self.share(tenant)))

        order = []
        for place in _merge([demand.tenant for demand in demands], key):
            needs.add(demands[place])
            order.append(place)
        return order

    def _class_of(self, tenant: int, after: Needs) -> int:
        """0 if a tenant is within its floor, 2 if it is beyond its cap, 1 between them."""
        bounds = [
            (need[tenant], one.floors[tenant], one.caps[tenant])
            for need, one in zip(after, self._all_bounds, strict=True)
        ]
        if all(need <= floor for need, floor, _ in bounds):
            return 0
        return 2 if any(need > cap for need, _, cap in bounds) else 1

    def victims(self, candidates: Sequence[tuple[int, int]]) -> list[int]:
        """Places of ``candidates`` in the order in which they give way.

        ``candidates``: tenant and bytes of each request, each tenant's in the order in which it
        would give way to itself. Who holds the most of its share comes first, and comes again
        once others hold more of theirs; who is not above its floor comes last.
        """
        held = self.held

        def key(place: int) -> tuple[bool, Fraction]:
            tenant = candidates[place][0]
            is_safe = bool(held[tenant] <= self._bytes.floors[tenant])
            return is_safe, -Fraction(int(held[tenant]), max(1, self.share(tenant)))

        order = []
        for place in _merge([tenant for tenant, _ in candidates], key):
            tenant, taken = candidates[place]
            held[tenant] -= taken
            order.append(place)
        return order

    @property
    def _all_bounds(self) -> tuple[_Bounds, _Bounds, _Bounds]:
        return self._bytes, self._bytes, self._requests

    def _fair_shares(self, there: tuple[int, ...]) -> dict[int, int]:
        shares = {tenant: self._shares[tenant] for tenant in there}
        return fair_shares(shares, self.capacity_bytes)

    def _amounts(self, count: int) -> list[Amounts]:
        return [np.zeros(len(self._shares), dtype=np.int64) for _ in range(count)]


class _Bounds(NamedTuple):
    """Floors and caps of one thing that tenants share."""

    capacity: int
    floors: Amounts
    caps: Amounts

    @classmethod
    def of(cls, shares: Sequence[Share], capacity: int) -> _Bounds:
        def part(fractions: Iterable[Fraction]) -> Amounts:
            return np.array([int(one * capacity) for one in fractions], dtype=np.int64)

        return cls(capacity, part(s.floor for s in shares), part(s.cap for s in shares))

    def have_room(self, need: Amounts) -> bool:
        """Whether this can be had while what others need less than their floors is left to them."""
        return bool(np.maximum(need, self.floors).sum() <= self.capacity)

    def allowance(self, tenant: int) -> int:
        """The most that one can have while the others' floors are left to them."""
        left = self.capacity - int(self.floors.sum() - self.floors[tenant])
        return min(int(self.caps[tenant]), left)


def _merge(tenants: Sequence[int], key: Callable[[int], tuple[Any, ...]]) -> Iterator[int]:
    """All places, each time the one of the least key among the first of each tenant.

    ``key`` of a place may depend on which of its tenant's were yielded already. Among equals the
    one that stands before comes first.
    """
    queues: dict[int, deque[int]] = {}
    for place, tenant in enumerate(tenants):
        queues.setdefault(tenant, deque()).append(place)
    heap = [(key(queue[0]), queue[0]) for queue in queues.values()]
    heapq.heapify(heap)
    while heap:
        _, place = heapq.heappop(heap)
        yield place
        queue = queues[tenants[place]]
        queue.popleft()
        if queue:
            heapq.heappush(heap, (key(queue[0]), queue[0]))
