"""What tests of tiered servers share: real prompts, checks when idle, answers with their logits."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

from server.harness import Server
from sglang_qevict.models import fetch_model

TIERED = ("--kv-tiering", "qevict")
EVERYTHING_FULL = ("--kv-tiering-budget", "1", "--kv-tiering-quant-fraction", "0")

# Two steps of bfloat16 between 16 and 32, where this model's best logits lie: torch's products
# depend on the number of rows, so the last bit of a logit depends on who else is served.
_NEAR_TIE = 0.25

_LICENSES = Path("/usr/share/common-licenses")
_IDLE_SECONDS = 60.0


@functools.cache
def text_tokens() -> list[int]:
    """Some 120,000 tokens of English and code: Python's help topics, and licences if installed."""
    texts = [topics[name] for name in sorted(topics)]
    if _LICENSES.is_dir():
        texts += [path.read_text() for path in sorted(_LICENSES.iterdir()) if path.is_file()]
    tokenizer = AutoTokenizer.from_pretrained(fetch_model(progress=False))
    tokens: list[int] = tokenizer("\n\n".join(texts))["input_ids"]
    return tokens


def prompts(lengths: Sequence[int], start: int = 0) -> list[list[int]]:
    """A prompt of each length, from places of the text that do not overlap."""
    tokens, result = text_tokens(), []
    for length in lengths:
        result.append(tokens[start : start + length])
        start += length
    assert start <= len(tokens)
    return result


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its tokens, and each step's best tokens with their logprobs, best first."""

    tokens: list[int]
    best: list[dict[int, float]]

    def gap(self, step: int, token: int) -> float:
        """How far a token lies below the best one; infinitely where it is none of the best."""
        logprobs = self.best[step]
        return max(logprobs.values()) - logprobs.get(token, -inf)


def answer(
    server: Server, prompt: Sequence[int], tokens: int, num_best: int = 10, **sampling: Any
) -> Answer:
    """The answer to a prompt, as many tokens long as asked."""
    sampling = sampling or {"ignore_eos": True}
    request = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling},
        "return_logprob": True,
        "top_logprobs_num": num_best,
    }
    result = server.post("/generate", request)
    best = [
        {token: logprob for logprob, token, _ in sorted(step, reverse=True)}
        for step in result["meta_info"]["output_top_logprobs"]
    ]
    assert len(result["output_ids"]) == len(best) == tokens
    return Answer(result["output_ids"], best)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The step of the first different token, or None."""
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return step
    return None


def assert_same_up_to_a_near_tie(one: Answer, other: Answer) -> int | None:
    """Two greedy answers may part where two tokens are as good; returns the step where they do."""
    step = first_difference(one.tokens, other.tokens)
    assert step is None or one.gap(step, other.tokens[step]) <= _NEAR_TIE
    return step


def report(server: Server) -> dict[str, Any]:
    """What ``/server_info`` tells of tiering; fails on a server that does not tier."""
    result: dict[str, Any] = server.info()["internal_states"][0]["kv_tiering"]
    return result


def _held(found: dict[str, Any]) -> dict[str, int]:
    """What requests hold, and what the prefix cache keeps, as far as it is not nothing."""
    kinds = ("full", "codes", "params", "alignment", "shadow", "reuse", "claimed")
    held = {kind: found["bytes"][kind] for kind in kinds}
    held |= {what: found[what] for what in ("requests", "kept_pages")}
    return {kind: amount for kind, amount in held.items() if amount}


def assert_idle(server: Server) -> None:
    """Once nothing runs: no window is seen; after a flush no byte is held, and the log is clean."""
    deadline = time.monotonic() + _IDLE_SECONDS
    # A row that was given back is released at the next launch, or by the check when idle.
    while (found := report(server))["requests"] or _seen(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    assert found["counters"]["non_finite"] == 0
    # SGLang's own check and tiering's come when the server idles, before the flush.
    time.sleep(1)
    server.assert_clean()
    server.flush_cache()
    assert _held(report(server)) == {}
    server.assert_clean()


def _seen(found: dict[str, Any]) -> bool:
    return any(sum(layers) for layers in found["layers"].values())
