"""A run as a folder: tables, plots, and one page that has everything in it."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_qevict import colors
from sglang_qevict.stress.mix import CheckKind, Kind
from sglang_qevict.stress.records import Outcome, Record, Run, Sample
from sglang_qevict.stress.summary import (
    Fairness,
    TenantSummary,
    alike,
    fairness,
    right_share,
    summarize,
    unmet,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write_report"]

_KIND_COLORS = {
    Kind.CHAT: "#2a6f97",
    Kind.DOCUMENT: "#5b8e7d",
    Kind.AGENT: "#7b6d8d",
    Kind.BATCH: "#8d99ae",
    Kind.OSCILLATOR: "#f4a259",
    Kind.THRASHER: "#c8963e",
    Kind.FLOODER: "#bc4b51",
    Kind.TRACE: "#52796f",
}
_ERROR = "#b23a48"
_TIERS = (
    ("full", "FULL", colors.FULL), ("coded", "coded", colors.CODED),
    ("evicted", "evicted", colors.EVICTED),
)  # fmt: skip
_BYTES = (
    ("full", "FULL copies", colors.FULL), ("codes", "codes", colors.CODED),
    ("params", "scales and zeros", "#f8c48f"), ("alignment", "alignment", "#fbe3cb"),
    ("shadow", "shadow", "#bc4b51"), ("reuse", "kept for reuse", colors.PROTECTED),
)  # fmt: skip
"""Key of `kv_tiering.bytes`, label, colour; what the arena holds."""

_MOVES = (
    ("rank_promoted", "risen by rank", "#2a6f97"), ("promoted", "rebuilt as FULL", "#5b8e7d"),
    ("demoted", "demoted to codes", "#f4a259"), ("evicted_full", "evicted, were FULL", "#8d99ae"),
    ("evicted_coded", "evicted, were coded", "#bc4b51"),
)  # fmt: skip
_MIB = 2**20

_COLUMNS: dict[str, tuple[str, str, str]] = {
    "kind": ("kind", "What its prompts look like", ""),
    "sent": ("sent", "Requests sent", "d"),
    "done": ("done", "Answered to the end", "d"),
    "left": ("left", "Aborted by their own client, as the mix says", "d"),
    "errors": ("errors", "Refused by the server, lost with the connection, or too late", "d"),
    "cut": ("cut", "Unfinished when the run ended", "d"),
    "first_p50": (
        "TTFT p50",
        "Seconds until the first token, or waited for it in vain, median",
        ".2f",
    ),
    "first_p90": ("p90", "Nine of ten requests had it by then", ".2f"),
    "first_p99": ("p99", "99 of 100 requests had it by then", ".2f"),
    "token_p50": ("TPOT p50", "Milliseconds for each token after the first, median", "ms"),
    "token_p90": ("p90", "Nine of ten requests were as fast", "ms"),
    "token_p99": ("p99", "99 of 100 requests were as fast", "ms"),
    "gap_p99": ("gap p99", "Milliseconds of the longest wait within an answer, 99 of 100", "ms"),
    "tokens_per_second": ("tokens/s", "Tokens of answers a second, over the whole run", ".1f"),
    "cached": ("cached", "Share of prompt tokens that came from the prefix cache", ".0%"),
    "retractions": ("retracted", "How often requests were sent back to the queue", "d"),
    "right": ("right", "Checked answers that are right, of all that were checked", "checks"),
    "same_as_alone": ("as alone", "Answers equal to those of the same prompts served alone", ".0%"),
    "slowdown": ("slowdown", "Latency over that of the same requests served alone, median", ".2f"),
    "churn": ("churn", "Mean selection churn of the tenant's requests, from /metrics", ".4f"),
}
"""Of the table: field of ``TenantSummary``, its heading, what it is, and its format."""


def write_report(directory: Path, run: Run) -> Path:
    """Write everything into a directory, which is there, in place of an earlier report.

    Returns the page. Raises ``OSError``.
    """
    rows = summarize(run)
    fair = fairness(run.records, run.alone)
    _write_tables(directory, run, rows)
    figures = _plots(directory, run, rows, fair)
    report = {
        "run": {**run.facts, "seconds": run.seconds, "stopped": run.stopped, "died": run.died},
        "totals": _totals(run, fair),
        "unmet": unmet(run),
        "notes": run.notes,
        "errors": _errors(run),
        "tenants": {row.tenant: dataclasses.asdict(row) for row in rows},
        "alone": {"counters": run.alone_moves, "promotions": _promotions(run)},
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    page = directory / "index.html"
    page.write_text(_page(run, rows, fair, _embedded(directory, figures)), encoding="utf-8")
    return page


def _embedded(directory: Path, plots: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Captions and pictures, as the page has them: it needs no other file."""
    return [
        (caption, base64.b64encode((directory / name).read_bytes()).decode())
        for name, caption in plots
    ]


def _write_tables(directory: Path, run: Run, rows: Sequence[TenantSummary]) -> None:
    tenants = [dataclasses.asdict(row) for row in rows]
    requests = [record.as_json() for record in run.records]
    for request in requests:
        del request["output_ids"]
    samples = [_flat(sample) for sample in run.samples]
    for name, entries in (("tenants", tenants), ("requests", requests), ("samples", samples)):
        columns = list(dict.fromkeys(key for entry in entries for key in entry))
        with (directory / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(entries)
    baseline = directory / "baseline.json"
    baseline.unlink(missing_ok=True)
    if run.alone:
        baseline.write_text(json.dumps([record.as_json() for record in run.alone]))


def _flat(sample: Sample) -> dict[str, float]:
    head = {
        "seconds": sample.at_seconds,
        "running": sample.running,
        "waiting": sample.waiting,
        "tokens": sample.tokens,
    }
    return {**head, **sample.tiering, **sample.metrics}


def _totals(run: Run, fair: Fairness) -> dict[str, Any]:
    records, count = run.records, Counter(record.outcome for record in run.records)
    tokens = sum(record.output_tokens for record in records)
    same = alike(records, run.alone)
    checks = {kind: right_share(run, kind) for kind in (CheckKind.NEEDLE, CheckKind.COPY)}
    return {
        "requests": len(records),
        **{outcome.value: count[outcome] for outcome in Outcome},
        "output_tokens": tokens,
        "tokens_per_second": tokens / run.seconds if run.seconds else 0.0,
        "retractions": sum(record.retractions for record in records),
        **{f"{kind.value}_right": right for kind, (right, _) in checks.items()},
        **{f"{kind.value}_checked": checked for kind, (_, checked) in checks.items()},
        "compared_with_alone": same.compared,
        "same_as_alone": same.same,
        "shared_with_alone": same.shared,
        "fairness_ratio": fair.ratio,
        "fairness_jain": fair.jain,
        "churn": _mean(run.samples, "churn"),
        "lir": _mean(run.samples, "lir"),
    }


def _mean(samples: Sequence[Sample], name: str) -> float | None:
    """What a histogram gained from the first sample to the last, as a mean."""
    ends = [sample.metrics for sample in samples if f"{name}_count" in sample.metrics]
    if not ends:
        return None
    total, count = (ends[-1][f"{name}_{x}"] - ends[0][f"{name}_{x}"] for x in ("sum", "count"))
    return total / count if count > 0 else None


def _errors(run: Run) -> dict[str, int]:
    """How often what was said, the most frequent first."""
    told = (f"{r.outcome.value}: {r.error}" for r in run.records if r.outcome.is_error)
    return dict(Counter(told).most_common(10))


def _promotions(run: Run) -> dict[str, float]:
    """Of 1,000 windows that were ranked while a tenant was served alone, how many rose."""
    return {
        tenant: 1e3 * moves["counters.rank_promoted"] / moves["counters.routed"]
        for tenant, moves in run.alone_moves.items()
        if moves.get("counters.routed")
    }


# -- plots --------------------------------------------------------------------------------

_PLOTS = tuple(
    f"{name}.png" for name in ("latency", "requests", "load", "tiers", "moves", "fairness")
)


def _plots(
    directory: Path, run: Run, rows: Sequence[TenantSummary], fair: Fairness
) -> list[tuple[str, str]]:
    """Write the plots; returns file names and captions."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 10, "axes.titlelocation": "left", "legend.frameon": False,
        "figure.dpi": 150, "figure.constrained_layout.use": True,
    }  # fmt: skip
    tall = 0.2 * len(rows)
    plots: list[tuple[str, str, Figure]] = []
    with rc_context(style):

        def plot(name: str, caption: str, height: float) -> Figure:
            figure = Figure(figsize=(7.5, height))
            plots.append((name, caption, figure))
            return figure

        if run.records:
            _plot_latency(plot(
                "latency.png", "Each tenant from its median (filled) over the 90th to the 99th "
                "percentile of its requests; logarithmic.", 1.3 + tall,
            ), rows)  # fmt: skip
            _plot_requests(plot(
                "requests.png", "Every request: pale until its first token, then in the colour of "
                "its kind; a cross is an error, a stroke a client that left.", 1.3 + 1.3 * tall,
            ), run)  # fmt: skip
        if len(run.samples) > 1:
            _plot_load(plot(
                "load.png", "Requests under way, and tokens of answers a second.", 3.4
            ), run)  # fmt: skip
        if len(run.samples) > 1 and run.samples[-1].tiering:
            _plot_tiers(plot(
                "tiers.png", "Windows that running requests see, over all layers, and the bytes of "
                "all copies: FULL ones and the ledger.", 4.6,
            ), run.samples)  # fmt: skip
            _plot_moves(plot(
                "moves.png", "Windows that moved, a second, each counted once a layer; and mean "
                "churn of the routing events since the look before.", 4.2,
            ), run.samples)  # fmt: skip
        if fair.slowdown:
            _plot_fairness(plot(
                "fairness.png", "How many times longer a tenant's requests took than alone; "
                "median.", 1.1 + tall,
            ), rows, fair)  # fmt: skip
        for name in _PLOTS:
            (directory / name).unlink(missing_ok=True)
        for name, _, figure in plots:
            figure.savefig(directory / name)
    return [(name, caption) for name, caption, _ in plots]


def _color(row: TenantSummary) -> str:
    return _KIND_COLORS[Kind(row.kind)]


def _name_tenants(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _plot_latency(figure: Figure, rows: Sequence[TenantSummary]) -> None:
    first, token = figure.subplots(1, 2, sharey=True)
    for axes, name, scale, title in (
        (first, "first", 1.0, "time to first token, s"),
        (token, "token", 1e3, "time per output token, ms"),
    ):
        for place, row in enumerate(rows):
            values = [getattr(row, f"{name}_{q}") for q in ("p50", "p90", "p99")]
            if None in values:
                continue
            low, middle, high = (value * scale for value in values)
            axes.plot([low, high], [place, place], color=_color(row), alpha=0.45, linewidth=3,
                      solid_capstyle="round")  # fmt: skip
            axes.plot([low], [place], "o", color=_color(row), markersize=6)
            axes.plot([middle, high], [place, place], "o", markerfacecolor="white",
                      markeredgecolor=_color(row), markersize=5)  # fmt: skip
        axes.set_xscale("log")
        axes.set_title(title)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
        _plain_numbers(axes)
    _name_tenants(first, [row.tenant for row in rows])
    token.tick_params(axis="y", length=0)


def _plain_numbers(axes: Axes) -> None:
    """Plain numbers on a logarithmic axis; between the decades where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=12)
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_requests(figure: Figure, run: Run) -> None:
    axes = figure.subplots()
    kinds = {tenant.name: tenant.kind for tenant in run.mix.tenants}
    for place, (name, kind) in enumerate(kinds.items()):
        mine = [record for record in run.records if record.tenant == name]
        lanes = _lanes([(r.at_seconds, r.at_seconds + r.ended_seconds) for r in mine])
        height = 0.8 / max(1, max(lanes, default=0) + 1)
        for lane in set(lanes):
            bottom, thick = place - 0.4 + lane * height, height * 0.82
            there = [record for record, at in zip(mine, lanes, strict=True) if at == lane]
            _plot_lane(axes, there, (bottom, thick), _KIND_COLORS[kind])
    axes.set_xlabel("seconds")
    axes.set_xlim(0, max(run.seconds, 1e-3))
    if run.seconds > run.mix.seconds:
        axes.axvline(run.mix.seconds, color="#bbbbbb", linewidth=1, linestyle=":")
    _name_tenants(axes, list(kinds))


def _plot_lane(
    axes: Axes, records: Sequence[Record], place: tuple[float, float], color: str
) -> None:
    """Requests one after the other; ``place``: bottom and height."""
    waits, answers = [], []
    failed, left = [], []
    for record in records:
        start, length, wait = record.at_seconds, record.ended_seconds, record.first_seconds
        wait = length if wait is None else wait
        waits.append((start, wait))
        answers.append((start + wait, length - wait))
        if record.outcome.is_error:
            failed.append(start + length)
        elif record.outcome is Outcome.ABORTED:
            left.append(start + length)
    bottom, thick = place
    axes.broken_barh(waits, place, color=color, alpha=0.28, linewidth=0)
    axes.broken_barh(answers, place, color=color, linewidth=0)
    axes.plot(failed, [bottom + thick / 2] * len(failed), "x", color=_ERROR, markersize=5)
    axes.vlines(left, bottom, bottom + thick, color="#222222", linewidth=1)


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each span, the lowest in which it overlaps none before it."""
    lanes = [0] * len(spans)
    ends: list[float] = []
    for number in sorted(range(len(spans)), key=lambda n: spans[n][0]):
        start, end = spans[number]
        free = (lane for lane, until in enumerate(ends) if until <= start)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(end)
        else:
            ends[lane] = end
        lanes[number] = lane
    return lanes


def _plot_load(figure: Figure, run: Run) -> None:
    top, bottom = figure.subplots(2, sharex=True)
    times = [sample.at_seconds for sample in run.samples]
    running = [sample.running for sample in run.samples]
    waiting = [sample.waiting for sample in run.samples]
    top.stackplot(times, running, waiting, colors=(colors.FULL, "#d4d9e1"),
                  labels=("being answered", "waiting for a first token"), step="post")  # fmt: skip
    top.set_ylabel("requests")
    top.yaxis.get_major_locator().set_params(integer=True)
    _legend(top)
    middles = [(a + b) / 2 for a, b in pairwise(times)]
    rates = [
        (b.tokens - a.tokens) / (b.at_seconds - a.at_seconds) for a, b in pairwise(run.samples)
    ]
    bottom.fill_between(middles, rates, color=colors.FULL, alpha=0.25, linewidth=0)
    bottom.plot(middles, rates, color=colors.FULL)
    bottom.set_ylabel("tokens/s")
    bottom.set_xlabel("seconds")
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
    top.set_xlim(0, max(times))


def _plot_tiers(figure: Figure, samples: Sequence[Sample]) -> None:
    top, bottom = figure.subplots(2, sharex=True)
    times = [sample.at_seconds for sample in samples]
    _stack(top, times, [
        (label, color, [sample.tiering.get(f"windows.{key}", 0.0) for sample in samples])
        for key, label, color in _TIERS
    ])  # fmt: skip
    top.set_ylabel("windows")
    _stack(bottom, times, [
        (label, color, [sample.tiering.get(f"bytes.{key}", 0.0) / _MIB for sample in samples])
        for key, label, color in _BYTES
    ])  # fmt: skip
    claimed = [sample.tiering.get("bytes.claimed", 0.0) / _MIB for sample in samples]
    bottom.plot(times, claimed, color="#444444", linewidth=1, linestyle="--", label="claimed")
    bottom.set_ylabel("MiB")
    bottom.set_xlabel("seconds")
    top.set_xlim(0, max(times))
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        _legend(axes)


def _stack(
    axes: Axes, times: Sequence[float], parts: Iterable[tuple[str, str, Sequence[float]]]
) -> None:
    """A stacked area of the parts that are not always nothing."""
    shown = [part for part in parts if any(part[2])]
    if shown:
        labels, tints, values = zip(*shown, strict=True)
        axes.stackplot(times, *values, labels=labels, colors=tints, step="post")


def _plot_moves(figure: Figure, samples: Sequence[Sample]) -> None:
    top, bottom = figure.subplots(2, sharex=True)
    pairs = [(a, b) for a, b in pairwise(samples) if a.tiering and b.tiering]
    middles = [(a.at_seconds + b.at_seconds) / 2 for a, b in pairs]
    for key, label, color in _MOVES:
        name = f"counters.{key}"
        rates = [
            (b.tiering[name] - a.tiering[name]) / (b.at_seconds - a.at_seconds) for a, b in pairs
        ]
        if any(rates):
            top.plot(middles, rates, color=color, label=label)
    top.set_yscale("symlog", linthresh=10)
    top.set_ylim(bottom=0)
    top.set_ylabel("windows/s")
    _legend(top)
    for name, label, color in (
        ("churn", "churn", colors.FULL), ("lir", "returns (LIR)", colors.CODED),
    ):  # fmt: skip
        means = [_mean((a, b), name) for a, b in pairs]
        known = [(at, mean) for at, mean in zip(middles, means, strict=True) if mean is not None]
        if known:
            bottom.plot(*zip(*known, strict=True), "o-", markersize=3, color=color, label=label)
    bottom.set_ylabel("share")
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(0, max(sample.at_seconds for sample in samples))
    bottom.set_xlabel("seconds")
    _legend(bottom)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _plot_fairness(figure: Figure, rows: Sequence[TenantSummary], fair: Fairness) -> None:
    axes = figure.subplots()
    shown = [row for row in rows if row.tenant in fair.slowdown]
    values = [fair.slowdown[row.tenant] for row in shown]
    bars = axes.barh(range(len(shown)), values, height=0.7, color=[_color(row) for row in shown])
    axes.bar_label(bars, labels=[f" {value:.1f}x" for value in values], color="#555555")
    axes.axvline(1, color="#444444", linewidth=1, linestyle=":")
    axes.set_xlabel("slowdown against running alone")
    _name_tenants(axes, [row.tenant for row in shown])


# -- page ---------------------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { font-weight: 600; } th[title] { cursor: help; text-decoration: underline dotted; }
figure { margin: 2rem 0; max-width: 60rem; } img { width: 100%; } figcaption { color: #555; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.5rem 0; }
.card { border: 1px solid #ddd; border-radius: .4rem; padding: .5rem .9rem; min-width: 7rem; }
.card b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
.card span { color: #555; } .bad, .card.bad b { color: #b23a48; }
dt { float: left; clear: left; width: 7rem; color: #555; } dd { margin-left: 7.5rem; }
"""


def _page(
    run: Run, rows: Sequence[TenantSummary], fair: Fairness, figures: Iterable[tuple[str, str]]
) -> str:
    facts = "".join(
        f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in run.facts.items()
    )
    heads = "".join(
        f'<th title="{_text(what)}">{_text(head)}</th>' for head, what, _ in _COLUMNS.values()
    )
    lines = "".join(
        f"<tr><td>{_text(row.tenant)}</td>"
        + "".join(f"<td>{_cell(row, field)}</td>" for field in _COLUMNS)
        + "</tr>\n"
        for row in rows
    )
    pictures = "".join(
        f'<figure><img alt="" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>\n"
        for caption, data in figures
    )
    files = ["tenants.csv", "requests.csv", "samples.csv", "report.json"]
    if run.alone:
        files.append("baseline.json")
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in files)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Stress test {_text(run.mix.name)}</title>
<style>{_STYLE}</style>
<h1>Stress test: {_text(run.mix.name)}</h1>
<dl>{facts}</dl>
{_warnings(run)}
{_cards(run, fair)}
<h2>Tenants</h2>
<div class="wide"><table><tr><th>tenant</th>{heads}</tr>
{lines}</table></div>
{_list("What went wrong", (f"{count} x {error}" for error, count in _errors(run).items()))}
{
        _list(
            "Windows that rose by rank, of 1,000 that were ranked while a tenant was served alone",
            (f"{tenant}: {rate:.2f}" for tenant, rate in _promotions(run).items()),
        )
    }
{pictures}
<p>The same as data: {links}.</p>
</html>
"""


def _warnings(run: Run) -> str:
    told = [run.died] if run.died else []
    if run.stopped:
        told.append("Stopped by its user: this is what was measured until then.")
    else:
        told += unmet(run)
    marked = [f'<p class="bad">{_text(sentence)}</p>' for sentence in told]
    return "\n".join([*marked, *(f"<p>{_text(note)}</p>" for note in run.notes)])


def _cards(run: Run, fair: Fairness) -> str:
    totals = _totals(run, fair)
    errors = sum(totals[outcome.value] for outcome in Outcome if outcome.is_error)
    cards: list[tuple[str, str, bool]] = [
        (f"{totals['done']:,} of {totals['requests']:,}", "requests done", False),
        (f"{errors:,}", "errors", errors > 0),
        (f"{totals['tokens_per_second']:,.1f}", "tokens/s", False),
        (f"{totals['retractions']:,}", "retractions", False),
    ]
    for kind, label in (("needle", "needles found"), ("copy", "copies exact")):
        if totals[f"{kind}_checked"]:
            of = f"{totals[f'{kind}_right']} of {totals[f'{kind}_checked']}"
            cards.append((of, label, False))
    if totals["compared_with_alone"]:
        of = f"{totals['same_as_alone']} of {totals['compared_with_alone']}"
        cards.append((of, "answers as alone", False))
    if fair.ratio is not None:
        cards.append((f"{fair.ratio:.1f}x", "max/min slowdown", False))
    if totals["churn"] is not None:
        cards.append((f"{totals['churn']:.4f}", "mean churn", False))
    return '<div class="cards">' + "".join(
        f'<div class="card{" bad" if bad else ""}"><b>{_text(value)}</b>'
        f"<span>{_text(label)}</span></div>"
        for value, label, bad in cards
    ) + "</div>"  # fmt: skip


def _cell(row: TenantSummary, field: str) -> str:
    value, form = getattr(row, field), _COLUMNS[field][2]
    if form == "checks":
        return f"{row.right} of {row.checked}" if row.checked else ""
    if value is None:
        return ""
    if form == "ms":
        return f"{value * 1e3:,.0f}"
    if field == "errors" and value:
        return f'<b class="bad">{value}</b>'
    return _text(format(value, form))


def _list(title: str, lines: Iterable[str]) -> str:
    entries = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<h2>{_text(title)}</h2><ul>{entries}</ul>" if entries else ""


def _text(value: Any) -> str:
    return html.escape(str(value))
