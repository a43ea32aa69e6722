"""Windows to codes and back; byte for byte what ``reference`` makes.

Every step is the reference's float32 operation, in its order: divisions round to nearest, and
the kernels are compiled without fused multiply-adds, since a fused one rounds elsewhere.

An entry of the list is one program's, all KV heads one after another; it is done at once where
it is to be skipped, so that long lists with few entries cost little. Where the length of a list is
on the device, a fixed number of programs takes turns. A head is a tile ``[W, D]``, channels padded
to a power of two.

Bytes: a FULL window and ``W`` rows of the rotary table are read, a record is written (or the
other way round).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qevict_kernels.checks import check, check_stores
from qevict_kernels.interface import FullArena
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.reference import SCALE_MARGIN, STEP_MARGIN
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.memory import programs
from qevict_kernels.triton.records import load_codes, load_params

__all__ = ["TritonCodes", "code_options", "dequantize_kernel", "quantize_kernel"]

_LARGEST = tl.constexpr(3.4028234663852886e38)
_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_HALF_NAN = tl.constexpr(0x7E00)
_SCALE_MARGIN = tl.constexpr(SCALE_MARGIN)
_STEP_MARGIN = tl.constexpr(STEP_MARGIN / 255)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)
"""Added to a float32 below 2**22, it leaves the nearest integer (half to even) in the low bits."""


class TritonCodes:
    """``quantize`` and ``dequantize`` of ``AttentionKernels``; see ``interface``.

    ``_cos_sin``: the rotary table, contiguous, on the device of the arenas.
    """

    geometry: WindowGeometry
    rotary: RotaryTable
    _cos_sin: torch.Tensor

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
        count: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the codes of FULL windows; returns which hold NaN or infinity, bool ``[n]``.

        ``count``: int32 on the device, how many of the entries there are; None: all.
        """
        self._check_entries(full, coded, full_slots, coded_slots, windows)
        refused = torch.empty_like(full_slots, dtype=torch.uint8)
        if grid := programs(full_slots, count):
            quantize_kernel[grid,](
                full.keys, full.values, coded, self._cos_sin, full_slots, coded_slots, windows,
                refused, refused if count is None else count, full.keys.stride(0),
                COUNTED=count is not None, **code_options(self.geometry, self.rotary),
            )  # fmt: skip
        return refused.view(torch.bool)

    def dequantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
        count: torch.Tensor | None = None,
    ) -> None:
        """Rebuild FULL windows from codes; ``count``: as for ``quantize``."""
        self._check_entries(full, coded, full_slots, coded_slots, windows)
        if grid := programs(full_slots, count):
            dequantize_kernel[grid,](
                full.keys, full.values, coded, self._cos_sin, full_slots, coded_slots, windows,
                full_slots if count is None else count, full.keys.stride(0),
                COUNTED=count is not None, **code_options(self.geometry, self.rotary),
            )  # fmt: skip

    def _check_entries(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> None:
        count = full_slots.shape[0]
        check_stores(self.geometry, full, coded, self._cos_sin.device.type)
        check("full_slots", full_slots, (torch.int32,), (count,))
        check("coded_slots", coded_slots, (torch.int32,), (count,))
        check("windows", windows, (torch.int32,), (count,))


def code_options(geometry: WindowGeometry, rotary: RotaryTable) -> dict[str, Any]:
    """Constants of both kernels, and how they are compiled."""
    padded = triton.next_power_of_2(geometry.head_dim)
    return {
        "G": geometry,
        "ROTARY_DIM": rotary.rotary_dim,
        "IS_NEOX": rotary.is_neox,
        "PAD": padded,
        "num_warps": max(1, min(8, geometry.window * padded // 256)),
        "enable_fp_fusion": False,
    }


# -- kernels ------------------------------------------------------------------------------


@triton.jit
def quantize_kernel(
    full_keys, full_values, coded, cos_sin, full_slots, coded_slots, windows, refused, count,
    slot_stride, G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    PAD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Grid ``[n]``, or where ``COUNTED`` any, for int32 ``count`` entries on the device; see
    ``AttentionKernels.quantize``. ``refused``: uint8 ``[n]``, out."""
    entries = tl.load(count) if COUNTED else tl.num_programs(0)
    for entry in range(tl.program_id(0), entries, tl.num_programs(0)):
        full_slot = tl.load(full_slots + entry).to(tl.int64)
        num_bad = 0
        if full_slot >= 0:
            num_bad = _quantize_window(
                full_keys, full_values, coded, cos_sin, full_slot,
                tl.load(coded_slots + entry).to(tl.int64), tl.load(windows + entry).to(tl.int64),
                slot_stride, G, ROTARY_DIM, IS_NEOX, PAD,
            )  # fmt: skip
        tl.store(refused + entry, tl.where(num_bad > 0, 1, 0).to(tl.uint8))


@triton.jit
def _quantize_window(
    full_keys, full_values, coded, cos_sin, full_slot, coded_slot, window, slot_stride,
    G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One entry; returns how many KV heads can't be coded."""
    L: tl.constexpr = G.record
    token, d = tl.arange(0, G.window), tl.arange(0, PAD)
    there = d < G.head_dim
    everywhere = token >= 0
    place = token[:, None] * G.head_dim + d[None, :]
    is_rotated, is_first, partner, cos, sin = _rotation(
        cos_sin, window, token, d, G, ROTARY_DIM, IS_NEOX
    )
    norm = cos * cos + sin * sin
    num_bad = 0
    for head in range(G.num_kv_heads):
        start = full_slot * slot_stride + head * G.window * G.head_dim
        key = tl.load(full_keys + start + place, mask=there[None, :], other=0.0).to(tl.float32)
        other = tl.load(
            full_keys + start + token[:, None] * G.head_dim + partner[None, :],
            mask=is_rotated[None, :],
            other=0.0,
        ).to(tl.float32)
        other = tl.where(is_first[None, :], other, -other)
        unrotated = tl.div_rn(key * cos + other * sin, norm)
        key = tl.where(is_rotated[None, :], unrotated, key)
        value = tl.load(full_values + start + place, mask=there[None, :], other=0.0)
        value = value.to(tl.float32)

        low, high = tl.min(key, axis=0) + 0.0, tl.max(key, axis=0) + 0.0
        k_scale, k_zero, k_scales, k_zeros, k0, k1, k2 = _params(low, high, there, G.key_bits, G)
        low = tl.min(tl.where(there[None, :], value, _INFINITY), axis=1) + 0.0
        high = tl.max(tl.where(there[None, :], value, -_INFINITY), axis=1) + 0.0
        v_scale, v_zero, v_scales, v_zeros, v0, v1, v2 = _params(
            low, high, everywhere, G.value_bits, G
        )

        bad = tl.max(tl.max(_not_finite(key), axis=1), axis=0)
        bad = tl.maximum(bad, tl.max(tl.max(_not_finite(value), axis=1), axis=0))
        numbers = tl.maximum(_not_finite(k_scale), _not_finite(k_zero))
        bad = tl.maximum(bad, tl.max(tl.where(there, numbers, 0), axis=0))
        numbers = tl.maximum(_not_finite(v_scale), _not_finite(v_zero))
        bad = tl.maximum(bad, tl.max(numbers, axis=0))
        num_bad += bad
        is_bad = bad > 0

        record = coded + (coded_slot * G.num_kv_heads + head) * L.record_bytes
        codes = _codes(key, k_scale[None, :], k_zero[None, :], G.key_bits)
        _store_codes(record + L.key_codes, tl.where(is_bad, 0, codes), d, there, G.key_bits, G)
        codes = _codes(value, v_scale[:, None], v_zero[:, None], G.value_bits)
        _store_codes(record + L.value_codes, tl.where(is_bad, 0, codes), d, there, G.value_bits, G)
        _store_rows(record + L.key_scales, k_scales, d, there, is_bad, G)
        _store_rows(record + L.key_zeros, k_zeros, d, there, is_bad, G)
        _store_rows(record + L.value_scales, v_scales, token, everywhere, is_bad, G)
        _store_rows(record + L.value_zeros, v_zeros, token, everywhere, is_bad, G)
        if G.params.value == "uint8":
            header = (record + L.header).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(header, tl.where(is_bad, _NAN, k0))
            tl.store(header + 1, tl.where(is_bad, _NAN, k1))
            tl.store(header + 2, tl.where(is_bad, _NAN, k2))
            tl.store(header + 3, tl.where(is_bad, _NAN, v0))
            tl.store(header + 4, tl.where(is_bad, _NAN, v1))
            tl.store(header + 5, tl.where(is_bad, _NAN, v2))
        padding = L.payload_bytes + tl.arange(0, 64)
        tl.store(record + padding, tl.zeros_like(padding), mask=padding < L.record_bytes)
    return num_bad


@triton.jit
def dequantize_kernel(
    full_keys, full_values, coded, cos_sin, full_slots, coded_slots, windows, count, slot_stride,
    G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, PAD: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Grid as for ``quantize_kernel``; see ``AttentionKernels.dequantize``."""
    entries = tl.load(count) if COUNTED else tl.num_programs(0)
    for entry in range(tl.program_id(0), entries, tl.num_programs(0)):
        full_slot = tl.load(full_slots + entry).to(tl.int64)
        if full_slot >= 0:
            _dequantize_window(
                full_keys, full_values, coded, cos_sin, full_slot,
                tl.load(coded_slots + entry).to(tl.int64), tl.load(windows + entry).to(tl.int64),
                slot_stride, G, ROTARY_DIM, IS_NEOX, PAD,
            )  # fmt: skip


@triton.jit
def _dequantize_window(
    full_keys, full_values, coded, cos_sin, full_slot, coded_slot, window, slot_stride,
    G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    L: tl.constexpr = G.record
    token, d = tl.arange(0, G.window), tl.arange(0, PAD)
    there = d < G.head_dim
    place = token[:, None] * G.head_dim + d[None, :]
    is_rotated, is_first, partner, cos, sin = _rotation(
        cos_sin, window, token, d, G, ROTARY_DIM, IS_NEOX
    )
    for head in range(G.num_kv_heads):
        record = coded + (coded_slot * G.num_kv_heads + head) * L.record_bytes
        key = _key(record, token, d, there, G)
        other = _key(record, token, partner, is_rotated, G)
        other = tl.where(is_first[None, :], -other, other)
        key = tl.where(is_rotated[None, :], key * cos + other * sin, key)
        codes = load_codes(
            record, token[:, None], d[None, :], there[None, :], L.value_codes, G.value_bits, G
        )
        scale, zero = load_params(
            record, token, token >= 0, L.value_scales, L.value_zeros, L.header + 12, G
        )
        value = zero[:, None] + codes.to(tl.float32) * scale[:, None]
        start = full_slot * slot_stride + head * G.window * G.head_dim
        _store_half(full_keys + start + place, key, there[None, :])
        _store_half(full_values + start + place, value, there[None, :])


# -- parts --------------------------------------------------------------------------------


@triton.jit
def _rotation(
    cos_sin, window, token, d,
    G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    """How a window's channels turn: which do, which are first of their pair, their partners, and
    float32 cosines and sines ``[W, D]`` (1 and 0 where nothing turns)."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    is_rotated = d < ROTARY_DIM
    if IS_NEOX:
        is_first, pair = d < HALF, d % HALF
        partner = tl.where(is_first, d + HALF, d - HALF)
    else:
        is_first, pair = d % 2 == 0, d // 2
        partner = d ^ 1
    table = cos_sin + (window * G.window + token[:, None]) * ROTARY_DIM + pair[None, :]
    cos = tl.load(table, mask=is_rotated[None, :], other=1.0)
    sin = tl.load(table + HALF, mask=is_rotated[None, :], other=0.0)
    return is_rotated, is_first, partner, cos, sin


@triton.jit
def _key(record, token, channel, there, G: tl.constexpr):
    """float32 keys before RoPE ``[W, channels]``."""
    L: tl.constexpr = G.record
    codes = load_codes(
        record, token[:, None], channel[None, :], there[None, :], L.key_codes, G.key_bits, G
    )
    scale, zero = load_params(record, channel, there, L.key_scales, L.key_zeros, L.header, G)
    return zero[None, :] + codes.to(tl.float32) * scale[None, :]


@triton.jit
def _params(low, high, there, BITS: tl.constexpr, G: tl.constexpr):
    """``reference.make_params`` of rows with extremes ``low`` and ``high``, all ``[rows]``.

    Returns the float32 numbers (scales, zeros), the stored ones as int32 (bits of a float16, or a
    byte), and the header.
    """
    LEVELS: tl.constexpr = (1 << BITS) - 1
    if G.params.value == "fp16":
        zero, zeros = _half_down(low)
        need = tl.div_rn(high - zero, tl.zeros_like(low) + LEVELS) * _SCALE_MARGIN
        # A minus sign would make 0 of 0 in older Tritons, not -0.
        scale, scales = _half_down(need * -1.0)
        return -scale, zero, scales ^ 0x8000, zeros, 0.0, 0.0, 0.0
    base = tl.min(tl.where(there, low, _INFINITY), axis=0)
    zero_step = tl.div_rn(tl.max(tl.where(there, low, -_INFINITY), axis=0) - base, 255.0)
    zeros = _floor(_clamp(_quotient(low - base, zero_step), 255.0))
    zeros = zeros - tl.where(base + zeros * zero_step > low, 1.0, 0.0)
    zero = base + zeros * zero_step
    need = tl.div_rn(high - zero, tl.zeros_like(low) + LEVELS)
    scale_step = tl.max(tl.where(there, need, -_INFINITY), axis=0) * _STEP_MARGIN
    scales = _ceil(_clamp(_quotient(need * _SCALE_MARGIN, scale_step), 255.0))
    return (
        scales * scale_step, zero, _integer(scales), _integer(zeros),
        scale_step, base, zero_step,
    )  # fmt: skip


@triton.jit
def _codes(x, scale, zero, BITS: tl.constexpr):
    """int32 codes of ``x``; all broadcast."""
    return _integer(_clamp(_quotient(x - zero, scale), (1 << BITS) - 1.0))


@triton.jit
def _store_codes(pointer, codes, d, there, BITS: tl.constexpr, G: tl.constexpr):
    """Pack codes ``[W, D]`` into words, one for each channel and group of tokens."""
    GROUPS: tl.constexpr = G.window // G.code_group
    shifts = tl.arange(0, G.window) % G.code_group * BITS
    bits = tl.reshape(codes << shifts[:, None], (GROUPS, G.code_group, codes.shape[1]))
    words = tl.sum(bits, axis=1)
    at = tl.arange(0, GROUPS)[:, None] * G.head_dim + d[None, :]
    if G.code_group * BITS == 8:
        tl.store(pointer + at, words.to(tl.uint8), mask=there[None, :])
    elif G.code_group * BITS == 16:
        pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(pointer + at, words.to(tl.uint16), mask=there[None, :])
    else:
        pointer = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(pointer + at, words, mask=there[None, :])


@triton.jit
def _store_rows(pointer, stored, row, there, is_bad, G: tl.constexpr):
    """Store scales or zeros; a bad window's are NaN, or 0 where the header is NaN."""
    if G.params.value == "fp16":
        pointer = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(pointer + row, tl.where(is_bad, _HALF_NAN, stored).to(tl.int16), mask=there)
    else:
        tl.store(pointer + row, tl.where(is_bad, 0, stored).to(tl.uint8), mask=there)


@triton.jit
def _store_half(pointers, x, mask):
    """Store float32 as the pointers' type, rounded to nearest even."""
    if pointers.dtype.element_ty == tl.bfloat16:
        # By hand, because the interpreter truncates. Half an ulp would carry a NaN over.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0).to(tl.int16)
        tl.store(pointers, rounded.to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _half_down(x):
    """The largest float16 that is not above ``x``: (as float32, its bits as int32)."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    # One step down: away from zero where negative, towards it where positive.
    below = tl.where(bits < 0, bits + 1, bits - 1).to(tl.int16)
    bits = tl.where(half.to(tl.float32) > x, below, bits)
    return bits.to(tl.float16, bitcast=True).to(tl.float32), bits.to(tl.int32)


@triton.jit
def _quotient(a, b):
    """a / b, and 0 where b is 0."""
    return tl.where(b == 0, 0.0, tl.div_rn(a, tl.where(b == 0, 1.0, b)))


@triton.jit
def _clamp(x, most):
    """``x`` in [0, most]; NaN gives either."""
    return tl.minimum(tl.maximum(x, 0.0), most)


@triton.jit
def _floor(x):
    """A float32 in [0, 255] rounded down (the device's own would take subnormals for 0)."""
    nearest = (x + _TO_INTEGER) - _TO_INTEGER
    return tl.where(nearest > x, nearest - 1.0, nearest)


@triton.jit
def _ceil(x):
    """A float32 in [0, 255] rounded up."""
    nearest = (x + _TO_INTEGER) - _TO_INTEGER
    return tl.where(nearest < x, nearest + 1.0, nearest)


@triton.jit
def _integer(x):
    """A float32 in [0, 255] rounded half to even, as int32."""
    return (x + _TO_INTEGER).to(tl.int32, bitcast=True) & 255


@triton.jit
def _not_finite(x):
    """int32 1 where ``x`` is NaN or infinite."""
    return tl.where(tl.abs(x) <= _LARGEST, 0, 1)
