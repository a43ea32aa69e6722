"""Churn and LIR while a server runs: the numbers of ``diagnostics``, gathered on the KV device.

``Wavering`` sees each view before and after each of its routing events and adds what changed to
histograms, by operations of fixed shape, so that no launch waits. ``diagnostics.selection_churn``
and ``diagnostics.returns`` of the same events give the same values; layers kept FULL are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from qevict_kernels.transfers import to_device
from qevict_tiers.budget import WindowBudget
from qevict_tiers.policy import Tier
from qevict_tiers.views import Views

__all__ = ["Before", "Wavering"]


class Before(NamedTuple):
    """Views just before a routing event: tiers uint8, outranked bool, ``[l, B, N]``."""

    tiers: torch.Tensor
    outranked: torch.Tensor


class Wavering:
    """Histograms of churn and LIR over all events, layers and rows, and churn by groups of rows.

    ``bounds``: upper bounds of the buckets, ascending; values beyond the last fall into one more.
    churn, returns: float64 ``[len(bounds) + 2]`` on the device: observations by bucket, then the
    sum of the values. group_churn: float64 ``[2, num_groups]``: sums, and how many.
    """

    def __init__(
        self,
        budget: WindowBudget,
        num_rows: int,
        max_windows: int,
        bounds: Sequence[float],
        num_groups: int,
        device: torch.device,
    ) -> None:
        self._budget = budget
        self._bounds = torch.tensor(bounds, dtype=torch.float64, device=device)
        is_routed = [layer not in budget.config.full_layers for layer in range(budget.num_layers)]
        self._is_routed = to_device(is_routed, device).bool()
        size = len(bounds) + 2
        self.churn = torch.zeros(size, dtype=torch.float64, device=device)
        self.returns = torch.zeros(size, dtype=torch.float64, device=device)
        self.group_churn = torch.zeros((2, num_groups), dtype=torch.float64, device=device)
        # Windows that ranked FULL at some event of their row.
        shape = (budget.num_layers, num_rows, max_windows)
        self._ever = torch.zeros(shape, dtype=torch.bool, device=device)
        # Length of each row at its last event, by layer; 0 before the first.
        self._tokens = np.zeros((num_rows, budget.num_layers), dtype=np.int64)

    @staticmethod
    def row_bytes(num_layers: int, max_windows: int) -> int:
        """Bytes that one row takes on the device."""
        return num_layers * max_windows

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self._ever.nbytes

    def close(self, rows: Sequence[int]) -> None:
        """Rows have ended."""
        longest = int(self._tokens[rows].max(initial=0))
        if longest:
            index = to_device(rows, self._ever.device)
            self._ever[:, index, : self._budget.num_windows(longest)] = False
            self._tokens[rows] = 0

    def before(self, views: Views, layers: slice, rows: Sequence[int], width: int) -> Before:
        """Remember the first ``width`` windows of rows, as they are before an event."""
        index = to_device(rows, views.tier.device)
        # Indexing by a tensor copies.
        return Before(views.tier[layers, index, :width], views.outranked[layers, index, :width])

    def after(
        self,
        before: Before,
        views: Views,
        layers: slice,
        rows: Sequence[int],
        tokens: Sequence[int],
        groups: Sequence[int],
    ) -> None:
        """Compare with what the event has made of them.

        ``tokens``: stored tokens of the rows; ``groups``: the group of each.
        """
        device, width = views.tier.device, before.tiers.shape[-1]
        last = self._tokens[rows, layers.start].tolist()
        self._tokens[rows, layers] = np.asarray(tokens)[:, None]
        history = [self._budget.history(n) for n in tokens]
        common = [
            (max(start, first), min(end, stop)) if previous else (0, 0)
            for previous, (start, end) in zip(last, history, strict=True)
            for first, stop in [self._budget.history(previous)]
        ]
        index, group, start, end, first, stop = to_device(
            [rows, groups, *zip(*history, strict=True), *zip(*common, strict=True)], device
        )
        window = torch.arange(width, device=device)
        now = (window >= start[:, None]) & (window < end[:, None])
        shared = (window >= first[:, None]) & (window < stop[:, None])
        tiers = views.tier[layers, index, :width]
        outranked = views.outranked[layers, index, :width]

        was_kept = _is_kept(before.tiers) & shared
        is_kept = _is_kept(tiers) & shared
        both, either = (was_kept & is_kept).sum(-1), (was_kept | is_kept).sum(-1)
        churn = torch.where(either == 0, 0.0, 1 - both.double() / either.clamp(min=1))

        was_ranked = was_kept & ~before.outranked
        is_ranked = _is_kept(tiers) & now & ~outranked
        ever = self._ever[layers, index, :width]
        num_ranked = is_ranked.sum(-1)
        back = (is_ranked & ever & ~was_ranked).sum(-1).double() / num_ranked.clamp(min=1)
        self._ever[layers, index, :width] = ever | is_ranked

        routed = self._is_routed[layers, None]
        compared = to_device([n > 0 for n in last], device).bool() & routed
        self._gather(self.churn, churn, compared)
        self._gather(self.returns, back, (num_ranked > 0) & routed)
        group = group.expand(churn.shape)
        amounts = torch.stack([torch.where(compared, churn, 0.0), compared.double()])
        self.group_churn.index_add_(1, group.flatten(), amounts.flatten(1))

    def _gather(self, histogram: torch.Tensor, values: torch.Tensor, where: torch.Tensor) -> None:
        bucket = torch.bucketize(values, self._bounds)
        histogram.index_add_(0, bucket.flatten(), where.double().flatten())
        histogram[-1] += torch.where(where, values, 0.0).sum()


def _is_kept(tiers: torch.Tensor) -> torch.Tensor:
    return (tiers == Tier.FULL) | (tiers == Tier.CODED)
