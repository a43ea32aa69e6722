"""`sglang-qevict doctor -- flags`: what a server with these flags would refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookType

from sglang_qevict import doctor, hooks
from sglang_qevict.doctor import Level

DOCTOR = (str(Path(sys.executable).with_name("sglang-qevict")), "doctor", "--")


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "vocab_size": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_every_hook_exists_in_the_installed_sglang() -> None:
    (finding,) = doctor.check_hooks()
    assert finding.level is Level.OK, finding


def test_a_hook_that_sglang_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "sglang.srt.server_args.ServerArgs.no_such_method"
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, (gone, None, HookType.AFTER)))
    (finding,) = doctor.check_hooks()
    assert finding.level is Level.MISSING
    assert finding.detail == f"this SGLang has no {gone}: install a tested one"


def test_checks_hook_nothing_in_this_process() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = set(HookRegistry._patched)
    list(doctor.check_hooks())
    assert set(HookRegistry._patched) == before


def test_refused_flags_are_told_with_the_servers_own_sentence_and_status_1(model: str) -> None:
    command = [*DOCTOR, "--model-path", model, "--kv-tiering", "qevict", "--pp-size", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    applied, refused = result.stdout.splitlines()[-2:]
    assert applied.startswith("ok       hooks applied")
    assert f"all {len(hooks.HOOKS)}, in this process" in applied
    assert refused.startswith("refused  server")
    assert "--kv-tiering qevict does not work with --pp-size" in refused
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (["--kv-tiering", "qevict"], 0, "would start with tiering"),
        ([], 0, "would start without tiering: add --kv-tiering qevict"),
        (["--kv-tiering", "maybe"], 1, "argument --kv-tiering: invalid choice: 'maybe'"),
        (["--kv-tiering-budget", "0.5"], 1, "has no effect without --kv-tiering qevict: add it"),
        (["--kv-tiering", "qevict", "--kv-tiering-budget", "0.05"], 1, "sink and local windows"),
        (["--page-size", "8", "--chunked-prefill-size", "12"], 1, "SGLang: chunked_prefill_size"),
    ],
)
def test_the_last_line_tells_how_a_server_would_start(
    flags: list[str], status: int, told: str, model: str
) -> None:
    # A model may also be given as `sglang serve` takes it, without its flag.
    result = subprocess.run([*DOCTOR, model, *flags], capture_output=True, text=True)
    assert told in result.stdout.splitlines()[-1]
    assert result.returncode == status
