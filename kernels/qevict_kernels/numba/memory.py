"""Addresses as arrays inside jitted code.

Launchers pass tensors as addresses (integers): boxing a torch tensor as an array costs more
than a small kernel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from qevict_kernels.numba.ir import I8

__all__ = ["aligned", "view"]


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], I8.as_pointer())

    return types.voidptr(types.int64), generate


@njit(inline="always")  # type: ignore[untyped-decorator]
def view(address: int, shape: Any, dtype: Any) -> Any:
    """The contiguous array of a shape and dtype at an address (no bounds, no ownership)."""
    return carray(_pointer(address), shape, dtype)


@njit(inline="always")  # type: ignore[untyped-decorator]
def aligned(address: int) -> int:
    """The next multiple of a cache line."""
    return (address + 63) & ~63
