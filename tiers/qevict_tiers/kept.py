"""The pages that are kept for requests to come, as the host knows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from qevict_tiers.budget import WindowBudget
from qevict_tiers.tenancy import Amounts, Tenancy

__all__ = ["UNLIMITED", "Keep", "KeptPages", "OwnedPages"]

_Pages = npt.NDArray[np.int64]


UNLIMITED = 1 << 40
"""More windows than any request has: all that it will have may be published."""


class Keep(IntEnum):
    """What is kept of a page for requests to come."""

    NOTHING = 0
    CODES = 1
    """Codes in the layers that are routed, FULL copies in the others."""
    FULL = 2
    """FULL copies in all layers."""


class KeptPages:
    """What is kept of each page, and how many rows share it; in bytes, over all layers.

    Its numbers follow from the order of the scheduler's decisions alone, so they are the same
    on every rank. A page that rows share is locked: it must stay. A page has an owner, the tenant
    that left it, which is of no interest here (`OwnedPages`).
    """

    def __init__(self, budget: WindowBudget, num_pages: int) -> None:
        self._keep = np.zeros(num_pages + 1, dtype=np.uint8)
        self._locks = np.zeros(num_pages + 1, dtype=np.int32)
        full = budget.num_layers * budget.full_bytes
        codes = budget.num_full_layers * budget.full_bytes
        codes += budget.num_tiered_layers * budget.coded_bytes
        self._bytes = np.array([0, codes, full], dtype=np.int64)
        # The first event beyond min_context is the first that demotes.
        longest_unrouted = budget.config.min_context + budget.config.route_every
        self._short_pages = budget.num_windows(longest_unrouted)
        if budget.at(budget.config.most_budget).keeps_everything:
            self._short_pages = num_pages
        self.num_bytes = 0
        self.locked_bytes = 0
        self.num_pages = 0

    def most_bytes(self, count: int) -> int:
        """The most that may be kept of the first ``count`` pages of a prompt.

        Requests that were never routed leave FULL pages, others codes (but for the sink).
        """
        full = min(count, self._short_pages)
        return full * int(self._bytes[Keep.FULL]) + (count - full) * int(self._bytes[Keep.CODES])

    def keep(self, pages: Sequence[int], how: Keep, owner: int = 0) -> None:
        """Keep pages that are not kept yet, and that ``owner`` has left."""
        index = np.asarray(pages, dtype=np.int64)
        assert not self._keep[index].any(), "a page is kept twice"
        self._keep[index] = how
        self._count(index, 1)
        self.num_pages += len(index)

    def raise_to_full(self, pages: Sequence[int]) -> None:
        """Keep FULL copies of pages instead of codes."""
        index = np.asarray(pages, dtype=np.int64)
        self._count(index, -1)
        self._keep[index] = Keep.FULL
        self._count(index, 1)

    def owner(self, page: int) -> int:
        """The tenant that left a page."""
        return 0

    def has_unused_codes(self, page: int) -> bool:
        """True if codes are kept of a page, and no row shares them now."""
        return self._keep[page] == Keep.CODES and not self._locks[page]

    def drop(self, pages: Sequence[int]) -> None:
        """Keep pages no longer."""
        index = np.asarray(pages, dtype=np.int64)
        assert self._keep[index].all(), "a page is dropped that is not kept"
        self._count(index, -1)
        self.num_pages -= len(index)
        self._keep[index] = Keep.NOTHING

    def lock(self, pages: Sequence[int]) -> None:
        """One row more shares pages."""
        index = np.asarray(pages, dtype=np.int64)
        self._count_locked(index[self._locks[index] == 0], 1)
        self._locks[index] += 1

    def unlock(self, pages: Sequence[int]) -> None:
        """One row less shares pages."""
        index = np.asarray(pages, dtype=np.int64)
        self._locks[index] -= 1
        self._count_locked(index[self._locks[index] == 0], -1)

    def bytes_to_lock(self, pages: Iterable[int]) -> int:
        """How much more would be locked if a row shared pages, too."""
        return self._sum(self._unlocked(pages))

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Bytes that are kept of pages."""
        return self._sum(np.asarray(pages, dtype=np.int64))

    def num_full(self, pages: Sequence[int]) -> int:
        """How many of the first pages are kept FULL, until one is not."""
        kept = self._keep[np.asarray(pages, dtype=np.int64)] == Keep.FULL
        return int(kept.argmin()) if not kept.all() else len(kept)

    def clear(self) -> None:
        """Forget all pages."""
        self._keep.fill(0)
        self._locks.fill(0)
        self.num_bytes = self.locked_bytes = self.num_pages = 0

    def _count(self, index: _Pages, sign: int) -> None:
        """Pages are kept from now on, or no longer."""
        self.num_bytes += sign * self._sum(index)

    def _count_locked(self, index: _Pages, sign: int) -> None:
        """Pages are shared from now on, or no longer."""
        self.locked_bytes += sign * self._sum(index)

    def _unlocked(self, pages: Iterable[int]) -> _Pages:
        index = np.fromiter(pages, dtype=np.int64)
        unlocked: _Pages = index[self._locks[index] == 0]
        return unlocked

    def _sum(self, index: _Pages) -> int:
        return int(self._bytes[self._keep[index]].sum())


class OwnedPages(KeptPages):
    """Kept pages, and what is kept and locked of what each tenant left, as a ``Tenancy`` has it."""

    def __init__(self, budget: WindowBudget, num_pages: int, tenancy: Tenancy) -> None:
        super().__init__(budget, num_pages)
        self._owner = np.zeros(num_pages + 1, dtype=np.uint16)
        self._tenancy = tenancy

    def keep(self, pages: Sequence[int], how: Keep, owner: int = 0) -> None:
        self._owner[np.asarray(pages, dtype=np.int64)] = owner
        super().keep(pages, how, owner)

    def owner(self, page: int) -> int:
        return int(self._owner[page])

    def owned_to_lock(self, pages: Iterable[int]) -> Amounts:
        """``bytes_to_lock`` by owner."""
        return self._by_owner(self._unlocked(pages))

    def _count(self, index: _Pages, sign: int) -> None:
        super()._count(index, sign)
        self._tenancy.kept += sign * self._by_owner(index)

    def _count_locked(self, index: _Pages, sign: int) -> None:
        super()._count_locked(index, sign)
        self._tenancy.locked += sign * self._by_owner(index)

    def _by_owner(self, index: _Pages) -> Amounts:
        amounts = np.zeros_like(self._tenancy.kept)
        np.add.at(amounts, self._owner[index], self._bytes[self._keep[index]])
        return amounts
