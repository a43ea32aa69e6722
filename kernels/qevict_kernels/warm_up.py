"""Every kernel once, before the first request."""

from __future__ import annotations

import torch

from qevict_kernels.interface import AttentionKernels, FullArena, LayerView, Lengths

__all__ = ["compile_kernels"]


def compile_kernels(kernels: AttentionKernels, dtype: torch.dtype, dequantizes: bool) -> None:
    """Run each kernel that serving needs once, for one request.

    Those that compile at their first use do so here, or load what an earlier start compiled.
    ``dequantizes``: whether serving rebuilds FULL windows from codes.
    """
    geometry = kernels.geometry
    device = kernels.rotary.cos_sin.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    # One window, many times: a chunk long enough that no kernel takes it token by token.
    tokens = 256
    columns = tokens // geometry.window
    window = zeros(1, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim, dtype=dtype)
    full = FullArena(keys=window[:, 0], values=window[:, 1])
    coded = zeros(1, geometry.num_kv_heads, geometry.record.record_bytes, dtype=torch.uint8)
    slot, row = zeros(1), zeros(1, dtype=torch.int64)
    view = LayerView(
        page_table=zeros(1, columns),
        full_slot=slot,
        coded_slot=slot,
        windows=torch.arange(columns, dtype=torch.int32, device=device)[None],
        num_full=zeros(1) + columns,
        num_coded=zeros(1),
    )
    queries = zeros(tokens, geometry.num_q_heads, geometry.head_dim, dtype=dtype)
    token = zeros(1, geometry.num_kv_heads, geometry.head_dim, dtype=dtype)
    out, scores = torch.empty_like(queries), zeros(1, columns, dtype=torch.float32)
    kernels.store(full, slot, slot, token, token)
    for count, whole in ((2, None), (tokens, None), (tokens, Lengths([0], [tokens]))):
        # As SGLang has them: int32, and positions int64.
        prefix, length = zeros(1), zeros(1) + count
        kernels.extend(
            queries[:count], full, coded, view, row, prefix, length, 1.0, out[:count], scores, row,
            whole,
        )  # fmt: skip
    kernels.decode(queries[:1], full, coded, view, row, row + 1, 1.0, out[:1], scores)
    kernels.copy_slots(window.view(1, -1).view(torch.uint8), slot - 1, slot)
    kernels.quantize(full, coded, slot, slot, slot)
    if dequantizes:
        kernels.dequantize(full, coded, slot, slot, slot)
