"""Batches for ``extend``, whole and in chunks, and what they come to by definition, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from qevict_kernels.interface import AttentionKernels, FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.reference import ReferenceKernels, decode_windows, unpack
from qevict_kernels.rope import RotaryTable

CPU = torch.device("cpu")
# Largest relative error of rounding to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Request:
    """``prefix`` tokens in tiers given by a pattern of F, C (coded) and . (evicted), repeated over
    whole windows; what the new tokens touch is FULL."""

    prefix: int
    extend: int
    tiers: str = "F"
    score_start: int = 0


GQA = WindowGeometry(num_q_heads=8, num_kv_heads=2, head_dim=64)

RAGGED = (
    Request(0, 40),
    Request(90, 0, "FC", 10**6),
    Request(203, 1, "FCC.", 203),
    Request(500, 100, "C.F", 590),
    Request(7, 2, "F", 8),
)


@dataclass(frozen=True)
class Case:
    """Arguments of ``extend``, with what the tests need to cut them into chunks."""

    kernels: AttentionKernels
    rotary: RotaryTable
    requests: tuple[Request, ...]
    query: torch.Tensor
    full: FullArena
    coded: torch.Tensor
    view: LayerView
    rows: torch.Tensor
    scores: torch.Tensor
    device: torch.device

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
    kernels: Callable[[WindowGeometry, RotaryTable], AttentionKernels],
    device: torch.device = CPU,
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
    query = torch.randn(num_tokens, geometry.num_q_heads, geometry.head_dim, generator=g)
    return Case(
        kernels(geometry, rotary),
        rotary,
        tuple(requests),
        query.to(dtype),
        full,
        coded,
        LayerView(page_table, tables[0], tables[1], windows, counts[0], counts[1]),
        rows,
        torch.rand(num_rows, columns, generator=g),
        device,
    )


def run(case: Case, scores: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scores) of the kernel, run on the case's device; the case stays as it is."""
    device = case.device
    # Query and output are slices of wider tensors: strided in the first dimension.
    shape = len(case.query), 2, case.geometry.num_q_heads + 2, case.geometry.head_dim
    wide = torch.full(shape, torch.nan, dtype=case.query.dtype, device=device)
    query, out = wide[:, 0, : case.query.shape[1]], wide[:, 1, : case.query.shape[1]]
    query.copy_(case.query)
    slots = torch.stack([case.full.keys, case.full.values], dim=1).to(device)
    view = LayerView(**{name: tensor.to(device) for name, tensor in vars(case.view).items()})
    after = case.scores.to(device, copy=True)
    prefix = torch.tensor([r.prefix for r in case.requests], device=device)
    length = torch.tensor([r.extend for r in case.requests], dtype=torch.int32, device=device)
    start = torch.tensor([r.score_start for r in case.requests], device=device)
    case.kernels.extend(
        query, FullArena(slots[:, 0], slots[:, 1]), case.coded.to(device), view,
        case.rows.to(device), prefix, length, case.scale, out,
        *((after, start) if scores else (None, None)),
    )  # fmt: skip
    return out.cpu(), after.cpu()


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


Storing = Callable[[torch.Tensor], torch.Tensor]
"""How a kernel rounds what it decodes before it multiplies: float64 to the storage dtype."""


def dense(case: Case, rounding: float | None = None, storing: Storing | None = None) -> Expected:
    """Attention by its definition, over keys put into one dense tensor per request.

    ``rounding``: largest relative error of weights and results (default: to nearest).
    ``storing``: None where decoded numbers stay float32.
    """
    geometry, window, dtype = case.geometry, case.geometry.window, case.query.dtype
    rounding = rounding or ROUNDING[dtype]
    # Weights below float16's smallest number are lost, a half of it each.
    lost = 2.0**-25 if dtype is torch.float16 else 0.0
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
        coded_keys = case.rotary.rotate(coded_keys, positions[num_full:, None])
        slots = case.view.full_slot[pages[:num_full]].long()
        # Rounded, a decoded number is one of two neighbours where its float32 errors decide.
        key_slack = torch.zeros(len(indices), *coded_keys.shape[1:], dtype=torch.float64)
        value_slack = key_slack.clone()
        coded_keys, key_slack[num_full:] = _stored(coded_keys, storing)
        coded_values, value_slack[num_full:] = _stored(coded_values, storing)
        keys = torch.cat([case.full.keys[slots].double(), coded_keys])
        values = torch.cat([case.full.values[slots].double(), coded_values])
        heads = torch.arange(geometry.num_q_heads) // geometry.group_size
        keys, values, key_slack, value_slack = (
            t.transpose(1, 2).flatten(0, 1)[:, heads]
            for t in (keys, values, key_slack, value_slack)
        )
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
        slack = torch.einsum("thd,khd->htk", query.double().abs(), key_slack) * case.scale
        # A mass is off by its own exponent's error and by the mean error of all.
        off = 1.1 * (slack + (mass * slack).sum(-1, keepdim=True)) + 3 * exponent
        off *= mass
        # Weights are rounded to the storage dtype at most, the result always.
        off_out = torch.einsum("htk,khd->thd", rounding * mass + off + lost, values.abs())
        off_out += torch.einsum("htk,khd->thd", mass, value_slack)
        off_out += rounding * (outs[-1].abs() + off_out) + 1e-7
        tolerances.append(off_out)
        is_scored = at >= request.score_start

        def by_window(x: torch.Tensor, is_scored: torch.Tensor = is_scored) -> torch.Tensor:
            return x[:, is_scored].mean(0).sum(0).view(-1, window).sum(-1)

        scores[row, indices] += by_window(mass)
        accumulation = request.extend * geometry.num_q_heads * ROUNDING[torch.float32]
        scores_tolerance[row, indices] += by_window(off)
        scores_tolerance[row, indices] += accumulation * (1 + scores[row, indices])
    return Expected(torch.cat(outs), scores, torch.cat(tolerances), scores_tolerance)


def _stored(x: torch.Tensor, storing: Storing | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded float32 windows ``[n, Hkv, W, D]`` as multiplied, and how far that may be off."""
    x = x.double()
    if storing is None:
        return x, torch.zeros_like(x)
    # A few roundings of numbers not above the largest of the head.
    slack = 8 * ROUNDING[torch.float32] * x.abs().amax((2, 3), keepdim=True)
    stored = storing(x)
    above, below = storing(x + slack), storing(x - slack)
    return stored, torch.maximum(above - stored, stored - below)


def check(
    case: Case, rounding: float | None = None, storing: Storing | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and compare with the oracle."""
    out, scores = run(case)
    expected = dense(case, rounding, storing)
    assert ((out.double() - expected.out).abs() <= expected.out_tolerance).all()
    assert ((scores.double() - expected.scores).abs() <= expected.scores_tolerance).all()
    return out, scores


class ExtendEqualsDense:
    """What holds for every backend; a subclass says how its cases are made and compared."""

    make_case: Callable[..., Case]
    check: Callable[[Case], object]

    def test_prefix_17_extend_5_gqa_equals_dense(self) -> None:
        self.check(self.make_case(GQA, [Request(17, 5)]))

    def test_empty_prefix_equals_dense(self) -> None:
        self.check(self.make_case(GQA, [Request(0, 131)]))

    def test_coded_prefix_equals_dense(self) -> None:
        self.check(self.make_case(GQA, [Request(320, 21, "C")]))

    def test_ragged_batch_equals_dense(self) -> None:
        self.check(self.make_case(GQA, RAGGED))

    def test_list_order_does_not_matter_to_the_mask(self) -> None:
        case = self.make_case(GQA, [Request(100, 60, "FFC")])
        row = int(case.rows[0])
        count = int(case.view.num_full[row])
        case.view.windows[row, :count] = case.view.windows[row, :count].flip(0)
        self.check(case)

    def test_a_query_that_sees_nothing_gets_zeros(self) -> None:
        case = self.make_case(GQA, [Request(16, 4)])
        case.view.num_full.zero_()
        out, scores = run(case)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(scores, case.scores)
