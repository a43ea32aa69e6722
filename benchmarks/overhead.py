"""What scores and routing cost a decode step.

Two sources in one run:

1. The tiered server itself (and stock beside it, in turns): time of every step, steps with a
   routing event and others apart, and the 99th percentile of the latency between tokens.
2. The same tiering without the model, on random data in this process: claims and routing before a
   step, storing new tokens, attention with and without scores; and the cost of an event against
   the number of requests that are due, with equal and mixed lengths, at once or in turn.

share              (scores + routing spread over all steps, from 2) divided by the mean step of
                   the server
bookkeeping_share  claims and views in a step that routes nothing, divided by the same
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import chain

from tqdm import tqdm

from replay import Replay, StepTimes
from report import (
    Column,
    Row,
    Target,
    begin,
    parser,
    print_table,
    print_targets,
    write_json,
)
from servers import (
    NAMES,
    OMEGA,
    QUICK_TURN_STEPS,
    STOCK,
    TIERED,
    TURN_STEPS,
    Servers,
    Texts,
    take_turns,
)

CELLS = ((4700, 1), (4700, 4), (7000, 8))

SERVER_COLUMNS = (
    Column("context", "context", "d"),
    Column("batch", "batch", "d"),
    Column("stock_ms", "stock ms"),
    Column("tiered_ms", "ours ms"),
    Column("ratio", "ratio", ".2f"),
    Column("event_ms", "event step"),
    Column("other_ms", "other steps"),
    Column("stock_p99_ms", "stock p99"),
    Column("tiered_p99_ms", "ours p99"),
    Column("scores_ms", "scores", ".2f"),
    Column("routing_ms", "routing/step", ".2f"),
    Column("bookkeeping_ms", "claims, views", ".2f"),
    Column("store_ms", "store", ".2f"),
    Column("attention_ms", "attention", ".2f"),
    Column("share", "share", ".1%"),
    Column("bookkeeping_share", "bookkeeping", ".1%"),
    Column("foreign_cores", "others", ".2f"),
)
EVENT_COLUMNS = (
    Column("pattern", "requests", "s"),
    Column("batch", "batch", "d"),
    Column("due", "due at once", "d"),
    Column("event_ms", "event ms", ".2f"),
    Column("event_ms_per_due", "ms per request", ".2f"),
    Column("quiet_ms", "quiet step ms", ".2f"),
    Column("mean_ms", "mean per step", ".2f"),
)
TARGETS = tuple(
    Target("share", 0.05, {"context": context, "batch": batch}, at_most=True)
    for context, batch in CELLS
)


def split_events(turns: list[list[float]]) -> tuple[float, float]:
    """Median seconds of event steps and of the others.

    Rows of one batch are routed together, at every eighth step. Turns are a multiple of that plus
    the steps that settle, so the phase is found anew in each: the slowest of the eight.
    """
    events: list[float] = []
    others: list[float] = []
    for turn in turns:
        phases = [statistics.median(turn[phase::OMEGA]) for phase in range(OMEGA)]
        event = phases.index(max(phases))
        for i, seconds in enumerate(turn):
            (events if i % OMEGA == event else others).append(seconds)
    return statistics.median(events), statistics.median(others)


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def replayed(budget: float, lengths: list[int], steps: int) -> StepTimes:
    """Times of a batch of these lengths, the first steps (compilation, cold memory) left out."""
    replay = Replay(budget, len(lengths))
    for tokens in lengths:
        replay.prefill(tokens)
    replay.decode(2 * OMEGA)
    return replay.decode(steps)


def measure_cell(
    turns: dict[str, list[list[float]]], foreign: float, times: StepTimes, context: int, batch: int
) -> Row:
    """One row of the first table."""
    steps = {name: list(chain.from_iterable(turns[name])) for name in NAMES}
    stock, tiered = (statistics.mean(steps[name]) for name in NAMES)
    event, other = split_events(turns[TIERED])
    quiet = times.median_ms("prologue", _none_due)
    routing = statistics.mean(times.prologue) * 1e3 - quiet
    scores = times.median_ms("scored") - times.median_ms("unscored")
    return {
        "context": context,
        "batch": batch,
        "stock_ms": stock * 1e3,
        "tiered_ms": tiered * 1e3,
        "ratio": stock / tiered,
        "event_ms": event * 1e3,
        "other_ms": other * 1e3,
        "stock_p99_ms": percentile(steps[STOCK], 99) * 1e3,
        "tiered_p99_ms": percentile(steps[TIERED], 99) * 1e3,
        "scores_ms": scores,
        "routing_ms": routing,
        "bookkeeping_ms": quiet,
        "store_ms": times.median_ms("store"),
        "attention_ms": times.median_ms("scored"),
        "share": (max(0.0, scores) + routing) / (tiered * 1e3),
        "bookkeeping_share": quiet / (tiered * 1e3),
        "foreign_cores": foreign,
    }


def _none_due(due: int) -> bool:
    return due == 0


def _some_due(due: int) -> bool:
    return due > 0


def event_rows(budget: float, quick: bool) -> list[Row]:
    """The cost of events against how many requests are due."""
    patterns: list[tuple[str, Callable[[int], int]]] = [
        ("4.7K each, aligned", lambda i: 4700),
        ("4.7K each, staggered", lambda i: 4700 + i),
        ("0.6K to 7K, aligned", lambda i: 600 + 1600 * (i % 5)),
    ]
    sizes = (1, 8) if quick else (1, 2, 4, 8, 16)
    rows: list[Row] = []
    with tqdm(total=len(patterns) * len(sizes), unit="batch", desc="events") as bar:
        for pattern, length in patterns:
            for batch in sizes:
                lengths = [length(i) for i in range(batch)]
                staggered = "staggered" in pattern
                replay = Replay(budget, batch)
                for tokens in lengths:
                    replay.prefill(4700 if staggered else tokens)
                    if staggered:
                        replay.decode(1)
                replay.decode(2 * OMEGA)
                times = replay.decode((2 if quick else 5) * OMEGA)
                event = times.median_ms("prologue", _some_due)
                due = max(times.due)
                rows.append(
                    {
                        "pattern": pattern,
                        "context": max(lengths),
                        "batch": batch,
                        "due": due,
                        "event_ms": event,
                        "event_ms_per_due": event / due,
                        "quiet_ms": times.median_ms("prologue", _none_due)
                        if 0 in times.due
                        else None,
                        "mean_ms": statistics.mean(times.prologue) * 1e3,
                    }
                )
                bar.update()
    return rows


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    cells = CELLS[:1] if options.quick else CELLS
    turns = 2 if options.quick else 5
    turn_steps = QUICK_TURN_STEPS if options.quick else TURN_STEPS
    machine = begin(options)
    measured = []
    with Servers(budget=options.budget) as servers:
        with servers.running(STOCK) as server:
            texts = Texts(server)
        with tqdm(total=len(cells) * (turns + 2), unit="turn", desc="servers") as bar:
            for cell in cells:
                measured.append((cell, take_turns(servers, texts, *cell, turns, turn_steps, bar)))
    rows = []
    for (context, batch), (held, foreign) in measured:
        times = replayed(options.budget, [context] * batch, turns * turn_steps)
        rows.append(measure_cell(held, foreign, times, context, batch))
    events = event_rows(options.budget, options.quick)
    print_table(rows, SERVER_COLUMNS)
    print_targets(rows, TARGETS)
    print()
    print_table(events, EVENT_COLUMNS)
    write_json(options.json, machine, rows, events=events)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    run(options.parse_args())


if __name__ == "__main__":
    main()
