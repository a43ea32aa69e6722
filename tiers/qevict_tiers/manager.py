"""The tier manager: applies routing plans to views and copies."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from qevict_kernels.interface import AttentionKernels, FullArena, LayerView
from qevict_tiers.arena import Arena
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion
from qevict_tiers.ledger import Counter, Counters, LedgerBytes
from qevict_tiers.policy import Tier, route
from qevict_tiers.views import Views

__all__ = ["Occupancy", "StorePlaces", "TierManager"]

logger = logging.getLogger(__name__)


class StorePlaces(NamedTuple):
    """Where the new tokens of a launch go, in all layers.

    slots: int32 ``[L, T]``, FULL slots, negative for page 0. offsets: int32 ``[T]``.
    """

    slots: torch.Tensor
    offsets: torch.Tensor


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
    ``fixed_shapes``: see ``arena``.

    A window that holds NaN or infinity, or a range beyond the format of the parameters, is
    never coded: where it would be, it is evicted from the view, counted
    (``Counter.NON_FINITE``) and, the first time, logged. While it is FULL it is attended as
    it is, as stock SGLang does, and spoils its own request only.
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
    ) -> None:
        device = storage.device
        self.budget = budget
        self.kernels = kernels
        self.device = device
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
        self.open_rows: set[int] = set()
        self._warned = False
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
        self._routed_layers = torch.tensor(
            [layer not in budget.config.full_layers for layer in range(self.num_layers)],
            device=device,
        )

    @staticmethod
    def page_bytes(num_layers: int) -> int:
        """Bytes of tables that one page takes."""
        return 2 * 4 * num_layers

    # -- life of a row ------------------------------------------------------------

    def open(self, rows: list[int]) -> None:
        """Start views for rows; what they held before must have been closed."""
        self.open_rows.update(rows)
        self.views.open(torch.tensor(rows, device=self.device))

    def append(self, rows: torch.Tensor, windows: torch.Tensor, pages: torch.Tensor) -> None:
        """Add FULL windows to views (``Views.append``); copies are made by ``allocate_full``."""
        self.views.append(rows, windows, pages)

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
        self.open_rows.difference_update(rows)
        index = torch.tensor(rows, device=self.device)
        everything = slice(0, self.num_layers)
        owners = self._owners(everything, self.views.page_table[index].to(torch.int64))
        tier = self.views.tier[:, index]
        has_full = (tier == Tier.FULL) & (self.arena.full.table[owners] >= 0)
        has_codes = self._holds_codes(tier, owners)
        self.arena.full.release(self._select(has_full, owners))
        self.arena.coded.release(self._select(has_codes, owners))
        self.views.open(index)

    def clear(self) -> None:
        """Forget all rows and copies."""
        self.arena.clear()
        if self.open_rows:
            self.views.open(torch.tensor(sorted(self.open_rows), device=self.device))
        self.open_rows.clear()

    # -- routing ------------------------------------------------------------------

    def route(self, layers: slice, rows: list[int], tokens: list[int]) -> None:
        """One routing event for rows of so many stored tokens, in some layers.

        Evicted codes go first, then demoted windows are coded, then the FULL copies that
        nobody sees any more go: so bytes in use never exceed FULL before plus codes after.
        """
        config = self.budget.config
        index = torch.tensor(rows, device=self.device)
        ranges = [self.budget.history(n) for n in tokens]
        limits = [self.budget.capacities(n) for n in tokens]
        width = max(self.budget.num_windows(n) for n in tokens)
        before = self.views.tier[layers, index, :width]
        routed = route(
            self.views.score[layers, index, :width],
            before,
            torch.tensor([start for start, _ in ranges], device=self.device),
            torch.tensor([end for _, end in ranges], device=self.device),
            torch.tensor([limit.full for limit in limits], device=self.device),
            torch.tensor([limit.coded for limit in limits], device=self.device),
            config.promote,
        )
        is_routed = self._routed_layers[layers, None, None]
        after = torch.where(is_routed, routed.tiers, before)
        outranked = is_routed & routed.outranked
        pages = self.views.page_table[index, :width].to(torch.int64)
        after = self._apply(layers, pages, before, after)
        risen = self.views.outranked[layers, index, :width] & ~outranked
        self.counters.add(Counter.RANK_PROMOTED, (risen & (after != Tier.EVICTED)).sum())
        self.views.set_tiers(layers, index, after, outranked)

    def _apply(
        self, layers: slice, pages: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """Make and release copies; returns the tiers that came of it."""
        full, coded = self.arena.full, self.arena.coded
        owners = self._owners(layers, pages)
        was_full, was_coded = before == Tier.FULL, before == Tier.CODED
        had_codes = self._holds_codes(before, owners)

        coded.release(self._select(had_codes & (after == Tier.EVICTED), owners))
        if self._quantize(was_full & (after == Tier.CODED) & ~had_codes, owners):
            uncoded = (after == Tier.CODED) & (coded.table[owners] < 0)
            after = torch.where(uncoded, Tier.EVICTED, after)
        to_coded = was_full & (after == Tier.CODED)
        to_full = was_coded & (after == Tier.FULL)
        gone = after == Tier.EVICTED
        full.release(self._select(was_full & (to_coded | gone), owners))
        if self.budget.config.promote is Promotion.DEQUANTIZE:
            self._dequantize(to_full, owners)

        count = self.counters.add
        count(Counter.ROUTED, (was_full | was_coded).sum())
        count(Counter.DEMOTED, to_coded.sum())
        count(Counter.EVICTED_FULL, (was_full & gone).sum())
        count(Counter.EVICTED_CODED, (was_coded & gone).sum())
        count(Counter.PROMOTED, to_full.sum())
        count(Counter.QUANTIZED, (to_coded & ~had_codes).sum())
        count(Counter.CODES_REUSED, (to_coded & had_codes).sum())
        return after

    def _quantize(self, mask: torch.Tensor, owners: torch.Tensor) -> int:
        """Code FULL windows; returns how many can't be coded, which have no codes then."""
        chosen = self._select(mask, owners)
        windows = self._select(mask, self._window_index(mask)).to(torch.int32)
        coded_slots = self.arena.coded.allocate(chosen)
        non_finite = self.kernels.quantize(
            self.full_arena,
            self.coded_arena,
            self.arena.full.slot_of(chosen),
            coded_slots,
            windows,
        )
        if non_finite:
            self._refuse(chosen, coded_slots, windows)
            self.counters.add(Counter.NON_FINITE, non_finite)
        return non_finite

    def _refuse(
        self, owners: torch.Tensor, coded_slots: torch.Tensor, windows: torch.Tensor
    ) -> None:
        """Release the codes that decode to NaN, and say so once."""
        n = owners.shape[0]
        decoded = torch.zeros(
            (n, 2, *self.full_arena.keys.shape[1:]),
            dtype=self.full_arena.keys.dtype,
            device=self.device,
        )
        targets = torch.arange(n, dtype=torch.int32, device=self.device)
        self.kernels.dequantize(
            FullArena(keys=decoded[:, 0], values=decoded[:, 1]),
            self.coded_arena,
            torch.where(owners >= 0, targets, -1),
            coded_slots,
            windows,
        )
        refused = torch.where(decoded.isnan().flatten(1).any(1), owners, -1)
        self.arena.coded.release(refused)
        if not self._warned:
            self._warned = True
            logger.warning(
                "KV tiering: layer %d has keys or values that are NaN, infinite or too large to "
                "be coded; such windows are evicted (said once, counted as non_finite)",
                int(refused.max()) // self.pages_per_layer,
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

    def _holds_codes(self, tier: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Windows of views that hold codes: coded ones, and FULL ones with shadow codes."""
        exists = (tier == Tier.FULL) | (tier == Tier.CODED)
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

    def ledger_bytes(self) -> LedgerBytes:
        """Bytes in use by kind (waits for the device)."""
        full, coded = self.arena.full, self.arena.coded
        return LedgerBytes.of(
            self.budget.geometry,
            num_full=int(full.count),
            num_coded=int(coded.count),
            num_shadow=int(((full.table >= 0) & (coded.table >= 0)).sum()),
            tables=full.table_bytes + coded.table_bytes + self.views.num_bytes,
        )

    def occupancy(self) -> Occupancy:
        """Windows per tier and layer, over all open rows (waits for the device)."""
        rows = torch.tensor(sorted(self.open_rows), dtype=torch.int64, device=self.device)
        tier = self.views.tier[:, rows]

        def per_layer(kind: Tier) -> list[int]:
            counts: list[int] = (tier == kind).flatten(1).sum(1).tolist()
            return counts

        return Occupancy(per_layer(Tier.FULL), per_layer(Tier.CODED), per_layer(Tier.EVICTED))

    def check_integrity(self) -> list[str]:
        """What is wrong with copies, tables and views; empty when nothing is.

        Every copy is in exactly one slot, each copy is seen by a view and each view finds
        its copies, and the bytes fit the arena.
        """
        problems = self.arena.check_integrity()
        rows = sorted(self.open_rows)
        problems += self.views.check_integrity(rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self.device)
        everything = slice(0, self.num_layers)
        owners = self._owners(everything, self.views.page_table[index].to(torch.int64))
        tier = self.views.tier[:, index]
        for side, kind in ((self.arena.full, Tier.FULL), (self.arena.coded, Tier.CODED)):
            seen = torch.unique(owners[tier == kind])
            if bool((side.table[seen] < 0).any()):
                problems.append(f"a {kind.name} window of a view has no copy")
        seen_full = torch.unique(owners[tier == Tier.FULL])
        seen_codes = torch.unique(owners[self._holds_codes(tier, owners)])
        for side, seen, name in (
            (self.arena.full, seen_full, "FULL"),
            (self.arena.coded, seen_codes, "coded"),
        ):
            if int(side.count) != len(seen):
                problems.append(f"{int(side.count)} {name} copies, {len(seen)} seen by views")
        return problems
