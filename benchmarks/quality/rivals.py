"""The other ways to make a KV cache smaller, as their authors publish them, at matched bytes.

Runs in an environment of its own, with kvpress, optimum-quanto and the transformers they want.
Everything here is kvpress's or transformers' own code; nothing is rewritten. Each method gets as
many bytes as ``--budget`` allows at the *end* of a text, prompt and forced tokens together:

- evictors keep ``k`` tokens of the prompt, and every token that comes after it:
  ``k = budget * (prompt + forced) - forced``. What a method adds for itself (scores, masks of
  heads) is not counted.
- quantised caches take the bytes that their bits, scales, zeros and residual take, whatever the
  budget is: the nearest they can be set to. The row says how many those are.

    cd benchmarks && RIVALS/bin/python -m quality.rivals --model DIR --json rivals.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, QuantizedCache

from quality.metrics import FORCED, PROMPTS, Sample, fidelity_of, row, samples, summary
from quality.texts import Half

Press = Callable[[float], Any]

EVICTORS: Mapping[str, Press] = {
    "StreamingLLM": kvpress.StreamingLLMPress,
    "SnapKV": kvpress.SnapKVPress,
    "H2O": kvpress.ObservedAttentionPress,
    "TOVA": kvpress.TOVAPress,
    "PyramidKV": kvpress.PyramidKVPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
    "Ada-SnapKV": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "Ada-ExpectedAttention": lambda ratio: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(ratio)
    ),
    "CriticalKV": lambda ratio: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
    "CriticalAdaKV": lambda ratio: kvpress.CriticalAdaKVPress(kvpress.SnapKVPress(ratio)),
    "KVzip": lambda ratio: kvpress.KVzipPress(compression_ratio=ratio),
    "KeyDiff": kvpress.KeyDiffPress,
    "LagKV": kvpress.LagKVPress,
}
"""By name: a press from the share of the prompt that is to go."""

NEEDS_EAGER = ("H2O",)

QUANTISED: Mapping[str, dict[str, Any]] = {
    "quanto 2 bit": {"backend": "quanto", "nbits": 2, "q_group_size": 64, "residual_length": 32},
    "quanto 4 bit": {"backend": "quanto", "nbits": 4, "q_group_size": 64, "residual_length": 32},
}


def main() -> None:
    """Measure all, or those that are named."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", type=Path, required=True, help="directory of the model")
    made.add_argument("--budget", type=float, action="append", help="default: 0.2, 0.1, 0.05")
    made.add_argument("--half", type=Half, default=Half.TEST)
    made.add_argument("--method", action="append", choices=[*EVICTORS, *QUANTISED])
    made.add_argument("--quick", action="store_true", help="two texts, one budget")
    made.add_argument("--json", type=Path)
    options = made.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    kinds = ["readme", "narrative"] if options.quick else list(PROMPTS)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = samples(lambda text: list(tokenizer(text)["input_ids"]), options.half, kinds,
                    32 if options.quick else FORCED)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    full = [_logits(model, text, DynamicCache(), contextlib.nullcontext()) for text in texts]
    rows: list[dict[str, Any]] = []
    chosen = [
        (name, budget)
        for budget in (options.budget or ([0.2] if options.quick else [0.2, 0.1, 0.05]))
        for name in options.method or [*EVICTORS, *QUANTISED]
        if name in EVICTORS or budget == 0.2
    ]
    progress = tqdm(chosen, unit="method")
    for name, budget in progress:
        began = time.monotonic()
        share, logits = 0.0, []
        for text in texts:
            found, bytes_share = _measure(model, name, text, budget)
            logits.append(found)
            share += bytes_share / len(texts)
        figures = row([fidelity_of(*one) for one in zip(texts, full, logits, strict=True)], kinds)
        progress.write(summary(f"{name} at {budget:g} ({share:.3f} of the bytes)", figures))
        seconds = time.monotonic() - began
        rows.append(
            {"method": name, "budget": budget, "bytes_share": share, "seconds": seconds, **figures}
        )
        if options.json:
            versions = {
                "kvpress": kvpress.__version__ if hasattr(kvpress, "__version__") else "",
                "transformers": transformers.__version__,
            }
            content = {"versions": versions, "half": options.half.value, "rows": rows}
            options.json.write_text(json.dumps(content, indent=1) + "\n")


def _measure(model: Any, name: str, text: Sample, budget: float) -> tuple[torch.Tensor, float]:
    """Logits of the forced tokens, and the share of the bytes that is held at the end."""
    total, forced = len(text.tokens), len(text.tokens) - text.prompt
    if name in QUANTISED:
        settings = QUANTISED[name]
        cache = QuantizedCache(config=model.config, **settings)
        return _logits(model, text, cache, contextlib.nullcontext()), _quantised(settings, total)
    kept = int(budget * total) - forced
    if kept < 1:
        raise ValueError(f"a budget of {budget} leaves nothing of a prompt of {text.prompt} tokens")
    press = EVICTORS[name](1 - kept / text.prompt)
    with _implementation(model, "eager" if name in NEEDS_EAGER else "sdpa"):
        logits = _logits(model, text, DynamicCache(), press(model))
    return logits, (kept + forced) / total


@torch.no_grad()
def _logits(
    model: Any, text: Sample, cache: Cache, compressing: contextlib.AbstractContextManager[Any]
) -> torch.Tensor:
    """The prompt into a cache, which is compressed then; and the forced tokens one after another.

    Next-token logits before each forced token, ``[forced, vocab]``.
    """
    prompt = torch.tensor([text.tokens[: text.prompt]])
    with compressing:
        first = model(prompt, past_key_values=cache, logits_to_keep=1).logits[0]
    forced = torch.tensor([text.tokens[text.prompt : -1]])
    positions = torch.arange(text.prompt, text.prompt + forced.shape[1])[None]
    rest = model(forced, past_key_values=cache, position_ids=positions).logits[0]
    return torch.cat([first, rest])


def _quantised(settings: Mapping[str, Any], tokens: int) -> float:
    """Share of bfloat16's bytes: codes, a scale and a zero of 2 bytes a group, the residual."""
    bits = settings["nbits"] + 2 * 16 / settings["q_group_size"]
    residual: int = min(tokens, settings["residual_length"])
    return float((tokens - residual) * bits / 16 + residual) / tokens


@contextlib.contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


if __name__ == "__main__":
    main()
