"""What the attention backend demands of a model's layers, and that its kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from mini_engine import rotary_table
from qevict_kernels import make_kernels
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.warm_up import compile_kernels
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from sglang_qevict.attention import QEvictAttentionBackend, _require_plain_attention

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scaling": 0.125}


def _model(*layers: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.ModuleList(RadixAttention(**{**SHAPE, **layer}) for layer in layers)


def _check(model: torch.nn.Module, num_layers: int = 2, first_layer: int = 0) -> None:
    budget = WindowBudget(TieringConfig(), TieringConfig().geometry(Heads(4, 2, 64)), num_layers)
    _require_plain_attention(model, budget, first_layer)


def test_plain_layers_of_the_planned_shape_pass() -> None:
    _check(_model({"layer_id": 0}, {"layer_id": 1}))
    _check(_model({"layer_id": 5}, {"layer_id": 4}), first_layer=4)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({"is_cross_attention": True}, "has cross-attention: drop"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "has bidirectional attention: drop"),
        ({"logit_cap": 30.0}, "has an attention logit cap: drop"),
        ({"sliding_window_size": 512}, "has a sliding window: drop"),
        ({"v_head_dim": 128}, "has values of another width than keys: drop"),
        ({"num_heads": 8}, r"has \(8, 2, 64\) query heads, KV heads and channels of a head where"),
        ({"num_kv_heads": 4}, r"has \(4, 4, 64\) query heads, .* configuration has \(4, 2, 64\)"),
        ({"head_dim": 128}, r"has \(4, 2, 128\) query heads"),
    ],
)
def test_a_layer_that_windows_would_get_wrong_is_named(layer: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^--kv-tiering qevict serves plain .* but 1 {told}"):
        _check(_model({"layer_id": 0}, {"layer_id": 1, **layer}))


def test_a_temperature_by_position_is_refused() -> None:
    model = _model({"layer_id": 0}, {"layer_id": 1})
    model[1].xai_temperature_len = 1024  # type: ignore[index]
    with pytest.raises(ValueError, match="but 1 has a temperature by position"):
        _check(model)


@pytest.mark.parametrize("ids", [[0], [0, 1, 2], [0, 0], [0, 2], [1, 2]])
def test_there_is_one_attention_in_each_planned_layer(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"in each of 2 layers, but this model has") as error:
        _check(_model(*({"layer_id": layer_id} for layer_id in ids)))
    assert f"in layers {ids}: drop --kv-tiering" in str(error.value)


@pytest.mark.parametrize("forward", ["forward_decode", "forward_extend"])
def test_what_would_be_ignored_is_refused(forward: str) -> None:
    backend = object.__new__(QEvictAttentionBackend)
    layer = RadixAttention(layer_id=3, **SHAPE)
    options = {"sinks": torch.zeros(4), "k_rope": None, "idx_q": torch.zeros(1)}
    with pytest.raises(TypeError, match="layer 3 asks for sinks, idx_q: drop --kv-tiering"):
        getattr(backend, forward)(None, None, None, layer, None, **options)
    with pytest.raises(TypeError, match="layer 3 has stored them already: drop --kv-tiering"):
        getattr(backend, forward)(None, None, None, layer, None, save_kv_cache=False)


# --- compiling at start ---

_PROGRAM = """
from fractions import Fraction
import torch
from mini_engine import MiniEngine
from numba.core.dispatcher import Dispatcher
from qevict_kernels import make_kernels
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_kernels.warm_up import compile_kernels

def refuse(*args, **kwargs):
    raise AssertionError("compiled after start")

def make(geometry, rotary):
    kernels = make_kernels(geometry, rotary, torch.device("cpu"))
    compile_kernels(kernels, torch.bfloat16, dequantizes=True)
    Dispatcher.compile = Dispatcher._compile_for_args = refuse
    return kernels

config = TieringConfig(
    budget=Fraction(3, 10), min_context=112, local=16, promote=Promotion.DEQUANTIZE
)
engine = MiniEngine(make, config, Heads(2, 1, 64), kv_tokens=1600, context=640)
engine.start(1, 200)
while engine.running[1].stored < 200:
    engine.extend({1: min(64, 200 - engine.running[1].stored)})
for _ in range(40):
    engine.decode([1])
assert sum(engine.manager.occupancy().coded)
"""


def test_nothing_is_left_to_compile_for_requests() -> None:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root / "tests"), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("dequantizes", [False, True])
def test_every_kernel_that_serving_needs_runs_at_start(
    dequantizes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = make_kernels(WindowGeometry(2, 1, 64), rotary_table(64), torch.device("cpu"))
    called: list[str] = []
    for name in ("store", "quantize", "dequantize", "decode", "extend"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name: called.append(name))
    compile_kernels(kernels, torch.float16, dequantizes)
    needed = {"store", "quantize", "decode", "extend"}
    assert set(called) == needed | ({"dequantize"} if dequantizes else set())
