"""All ways to start a server tier it, or fail with one clear error."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.harness import Server, ServerFailed
from server.tiering import TIERED, assert_idle, prompts, report
from sglang_qevict.models import fetch_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

ACTIVE = "KV tiering is on: "


def _assert_tiers(server: Server, budget: float) -> None:
    found = report(server)
    assert found["budget"] == budget
    assert server.log_text().count(ACTIVE) == 1
    (prompt,) = prompts([700])
    assert len(server.generate(prompt, max_new_tokens=9, ignore_eos=True)["output_ids"]) == 9
    assert report(server)["counters"]["demoted"] > found["counters"]["demoted"]
    assert_idle(server)


def test_launch_server_with_a_yaml_file_tiers(tiered: Server) -> None:
    _assert_tiers(tiered, 0.2)


@pytest.mark.slow
def test_two_tokenizer_workers_tier(tmp_path: Path) -> None:
    with Server(*TIERED, "--tokenizer-worker-num", "2", log_path=tmp_path / "server.log") as server:
        _assert_tiers(server, 0.2)


# Python runs this first of all; children that multiprocessing spawns lose the plugin's hooks.
_NO_HOOKS_IN_CHILDREN = """
import sys

if any("spawn_main" in argument for argument in sys.orig_argv):
    sys.modules["sglang_qevict.hooks"] = None
"""


@pytest.mark.slow
def test_a_server_whose_children_lost_the_plugin_never_serves(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_NO_HOOKS_IN_CHILDREN)
    env = {"PYTHONPATH": str(tmp_path)}
    server = Server(*TIERED, log_path=tmp_path / "server.log", env=env)
    with pytest.raises(ServerFailed, match="exit code"):
        server.start()
    assert "qevict" in server.log_tail()


_ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], max_total_tokens=8192, max_running_requests=4, log_level="info",
        kv_tiering="qevict", kv_tiering_budget=0.25,
    )
    params = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}
    answer = engine.generate(input_ids=json.loads(sys.argv[2]), sampling_params=params)
    info = engine.get_server_info()["internal_states"][0]["kv_tiering"]
    engine.shutdown()
    print(json.dumps({"tokens": len(answer["output_ids"]), "tiering": info}))
"""


def _run_engine(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "use_engine.py"
    path.write_text(script)
    command = [sys.executable, str(path), str(fetch_model(progress=False)), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_an_engine_tiers(tmp_path: Path) -> None:
    (prompt,) = prompts([700])
    result = _run_engine(tmp_path, _ENGINE, json.dumps(prompt))
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["tokens"] == 9
    assert found["tiering"]["budget"] == 0.25
    assert found["tiering"]["counters"]["demoted"] > 0
    assert (result.stdout + result.stderr).count(ACTIVE) == 1


@pytest.mark.slow
def test_an_engine_raises_what_is_wrong_with_its_keywords(tmp_path: Path) -> None:
    script = _ENGINE.replace("kv_tiering_budget=0.25", "enable_lmcache=True")
    result = _run_engine(tmp_path, script, "[1]")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: --kv-tiering qevict does not work with --enable-lmcache")


@pytest.mark.slow
def test_too_little_memory_ends_with_2_and_the_bytes_that_are_needed(tmp_path: Path) -> None:
    server = Server(*TIERED, "--max-total-tokens", "300", log_path=tmp_path / "server.log")
    server.launch()
    assert server.wait(240) == 2
    log = server.log_text()
    assert "Traceback" not in log
    (sentence,) = (line for line in log.splitlines() if line.startswith("sglang-qevict: error: "))
    assert "KV tiering got 6.5 MiB" in sentence
    assert "--max-total-tokens" in sentence


@pytest.mark.slow
def test_a_port_in_use_ends_with_2_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = Server(*TIERED, "--port", port, log_path=tmp_path / "server.log")
        server.launch()
        assert server.wait(120) == 2
    log = server.log_text()
    assert f"sglang-qevict: error: --port {port} is in use on 127.0.0.1" in log
    assert "Traceback" not in log
    assert "Load weight" not in log
