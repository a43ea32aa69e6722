"""``TritonKernels``: all that ``AttentionKernels`` asks for, on a CUDA device."""

from __future__ import annotations

import torch
import triton

from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.codes import Spec
from qevict_kernels.triton.decode import MAX_SPLITS, TILE, TritonDecode
from qevict_kernels.triton.extend import TritonExtend
from qevict_kernels.triton.memory import TritonMemory
from qevict_kernels.triton.quantize import TritonCodes

__all__ = ["TritonKernels"]


class TritonKernels(TritonMemory, TritonCodes, TritonDecode, TritonExtend):
    """``AttentionKernels`` for a CUDA device; see ``interface`` for what each method does.

    ``device``: where the arenas are; under Triton's interpreter the CPU. ``tile``, ``max_splits``:
    how decode cuts up a window list (see ``decode``); a result depends on them in its rounding.

    Raises ``ValueError`` for a rotary table that is not linear in the position, and from each
    method for tensors of a wrong dtype, shape or stride. Slots, pages, rows and windows are not
    checked.
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        rotary: RotaryTable,
        device: torch.device | str = "cuda",
        *,
        tile: int = TILE,
        max_splits: int = MAX_SPLITS,
    ) -> None:
        rotary.require_linear()
        if rotary.rotary_dim > geometry.head_dim:
            raise ValueError(
                f"the rotary table turns {rotary.rotary_dim} channels, "
                f"a head has {geometry.head_dim}"
            )
        for name, value, least in (("tile", tile, 16), ("max_splits", max_splits, 1)):
            if value < least or value & (value - 1):
                start = f" from {least} on" if least > 1 else ""
                raise ValueError(f"{name} must be a power of two{start}, got {value}")
        device = torch.device(device)
        self.geometry = geometry
        self.rotary = RotaryTable(rotary.cos_sin.to(device).contiguous(), rotary.is_neox)
        self._cos_sin = self.rotary.cos_sin
        interpreted = triton.knobs.runtime.interpret
        self.spec = Spec(geometry, rotary.rotary_dim, rotary.is_neox, interpreted)
        self.tile = tile
        self.max_splits = max_splits
        self.prepare_decode(device)
