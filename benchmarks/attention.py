"""Decode attention of the numba kernels against SDPA over the full context, in one run.

Each case gives a request 20 % of the bytes of its context: the protected windows FULL, of the
rest 30 % FULL windows and 70 % coded windows, scores included. The peers are the ways to have
the same attention from torch: bfloat16 with ``enable_gqa``, bfloat16 with the queries of a group
as rows, and the same in float32. All are checked against the reference or each other, then timed in
turns; the figures are medians, and the ratio is to the fastest peer: below 1 is faster. Where other
processes take a core away, a team of threads waits for whole time slices, and medians say little:
"best ratio" compares the fastest runs, and such rows are marked as disturbed.

    python benchmarks/attention.py --quick --json attention.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.memory import arena_memory
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba.spec import host_lanes
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.rope import RotaryTable

BUDGET = 0.2
CODED_SHARE = 0.7
PROTECTED_WINDOWS = 6  # one of the sink, five of the local tokens
CASES = [  # query heads, KV heads, head size, batch, context, target ratio
    (9, 3, 64, 4, 4736, 0.5),
    (9, 3, 64, 4, 8192, 0.45),
    (9, 3, 64, 4, 32768, 0.3),
    (9, 3, 64, 1, 32768, 0.4),
    (32, 8, 128, 2, 4736, 0.6),
    (32, 8, 128, 2, 8192, 0.5),
    (32, 8, 128, 2, 32768, 0.3),
]

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the result; times in milliseconds, medians."""

    geometry: str
    batch: int
    context: int
    full_windows: int
    coded_windows: int
    milliseconds: float
    peers_milliseconds: dict[str, float]
    ratio: float
    best_ratio: float
    disturbed: bool
    target: float
    gigabytes_per_second: float
    bandwidth_share: float
    limited_by: str
    load: float


def capacities(geometry: WindowGeometry, context: int) -> tuple[int, int]:
    """(FULL, coded) windows of a request, by bytes."""
    full_bytes, coded_bytes = geometry.full_window_bytes, geometry.coded_window_bytes
    total = BUDGET * context / geometry.window * full_bytes
    history = total - PROTECTED_WINDOWS * full_bytes
    full = int((1 - CODED_SHARE) * history / full_bytes) + PROTECTED_WINDOWS
    coded = int(CODED_SHARE * history / coded_bytes)
    return full, min(coded, context // geometry.window - full)


def rotary_table(dim: int, positions: int) -> RotaryTable:
    """A plain table, exact to float32."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), 1e4**-exponents)
    return RotaryTable(torch.cat([angles.cos(), angles.sin()], dim=1).float(), is_neox=True)


class Tiered:
    """A batch of requests whose windows lie in random slots of the arenas."""

    def __init__(self, geometry: WindowGeometry, batch: int, context: int) -> None:
        self.geometry, self.batch = geometry, batch
        self.full_windows, self.coded_windows = capacities(geometry, context)
        rotary = rotary_table(geometry.head_dim, context)
        self.kernels = NumbaKernels(geometry, rotary)
        self.reference = ReferenceKernels(geometry, rotary)
        columns = context // geometry.window
        num_full, num_coded = batch * self.full_windows, batch * self.coded_windows
        shape = (num_full, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim)
        data = arena_memory(num_full * geometry.full_window_bytes).view(torch.bfloat16).view(shape)
        data.normal_()
        self.full = FullArena(data[:, 0], data[:, 1])
        record = (geometry.num_kv_heads, geometry.record.record_bytes)
        self.coded = arena_memory(num_coded * math.prod(record)).view(num_coded, *record)
        windows = torch.empty(batch, columns, dtype=torch.int32)
        pages = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
        full_slot = torch.full((batch * columns,), -1, dtype=torch.int32)
        coded_slot = full_slot.clone()
        full_slots = torch.randperm(num_full).int().view(batch, -1)
        coded_slots = torch.randperm(num_coded).int().view(batch, -1)
        for b in range(batch):
            picked = torch.randperm(columns)[: self.full_windows + self.coded_windows]
            full = picked[: self.full_windows].sort().values
            coded = picked[self.full_windows :].sort().values
            windows[b, : self.full_windows] = full
            windows[b, columns - self.coded_windows :] = coded.flip(0)
            full_slot[pages[b, full].long()] = full_slots[b]
            coded_slot[pages[b, coded].long()] = coded_slots[b]
            sources = torch.arange(self.coded_windows, dtype=torch.int32) % num_full
            self.kernels.quantize(self.full, self.coded, sources, coded_slots[b], coded.int())
        counts = torch.full((2, batch), self.full_windows, dtype=torch.int32)
        counts[1] = self.coded_windows
        self.view = LayerView(pages, full_slot, coded_slot, windows, counts[0], counts[1])
        self.rows, self.seq_lens = torch.arange(batch), torch.full((batch,), context)
        self.query = torch.randn(batch, geometry.num_q_heads, geometry.head_dim).bfloat16()
        self.out, self.scores = torch.empty_like(self.query), torch.zeros(batch, columns)

    def decode(self, kernels: NumbaKernels | ReferenceKernels | None = None) -> torch.Tensor:
        """One step; by the numba kernels unless others are given."""
        (kernels or self.kernels).decode(
            self.query, self.full, self.coded, self.view, self.rows, self.seq_lens,
            self.geometry.head_dim**-0.5, self.out, self.scores,
        )  # fmt: skip
        return self.out

    def check(self) -> None:
        """Raise ``AssertionError`` unless output and scores are those of the reference."""
        self.scores.zero_()
        out, scores = self.decode().clone(), self.scores.clone()
        self.scores.zero_()
        expected = self.decode(self.reference).float()
        assert (out - expected).abs().max() <= 2.0**-7 * expected.abs().max()
        assert (scores - self.scores).abs().max() <= 1e-4 * self.scores.max()

    @property
    def bytes_read(self) -> int:
        """Bytes of windows that a step must read."""
        g = self.geometry
        each = self.full_windows * g.full_window_bytes + self.coded_windows * g.coded_window_bytes
        return self.batch * each


def peers(geometry: WindowGeometry, batch: int, context: int) -> dict[str, Run]:
    """SDPA over the full context, each checked against the float32 variant."""
    shape = (batch, geometry.num_kv_heads, context, geometry.head_dim)
    keys, values = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    keys32, values32 = keys.float(), values.float()
    query = torch.randn(batch, geometry.num_q_heads, 1, geometry.head_dim).bfloat16()
    packed = query.view(batch, geometry.num_kv_heads, geometry.group_size, geometry.head_dim)
    packed32 = packed.float()
    attention = F.scaled_dot_product_attention
    runs: dict[str, Run] = {
        "bf16 enable_gqa": lambda: attention(query, keys, values, enable_gqa=True),
        "bf16 packed": lambda: attention(packed, keys, values),
        "float32 packed": lambda: attention(packed32, keys32, values32),
    }
    expected = runs["float32 packed"]().flatten()
    for run in runs.values():
        assert (run().float().flatten() - expected).abs().max() <= 2.0**-6 * expected.abs().max()
    return runs


def take_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each run, taken in turns for about ``seconds`` in all."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 7:
        for name, run in runs.items():
            run()  # brings its own data and threads back after the others
            start = time.perf_counter()
            run()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return samples


def read_bandwidth() -> float:
    """GB/s of a sum over 256 MB, best of a few."""
    data = torch.zeros(1 << 26)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9


def load() -> float:
    """Processes that want a core, beside this one (one-minute average)."""
    return os.getloadavg()[0]


def measure(case: tuple[int, int, int, int, int, float], seconds: float, bandwidth: float) -> Row:
    """Check, then time one case."""
    num_q_heads, num_kv_heads, head_dim, batch, context, target = case
    torch.manual_seed(0)
    geometry = WindowGeometry(num_q_heads, num_kv_heads, head_dim)
    tiered = Tiered(geometry, batch, context)
    tiered.check()
    samples = take_turns({"tiered": tiered.decode} | peers(geometry, batch, context), seconds)
    times = {name: statistics.median(all_) for name, all_ in samples.items()}
    best = {name: min(all_) for name, all_ in samples.items()}
    own, own_best = times.pop("tiered"), best.pop("tiered")
    rate = tiered.bytes_read / own / 1e6
    share = rate / bandwidth
    return Row(
        geometry=f"{num_q_heads}/{num_kv_heads} heads, D {head_dim}",
        batch=batch,
        context=context,
        full_windows=tiered.full_windows,
        coded_windows=tiered.coded_windows,
        milliseconds=own,
        peers_milliseconds=times,
        ratio=own / min(times.values()),
        best_ratio=own_best / min(best.values()),
        disturbed=own > 1.5 * own_best,
        target=target,
        gigabytes_per_second=rate,
        bandwidth_share=share,
        limited_by="memory" if share > 0.6 else "arithmetic",
        load=load(),
    )


def table(rows: list[Row]) -> str:
    """Rows as text."""
    peer_names = list(rows[0].peers_milliseconds)
    header = ["geometry", "batch", "context", "FULL", "coded", "ms", *peer_names, "ratio"]
    header += ["best ratio", "target", "GB/s", "of read rate", "limited by"]
    lines = [header] + [
        [
            row.geometry, str(row.batch), str(row.context), str(row.full_windows),
            str(row.coded_windows), f"{row.milliseconds:.3f}",
            *(f"{row.peers_milliseconds[name]:.3f}" for name in peer_names),
            f"{row.ratio:.3f}", f"{row.best_ratio:.3f}", f"{row.target:.2f}",
            f"{row.gigabytes_per_second:.1f}",
            f"{row.bandwidth_share:.0%}",
            "other processes" if row.disturbed else row.limited_by,
        ]
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less than three minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows here as well")
    arguments = parser.parse_args()
    before, bandwidth = load(), read_bandwidth()
    machine = {
        "instructions": "AVX-512" if host_lanes() == 16 else "AVX2 or less",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": before,
        "read_gigabytes_per_second": bandwidth,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if before > 0.5:
        print("Other processes are running: absolute times and ratios below are not to be trusted.")
    seconds = 4.0 if arguments.quick else 20.0
    rows = [measure(case, seconds, bandwidth) for case in tqdm(CASES, unit="case")]
    print(table(rows))
    if arguments.json:
        result = {"machine": machine, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
