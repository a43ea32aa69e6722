"""What tiering cannot serve: every case of the two tables ends the start in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.platforms.device_mixin import DeviceCapability
from sglang.srt.server_args import ServerArgs

from command_line import parse, tiered
from qevict_tiers.config import TieringConfig
from sglang_qevict.arguments import check_model, from_keywords
from sglang_qevict.refusals import (
    FLAG_REFUSALS,
    MODEL_REFUSALS,
    Refusal,
    refused_model,
    refused_platform,
)
from sglang_qevict.runtime import NAME, config_of

PREFIX = "sglang-qevict: error: "

add_attention_backend_choices([NAME])  # as the plugin does

# How a user comes to each refusal of a flag: the command line that asks for it.
FLAGS: dict[str, list[str]] = {
    "--speculative-algorithm": ["--speculative-algorithm", "NGRAM"],
    "--disaggregation-mode": ["--disaggregation-mode", "prefill"],
    "--enable-pdmux": ["--enable-pdmux"],
    "--enable-hierarchical-cache": ["--enable-hierarchical-cache"],
    "--enable-hisparse": ["--enable-hisparse"],
    "--enable-lmcache": ["--enable-lmcache"],
    "--enable-flexkv": ["--enable-flexkv"],
    "--enable-unified-cache-external-linker": ["--enable-unified-cache-external-linker"],
    "--enable-memory-saver": ["--enable-memory-saver"],
    "--enable-unified-memory": ["--enable-unified-memory"],
    "--enable-page-major-kv-layout": ["--enable-page-major-kv-layout"],
    "--enable-kv-cache-sharding": ["--enable-kv-cache-sharding"],
    "--enable-two-batch-overlap": ["--enable-two-batch-overlap"],
    "--enable-deterministic-inference": ["--enable-deterministic-inference"],
    "--enable-streaming-session": ["--enable-streaming-session"],
    "--enable-session-radix-cache": ["--enable-session-radix-cache"],
    "--kv-canary": ["--kv-canary", "log"],
    "--enable-mis": ["--enable-mis"],
    "--is-embedding": ["--is-embedding"],
    "--kv-cache-dtype": ["--kv-cache-dtype", "fp8_e4m3"],
    "--dcp-size": ["--dcp-size", "2"],
    "--attn-dp-size": ["--attn-dp-size", "2"],
    "--enable-dp-attention": ["--enable-dp-attention"],
    "--moe-a2a-backend": ["--moe-a2a-backend", "deepep"],
    "--moe-dense-tp-size": ["--moe-dense-tp-size", "1"],
    "--attn-cp-size": ["--attn-cp-size", "2"],
    "--pp-size": ["--pp-size", "2"],
    "--dllm-algorithm": ["--dllm-algorithm", "LowConfidence"],
    "--prefill-only-disable-kv-cache": ["--prefill-only-disable-kv-cache"],
    "--attention-backend": ["--attention-backend", "torch_native"],
    "--prefill-attention-backend": ["--prefill-attention-backend", "flashinfer"],
    "--decode-attention-backend": ["--decode-attention-backend", "triton"],
    "--radix-cache-backend": ["--radix-cache-backend", "flexkv"],
}


def _sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without its prefix."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(PREFIX)
    assert captured.out == ""
    return line.removeprefix(PREFIX)


def test_every_refused_flag_has_a_command_line_here() -> None:
    assert [refusal.what for refusal in FLAG_REFUSALS] == list(FLAGS)


@pytest.mark.parametrize("refusal", FLAG_REFUSALS, ids=lambda refusal: refusal.what)
def test_a_refused_flag_exits_with_2_and_one_sentence_that_names_it(
    refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        tiered(*FLAGS[refusal.what])
    assert exit_.value.code == 2
    sentence = _sentence(capsys)
    assert f"--kv-tiering qevict does not work with {refusal.what}, since" in sentence
    assert f"{refusal.reason}: drop one of the two" in sentence


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_refused_flag_is_none_of_tierings_business_without_it(flags: list[str]) -> None:
    assert config_of(parse(*flags)) is None


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--page-size", "8"],
        ["--page-size", "16", "--kv-tiering-window", "16"],
        ["--kv-cache-dtype", "bfloat16"],
        ["--kv-canary", "none"],
        ["--attn-dp-size", "1"],
        ["--attention-backend", "qevict", "--radix-cache-backend", "qevict"],
        ["--tp-size", "2"],
        ["--dp-size", "2"],
        ["--enable-mixed-chunk"],
        ["--disable-radix-cache"],
        ["--disable-overlap-schedule"],
        ["--chunked-prefill-size", "-1"],
        ["--enable-lora"],
    ],
    ids=" ".join,
)
def test_what_is_served_is_not_refused(flags: list[str]) -> None:
    server_args = tiered(*flags)
    config = config_of(server_args)
    assert config is not None
    assert server_args.page_size == config.window
    assert server_args.attention_backend == "qevict"


@pytest.mark.parametrize(
    "flag",
    [
        "--attention-backend",
        "--prefill-attention-backend",
        "--decode-attention-backend",
        "--radix-cache-backend",
    ],
)
def test_a_part_of_tiering_is_refused_without_the_rest(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(flag, "qevict")
    assert exit_.value.code == 2
    told = f"{flag} qevict is a part of --kv-tiering qevict: add --kv-tiering qevict, or drop "
    assert _sentence(capsys) == f"{told}{flag} qevict"
    with pytest.raises(ValueError, match=f"^{flag} qevict is a part of"):
        from_keywords(ServerArgs, {"model_path": "x", flag[2:].replace("-", "_"): "qevict"})


@pytest.mark.parametrize(
    ("flags", "window"),
    [(["--page-size", "16"], 8), (["--page-size", "8", "--kv-tiering-window", "32"], 32)],
)
def test_a_page_size_other_than_the_window_is_refused(
    flags: list[str], window: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tiered(*flags)
    sentence = _sentence(capsys)
    assert f"--kv-tiering-window ({window})" in sentence
    assert f"got {flags[1]}: drop --page-size" in sentence


@pytest.mark.parametrize(("tokens", "window"), [(4, 8), (12, 8), (20, 8), (64, 32), (8, 16)])
def test_chunks_are_whole_windows(
    tokens: int, window: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--chunked-prefill-size", str(tokens), "--kv-tiering-window", str(window)]
    if tokens % window == 0:
        assert tiered(*flags).chunked_prefill_size == tokens
        return
    with pytest.raises(SystemExit):
        tiered(*flags)
    expected = f"--chunked-prefill-size must be a multiple of --kv-tiering-window ({window}), "
    assert _sentence(capsys) == f"{expected}or -1 for no chunks, got {tokens}"


def test_a_graph_of_what_is_decided_in_every_step_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with pytest.raises(SystemExit) as exit_:
        tiered()
    assert exit_.value.code == 2
    assert "SGLANG_ENABLE_METADATA_GLUE_GRAPH, since it captures" in capsys.readouterr().err


def _platform(device_type: str, name: str, capability: tuple[int, int] | None = None) -> Any:
    return SimpleNamespace(
        device_type=device_type,
        device_name=name,
        is_cuda=lambda: name == "cuda",
        get_device_capability=lambda: capability and DeviceCapability(*capability),
    )


@pytest.mark.parametrize(
    "platform",
    [_platform("cpu", "cpu"), *(_platform("cuda", "cuda", c) for c in ((8, 0), (8, 9), (10, 0)))],
)
def test_cpus_and_gpus_from_ampere_on_are_served(platform: Any) -> None:
    assert list(refused_platform(platform, TieringConfig())) == []


@pytest.mark.parametrize(
    ("platform", "told"),
    [
        (_platform("cuda", "cuda", (7, 5)), "a GPU of compute capability 7.5"),
        (_platform("cuda", "rocm"), "rocm"),
        (_platform("xpu", "xpu"), "xpu"),
    ],
)
def test_another_device_is_refused_with_what_is_served(platform: Any, told: str) -> None:
    (sentence,) = refused_platform(platform, TieringConfig())
    assert sentence == (
        "--kv-tiering qevict has kernels for CPUs and for NVIDIA GPUs of compute capability 8.0 or "
        f"later, but not for {told}: drop --kv-tiering"
    )


def test_the_ssd_tier_is_refused_on_a_gpu(tmp_path: Path) -> None:
    platform = _platform("cuda", "cuda", (9, 0))
    (sentence,) = refused_platform(platform, TieringConfig(ssd_dir=tmp_path))
    assert sentence.startswith("--kv-tiering-ssd-dir serves on CPUs only so far: drop ")


def test_routing_chunk_by_chunk_needs_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiered("--chunked-prefill-size", "-1", "--kv-tiering-exact-prefill-tokens", "1024")
    sentence = _sentence(capsys)
    assert sentence.startswith("--kv-tiering-exact-prefill-tokens")
    assert "--chunked-prefill-size -1 allows no chunks: drop one of the two" in sentence


def test_keywords_of_an_engine_are_refused_by_an_exception_with_the_same_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        tiered("--enable-lmcache")
    sentence = _sentence(capsys)
    keywords = {"enable_lmcache": True, "kv_tiering": "qevict"}
    record = SimpleNamespace(**{**vars(_raw_defaults()), "enable_lmcache": True})
    with pytest.raises(ValueError, match="enable-lmcache") as error:
        from_keywords(lambda **_: record, keywords)
    assert str(error.value) == sentence


def _raw_defaults() -> SimpleNamespace:
    server_args = parse()
    return SimpleNamespace(
        **{name: getattr(server_args, name) for name in server_args.__struct_fields__}
    )


# --- models ---

_PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}


def _model(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    return {**_PLAIN, "architectures": [architecture], "model_type": model_type, **config}


_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_MROPE = {"type": "mrope", "mrope_section": [8, 12, 12]}
_NAMES = [refusal.what for refusal in MODEL_REFUSALS]
_MLA, _SWA, _MAMBA, _HEAD, _SINKS, _CAP, _SHARED, _M_ROPE, _ENCODER, _DTYPE, _HEAD_DIM = _NAMES

# A configuration as published for each family, made small, and the features that are refused.
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (_PLAIN, []),
    "qwen2": (_model("Qwen2ForCausalLM", "qwen2", sliding_window=512), []),
    "qwen2_moe": (_model("Qwen2MoeForCausalLM", "qwen2_moe", sliding_window=512), []),
    "qwen3": (_model("Qwen3ForCausalLM", "qwen3"), []),
    "mistral": (_model("MistralForCausalLM", "mistral", sliding_window=None), []),
    "deepseek_v2": (_model("DeepseekV2ForCausalLM", "deepseek_v2", **_LATENT), [_MLA]),
    "deepseek_v3": (_model("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT), [_MLA]),
    "minicpm3": (_model("MiniCPM3ForCausalLM", "minicpm3", **_LATENT), [_MLA]),
    "mistral of 7B": (_model("MistralForCausalLM", "mistral", sliding_window=512), [_SWA]),
    "qwen2 with a window": (
        _model("Qwen2ForCausalLM", "qwen2", sliding_window=512, use_sliding_window=True),
        [_SWA],
    ),
    "gemma2": (
        _model("Gemma2ForCausalLM", "gemma2", sliding_window=512, attn_logit_softcapping=50.0),
        [_SWA, _CAP],
    ),
    "gemma3": (_model("Gemma3ForCausalLM", "gemma3_text", sliding_window=512), [_SWA]),
    "gemma3n": (
        {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "model_type": "gemma3n",
            "text_config": {**_PLAIN, "model_type": "gemma3n_text", "num_kv_shared_layers": 1},
        },
        [_SWA, _SHARED],
    ),
    "llama4": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": {**_PLAIN, "model_type": "llama4_text", "attention_chunk_size": 512},
        },
        [_SWA],
    ),
    "gpt-oss": (
        _model("GptOssForCausalLM", "gpt_oss", sliding_window=128, num_local_experts=4),
        [_SWA, _SINKS],
    ),
    "nemotron-h": (
        _model("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M*"),
        [_MAMBA],
    ),
    "qwen3-next": (_model("Qwen3NextForCausalLM", "qwen3_next", num_experts=4), [_MAMBA]),
    "falcon-h1": (_model("FalconH1ForCausalLM", "falcon_h1"), [_MAMBA]),
    "reward": (_model("Qwen2ForRewardModel", "qwen2"), [_HEAD]),
    "embedding": (_model("Qwen3Model", "qwen3"), [_HEAD]),
    "qwen2-vl": (
        _model("Qwen2VLForConditionalGeneration", "qwen2_vl", rope_scaling=_MROPE),
        [_M_ROPE],
    ),
    "mllama": (
        {
            "architectures": ["MllamaForConditionalGeneration"],
            "model_type": "mllama",
            "text_config": {**_PLAIN, "model_type": "mllama_text_model"},
        },
        [_ENCODER],
    ),
    "float32": ({**_PLAIN, "torch_dtype": "float32"}, [_DTYPE]),
    "head_dim 72": ({**_PLAIN, "head_dim": 72}, [_HEAD_DIM]),
}


def _write(path: Path, config: dict[str, Any], *flags: str) -> Any:
    """SGLang's record, tiering on, for a model directory that holds a configuration alone."""
    (path / "config.json").write_text(json.dumps(config))
    dtype = ("--dtype", config["torch_dtype"]) if config.get("torch_dtype") == "float32" else ()
    return tiered(*dtype, *flags, model=str(path))


def _check(path: Path, config: dict[str, Any], *flags: str) -> None:
    """The resolution hook on such a directory; exits where it refuses the model."""
    server_args = _write(path, config, *flags)
    passed_on: list[Any] = []
    try:
        check_model(server_args, passed_on.append)
    finally:
        assert passed_on == [server_args]


@pytest.mark.parametrize("name", [name for name, (_, features) in MODELS.items() if not features])
def test_a_model_with_plain_attention_is_served(name: str, tmp_path: Path) -> None:
    _check(tmp_path, MODELS[name][0])


@pytest.mark.parametrize("name", [name for name, (_, features) in MODELS.items() if features])
def test_a_model_is_refused_with_2_and_a_sentence_that_names_its_feature(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, features = MODELS[name]
    with pytest.raises(SystemExit) as exit_:
        _check(tmp_path, config)
    assert exit_.value.code == 2
    sentence = _sentence(capsys)
    assert any(f"does not serve models with {feature}, since" in sentence for feature in features)
    assert sentence.endswith("drop --kv-tiering, or serve another model")


@pytest.mark.parametrize("name", [name for name, (_, features) in MODELS.items() if features])
def test_each_entry_of_the_table_finds_its_feature_in_a_model_that_has_more(
    name: str, tmp_path: Path
) -> None:
    config, features = MODELS[name]
    sentences = list(refused_model(model_config_of(_write(tmp_path, config))))
    for feature in features:
        assert any(f"models with {feature}, since" in sentence for sentence in sentences)


def test_every_entry_of_the_table_has_a_model_here() -> None:
    assert {what for _, features in MODELS.values() for what in features} == set(_NAMES)


def test_a_model_is_not_looked_at_without_tiering(tmp_path: Path) -> None:
    server_args = parse(model=str(tmp_path / "no-such-directory"))
    check_model(server_args, lambda _: None)


def test_a_budget_below_its_floors_is_refused_with_the_flags_that_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _check(tmp_path, _PLAIN, "--kv-tiering-budget", "0.05")
    sentence = _sentence(capsys)
    assert sentence.startswith("--kv-tiering-budget 0.05 leaves 26 tokens a layer")
    assert "sink and local windows take 48" in sentence
    for remedy in ("budget", "min-context", "local", "sink", "full-layers"):
        assert f"--kv-tiering-{remedy}" in sentence.split("raise", 1)[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--enable-priority-scheduling",), "does not work with --enable-priority-scheduling,"),
        (("--schedule-policy", "routing-key"), "does not work with --schedule-policy routing-key,"),
    ],
)
def test_shares_of_tenants_are_refused_beside_another_order(
    flags: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config_of(tiered(*flags)) is not None
    with pytest.raises(SystemExit):
        tiered(*flags, "--kv-tiering-tenants", "{}")
    sentence = _sentence(capsys)
    assert sentence.startswith(f"--kv-tiering-tenants {told}")
    assert sentence.endswith("drop one of the two")


def test_more_named_tenants_than_are_told_apart_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        tiered("--kv-tiering-tenants", json.dumps({f"t{n}": {} for n in range(120)}))
    assert "must name less than 100 tenants, got 120: leave some to *" in _sentence(capsys)


def test_a_least_budget_below_its_floors_is_refused_with_the_flag_that_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _check(tmp_path, _PLAIN, "--kv-tiering-budget-limits", "0.05-0.5")
    sentence = _sentence(capsys)
    assert sentence.startswith("--kv-tiering-budget-limits 0.05 leaves 26 tokens a layer")
    assert "raise --kv-tiering-budget-limits or --kv-tiering-min-context" in sentence


def test_a_budget_below_its_floors_is_served_with_a_longer_min_context(tmp_path: Path) -> None:
    flags = ("--kv-tiering-budget", "0.05", "--kv-tiering-min-context", "1024")
    _check(tmp_path, _PLAIN, *flags)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "bfloat16"])
def test_a_kv_cache_of_another_dtype_than_the_model_is_refused(
    kv_cache_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _check(tmp_path, _PLAIN, "--dtype", "float16", "--kv-cache-dtype", kv_cache_dtype)
    sentence = _sentence(capsys)
    assert "the model's dtype (float16)" in sentence
    assert sentence.endswith("asks for bfloat16: use --dtype bfloat16 --kv-cache-dtype bfloat16")


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "float16"],
        ["--dtype", "float16", "--kv-cache-dtype", "auto"],
        ["--kv-cache-dtype", "bf16"],
    ],
    ids=" ".join,
)
def test_a_kv_cache_of_the_models_dtype_is_served(flags: list[str], tmp_path: Path) -> None:
    _check(tmp_path, _PLAIN, *flags)


def test_layers_that_the_model_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _check(tmp_path, _PLAIN, "--kv-tiering-full-layers", "0,5-6")
    assert "names layers [5, 6], but the model has layers 0 to 1" in _sentence(capsys)


# --- through the real command line ---


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param(["--page-size", "16"], "--page-size", id="page-size"),
        pytest.param(
            ["--speculative-algorithm", "NGRAM"],
            "--speculative-algorithm",
            marks=pytest.mark.slow,
            id="speculative",
        ),
        pytest.param(
            ["--kv-tiering-budget", "1.5"],
            "--kv-tiering-budget",
            marks=pytest.mark.slow,
            id="budget",
        ),
        pytest.param(
            ["--kv-tiering-params", "int8"],
            "--kv-tiering-params",
            marks=pytest.mark.slow,
            id="params",
        ),
        pytest.param(
            ["--kv-tiering-budget", "0.01"],
            "--kv-tiering-budget",
            marks=pytest.mark.slow,
            id="floors",
        ),
    ],
)
def test_sglang_serve_ends_with_2_and_without_a_traceback(
    flags: list[str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_PLAIN))
    serve = [str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", str(tmp_path)]
    result = subprocess.run(
        [*serve, "--kv-tiering", "qevict", *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    told = [line for line in result.stderr.splitlines() if ": error: " in line]
    assert len(told) == 1
    assert named in told[0]
