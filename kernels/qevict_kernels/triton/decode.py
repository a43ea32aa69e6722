"""Decode attention: one new token per request over its FULL and coded windows, in two launches.

``attend``: a fixed number of programs of two warps share out *items* (request, tier, split, KV
head, block of query heads). An item goes over one stretch of one window list, ``TILE`` units at a
time, and leaves a partial result: per query head the largest logit, the sum of the weights, and the
weighted sum of the values; and for each unit and head the log of its sum of weights.
``merge``: joins the partial results of a request in list order, and adds the mass of each window,
which follows from its log-sum and the request's, to its score.

How a list is split depends on its length alone, so a result doesn't depend on the batch. Counts,
slots and lists are read on the device: the launches are the same at every step, for a CUDA graph.

Tiles have units by channels on the side of the matrix product that is 16 rows high, query heads on
the side that is 8 wide, and one product per token of the units. The rotation of a token within its
unit is applied to the query, once an item; so a key needs only the rotation by its unit's base, and
that is joined with its dequantisation: two multiply-adds. Logits of one unit lie in one thread,
so its log-sum costs no exchange. Value codes enter the product as they are: scales go into the
weights, zeros into one sum a head.

Bytes: every code, parameter, FULL key and value is read once; ``2 * rotary_dim`` bytes of the
table of cosines and sines per unit and KV head (most of them from the cache), one float32 per unit
and query head is written and read, and ``head_dim + 2`` per item and query head.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# What kernels are written in knows neither unpacking nor conditions joined at compile time:
# ruff: noqa: RUF005

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qevict_kernels.checks import LENGTHS, check, check_heads, check_stores, check_view
from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.codes import (
    KEY_UNIT,
    Spec,
    coefficients,
    key_exponent,
    key_header,
    load_channels,
    load_words,
    plain_keys,
    prefetch_records,
    product,
    rotated_coefficients,
    rotated_keys,
    token_params,
    unpack_value,
    value_exponent,
    value_header,
)

__all__ = [
    "MAX_SPLITS",
    "TILE",
    "TritonDecode",
    "attend",
    "attend_options",
    "merge",
    "merge_options",
    "scratch_numbers",
]

TILE = 32
"""Units that a program goes over at a time."""
MAX_SPLITS = 32
"""Programs that share one window list, for one KV head, at most."""

PROGRAMS_PER_SM = 4  # of ``attend``: 255 registers in each of 64 threads
SCORE_PROGRAMS = 8  # of ``merge``, per request
LOG2_E = 1.4426950408889634

CHUNK = tl.constexpr(16)  # channels of a key tile: as few as a matrix product takes
AT_ONCE = tl.constexpr(4)  # tokens of FULL units whose loads are on the way together
ROWS = tl.constexpr(16)  # the least height of a matrix product
NOTHING = tl.constexpr(float("-inf"))


# -- which item ------------------------------------------------------------------------------


@triton.jit
def split_units(num_units, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Units of one split of a list: whole tiles, and at most ``MAX_SPLITS`` splits."""
    tiles = (num_units + MAX_SPLITS * TILE - 1) // (MAX_SPLITS * TILE)
    return tl.maximum(tiles, 1) * TILE


@triton.jit
def num_splits(num_units, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Splits of a list; none of an empty one."""
    size = split_units(num_units, TILE, MAX_SPLITS)
    return (num_units + size - 1) // size


@triton.jit
def list_units(counts, row, seq_len, spec: tl.constexpr):
    """Units in a list of ``row``; none where ``seq_len`` is 0."""
    return tl.where(seq_len > 0, tl.load(counts + row), 0) * spec.units


@triton.jit
def resolve(lists, row, unit, last, IS_CODED: tl.constexpr, spec: tl.constexpr):
    """(window, slot) of units of a list; past the ``last`` unit those of the last one.

    ``lists``: (page_table, slots, windows, columns, page_stride, window_stride).
    """
    page_table, slots, windows, columns, page_stride, window_stride = lists
    column = tl.minimum(unit, last) // spec.units
    if IS_CODED:
        column = columns - 1 - column
    window = tl.load(windows + row * window_stride + column)
    page = tl.load(page_table + row * page_stride + window)
    return window, tl.load(slots + page)


# -- queries ---------------------------------------------------------------------------------


@triton.jit
def load_query(query, channel, valid, head, head_valid, spec: tl.constexpr):
    """Queries of ``head`` ``[H]`` at ``channel`` ``[C]``, ``[C, H]``; 0 where not valid."""
    places = query + head[None, :] * spec.head_dim + channel[:, None]
    return tl.load(places, mask=valid[:, None] & head_valid[None, :], other=0.0)


@triton.jit
def coded_queries(query, offsets, head, head_valid, spec: tl.constexpr):
    """What the key tiles of ``coded_logits`` are multiplied with, in its order.

    Per chunk of pairs and token two float16 ``[CHUNK, H]``: the query turned back by the token's
    place in its unit, times ``4**key_exponent``; then per chunk of channels that aren't rotated
    one for exponent 0 and one for 1. ``offsets``: float32 ``[tokens, rotary_dim]``.
    """
    PAIRS: tl.constexpr = spec.pairs
    TOKENS: tl.constexpr = spec.tokens
    step = tl.arange(0, CHUNK)
    tiles = ()
    for start in tl.static_range(0, PAIRS, CHUNK):
        pair = start + step
        valid = pair < spec.pairs
        channel = pair * spec.pair_stride
        q1 = load_query(query, channel, valid, head, head_valid, spec).to(tl.float32)
        q2 = load_query(query, channel + spec.partner, valid, head, head_valid, spec).to(tl.float32)
        for token in tl.static_range(TOKENS):
            angle = offsets + token * spec.rotary_dim + pair
            cos = tl.load(angle, mask=valid, other=0.0)[:, None]
            sin = tl.load(angle + spec.pairs, mask=valid, other=0.0)[:, None]
            back1 = (q1 * cos + q2 * sin) * 4.0 ** key_exponent(spec.geometry.key_bits, token)
            back2 = (q2 * cos - q1 * sin) * 4.0 ** key_exponent(spec.geometry.key_bits, token)
            tiles = tiles + (back1.to(tl.float16), back2.to(tl.float16))
    ROTARY: tl.constexpr = spec.rotary_dim
    DIM: tl.constexpr = spec.head_dim
    for start in tl.static_range(ROTARY, DIM, CHUNK):
        channel = start + step
        valid = channel < spec.head_dim
        q = load_query(query, channel, valid, head, head_valid, spec).to(tl.float32)
        tiles = tiles + (q.to(tl.float16), (q * 4.0).to(tl.float16))
    return tiles


# -- logits and weights ----------------------------------------------------------------------


@triton.jit
def coded_logits(records, position, unit, bases, queries, HEADS: tl.constexpr, spec: tl.constexpr):
    """Raw logits of a tile of coded units, times ``KEY_UNIT``: per token float32 ``[TILE, H]``.

    ``records``: uint8 pointers; ``position``: of the first token, in units; ``unit``: within the
    window; each ``[TILE]``. ``bases``: float16 ``[positions, rotary_dim]``, cosines, then sines.
    """
    PAIRS: tl.constexpr = spec.pairs
    ROTARY: tl.constexpr = spec.rotary_dim
    DIM: tl.constexpr = spec.head_dim
    TOKENS: tl.constexpr = spec.tokens
    header = key_header(records, spec)
    table = bases + position * spec.rotary_dim
    logits = ()
    for _ in tl.static_range(TOKENS):
        logits = logits + (tl.zeros([records.shape[0], HEADS], tl.float32),)
    for start in tl.static_range(0, PAIRS, CHUNK):
        logits = add_rotated(logits, records, header, table, unit, queries, start, spec)
    for start in tl.static_range(ROTARY, DIM, CHUNK):
        logits = add_plain(logits, records, header, unit, queries, start, spec)
    return logits


@triton.jit
def add_rotated(
    logits, records, header, table, unit, queries, START: tl.constexpr, spec: tl.constexpr
):
    """``logits`` plus those of a chunk of pairs of channels."""
    WHOLE: tl.constexpr = spec.pairs >= START + CHUNK
    CODES: tl.constexpr = spec.record.key_codes
    BITS: tl.constexpr = spec.geometry.key_bits
    pair = START + tl.arange(0, CHUNK)
    valid = pair < spec.pairs
    first = pair * spec.pair_stride
    second = first + spec.partner
    words1 = load_words(records, unit, first, valid, CODES, BITS, WHOLE, spec)
    words2 = load_words(records, unit, second, valid, CODES, BITS, WHOLE, spec)
    cos = load_channels(table, pair, valid, WHOLE)
    sin = load_channels(table + spec.pairs, pair, valid, WHOLE)
    rotated = rotated_coefficients(
        coefficients(records, header, first, valid, WHOLE, spec),
        coefficients(records, header, second, valid, WHOLE, spec), cos, sin,
    )  # fmt: skip
    TOKENS: tl.constexpr = spec.tokens
    summed = ()
    for token in tl.static_range(TOKENS):
        key1, key2 = rotated_keys(words1, words2, rotated, token, spec)
        query1 = queries[(START // CHUNK * spec.tokens + token) * 2]
        query2 = queries[(START // CHUNK * spec.tokens + token) * 2 + 1]
        logit = product(key1, query1, logits[token], spec)
        summed = summed + (product(key2, query2, logit, spec),)
    return summed


@triton.jit
def add_plain(logits, records, header, unit, queries, START: tl.constexpr, spec: tl.constexpr):
    """``logits`` plus those of a chunk of channels that RoPE leaves alone."""
    WHOLE: tl.constexpr = spec.head_dim >= START + CHUNK
    BITS: tl.constexpr = spec.geometry.key_bits
    ROTATED: tl.constexpr = (spec.pairs + CHUNK - 1) // CHUNK * spec.tokens * 2
    PLACE: tl.constexpr = ROTATED + (START - spec.rotary_dim) // CHUNK * 2
    channel = START + tl.arange(0, CHUNK)
    valid = channel < spec.head_dim
    words = load_words(records, unit, channel, valid, spec.record.key_codes, BITS, WHOLE, spec)
    zero_step = coefficients(records, header, channel, valid, WHOLE, spec)
    TOKENS: tl.constexpr = spec.tokens
    summed = ()
    for token in tl.static_range(TOKENS):
        keys = plain_keys(words, zero_step, token, spec)
        query = queries[PLACE + key_exponent(BITS, token)]
        summed = summed + (product(keys, query, logits[token], spec),)
    return summed


@triton.jit
def softmax(logits, left, top, scale, TOKENS: tl.constexpr):
    """Weights of a tile, given the largest raw logit so far, ``top`` ``[H]``.

    ``left`` ``[TILE]``: tokens of a unit that are seen. ``scale``: makes raw logits those to the
    base 2. Returns weights ``2**(logit - shift)`` per token, their sums over each unit
    ``[TILE, H]``, the new ``top``, ``shift`` ``[H]``, and what older sums shrink by ``[H]``.
    """
    seen = ()
    largest = tl.full(logits[0].shape, NOTHING, tl.float32)
    for token in tl.static_range(TOKENS):
        logit = tl.where((token < left)[:, None], logits[token], NOTHING)
        seen = seen + (logit,)
        largest = tl.maximum(largest, logit)
    new_top = tl.maximum(top, tl.max(largest, 0))
    shift = tl.where(new_top == NOTHING, 0.0, new_top * scale)
    weights = ()
    sums = tl.zeros(logits[0].shape, tl.float32)
    for token in tl.static_range(TOKENS):
        weight = tl.exp2(seen[token] * scale - shift[None, :])
        weights = weights + (weight,)
        sums += weight
    return weights, sums, new_top, shift, tl.exp2(top * scale - shift)


# -- attend ----------------------------------------------------------------------------------


@triton.jit
def attend_coded(
    query, head, head_valid, coded, bases, offsets, lists, row, seq_len, start, end, scale, lses,
    HEADS: tl.constexpr, TILE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Partial result of coded units ``[start, end)``: (top ``[H]``, sum ``[H]``, values).

    ``coded``: the first record of the KV head. ``lses``: pointers ``[H]``, one float32 per unit.
    Values: a tuple of ``[spec.block, H]``.
    """
    BITS: tl.constexpr = spec.geometry.value_bits
    TOKENS: tl.constexpr = spec.tokens
    SLOT: tl.constexpr = spec.geometry.coded_window_bytes
    step = tl.arange(0, TILE)
    window, slot = resolve(lists, row, start + step, end - 1, True, spec)
    prefetch_records(coded + slot.to(tl.int64) * SLOT, spec)
    queries = coded_queries(query, offsets, head, head_valid, spec)
    unit_scale = scale / KEY_UNIT
    ones = tl.full([ROWS, TILE], 1.0, tl.float32).to(tl.bfloat16)
    top = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    zeros = tl.zeros([TILE, HEADS], tl.float32)  # what the zeros of the values add to all channels
    taken = tl.zeros([ROWS, HEADS], tl.float32)  # what the 1 of unpacked codes adds
    values = no_values(HEADS, spec)
    for first in range(start, end, TILE):
        place = first + step
        unit = tl.minimum(place, end - 1) % spec.units
        position = window * spec.units + unit
        records = coded + slot.to(tl.int64) * SLOT
        left = tl.where(place < end, seq_len - position * spec.tokens, 0)
        window, slot = resolve(lists, row, place + TILE, end - 1, True, spec)  # one tile ahead
        logits = coded_logits(records, position, unit, bases, queries, HEADS, spec)
        prefetch_records(coded + slot.to(tl.int64) * SLOT, spec)
        weights, sums, top, shift, shrink = softmax(logits, left, top, unit_scale, TOKENS)
        seen = (place < end)[:, None] & head_valid[None, :]
        tl.store(lses[None, :] + place[:, None], tl.log2(sums) + shift[None, :], mask=seen)
        total = total * shrink[None, :] + sums
        zeros *= shrink[None, :]
        taken *= shrink[None, :]
        scale_step, zero_base, zero_step = value_header(records, spec)
        scaled = ()
        for token in tl.static_range(TOKENS):
            token_scale = token_params(records, unit, token, spec.record.value_scales, spec)
            token_zero = token_params(records, unit, token, spec.record.value_zeros, spec)
            token_scale *= scale_step * 2.0 ** value_exponent(BITS, token)
            token_zero = zero_base + token_zero * zero_step
            zeros += weights[token] * token_zero[:, None]
            scaled = scaled + ((weights[token] * token_scale[:, None]).to(tl.bfloat16),)
            taken = product(ones, scaled[token], taken, spec)
        values = add_coded_values(values, shrink, scaled, records, unit, spec)
    offset = (tl.sum(zeros, 0) - tl.max(taken, 0))[None, :]
    complete = ()
    for j in tl.static_range(len(values)):
        complete = complete + (values[j] + offset,)
    return top * unit_scale, tl.sum(total, 0), complete


@triton.jit
def no_values(HEADS: tl.constexpr, spec: tl.constexpr):
    """The weighted sum of no values: zeros ``[spec.block, H]`` for each block of channels."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    values = ()
    for _ in tl.static_range(0, DIM, BLOCK):
        values = values + (tl.zeros([BLOCK, HEADS], tl.float32),)
    return values


@triton.jit
def add_coded_values(values, shrink, scaled, records, unit, spec: tl.constexpr):
    """``values`` times ``shrink``, plus ``unpack_value`` of a tile times its ``scaled`` weights."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    summed = ()
    for start in tl.static_range(0, DIM, BLOCK):
        block = values[start // BLOCK] * shrink[None, :]
        summed = summed + (add_coded_block(block, scaled, records, unit, start, spec),)
    return summed


@triton.jit
def add_coded_block(block, scaled, records, unit, START: tl.constexpr, spec: tl.constexpr):
    """One block of channels of ``add_coded_values``."""
    WHOLE: tl.constexpr = START + spec.block <= spec.head_dim
    CODES: tl.constexpr = spec.record.value_codes
    BITS: tl.constexpr = spec.geometry.value_bits
    TOKENS: tl.constexpr = spec.tokens
    channel = START + tl.arange(0, spec.block)
    words = load_words(records, unit, channel, channel < spec.head_dim, CODES, BITS, WHOLE, spec)
    turned = ()
    for j in tl.static_range(len(words)):
        turned = turned + (tl.trans(words[j]),)
    for token in tl.static_range(TOKENS):
        block = product(unpack_value(turned, token, spec), scaled[token], block, spec)
    return block


@triton.jit
def attend_full(
    query, head, head_valid, keys, values, slot_stride, lists, row, seq_len, start, end, scale,
    lses, HEADS: tl.constexpr, TILE: tl.constexpr, KEYS_ONLY: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """The same of FULL units; ``keys``, ``values``: of the KV head in the first slot.

    ``KEYS_ONLY``: values are not read, and the third result is zeros.
    """
    TOKENS: tl.constexpr = spec.tokens
    queries = full_queries(query, head, head_valid, spec)
    top = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([TILE, HEADS], tl.float32)
    result = no_values(HEADS, spec)
    step = tl.arange(0, TILE)
    window, slot = resolve(lists, row, start + step, end - 1, False, spec)
    for first in range(start, end, TILE):
        place = first + step
        unit = tl.minimum(place, end - 1) % spec.units
        position = window * spec.units + unit
        offset = slot.to(tl.int64) * slot_stride + unit * (spec.tokens * spec.head_dim)
        left = tl.where(place < end, seq_len - position * spec.tokens, 0)
        window, slot = resolve(lists, row, place + TILE, end - 1, False, spec)  # one tile ahead
        logits = full_logits(keys + offset, queries, TILE, HEADS, spec)
        weights, sums, top, shift, shrink = softmax(logits, left, top, scale, TOKENS)
        seen = (place < end)[:, None] & head_valid[None, :]
        tl.store(lses[None, :] + place[:, None], tl.log2(sums) + shift[None, :], mask=seen)
        total = total * shrink[None, :] + sums
        if not KEYS_ONLY:
            result = add_full_values(result, shrink, weights, values + offset, left, spec)
    return top * scale, tl.sum(total, 0), result


@triton.jit
def full_queries(query, head, head_valid, spec: tl.constexpr):
    """Queries ``[spec.block, H]`` for each block of channels."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    queries = ()
    for start in tl.static_range(0, DIM, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        valid = channel < spec.head_dim
        queries = queries + (load_query(query, channel, valid, head, head_valid, spec),)
    return queries


@triton.jit
def full_logits(keys, queries, TILE: tl.constexpr, HEADS: tl.constexpr, spec: tl.constexpr):
    """Raw logits of units whose keys begin at pointers ``[TILE]``: per token ``[TILE, H]``."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    TOKENS: tl.constexpr = spec.tokens
    logits = ()
    for first in tl.static_range(0, TOKENS, AT_ONCE):
        summed = ()
        for _ in tl.static_range(AT_ONCE):
            summed = summed + (tl.zeros([TILE, HEADS], tl.float32),)
        for start in tl.static_range(0, DIM, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            loaded = ()
            for i in tl.static_range(AT_ONCE):
                key = keys + (first + i) * spec.head_dim
                key = load_channels(key, channel, channel < spec.head_dim, start + BLOCK <= DIM)
                loaded = loaded + (key,)
            added = ()
            for i in tl.static_range(AT_ONCE):
                added = added + (product(loaded[i], queries[start // BLOCK], summed[i], spec),)
            summed = added
        logits = logits + summed
    return logits


@triton.jit
def add_full_values(result, shrink, weights, values, left, spec: tl.constexpr):
    """``result`` times ``shrink``, plus the values at pointers ``[TILE]`` times their weights."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    TOKENS: tl.constexpr = spec.tokens
    summed = ()
    for start in tl.static_range(0, DIM, BLOCK):
        block = result[start // BLOCK] * shrink[None, :]
        channel = start + tl.arange(0, BLOCK)
        for first in tl.static_range(0, TOKENS, AT_ONCE):
            loaded = ()
            for i in tl.static_range(AT_ONCE):
                # What no token has written may be NaN, which a weight of 0 does not cancel.
                places = (values + (first + i) * spec.head_dim)[:, None] + channel[None, :]
                written = (first + i < left)[:, None] & (channel < spec.head_dim)[None, :]
                loaded = loaded + (tl.load(places, mask=written, other=0.0),)
            for i in tl.static_range(AT_ONCE):
                weight = weights[first + i].to(loaded[i].dtype)
                block = product(tl.trans(loaded[i]), weight, block, spec)
        summed = summed + (block,)
    return summed


@triton.jit
def store_partial(sums, stats, index, head_valid, partial, spec: tl.constexpr):
    """Partial result ``index`` ``[H]`` into ``sums`` ``[.., D]`` and ``stats`` ``[.., 2]``."""
    DIM: tl.constexpr = spec.head_dim
    BLOCK: tl.constexpr = spec.block
    top, total, values = partial
    tl.store(stats + index * 2, top, mask=head_valid)
    tl.store(stats + index * 2 + 1, total, mask=head_valid)
    for start in tl.static_range(0, DIM, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        mask = (channel < spec.head_dim)[:, None] & head_valid[None, :]
        places = sums + (index * spec.head_dim)[None, :] + channel[:, None]
        tl.store(places, values[start // BLOCK], mask=mask)


@triton.jit(do_not_specialize=["batch", "columns", "page_stride", "window_stride"])
def attend(
    query, full_keys, full_values, coded, bases, offsets, page_table, full_slot, coded_slot,
    windows, num_full, num_coded, rows, seq_lens, sums, stats, lses, scale, batch, columns,
    query_stride, slot_stride, page_stride, window_stride, spec: tl.constexpr, BATCH: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, PRIOR: tl.constexpr,
):  # fmt: skip
    """Grid: any. ``scale``: what makes a raw logit one to the base 2; ``batch <= BATCH``.

    Partial result ``((request * 2 + is_coded) * MAX_SPLITS + split) * Hq + head``: ``stats``
    float32 ``[.., 2]`` (largest logit, sum of weights), ``sums`` float32 ``[.., D]``. ``lses``:
    float32 ``[batch, Hq, columns * units]``, FULL units first, both in the order of the lists.
    ``PRIOR``: something else attends to FULL windows; of them only ``lses`` is made.
    """
    GROUP: tl.constexpr = spec.geometry.group_size
    KV_HEADS: tl.constexpr = spec.geometry.num_kv_heads
    BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    each = tl.arange(0, BATCH)
    row = tl.load(rows + each, mask=each < batch, other=0)
    seq_len = tl.load(seq_lens + each, mask=each < batch, other=0)
    items = num_splits(list_units(num_full, row, seq_len, spec), TILE, MAX_SPLITS)
    items += num_splits(list_units(num_coded, row, seq_len, spec), TILE, MAX_SPLITS)
    items *= KV_HEADS * BLOCKS
    ends = tl.cumsum(items, 0)
    num_items = tl.sum(items, 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        request = tl.sum((ends <= item).to(tl.int32), 0)
        local = item - tl.max(tl.where(ends <= item, ends, 0), 0)
        kv_head = local // BLOCKS % KV_HEADS
        in_group = local % BLOCKS * HEADS + tl.arange(0, HEADS)
        head_valid = in_group < GROUP
        head = kv_head * GROUP + in_group
        split = local // (BLOCKS * KV_HEADS)
        own_row = tl.load(rows + request)
        own_len = tl.load(seq_lens + request).to(tl.int32)
        full_units = list_units(num_full, own_row, own_len, spec)
        coded_units = list_units(num_coded, own_row, own_len, spec)
        full_splits = num_splits(full_units, TILE, MAX_SPLITS)
        own_query = query + request.to(tl.int64) * query_stride
        first_lse = (request.to(tl.int64) * spec.geometry.num_q_heads + head) * columns * spec.units
        first_partial = request.to(tl.int64) * 2 * MAX_SPLITS + split
        if split < full_splits:
            inner: tl.constexpr = spec.geometry.window * spec.head_dim
            size = split_units(full_units, TILE, MAX_SPLITS)
            lists = (page_table, full_slot, windows, columns, page_stride, window_stride)
            partial = attend_full(
                own_query, head, head_valid, full_keys + kv_head * inner,
                full_values + kv_head * inner, slot_stride, lists, own_row, own_len,
                split * size, tl.minimum(split * size + size, full_units), scale,
                lses + first_lse, HEADS, TILE, PRIOR, spec,
            )  # fmt: skip
            if not PRIOR:
                index = first_partial * spec.geometry.num_q_heads + head
                store_partial(sums, stats, index, head_valid, partial, spec)
        if split >= full_splits:
            split -= full_splits
            size = split_units(coded_units, TILE, MAX_SPLITS)
            lists = (page_table, coded_slot, windows, columns, page_stride, window_stride)
            partial = attend_coded(
                own_query, head, head_valid, coded + kv_head * spec.record.record_bytes,
                bases, offsets, lists, own_row, own_len, split * size,
                tl.minimum(split * size + size, coded_units), scale,
                lses + first_lse + full_units, HEADS, TILE, spec,
            )  # fmt: skip
            index = first_partial + MAX_SPLITS - full_splits
            index = index * spec.geometry.num_q_heads + head
            store_partial(sums, stats, index, head_valid, partial, spec)


# -- merge -----------------------------------------------------------------------------------


@triton.jit
def merge_outputs(
    out, sums, stats, lse, first, head, full_splits, coded_splits, MAX_SPLITS: tl.constexpr,
    PRIOR: tl.constexpr, WANTS_LSE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """One query head's output, from the partial results from ``first`` on; zeros if none.

    ``PRIOR``: joined with what is in ``out``, of log-sum ``lse``. ``WANTS_LSE``: that is stored.
    """
    NUM_HEADS: tl.constexpr = spec.geometry.num_q_heads
    index = tl.arange(0, 2 * MAX_SPLITS)
    live = index % MAX_SPLITS < tl.where(index < MAX_SPLITS, full_splits, coded_splits)
    place = (first + index) * NUM_HEADS + head
    tops = tl.load(stats + place * 2, mask=live, other=NOTHING)
    totals = tl.load(stats + place * 2 + 1, mask=live, other=0.0)
    top = tl.max(tops, 0)
    if PRIOR:
        prior = tl.load(lse + head)
        top = tl.maximum(top, prior)
    shift = tl.where(top == NOTHING, 0.0, top)
    factors = tl.exp2(tops - shift)
    total = tl.sum(factors * totals, 0)
    channel = tl.arange(0, spec.padded_dim)
    valid = channel < spec.head_dim
    places = (place * spec.head_dim)[:, None] + channel[None, :]
    partial = tl.load(sums + places, mask=live[:, None] & valid[None, :], other=0.0)
    result = tl.sum(partial * factors[:, None], 0)
    if PRIOR:
        factor = tl.exp2(prior - shift)
        total += factor
        result += factor * tl.load(out + channel, mask=valid, other=0.0).to(tl.float32)
    if WANTS_LSE:
        tl.store(lse + head, tl.log2(total) + shift)
    result = tl.where(total == 0.0, 0.0, result / total)
    tl.store(out + channel, result.to(out.dtype.element_ty), mask=valid)


@triton.jit
def log_totals(
    stats, lse, first, full_splits, coded_splits, HEADS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, PRIOR: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Logs (base 2) of the sums of all weights of a request, ``[HEADS]``; 0 where nothing is."""
    head = tl.arange(0, HEADS)
    known = head < spec.geometry.num_q_heads
    top = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if PRIOR:
        top = tl.load(lse + head, mask=known, other=NOTHING)
        total = tl.where(top == NOTHING, 0.0, 1.0)
    for split in range(0, full_splits + coded_splits):
        index = first + split + tl.where(split < full_splits, 0, MAX_SPLITS - full_splits)
        place = stats + (index * spec.geometry.num_q_heads + head) * 2
        own_top = tl.load(place, mask=known, other=NOTHING)
        own_total = tl.load(place + 1, mask=known, other=0.0)
        new_top = tl.maximum(top, own_top)
        shift = tl.where(new_top == NOTHING, 0.0, new_top)
        total = total * tl.exp2(top - shift) + own_total * tl.exp2(own_top - shift)
        top = new_top
    return tl.where(total == 0.0, 0.0, tl.log2(total) + top)


@triton.jit
def add_masses(
    scores, windows, lses, totals, start, step, full_windows, num_windows, columns,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Add the mass of listed windows to a row's ``scores``: ``BLOCK`` of them every ``step``.

    ``lses``: of the request's first head. ``totals``: of ``log_totals``.
    """
    NUM_HEADS: tl.constexpr = spec.geometry.num_q_heads
    UNITS: tl.constexpr = spec.units
    head = tl.arange(0, HEADS)
    own_lses = lses + head * (columns * UNITS)
    for first in range(start, num_windows, step):
        entry = first + tl.arange(0, BLOCK)
        listed = entry < num_windows
        mass = tl.zeros([BLOCK], tl.float32)
        for unit in tl.static_range(UNITS):
            places = own_lses[:, None] + (entry * UNITS + unit)[None, :]
            mask = (head < NUM_HEADS)[:, None] & listed[None, :]
            lse = tl.load(places, mask=mask, other=NOTHING)
            mass += tl.sum(tl.exp2(lse - totals[:, None]), 0)
        column = tl.where(entry < full_windows, entry, columns - 1 - entry + full_windows)
        window = tl.load(windows + column, mask=listed, other=0)
        score = tl.load(scores + window, mask=listed, other=0.0)
        tl.store(scores + window, score + mass * (1.0 / NUM_HEADS), mask=listed)


@triton.jit(do_not_specialize=["columns", "out_stride", "window_stride", "score_stride"])
def merge(
    out, scores, sums, stats, lses, lse, rows, seq_lens, num_full, num_coded, windows,
    columns, out_stride, window_stride, score_stride, spec: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, PRIOR: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):  # fmt: skip
    """Grid ``[Hq + n, batch]``: outputs of the query heads; the other ``n`` programs of a request
    share out the scores of its windows, each written by one of them.

    ``lse``: float32 ``[batch, Hq]``, logs (base 2) of sums of weights: with ``PRIOR`` of the
    attention over FULL windows that is in ``out``, with ``WANTS_LSE`` of the result, to be stored.
    ``HEADS``: ``Hq``, rounded up to a power of two. The other arguments are those of ``attend``.
    """
    NUM_HEADS: tl.constexpr = spec.geometry.num_q_heads
    program = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + request)
    seq_len = tl.load(seq_lens + request)
    full_units = list_units(num_full, row, seq_len, spec)
    coded_units = list_units(num_coded, row, seq_len, spec)
    full_splits = 0 if PRIOR else num_splits(full_units, TILE, MAX_SPLITS)
    coded_splits = num_splits(coded_units, TILE, MAX_SPLITS)
    first = request * 2 * MAX_SPLITS
    lse += request * NUM_HEADS
    if program < NUM_HEADS:
        merge_outputs(
            out + request * out_stride + program * spec.head_dim, sums, stats, lse, first,
            program, full_splits, coded_splits, MAX_SPLITS, PRIOR, WANTS_LSE, spec,
        )  # fmt: skip
    else:
        totals = log_totals(
            stats, lse, first, full_splits, coded_splits, HEADS, MAX_SPLITS, PRIOR, spec
        )
        add_masses(
            scores + row * score_stride, windows + row * window_stride,
            lses + request * NUM_HEADS * columns * spec.units, totals,
            (program - NUM_HEADS) * BLOCK, (tl.num_programs(0) - NUM_HEADS) * BLOCK,
            full_units // spec.units, (full_units + coded_units) // spec.units, columns,
            HEADS, BLOCK, spec,
        )  # fmt: skip


# -- launch ----------------------------------------------------------------------------------


class TritonDecode:
    """``decode`` of ``AttentionKernels``; its scratch is kept, at addresses that stay.

    ``reserve`` allocates it for the largest batch before a CUDA graph is captured; without, it
    grows with what is decoded.
    """

    geometry: WindowGeometry
    rotary: RotaryTable
    spec: Spec
    tile: int
    """Units (windows of up to 8 tokens) that a program goes over at a time."""
    max_splits: int
    """Programs that share one window list, for one KV head, at most."""
    reserved: tuple[int, int]
    """The largest batch that ``reserve`` was told of, and its windows."""

    _bases: torch.Tensor
    _offsets: torch.Tensor
    _programs: int
    _scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def prepare_decode(self, device: torch.device) -> None:
        """Tables and the number of programs for ``device``."""
        tokens = self.spec.tokens
        self._bases = self.rotary.cos_sin[::tokens].to(device, torch.float16).contiguous()
        self._offsets = self.rotary.in_window(tokens).to(device)
        self._programs = 4
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._programs = processors * PROGRAMS_PER_SM
        self._scratch = _allocate((0, 0, 0), device)
        self.reserved = (0, 0)

    def reserve(self, batch: int, columns: int) -> None:
        """Allocate the scratch for such a batch."""
        self.reserved = (max(self.reserved[0], batch), max(self.reserved[1], columns))
        self._grow_scratch(batch, columns)

    def _grow_scratch(self, batch: int, columns: int) -> None:
        """Allocate the scratch for such a batch, unless there is as much already."""
        needed = scratch_numbers(self.geometry, self.max_splits, batch, columns)
        have = tuple(tensor.numel() for tensor in self._scratch)
        if any(n > h for n, h in zip(needed, have, strict=True)):
            sizes = tuple(map(max, needed, have))
            self._scratch = _allocate(sizes, self._bases.device)

    def decode(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> None:
        """Attention of one new token per request over its FULL and coded windows."""
        self.attend_windows(query, full, coded, view, rows, seq_lens, scale, out, scores)

    def attend_windows(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
        lse: torch.Tensor | None = None,
        prior: bool = False,
    ) -> None:
        """``decode`` with the logs (base 2) of the sums of weights, ``lse`` float32 ``[B, Hq]``.

        They are left there. Or, with ``prior``, something else has attended to the FULL windows: it
        has left its results in ``out`` and its logs in ``lse``, and of FULL windows only keys are
        read, for the scores. Without ``scores`` a row may have several tokens, each with its own
        length.
        """
        g = self.geometry
        batch, columns = query.shape[0], view.windows.shape[1]
        check_stores(g, full, coded, self._bases.device.type)
        for name, tensor in (("query", query), ("out", out)):
            check_heads(name, tensor, batch, g.num_q_heads, g.head_dim, full.keys.dtype)
        check_view(view, scores)
        check("rows", rows, (torch.int64,), (batch,))
        check("seq_lens", seq_lens, LENGTHS, (batch,))
        if not batch:
            return
        self._grow_scratch(batch, columns)
        sums, stats, lses = self._scratch
        if lse is not None:
            check("lse", lse, (torch.float32,), (batch, g.num_q_heads))
        attend[self._programs,](
            query, full.keys, full.values, coded, self._bases, self._offsets, view.page_table,
            view.full_slot, view.coded_slot, view.windows, view.num_full, view.num_coded, rows,
            seq_lens, sums, stats, lses, scale * LOG2_E, batch, columns, query.stride(0),
            full.keys.stride(0), view.page_table.stride(0), view.windows.stride(0),
            **attend_options(
                self.spec, self.tile, self.max_splits, max(batch, self.reserved[0]), prior
            ),
        )  # fmt: skip
        merge[g.num_q_heads + (SCORE_PROGRAMS if scores is not None else 0), batch](
            out, sums if scores is None else scores, sums, stats, lses,
            stats if lse is None else lse, rows, seq_lens,
            view.num_full, view.num_coded, view.windows, columns, out.stride(0),
            view.windows.stride(0), 0 if scores is None else scores.stride(0),
            **merge_options(
                self.spec, self.tile, self.max_splits, prior, lse is not None and not prior
            ),
        )  # fmt: skip


def scratch_numbers(
    geometry: WindowGeometry, max_splits: int, batch: int, columns: int
) -> tuple[int, int, int]:
    """float32 numbers of the scratch of ``decode``: ``sums``, ``stats`` and ``lses``."""
    partials = batch * 2 * max_splits * geometry.num_q_heads
    units = columns * geometry.window // geometry.code_group
    return partials * geometry.head_dim, partials * 2, batch * geometry.num_q_heads * units


def attend_options(
    spec: Spec, tile: int, max_splits: int, batch: int, prior: bool = False
) -> dict[str, Any]:
    """Constants of ``attend``, and how it is compiled: for any batch up to this one."""
    return {
        "spec": spec,
        "BATCH": _bucket(batch),
        "HEADS": 8 if spec.geometry.group_size <= 8 else 16,
        "TILE": tile,
        "MAX_SPLITS": max_splits,
        "PRIOR": prior,
        "num_warps": 2,
        "num_stages": 1,
    }


def _bucket(batch: int) -> int:
    """The least power of 4 from 16 on that is not below: few, since each is compiled apart."""
    bucket = 16
    while bucket < batch:
        bucket *= 4
    return bucket


def merge_options(
    spec: Spec, tile: int, max_splits: int, prior: bool = False, wants_lse: bool = False
) -> dict[str, Any]:
    """Constants of ``merge``, and how it is compiled."""
    return {
        "spec": spec,
        "HEADS": triton.next_power_of_2(spec.geometry.num_q_heads),
        "TILE": tile,
        "MAX_SPLITS": max_splits,
        "BLOCK": 64,
        "PRIOR": prior,
        "WANTS_LSE": wants_lse,
        "num_warps": 4,
    }


def _allocate(
    sizes: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums, stats, lses = (torch.empty(n, dtype=torch.float32, device=device) for n in sizes)
    return sums, stats, lses
