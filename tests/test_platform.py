"""The CPU platform: when it activates, what it tells SGLang, and that its rotation is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

from sglang_qevict import cpu_native, platform
from sglang_qevict.cpu_native import (
    CpuNativePlatform,
    get_device_module,
    rotate_in_float32,
    validate_prompt,
)
from sglang_qevict.platform import activate


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "find_accelerator", lambda: None)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)


def test_activates_where_there_is_no_accelerator() -> None:
    assert activate() == "sglang_qevict.cpu_native.CpuNativePlatform"


@pytest.mark.skipif(
    platform.find_accelerator() is not None, reason="this machine has an accelerator"
)
@pytest.mark.parametrize(
    "first",
    [
        "sglang_qevict.platform",
        pytest.param("sglang", marks=pytest.mark.slow),
        pytest.param("sglang_qevict.plugin", marks=pytest.mark.slow),
    ],
)
def test_sglang_resolves_it_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}; from sglang.srt.platforms import current_platform as p; print(repr(p))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "CpuNativePlatform" in result.stdout, result.stderr[-2000:]


def test_stays_out_of_the_way_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "find_accelerator", lambda: "cuda")
    assert activate() is None


def test_stays_out_of_the_way_of_sglangs_own_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None


def test_yields_to_another_platform_plugin_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name, "module:activate", "sglang.srt.platforms")
        for name in ("cpu_native", "other_chip")
    ]
    monkeypatch.setattr(platform, "entry_points", lambda group: points)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu_native")
    assert activate() is not None


@pytest.mark.parametrize("name", ["cuda", "xpu", "npu", "musa", "hpu", "mps"])
def test_every_accelerator_that_torch_offers_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    device = SimpleNamespace(is_available=lambda: True)
    for other in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(torch, other, SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(torch, name, device, raising=False)
    assert platform.find_accelerator() == name


def test_memory_is_the_containers_where_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cpu_native, "_CGROUP_LIMIT", limit)
    total_bytes = psutil.virtual_memory().total
    for text, expected_bytes in (("max\n", total_bytes), ("1048576\n", 1 << 20)):
        limit.write_text(text)
        assert CpuNativePlatform().get_device_total_memory() == expected_bytes
    limit.unlink()
    assert CpuNativePlatform().get_device_total_memory() == total_bytes


_RESOLVE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
config = resolving_view(args)
print(json.dumps({key: getattr(config, key) for key in ("device", "attention_backend")}))
"""


@pytest.fixture
def tiny_model(tmp_path: Path) -> Iterator[str]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "vocab_size": 128,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "backend"),
    [([], "torch_native"), (["--attention-backend", "flex_attention"], "flex_attention")],
)
def test_attention_backend_is_torchs_unless_the_user_names_one(
    tiny_model: str, flags: list[str], backend: str
) -> None:
    command = [sys.executable, "-c", _RESOLVE, "--model-path", tiny_model, *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert answer == {"device": "cpu", "attention_backend": backend}


_ROTATE = """
import sglang, torch
from sglang.srt.platforms import current_platform
current_platform.init_backend()
from sglang.srt.layers.rotary_embedding import get_rope
rope = get_rope(64, 64, 8192, 100000, True, dtype=torch.bfloat16)
assert rope.cos_sin_cache.dtype == torch.float32
positions = torch.tensor([0, 5, 4321, 8191])
key = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
_, rotated = rope(positions, key.clone(), key.clone())
angles = positions[:, None] * 100000.0 ** -(torch.arange(0, 64, 2) / 64).double()
low, high = key.double().chunk(2, -1)
turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
exact = torch.cat((turned.real, turned.imag), -1)
# Half a bfloat16 step for the one rounding, and a float32 angle's error at 8191 radians.
torch.testing.assert_close(rotated.double(), exact, rtol=2**-9, atol=4e-3)
"""


@pytest.mark.slow
def test_sglangs_own_rotary_module_turns_in_float32_from_a_float32_table() -> None:
    result = subprocess.run([sys.executable, "-c", _ROTATE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_rotation_rounds_once() -> None:
    x = torch.randn(5, 3, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(5)[:, None] * 0.7 ** torch.arange(32) * 100
    cos, sin = angles.cos(), angles.sin()
    exact = apply_rotary_emb(x.double(), cos.double(), sin.double(), True)
    rotated = rotate_in_float32(apply_rotary_emb, x, cos, sin, True)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.double(), exact, rtol=2**-8, atol=1e-6)
    rounded_table = apply_rotary_emb(x, cos, sin, True)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(rounded_table.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ([], "The prompt has no token: send at least one."),
        ([5, -1, 7], "The prompt has the token id -1, but ids go from 0 to 99."),
        ([5, 100], "The prompt has the token id 100, but ids go from 0 to 99."),
        ([0, 99], "SGLang's own answer"),
    ],
)
def test_a_prompt_that_operators_cannot_look_up_is_refused(
    tokens: list[int], sentence: str
) -> None:
    request = SimpleNamespace(
        origin_input_ids=array("q", tokens), vocab_size=100, multimodal_inputs=None
    )
    assert validate_prompt(lambda *_: "SGLang's own answer", request, 10, False) == sentence


def test_the_device_is_the_cpu_even_for_a_torch_that_was_built_for_cuda() -> None:
    assert get_device_module(torch.get_device_module) is torch.cpu
    assert get_device_module(torch.get_device_module, "cuda") is torch.cuda
