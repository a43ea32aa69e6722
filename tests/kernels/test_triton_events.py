"""Routing events in a few launches and in torch, one after another from equal beginnings.

Needs neither SGLang nor the miniature engine, so that it runs on a bare machine with a GPU.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kernel_cases import WITHOUT_STORE, rotary_table
from qevict_kernels.interface import RoutesOnDevice
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.memory import TritonMemory
from qevict_kernels.triton.quantize import TritonCodes
from qevict_kernels.triton.routing import TritonRouting
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion, TieringConfig
from qevict_tiers.manager import TierManager
from qevict_tiers.policy import Tier
from triton_device import DEVICE, require_device

require_device()

GEOMETRY = WindowGeometry(num_q_heads=2, num_kv_heads=1, head_dim=64)
LAYERS, ROWS, WINDOWS, SHORTER = 3, (1, 3), 60, 41


class InTorch(TritonMemory, TritonCodes):
    """What a tier manager needs of kernels; events are hundreds of torch operations."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        self.geometry, self.rotary = geometry, rotary
        self._cos_sin = rotary.cos_sin.to(DEVICE)


class OnDevice(InTorch, TritonRouting):
    """Events are a few launches."""


def make_manager(kernels: type[InTorch], promote: Promotion, publishable: int) -> TierManager:
    """Two rows of FULL windows of unequal length, of which the first may leave some."""
    config = TieringConfig(budget=Fraction(2, 5), min_context=112, local=16, promote=promote)
    budget = WindowBudget(config, GEOMETRY, LAYERS)
    pages = 2 * WINDOWS
    manager = TierManager(
        budget,
        kernels(GEOMETRY, rotary_table(64)),  # type: ignore[arg-type]
        torch.zeros(LAYERS * pages * 2 * budget.full_bytes, dtype=torch.uint8, device=DEVICE),
        num_pages=pages,
        num_rows=5,
        max_windows=WINDOWS + 3,
        dtype=torch.bfloat16,
        fixed_shapes=True,
    )
    assert isinstance(manager.kernels, RoutesOnDevice) == (kernels is OnDevice)
    g = torch.Generator().manual_seed(1)
    manager.full_arena.keys.copy_(torch.randn(manager.full_arena.keys.shape, generator=g))
    manager.full_arena.values.copy_(torch.randn(manager.full_arena.values.shape, generator=g))
    manager.open(list(ROWS), [publishable, 0])
    own = torch.randperm(pages, generator=g).to(DEVICE) + 1
    own = own[: WINDOWS + SHORTER]
    manager.append(ROWS, [range(WINDOWS), range(SHORTER)], own)
    manager.allocate_full(slice(0, LAYERS), own)
    # A window that has no code in this format.
    slot = manager.layer_view(1).full_slot[own[20]]
    manager.full_arena.values[slot, 0, 2, 7] = torch.inf
    return manager


def copies(manager: TierManager) -> dict[str, torch.Tensor]:
    """Every copy, by its owner; wherever it lies."""
    found = {}
    for name, side in (("FULL", manager.arena.full), ("coded", manager.arena.coded)):
        owners = torch.nonzero(side.table >= 0)[:, 0]
        found[f"owners of {name}"] = owners
        found[name] = side.slots[side.table[owners].long()]
    return found


@pytest.mark.parametrize("promote", WITHOUT_STORE)
@pytest.mark.parametrize("publishable", [30])
def test_events_are_what_they_are_in_torch(promote: Promotion, publishable: int) -> None:
    managers = [make_manager(kind, promote, publishable) for kind in (InTorch, OnDevice)]
    g = torch.Generator().manual_seed(2)
    seen: set[Tier] = set()
    for event in range(4):
        # Scores of few distinct values: ties are many.
        mass = torch.randint(0, 7, managers[0].views.score.shape, generator=g).float().to(DEVICE)
        layers = slice(1, 2) if event == 0 else slice(0, LAYERS)
        tokens = [8 * WINDOWS - 7 + event, 8 * SHORTER]
        for manager in managers:
            manager.views.score.copy_(mass)
            manager.route(layers, list(ROWS), tokens)
            assert manager.check_integrity() == []
        in_torch, on_device = managers
        for name in ("tier", "outranked", "num_full", "num_coded"):
            expected, found = (getattr(m.views, name)[:, ROWS] for m in managers)
            assert torch.equal(expected, found), (event, name)
        assert in_torch.read_counters() == on_device.read_counters()
        expected_copies, found_copies = copies(in_torch), copies(on_device)
        for name, tensor in expected_copies.items():
            assert torch.equal(tensor, found_copies[name]), (event, name)
        seen |= {Tier(int(tier)) for tier in on_device.views.tier.unique()}
    assert seen == set(Tier)
