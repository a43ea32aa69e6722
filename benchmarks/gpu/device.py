"""What the GPU benchmarks share: the device, timing, tables. Needs torch and triton only."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = ["DEVICE", "Row", "copy_bandwidth", "describe", "median_seconds", "parser", "report"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Row = dict[str, Any]


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to a file")
    made.add_argument("--repeats", type=int, default=15, help="timed runs of each point (15)")
    return made


def describe() -> dict[str, Any]:
    """The device and what computes on it."""
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": "cpu (interpreter)",
    }
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        machine["device"] = properties.name
        machine["multiprocessors"] = properties.multi_processor_count
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["copy_bandwidth"] = copy_bandwidth()
    return machine


def median_seconds(run: Callable[[], object], repeats: int, *, graph: bool = True) -> float:
    """Median time of a run, by default replayed from a CUDA graph, once it is warm."""
    if DEVICE.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    call: Callable[[], object] = run
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        call = captured.replay
    call()
    pairs = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def copy_bandwidth() -> float:
    """Bytes a second that a copy within the device reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), 15, graph=False)
    return 2 * source.numel() / seconds


def report(
    rows: Sequence[Row],
    columns: Mapping[str, str],
    path: Path | None,
    machine: Mapping[str, Any],
) -> None:
    """Print a table of ``columns`` (key to format) and write all of the rows."""
    cells = [list(columns)]
    cells += [[_cell(row.get(key), spec) for key, spec in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(json.dumps(machine))
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    if path is not None:
        path.write_text(json.dumps({"machine": machine, "rows": list(rows)}, indent=1) + "\n")


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, spec)
