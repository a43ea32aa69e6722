"""On an accelerator no launch waits for the device, whatever it routes.

Shown without one: torch's fake tensors are on a device "cuda" and have no contents, so that
what depends on contents (a shape, a number for the host) raises, as does an operation on two
devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_cases import WITHOUT_STORE
from mini_engine import rotary_table
from qevict_monitoring.exporter import Exporter
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.manager import TierManager
from sglang_qevict import late, metrics
from sglang_qevict.attention import QEvictAttentionBackend
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.state import TieringState, _Drop

CUDA = torch.device("cuda")
GEOMETRY = TieringConfig().geometry(Heads(4, 2, 64))
LAYERS = 2


class Launches:
    """Kernels that do nothing, and notice whether they could have."""

    geometry = GEOMETRY
    rotary = rotary_table(64)

    def __init__(self) -> None:
        self.quantized = self.rebuilt = self.moved = 0

    def quantize(self, full: Any, coded: Any, slots: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.quantized += slots.shape[0]
        return torch.zeros_like(slots, dtype=torch.bool)

    def dequantize(self, full: Any, coded: Any, slots: torch.Tensor, *rest: Any) -> None:
        self.rebuilt += slots.shape[0]

    def copy_slots(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.moved += sources.shape[0]


class _Event:
    """A CUDA event of a device that is never done."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on a GPU that isn't there. What torch copies from the host must be pinned."""
    original, original_to = torch.tensor, torch.Tensor.to
    pinned: list[torch.Tensor] = []

    def pin_memory(host: torch.Tensor) -> torch.Tensor:
        pinned.append(host)
        return host

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = original_to(tensor, *args, **options)
        if (tensor.device.type, result.device.type) == ("cpu", "cuda"):
            assert any(tensor is host for host in pinned), "waits for the device"
            assert options.get("non_blocking"), "waits for the device"
        return result

    def tensor(*args: Any, **options: Any) -> torch.Tensor:
        assert torch.device(options.get("device") or "cpu").type == "cpu", "waits for the device"
        return original(*args, **options)

    with FakeTensorMode():
        monkeypatch.setattr(torch, "tensor", tensor)
        # Fake tensors know nothing of pinned memory.
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to)
        yield


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("promote", WITHOUT_STORE)
@pytest.mark.parametrize("is_watched", [False, True])
def test_no_launch_waits_for_the_device(
    promote: Promotion, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TieringConfig(
        budget=Fraction(3, 10),
        min_context=112,
        local=16,
        promote=promote,
        score_decay=Fraction(1, 2),
    )
    budget = WindowBudget(config, GEOMETRY, LAYERS)
    plan = plan_capacity(budget, 1600 * budget.token_bytes, 512, 64, 4, 4)
    kernels = Launches()
    observer = None
    if is_watched:
        monkeypatch.setattr(torch.cuda, "Event", _Event)
        monkeypatch.setattr(late, "_pinned_like", lambda like: torch.empty(like.shape))
        monkeypatch.setattr(metrics, "_INTERVAL_SECONDS", 0.0)
        exporter = Exporter({"model_name": "m"}, CollectorRegistry())
        observer = metrics.MetricsObserver(plan, 5, CUDA, exporter)
    manager = TierManager(
        budget,
        kernels,  # type: ignore[arg-type]
        torch.empty(plan.arena_bytes, dtype=torch.uint8, device=CUDA),
        plan.num_pages,
        5,
        plan.max_windows,
        torch.bfloat16,
        observer=observer,
    )
    state = TieringState(plan, manager, torch.zeros(5, 512, dtype=torch.int32, device=CUDA))
    if observer is not None:
        observer.watch(state)
    assert manager.arena.fixed_shapes

    prompt, row = 200, 1
    stored, next_row = 0, 2

    def host(numbers: list[int]) -> SimpleNamespace:
        # What SGLang has on the host, which a fake tensor would not tell.
        return SimpleNamespace(tolist=lambda: numbers)

    while stored < prompt:
        start, stored = stored, stored + plan.claims.chunk_limit(prompt, stored)
        stored = min(stored, start + 64, prompt)
        state.extend_prepared(row, prompt, stored)
        for layer, chunks in _layers(state.start_extend([row], [start], [stored])):
            state.allocate_layer(layer, chunks)
            manager.locate(torch.zeros(stored - start, dtype=torch.int64, device=CUDA))
            state.route_layer(layer, chunks)
    backend = object.__new__(QEvictAttentionBackend)
    backend.serve(state, first_layer=0)
    for step in range(1, 20):
        state.alloc_to_lengths(
            req_pool_indices_cpu=host([row]), target_seq_lens_cpu=host([prompt + step])
        )
        backend.init_forward_metadata_out_graph(
            SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=4, num_padding=3)
        )
        manager.locate(torch.zeros(1, dtype=torch.int64, device=CUDA))
    assert kernels.quantized
    assert kernels.moved
    assert bool(kernels.rebuilt) == (promote is Promotion.DEQUANTIZE)

    # It ends and leaves its windows; another begins with them, is limited, and ends; pages go.
    pages = list(range(1, 1 + state.publishable_tokens(row) // 8))
    state.publish(row, 0, pages)
    state.free(row)
    state.extend_prepared(next_row, prompt, len(pages) * 8 + 8, pages)
    backend.init_forward_metadata_out_graph(
        SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices_cpu=host([next_row]),
            extend_prefix_lens_cpu=[len(pages) * 8],
            extend_seq_lens_cpu=[8],
            seq_lens=torch.zeros(1, dtype=torch.int64, device=CUDA),
        )
    )
    assert backend._whole is None
    state.ledger.limit_publishing(lambda: 0)
    manager.limit_publishing(next_row, 1)
    state.free(next_row)
    state.drain()
    state._apply(_Drop, [_Drop(pages)])


def _layers(chunks: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    return ((layer, chunks) for layer in range(LAYERS))
