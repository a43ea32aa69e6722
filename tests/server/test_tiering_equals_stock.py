"""Where tiering keeps everything FULL, a server answers as stock SGLang does, token by token.

Both compute in bfloat16, so two tokens whose logits lie closer than that error may change
places. The error is measured: against the same model in float32, fed with the same tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import fmean, stdev

import pytest
import torch
from transformers import AutoModelForCausalLM

from server.harness import Server, ServerPool
from server.tiering import (
    EVERYTHING_FULL,
    TIERED,
    Answer,
    answer,
    assert_idle,
    first_difference,
    prompts,
)
from sglang_qevict.models import fetch_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

FEW = [10, 29, 200, 600, 1200]
MANY = [10, 15, 22, 33, 48, 64, 90, 130, 190, 280, 400, 511, 512, 700, 1000, 1500, 2200, 3300, 4500,
        6000]  # fmt: skip
MANY_SHORT = [1, 7, 8, 9, 10, 16, 20, 25, 29, 40, 64, 90, 128, 160, 200, 256, 300, 360, 420, 479]


@functools.cache
def _float32_model() -> torch.nn.Module:
    path = fetch_model(progress=False)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model


@torch.no_grad()
def _exact_logprobs(prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Float32 logprobs at the step of each token, ``[len(tokens), vocabulary]``."""
    ids = torch.tensor([prompt + tokens[:-1]])
    logits = _float32_model()(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    return logits.log_softmax(-1)


@dataclass(frozen=True)
class Errors:
    """The errors of one step: logprob minus float32's, of the best tokens of each server."""

    stock: list[float]
    tiered: list[float]

    @property
    def spread_of_stock(self) -> float:
        """The largest error of a difference of two logits."""
        return max(self.stock) - min(self.stock)


def _errors(prompt: list[int], stock: Answer, tiered: Answer, num_steps: int) -> list[Errors]:
    exact = _exact_logprobs(prompt, stock.tokens[:num_steps])
    return [
        Errors(
            [logprob - float(exact[step, token]) for token, logprob in stock.best[step].items()],
            [logprob - float(exact[step, token]) for token, logprob in tiered.best[step].items()],
        )
        for step in range(num_steps)
    ]


def _size(errors: list[float]) -> float:
    return fmean(map(abs, errors))


def _assert_equal(asked: list[list[int]], stock: list[Answer], tiered: list[Answer]) -> None:
    """Equal tokens up to near ties, and errors no larger than stock's."""
    all_errors: list[Errors] = []
    near_ties = []
    for prompt, expected, found in zip(asked, stock, tiered, strict=True):
        step = first_difference(expected.tokens, found.tokens)
        num_steps = len(expected.tokens) if step is None else step + 1
        errors = _errors(prompt, expected, found, num_steps)
        all_errors += errors
        if step is not None:
            gap = expected.gap(step, found.tokens[step])
            error = errors[step].spread_of_stock
            near_ties.append(f"{len(prompt)} tokens, step {step}: gap {gap:.3f}, error {error:.3f}")
            # Both round, independently of each other.
            assert gap <= 2 * error, near_ties[-1]
    sizes = [(_size(errors.stock), _size(errors.tiered)) for errors in all_errors]
    of_stock, of_tiered = (fmean(column) for column in zip(*sizes, strict=True))
    print(f"\n{len(near_ties)} near ties among {len(sizes)} steps: {near_ties}")
    print(f"mean error of a logprob: stock {of_stock:.5f}, tiered {of_tiered:.5f}")
    # Two independent roundings of one size differ by their sampling error, taken at 2 sigma.
    differences = [ours - theirs for theirs, ours in sizes]
    assert of_tiered - of_stock <= 2 * stdev(differences) / len(sizes) ** 0.5


def _answers(server: Server, asked: list[list[int]], tokens: int) -> list[Answer]:
    return [answer(server, prompt, tokens) for prompt in asked]


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        pytest.param(EVERYTHING_FULL, FEW, id="budget-1-few"),
        pytest.param(EVERYTHING_FULL, MANY, id="budget-1-many", marks=pytest.mark.slow),
        pytest.param((), MANY_SHORT, id="below-min-context-many", marks=pytest.mark.slow),
    ],
)
def test_greedy_answers_are_those_of_stock_sglang(
    servers: ServerPool, flags: tuple[str, ...], lengths: list[int]
) -> None:
    asked = prompts(lengths)
    tokens = 32 if len(lengths) > 6 else 16
    stock = _answers(servers.get(), asked, tokens)
    server = servers.get(*TIERED, *flags)
    tiered = _answers(server, asked, tokens)
    assert_idle(server)
    _assert_equal(asked, stock, tiered)
