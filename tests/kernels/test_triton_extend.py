"""``extend`` of the Triton backend against a dense float64 oracle, and its invariances."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from extend_cases import (
    GQA,
    RAGGED,
    ROUNDING,
    Case,
    ExtendEqualsDense,
    Request,
    dense,
    run,
    run_chunks,
)
from extend_cases import check as check_with
from extend_cases import make_case as make_case_for
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton import TritonKernels
from qevict_kernels.triton.extend import TritonExtend, visible
from triton_device import DEVICE, IS_INTERPRETED, require_device

require_device()


class Kernels(TritonExtend):
    """What is tested here."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        self.geometry = geometry
        self.rotary = rotary
        self._cos_sin = rotary.cos_sin.to(DEVICE)


make_case = partial(make_case_for, kernels=Kernels, device=DEVICE)


def store(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 rounded to ``dtype``, as float64. The interpreter truncates to bfloat16."""
    if IS_INTERPRETED and dtype is torch.bfloat16:
        return (x.float().view(torch.int32) & -0x10000).view(torch.float32).double()
    return x.float().to(dtype).double()


def error_bounds(case: Case) -> dict[str, Any]:
    """How this backend rounds: see ``dense``."""
    dtype = case.query.dtype
    is_truncated = IS_INTERPRETED and dtype is torch.bfloat16
    return {
        "rounding": (2 if is_truncated else 1) * ROUNDING[dtype],
        "storing": partial(store, dtype=dtype),
    }


def check(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and compare with the oracle."""
    return check_with(case, **error_bounds(case))


class TestExtend(ExtendEqualsDense):
    make_case = staticmethod(make_case)
    check = staticmethod(check)


@pytest.mark.parametrize("start", [0, 203, 500])
def test_mixed_tiers_equal_dense_for_any_span_of_scores(start: int) -> None:
    check(make_case(GQA, [Request(150, 101, "FCC.CFC", start)]))


def test_a_query_before_every_window_gets_zeros() -> None:
    """Windows that a query sees none of, coded and FULL, leave nothing behind."""
    case = make_case(GQA, [Request(64, 16, "C")])
    request = replace(case.requests[0], prefix=0, extend=1)
    case.view.page_table[:] = case.view.page_table.roll(1, dims=1)
    case.view.windows[case.view.windows >= 0] += 1
    case = replace(case, requests=(request,), query=case.query[:1])
    out, scores = run(case)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(scores, case.scores)


SHAPES = [
    (WindowGeometry(2, 2, 64, window=4), "bf16", {}),
    (WindowGeometry(7, 1, 80, window=16, key_bits=4, value_bits=4), "fp16", {"rotary_dim": 32}),
    (WindowGeometry(4, 2, 96, window=32, value_bits=4), "bf16", {"rotary_dim": 20}),
    (WindowGeometry(8, 1, 128, key_bits=4, params=ParamFormat.FP16), "bf16", {}),
    (WindowGeometry(2, 1, 256, window=4, key_bits=4), "fp16", {"is_neox": False}),
    (WindowGeometry(9, 3, 64, params=ParamFormat.FP16), "bf16", {"is_neox": False}),
    (WindowGeometry(2, 1, 80, window=4, params=ParamFormat.FP16), "bf16", {}),
    (WindowGeometry(2, 1, 256, window=32), "bf16", {"rotary_dim": 64}),
    pytest.param(
        *(WindowGeometry(150, 1, 64, window=16), "bf16", {"rotary_dim": 40}),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("geometry", "half", "options"), SHAPES)
def test_shapes_codes_and_rotary_styles_equal_dense(
    geometry: WindowGeometry, half: str, options: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    requests = [Request(131, 21, "FCC", 140), Request(0, 9)]
    check(make_case(geometry, requests, dtype=dtype, **options))


@pytest.mark.parametrize("seed", range(4))
def test_chunk_boundaries_change_no_bit(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    request = Request(69, 90, ("FCCF.", "F", "C", "FC")[seed], (0, 120, 101, 150)[seed])
    case = make_case(GQA, [request], seed=seed)
    out, scores = check(case)
    cuts = torch.randint(1, request.extend, (4,), generator=g)
    ends = [*cuts.unique().tolist(), request.extend]
    chunked_out, chunked_scores = run_chunks(case, ends)
    assert torch.equal(chunked_out, out)
    assert torch.equal(chunked_scores, scores)


def test_token_by_token_changes_no_bit() -> None:
    case = make_case(GQA, [Request(30, 12, "FC")])
    out, scores = run(case)
    chunked_out, chunked_scores = run_chunks(case, range(1, 13))
    assert torch.equal(chunked_out, out)
    assert torch.equal(chunked_scores, scores)


@pytest.mark.slow
def test_rest_of_the_batch_changes_no_bit() -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case)
    for b, (request, query) in enumerate(zip(case.requests, case.queries(), strict=True)):
        alone = replace(case, requests=(request,), query=query, rows=case.rows[b : b + 1])
        alone_out, alone_scores = run(alone)
        assert torch.equal(alone_out, out.split([r.extend for r in case.requests])[b])
        assert torch.equal(alone_scores[case.rows[b]], scores[case.rows[b]])


@pytest.mark.slow
def test_more_requests_than_are_looked_at_at_a_time() -> None:
    """A program finds its request among 300, most of them without a new token."""
    small = WindowGeometry(1, 1, 64)
    requests = [Request(8, 3 * (b % 37 == 5), "F", 9) for b in range(300)]
    check(make_case(small, requests))


@triton.jit
def visible_kernel(windows, count, first_position, last_position, out, G: tl.constexpr):
    num_clear, num_seen = visible(windows, count, first_position, last_position, G)
    tl.store(out, num_clear)
    tl.store(out + 1, num_seen)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(
    "positions", [(0, 0), (7, 8), (4000, 4100), (15999, 16001), (30000, 31000)]
)
def test_visible_entries_of_lists_longer_than_what_is_looked_at_at_a_time(
    positions: tuple[int, int], is_sorted: bool
) -> None:
    first, last = positions
    listed = torch.arange(2500) if is_sorted else torch.randperm(2500)
    is_hidden = (listed + 1) * GQA.window - 1 > first
    is_seen = listed * GQA.window <= last
    expected = [
        int(is_hidden.nonzero()[0]) if is_hidden.any() else 2500,
        int(is_seen.nonzero()[-1]) + 1,
    ]
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    visible_kernel[(1,)](listed.int().to(DEVICE), 2500, first, last, out, GQA)
    assert out.tolist() == expected


@pytest.mark.slow
def test_no_scores_asked_leaves_them_alone() -> None:
    case = make_case(GQA, RAGGED[2:])
    out, scores = run(case, scores=False)
    assert torch.equal(scores, case.scores)
    assert torch.equal(out, run(case)[0])


def test_no_new_token_is_allowed() -> None:
    out, scores = run(case := make_case(GQA, [Request(8, 0)]))
    assert out.shape == (0, 8, 64)
    assert torch.equal(scores, case.scores)


def test_a_corrupted_value_fails_the_comparison() -> None:
    """The tolerance is tight enough to notice one wrong channel of one token."""
    case = make_case(GQA, [Request(17, 5)])
    expected = dense(case, **error_bounds(case))
    row = int(case.rows[0])
    slot = case.view.full_slot[case.view.page_table[row, 1]]
    case.full.values[slot, 0, 0, 0] += 4
    out, _ = run(case)
    assert ((out.double() - expected.out).abs() > expected.out_tolerance).any()


def test_a_corrupted_code_fails_the_comparison() -> None:
    """One bit of one key code, and one of one value code, of 64 tokens."""
    case = make_case(GQA, [Request(64, 8, "C")])
    expected = dense(case, **error_bounds(case))
    slot = case.view.coded_slot[case.view.coded_slot >= 0][3]
    record = GQA.record
    for place in (record.key_codes + 9, record.value_codes + 9):
        changed = replace(case, coded=case.coded.clone())
        changed.coded[slot, 0, place] ^= 0xAA
        out, _ = run(changed)
        assert ((out.double() - expected.out).abs() > expected.out_tolerance).any()


def test_nan_of_one_request_stays_in_it() -> None:
    case = make_case(GQA, [Request(0, 10), Request(90, 5, "FC")])
    out, scores = run(case)
    case.query[:10] = torch.nan
    again_out, again_scores = run(case)
    assert again_out[:10].isnan().all()
    assert torch.equal(again_out[10:], out[10:])
    others = case.rows[1:]
    assert torch.equal(again_scores[others], scores[others])


# -- a few tokens -------------------------------------------------------------------------


def make_short(geometry: WindowGeometry, requests: list[Request], **options: Any) -> Case:
    """A case whose kernels have room to attend token by token."""

    def kernels(geometry: WindowGeometry, rotary: RotaryTable) -> TritonKernels:
        made = TritonKernels(geometry, rotary, DEVICE, tile=16, max_splits=2)
        made.reserve(256, 256)
        return made

    return make_case_for(geometry, requests, kernels=kernels, device=DEVICE, **options)


SHORT = [Request(203, 1, "FCC.", 203), Request(90, 0, "FC", 10**6), Request(300, 20, "C.F", 310),
         Request(7, 2, "F", 8), Request(0, 9)]  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "options"),
    [
        (GQA, {}),
        pytest.param(
            *(WindowGeometry(4, 4, 128, window=16, key_bits=4), {"dtype": torch.float16}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(WindowGeometry(14, 2, 80, window=4, params=ParamFormat.FP16), {"rotary_dim": 32}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_few_tokens_attend_as_a_chunk_does(
    geometry: WindowGeometry, options: dict[str, Any]
) -> None:
    case = make_short(geometry, SHORT, **options)
    kernels = case.kernels
    assert isinstance(kernels, TritonKernels)
    assert kernels.is_short(case.query, case.view)
    out, scores = run(case)
    kernels.reserved = (0, 0)
    expected, expected_scores = run(case)
    largest = expected.abs().max().item()
    assert torch.allclose(out.float(), expected.float(), rtol=0, atol=2**-6 * largest)
    assert torch.allclose(scores, expected_scores, rtol=0, atol=2e-3)
    assert not torch.equal(out, expected)  # it was another kernel


def test_a_few_tokens_are_alone_what_they_are_in_a_batch() -> None:
    case = make_short(GQA, SHORT)
    out, _ = run(case)
    start = 0
    for index, request in enumerate(case.requests):
        end = start + request.extend
        alone = replace(
            case,
            requests=(request,),
            rows=case.rows[index : index + 1],
            query=case.query[start:end],
        )
        assert torch.equal(run(alone)[0], out[start:end])
        start = end


@pytest.mark.parametrize(("batch", "columns"), [(31, 256), (256, 20), (0, 0)])
def test_no_more_tokens_than_there_is_room_for(batch: int, columns: int) -> None:
    case = make_short(GQA, SHORT)
    assert isinstance(case.kernels, TritonKernels)
    case.kernels.reserved = (batch, columns)
    before = [tensor.data_ptr() for tensor in case.kernels._scratch]
    run(case)
    assert not case.kernels.is_short(case.query, case.view)
    assert [tensor.data_ptr() for tensor in case.kernels._scratch] == before
