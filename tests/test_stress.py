"""`sglang-qevict stress`: mixes, the requests they become, and what a run reports."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fake_sglang import FakeSGLang
from sglang_qevict import cli
from sglang_qevict.stress.mix import (
    Arrival,
    CheckKind,
    Distribution,
    Kind,
    Mix,
    Process,
    read_mix,
)
from sglang_qevict.stress.problem import Problem
from sglang_qevict.stress.records import Outcome, Record, Run, Sample
from sglang_qevict.stress.summary import alike, fairness, quantile, summarize, unmet
from sglang_qevict.stress.trace import read_trace
from sglang_qevict.stress.workload import Check, Texts, Workload, arrivals

CONFIGS = Path(__file__).parents[1] / "configs" / "stress"


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts.load(lambda texts: [[ord(x) for x in text] for text in texts], begin=[1])


def written(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "mix.yaml"
    path.write_text(content)
    return path


def mix_of(tmp_path: Path, tenants: str) -> Mix:
    return read_mix(written(tmp_path, f"tenants: [{tenants}]"))


# --- mixes ---


def test_every_mix_that_is_shipped_can_be_read() -> None:
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert {path.stem for path in paths} >= {"mixed", "quick", "soak"}
    for path in paths:
        assert read_mix(path).tenants
    mixed = read_mix(CONFIGS / "mixed.yaml")
    assert len(mixed.tenants) == 20
    for name in ("mixed", "quick"):
        kinds = {tenant.kind for tenant in read_mix(CONFIGS / f"{name}.yaml").tenants}
        assert kinds == set(Kind) - {Kind.TRACE}


def test_a_count_makes_tenants_with_numbers_and_salts_of_their_own(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, "{name: a, kind: chat, count: 2, salt: own}, {kind: batch, salt: x}")
    assert [(t.name, t.salt) for t in mix.tenants] == [
        ("a-1", "a-1"),
        ("a-2", "a-2"),
        ("batch", "x"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file must be a mapping"),
        ("tenants: []", "tenants must be a list of one tenant or more; it is []"),
        ("tenant: []", "unknown key tenant: use one of seed"),
        ("tenants: [{kind: chat}]\nseconds: -1", "seconds must be a number above 0; it is -1"),
        ("tenants: [{kind: chat}]\nseed: yes", "seed must be a whole number"),
        ("tenants: [{kind: chta}]", "tenants[0].kind must be one of chat, document"),
        ("tenants: [{kind: chat, lines: 3}]", "lines is for kind oscillator only, not chat"),
        ("tenants: [{kind: oscillator, lines: 65}]", "lines must be a whole number, 1 to 64"),
        ("tenants: [{kind: chat, colour: 1}]", "unknown key tenants[0].colour"),
        ("tenants: [{kind: chat, arrival: {process: poisson}}]", "arrival.rate must be a number"),
        (
            "tenants: [{kind: chat, arrival: {process: closed, users: 1, rate: 2}}]",
            "arrival.rate does not fit process closed, which takes users",
        ),
        ("tenants: [{kind: chat, prompt_tokens: 0}]", "prompt_tokens must be a number"),
        ("tenants: [{kind: chat, prompt_tokens: .inf}]", "it is inf"),
        ("tenants: [{kind: chat, prompt_tokens: {uniform: [9, 2]}}]", "a not above b"),
        ("tenants: [{kind: chat, prompt_tokens: {normal: [9, 2]}}]", "{uniform: [a, b]}"),
        ("tenants: [{kind: chat, turns: {lognormal: [2, -1]}}]", "numbers of 1 or more"),
        ("tenants: [{kind: chat, abort_rate: 2}]", "abort_rate must be a number, 0 to 1"),
        ("tenants: [{kind: flooder, check: needle}]", "has nothing to ask for"),
        ("tenants: [{kind: chat}, {kind: chat}]", "two tenants are called 'chat'"),
        ("tenants: [{kind: trace}]", "trace must be the file of a Mooncake trace"),
        (
            "tenants: [{kind: trace, trace: a.jsonl, output_tokens: 3}]",
            "output_tokens is what the trace says: leave it out",
        ),
        ("tenants: [{kind: chat}]\nrequire: {needles: 1}", "unknown key require.needles"),
        ("tenants: [{", "is no YAML at line 1"),
    ],
)
def test_a_wrong_mix_is_one_sentence_with_file_and_key(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, content)
    assert cli.main(["stress", str(path), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"sglang-qevict: {path}")
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# --- distributions and arrivals ---


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Distribution("constant", (40,), 1), 40, 0),
        (Distribution("uniform", (100, 300), 1), 200, 200 / 12**0.5),
        (Distribution("exponential", (5,), 0), 5, 5),
        (Distribution("choice", (1, 3), 1), 2, 1),
        (Distribution("lognormal", (100, 0.5), 1), 100 * 2.71828 ** (0.125), 60.4),
    ],
)
def test_a_distribution_has_its_mean(
    distribution: Distribution, mean: float, deviation: float
) -> None:
    rng, count = random.Random(0), 20_000
    drawn = [distribution.draw(rng) for _ in range(count)]
    # Five standard errors.
    assert sum(drawn) / count == pytest.approx(mean, abs=5 * deviation / count**0.5 + 1e-9)


def test_a_distribution_keeps_within_its_bounds() -> None:
    rng, wide = random.Random(0), Distribution("lognormal", (100, 2), 1, 150)
    drawn = [wide.draw(rng) for _ in range(1000)]
    assert max(drawn) == 150
    assert min(drawn) >= 1


def test_arrivals_come_at_their_rates() -> None:
    def times(arrival: Arrival) -> list[float]:
        return list(arrivals(arrival, 1000, random.Random(1)))

    # Within five standard deviations of 2,000.
    assert abs(len(times(Arrival(Process.POISSON, rate=2))) - 2000) < 5 * 2000**0.5
    constant = times(Arrival(Process.CONSTANT, rate=2))
    assert len(constant) == 2000
    assert {round(b - a, 6) for a, b in pairwise(constant)} == {0.5}
    bursts = times(Arrival(Process.BURSTS, size=4, every_seconds=10))
    assert [bursts.count(at) for at in sorted(set(bursts))] == [4] * 100
    assert times(Arrival(Process.CLOSED, users=3)) == []


# --- requests ---


def test_the_same_seed_gives_the_same_requests_and_another_one_others(texts: Texts) -> None:
    mix = read_mix(CONFIGS / "mixed.yaml")
    other = dataclasses.replace(mix, seed=1)
    for tenant in mix.tenants:
        ours, again, others = (
            [Workload(m, texts, 8192).session(tenant, n) for n in range(2)]
            for m in (mix, mix, other)
        )
        assert ours == again
        assert ours != others
        assert Workload(mix, texts, 8192).times(tenant) == Workload(mix, texts, 8192).times(tenant)


def test_prompts_are_as_long_as_told_and_hold_what_is_asked_for(
    texts: Texts, tmp_path: Path
) -> None:
    common = "prompt_tokens: 900, turn_tokens: 300, output_tokens: 24"
    mix = mix_of(
        tmp_path,
        f"{{name: plain, kind: chat, system_tokens: 50, turns: 3, {common}}},"
        f"{{name: needle, kind: document, turns: 2, {common}}},"
        f"{{name: copy, kind: chat, check: copy, system_tokens: 0, turns: 1, {common}}}",
    )
    plain, needle, copy = (Workload(mix, texts, 8192).session(t, 5) for t in mix.tenants)
    # One token begins every prompt.
    assert [len(turn.tokens) for turn in plain.turns] == [1 + 50 + 900, 300, 300]
    assert [len(turn.tokens) for turn in needle.turns] == [1 + 900, 300]
    document = "".join(map(chr, needle.turns[0].tokens))
    for turn in needle.turns:
        assert turn.check is not None
        question = "".join(map(chr, turn.tokens)).rpartition("Answer: ")[2]
        assert f"{question} {turn.check.expected}." in document
    [turn] = copy.turns
    assert len(turn.tokens) == 1 + 900
    assert turn.check is not None
    listed, again = "".join(map(chr, turn.tokens)).split("\n\nThe same list once more:\n")
    assert turn.check.expected.splitlines()[0] in listed.replace("\n ", "\n")
    assert again.strip() in listed


def test_tenants_of_one_system_prompt_share_it_and_others_do_not(
    texts: Texts, tmp_path: Path
) -> None:
    mix = mix_of(
        tmp_path,
        "{name: a, kind: chat, system: s, system_tokens: 64},"
        "{name: b, kind: chat, system: s, system_tokens: 64},"
        "{name: c, kind: chat, system_tokens: 64}",
    )
    a, b, c = (Workload(mix, texts, 8192).session(t, 0).turns[0].tokens[:65] for t in mix.tenants)
    assert a == b != c


def test_an_oscillator_has_a_line_in_each_half_and_copies_them_in_turn(
    texts: Texts, tmp_path: Path
) -> None:
    mix = mix_of(tmp_path, "{kind: oscillator, lines: 2, period_tokens: 24, prompt_tokens: 1500}")
    [turn] = Workload(mix, texts, 8192).session(mix.tenants[0], 0).turns
    assert turn.grammar is not None
    answer = json.loads(turn.grammar.removeprefix("root ::= "))
    assert [line[:3] for line in answer.splitlines()[:5]] == ["A1:", "B1:", "A2:", "B2:", "A1:"]
    prompt = "".join(map(chr, turn.tokens))
    places = [prompt.index(line + "\n") for line in answer.splitlines()[:4]]
    assert max(places[0], places[2]) < 751 < min(places[1], places[3])
    # Lines begin with windows, whatever a prompt begins with.
    assert {place % 24 for place in places} == {0}


def test_a_thrasher_takes_its_prefixes_in_turn(texts: Texts, tmp_path: Path) -> None:
    mix = mix_of(tmp_path, "{kind: thrasher, prefixes: 3, prompt_tokens: 80}")
    work = Workload(mix, texts, 8192)
    prompts = [work.session(mix.tenants[0], n).turns[0].tokens for n in range(6)]
    assert len({prompt[:70] for prompt in prompts}) == 3
    assert [prompt[:70] for prompt in prompts[:3]] == [prompt[:70] for prompt in prompts[3:]]
    assert len(set(prompts)) == 6


def test_no_request_is_longer_than_the_model_takes(texts: Texts, tmp_path: Path) -> None:
    mix = mix_of(
        tmp_path,
        "{kind: agent, turns: 50}, {name: long, kind: chat, prompt_tokens: 5000, turns: 1}",
    )
    for tenant in mix.tenants:
        session = Workload(mix, texts, 2048).session(tenant, 0)
        total = sum(len(turn.tokens) + turn.output_tokens for turn in session.turns)
        assert 1500 < total <= 2048


def test_what_is_cut_to_fit_is_not_asked_for(texts: Texts, tmp_path: Path) -> None:
    mix = mix_of(
        tmp_path,
        "{name: a, kind: document, system_tokens: 100, prompt_tokens: 5000, output_tokens: 24},"
        "{name: b, kind: document, system_tokens: 1900, prompt_tokens: 5000, output_tokens: 24}",
    )
    room = 2048 - 24
    short, cut = (Workload(mix, texts, 2048).session(t, 0).turns[0] for t in mix.tenants)
    # The text around the facts gives way, then the facts themselves.
    assert len(short.tokens) == len(cut.tokens) == room
    assert short.check is not None
    assert f"{short.check.expected}." in "".join(map(chr, short.tokens))
    assert cut.check is None


def test_sessions_to_serve_alone_are_spread_over_all_of_a_tenant(
    texts: Texts, tmp_path: Path
) -> None:
    mix = mix_of(
        tmp_path,
        "{kind: batch, arrival: {process: constant, rate: 1}},"
        "{kind: thrasher, arrival: {process: constant, rate: 0.03}},"
        "{kind: agent, arrival: {process: closed, users: 2}}",
    )
    work = Workload(mix, texts, 2048)
    assert [work.sample(tenant, 4) for tenant in mix.tenants] == [
        [0, 15, 30, 45],
        list(range(len(work.times(mix.tenants[1])))),
        [0, 1, 2, 3],
    ]
    assert len(work.times(mix.tenants[1])) < 4


@pytest.mark.parametrize(
    ("answer", "share"), [(" a 1\n b 2\n c", 1.0), (" a 1\n b", 1.0), (" a 9", 2 / 3), ("", 0.0)]
)
def test_a_copy_counts_as_far_as_it_is_right(answer: str, share: float) -> None:
    assert Check(CheckKind.COPY, "a 1\n b 2").share(answer) == pytest.approx(share)


@pytest.mark.parametrize(
    ("answer", "share"), [(" 1009. Then 1046", 1), (" 1046, 1009", 0), (" 10091", 0), (" none", 0)]
)
def test_a_needle_is_found_by_an_answer_that_names_it_first(answer: str, share: float) -> None:
    assert Check(CheckKind.NEEDLE, "1009").share(answer) == share


# --- traces ---


def trace_line(**given: Any) -> str:
    line = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
    return json.dumps({**line, **given})


def test_a_trace_keeps_its_times_lengths_and_common_blocks(texts: Texts, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        trace_line(timestamp=5000, hash_ids=[1, 2, 4]),
        trace_line(timestamp=3000),
        trace_line(timestamp=9000, input_length=90_000, hash_ids=list(range(176))),
    ]
    path.write_text("\n".join(lines) + "\n")
    mix = read_mix(path)
    assert mix.seconds == 7
    work = Workload(mix, texts, 4096)
    assert work.times(mix.tenants[0]) == [0, 2, 6]
    first, second, third = (work.session(mix.tenants[0], n).turns[0] for n in range(3))
    assert len(first.tokens) == len(second.tokens) == 1100
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:] != second.tokens[1024:]
    assert len(third.tokens) == 4091  # what the model takes beside five tokens of answer
    assert third.tokens[512:1536] == first.tokens[:1024]


def test_clients_of_a_trace_leave_as_the_mix_says(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("\n".join([trace_line(output_length=50)] * 40))
    mix = mix_of(tmp_path, "{kind: trace, trace: trace.jsonl, abort_rate: 0.5}")
    work = Workload(mix, texts, 4096)
    turns = [work.session(mix.tenants[0], n).turns[0] for n in range(40)]
    left = [turn.abort_after for turn in turns if turn.abort_after is not None]
    # Five standard deviations of a fair coin.
    assert 4 < len(left) < 36
    assert all(1 <= after < 50 for after in left)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "trace.jsonl:1 is no JSON"),
        ('{"timestamp": 1}', "lacks one of timestamp, input_length"),
        (trace_line(input_length=0), "both lengths whole numbers above 0"),
        (trace_line(hash_ids=["a"]), "hash_ids a list of whole numbers"),
        ("", "has no requests"),
    ],
)
def test_what_is_no_trace_is_one_sentence(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(Problem, match=message):
        read_trace(path)


# --- numbers ---


def record(**given: Any) -> Record:
    base = Record("a", 0, 0, Outcome.DONE, 0.0, 10, 4, "h", (1, 2, 3, 4), 0.5, 2.0, 2.0, 0.5, 0.6)
    return dataclasses.replace(base, **given)


def test_quantiles_are_values_that_were_measured() -> None:
    assert [quantile([3, 1, 2, 4], q) for q in (0, 0.5, 0.75, 0.99, 1)] == [1, 2, 3, 4, 4]
    assert quantile([], 0.5) is None


def test_who_waited_in_vain_counts_among_those_who_waited(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, "{name: a, kind: chat}")
    waiting = [
        record(outcome=how, first_seconds=None, latency_seconds=None, ended_seconds=60.0)
        for how in (Outcome.CUT, Outcome.TIMEOUT)
    ]
    refused = record(outcome=Outcome.REFUSED, first_seconds=None, ended_seconds=0.001)
    [row] = summarize(Run(mix, {}, [record(), record(), *waiting, refused]))
    assert (row.first_p50, row.first_p90) == (0.5, 60.0)


def test_answers_are_compared_only_where_prompts_are_equal() -> None:
    alone = [record(), record(session=1), record(session=2), record(session=3)]
    ours = [
        record(),
        record(session=1, output_ids=(1, 9, 3, 4)),
        record(session=2, prompt_hash="other"),
        record(session=3, outcome=Outcome.CUT),
        record(session=4),
    ]
    assert alike(ours, alone) == (2, 1, 0.25)


def test_fairness_is_the_largest_slowdown_over_the_smallest() -> None:
    alone = [record(tenant=t, session=n, latency_seconds=1.0) for t in "ab" for n in range(3)]
    ours = [record(tenant="a", session=n, latency_seconds=2.0) for n in range(3)]
    ours += [record(tenant="b", session=n, latency_seconds=s) for n, s in enumerate((5, 8, 90))]
    fair = fairness(ours, alone)
    assert fair.slowdown == {"a": 2, "b": 8}
    assert fair.ratio == 4
    assert fair.jain == pytest.approx(100 / (2 * 68))
    assert fairness(ours, []).ratio is None


def test_a_tenants_churn_is_what_its_counter_gained(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, "{name: a, kind: chat}, {name: b, kind: chat}")
    churn = [
        {"a": (1.0, 10.0)},
        {"a": (2.0, 20.0), "b": (0.5, 5.0)},
        {"a": (4.0, 30.0), "b": (1.0, 10.0)},
    ]
    samples = [Sample(float(n), 0, 0, 0, churn=seen) for n, seen in enumerate(churn)]
    a, b = summarize(Run(mix, {}, [], samples))
    assert (a.churn, b.churn) == (pytest.approx(3 / 20), pytest.approx(0.1))


def test_what_a_mix_requires_is_told_where_it_is_not_reached(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "tenants: [{name: a, kind: document}]\nrequire: {needle: 0.6, copy: 0, error_rate: 0.2}",
    )
    mix = read_mix(path)
    right, wrong = record(check=1.0), record(check=0.0)
    failed = record(outcome=Outcome.REFUSED)
    assert unmet(Run(mix, {}, [right, right, wrong, record()])) == []
    assert unmet(Run(mix, {}, [right, wrong, failed])) == [
        "1 of 2 needle answers are right, 60% are required",
        "1 of 3 requests failed, at most 20% are allowed",
    ]
    # What was never asked was not reached.
    assert unmet(Run(mix, {}, [])) == ["0 of 0 needle answers are right, 60% are required"]


# --- whole runs ---

SMALL = """
seconds: 1
drain_seconds: 20
baseline_sessions: 1
tenants:
  - {name: chat, kind: chat, arrival: {process: constant, rate: 4}, turns: 2, think_seconds: 0.01,
     output_tokens: 5, priority: 3}
  - {name: leaver, kind: chat, arrival: {process: constant, rate: 4}, turns: 1,
     output_tokens: 200, abort_rate: 1, salt: own}
  - {name: agent, kind: agent, output_tokens: 5, turns: 2, prompt_tokens: 50}
"""


def stress(server: FakeSGLang, tmp_path: Path, *flags: str, mix: str = SMALL) -> int:
    path = written(tmp_path, mix)
    return cli.main(["stress", str(path), server.url, "--out", str(tmp_path / "out"), *flags])


def reported(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "out" / "report.json").read_text())


def test_a_run_has_tables_plots_and_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeSGLang(tiered=True) as server:
        assert stress(server, tmp_path, "--baseline") == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out == f"{out / 'index.html'}\n"
    report = reported(tmp_path)
    tenants = report["tenants"]
    assert 4 <= tenants["chat"]["done"] == tenants["chat"]["sent"] <= 8
    assert tenants["chat"]["same_as_alone"] == 1
    assert tenants["leaver"]["left"] == tenants["leaver"]["sent"] == 4
    assert tenants["agent"]["errors"] == 0
    assert tenants["agent"]["slowdown"] > 0
    assert report["totals"]["fairness_ratio"] >= 1
    assert report["alone"]["promotions"]["chat"] == pytest.approx(100)
    page = (out / "index.html").read_text()
    for name in ("latency", "requests", "tiers", "moves", "load", "fairness"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == 6
    assert "http" not in page.replace(server.url, "")
    with (out / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == report["totals"]["requests"]
    assert {row["tenant"] for row in rows} == set(tenants)
    # The same requests again, beside the baseline that is there.
    with FakeSGLang() as server:
        moved = out.rename(tmp_path / "earlier")
        assert stress(server, tmp_path, "--baseline-from", str(moved)) == 0
    assert reported(tmp_path)["tenants"]["chat"]["same_as_alone"] == 1
    assert not (out / "tiers.png").exists()


def test_a_request_says_whose_it_is(tmp_path: Path) -> None:
    with FakeSGLang(priorities=True) as server:
        assert stress(server, tmp_path) == 0
    of = {body["routing_key"]: body for body in server.bodies}
    assert of["chat"]["priority"] == 3
    assert "priority" not in of["agent"]
    assert of["chat"]["cache_salt"] == of["agent"]["cache_salt"] != of["leaver"]["cache_salt"]
    assert len({body["rid"] for body in server.bodies}) == len(server.bodies)
    assert any(rid in [body["rid"] for body in server.bodies] for rid in server.left)
    # The next turn begins with the one before and its answer.
    turns = [b["input_ids"] for b in server.bodies if b["rid"].endswith(("chat-0-0", "chat-0-1"))]
    assert turns[1][: len(turns[0]) + 5] == [*turns[0], *range(7, 12)]


def test_sessions_served_alone_share_nothing_but_among_their_own_turns(tmp_path: Path) -> None:
    mix = SMALL.replace("baseline_sessions: 1", "baseline_sessions: 2")
    with FakeSGLang() as server:
        assert stress(server, tmp_path, "--baseline", mix=mix) == 0
    alone = [body for body in server.bodies if "-alone-" in body["rid"]]
    salts: dict[str, set[str]] = {}
    for body in alone:
        salts.setdefault(body["rid"].rpartition("-")[0], set()).add(body["cache_salt"])
    assert len(salts) == 6
    assert all(len(of_session) == 1 for of_session in salts.values())
    assert len(set.union(*salts.values())) == 6


@pytest.mark.parametrize("incremental", [False, True])
def test_an_answer_is_whole_however_it_comes(incremental: bool, tmp_path: Path) -> None:
    mix = """
        seconds: 1
        tenants: [{kind: agent, turns: 2, output_tokens: 8, prompt_tokens: 50, system_tokens: 0}]
    """
    with FakeSGLang(token_seconds=0.03, interval=4, incremental=incremental) as server:
        assert stress(server, tmp_path, mix=mix) == 0
    first, second, *_ = (body["input_ids"] for body in server.bodies)
    assert second[: len(first) + 8] == [*first, *range(7, 15)]
    # Four tokens come together, then four more, which took four times 30 ms and no seventh of it.
    assert reported(tmp_path)["tenants"]["agent"]["token_p50"] > 0.028


def test_priorities_are_left_out_where_a_server_has_none(tmp_path: Path) -> None:
    with FakeSGLang() as server:
        assert stress(server, tmp_path) == 0
    assert not any("priority" in body for body in server.bodies)
    assert "--enable-priority-scheduling" in reported(tmp_path)["notes"][0]


def test_refused_requests_are_errors_and_can_be_required_not_to_be(tmp_path: Path) -> None:
    with FakeSGLang(refuse=503) as server:
        assert stress(server, tmp_path) == 0
        assert stress(server, tmp_path, mix=SMALL + "require: {error_rate: 0.1}\n") == 1
    report = reported(tmp_path)
    [error] = report["errors"]
    assert error == "refused: status 503: no room"
    assert "requests failed, at most 10% are allowed" in report["unmet"][0]


def test_a_server_that_dies_is_reported_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_qevict.stress.drive._DEAD_SECONDS", 1.0)
    with FakeSGLang(die_after=3) as server:
        assert stress(server, tmp_path) == 1
    assert "does not answer any more" in " ".join(capsys.readouterr().err.split())
    report = reported(tmp_path)
    assert "does not answer any more" in report["run"]["died"]
    assert report["totals"]["lost"] > 0


def test_a_server_that_dies_while_tenants_are_alone_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_qevict.stress.drive._DEAD_SECONDS", 1.0)
    with FakeSGLang(die_after=1, tiered=True) as server:
        assert stress(server, tmp_path, "--baseline") == 1
    report = reported(tmp_path)
    assert "does not answer any more" in report["run"]["died"]
    assert report["totals"]["requests"] == 0


def test_what_is_no_answer_of_sglangs_is_an_error_of_the_request(tmp_path: Path) -> None:
    with FakeSGLang(garbled=True) as server:
        assert stress(server, tmp_path) == 0
    report = reported(tmp_path)
    assert report["totals"]["done"] == 0
    assert list(report["errors"]) == ["lost: no answer of SGLang's: KeyError('meta_info')"]


def test_a_folder_that_can_not_be_written_is_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with FakeSGLang() as server:
        for folder in (Path("/proc/self"), tmp_path / "file" / "report"):
            assert stress(server, tmp_path, "--out", str(folder)) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"sglang-qevict: {folder} can't be written (")
            assert told.count("\n") == 1
    assert server.bodies == []


def test_a_report_that_finds_no_room_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sglang_qevict.stress.report._write_tables", full)
    with FakeSGLang() as server:
        assert stress(server, tmp_path) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sglang-qevict: the report can't be written")
    assert "No space left" in last


def test_an_interrupt_ends_with_a_report_of_what_there_is(tmp_path: Path) -> None:
    with FakeSGLang() as server:

        def interrupt() -> None:
            while not any("agent-1-0" in body["rid"] for body in server.bodies):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        assert stress(server, tmp_path, "--seconds", "600") == 130
    report = reported(tmp_path)
    assert report["run"]["stopped"]
    assert report["tenants"]["agent"]["done"] > 0
    assert report["run"]["seconds"] < 60


@pytest.mark.parametrize(
    ("key", "message"), [("wrong", "refuses this key"), (None, "refuses this key")]
)
def test_a_wrong_key_is_one_sentence(
    key: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeSGLang(api_key="right") as server:
        assert stress(server, tmp_path, *(("--api-key", key) if key else ())) == 2
        told = capsys.readouterr().err
        assert told.startswith("sglang-qevict: ")
        assert message in told
        assert told.count("\n") == 1
        assert stress(server, tmp_path, "--api-key", "right") == 0


@pytest.mark.parametrize("address", ["127.0.0.1:1", "http://[", "no host at all", "ftp://x"])
def test_an_address_where_nothing_answers_is_one_sentence(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SMALL)
    assert cli.main(["stress", str(path), address, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("sglang-qevict: ")
    assert told.err.count("\n") == 1


def test_what_is_no_baseline_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, SMALL)
    assert cli.main(["stress", str(path), "--baseline-from", str(tmp_path)]) == 2
    assert "--baseline" in capsys.readouterr().err
    (tmp_path / "baseline.json").write_text("[{}]")
    assert cli.main(["stress", str(path), "--baseline-from", str(tmp_path)]) == 2
    assert "is no baseline" in capsys.readouterr().err
