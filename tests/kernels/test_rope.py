"""Rotary tables against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import rotary_table
from qevict_kernels.rope import RotaryTable

POSITIONS = torch.tensor([0, 1, 7, 100, 4095])
STYLES = [(64, True), (64, False), (32, True), (32, False)]


def oracle(x: torch.Tensor, dim: int, is_neox: bool) -> torch.Tensor:
    """``x`` at ``POSITIONS``, each pair of channels multiplied by exp(i * p * theta)."""
    theta = 1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), POSITIONS.unsqueeze(1) * theta)
    x = x.double()
    first = torch.arange(dim // 2) if is_neox else torch.arange(0, dim, 2)
    second = first + (dim // 2 if is_neox else 1)
    turned = torch.complex(x[:, first], x[:, second]) * turn
    out = x.clone()
    out[:, first], out[:, second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize(("dim", "is_neox"), STYLES)
def test_rotate_is_complex_multiplication(dim: int, is_neox: bool) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    rotated = rotary_table(dim, is_neox).rotate(x, POSITIONS)
    # Two products and a sum of float32, a table rounded to float32.
    bound = 4 * 2.0**-24 * x.abs().amax() * 2
    assert (rotated.double() - oracle(x, dim, is_neox)).abs().max() <= bound
    assert torch.equal(rotated[:, dim:], x[:, dim:])


@pytest.mark.parametrize(("dim", "is_neox"), STYLES)
@pytest.mark.parametrize("mscale", [1.0, 1.37], ids=["plain", "yarn"])
def test_unrotate_is_the_inverse_of_rotate(dim: int, is_neox: bool, mscale: float) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    table = rotary_table(dim, is_neox, mscale=mscale)
    back = table.unrotate(table.rotate(x, POSITIONS), POSITIONS)
    assert (back - x).abs().max() <= 12 * 2.0**-24 * x.abs().max()


@pytest.mark.parametrize("mscale", [1.0, 1.37], ids=["plain", "yarn"])
def test_offset_then_base_is_the_absolute_position(mscale: float) -> None:
    table = rotary_table(64, mscale=mscale)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    offsets = RotaryTable(table.in_window(8), True)
    twice = table.rotate(offsets.rotate(x, torch.arange(8)), torch.full((8,), 4088))
    once = table.rotate(x, 4088 + torch.arange(8))
    assert (twice - once).abs().max() <= 16 * 2.0**-24 * mscale * x.abs().max()


def test_positions_broadcast_over_heads() -> None:
    table = rotary_table(64)
    x = torch.randn(3, 2, 8, 64)
    positions = torch.randint(0, 4096, (3, 1, 8))
    assert torch.equal(
        table.rotate(x, positions)[:, 1], table.rotate(x[:, 1], positions.squeeze(1))
    )


def float32_table(inverse_frequencies: torch.Tensor, count: int) -> RotaryTable:
    """A table as engines build it: angles are products in float32."""
    angles = torch.outer(torch.arange(count, dtype=torch.float32), inverse_frequencies.float())
    return RotaryTable(torch.cat([angles.cos(), angles.sin()], dim=1), True)


def test_linear_tables_are_accepted() -> None:
    frequencies = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    llama3 = torch.where(frequencies < 1e-3, frequencies / 8, frequencies)
    for inverse in (frequencies, frequencies / 4, llama3):
        float32_table(inverse, 131072).require_linear()
    rotary_table(64, mscale=1.37).require_linear()
    rotary_table(64, max_positions=3).require_linear()


def test_longrope_is_refused_in_one_sentence() -> None:
    frequencies = 1e4 ** -(torch.arange(0, 64, 2) / 64)
    short, long = float32_table(frequencies, 8192), float32_table(frequencies / 3, 8192)
    table = RotaryTable(torch.cat([short.cos_sin[:4096], long.cos_sin[4096:]]), True)
    with pytest.raises(ValueError, match=r"not linear in the position .*longrope"):
        table.require_linear()


def test_odd_or_half_tables_are_refused() -> None:
    for table in (torch.ones(8, 3), torch.ones(8, 4, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="must be float32 with an even number of columns"):
            RotaryTable(table, True).require_linear()
