"""What the SSD tier gives to later turns, and what it costs those that decode meanwhile.

*Recall.* Five questions in turn about one document of about 4,000 tokens, each about a fact in
another place, on three servers: stock, with tiers, and with an SSD tier beside them. Each server
gets its own answers back. The prompts of turns two to five are then sent once more, each under a
salt of its own, so that the same server computes all of them.

found         facts whose number is in the answer
of_full      share of the facts that stock found which are found here, too
cached        mean share of a later turn's prompt that was reused or recalled
ttft_ms       time to first token of later turns, median
recompute_ms  of the same prompts when nothing of them is cached, median
ratio         recompute_ms / ttft_ms, median over the turns

*Writing behind.* Two servers with tiers, one of them with an SSD tier, decode the same batch in
turns (see decode.py), while other requests come, finish and, at the SSD tier, are written.

slowdown      what the mean step of a turn takes more with the SSD tier, median over pairs of turns;
              steps that wait for another request's prefill are left out (those of over 2.5 medians)
all_slowdown  the same with those steps
written_mib   what was written during the SSD tier's turns
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from tqdm import tqdm

from needles import document, question
from report import (
    Column,
    Row,
    Target,
    begin,
    parser,
    print_table,
    print_targets,
    spread,
    write_json,
)
from servers import SSD, STOCK, TIERED, Servers, Texts, chat, take_turns
from sglang_qevict.local_server import Server

QUESTIONS = 5

OTHER_PROMPT_TOKENS, OTHER_NEW_TOKENS = 512, 4
SKIPPED_TOKENS = 20_000
"""Of the text: what lies before is the batch's, what comes after is the other requests'."""
PREFILL_SHARE = 2.5
"""Steps of more medians than this wait for a prefill."""

RECALL_COLUMNS = (
    Column("server", "server", "s"),
    Column("context", "context", ".0f"),
    Column("facts", "facts", "d"),
    Column("found", "found", "d"),
    Column("of_full", "of what stock found", ".0%"),
    Column("cached", "cached", ".0%"),
    Column("ttft_ms", "TTFT ms", ".0f"),
    Column("recompute_ms", "computed ms", ".0f"),
    Column("ratio", "ratio", ".2f"),
)
WRITING_COLUMNS = (
    Column("context", "context", "d"),
    Column("batch", "batch", "d"),
    Column("tiered_ms", "tiers ms"),
    Column("ssd_ms", "SSD ms"),
    Column("slowdown", "slowdown", "+.1%"),
    Column("all_slowdown", "with prefills", "+.1%"),
    Column("written_mib", "written MiB", ".0f"),
    Column("spread", "spread", ".1%"),
    Column("foreign_cores", "others", ".2f"),
)
TARGETS = (Target("ratio", 3, {"server": SSD}), Target("slowdown", 0.03, {}, at_most=True))


@dataclass
class Conversation:
    """What a server made of one: facts found by city, and of its later turns tokens of the prompt,
    shares that were cached, and seconds to the first token as they came and when computed."""

    found: dict[str, bool] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    first_seconds: list[float] = field(default_factory=list)
    computed_seconds: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """How many times faster each later turn was than when it is computed."""
        pairs = zip(self.computed_seconds, self.first_seconds, strict=True)
        return [computed / first for computed, first in pairs]


def converse(server: Server, number: int, characters: int) -> Conversation:
    """Ask all questions about a document, one after the other; then time what is computed."""
    text, facts = document(number, characters, QUESTIONS)
    result, messages = Conversation(), list[dict[str, str]]()
    later = []
    for city, code in facts.items():
        content = question(city) if messages else f"{text}\n\n{question(city)}"
        messages.append({"role": "user", "content": content})
        answer = chat(server, messages)
        result.found[city] = code in answer.text
        if len(messages) > 1:
            later.append([*messages])
            result.prompt_tokens.append(answer.prompt_tokens)
            result.cached.append(answer.cached_tokens / answer.prompt_tokens)
            result.first_seconds.append(answer.first_seconds)
        messages.append({"role": "assistant", "content": answer.text})
    for turn, prompt in enumerate(later):
        answer = chat(server, prompt, max_tokens=1, cache_salt=f"{number} {turn}")
        assert answer.cached_tokens == 0
        result.computed_seconds.append(answer.first_seconds)
    return result


def facts_found(talks: list[Conversation]) -> set[tuple[int, str]]:
    """Facts that were found, by document and city."""
    return {
        (i, city) for i, talk in enumerate(talks) for city, is_in in talk.found.items() if is_in
    }


def recall_row(name: str, talks: list[Conversation], known: set[tuple[int, str]]) -> Row:
    """One server's row; ``known``: the facts that stock found."""
    found = facts_found(talks)

    def middle(values: list[list[float]]) -> float:
        return statistics.median([value for each in values for value in each])

    return {
        "server": name,
        "context": statistics.mean([tokens for talk in talks for tokens in talk.prompt_tokens]),
        "batch": 1,
        "facts": QUESTIONS * len(talks),
        "found": len(found),
        "of_full": len(found & known) / max(1, len(known)),
        "cached": statistics.mean([share for talk in talks for share in talk.cached]),
        "ttft_ms": middle([talk.first_seconds for talk in talks]) * 1e3,
        "recompute_ms": middle([talk.computed_seconds for talk in talks]) * 1e3,
        "ratio": middle([talk.ratios() for talk in talks]),
        "ratios": [talk.ratios() for talk in talks],
    }


def measure_recall(options: argparse.Namespace) -> list[Row]:
    """One row for each server; they take turns, a document each."""
    documents = 1 if options.quick else options.documents
    names = (STOCK, TIERED, SSD)
    talks: dict[str, list[Conversation]] = {name: [] for name in names}
    with (
        Servers("--enable-cache-report", budget=options.budget, names=names) as servers,
        tqdm(total=documents * len(names), unit="conversation") as bar,
    ):
        for number in range(documents):
            for name in names:
                bar.set_postfix_str(f"document {number + 1} of {documents}: {name}")
                with servers.running(name) as server:
                    talks[name].append(converse(server, number, options.characters))
                bar.update()
    known = facts_found(talks[STOCK])
    return [recall_row(name, talks[name], known) for name in names]


@contextmanager
def others(server: Server, texts: Texts) -> Iterator[None]:
    """Other requests, one after the other, as long as the block takes; the last one ends."""
    is_over = Event()

    def ask() -> None:
        while not is_over.is_set():
            prompt = texts.prompt(OTHER_PROMPT_TOKENS)
            server.generate(prompt, max_new_tokens=OTHER_NEW_TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            yield
        finally:
            is_over.set()
        asking.result()


def written_bytes(server: Server) -> int:
    """What a server's SSD tier has written so far; 0 without one."""
    spill = server.info()["internal_states"][0]["kv_tiering"]["spill"]
    return int(spill["counters"]["written_bytes"]) if spill else 0


def plain_mean(steps: list[float]) -> float:
    """The mean of the steps that wait for no prefill."""
    most = PREFILL_SHARE * statistics.median(steps)
    return statistics.mean([step for step in steps if step <= most])


def slowdowns(
    steps: dict[str, list[list[float]]], mean: Callable[[list[float]], float]
) -> list[float]:
    """How much more a step takes with the SSD tier, for each pair of turns."""
    pairs = zip(steps[SSD], steps[TIERED], strict=True)
    return [mean(ssd) / mean(tiered) - 1 for ssd, tiered in pairs]


def measure_writing(options: argparse.Namespace) -> Row:
    """One row: a batch that decodes while others are written, with and without the SSD tier."""
    turns, turn_steps = (3, 48) if options.quick else (8, 96)
    with Servers(budget=options.budget, names=(TIERED, SSD)) as servers:
        elsewhere: dict[str, Texts] = {}
        for name in servers.names:
            with servers.running(name) as server:
                texts = Texts(server)
                elsewhere[server.url] = Texts(server)
            elsewhere[server.url].prompt(SKIPPED_TOKENS)
        with tqdm(total=turns + 2, unit="turn") as bar:
            steps, foreign = take_turns(
                servers,
                texts,
                options.context,
                options.batch,
                turns,
                turn_steps,
                bar,
                beside=lambda server: others(server, elsewhere[server.url]),
            )
        with servers.running(SSD) as server:
            written = written_bytes(server)
    means = {name: statistics.median(map(plain_mean, each)) for name, each in steps.items()}
    plain = slowdowns(steps, plain_mean)
    return {
        "context": options.context,
        "batch": options.batch,
        "tiered_ms": means[TIERED] * 1e3,
        "ssd_ms": means[SSD] * 1e3,
        "slowdown": statistics.median(plain),
        "all_slowdown": statistics.median(slowdowns(steps, statistics.mean)),
        "slowdowns": plain,
        "written_mib": written / 2**20,
        "spread": spread([1 + each for each in plain]),
        "foreign_cores": foreign,
    }


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    machine = begin(options)
    rows = measure_recall(options)
    print_table(rows, RECALL_COLUMNS)
    writing = measure_writing(options)
    print_table([writing], WRITING_COLUMNS)
    print_targets([*rows, writing], TARGETS)
    write_json(options.json, machine, rows, writing=writing)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument("--documents", type=int, default=4, help="texts (default: 4, quick: 1)")
    options.add_argument(
        "--characters", type=int, default=15_000, help="length of a text (default: 15000)"
    )
    options.add_argument("--context", type=int, default=1024, help="tokens of those that decode")
    options.add_argument("--batch", type=int, default=4, help="how many decode (default: 4)")
    run(options.parse_args())


if __name__ == "__main__":
    main()
