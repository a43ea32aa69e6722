"""Float32 sums of attention over very long generations: do windows rank as exact sums rank them?

Kernels add each step's mass to a float32 score in place. A score that is 2^24 times as large as
what is added to it does not change any more, and long before that what is added is rounded to a
coarse grid. Here windows gather attention for ten million steps, 1.25 million routing events, in
float32 and in float64; compared are values and, since only these matter, ranks.

Where masses come from:

layer N   attention of the embedded model, in one layer, by 256 tokens of a text after a prompt of
          4,096, in random order again and again
steady    the means of the middle one of these layers, at every step: no noise whose roundings
          would average out
phases    the same layer, where every eighth window in turn gets 32 times as much for a while

Ways to sum: *plain*, as kernels do; *folded*, the sum of an interval added to a total at each
event; *compensated*, the same with Kahan's carry; *decayed*, plain with a decay at each event,
compared with the same decay in float64.

    cd benchmarks && python -m quality.accumulation --json results/quality/accumulation.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from tqdm import tqdm

from qevict_tiers.budget import Capacities, WindowBudget
from qevict_tiers.config import TieringConfig
from qevict_tiers.policy import rank_windows
from quality.texts import Half, load
from report import Column, Row, begin, parser, print_table, write_json
from sglang_qevict.diagnose.recording import record
from sglang_qevict.models import fetch_model
from sglang_qevict.offline import OfflineModel, Text

Floats = npt.NDArray[np.float32]

PROMPT, QUERIES = 4096, 256
CHECKPOINTS = (10_000, 100_000, 1_250_000, 10_000_000)
DECAY = 0.9999
_PHASES, _PHASE_STEPS, _HOT = 8, 50_000, 32.0


class Source(NamedTuple):
    """Where masses come from: rows of a pool, float32 ``[rows, N]``, at random.

    phases: the pool has so many parts of equal size, which take turns.
    """

    name: str
    pool: Floats
    phases: int = 1

    def order(self, start: int, end: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Rows of the pool for the steps ``[start, end)``."""
        part = len(self.pool) // self.phases
        phase = np.arange(start, end) // _PHASE_STEPS % self.phases
        return phase * part + random.integers(0, part, end - start)


class Sums:
    """Scores of ``N`` windows, summed in all the ways at once."""

    def __init__(self, count: int) -> None:
        names = ("plain", "folded", "compensated", "decayed", "interval", "carry")
        self.narrow = {name: np.zeros(count, np.float32) for name in names}
        self.wide = {name: np.zeros(count) for name in ("exact", "exact decayed")}

    def add(self, pool: Floats, order: npt.NDArray[np.int64], route_every: int) -> None:
        """Add one step after another, and an event after every ``route_every``."""
        _add(
            pool, order, route_every, np.float32(DECAY), *self.narrow.values(), *self.wide.values()
        )

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each way, its scores, and what they should be."""
        for name in ("plain", "folded", "compensated", "decayed"):
            exact = self.wide["exact decayed" if name == "decayed" else "exact"]
            yield name, torch.from_numpy(self.narrow[name]), torch.from_numpy(exact)


@njit  # type: ignore[untyped-decorator]
def _add(
    pool: Any, order: Any, route_every: int, decay: Any, plain: Any, folded: Any,
    compensated: Any, decayed: Any, interval: Any, carry: Any, exact: Any, exact_decayed: Any,
) -> None:  # fmt: skip
    count = pool.shape[1]
    for step in range(len(order)):
        row = pool[order[step]]
        for w in range(count):
            plain[w] += row[w]
            interval[w] += row[w]
            decayed[w] += row[w]
            exact[w] += row[w]
            exact_decayed[w] += row[w]
        if (step + 1) % route_every == 0:
            for w in range(count):
                folded[w] += interval[w]
                added = interval[w] - carry[w]
                total = compensated[w] + added
                carry[w] = (total - compensated[w]) - added
                compensated[w] = total
                interval[w] = 0
                decayed[w] *= decay
                exact_decayed[w] *= decay


def compare(found: torch.Tensor, exact: torch.Tensor, room: Capacities) -> Row:
    """Scores ``[N]`` against exact ones: values, and who would be FULL and who kept at all.

    error: largest and median relative error. inverted: share of all pairs of windows that rank
    the other way round. moved: windows that should be in a set and are not; lost: the share of
    the set's exact score that this costs.
    """
    error = (found.double() / exact - 1).abs()
    sign = (found[:, None] - found).sign() * (exact[:, None] - exact).sign()
    pairs = len(found) * (len(found) - 1)
    row = {
        "error_max": error.max().item(),
        "error_median": error.median().item(),
        "inverted": (sign < 0).sum().item() / pairs,
    }
    everything = torch.ones_like(exact, dtype=torch.bool)
    mine, best = rank_windows(found, everything), rank_windows(exact, everything)
    for name, size in (("full", room.full), ("kept", room.full + room.coded)):
        chosen, should = mine[:size], best[:size]
        row[f"{name}_moved"] = int((~torch.isin(should, chosen)).sum())
        row[f"{name}_lost"] = 1 - (exact[chosen].sum() / exact[should].sum()).item()
    return row


def sources(model: OfflineModel, budget: WindowBudget) -> list[Source]:
    """The masses of the history's windows."""
    text = model.tokenize(load("reference", Half.TEST))[: PROMPT + QUERIES]
    recording = record(model, Text(text, PROMPT), QUERIES)
    start, end = budget.history(PROMPT)
    count = budget.num_windows(PROMPT + QUERIES)
    mass = recording.by_window(PROMPT, PROMPT + QUERIES, budget.config.window, count)
    pools = mass[..., start:end].numpy()
    layers = [0, model.num_layers // 2, model.num_layers - 1]
    middle = pools[layers[1]]
    window = np.arange(end - start) % _PHASES
    hot = [
        middle * np.where(window == phase, _HOT, 1).astype(np.float32) for phase in range(_PHASES)
    ]
    return [
        *(Source(f"layer {layer}", np.ascontiguousarray(pools[layer])) for layer in layers),
        Source("steady", middle.mean(0, keepdims=True)),
        Source("phases", np.concatenate(hot), _PHASES),
    ]


def main() -> None:
    """Sum up, and compare at each checkpoint."""
    made = parser(__doc__ or "")
    options = made.parse_args()
    machine = begin(options)
    model, config = OfflineModel(fetch_model()), TieringConfig()
    budget = WindowBudget(config, config.geometry(model.heads), model.num_layers)
    room = budget.capacities(PROMPT)
    checkpoints = CHECKPOINTS[: 3 if options.quick else None]
    rows: list[Row] = []
    for source in tqdm(sources(model, budget), unit="source"):
        random, sums, done = np.random.default_rng(0), Sums(source.pool.shape[1]), 0
        for steps in checkpoints:
            for start in range(done, steps, _PHASE_STEPS):
                order = source.order(start, min(steps, start + _PHASE_STEPS), random)
                sums.add(source.pool, order, config.route_every)
            done = steps
            for way, found, exact in sums.pairs():
                rows.append(
                    {"source": source.name, "steps": steps, "way": way}
                    | compare(found, exact, room)
                )
        write_json(options.json, machine, rows, decay=DECAY, room=room.__dict__)
    print_table(
        rows,
        [
            Column("source", "source", "s"),
            Column("steps", "steps", "d"),
            Column("way", "sum", "s"),
            Column("error_max", "largest error", ".2e"),
            Column("error_median", "median", ".2e"),
            Column("inverted", "pairs inverted", ".2e"),
            Column("full_moved", "FULL moved", "d"),
            Column("full_lost", "lost", ".1e"),
            Column("kept_moved", "kept moved", "d"),
            Column("kept_lost", "lost", ".1e"),
        ],
    )


if __name__ == "__main__":
    main()
