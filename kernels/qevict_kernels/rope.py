"""Rotary position embedding as the kernels need it: the model's own table, and its inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RotaryTable"]


@dataclass(frozen=True)
class RotaryTable:
    """cos/sin of one model, taken from its own rotary module.

    ``cos_sin`` is float32 ``[max_positions, rotary_dim]``, the cosines of all
    frequencies first, then the sines (SGLang's ``cos_sin_cache``). A scaling
    factor folded into the table (YaRN's ``mscale``) is allowed. Only the first
    ``rotary_dim`` channels of a head are rotated. ``is_neox`` pairs channel ``j``
    with ``j + rotary_dim / 2``, otherwise ``2j`` with ``2j + 1``.
    """

    cos_sin: torch.Tensor
    is_neox: bool

    @property
    def rotary_dim(self) -> int:
        """Channels that are rotated, from the first on."""
        return int(self.cos_sin.shape[1])
