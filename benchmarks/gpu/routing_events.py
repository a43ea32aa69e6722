"""What a routing event costs on a GPU, and the kernels that it calls.

An event ranks all windows of the rows that are due, in all layers at once, codes what loses its
FULL copy and rebuilds the lists. It is launched between the steps and waits for nothing.

event_ms     one event of so many rows, launched from Python
step_share   that, spread over the steps of an interval, over a step that reads the weights once
quantize_us, dequantize_us, copy_us   one layer's window, of many at once
"""

from __future__ import annotations

import time

import torch
from device import DEVICE, Row, describe, median_seconds, parser, report
from tiered_decode import MODELS, rotary_table

from qevict_kernels.interface import FullArena
from qevict_kernels.triton import TritonKernels
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import TieringConfig
from qevict_tiers.kept import UNLIMITED
from qevict_tiers.manager import TierManager

WEIGHT_BYTES = {"8B": 16e9, "70B": 140e9, "tiny": 1e6}

COLUMNS = {
    "model": "s",
    "context": "d",
    "batch": "d",
    "event_ms": ".2f",
    "launch_ms": ".2f",
    "step_share": ".1%",
    "quantize_us": ".3f",
    "dequantize_us": ".3f",
    "copy_us": ".3f",
}


def wait() -> None:
    """Until the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def events(model: str, context: int, batch: int, repeats: int) -> Row:
    """One row: events of rows that are due together."""
    geometry, layers = MODELS[model]
    budget = WindowBudget(TieringConfig(), geometry, layers)
    count = budget.num_windows(context)
    kernels = TritonKernels(geometry, rotary_table(geometry.head_dim, context + 64), DEVICE)
    pages = batch * (count + 8)
    arena_bytes = int(1.2 * layers * batch * (count + 8) * (budget.full_bytes + budget.coded_bytes))
    manager = TierManager(
        budget,
        kernels,
        torch.zeros(arena_bytes, dtype=torch.uint8, device=DEVICE),
        num_pages=pages,
        num_rows=batch + 1,
        max_windows=count + 8,
        dtype=torch.bfloat16,
        fixed_shapes=True,
    )
    rows = list(range(1, batch + 1))
    own = torch.arange(1, batch * count + 1, device=DEVICE)
    manager.open(rows, [UNLIMITED] * batch)
    manager.append(rows, [range(count)] * batch, own)
    everything = slice(0, layers)
    manager.allocate_full(everything, own)
    manager.full_arena.keys.normal_()
    manager.full_arena.values.normal_()
    manager.views.score.uniform_()
    manager.route(everything, rows, [context] * batch)
    seconds, launches = [], []
    for _ in range(repeats):
        manager.views.score.add_(torch.rand_like(manager.views.score) * 0.05)
        wait()
        start = time.perf_counter()
        manager.route(everything, rows, [context] * batch)
        launches.append(time.perf_counter() - start)
        wait()
        seconds.append(time.perf_counter() - start)
    event, launch = (sorted(times)[len(times) // 2] for times in (seconds, launches))
    problems = manager.check_integrity()
    assert not problems, problems
    return {
        "model": model,
        "context": context,
        "batch": batch,
        "event_ms": event * 1e3,
        "launch_ms": launch * 1e3,
        "event_seconds_a_step": event / budget.config.route_every,
    }


def kernels_alone(model: str, windows: int, repeats: int) -> Row:
    """Microseconds of one layer's window."""
    geometry, _ = MODELS[model]
    kernels = TritonKernels(geometry, rotary_table(geometry.head_dim, 4096), DEVICE)
    g = geometry
    slots = torch.randn(
        windows, 2, g.num_kv_heads, g.window, g.head_dim, dtype=torch.bfloat16, device=DEVICE
    )
    full = FullArena(slots[:, 0], slots[:, 1])
    shape = (windows, g.num_kv_heads, g.record.record_bytes)
    coded = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
    index = torch.randperm(windows, device=DEVICE).int()
    places = index % 256
    kernels.quantize(full, coded, index, index, places)
    half = windows // 2
    runs = {
        "quantize_us": (lambda: kernels.quantize(full, coded, index, index, places), 1),
        "dequantize_us": (lambda: kernels.dequantize(full, coded, index, index, places), 1),
        "copy_us": (
            lambda: kernels.copy_slots(
                slots.view(torch.uint8).view(windows, -1), index[:half], index[half : 2 * half]
            ),
            0.5,
        ),
    }
    return {
        name: median_seconds(run, repeats, graph=False) / (windows * share) * 1e6
        for name, (run, share) in runs.items()
    }


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=["8B"], choices=MODELS)
    options.add_argument("--contexts", nargs="+", type=int, default=[4096, 32_768])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    options.add_argument("--windows", type=int, default=8192, help="of the kernels alone (8192)")
    chosen = options.parse_args()
    machine = describe()
    rows: list[Row] = []
    for model in chosen.models:
        alone = kernels_alone(model, chosen.windows, chosen.repeats)
        for context in chosen.contexts:
            for batch in chosen.batches:
                row = events(model, context, batch, chosen.repeats) | alone
                if bandwidth := machine.get("copy_bandwidth"):
                    step = WEIGHT_BYTES[model] / bandwidth
                    row["step_share"] = row["event_seconds_a_step"] / step
                rows.append(row)
                print(row, flush=True)
    report(rows, COLUMNS, chosen.json, machine)


if __name__ == "__main__":
    main()
