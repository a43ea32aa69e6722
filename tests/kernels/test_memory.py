"""The memory of arenas."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from qevict_kernels.memory import arena_memory


def flags_of(address: int) -> list[str]:
    """What the kernel was told of the mapping that holds an address."""
    found: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            found = line.split()[1:]
    return found


def test_an_arena_is_writable_zeros_that_live_as_long_as_their_tensor() -> None:
    memory = arena_memory(3 * 2**20 + 64)
    assert memory.dtype == torch.uint8
    assert memory.shape == (3 * 2**20 + 64,)
    assert not memory.any()
    part = memory[64:].view(torch.float32)
    part.fill_(1.5)
    del memory
    gc.collect()
    assert part.sum() == 1.5 * part.numel()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_an_arena_asks_for_huge_pages_and_small_tensors_do_not() -> None:
    memory, other = arena_memory(2**23), torch.zeros(64)
    assert "hg" in flags_of(memory.data_ptr() + 2**22)
    assert "hg" not in flags_of(other.data_ptr())


def test_more_than_there_is_says_how_much_was_wanted() -> None:
    with pytest.raises(MemoryError, match="arena of 1,048,576,000,000 MiB"):
        arena_memory(1_048_576_000_000 * 2**20)
