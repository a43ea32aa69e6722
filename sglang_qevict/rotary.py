"""The model's own rotary table, wherever its layers keep it."""

from __future__ import annotations

from typing import Any

import torch

from qevict_kernels.rope import RotaryTable

__all__ = ["find_rotary"]


def find_rotary(model: torch.nn.Module, device: str) -> RotaryTable:
    """The rotary table that all attention layers of a model share.

    Raises ``ValueError``, in one sentence, if layers use none or different ones.
    """
    modules: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor)
    ]
    if not modules:
        raise ValueError(
            "KV tiering codes keys before rotation, but this model has no rotary embedding with "
            "a table (cos_sin_cache): serve it with --kv-tiering none"
        )
    first: torch.Tensor = modules[0].cos_sin_cache
    for module in modules[1:]:
        other: torch.Tensor = module.cos_sin_cache
        if other is not first and not (other.shape == first.shape and torch.equal(other, first)):
            raise ValueError(
                "KV tiering needs one rotary embedding for all layers, but this model's layers "
                "use different ones: serve it with --kv-tiering none"
            )
    table = first.to(device=device, dtype=torch.float32).contiguous()
    return RotaryTable(cos_sin=table, is_neox=bool(modules[0].is_neox_style))
