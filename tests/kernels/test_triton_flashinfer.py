"""FULL windows attended by FlashInfer, or by a stand-in where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import fake_flashinfer
from extend_cases import GQA, ROUNDING, Request, check, make_case, run
from kernel_cases import Case, random_case, rotary_table
from qevict_kernels.flashinfer import FlashInferKernels, PairedDecode
from qevict_kernels.interface import FullArena, LayerView, Lengths
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton import TritonKernels
from triton_device import DEVICE, IS_INTERPRETED, require_device

require_device()

WHOLE = (
    Request(0, 40),
    Request(203, 1, score_start=203),
    Request(64, 21, score_start=70),
    Request(7, 2, score_start=8),
)


@pytest.fixture(autouse=True)
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_INTERPRETED:
        monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.MODULE)
    else:
        pytest.importorskip("flashinfer")
    return


class Whole(FlashInferKernels):
    """Tells itself the lengths."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        super().__init__(geometry, rotary, DEVICE, tile=16, max_splits=2)

    def extend(self, *arguments: Any, **options: Any) -> None:
        prefix, length = arguments[5], arguments[6]
        whole = Lengths(prefix.tolist(), (prefix + length).tolist())
        super().extend(*arguments, whole=whole)


def _rounding(dtype: torch.dtype) -> float:
    return (2 if IS_INTERPRETED and dtype is torch.bfloat16 else 1) * ROUNDING[dtype]


@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        (GQA, torch.bfloat16),
        (WindowGeometry(4, 4, 128, window=16), torch.float16),
        (WindowGeometry(14, 2, 64, window=4, key_bits=4), torch.bfloat16),
    ],
)
def test_chunks_over_full_windows_equal_dense(geometry: WindowGeometry, dtype: torch.dtype) -> None:
    case = make_case(geometry, WHOLE, dtype=dtype, kernels=Whole, device=DEVICE)
    check(case, rounding=_rounding(dtype))


def test_a_launch_is_planned_once_and_each_layer_has_its_own_slots() -> None:
    case = make_case(GQA, WHOLE, kernels=Whole, device=DEVICE)
    kernels = case.kernels
    assert isinstance(kernels, Whole)
    whole = Lengths([r.prefix for r in WHOLE], [r.prefix + r.extend for r in WHOLE])
    plans = []
    original = kernels._prefill.plan
    kernels._prefill.plan = lambda *a, **k: (plans.append(1), original(*a, **k))
    # A second layer: the same windows in other slots.
    moved = torch.randperm(len(case.full.keys) - 1)
    shift = torch.cat([moved, torch.tensor([len(moved)])])
    keys, values = torch.empty_like(case.full.keys), torch.empty_like(case.full.values)
    keys[shift], values[shift] = case.full.keys, case.full.values
    slot = case.view.full_slot
    slot = torch.where(slot >= 0, shift.int()[slot.clamp(min=0).long()], slot)
    other = replace(case, full=FullArena(keys, values), view=replace(case.view, full_slot=slot))
    kernels.extend = partial(FlashInferKernels.extend, kernels, whole=whole)  # type: ignore[method-assign]
    first, second = run(case), run(other)
    assert len(plans) == 1
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    kernels.extend = partial(FlashInferKernels.extend, kernels, whole=Lengths(*whole))  # type: ignore[method-assign]
    run(case)
    assert len(plans) == 2


def test_other_chunks_are_tritons() -> None:
    requests = [Request(150, 30, "FCC.", 160), Request(0, 9)]
    plain = partial(FlashInferKernels, device=DEVICE)
    mine = run(make_case(GQA, requests, kernels=plain, device=DEVICE))
    triton = run(
        make_case(GQA, requests, kernels=partial(TritonKernels, device=DEVICE), device=DEVICE)
    )
    for a, b in zip(mine, triton, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer_is_tried_out_before_it_serves(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = FlashInferKernels(GQA, rotary_table(64), DEVICE)
    kernels.try_out(dtype)
    monkeypatch.setattr(type(kernels._prefill), "run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernels.try_out(dtype)


def test_a_width_that_flashinfer_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels for a head_dim of 80"):
        FlashInferKernels(WindowGeometry(4, 2, 80), rotary_table(80), DEVICE)


# -- decode in a pair ---------------------------------------------------------------------


def _on_device(case: Case) -> Case:
    slots = torch.stack([case.full.keys, case.full.values], 1).to(DEVICE)
    return replace(
        case,
        query=case.query.to(DEVICE),
        full=FullArena(slots[:, 0], slots[:, 1]),
        coded=case.coded.to(DEVICE),
        view=LayerView(**{name: tensor.to(DEVICE) for name, tensor in vars(case.view).items()}),
        rows=case.rows.to(DEVICE),
        seq_lens=case.seq_lens.to(DEVICE),
        scores=case.scores.to(DEVICE),
    )


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize(
    ("geometry", "counts", "tail"),
    [
        (GQA, [(3, 5), (1, 0), (20, 40), (9, 1)], [1, 8, 5, 3]),
        (WindowGeometry(6, 2, 64, window=16), [(2, 3), (17, 33)], [16, 9]),
        (WindowGeometry(4, 4, 128, key_bits=4, value_bits=4), [(5, 9)], [2]),
    ],
)
def test_a_pair_equals_our_own_decode(
    geometry: WindowGeometry, counts: list[tuple[int, int]], tail: list[int], scores: bool
) -> None:
    rotary = rotary_table(geometry.head_dim)
    case = _on_device(random_case(geometry, rotary, counts, tail=tail))
    kernels = TritonKernels(geometry, rotary, DEVICE, tile=16, max_splits=2)
    pair = PairedDecode(kernels, DEVICE)
    pair.plan([f for f, _ in counts], case.seq_lens.tolist(), case.scale, case.query.dtype)
    expected, expected_scores = case.decode(kernels, scores)
    found, found_scores = case.decode(pair, scores)
    largest = expected.abs().max().item()
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=2**-6 * largest)
    assert torch.allclose(found_scores, expected_scores, rtol=0, atol=1e-3)
    if not scores:
        assert torch.equal(found_scores, case.scores)
    # A sum of weights is 1 for each request.
    if scores:
        gained = (found_scores - case.scores).sum(1)[case.rows]
        assert torch.allclose(gained, torch.ones_like(gained), atol=1e-3)
