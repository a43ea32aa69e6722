"""Architectures that people run, served in tiers as stock SGLang serves them.

Each is a small checkpoint with random weights. A server is told which tokens to generate, so
that distributions over the whole vocabulary are compared token by token in the same context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from server.harness import Server
from server.tiering import EVERYTHING_FULL, TIERED, assert_idle, report
from server_side import BIAS, ForcedTokens, install, spoiling
from tiny_models import REFUSED, SERVED, VOCABULARY, make_checkpoint, random_tokens, write_config

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = (
    "--skip-tokenizer-init",
    "--enable-custom-logit-processor",
    *("--max-total-tokens", "8192"),
)
# The floors are six windows of eight, which a fifth of 256 tokens just holds.
SMALL_BUDGET = ("--kv-tiering-budget", "0.2", "--kv-tiering-min-context", "256")

PROMPT, STEPS = 700, 32
# What is lost must be less than this share of what is lost with random codes, or with another
# history. KL grows as the square of an error, so a third stands for little more than half of it.
LOST = 1 / 3

# Tokens at both ends that another history leaves alone: those that are protected.
SINK, LOCAL = 8, 40


@dataclass(frozen=True)
class Text:
    """A prompt, and the tokens that follow it."""

    prompt: list[int]
    forced: list[int]

    def with_other_history(self, seed: int) -> Text:
        """The same ends around other tokens: what is left if nothing of the history is known."""
        history = random_tokens(len(self.prompt) - SINK - LOCAL, seed)
        return Text([*self.prompt[:SINK], *history, *self.prompt[-LOCAL:]], self.forced)


def random_text(seed: int) -> Text:
    tokens = random_tokens(PROMPT + STEPS, seed)
    return Text(tokens[:PROMPT], tokens[PROMPT:])


def logprobs(server: Server, text: Text) -> torch.Tensor:
    """Next-token logprobs before each forced token, ``[steps, vocabulary]`` float64."""
    params = {
        "temperature": 0,
        "max_new_tokens": len(text.forced),
        "ignore_eos": True,
        "custom_params": {"forced": text.forced},
    }
    body = {
        "input_ids": text.prompt,
        "sampling_params": params,
        "custom_logit_processor": ForcedTokens.to_str(),
        "return_logprob": True,
        "top_logprobs_num": VOCABULARY,
    }
    server.flush_cache()  # nothing is reused
    result: dict[str, Any] = server.post("/generate", body)
    assert result["output_ids"] == text.forced
    rows = torch.empty(len(text.forced), VOCABULARY, dtype=torch.float64)
    for step, best in enumerate(result["meta_info"]["output_top_logprobs"]):
        values, ids, _ = zip(*best, strict=True)
        rows[step, list(ids)] = torch.tensor(values, dtype=torch.float64)
        rows[step, text.forced[step]] -= BIAS
    return rows.log_softmax(-1)


@torch.no_grad()
def exact_logprobs(model: torch.nn.Module, text: Text) -> torch.Tensor:
    """The same by transformers, in float32."""
    ids = torch.tensor([text.prompt + text.forced[:-1]])
    logits = model(ids, use_cache=False, logits_to_keep=len(text.forced)).logits[0]
    return logits.double().log_softmax(-1)


def divergence(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Mean KL(one || other) over all steps, in nats."""
    p, q = torch.cat(list(one)), torch.cat(list(other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@dataclass(frozen=True)
class Run:
    """What one architecture answered; lists go by text.

    Greedy texts go on as stock SGLang does: ``exact`` by transformers in float32, ``stock``,
    and ``full`` with a budget of 1. Random texts go on as they were drawn: ``random_stock``,
    ``tiered`` at a fifth of the bytes, ``spoiled`` the same with random codes, and
    ``other_history`` by stock SGLang. Counters are those of ``/server_info``.
    """

    exact: list[torch.Tensor]
    stock: list[torch.Tensor]
    full: list[torch.Tensor]
    greedy: list[Text]
    random_stock: list[torch.Tensor]
    other_history: list[torch.Tensor]
    tiered: list[torch.Tensor]
    spoiled: list[torch.Tensor]
    full_counters: dict[str, int]
    tiered_counters: dict[str, int]


@pytest.fixture(scope="module", params=SERVED)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three servers, one after another."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(SERVED[request.param], directory / "model")
    env = install(directory / "plugin")

    def server(name: str, *flags: str) -> Server:
        return Server(*FLAGS, *flags, log_path=directory / f"{name}.log", env=env, model=model)

    texts = [random_text(seed) for seed in (1, 2)]
    with server("stock") as stock_server:
        greedy = [Text(text.prompt, _greedy(stock_server, text.prompt)) for text in texts]
        stock = [logprobs(stock_server, text) for text in greedy]
        random_stock = [logprobs(stock_server, text) for text in texts]
        others = [text.with_other_history(seed) for seed, text in enumerate(texts, start=101)]
        other_history = [logprobs(stock_server, text) for text in others]
        stock_server.assert_clean()
    with server("full", *TIERED, *EVERYTHING_FULL) as full_server:
        full = [logprobs(full_server, text) for text in greedy]
        full_counters = report(full_server)["counters"]
        assert_idle(full_server)
    with server("tiered", *TIERED, *SMALL_BUDGET) as tiered_server:
        tiered = [logprobs(tiered_server, text) for text in texts]
        tiered_counters = report(tiered_server)["counters"]
        spoiling(env).touch()
        spoiled = [logprobs(tiered_server, text) for text in texts]
        assert_idle(tiered_server)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    exact = [exact_logprobs(oracle, text) for text in greedy]
    return Run(
        exact, stock, full, greedy, random_stock, other_history, tiered, spoiled,
        full_counters, tiered_counters,
    )  # fmt: skip


def _greedy(server: Server, prompt: list[int]) -> list[int]:
    answer = server.generate(prompt, max_new_tokens=STEPS, ignore_eos=True)
    tokens: list[int] = answer["output_ids"]
    return tokens


def test_a_budget_of_one_answers_as_stock_sglang(run: Run) -> None:
    """The same greedy tokens up to a near tie, and logprobs no further from float32 than stock's.

    A tie is near where the gap is within what both round. Errors of two independent roundings
    of one size differ by their sampling error, taken at 3 sigma.
    """
    exact, stock, full = (torch.cat(rows) for rows in (run.exact, run.stock, run.full))
    tokens = torch.tensor([token for text in run.greedy for token in text.forced])
    assert torch.equal(stock.argmax(-1), tokens)
    gaps = stock.amax(-1) - stock.gather(1, full.argmax(-1, keepdim=True))[:, 0]
    errors = (stock - exact).abs().amax(-1)
    sizes = [(rows - exact).abs().mean(-1).tolist() for rows in (stock, full)]
    of_stock, of_full = map(fmean, sizes)
    print(
        f"\nnear ties (gap, error): {[(float(gaps[i]), float(errors[i])) for i in gaps.nonzero()]}"
    )
    print(f"mean error of a logprob: stock {of_stock:.5f}, budget 1 {of_full:.5f}")
    print(
        f"KL to float32: stock {divergence(run.exact, run.stock):.6f}, "
        f"budget 1 {divergence(run.exact, run.full):.6f}"
    )
    assert (gaps <= 2 * errors).all()
    differences = [ours - theirs for theirs, ours in zip(*sizes, strict=True)]
    assert of_full - of_stock <= 3 * stdev(differences) / len(differences) ** 0.5
    counters = run.full_counters
    assert not any(counters[name] for name in ("demoted", "evicted_full", "evicted_coded"))


def test_a_fifth_of_the_bytes_stays_near_stock_sglang_and_far_from_garbage(run: Run) -> None:
    found = divergence(run.random_stock, run.tiered)
    controls = {
        "random codes": divergence(run.random_stock, run.spoiled),
        "another history": divergence(run.random_stock, run.other_history),
    }
    print(f"\nKL to stock: {found:.4f}; {controls}; {run.tiered_counters}")
    assert run.tiered_counters["demoted"] > 0
    assert run.tiered_counters["evicted_full"] + run.tiered_counters["evicted_coded"] > 0
    assert found < LOST * min(controls.values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_tiers_would_get_wrong_ends_with_2_and_one_sentence(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    model = write_config(config, tmp_path / "model")
    flags = (*TIERED, *FLAGS, "--load-format", "dummy")
    server = Server(*flags, log_path=tmp_path / "server.log", model=model)
    server.launch()
    assert server.wait(120) == 2
    log = server.log_text()
    assert "Traceback" not in log
    (sentence,) = (line for line in log.splitlines() if line.startswith("sglang-qevict: error: "))
    assert reason in sentence
    assert "drop --kv-tiering" in sentence or "serve this model with --kv-tiering none" in sentence
