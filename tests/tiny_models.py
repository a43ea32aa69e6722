"""Checkpoints of popular architectures: as published ones, but small and with random weights.

Random weights alone make an attention that no tier policy could serve: each query looks somewhere
else. Trained models look at few tokens again and again, so weights get that structure here: every
twelfth token is salient, all queries have something in common, and what they have in common is
what keys of salient tokens answer to. Values carry what tells tokens apart, so what is kept of a
salient token decides the next token.

There is no tokenizer: serve with ``--skip-tokenizer-init`` and send token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

__all__ = [
    "REFUSED",
    "SERVED",
    "VOCABULARY",
    "TinyModel",
    "make_checkpoint",
    "random_tokens",
    "write_config",
]

VOCABULARY = 512
_NUM_SPECIAL = 2
_SALIENT_EVERY = 12

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

# Standard deviation of what a layer gives for inputs of size 1; 1 where nothing is said. Attention
# averages, so its output needs a large one to count.
_GAINS: dict[str, float] = {"o_proj": 3.0, "dense": 3.0, "lm_head": 2.5}

# How strongly queries answer to the common direction (0), and keys to the salient one (1).
_DIRECTIONS: dict[str, tuple[int, float]] = {"q_proj": (0, 1.0), "k_proj": (1, 2.0)}
# How much of them embeddings hold: all tokens of the common one, salient ones of the salient one.
_EMBEDDED = (1.0, 1.5)


@dataclass(frozen=True)
class TinyModel:
    """An architecture, as the fields of a published ``config.json`` with smaller sizes.

    interleaved: rotary pairs are neighbours (GLM), not halves. key_offset: a constant of this
    size and either sign in every third slow channel of all keys, by the key bias. gains:
    where they differ from `_GAINS`.
    """

    config: Mapping[str, Any]
    interleaved: bool = False
    key_offset: float = 0.0
    gains: Mapping[str, float] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        sizes = self.config
        return int(sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"])

    def slow_channels(self) -> torch.Tensor:
        """Channels of a head that turn by less than one radian in 700 tokens, bool."""
        rotary_dim = int(self.head_dim * self.config.get("partial_rotary_factor", 1))
        pairs = torch.arange(rotary_dim // 2)
        is_slow = self.config["rope_theta"] ** (-pairs / len(pairs)) * 700 < 1
        slow = torch.ones(self.head_dim, dtype=torch.bool)
        slow[:rotary_dim] = is_slow.repeat_interleave(2) if self.interleaved else is_slow.repeat(2)
        return slow


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**_COMMON, "architectures": [architecture], "model_type": model_type, **fields}


def _heads(query: int, key_value: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "head_dim": head_dim,
    }


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

SERVED: dict[str, TinyModel] = {
    "llama3": TinyModel(
        _config(
            "LlamaForCausalLM",
            "llama",
            **_heads(8, 2, 64),
            rope_theta=500000.0,
            rope_scaling=_LLAMA3_ROPE,
        )
    ),
    "mistral": TinyModel(
        _config(
            "MistralForCausalLM",
            "mistral",
            **_heads(4, 1, 128),
            rope_theta=1000000.0,
            sliding_window=None,
        )
    ),
    "qwen2": TinyModel(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            hidden_size=448,
            num_attention_heads=7,
            num_key_value_heads=1,
            rope_theta=1000000.0,
            sliding_window=512,  # as published: a number, but not used
            use_sliding_window=False,
            max_window_layers=3,
        ),
        key_offset=30.0,
    ),
    "qwen3": TinyModel(
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            **_heads(4, 2, 128),
            rope_theta=1000000.0,
            attention_bias=False,
            sliding_window=None,
            use_sliding_window=False,
        )
    ),
    "qwen3_moe": TinyModel(
        _config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            **_heads(4, 2, 128),
            rope_theta=1000000.0,
            attention_bias=False,
            sliding_window=None,
            use_sliding_window=False,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=256,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        # A router that is sure, so that rounding seldom changes what an expert adds.
        gains={"gate": 10.0},
    ),
    "glm4": TinyModel(
        _config(
            "Glm4ForCausalLM",
            "glm4",
            **_heads(4, 2, 128),
            rope_theta=10000.0,
            partial_rotary_factor=0.5,
            attention_bias=True,
            pad_token_id=1,
        ),
        interleaved=True,
    ),
    "phi": TinyModel(
        _config(
            "PhiForCausalLM",
            "phi",
            hidden_size=240,
            intermediate_size=960,
            num_attention_heads=3,
            num_key_value_heads=None,
            rope_theta=10000.0,
            partial_rotary_factor=0.4,
            layer_norm_eps=1e-5,
            hidden_act="gelu_new",
            qk_layernorm=False,
        )
    ),
    "gemma": TinyModel(
        _config(
            "GemmaForCausalLM",
            "gemma",
            **_heads(4, 1, 256),
            rope_theta=10000.0,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        # The embedding is the last layer too, and is multiplied by 16 where it is the first.
        gains={"embed_tokens": 0.15, "o_proj": 15.0, "down_proj": 3.0},
    ),
}

# Configurations, and what the refusal says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral of 7B": (
        _config(
            "MistralForCausalLM",
            "mistral",
            **_heads(4, 1, 128),
            rope_theta=10000.0,
            sliding_window=256,
        ),
        "does not serve models with sliding-window or chunked attention",
    ),
    "deepseek_v2": (
        _config(
            "DeepseekV2ForCausalLM",
            "deepseek_v2",
            num_attention_heads=4,
            num_key_value_heads=4,
            rope_theta=10000.0,
            kv_lora_rank=64,
            q_lora_rank=None,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        "does not serve models with multi-head latent attention (MLA)",
    ),
    "gpt2": (
        _config(
            "GPT2LMHeadModel",
            "gpt2",
            n_embd=256,
            n_head=4,
            n_layer=2,
            n_positions=2048,
            activation_function="gelu_new",
        ),
        "has no rotary embedding with a table",
    ),
}


def write_config(config: Mapping[str, Any], directory: Path) -> Path:
    """A model directory that holds a configuration alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def make_checkpoint(tiny: TinyModel, directory: Path) -> Path:
    """A model directory with configuration and bfloat16 weights, the same at every call."""
    config = AutoConfig.from_pretrained(write_config(tiny.config, directory))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(2, tiny.config["hidden_size"], generator=generator)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_draw(tiny, name, weight.shape, directions, generator))
    model.to(torch.bfloat16).save_pretrained(directory)
    return write_config(tiny.config, directory)  # as published, not as transformers writes it


def random_tokens(count: int, seed: int) -> list[int]:
    """Ordinary token ids, all equally likely."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_NUM_SPECIAL, VOCABULARY, (count,), generator=generator)
    tokens: list[int] = ids.tolist()
    return tokens


def _draw(
    tiny: TinyModel,
    name: str,
    shape: torch.Size,
    directions: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """One parameter; ``directions`` ``[2, hidden]`` are the common and the salient one."""
    *_, layer, kind = name.split(".")
    noise = torch.randn(shape, generator=generator)
    gain = tiny.gains.get(layer, _GAINS.get(layer, 1.0))
    if layer == "lm_head" and kind == "bias":
        return torch.zeros(shape)  # Phi has one, but SGLang 0.5.23 does not add it
    if kind == "bias":
        return 0.2 * noise + (_key_offsets(tiny, noise) if layer == "k_proj" else 0)
    if "norm" in layer:
        # Gemma stores what is to be added to 1.
        return 0.1 * noise + (0 if tiny.config["model_type"] == "gemma" else 1)
    if layer == "embed_tokens":
        is_salient = torch.arange(len(noise)) % _SALIENT_EVERY == 0
        common, salient = _EMBEDDED
        shares = torch.stack([torch.full(is_salient.shape, common), salient * is_salient], 1)
        return gain * (noise + shares @ directions)
    weight = gain * noise / shape[-1] ** 0.5
    if layer == "v_proj":
        return weight - weight @ torch.linalg.pinv(directions) @ directions
    if layer in _DIRECTIONS:
        index, strength = _DIRECTIONS[layer]
        answer = _salience_channels(tiny).repeat(len(weight) // tiny.head_dim)
        weight += strength * torch.outer(answer, directions[index]) / shape[-1]
    return weight


def _salience_channels(tiny: TinyModel) -> torch.Tensor:
    """Where queries and keys of salient tokens meet: slow channels, whatever the distance."""
    signs = torch.randn(tiny.head_dim, generator=torch.Generator().manual_seed(1)).sign()
    channels = signs * tiny.slow_channels()
    return channels * (tiny.head_dim / channels.count_nonzero()) ** 0.5


def _key_offsets(tiny: TinyModel, noise: torch.Tensor) -> torch.Tensor:
    """A key bias ``[heads * head_dim]`` as trained models with one have it."""
    slow = tiny.slow_channels().nonzero()[::3, 0]
    size = torch.zeros(tiny.head_dim).index_fill(0, slow, tiny.key_offset)
    return size.repeat(len(noise) // tiny.head_dim) * noise.sign()
