"""Moves of tokens and of whole copies: exact, one launch each, no wait for the device."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qevict_kernels.checks import check, check_full, check_heads
from qevict_kernels.interface import FullArena
from qevict_kernels.layout import WindowGeometry

__all__ = [
    "COPY_WORDS",
    "TritonMemory",
    "copy_kernel",
    "programs",
    "store_kernel",
    "store_options",
]

COPY_WORDS = 1024
"""Words of a row that a program moves at a time."""


MOST_PROGRAMS = 512
"""Programs that share a list whose length is on the device: a few for each processor."""


def programs(entries: torch.Tensor, count: torch.Tensor | None) -> int:
    """How many programs a list is given; ``count``: its length if that is on the device."""
    return entries.shape[0] if count is None else min(entries.shape[0], MOST_PROGRAMS)


class TritonMemory:
    """``store`` and ``copy_slots`` of ``AttentionKernels``; see ``interface``."""

    geometry: WindowGeometry

    def copy_slots(
        self,
        slots: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        count: torch.Tensor | None = None,
    ) -> None:
        """Copy rows of ``slots`` where the source is not negative.

        ``count``: int32 on the device, how many of the entries there are; None: all.
        """
        check("sources", sources, (torch.int32,), sources.shape[:1])
        check("targets", targets, (torch.int32,), sources.shape[:1])
        grid = programs(sources, count)
        if not grid:
            return
        for dtype in (torch.int32, torch.uint8):
            size = dtype.itemsize
            if not (slots.shape[1] % size or slots.stride(0) % size or slots.data_ptr() % size):
                break
        words = slots.view(dtype)
        copy_kernel[grid,](
            words, sources, targets, sources if count is None else count, words.stride(0),
            words.shape[1], COUNTED=count is not None, BLOCK=COPY_WORDS,
        )  # fmt: skip

    def store(
        self,
        full: FullArena,
        full_slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write new tokens into FULL windows where the slot is not negative."""
        g, count, dtype = self.geometry, full_slots.shape[0], full.keys.dtype
        check_full(g, full, full_slots.device.type)
        check("full_slots", full_slots, (torch.int32,), (count,))
        check("offsets", offsets, (torch.int32,), (count,))
        check_heads("keys", keys, count, g.num_kv_heads, g.head_dim, dtype)
        check_heads("values", values, count, g.num_kv_heads, g.head_dim, dtype)
        if not count:
            return
        options = store_options(g)
        store_kernel[count, triton.cdiv(options["CHANNELS"], options["BLOCK"])](
            full.keys, full.values, full_slots, offsets, keys, values,
            full.keys.stride(0), keys.stride(0), values.stride(0),
            **options,
        )  # fmt: skip


def store_options(geometry: WindowGeometry) -> dict[str, Any]:
    """Constants of ``store_kernel``."""
    channels = geometry.num_kv_heads * geometry.head_dim
    return {
        "CHANNELS": channels,
        "WINDOW": geometry.window,
        "DIM": geometry.head_dim,
        "BLOCK": min(triton.next_power_of_2(channels), 1024),
    }


@triton.jit
def copy_kernel(
    slots, sources, targets, count, stride, num_words, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid ``[m]``, or where ``COUNTED`` any, for int32 ``count`` entries on the device: a program
    moves one row at a time. Bytes: each row read and written once."""
    entries = tl.load(count) if COUNTED else tl.num_programs(0)
    for entry in range(tl.program_id(0), entries, tl.num_programs(0)):
        source = tl.load(sources + entry).to(tl.int64)
        target = tl.load(targets + entry).to(tl.int64)
        if source >= 0:
            for start in range(0, num_words, BLOCK):
                word = start + tl.arange(0, BLOCK)
                there = word < num_words
                data = tl.load(slots + source * stride + word, mask=there)
                tl.store(slots + target * stride + word, data, mask=there)


@triton.jit
def store_kernel(
    full_keys, full_values, full_slots, offsets, keys, values,
    slot_stride, key_stride, value_stride,
    CHANNELS: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[T, blocks of channels]``: one program stores one token, keys and values.

    ``CHANNELS``: those of all KV heads. Bytes: read and written once.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(full_slots + token).to(tl.int64)
    if slot < 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    head, d = channel // DIM, channel % DIM
    target = slot * slot_stride + (head * WINDOW + tl.load(offsets + token)) * DIM + d
    key = tl.load(keys + token * key_stride + channel, mask=there)
    value = tl.load(values + token * value_stride + channel, mask=there)
    tl.store(full_keys + target, key, mask=there)
    tl.store(full_values + target, value, mask=there)
