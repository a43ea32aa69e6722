"""The table of metrics for the docs: ``python -m qevict_monitoring.docs`` prints it."""

from __future__ import annotations

from qevict_monitoring.table import METRICS, Label, Metric

__all__ = ["table_lines"]


def table_lines() -> list[str]:
    """All metrics as a table in Markdown."""
    head = ["| metric | type | unit | labels | what it is |", "|---|---|---|---|---|"]
    return head + [_row(metric) for metric in METRICS.values()]


def _row(metric: Metric) -> str:
    labels = "; ".join(map(_label, metric.labels))
    cells = (f"`{metric.name}`", metric.kind.value, metric.unit, labels, metric.help)
    return f"| {' | '.join(cells)} |"


def _label(label: Label) -> str:
    values = ", ".join(label.values)
    return f"`{label.name}`: {values}" if values else f"`{label.name}`"


if __name__ == "__main__":
    print("\n".join(table_lines()))
