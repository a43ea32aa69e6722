"""What tests of tiered servers share: real prompts, checks when idle, answers with their logits."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from transformers import AutoTokenizer

from server.harness import Server
from sglang_qevict.models import fetch_model

RANKS = 3  # the embedded model has three KV heads

TIERED = ("--kv-tiering", "qevict")
EVERYTHING_FULL = ("--kv-tiering-budget", "1", "--kv-tiering-quant-fraction", "0")

# Two steps of bfloat16 between 16 and 32, where this model's best logits lie: torch's products
# depend on the number of rows, so the last bit of a logit depends on who else is served.
_NEAR_TIE = 0.25

_LICENSES = Path("/usr/share/common-licenses")
_IDLE_SECONDS = 60.0


def ranks_env() -> dict[str, str]:
    """Variables for a server with ``--tp 3``: cores, and SGLang's check of what ranks decide."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        # One core for each rank, though there may be fewer of them.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[n % len(cores)]) for n in range(RANKS)),
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }


def assert_consensus(server: Server) -> None:
    """All ranks of an idle server have decided alike, and nothing is left."""
    log = server.log_text()
    assert log.count("Rank consensus checker is enabled") == RANKS
    assert "Found rank divergence" not in log
    assert_idle(server)


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
    server: Server,
    prompt: Sequence[int],
    tokens: int,
    num_best: int = 10,
    salt: str | None = None,
    **sampling: Any,
) -> Answer:
    """The answer to a prompt, as many tokens long as asked."""
    sampling = sampling or {"ignore_eos": True}
    request = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, **sampling},
        "return_logprob": True,
        "top_logprobs_num": num_best,
    }
    if salt is not None:
        request["cache_salt"] = salt
    result = server.post("/generate", request)
    best = [
        {token: logprob for logprob, token, _ in sorted(step, reverse=True)}
        for step in result["meta_info"]["output_top_logprobs"]
    ]
    assert len(result["output_ids"]) == len(best) == tokens
    return Answer(result["output_ids"], best)


def answers(
    server: Server,
    asked: Sequence[Sequence[int]],
    tokens: int,
    salts: Sequence[str | None] | None = None,
) -> list[Answer]:
    """Answers to prompts that are sent at the same time."""
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(
            threads.map(
                lambda prompt, salt: answer(server, prompt, tokens, salt=salt),
                asked,
                salts or [None] * len(asked),
            )
        )


def ask(server: Server, prompt: Sequence[int], tokens: int = 8, **request: Any) -> dict[str, Any]:
    """SGLang's answer to a prompt, with further fields of the request."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, **request}
    result: dict[str, Any] = server.post("/generate", body)
    return result


def cached(result: dict[str, Any]) -> int:
    """Tokens that an answer reused."""
    return int(result["meta_info"]["cached_tokens"])


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    """Until a condition holds; fails if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_writes(server: Server, seconds: float = _IDLE_SECONDS) -> None:
    """Until all that was put into the SSD tier has reached the disk, or was dropped."""
    wait_for(lambda: not report(server)["spill"]["usage"]["queued_records"], seconds)


def tiers_at_events(server: Server, prompt: int) -> list[dict[int, str]]:
    """Checksums of the tiers by length, of each request with a prompt of so many tokens.

    From the server's log at the level debug.
    """
    pattern = rf"prompt of {prompt} routed at (\d+): tiers ([0-9a-f]+)"
    runs: list[dict[int, str]] = []
    for length, checksum in re.findall(pattern, server.log_text()):
        if int(length) == prompt:
            runs.append({})
        runs[-1][int(length)] = checksum
    return runs


def assert_routed_alike(
    one: tuple[Answer, dict[int, str]], other: tuple[Answer, dict[int, str]], prompt: int
) -> None:
    """Two answers to a prompt of so many tokens are one, and so are the tiers at each event, up to
    where a near tie of two tokens ends that."""
    step = assert_same_up_to_a_near_tie(one[0], other[0])
    same = [length for length in one[1] if step is None or length <= prompt + step]
    assert [other[1][length] for length in same] == [one[1][length] for length in same]


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


def wait_until_idle(server: Server) -> None:
    """Until no request runs, no window is seen, and the checks of an idle server have been made."""
    deadline = time.monotonic() + _IDLE_SECONDS
    # A row that was given back is released at the next launch, or by the check when idle.
    while (found := report(server))["requests"] or _seen(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    assert found["counters"]["non_finite"] == 0
    # SGLang's own check and tiering's come when the server idles.
    time.sleep(1)


def assert_idle(server: Server) -> None:
    """Once nothing runs: no window is seen; after a flush no byte is held, and the log is clean."""
    wait_until_idle(server)
    server.assert_clean()
    server.flush_cache()
    assert _held(report(server)) == {}
    server.assert_clean()


def _seen(found: dict[str, Any]) -> bool:
    return any(sum(layers) for layers in found["layers"].values())
