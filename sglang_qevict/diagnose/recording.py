"""The true attention of a model on a text, recorded with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.simulator import Recording

__all__ = ["Problem", "Recorder"]

_ATTENTION = "qevict_recording"


class Problem(Exception):
    """What a user can mend, in a sentence."""


class Recorder:
    """A model in float32, whose attention can be recorded.

    Raises ``Problem`` for what is no model that transformers can load.
    """

    def __init__(self, path: Path | str) -> None:
        disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise Problem(f"{path} can't be loaded as a model: {reason}") from None

    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        return int(self._model.config.num_hidden_layers)

    def geometry(self, **code: Any) -> WindowGeometry:
        """The windows of this model; ``code``: fields of ``WindowGeometry`` beyond the shape."""
        config = self._model.config
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return WindowGeometry(heads, config.num_key_value_heads, dim, **code)

    def tokenize(self, text: str) -> list[int]:
        """Token ids, without special tokens that a chat template would add."""
        return list(self._tokenizer(text)["input_ids"])

    @torch.no_grad()
    def record(
        self,
        tokens: Sequence[int],
        prompt: int,
        queries: int,
        on_layer: Callable[[], None] = lambda: None,
    ) -> Recording:
        """One pass over all tokens; the attention of the last ``queries`` of them is kept.

        The first ``prompt`` tokens are the prompt, the rest counts as generated. Takes
        ``4 * num_layers * queries * len(tokens)`` bytes. ``on_layer`` is called after each layer.

        Raises ``Problem`` for attention that is not softmax over the whole context.
        """
        layers: list[torch.Tensor] = []

        def attend(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any,
            scaling: float,
            **options: Any,
        ) -> tuple[torch.Tensor, None]:
            for name in ("sliding_window", "softcap", "s_aux"):
                if options.get(name) is not None:
                    raise Problem(
                        f"layer {len(layers)} attends with {name}, which has no tiers: "
                        "name a model with plain causal attention"
                    )
            layers.append(_mass(query[0], key[0], scaling, queries))
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            on_layer()
            return out.transpose(1, 2), None

        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = attend
        try:
            self._model.set_attn_implementation(_ATTENTION)
            self._model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=1)
        finally:
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION]
        if not layers:
            raise Problem("the model has its own attention: name one that transformers runs")
        return Recording(torch.stack(layers), prompt)


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
