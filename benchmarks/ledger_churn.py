"""What codes take while attention wavers: bytes of the ledger by kind against churn.

One request of the embedded model's shape, with the real tier manager on random keys and values.
Its scores are set: before each routing event the first windows by rank go last, a share of those
that FULL holds (``qevict_tiers.oscillation``). At a share of 1 every event has an altogether new
set for FULL, which is the worst that attention can do. Nothing here depends on the machine.

    cd benchmarks && python ledger_churn.py --json results/quality/ledger-churn.json
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch
from tqdm import tqdm

from qevict_kernels import make_kernels
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, PrefixReuse, TieringConfig
from qevict_tiers.diagnostics import Selection, selection_churn
from qevict_tiers.kept import UNLIMITED
from qevict_tiers.ledger import Counter, ledger_bound
from qevict_tiers.manager import TierManager
from qevict_tiers.oscillation import rotated
from qevict_tiers.policy import Tier
from qevict_tiers.presets import PRESETS
from report import Column, Row, begin, parser, print_table, write_json

HEADS, NUM_LAYERS = Heads(9, 3, 64), 30
PROMPT = 4096
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
_ROW = 1


class Request:
    """One request in all layers, routed by scores that are set.

    Its windows are pages 1, 2, 3 and so on.
    """

    def __init__(self, config: TieringConfig, prompt: int, num_layers: int, events: int) -> None:
        geometry, self._every = config.geometry(HEADS), config.route_every
        self.budget = budget = WindowBudget(config, geometry, num_layers)
        final = prompt + events * self._every
        windows = budget.num_windows(final)
        angles = torch.outer(torch.arange(float(final + geometry.window)), torch.full((32,), 0.1))
        rotary = RotaryTable(torch.cat([angles.cos(), angles.sin()], -1), is_neox=True)
        # All of it FULL, with codes beside.
        size = num_layers * (windows + 1) * (budget.full_bytes + budget.coded_bytes)
        self.manager = TierManager(
            budget,
            make_kernels(geometry, rotary, torch.device("cpu")),
            torch.zeros(size - size % 64, dtype=torch.uint8),
            num_pages=windows,
            num_rows=_ROW + 1,
            max_windows=windows,
            dtype=torch.bfloat16,
        )
        self.publishes = config.prefix_reuse is PrefixReuse.CODES
        self._layers = slice(0, num_layers)
        self.tokens = 0
        self.manager.open([_ROW], [UNLIMITED if self.publishes else 0])
        self._grow(prompt)
        views = self.manager.views
        views.score[:, _ROW].exponential_()
        self.manager.route(self._layers, [_ROW], [prompt])

    def event(self, share: float) -> None:
        """So many tokens more, and the next routing event; a share of FULL's windows go last."""
        last, views = self.tokens, self.manager.views
        self._grow(last + self._every)
        width = self.budget.num_windows(self.tokens)
        scores = views.score[:, _ROW, :width]
        by = round(share * self.budget.capacities(last).full)
        history = self.budget.history(last)
        scores.copy_(rotated(scores, views.tier[:, _ROW, :width], history, by))
        self.manager.route(self._layers, [_ROW], [self.tokens])

    def _grow(self, tokens: int) -> None:
        """Bring the request to a length, with random keys and values."""
        window, num_windows = self.budget.config.window, self.budget.num_windows
        added = range(num_windows(self.tokens), num_windows(tokens))
        pages = torch.arange(added.start, added.stop) + 1
        self.manager.append([_ROW], [added], pages)
        self.manager.allocate_full(self._layers, pages)
        locations = torch.arange(self.tokens, tokens) + window
        shape = (len(locations), HEADS.num_kv_heads, HEADS.head_dim)
        for layer in range(self.budget.num_layers):
            keys, values = torch.randn(2, *shape).bfloat16()
            self.manager.store(layer, locations, keys, values)
        self.tokens = tokens

    def selection(self) -> Selection:
        """What ranks among the first ``K_f`` of the history since the last event, as kept FULL."""
        width = self.budget.num_windows(self.tokens)
        tiers = self.manager.views.tier[:, _ROW, :width]
        ranked = (tiers != Tier.EVICTED) & ~self.manager.views.outranked[:, _ROW, :width]
        start, end = self.budget.history(self.tokens)
        ranked[:, :start] = False
        ranked[:, end:] = False
        kept = torch.where(ranked, Tier.FULL, Tier.EVICTED).to(torch.uint8)
        return Selection(self.tokens, kept, (start, end), ranked)


def measure(config: TieringConfig, share: float, events: int, num_layers: int, prompt: int) -> Row:
    """Bytes after each event, and the churn of what ranks FULL."""
    request = Request(config, prompt, num_layers, events)
    budget, manager = request.budget, request.manager
    selected, series = [request.selection()], []
    for number in range(events + 1):
        if number:
            request.event(share)
            selected.append(request.selection())
        held = asdict(manager.ledger_bytes())
        bound = ledger_bound(budget, request.tokens, publishes=request.publishes)
        everything = num_layers * budget.num_windows(request.tokens) * budget.full_bytes
        held |= {"bound": bound.total, "shadow_bound": bound.shadow, "everything": everything}
        series.append({key: held[key] for key in ("shadow", "shadow_bound", "everything")})
    churn = selection_churn(selected, [Tier.FULL])
    counts = manager.read_counters()
    return {
        "full_windows": budget.capacities(request.tokens).full,
        "coded_windows": budget.capacities(request.tokens).coded,
        "churn": churn.mean().item() if churn.numel() else 0.0,
        "promoted": counts[Counter.PROMOTED] / (events * num_layers),
        "quantized": counts[Counter.QUANTIZED] / num_layers,
        "codes_reused": counts[Counter.CODES_REUSED] / num_layers,
        "tokens": request.tokens,
        **_shares(held),
        "series": series,
    }


def _shares(held: dict[str, Any]) -> Row:
    """What is held at the end by kind, of the bytes of the whole context at full precision."""
    kinds = ("full", "codes", "params", "alignment", "shadow", "tables", "bound")
    shares = {kind: held[kind] / held["everything"] for kind in kinds}
    return shares | {"kept": held["reuse"] / held["everything"]}


def main() -> None:
    """Measure all settings."""
    made = parser(__doc__ or "")
    options = made.parse_args()
    machine = begin(options)
    torch.manual_seed(0)
    num_layers, events, prompt = (2, 6, 1024) if options.quick else (NUM_LAYERS, 32, PROMPT)
    rows = []
    chosen = list(product(("paper", "balanced"), (PrefixReuse.OFF, PrefixReuse.CODES), SHARES))
    for preset, reuse, share in tqdm(chosen, unit="setting"):
        config = replace(PRESETS[preset].config, prefix_reuse=reuse)
        found = measure(config, share, events, num_layers, prompt)
        rows.append({"preset": preset, "reuse": reuse.value, "share": share, **found})
        write_json(options.json, machine, rows)
    print_table(
        rows,
        [
            Column("preset", "preset", "s"),
            Column("reuse", "reuse", "s"),
            Column("full_windows", "K_f", "d"),
            Column("coded_windows", "K_q", "d"),
            Column("churn", "churn", ".3f"),
            Column("promoted", "promoted"),
            Column("full", "FULL", ".3f"),
            Column("codes", "codes", ".3f"),
            Column("params", "parameters", ".3f"),
            Column("alignment", "alignment", ".3f"),
            Column("shadow", "shadow", ".4f"),
            Column("kept", "kept", ".3f"),
            Column("tables", "tables", ".4f"),
            Column("bound", "bound", ".3f"),
        ],
    )


if __name__ == "__main__":
    main()
