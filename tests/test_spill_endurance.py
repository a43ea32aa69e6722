"""Thousands of requests through the SSD tier and its store: nothing grows, and nothing is mixed up.

The arena is made up: what a window's original is follows from its tenant, its document and its
place. So whatever comes back can be compared.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
import threading
import time
import zlib
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import torch

from mini_engine import SMALL
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.spill.keys import KeySpace, LayerSpan
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.store import SpillStore
from sglang_qevict.spill import Recall, SpilledRequest, SpillTier
from spill_cases import MEMORY, adds_up

LAYERS, ROWS, MAX_WINDOWS, WINDOW = 2, 8, 64, 8
TENANTS, DOCUMENTS = 20, 200
SSD_BYTES = 8 << 20
"""So few that they are used up by some hundred requests."""
SOON = 60


class Owner(NamedTuple):
    """Whose tokens a row holds, and how many."""

    tenant: int
    document: int
    tokens: int


class MadeUpArena:
    """As much of a ``TierManager`` as the SSD tier asks."""

    def __init__(self, budget: WindowBudget) -> None:
        self.budget, self.num_layers = budget, LAYERS
        self.views = SimpleNamespace(tier=torch.zeros(LAYERS, ROWS + 1, MAX_WINDOWS))
        self.owners: dict[int, Owner] = {}
        self.restored = 0
        self._random = random.Random(1)
        generator = torch.Generator().manual_seed(0)
        self._noise = torch.randint(256, (1 << 20,), dtype=torch.uint8, generator=generator)

    def original(self, row: int, window: int) -> torch.Tensor:
        """uint8 ``[L, bytes]``."""
        tenant, document, _ = self.owners[row]
        size = LAYERS * self.budget.full_bytes
        number = zlib.crc32(f"{tenant} {document} {window}".encode())
        start = number % (self._noise.numel() - size)
        return self._noise[start : start + size].view(LAYERS, -1)

    def originals(self, layers: slice, row: int, windows: range) -> torch.Tensor:
        """uint8 ``[windows, layers, bytes]``."""
        return torch.stack([self.original(row, window)[layers] for window in windows])

    def restore(self, layers: slice, row: int, originals: torch.Tensor) -> None:
        """What comes back is what went."""
        assert torch.equal(originals, self.originals(layers, row, range(len(originals))))
        self.restored += len(originals)

    def budget_of(self, row: int) -> WindowBudget:
        """All requests have the same."""
        return self.budget

    def near_full(self, row: int, tokens: int, share: float) -> list[int]:
        """Any windows of the history."""
        windows = range(*self.budget.history(tokens))
        return self._random.sample(windows, min(6, len(windows)))


class Server:
    """Requests of random tenants and lengths, some of which run at the same time."""

    def __init__(self, tier: SpillTier, arena: MadeUpArena) -> None:
        self.tier, self.arena = tier, arena
        self.random = random.Random(0)
        self.put_back = 0

    def serve(self, requests: int) -> None:
        """So many requests, one after the other as rows get free; all have ended then."""
        for _ in range(requests):
            if len(self.arena.owners) == ROWS:
                self.end(self.random.choice([*self.arena.owners]))
            self.begin()
            if self.random.random() < 0.003:
                # A flush: rows go without their end.
                self.tier.forget_rows()
                self.arena.owners.clear()
        for row in [*self.arena.owners]:
            self.end(row)

    def begin(self) -> None:
        """A prompt is recalled, or computed, and routed."""
        draw = self.random
        document = min(int(draw.paretovariate(0.5)), DOCUMENTS)
        owner = Owner(draw.randrange(TENANTS), document, draw.randrange(2, MAX_WINDOWS * WINDOW))
        row = min({*range(1, ROWS + 1)} - {*self.arena.owners})
        self.arena.owners[row] = owner
        request = self._request(owner)
        count = self.tier.find(request, (owner.tokens - 1) // WINDOW, matched=draw.randrange(3))
        is_recalled = count > 0 and self.tier.read(request, count)
        self.tier.open(row, request, shared=0)
        assert self.tier.recalled(row) == (count if is_recalled else 0)
        for layer in range(LAYERS):
            if is_recalled:
                self.tier.restore(slice(layer, layer + 1), row)
            self.tier.take(slice(layer, layer + 1), [(row, owner.tokens)])
        self.tier.prefetch([(row, owner.tokens)])

    def _request(self, owner: Owner) -> SpilledRequest:
        tokens = [owner.document * 10_000 + position for position in range(owner.tokens)]
        return self.tier.request(
            f"tenant {owner.tenant}", None, lambda start, stop: tokens[start:stop]
        )

    def end(self, row: int) -> None:
        """A last routing event; then most of them end well."""
        owner = self.arena.owners[row]
        at_hand = self.tier.at_hand([row])
        assert at_hand is not None
        for window in at_hand.windows[0].nonzero()[:, 0].tolist():
            assert torch.equal(at_hand.original(0, window), self.arena.original(row, window))
            self.put_back += 1
        if self.random.random() < 0.8:
            self.tier.finish(row, owner.tokens // WINDOW)
        self.tier.close(row)
        del self.arena.owners[row]


class Held(NamedTuple):
    """What a process holds. objects: those that Python's collector sees, but for the records that
    the store has; the collector's own are gone."""

    files: int
    threads: int
    objects: int
    resident_bytes: int

    @classmethod
    def now(cls, store: SpillStore) -> Held:
        """Once nothing is under way."""
        store.flush().result(SOON)
        deadline = time.monotonic() + SOON
        while store.usage().reading:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gc.collect()
        return cls(
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            len(gc.get_objects()) - store.usage().records,
            psutil.Process().memory_info().rss,
        )


def _close(store: SpillStore) -> tuple[int, int]:
    """Files and threads of the process after a store's end."""
    store.close()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(
    "requests",
    [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_requests_come_and_go_and_leave_nothing(requests: int) -> None:
    config = TieringConfig(**SMALL | {"promote": Promotion.RESTORE, "budget": Fraction(1, 2)})
    arena = MadeUpArena(WindowBudget(config, config.geometry(Heads(1, 1, 64)), LAYERS))
    space = KeySpace("made up", "uint8", WINDOW)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        medium = LocalMedium(Path(directory) / "ssd", space, SSD_BYTES, segment_bytes=256 << 10)
        store = SpillStore(medium)
        tier = SpillTier(arena, store, space, LayerSpan(0, LAYERS))  # type: ignore[arg-type]
        server = Server(tier, arena)
        server.serve(requests // 2)
        first = Held.now(store)
        server.serve(requests // 2)
        last = Held.now(store)

        assert (last.files, last.threads) == (first.files, first.threads)
        # One object a request would be many times as much.
        assert last.objects - first.objects < requests / 2
        assert last.resident_bytes - first.resident_bytes < 8 << 20
        assert medium.check_integrity() == []
        assert adds_up(store.counters)
        assert medium.usage()[2] <= SSD_BYTES
        # And all of it happened.
        counters = store.counters
        assert min(counters.evicted, counters.moved, arena.restored, server.put_back) > 100
        assert counters.corrupt == counters.read_errors == counters.dropped_write_error == 0
        assert tier.counters.requests[Recall.RECALLED] > requests // 10
        assert _close(store) == before
