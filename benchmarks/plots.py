"""Pictures for the documentation, from what benchmarks have measured.

    cd benchmarks
    python plots.py heat results/quality/ablations-scores.json ../docs/images/ablations.png
    python plots.py ledger results/quality/ledger-churn.json ../docs/images/ledger-churn.png

heat     the groups of `quality.ablations`: KL by options, colours on a scale of logarithms
ledger   `ledger_churn`: shadow codes from event to event, and bytes by kind
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from report import Row
from sglang_qevict import colors

_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
    "figure.dpi": 150, "figure.constrained_layout.use": True,
}  # fmt: skip

_PARAMS, _SHADOW, _KEPT = "#f9d0a8", "#bc4b51", "#7b6d8d"

Options = Mapping[str, str]


def heat(rows: Sequence[Row], groups: Sequence[str]) -> Figure:
    """One map for each group: its first option downwards, combinations of the others across."""
    panels = {group: [row for row in rows if row["group"] == group] for group in groups}
    widths = [len({_rest(row["options"]) for row in panel}) for panel in panels.values()]
    heights = [len({_first(row["options"]) for row in panel}) for panel in panels.values()]
    figure = Figure(figsize=(1.9 + 0.95 * max(widths), 1.2 * len(panels) + 0.42 * sum(heights)))
    shown = [row["kl"] for panel in panels.values() for row in panel]
    norm = LogNorm(min(shown), max(shown))
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=[1.5 + h for h in heights])
    for one, (group, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _map(one, group, panel, norm)
    figure.colorbar(axes[0, 0].images[0], ax=axes, label="KL to the full model, nats", shrink=0.6)
    return figure


def _first(options: Options) -> tuple[str, str]:
    """An option that names the row of a map."""
    name = next(iter(options))
    return name, options[name]


def _rest(options: Options) -> tuple[tuple[str, str], ...]:
    """What names the column."""
    return tuple(options.items())[1:]


def _map(axes: Axes, group: str, rows: Sequence[Row], norm: LogNorm) -> None:
    # In the order of the group, each once.
    down = list(dict.fromkeys(_first(row["options"]) for row in rows))
    across = list(dict.fromkeys(_rest(row["options"]) for row in rows))
    varies = [{column[i] for column in across} for i in range(len(across[0]))]
    grid = [[float("nan")] * len(across) for _ in down]
    palette = colormaps["YlOrRd"]
    for row in rows:
        y, x = down.index(_first(row["options"])), across.index(_rest(row["options"]))
        grid[y][x] = row["kl"]
        red, green, blue, _ = palette(norm(row["kl"]))
        is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        text = f"{row['kl']:.4f}\n{row['top1']:.1%}"
        color = "white" if is_dark else "black"
        axes.text(x, y, text, ha="center", va="center", color=color, fontsize=7)
    axes.imshow(grid, aspect="auto", cmap=palette, norm=norm)
    axes.set_title(group)
    axes.set_yticks(range(len(down)), [f"{name} {value}" for name, value in down])
    labels = [
        "\n".join(f"{k} {v}" for i, (k, v) in enumerate(column) if len(varies[i]) > 1)
        for column in across
    ]
    axes.set_xticks(range(len(across)), labels, fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def ledger(rows: Sequence[Row]) -> Figure:
    """Shadow codes of the paper's setting while attention wavers, and bytes by kind at the end."""
    figure = Figure(figsize=(9, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=[3, 4])
    _shadows(left, [row for row in rows if row["preset"] == "paper" and row["reuse"] == "off"])
    ends = [row for row in rows if row["share"] in (0, 1)]
    _kinds(right, ends)
    return figure


def _shadows(axes: Axes, rows: Sequence[Row]) -> None:
    palette = colormaps["viridis_r"]
    for number, row in enumerate(rows):
        series = row["series"]
        shares = [event["shadow"] / event["everything"] for event in series]
        color = palette(number / max(1, len(rows) - 1))
        axes.plot(range(len(series)), shares, color=color, label=f"churn {row['churn']:.2f}")
    bound = [event["shadow_bound"] / event["everything"] for event in rows[0]["series"]]
    axes.plot(range(len(bound)), bound, "--", color="black", label="worst case")
    axes.set_title("shadow codes, preset paper")
    axes.set_xlabel("routing events")
    axes.set_ylabel("share of all bytes at full precision")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _kinds(axes: Axes, rows: Sequence[Row]) -> None:
    kinds = {
        "FULL": (["full"], colors.FULL),
        "codes": (["codes"], colors.CODED),
        "parameters, padding": (["params", "alignment"], _PARAMS),
        "shadow": (["shadow"], _SHADOW),
        "kept for others": (["kept"], _KEPT),
    }
    base = [0.0] * len(rows)
    for name, (keys, color) in kinds.items():
        heights = [sum(row[key] for key in keys) for row in rows]
        axes.bar(range(len(rows)), heights, 0.7, bottom=base, color=color, label=name)
        base = [a + b for a, b in zip(base, heights, strict=True)]
    for place, row in enumerate(rows):
        worst = row["full"] + row["bound"]
        axes.plot([place - 0.4, place + 0.4], [worst, worst], "--", color="black")
    axes.plot([], [], "--", color="black", label="worst case")
    axes.set_xticks(range(len(rows)), [f"{row['churn']:.2f}" for row in rows], fontsize=7)
    for place, row in enumerate(rows):
        if row["share"] == 0:
            label = f"{row['preset']}\nreuse {row['reuse']}"
            below = axes.get_xaxis_transform()
            axes.text(place + 0.5, -0.1, label, transform=below, ha="center", va="top", fontsize=7)
    axes.set_xlabel("churn", labelpad=24)
    axes.set_title("bytes by kind after the last event")
    axes.set_ylabel("share of all bytes at full precision")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def main() -> None:
    """Draw one picture."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("kind", choices=["heat", "ledger"])
    made.add_argument("results", type=Path, nargs="+", metavar="JSON")
    made.add_argument("picture", type=Path, metavar="PNG")
    made.add_argument("--group", action="append", help="of ablations; default: all there are")
    options = made.parse_args()
    rows = [row for path in options.results for row in json.loads(path.read_text())["rows"]]
    with rc_context(_STYLE):
        if options.kind == "ledger":
            figure = ledger(rows)
        else:
            # A group of one setting is no map.
            found = dict.fromkeys(row["group"] for row in rows if row["options"])
            figure = heat(rows, options.group or list(found))
        figure.savefig(options.picture)


if __name__ == "__main__":
    main()
