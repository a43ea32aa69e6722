"""Checks of the arguments of kernels: dtype, shape and stride, named in a ``ValueError``."""

from __future__ import annotations

import torch

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry

__all__ = ["LENGTHS", "check", "check_full", "check_heads", "check_stores", "check_view"]

HALVES = (torch.bfloat16, torch.float16)
LENGTHS = (torch.int64, torch.int32)


def check_stores(
    geometry: WindowGeometry, full: FullArena, coded: torch.Tensor, device_type: str
) -> None:
    """Both arenas fit ``geometry`` and are on the device."""
    check_full(geometry, full, device_type)
    record = (geometry.num_kv_heads, geometry.record.record_bytes)
    check("coded", coded, (torch.uint8,), (*coded.shape[:1], *record))


def check_full(geometry: WindowGeometry, full: FullArena, device_type: str) -> None:
    """The arena of FULL windows is half precision, contiguous within a slot, on the device."""
    g = geometry
    keys, values = full.keys, full.values
    inner = (g.num_kv_heads, g.window, g.head_dim)
    strides = (g.window * g.head_dim, g.head_dim, 1)
    for name, tensor in (("full.keys", keys), ("full.values", values)):
        if tensor.dtype not in HALVES or tensor.device.type != device_type:
            raise ValueError(
                f"{name} must be bfloat16 or float16 on {device_type}, "
                f"got {tensor.dtype} on {tensor.device}"
            )
        if tensor.shape[1:] != inner or tensor.stride()[1:] != strides:
            raise ValueError(
                f"{name} must be [slots, {', '.join(map(str, inner))}], contiguous within a "
                f"slot, got {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
    if keys.dtype is not values.dtype or keys.stride(0) != values.stride(0):
        raise ValueError("full.keys and full.values must have one dtype and one stride")


def check_heads(
    name: str, tensor: torch.Tensor, rows: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """``tensor`` is ``[rows, heads, dim]`` of the arena's dtype, strided at most in the rows."""
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} must have the arena's dtype {dtype}, got {tensor.dtype}")
    if tensor.shape != (rows, heads, dim) or tensor.stride()[1:] != (dim, 1):
        raise ValueError(
            f"{name} must be [{rows}, {heads}, {dim}], contiguous within a row, "
            f"got {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def check_view(view: LayerView, scores: torch.Tensor | None) -> None:
    """Tables and lists have the shapes of ``LayerView``; ``scores`` is one number a window."""
    num_rows, columns = view.windows.shape
    int32 = (torch.int32,)
    _check_rows("view.windows", view.windows, torch.int32, (num_rows, columns))
    _check_rows("view.page_table", view.page_table, torch.int32, (num_rows, columns))
    check("view.full_slot", view.full_slot, int32, view.full_slot.shape)
    check("view.coded_slot", view.coded_slot, int32, view.full_slot.shape)
    check("view.num_full", view.num_full, int32, (num_rows,))
    check("view.num_coded", view.num_coded, int32, (num_rows,))
    if scores is not None:
        _check_rows("scores", scores, torch.float32, (num_rows, columns))


def check(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """``tensor`` is contiguous, of one of ``dtypes``, and of ``shape``."""
    if tensor.dtype not in dtypes or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {' or '.join(map(str, dtypes))} {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def _check_rows(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    if tensor.dtype is not dtype or tensor.shape != shape or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} with contiguous rows, "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
