"""Building blocks of generated code: explicit float32 vectors in LLVM IR.

numba's loops over small windows leave most of a core idle: LLVM sees neither the vector
width nor the register blocking. The inner blocks of the kernels are therefore written as
Python functions that *emit* LLVM IR through an ``Emitter`` (Python loops unroll, a list of
values is a register tile), and are called from ordinary numba code::

    @vector_function
    def add_rows(e, spec, source, target):          # emits the body
        for d in range(0, spec.head_dim, e.lanes):
            e.store(e.fadd(e.load(source, d), e.load(target, d)), target, d)

    @intrinsic
    def _add_rows(typing_context, spec, source, target):
        return add_rows(spec, source, target)        # callable from @njit code

Arguments of a vector function are addresses (int64 in numba code); they become ``noalias``
pointers of a separate function that is not inlined, so the optimiser sees that stores do not
disturb loads. An argument whose name starts with ``num_`` or ends with ``_index`` stays an integer.

Rounding is that of each single operation (no fast-math): results depend on the emitted order
alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from qevict_kernels.numba.spec import Spec, SpecType

__all__ = ["F32", "I8", "I16", "I32", "I64", "Emitter", "vector_function"]

F32, F16 = ir.FloatType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))

# 2**f on [-1/2, 1/2], minimax: relative error below 2e-9 before rounding.
_EXP2 = (
    1.0,
    0.6931472028559569,
    0.24022647913499817,
    0.0555033246971548,
    0.0096184373664106,
    0.0013398874859832266,
    0.00015353360616531228,
)


class Emitter:
    """Emits vector code at the end of a builder's current block.

    Vectors have ``lanes`` float32 (or int32) elements unless a width is given. Offsets of
    loads and stores count elements, and may be Python integers or i64 values.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes

    # -- memory ---------------------------------------------------------------------------

    def offset(self, pointer: ir.Value, num_bytes: int | ir.Value) -> ir.Value:
        """``pointer`` moved by a number of bytes."""
        base = self.b.bitcast(pointer, I8.as_pointer())
        return self.b.gep(base, [_i64(num_bytes)])

    def plus(self, a: ir.Value, b: int | ir.Value) -> ir.Value:
        """Sum of two i64 offsets."""
        return self.b.add(a, _i64(b))

    def pointer(self, address: ir.Value) -> ir.Value:
        """An i64 address as a pointer."""
        return self.b.inttoptr(address, I8.as_pointer())

    def load(
        self, pointer: ir.Value, offset: int | ir.Value = 0, lanes: int = 0, dtype: Any = F32
    ) -> ir.Value:
        """``lanes`` elements of ``dtype`` from element ``offset`` on; a scalar if 1."""
        typ = _vector(dtype, lanes or self.lanes)
        place = self.b.gep(self.b.bitcast(pointer, dtype.as_pointer()), [_i64(offset)])
        return self.b.load(self.b.bitcast(place, typ.as_pointer()), align=_size(dtype))

    def store(self, value: ir.Value, pointer: ir.Value, offset: int | ir.Value = 0) -> None:
        """Write a vector or scalar to element ``offset`` on."""
        dtype = getattr(value.type, "element", value.type)
        place = self.b.gep(self.b.bitcast(pointer, dtype.as_pointer()), [_i64(offset)])
        self.b.store(value, self.b.bitcast(place, value.type.as_pointer()), align=_size(dtype))

    def load_half(
        self, pointer: ir.Value, offset: int | ir.Value, half: str, lanes: int = 0
    ) -> ir.Value:
        """bfloat16 (``"bf16"``) or float16 (``"fp16"``) elements as float32."""
        lanes = lanes or self.lanes
        if half == "fp16":
            return self.b.fpext(self.load(pointer, offset, lanes, F16), _vector(F32, lanes))
        bits = self.zext(self.load(pointer, offset, lanes, I16))
        return self.as_float(self.shl(bits, 16))

    def store_half(
        self, value: ir.Value, pointer: ir.Value, offset: int | ir.Value, half: str
    ) -> None:
        """Write float32 as bfloat16 or float16, rounded to nearest even (as torch does)."""
        lanes = _lanes(value)
        if half == "fp16":
            self.store(self.b.fptrunc(value, _vector(F16, lanes)), pointer, offset)
            return
        bits = self.as_int(value)
        even = self.b.and_(self.lshr(bits, 16), self.splat_int(1, lanes))
        rounded = self.b.add(bits, self.b.add(even, self.splat_int(0x7FFF, lanes)))
        nan = self.b.fcmp_unordered("uno", value, value)
        rounded = self.b.select(nan, self.splat_int(0x7FC00000, lanes), rounded)
        words = self.b.trunc(self.lshr(rounded, 16), _vector(I16, lanes))
        self.store(words, pointer, offset)

    def load_words(
        self, pointer: ir.Value, offset: int | ir.Value, bits: int, lanes: int = 0
    ) -> ir.Value:
        """Code words of ``bits`` (8, 16 or 32) bits as int32."""
        return self.zext(self.load(pointer, offset, lanes or self.lanes, ir.IntType(bits)))

    def load_bytes(self, pointer: ir.Value, offset: int | ir.Value = 0, lanes: int = 0) -> ir.Value:
        """Unsigned bytes as float32."""
        values = self.zext(self.load(pointer, offset, lanes or self.lanes, I8))
        return self.b.sitofp(values, _vector(F32, _lanes(values)))

    def prefetch(self, pointer: ir.Value, num_bytes: int, locality: int = 3) -> None:
        """Ask for the cache lines of ``num_bytes`` bytes (64-byte lines).

        ``locality`` 3 brings them into the first cache level, 2 into the second.
        """
        name = "llvm.prefetch.p0"
        typ = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, typ, name)
        for start in range(0, num_bytes, 64):
            self.b.call(function, [self.offset(pointer, start), I32(0), I32(locality), I32(1)])

    def scratch(self, num_floats: int) -> ir.Value:
        """An aligned float32 array on the stack of this function."""
        with self.b.goto_entry_block():
            array = self.b.alloca(ir.ArrayType(F32, num_floats))
            array.align = 64
            return self.b.bitcast(array, I8.as_pointer())

    # -- arithmetic -----------------------------------------------------------------------

    def splat(self, value: float | ir.Value, lanes: int = 0) -> ir.Value:
        """A float32 constant or scalar in every lane."""
        lanes = lanes or self.lanes
        if not isinstance(value, ir.Value):
            return _vector(F32, lanes)([F32(value)] * lanes)
        single = self.b.insert_element(_vector(F32, lanes)(ir.Undefined), value, I32(0))
        return self.shuffle(single, None, [0] * lanes)

    def splat_int(self, value: int, lanes: int = 0) -> ir.Value:
        """An int32 constant in every lane."""
        lanes = lanes or self.lanes
        return _vector(I32, lanes)([I32(value)] * lanes)

    def broadcast(self, pointer: ir.Value, offset: int | ir.Value = 0, lanes: int = 0) -> ir.Value:
        """One float32 of memory in every lane."""
        return self.splat(self.load(pointer, offset, 1), lanes)

    def constant(self, values: Sequence[float]) -> ir.Value:
        """A float32 constant vector."""
        return _vector(F32, len(values))([F32(v) for v in values])

    def fadd(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a + b"""
        return self.b.fadd(a, b)

    def fsub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a - b"""
        return self.b.fsub(a, b)

    def fmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a * b"""
        return self.b.fmul(a, b)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value | None) -> ir.Value:
        """a * b + c, rounded once (a * b where ``c`` is None)."""
        return self.b.fmul(a, b) if c is None else self._call("llvm.fma", a, b, c)

    def fnma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """c - a * b, rounded once."""
        return self.fma(self.b.fneg(a), b, c)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger; ``b`` where either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The smaller; ``b`` where either is NaN."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def fdiv(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a / b"""
        return self.b.fdiv(a, b)

    def quotient(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a / b, and 0 where b is 0."""
        zero = self.splat(0.0, _lanes(a))
        return self.b.select(self.b.fcmp_unordered("==", b, zero), zero, self.b.fdiv(a, b))

    def clamp(self, a: ir.Value, low: float, high: float) -> ir.Value:
        """``a`` limited to [low, high]; NaN stays NaN."""
        lanes = _lanes(a)
        return self.minimum(self.splat(high, lanes), self.maximum(self.splat(low, lanes), a))

    def floor(self, a: ir.Value) -> ir.Value:
        """To the next integer below."""
        return self._call("llvm.floor", a)

    def ceil(self, a: ir.Value) -> ir.Value:
        """To the next integer above."""
        return self._call("llvm.ceil", a)

    def round(self, a: ir.Value) -> ir.Value:
        """To the nearest integer, ties to even."""
        return self._call("llvm.rint", a)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2**x within 2 ulp for x <= 127; 0 for x <= -127 (-inf too); NaN stays NaN."""
        lanes = _lanes(x)
        x = self.maximum(self.splat(-127.0, lanes), x)
        whole = self.round(x)
        power = self.b.add(self.b.fptosi(whole, _like(I32, x)), self.splat_int(127, lanes))
        fraction = self.fsub(x, whole)
        y = self.splat(_EXP2[-1], lanes)
        for coefficient in _EXP2[-2::-1]:
            y = self.fma(y, fraction, self.splat(coefficient, lanes))
        return self.fmul(y, self.as_float(self.shl(power, 23)))

    # -- bits -----------------------------------------------------------------------------

    def zext(self, a: ir.Value) -> ir.Value:
        """Narrow integers as int32."""
        return a if _element(a) == I32 else self.b.zext(a, _like(I32, a))

    def to_int(self, a: ir.Value) -> ir.Value:
        """A float32 that holds a small whole number as int32."""
        return self.b.fptosi(a, _like(I32, a))

    def narrow(self, a: ir.Value, bits: int) -> ir.Value:
        """The low bits of int32 as integers of 8, 16 or 32 bits."""
        return a if bits == 32 else self.b.trunc(a, _like(ir.IntType(bits), a))

    def shl(self, a: ir.Value, bits: int) -> ir.Value:
        """a << bits"""
        return self.b.shl(a, _like(I32, a)([I32(bits)] * _lanes(a))) if bits else a

    def lshr(self, a: ir.Value, bits: int) -> ir.Value:
        """a >> bits (logical)"""
        return self.b.lshr(a, _like(I32, a)([I32(bits)] * _lanes(a))) if bits else a

    def as_float(self, a: ir.Value) -> ir.Value:
        """The bits of an int32 read as float32."""
        return self.b.bitcast(a, _like(F32, a))

    def as_int(self, a: ir.Value) -> ir.Value:
        """The bits of a float32 as int32."""
        return self.b.bitcast(a, _like(I32, a))

    def code_as_number(self, words: ir.Value, index: int | Sequence[int], bits: int) -> ir.Value:
        """Code ``index`` of each word, or ``index[lane]`` of each lane's word, as float32."""
        lanes = _lanes(words)
        places = [index] * lanes if isinstance(index, int) else index
        moved = self.b.lshr(words, _like(I32, words)([I32(i * bits) for i in places]))
        if lanes == 16:  # one lookup instead of a mask and a conversion
            return self.lookup16(self.constant([float(n % (1 << bits)) for n in range(16)]), moved)
        codes = self.b.and_(moved, self.splat_int((1 << bits) - 1, lanes))
        return self.b.sitofp(codes, _like(F32, words))

    def lookup16(self, table: ir.Value, index: ir.Value) -> ir.Value:
        """``table[index & 15]`` of a 16-lane register table (AVX-512)."""
        typ = ir.FunctionType(table.type, [table.type, index.type])
        name = "llvm.x86.avx512.permvar.sf.512"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, typ, name), [table, index])

    # -- lanes ----------------------------------------------------------------------------

    def shuffle(self, a: ir.Value, b: ir.Value | None, lanes: Sequence[int]) -> ir.Value:
        """Lanes of the concatenation of ``a`` and ``b``; a scalar where one is asked for."""
        if len(lanes) == 1 and lanes[0] < _lanes(a):
            return self.element(a, lanes[0])
        other = a.type(ir.Undefined) if b is None else b
        return self.b.shuffle_vector(a, other, _vector(I32, len(lanes))([I32(i) for i in lanes]))

    def repeat(self, a: ir.Value, times: int) -> ir.Value:
        """All lanes, ``times`` times over."""
        return self.shuffle(a, None, list(range(_lanes(a))) * times)

    def split_pairs(self, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(even, odd) elements of two vectors in a row."""
        lanes = _lanes(a)
        return (
            self.shuffle(a, b, range(0, 2 * lanes, 2)),
            self.shuffle(a, b, range(1, 2 * lanes, 2)),
        )

    def join_pairs(self, even: ir.Value, odd: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The inverse of ``split_pairs``."""
        lanes = _lanes(even)
        order = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
        return self.shuffle(even, odd, order[:lanes]), self.shuffle(even, odd, order[lanes:])

    def element(self, a: ir.Value, lane: int) -> ir.Value:
        """One lane as a scalar."""
        if _lanes(a) == 1:
            return a
        return self.b.extract_element(a, I32(lane))

    def fold(self, a: ir.Value, op: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes combined by ``op`` (``fadd``, ``maximum``, ...) in a tree: a scalar."""
        lanes = _lanes(a)
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(a, None, range(lanes))
            a = op(low, self.shuffle(a, None, range(lanes, 2 * lanes)))
        return self.element(a, 0)

    def sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """Sum over the lanes of each of 1, 2, 4, ... <= lanes vectors: lane ``i`` of the
        result (``len(vectors)`` lanes) is the sum of ``vectors[i]``.

        A transposition and the additions in one tree: about three operations a vector.
        """
        rows, period = list(vectors), 1
        while len(rows) > 1:
            rows = [self.sum_pair(a, b, period) for a, b in zip(rows[::2], rows[1::2], strict=True)]
            period *= 2
        return self.sum_rest(rows[0], period)

    def sum_pair(self, a: ir.Value, b: ir.Value, period: int) -> ir.Value:
        """One step of ``sums``: two rows of ``period`` unfinished sums to one of twice as many.

        In a row, block ``k`` of ``period`` lanes is the ``k``-th part of each sum. A step keeps
        the sums of ``a`` before those of ``b`` and halves the number of parts.
        """
        lanes = _lanes(a)
        if period < 4 <= lanes:  # stay inside 128-bit lanes, where a shuffle is cheapest
            steps = range(0, 2, period)
            starts = [base + i for base in range(0, lanes, 4) for i in steps]
            far = 2
        else:
            starts = list(range(0, lanes, 2 * period))
            far = period
        low: list[int] = []
        for start in starts:
            block = list(range(start, start + period))
            low += block + [lane + lanes for lane in block]
        high = [lane + far for lane in low]
        return self.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))

    def sum_rest(self, a: ir.Value, period: int, parts: int = 1) -> ir.Value:
        """Finish the ``period`` sums of a row, or of each of its ``parts``.

        Sum ``i`` of part ``k`` is lane ``i * parts + k`` of the result.
        """
        width = _lanes(a) // parts
        while width > period:
            width //= 2
            low = [2 * width * k + i for k in range(parts) for i in range(width)]
            high = self.shuffle(a, None, [lane + width for lane in low])
            a = self.fadd(self.shuffle(a, None, low), high)
        return self.shuffle(a, None, [period * k + i for i in range(period) for k in range(parts)])

    # -- control flow ---------------------------------------------------------------------

    @contextmanager
    def loop(self, count: int | ir.Value, unroll: bool = True) -> Iterator[ir.Value]:
        """Run the body with an i64 index from 0 to ``count`` (exclusive).

        Without ``unroll`` the body stays one small block: LLVM orders a long run of vector code
        in ways that spill.
        """
        with cgutils.for_range(self.b, _i64(count)) as state:
            yield state.index
        if not unroll:
            body = state.index.incomings[1][1]
            body.terminator.set_metadata("llvm.loop", _keep_rolled(self.b.module))

    def variable(self, initial: ir.Value, at_entry: bool = False) -> ir.Value:
        """A mutable value (kept in a register by the optimiser): read with ``get``.

        It is set to ``initial`` here, or, a constant, once at the function's entry.
        """
        with self.b.goto_entry_block():
            place = self.b.alloca(initial.type)
            if at_entry:
                self.b.store(initial, place)
        if not at_entry:
            self.b.store(initial, place)
        return place

    def get(self, variable: ir.Value) -> ir.Value:
        """The current value of a ``variable``."""
        return self.b.load(variable)

    def set(self, variable: ir.Value, value: ir.Value) -> None:
        """Assign a ``variable``."""
        self.b.store(value, variable)

    def _call(self, name: str, *args: ir.Value) -> ir.Value:
        suffix = f"v{_lanes(args[0])}f32" if isinstance(args[0].type, ir.VectorType) else "f32"
        typ = ir.FunctionType(args[0].type, [a.type for a in args])
        function = cgutils.get_or_insert_function(self.b.module, typ, f"{name}.{suffix}")
        return self.b.call(function, args)


def vector_function(build: Callable[..., None]) -> Callable[..., tuple[Any, Any]]:
    """Turn ``build(emitter, spec, *arguments)`` into the body of a numba ``@intrinsic``.

    The result, called with the numba types of ``spec`` and the arguments, gives the signature
    and the code generator that ``@intrinsic`` expects.
    """
    names = list(inspect.signature(build).parameters)[2:]
    is_count = [name.startswith("num_") or name.endswith("_index") for name in names]

    def declare(spec_type: SpecType, *arguments: Any) -> tuple[Any, Any]:
        signature = types.void(spec_type, *[types.int64] * len(names))

        def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
            function = _define(builder.module, spec_type.spec, build, names, is_count)
            builder.call(
                function,
                [
                    a if count else builder.inttoptr(a, I8.as_pointer())
                    for a, count in zip(args[1:], is_count, strict=True)
                ],
            )
            return context.get_dummy_value()

        return signature, generate

    return declare


def _define(
    module: ir.Module,
    spec: Spec,
    build: Callable[..., None],
    names: list[str],
    is_count: list[bool],
) -> ir.Function:
    name = f"qevict.{build.__name__}.{spec.name}"
    if name in module.globals:
        return module.globals[name]
    arguments = [I64 if count else I8.as_pointer() for count in is_count]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    function.attributes.alignstack = 64  # a spilled vector must not cross a cache line
    for argument, label, count in zip(function.args, names, is_count, strict=True):
        argument.name = label
        if not count:
            argument.add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    build(Emitter(builder, spec.lanes), spec, *function.args)
    builder.ret_void()
    return function


def _keep_rolled(module: ir.Module) -> Any:
    """A fresh loop id: a node that names itself, then its options."""
    option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    loop_id = ir.MDValue(module, [option], name=str(len(module.metadata)))
    loop_id.operands = (loop_id, option)
    return loop_id


def _vector(dtype: Any, lanes: int) -> Any:
    return dtype if lanes == 1 else ir.VectorType(dtype, lanes)


def _element(value: ir.Value) -> Any:
    return getattr(value.type, "element", value.type)


def _lanes(value: ir.Value) -> int:
    return int(getattr(value.type, "count", 1))


def _like(dtype: Any, value: ir.Value) -> Any:
    return _vector(dtype, _lanes(value))


def _size(dtype: Any) -> int:
    return 4 if dtype == F32 else 2 if dtype == F16 else max(dtype.width // 8, 1)


def _i64(value: int | ir.Value) -> ir.Value:
    return value if isinstance(value, ir.Value) else I64(value)
