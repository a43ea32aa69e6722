"""Tiered decode attention on a GPU beside full attention in bfloat16, scores included.

One point is a stack of layers with windows of their own, so that what a cache holds of one layer
is gone before it is asked for again; a run goes through all layers, replayed from a CUDA graph.
Full attention is FlashInfer's paged decode where it can be imported, else the fastest of torch's.

full_us, tiered_us   one layer
ratio                full attention's time over ours: higher is better
pair_ratio           the same with FULL windows left to FlashInfer, keys read again for scores
bandwidth            bytes that tiers must touch (``roofline``), per second, over those of a copy
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import torch
import torch.nn.functional as F
from device import DEVICE, Row, describe, median_seconds, parser, report

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton import TritonKernels
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig

MODELS = {
    "8B": (TieringConfig().geometry(Heads(32, 8, 128)), 32),
    "70B": (TieringConfig().geometry(Heads(64, 8, 128)), 80),
    "tiny": (TieringConfig().geometry(Heads(4, 2, 64)), 2),
}
DISTINCT = 256
"""Windows with numbers of their own; a stack repeats them."""

Decode = Callable[..., None]
"""``decode`` of ``AttentionKernels``."""

CACHE_BYTES, MOST_BYTES = 256 << 20, 40 << 30
"""A stack is larger than the first, if it takes no more than the second."""

COLUMNS = {
    "model": "s",
    "context": "d",
    "batch": "d",
    "budget": ".1f",
    "baseline": "s",
    "full_us": ".1f",
    "tiered_us": ".1f",
    "ratio": ".2f",
    "pair_ratio": ".2f",
    "bandwidth": ".0%",
}


def rotary_table(head_dim: int, positions: int) -> RotaryTable:
    """Llama 3's table, unscaled."""
    frequencies = 500_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return RotaryTable(torch.cat([angles.cos(), angles.sin()], -1).float().to(DEVICE), True)


@dataclass(frozen=True)
class Point:
    """One line of the table."""

    model: str
    context: int
    batch: int

    @property
    def geometry(self) -> WindowGeometry:
        """Of the model."""
        return MODELS[self.model][0]

    def layers(self, layer_bytes: int) -> int:
        """How many layers make a stack."""
        most = max(1, MOST_BYTES // layer_bytes)
        return min(MODELS[self.model][1], most, max(1, math.ceil(CACHE_BYTES / layer_bytes)))


def repeated(base: torch.Tensor, count: int) -> torch.Tensor:
    """``[count, ...]`` of entries of ``base``, drawn at random."""
    out = base.new_empty(count, *base.shape[1:])
    for start in range(0, count, 1 << 16):
        part = out[start : start + (1 << 16)]
        index = torch.randint(base.shape[0], (part.shape[0],), device=base.device)
        torch.index_select(base, 0, index, out=part)
    return out


def full_attention(point: Point, repeats: int) -> tuple[str, float]:
    """The baseline and its seconds for one layer."""
    g = point.geometry
    token_bytes = 2 * g.num_kv_heads * g.head_dim * 2
    layers = point.layers(point.batch * point.context * token_bytes)
    query = torch.randn(
        layers, point.batch, g.num_q_heads, g.head_dim, dtype=torch.bfloat16, device=DEVICE
    )
    runs = _flashinfer(point, layers, query) or _sdpa(point, layers, query)
    seconds = {name: median_seconds(run, repeats) / layers for name, run in runs.items()}
    best = min(seconds, key=seconds.__getitem__)
    return best, seconds[best]


def _flashinfer(point: Point, layers: int, query: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Empty where FlashInfer can't be imported, or can't be compiled."""
    if DEVICE.type == "cpu":
        return {}
    try:
        return {"flashinfer": _flashinfer_decode(point, layers, query)}
    except (ImportError, OSError, RuntimeError) as error:
        print(f"no FlashInfer: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {}


def _flashinfer_decode(point: Point, layers: int, query: torch.Tensor) -> Callable[[], None]:
    import flashinfer

    g, page = point.geometry, 16
    pages = -(-point.context // page) * point.batch
    base = torch.randn(
        DISTINCT, 2, page, g.num_kv_heads, g.head_dim, dtype=torch.bfloat16, device=DEVICE
    )
    caches = [repeated(base, pages) for _ in range(layers)]
    indptr = torch.arange(point.batch + 1, dtype=torch.int32, device=DEVICE)
    indptr *= pages // point.batch
    indices = torch.randperm(pages, device=DEVICE).int()
    last = torch.full((point.batch,), (point.context - 1) % page + 1, dtype=torch.int32).to(DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        indptr, indices, last, g.num_q_heads, g.num_kv_heads, g.head_dim, page,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    out = torch.empty_like(query)

    def run() -> None:
        for layer in range(layers):
            wrapper.run(query[layer], caches[layer], out=out[layer])

    run()
    return run


def _sdpa(point: Point, layers: int, query: torch.Tensor) -> dict[str, Callable[[], None]]:
    g = point.geometry
    base = torch.randn(DISTINCT, g.num_kv_heads * g.head_dim, dtype=torch.bfloat16, device=DEVICE)

    def cache() -> torch.Tensor:
        tokens = repeated(base, point.batch * point.context)
        return tokens.view(point.batch, g.num_kv_heads, point.context, g.head_dim)

    keys, values = ([cache() for _ in range(layers)] for _ in range(2))

    def grouped() -> None:
        for layer in range(layers):
            q = query[layer].unsqueeze(2)
            F.scaled_dot_product_attention(q, keys[layer], values[layer], enable_gqa=True)

    def packed() -> None:
        for layer in range(layers):
            q = query[layer].view(point.batch, g.num_kv_heads, g.group_size, g.head_dim)
            F.scaled_dot_product_attention(q, keys[layer], values[layer])

    return {"sdpa grouped": grouped, "sdpa packed": packed}


class Tiers:
    """A stack of layers with the windows of a budget."""

    def __init__(self, point: Point, budget: str) -> None:
        g, layers = point.geometry, MODELS[point.model][1]
        self.point = point
        self.windows = WindowBudget(TieringConfig(budget=Fraction(budget)), g, layers)
        total = self.windows.num_windows(point.context)
        start, end = self.windows.history(point.context)
        limits = self.windows.capacities(point.context)
        self.num_full = total - (end - start) + limits.full
        self.num_coded = limits.coded
        self.total = total
        self.bytes = point.batch * (
            self.num_full * self.windows.full_bytes + self.num_coded * self.windows.coded_bytes
            + (self.num_full + self.num_coded) * (3 * 4 + 2 * 4 * g.num_q_heads + 2 * 4)
        )  # fmt: skip
        self.layers = point.layers(self.bytes)
        self.kernels = TritonKernels(g, rotary_table(g.head_dim, point.context), DEVICE)
        self.kernels.reserve(point.batch, total)
        self._make_copies()
        self._make_views()

    def _make_copies(self) -> None:
        g, point = self.point.geometry, self.point
        source = torch.randn(
            DISTINCT, 2, g.num_kv_heads, g.window, g.head_dim, dtype=torch.bfloat16, device=DEVICE
        )
        records = torch.empty(
            DISTINCT, g.num_kv_heads, g.record.record_bytes, dtype=torch.uint8, device=DEVICE
        )
        slots = torch.arange(DISTINCT, dtype=torch.int32, device=DEVICE)
        self.kernels.quantize(
            FullArena(source[:, 0], source[:, 1]), records, slots, slots, torch.zeros_like(slots)
        )
        full = repeated(source, max(1, self.layers * point.batch * self.num_full))
        self.full = FullArena(full[:, 0], full[:, 1])
        self.coded = repeated(records, max(1, self.layers * point.batch * self.num_coded))

    def _make_views(self) -> None:
        batch, total = self.point.batch, self.total
        order = torch.rand(batch, total, device=DEVICE).argsort(-1)
        full = order[:, : self.num_full].sort(-1).values
        coded = order[:, self.num_full : self.num_full + self.num_coded].sort(-1).values
        windows = torch.zeros(batch, total, dtype=torch.int32, device=DEVICE)
        windows[:, : self.num_full] = full.int()
        windows[:, total - self.num_coded :] = coded.flip(-1).int()
        pages = torch.randperm(batch * total, device=DEVICE).view(batch, total)

        def table(chosen: torch.Tensor, layer: int) -> torch.Tensor:
            count = chosen.numel()
            slots = torch.full((batch * total,), -1, dtype=torch.int32, device=DEVICE)
            own = torch.randperm(count, device=DEVICE).int() + layer * count
            slots[pages.gather(1, chosen).flatten()] = own
            return slots

        def counts(number: int) -> torch.Tensor:
            return torch.full((batch,), number, dtype=torch.int32, device=DEVICE)

        self.views = [
            LayerView(
                pages.int(),
                table(full, layer),
                table(coded, layer),
                windows,
                counts(self.num_full),
                counts(self.num_coded),
            )
            for layer in range(self.layers)
        ]
        self.scores = torch.zeros(self.layers, batch, total, device=DEVICE)

    def paired(self) -> Decode:
        """The kernels' decode beside FlashInfer's, planned for this stack."""
        from qevict_kernels.flashinfer import PairedDecode

        point, pair = self.point, PairedDecode(self.kernels, DEVICE)
        pair.plan(
            [self.num_full] * point.batch, [point.context] * point.batch,
            point.geometry.head_dim**-0.5, torch.bfloat16,
        )  # fmt: skip
        return pair.decode

    def run(self, attend: Decode) -> Callable[[], None]:
        """Decode one token in every layer."""
        g, batch = self.point.geometry, self.point.batch
        shape = (self.layers, batch, g.num_q_heads, g.head_dim)
        query = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty_like(query)
        rows = torch.arange(batch, device=DEVICE)
        lengths = torch.full((batch,), self.point.context, device=DEVICE)

        def decode() -> None:
            for layer, view in enumerate(self.views):
                attend(
                    query[layer], self.full, self.coded, view, rows, lengths, g.head_dim**-0.5,
                    out[layer], self.scores[layer],
                )  # fmt: skip

        return decode


def main() -> None:
    """Parse options and run."""
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=["8B", "70B"], choices=MODELS)
    options.add_argument("--contexts", nargs="+", type=int, default=[4096, 32_768, 131_072])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    options.add_argument("--budgets", nargs="+", default=["0.1", "0.2", "0.3"])
    chosen = options.parse_args()
    machine = describe()
    rows: list[Row] = []
    for model, context, batch in product(chosen.models, chosen.contexts, chosen.batches):
        point = Point(model, context, batch)
        # The second model is asked once a shape, at the default budget.
        budgets = chosen.budgets if model == chosen.models[0] else ["0.2"]
        baseline, full_seconds = full_attention(point, chosen.repeats)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        for budget in budgets:
            tiers = Tiers(point, budget)
            run = tiers.run(tiers.kernels.decode)
            seconds = median_seconds(run, chosen.repeats) / tiers.layers
            row: Row = {
                "model": model,
                "context": context,
                "batch": batch,
                "budget": float(budget),
                "baseline": baseline,
                "layers": tiers.layers,
                "full_us": full_seconds * 1e6,
                "tiered_us": seconds * 1e6,
                "ratio": full_seconds / seconds,
                "bytes": tiers.bytes,
            }
            if baseline == "flashinfer":
                pair = tiers.run(tiers.paired())
                row["pair_ratio"] = (
                    full_seconds * tiers.layers / median_seconds(pair, chosen.repeats)
                )
            if bandwidth := machine.get("copy_bandwidth"):
                row["bandwidth"] = tiers.bytes / seconds / bandwidth
            rows.append(row)
            print(row, flush=True)
            del tiers
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    report(rows, COLUMNS, chosen.json, machine)


if __name__ == "__main__":
    main()
