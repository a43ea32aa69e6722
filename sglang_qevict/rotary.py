"""The model's own rotary table, beside the attention layers that use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from qevict_kernels.rope import RotaryTable

__all__ = ["attention_layers", "find_rotary"]


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, RadixAttention]]:
    """The layers of a model that keep keys and values, and their names."""
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            yield name, module


def find_rotary(model: torch.nn.Module, device: str) -> RotaryTable:
    """The rotary table that all attention layers of a model share.

    Only modules beside an attention layer count: a vision tower has tables of its own.
    Raises ``ValueError``, in one sentence, if a layer has none, if layers have different
    ones, or if cos and sin are rounded.
    """
    rotaries = [
        rotary for name, _ in attention_layers(model) for rotary in _rotaries_beside(model, name)
    ]
    if not rotaries:
        raise ValueError("KV tiering found no attention layer: serve it with --kv-tiering none")
    first = rotaries[0]
    for rotary in rotaries[1:]:
        if not _is_same(rotary, first):
            raise ValueError(
                "KV tiering needs one rotary embedding for all layers, but this model's layers "
                "use different ones: serve it with --kv-tiering none"
            )
    table: torch.Tensor = first.cos_sin_cache
    if table.dtype != torch.float32:
        raise ValueError(
            "KV tiering rotates keys back, which needs cos and sin in float32, but SGLang rounded "
            f"them to {str(table.dtype).removeprefix('torch.')}: set SGLANG_ROPE_CACHE_FP32=1 and "
            "unset SGLANG_USE_CPU_ENGINE"
        )
    return RotaryTable(table.to(device).contiguous(), is_neox=bool(first.is_neox_style))


def _rotaries_beside(model: torch.nn.Module, name: str) -> list[Any]:
    """Siblings of a layer that have a table. Raises ``ValueError`` if there are none."""
    siblings = model.get_submodule(name.rpartition(".")[0]).children()
    found = [
        sibling
        for sibling in siblings
        if isinstance(getattr(sibling, "cos_sin_cache", None), torch.Tensor)
    ]
    if not found:
        raise ValueError(
            f"KV tiering codes keys before rotation, but {name} has no rotary embedding with a "
            "table (cos_sin_cache) beside it: serve this model with --kv-tiering none"
        )
    return found


def _is_same(rotary: Any, other: Any) -> bool:
    if rotary is other:
        return True
    return rotary.is_neox_style == other.is_neox_style and torch.equal(
        rotary.cos_sin_cache, other.cos_sin_cache
    )
