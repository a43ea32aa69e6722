"""``NumbaKernels``: checks arguments, then hands addresses to the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core import types

from qevict_kernels.checks import (
    LENGTHS,
    check,
    check_full,
    check_heads,
    check_stores,
    check_view,
)
from qevict_kernels.interface import FullArena, LayerView, Lengths
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba.decode import DECODE_ARGUMENTS, decode_kernel
from qevict_kernels.numba.extend import extend_kernel, launch_extend
from qevict_kernels.numba.parallel import require_openmp
from qevict_kernels.numba.quantize import (
    QUANTIZE_ARGUMENTS,
    dequantize_kernel,
    quantize_kernel,
)
from qevict_kernels.numba.spec import Spec, host_lanes
from qevict_kernels.numba.store import STORE_ARGUMENTS, store_kernel
from qevict_kernels.rope import RotaryTable

__all__ = ["NumbaKernels"]

_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class NumbaKernels:
    """``AttentionKernels`` for the CPU; see ``interface`` for what each method does.

    Kernels are compiled at their first use and cached on disk (``NUMBA_CACHE_DIR``). They run
    on torch's OpenMP threads (``torch.set_num_threads``) and release the GIL.

    Raises ``ValueError`` for a rotary table that is not linear in the position, and from each
    method for tensors of a wrong dtype, shape or stride. Slots, pages, rows and windows are not
    checked.
    """

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        rotary.require_linear()
        if rotary.rotary_dim > geometry.head_dim:
            raise ValueError(
                f"the rotary table turns {rotary.rotary_dim} channels, "
                f"a head has {geometry.head_dim}"
            )
        require_openmp()
        self.geometry = geometry
        self.rotary = rotary
        self._cos_sin = rotary.cos_sin.contiguous()
        self._bases = self._cos_sin[:: geometry.window].contiguous()
        self._offsets = _offset_table(rotary, geometry.window, *self._spec(torch.bfloat16).key_tile)
        self._compiled: dict[tuple[Any, torch.dtype], Callable[..., Any]] = {}

    def store(
        self,
        full: FullArena,
        full_slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write new tokens into FULL windows."""
        count, heads = full_slots.shape[0], self.geometry.num_kv_heads
        check_full(self.geometry, full, "cpu")
        check("full_slots", full_slots, (torch.int32,), (count,))
        check("offsets", offsets, (torch.int32,), (count,))
        check_heads("keys", keys, count, heads, self.geometry.head_dim, full.keys.dtype)
        check_heads("values", values, count, heads, self.geometry.head_dim, full.keys.dtype)
        arguments = np.empty(1, STORE_ARGUMENTS)
        arguments[0] = (
            0,
            full.keys.data_ptr(), full.values.data_ptr(), full_slots.data_ptr(),
            offsets.data_ptr(), keys.data_ptr(), values.data_ptr(),
            count, full.keys.stride(0), keys.stride(0), values.stride(0),
        )  # fmt: skip
        run = self._kernel(store_kernel, full.keys.dtype)
        run(None, arguments.ctypes.data, torch.get_num_threads())

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the codes of FULL windows; returns which hold NaN or infinity, ``[n]``."""
        refused = torch.zeros(full_slots.shape, dtype=torch.bool)
        self._code(quantize_kernel, full, coded, full_slots, coded_slots, windows, refused)
        return refused

    def dequantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> None:
        """Rebuild FULL windows from codes."""
        self._code(dequantize_kernel, full, coded, full_slots, coded_slots, windows)

    def decode(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> None:
        """Attention of one new token per request over its FULL and coded windows."""
        batch, heads = query.shape[0], self.geometry.num_q_heads
        check_stores(self.geometry, full, coded, "cpu")
        check_heads("query", query, batch, heads, self.geometry.head_dim, full.keys.dtype)
        check_heads("out", out, batch, heads, self.geometry.head_dim, full.keys.dtype)
        check_view(view, scores)
        check("rows", rows, (torch.int64,), (batch,))
        check("seq_lens", seq_lens, LENGTHS, (batch,))
        arguments = np.empty(1, DECODE_ARGUMENTS)
        arguments[0] = (
            query.data_ptr(), full.keys.data_ptr(), full.values.data_ptr(), coded.data_ptr(),
            self._bases.data_ptr(), self._offsets.data_ptr(), out.data_ptr(),
            0 if scores is None else scores.data_ptr(),
            view.page_table.data_ptr(), view.full_slot.data_ptr(), view.coded_slot.data_ptr(),
            view.windows.data_ptr(), view.num_full.data_ptr(), view.num_coded.data_ptr(),
            rows.data_ptr(), seq_lens.data_ptr(),
            batch, view.windows.shape[1],
            query.stride(0), out.stride(0), full.keys.stride(0),
            view.page_table.stride(0), view.windows.stride(0),
            0 if scores is None else scores.stride(0),
            seq_lens.dtype is torch.int64,
            0, 0, 0, 0, 0, 0, 0,
            scale,
        )  # fmt: skip
        run = self._kernel(decode_kernel, query.dtype)
        run(None, arguments.ctypes.data, torch.get_num_threads())

    def extend(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
        score_starts: torch.Tensor | None,
        whole: Lengths | None = None,
    ) -> None:
        """Causal attention of a chunk of new tokens per request."""
        batch, heads = rows.shape[0], self.geometry.num_q_heads
        check_stores(self.geometry, full, coded, "cpu")
        check_heads("query", query, query.shape[0], heads, self.geometry.head_dim, full.keys.dtype)
        check_heads("out", out, query.shape[0], heads, self.geometry.head_dim, full.keys.dtype)
        check_view(view, scores)
        check("rows", rows, (torch.int64,), (batch,))
        check("prefix_lens", prefix_lens, LENGTHS, (batch,))
        check("extend_lens", extend_lens, LENGTHS, (batch,))
        if score_starts is not None:
            check("score_starts", score_starts, LENGTHS, (batch,))
        launch_extend(
            self._kernel(extend_kernel, query.dtype), self._spec(query.dtype), self._cos_sin,
            query, full, coded, view, rows, prefix_lens, extend_lens, scale, out, scores,
            score_starts,
        )  # fmt: skip

    def _code(
        self,
        kernel: Any,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
        refused: torch.Tensor | None = None,
    ) -> None:
        count = full_slots.shape[0]
        check_stores(self.geometry, full, coded, "cpu")
        check("full_slots", full_slots, (torch.int32,), (count,))
        check("coded_slots", coded_slots, (torch.int32,), (count,))
        check("windows", windows, (torch.int32,), (count,))
        arguments = np.empty(1, QUANTIZE_ARGUMENTS)
        arguments[0] = (
            full.keys.data_ptr(), full.values.data_ptr(), coded.data_ptr(),
            self._cos_sin.data_ptr(),
            full_slots.data_ptr(), coded_slots.data_ptr(), windows.data_ptr(),
            0 if refused is None else refused.data_ptr(),
            count, full.keys.stride(0), 0,
        )  # fmt: skip
        run = self._kernel(kernel, full.keys.dtype)
        run(None, arguments.ctypes.data, torch.get_num_threads())

    def _spec(self, dtype: torch.dtype) -> Spec:
        return Spec(
            self.geometry, self.rotary.rotary_dim, self.rotary.is_neox, _HALVES[dtype], host_lanes()
        )

    def _kernel(self, function: Any, dtype: torch.dtype) -> Callable[..., Any]:
        """The entry point of ``function(spec, int64, int64)`` for a storage dtype.

        It is called directly: numba's dispatcher would look at the types of the arguments.
        """
        entry = self._compiled.get((function, dtype))
        if entry is None:
            signature = (self._spec(dtype)._numba_type_, types.int64, types.int64)
            function.compile(signature)
            entry = self._compiled[function, dtype] = function.overloads[signature].entry_point
        return entry


def _offset_table(rotary: RotaryTable, window: int, tokens: int, channels: int) -> torch.Tensor:
    """cos, cos + sin and sin - cos of the positions within a window, in vectors of coded keys.

    float32 ``[W / tokens, rotary_dim / 2 / channels, 3, tokens, channels]``.
    """
    cos, sin = rotary.in_window(window).chunk(2, dim=1)
    table = torch.stack([cos, cos + sin, sin - cos]).view(3, window // tokens, tokens, -1, channels)
    return table.permute(1, 3, 0, 2, 4).contiguous()
