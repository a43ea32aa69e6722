"""Coded records on the device: addresses, codes and parameters, and keys after RoPE.

A *unit* is the ``min(W, 8)`` tokens whose codes share a word (see ``layout``): most windows are
one unit, longer ones two or four. Kernels work on tiles of units by channels, one token of the
unit after another, so that a word and its parameters are read once for all its tokens, and so
that sums over the tokens of a unit stay within a thread.

Codes become floats without conversion: they are cut out of the word and taken as the mantissa of a
float, two of them in one 32-bit instruction, and parameters make good the power of two.

- keys, float16, subnormal: ``x = code / 2**16 / 4**k`` (4 bits: ``/ 2**18``), and
  ``key * KEY_UNIT / 4**k = zero / 4**k + x * step``, where ``step`` carries the rest, and ``k``
  is 1 where two tokens are cut out after one shift, and else 0 (``key_exponent``).
- values, bfloat16: ``x = 1 + code / 2**n`` (``n`` of ``value_exponent``), and the value is
  ``zero - scale * 2**n + x * scale * 2**n``.

Keys are computed in float16, parameters, cosines and sines included: their error is about that of
keys stored in bfloat16, or below. The keys of a channel may differ by 3000 within a window;
queries must be below ``2**14``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# What kernels are written in knows neither unpacking nor conditions joined at compile time:
# ruff: noqa: RUF005, SIM108

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from qevict_kernels.layout import ParamFormat, RecordLayout, WindowGeometry

__all__ = [
    "KEY_UNIT",
    "Spec",
    "coefficients",
    "key_exponent",
    "key_header",
    "load_channels",
    "load_params",
    "load_words",
    "plain_keys",
    "prefetch_records",
    "product",
    "rotated_coefficients",
    "rotated_keys",
    "token_params",
    "unpack_key",
    "unpack_value",
    "value_exponent",
    "value_header",
]


KEY_UNIT = tl.constexpr(2.0**-10)
"""Keys are computed times this, so that parameters that undo subnormal codes are not too large."""
MIDDLE = tl.constexpr(128)


@dataclass(frozen=True)
class Spec:
    """What a kernel is compiled for; passed to it as one ``tl.constexpr``.

    ``interpreted``: whether Triton's interpreter runs it, which knows neither machine instructions
    nor products of bfloat16.
    """

    geometry: WindowGeometry
    rotary_dim: int
    is_neox: bool
    interpreted: bool

    @property
    def record(self) -> RecordLayout:
        """Where the fields of a record lie."""
        return self.geometry.record

    @property
    def fp16_params(self) -> bool:
        """Whether scales and zeros are stored as float16."""
        return self.geometry.params is ParamFormat.FP16

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.geometry.head_dim

    @property
    def padded_dim(self) -> int:
        """``head_dim``, rounded up to a power of two."""
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def block(self) -> int:
        """Channels of values, or of FULL keys, that are handled at a time."""
        return 32 if self.head_dim % 64 else 64

    @property
    def tokens(self) -> int:
        """Tokens of a unit."""
        return self.geometry.code_group

    @property
    def units(self) -> int:
        """Units of a window."""
        return self.geometry.window // self.tokens

    @property
    def pairs(self) -> int:
        """Pairs of channels that RoPE rotates."""
        return self.rotary_dim // 2

    @property
    def pair_stride(self) -> int:
        """From the first channel of a pair to that of the next."""
        return 1 if self.is_neox else 2

    @property
    def partner(self) -> int:
        """From the first channel of a pair to the second."""
        return self.pairs if self.is_neox else 1


# -- where a token's code lies, and what it becomes ------------------------------------------


@triton.constexpr_function
def key_exponent(bits: int, token: int) -> int:
    """``k`` of a token."""
    return 1 - token % 2 if bits == 2 else 0


@triton.constexpr_function
def value_exponent(bits: int, token: int) -> int:
    """``n`` of a token."""
    return 7 - 2 * (token % 8 % 3) if bits == 2 else 4


@triton.constexpr_function
def _key_cut(bits: int, token: int) -> tuple[int, int]:
    """(bits to rotate a 16-bit word to the left by, mask) for float16's mantissa of 10 bits."""
    if bits == 2:
        return 6 - 4 * (token // 2), 0x300 >> 2 * (1 - token % 2)
    return 6 - 4 * (token % 4), 0x3C0


@triton.constexpr_function
def _value_cut(bits: int, token: int) -> tuple[int, int]:
    """The same for bfloat16's mantissa of 7 bits."""
    if bits == 2:
        return -6 * (token // 3), 3 << 2 * (token % 3)
    return 3 - 4 * (token % 4), 0x78


@triton.constexpr_function
def _cut_asm(cut: tuple[int, int], one: int) -> str:
    shift, mask = cut
    return (
        "{ .reg .b32 t;"
        f" shf.l.wrap.b32 t, $1, $1, {shift % 32};"
        f" lop3.b32 $0, t, {mask * 0x10001}, {one * 0x10001}, 0xEA; }}"
    )


@triton.jit
def _cut(words, CUT: tl.constexpr, ONE: tl.constexpr, spec: tl.constexpr):
    """int16 words with one code put into the mantissa of ``ONE``, the bits of a float."""
    if spec.interpreted:
        wide = words.to(tl.int32) & 0xFFFF
        if CUT[0] >= 0:
            moved = wide << CUT[0]
        else:
            moved = wide >> -CUT[0]
        return ((moved & CUT[1]) | ONE).to(tl.int16)
    return tl.inline_asm_elementwise(
        _cut_asm(CUT, ONE), "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2
    )


@triton.jit
def unpack_key(words, token: tl.constexpr, spec: tl.constexpr):
    """float16 ``code / 2**16 / 4**key_exponent`` (4 bits: ``/ 2**18``), from ``load_words``."""
    word = words[token * spec.geometry.key_bits // 16]
    cut = _cut(word, _key_cut(spec.geometry.key_bits, token), 0, spec)
    return cut.to(tl.float16, bitcast=True)


@triton.jit
def unpack_value(words, token: tl.constexpr, spec: tl.constexpr):
    """bfloat16 ``1 + code / 2**value_exponent`` of a token, from ``load_words``."""
    word = words[token * spec.geometry.value_bits // 16]
    cut = _cut(word, _value_cut(spec.geometry.value_bits, token), 0x3F80, spec)
    return cut.to(tl.bfloat16, bitcast=True)


# -- reading a record ------------------------------------------------------------------------


@triton.jit
def load_channels(base, channel, valid, WHOLE: tl.constexpr):
    """``base[channel]`` ``[U, C]`` for pointers ``base`` ``[U]``.

    ``valid`` ``[C]``: which channels there are, the others give 0; ignored where ``WHOLE``.
    """
    places = base[:, None] + channel[None, :]
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=valid[None, :], other=0)


@triton.jit
def load_words(
    records, unit, channel, valid, OFFSET: tl.constexpr, BITS: tl.constexpr,
    WHOLE: tl.constexpr, spec: tl.constexpr,
):  # fmt: skip
    """Code words of ``channel`` ``[C]`` in ``unit`` ``[U]`` of records: int16 ``[U, C]`` each.

    ``records``: uint8 pointers ``[U]``. ``OFFSET``: of the codes in a record. Element ``j`` of the
    tuple holds the codes from bit ``16 * j`` of the word on. ``valid``: see ``load_channels``.
    """
    if spec.tokens * BITS == 8:
        base = records + OFFSET
    elif spec.tokens * BITS == 16:
        base = records.to(tl.pointer_type(tl.int16)) + OFFSET // 2
    else:
        base = records.to(tl.pointer_type(tl.int32)) + OFFSET // 4
    if spec.units > 1:
        base += unit * spec.head_dim
    words = load_channels(base, channel, valid, WHOLE)
    halves = (words.to(tl.int16),)
    if spec.tokens * BITS == 32:
        halves = halves + ((words >> 16).to(tl.int16),)
    return halves


@triton.jit
def load_params(
    records, channel, valid, OFFSET: tl.constexpr, LESS: tl.constexpr, WHOLE: tl.constexpr,
    spec: tl.constexpr,
):  # fmt: skip
    """Stored scales or zeros of key channels as float16 ``[U, C]``; of bytes, ``LESS`` is taken."""
    if spec.fp16_params:
        base = records.to(tl.pointer_type(tl.float16)) + OFFSET // 2
        return load_channels(base, channel, valid, WHOLE)
    stored = load_channels(records + OFFSET, channel, valid, WHOLE)
    if spec.interpreted:
        return stored.to(tl.float16) - LESS
    # Bytes into the mantissas of 1024: exact, and much cheaper than a conversion.
    halves = tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0x64, 0x4140; prmt.b32 $1, $2, 0x64, 0x4342;",
        "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip
    return halves - (1024.0 + LESS)


@triton.jit
def key_header(records, spec: tl.constexpr):
    """(step, zero step, base): what makes stored key parameters numbers, float16 ``[U]``.

    The base is that of the middle byte, which halves the rounding of the zeros. With float16
    parameters there is no header, and only the powers of two remain.
    """
    POWER: tl.constexpr = KEY_UNIT * (2.0**16 if spec.geometry.key_bits == 2 else 2.0**18)
    if spec.fp16_params:
        one = tl.full(records.shape, 1.0, tl.float32).to(tl.float16)
        return one * POWER, one * KEY_UNIT, one * 0.0
    header = records.to(tl.pointer_type(tl.float32)) + spec.record.header // 4
    zero_step = tl.load(header + 2)
    base = tl.load(header + 1) + zero_step * MIDDLE
    step = (tl.load(header) * POWER).to(tl.float16)
    return step, (zero_step * KEY_UNIT).to(tl.float16), (base * KEY_UNIT).to(tl.float16)


@triton.jit
def coefficients(records, header, channel, valid, WHOLE: tl.constexpr, spec: tl.constexpr):
    """(zero, step) of key channels, float16 ``[U, C]``; ``header``: of ``key_header``.

    Before RoPE ``key * KEY_UNIT / 4**k`` is ``zero / 4**k + unpack_key(words, token) * step``.
    """
    scale_step, zero_step, base = header
    step = load_params(records, channel, valid, spec.record.key_scales, 0, WHOLE, spec)
    zero = load_params(records, channel, valid, spec.record.key_zeros, MIDDLE, WHOLE, spec)
    zero = zero * zero_step[:, None]
    if not spec.fp16_params:
        zero += base[:, None]
    return zero, step * scale_step[:, None]


@triton.jit
def rotated_coefficients(first, second, cos, sin):
    """Dequantisation and rotation in one, for pairs of channels of one angle a unit.

    ``first``, ``second``: the (zero, step) of the two channels; ``cos``, ``sin``: ``[U, C]``.
    ``rotated_keys`` takes the result.
    """
    zero1, step1 = first
    zero2, step2 = second
    rotated1 = (zero1 * cos - zero2 * sin, step1 * cos, step2 * sin)
    rotated2 = (zero2 * cos + zero1 * sin, step2 * cos, step1 * sin)
    return (rotated1, rotated2)


@triton.jit
def rotated_keys(words1, words2, rotated, token: tl.constexpr, spec: tl.constexpr):
    """Both channels of pairs of keys of one token, rotated, ``* KEY_UNIT / 4**key_exponent``."""
    zero1, a1, b1 = rotated[0]
    zero2, a2, b2 = rotated[1]
    share: tl.constexpr = 0.25 ** key_exponent(spec.geometry.key_bits, token)
    x1 = unpack_key(words1, token, spec)
    x2 = unpack_key(words2, token, spec)
    key1 = zero1 * share + x1 * a1 - x2 * b1
    key2 = zero2 * share + x2 * a2 + x1 * b2
    return (key1, key2)


@triton.jit
def plain_keys(words, zero_step, token: tl.constexpr, spec: tl.constexpr):
    """Keys of one token in channels that RoPE leaves alone, ``* KEY_UNIT / 4**key_exponent``."""
    zero, step = zero_step
    share: tl.constexpr = 0.25 ** key_exponent(spec.geometry.key_bits, token)
    return zero * share + unpack_key(words, token, spec) * step


@triton.jit
def token_params(records, unit, token: tl.constexpr, OFFSET: tl.constexpr, spec: tl.constexpr):
    """Stored scale or zero of one token's values, float32 ``[U]``; bytes are whole numbers."""
    width: tl.constexpr = 2 if spec.fp16_params else 1
    base = records.to(tl.pointer_type(tl.int32)) + OFFSET // 4
    if spec.units > 1:
        base += unit * (spec.tokens * width // 4)
    # The same words serve several tokens; the compiler reads them once.
    word = tl.load(base + token * width // 4) >> (token * width % 4 * 8)
    if spec.fp16_params:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return (word & 255).to(tl.float32)


@triton.jit
def value_header(records, spec: tl.constexpr):
    """(scale step, zero base, zero step) of the values, float32 ``[U]`` each."""
    if spec.fp16_params:
        one = tl.full(records.shape, 1.0, tl.float32)
        return one, one * 0.0, one
    header = records.to(tl.pointer_type(tl.float32)) + spec.record.header // 4
    return tl.load(header + 3), tl.load(header + 4), tl.load(header + 5)


@triton.jit
def product(a, b, sums, spec: tl.constexpr):
    """``sums + a @ b`` in float32."""
    if spec.interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums)


@triton.jit
def prefetch_records(records, spec: tl.constexpr):
    """Ask for records at pointers ``[U]``: loads will find them in the second cache level."""
    SIZE: tl.constexpr = spec.record.record_bytes
    if not spec.interpreted:
        for start in tl.static_range(0, SIZE, 64):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l",
                [(records + start).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
