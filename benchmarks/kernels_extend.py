"""Times ``extend`` of the CPU kernels beside torch's SDPA, from an empty prefix.

    python benchmarks/kernels_extend.py                     # 9/3/64 and 32/8/128
    python benchmarks/kernels_extend.py --shape 9,3,64 --tokens 4700 --repeats 15

Peers, each for one layer of one request in bfloat16:

sdpa      ``scaled_dot_product_attention(is_causal=True, enable_gqa=True)`` on contiguous tensors
gathered  the same after reading keys and values by token index, as a stock server does

Variants of ``extend``: no scores, those of the last 32 tokens' queries, those of all. Variants
and peers take turns; medians are printed, with the ratio to each peer. ``error`` is the root mean
square of the difference from float32 SDPA, of ``extend`` and of bfloat16 SDPA; nothing is timed
unless that of ``extend`` is at most a hundredth larger. A busy machine shows in the spread, half
of the distance between quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.rope import RotaryTable


class Workload:
    """One prompt whose windows lie scattered in an arena."""

    def __init__(self, num_q_heads: int, num_kv_heads: int, head_dim: int, tokens: int) -> None:
        g = torch.Generator().manual_seed(0)
        geometry = WindowGeometry(num_q_heads, num_kv_heads, head_dim)
        angles = torch.outer(torch.arange(64.0), torch.linspace(1, 0, head_dim // 2))
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.kernels = NumbaKernels(geometry, RotaryTable(table, is_neox=True))
        window = geometry.window
        count = -(-tokens // window)
        data = torch.randn(count, 2, num_kv_heads, window, head_dim, generator=g).bfloat16()
        self.full = FullArena(data[:, 0], data[:, 1])
        self.coded = torch.zeros(1, num_kv_heads, geometry.record.record_bytes, dtype=torch.uint8)
        slots = torch.randperm(count, generator=g).int()
        indices = torch.arange(count, dtype=torch.int32)
        self.view = LayerView(
            page_table=indices[None],
            full_slot=slots,
            coded_slot=torch.full_like(slots, -1),
            windows=indices[None],
            num_full=torch.tensor([count], dtype=torch.int32),
            num_coded=torch.zeros(1, dtype=torch.int32),
        )
        self.query = torch.randn(tokens, num_q_heads, head_dim, generator=g).bfloat16()
        self.out = torch.zeros_like(self.query)
        self.scores = torch.zeros(1, count)
        self.scale = head_dim**-0.5
        keys, values = (
            t[slots.long()].transpose(1, 2).flatten(0, 1)[:tokens]
            for t in (self.full.keys, self.full.values)
        )
        # A stock server's cache: token slots, here in random order.
        self.token_ids = torch.randperm(tokens, generator=g)
        self.key_cache, self.value_cache = torch.empty_like(keys), torch.empty_like(values)
        self.key_cache[self.token_ids], self.value_cache[self.token_ids] = keys, values
        self.heads_first = [t.transpose(0, 1).contiguous() for t in (self.query, keys, values)]

    def extend(self, score_start: int | None) -> None:
        """Attention of the whole prompt; positions from ``score_start`` on give scores."""
        zero = torch.zeros(1, dtype=torch.int64)
        tokens = torch.tensor([len(self.query)])
        starts = None if score_start is None else torch.tensor([score_start])
        scores = None if score_start is None else self.scores
        self.kernels.extend(
            self.query, self.full, self.coded, self.view, zero, zero, tokens, self.scale, self.out,
            scores, starts,
        )  # fmt: skip

    def sdpa(self) -> torch.Tensor:
        """bfloat16, contiguous."""
        return _attention(*self.heads_first)

    def gathered(self) -> torch.Tensor:
        """bfloat16, keys and values read by index first."""
        keys, values = self.key_cache[self.token_ids], self.value_cache[self.token_ids]
        return _attention(*(t.transpose(0, 1) for t in (self.query, keys, values)))

    def errors(self) -> tuple[float, float]:
        """Root mean square error of ``extend`` and of bfloat16 SDPA."""
        exact = _attention(*(t.float() for t in self.heads_first)).transpose(0, 1)
        self.extend(None)
        theirs = self.sdpa().transpose(0, 1)
        ours, stock = ((t.float() - exact).square().mean().sqrt() for t in (self.out, theirs))
        return float(ours), float(stock)


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )[0]


def measure(shape: tuple[int, int, int], tokens: int, repeats: int) -> None:
    """Check, time and print one row."""
    work = Workload(*shape, tokens)
    ours, theirs = work.errors()
    if not ours <= 1.01 * theirs:
        raise SystemExit(f"extend is less exact than SDPA: {ours:.3e} against {theirs:.3e}")
    runs: dict[str, Callable[[], object]] = {
        "sdpa": work.sdpa,
        "gathered": work.gathered,
        "extend": lambda: work.extend(None),
        "last 32": lambda: work.extend(max(tokens - 32, 0)),
        "all": lambda: work.extend(0),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(t) for name, t in times.items()}
    low, _, high = statistics.quantiles(times["extend"], n=4)
    spread = (high - low) / 2 / median["extend"]
    heads, _, dim = shape
    flops = 4 * heads * dim * tokens * (tokens + 1) / 2
    row = [f"{'/'.join(map(str, shape)):>9} {tokens:>6}"]
    row += [f"{median[name] * 1e3:>8.2f}" for name in runs]
    row += [f"{median[name] / median['sdpa']:>7.2f}" for name in ("extend", "last 32", "all")]
    row += [f"{median[name] / median['gathered']:>7.2f}" for name in ("extend", "last 32", "all")]
    row += [f"{flops / median['extend'] / 1e9:>7.0f}", f"{spread:>6.0%}"]
    print(*row, f"  {ours:.1e} {theirs:.1e}", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="query heads,KV heads,head_dim")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads; milliseconds, ratios, GFLOP/s")
    print(
        "    shape  tokens     sdpa gathered   extend  last 32      all"
        " | to sdpa: extend, last 32, all | to gathered | GFLOP/s spread  error"
    )
    for shape in options.shape or ["9,3,64", "32,8,128"]:
        heads, kv_heads, dim = map(int, shape.split(","))
        for tokens in options.tokens or [1024, 4700, 7168]:
            measure((heads, kv_heads, dim), tokens, options.repeats)


if __name__ == "__main__":
    main()
