"""Decode attention of the Triton backend against the reference, and its invariances."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from kernel_cases import Case, random_case, rotary_table
from qevict_kernels.interface import AttentionKernels, FullArena, LayerView
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.triton import TritonKernels
from qevict_kernels.triton.decode import scratch_numbers
from triton_device import DEVICE, IS_INTERPRETED, require_device

require_device()

EPS = 2.0**-24
# The largest relative error of one rounding. The interpreter truncates to bfloat16.
ROUNDING = {torch.bfloat16: 2.0**-7 if IS_INTERPRETED else 2.0**-8, torch.float16: 2.0**-11}
TILE, MAX_SPLITS = 16, 2  # so that few windows make several tiles and splits


@dataclass(frozen=True)
class Setup:
    """One compiled specialisation. Together they meet every head size, window, code, parameter
    format, dtype, rotary style and kind of head grouping that is supported."""

    geometry: WindowGeometry
    rotary_dim: int
    is_neox: bool
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        g = self.geometry
        style = "neox" if self.is_neox else "pairs"
        return (
            f"q{g.num_q_heads}kv{g.num_kv_heads}d{g.head_dim}w{g.window}-k{g.key_bits}v{g.value_bits}"
            f"-{g.params.value}-{style}{self.rotary_dim}-{str(self.dtype)[6:]}"
        )


FP16, UINT8 = ParamFormat.FP16, ParamFormat.UINT8
SMALL = Setup(WindowGeometry(6, 2, 64), 64, True)
TINY = Setup(WindowGeometry(2, 1, 64), 64, True)
SETUPS = [
    SMALL,
    Setup(WindowGeometry(4, 1, 128), 128, True),
    Setup(WindowGeometry(8, 1, 64, 16, 4, 2, FP16), 64, False),
    Setup(WindowGeometry(5, 1, 80, 4, 2, 4, UINT8), 32, False, torch.float16),
    Setup(WindowGeometry(2, 2, 96, 32, 4, 4, UINT8), 96, True),
    Setup(WindowGeometry(8, 1, 256, 8, 2, 2, FP16), 64, True),
    Setup(WindowGeometry(2, 1, 80, 8, 2, 4, FP16), 80, True, torch.float16),
    Setup(WindowGeometry(17, 1, 64, 4, 4, 4, UINT8), 40, False),
]
QUICK = (SMALL, SETUPS[1], SETUPS[3])
each_setup = pytest.mark.parametrize(
    "setup",
    [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in SETUPS],
    ids=str,
)


@cache
def reference(setup: Setup) -> ReferenceKernels:
    return ReferenceKernels(setup.geometry, rotary_table(setup.rotary_dim, setup.is_neox))


@cache
def kernels(setup: Setup) -> TritonKernels:
    return made(setup)


def made(setup: Setup) -> TritonKernels:
    rotary = reference(setup).rotary
    return TritonKernels(setup.geometry, rotary, DEVICE, tile=TILE, max_splits=MAX_SPLITS)


def decode(
    triton: TritonKernels, case: Case, scores: bool = True, **changes: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, scores) of the case on the device, brought back."""
    case = replace(case, **changes)
    view = LayerView(**{k: v.to(DEVICE) for k, v in vars(case.view).items()})
    full = FullArena(case.full.keys.to(DEVICE), case.full.values.to(DEVICE))
    tensors = {k: v.to(DEVICE) for k, v in vars(case).items() if isinstance(v, torch.Tensor)}
    out, after = replace(case, view=view, full=full, **tensors).decode(triton, scores)
    return out.cpu(), after.cpu()


# -- error bounds -------------------------------------------------------------------------


@dataclass
class Bounds:
    """How far outputs ``[Hq, D]`` and the masses of windows ``[N]`` of a request may be off."""

    out: torch.Tensor
    mass: torch.Tensor


def bounds(setup: Setup, case: Case, b: int) -> Bounds:
    """What the kernel's roundings, and none other, explain.

    A coded key may be off by as much as if it had been stored in bfloat16: each channel by one
    rounding, independent of the others, so that a logit has a standard deviation of the root of
    the sum of ``(q k 2**-8)**2 / 12``; six of them are allowed. Weights are rounded once before
    they meet a value; of a coded value they meet the part above the zero.
    """
    g, row, length = case.geometry, int(case.rows[b]), int(case.seq_lens[b])
    windows, keys, values = reference(setup)._row_windows(case.full, case.coded, case.view, row)
    num_full = int(case.view.num_full[row])
    heads = torch.arange(g.num_q_heads) // g.group_size
    seen = reference(setup)._positions(windows).squeeze(1) < length  # [n, W]
    keys, values = (x.masked_fill(~seen[:, None, :, None], 0.0)[:, heads] for x in (keys, values))
    terms = case.query[b].float()[None, :, None] * keys * case.scale  # [n, Hq, W, D]
    logits = terms.sum(-1).masked_fill(~seen[:, None], -math.inf).transpose(0, 1)  # [Hq, n, W]
    mass = logits.flatten(1).softmax(-1).view(logits.shape).nan_to_num()
    step = g.head_dim * EPS * terms.abs().sum(-1)
    step[num_full:] += 6 * (terms[num_full:].square().sum(-1) / 12).sqrt() * 2.0**-8
    if not len(windows):
        return Bounds(torch.zeros(case.query.shape[1:]), torch.zeros(case.view.windows.shape[1]))
    logit = step.amax(dim=(0, 2))  # [Hq]
    values = values.transpose(0, 1)  # [Hq, n, W, D]
    out = torch.einsum("hnw,hnwd->hd", mass, values)
    spread = torch.einsum("hnw,hnwd->hd", mass, (values - out[:, None, None]).abs())
    parts = values.abs()
    parts[:, num_full:] = (values.amax(-1) - values.amin(-1))[:, num_full:, :, None]
    weighed = mass.clone()
    weighed[:, :num_full] *= ROUNDING[setup.dtype]
    weighed[:, num_full:] *= ROUNDING[torch.bfloat16]
    off = torch.einsum("hnw,hnwd->hd", weighed, parts) + 2 * logit[:, None] * spread
    off += 2 * ROUNDING[setup.dtype] * out.abs() + 64 * EPS
    gained = torch.zeros(case.view.windows.shape[1])
    window_mass = mass.sum(-1)  # [Hq, n]
    gained[windows.long()] = ((2 * logit[:, None] + 64 * EPS) * window_mass).mean(0) + 64 * EPS
    return Bounds(off, gained)


def assert_close(setup: Setup, case: Case, triton: TritonKernels | None = None) -> None:
    """Triton's decode equals the reference's within its ``bounds``."""
    expected, expected_scores = case.decode(reference(setup))
    out, scores = decode(triton or kernels(setup), case)
    changed = torch.zeros_like(scores, dtype=torch.bool)
    for b, row in enumerate(case.rows.tolist()):
        allowed = bounds(setup, case, b)
        assert ((out[b].float() - expected[b].float()).abs() <= allowed.out).all(), f"request {b}"
        assert ((scores[row] - expected_scores[row]).abs() <= allowed.mass).all(), f"scores of {b}"
        changed[row] = allowed.mass > 0
    assert torch.equal(scores[~changed], case.scores[~changed])


# -- agreement ----------------------------------------------------------------------------

RAGGED = [(3, 5), (0, 4), (2, 0), (0, 0), (TILE + 1, 2 * TILE + 8)]
# Lists of exactly a tile, of all splits full, and one window more or less.
BOUNDARIES = [(TILE, TILE - 1), (2 * TILE, 2 * TILE + 1), (0, 4 * TILE + 1)]


@each_setup
def test_decode_agrees_with_the_reference(setup: Setup) -> None:
    window = setup.geometry.window
    case = random_case(
        setup.geometry, reference(setup).rotary, RAGGED, dtype=setup.dtype,
        tail=[window, 1, 1, 1, window - 1],
    )  # fmt: skip
    assert_close(setup, case)


def test_decode_agrees_at_the_boundaries_of_tiles_and_splits() -> None:
    assert_close(TINY, random_case(TINY.geometry, reference(TINY).rotary, BOUNDARIES))


@pytest.mark.parametrize("tail", range(1, 9))
def test_decode_masks_what_is_not_written_yet(tail: int) -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(2, 1), (1, 0)], tail=[tail, tail])
    assert case.full.keys.isnan().any()
    assert_close(TINY, case)


def test_decode_masks_windows_past_the_end() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(3, 3), (2, 2)])
    assert_close(TINY, replace(case, seq_lens=torch.tensor([13, 1])))


def test_decode_with_a_yarn_table_agrees_with_the_reference() -> None:
    rotary = rotary_table(64, mscale=1.3)
    case = random_case(TINY.geometry, rotary, [(3, 20)])
    expected, _ = case.decode(ReferenceKernels(TINY.geometry, rotary))
    out, _ = decode(TritonKernels(TINY.geometry, rotary, DEVICE, tile=TILE), case)
    assert (out - expected).abs().max() <= 4 * ROUNDING[torch.bfloat16] * expected.abs().max()


@pytest.mark.parametrize("params", [UINT8, FP16], ids=["uint8", "fp16"])
@pytest.mark.parametrize("bits", [2, 4])
def test_coded_keys_are_as_exact_as_keys_stored_in_bfloat16(params: ParamFormat, bits: int) -> None:
    """The error of the log of a window's mass, against that of keys rounded after RoPE.

    The interpreter rounds a product before it is added to.
    """
    setup = Setup(WindowGeometry(1, 1, 128, 8, bits, 2, params), 128, True)
    case = random_case(setup.geometry, reference(setup).rotary, [(0, 3 * TILE)])
    case = replace(case, scores=torch.zeros_like(case.scores))
    row = int(case.rows[0])
    windows, keys, _ = reference(setup)._row_windows(case.full, case.coded, case.view, row)

    def log_mass(keys: torch.Tensor) -> torch.Tensor:
        logits = (keys[:, 0].double() @ case.query[0, 0].double()) * case.scale  # [n, W]
        return logits.flatten().softmax(0).view(logits.shape).sum(-1).log()

    _, scores = decode(kernels(setup), case)
    error = scores[row, windows.long()].double().log() - log_mass(keys)
    stored = log_mass(keys.bfloat16()) - log_mass(keys)
    assert error.square().mean() <= (2 if IS_INTERPRETED else 1) * stored.square().mean()


def test_empty_request_gives_zeros_and_no_score() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(2, 3), (0, 0)])
    for length in (0, 1):
        out, scores = decode(kernels(TINY), case, seq_lens=torch.tensor([0, length]))
        assert not out.any()
        assert torch.equal(scores, case.scores)


def test_padding_of_a_batch_changes_nothing() -> None:
    """A CUDA graph runs for more requests than there are: the others have length 0 and row 0."""
    case = random_case(TINY.geometry, reference(TINY).rotary, [(2, 3)])
    rows = torch.zeros(1, dtype=torch.int64)
    view = replace(
        case.view, **{k: v.roll(-int(case.rows[0]), 0) for k, v in vars(case.view).items()
                      if k in ("page_table", "windows", "num_full", "num_coded")}
    )  # fmt: skip
    case = replace(case, view=view, rows=rows)
    expected, expected_scores = decode(kernels(TINY), case)
    padded = replace(
        case,
        query=torch.cat([case.query, torch.full_like(case.query, torch.nan).expand(2, -1, -1)]),
        rows=torch.zeros(3, dtype=torch.int64),
        seq_lens=torch.cat([case.seq_lens, torch.zeros(2, dtype=torch.int64)]),
    )
    out, scores = decode(kernels(TINY), padded)
    assert torch.equal(out[:1], expected)
    assert not out[1:].any()
    assert torch.equal(scores, expected_scores)


def test_strided_query_out_and_int32_lengths() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, RAGGED[:3])
    expected, _ = decode(kernels(TINY), case)
    wide = torch.zeros(3, 2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 0] = case.query.to(DEVICE)
    view = LayerView(**{k: v.to(DEVICE) for k, v in vars(case.view).items()})
    full = FullArena(case.full.keys.to(DEVICE), case.full.values.to(DEVICE))
    kernels(TINY).decode(
        wide[:, 0], full, case.coded.to(DEVICE), view, case.rows.to(DEVICE),
        case.seq_lens.int().to(DEVICE), case.scale, wide[:, 1], None,
    )  # fmt: skip
    assert torch.equal(wide[:, 1].cpu(), expected)
    assert torch.equal(wide[:, 0].cpu(), case.query)


def test_nan_stays_in_its_request() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(3, 9), (3, 9)])
    expected, expected_scores = decode(kernels(TINY), case)
    row = int(case.rows[0])
    page = case.view.page_table[row, int(case.view.windows[row, -1])]
    slot = int(case.view.coded_slot[page])
    start = TINY.geometry.record.header
    case.coded[slot, :, start : start + 24] = torch.full((6,), torch.nan).view(torch.uint8)
    out, scores = decode(kernels(TINY), case)
    assert out[0].isnan().all()
    assert torch.equal(out[1], expected[1])
    other = int(case.rows[1])
    assert torch.equal(scores[other], expected_scores[other])


def test_extreme_logits_do_not_overflow() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(3, 20)])
    for scale in (1e3, 1e-6):
        out, scores = decode(kernels(TINY), case, scale=scale)
        assert out.isfinite().all()
        gained = (scores - case.scores)[int(case.rows[0])].sum()
        assert abs(float(gained) - 1) <= 1e-4


def test_what_no_request_sees_is_not_read() -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(2, 3), (1, 2)])
    expected, expected_scores = decode(kernels(TINY), case)
    mine = case.rows.tolist()
    view = replace(
        case.view, windows=case.view.windows.clone(), num_full=case.view.num_full.clone(),
        page_table=case.view.page_table.clone(),
    )  # fmt: skip
    for row in range(len(view.windows)):
        if row not in mine:
            view.windows[row], view.page_table[row], view.num_full[row] = -7, 1 << 30, 99
            continue
        listed = torch.ones(view.windows.shape[1], dtype=torch.bool)
        listed[: int(view.num_full[row])] = False
        listed[len(listed) - int(view.num_coded[row]) :] = False
        view.windows[row, listed] = 1 << 30
    case.coded[~torch.isin(torch.arange(len(case.coded)), view.coded_slot)] = 17
    out, scores = decode(kernels(TINY), case, view=view)
    assert torch.equal(out, expected)
    assert torch.equal(scores, expected_scores)


# -- invariance ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch() -> Case:
    return random_case(TINY.geometry, reference(TINY).rotary, [*RAGGED[:4], *BOUNDARIES[:2]])


def test_decode_is_bit_identical_alone_and_in_a_batch(batch: Case) -> None:
    out, scores = decode(kernels(TINY), batch)
    for b in range(len(out)):
        alone, alone_scores = decode(kernels(TINY), batch.alone(b))
        row = int(batch.rows[b])
        assert torch.equal(alone[0], out[b])
        assert torch.equal(alone_scores[row], scores[row])


@pytest.mark.slow
def test_decode_is_bit_identical_for_any_number_of_programs(batch: Case) -> None:
    expected = decode(kernels(TINY), batch)
    other = made(TINY)
    other._programs = 3
    for got, want in zip(decode(other, batch), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.slow
def test_output_does_not_depend_on_whether_scores_are_asked_for(batch: Case) -> None:
    with_scores, _ = decode(kernels(TINY), batch)
    without, scores = decode(kernels(TINY), batch, scores=False)
    assert torch.equal(with_scores, without)
    assert torch.equal(scores, batch.scores)


# -- every byte matters -------------------------------------------------------------------


@pytest.mark.parametrize("setup", [TINY, SETUPS[6]], ids=str)
def test_every_field_of_a_record_changes_the_result(setup: Setup) -> None:
    """A bound that a corrupted record passes proves nothing."""
    case = random_case(setup.geometry, reference(setup).rotary, [(0, 3)], dtype=setup.dtype)
    record, is_fp16 = setup.geometry.record, setup.geometry.params is FP16
    expected, _ = case.decode(reference(setup))
    places = [record.key_codes, record.value_codes, record.key_scales, record.key_zeros,
              record.value_scales, record.value_zeros]  # fmt: skip
    places += [record.header + 4 * i for i in range(6) if not is_fp16]
    for place in places:
        changed = replace(case, coded=case.coded.clone())
        # The top byte of the field's first number, of a float32 the top byte of its mantissa.
        width = 3 if place >= record.header else 2 if is_fp16 else 1
        changed.coded[..., place + width - 1] ^= 0x15
        again, _ = changed.decode(reference(setup))
        assert not torch.equal(again, expected)
        assert_close(setup, changed)


# -- scratch, arguments, interface --------------------------------------------------------


def test_scratch_is_allocated_once() -> None:
    triton = made(TINY)
    triton.reserve(8, 100)
    before = [tensor.data_ptr() for tensor in triton._scratch]
    expected = scratch_numbers(TINY.geometry, triton.max_splits, 8, 100)
    assert tuple(tensor.numel() for tensor in triton._scratch) == expected
    decode(triton, random_case(TINY.geometry, reference(TINY).rotary, [(2, 3)]))
    assert [tensor.data_ptr() for tensor in triton._scratch] == before


def test_scratch_grows_with_the_batch() -> None:
    triton = made(TINY)
    case = random_case(TINY.geometry, reference(TINY).rotary, [(2, 3)])
    decode(triton, case)
    expected = scratch_numbers(TINY.geometry, triton.max_splits, 1, case.view.windows.shape[1])
    assert tuple(tensor.numel() for tensor in triton._scratch) == expected


def test_decode_has_the_signature_of_the_interface() -> None:
    expected = inspect.signature(AttentionKernels.decode)
    assert inspect.signature(TritonKernels.decode) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 2, 32, dtype=torch.bfloat16)}, r"query must be \[2, 2, 64\]"),
        ({"query": torch.zeros(2, 2, 64)}, "query must have the arena's dtype torch.bfloat16"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows must be contiguous torch.int64"),
        ({"rows": torch.zeros(3, dtype=torch.int64)}, r"rows must .* \[2\], got torch.int64 \[3\]"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be contiguous torch.int64 or torch.int32"),
        ({"coded": torch.zeros(1, 1, 64, dtype=torch.uint8)}, r"coded must .* \[1, 1, 448\]"),
        ({"full": FullArena(*torch.zeros(2, 1, 1, 8, 64))}, "must be bfloat16 or float16 on"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    case = random_case(TINY.geometry, reference(TINY).rotary, [(1, 1), (1, 1)])
    with pytest.raises(ValueError, match=message):
        decode(kernels(TINY), case, **change)


def test_splits_must_be_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="max_splits must be a power of two, got 3"):
        TritonKernels(TINY.geometry, reference(TINY).rotary, DEVICE, max_splits=3)
    with pytest.raises(ValueError, match="tile must be a power of two from 16 on, got 8"):
        TritonKernels(TINY.geometry, reference(TINY).rotary, DEVICE, tile=8)
