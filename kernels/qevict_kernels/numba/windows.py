"""Emitted access to windows: the order of rotary channels, and the parameters of a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from qevict_kernels.numba.ir import Emitter
from qevict_kernels.numba.spec import Spec

__all__ = [
    "Parts",
    "first_halves",
    "load_params",
    "load_split",
    "memory_order",
    "rotary_lanes",
    "unrotated",
]

Parts = dict[int, ir.Value]
"""Vectors of one head by channel offset."""


def rotary_lanes(e: Emitter, spec: Spec) -> int:
    """Lanes that divide the rotary halves and the channels that are not rotated."""
    return math.gcd(e.lanes, spec.rotary_dim // 2, spec.head_dim - spec.rotary_dim)


def first_halves(e: Emitter, spec: Spec) -> range:
    """Offsets of the first halves of pairs; partners are ``rotary_dim / 2`` further on."""
    return range(0, spec.rotary_dim // 2, rotary_lanes(e, spec))


def unrotated(e: Emitter, spec: Spec) -> range:
    """Offsets of the channels that are not rotated."""
    return range(spec.rotary_dim, spec.head_dim, rotary_lanes(e, spec))


def load_split(e: Emitter, spec: Spec, load: Callable[[int], ir.Value]) -> Parts:
    """A head in *split order*: first halves of all pairs, second halves, the rest.

    ``load(offset)`` reads ``rotary_lanes`` channels in memory order. For neox pairs the two orders
    are the same; interleaved pairs are separated here, once, so that all else sees one order.
    """
    lanes, half = rotary_lanes(e, spec), spec.rotary_dim // 2
    parts = {}
    for d in first_halves(e, spec):
        if spec.is_neox:
            parts[d], parts[half + d] = load(d), load(half + d)
        else:
            parts[d], parts[half + d] = e.split_pairs(load(2 * d), load(2 * d + lanes))
    return parts | {d: load(d) for d in unrotated(e, spec)}


def memory_order(e: Emitter, spec: Spec, parts: Parts) -> Parts:
    """The inverse of ``load_split``: vectors as they stand in memory."""
    if spec.is_neox:
        return parts
    lanes, half = rotary_lanes(e, spec), spec.rotary_dim // 2
    ordered = {d: parts[d] for d in unrotated(e, spec)}
    for d in first_halves(e, spec):
        joined = e.join_pairs(parts[d], parts[half + d])
        ordered[2 * d], ordered[2 * d + lanes] = joined
    return ordered


def load_params(
    e: Emitter, spec: Spec, record: ir.Value, of: str
) -> tuple[Callable[[int, int], ir.Value], Callable[[int, int], ir.Value]]:
    """Readers ``(offset, lanes) -> vector`` of the scales and zeros of ``"keys"`` or ``"values"``.

    Rounded as the reference does: product, then sum.
    """
    layout = spec.record
    scales, zeros, header = {
        "keys": (layout.key_scales, layout.key_zeros, layout.header),
        "values": (layout.value_scales, layout.value_zeros, layout.header + 12),
    }[of]
    scale_place, zero_place = e.offset(record, scales), e.offset(record, zeros)
    if spec.fp16_params:
        return (
            lambda d, lanes: e.load_half(scale_place, d, "fp16", lanes),
            lambda d, lanes: e.load_half(zero_place, d, "fp16", lanes),
        )
    second: Any = e.offset(record, header)
    scale_step, zero_base, zero_step = (e.load(second, i, 1) for i in range(3))

    def scale(d: int, lanes: int) -> ir.Value:
        return e.fmul(e.load_bytes(scale_place, d, lanes), e.splat(scale_step, lanes))

    def zero(d: int, lanes: int) -> ir.Value:
        product = e.fmul(e.load_bytes(zero_place, d, lanes), e.splat(zero_step, lanes))
        return e.fadd(e.splat(zero_base, lanes), product)

    return scale, zero
