"""Routing events on the device: what is ranked becomes tiers, lists and moves of copies.

The rules are those of ``qevict_tiers`` (``policy.route``, ``TierManager``, ``arena.Side``), which
does the same with several hundred torch operations. Here an event is about fifteen launches:

``keys``     scores of candidates, the newest window first, for a stable sort
``rank``     tiers of all windows, in order of rank; lists of the copies that come and go
``release``  drops references; the ends of the arena stay compact; leaves moves for ``copy``
``allocate`` slots for the copies that are about to be made
``refuse``   windows that can't be coded are evicted
``finish``   the views: tiers, ranks, window lists

How many entries a list has is known on the device only. So ``release``, ``allocate`` and
``refuse`` are one program each, which goes through the list; lists are short, since few windows
change their tier. ``keys``, ``rank`` and ``finish`` are one program for each row and layer.

An entry of a list is ``owner << 32 | place << 1 | flag``: ``place`` is that of the window in the
event's own arrays ``[L, B, N]``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qevict_kernels.interface import FullArena, RoutingEvent, SideTensors, ViewTensors

__all__ = [
    "TritonRouting",
    "allocate_kernel",
    "finish_kernel",
    "keys_kernel",
    "rank_kernel",
    "refuse_kernel",
    "release_kernel",
]

NONE, FULL, CODED, EVICTED = (tl.constexpr(tier) for tier in range(4))
_INFINITY = tl.constexpr(float("inf"))

_BLOCK = 1024
"""Windows, or entries, that a program looks at at a time."""


class TritonRouting:
    """``RoutesOnDevice``; see ``interface``. Needs ``quantize``, ``dequantize``, ``copy_slots``."""

    def route(
        self,
        event: RoutingEvent,
        views: ViewTensors,
        full: SideTensors,
        coded: SideTensors,
        full_arena: FullArena,
        coded_arena: torch.Tensor,
        totals: torch.Tensor,
        refused_layer: torch.Tensor,
    ) -> None:
        """One routing event, in the order of ``TierManager.route``."""
        batch, width, device = event.rows.shape[0], event.width, event.rows.device
        shape = event.num_layers, batch, width
        grid = (batch, event.num_layers)
        layer_stride, row_stride = views.tier.stride()[:2]
        byte = torch.uint8
        after = torch.empty(shape, dtype=byte, device=device)
        below = torch.empty(shape, dtype=byte, device=device)
        # At most each window of the event, and each copy that there is.
        most = min(after.numel(), full.owner.shape[0])
        most_gone = max(most, min(after.numel(), coded.owner.shape[0]))
        left, gone = (torch.empty(n, dtype=torch.int64, device=device) for n in (most, most_gone))
        num_left, num_gone, num_raised = torch.zeros(3, dtype=torch.int32, device=device)
        scratch = _Scratch(most_gone, device)

        keys = torch.empty(shape, dtype=torch.float32, device=device)
        keys_kernel[grid](
            keys, views.score, views.tier, event.rows, event.limits, views.shared, batch, width,
            event.first_layer, layer_stride, row_stride, BLOCK=_BLOCK,
        )  # fmt: skip
        order = torch.sort(keys, dim=-1, descending=True, stable=True).indices
        rank_kernel[grid](
            order, views.tier, views.outranked.view(byte), after, below, event.rows, event.limits,
            views.shared, views.publishable, views.page_table, coded.table,
            views.is_routed.view(byte), left, num_left, gone, num_gone, totals, batch, width,
            event.first_layer, layer_stride, row_stride, views.page_table.stride(0),
            event.pages_per_layer, *event.coded_per_full, DEQUANTIZES=event.dequantizes,
            BLOCK=_BLOCK,
        )  # fmt: skip
        self._release(coded, gone, num_gone, scratch)
        sources, targets, windows = scratch.entries
        self._allocate(coded, left, num_left, full.table, scratch, width, only_flagged=True)
        refused = self.quantize(full_arena, coded_arena, sources, targets, windows, num_left)  # type: ignore[attr-defined]
        refuse_kernel[1,](
            left, num_left, refused.view(byte), after, gone, num_gone, totals, refused_layer,
            event.pages_per_layer, BLOCK=_BLOCK,
        )  # fmt: skip
        self._release(coded, gone, num_gone, scratch)
        finish_kernel[grid](
            after, below, views.tier, views.outranked.view(byte), views.windows, views.num_full,
            views.num_coded, event.rows, views.page_table, gone, num_raised, batch, width,
            views.windows.shape[-1], event.first_layer, views.tier.shape[1], layer_stride,
            row_stride, views.page_table.stride(0), event.pages_per_layer, BLOCK=_BLOCK,
        )  # fmt: skip
        self._release(full, left, num_left, scratch)
        if event.dequantizes:
            self._allocate(full, gone, num_raised, coded.table, scratch, width, only_flagged=False)
            self.dequantize(full_arena, coded_arena, targets, sources, windows, num_raised)  # type: ignore[attr-defined]

    def _release(
        self, side: SideTensors, entries: torch.Tensor, length: torch.Tensor, scratch: _Scratch
    ) -> None:
        sources, targets, _ = scratch.entries
        release_kernel[1,](
            entries, length, side.table, side.owner, side.references, side.used, scratch.dead,
            sources, targets, scratch.num_moves, side.slots.shape[0], FROM_RIGHT=side.from_right,
            BLOCK=_BLOCK,
        )  # fmt: skip
        self.copy_slots(side.slots, sources, targets, scratch.num_moves)  # type: ignore[attr-defined]

    def _allocate(
        self,
        side: SideTensors,
        entries: torch.Tensor,
        length: torch.Tensor,
        source_table: torch.Tensor,
        scratch: _Scratch,
        width: int,
        only_flagged: bool,
    ) -> None:
        allocate_kernel[1,](
            entries, length, side.table, side.owner, side.references, side.used, source_table,
            *scratch.entries, width, side.slots.shape[0], ONLY_FLAGGED=only_flagged,
            FROM_RIGHT=side.from_right, BLOCK=_BLOCK,
        )  # fmt: skip


class _Scratch:
    """What the steps of an event leave for the next launch.

    entries: int32 ``[3, n]``: source slots, target slots, windows. dead: int64 ``[n]``.
    num_moves: int32 ``[]``.
    """

    def __init__(self, n: int, device: torch.device) -> None:
        self.entries = torch.empty(3, n, dtype=torch.int32, device=device)
        self.dead = torch.empty(n, dtype=torch.int64, device=device)
        self.num_moves = torch.zeros((), dtype=torch.int32, device=device)


@triton.jit
def _candidate(tier, window, start, end, shared):
    """Whether windows are ranked: see ``policy.route``."""
    is_private_full = (tier == FULL) & (window >= shared)
    return (window >= start) & (window < end) & (is_private_full | (tier == CODED))


@triton.jit
def _entry(owner, place, flag):
    """An entry of a list, see the module."""
    return (owner << 32) | (place << 1) | flag.to(tl.int64)


@triton.jit
def _owner_of(entry):
    return entry >> 32


@triton.jit
def _place_of(entry):
    return (entry & 0xFFFFFFFF) >> 1


@triton.jit
def _append(entries, length, entry, mask):
    """Append the masked entries to a list."""
    taken = mask.to(tl.int32)
    base = tl.atomic_add(length, tl.sum(taken, axis=0))
    tl.store(entries + base + tl.cumsum(taken, axis=0) - taken, entry, mask=mask)


@triton.jit(do_not_specialize=["batch", "width", "first_layer", "layer_stride", "row_stride"])
def keys_kernel(
    keys, scores, tiers, rows, limits, shared, batch, width, first_layer, layer_stride, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[B, L]``. ``keys``: float32 ``[L, B, width]``, the last window first; -inf where a
    window is no candidate. ``limits``: int64 ``[4, B]``, see ``rank_kernel``."""
    b, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + b)
    start, end = tl.load(limits + b), tl.load(limits + batch + b)
    own = (first_layer + layer).to(tl.int64) * layer_stride + row * row_stride
    first_shared = tl.load(shared + row)
    keys += (layer.to(tl.int64) * batch + b) * width
    for first in range(0, width, BLOCK):
        window = first + tl.arange(0, BLOCK)
        there = window < width
        tier = tl.load(tiers + own + window, mask=there, other=0)
        score = tl.load(scores + own + window, mask=there, other=0.0)
        key = tl.where(_candidate(tier, window, start, end, first_shared), score, -_INFINITY)
        tl.store(keys + width - 1 - window, key, mask=there)


@triton.jit(
    do_not_specialize=[
        "batch",
        "width",
        "first_layer",
        "layer_stride",
        "row_stride",
        "page_stride",
        "pages_per_layer",
        "coded_per_full",
        "full_per_coded",
    ]
)
def rank_kernel(
    order, tiers, outranked, after, below, rows, limits, shared, publishable, page_table,
    coded_table, is_routed, left, num_left, gone, num_gone, totals,
    batch, width, first_layer, layer_stride, row_stride, page_stride, pages_per_layer,
    coded_per_full, full_per_coded, DEQUANTIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[B, L]``: the tiers of a row in a layer, and what that does to copies.

    ``order``: int64 ``[L, B, width]``, places in ``keys`` by rank. ``limits``: int64 ``[4, B]``:
    beginning and end of the history, FULL and coded windows that it may have.
    ``coded_per_full / full_per_coded``: coded windows for the bytes of a FULL one.
    Out: ``after`` uint8 and ``below`` bool ``[L, B, width]``; entries ``left`` of windows that are
    no longer FULL, flagged where codes have to be made; owners ``gone`` whose codes go; ``totals``.
    """
    b, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + b)
    start, end = tl.load(limits + b), tl.load(limits + batch + b)
    max_full, max_coded = tl.load(limits + 2 * batch + b), tl.load(limits + 3 * batch + b)
    first_shared, first_unpublished = tl.load(shared + row), tl.load(publishable + row)
    routed = tl.load(is_routed + first_layer + layer) != 0
    own = (first_layer + layer).to(tl.int64) * layer_stride + row * row_stride
    here = (layer.to(tl.int64) * batch + b) * width
    tiers += own
    outranked += own
    page_table += row * page_stride
    each = tl.arange(0, BLOCK)

    eligible = tl.zeros((), tl.int64)
    for first in range(0, width, BLOCK):
        window = first + each
        tier = tl.load(tiers + window, mask=window < width, other=0)
        may = _candidate(tier, window, start, end, first_shared)
        may &= (window >= first_shared) if DEQUANTIZES else (tier == FULL)
        eligible += tl.sum(may.to(tl.int64), axis=0)
    unused = max_full - tl.minimum(max_full, eligible)
    max_coded += unused * coded_per_full // full_per_coded

    num_eligible = tl.zeros((), tl.int64)
    num_rest = tl.zeros((), tl.int64)
    for first in range(0, width, BLOCK):
        rank = first + each
        there = rank < width
        window = width - 1 - tl.load(order + here + rank, mask=there, other=0)
        tier = tl.load(tiers + window, mask=there, other=0)
        candidate = there & _candidate(tier, window, start, end, first_shared)
        may = candidate & ((window >= first_shared) if DEQUANTIZES else (tier == FULL))
        to_full = may & (num_eligible + tl.cumsum(may.to(tl.int64), axis=0) <= max_full)
        rest = candidate & ~to_full
        to_coded = rest & (num_rest + tl.cumsum(rest.to(tl.int64), axis=0) <= max_coded)
        num_eligible += tl.sum(may.to(tl.int64), axis=0)
        num_rest += tl.sum(rest.to(tl.int64), axis=0)
        chosen = tl.where(to_full, FULL, tl.where(to_coded, CODED, EVICTED))
        chosen = tl.where(candidate & routed, chosen, tier)
        tl.store(after + here + window, chosen.to(tl.uint8), mask=there)
        is_below = candidate & routed & (rank >= max_full)
        tl.store(below + here + window, is_below.to(tl.uint8), mask=there)
    tl.debug_barrier()

    demoted = tl.zeros((), tl.int64)
    evicted_full, evicted_coded, promoted = demoted, demoted, demoted
    made_codes, reused, for_reuse, risen, ranked = demoted, demoted, demoted, demoted, demoted
    for first in range(0, width, BLOCK):
        window = first + each
        there = window < width
        was = tl.load(tiers + window, mask=there, other=0)
        now = tl.load(after + here + window, mask=there, other=0)
        page = tl.load(page_table + window, mask=there, other=0).to(tl.int64)
        owner = (first_layer + layer).to(tl.int64) * pages_per_layer + page
        keeps = (window >= first_shared) & (window < first_unpublished)
        holds = (was == FULL) | (was == CODED) | ((was == EVICTED) & keeps)
        holds &= there & (tl.load(coded_table + owner, mask=there, other=-1) >= 0)
        goes = holds & (now == EVICTED) & ~keeps
        leaves = there & (was == FULL) & (now != FULL)
        made = leaves & ~holds & ((now == CODED) | keeps)
        _append(gone, num_gone, _entry(owner, here + window, goes), goes)
        _append(left, num_left, _entry(owner, here + window, made), leaves)
        to_coded = leaves & (now == CODED)
        ranked += tl.sum(((was == FULL) | (was == CODED)).to(tl.int64), axis=0)
        demoted += tl.sum(to_coded.to(tl.int64), axis=0)
        evicted_full += tl.sum((leaves & (now == EVICTED)).to(tl.int64), axis=0)
        evicted_coded += tl.sum(((was == CODED) & (now == EVICTED)).to(tl.int64), axis=0)
        promoted += tl.sum(((was == CODED) & (now == FULL)).to(tl.int64), axis=0)
        made_codes += tl.sum(made.to(tl.int64), axis=0)
        reused += tl.sum((to_coded & ~made).to(tl.int64), axis=0)
        for_reuse += tl.sum((made & (now == EVICTED)).to(tl.int64), axis=0)
        ranked_below = tl.load(outranked + window, mask=there, other=0) != 0
        is_below = tl.load(below + here + window, mask=there, other=0) != 0
        rises = ranked_below & ~is_below & (now != EVICTED)
        risen += tl.sum(rises.to(tl.int64), axis=0)
    # In the order of ``ledger.Counter``.
    tl.atomic_add(totals, ranked)
    tl.atomic_add(totals + 1, demoted)
    tl.atomic_add(totals + 2, evicted_full)
    tl.atomic_add(totals + 3, evicted_coded)
    tl.atomic_add(totals + 4, promoted)
    tl.atomic_add(totals + 5, made_codes)
    tl.atomic_add(totals + 6, reused)
    tl.atomic_add(totals + 8, risen)
    tl.atomic_add(totals + 9, for_reuse)


@triton.jit
def _flip(position, capacity, FROM_RIGHT: tl.constexpr):
    """Position in the compact run to slot, and back."""
    return capacity - 1 - position if FROM_RIGHT else position


@triton.jit(do_not_specialize=["capacity"])
def release_kernel(
    entries, length, table, owners, references, count, dead, sources, targets, num_moves, capacity,
    FROM_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[1]``: ``Side.release`` of the owners in a list.

    ``dead``: int64, as long as the list, scratch. ``sources``, ``targets``: int32, slots to copy,
    ``num_moves`` of them.
    """
    each = tl.arange(0, BLOCK)
    n = tl.load(length)
    for first in range(0, n, BLOCK):
        there = first + each < n
        owner = _owner_of(tl.load(entries + first + each, mask=there, other=0))
        position = _flip(tl.load(table + owner, mask=there, other=0), capacity, FROM_RIGHT)
        tl.atomic_add(references + position, -1, mask=there)
    tl.debug_barrier()
    # The first to find a copy without references takes it: -1 says that it was taken.
    num_dead = tl.zeros((), tl.int32)
    for first in range(0, n, BLOCK):
        there = first + each < n
        owner = _owner_of(tl.load(entries + first + each, mask=there, other=0))
        slot = tl.load(table + owner, mask=there, other=-1)
        # The entry after the last slot is nobody's.
        position = tl.where(there & (slot >= 0), _flip(slot, capacity, FROM_RIGHT), capacity)
        expected = tl.where(position == capacity, 1, 0)
        found = tl.atomic_cas(references + position, expected, tl.where(expected == 1, 1, -1))
        is_dead = there & (position < capacity) & (found == 0)
        place = num_dead + tl.cumsum(is_dead.to(tl.int32), axis=0) - 1
        tl.store(dead + place, position.to(tl.int64), mask=is_dead)
        tl.store(owners + position, -1, mask=is_dead)
        num_dead += tl.sum(is_dead.to(tl.int32), axis=0)
    tl.debug_barrier()
    for first in range(0, n, BLOCK):
        there = first + each < n
        owner = _owner_of(tl.load(entries + first + each, mask=there, other=0))
        slot = tl.load(table + owner, mask=there, other=-1)
        position = _flip(slot, capacity, FROM_RIGHT)
        held = tl.load(references + position, mask=there & (slot >= 0), other=1)
        tl.store(table + owner, -1, mask=there & (slot >= 0) & (held < 0))
    tl.debug_barrier()
    new_count = tl.load(count) - num_dead
    num_holes = tl.zeros((), tl.int32)
    num_survivors = tl.zeros((), tl.int32)
    for first in range(0, num_dead, BLOCK):
        there = first + each < num_dead
        position = tl.load(dead + first + each, mask=there, other=0)
        is_hole = there & (position < new_count)
        place = num_holes + tl.cumsum(is_hole.to(tl.int32), axis=0) - 1
        tl.store(targets + place, position.to(tl.int32), mask=is_hole)
        num_holes += tl.sum(is_hole.to(tl.int32), axis=0)
        beyond = new_count + first + each
        survives = there & (tl.load(references + beyond, mask=there, other=0) > 0)
        place = num_survivors + tl.cumsum(survives.to(tl.int32), axis=0) - 1
        tl.store(sources + place, beyond.to(tl.int32), mask=survives)
        num_survivors += tl.sum(survives.to(tl.int32), axis=0)
    tl.debug_barrier()
    for first in range(0, num_holes, BLOCK):
        there = first + each < num_holes
        source = tl.load(sources + first + each, mask=there, other=0)
        target = tl.load(targets + first + each, mask=there, other=0)
        owner = tl.load(owners + source, mask=there, other=0)
        held = tl.load(references + source, mask=there, other=0)
        tl.store(owners + target, owner, mask=there)
        tl.store(references + target, held, mask=there)
        slot = _flip(target, capacity, FROM_RIGHT).to(tl.int32)
        tl.store(table + owner, slot, mask=there)
        tl.store(owners + source, -1, mask=there)
        tl.store(
            sources + first + each, _flip(source, capacity, FROM_RIGHT).to(tl.int32), mask=there
        )
        tl.store(targets + first + each, slot, mask=there)
    tl.debug_barrier()
    for first in range(0, num_dead, BLOCK):
        there = first + each < num_dead
        tl.store(references + new_count + first + each, 0, mask=there)
    tl.store(count, new_count)
    tl.store(num_moves, num_holes)


@triton.jit(do_not_specialize=["width", "capacity"])
def allocate_kernel(
    entries, length, table, owners, references, count, source_table, sources, targets, windows,
    width, capacity, ONLY_FLAGGED: tl.constexpr, FROM_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[1]``: ``Side.allocate`` for the (flagged) entries of a list.

    Out, int32, one for each entry: ``targets``, its slot; ``sources``, the slot that
    ``source_table`` has for it, -1 if it is not flagged; ``windows``, its window.
    """
    each = tl.arange(0, BLOCK)
    n = tl.load(length)
    base = tl.load(count)
    for first in range(0, n, BLOCK):
        index = first + each
        there = index < n
        entry = tl.load(entries + index, mask=there, other=0)
        chosen = there & (((entry & 1) == 1) if ONLY_FLAGGED else there)
        owner = _owner_of(entry)
        position = base + tl.cumsum(chosen.to(tl.int64), axis=0) - 1
        slot = _flip(position, capacity, FROM_RIGHT).to(tl.int32)
        tl.store(owners + position, owner, mask=chosen)
        tl.store(references + position, 1, mask=chosen)
        tl.store(table + owner, slot, mask=chosen)
        source = tl.load(source_table + owner, mask=chosen, other=-1)
        tl.store(sources + index, source, mask=there)
        tl.store(targets + index, slot, mask=there)
        window = (_place_of(entry) % width).to(tl.int32)
        tl.store(windows + index, window, mask=there)
        base += tl.sum(chosen.to(tl.int64), axis=0)
    tl.store(count, base)


@triton.jit(do_not_specialize=["pages_per_layer"])
def refuse_kernel(
    entries, length, refused, after, gone, num_gone, totals, refused_layer, pages_per_layer,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[1]``: entries whose codes came out as NaN are evicted, and put into ``gone``.

    ``refused``: uint8, one for each entry.
    """
    each = tl.arange(0, BLOCK)
    n = tl.load(length)
    num_bad = tl.zeros((), tl.int32)
    from_coded = tl.zeros((), tl.int64)
    last_layer = tl.zeros((), tl.int64) - 1
    for first in range(0, n, BLOCK):
        index = first + each
        there = index < n
        bad = there & (tl.load(refused + index, mask=there, other=0) != 0)
        entry = tl.load(entries + index, mask=there, other=0)
        place = _place_of(entry)
        was_to_be_coded = bad & (tl.load(after + place, mask=bad, other=0) == CODED)
        tl.store(after + place, tl.zeros_like(place).to(tl.uint8) + EVICTED, mask=was_to_be_coded)
        taken = bad.to(tl.int32)
        tl.store(gone + num_bad + tl.cumsum(taken, axis=0) - 1, entry, mask=bad)
        num_bad += tl.sum(taken, axis=0)
        from_coded += tl.sum(was_to_be_coded.to(tl.int64), axis=0)
        layer = tl.where(bad, _owner_of(entry) // pages_per_layer, -1)
        last_layer = tl.maximum(last_layer, tl.max(layer, axis=0))
    tl.store(num_gone, num_bad)
    tl.store(refused_layer, tl.maximum(tl.load(refused_layer), last_layer))
    bad_codes = num_bad.to(tl.int64)
    tl.store(totals + 1, tl.load(totals + 1) - from_coded)
    tl.store(totals + 2, tl.load(totals + 2) + from_coded)
    tl.store(totals + 5, tl.load(totals + 5) - bad_codes)
    tl.store(totals + 7, tl.load(totals + 7) + bad_codes)
    tl.store(totals + 9, tl.load(totals + 9) - (bad_codes - from_coded))


@triton.jit(
    do_not_specialize=[
        "batch",
        "width",
        "columns",
        "first_layer",
        "num_rows",
        "layer_stride",
        "row_stride",
        "page_stride",
        "pages_per_layer",
    ]
)
def finish_kernel(
    after, below, tiers, outranked, windows, num_full, num_coded, rows, page_table, raised,
    num_raised, batch, width, columns, first_layer, num_rows, layer_stride, row_stride,
    page_stride, pages_per_layer, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[B, L]``: the views of a row in a layer; entries ``raised`` of coded windows that are
    FULL from now on."""
    b, layer = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + b)
    own = (first_layer + layer).to(tl.int64) * layer_stride + row * row_stride
    here = (layer.to(tl.int64) * batch + b) * width
    lists = windows + own
    each = tl.arange(0, BLOCK)
    full = tl.zeros((), tl.int32)
    coded = tl.zeros((), tl.int32)
    for first in range(0, width, BLOCK):
        window = first + each
        there = window < width
        now = tl.load(after + here + window, mask=there, other=0)
        was = tl.load(tiers + own + window, mask=there, other=0)
        is_full, is_coded = there & (now == FULL), there & (now == CODED)
        place = full + tl.cumsum(is_full.to(tl.int32), axis=0) - 1
        tl.store(lists + place, window.to(tl.int32), mask=is_full)
        place = columns - coded - tl.cumsum(is_coded.to(tl.int32), axis=0)
        tl.store(lists + place, window.to(tl.int32), mask=is_coded)
        full += tl.sum(is_full.to(tl.int32), axis=0)
        coded += tl.sum(is_coded.to(tl.int32), axis=0)
        page = tl.load(page_table + row * page_stride + window, mask=there, other=0).to(tl.int64)
        owner = (first_layer + layer).to(tl.int64) * pages_per_layer + page
        rises = is_full & (was == CODED)
        _append(raised, num_raised, _entry(owner, here + window, rises), rises)
        tl.store(tiers + own + window, now, mask=there)
        rank = tl.load(below + here + window, mask=there, other=0)
        tl.store(outranked + own + window, rank, mask=there)
    place = (first_layer + layer) * num_rows + row
    tl.store(num_full + place, full)
    tl.store(num_coded + place, coded)
