"""Routing events in a few launches, against the same in torch: tiers, scores, copies, counts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from kernel_cases import WITHOUT_STORE
from mini_engine import SMALL, MiniEngine, Text
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton import routing
from qevict_kernels.triton.memory import TritonMemory
from qevict_kernels.triton.quantize import TritonCodes
from qevict_kernels.triton.routing import TritonRouting
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.policy import Tier
from triton_device import DEVICE, require_device

require_device()

pytestmark = pytest.mark.slow

on_the_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="the miniature engine is the CPU's")

HEADS = Heads(2, 1, 64)


class InTorch(TritonMemory, TritonCodes, ReferenceKernels):
    """Routing as the tier manager does it; attention in torch, which is quicker here."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        super().__init__(geometry, rotary)
        self._cos_sin = rotary.cos_sin

    def reserve(self, batch: int, columns: int) -> None:
        """Nothing."""


class OnDevice(InTorch, TritonRouting):
    """Routing in a few launches."""


def make_engine(kernels: Any, **options: Any) -> MiniEngine:
    config = TieringConfig(**SMALL | {"route_every": 4} | options)
    engine = MiniEngine(
        kernels, config, HEADS, num_layers=3, kv_tokens=2200, context=480, rows=4,
        fixed_shapes=True,
    )  # fmt: skip
    assert (engine.manager._on_device is not None) == (kernels is OnDevice)
    return engine


def live(engine: MiniEngine) -> dict[str, torch.Tensor]:
    """Requests that share a prefix, come and go; what became of them."""
    found: dict[str, torch.Tensor] = {}
    document = Text(1, 150)
    for name, prompt in ((1, 200), (2, 180), (3, 60)):
        engine.start(name, prompt, document)
        while engine.running[name].stored < prompt:
            engine.extend({name: 64})
        for _ in range(10):
            engine.decode(sorted(engine.running))
        assert engine.problems() == []
        if name == 1:
            engine.finish(1, publish=True)
    for name in engine.running:
        row = engine.running[name].row
        views = engine.manager.views
        found[f"tiers of {name}"] = engine.tiers(name)
        found[f"outputs of {name}"] = torch.stack(engine.outputs[name])
        found[f"scores of {name}"] = views.score[:, row]
        found[f"ranks of {name}"] = views.outranked[:, row]
    for counter, total in engine.manager.read_counters().items():
        found[counter.name] = torch.tensor(total)
    return found


def compare(**options: Any) -> dict[str, torch.Tensor]:
    expected, found = (live(make_engine(kernels, **options)) for kernels in (InTorch, OnDevice))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    return found


@on_the_cpu
@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_an_event_is_what_it_is_in_torch(promote: Promotion) -> None:
    found = compare(promote=promote)
    tiers = torch.cat([t.flatten() for name, t in found.items() if name.startswith("tiers")])
    assert {Tier(int(tier)) for tier in tiers.unique()} >= {Tier.FULL, Tier.CODED, Tier.EVICTED}
    assert found["QUANTIZED"] > 0
    assert found["EVICTED_CODED"] > 0
    assert (found["PROMOTED"] > 0) == (promote is Promotion.DEQUANTIZE)


@on_the_cpu
@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_lists_and_rows_longer_than_a_block(
    promote: Promotion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_BLOCK", 16)
    compare(promote=promote, full_layers=frozenset({1}), budget=Fraction(3, 5))


@on_the_cpu
def test_scores_that_decay() -> None:
    decayed, kept = (compare(score_decay=share) for share in (Fraction(1, 2), Fraction(1)))
    assert (decayed["scores of 2"].sum(-1) < kept["scores of 2"].sum(-1)).all()


@on_the_cpu
@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_windows_that_cannot_be_coded(promote: Promotion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of some tokens have no float16: their windows are evicted, and counted."""
    original = MiniEngine._draw

    def draw(
        engine: MiniEngine, request: Any, layer: int, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = original(engine, request, layer, position)
        if position % 37 == 5:
            value = value.clone()
            value[..., layer] = 1e6
        return query, key, value

    monkeypatch.setattr(MiniEngine, "_draw", draw)
    found = compare(params=ParamFormat.FP16, promote=promote)
    assert found["NON_FINITE"] > 3
