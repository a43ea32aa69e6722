"""What may go wrong around the tiers, on request: a disk that fails, ranks of which one does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from mini_engine import MemoryStore
from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.records import Reading, ReadStatus, Record

__all__ = ["FailingStore", "Ranks"]

_T = TypeVar("_T")

_FAILURES = [status for status in ReadStatus if status is not ReadStatus.HIT]


class FailingStore(MemoryStore):
    """Loses records, forgets others, fails reads, and gives what nobody waits for late and in any
    order. What it does give is right.

    ``share``: how much of all goes wrong.
    """

    def __init__(self, seed: int, share: float = 0.3) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._share = share
        self._late: list[tuple[Future[list[Reading]], Sequence[SpillKey], list[torch.Tensor]]] = []

    def put(self, records: Sequence[Record]) -> Future[int]:
        """Keep some of them."""
        return super().put([record for record in records if not self._fails()])

    def contains(self, keys: Sequence[SpillKey]) -> Future[list[bool]]:
        """Which are there, but for some."""
        self._end_some()
        found: Future[list[bool]] = Future()
        known = super().contains(keys).result()
        found.set_result([there and not self._fails() for there in known])
        return found

    def get(
        self,
        keys: Sequence[SpillKey],
        into: Sequence[torch.Tensor],
        deadline_seconds: float | None = None,
    ) -> Future[list[Reading]]:
        """Read what does not fail: at once with a deadline, later without."""
        self._end_some()
        reading: Future[list[Reading]] = Future()
        self._late.append((reading, keys, list(into)))
        if deadline_seconds is not None:
            self._end(len(self._late) - 1)
        return reading

    def _end_some(self) -> None:
        for place in reversed(range(len(self._late))):
            if self._random.random() < 0.5:
                self._end(place)

    def _end(self, place: int) -> None:
        reading, keys, into = self._late.pop(place)
        found = super().get(keys, into).result()
        reading.set_result(
            [Reading(self._random.choice(_FAILURES)) if self._fails() else one for one in found]
        )

    def _fails(self) -> bool:
        return self._random.random() < self._share


class Ranks:
    """As much of a tensor-parallel group as decides together: all get the least of their numbers.

    Each rank is a thread. One runs at a time, from one decision to the next.
    """

    def __init__(self, size: int) -> None:
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=60)
        self._numbers = [0] * size
        self.decisions = 0

    def run(self, work: Callable[[], _T]) -> _T:
        """What a rank does."""
        with self._turn:
            return work()

    def least(self, rank: int, number: int) -> int:
        """The least of what all ranks say, once all have."""
        self._numbers[rank] = number
        self._meet()
        result = min(self._numbers)
        self._meet()  # nobody says the next number before all have read these
        self.decisions += rank == 0
        return result

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()
