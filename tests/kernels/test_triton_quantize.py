"""Codes, tokens and copies of the Triton backend: byte for byte those of the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from kernel_cases import full_arena, rotary_table
from qevict_kernels.interface import FullArena
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.memory import TorchMemory
from qevict_kernels.reference import ReferenceKernels
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.memory import TritonMemory
from qevict_kernels.triton.quantize import TritonCodes
from triton_device import DEVICE, require_device

require_device()

FP16, UINT8 = ParamFormat.FP16, ParamFormat.UINT8
NUM_WINDOWS = 12


class Kernels(TritonCodes, TritonMemory):
    """What is tested here."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        self.geometry = geometry
        self.rotary = rotary
        self._cos_sin = rotary.cos_sin.to(DEVICE)


@dataclass(frozen=True)
class Setup:
    """Together they meet every head size, window, pair of codes, parameter format, dtype and
    rotary style that is supported."""

    geometry: WindowGeometry
    rotary_dim: int
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        g = self.geometry
        style = "neox" if self.is_neox else "pairs"
        return (
            f"h{g.num_kv_heads}d{g.head_dim}w{g.window}-k{g.key_bits}v{g.value_bits}"
            f"-{g.params.value}-{style}{self.rotary_dim}-{str(self.dtype)[6:]}"
        )

    @property
    def rotary(self) -> RotaryTable:
        return rotary_table(self.rotary_dim, self.is_neox, mscale=1.2)


SMALL = Setup(WindowGeometry(8, 2, 64), 64)
SETUPS = [
    SMALL,
    Setup(WindowGeometry(8, 2, 128), 128),
    Setup(WindowGeometry(8, 1, 64, 16, 4, 2, FP16), 64, False),
    Setup(WindowGeometry(5, 1, 80, 4, 2, 4, UINT8), 32, False, torch.float16),
    Setup(WindowGeometry(2, 2, 96, 32, 4, 4, UINT8), 96),
    Setup(WindowGeometry(16, 2, 256, 8, 2, 2, FP16), 64),
    Setup(WindowGeometry(2, 1, 80, 8, 2, 4, FP16), 80, True, torch.float16),
    Setup(WindowGeometry(17, 1, 64, 4, 4, 4, UINT8), 40, False),
    Setup(WindowGeometry(2, 1, 128, 16, 4, 2, UINT8), 128, True, torch.float16),
    Setup(WindowGeometry(2, 1, 96, 32, 2, 2, FP16), 20, True, torch.float16),
    Setup(WindowGeometry(2, 1, 256, 4, 4, 2, UINT8), 256, False),
]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)


@cache
def reference(setup: Setup) -> ReferenceKernels:
    return ReferenceKernels(setup.geometry, setup.rotary)


def on_device(full: FullArena) -> FullArena:
    """A copy whose slots hold keys, then values."""
    data = torch.stack([full.keys, full.values], dim=1).to(DEVICE)
    return FullArena(data[:, 0], data[:, 1])


def to_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def hostile_arena(setup: Setup, seed: int = 3) -> FullArena:
    """Windows with NaN, infinity, constants, zeros of both signs, outliers and tiny numbers."""
    generator = torch.Generator().manual_seed(seed)
    full = full_arena(setup.geometry, NUM_WINDOWS, setup.dtype, generator)
    full.keys[0, 0, 1, 2] = torch.nan
    full.values[1, -1, 0, 0] = torch.inf
    full.keys[2] = 0.0
    full.keys[3, :, ::2] = -0.0
    full.values[4] = 3.5
    full.keys[5, ..., 4] = 6e4
    full.keys[6, ..., 4] = -6e4 if setup.dtype is torch.float16 else -1e30
    full.values[7] *= 1e-7
    full.values[8, 0, 0] = -torch.inf
    full.keys[8] = torch.nan
    return full


def entries() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources, targets (permuted) and window indices; two are skipped."""
    g = torch.Generator().manual_seed(NUM_WINDOWS)
    sources, targets = (torch.randperm(NUM_WINDOWS, generator=g).int() for _ in range(2))
    sources[(sources == 9) | (sources == 10)] = -1
    return sources, targets, torch.randint(0, 4096 // 32, (NUM_WINDOWS,), generator=g).int()


def records(setup: Setup, byte: int) -> torch.Tensor:
    geometry = setup.geometry
    shape = (NUM_WINDOWS, geometry.num_kv_heads, geometry.record.record_bytes)
    return torch.full(shape, byte, dtype=torch.uint8)


# -- quantize, dequantize -----------------------------------------------------------------


@each_setup
@pytest.mark.parametrize("seed", [3, 4])
def test_quantize_writes_the_bytes_of_the_reference(setup: Setup, seed: int) -> None:
    full, expected, got = hostile_arena(setup, seed), records(setup, 7), records(setup, 7)
    refused = reference(setup).quantize(full, expected, *entries())
    assert 3 <= refused.sum() < NUM_WINDOWS - 2
    (got,) = to_device(got)
    told = Kernels(setup.geometry, setup.rotary).quantize(
        on_device(full), got, *to_device(*entries())
    )
    assert told.dtype == torch.bool
    assert torch.equal(told.cpu(), refused)
    assert torch.equal(got.cpu(), expected)


def test_a_skipped_entry_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory held before."""
    full, coded, skipped = hostile_arena(SMALL), records(SMALL, 7), torch.full((3,), -1).int()
    monkeypatch.setattr(torch, "empty_like", partial(torch.full_like, fill_value=1))
    refused = Kernels(SMALL.geometry, SMALL.rotary).quantize(
        on_device(full), coded.to(DEVICE), *to_device(skipped, skipped, skipped)
    )
    assert refused.tolist() == [False] * 3


def test_a_range_beyond_float16_parameters_is_refused() -> None:
    setup = Setup(WindowGeometry(1, 1, 64, params=FP16), 64)
    full, coded = hostile_arena(setup), records(setup, 0)
    full.keys[11, 0, 0, 0], full.values[2, 0, 0, 0] = -1e6, 1e6
    expected = reference(setup).quantize(full, coded, *entries())
    got = Kernels(setup.geometry, setup.rotary).quantize(
        on_device(full), coded.to(DEVICE), *to_device(*entries())
    )
    sources = entries()[0].tolist()
    assert got[sources.index(11)]
    assert got[sources.index(2)]
    assert torch.equal(got.cpu(), expected)


@each_setup
def test_dequantize_writes_the_numbers_of_the_reference(setup: Setup) -> None:
    coded = records(setup, 0)
    reference(setup).quantize(hostile_arena(setup), coded, *entries())
    data = torch.full((NUM_WINDOWS, 2, *hostile_arena(setup).keys.shape[1:]), 7.0).to(setup.dtype)
    expected = FullArena(data[:, 0], data[:, 1])
    got = on_device(expected)
    reference(setup).dequantize(expected, coded, *entries())
    Kernels(setup.geometry, setup.rotary).dequantize(got, coded.to(DEVICE), *to_device(*entries()))
    for a, b in ((got.keys.cpu(), expected.keys), (got.values.cpu(), expected.values)):
        assert b.isnan().any()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_nothing_to_do_is_allowed() -> None:
    kernels, none = Kernels(SMALL.geometry, SMALL.rotary), torch.empty(0, dtype=torch.int32)
    full, coded = on_device(hostile_arena(SMALL)), records(SMALL, 7).to(DEVICE)
    lists = to_device(none, none, none)
    token = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.quantize(full, coded, *lists).shape == (0,)
    kernels.dequantize(full, coded, *lists)
    kernels.copy_slots(coded.flatten(1), *lists[:2])
    kernels.store(full, *lists[:2], token, token)
    assert (coded == 7).all()


# -- memory -------------------------------------------------------------------------------


@each_setup
def test_store_writes_the_bytes_of_the_reference(setup: Setup) -> None:
    geometry, g, tokens = setup.geometry, torch.Generator().manual_seed(1), 11
    places = torch.randperm(NUM_WINDOWS * geometry.window, generator=g)[:tokens].int()
    slots, offsets = places // geometry.window, places % geometry.window
    slots[::5] = -1
    # Keys and values as they come out of one projection: strided in the tokens.
    both = torch.randn(tokens, 2, geometry.num_kv_heads, geometry.head_dim, generator=g)
    both = both.to(setup.dtype)
    expected = full_arena(geometry, NUM_WINDOWS, setup.dtype, g)
    got = on_device(expected)
    TorchMemory().store(expected, slots, offsets, both[:, 0], both[:, 1])
    slots, offsets, both = to_device(slots, offsets, both)
    Kernels(geometry, setup.rotary).store(got, slots, offsets, both[:, 0], both[:, 1])
    assert torch.equal(got.keys.cpu(), expected.keys)
    assert torch.equal(got.values.cpu(), expected.values)


@pytest.mark.parametrize("row_bytes", [64, 448, 4096, 4160, 30, 33])
@pytest.mark.parametrize("shift", [0, 1])
def test_copies_are_exact_whatever_the_row_and_the_address(row_bytes: int, shift: int) -> None:
    g = torch.Generator().manual_seed(row_bytes)
    # There is a row before the first, so that reading row -1 would be seen.
    buffer = torch.randint(0, 256, (21 * row_bytes + shift,), generator=g, dtype=torch.uint8)
    shift += row_bytes
    sources = torch.tensor([3, -1, 19, 7, -1]).int()
    targets = torch.tensor([0, 5, 1, 18, -1]).int()
    got = buffer.to(DEVICE, copy=True)
    Kernels(SMALL.geometry, SMALL.rotary).copy_slots(
        got[shift:].view(20, row_bytes), *to_device(sources, targets)
    )
    TorchMemory().copy_slots(buffer[shift:].view(20, row_bytes), sources, targets)
    assert torch.equal(got.cpu(), buffer)
