"""From flags or keywords to the record that SGLang gives to all its processes."""

from __future__ import annotations

import copy
import json
import pickle
import socket
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from command_line import make_parser, parse, tiered
from qevict_tiers.config import TieringConfig
from sglang_qevict.arguments import apply_command_line, check_port, from_keywords, is_command_line
from sglang_qevict.runtime import config_of


def _fields(server_args: Any) -> dict[str, Any]:
    return {name: getattr(server_args, name) for name in ServerArgs.__struct_fields__}


def test_tiering_sets_these_arguments_of_sglang_and_no_other() -> None:
    before, after = _fields(parse()), _fields(tiered())
    assert {name: value for name, value in after.items() if value != before[name]} == {
        "page_size": 8,
        "attention_backend": "qevict",
        "radix_cache_backend": "qevict",
        "disable_prefill_cuda_graph": True,
    }


def test_without_tiering_the_record_is_sglangs_own() -> None:
    parser = make_parser()
    namespace = parser.parse_args(["--model-path", "x", "--page-size", "4"])
    expected = _fields(ServerArgs.from_cli_args(namespace))
    server_args = parse("--page-size", "4", model="x")
    assert _fields(server_args) == expected
    assert config_of(server_args) is None


def test_options_ride_on_the_record() -> None:
    config = config_of(tiered("--kv-tiering-budget", "0.3", "--kv-tiering-window", "16"))
    assert config == TieringConfig(budget=Fraction(3, 10), window=16)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_configuration_survives_the_way_to_a_subprocess(protocol: int) -> None:
    server_args = tiered("--kv-tiering-budget", "0.3")
    copied = pickle.loads(pickle.dumps(server_args, protocol))
    assert config_of(copied) == config_of(server_args)
    assert is_command_line(copied)


def test_the_configuration_survives_a_deep_copy() -> None:
    server_args = tiered("--kv-tiering-budget", "0.3")
    assert config_of(copy.deepcopy(server_args)) == config_of(server_args)


def test_the_radix_cache_is_switched_off_inside_of_tiering() -> None:
    assert tiered("--disable-radix-cache").disable_radix_cache is False


def test_a_yaml_file_is_as_good_as_the_command_line(tmp_path: Path) -> None:
    lines = ["model-path: x", "kv-tiering: qevict", "kv-tiering-budget: 0.3"]
    lines += ["kv-tiering-full-layers: 0,2-3", "kv-tiering-window: 16"]
    path = tmp_path / "serve.yaml"
    path.write_text("\n".join(lines))
    parser = make_parser()
    argv = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path)])
    namespace = parser.parse_args(argv)
    server_args = ServerArgs.from_cli_args(namespace)
    apply_command_line(server_args, vars(namespace))
    assert config_of(server_args) == TieringConfig(
        budget=Fraction(3, 10), window=16, full_layers=frozenset({0, 2, 3})
    )


def test_the_command_line_wins_over_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model-path: x\nkv-tiering: qevict\nkv-tiering-budget: 0.3\n")
    parser = make_parser()
    argv = ["--config", str(path), "--kv-tiering-budget", "0.5"]
    namespace = parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(argv))
    assert namespace.kv_tiering == "qevict"
    assert namespace.kv_tiering_budget == "0.5"


def test_the_flag_calls_its_check_when_tiering_is_asked_for_and_not_otherwise() -> None:
    import argparse

    from sglang_qevict.flags import add_flags

    calls: list[str] = []
    parser = argparse.ArgumentParser()
    add_flags(parser, when_on=lambda: calls.append("on"))
    parser.parse_args([])
    parser.parse_args(["--kv-tiering", "none"])
    assert calls == []
    parser.parse_args(["--kv-tiering", "qevict"])
    assert calls == ["on"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_refused_and_a_free_one_is_not(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server_args = tiered("--host", host, "--port", port)
        with pytest.raises(SystemExit) as exit_:
            check_port(server_args)
        check_port(tiered("--host", host, "--port", port, "--node-rank", "1"))
    assert exit_.value.code == 2
    assert f"--port {port} is in use on {host}: stop what" in capsys.readouterr().err
    check_port(server_args)


# --- sglang.Engine ---


def test_keywords_of_an_engine_give_the_record_of_the_same_flags() -> None:
    keywords = {"model_path": "x", "kv_tiering": "qevict", "kv_tiering_budget": 0.3}
    server_args = from_keywords(ServerArgs, dict(keywords))
    expected = tiered("--kv-tiering-budget", "0.3", model="x")
    assert config_of(server_args) == config_of(expected)
    assert _fields(server_args) == _fields(expected)
    assert not is_command_line(server_args)


def test_an_engine_without_keywords_of_tiering_is_stock() -> None:
    server_args = from_keywords(ServerArgs, {"model_path": "x"})
    assert config_of(server_args) is None
    assert _fields(server_args) == _fields(ServerArgs(model_path="x"))


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"kv_tiering": "on"}, "--kv-tiering must be none or qevict, got 'on'"),
        ({"kv_tiering": True}, "--kv-tiering must be none or qevict, got True"),
        ({"kv_tiering_budget": 0.2}, "--kv-tiering-budget has no effect"),
        ({"kv_tiering": "qevict", "kv_tiering_budget": 2}, "--kv-tiering-budget must be above 0"),
        ({"kv_tiering": "qevict", "page_size": 16}, "--page-size must equal --kv-tiering-window"),
        ({"kv_tiering": "qevict", "enable_lmcache": True}, "--enable-lmcache"),
    ],
)
def test_what_is_wrong_with_keywords_is_one_exception(
    keywords: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"^--kv-tiering|^--page-size") as error:
        from_keywords(ServerArgs, {"model_path": "x", **keywords})
    assert named in str(error.value)
    assert capsys.readouterr().err == ""


def test_a_misspelt_keyword_is_still_sglangs_error() -> None:
    with pytest.raises(TypeError, match="kv_tierin"):
        from_keywords(ServerArgs, {"model_path": "x", "kv_tierin": "qevict"})


def test_the_record_can_be_logged_as_json() -> None:
    # SGLang prints the record and answers /server_info with it.
    encoded = msgspec.json.encode(tiered("--kv-tiering-budget", "0.3"))
    assert json.loads(encoded)["attention_backend"] == "qevict"


def test_a_sealed_record_keeps_its_configuration(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1,
        "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "vocab_size": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    server_args = tiered(model=str(tmp_path))
    server_args.resolve_once()
    assert config_of(server_args) == TieringConfig()
    assert resolving_view(server_args).page_size == 8
    assert resolving_view(server_args).attention_backend == "qevict"
