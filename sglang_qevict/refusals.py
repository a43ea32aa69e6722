"""What tiering cannot serve: flags to drop, features of models, kinds of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.environ import envs

from qevict_kernels.layout import SUPPORTED_HEAD_DIMS
from qevict_tiers.claims import ClaimLedger, Terms
from qevict_tiers.config import Promotion, TieringConfig
from sglang_qevict.tenants import MAX_TENANTS

__all__ = [
    "FLAG_REFUSALS",
    "MODEL_REFUSALS",
    "REQUEST_REFUSALS",
    "Refusal",
    "refused_flags",
    "refused_kv_dtype",
    "refused_model",
    "refused_platform",
    "refused_prompt",
    "refused_request",
]


@dataclass(frozen=True)
class Refusal:
    """One thing that tiering does not serve.

    what: for the table in the docs, a flag or a feature of a model or a request. found:
    whether SGLang's arguments (its model configuration, its request) ask for it. reason:
    why, in a few words.
    """

    what: str
    found: Callable[[Any], bool]
    reason: str


def _is_set(field: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, field))


def _above_one(field: str) -> Callable[[Any], bool]:
    return lambda args: getattr(args, field) > 1


def _not_in(field: str, *allowed: Any) -> Callable[[Any], bool]:
    return lambda args: getattr(args, field) not in allowed


_LEAST_CAPABILITY = (8, 0)
"""Of NVIDIA GPUs: the first whose matrix units take bfloat16."""

_OWN_TIERS = "tiering keeps its own copies and tiers of the KV cache"
_ROW_SHAPE = "it writes or reads KV in a shape that tiered windows do not have"
_NOT_DECODED = "nothing is decoded, so tiers would save nothing"
_PADS_BATCHES = "it pads batches with rows that belong to no request"

FLAG_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--speculative-algorithm",
        _is_set("speculative_algorithm"),
        "rejected draft tokens cannot be taken back from windows",
    ),
    Refusal(
        "--disaggregation-mode",
        _not_in("disaggregation_mode", "null"),
        "tiered windows are not transferred between servers",
    ),
    Refusal("--enable-pdmux", _is_set("enable_pdmux"), "it runs prefill and decode concurrently"),
    Refusal("--enable-hierarchical-cache", _is_set("enable_hierarchical_cache"), _OWN_TIERS),
    Refusal("--enable-hisparse", _is_set("enable_hisparse"), _OWN_TIERS),
    Refusal("--enable-lmcache", _is_set("enable_lmcache"), _OWN_TIERS),
    Refusal("--enable-flexkv", _is_set("enable_flexkv"), _OWN_TIERS),
    Refusal(
        "--enable-unified-cache-external-linker",
        _is_set("enable_unified_cache_external_linker"),
        _OWN_TIERS,
    ),
    Refusal(
        "--enable-memory-saver",
        _is_set("enable_memory_saver"),
        "the arena of windows can't be given back while the server runs",
    ),
    Refusal("--enable-unified-memory", _is_set("enable_unified_memory"), _OWN_TIERS),
    Refusal("--enable-page-major-kv-layout", _is_set("enable_page_major_kv_layout"), _ROW_SHAPE),
    Refusal("--enable-kv-cache-sharding", _is_set("enable_kv_cache_sharding"), _ROW_SHAPE),
    Refusal(
        "--enable-two-batch-overlap",
        _is_set("enable_two_batch_overlap"),
        "routing happens once a step, for one batch",
    ),
    Refusal(
        "--enable-deterministic-inference",
        _is_set("enable_deterministic_inference"),
        "it prescribes other attention kernels",
    ),
    Refusal(
        "--enable-streaming-session",
        _is_set("enable_streaming_session"),
        "a session would keep rows that tiering believes are gone",
    ),
    Refusal(
        "--enable-session-radix-cache",
        _is_set("enable_session_radix_cache"),
        "tiering does not know which session refers to a prefix",
    ),
    Refusal("--kv-canary", _not_in("kv_canary", "none"), _ROW_SHAPE),
    Refusal(
        "--enable-mis", _is_set("enable_mis"), "tiered attention is causal, with no other mask"
    ),
    Refusal("--is-embedding", _is_set("is_embedding"), _NOT_DECODED),
    Refusal(
        "--kv-cache-dtype",
        _not_in("kv_cache_dtype", "auto", "bf16", "bfloat16"),
        "FULL windows have the model's dtype and the others a code of tiering's own",
    ),
    Refusal("--dcp-size", _above_one("dcp_size"), "a window is not spread over ranks"),
    Refusal("--attn-dp-size", _above_one("attn_dp_size"), _PADS_BATCHES),
    Refusal("--enable-dp-attention", _is_set("enable_dp_attention"), _PADS_BATCHES),
    Refusal("--moe-a2a-backend", _not_in("moe_a2a_backend", None, "none"), _PADS_BATCHES),
    Refusal("--moe-dense-tp-size", _is_set("moe_dense_tp_size"), _PADS_BATCHES),
    Refusal("--attn-cp-size", _above_one("attn_cp_size"), "a prompt is not spread over ranks"),
    Refusal("--pp-size", _above_one("pp_size"), "the budget spans all layers of a model"),
    Refusal("--dllm-algorithm", _is_set("dllm_algorithm"), "diffusion rewrites tokens in place"),
    Refusal(
        "--prefill-only-disable-kv-cache",
        _is_set("prefill_only_disable_kv_cache"),
        "there would be nothing to tier",
    ),
    Refusal(
        "--attention-backend",
        _not_in("attention_backend", None, "qevict"),
        "tiered windows can only be read by the backend qevict",
    ),
    Refusal(
        "--prefill-attention-backend",
        _not_in("prefill_attention_backend", None, "qevict"),
        "tiered windows can only be read by the backend qevict",
    ),
    Refusal(
        "--decode-attention-backend",
        _not_in("decode_attention_backend", None, "qevict"),
        "tiered windows can only be read by the backend qevict",
    ),
    Refusal(
        "--radix-cache-backend",
        _not_in("radix_cache_backend", None, "qevict"),
        "prefixes of tiered windows are kept by tiering",
    ),
)


def _text(field: str) -> Callable[[Any], bool]:
    return lambda model: bool(getattr(model.hf_text_config, field, None))


def _is_mla(model: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return bool(model.attention_arch == AttentionArch.MLA)


def _is_recurrent(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def _has_sliding_window(model: Any) -> bool:
    # Without one, most configurations say None, Qwen2-MoE's 0.
    has_window = (model.sliding_window_size or 0) > 0
    return bool(model.is_hybrid_swa or model.attention_chunk_size or has_window)


MODEL_REFUSALS: tuple[Refusal, ...] = (
    Refusal("multi-head latent attention (MLA)", _is_mla, "it keeps latents, not keys and values"),
    Refusal(
        "sliding-window or chunked attention",
        _has_sliding_window,
        "its layers forget by position already",
    ),
    Refusal("recurrent (Mamba, linear attention) layers", _is_recurrent, "they have no windows"),
    Refusal(
        "an embedding, reward or classification head",
        lambda model: not model.is_generation,
        _NOT_DECODED,
    ),
    Refusal(
        "attention sinks", lambda model: bool(model.has_attention_sinks), "window masses miss them"
    ),
    Refusal(
        "attention logit caps",
        lambda model: _text("attn_logit_softcapping")(model),
        "scores are exact only for plain softmax",
    ),
    Refusal(
        "KV shared between layers",
        _text("num_kv_shared_layers"),
        "each layer routes windows of its own",
    ),
    Refusal(
        "multimodal rotary positions (mrope)",
        lambda model: bool(model.model_is_mrope),
        "a window's rotation must follow from its place in the text",
    ),
    Refusal(
        "encoder-decoder attention",
        lambda model: bool(model.is_encoder_decoder),
        "it is not causal self-attention",
    ),
    Refusal(
        "a dtype other than bfloat16 or float16",
        lambda model: str(model.dtype) not in ("torch.bfloat16", "torch.float16"),
        "FULL windows are stored in 2 bytes a number",
    ),
    Refusal(
        f"head_dim other than {', '.join(map(str, SUPPORTED_HEAD_DIMS))}",
        lambda model: (
            model.head_dim not in SUPPORTED_HEAD_DIMS or model.v_head_dim != model.head_dim
        ),
        "no kernel was built for it",
    ),
)

REQUEST_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "beam search (`beam_width` above 1)",
        lambda request: (request.sampling_params.beam_width or 1) > 1,
        "beams take over each other's KV as they decode",
    ),
)


def refused_flags(server_args: Any, config: TieringConfig) -> Iterator[str]:
    """A sentence for each flag among SGLang's raw arguments that cannot be served."""
    for refusal in FLAG_REFUSALS:
        if refusal.found(server_args):
            yield (
                f"--kv-tiering qevict does not work with {refusal.what}, since {refusal.reason}: "
                f"drop one of the two"
            )
    if config.promote is Promotion.RESTORE and not config.spills:
        yield (
            "--kv-tiering-promote restore brings originals back from the SSD tier: add "
            "--kv-tiering-ssd-dir, or drop --kv-tiering-promote restore"
        )
    yield from _refused_tenants(server_args, config)
    if server_args.page_size not in (None, config.window):
        yield (
            f"--page-size must equal --kv-tiering-window ({config.window}), got "
            f"{server_args.page_size}: drop --page-size"
        )
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        yield (
            "--kv-tiering qevict does not work with SGLANG_ENABLE_METADATA_GLUE_GRAPH, since it "
            "captures once what tiering decides in every step: unset it, or drop --kv-tiering"
        )
    chunk_tokens = server_args.chunked_prefill_size
    if chunk_tokens is None:
        return
    if chunk_tokens > 0 and chunk_tokens % config.window:
        yield (
            f"--chunked-prefill-size must be a multiple of --kv-tiering-window ({config.window}), "
            f"or -1 for no chunks, got {chunk_tokens}"
        )
    if chunk_tokens < 1 and config.exact_prefill_tokens is not None:
        yield (
            "--kv-tiering-exact-prefill-tokens routes longer prompts chunk by chunk, but "
            f"--chunked-prefill-size {chunk_tokens} allows no chunks: drop one of the two"
        )


def _refused_tenants(server_args: Any, config: TieringConfig) -> Iterator[str]:
    """A sentence for each flag that shares of tenants do not go together with."""
    if config.shares is None:
        return
    other_orders = {
        "--enable-priority-scheduling": server_args.enable_priority_scheduling,
        "--schedule-policy routing-key": server_args.schedule_policy == "routing-key",
    }
    for flag, is_given in other_orders.items():
        if is_given:
            yield (
                f"--kv-tiering-tenants does not work with {flag}, since each puts what waits in an "
                "order of its own: drop one of the two"
            )
    if len(config.shares.named) >= MAX_TENANTS:
        yield (
            f"--kv-tiering-tenants must name less than {MAX_TENANTS} tenants, got "
            f"{len(config.shares.named)}: leave some to *"
        )


def refused_platform(platform: Any, config: TieringConfig) -> Iterator[str]:
    """A sentence for SGLang's platform at hand, unless it can do what is asked."""
    if platform.device_type == "cpu":
        return
    if config.spills:
        flag = "ssd-dir" if config.ssd_dir is not None else "spill-backend"
        yield (
            f"--kv-tiering-{flag} serves on CPUs only so far: drop --kv-tiering-{flag} on "
            f"{platform.device_name}"
        )
    found = platform.device_name
    if platform.is_cuda():
        capability = platform.get_device_capability()
        if capability >= _LEAST_CAPABILITY:
            return
        found = f"a GPU of compute capability {capability.major}.{capability.minor}"
    yield (
        f"--kv-tiering qevict has kernels for CPUs and for NVIDIA GPUs of compute capability "
        f"{'.'.join(map(str, _LEAST_CAPABILITY))} or later, but not for {found}: drop --kv-tiering"
    )


def refused_model(model_config: Any) -> Iterator[str]:
    """A sentence for each feature of a model that cannot be served."""
    for refusal in MODEL_REFUSALS:
        if refusal.found(model_config):
            yield (
                f"--kv-tiering qevict does not serve models with {refusal.what}, since "
                f"{refusal.reason}: drop --kv-tiering, or serve another model"
            )


def refused_kv_dtype(model_dtype: torch.dtype, kv_dtype: torch.dtype) -> Iterator[str]:
    """A sentence for a KV cache of another dtype than the model's."""
    if kv_dtype != model_dtype:
        yield (
            f"--kv-tiering qevict keeps FULL windows in the model's dtype ({_name(model_dtype)}), "
            f"but --kv-cache-dtype or the checkpoint asks for {_name(kv_dtype)}: use --dtype "
            "bfloat16 --kv-cache-dtype bfloat16"
        )


def refused_request(request: Any) -> Iterator[str]:
    """A sentence for each thing that a request asks for and that cannot be served."""
    for refusal in REQUEST_REFUSALS:
        if refusal.found(request):
            yield f"KV tiering does not serve {refusal.what}, since {refusal.reason}."


def refused_prompt(ledger: ClaimLedger, tokens: int, terms: Terms) -> Iterator[str]:
    """A sentence for a prompt that would not fit an empty server."""
    needed, allowance = terms.claims.peak_bytes(tokens, tokens), ledger.allowance(terms)
    if needed > allowance:
        has = "this server has" if allowance == ledger.capacity_bytes else "this tenant may have"
        yield (
            f"KV tiering: a prompt of {tokens} tokens takes {needed / 2**20:.1f} MiB of windows, "
            f"but {has} {allowance / 2**20:.1f} MiB: shorten it, or start the server with a larger "
            "--mem-fraction-static or --max-total-tokens, or a smaller --kv-tiering-budget."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
