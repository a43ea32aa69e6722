"""The map of a view against counting its windows one by one."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from qevict_tiers.policy import Tier
from qevict_tiers.tier_map import NOTHING, SHARE_STEPS, tier_map


def test_a_window_in_a_cell_is_told_as_it_is() -> None:
    tiers = torch.tensor([[Tier.FULL, Tier.CODED, Tier.EVICTED, Tier.NONE]], dtype=torch.uint8)
    found = tier_map(tiers, max_columns=4)
    assert found.span == 1
    assert found.cells.tolist() == [[0xF0, 0x0F, 0x00, NOTHING]]


def test_a_long_context_has_no_more_columns_than_allowed_and_nothing_has_none() -> None:
    found = tier_map(torch.ones(3, 100_001, dtype=torch.uint8), max_columns=256)
    assert found.cells.shape == (3, 256)
    assert found.span == 391
    assert (found.cells == 0xF0).all()
    assert tier_map(torch.ones(3, 0, dtype=torch.uint8), max_columns=256).cells.shape == (3, 0)


def _share(part: int, whole: int) -> int:
    return floor(Fraction(SHARE_STEPS * part, whole) + Fraction(1, 2))


@given(
    st.lists(st.sampled_from(list(Tier)), min_size=1, max_size=60),
    st.integers(min_value=1, max_value=20),
)
def test_cells_are_the_rounded_shares_of_their_windows(tiers: list[Tier], columns: int) -> None:
    cells, span = tier_map(torch.tensor([tiers], dtype=torch.uint8), columns)
    assert cells.shape[1] <= columns
    assert (cells.shape[1] - 1) * span < len(tiers) <= cells.shape[1] * span
    for column, cell in enumerate(cells[0].tolist()):
        windows = [tier for tier in tiers[column * span :][:span] if tier is not Tier.NONE]
        if not windows:
            assert cell == NOTHING
            continue
        full, coded = windows.count(Tier.FULL), windows.count(Tier.CODED)
        assert cell >> 4 == _share(full, len(windows))
        assert (cell >> 4) + (cell & 15) == _share(full + coded, len(windows)) <= SHARE_STEPS


@pytest.mark.parametrize("rows", [1, 3])
def test_a_view_of_a_larger_table_is_read_as_it_lies(rows: int) -> None:
    table = torch.randint(0, 4, (5, 7, 64), dtype=torch.uint8)
    assert torch.equal(
        tier_map(table[:, rows, :40], 8).cells, tier_map(table[:, rows, :40].clone(), 8).cells
    )
