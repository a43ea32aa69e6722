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

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from qevict_kernels.numba.ir import F32, I8, I64, Emitter, vector_function
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
        parts = load_split(e, spec, lambda d, row=row: e.load(plain, row + d, lanes))
        for d, x in parts.items():
            e.store(x, split, row + d)


@vector_function
def _full_logits(
    e: Emitter, spec: Spec, keys: ir.Value, query: ir.Value, logits: ir.Value, ahead: ir.Value
) -> None:
    e.prefetch(ahead, spec.window * spec.head_dim * 2)
    group = min(spec.window, 8)
    with e.loop(spec.window // group) as index:
        start = e.b.mul(index, I64(group))
        keys = e.offset(keys, e.b.mul(start, I64(2 * spec.head_dim)))

        def key(token: int) -> list[tuple[int, ir.Value]]:
            return [
                (d, e.load_half(keys, token * spec.head_dim + d, spec.half))
                for d in range(0, spec.head_dim, e.lanes)
            ]

        _dot_tokens(e, spec, key, query, e.offset(logits, e.b.mul(start, I64(4))), group)


@vector_function
def _coded_logits(
    e: Emitter,
    spec: Spec,
    record: ir.Value,
    query: ir.Value,
    base: ir.Value,
    table: ir.Value,
    logits: ir.Value,
    ahead: ir.Value,
) -> None:
    e.prefetch(ahead, spec.record.payload_bytes)
    lanes, half = rotary_lanes(e, spec), spec.rotary_dim // 2
    bits = spec.geometry.key_bits
    rotated = _rotate_query(e, spec, query, base)
    scales, zeros = _key_params(e, spec, record)
    group = spec.geometry.code_group
    with e.loop(spec.window // group) as index:
        start = e.b.mul(index, I64(group))
        codes = e.offset(record, spec.record.key_codes)
        codes = e.offset(codes, e.b.mul(index, I64(spec.head_dim * group * bits // 8)))
        cos = e.offset(table, e.b.mul(start, I64(4 * spec.rotary_dim)))
        words = load_split(e, spec, lambda d: e.load_words(codes, d, group * bits, lanes))

        def number(d: int, token: int) -> ir.Value:
            code = e.code_as_float(words[d], token, bits)
            return e.fma(code, scales[d], zeros[d])

        def key(token: int) -> list[tuple[int, ir.Value]]:
            parts = []
            for d in first_halves(e, spec):
                first, second = number(d, token), number(half + d, token)
                c = e.load(cos, token * spec.rotary_dim + d, lanes)
                s = e.load(cos, token * spec.rotary_dim + half + d, lanes)
                parts += [
                    (d, e.fnma(second, s, e.fmul(first, c))),
                    (half + d, e.fma(first, s, e.fmul(second, c))),
                ]
            return parts + [(d, number(d, token)) for d in unrotated(e, spec)]

        _dot_tokens(e, spec, key, rotated, e.offset(logits, e.b.mul(start, I64(4))), group)


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


def _key_params(e: Emitter, spec: Spec, record: ir.Value) -> tuple[Parts, Parts]:
    """Scale and zero of the key channels, for codes from ``code_as_float``."""
    lanes, levels = rotary_lanes(e, spec), float(1 << spec.geometry.key_bits)
    load_scale, load_zero = load_params(e, spec, record, "keys")
    scales = load_split(e, spec, lambda d: load_scale(d, lanes))
    zeros = load_split(e, spec, lambda d: load_zero(d, lanes))
    for d in scales:
        scales[d] = e.fmul(scales[d], e.splat(levels, lanes))
        zeros[d] = e.fsub(zeros[d], scales[d])
    return scales, zeros


def _dot_tokens(
    e: Emitter, spec: Spec, key: Any, query: ir.Value, logits: ir.Value, num_tokens: int
) -> None:
    """Logits of ``num_tokens`` tokens for every head; ``key(token)`` gives (offset, vector)s."""
    heads = range(spec.group_size)
    sums: dict[tuple[int, int], ir.Value] = {}
    for token in range(num_tokens):
        for d, vector in key(token):
            for g in heads:
                q = e.load(query, g * spec.head_dim + d, vector.type.count)
                sums[g, token] = e.fma(vector, q, sums.get((g, token)))
    lanes = next(iter(sums.values())).type.count
    step = min(num_tokens, lanes)
    for g in heads:
        for token in range(0, num_tokens, step):
            parts = [sums[g, token + i] for i in range(step)]
            e.store(e.sums(parts), logits, g * BLOCK * spec.window + token)


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
    e: Emitter, spec: Spec, addresses: ir.Value, probs: ir.Value, partial: ir.Value, num_windows: ir.Value
) -> None:
    heads, stride = range(spec.group_size), partial_floats(spec.head_dim)
    for chunk in _channel_chunks(e, spec):
        sums = {(g, d): e.variable(e.splat(0.0)) for g in heads for d in chunk}
        with e.loop(num_windows) as w:
            values = e.pointer(e.load(addresses, w, 1, I64))
            with e.loop(spec.window) as i:
                token = e.b.add(e.b.mul(w, I64(spec.window)), i)
                start = e.b.mul(i, I64(spec.head_dim))
                vectors = {
                    d: e.load_half(values, e.b.add(start, I64(d)), spec.half) for d in chunk
                }
                for g in heads:
                    p = e.broadcast(probs, e.b.add(token, I64(g * BLOCK * spec.window)))
                    for d in chunk:
                        e.set(sums[g, d], e.fma(vectors[d], p, e.get(sums[g, d])))
        for g in heads:
            for d in chunk:
                e.store(e.get(sums[g, d]), partial, g * stride + d)


@vector_function
def _coded_values(
    e: Emitter, spec: Spec, addresses: ir.Value, probs: ir.Value, partial: ir.Value, num_windows: ir.Value
) -> None:
    heads, stride = range(spec.group_size), partial_floats(spec.head_dim)
    bits, group = spec.geometry.value_bits, spec.geometry.code_group
    levels = float(1 << bits)
    biases = _scale_probs(e, spec, addresses, probs, num_windows, levels)
    for chunk in _channel_chunks(e, spec):
        sums = {(g, d): e.variable(e.splat(0.0)) for g in heads for d in chunk}
        with e.loop(num_windows) as w:
            record = e.pointer(e.load(addresses, w, 1, I64))
            with e.loop(spec.window // group) as index:
                codes = e.offset(record, spec.record.value_codes)
                codes = e.offset(codes, e.b.mul(index, I64(spec.head_dim * group * bits // 8)))
                words = {d: e.load_words(codes, d, group * bits) for d in chunk}
                token = e.b.add(e.b.mul(w, I64(spec.window)), e.b.mul(index, I64(group)))
                for i in range(group):
                    numbers = {d: e.code_as_float(words[d], i, bits) for d in chunk}
                    for g in heads:
                        at = e.b.add(token, I64(g * BLOCK * spec.window + i))
                        p = e.broadcast(probs, at)
                        for d in chunk:
                            e.set(sums[g, d], e.fma(numbers[d], p, e.get(sums[g, d])))
        for g in heads:
            for d in chunk:
                total = e.fadd(e.get(sums[g, d]), e.splat(biases[g]))
                e.store(total, partial, g * stride + d)


def _scale_probs(
    e: Emitter, spec: Spec, addresses: ir.Value, probs: ir.Value, num_windows: ir.Value, levels: float
) -> list[ir.Value]:
    """Fold the values' scales into the probabilities; returns what the zeros add, per head."""
    width = min(spec.window, e.lanes)
    heads = range(spec.group_size)
    biases = [e.variable(e.splat(0.0, width)) for _ in heads]
    with e.loop(num_windows) as w:
        record = e.pointer(e.load(addresses, w, 1, I64))
        scale, zero = load_params(e, spec, record, "values")
        for i in range(0, spec.window, width):
            times = e.fmul(scale(i, width), e.splat(levels, width))
            plus = e.fsub(zero(i, width), times)
            for g in heads:
                at = e.b.add(e.b.mul(w, I64(spec.window)), I64(g * BLOCK * spec.window + i))
                p = e.load(probs, at, width)
                e.set(biases[g], e.fma(p, plus, e.get(biases[g])))
                e.store(e.fmul(p, times), probs, at)
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
        weight = e.exp2(
            e.splat(e.fsub(e.load(partial, e.b.add(at, I64(dim + BLOCK)), 1), top))
        )
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
def full_logits(ctx: Any, spec: Any, keys: Any, query: Any, logits: Any, ahead: Any) -> Any:
    """Logits of a FULL window ``[W, D]``; prefetches the keys at ``ahead``."""
    return _full_logits(spec, keys, query, logits, ahead)


@intrinsic  # type: ignore[untyped-decorator]
def coded_logits(
    ctx: Any, spec: Any, record: Any, query: Any, base: Any, table: Any, logits: Any, ahead: Any
) -> Any:
    """Logits of a coded window; ``base``: its row of the rotary table; ``table``: offsets."""
    return _coded_logits(spec, record, query, base, table, logits, ahead)


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
