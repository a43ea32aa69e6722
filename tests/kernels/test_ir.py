"""The building blocks of generated code against numpy and torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from numba.extending import intrinsic

from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba.ir import Emitter, vector_function
from qevict_kernels.numba.spec import Spec, host_lanes

SPEC = Spec(WindowGeometry(1, 1, 64), 64, True, "bf16", host_lanes())
SUMS = [(lanes, n) for lanes, n in product((4, 8, 16), (1, 2, 4, 8, 16)) if n <= lanes]


@vector_function
def emit_sums(e: Emitter, spec: Spec, source: Any, target: Any) -> None:
    at = 0
    for lanes, count in SUMS:
        e.store(e.sums([e.load(source, i * lanes, lanes) for i in range(count)]), target, at)
        at += count


PARTS = [(16, 1, 4), (16, 2, 4), (16, 4, 4), (8, 2, 2), (8, 4, 2), (8, 1, 2)]
"""(lanes, rows, parts) of sums that stay apart for each part."""


@vector_function
def emit_sums_of_parts(e: Emitter, spec: Spec, source: Any, target: Any) -> None:
    at = 0
    for lanes, count, parts in PARTS:
        rows, period = [e.load(source, i * lanes, lanes) for i in range(count)], 1
        while len(rows) > 1:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows, period = [e.sum_pair(a, b, period) for a, b in pairs], 2 * period
        e.store(e.sum_rest(rows[0], period, parts), target, at)
        at += count * parts


@vector_function
def emit_exp2(e: Emitter, spec: Spec, source: Any, target: Any) -> None:
    for d in range(0, 64, e.lanes):
        e.store(e.exp2(e.load(source, d)), target, d)


@vector_function
def emit_bf16(e: Emitter, spec: Spec, source: Any, target: Any) -> None:
    for d in range(0, 64, e.lanes):
        e.store_half(e.load(source, d), target, d, "bf16")


@vector_function
def emit_fp16(e: Emitter, spec: Spec, source: Any, target: Any) -> None:
    for d in range(0, 64, e.lanes):
        e.store_half(e.load(source, d), target, d, "fp16")


def run(emit: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    @intrinsic
    def call(context: Any, spec: Any, source: Any, target: Any) -> Any:
        return emit(spec, source, target)

    @njit
    def kernel(spec: Any, source: int, target: int) -> None:
        call(spec, source, target)

    kernel(SPEC, source.data_ptr(), target.data_ptr())
    return target


def test_sums_are_row_sums_in_order() -> None:
    data = torch.randn(256, generator=torch.Generator().manual_seed(0))
    out = run(emit_sums, data, torch.empty(sum(n for _, n in SUMS)))
    expected = torch.cat([data[: n * lanes].view(n, lanes).double().sum(1) for lanes, n in SUMS])
    # At most four additions of numbers below 16 each.
    assert (out - expected).abs().max() <= 4 * 16 * 2.0**-24


def test_sums_of_parts_are_those_of_each_part_in_order() -> None:
    data = torch.randn(64, generator=torch.Generator().manual_seed(0))
    out = run(emit_sums_of_parts, data, torch.empty(sum(n * parts for _, n, parts in PARTS)))
    rows = [data[: n * lanes].view(n, parts, -1).double() for lanes, n, parts in PARTS]
    expected = torch.cat([row.sum(2).flatten() for row in rows])
    assert (out - expected).abs().max() <= 4 * 16 * 2.0**-24


def test_exp2_is_within_two_ulp_and_exact_at_the_ends() -> None:
    x = torch.linspace(-126, 127, 64)
    error = run(emit_exp2, x, torch.empty(64)).double() / x.double().exp2() - 1
    assert error.abs().max() <= 2 * 2.0**-23
    ends = torch.tensor([-torch.inf, -1e30, -127.0, 0.0, 1.0, torch.nan]).repeat(11)[:64]
    out = run(emit_exp2, ends.contiguous(), torch.empty(64))
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, torch.nan]).repeat(11)[:64]
    assert np.array_equal(out.numpy(), expected.numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("emit", "dtype"),
    [(emit_bf16, torch.bfloat16), (emit_fp16, torch.float16)],
    ids=["bf16", "fp16"],
)
def test_halves_are_rounded_as_torch_rounds(emit: Any, dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x[:8] = torch.tensor([0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan, 1 + 2.0**-9, 1e38])
    out = run(emit, x, torch.empty(64, dtype=dtype))
    expected = x.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(
        out.nan_to_num(0).view(torch.int16), expected.nan_to_num(0).view(torch.int16)
    )
