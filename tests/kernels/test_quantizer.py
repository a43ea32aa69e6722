"""Properties of the reference quantiser, which defines the codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import full_arena, rotary_table
from qevict_kernels.interface import FullArena
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.reference import (
    ReferenceKernels,
    decode_windows,
    encode_windows,
    make_params,
    pack,
    quantize_rows,
    rows_of,
    unpack,
)

quick = settings(max_examples=40, deadline=None)
EPS = 2.0**-24
TINY = 2.0**-126

geometries = st.builds(
    WindowGeometry,
    num_q_heads=st.just(2),
    num_kv_heads=st.just(2),
    head_dim=st.sampled_from([64, 80]),
    window=st.sampled_from([4, 8, 16, 32]),
    key_bits=st.sampled_from([2, 4]),
    value_bits=st.sampled_from([2, 4]),
    params=st.sampled_from(list(ParamFormat)),
)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """``[num_rows, length]``: rows of unlike offset and spread, constants and outliers."""
    num_rows, length = draw(st.sampled_from([(64, 8), (8, 64), (4, 4), (80, 32)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = 10.0 ** draw(st.floats(-6, 3))
    offset = draw(st.sampled_from([0.0, 1.0, -1000.0]))
    x = torch.randn(num_rows, length, generator=generator) * spread
    x *= torch.rand(num_rows, 1, generator=generator)
    x += offset * torch.randn(num_rows, 1, generator=generator)
    if draw(st.booleans()):
        x[draw(st.integers(0, num_rows - 1))] = draw(st.floats(-100, 100, width=32))
    if draw(st.booleans()):
        x[draw(st.integers(0, num_rows - 1)), 0] = draw(st.sampled_from([-6e4, 6e4, 1e3]))
    return x.bfloat16().float() if draw(st.booleans()) else x


both_params = pytest.mark.parametrize("params", list(ParamFormat), ids=lambda p: p.value)
both_bits = pytest.mark.parametrize("bits", [2, 4])


@both_params
@both_bits
@quick
@given(x=rows())
def test_stored_range_covers_the_row(x: torch.Tensor, bits: int, params: ParamFormat) -> None:
    scales, zeros = make_params(x, bits, params).numbers()
    top = zeros + (2**bits - 1) * scales  # float32, as it is decoded
    assert (zeros <= x.amin(-1)).all()
    assert (top >= x.amax(-1) - TINY).all()


@both_params
@both_bits
@quick
@given(x=rows())
def test_error_is_at_most_half_a_stored_step(
    x: torch.Tensor, bits: int, params: ParamFormat
) -> None:
    stored = make_params(x, bits, params)
    error = (rows_of(quantize_rows(x, stored, bits), stored) - x).abs()
    scales, zeros = stored.numbers()
    # Rounded: the difference to the zero, the quotient, the product and the sum.
    largest = torch.maximum(zeros.abs(), (zeros + (2**bits - 1) * scales).abs())
    bound = scales / 2 + 4 * EPS * (largest + 2**bits * scales) + TINY
    assert (error <= bound.unsqueeze(-1)).all()


@both_params
@both_bits
@quick
@given(x=rows())
def test_stored_step_is_little_wider_than_needed(
    x: torch.Tensor, bits: int, params: ParamFormat
) -> None:
    scales, zeros = make_params(x, bits, params).numbers()
    low, high = x.amin(-1), x.amax(-1)
    if params is ParamFormat.UINT8:  # one 255th of the widest of all rows, of zeros and of scales
        slack = (low.max() - low.min()) / 255
        step = (high - zeros).max() / 255
    else:  # one float16 step of each
        slack = low.abs() * 2.0**-10 + 2.0**-24
        step = (high - zeros) * 2.0**-10 + (2**bits - 1) * 2.0**-24
    needed = high - low + slack + step
    assert ((2**bits - 1) * scales <= needed * (1 + 2.0**-18) + 2 * EPS * low.abs()).all()


@both_params
@both_bits
@quick
@given(x=rows())
def test_coding_the_decoded_again_changes_nothing(
    x: torch.Tensor, bits: int, params: ParamFormat
) -> None:
    stored = make_params(x, bits, params)
    codes = quantize_rows(x, stored, bits)
    decoded = rows_of(codes, stored)
    again = quantize_rows(decoded, stored, bits)
    scales, zeros = stored.numbers()
    # A step below the rounding of its own zero point is lost in the sum: such codes may differ,
    # what they decode to may not.
    distinct = scales > 16 * EPS * zeros.abs()
    assert torch.equal(again[distinct], codes[distinct])
    error = (rows_of(again, stored) - decoded).abs()
    assert (error <= 4 * EPS * zeros.abs().unsqueeze(-1) * ~distinct.unsqueeze(-1)).all()


@quick
@given(geometry=geometries, seed=st.integers(0, 1000))
def test_records_give_back_what_was_packed(geometry: WindowGeometry, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 2, geometry.window, geometry.head_dim)
    windows, bad = encode_windows(
        torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), geometry
    )
    records = pack(windows, geometry)
    assert not bad.any()
    assert records.shape == (3, 2, geometry.record.record_bytes)
    unpacked = unpack(records, geometry)
    assert torch.equal(unpacked.key_codes, windows.key_codes)
    assert torch.equal(unpacked.value_codes, windows.value_codes)
    for got, put in zip(decode_windows(unpacked), decode_windows(windows), strict=True):
        assert torch.equal(got, put)


def test_word_holds_the_codes_of_a_channel_from_the_lowest_bits_on() -> None:
    geometry = WindowGeometry(1, 1, 64)
    keys = torch.arange(8.0).remainder(4).view(8, 1).expand(8, 64)  # codes 0 1 2 3 0 1 2 3
    windows, _ = encode_windows(keys, keys.flip(0), geometry)
    words = pack(windows, geometry)[:256].view(torch.uint16)
    assert words[:64].tolist() == [0b1110010011100100] * 64
    assert words[64:128].tolist() == [0] * 64  # a token's values are constant: codes 0


@both_params
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_window_with_nan_or_infinity_decodes_to_nan_and_is_told(
    value: float, where: str, params: ParamFormat
) -> None:
    geometry = WindowGeometry(4, 2, 64, params=params)
    full = full_arena(geometry, 4, torch.bfloat16, torch.Generator().manual_seed(0))
    getattr(full, where)[2, 1, 3, 5] = value
    coded = torch.zeros(4, 2, geometry.record.record_bytes, dtype=torch.uint8)
    every = torch.arange(4, dtype=torch.int32)
    kernels = ReferenceKernels(geometry, rotary_table(64))
    assert kernels.quantize(full, coded, every, every, every).tolist() == [
        False,
        False,
        True,
        False,
    ]
    for numbers in decode_windows(unpack(coded, geometry)):
        assert numbers[2, 1].isnan().all()
        others = [numbers[0], numbers[1], numbers[2, 0], numbers[3]]
        assert all(n.isfinite().all() for n in others)


def test_range_beyond_float16_parameters_is_counted_as_not_finite() -> None:
    geometry = WindowGeometry(1, 1, 64, params=ParamFormat.FP16)
    keys = torch.zeros(8, 64)
    keys[0, 0] = -1e6
    windows, bad = encode_windows(keys, torch.zeros(8, 64), geometry)
    assert bad.item()
    assert decode_windows(windows)[0].isnan().all()


@both_params
def test_constant_windows_are_exact(params: ParamFormat) -> None:
    geometry = WindowGeometry(1, 1, 64, params=params)
    keys, values = torch.full((8, 64), 2.5), torch.full((8, 64), -0.75)
    windows, bad = encode_windows(keys, values, geometry)
    decoded_keys, decoded_values = decode_windows(windows)
    assert not bad.item()
    assert torch.equal(decoded_keys, keys)
    assert torch.equal(decoded_values, values)


@settings(max_examples=20, deadline=None)
@given(geometry=geometries, seed=st.integers(0, 1000))
def test_dequantize_writes_the_decoded_window_rotated(geometry: WindowGeometry, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rotary = rotary_table(64)
    kernels = ReferenceKernels(geometry, rotary)
    full = full_arena(geometry, 3, torch.bfloat16, generator)
    coded = torch.zeros(3, 2, geometry.record.record_bytes, dtype=torch.uint8)
    slots, targets = torch.tensor([0, -1, 2]).int(), torch.tensor([2, 1, 0]).int()
    windows = torch.tensor([5, 6, 7]).int()
    kernels.quantize(full, coded, slots, targets, windows)
    assert not coded[1].any()  # a negative source is skipped
    rebuilt = FullArena(torch.zeros_like(full.keys), torch.zeros_like(full.values))
    kernels.dequantize(rebuilt, coded, slots, targets, windows)
    for source, target, window in ((0, 2, 5), (2, 0, 7)):
        keys, values = decode_windows(unpack(coded[target], geometry))
        positions = window * geometry.window + torch.arange(geometry.window)
        assert torch.equal(rebuilt.keys[source], rotary.rotate(keys, positions).bfloat16())
        assert torch.equal(rebuilt.values[source], values.bfloat16())
    assert not rebuilt.keys[1].any()
