"""The tier manager: applies routing plans to views and copies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from qevict_kernels.interface import (
    AttentionKernels,
    FullArena,
    LayerView,
    RoutesOnDevice,
    RoutingEvent,
)
from qevict_kernels.transfers import to_device
from qevict_tiers.arena import Arena
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion
from qevict_tiers.kept import Keep
from qevict_tiers.ledger import Copies, Counter, Counters, LedgerBytes
from qevict_tiers.observer import Observer
from qevict_tiers.policy import Limits, Tier, route
from qevict_tiers.scores import AttentionScorer, Ranking, Scorer, scorer_of
from qevict_tiers.views import Views

__all__ = ["AtHand", "Occupancy", "StorePlaces", "TierManager"]

logger = logging.getLogger(__name__)

_AT_ONCE = 1 << 20
"""Windows, each layer's counted, that are looked at together: some 100 bytes each for a moment."""


class StorePlaces(NamedTuple):
    """Where the new tokens of a launch go, in all layers.

    slots: int32 ``[L, T]``, FULL slots, negative for page 0. offsets: int32 ``[T]``.
    """

    slots: torch.Tensor
    offsets: torch.Tensor


class AtHand(NamedTuple):
    """Originals that could be put back into FULL copies by a routing event.

    windows: bool ``[rows, N]``, on the device. original: of the row at an index of the event and
    a window, uint8 ``[L, bytes]``.
    """

    windows: torch.Tensor
    original: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Occupancy:
    """Windows per tier of the open rows, ``[L]`` each."""

    full: list[int]
    coded: list[int]
    evicted: list[int]


class TierManager:
    """State of all windows of one model rank; every change of tier goes through here.

    A page is SGLang's page id in ``[1, num_pages]`` (0 belongs to nobody), a row its
    request slot. ``storage`` is the arena's buffer, uint8; everything else lies on its
    device. The caller decides, from lengths alone, what fits; the manager trusts that.
    ``fixed_shapes``: see ``arena``. ``observer`` is told of routing events and ended views.
    ``scorer``: what windows are ranked by; the default is that of the options. Kernels route on
    the device by what attention has gathered; with another scorer torch does.

    Pages of a finished row can be *kept* for rows to come (``publish``), which then *share*
    their copies. As long as that may happen, a window of the row that is evicted keeps its
    codes (``Views.publishable``), so that what is kept has a copy in every layer.

    A window that holds NaN or infinity, or a range beyond the format of the parameters, is
    never coded: where it would be, it is evicted from the view, counted
    (``Counter.NON_FINITE``) and, the first time, logged (with fixed shapes when the counters
    are next read). While it is FULL it is attended as it is, as stock SGLang does, and spoils
    its own request only.
    """

    def __init__(
        self,
        budget: WindowBudget,
        kernels: AttentionKernels,
        storage: torch.Tensor,
        num_pages: int,
        num_rows: int,
        max_windows: int,
        dtype: torch.dtype,
        fixed_shapes: bool | None = None,
        observer: Observer | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        device = storage.device
        self.budget = budget
        self.kernels = kernels
        self.device = device
        self.observer = observer or Observer()
        self.scorer = scorer or scorer_of(budget.config)
        self.num_layers = budget.num_layers
        self.pages_per_layer = num_pages + 1
        self.arena = Arena(
            storage,
            budget.full_bytes,
            budget.coded_bytes,
            self.num_layers * self.pages_per_layer,
            kernels.copy_slots,
            fixed_shapes,
        )
        self.views = Views(self.num_layers, num_rows, max_windows, device)
        self.counters = Counters(device)
        self.kept = torch.zeros(self.pages_per_layer, dtype=torch.uint8, device=device)
        self.open_rows: dict[int, int] = {}
        self._budgets: dict[int, WindowBudget] = {}
        self._on_device = (
            kernels
            if self.arena.fixed_shapes
            and isinstance(self.scorer, AttentionScorer)
            and isinstance(kernels, RoutesOnDevice)
            else None
        )
        self._warned = False
        self._refused_layer = torch.full((), -1, dtype=torch.int64, device=device)
        geometry = budget.geometry
        slots = self.arena.full.slots.view(dtype).view(
            -1, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim
        )
        self.full_arena = FullArena(keys=slots[:, 0], values=slots[:, 1])
        self.coded_arena = self.arena.coded.slots.view(
            -1, geometry.num_kv_heads, geometry.record.record_bytes
        )
        self._full_slot = self.arena.full.table.view(self.num_layers, -1)
        self._coded_slot = self.arena.coded.table.view(self.num_layers, -1)
        self._layer_views = [
            self.views.layer_view(layer, self._full_slot[layer], self._coded_slot[layer])
            for layer in range(self.num_layers)
        ]
        is_routed = [layer not in budget.config.full_layers for layer in range(self.num_layers)]
        self._routed_layers = to_device(is_routed, device).bool()

    @staticmethod
    def page_bytes(num_layers: int) -> int:
        """Bytes of tables that one page takes."""
        return 2 * 4 * num_layers + 1

    # -- life of a row ------------------------------------------------------------

    def open(
        self,
        rows: list[int],
        publishable: list[int],
        budgets: Sequence[WindowBudget] | None = None,
    ) -> None:
        """Start views for rows, which may leave so many windows each (``UNLIMITED``: all).

        ``budgets``: of each row, the manager's with other bytes; None: as the manager's.
        """
        self.open_rows.update(dict.fromkeys(rows, 0))
        if budgets is not None:
            self._budgets.update(zip(rows, budgets, strict=True))
        index, windows = to_device([rows, publishable], self.device)
        self.views.publishable[index] = windows

    def budget_of(self, row: int) -> WindowBudget:
        """The budget of an open row."""
        return self._budgets.get(row, self.budget)

    def share(self, row: int, pages: torch.Tensor) -> None:
        """Begin the view of an empty row with kept pages (int64 ``[n]``), whose copies it shares.

        It sees in each layer what is kept: FULL windows, coded ones, or nothing of a window
        that could not be coded.
        """
        n = pages.shape[0]
        owners = self._owners(slice(0, self.num_layers), pages)
        has_full, has_codes = (
            self.arena.full.table[owners] >= 0,
            self.arena.coded.table[owners] >= 0,
        )
        tiers = torch.full_like(owners, Tier.EVICTED, dtype=torch.uint8)
        tiers.masked_fill_(has_codes, Tier.CODED).masked_fill_(has_full, Tier.FULL)
        self.arena.full.retain(self._select(has_full, owners))
        self.arena.coded.retain(self._select(has_codes & ~has_full, owners))
        self.open_rows[row] = n
        self.views.page_table[row, :n] = pages.to(torch.int32)
        self.views.shared[row] = n
        index = to_device([row], self.device)
        tiers = tiers[:, None]
        self.views.set_tiers(
            slice(0, self.num_layers), index, tiers, torch.zeros_like(tiers, dtype=torch.bool)
        )

    def append(self, rows: Sequence[int], windows: Sequence[range], pages: torch.Tensor) -> None:
        """Add FULL windows to views; copies are made by ``allocate_full``.

        ``windows``: of each row; ``pages``: int64, those of one row after another.
        """
        of_rows = [row for row, added in zip(rows, windows, strict=True) for _ in added]
        of_windows = [window for added in windows for window in added]
        index, window = to_device([of_rows, of_windows], self.device)
        self.views.append(index, window, pages)
        for row, added in zip(rows, windows, strict=True):
            self.open_rows[row] = added.stop

    def allocate_full(self, layers: slice, pages: torch.Tensor) -> None:
        """Give pages (int64 ``[n]``) FULL copies in layers, contents undefined."""
        self.arena.full.allocate(self._owners(layers, pages).flatten())

    def locate(self, locations: torch.Tensor) -> StorePlaces:
        """Where tokens (int64 ``[T]``, ``page * W + offset``) lie, once all layers have copies."""
        return self._locate(slice(0, self.num_layers), locations)

    def store(
        self, layer: int, locations: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write new tokens of a layer into the FULL copies of their pages.

        ``locations``: int64 ``[T]``, ``page * W + offset``; page 0 is written nowhere.
        ``keys``, ``values``: ``[T, Hkv, D]`` (or flat), keys after RoPE.
        """
        slots, offsets = self._locate(slice(layer, layer + 1), locations)
        self._store(slots[0], offsets, keys, values)

    def store_at(
        self, layer: int, places: StorePlaces, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """``store`` for tokens that ``locate`` found."""
        self._store(places.slots[layer], places.offsets, keys, values)

    def originals(self, layers: slice, row: int, windows: range) -> torch.Tensor:
        """The FULL copies of a row's windows: uint8 ``[windows, layers, bytes]``, a copy."""
        slots = self._full_slots(layers, row, windows)
        return self.arena.full.slots[slots].view(len(windows), -1, self.budget.full_bytes)

    def restore(self, layers: slice, row: int, originals: torch.Tensor) -> None:
        """Write what ``originals`` gave into the FULL copies of a row's first windows."""
        slots = self._full_slots(layers, row, range(len(originals)))
        self.arena.full.slots[slots] = originals.flatten(0, 1)

    def _full_slots(self, layers: slice, row: int, windows: range) -> torch.Tensor:
        """FULL slots of a row's windows, of one window after another: int64 ``[n]``."""
        pages = self.views.page_table[row, windows.start : windows.stop].to(torch.int64)
        slots = self._full_slot[layers, pages].T.flatten().to(torch.int64)
        assert bool((slots >= 0).all()), "a window has no FULL copy"
        return slots

    def _locate(self, layers: slice, locations: torch.Tensor) -> StorePlaces:
        window = self.budget.geometry.window
        pages = torch.div(locations, window, rounding_mode="floor")
        offsets = (locations - pages * window).to(torch.int32)
        return StorePlaces(self._full_slot[layers, pages], offsets)

    def _store(
        self,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        geometry = self.budget.geometry
        shape = (-1, geometry.num_kv_heads, geometry.head_dim)
        self.kernels.store(self.full_arena, slots, offsets, keys.view(shape), values.view(shape))

    def close(self, rows: list[int]) -> None:
        """End views: their copies are released."""
        width = max((self.open_rows[row] for row in rows), default=0)
        step = self._at_once(width)
        for first in range(0, len(rows), step):
            self._close(rows[first : first + step])

    def _close(self, rows: list[int]) -> None:
        index, owners, tier = self._views(rows)
        has_full = (tier == Tier.FULL) & (self.arena.full.table[owners] >= 0)
        has_codes = self._holds_codes(tier, owners, self.views.keeps_codes(index, tier.shape[-1]))
        self.arena.full.release(self._select(has_full, owners))
        self.arena.coded.release(self._select(has_codes, owners))
        self.views.close(index, tier.shape[-1])
        self.observer.closed(rows)
        for row in rows:
            del self.open_rows[row]
            self._budgets.pop(row, None)

    def clear(self) -> None:
        """Forget all rows, pages and copies."""
        self.arena.clear()
        self.kept.zero_()
        if rows := list(self.open_rows):
            self.views.close(to_device(rows, self.device), max(self.open_rows.values()))
            self.observer.closed(rows)
        self.open_rows.clear()
        self._budgets.clear()

    # -- reuse of pages -----------------------------------------------------------

    def limit_publishing(self, row: int, windows: int) -> None:
        """From now on only the first so many windows of a row may be published."""
        index, owners, tier = self._views([row])
        before = self.views.keeps_codes(index, tier.shape[-1])
        self.views.publishable[index] = self.views.publishable[index].clamp(max=windows)
        dropped = before & ~self.views.keeps_codes(index, tier.shape[-1])
        has_codes = (tier == Tier.EVICTED) & dropped & (self.arena.coded.table[owners] >= 0)
        self.arena.coded.release(self._select(has_codes, owners))

    def publish(self, row: int, start: int, end: int, keep: Keep) -> None:
        """Keep the pages of a row's own windows ``[start, end)``, all of them complete.

        ``Keep.CODES``: what is still FULL of them in a routed layer is coded now; the
        windows must be publishable. ``Keep.FULL``: they must be FULL in all layers.
        """
        pages = self.views.page_table[row, start:end].to(torch.int64)
        everything = slice(0, self.num_layers)
        owners = self._owners(everything, pages)
        if keep is Keep.CODES:
            self._code_all(row, start, end)
        coded = self._routed_layers[:, None] & (keep is Keep.CODES)
        self.arena.full.retain(self._select(~coded & (self.arena.full.table[owners] >= 0), owners))
        self.arena.coded.retain(self._select(coded & (self.arena.coded.table[owners] >= 0), owners))
        self.kept[pages] = int(keep)

    def raise_kept(self, row: int, windows: torch.Tensor, pages: torch.Tensor) -> None:
        """Keep the FULL copies of a row's windows for kept pages of which there are codes.

        ``windows``, ``pages``: int64 ``[n]``; the windows are FULL in all layers, the pages hold
        the same tokens, and nobody shares them. The row has these pages then, instead of its own.
        """
        everything = slice(0, self.num_layers)
        own = self._owners(everything, self.views.page_table[row, windows].to(torch.int64))
        kept = self._owners(everything, pages)
        routed = self._routed_layers[:, None].expand(kept.shape)
        has_codes = routed & (self.arena.coded.table[kept] >= 0)
        self.arena.coded.release(self._select(has_codes, kept))
        self.arena.full.rename(self._select(routed, own), self._select(routed, kept))
        # Layers that are not routed have a FULL copy for the page already.
        self.arena.full.release(self._select(~routed, own))
        self.arena.full.retain(kept.flatten())
        self.views.page_table[row, windows] = pages.to(torch.int32)
        self.kept[pages] = Keep.FULL

    def _code_all(self, row: int, start: int, end: int) -> None:
        """Demote the FULL windows ``[start, end)`` of a row in all routed layers."""
        everything = slice(0, self.num_layers)
        width = self.open_rows[row]
        index = to_device([row], self.device)
        before = self.views.tier[:, index, :width]
        window = torch.arange(width, device=self.device)
        is_routed = self._routed_layers[:, None, None]
        demoted = (before == Tier.FULL) & is_routed & (window >= start) & (window < end)
        pages = self.views.page_table[index, :width].to(torch.int64)
        after, made = self._apply(
            everything, pages, before, torch.where(demoted, Tier.CODED, before), index
        )
        self.counters.add(Counter.CODED_FOR_REUSE, made.sum())
        self.views.set_tiers(everything, index, after, self.views.outranked[:, index, :width])

    def drop(self, pages: torch.Tensor) -> None:
        """Keep pages (int64 ``[n]``) no longer."""
        step = self._at_once(1)
        for first in range(0, pages.shape[0], step):
            full, coded, owners = self._kept_copies(pages[first : first + step])
            self.arena.full.release(self._select(full, owners))
            self.arena.coded.release(self._select(coded, owners))
        self.kept[pages] = Keep.NOTHING

    def _kept_copies(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which FULL and which coded copies are kept of pages: masks of owners, ``[L, n]``."""
        owners = self._owners(slice(0, self.num_layers), pages)
        keep = self.kept[pages]
        routed = self._routed_layers[:, None]
        full = (keep == Keep.FULL) | ((keep == Keep.CODES) & ~routed)
        coded = (keep == Keep.CODES) & routed
        return (
            full & (self.arena.full.table[owners] >= 0),
            coded & (self.arena.coded.table[owners] >= 0),
            owners,
        )

    # -- routing ------------------------------------------------------------------

    def route(
        self,
        layers: slice,
        rows: list[int],
        tokens: list[int],
        at_hand: AtHand | None = None,
    ) -> None:
        """One routing event for rows of so many stored tokens, in some layers.

        Evicted and restored codes go first, then demoted windows are coded, then the FULL copies
        that nobody sees any more go, then what is promoted gets its own: so bytes in use never
        exceed FULL before plus codes after, or FULL after plus codes after.
        """
        with self.observer.routing(self.views, layers, rows, tokens):
            self._route(layers, rows, tokens, at_hand)

    def _route(
        self, layers: slice, rows: list[int], tokens: list[int], at_hand: AtHand | None
    ) -> None:
        width = max(self.budget.num_windows(n) for n in tokens)
        if self._on_device is not None:
            self._route_on_device(self._on_device, layers, rows, tokens, width)
        else:
            self._route_in_torch(layers, rows, tokens, width, at_hand)
        if self.scorer.decay != 1:
            index = to_device(rows, self.device)
            self.views.score[layers, index, :width] *= self.scorer.decay

    def _route_in_torch(
        self,
        layers: slice,
        rows: list[int],
        tokens: list[int],
        width: int,
        at_hand: AtHand | None,
    ) -> None:
        index = to_device(rows, self.device)
        before = self.views.tier[layers, index, :width]
        budgets = [self.budget_of(row) for row in rows]
        limits = Limits.of(budgets, tokens, self.views.shared[index])
        gathered = self.views.score[layers, index, :width]
        scores = self.scorer.rank(gathered, Ranking(layers, rows, tokens))
        windows = None if at_hand is None else at_hand.windows[:, :width]
        routed = route(scores, before, limits, self.budget.config.promote, windows)
        is_routed = self._routed_layers[layers, None, None]
        after = torch.where(is_routed, routed.tiers, before)
        outranked = is_routed & routed.outranked
        pages = self.views.page_table[index, :width].to(torch.int64)
        after, made = self._apply(layers, pages, before, after, index, at_hand)
        self._count(before, after, made)
        risen = self.views.outranked[layers, index, :width] & ~outranked
        self.counters.add(Counter.RANK_PROMOTED, (risen & (after != Tier.EVICTED)).sum())
        self.views.set_tiers(layers, index, after, outranked)

    def near_full(self, row: int, tokens: int, share: float) -> list[int]:
        """Coded windows of a row that may soon be FULL, those that gained most first.

        Their score is at least ``share`` of the least that a FULL window of their layer's history
        has; what it is beyond that, over all layers, is their gain. ``tokens``: that are stored.
        Windows of a reused prefix never are.
        """
        (start, end), shared = self.budget.history(tokens), int(self.views.shared[row])
        tiers, scores = self.views.tier[:, row, start:end], self.views.score[:, row, start:end]
        least = scores.masked_fill(tiers != Tier.FULL, torch.inf).amin(-1, keepdim=True)
        beyond = torch.where(tiers == Tier.CODED, scores - share * least, -torch.inf)
        gain = beyond.clamp(min=0).sum(0)
        gain[: max(0, shared - start)] = 0
        order = gain.argsort(descending=True, stable=True)
        return [start + window for window in order[gain[order] > 0].tolist()]

    def warm_up(self) -> None:
        """Compile what an event needs, by one for row 0, a row without windows."""
        self._route(slice(0, self.num_layers), [0], [self.budget.config.min_context + 1], None)

    def _route_on_device(
        self,
        kernels: RoutesOnDevice,
        layers: slice,
        rows: list[int],
        tokens: list[int],
        width: int,
    ) -> None:
        config, budget = self.budget.config, self.budget
        budgets = [self.budget_of(row) for row in rows]
        numbers = to_device([rows, *Limits.numbers(budgets, tokens)], self.device)
        coded_per_full = Limits.coded_per_full_of(budget)
        event = RoutingEvent(
            rows=numbers[0],
            limits=numbers[1:],
            first_layer=layers.start,
            num_layers=layers.stop - layers.start,
            width=width,
            coded_per_full=(coded_per_full.numerator, coded_per_full.denominator),
            dequantizes=config.promote is Promotion.DEQUANTIZE,
            pages_per_layer=self.pages_per_layer,
        )
        kernels.route(
            event,
            self.views.tensors(self._routed_layers),
            self.arena.full.tensors,
            self.arena.coded.tensors,
            self.full_arena,
            self.coded_arena,
            self.counters.totals,
            self._refused_layer,
        )

    def _count(self, before: torch.Tensor, after: torch.Tensor, made: torch.Tensor) -> None:
        """Count what a routing event did; ``made``: windows whose codes were made."""
        was_full, was_coded = before == Tier.FULL, before == Tier.CODED
        is_coded, is_gone = after == Tier.CODED, after == Tier.EVICTED
        count = self.counters.add
        count(Counter.ROUTED, (was_full | was_coded).sum())
        count(Counter.DEMOTED, (was_full & is_coded).sum())
        count(Counter.EVICTED_FULL, (was_full & is_gone).sum())
        count(Counter.EVICTED_CODED, (was_coded & is_gone).sum())
        count(Counter.PROMOTED, (was_coded & (after == Tier.FULL)).sum())
        count(Counter.CODES_REUSED, (was_full & is_coded & ~made).sum())
        count(Counter.CODED_FOR_REUSE, (made & is_gone).sum())

    def _apply(
        self,
        layers: slice,
        pages: torch.Tensor,
        before: torch.Tensor,
        after: torch.Tensor,
        rows: torch.Tensor,
        at_hand: AtHand | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make and release copies of the first windows of rows, as their tiers change.

        Returns the tiers that came of it, and which windows got codes that had none.
        """
        full, coded = self.arena.full, self.arena.coded
        owners = self._owners(layers, pages)
        keeps = self.views.keeps_codes(rows, pages.shape[-1])
        was_full = before == Tier.FULL
        had_codes = self._holds_codes(before, owners, keeps)

        restored = (before == Tier.CODED) & (after == Tier.FULL) & (at_hand is not None)
        evicted = (after == Tier.EVICTED) & ~keeps
        coded.release(self._select(had_codes & (evicted | restored), owners))
        needs_codes = (after == Tier.CODED) | ((after == Tier.EVICTED) & keeps)
        made = was_full & needs_codes & ~had_codes
        if not self._quantize(made, owners):
            made &= coded.table[owners] >= 0
            uncoded = (after == Tier.CODED) & (coded.table[owners] < 0)
            after = torch.where(uncoded, Tier.EVICTED, after)
        full.release(self._select(was_full & (after != Tier.FULL), owners))
        if self.budget.config.promote is Promotion.DEQUANTIZE:
            self._dequantize((before == Tier.CODED) & (after == Tier.FULL), owners)
        if at_hand is not None:
            self._put_back(layers, restored, owners, at_hand)
        self.counters.add(Counter.QUANTIZED, made.sum())
        return after, made

    def _put_back(
        self, layers: slice, restored: torch.Tensor, owners: torch.Tensor, at_hand: AtHand
    ) -> None:
        """Give restored windows FULL copies with their originals."""
        slots = self.arena.full.allocate(owners[restored])
        places = restored.nonzero().tolist()
        for slot, (layer, row, window) in zip(slots.tolist(), places, strict=True):
            self.arena.full.slots[slot] = at_hand.original(row, window)[layers.start + layer]

    def _quantize(self, mask: torch.Tensor, owners: torch.Tensor) -> bool:
        """Code FULL windows; those that can't be coded have no codes then.

        Returns whether all are known to have been coded, which is never with fixed shapes.
        """
        chosen = self._select(mask, owners)
        windows = self._select(mask, self._window_index(mask)).to(torch.int32)
        coded_slots = self.arena.coded.allocate(chosen)
        refused = self.kernels.quantize(
            self.full_arena,
            self.coded_arena,
            self.arena.full.slot_of(chosen),
            coded_slots,
            windows,
        )
        if self.arena.fixed_shapes:
            self._refuse(refused, chosen)
            return False
        if not refused.any():
            return True
        self._refuse(refused, chosen)
        self._warn_of_refused()
        return False

    def _refuse(self, refused: torch.Tensor, owners: torch.Tensor) -> None:
        """Release the codes that decode to NaN, and count them."""
        if not owners.shape[0]:
            return
        gone = torch.where(refused, owners, -1)
        self.arena.coded.release(gone)
        self.counters.add(Counter.NON_FINITE, refused.sum())
        layers = torch.div(gone, self.pages_per_layer, rounding_mode="floor")
        torch.maximum(self._refused_layer, layers.amax(), out=self._refused_layer)

    def _warn_of_refused(self) -> None:
        """Say, once, that there are windows that can't be coded (waits for the device)."""
        if self._warned:
            return
        layer = int(self._refused_layer)
        if layer >= 0:
            self._warned = True
            logger.warning(
                "KV tiering: layer %d has keys or values that are NaN, infinite or too large to "
                "be coded; such windows are evicted (said once, counted as non_finite)",
                layer,
            )

    def _dequantize(self, mask: torch.Tensor, owners: torch.Tensor) -> None:
        chosen = self._select(mask, owners)
        windows = self._select(mask, self._window_index(mask))
        self.kernels.dequantize(
            self.full_arena,
            self.coded_arena,
            self.arena.full.allocate(chosen),
            self.arena.coded.slot_of(chosen),
            windows.to(torch.int32),
        )

    def _window_index(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(like.shape[-1], device=self.device).expand(like.shape)

    def _select(self, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The masked values as one list; with fixed shapes all, with -1 where masked out."""
        values = values.expand(mask.shape)
        if self.arena.fixed_shapes:
            return torch.where(mask, values, -1).flatten()
        return values[mask]

    def _holds_codes(
        self, tier: torch.Tensor, owners: torch.Tensor, keeps: torch.Tensor
    ) -> torch.Tensor:
        """Windows of views that hold codes: coded ones, FULL ones with shadow codes, and evicted
        ones that keep them (``Views.keeps_codes``)."""
        exists = (tier == Tier.FULL) | (tier == Tier.CODED) | ((tier == Tier.EVICTED) & keeps)
        return exists & (self.arena.coded.table[owners] >= 0)

    def _owners(self, layers: slice, pages: torch.Tensor) -> torch.Tensor:
        """Owners of pages in layers: ``[len(layers), *pages.shape]``."""
        layer = torch.arange(layers.start, layers.stop, device=self.device)
        return layer.view(-1, *[1] * pages.dim()) * self.pages_per_layer + pages

    # -- what kernels and reports need ---------------------------------------------

    def layer_view(self, layer: int) -> LayerView:
        """Views and slot tables of one layer (stable tensors)."""
        return self._layer_views[layer]

    def layer_scores(self, layer: int) -> torch.Tensor:
        """Scores of one layer, float32 ``[rows, N]``, to be added to by attention."""
        return self.views.score[layer]

    def _views(self, rows: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, and owners and tiers of all their windows: int64 ``[n]``, ``[L, n, windows]``."""
        index = to_device(list(rows), self.device)
        width = max((self.open_rows[row] for row in rows), default=0)
        pages = self.views.page_table[index, :width].to(torch.int64)
        return (
            index,
            self._owners(slice(0, self.num_layers), pages),
            self.views.tier[:, index, :width],
        )

    def _at_once(self, windows: int) -> int:
        """How many rows of so many windows to look at together."""
        return max(1, _AT_ONCE // (self.num_layers * max(1, windows)))

    def read_counters(self) -> dict[Counter, int]:
        """All totals; warns, once, of windows that can't be coded (waits for the device)."""
        self._warn_of_refused()
        return self.counters.read()

    def count_copies(self) -> torch.Tensor:
        """``Copies``, int64 ``[5]`` on the device."""
        full, coded = self.arena.full, self.arena.coded
        has_full, has_codes = full.table >= 0, coded.table >= 0
        shadows = has_full & has_codes
        seen = shadows.clone()
        index = to_device(list(self.open_rows), self.device)
        width = max(self.open_rows.values(), default=0)
        pages = self.views.page_table[index, :width].to(torch.int64)
        step = max(1, _AT_ONCE // max(1, pages.numel()))
        for first in range(0, self.num_layers, step):
            layers = slice(first, min(first + step, self.num_layers))
            tier = self.views.tier[layers, index, :width]
            is_seen = (tier == Tier.FULL) | (tier == Tier.CODED)
            # Owner 0, a page that is never used, stands for windows that are not seen.
            seen[torch.where(is_seen, self._owners(layers, pages), 0)] = True
        return torch.stack(
            [
                full.count,
                coded.count,
                shadows.sum(),
                (has_full & ~seen).sum(),
                (has_codes & ~seen).sum(),
            ]
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of all that says where copies lie and what views see."""
        tables = self.arena.full.table_bytes + self.arena.coded.table_bytes
        return tables + self.views.num_bytes + self.kept.nbytes

    def ledger_bytes(self) -> LedgerBytes:
        """Bytes in use by kind (waits for the device)."""
        copies = Copies(*self.count_copies().tolist())
        return LedgerBytes.of(self.budget.geometry, copies, self.table_bytes)

    def occupancy(self) -> Occupancy:
        """Windows per tier and layer, over all open rows (waits for the device)."""
        index, windows = to_device(list(self.open_rows), self.device), sum(self.open_rows.values())
        full, coded = (
            counts[:, index].sum(1).tolist()
            for counts in (self.views.num_full, self.views.num_coded)
        )
        evicted = [windows - seen for seen in map(sum, zip(full, coded, strict=True))]
        return Occupancy(full, coded, evicted)

    def check_integrity(self) -> list[str]:
        """What is wrong with copies, tables and views; empty when nothing is.

        Every copy is in exactly one slot and has as many references as views and kept pages
        hold, each view finds its copies, and the bytes fit the arena.
        """
        problems = self.arena.check_integrity()
        problems += self.views.check_integrity(sorted(self.open_rows))
        index, owners, tier = self._views(self.open_rows)
        for side, kind in ((self.arena.full, Tier.FULL), (self.arena.coded, Tier.CODED)):
            if bool((side.table[owners[tier == kind]] < 0).any()):
                problems.append(f"a {kind.name} window of a view has no copy")
        holds_codes = self._holds_codes(tier, owners, self.views.keeps_codes(index, tier.shape[-1]))
        pages = torch.nonzero(self.kept)[:, 0]
        kept_full, kept_codes, kept_owners = self._kept_copies(pages)
        for side, seen, kept, name in (
            (self.arena.full, tier == Tier.FULL, kept_full, "FULL"),
            (self.arena.coded, holds_codes, kept_codes, "coded"),
        ):
            held = torch.cat([owners[seen], kept_owners[kept]])
            problems += side.check_references(held, name)
        return problems
