"""Time to first token and peak memory of a prefill: stock SGLang against tiering.

The same prompt goes to both servers in turn, each time with an empty prefix cache and the same
chunk size; the server that waits is suspended. Figures are medians.

ratio             stock's time to first token divided by ours
peak_bytes_ratio  stock's peak of resident bytes of the scheduler process divided by ours
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from report import (
    Column,
    Row,
    Target,
    begin,
    parser,
    print_table,
    print_targets,
    spread,
    write_json,
)
from servers import NAMES, STOCK, TIERED, Servers, Texts
from sglang_qevict.foreign_load import ForeignLoad

CONTEXTS = (1024, 4096, 7000)

COLUMNS = (
    Column("context", "context", "d"),
    Column("batch", "batch", "d"),
    Column("stock_ms", "stock ms", ".0f"),
    Column("tiered_ms", "ours ms", ".0f"),
    Column("ratio", "ratio", ".2f"),
    Column("spread", "spread", ".1%"),
    Column("stock_peak_mib", "stock peak MiB", ".0f"),
    Column("tiered_peak_mib", "ours peak MiB", ".0f"),
    Column("peak_bytes_ratio", "peak ratio", ".2f"),
    Column("foreign_cores", "others", ".2f"),
)
TARGETS = tuple(Target("ratio", 1 / 1.03, {"context": context}) for context in CONTEXTS)


class PeakBytes:
    """The peak of resident bytes of a process since ``start``, as the kernel keeps it."""

    def __init__(self, process: psutil.Process) -> None:
        self._proc = Path(f"/proc/{process.pid}")

    def start(self) -> None:
        """Forget the peak so far."""
        (self._proc / "clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        lines = (self._proc / "status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


def measure(servers: Servers, texts: Texts, context: int, repeats: int, bar: tqdm[Any]) -> Row:
    """One row of the table."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    peaks: dict[str, list[int]] = {name: [] for name in NAMES}
    load = ForeignLoad(servers.processes)
    for repeat in range(repeats):
        prompt = texts.prompt(context)
        for name in NAMES if repeat % 2 else NAMES[::-1]:
            bar.set_postfix_str(f"{context} tokens, {name}")
            with servers.running(name) as server:
                server.flush_cache()
                peak = PeakBytes(server.scheduler())
                peak.start()
                start = time.perf_counter()
                server.generate(prompt, max_new_tokens=1)
                times[name].append(time.perf_counter() - start)
                peaks[name].append(peak.read())
            bar.update()
    stock, tiered = (statistics.median(times[name]) for name in NAMES)
    row: Row = {
        "context": context,
        "batch": 1,
        "stock_ms": stock * 1e3,
        "tiered_ms": tiered * 1e3,
        "ratio": stock / tiered,
        "spread": max(spread(times[name]) for name in NAMES),
        "foreign_cores": load.cores(),
        "repeats_ms": {name: [x * 1e3 for x in times[name]] for name in NAMES},
    }
    for name in NAMES:
        row[f"{name}_peak_bytes"] = max(peaks[name])
        row[f"{name}_peak_mib"] = max(peaks[name]) / 2**20
    row["peak_bytes_ratio"] = row[f"{STOCK}_peak_bytes"] / row[f"{TIERED}_peak_bytes"]
    return row


def run(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    contexts = options.context or ([1024, 4096] if options.quick else list(CONTEXTS))
    repeats = options.repeats or (3 if options.quick else 5)
    machine = begin(options)
    flags = ("--chunked-prefill-size", str(options.chunk))
    with Servers(*flags, budget=options.budget) as servers:
        with servers.running(STOCK) as server:
            texts = Texts(server)
        with tqdm(total=len(contexts) * repeats * len(NAMES), unit="prefill") as bar:
            rows = [measure(servers, texts, context, repeats, bar) for context in contexts]
    print_table(rows, COLUMNS)
    print_targets(rows, TARGETS)
    write_json(options.json, machine, rows, chunk_tokens=options.chunk)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--context", type=int, action="append", help="tokens; may be repeated")
    options.add_argument("--repeats", type=int, help="prefills by each server (default: 5)")
    options.add_argument("--budget", type=float, default=0.2, help="share of the KV bytes")
    options.add_argument("--chunk", type=int, default=8192, help="tokens in a chunk, for both")
    run(options.parse_args())


if __name__ == "__main__":
    main()
