"""Inner blocks of decode attention: what happens to up to ``BLOCK`` windows of one KV head.

A block is the unit of work and of rounding: its windows share one softmax, and its result
does not depend on anything outside it. Steps, each one emitted function:

1. ``load_query``: the group's queries, scaled, as float32;
2. ``coded_logits`` / ``full_logits``, per window: logits of its tokens for each head;
3. ``softmax``: probabilities relative to the block's maximum, and their sum per window;
4. ``coded_values`` / ``full_values``: the weighted sum over all windows of the block.

Scratch of a block: ``logits`` float32 ``[group_size, BLOCK, W]`` (probabilities after step 3) and
a *partial*, float32 ``[group_size, partial_floats]``: the weighted sum ``[D]``, the window sums
``[BLOCK]``, the maximum (log2) and the sum of everything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as bind
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from qevict_kernels.numba.ir import F32, I64, Emitter, vector_function
from qevict_kernels.numba.spec import Spec
from qevict_kernels.numba.windows import (
    Parts,
    first_halves,
    load_params,
    load_split,
    rotary_lanes,
    unrotated,
)

__all__ = [
    "BLOCK",
    "block_scores",
    "coded_logits",
    "coded_values",
    "full_logits",
    "full_values",
    "load_query",
    "merge_partials",
    "partial_floats",
    "prefetch_coded",
    "prefetch_full",
    "softmax",
]

BLOCK = 32
"""Windows of a block."""

LOWEST = -1e30
"""A finite stand-in for the maximum of a block in which everything is masked."""


def partial_floats(head_dim: int) -> int:
    """float32 numbers of one head's partial result (a multiple of a cache line)."""
    return head_dim + BLOCK + 16


# -- emitted functions --------------------------------------------------------------------


@vector_function
def _load_query(
    e: Emitter, spec: Spec, query: ir.Value, factor: ir.Value, plain: ir.Value, split: ir.Value
) -> None:
    times = e.broadcast(factor)
    for g in range(spec.group_size):
        row = g * spec.head_dim
        for d in range(0, spec.head_dim, e.lanes):
            x = e.load_half(query, row + d, spec.half)
            e.store(e.fmul(x, times), plain, row + d)
        lanes = rotary_lanes(e, spec)
        here = e.offset(plain, 4 * row)
        parts = load_split(e, spec, bind(e.load, here, lanes=lanes))
        for d, x in parts.items():
            e.store(x, split, row + d)


@vector_function
def _prefetch_full(e: Emitter, spec: Spec, keys: ir.Value) -> None:
    e.prefetch(keys, 2 * spec.window * spec.head_dim, locality=2)


@vector_function
def _prefetch_coded(e: Emitter, spec: Spec, record: ir.Value, base: ir.Value) -> None:
    e.prefetch(record, spec.record.payload_bytes, locality=2)
    e.prefetch(base, 4 * spec.rotary_dim, locality=2)


@vector_function
def _full_logits(
    e: Emitter,
    spec: Spec,
    keys: ir.Value,
    query: ir.Value,
    logits: ir.Value,
) -> None:
    dim, group = spec.head_dim, min(spec.window, 8)
    with e.loop(spec.window // group) as index:
        start = e.b.mul(index, I64(group))
        place = e.offset(keys, e.b.mul(start, I64(2 * dim)))

        def accumulate(tokens: range, add: Add) -> None:
            with e.loop(dim // e.lanes, unroll=False) as j:
                d = e.b.mul(j, I64(e.lanes))
                add(d, [e.load_half(place, e.plus(d, t * dim), spec.half) for t in tokens])

        here = e.offset(logits, e.b.mul(start, I64(4)))
        _dot_tokens(e, spec, query, here, group, (1, e.lanes), accumulate)


@vector_function
def _coded_logits(
    e: Emitter,
    spec: Spec,
    record: ir.Value,
    query: ir.Value,
    base: ir.Value,
    offsets: ir.Value,
    logits: ir.Value,
) -> None:
    half, dim = spec.rotary_dim // 2, spec.head_dim
    bits, group = spec.geometry.key_bits, spec.geometry.code_group
    tokens, channels = spec.key_tile
    rotated = _rotate_query(e, spec, query, base)
    scales, zeros = _key_params(e, spec, record)
    with e.loop(spec.window // group) as index:
        start = e.b.mul(index, I64(group))
        codes = e.offset(record, spec.record.key_codes)
        codes = e.offset(codes, e.b.mul(index, I64(dim * group * bits // 8)))
        table = e.offset(offsets, e.b.mul(start, I64(4 * 3 * half)))

        def words(d: ir.Value) -> ir.Value:
            return e.load_words(codes, d, group * bits, channels)

        def numbers(word: ir.Value, rows: range, d: ir.Value) -> list[ir.Value]:
            word, scale, zero = (
                e.repeat(x, tokens)
                for x in (word, e.load(scales, d, channels), e.load(zeros, d, channels))
            )
            places = [[tokens * r + k // channels for k in range(tokens * channels)] for r in rows]
            return [e.fma(e.code_as_number(word, at, bits), scale, zero) for at in places]

        def rotate(x: ir.Value, y: ir.Value, r: int, d: ir.Value) -> tuple[ir.Value, ir.Value]:
            # Three products instead of four: the fused units are what limits this loop.
            place = e.b.mul(e.plus(d, r * half), I64(3 * tokens))
            c, c_plus_s, s_minus_c = (
                e.load(table, e.plus(place, i * tokens * channels), tokens * channels)
                for i in range(3)
            )
            both = e.fmul(e.fadd(x, y), c)
            return e.fnma(y, c_plus_s, both), e.fma(x, s_minus_c, both)

        def accumulate(rows: range, add: Add) -> None:
            with e.loop(half // channels, unroll=False) as j:
                d = e.b.mul(j, I64(channels))
                partner = e.plus(d, half)
                if spec.is_neox:
                    first, second = words(d), words(partner)
                else:
                    twice = e.plus(d, d)
                    first, second = e.split_pairs(words(twice), words(e.plus(twice, channels)))
                pairs = zip(numbers(first, rows, d), numbers(second, rows, partner), strict=True)
                turned = [rotate(x, y, r, d) for r, (x, y) in zip(rows, pairs, strict=True)]
                add(d, [x for x, _ in turned])
                add(partner, [y for _, y in turned])
            with e.loop((dim - spec.rotary_dim) // channels, unroll=False) as j:
                d = e.plus(e.b.mul(j, I64(channels)), spec.rotary_dim)
                add(d, numbers(words(d), rows, d))

        here = e.offset(logits, e.b.mul(start, I64(4)))
        _dot_tokens(e, spec, rotated, here, group, spec.key_tile, accumulate)


def _rotate_query(e: Emitter, spec: Spec, query: ir.Value, base: ir.Value) -> ir.Value:
    """The group's queries turned back by the window's base position, on the stack."""
    lanes, half = rotary_lanes(e, spec), spec.rotary_dim // 2
    rotated = e.scratch(spec.group_size * spec.head_dim)
    for d in first_halves(e, spec):
        cos, sin = e.load(base, d, lanes), e.load(base, half + d, lanes)
        for row in range(0, spec.group_size * spec.head_dim, spec.head_dim):
            first, second = e.load(query, row + d, lanes), e.load(query, row + half + d, lanes)
            e.store(e.fma(second, sin, e.fmul(first, cos)), rotated, row + d)
            e.store(e.fnma(first, sin, e.fmul(second, cos)), rotated, row + half + d)
    for d in unrotated(e, spec):
        for row in range(0, spec.group_size * spec.head_dim, spec.head_dim):
            e.store(e.load(query, row + d, lanes), rotated, row + d)
    return rotated


def _key_params(e: Emitter, spec: Spec, record: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Scales and zeros of the key channels, in split order, on the stack."""
    lanes = rotary_lanes(e, spec)

    def stored(load: Callable[[int, int], ir.Value]) -> ir.Value:
        place = e.scratch(spec.head_dim)
        for d, x in load_split(e, spec, lambda d: load(d, lanes)).items():
            e.store(x, place, d)
        return place

    load_scale, load_zero = load_params(e, spec, record, "keys")
    return stored(load_scale), stored(load_zero)


Add = Callable[[ir.Value, list[ir.Value]], None]
"""Takes a channel offset and one vector of keys for each of some rows."""


def _dot_tokens(
    e: Emitter,
    spec: Spec,
    query: ir.Value,
    logits: ir.Value,
    num_tokens: int,
    tile: tuple[int, int],
    accumulate: Callable[[range, Add], None],
) -> None:
    """Logits of ``num_tokens`` tokens for every head.

    ``tile`` is (tokens, channels) of a vector of keys; row ``r`` is made of the ``r``-th so many
    tokens. ``accumulate(rows, add)`` hands all vectors of the keys of ``rows`` to ``add``. As many
    rows are taken at a time as accumulators fit the registers; a query vector is loaded once
    for them.
    """
    heads, (tokens, channels) = range(spec.group_size), tile
    num_rows = num_tokens // tokens
    step = min(num_rows, channels)  # rows whose sums fit one vector
    at_once = min(_floor_power_of_two(max(e.lanes // spec.group_size, 1)), step)
    for start in range(0, num_rows, step):
        sums_of_rows: list[list[ir.Value]] = []
        for first in range(start, start + step, at_once):
            rows = range(first, first + at_once)
            sums = {
                (r, g): e.variable(e.splat(0.0, tokens * channels)) for r in rows for g in heads
            }

            def add(
                offset: ir.Value, vectors: list[ir.Value], rows: range = rows, sums: Any = sums
            ) -> None:
                for g in heads:
                    q = e.load(query, e.plus(offset, g * spec.head_dim), channels)
                    q = e.repeat(q, tokens)
                    for r, vector in zip(rows, vectors, strict=True):
                        e.set(sums[r, g], e.fma(vector, q, e.get(sums[r, g])))

            accumulate(rows, add)
            parts = [[e.get(sums[r, g]) for g in heads] for r in rows]
            sums_of_rows.append(_pair_up(e, parts, 1))
        for g, row in enumerate(_pair_up(e, sums_of_rows, at_once)):
            place = g * BLOCK * spec.window + start * tokens
            e.store(e.sum_rest(row, step, tokens), logits, place)


def _pair_up(e: Emitter, rows: list[list[ir.Value]], period: int) -> list[ir.Value]:
    """Per head, the rows of ``period`` unfinished sums in one (see ``Emitter.sums``)."""
    while len(rows) > 1:
        rows = [
            [e.sum_pair(a, b, period) for a, b in zip(left, right, strict=True)]
            for left, right in zip(rows[::2], rows[1::2], strict=True)
        ]
        period *= 2
    return rows[0]


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)


@vector_function
def _softmax(e: Emitter, spec: Spec, logits: ir.Value, partial: ir.Value) -> None:
    floats = BLOCK * spec.window
    stride, dim = partial_floats(spec.head_dim), spec.head_dim
    width = min(spec.window, e.lanes)  # of a vector that belongs to one window
    with e.loop(spec.group_size) as g:
        row = e.offset(logits, e.b.mul(g, I64(4 * floats)))
        target = e.offset(partial, e.b.mul(g, I64(4 * stride)))
        highest = e.variable(e.splat(LOWEST))
        with e.loop(floats // e.lanes) as i:
            x = e.load(row, e.b.mul(i, I64(e.lanes)))
            e.set(highest, e.maximum(x, e.get(highest)))
        top = e.fold(e.get(highest), e.maximum)
        with e.loop(floats // e.lanes) as i:
            at = e.b.mul(i, I64(e.lanes))
            e.store(e.exp2(e.fsub(e.load(row, at), e.splat(top))), row, at)
        total = e.variable(F32(0.0))
        with e.loop(BLOCK // width) as i:  # `width` windows at a time, one sum each
            at = e.b.mul(i, I64(width * spec.window))
            sums = []
            for w in range(width):
                parts = [
                    e.load(row, e.b.add(at, I64(w * spec.window + k)), width)
                    for k in range(0, spec.window, width)
                ]
                while len(parts) > 1:
                    parts = [e.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                sums += parts
            masses = e.sums(sums)
            e.store(masses, target, e.b.add(I64(dim), e.b.mul(i, I64(width))))
            e.set(total, e.fadd(e.get(total), e.fold(masses, e.fadd)))
        e.store(top, target, dim + BLOCK)
        e.store(e.get(total), target, dim + BLOCK + 1)


def _channel_chunks(e: Emitter, spec: Spec) -> list[range]:
    """Offsets of channel vectors, in chunks whose accumulators (all heads) fit the registers."""
    offsets = range(0, spec.head_dim, e.lanes)
    size = max(e.lanes // spec.group_size, 1)
    return [offsets[i : i + size] for i in range(0, len(offsets), size)]


@vector_function
def _full_values(
    e: Emitter,
    spec: Spec,
    addresses: ir.Value,
    probs: ir.Value,
    partial: ir.Value,
    num_windows: ir.Value,
) -> None:
    heads, stride = range(spec.group_size), partial_floats(spec.head_dim)
    for chunk in _channel_chunks(e, spec):
        sums = {(g, d): e.variable(e.splat(0.0)) for g in heads for d in chunk}
        with e.loop(num_windows) as w:
            values = e.pointer(e.load(addresses, w, 1, I64))
            with e.loop(spec.window) as i:
                token = e.b.add(e.b.mul(w, I64(spec.window)), i)
                start = e.b.mul(i, I64(spec.head_dim))
                vectors = {d: e.load_half(values, e.b.add(start, I64(d)), spec.half) for d in chunk}
                for g in heads:
                    p = e.broadcast(probs, e.b.add(token, I64(g * BLOCK * spec.window)))
                    for d in chunk:
                        e.set(sums[g, d], e.fma(vectors[d], p, e.get(sums[g, d])))
        for g in heads:
            for d in chunk:
                e.store(e.get(sums[g, d]), partial, g * stride + d)


@vector_function
def _coded_values(
    e: Emitter,
    spec: Spec,
    addresses: ir.Value,
    probs: ir.Value,
    partial: ir.Value,
    num_windows: ir.Value,
) -> None:
    heads, stride = range(spec.group_size), partial_floats(spec.head_dim)
    bits, group = spec.geometry.value_bits, spec.geometry.code_group
    biases = _scale_probs(e, spec, addresses, probs, num_windows)
    add_tokens = _add_by_table if e.lanes == 16 and bits == 2 else _add_by_product
    for chunk in _channel_chunks(e, spec):
        sums = {(g, d): e.variable(e.splat(0.0)) for g in heads for d in chunk}
        with e.loop(num_windows) as w:
            record = e.pointer(e.load(addresses, w, 1, I64))
            with e.loop(spec.window // group) as index:
                codes = e.offset(record, spec.record.value_codes)
                codes = e.offset(codes, e.b.mul(index, I64(spec.head_dim * group * bits // 8)))
                words = {d: e.load_words(codes, d, group * bits) for d in chunk}
                token = e.plus(e.b.mul(w, I64(spec.window)), e.b.mul(index, I64(group)))
                add_tokens(e, spec, words, e.offset(probs, e.b.mul(token, I64(4))), sums)
        for g in heads:
            for d in chunk:
                total = e.fadd(e.get(sums[g, d]), e.splat(biases[g]))
                e.store(total, partial, g * stride + d)


def _add_by_table(
    e: Emitter, spec: Spec, words: Parts, probs: ir.Value, sums: dict[tuple[int, int], ir.Value]
) -> None:
    """Add a group of tokens: four bits of a code word select one of 16 sums of scaled codes.

    Two tokens of 2 bits take one lookup and one addition for each head and vector, on units
    that products leave idle.
    """
    bits = spec.geometry.value_bits
    at_once = 4 // bits
    for first in range(0, spec.geometry.code_group, at_once):
        index = {d: e.lshr(word, first * bits) for d, word in words.items()}
        for g in range(spec.group_size):
            table: ir.Value | None = None
            for i in range(at_once):
                codes = e.constant([float(n >> (i * bits) & ((1 << bits) - 1)) for n in range(16)])
                p = e.broadcast(probs, g * BLOCK * spec.window + first + i)
                table = e.fma(codes, p, table)
            for d in words:
                e.set(sums[g, d], e.fadd(e.get(sums[g, d]), e.lookup16(table, index[d])))


def _add_by_product(
    e: Emitter, spec: Spec, words: Parts, probs: ir.Value, sums: dict[tuple[int, int], ir.Value]
) -> None:
    """Add a group of tokens, one product a token and head; a code is unpacked for all heads."""
    bits = spec.geometry.value_bits
    for i in range(spec.geometry.code_group):
        codes = {d: e.code_as_number(word, i, bits) for d, word in words.items()}
        for g in range(spec.group_size):
            p = e.broadcast(probs, g * BLOCK * spec.window + i)
            for d in words:
                e.set(sums[g, d], e.fma(codes[d], p, e.get(sums[g, d])))


def _scale_probs(
    e: Emitter, spec: Spec, addresses: ir.Value, probs: ir.Value, num_windows: ir.Value
) -> list[ir.Value]:
    """Fold the values' scales into the probabilities; returns what the zeros add, per head."""
    width = min(spec.window, e.lanes)
    heads = range(spec.group_size)
    biases = [e.variable(e.splat(0.0, width)) for _ in heads]
    with e.loop(num_windows) as w:
        record = e.pointer(e.load(addresses, w, 1, I64))
        load_scale, load_zero = load_params(e, spec, record, "values")
        for i in range(0, spec.window, width):
            scale, zero = load_scale(i, width), load_zero(i, width)
            for g in heads:
                at = e.plus(e.b.mul(w, I64(spec.window)), g * BLOCK * spec.window + i)
                p = e.load(probs, at, width)
                e.set(biases[g], e.fma(p, zero, e.get(biases[g])))
                e.store(e.fmul(p, scale), probs, at)
    return [e.fold(e.get(bias), e.fadd) for bias in biases]


@vector_function
def _merge_partials(
    e: Emitter, spec: Spec, partial: ir.Value, num_blocks: ir.Value, out: ir.Value, total: ir.Value
) -> None:
    """One head's partials (a row of all heads apart) into its output, in order."""
    dim = spec.head_dim
    stride = I64(spec.num_q_heads * partial_floats(dim))
    highest = e.variable(F32(LOWEST))
    with e.loop(num_blocks) as i:
        x = e.load(partial, e.b.add(e.b.mul(i, stride), I64(dim + BLOCK)), 1)
        e.set(highest, e.maximum(x, e.get(highest)))
    top = e.get(highest)
    sums = {d: e.variable(e.splat(0.0)) for d in range(0, dim, e.lanes)}
    mass = e.variable(F32(0.0))
    with e.loop(num_blocks) as i:
        at = e.b.mul(i, stride)
        weight = e.exp2(e.splat(e.fsub(e.load(partial, e.b.add(at, I64(dim + BLOCK)), 1), top)))
        part = e.load(partial, e.b.add(at, I64(dim + BLOCK + 1)), 1)
        e.set(mass, e.fma(part, e.element(weight, 0), e.get(mass)))
        for d, variable in sums.items():
            x = e.load(partial, e.b.add(at, I64(d)))
            e.set(variable, e.fma(x, weight, e.get(variable)))
    empty = e.b.fcmp_ordered("==", e.get(mass), F32(0.0))
    inverse = e.b.select(empty, F32(0.0), e.b.fdiv(F32(1.0), e.get(mass)))
    for d, variable in sums.items():
        e.store_half(e.fmul(e.get(variable), e.splat(inverse)), out, d, spec.half)
    e.store(top, total, 0)
    e.store(e.fmul(inverse, F32(1.0 / spec.num_q_heads)), total, 1)


@vector_function
def _block_scores(
    e: Emitter, spec: Spec, partial: ir.Value, totals: ir.Value, masses: ir.Value
) -> None:
    """Mass of each window of a block, averaged over all query heads."""
    dim, stride = spec.head_dim, partial_floats(spec.head_dim)
    offsets = range(0, BLOCK, e.lanes)
    sums = {d: e.variable(e.splat(0.0)) for d in offsets}
    with e.loop(spec.num_q_heads) as h:
        head = e.offset(partial, e.b.mul(h, I64(4 * stride)))
        total = e.offset(totals, e.b.mul(h, I64(8)))
        top = e.splat(e.fsub(e.load(head, dim + BLOCK, 1), e.load(total, 0, 1)))
        weight = e.fmul(e.exp2(top), e.broadcast(total, 1))
        for d in offsets:
            e.set(sums[d], e.fma(e.load(head, dim + d), weight, e.get(sums[d])))
    for d in offsets:
        e.store(e.get(sums[d]), masses, d)


# -- what jitted code calls ---------------------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def load_query(ctx: Any, spec: Any, query: Any, factor: Any, plain: Any, split: Any) -> Any:
    """Queries of a group ``[G, D]`` times ``*factor`` as float32, in memory and in split order."""
    return _load_query(spec, query, factor, plain, split)


@intrinsic  # type: ignore[untyped-decorator]
def full_logits(ctx: Any, spec: Any, keys: Any, query: Any, logits: Any) -> Any:
    """Logits of a FULL window ``[W, D]``."""
    return _full_logits(spec, keys, query, logits)


@intrinsic  # type: ignore[untyped-decorator]
def coded_logits(
    ctx: Any, spec: Any, record: Any, query: Any, base: Any, offsets: Any, logits: Any
) -> Any:
    """Logits of a coded window; ``base`` is its row of the rotary table, ``offsets`` holds cos,
    cos + sin and sin - cos of the positions within a window, in vectors of ``spec.key_tile``."""
    return _coded_logits(spec, record, query, base, offsets, logits)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_full(ctx: Any, spec: Any, keys: Any) -> Any:
    """Ask for the keys, or the values, of a FULL window."""
    return _prefetch_full(spec, keys)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_coded(ctx: Any, spec: Any, record: Any, base: Any) -> Any:
    """Ask for a record and its row of the rotary table."""
    return _prefetch_coded(spec, record, base)


@intrinsic  # type: ignore[untyped-decorator]
def softmax(ctx: Any, spec: Any, logits: Any, partial: Any) -> Any:
    """Logits of a whole block to probabilities in place; sums and maximum to the partial."""
    return _softmax(spec, logits, partial)


@intrinsic  # type: ignore[untyped-decorator]
def full_values(ctx: Any, spec: Any, addresses: Any, probs: Any, partial: Any, num: Any) -> Any:
    """Weighted sum of ``num`` FULL windows ``[W, D]`` at ``addresses`` (int64)."""
    return _full_values(spec, addresses, probs, partial, num)


@intrinsic  # type: ignore[untyped-decorator]
def coded_values(ctx: Any, spec: Any, addresses: Any, probs: Any, partial: Any, num: Any) -> Any:
    """Weighted sum of ``num`` coded windows at ``addresses``; uses up ``probs``."""
    return _coded_values(spec, addresses, probs, partial, num)


@intrinsic  # type: ignore[untyped-decorator]
def merge_partials(ctx: Any, spec: Any, partial: Any, num_blocks: Any, out: Any, total: Any) -> Any:
    """Output of one head, and (maximum, 1 / (sum * heads)) to ``total``."""
    return _merge_partials(spec, partial, num_blocks, out, total)


@intrinsic  # type: ignore[untyped-decorator]
def block_scores(ctx: Any, spec: Any, partial: Any, totals: Any, masses: Any) -> Any:
    """Mean mass of the ``BLOCK`` windows of a block, all heads' partials and totals given."""
    return _block_scores(spec, partial, totals, masses)
