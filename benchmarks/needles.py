"""Facts found in a document, by a later turn that reuses it as codes.

A long text has a few made-up facts in it. The first turn asks about something else; each later
turn asks for one fact, in a conversation that goes on, so that with reuse the document is seen as
codes. Answers are greedy. Stock says which facts this model finds at all.

found         facts whose number is in the answer
of_full       share of the facts that stock found which are found here, too
cached        mean share of a later turn's prompt that was reused
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from tqdm import tqdm

from report import Column, Row, begin, parser, print_table, write_json
from servers import STOCK, TIERED, Servers, chat
from sglang_qevict.local_server import Server

VARIANTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("stock", STOCK, ()),
    ("tiers, no reuse", TIERED, ("--kv-tiering-prefix-reuse", "off")),
    ("tiers, reuse", TIERED, ()),
)
CITIES = ("Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Athens", "Riga", "Sofia")
FACTS = 2
COLUMNS = (
    Column("variant", "server", "s"),
    Column("context", "context", "d"),
    Column("facts", "facts", "d"),
    Column("found", "found", "d"),
    Column("of_full", "of what stock found", ".0%"),
    Column("cached", "cached", ".0%"),
)

Found = dict[tuple[int, str], bool]


def document(number: int, characters: int, num_facts: int = FACTS) -> tuple[str, dict[str, str]]:
    """A text of about so many characters with facts in it, and the facts: city to number."""
    from pydoc_data.topics import topics

    random_of = random.Random(number)
    text = "\n".join(topics[name] for name in sorted(topics))
    start = random_of.randrange(len(text) - characters)
    paragraphs = text[start : start + characters].split("\n\n")
    cities = random_of.sample(CITIES, num_facts)
    facts = {city: str(random_of.randrange(1000, 9999)) for city in cities}
    for city, code in facts.items():
        place = random_of.randrange(1, len(paragraphs) - 1)
        paragraphs.insert(place, f"The access code of the {city} office is {code}.")
    return "\n\n".join(paragraphs), facts


def question(city: str) -> str:
    """What asks for one fact."""
    return f"What is the access code of the {city} office?"


def search(server: Server, documents: int, characters: int, bar: Any) -> tuple[Found, float]:
    """Which facts are found, by document and city; mean share of later prompts that was cached."""
    found: Found = {}
    cached = []
    for number in range(documents):
        text, facts = document(number, characters)
        messages = [{"role": "user", "content": f"{text}\n\nWhat is this text about?"}]
        answer = chat(server, messages)
        for city, code in facts.items():
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": question(city)},
            ]
            answer = chat(server, messages)
            cached.append(answer.cached_tokens / answer.prompt_tokens)
            found[number, city] = code in answer.text
        bar.update()
    return found, sum(cached) / len(cached)


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    documents = 2 if options.quick else options.documents
    characters = options.characters // 2 if options.quick else options.characters
    machine = begin(options)
    rows: list[Row] = []
    full: Found = {}
    with tqdm(total=len(VARIANTS) * documents, unit="document") as bar:
        for variant, name, flags in VARIANTS:
            bar.set_postfix_str(variant)
            flags = (*flags, "--enable-cache-report")
            with (
                Servers(*flags, budget=options.budget, names=(name,)) as servers,
                servers.running(name) as server,
            ):
                found, cached = search(server, documents, characters, bar)
            full = full or found
            known = [fact for fact, there in full.items() if there]
            rows.append(
                {
                    "variant": variant,
                    "context": characters // 4,
                    "batch": 1,
                    "facts": len(found),
                    "found": sum(found.values()),
                    "of_full": sum(found[fact] for fact in known) / max(1, len(known)),
                    "cached": cached,
                }
            )
    print_table(rows, COLUMNS)
    write_json(options.json, machine, rows)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument("--documents", type=int, default=16, help="texts (default: 16, quick: 2)")
    options.add_argument(
        "--characters",
        type=int,
        default=12_000,
        help="length of a text (default: 12000, quick: half)",
    )
    run(options.parse_args())


if __name__ == "__main__":
    main()
