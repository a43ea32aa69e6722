"""Every kernel once, before the first request."""

from __future__ import annotations

import torch

from qevict_kernels.interface import AttentionKernels, FullArena, LayerView, Lengths

__all__ = ["compile_kernels"]


def compile_kernels(kernels: AttentionKernels, dtype: torch.dtype, dequantizes: bool) -> None:
    """Run each kernel that serving needs once, on one window of one request.

    Those that compile at their first use do so here, or load what an earlier start compiled.
    ``dequantizes``: whether serving rebuilds FULL windows from codes.
    """
    geometry = kernels.geometry
    device = kernels.rotary.cos_sin.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    window = zeros(1, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim, dtype=dtype)
    full = FullArena(keys=window[:, 0], values=window[:, 1])
    coded = zeros(1, geometry.num_kv_heads, geometry.record.record_bytes, dtype=torch.uint8)
    slot, row, one = zeros(1), zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64) + 1
    view = LayerView(
        page_table=zeros(1, 1),
        full_slot=slot,
        coded_slot=slot,
        windows=zeros(1, 1),
        num_full=zeros(1) + 1,
        num_coded=zeros(1),
    )
    query = zeros(1, geometry.num_q_heads, geometry.head_dim, dtype=dtype)
    token = zeros(1, geometry.num_kv_heads, geometry.head_dim, dtype=dtype)
    out, scores = torch.empty_like(query), zeros(1, 1, dtype=torch.float32)
    kernels.store(full, slot, slot, token, token)
    for whole in (None, Lengths([0], [1])):
        kernels.extend(query, full, coded, view, row, row, one, 1.0, out, scores, row, whole)
    kernels.decode(query, full, coded, view, row, one, 1.0, out, scores)
    kernels.quantize(full, coded, slot, slot, slot)
    if dequantizes:
        kernels.dequantize(full, coded, slot, slot, slot)
