"""Vector code of ``extend``: the three inner functions, generated as LLVM IR.

Lanes are query rows. A *panel* is ``PANEL_VECTORS`` vectors of ``LANES`` rows; every
array over rows has a panel's ``PANEL`` rows as its last, contiguous dimension. A row
never meets its neighbours: each lane does the same arithmetic whatever else is in the
vector, which is what makes results independent of batch, tile and chunk.

============== ======================================================================
``multiply``   ``c[m, row] (+)= sum_k a[m, k] * b[k, row]``; a is broadcast, b and c are
               lanes. Serves queries against keys and probabilities against values.
``softmax``    one block of scores to probabilities: maximum, window sums, rescaling
``normalise``  window sums relative to a block's maximum to attention mass
============== ======================================================================

``multiply`` comes in float32 and in bfloat16 pairs: two neighbours of the summed
dimension share a 32-bit lane and one ``dpbf16ps`` multiplies and adds both, exactly,
in float32. The pair form needs the instruction (``HAS_PAIRS``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

__all__ = [
    "HAS_PAIRS",
    "LANES",
    "NO_SCORE",
    "PANEL",
    "PANEL_VECTORS",
    "ROW_BLOCK",
    "multiply_keys",
    "multiply_values",
    "normalise",
    "softmax",
]

# The features numba compiles for, which NUMBA_CPU_FEATURES may narrow.
_FEATURES = set(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
_WIDE = "+avx512f" in _FEATURES

HAS_PAIRS = "+avx512bf16" in _FEATURES
"""Whether bfloat16 products can be formed without conversion."""
LANES = 16 if _WIDE else 8
PANEL_VECTORS = 3
PANEL = LANES * PANEL_VECTORS
"""Rows of a panel."""
ROW_BLOCK = 8 if _WIDE else 4
"""Rows of ``c`` held in registers: 24 accumulators of 32 registers, or 12 of 16."""

NO_SCORE = -1e30
"""Running maximum of a row that has seen no key; finite, so that differences are."""

# Minimax polynomial of 2**x on [-.5, .5] with 2**0 == 1 exactly, relative error 9e-8.
_EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341)
_EXP2 += (0.009671512991189957, 0.001326472731307149)
# 1.5 * 2**23: adding it leaves the nearest integer in the low bits of the float.
_ROUNDER = 12582912.0

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_F32_PTR, _I32_PTR = _F32.as_pointer(), _I32.as_pointer()
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class _BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def _splat(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _splat_int(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


class _Code:
    """An IR builder with the vector idioms of this module."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        """A vector of copies of a 32-bit scalar."""
        vector = _INTS if scalar.type == _I32 else _FLOATS
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.b.insert_element(undefined, scalar, _I32(0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * LANES))

    def at(self, pointer: ir.Value, *terms: ir.Value | int) -> ir.Value:
        """``pointer`` moved by the sum of ``terms`` elements."""
        for term in terms:
            pointer = self.b.gep(pointer, [_I64(term) if isinstance(term, int) else term])
        return pointer

    def load(self, pointer: ir.Value) -> ir.Value:
        """The vector at a float32 or int32 pointer."""
        vector = _INTS if pointer.type == _I32_PTR else _FLOATS
        return self.b.load(self.b.bitcast(pointer, vector.as_pointer()), align=4)

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.b.mul(value, _I64(factor))

    def variable(self, value: ir.Value) -> ir.Value:
        """A slot in the entry block that LLVM turns into registers."""
        return cgutils.alloca_once_value(self.b, value)

    @contextmanager
    def steps(self, count: ir.Value, step: int = 1) -> Any:
        """Loop with an index 0, step, 2 * step, ... below ``count``."""
        with cgutils.for_range_slice(self.b, _I64(0), count, _I64(step), _I64) as (index, _):
            yield index

    def maximum(self, running: ir.Value, value: ir.Value) -> ir.Value:
        return self.b.select(self.b.fcmp_ordered(">", running, value), running, value)

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        declared = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, declared, name), args)

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{LANES}f32", _FLOATS, x, y, z)

    def pair_multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        x, y = self.b.bitcast(x, _BFLOATS), self.b.bitcast(y, _BFLOATS)
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, z, x, y)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2**x: 1 exactly at 0, tiny below -126, NaN for NaN."""
        b = self.b
        # The comparison is ordered so that NaN falls through to x.
        x = b.select(b.fcmp_ordered("<", x, _splat(-126.0)), _splat(-126.0), x)
        shifted = b.fadd(x, _splat(_ROUNDER))
        fraction = b.fsub(x, b.fsub(shifted, _splat(_ROUNDER)))
        result = _splat(_EXP2[-1])
        for coefficient in (*_EXP2[-2::-1], 1.0):
            result = self.multiply_add(result, fraction, _splat(coefficient))
        exponent = b.shl(b.bitcast(shifted, _INTS), _splat_int(23))
        return b.bitcast(b.add(b.bitcast(result, _INTS), exponent), _FLOATS)

    def pack(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """Pairs of bfloat16, rounded to nearest, from two vectors of finite numbers >= 0."""
        b = self.b
        half = _splat_int(0x8000)
        even = b.lshr(b.add(b.bitcast(even, _INTS), half), _splat_int(16))
        odd = b.and_(b.add(b.bitcast(odd, _INTS), half), _splat_int(-65536))
        return b.or_(even, odd)


def _function(
    module: ir.Module,
    name: str,
    arguments: list[ir.Type],
    body: Callable[..., None],
) -> ir.Function:
    """The function ``name`` of ``module``, made on first use.

    It stays a function of its own with pointers that don't overlap, so that LLVM
    allocates registers for this loop alone.
    """
    name = f"qevict_extend_{name}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    for argument in function.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    body(_Code(builder), *function.args)
    builder.ret_void()
    return function


def _multiply(
    module: ir.Module, vectors: int, pairs: bool, row_stride: int, sum_stride: int, add: bool
) -> ir.Function:
    """``c[m, row] = alpha[row] * c[m, row] + sum_k a[m, k] * b[k, row]``.

    Arguments: c, a, b, alpha, number of m (a multiple of ``ROW_BLOCK``), number of k.
    Strides of a are in elements; ``add`` false takes c as 0. The order of k is fixed.
    """
    element = _I32 if pairs else _F32

    def body(
        code: _Code,
        c: ir.Value,
        a: ir.Value,
        b: ir.Value,
        alpha: ir.Value,
        rows: ir.Value,
        count: ir.Value,
    ) -> None:
        multiply_add = code.pair_multiply_add if pairs else code.multiply_add
        with code.steps(rows, ROW_BLOCK) as row:
            c_rows = code.at(c, code.times(row, PANEL))
            a_rows = code.at(a, code.times(row, row_stride))
            sums = {}
            for v in range(vectors):
                factor = code.load(code.at(alpha, v * LANES)) if add else None
                for m in range(ROW_BLOCK):
                    start = _splat(0.0)
                    if factor is not None:
                        start = code.b.fmul(factor, code.load(code.at(c_rows, m * PANEL + v * LANES)))
                    sums[m, v] = code.variable(start)
            with code.steps(count) as k:
                b_row = code.at(b, code.times(k, PANEL))
                lanes = [code.load(code.at(b_row, v * LANES)) for v in range(vectors)]
                a_column = code.at(a_rows, code.times(k, sum_stride))
                for m in range(ROW_BLOCK):
                    value = code.broadcast(code.b.load(code.at(a_column, m * row_stride)))
                    for v in range(vectors):
                        total = code.b.load(sums[m, v])
                        code.b.store(multiply_add(value, lanes[v], total), sums[m, v])
            for (m, v), total in sums.items():
                code.store(code.b.load(total), code.at(c_rows, m * PANEL + v * LANES))

    form = "pairs" if pairs else "floats"
    name = f"multiply_{form}_{vectors}_{row_stride}_{sum_stride}_{'add' if add else 'set'}"
    pointer = element.as_pointer()
    return _function(module, name, [_F32_PTR, pointer, pointer, _F32_PTR, _I64, _I64], body)


def _softmax(module: ir.Module, window: int, pairs: bool, masked: bool) -> ir.Function:
    """Scores of one block and one vector of rows to probabilities, in place.

    Arguments: scores ``[keys, PANEL]``, key positions ``[keys]``, query positions
    ``[PANEL]``, running maximum, sum and the factor for what was added before
    ``[PANEL]``, maximum to remember ``[PANEL]``, window sums ``[keys / window, stride]``,
    stride, number of keys, scale (of an exponent to base 2).
    With ``pairs``, probabilities of keys 2i and 2i + 1 are written to row i.
    """

    def body(
        code: _Code,
        scores: ir.Value,
        key_positions: ir.Value,
        positions: ir.Value,
        maximum: ir.Value,
        total: ir.Value,
        alpha: ir.Value,
        block_maximum: ir.Value,
        sums: ir.Value,
        stride: ir.Value,
        keys: ir.Value,
        scale: ir.Value,
    ) -> None:
        b = code.b
        scale = code.broadcast(scale)
        position = code.load(positions) if masked else None

        def visible(key: ir.Value) -> ir.Value:
            key_position = code.broadcast(b.load(code.at(key_positions, key)))
            return b.icmp_signed("<=", key_position, position)

        before = code.load(maximum)
        # Several maxima, so that one does not wait for the other.
        running = [code.variable(before) for _ in range(4)]
        with code.steps(keys, 4) as first:
            for i, slot in enumerate(running):
                key = b.add(first, _I64(i))
                score = code.load(code.at(scores, code.times(key, PANEL)))
                if masked:
                    score = b.select(visible(key), score, _splat(NO_SCORE))
                b.store(code.maximum(b.load(slot), score), slot)
        r0, r1, r2, r3 = (b.load(slot) for slot in running)
        peak = code.maximum(code.maximum(r0, r1), code.maximum(r2, r3))
        factor = code.exp2(b.fmul(b.fsub(before, peak), scale))
        code.store(peak, maximum)
        code.store(peak, block_maximum)
        code.store(factor, alpha)

        block_sum = code.variable(_splat(0.0))
        sums_slot = code.variable(sums)
        with code.steps(keys, window) as first:
            window_sum, even = _splat(0.0), None
            for i in range(window):
                key = b.add(first, _I64(i))
                row = code.at(scores, code.times(key, PANEL))
                weight = code.exp2(b.fmul(b.fsub(code.load(row), peak), scale))
                if masked:
                    weight = b.select(visible(key), weight, _splat(0.0))
                window_sum = b.fadd(window_sum, weight)
                if not pairs:
                    code.store(weight, row)
                elif even is None:
                    even = weight
                else:
                    # Row key / 2 was read already: both of its keys come before this pair.
                    target = code.at(scores, code.times(b.lshr(key, _I64(1)), PANEL))
                    code.store(b.bitcast(code.pack(even, weight), _FLOATS), target)
                    even = None
            b.store(b.fadd(b.load(block_sum), window_sum), block_sum)
            target = b.load(sums_slot)
            code.store(window_sum, target)
            b.store(code.at(target, stride), sums_slot)
        code.store(code.multiply_add(code.load(total), factor, b.load(block_sum)), total)

    form = "pairs" if pairs else "floats"
    name = f"softmax_{form}_{window}_{'masked' if masked else 'whole'}"
    pointers = [_F32_PTR, _I32_PTR, _I32_PTR, *[_F32_PTR] * 5]
    return _function(module, name, [*pointers, _I64, _I64, _F32], body)


def _addresses(code: _Code, values: list[ir.Value], kinds: list[ir.Type]) -> list[ir.Value]:
    """Addresses as pointers of ``kinds``."""
    return [code.b.inttoptr(v, kind) for v, kind in zip(values, kinds, strict=True)]


def _switch(code: _Code, vectors: ir.Value, emit: Callable[[int], None]) -> None:
    """``emit(n)`` for the run-time ``vectors`` n in 1 .. ``PANEL_VECTORS``."""
    for n in range(1, PANEL_VECTORS + 1):
        with code.b.if_then(code.b.icmp_signed("==", vectors, _I64(n))):
            emit(n)


_ADDRESS = types.intp


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_keys(
    typing: Any, spec: Any, pairs: Any, scores: Any, keys: Any, query: Any, count: Any, vectors: Any
) -> Any:
    """scores ``[count, PANEL]`` = keys ``[count, D]`` x query ``[D, PANEL]``, by address.

    ``pairs`` (a literal): keys are bfloat16 and query is pairs ``[D / 2, PANEL]``.
    """
    pair, dim = pairs.literal_value, spec.spec.head_dim
    length = dim // 2 if pair else dim

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        element = (_I32 if pair else _F32).as_pointer()
        c, a, b = _addresses(code, args[2:5], [_F32_PTR, element, element])

        def emit(n: int) -> None:
            function = _multiply(builder.module, n, pair, length, 1, add=False)
            builder.call(function, [c, a, b, ir.Constant(_F32_PTR, None), args[5], _I64(length)])

        _switch(code, args[6], emit)
        return context.get_dummy_value()

    return types.void(spec, pairs, *[_ADDRESS] * 5), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_values(
    typing: Any,
    spec: Any,
    pairs: Any,
    sums: Any,
    values: Any,
    weights: Any,
    alpha: Any,
    count: Any,
    vectors: Any,
) -> Any:
    """sums ``[D, PANEL]`` = alpha * sums + values^T x weights ``[count, PANEL]``, by address.

    values are float32 ``[count, D]``; ``pairs`` (a literal): bfloat16 pairs of two
    tokens ``[count / 2, D]``, and weights are pairs likewise.
    """
    pair, dim = pairs.literal_value, spec.spec.head_dim

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        element = (_I32 if pair else _F32).as_pointer()
        c, a, b, factor = _addresses(code, args[2:6], [_F32_PTR, element, element, _F32_PTR])
        length = builder.lshr(args[6], _I64(1)) if pair else args[6]

        def emit(n: int) -> None:
            function = _multiply(builder.module, n, pair, 1, dim, add=True)
            builder.call(function, [c, a, b, factor, _I64(dim), length])

        _switch(code, args[7], emit)
        return context.get_dummy_value()

    return types.void(spec, pairs, *[_ADDRESS] * 6), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def softmax(
    typing: Any,
    spec: Any,
    pairs: Any,
    scores: Any,
    key_positions: Any,
    positions: Any,
    maximum: Any,
    total: Any,
    alpha: Any,
    block_maximum: Any,
    sums: Any,
    stride: Any,
    count: Any,
    scale: Any,
    masked: Any,
    vectors: Any,
) -> Any:
    """One step of the online softmax over a block of keys; see ``_softmax``."""
    pair, window = pairs.literal_value, spec.spec.window

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = _Code(builder)
        kinds = [_F32_PTR, _I32_PTR, _I32_PTR, *[_F32_PTR] * 5]
        pointers = _addresses(code, args[2:10], kinds)
        stride, count, scale, masked, vectors = args[10:]
        with code.steps(vectors) as v:
            lane = code.times(v, LANES)
            moved = [p if i == 1 else code.at(p, lane) for i, p in enumerate(pointers)]
            with builder.if_else(masked) as (then, otherwise):
                for branch, mask in ((then, True), (otherwise, False)):
                    with branch:
                        function = _softmax(builder.module, window, pair, mask)
                        builder.call(function, [*moved, stride, count, scale])
        return context.get_dummy_value()

    return types.void(
        spec, pairs, *[_ADDRESS] * 10, types.float32, types.boolean, types.intp
    ), generate


@intrinsic  # type: ignore[untyped-decorator]
def normalise(
    typing: Any,
    sums: Any,
    stride: Any,
    windows: Any,
    block_maximum: Any,
    maximum: Any,
    total: Any,
    scale: Any,
    vectors: Any,
) -> Any:
    """Window sums ``[windows, stride]`` of one block to attention mass, in place, by address.

    ``mass = sum * 2**((block_maximum - maximum) * scale) / total``
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, b = _Code(builder), builder
        sums, stride, windows, block_maximum, maximum, total, scale, vectors = args
        sums, block_maximum, maximum, total = _addresses(
            code, [sums, block_maximum, maximum, total], [_F32_PTR] * 4
        )
        scale = code.broadcast(scale)
        with code.steps(vectors) as v:
            lane = code.times(v, LANES)
            difference = b.fsub(
                code.load(code.at(block_maximum, lane)), code.load(code.at(maximum, lane))
            )
            weight = code.exp2(b.fmul(difference, scale))
            factor = b.fdiv(weight, code.load(code.at(total, lane)))
            slot = code.variable(code.at(sums, lane))
            with code.steps(windows):
                target = b.load(slot)
                code.store(b.fmul(code.load(target), factor), target)
                b.store(code.at(target, stride), slot)
        return context.get_dummy_value()

    return types.void(*[_ADDRESS] * 6, types.float32, types.intp), generate
