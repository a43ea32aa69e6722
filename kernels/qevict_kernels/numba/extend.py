"""``extend`` on the CPU: causal attention of chunks over FULL and coded windows.

A *task* is one (request, KV head, tile); a tile is the query rows (token, query head of the
group) of as many whole tokens as fit ``TILE_PANELS`` panels. It visits its request's list in
blocks of ``BLOCK`` keys: FULL windows in list order, then coded windows in theirs.

    1. stage: the block's keys and values are copied, or decoded and rotated, into a
       contiguous tile of this thread, once for all rows of the task;
    2. for each panel of rows: scores = keys x queries; online softmax; sums = values x
       weights. A weight lives for one block of one panel;
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
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.numba.extend_ir import (
    NO_SCORE,
    PANEL_VECTORS,
    add_values,
    add_values_pairs,
    constant,
    key_scores,
    key_scores_pairs,
    mass,
    softmax,
    softmax_pairs,
)
from qevict_kernels.numba.parallel import atomic_add, barrier, parallel, require_openmp
from qevict_kernels.numba.spec import Spec
from qevict_kernels.rope import RotaryTable

__all__ = ["extend"]

Array = npt.NDArray[Any]

BLOCK = 64
"""Keys visited at a time; a multiple of every window size."""
TILE_PANELS = 2
"""Panels of a tile, more only where one token has more rows."""
MASS_FLOATS = 1 << 20
"""Attention mass held at a time, in float32 numbers, unless one tile needs more."""

_NEVER = np.iinfo(np.int32).max


def _record(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


# What a launch tells its threads: addresses, counts, and strides of first dimensions (in bytes
# for queries, outputs and arenas, in elements for tables).
_ARGUMENTS = _record(
    *("query", "query_stride", "out", "out_stride"),
    *("keys", "keys_stride", "values", "values_stride", "coded", "coded_stride"),
    *("cos_sin", "scale", "scores", "scores_stride"),
    *("page_table", "page_table_stride", "windows", "windows_stride", "list_length"),
    *("full_slot", "coded_slot", "num_full", "num_coded"),
    *("rows", "prefix_lens", "extend_lens", "first_tokens", "score_starts"),
    *("tasks", "spans", "rounds", "num_rounds", "counters"),
    *("tile_tokens", "tile_panels", "max_blocks", "masses", "scratch", "scratch_floats"),
)
# One tile of one KV head; its window sums go to float ``mass`` of the buffer (-1: nowhere),
# those of the next window lie ``stride`` floats further.
_TASK = _record("request", "head", "tile", "mass", "stride")
# The scored tiles of one request in one round. Their mass is [head, list window, tile, column].
_SPAN = _record("request", "first_tile", "end_tile", "mass", "num_blocks", "columns")


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _half_to_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of float16 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float_to_half(typing_context: Any, value: Any) -> Any:
    """float16 bits of a float32, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit(cache=True)  # type: ignore[untyped-decorator]
def _array(address: int, count: int, dtype: Any) -> Any:
    """The memory at an address as a one-dimensional array."""
    return carray(_pointer(address), (count,), dtype)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _widen(spec: Spec, source: int, count: int, target: int) -> None:
    """``count`` numbers of the storage dtype to float32."""
    halves = _array(source, count, np.uint16)
    if constant(spec, "bf16"):
        bits = _array(target, count, np.uint32)
        for i in range(count):
            bits[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        floats = _array(target, count, np.float32)
        for i in range(count):
            floats[i] = _half_to_float(halves[i])


# -- staging: one window of one head into rows of the block's tiles ---------------------------


@njit(cache=True)  # type: ignore[untyped-decorator]
def _stage_full(
    spec: Spec, keys: int, values: int, num_valid: int, key_tile: int, value_tile: int
) -> None:
    """A FULL window as it is (values as pairs of tokens), or converted to float32.

    Values of tokens from ``num_valid`` on have not been written; they are staged as 0.
    """
    dim = constant(spec, "head_dim")
    size = constant(spec, "window") * dim
    if constant(spec, "pairs"):
        _array(key_tile, size, np.uint16)[:] = _array(keys, size, np.uint16)
        source, target = _array(values, size, np.uint16), _array(value_tile, size, np.uint16)
        for i in range(0, size, 2 * dim):
            for d in range(dim):
                target[i + 2 * d] = source[i + d]
                target[i + 2 * d + 1] = source[i + dim + d]
        for token in range(max(num_valid, 0), constant(spec, "window")):
            for d in range(dim):
                target[(token & ~1) * dim + 2 * d + (token & 1)] = 0
    else:
        _widen(spec, keys, size, key_tile)
        _widen(spec, values, size, value_tile)
        _array(value_tile, size, np.float32)[max(num_valid, 0) * dim :] = 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _unpack(words: Any, bits: int, group: int, dim: int, tile: Any) -> None:
    """Codes of ``words[tokens / group, dim]`` as floats ``[tokens, dim]``."""
    mask = np.uint32((1 << bits) - 1)
    for token in range(tile.size // dim):
        shift = np.uint32((token % group) * bits)
        row, first = token // group * dim, token * dim
        for d in range(dim):
            tile[first + d] = np.float32(np.int32((np.uint32(words[row + d]) >> shift) & mask))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _load_codes(spec: Spec, codes: int, bits: int, target: int) -> None:
    dim, group = constant(spec, "head_dim"), constant(spec, "code_group")
    size = constant(spec, "window") * dim
    tile = _array(target, size, np.float32)
    if bits * group == 8:
        _unpack(_array(codes, size // group, np.uint8), bits, group, dim, tile)
    elif bits * group == 16:
        _unpack(_array(codes, size // group, np.uint16), bits, group, dim, tile)
    else:
        _unpack(_array(codes, size // group, np.uint32), bits, group, dim, tile)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _load_parameters(
    spec: Spec, scales: int, zeros: int, header: int, count: int, scale: Any, zero: Any
) -> None:
    """Scales and zeros as float32; ``header`` is the address of (scale step, base, step)."""
    if constant(spec, "fp16_params"):
        half_scales, half_zeros = (_array(scales, count, np.uint16), _array(zeros, count, np.uint16))
        for i in range(count):
            scale[i] = _half_to_float(half_scales[i])
            zero[i] = _half_to_float(half_zeros[i])
    else:
        byte_scales, byte_zeros = _array(scales, count, np.uint8), _array(zeros, count, np.uint8)
        scale_step, base, zero_step = _array(header, 3, np.float32)
        for i in range(count):
            scale[i] = np.float32(np.int32(byte_scales[i])) * scale_step
            zero[i] = base + np.float32(np.int32(byte_zeros[i])) * zero_step


@njit(cache=True)  # type: ignore[untyped-decorator]
def _rotate(spec: Spec, tile: Any, first_position: int, cos_sin: int) -> None:
    """Keys ``[W, D]`` to their positions, in place."""
    dim, rotary_dim = constant(spec, "head_dim"), constant(spec, "rotary_dim")
    half = rotary_dim // 2
    for token in range(constant(spec, "window")):
        position = first_position + token
        angles = _array(cos_sin + 4 * position * rotary_dim, rotary_dim, np.float32)
        cos, sin = angles[:half], angles[half:]
        key = tile[token * dim : (token + 1) * dim]
        if constant(spec, "is_neox"):
            low, high = key[:half], key[half:rotary_dim]
        else:
            low, high = key[0:rotary_dim:2], key[1:rotary_dim:2]
        for i in range(half):
            x, y = low[i], high[i]
            low[i] = x * cos[i] - y * sin[i]
            high[i] = y * cos[i] + x * sin[i]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _stage_coded(
    spec: Spec,
    record: int,
    first_position: int,
    cos_sin: int,
    parameters: int,
    key_tile: int,
    value_tile: int,
) -> None:
    """A coded window, decoded to float32, its keys rotated; ``parameters``: ``2 * D`` floats."""
    dim, window = constant(spec, "head_dim"), constant(spec, "window")
    scale = _array(parameters, dim, np.float32)
    zero = _array(parameters + 4 * dim, dim, np.float32)
    header = record + constant(spec, "header")

    _load_codes(spec, record + constant(spec, "key_codes"), constant(spec, "key_bits"), key_tile)
    scales, zeros = record + constant(spec, "key_scales"), record + constant(spec, "key_zeros")
    _load_parameters(spec, scales, zeros, header, dim, scale, zero)
    keys = _array(key_tile, window * dim, np.float32)
    for token in range(window):
        for d in range(dim):
            keys[token * dim + d] = zero[d] + keys[token * dim + d] * scale[d]
    _rotate(spec, keys, first_position, cos_sin)

    codes = record + constant(spec, "value_codes")
    _load_codes(spec, codes, constant(spec, "value_bits"), value_tile)
    scales, zeros = record + constant(spec, "value_scales"), record + constant(spec, "value_zeros")
    _load_parameters(spec, scales, zeros, header + 12, window, scale, zero)
    values = _array(value_tile, window * dim, np.float32)
    for token in range(window):
        for d in range(dim):
            values[token * dim + d] = zero[token] + values[token * dim + d] * scale[token]


# -- panels -----------------------------------------------------------------------------------


@njit(cache=True)  # type: ignore[untyped-decorator]
def _pack_queries(
    spec: Spec,
    source: int,
    source_stride: int,
    first_row: int,
    num_rows: int,
    pairs: int,
    floats: int,
) -> None:
    """Rows ``first_row + [0, num_rows)`` of a tile as lanes, the rest of the panel 0.

    ``source`` is the address of the tile's first token at the group's first head. ``pairs``
    ``[D / 2, P]`` and ``floats`` ``[D, P]`` are addresses; 0: not wanted.
    """
    dim, panel, group = constant(spec, "head_dim"), constant(spec, "panel"), constant(spec, "group_size")
    if pairs != 0:
        pair_tile = _array(pairs, dim // 2 * panel, np.uint32)
        pair_tile[:] = 0
    if floats != 0:
        float_tile = _array(floats, dim * panel, np.float32)
        float_tile[:] = 0
    for lane in range(num_rows):
        token, head = divmod(first_row + lane, group)
        row = source + token * source_stride + head * dim * 2
        if pairs != 0:
            words = _array(row, dim // 2, np.uint32)
            for i in range(dim // 2):
                pair_tile[i * panel + lane] = words[i]
        if floats != 0:
            halves = _array(row, dim, np.uint16)
            for d in range(dim):
                if constant(spec, "bf16"):
                    bits = np.uint32(halves[d]) << np.uint32(16)
                    float_tile.view(np.uint32)[d * panel + lane] = bits
                else:
                    float_tile[d * panel + lane] = _half_to_float(halves[d])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _write_rows(
    spec: Spec,
    target: int,
    target_stride: int,
    first_row: int,
    num_rows: int,
    sums: int,
    total: int,
) -> None:
    """``sums[D, P] / total[P]`` to the rows of a tile; the inverse of ``_pack_queries``.

    A row that saw no key is 0.
    """
    dim, panel, group = constant(spec, "head_dim"), constant(spec, "panel"), constant(spec, "group_size")
    tile, totals = _array(sums, dim * panel, np.float32), _array(total, panel, np.float32)
    bits = _array(sums, dim * panel, np.uint32)
    for lane in range(panel):
        if totals[lane] == 0:
            totals[lane] = 1
    for d in range(dim):
        for lane in range(panel):
            tile[d * panel + lane] /= totals[lane]
    if constant(spec, "bf16"):
        for i in range(dim * panel):
            word = bits[i]
            rounded = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
            nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            bits[i] = np.uint32(0x7FC0) if nan else rounded >> np.uint32(16)
    else:
        for i in range(dim * panel):
            bits[i] = np.uint32(_float_to_half(tile[i]))
    for lane in range(num_rows):
        token, head = divmod(first_row + lane, group)
        row = _array(target + token * target_stride + head * dim * 2, dim, np.uint16)
        for d in range(dim):
            row[d] = np.uint16(bits[d * panel + lane])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _scratch_layout(
    dim: int, panel: int, panels: int, max_blocks: int
) -> tuple[int, int, int, int, int, int, int, int]:
    """Where a thread keeps what, in float32 numbers, and last the sum.

    Staged keys, values (from 0 on), parameters; key positions; scores; window sums that
    nobody asked for; panels of queries, sums and state; block maxima.
    """
    parameters = 2 * BLOCK * dim
    positions = parameters + 2 * dim
    scores = positions + BLOCK
    window_sums = scores + BLOCK * panel
    first_panel = window_sums + BLOCK // 4 * panel
    panel_floats = (2 * dim + dim // 2 + 4) * panel
    maxima = first_panel + panels * panel_floats
    end = maxima + max_blocks * panels * panel
    return parameters, positions, scores, window_sums, first_panel, panel_floats, maxima, end


@njit(cache=True)  # type: ignore[untyped-decorator]
def _clear(address: int, count: int) -> None:
    """``count`` float32 zeros."""
    _array(address, count, np.float32)[:] = 0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _stage_block(
    spec: Spec,
    a: Any,
    task: Any,
    is_full: bool,
    first: int,
    last_position: int,
    key_positions: Any,
    scratch: int,
    parameters: int,
) -> int:
    """Stage the list entries from ``first`` on that some row of the tile may see.

    Fills ``key_positions`` of the block; returns how many windows were staged. Behind them
    the tiles hold zeros up to the granularity of the products.
    """
    dim, window, heads = constant(spec, "head_dim"), constant(spec, "window"), constant(spec, "num_kv_heads")
    row = _array(a.rows, task.request + 1, np.int64)[task.request]
    length = (
        _array(a.prefix_lens, task.request + 1, np.int64)[task.request]
        + _array(a.extend_lens, task.request + 1, np.int64)[task.request]
    )
    counts = _array(a.num_full if is_full else a.num_coded, row + 1, np.int32)
    count = min(BLOCK // window, counts[row] - first)
    entries = _array(a.windows + 4 * row * a.windows_stride, a.list_length, np.int32)
    pages = _array(a.page_table + 4 * row * a.page_table_stride, a.list_length, np.int32)
    key_positions[:] = _NEVER
    num_used = 0
    for i in range(count):
        index = entries[first + i if is_full else a.list_length - 1 - first - i]
        for j in range(window):
            key_positions[i * window + j] = index * window + j
        if index * window <= last_position:
            num_used = i + 1
    if num_used == 0:
        return 0

    halves = 2 if is_full and constant(spec, "pairs") else 4
    key_tile, value_tile = scratch, scratch + 4 * BLOCK * dim
    for i in range(num_used):
        index = key_positions[i * window] // window
        page = np.int64(pages[index])
        target = i * window * dim * halves
        if is_full:
            slot = np.int64(_array(a.full_slot, page + 1, np.int32)[page])
            offset = task.head * window * dim * 2
            keys = a.keys + slot * a.keys_stride + offset
            values = a.values + slot * a.values_stride + offset
            valid = min(window, length - index * window)
            _stage_full(spec, keys, values, valid, key_tile + target, value_tile + target)
        else:
            slot = np.int64(_array(a.coded_slot, page + 1, np.int32)[page])
            record = a.coded + slot * a.coded_stride + task.head * constant(spec, "record_bytes")
            _stage_coded(
                spec, record, index * window, a.cos_sin, parameters,
                key_tile + target, value_tile + target,
            )  # fmt: skip
    padding = -num_used * window % constant(spec, "row_block") * dim * halves // 4
    end = num_used * window * dim * halves
    _clear(key_tile + end, padding)
    _clear(value_tile + end, padding)
    return num_used


@njit(cache=True)  # type: ignore[untyped-decorator]
def _attend(spec: Spec, a: Any, task: Any, scratch: int) -> None:
    """One task: the output of its rows, and their mass where it is asked for."""
    dim, window, panel = constant(spec, "head_dim"), constant(spec, "window"), constant(spec, "panel")
    lanes, group = constant(spec, "lanes"), constant(spec, "group_size")
    heads, row_block = constant(spec, "num_kv_heads"), constant(spec, "row_block")
    per_block = BLOCK // window
    b = task.request
    row = _array(a.rows, b + 1, np.int64)[b]
    num_full = np.int64(_array(a.num_full, row + 1, np.int32)[row])
    num_coded = np.int64(_array(a.num_coded, row + 1, np.int32)[row])
    full_blocks = -(-num_full // per_block)
    num_blocks = full_blocks - (-num_coded // per_block)
    first_token = task.tile * a.tile_tokens
    num_tokens = min(a.tile_tokens, _array(a.extend_lens, b + 1, np.int64)[b] - first_token)
    first_position = _array(a.prefix_lens, b + 1, np.int64)[b] + first_token
    last_position = first_position + num_tokens - 1
    num_rows = num_tokens * group
    num_panels = -(-num_rows // panel)
    token = _array(a.first_tokens, b + 1, np.int64)[b] + first_token
    query = a.query + token * a.query_stride + task.head * group * dim * 2
    out = a.out + token * a.out_stride + task.head * group * dim * 2

    layout = _scratch_layout(dim, panel, a.tile_panels, a.max_blocks)
    parameters, positions, scores, no_sums, panels, panel_floats, maxima, _ = layout
    key_tile, value_tile = scratch, scratch + 4 * BLOCK * dim
    key_positions = _array(scratch + 4 * positions, BLOCK, np.int32)
    scores = scratch + 4 * scores
    lane_bytes = 4 * panel
    for p in range(num_panels):
        floats = scratch + 4 * (panels + p * panel_floats)
        sums = floats + dim * lane_bytes
        pairs = sums + dim * lane_bytes
        state = pairs + dim // 2 * lane_bytes
        rows_here = min(panel, num_rows - p * panel)
        has_pairs = constant(spec, "pairs") != 0
        _pack_queries(
            spec, query, a.query_stride, p * panel, rows_here,
            pairs if has_pairs else 0, floats if num_coded > 0 or not has_pairs else 0,
        )  # fmt: skip
        _clear(sums, dim * panel)
        _clear(state + lane_bytes, panel)
        _array(state, panel, np.float32)[:] = NO_SCORE
        row_positions = _array(state + 3 * lane_bytes, panel, np.int32)
        for lane in range(panel):
            # Rows that pad the panel see what the last row sees.
            row_positions[lane] = first_position + min(p * panel + lane, num_rows - 1) // group

    for block in range(num_blocks):
        is_full = block < full_blocks
        first = (block if is_full else block - full_blocks) * per_block
        num_used = _stage_block(
            spec, a, task, is_full, first, last_position, key_positions, scratch,
            scratch + 4 * parameters,
        )  # fmt: skip
        for p in range(num_panels):
            floats = scratch + 4 * (panels + p * panel_floats)
            sums = floats + dim * lane_bytes
            pairs = sums + dim * lane_bytes
            maximum = pairs + dim // 2 * lane_bytes
            total, alpha = maximum + lane_bytes, maximum + 2 * lane_bytes
            row_positions = _array(maximum + 3 * lane_bytes, panel, np.int32)
            block_maximum = scratch + 4 * (maxima + (block * a.tile_panels + p) * panel)
            num_vectors = min(PANEL_VECTORS, -(-(num_rows - p * panel) // lanes))
            window_sums, stride = scratch + 4 * no_sums, lane_bytes
            if task.mass >= 0:
                stride = 4 * task.stride
                window_sums = a.masses + 4 * task.mass + block * per_block * stride + p * lane_bytes
            visible = 0
            for i in range(num_used):
                if key_positions[i * window] <= row_positions[panel - 1]:
                    visible = i + 1
            num_keys = -(-visible * window // row_block) * row_block
            if task.mass >= 0:
                for i in range(num_keys // window, per_block):
                    _clear(window_sums + i * stride, num_vectors * lanes)
            if visible == 0:
                _array(block_maximum, panel, np.float32)[:] = NO_SCORE
                continue
            masked = 0
            for i in range(num_keys):
                masked |= np.int64(key_positions[i] > row_positions[0])
            if constant(spec, "pairs") and is_full:
                key_scores_pairs(spec, scores, key_tile, pairs, num_keys, num_vectors)
                softmax_pairs(
                    spec, scores, scratch + 4 * positions, maximum + 3 * lane_bytes, maximum,
                    total, alpha, block_maximum, window_sums, a.scale, num_keys, stride, masked,
                    num_vectors,
                )  # fmt: skip
                add_values_pairs(spec, sums, value_tile, scores, alpha, num_keys, num_vectors)
            else:
                key_scores(spec, scores, key_tile, floats, num_keys, num_vectors)
                softmax(
                    spec, scores, scratch + 4 * positions, maximum + 3 * lane_bytes, maximum,
                    total, alpha, block_maximum, window_sums, a.scale, num_keys, stride, masked,
                    num_vectors,
                )  # fmt: skip
                add_values(spec, sums, value_tile, scores, alpha, num_keys, num_vectors)

    for p in range(num_panels):
        floats = scratch + 4 * (panels + p * panel_floats)
        sums = floats + dim * lane_bytes
        maximum = sums + (dim + dim // 2) * lane_bytes
        total = maximum + lane_bytes
        num_vectors = min(PANEL_VECTORS, -(-(num_rows - p * panel) // lanes))
        if task.mass >= 0:
            for block in range(num_blocks):
                block_maximum = scratch + 4 * (maxima + (block * a.tile_panels + p) * panel)
                stride = 4 * task.stride
                window_sums = a.masses + 4 * task.mass + block * per_block * stride + p * lane_bytes
                mass(
                    spec, window_sums, block_maximum, maximum, total, a.scale, per_block, stride,
                    num_vectors,
                )  # fmt: skip
        _write_rows(spec, out, a.out_stride, p * panel, min(panel, num_rows - p * panel), sums, total)


# -- scores -----------------------------------------------------------------------------------


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add_scores(spec: Spec, a: Any, span: Any, block: int) -> None:
    """Add the mass of a span's scored tokens to the windows of one block, token by token."""
    window, group = constant(spec, "window"), constant(spec, "group_size")
    heads = constant(spec, "num_kv_heads")
    b = span.request
    row = _array(a.rows, b + 1, np.int64)[b]
    num_full = np.int64(_array(a.num_full, row + 1, np.int32)[row])
    num_coded = np.int64(_array(a.num_coded, row + 1, np.int32)[row])
    prefix = _array(a.prefix_lens, b + 1, np.int64)[b]
    num_tokens = _array(a.extend_lens, b + 1, np.int64)[b]
    start = _array(a.score_starts, b + 1, np.int64)[b] - prefix
    entries = _array(a.windows + 4 * row * a.windows_stride, a.list_length, np.int32)
    scores = _array(a.scores + 4 * row * a.scores_stride, a.list_length, np.float32)
    per_block = BLOCK // window
    full_blocks = -(-num_full // per_block)
    tiles = span.end_tile - span.first_tile
    stride = tiles * span.columns
    head_stride = span.num_blocks * per_block * stride
    masses = _array(a.masses + 4 * span.mass, heads * head_stride, np.float32)
    mean = np.float32(1) / np.float32(heads * group)
    end_token = min(num_tokens, span.end_tile * a.tile_tokens)
    for i in range(per_block):
        place = block * per_block + i
        if block < full_blocks:
            if place >= num_full:
                break
            index = entries[place]
        else:
            place_coded = place - full_blocks * per_block
            if place_coded >= num_coded:
                break
            index = entries[a.list_length - 1 - place_coded]
        if index * window >= prefix + end_token:
            continue
        score = scores[index]
        for tile in range(span.first_tile, span.end_tile):
            first = tile * a.tile_tokens
            column = place * stride + (tile - span.first_tile) * span.columns
            for token in range(max(first, start), min(first + a.tile_tokens, num_tokens)):
                total = np.float32(0)
                for head in range(heads):
                    at = head * head_stride + column + (token - first) * group
                    for g in range(group):
                        total += masses[at + g]
                score += total * mean
        scores[index] = score


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _worker(spec: Spec, address: int) -> None:
    """What each thread does: take tasks until the round is empty, then windows to add up."""
    a = _array(address, 1, _ARGUMENTS)[0]
    thread = atomic_add(a.counters, 1)
    scratch = a.scratch + 4 * thread * a.scratch_floats
    rounds = _array(a.rounds, 2 * (a.num_rounds + 1), np.int64)
    tasks = _array(a.tasks, rounds[2 * a.num_rounds], _TASK)
    spans = _array(a.spans, rounds[2 * a.num_rounds + 1], _SPAN)
    for step in range(a.num_rounds):
        counter = a.counters + 8 * (1 + 2 * step)
        end_task = rounds[2 * step + 2]
        i = rounds[2 * step] + atomic_add(counter, 1)
        while i < end_task:
            _attend(spec, a, tasks[i], scratch)
            i = rounds[2 * step] + atomic_add(counter, 1)
        if rounds[2 * step + 1] == rounds[2 * step + 3]:
            continue
        barrier()
        mine, item = atomic_add(counter + 8, 1), 0
        for s in range(rounds[2 * step + 1], rounds[2 * step + 3]):
            for block in range(spans[s].num_blocks):
                if item == mine:
                    _add_scores(spec, a, spans[s], block)
                    mine = atomic_add(counter + 8, 1)
                item += 1
        barrier()


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _launch(spec: Spec, address: int, num_threads: int) -> None:
    parallel(_worker, spec, address, num_threads)


# -- plan -------------------------------------------------------------------------------------


@njit(cache=True)  # type: ignore[untyped-decorator]
def _plan(
    prefix_lens: Array,
    extend_lens: Array,
    score_starts: Array,
    num_blocks: Array,
    heads: int,
    group: int,
    per_block: int,
    lanes: int,
    tile_tokens: int,
    mass_floats: int,
) -> tuple[Array, Array, Array, int]:
    """Tasks and spans in order, the bounds of the rounds in both, and the floats of mass.

    Tiles without a scored token all go to the first round. Within a round heavy tiles come
    first, so that threads finish together.
    """
    batch = extend_lens.size
    num_tiles = -(-extend_lens // tile_tokens)
    next_tile = np.empty(batch, np.int64)
    for b in range(batch):
        first = max(score_starts[b] - prefix_lens[b], 0)
        next_tile[b] = first // tile_tokens if first < extend_lens[b] else num_tiles[b]
    num_scored = (num_tiles - next_tile).sum()
    tasks = np.empty(num_tiles.sum() * heads, _TASK)
    spans = np.empty(num_scored, _SPAN)
    rounds = np.zeros((num_scored + 2, 2), np.int64)
    num_tasks = num_spans = num_rounds = most = 0
    for b in range(batch):
        num_tasks = _add_tasks(tasks, num_tasks, b, 0, next_tile[b], heads, -1, 0, 0)
    while True:
        used, taken = 0, False
        for b in range(batch):
            if next_tile[b] == num_tiles[b]:
                continue
            columns = -(-min(tile_tokens, extend_lens[b]) * group // lanes) * lanes
            windows = num_blocks[b] * per_block
            tile_floats = heads * windows * columns
            room = (mass_floats - used) // max(tile_floats, 1)
            count = min(num_tiles[b] - next_tile[b], max(room, 0 if taken else 1))
            if count == 0:
                continue
            first, end = next_tile[b], next_tile[b] + count
            span = spans[num_spans]
            span.request, span.first_tile, span.end_tile = b, first, end
            span.mass, span.num_blocks, span.columns = used, num_blocks[b], columns
            num_tasks = _add_tasks(
                tasks, num_tasks, b, first, end, heads, used, windows, columns
            )
            num_spans += 1
            used += count * tile_floats
            next_tile[b] = end
            taken = True
        num_rounds += 1
        rounds[num_rounds] = num_tasks, num_spans
        most = max(most, used)
        if (next_tile == num_tiles).all():
            break
    return tasks, spans, rounds[: num_rounds + 1], most


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add_tasks(
    tasks: Array,
    num_tasks: int,
    request: int,
    first: int,
    end: int,
    heads: int,
    mass: int,
    windows: int,
    columns: int,
) -> int:
    """Append the tasks of tiles [first, end) of all heads; returns how many there are now."""
    stride = (end - first) * columns
    for head in range(heads):
        for tile in range(end - 1, first - 1, -1):
            task = tasks[num_tasks]
            task.request, task.head, task.tile, task.stride = request, head, tile, stride
            task.mass = -1
            if mass >= 0:
                task.mass = mass + head * windows * stride + (tile - first) * columns
            num_tasks += 1
    return num_tasks


def extend(
    spec: Spec,
    rotary: RotaryTable,
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
    """``AttentionKernels.extend`` for the geometry and dtype of ``spec``.

    Raises ``ValueError`` for a scale that is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    geometry, lanes = spec.geometry, spec.lanes
    panel, per_block = PANEL_VECTORS * lanes, BLOCK // spec.window
    tile_tokens = max(TILE_PANELS * panel // spec.group_size, 1)
    tile_panels = -(-tile_tokens * spec.group_size // panel)
    batch_rows, prefix, length = (
        t.to(torch.int64).contiguous() for t in (rows, prefix_lens, extend_lens)
    )
    first_tokens = torch.cumsum(length, 0) - length
    if scores is None or score_starts is None:
        starts = prefix + length
    else:
        starts = score_starts.to(torch.int64).contiguous()
    blocks = -(-view.num_full[batch_rows].to(torch.int64) // per_block)
    blocks += -(-view.num_coded[batch_rows].to(torch.int64) // per_block)
    tasks, spans, rounds, mass_floats = _plan(
        prefix.numpy(), length.numpy(), starts.numpy(), blocks.numpy(), geometry.num_kv_heads,
        spec.group_size, per_block, lanes, tile_tokens, MASS_FLOATS,
    )  # fmt: skip
    if not tasks.size:
        return
    max_blocks = int(blocks.max())
    num_threads = torch.get_num_threads()
    scratch_floats = _scratch_layout(spec.head_dim, panel, tile_panels, max_blocks)[-1]
    scratch_floats = -(-scratch_floats // 1024) * 1024
    memory = _aligned(num_threads * scratch_floats + mass_floats)
    counters = np.zeros(2 * len(rounds) + 1, np.int64)
    exponent_scale = np.array([scale / math.log(2)], np.float32)
    arguments = np.zeros(1, _ARGUMENTS)
    arguments[0] = (
        *(query.data_ptr(), 2 * query.stride(0), out.data_ptr(), 2 * out.stride(0)),
        *(full.keys.data_ptr(), 2 * full.keys.stride(0)),
        *(full.values.data_ptr(), 2 * full.values.stride(0)),
        *(coded.data_ptr(), coded.stride(0)),
        *(rotary.cos_sin.data_ptr(), exponent_scale.ctypes.data),
        *((0, 0) if scores is None else (scores.data_ptr(), scores.stride(0))),
        *(view.page_table.data_ptr(), view.page_table.stride(0)),
        *(view.windows.data_ptr(), view.windows.stride(0), view.windows.shape[1]),
        *(view.full_slot.data_ptr(), view.coded_slot.data_ptr()),
        *(view.num_full.data_ptr(), view.num_coded.data_ptr()),
        *(t.data_ptr() for t in (batch_rows, prefix, length, first_tokens, starts)),
        *(tasks.ctypes.data, spans.ctypes.data, rounds.ctypes.data, len(rounds) - 1),
        *(counters.ctypes.data, tile_tokens, tile_panels, max_blocks),
        *(memory.data_ptr() + 4 * num_threads * scratch_floats, memory.data_ptr(), scratch_floats),
    )
    require_openmp()
    _launch(spec, arguments.ctypes.data, num_threads)


def _aligned(num_floats: int) -> torch.Tensor:
    """Uninitialised float32 memory that begins on a cache line (torch aligns to 64 bytes)."""
    return torch.empty(num_floats, dtype=torch.float32)
