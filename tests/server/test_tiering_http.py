"""A tiered server as its clients see it: every kind of request, then idle with nothing left."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.harness import Server, ServerPool
from server.tiering import (
    EVERYTHING_FULL,
    TIERED,
    Answer,
    answer,
    answers,
    assert_idle,
    assert_routed_alike,
    assert_same_up_to_a_near_tie,
    prompts,
    report,
    tiers_at_events,
)

pytestmark = pytest.mark.server


def test_chat_answers_a_question(tiered: Server) -> None:
    assert "Paris" in tiered.chat("What is the capital of France?")


def test_a_stream_brings_the_same_text_as_one_answer(tiered: Server) -> None:
    (prompt,) = prompts([600])
    params = {"temperature": 0, "max_new_tokens": 24}
    whole = tiered.generate(prompt, **params)
    tiered.flush_cache()
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    with httpx.stream("POST", f"{tiered.url}/generate", json=body, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert len(lines) > 3
    assert json.loads(lines[-2])["text"] == whole["text"]


def test_prompts_around_the_window_are_answered_together_as_alone(tiered: Server) -> None:
    around, tokens = prompts([1, 7, 8, 9, 29]), 12
    alone = [answer(tiered, prompt, tokens) for prompt in around]
    together = answers(tiered, around, tokens)
    for one, other in zip(alone, together, strict=True):
        assert_same_up_to_a_near_tie(one, other)


def test_a_request_among_others_answers_and_is_routed_as_alone(tiered: Server) -> None:
    """Which windows are FULL, coded and evicted in which layer, after each of its events."""
    mine, *others = prompts([1200, 10, 900, 40, 520, 700, 130, 600], start=20_000)
    tokens = 34
    alone = answer(tiered, mine, tokens)
    tiered.flush_cache()
    among = answers(tiered, [mine, *others], tokens)[0]
    first, second = tiers_at_events(tiered, prompt=len(mine))[-2:]
    assert list(first) == [1200, 1208, 1216, 1224, 1232]
    assert len(set(first.values())) == len(first)
    assert_routed_alike((alone, first), (among, second), len(mine))


@pytest.mark.parametrize("turns", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_aborted_streams_leave_nothing(tiered: Server, turns: int) -> None:
    many = prompts([40, 300, 520, 700, 90] * turns, start=40_000)

    def abort_midstream(prompt: list[int]) -> None:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        with httpx.stream("POST", f"{tiered.url}/generate", json=body, timeout=120) as response:
            next(response.iter_lines())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(abort_midstream, many))


@pytest.mark.slow
def test_aborts_in_the_queue_and_within_a_prompt_leave_nothing(servers: ServerPool) -> None:
    """Each is hung up at another moment of its prefill, which takes many chunks."""
    server = servers.get(*TIERED, "--chunked-prefill-size", "256", "--enable-mixed-chunk")
    asked = prompts([3000] * 12, start=30_000)

    def hang_up(turn: int) -> None:
        body = {"input_ids": asked[turn], "sampling_params": {"max_new_tokens": 100}}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/generate", json=body, timeout=0.4 * (turn + 1))

    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(hang_up, range(len(asked))))
    (after,) = prompts([600])
    assert len(server.generate(after, max_new_tokens=8, ignore_eos=True)["output_ids"]) == 8
    assert_idle(server)


def test_a_retracted_request_goes_on_as_if_all_so_far_was_sent_afresh(tiered: Server) -> None:
    """Alone, so that both compute in batches of one and are equal to the bit."""
    (prompt,), tokens = prompts([560], start=50_000), 60
    logged = len(tiered.log_text())
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(answer, tiered, prompt, tokens)
        while len(_tiers_held(tiered)) < 3:
            time.sleep(0.05)
        tiered.post("/pause_generation", {"mode": "retract"})
        while report(tiered)["requests"]:
            time.sleep(0.05)
        tiered.post("/continue_generation", {})
        whole = future.result()
    resumed = _resumed(tiered.log_text()[logged:], len(prompt), tokens)
    generated = resumed - len(prompt)
    tiered.flush_cache()
    afresh = answer(tiered, prompt + whole.tokens[:generated], tokens - generated)
    assert afresh.tokens == whole.tokens[generated:]
    first, second = tiers_at_events(tiered, prompt=resumed)[-2:]
    assert len(first) > 3
    assert second == first


def _resumed(log: str, prompt: int, tokens: int) -> int:
    """The length at which a request was retracted, which it had as its prompt then."""
    pattern = r"prompt of (\d+) routed at \1: "
    lengths = {int(length) for length in re.findall(pattern, log)}
    (resumed,) = (length for length in lengths if prompt < length < prompt + tokens)
    return resumed


def _tiers_held(server: Server) -> set[str]:
    """Tiers that some window is in now."""
    return {tier for tier, layers in report(server)["layers"].items() if sum(layers)}


@pytest.mark.parametrize("flushes", [5, pytest.param(120, marks=pytest.mark.slow)])
def test_flushes_right_after_a_request(tiered: Server, flushes: int) -> None:
    (prompt,) = prompts([100])
    expected = tiered.generate(prompt, max_new_tokens=4)["output_ids"]
    for _ in range(flushes):
        tiered.flush_cache()
        assert tiered.generate(prompt, max_new_tokens=4)["output_ids"] == expected


def test_three_samples_of_one_prompt(tiered: Server) -> None:
    (prompt,) = prompts([600])
    params = {"n": 3, "temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    samples = tiered.post("/generate", {"input_ids": prompt, "sampling_params": params})
    assert [len(sample["output_ids"]) for sample in samples] == [16] * 3
    assert len({tuple(sample["output_ids"]) for sample in samples}) == 3


def test_constrained_output_is_json_of_the_schema(tiered: Server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "inhabitants": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        },
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    text = tiered.chat("Name a city and its inhabitants.", response_format=wanted, max_tokens=128)
    found = json.loads(text)
    assert isinstance(found["city"], str)
    assert isinstance(found["inhabitants"], int)


def test_logprobs_are_those_of_the_greedy_tokens(tiered: Server) -> None:
    (prompt,) = prompts([700])
    found = answer(tiered, prompt, tokens=16, num_best=3)
    assert all(len(step) == 3 for step in found.best)
    # Logits are bfloat16, so two tokens may share the best one.
    for token, step in zip(found.tokens, found.best, strict=True):
        assert step[token] == max(step.values())
    assert all(logprob <= 0 for step in found.best for logprob in step.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "lengths", "tokens"),
    [
        # Below min_context nothing is coded.
        (("--max-total-tokens", "1200"), [250, 260, 270], 150),
        (
            ("--max-total-tokens", "2300", "--context-length", "1024", *EVERYTHING_FULL),
            [520, 530, 540],
            300,
        ),
    ],
)
def test_what_is_full_survives_retraction(
    servers: ServerPool, flags: tuple[str, ...], lengths: list[int], tokens: int
) -> None:
    # Room for two and a half of them once they have grown, but SGLang expects them to end early.
    server = servers.get(*TIERED, *flags, "--schedule-conservativeness", "0.01")
    asked = prompts(lengths, start=60_000)
    # With ignore_eos SGLang would expect each of them to use all its tokens.
    endless = {"min_new_tokens": tokens}

    def ask_in_turn(turn: int) -> Answer:
        # One in each scheduling pass, since a pass reserves in full for the ones it admits.
        time.sleep(2 * turn)
        return answer(server, asked[turn], tokens, **endless)

    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(ask_in_turn, range(len(asked))))
    assert "Retract requests" in server.log_text()
    assert_idle(server)
    # The last one, whose prompt was prefilled again, lost nothing; idle now, the server has
    # forgotten it.
    alone = answer(server, asked[-1], tokens, **endless)
    assert_same_up_to_a_near_tie(alone, answers[-1])


@pytest.mark.slow
def test_a_prompt_that_can_never_fit_is_told_what_it_would_need(servers: ServerPool) -> None:
    server = servers.get(
        *TIERED, "--max-total-tokens", "1200", "--schedule-conservativeness", "0.01"
    )
    (prompt,) = prompts([7500])
    with pytest.raises(httpx.HTTPStatusError) as error:
        server.generate(prompt, max_new_tokens=1)
    assert error.value.response.status_code == 400
    assert re.search(
        r"a prompt of 7500 tokens takes [\d.]+ MiB of windows, but this server has [\d.]+ MiB",
        error.value.response.text,
    )
    assert_idle(server)


@pytest.mark.slow
def test_requests_that_are_retracted_after_a_demotion_all_complete(servers: ServerPool) -> None:
    flags = ("--max-total-tokens", "1300", "--schedule-conservativeness", "0.01")
    server = servers.get(*TIERED, *flags, "--kv-tiering-budget", "0.6")
    asked = prompts([520, 528, 536], start=70_000)

    def ask_in_turn(turn: int) -> int:
        time.sleep(3 * turn)
        params = {"max_new_tokens": 250, "min_new_tokens": 250}
        return len(server.generate(asked[turn], **params)["output_ids"])

    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(ask_in_turn, range(len(asked)))) == [250] * len(asked)
    assert "Retract requests" in server.log_text()
    assert report(server)["counters"]["demoted"] > 0
    assert_idle(server)


@pytest.mark.slow
def test_a_request_of_higher_priority_takes_the_place_of_others(servers: ServerPool) -> None:
    """Two long answers fill the memory; what comes third and matters more is ready first."""
    server = servers.get(
        *TIERED, "--max-total-tokens", "1500", "--context-length", "1024",
        "--enable-priority-scheduling",
    )  # fmt: skip
    *low, high = prompts([500, 480, 450], start=64_000)
    ended: list[str] = []

    def ask(prompt: list[int], tokens: int, priority: int) -> int:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "priority": priority}
        answer = server.post("/generate", body)
        ended.append("high" if priority else "low")
        return len(answer["output_ids"])

    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(ask, prompt, 200, 0) for prompt in low]
        while report(server)["requests"] < 2:
            time.sleep(0.05)
        answers.append(threads.submit(ask, high, 8, 100))
        assert [answer.result() for answer in answers] == [200, 200, 8]
    assert ended == ["high", "low", "low"]
    assert_idle(server)
