"""Windows to codes and back; byte for byte what ``reference`` makes.

Every step is the reference's float32 operation, in its order and unfused, so that both round alike.
A task is one window: all KV heads of it.

Bytes: a FULL window and ``W`` rows of the rotary table are read, a record is written (or the
other way round).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from qevict_kernels.numba.ir import F16, F32, I16, I32, I64, Emitter, vector_function
from qevict_kernels.numba.memory import view
from qevict_kernels.numba.parallel import atomic_add, parallel
from qevict_kernels.numba.spec import Spec
from qevict_kernels.numba.windows import (
    Parts,
    first_halves,
    load_params,
    load_split,
    memory_order,
    rotary_lanes,
)
from qevict_kernels.reference import SCALE_MARGIN, STEP_MARGIN

__all__ = ["QUANTIZE_ARGUMENTS", "decode_window", "dequantize_kernel", "quantize_kernel"]

QUANTIZE_ARGUMENTS = np.dtype(
    [
        (name, np.int64)
        for name in (
            # addresses of tensors
            "full_keys", "full_values", "coded", "rotary",
            "full_slots", "coded_slots", "windows", "refused",
            # number of entries, stride of a FULL slot in elements, next entry
            "count", "slot_stride", "next",
        )
    ]
)  # fmt: skip
_NEXT = QUANTIZE_ARGUMENTS.itemsize - 8


# -- drivers ------------------------------------------------------------------------------


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def quantize_kernel(spec: Any, arguments: int, num_threads: int) -> Any:
    """Run the work described at ``arguments``; returns 0."""
    parallel(_quantize_worker, spec, arguments, num_threads)
    return 0


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def dequantize_kernel(spec: Any, arguments: int, num_threads: int) -> Any:
    """Run the work described at ``arguments``; returns 0."""
    parallel(_dequantize_worker, spec, arguments, num_threads)
    return 0


@njit  # type: ignore[untyped-decorator]
def _quantize_worker(spec: Any, arguments: int) -> None:
    a = view(arguments, 1, QUANTIZE_ARGUMENTS)[0]
    bad = np.empty(1, np.int64)
    while True:
        entry = atomic_add(_next(arguments), 1)
        if entry >= a.count:
            break
        if view(a.full_slots, a.count, np.int32)[entry] < 0:
            continue
        bad[0] = 0
        for head in range(spec.num_kv_heads):
            keys, values, record, rotary = _locate(spec, a, entry, head)
            _quantize_window(spec, keys, values, rotary, record, bad.ctypes.data)
        view(a.refused, a.count, np.bool_)[entry] = bad[0] != 0


@njit  # type: ignore[untyped-decorator]
def _dequantize_worker(spec: Any, arguments: int) -> None:
    a = view(arguments, 1, QUANTIZE_ARGUMENTS)[0]
    while True:
        entry = atomic_add(_next(arguments), 1)
        if entry >= a.count:
            break
        if view(a.full_slots, a.count, np.int32)[entry] < 0:
            continue
        for head in range(spec.num_kv_heads):
            keys, values, record, rotary = _locate(spec, a, entry, head)
            _dequantize_window(spec, record, rotary, keys, values)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _next(arguments: int) -> int:
    """Address of the last field, ``next``."""
    return arguments + _NEXT


@njit  # type: ignore[untyped-decorator]
def _locate(spec: Any, a: Any, entry: int, head: int) -> Any:
    """Addresses of an entry's keys, values, record and rows of the rotary table."""
    full_slot = np.int64(view(a.full_slots, a.count, np.int32)[entry])
    coded_slot = np.int64(view(a.coded_slots, a.count, np.int32)[entry])
    window = np.int64(view(a.windows, a.count, np.int32)[entry])
    place = 2 * (full_slot * a.slot_stride + head * spec.window * spec.head_dim)
    return (
        a.full_keys + place,
        a.full_values + place,
        a.coded + (coded_slot * spec.num_kv_heads + head) * spec.record_bytes,
        a.rotary + 4 * window * spec.window * spec.rotary_dim,
    )


@intrinsic  # type: ignore[untyped-decorator]
def _quantize_window(
    ctx: Any, spec: Any, keys: Any, values: Any, rotary: Any, record: Any, bad: Any
) -> Any:
    return _emit_quantize(spec, keys, values, rotary, record, bad)


@intrinsic  # type: ignore[untyped-decorator]
def _dequantize_window(
    ctx: Any, spec: Any, record: Any, rotary: Any, keys: Any, values: Any
) -> Any:
    return _emit_dequantize(spec, record, rotary, keys, values)


# -- emitted code -------------------------------------------------------------------------


@vector_function
def _emit_quantize(
    e: Emitter,
    spec: Spec,
    keys: ir.Value,
    values: ir.Value,
    rotary: ir.Value,
    record: ir.Value,
    bad: ir.Value,
) -> None:
    window, dim, layout = spec.window, spec.head_dim, spec.record
    geometry = spec.geometry
    key_table, value_table = e.scratch(window * dim), e.scratch(window * dim)
    low, high = e.scratch(dim), e.scratch(dim)
    poison = _Poison(e)
    with e.loop(layout.record_bytes // 4) as i:
        e.store(I32(0), record, i)

    with e.loop(window) as token:
        row = e.b.mul(token, I64(dim))
        table = e.offset(rotary, e.b.mul(token, I64(4 * spec.rotary_dim)))
        for d, x in _unrotated_key(e, spec, keys, row, table).items():
            poison.add(x)
            e.store(x, key_table, e.b.add(row, I64(d)))
        lowest, highest = None, None
        for d in range(0, dim, e.lanes):
            x = e.load_half(values, e.b.add(row, I64(d)), spec.half)
            poison.add(x)
            e.store(x, value_table, e.b.add(row, I64(d)))
            lowest = x if lowest is None else e.minimum(x, lowest)
            highest = x if highest is None else e.maximum(x, highest)
        # Adding 0 makes a negative zero positive: which one a minimum yields is arbitrary.
        e.store(e.fadd(e.fold(lowest, e.minimum), F32(0.0)), low, token)
        e.store(e.fadd(e.fold(highest, e.maximum), F32(0.0)), high, token)
    # Scale and zero of each row: keys by channel, values by token.
    value_params = _store_params(
        e, spec, low, high, window, geometry.value_bits,
        (record, layout.value_scales, layout.value_zeros, layout.header + 12), poison,
    )  # fmt: skip
    for d in range(0, dim, e.lanes):
        lowest = highest = e.load(key_table, d)
        for token in range(1, window):
            x = e.load(key_table, token * dim + d)
            lowest, highest = e.minimum(x, lowest), e.maximum(x, highest)
        e.store(e.fadd(lowest, e.splat(0.0)), low, d)
        e.store(e.fadd(highest, e.splat(0.0)), high, d)
    key_params = _store_params(
        e, spec, low, high, dim, geometry.key_bits,
        (record, layout.key_scales, layout.key_zeros, layout.header), poison,
    )  # fmt: skip

    def code(x: ir.Value, scale: ir.Value, zero: ir.Value, bits: int) -> ir.Value:
        steps = e.round(e.quotient(e.fsub(x, zero), scale))
        return e.to_int(e.clamp(steps, 0.0, float(2**bits - 1)))

    group = geometry.code_group
    for table, params, bits, place, by_channel in (
        (key_table, key_params, geometry.key_bits, layout.key_codes, True),
        (value_table, value_params, geometry.value_bits, layout.value_codes, False),
    ):
        scales, zeros = params
        with e.loop(window // group) as index, e.loop(dim // e.lanes) as vector:
            d = e.b.mul(vector, I64(e.lanes))
            start = e.b.mul(index, I64(group))
            word = None
            for i in range(group):
                token = e.b.add(start, I64(i))
                x = e.load(table, e.b.add(e.b.mul(token, I64(dim)), d))
                if by_channel:
                    scale, zero = e.load(scales, d), e.load(zeros, d)
                else:
                    scale, zero = e.broadcast(scales, token), e.broadcast(zeros, token)
                bits_of_token = e.shl(code(x, scale, zero, bits), i * bits)
                word = bits_of_token if word is None else e.b.or_(word, bits_of_token)
            at = e.b.add(e.b.mul(index, I64(dim)), d)
            e.store(e.narrow(word, group * bits), e.offset(record, place), at)

    with e.b.if_then(poison.found(), likely=False):
        e.store(I64(1), bad)
        _spoil(e, spec, record)


def _unrotated_key(e: Emitter, spec: Spec, keys: ir.Value, row: ir.Value, table: ir.Value) -> Parts:
    """The key from element ``row`` on, before RoPE, in memory order."""
    lanes, half = rotary_lanes(e, spec), spec.rotary_dim // 2
    parts = load_split(e, spec, lambda d: e.load_half(keys, e.b.add(row, I64(d)), spec.half, lanes))
    for d in first_halves(e, spec):
        first, second = parts[d], parts[half + d]
        c, s = e.load(table, d, lanes), e.load(table, half + d, lanes)
        norm = e.fadd(e.fmul(c, c), e.fmul(s, s))
        parts[d] = e.fdiv(e.fadd(e.fmul(first, c), e.fmul(second, s)), norm)
        parts[half + d] = e.fdiv(e.fsub(e.fmul(second, c), e.fmul(first, s)), norm)
    return memory_order(e, spec, parts)


class _Poison:
    """Whether any of the numbers shown to it is NaN or infinite."""

    def __init__(self, e: Emitter) -> None:
        self._e = e
        self._sums: dict[int, ir.Value] = {}

    def add(self, x: ir.Value) -> None:
        """Look at every lane of ``x``."""
        e, lanes = self._e, x.type.count
        if lanes not in self._sums:
            self._sums[lanes] = e.variable(e.splat(0.0, lanes), at_entry=True)
        zero_or_nan = e.fmul(x, e.splat(0.0, lanes))
        e.set(self._sums[lanes], e.fadd(e.get(self._sums[lanes]), zero_or_nan))

    def found(self) -> ir.Value:
        """A bit."""
        e = self._e
        total = F32(0.0)
        for variable in self._sums.values():
            total = e.fadd(total, e.fold(e.get(variable), e.fadd))
        return e.b.fcmp_unordered("uno", total, total)


def _store_params(
    e: Emitter,
    spec: Spec,
    low: ir.Value,
    high: ir.Value,
    num_rows: int,
    bits: int,
    places: tuple[ir.Value, int, int, int],
    poison: _Poison,
) -> tuple[ir.Value, ir.Value]:
    """Write the parameters of rows with extremes ``low`` and ``high``, as ``make_params`` does.

    ``places`` are the record and the offsets of scales, zeros and header. Returns float32 arrays
    of the stored scales and zeros.
    """
    record, scales_at, zeros_at, header_at = places
    lanes = min(num_rows, e.lanes)
    scales, zeros = e.scratch(num_rows), e.scratch(num_rows)
    rows = range(0, num_rows, lanes)
    levels = e.splat(float(2**bits - 1), lanes)
    margin = e.splat(SCALE_MARGIN, lanes)

    def extreme(table: ir.Value, op: Any) -> ir.Value:
        best = e.load(table, 0, lanes)
        for i in rows[1:]:
            best = op(e.load(table, i, lanes), best)
        return e.fold(best, op)

    def put(at: int, scale: ir.Value, zero: ir.Value) -> None:
        poison.add(scale)
        poison.add(zero)
        e.store(scale, scales, at)
        e.store(zero, zeros, at)

    if spec.fp16_params:
        for i in rows:
            zero, zero_bits = _half_down(e, e.load(low, i, lanes))
            need = e.fmul(e.fdiv(e.fsub(e.load(high, i, lanes), zero), levels), margin)
            scale, scale_bits = _half_down(e, e.b.fneg(need))
            sign = _vector_of(scale_bits, 0x8000)
            put(i, e.b.fneg(scale), zero)
            e.store(e.b.xor(scale_bits, sign), e.offset(record, scales_at), i)
            e.store(zero_bits, e.offset(record, zeros_at), i)
        return scales, zeros

    base = extreme(low, e.minimum)
    zero_step = e.fdiv(e.fsub(extreme(low, e.maximum), base), F32(255.0))
    base_v, zero_step_v = e.splat(base, lanes), e.splat(zero_step, lanes)
    needs = e.scratch(num_rows)
    for i in rows:
        x = e.load(low, i, lanes)
        byte = e.clamp(e.floor(e.quotient(e.fsub(x, base_v), zero_step_v)), 0.0, 255.0)
        above = e.b.fcmp_ordered(">", e.fadd(base_v, e.fmul(byte, zero_step_v)), x)
        byte = e.fsub(byte, e.b.uitofp(above, byte.type))
        zero = e.fadd(base_v, e.fmul(byte, zero_step_v))
        e.store(e.narrow(e.to_int(byte), 8), e.offset(record, zeros_at), i)
        e.store(zero, zeros, i)
        e.store(e.fdiv(e.fsub(e.load(high, i, lanes), zero), levels), needs, i)
    scale_step = e.fmul(extreme(needs, e.maximum), F32(_float32(STEP_MARGIN / 255)))
    scale_step_v = e.splat(scale_step, lanes)
    for i in rows:
        need = e.fmul(e.load(needs, i, lanes), margin)
        byte = e.clamp(e.ceil(e.quotient(need, scale_step_v)), 0.0, 255.0)
        e.store(e.narrow(e.to_int(byte), 8), e.offset(record, scales_at), i)
        put(i, e.fmul(byte, scale_step_v), e.load(zeros, i, lanes))
    for i, number in enumerate((scale_step, base, zero_step)):
        e.store(number, e.offset(record, header_at), i)
    return scales, zeros


def _half_down(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The largest float16 that is not above ``x``: (as float32, its bits)."""
    half = e.b.fptrunc(x, ir.VectorType(F16, x.type.count))
    bits = e.b.bitcast(half, ir.VectorType(I16, x.type.count))
    above = e.b.fcmp_ordered(">", e.b.fpext(half, x.type), x)
    # One step down: away from zero where negative, towards it where positive.
    is_negative = e.b.icmp_signed("<", bits, _vector_of(bits, 0))
    one = _vector_of(bits, 1)
    below = e.b.select(is_negative, e.b.add(bits, one), e.b.sub(bits, one))
    bits = e.b.select(above, below, bits)
    return e.b.fpext(e.b.bitcast(bits, half.type), x.type), bits


def _spoil(e: Emitter, spec: Spec, record: ir.Value) -> None:
    """Make a record decode to NaN: parameters of NaN, all else 0."""
    layout = spec.record
    with e.loop(layout.record_bytes // 4) as i:
        e.store(I32(0), record, i)
    if spec.fp16_params:
        start, num_halves = layout.key_scales, 2 * (spec.head_dim + spec.window)
        with e.loop(num_halves) as i:
            e.store(I16(0x7E00), e.offset(record, start), i)
    else:
        for i in range(6):
            e.store(I32(0x7FC00000), e.offset(record, layout.header), i)


@vector_function
def _emit_dequantize(
    e: Emitter, spec: Spec, record: ir.Value, rotary: ir.Value, keys: ir.Value, values: ir.Value
) -> None:
    def store(x: ir.Value, target: ir.Value, at: ir.Value) -> None:
        e.store_half(x, target, at, spec.half)

    decode_window(e, spec, record, rotary, keys, values, store)


def decode_window(
    e: Emitter,
    spec: Spec,
    record: ir.Value,
    rotary: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    store: Callable[[ir.Value, ir.Value, ir.Value], None],
) -> None:
    """Emit the decoding of a record: float32 vectors of its keys and values ``[W, D]``.

    ``rotary`` is the window's first row of the rotary table, by which keys are rotated.
    ``store(vector, keys or values, offset)`` emits what is done with each.
    """
    geometry, layout, dim = spec.geometry, spec.record, spec.head_dim
    group, half = geometry.code_group, spec.rotary_dim // 2
    lanes = rotary_lanes(e, spec)
    load_scale, load_zero = load_params(e, spec, record, "keys")
    scales = load_split(e, spec, lambda d: load_scale(d, lanes))
    zeros = load_split(e, spec, lambda d: load_zero(d, lanes))
    value_scales, value_zeros = e.scratch(spec.window), e.scratch(spec.window)
    load_scale, load_zero = load_params(e, spec, record, "values")
    width = min(spec.window, e.lanes)
    for i in range(0, spec.window, width):
        e.store(load_scale(i, width), value_scales, i)
        e.store(load_zero(i, width), value_zeros, i)

    def codes(start: int, index: ir.Value, bits: int) -> ir.Value:
        return e.offset(e.offset(record, start), e.b.mul(index, I64(dim * group * bits // 8)))

    def number(words: ir.Value, i: int, bits: int, scale: ir.Value, zero: ir.Value) -> ir.Value:
        code = e.code_as_number(words, i, bits)
        return e.fadd(zero, e.fmul(code, scale))

    with e.loop(spec.window // group) as index:
        bits = geometry.key_bits
        place = codes(layout.key_codes, index, bits)
        words = load_split(e, spec, lambda d: e.load_words(place, d, group * bits, lanes))
        for i in range(group):
            token = e.b.add(e.b.mul(index, I64(group)), I64(i))
            table = e.offset(rotary, e.b.mul(token, I64(4 * spec.rotary_dim)))
            parts = {d: number(words[d], i, bits, scales[d], zeros[d]) for d in words}
            for d in first_halves(e, spec):
                first, second = parts[d], parts[half + d]
                c, s = e.load(table, d, lanes), e.load(table, half + d, lanes)
                parts[d] = e.fsub(e.fmul(first, c), e.fmul(second, s))
                parts[half + d] = e.fadd(e.fmul(second, c), e.fmul(first, s))
            for d, x in memory_order(e, spec, parts).items():
                at = e.b.add(e.b.mul(token, I64(dim)), I64(d))
                store(x, keys, at)
        bits = geometry.value_bits
        place = codes(layout.value_codes, index, bits)
        for d in range(0, dim, e.lanes):
            word = e.load_words(place, d, group * bits)
            for i in range(group):
                token = e.b.add(e.b.mul(index, I64(group)), I64(i))
                scale, zero = e.broadcast(value_scales, token), e.broadcast(value_zeros, token)
                at = e.b.add(e.b.mul(token, I64(dim)), I64(d))
                store(number(word, i, bits, scale, zero), values, at)


def _vector_of(like: ir.Value, value: int) -> ir.Value:
    return like.type([I16(value)] * like.type.count)


def _float32(value: float) -> float:
    return float(np.float32(value))
