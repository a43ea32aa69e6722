"""What all benchmarks share: options, the machine and its load, tables, JSON, targets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sglang_qevict.foreign_load import ForeignLoad

BUSY_CORES = 0.1
"""Share of one core that other programs may take before a measurement counts as disturbed."""

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")

Row = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="fewer points and repeats: < 3 minutes")
    made.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to a file")
    made.add_argument(
        "--wait",
        type=float,
        default=0,
        metavar="SECONDS",
        help="wait so long for other programs to leave the CPU, then give up (default: just warn)",
    )
    return made


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran."""

    cpu: str
    cores: int
    instruction_sets: str
    memory_bytes: int
    python: str
    sglang: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        from importlib.metadata import version

        info = _cpu_info()
        flags = info.get("flags", info.get("Features", "")).split()
        return cls(
            cpu=info.get("model name", platform.processor() or platform.machine()),
            cores=len(os.sched_getaffinity(0)),
            instruction_sets=" ".join(x for x in _INSTRUCTION_SETS if x in flags),
            memory_bytes=psutil.virtual_memory().total,
            python=platform.python_version(),
            sglang=version("sglang"),
            torch=version("torch"),
        )

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.instruction_sets}, "
            f"{self.memory_bytes / 2**30:.0f} GiB; "
            f"SGLang {self.sglang}, torch {self.torch}, Python {self.python}"
        )


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def begin(options: argparse.Namespace) -> Machine:
    """Print the machine and its load; wait or warn if it is busy.

    Raises ``SystemExit`` if it stays busy for ``--wait`` seconds.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = Machine.here()
    print(machine)
    deadline = time.monotonic() + options.wait
    while True:
        load = ForeignLoad()
        time.sleep(2)
        cores = load.cores()
        averages = " ".join(f"{x:.2f}" for x in os.getloadavg())
        if cores <= BUSY_CORES or time.monotonic() > deadline:
            break
    print(f"load average {averages}; other programs take {cores:.2f} cores")
    if cores > BUSY_CORES:
        if options.wait:
            raise SystemExit(f"the machine stayed busy for {options.wait:g} s: nothing measured")
        warn("the machine is busy, so these figures are worth little (--wait SECONDS waits)")
    return machine


def warn(sentence: str) -> None:
    """A warning that stands out, on stderr."""
    print(f"WARNING: {sentence}", file=sys.stderr, flush=True)


class Column(NamedTuple):
    """One column of a table: key of the row, heading, format."""

    key: str
    heading: str
    format: str = ".1f"


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    """Print rows; a row with ``foreign_cores`` above ``BUSY_CORES`` is marked with a star."""
    cells = [[column.heading for column in columns]]
    for row in rows:
        cells.append([_cell(row.get(column.key), column.format) for column in columns])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = ["", *("*" if row.get("foreign_cores", 0) > BUSY_CORES else "" for row in rows)]
    for line, mark in zip(cells, marks, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(padded), mark)
    if any(marks):
        print(f"* other programs took more than {BUSY_CORES:g} cores meanwhile")


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, spec)


class Target(NamedTuple):
    """A figure that some row should reach: ``key`` at least (or at most) ``value``."""

    key: str
    value: float
    where: Mapping[str, Any]
    at_most: bool = False


def print_targets(rows: Sequence[Row], targets: Sequence[Target]) -> None:
    """Say of each target that was measured whether it was reached."""
    for key, value, where, at_most in targets:
        for row in rows:
            measured = row.get(key)
            if measured is None or any(row.get(k) != v for k, v in where.items()):
                continue
            met = measured <= value if at_most else measured >= value
            place = ", ".join(f"{k} {v}" for k, v in where.items())
            sign = "<=" if at_most else ">="
            verdict = "reached" if met else "MISSED"
            print(f"{verdict}: {key} {measured:.3g} ({sign} {value:g}) {place}")


def write_json(path: Path | None, machine: Machine, rows: Sequence[Row], **more: Any) -> None:
    """``{"machine": {...}, "rows": [...]}`` and more."""
    if path is not None:
        content = {"machine": asdict(machine), **more, "rows": list(rows)}
        path.write_text(json.dumps(content, indent=1) + "\n")


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median; 0 for fewer than three values."""
    if len(values) < 3:
        return 0.0
    ordered = sorted(values)
    n = len(ordered)
    low, middle, high = ordered[n // 4], ordered[n // 2], ordered[(3 * n) // 4]
    return (high - low) / 2 / middle
