"""A dashboard as a picture, from what a Prometheus has: without Grafana and without a browser.

``python -m qevict_monitoring.render DASHBOARD.json PROMETHEUS_URL OUT.png --minutes 15``
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qevict_monitoring.prometheus import Panel, Prometheus, Series, expand, read_panels

__all__ = ["render"]

_BACKGROUND, _CARD, _TEXT, _FAINT = "#111217", "#181B1F", "#D8D9DA", "#8E8E9C"
_PALETTE = ("#5794F2", "#73BF69", "#FADE2A", "#FF9830", "#F2495C", "#B877D9", "#8AB8FF", "#96D98D")
_COLUMNS, _COLUMN_INCHES, _ROW_INCHES = 24, 0.62, 0.33
_STEPS = 240

_Named = tuple[str, Series]


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    index = 0
    while abs(value) >= base and index < len(units) - 1:
        value, index = value / base, index + 1
    digits = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits} {units[index]}".rstrip()


_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": lambda v: _scaled(v, 1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "percentunit": lambda v: f"{100 * v:.3g} %",
    "s": lambda v: f"{v:.3g} s" if v >= 1 else f"{1000 * v:.3g} ms",
    "short": lambda v: _scaled(v, 1000, ("", "k", "M", "G")),
    "none": lambda v: f"{v:.4g}",
    "x": lambda v: f"{v:.3g}x",
    "binBps": lambda v: _scaled(v, 1024, ("B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s")),
    "wps": lambda v: f"{v:.3g}/s",
    "ops": lambda v: f"{v:.3g}/s",
    "reqps": lambda v: f"{v:.3g}/s",
}


def render(dashboard: Path, prometheus: Prometheus, start: float, end: float, out: Path) -> None:
    """Draw all panels of a dashboard's file from one time to another (seconds since the epoch)."""
    panels = list(read_panels(dashboard))
    rows = max(panel.y + panel.height for panel in panels)
    size = (_COLUMNS * _COLUMN_INCHES, rows * _ROW_INCHES)
    figure = plt.figure(figsize=size, dpi=110, facecolor=_BACKGROUND)
    step = max(1.0, (end - start) / _STEPS)
    for panel in panels:
        named = [
            (target.name(series.labels), series)
            for target in panel.targets
            for series in prometheus.query_range(
                expand(target.expr, rate_seconds=max(20, round(4 * step))), start, end, step
            )
        ]
        _card(figure, panel, rows, named, (start, end))
    figure.savefig(out, facecolor=_BACKGROUND)
    plt.close(figure)


def _card(
    figure: Any, panel: Panel, rows: int, named: list[_Named], span: tuple[float, float]
) -> None:
    x, width = panel.x / _COLUMNS, panel.width / _COLUMNS
    y, height = 1 - (panel.y + panel.height) / rows, panel.height / rows
    inch_x, inch_y = 1 / (_COLUMNS * _COLUMN_INCHES), 1 / (rows * _ROW_INCHES)
    if panel.kind == "row":
        figure.text(x + 0.1 * inch_x, y + 0.08 * inch_y, panel.title, color=_TEXT, fontsize=11)
        return
    gap = 0.04
    figure.add_artist(
        FancyBboxPatch(
            (x + gap * inch_x, y + gap * inch_y),
            width - 2 * gap * inch_x,
            height - 2 * gap * inch_y,
            boxstyle="square,pad=0",
            facecolor=_CARD,
            edgecolor="#24272C",
            transform=figure.transFigure,
            zorder=0,
        )
    )
    top = y + height - 0.24 * inch_y
    figure.text(x + 0.15 * inch_x, top, panel.title, color=_TEXT, fontsize=9)
    draw = {"stat": _draw_number, "bargauge": _draw_bars, "timeseries": _draw_lines}[panel.kind]
    left, bottom = {"stat": (0.15, 0.12), "bargauge": (1.5, 0.2)}.get(panel.kind, (0.8, 0.62))
    axes = figure.add_axes(
        (
            x + left * inch_x,
            y + bottom * inch_y,
            width - (left + 0.2) * inch_x,
            height - (bottom + 0.36) * inch_y,
        ),
        facecolor="none",
    )
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=_FAINT, labelsize=7, length=0)
    shown = [(name, series) for name, series in named if not all(map(math.isnan, series.values))]
    if not shown:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no data", color=_FAINT, ha="center", transform=axes.transAxes)
        return
    draw(axes, panel, shown, span)


def _colors(panel: Panel, names: Sequence[str]) -> list[str]:
    return [
        panel.colors.get(name, _PALETTE[index % len(_PALETTE)]) for index, name in enumerate(names)
    ]


def _draw_number(axes: Axes, panel: Panel, named: list[_Named], span: tuple[float, float]) -> None:
    _, series = named[0]
    values = [v for v in series.values if not math.isnan(v)]
    axes.fill_between(series.times, series.values, color=_PALETTE[0], alpha=0.18, lw=0)
    axes.plot(series.times, series.values, color=_PALETTE[0], lw=1.2)
    axes.set_axis_off()
    low, high = min(values), max(values)
    axes.set_ylim(min(0.0, low), (high or 1) * 2.2)
    text = _FORMATS[panel.unit](values[-1])
    axes.text(0.5, 0.62, text, color=_PALETTE[0], fontsize=19, ha="center", va="center",
              transform=axes.transAxes)  # fmt: skip


def _draw_bars(axes: Axes, panel: Panel, named: list[_Named], span: tuple[float, float]) -> None:
    last = [(name, [v for v in s.values if not math.isnan(v)][-1]) for name, s in named]
    last = sorted(last, key=lambda item: item[1])[-10:]
    bars = axes.barh([name for name, _ in last], [v for _, v in last], 0.6, color=_PALETTE[0])
    axes.bar_label(
        bars, [_FORMATS[panel.unit](v) for _, v in last], color=_TEXT, fontsize=8, padding=4
    )
    axes.set_xlim(0, max(1e-9, 1.2 * max(v for _, v in last)))
    axes.set_xticks([])
    axes.tick_params(colors=_TEXT)


def _ticks(top: float, unit: str) -> list[float]:
    """Round values up to ``top``, of bytes in their own unit."""
    is_bytes = unit in ("bytes", "binBps")
    scale = 1024.0 ** int(math.log(top, 1024)) if is_bytes and top >= 1024 else 1.0
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, top / scale)
    return [scale * tick for tick in ticks if scale * tick <= top]


def _clock(seconds: float, _: int) -> str:
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S}"


def _draw_lines(axes: Axes, panel: Panel, named: list[_Named], span: tuple[float, float]) -> None:
    names = [name for name, _ in named]
    colors = _colors(panel, names)
    if panel.stacked:
        grid = sorted({t for _, series in named for t in series.times})
        stacks = []
        for _, series in named:
            known = dict(zip(series.times, series.values, strict=True))
            stacks.append([0.0 if math.isnan(v := known.get(t, 0.0)) else v for t in grid])
        axes.stackplot(
            grid,
            stacks,
            colors=colors,
            alpha=0.75,
            labels=names,
            lw=0,
        )
    else:
        for (name, series), color in zip(named, colors, strict=True):
            axes.plot(series.times, series.values, color=color, lw=1.3, label=name)
            axes.fill_between(series.times, series.values, color=color, alpha=0.04, lw=0)
    axes.set_ylim(bottom=0)
    if axes.get_ylim()[1] < 1e-6:
        axes.set_ylim(0, 1)
    axes.set_xlim(*span)
    axes.grid(color="#2C3235", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_yticks(_ticks(axes.get_ylim()[1], panel.unit))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _FORMATS[panel.unit](v)))
    axes.xaxis.set_major_locator(MaxNLocator(panel.width // 2, steps=[1, 1.5, 3, 6, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, -0.09), ncols=6, frameon=False, fontsize=7,
        labelcolor=_TEXT, handlelength=1.2, columnspacing=1.2, borderaxespad=0,
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dashboard", type=Path)
    parser.add_argument("prometheus")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    end = time.time()
    start = end - 60 * args.minutes
    render(args.dashboard, Prometheus(args.prometheus), start, end, args.out)


if __name__ == "__main__":
    main()
