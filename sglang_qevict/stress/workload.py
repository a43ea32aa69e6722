"""A mix and a seed as requests: the same ones on every run.

A session depends on the seed, its tenant's name and its own number alone, so neither the speed of
a server nor other tenants change it. Prompts are token ids, so their lengths are exact: slices of
Python's own help topics, and sentences from a fixed list. The server's tokenizer turns both into
ids once, so other requests come of another tokenizer, or of the topics of another Python.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from sglang_qevict.stress.mix import (
    MAX_LINES,
    Arrival,
    CheckKind,
    Kind,
    Mix,
    Process,
    Tenant,
)
from sglang_qevict.stress.trace import TraceRequest, read_trace

__all__ = ["Check", "Session", "Texts", "Tokenize", "Turn", "Workload", "arrivals"]

Tokenize = Callable[[Sequence[str]], list[list[int]]]
"""Texts to token ids, without special tokens."""

_CITIES = (
    "Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Riga", "Sofia", "Madrid", "Cairo",
    "Lima", "Quito", "Delhi", "Tokyo", "Seoul", "Hanoi",
)  # fmt: skip
_WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "market", "needle", "orange", "pencil", "rabbit", "saddle",
    "tunnel", "violin", "window", "yellow", "basket", "copper", "dragon", "flower",
)  # fmt: skip
_CODES = tuple(str(1009 + 37 * number) for number in range(240))
_COPY_AGAIN = "\n\nThe same list once more:\n"
_OSCILLATE = (
    "\n\nCopy line 1 of A, then line 1 of B, then line 2 of A, and so on; begin again at the end."
    "\n\n"
)


def _fact(city: str) -> str:
    return f"\n\nThe access code of the {city} office is"


def _question(city: str) -> str:
    return (
        f"\n\nQuestion: What is the access code of the {city} office?\n"
        f"Answer: The access code of the {city} office is"
    )


def _word(word: str) -> str:
    return f" {word}"


def _label(half: str, number: int) -> str:
    return f"{half}{number + 1}:"


def _phrases() -> list[str]:
    """Every text that is put between slices of the long one."""
    labels = [_label(half, number) for half in "AB" for number in range(MAX_LINES)]
    return [
        *map(_fact, _CITIES), *map(_question, _CITIES), *map(_word, _CODES), *map(_word, _WORDS),
        *labels, ".\n\n", "\n", "\n\n", _COPY_AGAIN, _OSCILLATE,
    ]  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Token ids of a model: a long text, phrases, and what a prompt begins with."""

    long: Sequence[int]
    phrases: Mapping[str, tuple[int, ...]]
    begin: tuple[int, ...] = ()

    @classmethod
    def load(cls, tokenize: Tokenize, begin: Sequence[int] = ()) -> Texts:
        """Python's help topics, some 110,000 tokens, and all phrases, in one call."""
        from pydoc_data.topics import topics

        phrases = _phrases()
        long = "\n\n".join(topics[name] for name in sorted(topics))
        ids = tokenize([long, *phrases])
        return cls(
            tuple(ids[0]), dict(zip(phrases, map(tuple, ids[1:]), strict=True)), tuple(begin)
        )

    def slice(self, rng: random.Random, length: int) -> tuple[int, ...]:
        """So many tokens from a random place; the text goes on at its beginning."""
        start = rng.randrange(len(self.long))
        part = list(self.long[start : start + length])
        while len(part) < length:
            part += self.long[: length - len(part)]
        return tuple(part)


@dataclass(frozen=True)
class Check:
    """What a right answer is: of a needle, its first number; of a copy, how it begins, as long as
    either reaches."""

    kind: CheckKind
    expected: str

    def share(self, answer: str) -> float:
        """How much of it is right, from 0 to 1."""
        if self.kind is CheckKind.NEEDLE:
            number = re.search(r"\d+", answer)
            return float(number is not None and number.group() == self.expected)
        answer = answer.strip()
        length = min(len(answer), len(self.expected))
        right = 0
        while right < length and answer[right] == self.expected[right]:
            right += 1
        return right / max(1, length)


@dataclass(frozen=True)
class Turn:
    """One request. tokens: what is new in its prompt, after the answer before it.

    abort_after: the client leaves after so many tokens of the answer. grammar: an EBNF that the
    answer must follow.
    """

    tokens: tuple[int, ...]
    output_tokens: int
    think_seconds: float
    check: Check | None = None
    abort_after: int | None = None
    grammar: str | None = None


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, each with all before it in its prompt."""

    tenant: Tenant
    number: int
    turns: tuple[Turn, ...]


class Workload:
    """All sessions of a mix.

    Args:
        max_context: tokens that prompt and answer may have together; longer prompts are cut, and
            sessions end before they would need more.
    """

    def __init__(self, mix: Mix, texts: Texts, max_context: int) -> None:
        self.mix = mix
        self._texts = texts
        self._max_context = max_context
        self._traces = {
            tenant.name: read_trace(tenant.trace.path) for tenant in mix.tenants if tenant.trace
        }

    def times(self, tenant: Tenant) -> list[float]:
        """Seconds at which a tenant's sessions begin, in order; none in a closed loop."""
        if tenant.trace is None:
            return list(arrivals(tenant.arrival, self.mix.seconds, self._rng(tenant, "arrivals")))
        times = [line.at_seconds / tenant.trace.speed for line in self._traces[tenant.name]]
        return [seconds for seconds in times if seconds < self.mix.seconds]

    def session(self, tenant: Tenant, number: int) -> Session:
        """One session; a trace has no more than its lines."""
        rng = self._rng(tenant, number)
        if tenant.trace is not None:
            turns = [self._traced(tenant, self._traces[tenant.name][number], rng)]
        else:
            turns = self._turns(tenant, number, rng)
        return Session(tenant, number, self._fitting(turns))

    def sample(self, tenant: Tenant, count: int) -> list[int]:
        """Numbers of so many sessions, evenly from all that begin; the first of a closed loop,
        where the server decides how many there are."""
        if tenant.trace is None and tenant.arrival.process is Process.CLOSED:
            return list(range(count))
        total = len(self.times(tenant))
        count = min(count, total)
        return [place * total // count for place in range(count)]

    def _rng(self, tenant: Tenant, what: object) -> random.Random:
        return random.Random(f"{self.mix.seed} {tenant.name} {what}")

    def _turns(self, tenant: Tenant, number: int, rng: random.Random) -> list[Turn]:
        count = tenant.turns.draw_count(rng)
        asked = [
            (city, rng.choice(_CODES)) for city in rng.sample(_CITIES, min(count, len(_CITIES)))
        ]
        turns = []
        for turn in range(count):
            system = () if turn else self._system(tenant)
            length = (tenant.turn_tokens if turn else tenant.prompt_tokens).draw_count(rng)
            output = tenant.output_tokens.draw_count(rng)
            length = min(length, max(1, self._max_context - output - len(system)))
            grammar = None
            check = None
            if tenant.kind is Kind.OSCILLATOR:
                tokens, grammar = self._oscillate(tenant, len(system), length, output, rng)
            elif tenant.kind is Kind.THRASHER:
                tokens = self._thrash(tenant, number, length, rng)
            elif tenant.check is CheckKind.NEEDLE:
                planted = [] if turn else asked
                tokens, check = self._needle(length, planted, asked[turn % len(asked)], rng)
            elif tenant.check is CheckKind.COPY:
                tokens, check = self._copy(length, output, rng)
            else:
                tokens = self._texts.slice(rng, length)
            abort_after = _abort_after(tenant, output, rng)
            think = tenant.think_seconds.draw(rng)
            turns.append(Turn(system + tokens, output, think, check, abort_after, grammar))
        return turns

    def _fitting(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns for which the model has room.

        A first one that needs more, whatever its length, loses its beginning, and is checked for
        nothing: what it asks for may have been there.
        """
        first = turns[0]
        output = min(first.output_tokens, self._max_context - 1)
        keep = self._max_context - output
        if len(first.tokens) > keep:
            first = replace(first, tokens=first.tokens[-keep:], check=None)
        fitting = [replace(first, output_tokens=output)]
        used = len(first.tokens) + output
        for turn in turns[1:]:
            used += len(turn.tokens) + turn.output_tokens
            if used > self._max_context:
                break
            fitting.append(turn)
        return tuple(fitting)

    # --- prompts ---

    def _system(self, tenant: Tenant) -> tuple[int, ...]:
        rng = random.Random(f"{self.mix.seed} system {tenant.system}")
        return self._texts.begin + self._texts.slice(rng, tenant.system_tokens)

    def _needle(
        self,
        length: int,
        planted: Sequence[tuple[str, str]],
        asked: tuple[str, str],
        rng: random.Random,
    ) -> tuple[tuple[int, ...], Check]:
        """Facts at random places of a text, then a question; no shorter than these need."""
        phrases = self._texts.phrases
        city, code = asked
        question = phrases[_question(city)]
        facts = [phrases[_fact(c)] + phrases[_word(n)] + phrases[".\n\n"] for c, n in planted]
        filler = self._texts.slice(rng, max(0, length - len(question) - sum(map(len, facts))))
        places = sorted(rng.randint(0, len(filler)) for _ in facts)
        tokens: list[int] = []
        for start, end, fact in zip([0, *places[:-1]], places, facts, strict=False):
            tokens += [*filler[start:end], *fact]
        tokens += [*filler[places[-1] if places else 0 :], *question]
        return tuple(tokens), Check(CheckKind.NEEDLE, code)

    def _copy(self, length: int, output: int, rng: random.Random) -> tuple[tuple[int, ...], Check]:
        """A text, a list of words and numbers, and its beginning again: the rest is asked for."""
        phrases = self._texts.phrases
        lines: list[str] = []
        ids: list[tuple[int, ...]] = []
        while sum(map(len, ids[1:])) < output and len(ids) < 200:
            words = [
                _word(rng.choice(_WORDS)),
                _word(rng.choice(_WORDS)),
                _word(rng.choice(_CODES)),
            ]
            lines.append("".join(words))
            ids.append(tuple(i for word in words for i in phrases[word]) + phrases["\n"])
        task = phrases["\n\n"] + sum(ids, ()) + phrases[_COPY_AGAIN] + ids[0]
        filler = self._texts.slice(rng, max(0, length - len(task)))
        return filler + task, Check(CheckKind.COPY, "\n".join(lines[1:]).strip())

    def _thrash(
        self, tenant: Tenant, number: int, length: int, rng: random.Random
    ) -> tuple[int, ...]:
        """One of the prefixes in turn, the one that was used longest ago, and a tail of its own."""
        tail = max(1, length // 8)
        prefix = random.Random(f"{self.mix.seed} {tenant.name} prefix {number % tenant.prefixes}")
        return self._texts.slice(prefix, length - tail) + self._texts.slice(rng, tail)

    def _oscillate(
        self, tenant: Tenant, before: int, length: int, output: int, rng: random.Random
    ) -> tuple[tuple[int, ...], str]:
        """Lines far apart, half of them in each half of the text, and the order to copy them.

        The grammar makes the answer copy a line of A, then one of B, again and again, each as long
        as the time between two routing events: what is attended to lies elsewhere at each.
        ``before``: tokens of the prompt that come first.
        """
        phrases, period = self._texts.phrases, tenant.period_tokens
        lines = {
            (half, number): self._line(_label(half, number), period, rng)
            for half in "AB"
            for number in range(tenant.lines)
        }
        order = phrases[_OSCILLATE]
        room = max(0, length - len(order) - sum(len(ids) for _, ids in lines.values()))
        filler, gap = self._texts.slice(rng, room), room // len(lines)
        tokens: list[int] = []
        used = 0
        for _, ids in lines.values():
            # A line begins with a window, so that it is in one and not in two.
            unaligned = (before + len(tokens) + gap) % period
            end = used + max(0, gap - unaligned)
            tokens += [*filler[used:end], *ids]
            used = end
        tokens += [*filler[used:], *order]
        steps = [(half, number) for number in range(tenant.lines) for half in "AB"]
        answer = "".join(lines[step][0] for step in steps)
        times = 1 + 2 * output // (period * len(steps))
        return tuple(tokens), f"root ::= {json.dumps(answer * times)}"

    def _line(self, label: str, period: int, rng: random.Random) -> tuple[str, tuple[int, ...]]:
        """A line of so many tokens: its label, words, and the end of the line."""
        phrases = self._texts.phrases
        short = _short_words(tuple((word, len(phrases[_word(word)])) for word in _WORDS))
        text, ids = label, phrases[label]
        while len(ids) < period - len(phrases["\n"]):
            word = _word(rng.choice(short))
            text, ids = text + word, ids + phrases[word]
        return text + "\n", ids + phrases["\n"]

    def _traced(self, tenant: Tenant, line: TraceRequest, rng: random.Random) -> Turn:
        """Blocks with the same number have the same tokens, whoever sends them."""
        trace = tenant.trace
        assert trace is not None
        block = max(1, round(trace.block_tokens * trace.scale))
        length = max(1, round(line.input_tokens * trace.scale))
        tokens: list[int] = []
        for number in line.block_ids:
            tokens += self._texts.slice(random.Random(f"{self.mix.seed} block {number}"), block)
        rest = random.Random(f"{self.mix.seed} {line.at_seconds} {line.block_ids}")
        tokens += self._texts.slice(rest, max(0, length - len(tokens)))
        output = min(max(1, round(line.output_tokens * trace.scale)), self._max_context - 1)
        # What is too long loses its end: what it shares with others is at its beginning.
        tokens = tokens[: min(length, self._max_context - output)]
        return Turn(tuple(tokens), output, 0.0, abort_after=_abort_after(tenant, output, rng))


def _abort_after(tenant: Tenant, output: int, rng: random.Random) -> int | None:
    """After which token of an answer its client leaves, if it does."""
    leaves = rng.random() < tenant.abort_rate
    return rng.randint(1, max(1, output - 1)) if leaves else None


@cache
def _short_words(lengths: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The words that are one token; all of them if none is."""
    return tuple(word for word, length in lengths if length == 1) or _WORDS


def arrivals(arrival: Arrival, seconds: float, rng: random.Random) -> Iterator[float]:
    """Seconds at which sessions begin; none for a closed loop, where an answer decides.

    A constant rate and bursts begin at a random moment of their first interval, so that tenants
    with the same rate don't send at the same time.
    """
    if arrival.process is Process.CLOSED:
        return
    interval = arrival.every_seconds or 1 / arrival.rate
    poisson = arrival.process is Process.POISSON
    now = rng.expovariate(arrival.rate) if poisson else rng.random() * interval
    while now < seconds:
        yield from [now] * (arrival.size or 1)
        now += rng.expovariate(arrival.rate) if poisson else interval
