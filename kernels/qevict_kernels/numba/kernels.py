"""``NumbaKernels``: checks arguments, then hands addresses to the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.core import types

from qevict_kernels.interface import FullArena, LayerView
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.numba.decode import DECODE_ARGUMENTS, decode_kernel
from qevict_kernels.numba.parallel import require_openmp
from qevict_kernels.numba.quantize import (
    QUANTIZE_ARGUMENTS,
    dequantize_kernel,
    quantize_kernel,
)
from qevict_kernels.numba.spec import Spec, host_lanes
from qevict_kernels.rope import RotaryTable

__all__ = ["NumbaKernels"]

_HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class NumbaKernels:
    """``AttentionKernels`` for the CPU; see ``interface`` for what each method does.

    Kernels are compiled at their first use and cached on disk (``NUMBA_CACHE_DIR``). They run
    on torch's OpenMP threads (``torch.set_num_threads``) and release the GIL.

    Raises ``ValueError`` for a rotary table that is not linear in the position, and from each
    method for tensors of a wrong dtype, shape or stride.
    """

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        rotary.require_linear()
        require_openmp()
        self.geometry = geometry
        self.rotary = rotary
        self._cos_sin = rotary.cos_sin.contiguous()
        self._bases = self._cos_sin[:: geometry.window].contiguous()
        cos, sin = rotary.in_window(geometry.window).chunk(2, dim=1)
        self._offsets = torch.stack([cos, cos + sin, sin - cos], dim=1)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> int:
        """Write the codes of FULL windows; returns how many hold NaN or infinity."""
        return self._code(quantize_kernel, full, coded, full_slots, coded_slots, windows)

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
        batch, columns = query.shape[0], view.windows.shape[1]
        arguments = np.empty(1, DECODE_ARGUMENTS)
        arguments[0] = (
            query.data_ptr(), full.keys.data_ptr(), full.values.data_ptr(), coded.data_ptr(),
            self._bases.data_ptr(), self._offsets.data_ptr(), out.data_ptr(),
            0 if scores is None else scores.data_ptr(),
            view.page_table.data_ptr(), view.full_slot.data_ptr(), view.coded_slot.data_ptr(),
            view.windows.data_ptr(), view.num_full.data_ptr(), view.num_coded.data_ptr(),
            rows.data_ptr(), seq_lens.data_ptr(),
            batch, columns, query.stride(0), out.stride(0), full.keys.stride(0),
            seq_lens.dtype is torch.int64, 0, 0, 0, 0, 0, scale,
        )  # fmt: skip
        run = self._kernel(decode_kernel, query.dtype)
        run(None, arguments.ctypes.data, torch.get_num_threads())

    def _code(
        self,
        kernel: Any,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> int:
        arguments = np.empty(1, QUANTIZE_ARGUMENTS)
        arguments[0] = (
            full.keys.data_ptr(), full.values.data_ptr(), coded.data_ptr(),
            self._cos_sin.data_ptr(),
            full_slots.data_ptr(), coded_slots.data_ptr(), windows.data_ptr(),
            full_slots.shape[0], full.keys.stride(0), 0, 0,
        )  # fmt: skip
        run = self._kernel(kernel, full.keys.dtype)
        return int(run(None, arguments.ctypes.data, torch.get_num_threads()))

    def _kernel(self, function: Any, dtype: torch.dtype) -> Callable[..., Any]:
        """The entry point of ``function(spec, int64, int64)`` for a storage dtype."""
        try:
            return self._compiled[function, dtype]
        except KeyError:
            spec = Spec(
                self.geometry, self.rotary.rotary_dim, self.rotary.is_neox, _HALVES[dtype],
                host_lanes(),
            )  # fmt: skip
            signature = (spec._numba_type_, types.int64, types.int64)
            function.compile(signature)
            entry = function.overloads[signature].entry_point
            self._compiled[function, dtype] = entry
            return entry  # type: ignore[no-any-return]
