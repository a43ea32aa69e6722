"""Views: what each request sees of each window in each layer, as tensors on the KV device."""

from __future__ import annotations

import torch

from qevict_kernels.interface import LayerView, ViewTensors
from qevict_tiers.policy import Tier

__all__ = ["Views"]


class Views:
    """The private views of all rows (requests) in all layers.

    tier: uint8 ``[L, rows, N]`` (``Tier``). score: float32 ``[L, rows, N]``, attention
    mass gathered so far, less what has decayed (``scores``). outranked: bool ``[L, rows, N]``,
    windows that ranked below the first ``K_f`` at their row's last routing event. windows,
    num_full, num_coded: the window lists of ``qevict_kernels.interface.LayerView``, which
    kernels read: tier as lists. page_table: int32 ``[rows, N]``. shared: int64 ``[rows]``,
    leading windows whose copies belong to a reused prefix. publishable: int64 ``[rows]``,
    leading windows that may be reused by others later, so that they keep codes when they are
    evicted.
    """

    def __init__(self, num_layers: int, num_rows: int, max_windows: int, device: torch.device):
        shape = (num_layers, num_rows, max_windows)
        self.tier = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.score = torch.zeros(shape, dtype=torch.float32, device=device)
        self.outranked = torch.zeros(shape, dtype=torch.bool, device=device)
        self.windows = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_full = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.num_coded = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.page_table = torch.zeros(shape[1:], dtype=torch.int32, device=device)
        self.shared = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.publishable = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def tensors(self, is_routed: torch.Tensor) -> ViewTensors:
        """For kernels that change views themselves; ``is_routed``: bool ``[L]``."""
        return ViewTensors(
            self.tier, self.score, self.outranked, self.windows, self.num_full, self.num_coded,
            self.page_table, self.shared, self.publishable, is_routed,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        per_layer = (self.tier, self.score, self.outranked, self.windows)
        per_row = (self.num_full, self.num_coded, self.page_table, self.shared, self.publishable)
        return sum(x.nbytes for x in (*per_layer, *per_row))

    @staticmethod
    def row_bytes(num_layers: int, max_windows: int) -> int:
        """Bytes that one row takes."""
        return max_windows * (num_layers * (1 + 4 + 1 + 4) + 4) + num_layers * 8 + 16

    def layer_view(
        self, layer: int, full_slot: torch.Tensor, coded_slot: torch.Tensor
    ) -> LayerView:
        """The views in one layer, with that layer's slot tables (int32 ``[pages]``)."""
        return LayerView(
            page_table=self.page_table,
            full_slot=full_slot,
            coded_slot=coded_slot,
            windows=self.windows[layer],
            num_full=self.num_full[layer],
            num_coded=self.num_coded[layer],
        )

    def close(self, rows: torch.Tensor, width: int) -> None:
        """Make rows (int64 ``[n]``) empty, which have had ``width`` windows at most."""
        self.tier[:, rows, :width] = Tier.NONE
        self.score[:, rows, :width] = 0.0
        self.outranked[:, rows, :width] = False
        self.num_full[:, rows] = 0
        self.num_coded[:, rows] = 0
        self.shared[rows] = 0
        self.publishable[rows] = 0

    def keeps_codes(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Whether windows keep their codes when they are evicted: bool ``[len(rows), width]``."""
        window = torch.arange(width, device=rows.device)
        is_private = window >= self.shared[rows][:, None]
        return is_private & (window < self.publishable[rows][:, None])

    def append(self, rows: torch.Tensor, windows: torch.Tensor, pages: torch.Tensor) -> None:
        """Add FULL windows to the views, in all layers.

        ``rows``, ``windows``, ``pages``: int64 ``[n]``; the windows of a row are
        consecutive and stand together in ascending order.
        """
        self.page_table[rows, windows] = pages.to(torch.int32)
        self.tier[:, rows, windows] = Tier.FULL
        # Rank of each entry among those of its row: its distance from the row's first.
        starts = torch.ones_like(rows, dtype=torch.bool)
        starts[1:] = rows[1:] != rows[:-1]
        index = torch.arange(rows.shape[0], device=rows.device)
        rank = index - torch.where(starts, index, 0).cummax(0).values
        position = self.num_full[:, rows].to(torch.int64) + rank
        layers = torch.arange(self.tier.shape[0], device=rows.device)[:, None]
        self.windows[layers, rows, position] = windows.to(torch.int32)
        self.num_full.index_add_(1, rows, torch.ones_like(position, dtype=torch.int32))

    def set_tiers(
        self, layers: slice, rows: torch.Tensor, tiers: torch.Tensor, outranked: torch.Tensor
    ) -> None:
        """Set tiers and ranks of the first ``n`` windows of rows, and rebuild their lists.

        ``tiers``: uint8 ``[len(layers), len(rows), n]``, ``outranked``: bool, same shape;
        windows from ``n`` on must not exist.
        """
        n, width = tiers.shape[-1], self.windows.shape[-1]
        self.tier[layers, rows, :n] = tiers
        self.outranked[layers, rows, :n] = outranked
        full, coded = tiers == Tier.FULL, tiers == Tier.CODED
        # What lies between the first n entries and the last n is not touched.
        span = min(width, 2 * n)
        lists = torch.zeros((*tiers.shape[:2], span + 1), dtype=torch.int32, device=tiers.device)
        window = torch.arange(n, dtype=torch.int32, device=tiers.device).expand(tiers.shape)
        # Sums of bool would be int64, which takes a CPU ten times as long.
        from_left = full.cumsum(-1, dtype=torch.int32) - 1
        from_right = span - coded.cumsum(-1, dtype=torch.int32)
        position = torch.where(full, from_left, torch.where(coded, from_right, span))
        lists.scatter_(-1, position.to(torch.int64), window)
        self.windows[layers, rows, : span - n] = lists[..., : span - n]
        self.windows[layers, rows, width - n :] = lists[..., span - n : span]
        self.num_full[layers, rows] = full.sum(-1, dtype=torch.int32)
        self.num_coded[layers, rows] = coded.sum(-1, dtype=torch.int32)

    def check_integrity(self, rows: list[int]) -> list[str]:
        """Whether the lists of rows say what the tiers say; empty when they do."""
        problems = []
        width = self.windows.shape[-1]
        for row in rows:
            for layer in range(self.tier.shape[0]):
                tier = self.tier[layer, row]
                num_full = int(self.num_full[layer, row])
                num_coded = int(self.num_coded[layer, row])
                lists = self.windows[layer, row]
                expected_full = torch.nonzero(tier == Tier.FULL)[:, 0]
                expected_coded = torch.nonzero(tier == Tier.CODED)[:, 0]
                if not torch.equal(
                    lists[:num_full].sort().values.long(), expected_full
                ) or not torch.equal(
                    lists[width - num_coded :].sort().values.long(), expected_coded
                ):
                    problems.append(f"row {row} layer {layer}: window lists and tiers differ")
        return problems
