"""Numbers from the device of the KV cache to the host, without a wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

__all__ = ["LateReader", "Stopwatch"]

_Note = TypeVar("_Note")


class LateReader(Generic[_Note]):
    """Reads a small tensor again and again; on an accelerator one reads what was there before.

    There a copy is begun each time, if none is under way, and what the last one brought is
    what is read.
    """

    def __init__(self) -> None:
        self._latest: tuple[list[float], _Note] | None = None
        self._note: _Note
        self._host: torch.Tensor | None = None
        self._arrived: Any = None

    def read(
        self, numbers: torch.Tensor, note: _Note, *, wait: bool = False
    ) -> tuple[list[float], _Note] | None:
        """The tensor's numbers (``[n]``), or earlier ones; None if none have arrived so far.

        With them comes the ``note`` that they were asked for with. ``wait``: wait for these, as
        one may when the device is idle.
        """
        if numbers.device.type == "cpu":
            return numbers.tolist(), note
        if self._arrived is not None and (wait or self._arrived.query()):
            self._take()
        if self._arrived is None:
            if self._host is None or self._host.shape != numbers.shape:
                self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
            self._note = note
            if wait:
                self._take()
        return self._latest

    def _take(self) -> None:
        assert self._host is not None
        self._arrived.synchronize()
        self._latest, self._arrived = (self._host.tolist(), self._note), None


class Stopwatch:
    """Adds up how long pieces of work take on a device; on an accelerator by its own events.

    Their times are known only later: ``seconds`` has those of the pieces that are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time of all pieces that are done."""
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1000
        return self._seconds

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the work that is begun inside."""
        if self._on_host:
            started = perf_counter()
            yield
            self._seconds += perf_counter() - started
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._pending.append((start, end))
