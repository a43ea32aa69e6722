"""Vector code of ``extend``: products, softmax and mass of one block of keys.

Lanes are query rows. A *panel* is ``PANEL_VECTORS`` vectors of rows, and every array over
rows has a panel as its last, contiguous dimension (written ``P`` below). A lane never meets
its neighbours, so a row's arithmetic is the same in whatever tile it stands; maximum and
sum need no step across lanes.

Products come in float32 and in bfloat16 *pairs*: two neighbours of the summed dimension
share a 32-bit lane, and one ``dpbf16ps`` adds both products, exact before they are added in
float32. ``host_has_pairs`` says whether the instruction is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from qevict_kernels.numba.ir import F32, I32, I64, Emitter, vector_function
from qevict_kernels.numba.spec import Spec, SpecType

__all__ = [
    "NO_SCORE",
    "PANEL_VECTORS",
    "add_values",
    "add_values_pairs",
    "constant",
    "host_has_pairs",
    "key_scores",
    "key_scores_pairs",
    "mass",
    "softmax",
    "softmax_pairs",
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


@cache
def host_has_pairs() -> bool:
    """Whether the CPU that numba compiles for multiplies bfloat16 pairs."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    return "+avx512bf16" in features.split(",")


def _has_pairs(spec: Spec) -> bool:
    """Whether FULL windows are multiplied as pairs."""
    return spec.half == "bf16" and spec.lanes == 16 and host_has_pairs()


def _constants(spec: Spec) -> dict[str, int]:
    geometry, record = spec.geometry, spec.record
    return {
        "head_dim": spec.head_dim,
        "window": spec.window,
        "lanes": spec.lanes,
        "panel": PANEL_VECTORS * spec.lanes,
        "row_block": _row_block(spec),
        "bf16": int(spec.half == "bf16"),
        "pairs": int(_has_pairs(spec)),
        "rotary_dim": spec.rotary_dim,
        "is_neox": int(spec.is_neox),
        "group_size": geometry.group_size,
        "num_kv_heads": geometry.num_kv_heads,
        "key_bits": geometry.key_bits,
        "value_bits": geometry.value_bits,
        "code_group": geometry.code_group,
        "fp16_params": int(spec.fp16_params),
        "record_bytes": record.record_bytes,
        "key_codes": record.key_codes,
        "value_codes": record.value_codes,
        "key_scales": record.key_scales,
        "key_zeros": record.key_zeros,
        "value_scales": record.value_scales,
        "value_zeros": record.value_zeros,
        "header": record.header,
    }


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def constant(typing_context: Any, spec: SpecType, name: Any) -> Any:
    """A number that is fixed by ``spec``, known to the optimiser."""
    value = _constants(spec.spec)[name.literal_value]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, value)

    return types.int64(spec, name), generate


def _row_block(spec: Spec) -> int:
    """Rows of a product held in registers: 24 accumulators of 32, or 12 of 16."""
    return 8 if spec.lanes == 16 else 4


def _exp2(e: Emitter, x: ir.Value) -> ir.Value:
    """2**x: 1 exactly at 0, below 2**-126 under -126, NaN for NaN; no conversion to integers."""
    x = e.maximum(e.splat(-126.0), x)
    shifted = e.fadd(x, e.splat(_ROUNDER))
    fraction = e.fsub(x, e.fsub(shifted, e.splat(_ROUNDER)))
    y = e.splat(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        y = e.fma(y, fraction, e.splat(coefficient))
    return e.as_float(e.b.add(e.as_int(y), e.shl(e.as_int(shifted), 23)))


def _pack(e: Emitter, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Pairs of bfloat16 of two float32 vectors of non-negative numbers, rounded to nearest."""
    half = e.splat_int(0x8000)
    low = e.lshr(e.b.add(e.as_int(even), half), 16)
    high = e.b.and_(e.b.add(e.as_int(odd), half), e.splat_int(0xFFFF0000))
    return e.b.or_(low, high)


def _broadcast(e: Emitter, value: ir.Value) -> ir.Value:
    """A 32-bit scalar in every lane."""
    typ = ir.VectorType(value.type, e.lanes)
    single = e.b.insert_element(typ(ir.Undefined), value, I32(0))
    return e.shuffle(single, None, [0] * e.lanes)


class _BFloat(ir.HalfType):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__


def _pair_fma(e: Emitter, spec: Spec, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """c + a.odd * b.odd + a.even * b.even in each 32-bit lane."""
    if not _has_pairs(spec):  # compiled, never run
        return c
    pairs = ir.VectorType(_BFloat(), 2 * e.lanes)
    typ = ir.FunctionType(c.type, [c.type, pairs, pairs])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(e.b.module, typ, name)
    return e.b.call(function, [c, e.b.bitcast(a, pairs), e.b.bitcast(b, pairs)])


@contextmanager
def _steps(e: Emitter, count: ir.Value, step: int) -> Iterator[ir.Value]:
    """Loop with an index 0, step, 2 * step, ... below ``count``."""
    with cgutils.for_range_slice(e.b, I64(0), count, I64(step), I64) as (index, _):
        yield index


def _times(e: Emitter, index: ir.Value, factor: int) -> ir.Value:
    return e.b.mul(index, I64(factor))


def _multiply(
    e: Emitter,
    spec: Spec,
    c: ir.Value,
    a: ir.Value,
    b: ir.Value,
    alpha: ir.Value | None,
    num_m: ir.Value,
    num_k: ir.Value,
    num_vectors: ir.Value,
    m_stride: int,
    k_stride: int,
    pairs: bool,
) -> None:
    """``c[m, p] = alpha[p] * c[m, p] + sum over k of a[m, k] * b[k, p]`` in the order of k.

    ``c`` is float32 ``[num_m, P]`` (taken as 0 without ``alpha``), ``b`` is ``[num_k, P]`` and
    ``a[m, k]`` lies at element ``m * m_stride + k * k_stride``; elements are float32 or pairs.
    Only the first ``num_vectors`` vectors of a panel are computed.
    """
    for vectors in range(1, PANEL_VECTORS + 1):
        with (
            e.b.if_then(e.b.icmp_signed("==", num_vectors, I64(vectors))),
            _steps(e, num_m, _row_block(spec)) as m,
        ):
            _multiply_rows(e, spec, c, a, b, alpha, m, num_k, vectors, m_stride, k_stride, pairs)


def _multiply_rows(
    e: Emitter,
    spec: Spec,
    c: ir.Value,
    a: ir.Value,
    b: ir.Value,
    alpha: ir.Value | None,
    m: ir.Value,
    num_k: ir.Value,
    vectors: int,
    m_stride: int,
    k_stride: int,
    pairs: bool,
) -> None:
    """The rows of ``_multiply`` from ``m`` on that fit registers."""
    panel = PANEL_VECTORS * e.lanes
    element = I32 if pairs else F32
    tile = [(i, v) for i in range(_row_block(spec)) for v in range(vectors)]
    c = e.offset(c, _times(e, m, 4 * panel))
    a = e.offset(a, _times(e, m, 4 * m_stride))
    sums = {}
    for i, v in tile:
        start = e.splat(0.0)
        if alpha is not None:
            old = e.load(c, i * panel + v * e.lanes)
            start = e.fmul(e.load(alpha, v * e.lanes), old)
        sums[i, v] = e.variable(start)
    with e.loop(num_k) as k:
        row = e.offset(b, _times(e, k, 4 * panel))
        column = e.offset(a, _times(e, k, 4 * k_stride))
        lanes = [e.load(row, v * e.lanes, dtype=element) for v in range(vectors)]
        for i in range(_row_block(spec)):
            value = _broadcast(e, e.load(column, i * m_stride, 1, element))
            for v in range(vectors):
                total = e.get(sums[i, v])
                if pairs:
                    total = _pair_fma(e, spec, value, lanes[v], total)
                else:
                    total = e.fma(value, lanes[v], total)
                e.set(sums[i, v], total)
    for i, v in tile:
        e.store(e.get(sums[i, v]), c, i * panel + v * e.lanes)


@vector_function
def _key_scores(
    e: Emitter,
    spec: Spec,
    scores: ir.Value,
    keys: ir.Value,
    query: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    dim = spec.head_dim
    _multiply(
        e, spec, scores, keys, query, None, num_keys, I64(dim), num_vectors, dim, 1, pairs=False
    )


@vector_function
def _key_scores_pairs(
    e: Emitter,
    spec: Spec,
    scores: ir.Value,
    keys: ir.Value,
    query: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    dim = spec.head_dim // 2
    _multiply(
        e, spec, scores, keys, query, None, num_keys, I64(dim), num_vectors, dim, 1, pairs=True
    )


@vector_function
def _add_values(
    e: Emitter,
    spec: Spec,
    sums: ir.Value,
    values: ir.Value,
    weights: ir.Value,
    alpha: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    dim = spec.head_dim
    _multiply(
        e, spec, sums, values, weights, alpha, I64(dim), num_keys, num_vectors, 1, dim, pairs=False
    )


@vector_function
def _add_values_pairs(
    e: Emitter,
    spec: Spec,
    sums: ir.Value,
    values: ir.Value,
    weights: ir.Value,
    alpha: ir.Value,
    num_keys: ir.Value,
    num_vectors: ir.Value,
) -> None:
    dim, half = spec.head_dim, e.b.lshr(num_keys, I64(1))
    _multiply(
        e, spec, sums, values, weights, alpha, I64(dim), half, num_vectors, 1, dim, pairs=True
    )


def _softmax_lanes(
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
    pairs: bool,
    masked: bool,
) -> None:
    """One vector of rows of ``softmax``."""
    row_bytes = 4 * PANEL_VECTORS * e.lanes
    scale = _broadcast(e, e.load(scale, 0, 1))
    position = e.load(positions, 0, dtype=I32)

    def visible(key: ir.Value) -> ir.Value:
        key_position = _broadcast(e, e.load(key_positions, key, 1, I32))
        return e.b.icmp_signed("<=", key_position, position)

    before = e.load(maximum)
    # Four running maxima, so that one comparison need not wait for the last.
    running = [e.variable(before) for _ in range(4)]
    with _steps(e, num_keys, 4) as first:
        for i, slot in enumerate(running):
            key = e.b.add(first, I64(i))
            score = e.load(e.offset(scores, _times(e, key, row_bytes)))
            if masked:
                score = e.b.select(visible(key), score, e.splat(NO_SCORE))
            e.set(slot, e.maximum(e.get(slot), score))
    r0, r1, r2, r3 = (e.get(slot) for slot in running)
    peak = e.maximum(e.maximum(r0, r1), e.maximum(r2, r3))
    factor = _exp2(e, e.fmul(e.fsub(before, peak), scale))
    e.store(peak, maximum)
    e.store(peak, block_maximum)
    e.store(factor, alpha)

    block_sum = e.variable(e.splat(0.0))
    sums_at = e.variable(window_sums)
    with _steps(e, num_keys, spec.window) as first:
        window_sum, even = e.splat(0.0), None
        for i in range(spec.window):
            key = e.b.add(first, I64(i))
            row = e.offset(scores, _times(e, key, row_bytes))
            weight = _exp2(e, e.fmul(e.fsub(e.load(row), peak), scale))
            if masked:
                weight = e.b.select(visible(key), weight, e.splat(0.0))
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


def _softmax(
    e: Emitter,
    spec: Spec,
    pointers: list[ir.Value],
    num_keys: ir.Value,
    num_stride: ir.Value,
    num_masked: ir.Value,
    num_vectors: ir.Value,
    pairs: bool,
) -> None:
    scores, key_positions, *lanes, scale = pointers
    with e.loop(num_vectors) as v:
        move = _times(e, v, 4 * e.lanes)
        scores, *lanes = (e.offset(p, move) for p in (scores, *lanes))
        arguments = (scores, key_positions, *lanes, scale, num_keys, num_stride)
        masked = e.b.icmp_signed("!=", num_masked, I64(0))
        with e.b.if_else(masked) as (then, otherwise):
            with then:
                _softmax_lanes(e, spec, *arguments, pairs=pairs, masked=True)
            with otherwise:
                _softmax_lanes(e, spec, *arguments, pairs=pairs, masked=False)


def _softmax_function(pairs: bool) -> Any:
    def softmax(
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
        state = [positions, maximum, total, alpha, block_maximum, window_sums]
        pointers = [scores, key_positions, *state, scale]
        _softmax(e, spec, pointers, num_keys, num_stride, num_masked, num_vectors, pairs)

    softmax.__name__ += "_pairs" if pairs else ""
    return vector_function(softmax)


@vector_function
def _mass(
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
    factor_scale = _broadcast(e, e.load(scale, 0, 1))
    with e.loop(num_vectors) as v:
        lane = _times(e, v, e.lanes)
        distance = e.fsub(e.load(block_maximum, lane), e.load(maximum, lane))
        weight = _exp2(e, e.fmul(distance, factor_scale))
        # A row that saw a key has a total of at least 1; another row's sums are 0.
        factor = e.b.fdiv(weight, e.maximum(e.splat(1.0), e.load(total, lane)))
        with e.loop(num_windows) as window:
            target = e.offset(window_sums, e.b.mul(window, num_stride))
            e.store(e.fmul(e.load(target, lane), factor), target, lane)


# What follows is called from numba code; every argument but ``num_*`` is an address.


@intrinsic  # type: ignore[untyped-decorator]
def key_scores(typing_context: Any, spec: SpecType, scores: Any, keys: Any, query: Any,
               num_keys: Any, num_vectors: Any) -> Any:  # fmt: skip
    """scores ``[num_keys, P]`` = keys ``[num_keys, D]`` x query ``[D, P]``, all float32."""
    return _key_scores(spec, scores, keys, query, num_keys, num_vectors)


@intrinsic  # type: ignore[untyped-decorator]
def key_scores_pairs(typing_context: Any, spec: SpecType, scores: Any, keys: Any, query: Any,
                     num_keys: Any, num_vectors: Any) -> Any:  # fmt: skip
    """As ``key_scores``; keys bfloat16 ``[num_keys, D]``, query pairs ``[D / 2, P]``."""
    return _key_scores_pairs(spec, scores, keys, query, num_keys, num_vectors)


@intrinsic  # type: ignore[untyped-decorator]
def add_values(typing_context: Any, spec: SpecType, sums: Any, values: Any, weights: Any,
               alpha: Any, num_keys: Any, num_vectors: Any) -> Any:  # fmt: skip
    """sums ``[D, P]`` = alpha ``[P]`` * sums + values ``[num_keys, D]``^T x weights
    ``[num_keys, P]``, all float32."""
    return _add_values(spec, sums, values, weights, alpha, num_keys, num_vectors)


@intrinsic  # type: ignore[untyped-decorator]
def add_values_pairs(typing_context: Any, spec: SpecType, sums: Any, values: Any, weights: Any,
                     alpha: Any, num_keys: Any, num_vectors: Any) -> Any:  # fmt: skip
    """As ``add_values``; values ``[num_keys / 2, D]`` and weights ``[num_keys / 2, P]`` are
    pairs of tokens."""
    return _add_values_pairs(spec, sums, values, weights, alpha, num_keys, num_vectors)


_softmax_floats, _softmax_pairs = _softmax_function(pairs=False), _softmax_function(pairs=True)


@intrinsic  # type: ignore[untyped-decorator]
def softmax(typing_context: Any, spec: SpecType, scores: Any, key_positions: Any, positions: Any,
            maximum: Any, total: Any, alpha: Any, block_maximum: Any, window_sums: Any,
            scale: Any, num_keys: Any, num_stride: Any, num_masked: Any,
            num_vectors: Any) -> Any:  # fmt: skip
    """Online softmax over one block: scores ``[num_keys, P]`` become weights, in place.

    key_positions int32 ``[num_keys]``, positions int32 ``[P]``: where ``num_masked`` is not 0
    a key counts only up to a row's position. maximum, total ``[P]``: running state; alpha
    ``[P]``: factor for what was summed before; block_maximum ``[P]``: a copy of maximum.
    window_sums ``[num_keys / W]`` rows, ``num_stride`` bytes apart: sums of a window's weights.
    scale: one float32, the exponent's factor to base 2. ``num_keys`` is a multiple of W and 4.
    """
    return _softmax_floats(spec, scores, key_positions, positions, maximum, total, alpha,
                           block_maximum, window_sums, scale, num_keys, num_stride, num_masked,
                           num_vectors)  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def softmax_pairs(typing_context: Any, spec: SpecType, scores: Any, key_positions: Any,
                  positions: Any, maximum: Any, total: Any, alpha: Any, block_maximum: Any,
                  window_sums: Any, scale: Any, num_keys: Any, num_stride: Any, num_masked: Any,
                  num_vectors: Any) -> Any:  # fmt: skip
    """As ``softmax``; weights of keys 2i and 2i + 1 become the pairs of row i."""
    return _softmax_pairs(spec, scores, key_positions, positions, maximum, total, alpha,
                          block_maximum, window_sums, scale, num_keys, num_stride, num_masked,
                          num_vectors)  # fmt: skip


@intrinsic  # type: ignore[untyped-decorator]
def mass(typing_context: Any, spec: SpecType, window_sums: Any, block_maximum: Any, maximum: Any,
         total: Any, scale: Any, num_windows: Any, num_stride: Any,
         num_vectors: Any) -> Any:  # fmt: skip
    """Window sums of one block of a finished row to attention mass, in place.

    ``window_sums *= 2**((block_maximum - maximum) * scale) / total``
    """
    return _mass(spec, window_sums, block_maximum, maximum, total, scale, num_windows, num_stride,
                 num_vectors)  # fmt: skip
