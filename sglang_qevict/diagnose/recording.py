"""The true attention of a model on a text, recorded with transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qevict_tiers.simulator import Recording
from sglang_qevict.offline import OfflineModel, Text, causal_attention

__all__ = ["record"]


@torch.no_grad()
def record(
    model: OfflineModel, text: Text, queries: int, on_layer: Callable[[], None] = lambda: None
) -> Recording:
    """One pass over a whole text; the attention of its last ``queries`` tokens is kept.

    Takes ``4 * num_layers * queries * len(text.tokens)`` bytes. ``on_layer`` is called after
    each layer.

    Raises ``ValueError`` for attention that is not softmax over the whole context.
    """
    layers: list[torch.Tensor] = []

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        layers.append(_mass(query.transpose(0, 1), key.transpose(0, 1), scale, queries))
        on_layer()
        return causal_attention(query, key, value, scale)

    with model.attending(attend):
        model.model(torch.tensor([list(text.tokens)]), use_cache=False, logits_to_keep=1)
    return Recording(torch.stack(layers), text.prompt)


def _mass(query: torch.Tensor, key: torch.Tensor, scale: float, queries: int) -> torch.Tensor:
    """Probabilities of the last queries, mean over heads, ``[queries, T]``.

    ``query`` ``[Hq, T, D]``, ``key`` ``[Hkv, T, D]``.
    """
    (num_heads, total, _), num_kv_heads = query.shape, key.shape[0]
    group = num_heads // num_kv_heads
    last = torch.arange(total - queries, total)
    future = torch.arange(total) > last[:, None]
    mass = query.new_zeros(queries, total)
    for head in range(num_heads):
        logits = query[head, -queries:] @ key[head // group].T * scale
        mass += logits.masked_fill_(future, -torch.inf).softmax(-1)
    return mass / num_heads
