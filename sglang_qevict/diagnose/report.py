"""A diagnosis as a folder: tables, plots, and one page that shows them."""

from __future__ import annotations

import csv
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qevict_tiers.diagnostics import Place, places
from sglang_qevict import colors
from sglang_qevict.diagnose.policies import Outcome, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Observation", "observations", "write_report"]

COLORS = {
    Place.PROTECTED: colors.PROTECTED,
    Place.FULL: colors.FULL,
    Place.CODED: colors.CODED,
    Place.EVICTED: colors.EVICTED,
}
_LINES = ("#bc4b51", "#7b6d8d", "#2a6f97", "#f4a259", "#5b8e7d")

_COLUMNS: dict[str, tuple[str, str]] = {
    "bytes_share": ("bytes", "Held after the last event, of all bytes at full precision"),
    "protected": ("protected", "Attention to sink and local windows"),
    "full": ("FULL", "Attention to FULL windows of the history"),
    "coded": ("coded", "Attention to coded windows"),
    "missed": ("evicted", "Attention to what is evicted when the step is made"),
    "fmm": ("FMM", "Attention of all later steps to what is evicted at an event"),
    "fmm_history": ("FMM, history", "The same of the attention to the history"),
    "churn": ("churn", "Of what is kept, how much changes from event to event"),
    "lir": ("LIR", "Of the windows that rank FULL, how many have come back"),
    "lir_oracle": ("LIR, oracle", "The same where true attention ranks"),
}
"""Of the table: field of ``Summary``, its heading, and what it is."""


class Observation(NamedTuple):
    """Something that the paper observed, whether it holds here, and the numbers."""

    claim: str
    holds: bool
    numbers: str


def observations(summaries: Mapping[str, Summary]) -> list[Observation]:
    """The three observations of the paper (QEvict, arXiv 2608.05326), checked on this run."""
    r1, r2, r3, off, r4 = (summaries[name] for name in ("R1", "R2", "R3", "R3 off", "R4"))
    return [
        Observation(
            "Attention drifts: what two tiers evict is needed later, and a coded tier keeps "
            "more of it.",
            r3.fmm < r2.fmm,
            f"Future missed mass {r2.fmm:.3f} with two tiers, {r3.fmm:.3f} with three "
            f"(single tokens, two tiers: {r1.fmm:.3f}).",
        ),
        Observation(
            "The coded tier carries it: with three tiers FULL windows alone hold less than "
            "with two, FULL and coded ones together more.",
            r3.full < r2.full < r3.full + r3.coded,
            f"FULL holds {r2.full:.3f} with two tiers; with three it holds {r3.full:.3f}, "
            f"coded windows {r3.coded:.3f}. With the coded tier off, FMM is {off.fmm:.3f}.",
        ),
        Observation(
            "Windows return, and windows of eight are the calmest: more of what is kept "
            "changes with single tokens and with windows of 32.",
            r3.lir > 0 and r3.churn < min(r1.churn, r4.churn),
            f"Churn {r1.churn:.4f} with single tokens, {r3.churn:.4f} with windows of the "
            f"chosen size, {r4.churn:.4f} with windows of 32. LIR {r3.lir:.2%}, by true "
            f"attention {r3.lir_oracle:.2%}.",
        ),
    ]


def write_report(directory: Path, outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> Path:
    """Write everything into a directory, which is made; returns the page.

    ``facts``: what was run, shown and kept as it is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    summaries = {outcome.policy.name: outcome.summary for outcome in outcomes}
    found = observations(summaries)
    labels = {outcome.policy.name: outcome.policy.label for outcome in outcomes}
    _write_tables(directory, outcomes, summaries)
    report = {
        "run": dict(facts),
        "policies": {
            name: {
                "label": labels[name],
                **{key: _defined(x) for key, x in summary._asdict().items()},
            }
            for name, summary in summaries.items()
        },
        "observations": [observation._asdict() for observation in found],
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plots = _write_plots(directory, outcomes)
    page = directory / "index.html"
    page.write_text(_page(facts, summaries, labels, found, plots), encoding="utf-8")
    return page


def _write_tables(
    directory: Path, outcomes: Sequence[Outcome], summaries: Mapping[str, Summary]
) -> None:
    with (directory / "policies.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["policy", *Summary._fields])
        table.writerows([name, *map(_defined, summary)] for name, summary in summaries.items())
    with (directory / "events.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["policy", "tokens", "layer", "fmm", "fmm_history", "churn", "lir"])
        for outcome in outcomes:
            for number, selection in enumerate(outcome.selections):
                for layer in range(outcome.fmm.shape[0]):
                    churn = outcome.churn[layer, number - 1].item() if number else ""
                    values = (x[layer, number].item() for x in (outcome.fmm, outcome.fmm_history))
                    lir = _defined(outcome.lir[layer, number].item())
                    row = [outcome.policy.name, selection.tokens, layer, *values, churn, lir]
                    table.writerow(row)
    with (directory / "mass.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["policy", "layer", *(place.name.lower() for place in Place)])
        for outcome in outcomes:
            for layer, shares in enumerate(outcome.places.double().mean(1).tolist()):
                table.writerow([outcome.policy.name, layer, *shares])


def _defined(value: float) -> float | None:
    """None for NaN, which JSON has not: a rate of nothing."""
    return None if math.isnan(value) else value


# -- plots --------------------------------------------------------------------------------


def _write_plots(directory: Path, outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Write the plots; returns file names and captions."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    named = {outcome.policy.name: outcome for outcome in outcomes}
    two, three = named["R2"], named["R3"]
    window = three.policy.budget.config.window
    style: dict[Any, Any] = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
        "figure.dpi": 150, "figure.constrained_layout.use": True,
    }  # fmt: skip
    plots: list[tuple[str, str, Figure]] = []
    with rc_context(style):
        figure = Figure(figsize=(7.5, 3.2))
        _plot_fmm(figure.subplots(), outcomes)
        plots.append(
            ("fmm.png", "Future missed mass: what later steps would give to windows that are "
             "gone at this event. Mean over layers.", figure)
        )  # fmt: skip
        figure = Figure(figsize=(7.5, 4.6))
        for axes, outcome in zip(figure.subplots(2, sharex=True), (two, three), strict=True):
            _plot_mass(axes, outcome)
        _name_places(figure)
        plots.append(("mass.png", "Where true attention lands, by layer; mean over steps.", figure))
        figure = Figure(figsize=(7.5, 5.6))
        _plot_tiers(figure, three)
        plots.append(
            ("tiers.png", f"Every window of {window} tokens in three layers, from event to event "
             "(R3).", figure)
        )  # fmt: skip
        figure = Figure(figsize=(7.5, 3.2))
        _plot_changes(figure.subplots(1, 2), outcomes)
        plots.append(
            ("changes.png", "Selection churn from event to event, and windows that have come "
             "back among those that rank FULL. Mean over layers.", figure)
        )  # fmt: skip
        for name, _, figure in plots:
            figure.savefig(directory / name)
    return [(name, caption) for name, caption, _ in plots]


def _plot_fmm(axes: Axes, outcomes: Iterable[Outcome]) -> None:
    for outcome, color in zip(outcomes, _LINES, strict=False):
        tokens = [selection.tokens for selection in outcome.selections]
        axes.plot(tokens, outcome.fmm.nanmean(0), color=color, label=_label(outcome))
    axes.set_xlabel("tokens of context at the event")
    axes.set_ylabel("share of attention")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _plot_mass(axes: Axes, outcome: Outcome) -> None:
    shares = outcome.places.double().mean(1)
    layers, base = range(shares.shape[0]), [0.0] * shares.shape[0]
    for place in Place:
        heights = shares[:, place].tolist()
        axes.bar(layers, heights, bottom=base, width=0.85, color=COLORS[place])
        base = [a + b for a, b in zip(base, heights, strict=True)]
    axes.set_title(_label(outcome))
    axes.set_ylabel("share of attention")
    axes.set_xlabel("layer")
    axes.label_outer()
    axes.set_ylim(0, 1)


def _plot_tiers(figure: Figure, outcome: Outcome) -> None:
    import numpy as np
    from matplotlib.colors import ListedColormap

    last = outcome.selections[-1]
    num_layers, count = last.tiers.shape
    chosen = sorted({0, num_layers // 2, num_layers - 1})
    palette = ListedColormap(["white", *(COLORS[place] for place in Place)])
    window = outcome.policy.budget.config.window
    for axes, layer in zip(np.atleast_1d(figure.subplots(len(chosen), sharex=True)), chosen,
                           strict=True):  # fmt: skip
        picture = np.zeros((count, len(outcome.selections)), dtype=np.uint8)
        for column, selection in enumerate(outcome.selections):
            there = selection.tiers.shape[1]
            picture[:there, column] = 1 + places(selection, there)[layer].numpy()
        first, final = outcome.selections[0].tokens, last.tokens
        axes.imshow(
            picture, aspect="auto", origin="lower", cmap=palette, vmin=-0.5, vmax=4.5,
            interpolation="nearest", extent=(first, final, 0, count * window),
        )  # fmt: skip
        axes.set_title(f"layer {layer}")
        axes.set_ylabel("token")
    axes.set_xlabel("tokens of context at the event")
    _name_places(figure)


def _name_places(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLORS[place], label=_name(place)) for place in Place]
    figure.legend(handles=patches, loc="outside right center")


def _plot_changes(both: Sequence[Axes], outcomes: Sequence[Outcome]) -> None:
    churn, back = both
    shown = [outcome for outcome in outcomes if outcome.policy.name != "R3 off"]
    for outcome in shown:
        color = _LINES[list(outcomes).index(outcome)]
        tokens = [selection.tokens for selection in outcome.selections]
        churn.plot(tokens[1:], outcome.churn.nanmean(0), color=color)
        back.plot(tokens, outcome.lir.nanmean(0).nan_to_num(), color=color, label=_label(outcome))
    churn.set_title("churn")
    back.set_title("returns (LIR)")
    for axes in both:
        axes.set_xlabel("tokens of context")
        axes.set_ylim(bottom=0)
    back.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _label(outcome: Outcome) -> str:
    return f"{outcome.policy.name}: {outcome.policy.label}"


def _name(place: Place) -> str:
    return "FULL" if place is Place.FULL else place.name.lower()


# -- page ---------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; } th[title] { cursor: help; text-decoration: underline dotted; }
img { width: 100%; } figure { margin: 2rem 0; } figcaption { color: #555; }
.yes, .no { display: inline-block; min-width: 7.5rem; font-weight: 600; }
.yes { color: #2b7a4b; } .no { color: #b23a48; }
dt { float: left; clear: left; width: 11rem; color: #555; } dd { margin-left: 11.5rem; }
"""


def _page(
    facts: Mapping[str, Any],
    summaries: Mapping[str, Summary],
    labels: Mapping[str, str],
    found: Iterable[Observation],
    plots: Iterable[tuple[str, str]],
) -> str:
    def text(value: Any) -> str:
        return html.escape(str(value))

    def number(value: float) -> str:
        return "&ndash;" if math.isnan(value) else f"{value:.4f}"

    heads = "".join(
        f'<th title="{text(what)}">{text(head)}</th>' for head, what in _COLUMNS.values()
    )
    rows = "".join(
        f"<tr><td>{text(name)}: {text(labels[name])}</td>"
        + "".join(f"<td>{number(getattr(summary, field))}</td>" for field in _COLUMNS)
        + "</tr>\n"
        for name, summary in summaries.items()
    )
    verdicts = "".join(
        f'<p><span class="{"yes" if holds else "no"}">{"holds" if holds else "does not hold"}'
        f"</span>{text(claim)}<br>{text(numbers)}</p>\n"
        for claim, holds, numbers in found
    )
    figures = "".join(
        f'<figure><img src="{text(name)}" alt=""><figcaption>{text(caption)}</figcaption>'
        "</figure>\n"
        for name, caption in plots
    )
    run = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KV tiers on {text(facts.get("model", "a model"))}</title>
<style>{_STYLE}</style>
<h1>What KV tiers would do</h1>
<dl>{run}</dl>
<h2>The paper's observations</h2>
{verdicts}
<h2>Policies</h2>
<div class="wide"><table><tr><th>policy</th>{heads}</tr>
{rows}</table></div>
<p>Shares of the model's true attention, recorded without tiers: means over layers, steps and
events. What codes do to the numbers that are attended is no part of this.</p>
{figures}
<p>The same as data: <a href="policies.csv">policies.csv</a>, <a href="events.csv">events.csv</a>,
<a href="mass.csv">mass.csv</a>, <a href="report.json">report.json</a>.</p>
</html>
"""
