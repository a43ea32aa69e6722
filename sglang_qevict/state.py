"""The state of tiering in one scheduler process: claims on the host, windows on the device."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import eq
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.utils.rank_consensus_checker import assert_same, rank_consensus

from qevict_kernels.transfers import to_device
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import ClaimLedger, Gives, Prompt, Terms
from qevict_tiers.config import PrefixReuse
from qevict_tiers.kept import UNLIMITED, Keep
from qevict_tiers.manager import TierManager
from qevict_tiers.observer import Observer
from qevict_tiers.presets import preset_name
from qevict_tiers.threads import single_threaded
from sglang_qevict.capacity import CapacityPlan
from sglang_qevict.fairness import Turns
from sglang_qevict.spill import NoSpill, SpilledRequest
from sglang_qevict.tenants import Tenants, make_tenancy
from sglang_qevict.terms import RequestTerms

__all__ = ["CHECK_VARIABLE", "Chunk", "TieringState"]

logger = logging.getLogger(__name__)

CHECK_VARIABLE = "QEVICT_CHECK_INTEGRITY"
"""An environment variable: 1 makes an idle server check every copy and view."""


class _Open(NamedTuple):
    """A row begins: its budget, how many windows it may leave and shares, and what the SSD tier has
    of it."""

    row: int
    budget: WindowBudget
    publishable: int
    shared: int
    spilled: SpilledRequest | None


class _Finish(NamedTuple):
    """A row is about to end well, with so many whole windows."""

    row: int
    windows: int


class _Close(NamedTuple):
    """A row ends."""

    row: int


class _Publish(NamedTuple):
    """Windows of a row that is about to end are kept."""

    row: int
    start: int
    end: int
    keep: Keep


class _Raise(NamedTuple):
    """FULL windows of a row that is about to end are kept in place of codes."""

    row: int
    windows: list[int]
    pages: list[int]


class _Limit(NamedTuple):
    """A row may leave less."""

    row: int
    windows: int


class _Drop(NamedTuple):
    """Pages are kept no longer."""

    pages: list[int]


MayGo = Callable[[int], bool]
"""Whether a leaf of the prefix cache may be evicted that has this page."""

EvictUntil = Callable[[Callable[[], bool], MayGo | None], None]
"""Evicts from the prefix cache what may go (None: anything), in the cache's own order, until a
condition holds or nothing is left."""

_Event = _Open | _Finish | _Close | _Publish | _Raise | _Limit | _Drop


@dataclass(frozen=True)
class Chunk:
    """One row's share of a launch: tokens ``[start, end)``.

    score_start: queries from this position on score windows. route_at: length at which
    the row is routed once its queries have attended, or None. lazy: its FULL copies are
    made layer by layer, since each layer is routed right after its attention. is_whole: every
    window that its queries see is FULL.
    """

    row: int
    start: int
    end: int
    score_start: int
    route_at: int | None
    lazy: bool
    is_whole: bool
    recalled: int
    """Windows before ``start`` that come from the SSD tier in this launch."""


class TieringState:
    """Joins what the scheduler decides (rows, lengths) with what the device does.

    The scheduler's side only records: rows that come and go, and pages that are kept or
    dropped, are events in one queue, in the order of its decisions. The queue is applied
    at the start of the next launch, so nothing changes under a launch in flight. Events hold
    numbers, no tensors: launches have a stream of their own on a GPU. The state is
    also SGLang's auxiliary cache of the request pool (``ReqToTokenPool.attach_aux_cache``).

    Ranks of a tensor-parallel group route by their own heads, but decide alike here. SGLang's
    checker of that (``SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1``) is told what they decide.
    """

    def __init__(
        self,
        plan: CapacityPlan,
        manager: TierManager,
        req_to_token: torch.Tensor,
        spill: NoSpill | None = None,
    ):
        self.plan = plan
        self.manager = manager
        self.spill = spill or NoSpill()
        self.claims = plan.claims
        capacity, shares = manager.arena.capacity_bytes, plan.budget.config.shares
        self.tenants = Tenants(shares.named if shares else ())
        tenancy = make_tenancy(shares, self.tenants, capacity, plan.num_rows) if shares else None
        self.ledger = ClaimLedger(plan.claims, capacity, plan.num_pages, tenancy)
        self.terms = RequestTerms(plan.claims, self.tenants if shares else None)
        self.turns = Turns(self.ledger, self.terms) if shares else None
        # Of the request that SGLang is taking in.
        self.coming_in = self.ledger.terms
        self._reuses = plan.budget.config.prefix_reuse is not PrefixReuse.OFF
        self._req_to_token = req_to_token
        self._events: list[_Event] = []
        self._prepared: tuple[list[int], list[int]] = ([], [])
        self._view_tokens: dict[int, int] = {}
        self._changed = False
        self._checks = 0

    # -- the scheduler's side -------------------------------------------------------

    @rank_consensus(same_params=["row", "prompt_tokens", "end", "shared", "publishes"])
    def extend_prepared(
        self,
        row: int,
        prompt_tokens: int,
        end: int,
        shared: Sequence[int] = (),
        publishes: bool = True,
        spilled: SpilledRequest | None = None,
        terms: Terms | None = None,
    ) -> None:
        """The next launch prefills a row up to token ``end``.

        Of a row that begins, ``shared`` are the kept pages of its reused prefix, ``publishes``
        tells whether it may leave its windows when it ends, ``spilled`` is what the SSD tier has
        and gets of it, and ``terms`` are those of a request that asks for nothing by default.
        """
        if row not in self.ledger:
            publishable = UNLIMITED if self._reuses and publishes else 0
            self.ledger.admit(
                row,
                Prompt(prompt_tokens, whole=end == prompt_tokens),
                publishable,
                shared,
                terms,
            )
            budget = self.ledger.claims_of(row).budget
            self._events.append(_Open(row, budget, publishable, len(shared), spilled))
        self.ledger.advance(row, end)

    def most_beside_a_prefix(self, prompt_tokens: int, terms: Terms) -> int | None:
        """What a request may generate on an empty server that keeps its whole prompt for others.

        None if nothing is kept, or it would get little beside it: less than SGLang expects of any
        answer, and less than half of what it gets without.
        """
        if not self._reuses:
            return None
        limit = self.plan.max_tokens
        free = self.ledger.max_new_tokens(prompt_tokens, limit, 0, terms)
        shared = prompt_tokens // self._window
        beside = self.ledger.max_new_tokens(prompt_tokens, limit, shared, terms)
        if free is None or beside is None:
            return None
        return beside if beside >= min(CLIP_MAX_NEW_TOKENS, free // 2) else None

    def publishable_tokens(self, row: int) -> int:
        """Leading tokens of a row that may be kept if it ends now: no more than were launched."""
        if row not in self.ledger:
            return 0
        return min(self.ledger.publishable(row) * self._window, self.launched_tokens(row))

    def launched_tokens(self, row: int) -> int:
        """Tokens of a row that a launch has brought it to, or is bringing it to."""
        return self._view_tokens.get(row, 0)

    def pages(self, row: int, windows: range) -> torch.Tensor:
        """Pages of windows of a row, int64 on the device."""
        tokens = slice(windows.start * self._window, windows.stop * self._window, self._window)
        return self._req_to_token[row, tokens].to(torch.int64) // self._window

    def finish(self, row: int, tokens: int) -> None:
        """A row is about to end well with so many tokens, before any of it is published."""
        self._events.append(_Finish(row, tokens // self._window))

    @rank_consensus(same_params=True)
    def publish(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Keep windows of a row that ends: ``pages`` are those from window ``start`` on."""
        end, first_coded = start + len(pages), start + len(pages)
        if self.ledger.was_routed(row):
            # Sink windows never are.
            first_coded = max(start, min(end, self.plan.budget.sink_windows))
        for first, last, keep in (
            (start, first_coded, Keep.FULL),
            (first_coded, end, Keep.CODES),
        ):
            if first < last:
                owner = self.ledger.terms_of(row).tenant
                self.ledger.kept.keep(pages[first - start : last - start], keep, owner)
                self._events.append(_Publish(row, first, last, keep))
        self._changed = True

    @rank_consensus(same_params=True)
    def raise_kept(self, row: int, start: int, pages: Sequence[int]) -> None:
        """A row ends whose windows from ``start`` on are kept already, in these pages.

        Where they are codes that nobody shares now, and the row has FULL windows, these are kept
        instead: or else what a long request has left would keep short ones from reusing it.
        """
        if self.ledger.was_routed(row):
            return
        kept = self.ledger.kept
        windows = [i for i, page in enumerate(pages, start) if kept.has_unused_codes(page)]
        if windows:
            raised = [pages[window - start] for window in windows]
            kept.raise_to_full(raised)
            self._events.append(_Raise(row, windows, raised))

    def drop(self, locations: torch.Tensor) -> None:
        """The prefix cache gives up these tokens, whole pages (waits for the device)."""
        pages: list[int] = (locations[:: self._window] // self._window).tolist()
        self.ledger.kept.drop(pages)
        self.observer.dropped(len(pages))
        self._events.append(_Drop(pages))
        self._changed = True

    def can_decode(self, rows: Iterable[int], evict_until: EvictUntil) -> bool:
        """Whether these rows can decode their next token; what is kept for reuse makes room.

        Several rows must leave what other tenants have been promised, too; the last one may use
        it, since SGLang would end it with an error.
        """
        held = [row for row in rows if row in self.ledger]
        is_last = len(held) <= 1
        has_room = self._make_room(
            lambda: self.ledger.total_if_decoded(held) - self.ledger.capacity_bytes,
            evict_until,
            must=is_last,
        )
        return has_room and (is_last or self.ledger.keeps_floors())

    def make_room(self, evict_until: EvictUntil) -> bool:
        """Make room for what was granted; False if what was kept for reuse is not enough."""
        return self._make_room(
            lambda: self.ledger.total_bytes - self.ledger.capacity_bytes, evict_until, must=True
        )

    def _make_room(self, excess: Callable[[], int], evict_until: EvictUntil, *, must: bool) -> bool:
        """Evict what nobody shares, then let running requests leave less.

        In this order, since what a running request will leave is newer than all that is kept.
        ``must``: if need be, from tenants that should not give way, too.
        """
        self._trim(evict_until)
        missing = excess()
        if missing > 0:
            for gives in self.ledger.givers(must=must):
                self._evict(excess, evict_until, gives)
                self._limit(excess, gives)
            missing = excess()
        assert_same("%d bytes claimed, %d too many", self.ledger.total_bytes, missing)
        return missing <= 0

    def _trim(self, evict_until: EvictUntil) -> None:
        """Take what tenants keep for later from those that hold more than their caps."""
        tenancy = self.ledger.tenancy
        if tenancy is None:
            return
        for tenant in tenancy.over_caps():
            beyond, gives = partial(tenancy.beyond_cap, tenant), partial(eq, tenant)
            self._evict(beyond, evict_until, gives)
            self._limit(beyond, gives)

    def _evict(
        self, excess: Callable[[], int], evict_until: EvictUntil, gives: Gives | None
    ) -> None:
        """Evict leaves of the tenants that give, as long as there is an excess."""
        tenancy = self.ledger.tenancy
        if tenancy is None or gives is None or tenancy.leaves_something(gives):
            evict_until(lambda: excess() <= 0, self.may_go(gives))

    def _limit(self, excess: Callable[[], int], gives: Gives | None) -> None:
        """Let rows of the tenants that give leave less, as long as there is an excess."""
        for row, windows in self.ledger.limit_publishing(excess, gives):
            self._events.append(_Limit(row, windows))

    def may_go(self, gives: Gives | None) -> MayGo | None:
        """Which leaves may go if these tenants give; None for any."""
        kept = self.ledger.kept
        return None if gives is None else lambda page: gives(kept.owner(page))

    def free(self, row: int) -> None:
        """A row was given back (auxiliary cache)."""
        if row in self.ledger:
            self.ledger.remove(row)
            self._events.append(_Close(row))
            self._changed = True

    def alloc_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """The next launch brings rows to these lengths (auxiliary cache).

        Rows that start a prefill are not known yet; ``extend_prepared`` follows for them.
        """
        rows, lengths = req_pool_indices_cpu.tolist(), target_seq_lens_cpu.tolist()
        self._prepared = rows, lengths
        for row, tokens in zip(rows, lengths, strict=True):
            if row in self.ledger:
                self.ledger.advance(row, tokens)

    def clear(self) -> None:
        """Everything was flushed (auxiliary cache)."""
        self._changed = True
        # What has finished is still to be written to the SSD tier.
        self.drain()
        self.ledger.clear()
        self._prepared = ([], [])
        self._view_tokens.clear()
        self.manager.clear()
        self.spill.forget_rows()

    def reset_allocator(self) -> None:
        """Nothing is allocated apart from rows (auxiliary cache)."""

    @property
    def dense_capacity(self) -> int:
        """Logical tokens that can be scheduled (auxiliary cache)."""
        return self.plan.max_tokens

    # -- the launch's side ------------------------------------------------------------

    def take_decoding(self, batch_size: int) -> tuple[list[int], list[int]]:
        """Rows that the decode launch at hand is for, and the lengths it brings them to.

        As the scheduler prepared them: on the device the launch has them too, but to read them
        there would be to wait for the launch before. Both are empty for a launch that nobody
        prepared, as SGLang's warm-ups are.

        Raises ``RuntimeError`` if the launch is for another number of rows.
        """
        (rows, lengths), self._prepared = self._prepared, ([], [])
        if rows and len(rows) != batch_size:
            raise RuntimeError(
                f"KV tiering: SGLang prepared {len(rows)} requests to decode, but decodes "
                f"{batch_size}"
            )
        return rows, lengths

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
        self._prepared = ([], [])
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
        everything = slice(0, self.manager.num_layers)
        self._restore(everything, [chunk for chunk in chunks if not chunk.lazy])
        self._launched([chunk.row for chunk in chunks])
        return chunks

    def drain(self) -> None:
        """Apply the queue of what was decided."""
        events, self._events = self._events, []
        for kind, group in groupby(events, type):
            self._apply(kind, list(group))

    def _apply(self, kind: type[_Event], events: Sequence[Any]) -> None:
        """Apply consecutive events of one kind."""
        if kind is _Open:
            rows = [event.row for event in events]
            self.manager.open(
                rows,
                [event.publishable for event in events],
                [event.budget for event in events],
            )
            self._view_tokens.update(dict.fromkeys(rows, 0))
            for event in events:
                self.spill.open(event.row, event.spilled, event.shared)
        elif kind is _Finish:
            for event in events:
                self.spill.finish(event.row, event.windows)
        elif kind is _Close:
            rows = [event.row for event in events]
            self.manager.close(rows)
            for row in rows:
                self._view_tokens.pop(row, None)
                self.spill.close(row)
        elif kind is _Publish:
            for event in events:
                self.manager.publish(event.row, event.start, event.end, event.keep)
        elif kind is _Raise:
            for event in events:
                windows, pages = to_device([event.windows, event.pages], self.manager.device)
                self.manager.raise_kept(event.row, windows, pages)
        elif kind is _Limit:
            for event in events:
                self.manager.limit_publishing(event.row, event.windows)
        else:
            dropped = [page for event in events for page in event.pages]
            self.manager.drop(to_device(dropped, self.manager.device))

    @single_threaded
    def allocate_layer(self, layer: int, chunks: list[Chunk]) -> None:
        """Make the FULL copies of lazy chunks in one layer."""
        lazy = [chunk for chunk in chunks if chunk.lazy]
        if lazy:
            pages = [
                self.pages(
                    chunk.row, self._windows(0 if chunk.recalled else chunk.start, chunk.end)
                )
                for chunk in lazy
            ]
            self.manager.allocate_full(slice(layer, layer + 1), torch.cat(pages))
            self._restore(slice(layer, layer + 1), lazy)

    def _restore(self, layers: slice, chunks: Sequence[Chunk]) -> None:
        """Put what the SSD tier has read for these chunks into their FULL copies."""
        for chunk in chunks:
            if chunk.recalled:
                self.spill.restore(layers, chunk.row)

    @single_threaded
    def route_layer(self, layer: int, chunks: list[Chunk]) -> None:
        """Route rows whose chunk ends at a routing point, in one layer."""
        due = [(chunk.row, chunk.route_at) for chunk in chunks if chunk.route_at is not None]
        if due:
            rows, tokens = zip(*due, strict=True)
            self.spill.take(slice(layer, layer + 1), due)
            self.manager.route(slice(layer, layer + 1), list(rows), list(tokens))
            if layer == self.manager.num_layers - 1:
                self._log_routed(due)

    def _chunk(self, row: int, start: int, end: int) -> Chunk:
        prompt, shared = self.ledger.prompt_tokens(row), self.ledger.sharing(row).shared
        claims = self.ledger.claims_of(row)
        is_whole = not shared and claims.is_unrouted(prompt, start)
        recalled = self.spill.recalled(row)
        if start >= prompt:
            return Chunk(row, start, end, start, None, lazy=False, is_whole=is_whole, recalled=0)
        segment_end = start + claims.chunk_limit(prompt, start)
        route_at = claims.routing_point(prompt, end)
        in_one = start == max(shared, recalled) * self._window and end == prompt
        return Chunk(
            row,
            start,
            end,
            score_start=claims.score_start(segment_end),
            route_at=route_at,
            lazy=in_one and route_at is not None,
            is_whole=is_whole,
            recalled=recalled,
        )

    def _route_due(self, rows: list[int], stored: list[int]) -> None:
        due = [
            (row, tokens)
            for row, tokens in zip(rows, stored, strict=True)
            if row in self.ledger and self._is_due(row, tokens)
        ]
        if due:
            everything = slice(0, self.manager.num_layers)
            due_rows, tokens = [row for row, _ in due], [n for _, n in due]
            self.spill.take(everything, due)
            self.manager.route(everything, due_rows, tokens, self.spill.at_hand(due_rows))
            self.spill.prefetch(due)
            self._log_routed(due)

    def _is_due(self, row: int, tokens: int) -> bool:
        return self.ledger.claims_of(row).is_due(self.ledger.prompt_tokens(row), tokens)

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
        grown, windows, all_pages, eager_pages = [], [], [], []
        for row, length in zip(rows, lengths, strict=True):
            if row not in self._view_tokens:
                continue
            if self._view_tokens[row] == 0:
                self._share(row)
            start, self._view_tokens[row] = self._view_tokens[row], length
            added = self._windows(start, length)
            if not added:
                continue
            pages = self.pages(row, added)
            grown.append(row)
            windows.append(added)
            all_pages.append(pages)
            if row not in lazy:
                eager_pages.append(pages)
        if grown:
            self.manager.append(grown, windows, torch.cat(all_pages))
        if eager_pages:
            everything = slice(0, self.manager.num_layers)
            self.manager.allocate_full(everything, torch.cat(eager_pages))

    def _share(self, row: int) -> None:
        """Begin a view with the reused prefix of its row."""
        shared = self.ledger.sharing(row).shared if row in self.ledger else 0
        if shared:
            self._view_tokens[row] = shared * self._window
            self.manager.share(row, self.pages(row, range(shared)))

    @property
    def observer(self) -> Observer:
        """What watches tiering in this process."""
        return self.manager.observer

    @property
    def _window(self) -> int:
        return self.plan.budget.config.window

    def _windows(self, start: int, end: int) -> range:
        """Windows that begin among tokens ``[start, end)``."""
        num_windows = self.plan.budget.num_windows
        return range(num_windows(start), num_windows(end))

    def _launched(self, rows: list[int]) -> None:
        for row in rows:
            if row in self.ledger:
                self.ledger.launched(row)
        self.observer.launched()

    # -- checks and reports --------------------------------------------------------------

    def check_when_changed(self) -> list[str]:
        """What is wrong, unless nothing happened since the last time.

        Bytes and pages against what the scheduler knows of them; with ``CHECK_VARIABLE`` set,
        every copy and every view, for which requests would wait in a large cache.
        """
        if not self._changed:
            self.observer.resting()
            return []
        self._changed = False
        self._checks += 1
        if os.environ.get(CHECK_VARIABLE, "0") != "0":
            problems = self.check_integrity()
        else:
            self.drain()
            problems = self._check_totals()
        self.observer.idle()
        return problems

    def check_integrity(self) -> list[str]:
        """What is wrong with claims, copies and views once the queue is applied."""
        self.drain()
        return self.manager.check_integrity() + self._check_totals()

    def _check_totals(self) -> list[str]:
        problems = self.ledger.check_tenants()
        used, claimed = self.manager.arena.used_bytes, self.ledger.total_bytes
        if used > claimed:
            problems.append(f"{used} bytes in use, {claimed} claimed")
        if claimed > self.ledger.capacity_bytes:
            problems.append(f"{claimed} bytes claimed of {self.ledger.capacity_bytes}")
        kept = int((self.manager.kept > 0).sum())
        if kept != self.ledger.kept.num_pages:
            problems.append(f"{kept} pages kept, {self.ledger.kept.num_pages} known to be")
        if set(self.manager.open_rows) != set(self._view_tokens):
            problems.append("rows of the manager and of the scheduler differ")
        return problems

    def rows_in_view(self) -> dict[int, int]:
        """Rows that have launched something, and how many tokens their views have.

        Those that began first come first. Rows that ended or began since are left out.
        """
        changed = {event.row for event in self._events if isinstance(event, _Open | _Close)}
        return {
            row: tokens
            for row, tokens in self._view_tokens.items()
            if tokens and row in self.ledger and row not in changed
        }

    def report(self) -> dict[str, Any]:
        """What tiering holds now, for ``/server_info``."""
        ledger = self.manager.ledger_bytes()
        occupancy = self.manager.occupancy()
        config = self.plan.budget.config
        return {
            "preset": preset_name(config),
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
                "reuse": ledger.reuse,
                # As in the line at start: with SGLang's buffers for the logical tokens.
                "tables": self.plan.table_bytes,
                "own_tables": ledger.tables,
                "arena": self.ledger.capacity_bytes,
                "claimed": self.ledger.total_bytes,
            },
            "counters": {
                counter.name.lower(): total
                for counter, total in self.manager.read_counters().items()
            },
            "requests": len(self.ledger),
            "kept_pages": self.ledger.kept.num_pages,
            "max_logical_tokens": self.plan.max_tokens,
            "checks": self._checks,
            "tenants": self._report_tenants(),
            "spill": self.spill.report(),
        }

    def _report_tenants(self) -> dict[str, dict[str, int]] | None:
        """What each tenant that is there holds, against its share; None without shares."""
        tenancy = self.ledger.tenancy
        if tenancy is None:
            return None
        return {
            name: {
                "requests": int(tenancy.rows[number]),
                "bytes": int(tenancy.claimed[number]),
                "reuse_bytes": int(tenancy.kept[number]),
                "share_bytes": tenancy.share(number),
            }
            for number, name in enumerate(self.tenants.names)
            if tenancy.held[number] or number in tenancy.waiting
        }
