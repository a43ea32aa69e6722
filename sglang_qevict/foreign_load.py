"""CPU time that other programs take while something is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

__all__ = ["ForeignLoad"]


class ForeignLoad:
    """CPU time that programs other than the measuring ones take, in cores.

    ``own``: the measuring processes besides this one.
    """

    def __init__(self, own: Callable[[], Iterable[psutil.Process]] = tuple) -> None:
        self._own = own
        self.start()

    def start(self) -> None:
        """Begin to count."""
        self._since = time.monotonic()
        self._busy, self._ours = _busy_seconds(), self._own_seconds()

    def cores(self) -> float:
        """Cores that others took on average since ``start``."""
        elapsed = time.monotonic() - self._since
        others = (_busy_seconds() - self._busy) - (self._own_seconds() - self._ours)
        return max(0.0, others / elapsed)

    def _own_seconds(self) -> float:
        total = 0.0
        for process in (psutil.Process(), *self._own()):
            times = process.cpu_times()
            total += times.user + times.system
        return total


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    # Time of guests is part of user time already.
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
