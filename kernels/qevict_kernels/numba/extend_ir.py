"""Emitted code of ``extend``: what happens to one block of keys and one panel of query rows.

Lanes are query rows. A *panel* is ``PANEL_VECTORS`` vectors of rows, and every array over
rows has a panel as its last, contiguous dimension (written ``P`` below). A lane never meets
its neighbours, so a row's arithmetic is the same in whatever tile it stands, and maximum and
sum need no step across lanes.

Products come in float32 and in bfloat16 *pairs*: two neighbours of the summed dimension
share a 32-bit lane, and one ``dpbf16ps`` multiplies both and adds to float32 without rounding
the products. FULL windows of a bfloat16 model go that way where the CPU has the instruction
(``has_pairs``), all else is float32.

All functions are called from jitted code as ``f(spec, ...)``; an argument is an address, or a
number if its name begins with ``num_``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from qevict_kernels.numba.ir import F16, F32, I16, I32, I64, Emitter, vector_function
from qevict_kernels.numba.quantize import decode_window
from qevict_kernels.numba.spec import Spec

__all__ = [
    "NO_SCORE",
    "PANEL_VECTORS",
    "add_values",
    "add_values_pairs",
    "divide",
    "has_pairs",
    "key_scores",
    "key_scores_pairs",
    "normalise",
    "row_block",
    "softmax",
    "softmax_pairs",
    "stage_coded",
    "stage_full",
    "widen_query",
]

PANEL_VECTORS = 3

NO_SCORE = -1e30
"""Running maximum of a row that has seen no key; finite, so that differences are."""

# Minimax polynomial of 2**x on [-1/2, 1/2] that is 1 at 0, relative error 9e-8.
_EXP2 = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
# 1.5 * 2**23: adding it leaves the nearest integer in the low bits of the float.
_ROUNDER = 12582912.0


def has_pairs(spec: Spec) -> bool:
    """Whether FULL windows are multiplied as bfloat16 pairs."""
    return spec.half == "bf16" and spec.lanes == 16 and _target_has("avx512bf16")


def row_block(lanes: int) -> int:
    """Rows of a product that are held in registers: 24 accumulators of 32, or 12 of 16."""
    return 8 if lanes == 16 else 4


@cache
def _target_has(feature: str) -> bool:
    """Whether the CPU that numba compiles for has a feature."""
    return f"+{feature}" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def _callable(build: Callable[..., None]) -> Any:
    """``vector_function`` as an intrinsic of the same arguments."""
    declare = vector_function(build)
    names = ["typing_context", "spec", *list(inspect.signature(build).parameters)[2:]]

    def call(typing_context: Any, *arguments: Any) -> Any:
        return declare(*arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(call)


def _in_both_forms(build: Callable[..., None]) -> tuple[Any, Any]:
    """``build(pairs, emitter, spec, ...)`` in float32 and in pairs."""
    functions = []
    for pairs in (False, True):
        variant = partial(build, pairs)
        variant.__name__ = f"{build.__name__}_{pairs}"  # type: ignore[attr-defined]
        functions.append(_callable(variant))
    return functions[0], functions[1]


# -- idioms -----------------------------------------------------------------------------------


def _exp2(e: Emitter, x: ir.Value) -> ir.Value:
    """2**x: 1 exactly at 0, below 2**-125 under -126, NaN for NaN.

    Half the cost of ``Emitter.exp2``, which is 0 at -inf.
    """
    x = e.maximum(e.splat(-126.0), x)
    shifted = e.fadd(x, e.splat(_ROUNDER))
    fraction = e.fsub(x, e.fsub(shifted, e.splat(_ROUNDER)))
    y = e.splat(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        y = e.fma(y, fraction, e.splat(coefficient))
    return e.as_float(e.b.add(e.as_int(y), e.shl(e.as_int(shifted), 23)))


def _pack(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Pairs of bfloat16 of two float32 vectors of numbers >= 0, rounded to nearest."""
    half = e.splat_int(0x8000)
    low = e.lshr(e.b.add(e.as_int(even), half), 16)
    high = e.b.and_(e.b.add(e.as_int(odd), half), e.splat_int(0xFFFF0000))
    return e.b.or_(low, high)


class _BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__


def _pair_fma(e: Emitter, spec: Spec, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """c + a.odd * b.odd + a.even * b.even in each 32-bit lane."""
    if not has_pairs(spec):
        return c  # compiled, never run
    pairs = ir.VectorType(_BFloat(), 2 * e.lanes)
    typ = ir.FunctionType(c.type, [c.type, pairs, pairs])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(e.b.module, typ, name)
    return e.b.call(function, [c, e.b.bitcast(a, pairs), e.b.bitcast(b, pairs)])


def _broadcast(e: Emitter, value: ir.Value) -> ir.Value:
    """A 32-bit scalar in every lane."""
    typ = ir.VectorType(value.type, e.lanes)
    single = e.b.insert_element(typ(ir.Undefined), value, I32(0))
    return e.shuffle(single, None, [0] * e.lanes)


@contextmanager
def _steps(e: Emitter, count: ir.Value, step: int) -> Iterator[ir.Value]:
    """Loop with an index 0, step, 2 * step, ... below ``count``."""
    with cgutils.for_range_slice(e.b, I64(0), count, I64(step), I64) as (index, _):
        yield index


def _times(e: Emitter, index: ir.Value, factor: int) -> ir.Value:
    return e.b.mul(index, I64(factor))


# -- staging ----------------------------------------------------------------------------------


@_callable
def stage_full(
    e: Emitter,
    spec: Spec,
    keys: ir.Value,
    values: ir.Value,
    key_tile: ir.Value,
    value_tile: ir.Value,
) -> None:
    """A FULL window ``[W, D]`` of one head to the tiles of its block.

    With pairs: keys are copied, values become pairs of tokens ``[W / 2, D]``. Else: float32.
    """
    dim, size = spec.head_dim, spec.window * spec.head_dim
    if not has_pairs(spec):
        with _steps(e, I64(size), e.lanes) as i:
            for source, target in ((keys, key_tile), (values, value_tile)):
                e.store(e.load_half(source, i, spec.half), target, i)
        return
    with _steps(e, I64(size // 2), e.lanes) as i:
        e.store(e.load(keys, i, dtype=I32), key_tile, i)
    with e.loop(spec.window // 2) as pair:
        row = _times(e, pair, dim)
        for d in range(0, dim, e.lanes):
            at = e.b.add(_times(e, row, 2), I64(d))
            even = e.zext(e.load(values, at, dtype=I16))
            odd = e.zext(e.load(values, e.b.add(at, I64(dim)), dtype=I16))
            e.store(e.b.or_(even, e.shl(odd, 16)), value_tile, e.b.add(row, I64(d)))


@_callable
def stage_coded(
    e: Emitter,
    spec: Spec,
    record: ir.Value,
    rotary: ir.Value,
    key_tile: ir.Value,
    value_tile: ir.Value,
) -> None:
    """A coded window of one head, decoded to float32 ``[W, D]``; ``rotary``: its first row."""
    decode_window(e, spec, record, rotary, key_tile, value_tile, e.store)


@_callable
def widen_query(e: Emitter, spec: Spec, words: ir.Value, query: ir.Value) -> None:
    """Words of two channels ``[D / 2, P]`` to float32 ``[D, P]``."""
    panel = PANEL_VECTORS * e.lanes
    halves = ir.VectorType(I16, e.lanes)
    with e.loop(spec.head_dim // 2) as i, _steps(e, I64(panel), e.lanes) as lane:
        word = e.load(words, e.b.add(_times(e, i, panel), lane), dtype=I32)
        for part in (0, 1):
            if spec.half == "bf16":
                odd = e.b.and_(word, e.splat_int(0xFFFF0000))
                x = e.as_float(odd if part else e.shl(word, 16))
            else:
                bits = e.b.trunc(e.lshr(word, 16 * part), halves)
                x = e.b.fpext(e.b.bitcast(bits, ir.VectorType(F16, e.lanes)), e.splat(0.0).type)
            at = e.b.add(_times(e, i, 2 * panel), I64(part * panel))
            e.store(x, query, e.b.add(at, lane))


# -- products ---------------------------------------------------------------------------------


def _multiply(
    e: Emitter,
    spec: Spec,
    pairs: bool,
    c: ir.Value,
    a: ir.Value,
    b: ir.Value,
    alpha: ir.Value | None,
    num_m: ir.Value,
    num_k: ir.Value,
    num_vectors: ir.Value,
    strides: tuple[int, int],
) -> None:
    """``c[m, p] = alpha[p] * c[m, p] + sum over k of a[m, k] * b[k, p]`` in the order of k.

    ``c`` is float32 ``[num_m, P]`` (taken as 0 without ``alpha``), ``b`` is ``[num_k, P]`` and
    ``a[m, k]`` lies at element ``m * strides[0] + k * strides[1]``; elements are float32 or
    pairs. Only the first ``num_vectors`` vectors of a panel are computed.
    """
    panel, block = PANEL_VECTORS * e.lanes, row_block(e.lanes)
    element, fma = (I32, partial(_pair_fma, e, spec)) if pairs else (F32, e.fma)
    m_stride, k_stride = strides

    def rows(m: ir.Value, vectors: int) -> None:
        registers = [(i, v) for i in range(block) for v in range(vectors)]
        c_rows = e.offset(c, _times(e, m, 4 * panel))
        a_rows = e.offset(a, _times(e, m, 4 * m_stride))
        sums = {}
        for i, v in registers:
            start = e.splat(0.0)
            if alpha is not None:
                old = e.load(c_rows, i * panel + v * e.lanes)
                start = e.fmul(e.load(alpha, v * e.lanes), old)
            sums[i, v] = e.variable(start)
        with e.loop(num_k) as k:
            row = e.offset(b, _times(e, k, 4 * panel))
            column = e.offset(a_rows, _times(e, k, 4 * k_stride))
            lanes = [e.load(row, v * e.lanes, dtype=element) for v in range(vectors)]
            for i in range(block):
                x = _broadcast(e, e.load(column, i * m_stride, 1, element))
                for v in range(vectors):
                    e.set(sums[i, v], fma(x, lanes[v], e.get(sums[i, v])))
        for i, v in registers:
            e.store(e.get(sums[i, v]), c_rows, i * panel + v * e.lanes)

    for vectors in range(1, PANEL_VECTORS + 1):
        chosen = e.b.icmp_signed("==", num_vectors, I64(vectors))
        with e.b.if_then(chosen), _steps(e, num_m, block) as m:
            rows(m, vectors)


@_in_both_forms
def _key_scores(
    pairs: bool,
    e: Emitter,
    spec: Spec,
    scores: ir.Value,
    keys: ir.Value,
    query: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    """scores ``[num_keys, P]`` = keys ``[num_keys, D]`` x query ``[D, P]`` (pairs: ``[D / 2, P]``).

    ``num_keys`` is a multiple of ``row_block``.
    """
    length = spec.head_dim // 2 if pairs else spec.head_dim
    _multiply(
        e, spec, pairs, scores, keys, query, None, num_keys, I64(length), num_vectors, (length, 1)
    )


@_in_both_forms
def _add_values(
    pairs: bool,
    e: Emitter,
    spec: Spec,
    sums: ir.Value,
    values: ir.Value,
    weights: ir.Value,
    alpha: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    """sums ``[D, P]`` = alpha ``[P]`` * sums + values^T x weights.

    values are ``[num_keys, D]``, weights ``[num_keys, P]``; pairs of tokens: half as many rows.
    """
    dim, length = spec.head_dim, e.b.lshr(num_keys, I64(1)) if pairs else num_keys
    _multiply(e, spec, pairs, sums, values, weights, alpha, I64(dim), length, num_vectors, (1, dim))


# -- softmax ----------------------------------------------------------------------------------


@_in_both_forms
def _softmax(
    pairs: bool,
    e: Emitter,
    spec: Spec,
    scores: ir.Value,
    key_positions: ir.Value,
    positions: ir.Value,
    maximum: ir.Value,
    total: ir.Value,
    alpha: ir.Value,
    block_maximum: ir.Value,
    window_sums: ir.Value,
    scale: ir.Value,
    num_keys: ir.Value,
    num_stride: ir.Value,
    num_masked: ir.Value,
    num_vectors: ir.Value,
) -> None:
    """One block of an online softmax: scores ``[num_keys, P]`` become weights, in place.

    maximum, total ``[P]``: the running state. alpha ``[P]``: the factor for what was summed
    before. block_maximum ``[P]``: a copy of the new maximum. window_sums: a row ``[P]`` for each
    window, ``num_stride`` bytes apart: the sum of its weights. scale: one float32, factor of the
    exponent to base 2. Where ``num_masked`` is not 0, a key counts for the rows whose position
    (int32 ``[P]``) is not below the key's (int32 ``[num_keys]``). ``num_keys`` is a multiple of
    W and 4. With pairs, the weights of keys 2i and 2i + 1 become row i.
    """
    moved = [scores, positions, maximum, total, alpha, block_maximum, window_sums]
    with e.loop(num_vectors) as v:
        lanes = [e.offset(p, _times(e, v, 4 * e.lanes)) for p in moved]
        is_masked = e.b.icmp_signed("!=", num_masked, I64(0))
        with e.b.if_else(is_masked) as branches:
            for branch, masked in zip(branches, (True, False), strict=True):
                with branch:
                    hide = _Mask(e, key_positions, lanes[1]) if masked else None
                    _softmax_lanes(e, spec, pairs, hide, lanes, scale, num_keys, num_stride)


class _Mask:
    """Causal mask of one vector of rows."""

    def __init__(self, e: Emitter, key_positions: ir.Value, positions: ir.Value) -> None:
        self._e = e
        self._keys = key_positions
        self._rows = e.load(positions, 0, dtype=I32)

    def __call__(self, key: ir.Value, x: ir.Value, otherwise: float) -> ir.Value:
        """``x`` where the row sees the key."""
        e = self._e
        position = _broadcast(e, e.load(self._keys, key, 1, I32))
        seen = e.b.icmp_signed("<=", position, self._rows)
        return e.b.select(seen, x, e.splat(otherwise))


def _softmax_lanes(
    e: Emitter,
    spec: Spec,
    pairs: bool,
    mask: _Mask | None,
    pointers: list[ir.Value],
    scale: ir.Value,
    num_keys: ir.Value,
    num_stride: ir.Value,
) -> None:
    """``_softmax`` of one vector of rows."""
    scores, _, maximum, total, alpha, block_maximum, window_sums = pointers
    row_bytes = 4 * PANEL_VECTORS * e.lanes
    scale = e.broadcast(scale)
    before = e.load(maximum)
    # Four running maxima, so that one comparison need not wait for the last.
    running = [e.variable(before) for _ in range(4)]
    with _steps(e, num_keys, 4) as first:
        for i, slot in enumerate(running):
            key = e.b.add(first, I64(i))
            score = e.load(e.offset(scores, _times(e, key, row_bytes)))
            if mask is not None:
                score = mask(key, score, NO_SCORE)
            e.set(slot, e.maximum(e.get(slot), score))
    r0, r1, r2, r3 = (e.get(slot) for slot in running)
    peak = e.maximum(e.maximum(r0, r1), e.maximum(r2, r3))
    factor = _exp2(e, e.fmul(e.fsub(before, peak), scale))
    e.store(peak, maximum)
    e.store(peak, block_maximum)
    e.store(factor, alpha)

    block_sum, sums_at = e.variable(e.splat(0.0)), e.variable(window_sums)
    with _steps(e, num_keys, spec.window) as first:
        window_sum, even = e.splat(0.0), None
        for i in range(spec.window):
            key = e.b.add(first, I64(i))
            row = e.offset(scores, _times(e, key, row_bytes))
            weight = _exp2(e, e.fmul(e.fsub(e.load(row), peak), scale))
            if mask is not None:
                weight = mask(key, weight, 0.0)
            window_sum = e.fadd(window_sum, weight)
            if not pairs:
                e.store(weight, row)
            elif even is None:
                even = weight
            else:
                # Row key // 2 was read already: its keys come before this pair.
                target = e.offset(scores, _times(e, e.b.lshr(key, I64(1)), row_bytes))
                e.store(_pack(e, even, weight), target)
                even = None
        e.set(block_sum, e.fadd(e.get(block_sum), window_sum))
        e.store(window_sum, e.get(sums_at))
        e.set(sums_at, e.offset(e.get(sums_at), num_stride))
    e.store(e.fma(e.load(total), factor, e.get(block_sum)), total)


# -- finished rows ----------------------------------------------------------------------------


@_callable
def normalise(
    e: Emitter,
    spec: Spec,
    window_sums: ir.Value,
    block_maximum: ir.Value,
    maximum: ir.Value,
    total: ir.Value,
    scale: ir.Value,
    num_windows: ir.Value,
    num_stride: ir.Value,
    num_vectors: ir.Value,
) -> None:
    """Window sums of one block to attention mass, in place; arguments as in ``softmax``.

    ``window_sums *= 2**((block_maximum - maximum) * scale) / total``
    """
    with e.loop(num_vectors) as v:
        lane = _times(e, v, e.lanes)
        distance = e.fsub(e.load(block_maximum, lane), e.load(maximum, lane))
        weight = _exp2(e, e.fmul(distance, e.broadcast(scale)))
        factor = e.b.fdiv(weight, _positive(e, e.load(total, lane)))
        with e.loop(num_windows) as window:
            target = e.offset(window_sums, e.b.mul(window, num_stride))
            e.store(e.fmul(e.load(target, lane), factor), target, lane)


@_callable
def divide(
    e: Emitter,
    spec: Spec,
    sums: ir.Value,
    total: ir.Value,
    halves: ir.Value,
    num_vectors: ir.Value,
) -> None:
    """halves ``[D, P]`` = sums ``[D, P]`` / total ``[P]``, rounded to the storage dtype."""
    panel = PANEL_VECTORS * e.lanes
    with e.loop(num_vectors) as v:
        lane = _times(e, v, e.lanes)
        inverse = e.b.fdiv(e.splat(1.0), _positive(e, e.load(total, lane)))
        with e.loop(spec.head_dim) as d:
            at = e.b.add(_times(e, d, panel), lane)
            e.store_half(e.fmul(e.load(sums, at), inverse), halves, at, spec.half)


def _positive(e: Emitter, total: ir.Value) -> ir.Value:
    """A row's total, at least 1 if it saw a key; 1 for another row, whose sums are 0."""
    return e.maximum(e.splat(1.0), total)


key_scores, key_scores_pairs = _key_scores
add_values, add_values_pairs = _add_values
softmax, softmax_pairs = _softmax
