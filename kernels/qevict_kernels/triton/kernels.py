"""``TritonKernels``: all that ``AttentionKernels`` asks for, on a CUDA device."""

from __future__ import annotations

import torch
import triton

from qevict_kernels.interface import LayerView, Lengths
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.codes import Spec
from qevict_kernels.triton.decode import MAX_SPLITS, TILE, TritonDecode
from qevict_kernels.triton.extend import Chunks, TritonExtend
from qevict_kernels.triton.memory import TritonMemory
from qevict_kernels.triton.quantize import TritonCodes
from qevict_kernels.triton.routing import TritonRouting

__all__ = ["SHORT_TOKENS", "TritonKernels"]

SHORT_TOKENS = 128
"""Up to so many new tokens a launch attends token by token: chunks would leave a GPU idle."""


class TritonKernels(TritonMemory, TritonCodes, TritonDecode, TritonExtend, TritonRouting):
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

    def is_short(self, query: torch.Tensor, view: LayerView) -> bool:
        """Whether ``extend`` of these queries attends token by token."""
        batch, columns = self.reserved
        return query.shape[0] <= min(SHORT_TOKENS, batch) and view.windows.shape[1] <= columns

    def attend_chunks(self, chunks: Chunks, wants_lse: bool, whole: Lengths | None) -> torch.Tensor:
        """``extend`` without scores.

        A few new tokens over a long context, such as a question about a text that is reused, give
        too few tiles of queries to fill a GPU. Each is decoded for itself then, which divides the
        context. Only as far as ``reserve`` has made room.
        """
        if not self.is_short(chunks.query, chunks.view):
            return super().attend_chunks(chunks, wants_lse, whole)
        lse = chunks.query.new_empty(chunks.query.shape[:2], dtype=torch.float32)
        self.attend_windows(
            chunks.query, chunks.full, chunks.coded, chunks.view, *self.tokens(chunks),
            chunks.scale, chunks.out, None, lse,
        )  # fmt: skip
        return lse
