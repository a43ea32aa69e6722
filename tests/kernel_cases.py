"""Random arenas, views and rotary tables for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba import NumbaKernels
from qevict_kernels.numba.spec import Spec
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.rope import RotaryTable
from qevict_tiers.config import Promotion

WITHOUT_STORE = (Promotion.ALIAS, Promotion.DEQUANTIZE)
"""How windows are promoted where nobody has their originals."""


class NarrowKernels(NumbaKernels):
    """As they are compiled for a CPU without AVX-512, which one with it runs as well."""

    def _spec(self, dtype: torch.dtype) -> Spec:
        return replace(super()._spec(dtype), lanes=8)


def rotary_table(
    rotary_dim: int, is_neox: bool = True, max_positions: int = 4096, mscale: float = 1.0
) -> RotaryTable:
    """A table as SGLang builds it, with angles exact to float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), 1e4**-exponents)
    table = torch.cat([angles.cos(), angles.sin()], dim=1) * mscale
    return RotaryTable(table.float(), is_neox)


@dataclass
class Case:
    """The arguments of ``decode`` for a batch (and of the other methods)."""

    geometry: WindowGeometry
    query: torch.Tensor
    full: FullArena
    coded: torch.Tensor
    view: LayerView
    rows: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    scores: torch.Tensor

    def decode(
        self, kernels: object, scores: bool = True, **changes: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``kernels.decode``; returns (out, scores) without touching the case."""
        arguments = {
            "query": self.query, "full": self.full, "coded": self.coded, "view": self.view,
            "rows": self.rows, "seq_lens": self.seq_lens, "scale": self.scale,
        } | changes  # fmt: skip
        out = torch.full_like(arguments["query"], torch.nan)
        after = self.scores.clone()
        kernels.decode(**arguments, out=out, scores=after if scores else None)  # type: ignore[attr-defined]
        return out, after

    def alone(self, b: int) -> Case:
        """The case with request ``b`` as the only one of the batch."""
        return Case(
            self.geometry, self.query[b : b + 1], self.full, self.coded, self.view,
            self.rows[b : b + 1], self.seq_lens[b : b + 1], self.scale, self.scores,
        )  # fmt: skip


def full_arena(
    geometry: WindowGeometry, num_slots: int, dtype: torch.dtype, generator: torch.Generator
) -> FullArena:
    """An arena whose slots hold keys, then values; keys have channels of unlike size."""
    shape = (num_slots, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim)
    data = torch.randn(shape, generator=generator)
    data[:, 0] *= torch.rand(geometry.head_dim, generator=generator) * 3
    data[:, 0] += torch.randn(geometry.head_dim, generator=generator)
    data = data.to(dtype)
    return FullArena(data[:, 0], data[:, 1])


def random_case(
    geometry: WindowGeometry,
    rotary: RotaryTable,
    counts: Sequence[tuple[int, int]],
    *,
    tail: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    num_spare_rows: int = 2,
) -> Case:
    """A batch of requests with ``(num_full, num_coded)`` windows each.

    Windows are drawn without order from a request twice as long; the last window of the
    sequence is FULL where there is a FULL one, and holds ``tail[b]`` tokens (default: all).
    Everything that no request sees is NaN.
    """
    g = torch.Generator().manual_seed(seed)
    window = geometry.window
    num_rows = len(counts) + num_spare_rows
    columns = max((2 * (f + c) for f, c in counts), default=0) + 3
    columns = min(columns, rotary.max_positions // window)
    num_pages = num_rows * columns + 1
    num_full, num_coded = (sum(c[i] for c in counts) for i in (0, 1))
    arena = full_arena(geometry, num_full + 2, dtype, g)
    coded = torch.full(
        (num_coded + 2, geometry.num_kv_heads, geometry.record.record_bytes), 255, dtype=torch.uint8
    )
    page_table = (torch.randperm(num_rows * columns, generator=g) + 1).view(num_rows, columns).int()
    full_slot = torch.full((num_pages,), -1, dtype=torch.int32)
    coded_slot = torch.full((num_pages,), -1, dtype=torch.int32)
    windows = torch.full((num_rows, columns), -1, dtype=torch.int32)
    counts_full = torch.zeros(num_rows, dtype=torch.int32)
    counts_coded = torch.zeros(num_rows, dtype=torch.int32)
    full_free = torch.randperm(num_full + 2, generator=g).int()
    coded_free = torch.randperm(num_coded + 2, generator=g).int()
    rows = torch.randperm(num_rows, generator=g)[: len(counts)]
    seq_lens = torch.zeros(len(counts), dtype=torch.int64)
    sources, targets, indices = [], [], []
    for b, (f, c) in enumerate(counts):
        row = int(rows[b])
        length = min(max(f + c, 2 * (f + c) - 1), columns)
        seq_lens[b] = length * window
        picked = torch.randperm(max(length - 1, 0), generator=g).int()
        if f:
            last = torch.tensor([length - 1], dtype=torch.int32)
            own = torch.cat([picked[: f - 1], last])
            missing = window - (tail[b] if tail else window)
            seq_lens[b] -= missing
        else:
            own = picked[:0]
        rest = picked[len(picked) - c :] if c else picked[:0]
        if c > len(picked):  # no FULL window and every window coded
            rest = torch.randperm(length, generator=g).int()[:c]
        windows[row, :f] = own
        windows[row, columns - c :] = rest.flip(0)
        counts_full[row], counts_coded[row] = f, c
        full_slot[page_table[row, own.long()].long()] = full_free[:f]
        full_free = full_free[f:]
        slots = coded_free[:c]
        coded_free = coded_free[c:]
        coded_slot[page_table[row, rest.long()].long()] = slots
        targets.append(slots)
        indices.append(rest)
        if f:
            slot = int(full_slot[page_table[row, int(own[-1])]])
            valid = int(seq_lens[b]) - int(own[-1]) * window
            arena.keys[slot, :, valid:] = torch.nan
            arena.values[slot, :, valid:] = torch.nan
    source_arena = full_arena(geometry, max(num_coded, 1), dtype, g)
    sources = torch.arange(num_coded, dtype=torch.int32)
    ReferenceKernels(geometry, rotary).quantize(
        source_arena, coded, sources, torch.cat(targets) if targets else sources,
        torch.cat(indices) if indices else sources,
    )  # fmt: skip
    unused = full_free.long()
    arena.keys[unused] = torch.nan
    arena.values[unused] = torch.nan
    query = torch.randn(len(counts), geometry.num_q_heads, geometry.head_dim, generator=g).to(dtype)
    return Case(
        geometry, query, arena, coded,
        LayerView(page_table, full_slot, coded_slot, windows, counts_full, counts_coded),
        rows, seq_lens, geometry.head_dim**-0.5,
        torch.rand(num_rows, columns, generator=g),
    )  # fmt: skip
