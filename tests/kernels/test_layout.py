"""The record layout: sizes that budgets rely on, and what is refused."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from qevict_kernels.layout import (
    SUPPORTED_BITS,
    SUPPORTED_HEAD_DIMS,
    SUPPORTED_WINDOWS,
    ParamFormat,
    WindowGeometry,
)

ALL = list(
    product(
        SUPPORTED_HEAD_DIMS, SUPPORTED_WINDOWS, SUPPORTED_BITS, SUPPORTED_BITS, list(ParamFormat)
    )
)


@pytest.mark.parametrize(("head_dim", "record_bytes"), [(64, 448), (128, 832)], ids=["D64", "D128"])
def test_default_record_has_the_published_size(head_dim: int, record_bytes: int) -> None:
    geometry = WindowGeometry(8, 2, head_dim)
    assert geometry.record.record_bytes == record_bytes
    assert geometry.coded_window_bytes == 2 * record_bytes
    assert geometry.full_window_bytes == 2 * 2 * 8 * head_dim * 2


@pytest.mark.parametrize(("dim", "window", "key_bits", "value_bits", "params"), ALL)
def test_fields_follow_each_other_without_overlap(
    dim: int, window: int, key_bits: int, value_bits: int, params: ParamFormat
) -> None:
    record = WindowGeometry(4, 2, dim, window, key_bits, value_bits, params).record
    width = 2 if params is ParamFormat.FP16 else 1
    ends = [
        (record.key_codes, dim * window * key_bits // 8),
        (record.value_codes, dim * window * value_bits // 8),
        (record.key_scales, dim * width),
        (record.key_zeros, dim * width),
        (record.value_scales, window * width),
        (record.value_zeros, window * width),
        (record.header, 24 if params is ParamFormat.UINT8 else 0),
        (record.payload_bytes, 0),
    ]
    for (start, size), (following, _) in pairwise(ends):
        assert start % 4 == 0
        assert start + size <= following < start + size + 4
    assert record.code_bytes + record.param_bytes + record.alignment_bytes == record.record_bytes
    assert record.record_bytes % 64 == 0
    assert 0 <= record.alignment_bytes < 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 5}, "window must be one of 4, 8, 16, 32, got 5"),
        ({"head_dim": 72}, "head_dim must be one of"),
        ({"key_bits": 3}, "key_bits must be one of 2, 4, got 3"),
        ({"value_bits": 8}, "value_bits must be one of 2, 4, got 8"),
        ({"num_q_heads": 7}, "num_q_heads must be a multiple of num_kv_heads"),
    ],
)
def test_unsupported_geometry_is_named(change: dict[str, int], message: str) -> None:
    arguments = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64} | change
    with pytest.raises(ValueError, match=message):
        WindowGeometry(**arguments)
