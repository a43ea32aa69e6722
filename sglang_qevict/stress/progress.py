"""What a terminal shows while a stress test runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_qevict.stress.drive import Driver
from sglang_qevict.stress.records import Outcome
from sglang_qevict.stress.summary import quantile

__all__ = ["frame"]

_BAR = 32


@dataclass
class _Row:
    running: int = 0
    waiting: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    firsts: list[float] = field(default_factory=list)


def frame(driver: Driver) -> RenderableType:
    """The run so far, a line for each tenant."""
    alone = driver.phase == "alone"
    rows = _rows(driver, alone)
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant", no_wrap=True)
    for heading in ("sent", "waiting", "running", "done", "left", "errors", "first token, s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        errors = sum(count for outcome, count in row.outcomes.items() if outcome.is_error)
        first = quantile(row.firsts, 0.5)
        table.add_row(
            name,
            str(driver.sent[name]),
            str(row.waiting or "·"),
            str(row.running or "·"),
            str(row.outcomes[Outcome.DONE]),
            str(row.outcomes[Outcome.ABORTED] or "·"),
            Text(str(errors or "·"), "bold red" if errors else ""),
            "" if first is None else f"{first:.2f}",
        )
    return Group(_head(driver, alone), table)


def _rows(driver: Driver, alone: bool) -> dict[str, _Row]:
    rows = {tenant.name: _Row() for tenant in driver.mix.tenants}
    for tenant, stream in driver.streams.values():
        row = rows[tenant.name]
        if stream.tokens:
            row.running += 1
        else:
            row.waiting += 1
    for record in driver.run.alone if alone else driver.run.records:
        row = rows[record.tenant]
        row.outcomes[record.outcome] += 1
        if record.first_seconds is not None:
            row.firsts.append(record.first_seconds)
    return rows


def _head(driver: Driver, alone: bool) -> Text:
    head = Text.assemble((driver.mix.name, "bold"), "  ")
    if alone:
        head.append(f"baseline: one request at a time, {driver.elapsed:.0f} s")
    else:
        share = min(1.0, driver.elapsed / driver.mix.seconds)
        filled = round(_BAR * share)
        head.append("━" * filled, "cyan")
        head.append("━" * (_BAR - filled), "bright_black")
        word = "" if share < 1 else ", the last requests end"
        head.append(f"  {driver.elapsed:.0f} of {driver.mix.seconds:g} s{word}")
        head.append(f"  {driver.tokens / max(driver.elapsed, 1e-9):,.0f} tokens/s")
    head.append("  Ctrl-C ends with a report", "dim")
    return head
