"""Decode attention: one new token per request over its FULL and coded windows.

Work is cut into blocks of up to ``BLOCK`` windows of one list of one request. A task is one
(block, KV head): tasks are handed out by a shared counter, so any number of threads keeps busy, and
each writes its own partial. Who finishes the last block of a KV head merges its partials, in the
order of the list; who finishes the last KV head of a request adds the mass of all windows to the
scores. So threads meet only once, at the end: on a busy machine each meeting costs a time slice.

Bytes: every code and every FULL key and value is read once; per window and KV head one row of
the rotary table; partials cost ``partial_floats`` float32 a head and block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from qevict_kernels.numba.blocks import (
    BLOCK,
    block_scores,
    coded_logits,
    coded_values,
    full_logits,
    full_values,
    load_query,
    merge_partials,
    partial_floats,
    prefetch_coded,
    prefetch_full,
    softmax,
)
from qevict_kernels.numba.memory import aligned, view
from qevict_kernels.numba.parallel import atomic_add, parallel

__all__ = ["DECODE_ARGUMENTS", "decode_kernel"]

LOG2_E = np.float32(1.4426950408889634)
# Windows to prefetch, into the second cache level, ahead of their use. Slots lie anywhere: without
# it, the time of long contexts doubles.
CODED_AHEAD = 6
FULL_AHEAD = 4
NOTHING = np.float32(-np.inf)

DECODE_ARGUMENTS = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses of tensors
            "query", "full_keys", "full_values", "coded", "bases", "offsets", "out", "scores",
            "page_table", "full_slot", "coded_slot", "windows", "num_full", "num_coded",
            "rows", "seq_lens",
            # shapes, and strides in elements
            "batch", "columns", "query_stride", "out_stride", "slot_stride",
            "page_stride", "window_stride", "score_stride", "wide_lens",
            # filled in by the kernel: addresses of its scratch
            "block_start", "block_request", "partials", "totals",
            "next_task", "open_blocks", "open_heads",
        )
    ]
    + [("scale", np.float64)]
)  # fmt: skip

partial_floats = njit(inline="always")(partial_floats)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def decode_kernel(spec: Any, arguments: int, num_threads: int) -> Any:
    """Run the step described at ``arguments``; returns the number of blocks."""
    a = view(arguments, 1, DECODE_ARGUMENTS)[0]
    rows = view(a.rows, a.batch, np.int64)
    num_full = view(a.num_full, 1 << 40, np.int32)
    num_coded = view(a.num_coded, 1 << 40, np.int32)
    starts = np.empty(a.batch + 1, np.int64)
    num_blocks = 0
    for b in range(a.batch):
        starts[b] = num_blocks
        if _seq_len(a, b) > 0:
            num_blocks += _num_blocks(num_full[rows[b]]) + _num_blocks(num_coded[rows[b]])
    starts[a.batch] = num_blocks
    requests = np.empty(num_blocks, np.int32)
    for b in range(a.batch):
        requests[starts[b] : starts[b + 1]] = b
    stride = partial_floats(spec.head_dim)
    partials = np.empty(num_blocks * spec.num_q_heads * stride + 16, np.float32)
    totals = np.empty(a.batch * spec.num_q_heads * 2, np.float32)
    next_task = np.zeros(1, np.int64)
    open_blocks = np.empty((a.batch, spec.num_kv_heads), np.int64)
    open_heads = np.full(a.batch, spec.num_kv_heads, np.int64)
    a.block_start = starts.ctypes.data
    a.block_request = requests.ctypes.data
    a.partials = aligned(partials.ctypes.data)
    a.totals = totals.ctypes.data
    a.next_task = next_task.ctypes.data
    a.open_blocks = open_blocks.ctypes.data
    a.open_heads = open_heads.ctypes.data
    for b in range(a.batch):
        open_blocks[b] = starts[b + 1] - starts[b]
        if starts[b + 1] == starts[b]:  # no task will write the zeros
            for head in range(spec.num_kv_heads):
                _merge(spec, a, b, head)
    parallel(_worker, spec, arguments, num_threads)
    # Naming the arrays here keeps them alive while the team works on their addresses.
    kept = starts.size + requests.size + partials.size + totals.size
    return kept + next_task.size + open_blocks.size + open_heads.size


@njit  # type: ignore[untyped-decorator]
def _worker(spec: Any, arguments: int) -> None:
    a = view(arguments, 1, DECODE_ARGUMENTS)[0]
    starts = view(a.block_start, a.batch + 1, np.int64)
    requests = view(a.block_request, starts[a.batch], np.int32)
    memory = np.empty(_scratch_bytes(spec), np.uint8)
    scratch = _scratch_of(spec, aligned(memory.ctypes.data))
    while True:
        task = atomic_add(a.next_task, 1)
        if task >= starts[a.batch] * spec.num_kv_heads:
            break
        block, head = divmod(task, spec.num_kv_heads)
        _attend_block(spec, a, scratch, block, head)
        b = requests[block]
        if atomic_add(a.open_blocks + 8 * (b * spec.num_kv_heads + head), -1) > 1:
            continue
        _merge(spec, a, b, head)
        if atomic_add(a.open_heads + 8 * b, -1) == 1 and a.scores != 0:
            for block in range(starts[b], starts[b + 1]):
                _add_scores(spec, a, scratch, block)
    memory[0] = 0  # keeps the scratch alive until here


class _Scratch(NamedTuple):
    """Addresses of the parts of one thread's scratch."""

    logits: int  # float32 [group, BLOCK, window]
    plain: int  # the group's queries, float32 [group, dim]
    split: int  # the same in split order (see ``windows``)
    keys: int  # int64 [BLOCK], addresses of keys or records
    values: int  # int64 [BLOCK]
    bases: int  # int64 [BLOCK], rows of the rotary table
    factor: int  # float32, what queries are multiplied by
    tails: int  # keys and values of windows that are not complete, padded with zeros


@njit  # type: ignore[untyped-decorator]
def _scratch_of(spec: Any, address: int) -> Any:
    group, dim, window = spec.group_size, spec.head_dim, spec.window
    plain = address + 4 * group * BLOCK * window
    split = plain + 4 * group * dim
    keys = split + 4 * group * dim
    values, bases, factor = keys + 8 * BLOCK, keys + 16 * BLOCK, keys + 24 * BLOCK
    return _Scratch(address, plain, split, keys, values, bases, factor, factor + 64)


@njit  # type: ignore[untyped-decorator]
def _scratch_bytes(spec: Any) -> Any:
    tails = BLOCK * 4 * spec.window * spec.head_dim
    return _scratch_of(spec, 0).tails + tails + 64  # 64: to align


@njit  # type: ignore[untyped-decorator]
def _attend_block(spec: Any, a: Any, scratch: Any, block: int, head: int) -> None:
    """Partial results of one block for the query heads of one KV head."""
    b, _, _, count, is_full = _locate(a, block)
    group, dim = spec.group_size, spec.head_dim
    view(scratch.factor, 1, np.float32)[0] = np.float32(a.scale) * LOG2_E
    query = a.query + 2 * (b * a.query_stride + head * group * dim)
    load_query(spec, query, scratch.factor, scratch.plain, scratch.split)
    partial = a.partials + 4 * partial_floats(dim) * (block * spec.num_q_heads + head * group)
    if is_full:
        _full_block_logits(spec, a, scratch, block, head)
    else:
        _coded_block_logits(spec, a, scratch, block, head)
    for i in range(count, BLOCK):
        _mask(spec, scratch.logits, i, 0)
    softmax(spec, scratch.logits, partial)
    if is_full:
        full_values(spec, scratch.values, scratch.logits, partial, count)
    else:
        coded_values(spec, scratch.keys, scratch.logits, partial, count)


@njit  # type: ignore[untyped-decorator]
def _full_block_logits(spec: Any, a: Any, scratch: Any, block: int, head: int) -> None:
    b, row, first, count, _ = _locate(a, block)
    window, size = spec.window, 2 * spec.window * spec.head_dim
    keys, values = view(scratch.keys, BLOCK, np.int64), view(scratch.values, BLOCK, np.int64)
    slots = view(a.full_slot, 1 << 40, np.int32)
    seq_len, tails = _seq_len(a, b), scratch.tails
    for i in range(count):
        w, page = _window_and_page(a, row, first + i)
        place = 2 * slots[page] * a.slot_stride + head * size
        keys[i], values[i] = a.full_keys + place, a.full_values + place
        if i < FULL_AHEAD:
            prefetch_full(spec, keys[i])
        if seq_len < (w + 1) * window:
            # What is not written yet may be NaN, which a probability of 0 does not cancel.
            written = 2 * spec.head_dim * max(seq_len - w * window, 0)
            _copy_padded(keys[i], tails, written, size)
            _copy_padded(values[i], tails + size, written, size)
            keys[i], values[i] = tails, tails + size
            tails += 2 * size
    for i in range(count):
        prefetch_full(spec, values[i])
        if i + FULL_AHEAD < count:
            prefetch_full(spec, keys[i + FULL_AHEAD])
        full_logits(spec, keys[i], scratch.plain, scratch.logits + 4 * i * window)
    if tails != scratch.tails:
        for i in range(count):
            w, _ = _window_and_page(a, row, first + i)
            _mask(spec, scratch.logits, i, max(seq_len - w * window, 0))


@njit  # type: ignore[untyped-decorator]
def _coded_block_logits(spec: Any, a: Any, scratch: Any, block: int, head: int) -> None:
    b, row, first, count, _ = _locate(a, block)
    window = spec.window
    records, bases = view(scratch.keys, BLOCK, np.int64), view(scratch.bases, BLOCK, np.int64)
    slots = view(a.coded_slot, 1 << 40, np.int32)
    seq_len, masked = _seq_len(a, b), False
    for i in range(count):
        w, page = _window_and_page(a, row, first - i)
        records[i] = a.coded + (slots[page] * spec.num_kv_heads + head) * spec.record_bytes
        bases[i] = a.bases + 4 * w * spec.rotary_dim
        if i < CODED_AHEAD:
            prefetch_coded(spec, records[i], bases[i])
        masked |= seq_len < (w + 1) * window
    for i in range(count):
        if i + CODED_AHEAD < count:
            prefetch_coded(spec, records[i + CODED_AHEAD], bases[i + CODED_AHEAD])
        logits = scratch.logits + 4 * i * window
        coded_logits(spec, records[i], scratch.split, bases[i], a.offsets, logits)
    if masked:
        for i in range(count):
            w, _ = _window_and_page(a, row, first - i)
            _mask(spec, scratch.logits, i, max(seq_len - w * window, 0))


@njit  # type: ignore[untyped-decorator]
def _mask(spec: Any, logits: int, index: int, num_valid: int) -> None:
    """Hide the tokens of a window from ``num_valid`` on."""
    table = view(logits, (spec.group_size, BLOCK, spec.window), np.float32)
    for g in range(spec.group_size):
        for i in range(num_valid, spec.window):
            table[g, index, i] = NOTHING


@njit  # type: ignore[untyped-decorator]
def _copy_padded(source: int, target: int, num_bytes: int, size: int) -> None:
    data, copy = view(source, num_bytes, np.uint8), view(target, size, np.uint8)
    for i in range(num_bytes):
        copy[i] = data[i]
    for i in range(num_bytes, size):
        copy[i] = 0


@njit  # type: ignore[untyped-decorator]
def _merge(spec: Any, a: Any, request: int, kv_head: int) -> None:
    """Outputs and totals of the query heads of one KV head, from all blocks of a request."""
    starts = view(a.block_start, a.batch + 1, np.int64)
    first, stride = starts[request] * spec.num_q_heads, 4 * partial_floats(spec.head_dim)
    for g in range(spec.group_size):
        head = kv_head * spec.group_size + g
        merge_partials(
            spec,
            a.partials + stride * (first + head),
            starts[request + 1] - starts[request],
            a.out + 2 * (request * a.out_stride + head * spec.head_dim),
            a.totals + 8 * (request * spec.num_q_heads + head),
        )


@njit  # type: ignore[untyped-decorator]
def _add_scores(spec: Any, a: Any, scratch: Any, block: int) -> None:
    """Add the mass of the windows of one block, averaged over all query heads."""
    b, row, first, count, is_full = _locate(a, block)
    partial = a.partials + 4 * partial_floats(spec.head_dim) * block * spec.num_q_heads
    block_scores(spec, partial, a.totals + 8 * b * spec.num_q_heads, scratch.logits)
    masses = view(scratch.logits, BLOCK, np.float32)
    scores = view(a.scores + 4 * row * a.score_stride, a.columns, np.float32)
    step = 1 if is_full else -1
    for i in range(count):
        w, _ = _window_and_page(a, row, first + step * i)
        scores[w] += masses[i]


@njit  # type: ignore[untyped-decorator]
def _locate(a: Any, block: int) -> Any:
    """(request, row, first column of ``windows``, number of windows, whether FULL) of a block.

    FULL windows follow to the right of the first column, coded windows to the left.
    """
    b = view(a.block_request, block + 1, np.int32)[block]
    row = view(a.rows, a.batch, np.int64)[b]
    local = block - view(a.block_start, a.batch + 1, np.int64)[b]
    num_full = view(a.num_full, row + 1, np.int32)[row]
    full_blocks = _num_blocks(num_full)
    if local < full_blocks:
        first = local * BLOCK
        return b, row, first, min(BLOCK, num_full - first), True
    first = (local - full_blocks) * BLOCK
    num_coded = view(a.num_coded, row + 1, np.int32)[row]
    return b, row, a.columns - 1 - first, min(BLOCK, num_coded - first), False


@njit(inline="always")  # type: ignore[untyped-decorator]
def _window_and_page(a: Any, row: int, column: int) -> Any:
    w = view(a.windows + 4 * (row * a.window_stride + column), 1, np.int32)[0]
    return w, view(a.page_table + 4 * (row * a.page_stride + w), 1, np.int32)[0]


@njit(inline="always")  # type: ignore[untyped-decorator]
def _num_blocks(num_windows: int) -> int:
    return (num_windows + BLOCK - 1) // BLOCK


@njit(inline="always")  # type: ignore[untyped-decorator]
def _seq_len(a: Any, b: int) -> Any:
    if a.wide_lens:
        return view(a.seq_lens, b + 1, np.int64)[b]
    return np.int64(view(a.seq_lens, b + 1, np.int32)[b])
