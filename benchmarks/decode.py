"""Time per output token: stock SGLang against tiering, at several contexts and batches.

All servers hold the same batch at the same time, and only one of them runs (the others are
suspended). They take turns, some steps each, so that a change of the machine meets both.
A figure is the mean over the steps of a turn, which include routing events at their true
frequency, and the median over the turns. All requests of a batch are streamed and decode
in all measured steps. Context is counted in the middle of the measurement. Each request has a
text of its own.

ratio           stock's time per output token divided by ours
marginal_ratio  the same for the part that grows with context: differences from the shortest
                context at the same batch
preset_ratio    time with the options of ``--beside`` divided by ours, at the same bytes

At batch 1 the slopes per 1,000 tokens of context are then compared in rounds (see slopes.py),
beside llama.cpp's where llama-cpp-python and the model's GGUF file are at hand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from tqdm import tqdm

from qevict_tiers.presets import PRESETS
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
from servers import NAMES, QUICK_TURN_STEPS, STOCK, TIERED, TURN_STEPS, Servers, Texts, take_turns
from slopes import LLAMA_CPP, measure_slopes

CONTEXTS = (200, 1024, 4700, 7000)
BATCHES = (1, 4, 8)
SHORTEST = CONTEXTS[0]

COLUMNS = (
    Column("context", "context", "d"),
    Column("batch", "batch", "d"),
    Column("stock_ms", "stock ms"),
    Column("tiered_ms", "ours ms"),
    Column("ratio", "ratio", ".2f"),
    Column("marginal_ratio", "marginal", ".1f"),
    Column("preset_ratio", "preset", ".2f"),
    Column("spread", "spread", ".1%"),
    Column("foreign_cores", "others", ".2f"),
)
TARGETS = (
    *(Target("ratio", 0.97, {"context": SHORTEST, "batch": batch}) for batch in BATCHES),
    Target("ratio", 2.5, {"context": 4700, "batch": 4}),
    Target("ratio", 5, {"context": 7000, "batch": 8}),
    Target("marginal_ratio", 8, {"context": 4700, "batch": 4}),
    Target("marginal_ratio", 10, {"context": 7000, "batch": 8}),
    Target("preset_ratio", 0.9, {}),
)


def cell_row(steps: dict[str, list[list[float]]], foreign: float, context: int, batch: int) -> Row:
    """One cell of the table, from what `take_turns` measured."""
    times = {name: [statistics.mean(turn) for turn in turns] for name, turns in steps.items()}
    medians = {name: statistics.median(means) for name, means in times.items()}
    stock, tiered = (medians.pop(name) for name in NAMES)
    return {
        "context": context,
        "batch": batch,
        "stock_ms": stock * 1e3,
        "tiered_ms": tiered * 1e3,
        "ratio": stock / tiered,
        "preset_ratio": medians.popitem()[1] / tiered if medians else None,
        "spread": max(map(spread, times.values())),
        "foreign_cores": foreign,
        "turns_ms": {name: [x * 1e3 for x in means] for name, means in times.items()},
    }


def add_marginal_ratios(rows: list[Row]) -> None:
    """Compare growth over the shortest context, where ours grew at all."""
    base = {row["batch"]: row for row in rows if row["context"] == SHORTEST}
    for row in rows:
        first = base.get(row["batch"])
        if first is None or first is row:
            continue
        stock, ours = (row[k] - first[k] for k in ("stock_ms", "tiered_ms"))
        row["marginal_ratio"] = stock / ours if ours > 0 else None


def print_slopes(slopes: dict[str, Any]) -> None:
    """The slopes of all engines, and whether ours is as flat as it should be."""
    if slopes["missing"]:
        print(f"llama.cpp was not measured: {slopes['missing']}")
    per_1000 = slopes["ms_per_1000_tokens"]
    print(
        "ms for each 1,000 tokens of context at batch 1: "
        + ", ".join(f"{name} {ms:.2f}" for name, ms in per_1000.items())
    )
    ratios = {f"{name}_slope_ratio": ms / per_1000[TIERED] for name, ms in per_1000.items()}
    print_targets([ratios], [Target(f"{LLAMA_CPP}_slope_ratio", 4, {})])


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    contexts = options.context or ([200, 4700] if options.quick else list(CONTEXTS))
    batches = options.batch or ([4] if options.quick else list(BATCHES))
    turns = options.turns or (2 if options.quick else 5)
    turn_steps = QUICK_TURN_STEPS if options.quick else TURN_STEPS
    machine = begin(options)
    cells = [(context, batch) for batch in batches for context in contexts]
    rows: list[Row] = []
    slopes: dict[str, Any] = {}
    names = (*NAMES, options.beside) if options.beside else NAMES
    with Servers(budget=options.budget, names=names) as servers:
        with servers.running(STOCK) as server:
            texts = Texts(server)
        with tqdm(total=len(cells) * (turns + len(names)), unit="turn") as bar:
            for context, batch in cells:
                steps, foreign = take_turns(servers, texts, context, batch, turns, turn_steps, bar)
                row = cell_row(steps, foreign, context, batch)
                rows.append(row)
                bar.write(
                    f"{context} x {batch}: stock {row['stock_ms']:.1f} ms, "
                    f"ours {row['tiered_ms']:.1f} ms, others {row['foreign_cores']:.2f} cores"
                )
        if 1 in batches and len(contexts) > 1 and not options.beside:
            slopes = measure_slopes(
                servers, texts, min(contexts), max(contexts), options.rounds, options.llama_cpp
            )
    add_marginal_ratios(rows)
    rows.sort(key=lambda row: (row["context"], row["batch"]))
    print_table(rows, COLUMNS)
    print_targets(rows, TARGETS)
    if slopes:
        print_slopes(slopes)
    write_json(options.json, machine, rows, slopes=slopes)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--context", type=int, action="append", help="tokens; may be repeated")
    options.add_argument("--batch", type=int, action="append", help="requests; may be repeated")
    options.add_argument("--turns", type=int, help="turns of each server (default: 5)")
    options.add_argument("--rounds", type=int, default=9, help="rounds of the slopes (default: 9)")
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument(
        "--beside", choices=PRESETS, help="a third server with these options; leaves out the slopes"
    )
    options.add_argument(
        "--llama-cpp",
        metavar="PYTHON",
        default=sys.executable,
        help="a Python that can import llama_cpp (default: this one)",
    )
    run(options.parse_args())


if __name__ == "__main__":
    main()
