"""The SSD tier's own counters as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter

__all__ = ["export_spill", "is_busy"]

_STORE: dict[table.Metric, dict[tuple[str, ...], tuple[str, ...]]] = {
    table.SPILL_WRITTEN_RECORDS: {(): ("written",)},
    table.SPILL_WRITTEN_BYTES: {(): ("written_bytes",)},
    table.SPILL_MEDIUM_WRITTEN_BYTES: {(): ("medium_written_bytes",)},
    table.SPILL_DROPPED_RECORDS: {
        (reason,): (f"dropped_{reason}",) for reason in table.SPILL_DROPPED_RECORDS.labels[0].values
    },
    table.SPILL_EVICTED_RECORDS: {(): ("evicted",)},
    table.SPILL_READ_RECORDS: {
        ("hit",): ("hits",),
        ("miss",): ("misses",),
        ("corrupt",): ("corrupt",),
        ("error",): ("read_errors",),
        ("late",): ("late",),
        ("busy",): ("busy",),
        ("wrong_size",): ("wrong_size",),
    },
    table.SPILL_READ_BYTES: {(): ("hit_bytes",)},
    table.SPILL_ERRORS: {
        ("read",): ("read_errors",),
        ("write",): ("dropped_write_error",),
        ("damaged",): ("corrupt", "damaged"),
        ("lost",): ("lost",),
        ("reclaim",): ("reclaim_errors",),
    },
    table.SPILL_RECOVERED_RECORDS: {(): ("recovered",)},
    table.SPILL_REJECTED: {
        (part,): (f"rejected_{part}s",) for part in table.SPILL_REJECTED.labels[0].values
    },
}
"""The counters of the store (``SpillCounters``) that each series is the sum of, by its labels."""


def export_spill(exporter: Exporter, report: Mapping[str, Any]) -> None:
    """Export what ``SpillTier.report`` says."""
    usage, counters, recalls = report["usage"], report["counters"], report["recalls"]
    exporter.set(table.SPILL_RECORDS, _known(usage["records"]), "stored")
    exporter.set(table.SPILL_RECORDS, usage["queued_records"], "queued")
    exporter.set(table.SPILL_BYTES, _known(usage["payload_bytes"]), "stored")
    exporter.set(table.SPILL_BYTES, usage["queued_bytes"], "queued")
    exporter.set(table.SPILL_FILE_BYTES, _known(usage["file_bytes"]))
    for metric, series in _STORE.items():
        for labels, names in series.items():
            exporter.count_to(metric, sum(counters[name] for name in names), *labels)
    exporter.count_to(table.SPILL_WRITE_SECONDS, counters["write_nanoseconds"] / 1e9)
    exporter.count_to(table.SPILL_READ_SECONDS, counters["read_nanoseconds"] / 1e9)
    for outcome, requests in recalls["requests"].items():
        exporter.count_to(table.SPILL_RECALLS, requests, outcome)
        exporter.count_to(table.SPILL_RECALL_RECORDS, recalls["windows"][outcome], outcome)
    exporter.count_to(table.SPILL_RECALLED_BYTES, recalls["bytes"])
    exporter.count_to(table.SPILL_RECALL_SECONDS, recalls["nanoseconds"] / 1e9)
    exporter.count_to(table.SPILL_PREFETCHED_RECORDS, recalls["prefetched"])
    exporter.count_to(table.SPILL_LATE_RECORDS, recalls["late"])


def is_busy(report: Mapping[str, Any]) -> bool:
    """Whether these numbers go on changing by themselves: something is being written, or read."""
    usage = report["usage"]
    return bool(usage["queued_records"] or usage["reading"])


def _known(number: int) -> float:
    """What a store can't say it says as -1."""
    return number if number >= 0 else math.nan
