"""How far a compressed cache takes a model from itself: KL, top-1 agreement, perplexity.

Everybody gets the same tokens: the first ``prompt`` of a text as the prompt, the next ones one
by one as if they had been generated (teacher forcing). Confidence intervals are percentile
bootstraps over texts, since steps of one text depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quality.texts import Half, load

__all__ = ["FORCED", "PROMPTS", "Fidelity", "Sample", "fidelity_of", "row", "samples", "summary"]

PROMPTS = {
    "reference": 6000,
    "code": 5000,
    "chat": 4500,
    "license": 4000,
    "data": 3500,
    "mathematics": 3000,
    "narrative": 2500,
    "readme": 2000,
}
"""Tokens of the prompt, by kind of text."""

FORCED = 128
"""Tokens after the prompt."""

_RESAMPLES = 2000
_CONFIDENCE = 0.95


class Sample(NamedTuple):
    """Tokens of which the first ``prompt`` are the prompt; the others are forced."""

    tokens: list[int]
    prompt: int


@dataclass(frozen=True)
class Fidelity:
    """One text's steps, each tensor float64 ``[n]``.

    kl: KL(full || other) in nats. same: 1 where both have the same best token. loss, full_loss:
    negative log-likelihood of the text's own token, in nats.
    """

    kl: torch.Tensor
    same: torch.Tensor
    loss: torch.Tensor
    full_loss: torch.Tensor


def samples(
    tokenize: Callable[[str], list[int]],
    half: Half,
    kinds: Iterable[str] = PROMPTS,
    forced: int = FORCED,
) -> list[Sample]:
    """The texts. Raises ``ValueError`` if one is too short."""
    result = []
    for kind in kinds:
        prompt = PROMPTS[kind]
        tokens = tokenize(load(kind, half))[: prompt + forced]
        if len(tokens) < prompt + forced:
            raise ValueError(f"the text {kind} is too short for {prompt} + {forced} tokens")
        result.append(Sample(tokens, prompt))
    return result


def fidelity_of(sample: Sample, full: torch.Tensor, other: torch.Tensor) -> Fidelity:
    """Compare logits ``[n, vocab]`` of the steps of one text."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    tokens = torch.tensor(sample.tokens[sample.prompt :])[:, None]
    return Fidelity(
        kl=(p.exp() * (p - q)).sum(-1),
        same=(full.argmax(-1) == other.argmax(-1)).double(),
        loss=-q.gather(1, tokens)[:, 0],
        full_loss=-p.gather(1, tokens)[:, 0],
    )


def row(fidelities: Sequence[Fidelity], kinds: Iterable[str] = PROMPTS) -> dict[str, Any]:
    """The figures of all texts: means with their intervals, and the KL of each kind."""
    per_text = [one.kl.mean().item() for one in fidelities]
    same = [one.same.mean().item() for one in fidelities]
    ratio = [(one.loss.mean() - one.full_loss.mean()).exp().item() for one in fidelities]
    return {
        "kl": _mean(per_text),
        "kl_interval": _interval(per_text),
        "top1": _mean(same),
        "top1_interval": _interval(same),
        "perplexity_ratio": _mean(ratio),
        "kl_by_kind": dict(zip(kinds, per_text, strict=True)),
    }


def summary(name: str, found: Mapping[str, Any]) -> str:
    """One line."""
    low, high = found["kl_interval"]
    return f"{name}: KL {found['kl']:.4f} [{low:.4f}, {high:.4f}], top-1 {found['top1']:.3f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    data = torch.tensor(values, dtype=torch.float64)
    chosen = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)
    means = data[chosen].mean(-1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high
