"""Storing new tokens: each token's keys and values of all heads go to their place in a window.

Bytes: read and written once. A decode step stores a token or a few in each layer, which is too
little to wake a team for; a chunk of a prompt is shared out in runs of ``RUN`` tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from qevict_kernels.numba.memory import view
from qevict_kernels.numba.parallel import atomic_add, parallel

__all__ = ["STORE_ARGUMENTS", "store_kernel"]

RUN = 64
"""Tokens that one thread stores at a time."""

STORE_ARGUMENTS = np.dtype(
    [
        (name, np.int64)
        for name in (
            "next_run",  # counted up by the kernel
            # addresses of tensors
            "full_keys", "full_values", "slots", "offsets", "keys", "values",
            # number of tokens, and strides in elements
            "count", "slot_stride", "key_stride", "value_stride",
        )
    ]
)  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def store_kernel(spec: Any, arguments: int, num_threads: int) -> Any:
    """Run the work described at ``arguments``; returns 0."""
    a = view(arguments, 1, STORE_ARGUMENTS)[0]
    if a.count > RUN:
        parallel(_worker, spec, arguments, num_threads)
    else:
        _store_run(spec, a, 0)
    return 0


@njit  # type: ignore[untyped-decorator]
def _worker(spec: Any, arguments: int) -> None:
    a = view(arguments, 1, STORE_ARGUMENTS)[0]
    while True:
        first = RUN * atomic_add(arguments, 1)  # ``next_run``
        if first >= a.count:
            break
        _store_run(spec, a, first)


@njit  # type: ignore[untyped-decorator]
def _store_run(spec: Any, a: Any, first: int) -> None:
    window, dim = spec.window, spec.head_dim
    slots, offsets = view(a.slots, a.count, np.int32), view(a.offsets, a.count, np.int32)
    for token in range(first, min(first + RUN, a.count)):
        if slots[token] < 0:
            continue
        target = np.int64(slots[token]) * a.slot_stride + offsets[token] * dim
        for head in range(spec.num_kv_heads):
            place = 2 * (target + head * window * dim)
            source = head * dim
            _copy_row(spec, a.keys + 2 * (token * a.key_stride + source), a.full_keys + place)
            _copy_row(spec, a.values + 2 * (token * a.value_stride + source), a.full_values + place)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_row(spec: Any, source: int, target: int) -> None:
    """One head of one token; ``head_dim`` numbers of two bytes."""
    row, copy = view(source, spec.head_dim, np.uint16), view(target, spec.head_dim, np.uint16)
    for i in range(spec.head_dim):
        copy[i] = row[i]
