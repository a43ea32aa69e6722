"""Causal attention of chunks of new tokens over FULL and coded windows.

A *task* is one (request, KV head, tile); a tile is the query rows (token, query head of the
group) of as many whole tokens as fit up to ``TILE_PANELS`` panels. It visits its request's
list in blocks of ``BLOCK`` keys: FULL windows in list order, then coded windows in theirs.

1. stage: the block's keys and values are copied, or decoded and rotated, into a contiguous
   tile of this thread, once for all rows of the task;
2. for each panel of rows: scores = keys x queries; online softmax; sums = values x weights.
   A weight lives for one block of one panel;
3. after the last block: divide, write out.

Attention mass needs no second pass over keys: the softmax leaves each window's sum relative
to the maximum known at that block, and once a row is complete one factor a block turns it
into mass.

Invariance. Blocks are cut at fixed positions of the list, each row does the same arithmetic
whatever tile it stands in, and a masked key is an exact no-op: it adds 0 to sums and leaves
the maximum alone. So it does not matter how many masked keys a tile visits. Scores are added
token by token in the order of positions, each token's mean over heads in a fixed order. That
order is kept by *rounds*: the tasks of a round write the mass of their rows to a buffer, then
each window adds up its tokens.

Bytes: a tile reads every FULL key and value that it sees, and every code, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.numba.extend_ir import (
    NO_SCORE,
    PANEL_VECTORS,
    add_values,
    add_values_pairs,
    divide,
    has_pairs,
    key_scores,
    key_scores_pairs,
    normalise,
    row_block,
    softmax,
    softmax_pairs,
    stage_coded,
    stage_full,
    widen_query,
)
from qevict_kernels.numba.extend_plan import SPAN, TASK, Limits, ceil_div, plan_extend, record
from qevict_kernels.numba.memory import view as array
from qevict_kernels.numba.parallel import atomic_add, barrier, parallel
from qevict_kernels.numba.spec import Spec

__all__ = ["extend_kernel", "launch_extend"]

Array = npt.NDArray[Any]

BLOCK = 64
"""Keys visited at a time; a multiple of every window size."""
TILE_PANELS = 4
"""Most panels of a tile (more only where one token has more rows): they share what is staged."""
TASKS_PER_THREAD = 8
"""Tiles get smaller before threads get fewer tasks than this."""
MASS_FLOATS = 1 << 22
"""Attention mass held at a time (16 MiB) unless one tile needs more: rounds end in a barrier, so
they must not be short."""

_NEVER = np.iinfo(np.int32).max


# What a launch tells its threads: addresses, counts, and strides of first dimensions (in bytes
# for queries, outputs and arenas, in elements for tables).
_ARGUMENTS = record(
    *("query", "query_stride", "out", "out_stride"),
    *("keys", "values", "slot_stride", "coded", "cos_sin", "scale"),
    *("page_table", "page_table_stride", "windows", "windows_stride", "list_length"),
    *("full_slot", "coded_slot", "num_full", "num_coded", "scores", "scores_stride"),
    *("rows", "prefix_lens", "extend_lens", "first_tokens", "score_starts"),
    *("tasks", "spans", "rounds", "num_rounds", "counters", "masses"),
    *("lanes", "row_block", "pairs", "tile_tokens"),
    *("scratch", "scratch_bytes"),
)


class _List(NamedTuple):
    """One request's windows, padded to blocks."""

    row: int
    num_full: int
    num_coded: int
    full_blocks: int
    num_blocks: int


class _Tile(NamedTuple):
    """The rows of a task."""

    request: int
    head: int
    first_position: int
    last_position: int
    num_rows: int
    num_panels: int
    query: int
    out: int


class _Panel(NamedTuple):
    """Addresses of a panel's state, and how much of it is used."""

    words: int  # query, [D / 2, P] words of two channels
    query: int  # query, float32 [D, P]
    sums: int  # float32 [D, P]
    maximum: int  # [P], as are the following
    total: int
    alpha: int
    positions: int
    block_maxima: int  # float32 [blocks, P]
    first_row: int
    num_rows: int
    num_vectors: int


@njit(inline="always")  # type: ignore[untyped-decorator]
def _long(address: int, index: int) -> Any:
    """Number ``index`` of the int64 at an address."""
    return array(address, index + 1, np.int64)[index]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _int(address: int, index: int) -> Any:
    """Number ``index`` of the int32 at an address."""
    return np.int64(array(address, index + 1, np.int32)[index])


@njit  # type: ignore[untyped-decorator]
def _fill(address: int, count: int, value: float) -> None:
    array(address, count, np.float32)[:] = value


# -- where things are -------------------------------------------------------------------------


@njit  # type: ignore[untyped-decorator]
def _list_of(spec: Any, a: Any, request: int) -> Any:
    row = _long(a.rows, request)
    num_full, num_coded = _int(a.num_full, row), _int(a.num_coded, row)
    full_blocks = ceil_div(num_full * spec.window, BLOCK)
    num_blocks = full_blocks + ceil_div(num_coded * spec.window, BLOCK)
    return _List(row, num_full, num_coded, full_blocks, num_blocks)


@njit  # type: ignore[untyped-decorator]
def _block_of(spec: Any, a: Any, windows: Any, block: int) -> Any:
    """(whether FULL, step in the list, address of the first entry, entries) of a block."""
    per_block = BLOCK // spec.window
    entries = a.windows + 4 * windows.row * a.windows_stride
    if block < windows.full_blocks:
        first = block * per_block
        return True, 1, entries + 4 * first, min(per_block, windows.num_full - first)
    first = (block - windows.full_blocks) * per_block
    last = entries + 4 * (a.list_length - 1 - first)
    return False, -1, last, min(per_block, windows.num_coded - first)


@njit  # type: ignore[untyped-decorator]
def _tile_of(spec: Any, a: Any, task: Any) -> Any:
    first_token = task.tile * a.tile_tokens
    num_tokens = min(a.tile_tokens, _long(a.extend_lens, task.request) - first_token)
    first_position = _long(a.prefix_lens, task.request) + first_token
    num_rows = num_tokens * spec.group_size
    token = _long(a.first_tokens, task.request) + first_token
    head = 2 * task.head * spec.group_size * spec.head_dim
    return _Tile(
        task.request, task.head, first_position, first_position + num_tokens - 1, num_rows,
        ceil_div(num_rows, PANEL_VECTORS * a.lanes),
        a.query + token * a.query_stride + head, a.out + token * a.out_stride + head,
    )  # fmt: skip


@njit  # type: ignore[untyped-decorator]
def _block_bytes(dim: int, lanes: int) -> tuple[int, int, int, int]:
    """Offsets of a thread's arrays for one block of keys: values, scores, positions, panels.

    Staged keys come first; between positions and panels lie window sums that nobody asked for.
    """
    tile, panel = 4 * BLOCK * dim, 4 * PANEL_VECTORS * lanes
    scores, positions = 2 * tile, 2 * tile + BLOCK * panel
    return tile, scores, positions, positions + 4 * BLOCK + BLOCK // 4 * panel


@njit  # type: ignore[untyped-decorator]
def _panel_bytes(dim: int, lanes: int, max_blocks: int) -> int:
    return 4 * PANEL_VECTORS * lanes * (dim // 2 + 2 * dim + 4 + max_blocks)


@njit  # type: ignore[untyped-decorator]
def _panel_of(spec: Any, a: Any, tile: Any, max_blocks: int, scratch: int, index: int) -> Any:
    panel, dim = PANEL_VECTORS * a.lanes, spec.head_dim
    words = scratch + _block_bytes(dim, a.lanes)[3]
    words += index * _panel_bytes(dim, a.lanes, max_blocks)
    query = words + dim // 2 * 4 * panel
    sums = query + dim * 4 * panel
    state = sums + dim * 4 * panel
    num_rows = min(panel, tile.num_rows - index * panel)
    return _Panel(
        words, query, sums, state, state + 4 * panel, state + 8 * panel, state + 12 * panel,
        state + 16 * panel, index * panel, num_rows, ceil_div(num_rows, a.lanes),
    )  # fmt: skip


# -- steps of a task --------------------------------------------------------------------------


@njit  # type: ignore[untyped-decorator]
def _begin_panel(spec: Any, a: Any, tile: Any, panel: Any, floats: bool) -> None:
    """Queries to lanes; no key seen yet."""
    size, dim = PANEL_VECTORS * a.lanes, spec.head_dim
    words = array(panel.words, dim // 2 * size, np.uint32)
    words[:] = 0
    positions = array(panel.positions, size, np.int32)
    for lane in range(size):
        # Rows that pad the panel see what the last row sees.
        row = panel.first_row + min(lane, panel.num_rows - 1)
        token, head = row // spec.group_size, row % spec.group_size
        positions[lane] = tile.first_position + token
        if lane < panel.num_rows:
            source = tile.query + token * a.query_stride + 2 * head * dim
            channels = array(source, dim // 2, np.uint32)
            for i in range(dim // 2):
                words[i * size + lane] = channels[i]
    if floats:
        widen_query(spec, panel.words, panel.query)
    _fill(panel.sums, dim * size, 0.0)
    _fill(panel.maximum, size, NO_SCORE)
    _fill(panel.total, size, 0.0)


@njit  # type: ignore[untyped-decorator]
def _stage_block(spec: Any, a: Any, tile: Any, windows: Any, block: int, scratch: int) -> int:
    """Bring the windows of a block that some row may see to the thread's tiles.

    Writes the positions of the block's keys. Returns the number of windows staged; zeros follow
    them up to the granularity of the products.
    """
    dim, window = spec.head_dim, spec.window
    value_offset, _, position_offset, _ = _block_bytes(dim, a.lanes)
    positions = array(scratch + position_offset, BLOCK, np.int32)
    is_full, step, entries, count = _block_of(spec, a, windows, block)
    num_staged = 0
    positions[:] = _NEVER
    for i in range(count):
        first = _entry(entries, step, i) * window
        for j in range(window):
            positions[i * window + j] = first + j
        if first <= tile.last_position:
            num_staged = i + 1

    number = 2 if is_full and a.pairs else 4
    length = _long(a.prefix_lens, tile.request) + _long(a.extend_lens, tile.request)
    keys, values = scratch, scratch + value_offset
    for i in range(num_staged):
        index = _entry(entries, step, i)
        page = _int(a.page_table + 4 * windows.row * a.page_table_stride, index)
        if is_full:
            offset = _int(a.full_slot, page) * a.slot_stride + 2 * tile.head * window * dim
            stage_full(spec, a.keys + offset, a.values + offset, keys, values)
            # What is not written yet may be NaN, which a weight of 0 does not cancel.
            _clear_tokens(values, length - index * window, window, dim, a.pairs)
        else:
            slot = _int(a.coded_slot, page) * spec.num_kv_heads + tile.head
            rotary = a.cos_sin + 4 * index * window * spec.rotary_dim
            stage_coded(spec, a.coded + slot * spec.record_bytes, rotary, keys, values)
        keys += number * window * dim
        values += number * window * dim
    padding = -num_staged * window % a.row_block * dim * number // 4
    _fill(keys, padding, 0.0)
    _fill(values, padding, 0.0)
    return num_staged


@njit(inline="always")  # type: ignore[untyped-decorator]
def _entry(entries: int, step: int, index: int) -> Any:
    return _int(entries + 4 * step * index, 0)


@njit  # type: ignore[untyped-decorator]
def _clear_tokens(values: int, first: int, window: int, dim: int, pairs: int) -> None:
    """Staged values of a FULL window from token ``first`` on become 0."""
    for token in range(max(first, 0), window):
        if pairs:
            row = array(values + 4 * (token // 2) * dim, 2 * dim, np.uint16)
            for d in range(dim):
                row[2 * d + token % 2] = 0
        else:
            _fill(values + 4 * token * dim, dim, 0.0)


@njit  # type: ignore[untyped-decorator]
def _visit_block(
    spec: Any,
    a: Any,
    panel: Any,
    block: int,
    pairs: bool,
    num_staged: int,
    mass: int,
    stride: int,
    scratch: int,
) -> None:
    """Attention of a panel over a staged block.

    ``mass``: where the sum of the block's first window goes, the next one ``stride`` bytes
    further (0: nowhere).
    """
    size, window = PANEL_VECTORS * a.lanes, spec.window
    values, scores, key_positions, _ = _block_bytes(spec.head_dim, a.lanes)
    values, scores, key_positions = scratch + values, scratch + scores, scratch + key_positions
    first_position = _int(panel.positions, 0)
    last_position = _int(panel.positions, size - 1)
    visible = 0
    for i in range(num_staged):
        if _int(key_positions, i * window) <= last_position:
            visible = i + 1
    num_keys = ceil_div(visible * window, a.row_block) * a.row_block
    if mass:
        for i in range(num_keys // window, BLOCK // window):
            _fill(mass + i * stride, panel.num_vectors * a.lanes, 0.0)
    else:
        mass, stride = key_positions + 4 * BLOCK, 4 * size
    block_maximum = panel.block_maxima + 4 * block * size
    if visible == 0:
        _fill(block_maximum, size, NO_SCORE)
        return
    masked = 0
    for i in range(num_keys):
        if _int(key_positions, i) > first_position:
            masked = 1
    if pairs:
        key_scores_pairs(spec, scores, scratch, panel.words, num_keys, panel.num_vectors)
        softmax_pairs(
            spec, scores, key_positions, panel.positions, panel.maximum, panel.total, panel.alpha,
            block_maximum, mass, a.scale, num_keys, stride, masked, panel.num_vectors,
        )  # fmt: skip
        add_values_pairs(spec, panel.sums, values, scores, panel.alpha, num_keys, panel.num_vectors)
    else:
        key_scores(spec, scores, scratch, panel.query, num_keys, panel.num_vectors)
        softmax(
            spec, scores, key_positions, panel.positions, panel.maximum, panel.total, panel.alpha,
            block_maximum, mass, a.scale, num_keys, stride, masked, panel.num_vectors,
        )  # fmt: skip
        add_values(spec, panel.sums, values, scores, panel.alpha, num_keys, panel.num_vectors)


@njit  # type: ignore[untyped-decorator]
def _end_panel(spec: Any, a: Any, tile: Any, panel: Any) -> None:
    """Results of a panel to the output."""
    size, dim = PANEL_VECTORS * a.lanes, spec.head_dim
    # The query is no longer needed; its place takes the rounded results.
    divide(spec, panel.sums, panel.total, panel.query, panel.num_vectors)
    halves = array(panel.query, dim * size, np.uint16)
    for lane in range(panel.num_rows):
        row = panel.first_row + lane
        token, head = row // spec.group_size, row % spec.group_size
        target = array(tile.out + token * a.out_stride + 2 * head * dim, dim, np.uint16)
        for d in range(dim):
            target[d] = halves[d * size + lane]


@njit  # type: ignore[untyped-decorator]
def _attend(spec: Any, a: Any, task: Any, scratch: int) -> None:
    """One task: the output of its rows, and their mass where it is asked for."""
    tile, windows = _tile_of(spec, a, task), _list_of(spec, a, task.request)
    num_blocks, lanes = windows.num_blocks, a.lanes
    block_stride = 4 * task.stride * (BLOCK // spec.window)
    for p in range(tile.num_panels):
        panel = _panel_of(spec, a, tile, num_blocks, scratch, p)
        _begin_panel(spec, a, tile, panel, windows.num_coded > 0 or not a.pairs)
    for block in range(num_blocks):
        num_staged = _stage_block(spec, a, tile, windows, block, scratch)
        pairs = a.pairs and block < windows.full_blocks
        for p in range(tile.num_panels):
            panel = _panel_of(spec, a, tile, num_blocks, scratch, p)
            mass = 0
            if task.mass >= 0:
                mass = a.masses + 4 * (task.mass + panel.first_row) + block * block_stride
            _visit_block(spec, a, panel, block, pairs, num_staged, mass, 4 * task.stride, scratch)
    for p in range(tile.num_panels):
        panel = _panel_of(spec, a, tile, num_blocks, scratch, p)
        _end_panel(spec, a, tile, panel)
        if task.mass >= 0:
            mass = a.masses + 4 * (task.mass + panel.first_row)
            for block in range(num_blocks):
                normalise(
                    spec, mass + block * block_stride,
                    panel.block_maxima + 4 * block * PANEL_VECTORS * lanes, panel.maximum,
                    panel.total, a.scale, BLOCK // spec.window, 4 * task.stride,
                    panel.num_vectors,
                )  # fmt: skip


@njit  # type: ignore[untyped-decorator]
def _add_scores(spec: Any, a: Any, span: Any, block: int) -> None:
    """Add the mass of a span's scored tokens to the windows of one block, token by token."""
    windows = _list_of(spec, a, span.request)
    _, step, entries, count = _block_of(spec, a, windows, block)
    prefix, group = _long(a.prefix_lens, span.request), spec.group_size
    start = _long(a.score_starts, span.request) - prefix
    end = min(_long(a.extend_lens, span.request), span.end_tile * a.tile_tokens)
    stride = (span.end_tile - span.first_tile) * span.columns
    head_stride = span.num_blocks * (BLOCK // spec.window) * stride
    scores = array(a.scores + 4 * windows.row * a.scores_stride, a.list_length, np.float32)
    mean = np.float32(1.0 / spec.num_q_heads)
    for i in range(count):
        index = _entry(entries, step, i)
        if index * spec.window >= prefix + end:
            continue  # no token of the span sees it: all its mass is 0
        place = span.mass + (block * (BLOCK // spec.window) + i) * stride
        mass = array(a.masses + 4 * place, stride, np.float32)
        for head in range(1, spec.num_kv_heads):
            other = array(a.masses + 4 * (place + head * head_stride), stride, np.float32)
            for column in range(stride):
                mass[column] += other[column]
        score = scores[index]
        for tile in range(span.first_tile, span.end_tile):
            first = tile * a.tile_tokens
            column = (tile - span.first_tile) * span.columns
            for token in range(max(first, start), min(first + a.tile_tokens, end)):
                total = np.float32(0.0)
                for g in range(group):
                    total += mass[column + (token - first) * group + g]
                score += total * mean
        scores[index] = score


@njit  # type: ignore[untyped-decorator]
def _worker(spec: Any, arguments: int) -> None:
    """What each thread does: take tasks until the round is empty, then windows to add up."""
    a = array(arguments, 1, _ARGUMENTS)[0]
    scratch = a.scratch + atomic_add(a.counters, 1) * a.scratch_bytes
    rounds = array(a.rounds, (a.num_rounds + 1, 2), np.int64)
    tasks = array(a.tasks, rounds[a.num_rounds, 0], TASK)
    spans = array(a.spans, rounds[a.num_rounds, 1], SPAN)
    for step in range(a.num_rounds):
        next_task = a.counters + 8 + 16 * step
        next_item = next_task + 8
        while True:
            i = rounds[step, 0] + atomic_add(next_task, 1)
            if i >= rounds[step + 1, 0]:
                break
            _attend(spec, a, tasks[i], scratch)
        if rounds[step, 1] == rounds[step + 1, 1]:
            continue
        barrier()
        mine, item = atomic_add(next_item, 1), 0
        for s in range(rounds[step, 1], rounds[step + 1, 1]):
            for block in range(spans[s].num_blocks):
                if item == mine:
                    _add_scores(spec, a, spans[s], block)
                    mine = atomic_add(next_item, 1)
                item += 1
        barrier()


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def extend_kernel(spec: Any, arguments: int, num_threads: int) -> int:
    """Run the launch described at ``arguments``; returns 0."""
    parallel(_worker, spec, arguments, num_threads)
    return 0


# -- launch -----------------------------------------------------------------------------------


def launch_extend(
    run: Callable[[None, int, int], Any],
    spec: Spec,
    cos_sin: torch.Tensor,
    query: torch.Tensor,
    full: FullArena,
    coded: torch.Tensor,
    view: LayerView,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    scores: torch.Tensor | None,
    score_starts: torch.Tensor | None,
) -> None:
    """``AttentionKernels.extend`` with ``run``, the compiled ``extend_kernel`` of ``spec``.

    Raises ``ValueError`` for a scale that is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if not len(rows):
        return
    num_threads, panel_rows = torch.get_num_threads(), PANEL_VECTORS * spec.lanes
    num_panels = query.shape[0] * spec.num_q_heads // panel_rows
    max_panels = min(num_panels // (TASKS_PER_THREAD * num_threads), TILE_PANELS)
    limits = Limits(
        spec.num_kv_heads, spec.group_size, BLOCK // spec.window, spec.lanes, panel_rows,
        max_panels, MASS_FLOATS,
    )  # fmt: skip
    prefix, length = (t.to(torch.int64) for t in (prefix_lens, extend_lens))
    starts = prefix + length if scores is None or score_starts is None else score_starts.long()
    first_tokens = length.cumsum(0) - length
    plan = plan_extend(
        *(t.numpy() for t in (rows, prefix, length, starts, view.num_full, view.num_coded)), limits
    )
    tile_panels = ceil_div.py_func(plan.tile_tokens * spec.group_size, panel_rows)
    scratch_bytes = _block_bytes.py_func(spec.head_dim, spec.lanes)[3]
    scratch_bytes += tile_panels * _panel_bytes.py_func(spec.head_dim, spec.lanes, plan.max_blocks)
    # torch aligns to a cache line, and all parts are multiples of it.
    scratch = torch.empty(num_threads * scratch_bytes + 4 * plan.mass_floats, dtype=torch.uint8)
    counters = np.zeros(2 * len(plan.rounds) + 1, np.int64)
    exponent = np.array([scale / math.log(2)], np.float32)
    arguments = np.empty(1, _ARGUMENTS)
    arguments[0] = (
        *(query.data_ptr(), 2 * query.stride(0), out.data_ptr(), 2 * out.stride(0)),
        *(full.keys.data_ptr(), full.values.data_ptr(), 2 * full.keys.stride(0)),
        *(coded.data_ptr(), cos_sin.data_ptr(), exponent.ctypes.data),
        *(view.page_table.data_ptr(), view.page_table.stride(0)),
        *(view.windows.data_ptr(), view.windows.stride(0), view.windows.shape[1]),
        *(view.full_slot.data_ptr(), view.coded_slot.data_ptr()),
        *(view.num_full.data_ptr(), view.num_coded.data_ptr()),
        *((0, 0) if scores is None else (scores.data_ptr(), scores.stride(0))),
        *(t.data_ptr() for t in (rows, prefix, length, first_tokens, starts)),
        *(t.ctypes.data for t in (plan.tasks, plan.spans, plan.rounds)),
        len(plan.rounds) - 1,
        *(counters.ctypes.data, scratch.data_ptr() + num_threads * scratch_bytes),
        *(spec.lanes, row_block(spec.lanes), has_pairs(spec), plan.tile_tokens),
        *(scratch.data_ptr(), scratch_bytes),
    )
    run(None, arguments.ctypes.data, num_threads)
