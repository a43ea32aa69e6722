"""The state of tiering in one scheduler process: claims on the host, windows on the device."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from qevict_tiers.claims import ClaimLedger, Prompt
from qevict_tiers.manager import TierManager
from qevict_tiers.threads import single_threaded
from sglang_qevict.capacity import CapacityPlan

__all__ = ["Chunk", "TieringState"]

logger = logging.getLogger(__name__)


class _Event(Enum):
    OPEN = "open"
    CLOSE = "close"


@dataclass(frozen=True)
class Chunk:
    """One row's share of a launch: tokens ``[start, end)``.

    score_start: queries from this position on score windows. route_at: length at which
    the row is routed once its queries have attended, or None. lazy: its FULL copies are
    made layer by layer, since each layer is routed right after its attention.
    """

    row: int
    start: int
    end: int
    score_start: int
    route_at: int | None
    lazy: bool


class TieringState:
    """Joins what the scheduler decides (rows, lengths) with what the device does.

    The scheduler's side only records: rows come and go as events in one queue, in the
    order of its decisions. The queue is applied at the start of the next launch, so
    nothing changes under a launch in flight. It is also SGLang's auxiliary cache of the
    request pool (``ReqToTokenPool.attach_aux_cache``).
    """

    def __init__(self, plan: CapacityPlan, manager: TierManager, req_to_token: torch.Tensor):
        self.plan = plan
        self.manager = manager
        self.claims = plan.claims
        self.ledger = ClaimLedger(plan.claims, manager.arena.capacity_bytes)
        self._req_to_token = req_to_token
        self._events: list[tuple[_Event, int]] = []
        self._view_tokens: dict[int, int] = {}
        self._changed = False

    # -- the scheduler's side -------------------------------------------------------

    def rows_allocated(self, rows: list[int]) -> None:
        """Rows were given to new requests (``ReqToTokenPool.register_on_alloc_rows``)."""
        self._events.extend((_Event.OPEN, row) for row in rows)

    def extend_prepared(self, row: int, prompt_tokens: int, start: int, end: int) -> None:
        """The next launch prefills tokens ``[start, end)`` of a row."""
        if row not in self.ledger:
            self.ledger.admit(row, Prompt(prompt_tokens, whole=start == 0 and end == prompt_tokens))
        self.ledger.advance(row, end)

    def free(self, row: int) -> None:
        """A row was given back (auxiliary cache)."""
        self.ledger.remove(row)
        self._events.append((_Event.CLOSE, row))
        self._changed = True

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """The next launch brings rows to these lengths (auxiliary cache).

        Rows that start a prefill are not known yet; ``extend_prepared`` follows for them.
        """
        for row, tokens in zip(
            req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist(), strict=True
        ):
            if row in self.ledger:
                self.ledger.advance(row, tokens)

    def clear(self) -> None:
        """Everything was flushed (auxiliary cache)."""
        self._changed = True
        self.ledger.clear()
        self._events.clear()
        self._view_tokens.clear()
        self.manager.clear()

    def reset_allocator(self) -> None:
        """Nothing is allocated apart from rows (auxiliary cache)."""

    @property
    def dense_capacity(self) -> int:
        """Logical tokens that can be scheduled (auxiliary cache)."""
        return self.plan.max_tokens

    # -- the launch's side ------------------------------------------------------------

    @single_threaded
    def start_decode(self, rows: list[int], lengths: list[int]) -> None:
        """A launch decodes one token of each row, which brings it to its length."""
        self.drain()
        self.ledger.require_room()
        self._route_due(rows, [length - 1 for length in lengths])
        self._grow(rows, lengths, lazy=set())
        self._launched(rows)

    @single_threaded
    def start_extend(self, rows: list[int], starts: list[int], ends: list[int]) -> list[Chunk]:
        """A launch extends rows from ``starts`` to ``ends``; decode rows may be among them."""
        self.drain()
        self.ledger.require_room()
        chunks = [
            self._chunk(row, start, end)
            for row, start, end in zip(rows, starts, ends, strict=True)
            if row in self.ledger
        ]
        self._route_due([chunk.row for chunk in chunks], [chunk.start for chunk in chunks])
        lazy = {chunk.row for chunk in chunks if chunk.lazy}
        self._grow([chunk.row for chunk in chunks], [chunk.end for chunk in chunks], lazy)
        self._launched([chunk.row for chunk in chunks])
        return chunks

    def drain(self) -> None:
        """Apply the queue of rows that came and went."""
        events, self._events = self._events, []
        position = 0
        while position < len(events):
            kind = events[position][0]
            rows: list[int] = []
            while position < len(events) and events[position][0] is kind:
                rows.append(events[position][1])
                position += 1
            if kind is _Event.OPEN:
                self.manager.open(rows)
                self._view_tokens.update(dict.fromkeys(rows, 0))
            else:
                self.manager.close(rows)
                for row in rows:
                    self._view_tokens.pop(row, None)

    @single_threaded
    def allocate_layer(self, layer: int, chunks: list[Chunk]) -> None:
        """Make the FULL copies of lazy chunks in one layer."""
        pages = [
            self._pages(chunk.row, chunk.start, chunk.end)[1] for chunk in chunks if chunk.lazy
        ]
        if pages:
            self.manager.allocate_full(slice(layer, layer + 1), torch.cat(pages))

    @single_threaded
    def route_layer(self, layer: int, chunks: list[Chunk]) -> None:
        """Route rows whose chunk ends at a routing point, in one layer."""
        due = [(chunk.row, chunk.route_at) for chunk in chunks if chunk.route_at is not None]
        if due:
            rows, tokens = zip(*due, strict=True)
            self.manager.route(slice(layer, layer + 1), list(rows), list(tokens))
            if layer == self.manager.num_layers - 1:
                self._log_routed(due)

    def _chunk(self, row: int, start: int, end: int) -> Chunk:
        prompt = self.ledger.prompt_tokens(row)
        if start >= prompt:
            return Chunk(row, start, end, score_start=start, route_at=None, lazy=False)
        segment_end = start + self.claims.chunk_limit(prompt, start)
        route_at = self.claims.routing_point(prompt, end)
        whole = start == 0 and end == prompt
        return Chunk(
            row,
            start,
            end,
            score_start=self.claims.score_start(segment_end),
            route_at=route_at,
            lazy=whole and route_at is not None,
        )

    def _route_due(self, rows: list[int], stored: list[int]) -> None:
        due = [
            (row, tokens)
            for row, tokens in zip(rows, stored, strict=True)
            if row in self.ledger and self.claims.is_due(self.ledger.prompt_tokens(row), tokens)
        ]
        if due:
            everything = slice(0, self.manager.num_layers)
            self.manager.route(everything, [row for row, _ in due], [n for _, n in due])
            self._log_routed(due)

    def _log_routed(self, due: list[tuple[int, int]]) -> None:
        """For debugging: a checksum tells whether two runs of a request were routed alike."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for row, tokens in due:
            tiers = self.manager.views.tier[:, row, : self.plan.budget.num_windows(tokens)]
            checksum = zlib.crc32(tiers.to(torch.uint8).cpu().numpy().tobytes())
            prompt = self.ledger.prompt_tokens(row)
            logger.debug("prompt of %d routed at %d: tiers %08x", prompt, tokens, checksum)

    def _grow(self, rows: list[int], lengths: list[int], lazy: set[int]) -> None:
        """Bring the views of rows to their lengths."""
        all_rows, all_windows, all_pages, eager_pages = [], [], [], []
        for row, length in zip(rows, lengths, strict=True):
            if row not in self._view_tokens:
                continue
            start, self._view_tokens[row] = self._view_tokens[row], length
            if self.plan.budget.num_windows(start) == self.plan.budget.num_windows(length):
                continue
            windows, pages = self._pages(row, start, length)
            all_rows.append(torch.full_like(windows, row))
            all_windows.append(windows)
            all_pages.append(pages)
            if row not in lazy:
                eager_pages.append(pages)
        if all_rows:
            self.manager.append(torch.cat(all_rows), torch.cat(all_windows), torch.cat(all_pages))
        if eager_pages:
            everything = slice(0, self.manager.num_layers)
            self.manager.allocate_full(everything, torch.cat(eager_pages))

    def _pages(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows that begin in ``[start, end)`` of a row, rounded up, and their pages."""
        window = self.plan.budget.config.window
        first, last = -(-start // window), -(-end // window)
        windows = torch.arange(first, last, device=self._req_to_token.device)
        pages = self._req_to_token[row, windows * window].to(torch.int64) // window
        return windows, pages

    def _launched(self, rows: list[int]) -> None:
        for row in rows:
            if row in self.ledger:
                self.ledger.launched(row)

    # -- checks and reports --------------------------------------------------------------

    def check_when_changed(self) -> list[str]:
        """``check_integrity``, unless nothing happened since the last time."""
        if not self._changed:
            return []
        self._changed = False
        return self.check_integrity()

    def check_integrity(self) -> list[str]:
        """What is wrong with claims, copies and views once the queue is applied."""
        self.drain()
        problems = self.manager.check_integrity()
        used, claimed = self.manager.arena.used_bytes, self.ledger.total_bytes
        if used > claimed:
            problems.append(f"{used} bytes in use, {claimed} claimed")
        if claimed > self.ledger.capacity_bytes:
            problems.append(f"{claimed} bytes claimed of {self.ledger.capacity_bytes}")
        if set(self.manager.open_rows) != set(self._view_tokens):
            problems.append("rows of the manager and of the scheduler differ")
        return problems

    def report(self) -> dict[str, Any]:
        """What tiering holds now, for ``/server_info``."""
        ledger = self.manager.ledger_bytes()
        occupancy = self.manager.occupancy()
        config = self.plan.budget.config
        return {
            "budget": float(config.budget),
            "quant_fraction": float(config.quant_fraction),
            "window": config.window,
            "layers": {
                "full": occupancy.full,
                "coded": occupancy.coded,
                "evicted": occupancy.evicted,
            },
            "bytes": {
                "full": ledger.full,
                "codes": ledger.codes,
                "params": ledger.params,
                "alignment": ledger.alignment,
                "shadow": ledger.shadow,
                # As in the line at start: with SGLang's buffers for the logical tokens.
                "tables": self.plan.table_bytes,
                "own_tables": ledger.tables,
                "arena": self.ledger.capacity_bytes,
                "claimed": self.ledger.total_bytes,
            },
            "counters": {
                counter.name.lower(): total
                for counter, total in self.manager.counters.read().items()
            },
            "requests": len(self.ledger),
            "max_logical_tokens": self.plan.max_tokens,
        }
