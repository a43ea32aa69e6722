"""The two-ended arena against a dict of what each owner's copy holds."""

from __future__ import annotations

import random

import pytest
import torch

from qevict_kernels.memory import TorchMemory
from qevict_tiers.arena import Arena, Side

FULL_BYTES, CODED_BYTES, OWNERS = 64, 13, 2000


def make_arena(arena_bytes: int, fixed_shapes: bool = False) -> Arena:
    storage = torch.zeros(arena_bytes, dtype=torch.uint8)
    return Arena(storage, FULL_BYTES, CODED_BYTES, OWNERS, TorchMemory().copy_slots, fixed_shapes)


def fill(side: Side, owners: list[int], values: list[int]) -> None:
    slots = side.allocate(torch.tensor([*owners, -1]))
    assert slots[-1] == -1
    for slot, value in zip(slots.tolist(), values, strict=False):
        side.slots[slot] = value


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_copies_survive_any_order_of_allocations_and_releases(
    seed: int, fixed_shapes: bool
) -> None:
    rng = random.Random(seed)
    arena = make_arena(FULL_BYTES * 400, fixed_shapes)
    sides = (arena.full, arena.coded)
    held: tuple[dict[int, int], dict[int, int]] = ({}, {})
    references: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for _ in range(300):
        which = rng.randrange(2)
        side, values, refs = sides[which], held[which], references[which]
        if rng.random() < 0.5:
            room = (arena.capacity_bytes - arena.used_bytes) // side.slot_bytes
            free = [x for x in rng.sample(range(1, OWNERS), 30) if x not in values][:room]
            fresh = {owner: rng.randrange(256) for owner in free}
            fill(side, list(fresh), list(fresh.values()))
            values.update(fresh)
            refs.update(dict.fromkeys(fresh, 1))
        elif values:
            chosen = rng.sample(sorted(values), min(len(values), 25))
            shared = [owner for owner in chosen if rng.random() < 0.3]
            side.retain(torch.tensor([*shared, -1]))
            for owner in shared:
                refs[owner] += 1
            entries = [*chosen, *(o for o in shared if rng.random() < 0.5), -1]
            rng.shuffle(entries)
            side.release(torch.tensor(entries))
            for owner in entries:
                if owner >= 0:
                    refs[owner] -= 1
            for owner in chosen:
                if refs[owner] == 0:
                    del refs[owner], values[owner]
        assert arena.check_integrity() == []
        for side, values in zip(sides, held, strict=True):
            assert int(side.count) == len(values)
            for owner, value in values.items():
                assert (side.slots[side.table[owner]] == value).all()


def test_a_byte_that_one_tier_leaves_serves_the_other() -> None:
    arena = make_arena(FULL_BYTES * 100)
    fill(arena.full, list(range(1, 101)), [1] * 100)
    assert arena.used_bytes == FULL_BYTES * 100
    arena.full.release(torch.arange(1, 101))
    coded = FULL_BYTES * 100 // CODED_BYTES
    fill(arena.coded, list(range(1, coded + 1)), [2] * coded)
    assert arena.check_integrity() == []
    assert arena.capacity_bytes - arena.used_bytes < CODED_BYTES


def test_integrity_names_what_is_wrong() -> None:
    arena = make_arena(FULL_BYTES * 10)
    fill(arena.full, [1, 2, 3], [1, 2, 3])
    arena.full.table[3] = -1
    assert "owners in the table" in arena.check_integrity()[0]
    arena.full.table[3] = 1
    assert "does not point back" in arena.check_integrity()[0]
    arena = make_arena(FULL_BYTES * 4)
    fill(arena.full, [1, 2, 3], [1] * 3)
    fill(arena.coded, list(range(1, 10)), [2] * 9)
    assert "bytes used of" in arena.check_integrity()[0]
