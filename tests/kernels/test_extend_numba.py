"""``extend`` of the numba backend against a dense float64 oracle, and its invariances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba import extend as extend_module
from qevict_kernels.numba.spec import Spec
from qevict_kernels.reference import ReferenceKernels, decode_windows, unpack
from qevict_kernels.rope import RotaryTable

# Largest relative error of rounding to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
GQA = WindowGeometry(num_q_heads=8, num_kv_heads=2, head_dim=64)


class NarrowKernels(NumbaKernels):
    """As they are compiled for a CPU without AVX-512."""

    def _spec(self, dtype: torch.dtype) -> Spec:
        return replace(super()._spec(dtype), lanes=8)


@dataclass(frozen=True)
class Request:
    """``prefix`` tokens in tiers given by a pattern of F, C (coded) and . (evicted), repeated over
    whole windows; what the new tokens touch is FULL."""

    prefix: int
    extend: int
    tiers: str = "F"
    score_start: int = 0


@dataclass(frozen=True)
class Case:
    """Arguments of ``extend``, with what the tests need to cut them into chunks."""

    kernels: NumbaKernels
    requests: tuple[Request, ...]
    query: torch.Tensor
    full: FullArena
    coded: torch.Tensor
    view: LayerView
    rows: torch.Tensor
    scores: torch.Tensor

    @property
    def scale(self) -> float:
        return 1.3 * self.geometry.head_dim**-0.5

    @property
    def geometry(self) -> WindowGeometry:
        return self.kernels.geometry

    def queries(self) -> list[torch.Tensor]:
        return list(self.query.split([r.extend for r in self.requests]))


def rotary_table(rotary_dim: int, is_neox: bool) -> RotaryTable:
    """A table with a scaling factor folded in."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.outer(torch.arange(1024, dtype=torch.float64), 1e4**-exponents)
    return RotaryTable(1.1 * torch.cat([angles.cos(), angles.sin()], dim=1).float(), is_neox)


def make_case(
    geometry: WindowGeometry,
    requests: Sequence[Request],
    *,
    dtype: torch.dtype = torch.bfloat16,
    rotary_dim: int | None = None,
    is_neox: bool = True,
    kernels: type[NumbaKernels] = NumbaKernels,
    seed: int = 0,
) -> Case:
    """Random queries, arenas and views; whatever nobody may read is NaN."""
    g = torch.Generator().manual_seed(seed)
    window = geometry.window
    rotary = rotary_table(rotary_dim or geometry.head_dim, is_neox)
    columns = max(-(-(r.prefix + r.extend) // window) for r in requests) + 2
    num_rows = len(requests) + 1
    num_pages = num_rows * columns
    slots = torch.randperm(num_pages, generator=g).int()
    shape = (num_pages + 1, 2, geometry.num_kv_heads, window, geometry.head_dim)
    data = torch.randn(shape, generator=g).to(dtype)
    full = FullArena(data[:, 0], data[:, 1])
    coded = torch.full(
        (num_pages, geometry.num_kv_heads, geometry.record.record_bytes), 255, dtype=torch.uint8
    )
    page_table = torch.randperm(num_pages, generator=g).int().view(num_rows, columns)
    tables = torch.full((2, num_pages), -1, dtype=torch.int32)
    windows = torch.full((num_rows, columns), -1, dtype=torch.int32)
    counts = torch.zeros(2, num_rows, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=g)[: len(requests)]
    reference = ReferenceKernels(geometry, rotary)
    used = torch.zeros(num_pages + 1, dtype=torch.bool)
    for request, row in zip(requests, rows.tolist(), strict=True):
        length = request.prefix + request.extend
        for w in range(-(-length // window)):
            tier = request.tiers[w % len(request.tiers)]
            page = int(page_table[row, w])
            slot = slots[page : page + 1]
            if (w + 1) * window > request.prefix or tier == "F":
                windows[row, counts[0, row]] = w
                counts[0, row] += 1
                tables[0, page] = slot
                used[slot] = True
                full.keys[slot.long(), :, max(length - w * window, 0) :] = torch.nan
                full.values[slot.long(), :, max(length - w * window, 0) :] = torch.nan
            elif tier == "C":
                counts[1, row] += 1
                windows[row, columns - counts[1, row]] = w
                tables[1, page] = slot
                index = torch.tensor([w], dtype=torch.int32)
                reference.quantize(full, coded, slot, slot, index)
    full.keys[~used] = torch.nan
    full.values[~used] = torch.nan
    num_tokens = sum(r.extend for r in requests)
    # A query is a slice of a wider projection: strided in the first dimension.
    projected = torch.randn(num_tokens, geometry.num_q_heads + 2, geometry.head_dim, generator=g)
    return Case(
        kernels(geometry, rotary),
        tuple(requests),
        projected.to(dtype)[:, : geometry.num_q_heads],
        full,
        coded,
        LayerView(page_table, tables[0], tables[1], windows, counts[0], counts[1]),
        rows,
        torch.rand(num_rows, columns, generator=g),
    )


def run(case: Case, scores: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scores) of the kernel; the case stays as it is."""
    out = torch.full(case.query.shape, torch.nan, dtype=case.query.dtype)
    after = case.scores.clone()
    prefix = torch.tensor([r.prefix for r in case.requests])
    length = torch.tensor([r.extend for r in case.requests], dtype=torch.int32)
    start = torch.tensor([r.score_start for r in case.requests])
    case.kernels.extend(
        case.query, case.full, case.coded, case.view, case.rows, prefix, length, case.scale,
        out, *((after, start) if scores else (None, None)),
    )  # fmt: skip
    return out, after


def chunk(case: Case, start: int, end: int) -> Case:
    """Tokens [start, end) of the only request's new tokens, before later ones are written."""
    (request,), (row,), window = case.requests, case.rows.tolist(), case.geometry.window
    length = request.prefix + end
    full = FullArena(case.full.keys.clone(), case.full.values.clone())
    listed = case.view.windows[row, : case.view.num_full[row]]
    for w in listed[(listed + 1) * window > length].tolist():
        slot = case.view.full_slot[case.view.page_table[row, w]]
        full.keys[slot, :, max(length - w * window, 0) :] = torch.nan
        full.values[slot, :, max(length - w * window, 0) :] = torch.nan
    num_full = case.view.num_full.clone()
    num_full[row] = (listed * window < length).sum()
    return replace(
        case,
        requests=(replace(request, prefix=request.prefix + start, extend=end - start),),
        query=case.query[start:end],
        full=full,
        view=replace(case.view, num_full=num_full),
    )


def run_chunks(case: Case, ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``run``, chunk by chunk; a chunk ends before each of ``ends``."""
    outs, scores, start = [], case.scores, 0
    for end in ends:
        out, scores = run(replace(chunk(case, start, end), scores=scores))
        outs.append(out)
        start = end
    return torch.cat(outs), scores


@dataclass(frozen=True)
class Expected:
    """Dense results in float64, and what bounds the error of a float32 computation of them."""

    out: torch.Tensor
    scores: torch.Tensor
    out_tolerance: torch.Tensor
    scores_tolerance: torch.Tensor


def dense(case: Case) -> Expected:
    """Attention by its definition, over keys put into one dense tensor per request."""
    geometry, window = case.geometry, case.geometry.window
    outs, tolerances = [], []
    scores, scores_tolerance = case.scores.double(), torch.zeros_like(case.scores).double()
    for request, row, query in zip(case.requests, case.rows.tolist(), case.queries(), strict=True):
        num_full, num_coded = int(case.view.num_full[row]), int(case.view.num_coded[row])
        listed = case.view.windows[row]
        indices = torch.cat([listed[:num_full], listed[len(listed) - num_coded :]]).long()
        pages = case.view.page_table[row, indices].long()
        codes = unpack(case.coded[case.view.coded_slot[pages[num_full:]].long()], geometry)
        coded_keys, coded_values = decode_windows(codes)
        positions = indices.view(-1, 1) * window + torch.arange(window)
        coded_keys = case.kernels.rotary.rotate(coded_keys, positions[num_full:, None])
        slots = case.view.full_slot[pages[:num_full]].long()
        keys = torch.cat([case.full.keys[slots].float(), coded_keys]).double()
        values = torch.cat([case.full.values[slots].float(), coded_values]).double()
        heads = torch.arange(geometry.num_q_heads) // geometry.group_size
        keys, values = (t.transpose(1, 2).flatten(0, 1)[:, heads] for t in (keys, values))
        written = positions.flatten() < request.prefix + request.extend
        keys[~written], values[~written] = 0, 0
        at = request.prefix + torch.arange(request.extend)
        seen = positions.flatten() <= at.unsqueeze(1)
        products = torch.einsum("thd,khd->htk", query.double(), keys) * case.scale
        mass = products.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("htk,khd->thd", mass, values))
        # An exponent is off by at most the sum of D roundings of its terms (and of the few
        # operations after it), and a weight by that times itself.
        size = torch.einsum("thd,khd->htk", query.double().abs(), keys.abs()) * case.scale
        largest = size.amax() if size.numel() else 0
        exponent = (geometry.head_dim + 16) * ROUNDING[torch.float32] * (1 + largest)
        # Weights are rounded to the storage dtype at most, the result always.
        dtype = case.query.dtype
        magnitude = torch.einsum("htk,khd->thd", mass, values.abs())
        tolerances.append((ROUNDING[dtype] + 3 * exponent) * magnitude)
        tolerances[-1] += ROUNDING[dtype] * (outs[-1].abs() + tolerances[-1]) + 1e-7
        scored = mass[:, at >= request.score_start].mean(0).sum(0).view(-1, window).sum(-1)
        scores[row, indices] += scored
        accumulation = request.extend * geometry.num_q_heads * ROUNDING[torch.float32]
        scores_tolerance[row, indices] += 3 * exponent * scored
        scores_tolerance[row, indices] += accumulation * (1 + scores[row, indices])
    return Expected(torch.cat(outs), scores, torch.cat(tolerances), scores_tolerance)


def check(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and compare with the oracle."""
    out, scores = run(case)
    expected = dense(case)
    assert ((out.double() - expected.out).abs() <= expected.out_tolerance).all()
    assert ((scores.double() - expected.scores).abs() <= expected.scores_tolerance).all()
    return out, scores


def test_prefix_17_extend_5_gqa_equals_dense() -> None:
    check(make_case(GQA, [Request(17, 5)]))


def test_empty_prefix_equals_dense() -> None:
    check(make_case(GQA, [Request(0, 131)]))


def test_coded_prefix_equals_dense() -> None:
    check(make_case(GQA, [Request(320, 21, "C")]))


@pytest.mark.parametrize("start", [0, 500, 603, 700])
def test_mixed_tiers_equal_dense_for_any_span_of_scores(start: int) -> None:
    check(make_case(GQA, [Request(500, 151, "FCC.CFC", start)]))


RAGGED = (
    Request(0, 40),
    Request(90, 0, "FC", 10**6),
    Request(203, 1, "FCC.", 203),
    Request(500, 100, "C.F", 590),
    Request(7, 2, "F", 8),
)


def test_ragged_batch_equals_dense() -> None:
    check(make_case(GQA, RAGGED))


def test_list_order_does_not_matter_to_the_mask() -> None:
    case = make_case(GQA, [Request(100, 60, "FFC")])
    row = int(case.rows[0])
    count = int(case.view.num_full[row])
    case.view.windows[row, :count] = case.view.windows[row, :count].flip(0)
    check(case)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    case = make_case(GQA, [Request(16, 4)])
    case.view.num_full.zero_()
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
