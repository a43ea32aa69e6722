"""Where the copies live: one byte buffer, FULL windows from the left, coded ones from the right.

::

    | FULL FULL FULL FULL ->            free            <- coded coded coded |

Both ends stay compact: releasing copies moves the ones at the frontier into the holes.
So free bytes are always in one piece, a byte that one tier doesn't use serves the other,
and what fits is known from counts alone. Slots serve any layer. A copy is known by its
*owner*, ``layer * pages + page``; ``table`` maps owners to slots and follows the moves.
Copies are counted: each view that reads a copy holds one reference.

All operations take owner lists of any length in which -1 means "none". With *fixed shapes*,
the rule on accelerators, no shape depends on what a tensor holds, so that the host need not
wait for the device; without, as on the CPU, entries that mean nothing are left out first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qevict_kernels.interface import SideTensors

__all__ = ["Arena", "CopySlots", "Side"]

CopySlots = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``copy(slots, sources, targets)``: copy rows of ``slots`` (uint8 ``[n, bytes]``), skipping -1."""


class Side:
    """One end of the arena: the copies of one kind, their owners and reference counts.

    ``table``: int32 ``[owners]``, slot of an owner or -1. ``capacity`` slots of
    ``slots.shape[1]`` bytes; ``from_right`` says where the compact run starts.
    ``fixed_shapes``: see above.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        num_owners: int,
        from_right: bool,
        copy_slots: CopySlots,
        fixed_shapes: bool,
    ) -> None:
        device = slots.device
        self.slots = slots
        self.fixed_shapes = fixed_shapes
        self.capacity = slots.shape[0]
        self.from_right = from_right
        self.table = torch.full((num_owners,), -1, dtype=torch.int32, device=device)
        self._copy_slots = copy_slots
        # One entry more than slots: where masked scatters go.
        self._owner = torch.full((self.capacity + 1,), -1, dtype=torch.int64, device=device)
        self._references = torch.zeros(self.capacity + 1, dtype=torch.int32, device=device)
        self._mark = torch.zeros(self.capacity + 1, dtype=torch.int64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def clear(self) -> None:
        """Forget every copy."""
        self.table.fill_(-1)
        self._owner.fill_(-1)
        self._references.zero_()
        self.count.zero_()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return int(self.slots.shape[1])

    @property
    def table_bytes(self) -> int:
        """Bytes of all that says where copies lie."""
        tensors = (self.table, self._owner, self._references, self._mark)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def tensors(self) -> SideTensors:
        """For kernels that change both ends themselves."""
        return SideTensors(
            self.slots, self.table, self._owner, self._references, self.count, self.from_right
        )

    def slot_of(self, owners: torch.Tensor) -> torch.Tensor:
        """Slots of owners, int32, -1 where an owner is -1 or has no copy."""
        slots = self.table[owners.clamp(min=0)]
        return torch.where(owners >= 0, slots, torch.full_like(slots, -1))

    def allocate(self, owners: torch.Tensor) -> torch.Tensor:
        """Give each owner (int64 ``[n]``, distinct, without a copy) a slot and one reference.

        Returns the slots, int32 ``[n]``, -1 for skipped entries. That there is room is the
        caller's claim; ``Arena.check_integrity`` verifies it.
        """
        valid = owners >= 0
        position = self.count + valid.cumsum(0) - 1
        target = torch.where(valid, position, self.capacity)
        self._owner[target] = owners
        self._references[target] = 1
        slots = torch.where(valid, self._flip(position), -1).to(torch.int32)
        self._set_table(owners, valid, slots)
        self.count += valid.sum()
        return slots

    def retain(self, owners: torch.Tensor) -> None:
        """Add one reference to the copy of each owner; an owner may be named repeatedly."""
        valid = owners >= 0
        position = torch.where(valid, self._position(owners), self.capacity)
        self._references.index_add_(0, position, valid.to(torch.int32))

    def release(self, owners: torch.Tensor) -> None:
        """Drop one reference per entry; copies without references go, and the end stays compact.

        ``owners``: int64 ``[n]``; each has a copy or is -1; an owner may be named repeatedly.
        """
        n = owners.shape[0]
        if n == 0:
            return
        entry = torch.arange(n, device=owners.device)
        valid = owners >= 0
        position = torch.where(valid, self._position(owners), self.capacity)
        self._references.index_add_(0, position, -valid.to(torch.int32))
        gone = valid & (self._references[position] == 0)
        # Of several entries with the same owner one stands for all.
        self._mark[position] = entry
        dead = gone & (self._mark[position] == entry)
        new_count = self.count - dead.sum()

        # Holes below the new frontier are filled with the survivors beyond it, in order.
        beyond = new_count + entry
        inside = beyond < self.count
        beyond = torch.where(inside, beyond, self.capacity)
        survivors = _compact(inside & (self._references[beyond] > 0), beyond)
        holes = _compact(dead & (position < new_count), position)
        self._set_table(owners, gone, torch.full_like(owners, -1, dtype=torch.int32))
        self._owner[torch.where(dead, position, self.capacity)] = -1
        self._move(survivors, holes)
        self.count.copy_(new_count)

    def rename(self, owners: torch.Tensor, new_owners: torch.Tensor) -> None:
        """The copies of owners belong to other owners from now on, references and all.

        ``owners``, ``new_owners``: int64 ``[n]``; where one is -1 so is the other; new owners
        have no copy.
        """
        valid = owners >= 0
        slots = self.slot_of(owners)
        self._owner[torch.where(valid, self._position(owners), self.capacity)] = new_owners
        self._set_table(owners, valid, torch.full_like(slots, -1))
        self._set_table(new_owners, valid, slots)

    def _move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        if not self.fixed_shapes:
            moves = sources >= 0
            sources, targets = sources[moves], targets[moves]
            if not sources.shape[0]:
                return
        moves = sources >= 0
        self._copy_slots(
            self.slots,
            torch.where(moves, self._flip(sources), -1).to(torch.int32),
            torch.where(moves, self._flip(targets), -1).to(torch.int32),
        )
        source = torch.where(moves, sources, self.capacity)
        target = torch.where(moves, targets, self.capacity)
        owners = self._owner[source]
        self._owner[target] = owners
        self._references[target] = self._references[source]
        self._owner[source] = -1
        self._references[source] = 0
        self._set_table(owners, moves, self._flip(targets).to(torch.int32))

    def _set_table(self, owners: torch.Tensor, where: torch.Tensor, slots: torch.Tensor) -> None:
        if self.fixed_shapes:
            # Owner 0, a page that is never used, takes the writes of the skipped entries.
            self.table[torch.where(where, owners, 0)] = torch.where(where, slots, -1)
        else:
            self.table[owners[where]] = slots[where]

    def _flip(self, position: torch.Tensor) -> torch.Tensor:
        """Position in the compact run to slot, and back."""
        return self.capacity - 1 - position if self.from_right else position

    def _position(self, owners: torch.Tensor) -> torch.Tensor:
        return self._flip(self.table[owners.clamp(min=0)].to(torch.int64))

    def check_integrity(self) -> list[str]:
        """What is wrong with owners, slots and references; empty when nothing is."""
        count = int(self.count)
        kind = "coded" if self.from_right else "FULL"
        problems = []
        owners = self._owner[:count]
        held = torch.nonzero(self.table >= 0)[:, 0]
        if bool((owners < 0).any()) or len(torch.unique(owners)) != count:
            problems.append(f"{kind}: {count} slots in use, but not by as many owners")
        elif len(held) != count:
            problems.append(f"{kind}: {len(held)} owners in the table, {count} slots in use")
        elif not torch.equal(
            self._flip(self.table[owners].to(torch.int64)),
            torch.arange(count, device=owners.device),
        ):
            problems.append(f"{kind}: a slot's owner does not point back at it")
        if bool((self._references[:count] < 1).any()):
            problems.append(f"{kind}: a copy without references")
        if bool((self._owner[count : self.capacity] >= 0).any()):
            problems.append(f"{kind}: an owner beyond the frontier")
        return problems

    def check_references(self, holders: torch.Tensor, kind: str) -> list[str]:
        """Whether each copy has one reference for each time that its owner is in ``holders``."""
        count = int(self.count)
        expected = torch.bincount(holders, minlength=self.table.shape[0])
        found = torch.zeros_like(expected)
        found[self._owner[:count]] = self._references[:count].to(torch.int64)
        wrong = torch.nonzero(expected != found)[:, 0]
        if not len(wrong):
            return []
        first = int(wrong[0])
        return [
            f"{len(wrong)} {kind} copies with wrong references, such as owner {first}: "
            f"{int(found[first])} instead of {int(expected[first])}"
        ]


class Arena:
    """One buffer with a FULL side and a coded side.

    ``storage``: uint8 ``[bytes]``. ``full``, ``coded``: the two sides; both see the whole
    buffer, as slots of ``full_bytes`` and of ``coded_bytes``. ``fixed_shapes``: see above;
    None: on accelerators only.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        full_bytes: int,
        coded_bytes: int,
        num_owners: int,
        copy_slots: CopySlots,
        fixed_shapes: bool | None = None,
    ) -> None:
        if fixed_shapes is None:
            fixed_shapes = storage.device.type != "cpu"
        self.fixed_shapes = fixed_shapes
        num_full = storage.shape[0] // full_bytes
        num_coded = storage.shape[0] // coded_bytes
        self.full = Side(
            storage[: num_full * full_bytes].view(num_full, full_bytes),
            num_owners,
            from_right=False,
            copy_slots=copy_slots,
            fixed_shapes=fixed_shapes,
        )
        self.coded = Side(
            storage[: num_coded * coded_bytes].view(num_coded, coded_bytes),
            num_owners,
            from_right=True,
            copy_slots=copy_slots,
            fixed_shapes=fixed_shapes,
        )

    @staticmethod
    def bookkeeping_bytes(arena_bytes: int, full_bytes: int, coded_bytes: int) -> int:
        """Bytes of owners and reference counts beside a buffer of ``arena_bytes``."""
        return (8 + 4 + 8) * (arena_bytes // full_bytes + arena_bytes // coded_bytes + 2)

    @property
    def capacity_bytes(self) -> int:
        """Bytes that copies can take."""
        return self.coded.capacity * self.coded.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that copies take now (reads the counters from the device)."""
        full, coded = int(self.full.count), int(self.coded.count)
        return full * self.full.slot_bytes + coded * self.coded.slot_bytes

    def clear(self) -> None:
        """Forget every copy."""
        self.full.clear()
        self.coded.clear()

    def check_integrity(self) -> list[str]:
        """What is wrong; empty when nothing is."""
        problems = self.full.check_integrity() + self.coded.check_integrity()
        if self.used_bytes > self.capacity_bytes:
            problems.append(f"{self.used_bytes} bytes used of {self.capacity_bytes}")
        return problems


def _compact(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The masked values moved to the front in order, then -1; the shape stays."""
    n = mask.shape[0]
    target = torch.where(mask, mask.cumsum(0) - 1, n)
    out = torch.full((n + 1,), -1, dtype=values.dtype, device=values.device)
    out[target] = values
    return out[:n]
