"""A picture of one request's view: layers by windows, small enough to send, whatever its length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qevict_tiers.policy import Tier

__all__ = ["NOTHING", "SHARE_STEPS", "TierMap", "tier_map"]

SHARE_STEPS = 15
"""A share of a cell's windows is told in fifteenths."""

NOTHING = 0xFF
"""A cell whose windows do not exist (yet)."""


class TierMap(NamedTuple):
    """Cells of ``span`` consecutive windows each; the last one may have fewer.

    cells: uint8 ``[L, C]``. The high four bits of a cell are the share of its windows that are
    FULL, the low ones the share that are coded, in fifteenths; the rest is evicted. So with one
    window in a cell it is 0xF0, 0x0F or 0x00. ``NOTHING`` where there is no window.
    """

    cells: torch.Tensor
    span: int


def tier_map(tiers: torch.Tensor, max_columns: int) -> TierMap:
    """The map of tiers (uint8 ``[L, N]``, ``Tier``), with at most ``max_columns`` cells a layer.

    Cells are computed where the tiers are, so a GPU sends no more than the map.
    """
    layers, windows = tiers.shape
    span = max(1, -(-windows // max_columns))
    columns = -(-windows // span)
    padded = torch.nn.functional.pad(tiers, (0, columns * span - windows), value=Tier.NONE)
    grouped = padded.view(layers, columns, span)

    def count(*kinds: Tier) -> torch.Tensor:
        return sum((grouped == kind).sum(-1, dtype=torch.int32) for kind in kinds)  # type: ignore[return-value]

    full, there = count(Tier.FULL), count(Tier.FULL, Tier.CODED, Tier.EVICTED)
    kept, size = full + count(Tier.CODED), there.clamp(min=1)
    # Both rounded from zero, so that the shares never add up to more than all.
    full_share = (2 * SHARE_STEPS * full + size) // (2 * size)
    kept_share = (2 * SHARE_STEPS * kept + size) // (2 * size)
    cells = (full_share << 4 | (kept_share - full_share)).masked_fill(there == 0, NOTHING)
    return TierMap(cells.to(torch.uint8), span)
