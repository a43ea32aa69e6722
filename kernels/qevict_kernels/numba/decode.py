"""Decode attention: one new token per request over its FULL and coded windows.

Work is cut into blocks of up to ``BLOCK`` windows of one list of one request. A task is one
(block, KV head): tasks are handed out by a shared counter, so any number of threads keeps busy, and
each writes its own partial. After a barrier, partials are merged per (request, query head), and
after another one the window masses of each block are added to the scores.

Bytes: every code and every FULL key and value is read once; per window and KV head one row of
the rotary table; partials cost ``partial_floats`` float32 a head and block.
"""

from __future__ import annotations

from typing import Any

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
    softmax,
)
from qevict_kernels.numba.memory import aligned, view
from qevict_kernels.numba.parallel import atomic_add, barrier, parallel

__all__ = ["DECODE_ARGUMENTS", "decode_kernel"]

LOG2_E = np.float32(1.4426950408889634)
# Windows to prefetch ahead of their use.
CODED_AHEAD = 2
FULL_AHEAD = 2
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
            "block_start", "block_request", "partials", "totals", "counters",
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
    counters = np.zeros(3, np.int64)
    a.block_start = starts.ctypes.data
    a.block_request = requests.ctypes.data
    a.partials = aligned(partials.ctypes.data)
    a.totals = totals.ctypes.data
    a.counters = counters.ctypes.data
    parallel(_worker, spec, arguments, num_threads)
    # Naming the arrays here keeps them alive while the team works on their addresses.
    return starts.size + requests.size + partials.size + totals.size + counters.size


@njit  # type: ignore[untyped-decorator]
def _worker(spec: Any, arguments: int) -> None:
    a = view(arguments, 1, DECODE_ARGUMENTS)[0]
    num_blocks = view(a.block_start, a.batch + 1, np.int64)[a.batch]
    scratch = np.empty(_scratch_bytes(spec), np.uint8)
    while True:
        task = atomic_add(a.counters, 1)
        if task >= num_blocks * spec.num_kv_heads:
            break
        block, head = divmod(task, spec.num_kv_heads)
        _attend_block(spec, a, aligned(scratch.ctypes.data), block, head)
    barrier()
    while True:
        task = atomic_add(a.counters + 8, 1)
        if task >= a.batch * spec.num_q_heads:
            break
        request, head = divmod(task, spec.num_q_heads)
        _merge(spec, a, request, head)
    if a.scores == 0:
        return
    barrier()
    while True:
        block = atomic_add(a.counters + 16, 1)
        if block >= num_blocks:
            break
        _add_scores(spec, a, aligned(scratch.ctypes.data), block)
    scratch[0] = 0  # keeps the scratch alive until here


@njit  # type: ignore[untyped-decorator]
def _attend_block(spec: Any, a: Any, scratch: int, block: int, head: int) -> None:
    """Partial results of one block for the query heads of one KV head."""
    b, row, first, count, is_full = _locate(a, block)
    group, dim, window = spec.group_size, spec.head_dim, spec.window
    logits = scratch
    plain = logits + 4 * group * BLOCK * window
    split = plain + 4 * group * dim
    keys = split + 4 * group * dim  # int64 addresses, as `values` and `bases`
    values = keys + 8 * (BLOCK)
    bases = values + 8 * (BLOCK)
    factor = bases + 8 * (BLOCK)
    tail = factor + 64
    view(factor, 1, np.float32)[0] = np.float32(a.scale) * LOG2_E
    query = a.query + 2 * (b * a.query_stride + head * group * dim)
    load_query(spec, query, factor, plain, split)
    partial = a.partials + 4 * partial_floats(dim) * (block * spec.num_q_heads + head * group)
    seq_len = _seq_len(a, b)
    key_at = view(keys, BLOCK, np.int64)
    value_at = view(values, BLOCK, np.int64)
    base_at = view(bases, BLOCK, np.int64)
    listed = view(a.windows + 4 * row * a.window_stride, a.columns, np.int32)
    pages = view(a.page_table + 4 * row * a.page_stride, a.columns, np.int32)
    masked = False
    if is_full:
        slots = view(a.full_slot, 1 << 40, np.int32)
        for i in range(count):
            w = listed[first + i]
            place = 2 * (slots[pages[w]] * a.slot_stride + head * window * dim)
            key_at[i] = a.full_keys + place
            value_at[i] = a.full_values + place
            if seq_len < (w + 1) * window:
                masked = True
                # What is not written yet may be NaN, which a probability of 0 does not cancel.
                size = 2 * dim * max(seq_len - w * window, 0)
                _copy_padded(key_at[i], tail, size, 2 * dim * window)
                _copy_padded(value_at[i], tail + 2 * dim * window, size, 2 * dim * window)
                key_at[i] = tail
                value_at[i] = tail + 2 * dim * window
                tail += 4 * dim * window
        for i in range(count):
            ahead = min(i + FULL_AHEAD, count - 1)
            full_logits(spec, key_at[i], plain, logits + 4 * i * window, key_at[ahead], value_at[i])
    else:
        slots = view(a.coded_slot, 1 << 40, np.int32)
        for i in range(count):
            w = listed[a.columns - 1 - first - i]
            key_at[i] = a.coded + (slots[pages[w]] * spec.num_kv_heads + head) * spec.record_bytes
            base_at[i] = a.bases + 4 * w * spec.rotary_dim
            masked |= seq_len < (w + 1) * window
        for i in range(count):
            ahead = min(i + CODED_AHEAD, count - 1)
            coded_logits(
                spec, key_at[i], split, base_at[i], a.offsets, logits + 4 * i * window,
                key_at[ahead], base_at[ahead],
            )  # fmt: skip
    if masked:
        for i in range(count):
            w = listed[first + i] if is_full else listed[a.columns - 1 - first - i]
            _mask(spec, logits, i, max(seq_len - w * window, 0))
    for i in range(count, BLOCK):
        _mask(spec, logits, i, 0)
    softmax(spec, logits, partial)
    if is_full:
        full_values(spec, values, logits, partial, count)
    else:
        coded_values(spec, keys, logits, partial, count)


@njit  # type: ignore[untyped-decorator]
def _scratch_bytes(spec: Any) -> Any:
    group, dim, window = spec.group_size, spec.head_dim, spec.window
    logits = group * BLOCK * window
    return 4 * (logits + 2 * group * dim) + 24 * (BLOCK) + 128 + 4 * dim * window * BLOCK


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
def _merge(spec: Any, a: Any, request: int, head: int) -> None:
    starts = view(a.block_start, a.batch + 1, np.int64)
    stride = 4 * partial_floats(spec.head_dim)
    merge_partials(
        spec,
        a.partials + stride * (starts[request] * spec.num_q_heads + head),
        starts[request + 1] - starts[request],
        a.out + 2 * (request * a.out_stride + head * spec.head_dim),
        a.totals + 8 * (request * spec.num_q_heads + head),
    )


@njit  # type: ignore[untyped-decorator]
def _add_scores(spec: Any, a: Any, scratch: int, block: int) -> None:
    b, row, first, count, is_full = _locate(a, block)
    partial = a.partials + 4 * partial_floats(spec.head_dim) * block * spec.num_q_heads
    block_scores(spec, partial, a.totals + 8 * b * spec.num_q_heads, scratch)
    masses = view(scratch, BLOCK, np.float32)
    listed = view(a.windows + 4 * row * a.window_stride, a.columns, np.int32)
    scores = view(a.scores + 4 * row * a.score_stride, a.columns, np.float32)
    for i in range(count):
        w = listed[first + i] if is_full else listed[a.columns - 1 - first - i]
        scores[w] += masses[i]


@njit  # type: ignore[untyped-decorator]
def _locate(a: Any, block: int) -> Any:
    """(request, row, first window in its list, number of windows, whether FULL) of a block."""
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
    return b, row, first, min(BLOCK, num_coded - first), False


@njit(inline="always")  # type: ignore[untyped-decorator]
def _num_blocks(num_windows: int) -> int:
    return (num_windows + BLOCK - 1) // BLOCK


@njit(inline="always")  # type: ignore[untyped-decorator]
def _seq_len(a: Any, b: int) -> Any:
    if a.wide_lens:
        return view(a.seq_lens, b + 1, np.int64)[b]
    return np.int64(view(a.seq_lens, b + 1, np.int32)[b])
