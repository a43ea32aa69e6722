"""What tiered decode attention could give at best: bytes and instructions, counted.

Decode attention over full precision is bound by memory: each key and value is read once. Over
tiers fewer bytes are read, but codes (of 2 bits here) have to be made numbers, so that instructions
may bind. This counts both for one layer and one step, scores included, and divides by what the
device can do. It measures nothing; ``benchmarks/gpu`` does.

bytes        read and written by one layer: windows, their lists, tables and log-sums, scores
full_us      full attention in bfloat16 at all of the bandwidth
memory_us    tiers, as the bytes need
issue_us     tiers, as the instructions need, if every scheduler issued one in each cycle
ratio        full_us over the larger of the two: the best possible speed-up
bytes_ratio  bytes of full attention over those of tiers
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from fractions import Fraction

from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from report import Column, Machine, Row, parser, print_table, write_json

MODELS = {
    "Llama-3.1-8B": (Heads(32, 8, 128), 32),
    "Llama-3.1-70B": (Heads(64, 8, 128), 80),
}
CONTEXTS, BATCHES, BUDGETS = (4096, 32_768, 131_072), (1, 8, 32), ("0.1", "0.2", "0.3")

# Instructions of one lane for one element (a channel of a key or of a value) in the loops over
# tiles, counted in what Triton 3.8 compiles for sm_90 at 32/8 heads, head_dim 128 and 2 bits.
CODED_INSTRUCTIONS, FULL_INSTRUCTIONS = 2.88, 1.57
MAX_SPLITS = 32

COLUMNS = (
    Column("model", "model", "s"),
    Column("context", "context", "d"),
    Column("batch", "batch", "d"),
    Column("budget", "budget", ".1f"),
    Column("full", "FULL", ".1%"),
    Column("coded", "coded", ".1%"),
    Column("bytes", "bytes", ".3g"),
    Column("bytes_ratio", "bytes ratio", ".2f"),
    Column("full_us", "full us", ".1f"),
    Column("memory_us", "memory us", ".1f"),
    Column("issue_us", "issue us", ".1f"),
    Column("ratio", "best ratio", ".2f"),
)


@dataclass(frozen=True)
class Device:
    """What a device can do in a second."""

    bandwidth: float
    multiprocessors: int
    clock: float

    @property
    def lane_instructions(self) -> float:
        """Instructions of one lane: four schedulers of 32 lanes each."""
        return self.multiprocessors * 4 * 32 * self.clock


def count(heads: Heads, layers: int, context: int, batch: int, budget: str, device: Device) -> Row:
    """One row."""
    config = TieringConfig(budget=Fraction(budget), key_bits=2, value_bits=2)
    geometry = config.geometry(heads)
    windows = WindowBudget(config, geometry, layers)
    total = windows.num_windows(context)
    start, end = windows.history(context)
    limits = windows.capacities(context)
    full, coded = total - (end - start) + limits.full, limits.coded
    q_heads, dim = heads.num_q_heads, heads.head_dim

    of_windows = full * windows.full_bytes + coded * windows.coded_bytes
    lists = (full + coded) * 3 * 4  # window, page and slot, once: caches serve the other heads
    log_sums = 2 * (full + coded) * q_heads * 4
    scores = 2 * (full + coded) * 4
    partials = 2 * 2 * min(MAX_SPLITS, full + coded) * q_heads * (dim + 2) * 4
    tiered_bytes = batch * (of_windows + lists + log_sums + scores + partials)
    full_bytes = batch * total * windows.full_bytes

    elements = 2 * geometry.num_kv_heads * geometry.window * dim
    instructions = elements * (full * FULL_INSTRUCTIONS + coded * CODED_INSTRUCTIONS)
    full_us = full_bytes / device.bandwidth * 1e6
    memory_us = tiered_bytes / device.bandwidth * 1e6
    issue_us = batch * instructions / device.lane_instructions * 1e6
    return {
        "context": context,
        "batch": batch,
        "budget": float(budget),
        "full": full / total,
        "coded": coded / total,
        "bytes": tiered_bytes,
        "bytes_ratio": full_bytes / tiered_bytes,
        "full_us": full_us,
        "memory_us": memory_us,
        "issue_us": issue_us,
        "ratio": full_us / max(memory_us, issue_us),
    }


def run(options: argparse.Namespace) -> None:
    """Count, print and write."""
    device = Device(options.bandwidth, options.multiprocessors, options.clock)
    rows: list[Row] = [
        {"model": name} | count(heads, layers, context, batch, budget, device)
        for name, (heads, layers) in list(MODELS.items())[: 1 if options.quick else None]
        for context in CONTEXTS
        for batch in BATCHES
        for budget in BUDGETS
    ]
    print_table(rows, COLUMNS)
    write_json(options.json, Machine.here(), rows)


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument(
        "--bandwidth", type=float, default=4.8e12, help="bytes a second (default: an H200's)"
    )
    options.add_argument("--multiprocessors", type=int, default=132, help="how many (132)")
    options.add_argument("--clock", type=float, default=1.755e9, help="in Hz (1.755e9)")
    run(options.parse_args())


if __name__ == "__main__":
    main()
