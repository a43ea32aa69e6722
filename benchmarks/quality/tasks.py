"""Tasks in the manner of RULER (arXiv 2404.06654), made here, with answers that can be checked.

A task is a text with something hidden in it, a question, and the strings that a right answer
holds. A small model solves few of them, so a method is scored only where the full model itself
succeeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from quality.texts import Half, load

__all__ = ["TASKS", "Task", "make", "score"]

_CITIES = (
    "Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Riga", "Sofia", "Madrid", "Cairo",
    "Lima", "Quito", "Delhi", "Tokyo", "Seoul", "Hanoi",
)  # fmt: skip
_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas",
    "Karin", "Louis", "Maria", "Nils", "Olga", "Peter",
)  # fmt: skip
_COUNTRIES = ("Portugal", "Norway", "Austria", "Ireland", "Greece", "Latvia", "Peru", "Japan")
_WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "market", "needle", "orange", "pencil", "rabbit", "saddle",
    "tunnel", "violin", "window", "yellow", "basket", "copper", "dragon", "flower",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One instance.

    kind: a key of ``TASKS``. context, question: what is asked about, and what is asked.
    answers: every one of them is in a right answer.
    """

    kind: str
    context: str
    question: str
    answers: tuple[str, ...]


def score(task: Task, answer: str) -> float:
    """Share of the strings that the answer holds, whatever their case."""
    text = answer.lower()
    return sum(string.lower() in text for string in task.answers) / len(task.answers)


def make(kind: str, characters: int, seed: int, half: Half) -> Task:
    """An instance whose context has about so many characters; the same for the same seed."""
    return TASKS[kind](random.Random(f"{kind} {seed}"), characters, half)


def _haystack(rng: random.Random, characters: int, half: Half, needles: list[str]) -> str:
    """Paragraphs of the reference with sentences hidden between them, in their order."""
    text = load("reference", half)
    start = rng.randrange(len(text) - characters)
    paragraphs = [p for p in text[start : start + characters].split("\n\n") if p.strip()]
    places = sorted(rng.randrange(1, len(paragraphs)) for _ in needles)
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        paragraphs.insert(place, needle)
    return "\n\n".join(paragraphs)


def _code(rng: random.Random) -> str:
    return str(rng.randrange(1000, 9999))


def _single_needle(rng: random.Random, characters: int, half: Half) -> Task:
    city, code = rng.choice(_CITIES), _code(rng)
    needle = f"The access code of the {city} office is {code}."
    return Task(
        "single needle",
        _haystack(rng, characters, half, [needle]),
        f"What is the access code of the {city} office?",
        (code,),
    )


def _multi_key(rng: random.Random, characters: int, half: Half) -> Task:
    codes = {city: _code(rng) for city in rng.sample(_CITIES, 4)}
    needles = [f"The access code of the {city} office is {code}." for city, code in codes.items()]
    asked = rng.choice(list(codes))
    return Task(
        "multi-key needle",
        _haystack(rng, characters, half, needles),
        f"What is the access code of the {asked} office?",
        (codes[asked],),
    )


def _multi_value(rng: random.Random, characters: int, half: Half) -> Task:
    city, codes = rng.choice(_CITIES), tuple(_code(rng) for _ in range(3))
    needles = [f"An access code of the {city} office is {code}." for code in codes]
    return Task(
        "multi-value needle",
        _haystack(rng, characters, half, needles),
        f"What are all access codes of the {city} office?",
        codes,
    )


def _variables(rng: random.Random, characters: int, half: Half) -> Task:
    names, value = rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 3), _code(rng)
    first = f"The variable {names[0]} is {value}."
    chain = [f"The variable {b} is the same as the variable {a}." for a, b in pairwise(names)]
    return Task(
        "variable tracking",
        _haystack(rng, characters, half, [first, *chain]),
        f"What number is the variable {names[-1]}?",
        (value,),
    )


def _word_list(rng: random.Random, characters: int, counts: Mapping[str, int]) -> str:
    """Words in random order, each as often as told, repeated to the length in proportion."""
    length = sum(count * (len(word) + 2) for word, count in counts.items())
    times = max(1, characters // length)
    words = [word for word, count in counts.items() for _ in range(count * times)]
    rng.shuffle(words)
    return ", ".join(words)


def _common_words(rng: random.Random, characters: int, half: Half) -> Task:
    words = rng.sample(_WORDS, 14)
    counts = {word: (10 if number < 2 else 1) for number, word in enumerate(words)}
    return Task(
        "common words",
        "A list of words: " + _word_list(rng, characters, counts),
        "Which two words are the most common ones in the list?",
        tuple(words[:2]),
    )


def _frequent_words(rng: random.Random, characters: int, half: Half) -> Task:
    words = rng.sample(_WORDS, 8)
    counts = {word: max(1, 24 // (number + 1) ** 2) for number, word in enumerate(words)}
    return Task(
        "frequent words",
        "A list of words: " + _word_list(rng, characters, counts),
        "Which word is the most frequent one in the list?",
        (words[0],),
    )


def _two_hops(rng: random.Random, characters: int, half: Half) -> Task:
    people, countries = rng.sample(_NAMES, 3), rng.sample(_COUNTRIES, 3)
    cities = rng.sample(_CITIES, 3)
    lives = [f"{p} works in the {c} office." for p, c in zip(people, cities, strict=True)]
    heads = [
        f"The {c} office belongs to the branch of {k}."
        for c, k in zip(cities, countries, strict=True)
    ]
    needles = lives + heads
    rng.shuffle(needles)
    return Task(
        "two hops",
        _haystack(rng, characters, half, needles),
        f"{people[0]} works in an office. To the branch of which country does it belong?",
        (countries[0],),
    )


TASKS: dict[str, Callable[[random.Random, int, Half], Task]] = {
    "single needle": _single_needle,
    "multi-key needle": _multi_key,
    "multi-value needle": _multi_value,
    "variable tracking": _variables,
    "common words": _common_words,
    "frequent words": _frequent_words,
    "two hops": _two_hops,
}
