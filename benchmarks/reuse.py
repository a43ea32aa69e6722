"""Prefix reuse on a trace of conversations, against stock in the same KV bytes.

Every conversation begins with the same system prompt and then has a document of its own. Some are
going on at any time; which of them has its next turn is drawn at random, and one that has had all
its turns makes place for a new one. Both servers get the same requests in the same order: each
turn is the prompt, the answers that *that server* gave, and a new question. The KV bytes hold half
of the conversations that are going on at stock, so that it matters what a context takes.

hit_rate        cached tokens divided by prompt tokens
cached_ratio    our cached tokens divided by stock's
ratio           stock's mean time to first token divided by ours, over turns after the first
resident_ratio  conversations whose context is still cached at the end, ours divided by stock's
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
from tqdm import tqdm

from report import Column, Row, Target, begin, parser, print_table, print_targets, write_json
from servers import NAMES, STOCK, TIERED, Servers, Texts
from sglang_qevict.local_server import Server

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 32, 24

COLUMNS = (
    Column("context", "context", "d"),
    Column("conversations", "conversations", "d"),
    Column("turns", "turns", "d"),
    Column("kv_mib", "KV MiB", ".0f"),
    Column("stock_hit_rate", "stock hits", ".1%"),
    Column("tiered_hit_rate", "our hits", ".1%"),
    Column("cached_ratio", "ratio", ".2f"),
    Column("stock_ttft_ms", "stock TTFT ms", ".0f"),
    Column("tiered_ttft_ms", "our TTFT ms", ".0f"),
    Column("ratio", "ratio", ".2f"),
    Column("stock_resident", "stock resident", "d"),
    Column("tiered_resident", "ours resident", "d"),
    Column("resident_ratio", "ratio", ".2f"),
)
TARGETS = (
    Target("cached_ratio", 1, {}),
    Target("resident_ratio", 3, {}),
)


@dataclass
class Conversation:
    """What was said so far, in tokens, the questions, and how many of them were asked."""

    tokens: list[int]
    questions: list[list[int]]
    asked: int = 0


@dataclass
class Replayed:
    """What one server made of the trace."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    later_seconds: list[float] = field(default_factory=list)
    resident: int = 0


class Asked(NamedTuple):
    """An answer: its tokens, how many of the prompt's were cached, seconds to its first token."""

    tokens: list[int]
    cached: int
    first_seconds: float


def ask(server: Server, tokens: list[int], new_tokens: int) -> Asked:
    """One request, streamed."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
    start, first = time.perf_counter(), None
    answer: list[int] = []
    cached = 0
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=3600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            answer, cached = event["output_ids"], event["meta_info"]["cached_tokens"]
    assert first is not None
    assert len(answer) == new_tokens
    return Asked(answer, cached, first)


def order(conversations: int, turns: int, at_once: int) -> list[int]:
    """Whose turn it is, of so many conversations, as long as any has turns left."""
    draw = random.Random(0)
    waiting = iter(range(conversations))
    active = {next(waiting): turns for _ in range(at_once)}
    result = []
    while active:
        one = draw.choice(list(active))
        result.append(one)
        active[one] -= 1
        if not active[one]:
            del active[one]
            if (new := next(waiting, None)) is not None:
                active[new] = turns
    return result


def replay(
    server: Server, conversations: list[Conversation], whose_turn: list[int], name: str
) -> Replayed:
    """Ask each conversation's next question in turn; then see which contexts are still cached."""
    result = Replayed()
    with tqdm(total=len(whose_turn) + len(conversations), unit="request", desc=name) as bar:
        for index in whose_turn:
            conversation = conversations[index]
            conversation.tokens += conversation.questions[conversation.asked]
            asked = ask(server, conversation.tokens, ANSWER_TOKENS)
            if conversation.asked:
                result.later_seconds.append(asked.first_seconds)
            conversation.asked += 1
            result.prompt_tokens += len(conversation.tokens)
            result.cached_tokens += asked.cached
            conversation.tokens += asked.tokens
            bar.update()
        # The latest first, so that asking evicts nothing that is asked for later.
        for index in dict.fromkeys(reversed(whose_turn)):
            tokens = conversations[index].tokens
            result.resident += ask(server, tokens, 1).cached >= 0.9 * len(tokens)
            bar.update()
    return result


def measure(options: argparse.Namespace) -> Row:
    """One row: the trace on both servers."""
    turns = 2 if options.quick else 4
    count = options.conversations or (8 if options.quick else 20)
    context = options.context or (1536 if options.quick else 3072)
    at_once = max(2, count // 2)
    whose_turn = order(count, turns, at_once)
    at_stock = at_once // 2
    total_tokens = at_stock * (context + turns * (QUESTION_TOKENS + ANSWER_TOKENS) + 64)
    flags = ("--max-total-tokens", str(total_tokens))
    found: dict[str, Replayed] = {}
    with Servers(*flags, budget=options.budget) as servers:
        with servers.running(STOCK) as server:
            texts = Texts(server)
        system = texts.prompt(SYSTEM_TOKENS)
        documents = [texts.prompt(context - SYSTEM_TOKENS) for _ in range(count)]
        questions = [[texts.prompt(QUESTION_TOKENS) for _ in range(turns)] for _ in range(count)]
        for name in NAMES:
            conversations = [
                Conversation(system + document, asked)
                for document, asked in zip(documents, questions, strict=True)
            ]
            with servers.running(name) as server:
                found[name] = replay(server, conversations, whose_turn, name)
    row: Row = {
        "context": context,
        "batch": 1,
        "conversations": count,
        "turns": turns,
        "kv_mib": total_tokens * options.token_bytes / 2**20,
    }
    for name, replayed in found.items():
        row |= {
            f"{name}_cached_tokens": replayed.cached_tokens,
            f"{name}_hit_rate": replayed.cached_tokens / replayed.prompt_tokens,
            f"{name}_ttft_ms": statistics.mean(replayed.later_seconds) * 1e3,
            f"{name}_resident": replayed.resident,
        }
    stock, tiered = found[STOCK], found[TIERED]
    row["cached_ratio"] = tiered.cached_tokens / max(1, stock.cached_tokens)
    row["ratio"] = row[f"{STOCK}_ttft_ms"] / row[f"{TIERED}_ttft_ms"]
    row["resident_ratio"] = tiered.resident / max(1, stock.resident)
    return row


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    machine = begin(options)
    row = measure(options)
    print_table([row], COLUMNS)
    print_targets([row], TARGETS)
    write_json(options.json, machine, [row])


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument("--conversations", type=int, help="how many (default: 20, quick: 8)")
    options.add_argument("--context", type=int, help="tokens of the first prompt (default: 3072)")
    options.add_argument("--token-bytes", type=int, default=23040, help="KV bytes of a token")
    run(options.parse_args())


if __name__ == "__main__":
    main()
