"""``extend`` of the numba backend against a dense float64 oracle, and its invariances."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from extend_cases import GQA, RAGGED, ExtendEqualsDense, Request, check, dense, run, run_chunks
from extend_cases import make_case as make_case_for
from kernel_cases import NarrowKernels
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba import extend as extend_module

make_case = partial(make_case_for, kernels=NumbaKernels)


class TestExtend(ExtendEqualsDense):
    make_case = staticmethod(make_case)
    check = staticmethod(check)


@pytest.mark.parametrize("start", [0, 500, 603, 700])
def test_mixed_tiers_equal_dense_for_any_span_of_scores(start: int) -> None:
    check(make_case(GQA, [Request(500, 151, "FCC.CFC", start)]))


SHAPES = [
    (WindowGeometry(2, 2, 64, window=4), "bf16", {}),
    (WindowGeometry(7, 1, 80, window=16, key_bits=4, value_bits=4), "fp16", {"rotary_dim": 32}),
    (WindowGeometry(4, 2, 96, window=32, value_bits=4), "bf16", {"rotary_dim": 20}),
    (WindowGeometry(8, 1, 128, key_bits=4, params=ParamFormat.FP16), "bf16", {}),
    (WindowGeometry(2, 1, 256, window=4, key_bits=4), "fp16", {"is_neox": False}),
    (WindowGeometry(9, 3, 64, params=ParamFormat.FP16), "bf16", {"is_neox": False}),
    (WindowGeometry(100, 1, 64), "bf16", {"kernels": NarrowKernels}),
]


@pytest.mark.parametrize(("geometry", "half", "options"), SHAPES)
def test_shapes_codes_and_rotary_styles_equal_dense(
    geometry: WindowGeometry, half: str, options: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    requests = [Request(259, 70, "FCC", 300), Request(0, 9)]
    check(make_case(geometry, requests, dtype=dtype, **options))


@pytest.mark.parametrize("seed", range(4))
def test_chunk_boundaries_change_no_bit(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    request = Request(69, 250, ("FCCF.", "F", "C", "FC")[seed], (0, 250, 101, 290)[seed])
    case = make_case(GQA, [request], seed=seed)
    out, scores = check(case)
    for pieces in (2, 7):
        cuts = torch.randint(1, request.extend, (pieces - 1,), generator=g)
        ends = [*cuts.unique().tolist(), request.extend]
        chunked_out, chunked_scores = run_chunks(case, ends)
        assert torch.equal(chunked_out, out)
        assert torch.equal(chunked_scores, scores)


def test_token_by_token_changes_no_bit() -> None:
    case = make_case(GQA, [Request(30, 45, "FC")])
    out, scores = run(case)
    chunked_out, chunked_scores = run_chunks(case, range(1, 46))
    assert torch.equal(chunked_out, out)
    assert torch.equal(chunked_scores, scores)


@pytest.mark.parametrize(
    ("limit", "value"), [("MASS_FLOATS", 1), ("TASKS_PER_THREAD", 1), ("TILE_PANELS", 1)]
)
def test_how_work_is_cut_changes_no_bit(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case)
    monkeypatch.setattr(extend_module, limit, value)
    again_out, again_scores = run(case)
    assert torch.equal(again_out, out)
    assert torch.equal(again_scores, scores)


def test_rest_of_the_batch_changes_no_bit() -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case)
    for b, (request, query) in enumerate(zip(case.requests, case.queries(), strict=True)):
        alone = replace(case, requests=(request,), query=query, rows=case.rows[b : b + 1])
        alone_out, alone_scores = run(alone)
        assert torch.equal(alone_out, out.split([r.extend for r in case.requests])[b])
        assert torch.equal(alone_scores[case.rows[b]], scores[case.rows[b]])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_number_of_threads_changes_no_bit(num_threads: int) -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        again_out, again_scores = run(case)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again_out, out)
    assert torch.equal(again_scores, scores)


def test_no_scores_asked_leaves_them_alone() -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case, scores=False)
    assert torch.equal(scores, case.scores)
    assert torch.equal(out, run(case)[0])


def test_a_corrupted_value_fails_the_comparison() -> None:
    """The tolerance is tight enough to notice one wrong channel of one token."""
    case = make_case(GQA, [Request(17, 5)])
    expected = dense(case)
    row = int(case.rows[0])
    slot = case.view.full_slot[case.view.page_table[row, 1]]
    case.full.values[slot, 0, 0, 0] += 4
    out, _ = run(case)
    assert ((out.double() - expected.out).abs() > expected.out_tolerance).any()


def test_nan_of_one_request_stays_in_it() -> None:
    case = make_case(GQA, RAGGED)
    out, scores = run(case)
    case.query[:40] = torch.nan
    again_out, again_scores = run(case)
    assert again_out[:40].isnan().all()
    assert torch.equal(again_out[40:], out[40:])
    others = case.rows[1:]
    assert torch.equal(again_scores[others], scores[others])


def test_scale_must_be_positive() -> None:
    case = make_case(GQA, [Request(0, 4)])
    with pytest.raises(ValueError, match="scale must be positive, got 0"):
        case.kernels.extend(
            case.query, case.full, case.coded, case.view, case.rows, torch.tensor([0]),
            torch.tensor([4]), 0.0, case.query.clone(), None, None,
        )  # fmt: skip
