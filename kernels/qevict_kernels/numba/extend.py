"""``extend`` on the CPU: causal attention of chunks over FULL and coded windows.

A *task* is one (request, KV head, tile); a tile is the query rows (token, query head of
the group) of up to ``TILE`` rows. It visits its request's list in blocks of ``BLOCK``
keys: FULL windows in list order, then coded windows in theirs.

    1. stage: the block's keys and values are copied, or decoded and rotated, into a
       contiguous tile of this thread, once for all rows of the task;
    2. for each panel of rows: scores = keys x queries; online softmax; sums += values x
       probabilities. A probability lives for one block of one panel;
    3. after the last block: divide, write out.

Attention mass needs no second pass: the softmax leaves each window's sum relative to
the maximum known at that block, and when the row is complete one factor a block turns
it into mass.

Invariance. Blocks are cut at fixed positions of the list, each row does the same
arithmetic whatever tile it stands in, and a masked key is an exact no-op: it adds 0 to
sums and leaves the maximum alone. So it does not matter how many masked keys a tile
visits. Scores are added token by token in the order of positions, each token's mean over
heads in a fixed order. That order is kept by *rounds*: the tasks of a round write the
mass of their rows to a buffer, then each window adds up its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import carray, get_num_threads, njit, prange, set_num_threads, types
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    overload_attribute,
    register_model,
    typeof_impl,
    unbox,
)

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.numba import extend_ir
from qevict_kernels.numba.extend_ir import (
    HAS_PAIRS,
    LANES,
    NO_SCORE,
    PANEL,
    PANEL_VECTORS,
    multiply_keys,
    multiply_values,
    normalise,
    softmax,
)
from qevict_kernels.rope import RotaryTable

__all__ = ["extend"]

Array = npt.NDArray[Any]

BLOCK = 64
"""Keys visited at a time: a multiple of every window size."""
TILE = 2 * PANEL
"""Rows of a tile, rounded down to whole tokens (and up to one token)."""
MASS_FLOATS = 1 << 20
"""Attention mass held at a time, in float32 numbers, unless one tile needs more."""

_ALIGNMENT = 64
_NEVER = np.iinfo(np.int32).max
# Columns of a task and of a span.
_REQUEST, _HEAD, _TILE, _MASS, _WIDTH = range(5)
_FIRST_ROW, _END_ROW = 2, 4


@dataclass(frozen=True)
class _Spec:
    """What the code is specialised for; it reaches the compiler as a type."""

    head_dim: int
    window: int
    bfloat16: bool
    key_bits: int
    value_bits: int
    fp16_params: bool
    neox: bool
    key_codes: int
    value_codes: int
    key_scales: int
    key_zeros: int
    value_scales: int
    value_zeros: int
    header: int

    @property
    def pairs(self) -> bool:
        """Whether FULL windows are multiplied as bfloat16 pairs."""
        return self.bfloat16 and HAS_PAIRS

    @property
    def group(self) -> int:
        """Tokens whose codes share a word."""
        return min(self.window, 8)


class _SpecType(types.Type):  # type: ignore[misc]
    def __init__(self, spec: _Spec) -> None:
        self.spec = spec
        super().__init__(name=f"{spec!r} {_IR_DIGEST}")


# A compiled function is cached under its own file's date; the IR is part of it too.
with open(extend_ir.__file__, "rb") as _file:
    _IR_DIGEST = hash_bytes(_file.read())
