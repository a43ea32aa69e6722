"""Moves of tokens and of whole copies: exact, one launch each, no wait for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qevict_kernels.interface import FullArena
from qevict_kernels.layout import WindowGeometry

__all__ = ["TritonMemory"]

COPY_WORDS = 1024
"""Words of a row that a program moves at a time."""


class TritonMemory:
    """``store`` and ``copy_slots`` of ``AttentionKernels``."""

    geometry: WindowGeometry

    def copy_slots(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of ``slots`` where the source is not negative."""
        if not sources.shape[0]:
            return
        for dtype in (torch.int32, torch.uint8):
            size = dtype.itemsize
            if not (slots.shape[1] % size or slots.stride(0) % size or slots.data_ptr() % size):
                break
        words = slots.view(dtype)
        _copy_kernel[(sources.shape[0],)](
            words, sources, targets, words.stride(0), words.shape[1], BLOCK=COPY_WORDS
        )

    def store(
        self,
        full: FullArena,
        full_slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write new tokens into FULL windows where the slot is not negative."""
        count, geometry = full_slots.shape[0], self.geometry
        if not count:
            return
        channels = geometry.num_kv_heads * geometry.head_dim
        block = min(triton.next_power_of_2(channels), 1024)
        _store_kernel[(count, triton.cdiv(channels, block))](
            full.keys, full.values, full_slots, offsets, keys, values,
            full.keys.stride(0), keys.stride(0), values.stride(0),
            CHANNELS=channels, WINDOW=geometry.window, DIM=geometry.head_dim, BLOCK=block,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(slots, sources, targets, stride, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid ``[m]``: one program moves one row. Bytes: each row read and written once."""
    entry = tl.program_id(0)
    source = tl.load(sources + entry).to(tl.int64)
    if source < 0:
        return
    target = tl.load(targets + entry).to(tl.int64)
    for start in range(0, num_words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        there = word < num_words
        data = tl.load(slots + source * stride + word, mask=there)
        tl.store(slots + target * stride + word, data, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _store_kernel(  # type: ignore[no-untyped-def]
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
