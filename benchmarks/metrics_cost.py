"""What metrics cost a decode step: attention, views and routing with an observer, and without.

    python benchmarks/metrics_cost.py                       # 4 requests of 4,096 tokens
    python benchmarks/metrics_cost.py --batch 8 --tokens 2048 --turns 12

The embedded model's 30 layers (9 query heads, 3 KV heads, 64 channels) with random keys and values,
but no model around them: a real step takes longer, so the share that metrics have of it is smaller.
The two take turns of 32 steps on the same state; each turn holds four routing events of each
request. Numbers are exported as often as in a server with steps of ``--step-ms`` (README: 54 ms at
200 tokens, the shortest). CPU time of the scheduler's thread counts, so that other programs matter
little. Printed: medians a step, their difference, and that over a step
without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from prometheus_client import CollectorRegistry
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from qevict_kernels import make_kernels
from qevict_kernels.rope import RotaryTable
from qevict_monitoring.exporter import Exporter
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.manager import TierManager
from qevict_tiers.observer import Observer
from sglang_qevict import metrics
from sglang_qevict.attention import QEvictAttentionBackend
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.metrics import MetricsObserver
from sglang_qevict.state import TieringState

CPU = torch.device("cpu")
LAYERS, STEPS = 30, 32


class Decoding:
    """Requests that decode, one step at a time, watched or not."""

    def __init__(self, batch: int, tokens: int, steps: int, step_seconds: float) -> None:
        self.seconds, self.step_seconds = 0.0, step_seconds
        metrics.monotonic = lambda: self.seconds  # type: ignore[attr-defined]
        config = TieringConfig()
        self.geometry = geometry = config.geometry(Heads(9, 3, 64))
        budget = WindowBudget(config, geometry, LAYERS)
        context = tokens + steps + geometry.window
        plan = plan_capacity(
            budget, 2 * batch * context * budget.token_bytes, context, tokens, batch, batch
        )
        angles = torch.outer(torch.arange(float(context)), 1e5 ** -(torch.arange(32) / 32))
        rotary = RotaryTable(torch.cat([angles.cos(), angles.sin()], 1), is_neox=True)
        exporter = Exporter({"model_name": "m"}, CollectorRegistry())
        self.watched = MetricsObserver(plan, batch + 1, CPU, exporter)
        self.manager = TierManager(
            budget,
            make_kernels(geometry, rotary, CPU),
            torch.zeros(plan.arena_bytes, dtype=torch.uint8),
            plan.num_pages,
            batch + 1,
            plan.max_windows,
            torch.bfloat16,
            observer=self.watched,
        )
        locations = torch.arange(batch * context // 8 * 8).view(batch, -1) + geometry.window
        table = torch.zeros(batch + 1, locations.shape[1], dtype=torch.int32)
        table[1:] = locations.to(torch.int32)
        self.table = table
        self.state = TieringState(plan, self.manager, table)
        self.watched.watch(self.state)
        self.rows = list(range(1, batch + 1))
        self.length = tokens
        self._prefill(tokens)
        self.backend = object.__new__(QEvictAttentionBackend)
        self.backend.serve(self.state, first_layer=0)
        heads, dim = geometry.num_q_heads, geometry.head_dim
        self.layers = [
            RadixAttention(heads, dim, dim**-0.5, geometry.num_kv_heads, layer_id=layer)
            for layer in range(LAYERS)
        ]

    def _prefill(self, tokens: int) -> None:
        g = torch.Generator().manual_seed(0)
        shape = (tokens, self.geometry.num_kv_heads * self.geometry.head_dim)
        for row in self.rows:
            self.state.extend_prepared(row, tokens, tokens)
            chunks = self.state.start_extend([row], [0], [tokens])
            for layer in range(LAYERS):
                self.state.allocate_layer(layer, chunks)
                keys, values = (torch.randn(shape, generator=g).bfloat16() for _ in range(2))
                self.manager.store(layer, self.table[row, :tokens].long(), keys, values)
                windows = self.manager.views.score[layer, row, : tokens // 8]
                windows.copy_(torch.rand(windows.shape, generator=g))
                self.state.route_layer(layer, chunks)

    def step(self) -> None:
        """One token of each request, through all layers."""
        self.length += 1
        self.seconds += self.step_seconds
        rows, lengths = torch.tensor(self.rows), torch.full((len(self.rows),), self.length)
        self.state.alloc_to_lengths(req_pool_indices_cpu=rows, target_seq_lens_cpu=lengths)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self.rows),
            out_cache_loc=self.table[rows, self.length - 1].long(),
            req_pool_indices=rows,
            seq_lens=lengths,
        )
        self.backend.init_forward_metadata_out_graph(batch)
        g, n = self.geometry, len(self.rows)
        query = torch.randn(n, g.num_q_heads * g.head_dim).bfloat16()
        key, value = (torch.randn(n, g.num_kv_heads * g.head_dim).bfloat16() for _ in range(2))
        for layer in self.layers:
            self.backend.forward_decode(query, key, value, layer, batch)

    def turn(self, is_watched: bool) -> float:
        """CPU seconds of this thread a step."""
        self.manager.observer = self.watched if is_watched else Observer()
        started = time.thread_time()
        for _ in range(STEPS):
            self.step()
        return (time.thread_time() - started) / STEPS


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=54)
    args = parser.parse_args()
    steps = (2 * args.turns + 2) * STEPS
    decoding = Decoding(args.batch, args.tokens, steps, args.step_ms / 1000)
    times: dict[bool, list[float]] = {True: [], False: []}
    for watched in (True, False):
        decoding.turn(watched)
    for _ in range(args.turns):
        for watched in (True, False):
            times[watched].append(1000 * decoding.turn(watched))
    with_metrics, without = (statistics.median(times[x]) for x in (True, False))
    print(f"with metrics {with_metrics:.3f} ms, without {without:.3f} ms of CPU a step")
    print(f"cost {with_metrics - without:.3f} ms, {with_metrics / without - 1:+.2%}")


if __name__ == "__main__":
    main()
