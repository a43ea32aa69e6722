"""Who does what in ``extend``: tasks, and rounds of them, from lengths alone.

A *tile* is a run of whole tokens of one request, a *task* one (request, KV head, tile). Tasks
of a *round* run in any order; after it, what its *spans* (scored tiles of one request in one
round) have left in the mass buffer is added to the scores. A request's scored tiles come in
order of position, so each score is a sum in that order, however tiles are cut. Tiles without
a scored token all belong to the first round. Within a round heavy tasks come first, so that
threads finish together.

Nothing here changes a result; it decides about memory and balance only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["SPAN", "TASK", "Limits", "Plan", "ceil_div", "plan_extend"]

Array = npt.NDArray[Any]


def record(*names: str) -> np.dtype[Any]:
    """A row of int64 numbers."""
    return np.dtype([(name, np.int64) for name in names])


TASK = record("request", "head", "tile", "mass", "stride")
"""``mass``: float of the mass buffer for the tile's first row and the list's first window (-1:
not scored); the next window lies ``stride`` floats further."""

SPAN = record("request", "first_tile", "end_tile", "mass", "num_blocks", "columns")
"""Scored tiles of a request. Their mass is ``[head, list window, tile, columns]``, from float
``mass`` on; the list is padded to ``num_blocks`` blocks, the rows of a tile to ``columns``."""


class Limits(NamedTuple):
    """What a plan must know of the kernel."""

    num_kv_heads: int
    group_size: int
    block_windows: int  # windows of a block
    lanes: int
    panel_rows: int
    max_panels: int  # of a tile that holds more than one token
    mass_floats: int  # of the buffer, unless one tile needs more


class Plan(NamedTuple):
    """``rounds`` int64 ``[n + 1, 2]``: where each round begins in ``tasks`` and in ``spans``."""

    tasks: Array
    spans: Array
    rounds: Array
    tile_tokens: int
    mass_floats: int
    max_blocks: int  # of one request's list


@njit(inline="always")  # type: ignore[untyped-decorator]
def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


@njit(cache=True)  # type: ignore[untyped-decorator]
def plan_extend(
    rows: Array,
    prefix_lens: Array,
    extend_lens: Array,
    score_starts: Array,
    num_full: Array,
    num_coded: Array,
    limits: Limits,
) -> Plan:
    """Plan a batch: int64 ``[B]`` arrays as in ``AttentionKernels.extend``, int32 list lengths.

    ``score_starts`` at or past the end of a request: nothing of it is scored.
    """
    batch, max_blocks = rows.size, 0
    num_blocks, num_tiles, next_tile = np.empty((3, batch), np.int64)
    is_scored = False
    for b in range(batch):
        num_blocks[b] = ceil_div(num_full[rows[b]], limits.block_windows)
        num_blocks[b] += ceil_div(num_coded[rows[b]], limits.block_windows)
        max_blocks = max(max_blocks, num_blocks[b])
        is_scored |= score_starts[b] < prefix_lens[b] + extend_lens[b]
    tile_tokens = _tile_tokens(max_blocks if is_scored else 0, limits)
    total_tiles, num_scored = 0, 0
    for b in range(batch):
        num_tiles[b] = next_tile[b] = ceil_div(extend_lens[b], tile_tokens)
        first_scored = max(score_starts[b] - prefix_lens[b], 0)
        if first_scored < extend_lens[b]:
            next_tile[b] = first_scored // tile_tokens
        total_tiles += num_tiles[b]
        num_scored += num_tiles[b] - next_tile[b]

    tasks = np.empty(total_tiles * limits.num_kv_heads, TASK)
    spans = np.empty(num_scored, SPAN)
    rounds = np.zeros((num_scored + 2, 2), np.int64)
    num_tasks, num_spans, num_rounds, most_mass = 0, 0, 0, 0
    for b in range(batch):
        num_tasks = _add_tasks(tasks, num_tasks, b, 0, next_tile[b], limits, -1, 0, 0)
    remaining = True
    while remaining:
        remaining, used, first_span = False, 0, num_spans
        for b in range(batch):
            first, windows = next_tile[b], num_blocks[b] * limits.block_windows
            columns = min(tile_tokens, extend_lens[b]) * limits.group_size
            columns = ceil_div(columns, limits.lanes) * limits.lanes
            tile_floats = max(limits.num_kv_heads * windows * columns, 1)
            room = (limits.mass_floats - used) // tile_floats
            if num_spans == first_span:
                room = max(room, 1)
            end = min(num_tiles[b], first + room)
            remaining |= end < num_tiles[b]
            if end <= first:
                continue
            span = spans[num_spans]
            span.request, span.first_tile, span.end_tile = b, first, end
            span.mass, span.num_blocks, span.columns = used, num_blocks[b], columns
            num_tasks = _add_tasks(tasks, num_tasks, b, first, end, limits, used, windows, columns)
            num_spans += 1
            used += (end - first) * tile_floats
            next_tile[b] = end
        num_rounds += 1
        rounds[num_rounds, 0], rounds[num_rounds, 1] = num_tasks, num_spans
        most_mass = max(most_mass, used)
    return Plan(tasks, spans, rounds[: num_rounds + 1], tile_tokens, most_mass, max_blocks)


@njit  # type: ignore[untyped-decorator]
def _tile_tokens(scored_blocks: int, limits: Limits) -> int:
    """Tokens of a tile: several panels of rows, fewer where their mass would fill the buffer."""
    windows = scored_blocks * limits.block_windows
    panel_floats = limits.num_kv_heads * windows * limits.panel_rows
    panels = max(min(limits.max_panels, limits.mass_floats // max(panel_floats, 1)), 1)
    return max(panels * limits.panel_rows // limits.group_size, 1)


@njit  # type: ignore[untyped-decorator]
def _add_tasks(
    tasks: Array,
    num_tasks: int,
    request: int,
    first: int,
    end: int,
    limits: Limits,
    mass: int,
    windows: int,
    columns: int,
) -> int:
    """Append the tasks of tiles [first, end) of all heads; returns how many there are now."""
    stride = (end - first) * columns
    for head in range(limits.num_kv_heads):
        for tile in range(end - 1, first - 1, -1):
            task = tasks[num_tasks]
            task.request, task.head, task.tile, task.stride = request, head, tile, stride
            task.mass = -1
            if mass >= 0:
                task.mass = mass + head * windows * stride + (tile - first) * columns
            num_tasks += 1
    return num_tasks
