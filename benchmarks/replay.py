"""The tiering of a server without its model: real state, manager and kernels on random data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

import torch

from qevict_kernels import make_kernels
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.manager import TierManager
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.state import TieringState

GEOMETRY = TieringConfig().geometry(Heads(9, 3, 64))
NUM_LAYERS = 30
CONTEXT_LIMIT = 8192


@dataclass
class StepTimes:
    """Seconds of each measured decode step by part; ``due`` says how many rows were routed.

    prologue: claims, views and routing before the first layer. store: new tokens, all layers.
    scored, unscored: attention of all layers, with and without scores.
    """

    due: list[int] = field(default_factory=list)
    prologue: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)
    unscored: list[float] = field(default_factory=list)

    def median_ms(self, part: str, keep: Callable[[int], bool] = lambda due: True) -> float:
        """Median of a part over the steps whose number of due rows is to be kept."""
        pairs = zip(getattr(self, part), self.due, strict=True)
        kept = [seconds for seconds, due in pairs if keep(due)]
        return statistics.median(kept) * 1e3 if kept else float("nan")


class Replay:
    """Decodes rows of random keys and values as the embedded model's server would.

    First scores are random, and shaken by a tenth before each routing event, so that some
    windows near the borders of the tiers move.
    """

    def __init__(self, budget: float, num_rows: int, kv_tokens: int = 65536) -> None:
        config = TieringConfig(budget=Fraction(str(budget)))
        rule = WindowBudget(config, GEOMETRY, NUM_LAYERS)
        plan = plan_capacity(
            rule, kv_tokens * rule.token_bytes, CONTEXT_LIMIT, CONTEXT_LIMIT, num_rows, num_rows
        )
        angles = torch.outer(torch.arange(float(CONTEXT_LIMIT)), 1e5 ** -(torch.arange(32.0) / 32))
        rotary = RotaryTable(torch.cat([angles.cos(), angles.sin()], -1), is_neox=True)
        self._requests = torch.zeros((num_rows + 1, CONTEXT_LIMIT), dtype=torch.int32)
        self._manager = TierManager(
            rule,
            make_kernels(GEOMETRY, rotary, torch.device("cpu")),
            torch.zeros(plan.arena_bytes, dtype=torch.uint8),
            plan.num_pages,
            num_rows + 1,
            plan.max_windows,
            torch.bfloat16,
        )
        self._state = TieringState(plan, self._manager, self._requests)
        self._next_page = 1
        self._lengths: dict[int, int] = {}

    def prefill(self, tokens: int) -> None:
        """One more request with a prompt of so many tokens, routed at its end."""
        row, state = len(self._lengths) + 1, self._state
        self._grow(row, 0, tokens)
        state.extend_prepared(row, tokens, tokens)
        chunks = state.start_extend([row], [0], [tokens])
        locations = self._requests[row, :tokens].long()
        keys = torch.randn(tokens, GEOMETRY.num_kv_heads, GEOMETRY.head_dim).bfloat16()
        for layer in range(NUM_LAYERS):
            state.allocate_layer(layer, chunks)
            self._manager.store(layer, locations, keys, keys)
            self._manager.layer_scores(layer)[row].exponential_()
            state.route_layer(layer, chunks)

    def decode(self, steps: int) -> StepTimes:
        """Decode so many tokens of all requests; each part is timed."""
        times = StepTimes()
        for step in range(steps):
            self._decode(times, scored_first=step % 2 == 0)
        return times

    def _decode(self, times: StepTimes, scored_first: bool) -> None:
        state, rows = self._state, list(self._lengths)
        for row in rows:
            self._grow(row, self._lengths[row], 1)
        lengths = [self._lengths[row] for row in rows]
        index, ends = torch.tensor(rows), torch.tensor(lengths)
        ledger = state.ledger
        due = [
            ledger.claims.is_due(ledger.prompt_tokens(r), n - 1) for r, n in self._lengths.items()
        ]
        times.due.append(sum(due))
        if any(due):
            self._manager.views.score.mul_(1 + 0.1 * torch.rand_like(self._manager.views.score))
        with _timed(times.prologue):
            # What SGLang asks and tells before a step, then the step's own beginning.
            ledger.total_if_decoded(rows)
            state.alloc_to_lengths(req_pool_indices_cpu=index, target_seq_lens_cpu=ends)
            state.start_decode(rows, lengths)
        locations = self._requests[index, ends - 1].long()
        heads = (len(rows), GEOMETRY.num_q_heads, GEOMETRY.head_dim)
        query = torch.randn(heads).bfloat16()
        keys = torch.randn(len(rows), GEOMETRY.num_kv_heads, GEOMETRY.head_dim).bfloat16()
        with _timed(times.store):
            places = self._manager.locate(locations)
            for layer in range(NUM_LAYERS):
                self._manager.store_at(layer, places, keys, keys)
        passes = [(times.scored, True), (times.unscored, False)]
        for seconds, with_scores in passes if scored_first else passes[::-1]:
            with _timed(seconds):
                for layer in range(NUM_LAYERS):
                    self._attend(layer, query, index, ends, with_scores)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        with_scores: bool,
    ) -> None:
        manager = self._manager
        manager.kernels.decode(
            query,
            manager.full_arena,
            manager.coded_arena,
            manager.layer_view(layer),
            rows,
            lengths,
            GEOMETRY.head_dim**-0.5,
            torch.empty_like(query),
            manager.layer_scores(layer) if with_scores else None,
        )

    def _grow(self, row: int, length: int, tokens: int) -> None:
        """Give pages to the next tokens of a row."""
        window = GEOMETRY.window
        for position in range(length, length + tokens):
            if position % window == 0:
                self._requests[row, position] = self._next_page * window
                self._next_page += 1
            else:
                self._requests[row, position] = self._requests[row, position - 1] + 1
        self._lengths[row] = length + tokens


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - start)
