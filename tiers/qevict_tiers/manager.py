"""The tier manager: applies routing plans to views and copies."""

from __future__ import annotations

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
    ) -> None:
        device = storage.device
        self.budget = budget
        self.kernels = kernels
        self.device = device
        self.num_layers = budget.num_layers
        self.num_pages = num_pages
        self.pages_per_layer = num_pages + 1
        self.arena = Arena(
            storage,
            budget.full_bytes,
            budget.coded_bytes,
            self.num_layers * self.pages_per_layer,
            kernels.copy_slots,
        )
        self.views = Views(self.num_layers, num_rows, max_windows, device)
        self.counters = Counters(device)
        self.open_rows: set[int] = set()
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
        self.arena.full.release(_select(has_full, owners))
        self.arena.coded.release(_select(has_codes, owners))
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
        after = route(
            self.views.score[layers, index, :width],
            before,
            torch.tensor([start for start, _ in ranges], device=self.device),
            torch.tensor([end for _, end in ranges], device=self.device),
            torch.tensor([limit.full for limit in limits], device=self.device),
            torch.tensor([limit.coded for limit in limits], device=self.device),
            config.promote,
        )
        after = torch.where(self._routed_layers[layers, None, None], after, before)
        pages = self.views.page_table[index, :width].to(torch.int64)
        self._apply(layers, pages, before, after)
        self.views.set_tiers(layers, index, after)

    def _apply(
        self, layers: slice, pages: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        full, coded = self.arena.full, self.arena.coded
        owners = self._owners(layers, pages)
        was_full, was_coded = before == Tier.FULL, before == Tier.CODED
        to_coded = was_full & (after == Tier.CODED)
        to_full = was_coded & (after == Tier.FULL)
        gone = after == Tier.EVICTED
        had_codes = self._holds_codes(before, owners)

        coded.release(_select(had_codes & gone, owners))
        self._quantize(to_coded & ~had_codes, owners)
        full.release(_select(was_full & (to_coded | gone), owners))
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

    def _quantize(self, mask: torch.Tensor, owners: torch.Tensor) -> None:
        chosen = _select(mask, owners)
        windows = _select(mask, self._window_index(mask))
        non_finite = self.kernels.quantize(
            self.full_arena,
            self.coded_arena,
            self.arena.full.slot_of(chosen),
            self.arena.coded.allocate(chosen),
            windows.to(torch.int32),
        )
        self.counters.add(Counter.NON_FINITE, non_finite)

    def _dequantize(self, mask: torch.Tensor, owners: torch.Tensor) -> None:
        chosen = _select(mask, owners)
        windows = _select(mask, self._window_index(mask))
        self.kernels.dequantize(
            self.full_arena,
            self.coded_arena,
            self.arena.full.allocate(chosen),
            self.arena.coded.slot_of(chosen),
            windows.to(torch.int32),
        )

    def _window_index(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(like.shape[-1], device=self.device).expand(like.shape)

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
        tables = sum(
            tensor.numel() * tensor.element_size()
            for tensor in (
                self.arena.full.table,
                self.arena.coded.table,
                self.views.tier,
                self.views.score,
                self.views.windows,
                self.views.num_full,
                self.views.num_coded,
                self.views.page_table,
            )
        )
        return LedgerBytes.of(
            self.budget.geometry, int(self.arena.full.count), int(self.arena.coded.count), tables
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


def _select(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The masked values as one list; on an accelerator all, with -1 where masked out.

    So shapes are fixed where a host that waited for a count would stall the device.
    """
    values = values.expand(mask.shape)
    if mask.is_cuda:
        return torch.where(mask, values, -1).flatten()
    return values[mask]
