"""What the store asks of the place where records lie."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.records import Reading, Record, SpillCounters, WriteStatus

__all__ = ["Medium", "OneLine"]

logger = logging.getLogger(__name__)


class Medium(ABC):
    """A place for records, used by a ``SpillStore``'s threads only.

    One thread calls ``write``, ``delete``, ``clear`` and ``close``, several call ``read``; all of
    them may block. A medium counts what only it knows into ``counters``.
    """

    persists: bool
    """Whether records are meant to outlive the store; if not, closing doesn't wait for writes."""

    contains_blocks: bool
    """Whether ``contains`` may take longer than a look at a table."""

    counters: SpillCounters

    @abstractmethod
    def write(self, records: Sequence[Record]) -> list[WriteStatus]:
        """Write records that are not there; one status each. An ``OSError`` fails all of them."""

    @abstractmethod
    def read(self, keys: Sequence[SpillKey], into: Sequence[memoryview | None]) -> list[Reading]:
        """Read records, into the buffers that are given; an ``OSError`` fails all of them.

        A buffer that was given holds the payload only where the reading is a HIT.
        """

    @abstractmethod
    def contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        """Which of the keys are there."""

    @abstractmethod
    def delete(self, keys: Sequence[SpillKey]) -> None:
        """Forget these; what isn't there is no error."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    @abstractmethod
    def usage(self) -> tuple[int, int, int]:
        """Records, their payload bytes, and bytes of files; -1 for what isn't known."""


class OneLine:
    """Logs the same kind of trouble at most once in ``every_seconds``."""

    def __init__(self, every_seconds: float = 600) -> None:
        self.every_seconds = every_seconds
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, kind: str, message: str, *arguments: object) -> None:
        """Log ``message`` as a warning, unless its kind was logged lately."""
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -self.every_seconds) < self.every_seconds:
                return
            self._last[kind] = now
        logger.warning(message, *arguments)
