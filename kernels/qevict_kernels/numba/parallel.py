"""Fork and join on the OpenMP team that torch already runs.

numba's own OpenMP layer links another copy of libgomp than torch's wheel carries. Two teams
then compete for the cores: the threads of the one that has just finished spin while the other
works. Calling the runtime that torch has loaded avoids that, follows
``torch.set_num_threads`` exactly, and starts in about a microsecond.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import torch  # noqa: F401  (loads its OpenMP runtime, whose symbols are used below)
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from qevict_kernels.numba.ir import I8, I32, I64
from qevict_kernels.numba.spec import Spec, SpecType

__all__ = ["atomic_add", "barrier", "parallel", "require_openmp"]


def require_openmp() -> None:
    """Make the OpenMP runtime known to the code generator.

    Raises ``RuntimeError`` where the process has none (a torch built without OpenMP).
    """
    for symbol in ("GOMP_parallel", "GOMP_barrier"):
        if llvm.address_of_symbol(symbol):
            continue
        try:
            address = ctypes.cast(getattr(ctypes.CDLL("libgomp.so.1"), symbol), ctypes.c_void_p)
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"the numba kernels need an OpenMP runtime with {symbol}; "
                "install libgomp (Debian: libgomp1) or a torch built with OpenMP"
            ) from error
        llvm.add_symbol(symbol, address.value)


@intrinsic  # type: ignore[untyped-decorator]
def parallel(
    typing_context: Any, worker: Any, spec: SpecType, arguments: Any, num_threads: Any
) -> Any:
    """Run ``worker(spec, arguments)`` on ``num_threads`` threads and wait for all of them.

    ``worker`` is a jitted function that returns nothing and never raises; ``arguments`` is one
    int64 (an address) that every thread receives.
    """
    signature = types.void(worker, spec, types.int64, types.int64)

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        # Compiled as a part of the caller: it has no entry point and no cache file of its own.
        compiled = context.compile_subroutine(
            builder, worker.dispatcher.py_func, types.void(spec, types.int64)
        )
        entry = _entry(context, builder.module, compiled, spec.spec)
        start = _external(builder.module, "GOMP_parallel", [entry.type, I8.as_pointer(), I32, I32])
        threads = builder.trunc(args[3], I32)
        data = builder.inttoptr(args[2], I8.as_pointer())
        builder.call(start, [entry, data, threads, I32(0)])
        return context.get_dummy_value()

    return signature, generate


def _entry(context: Any, module: ir.Module, compiled: Any, spec: Spec) -> ir.Function:
    """``void (void *)`` around a compiled ``worker(spec, int64)``."""
    name = f"qevict.entry.{compiled.fndesc.mangled_name}"
    typ = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
    entry = ir.Function(module, typ, name)
    entry.linkage = "internal"
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    worker = context.declare_function(module, compiled.fndesc)
    address = builder.ptrtoint(entry.args[0], I64)
    context.call_conv.call_function(
        builder,
        worker,
        compiled.fndesc.restype,
        compiled.fndesc.argtypes,
        [context.get_dummy_value(), address],
    )
    builder.ret_void()
    return entry


@intrinsic  # type: ignore[untyped-decorator]
def barrier(typing_context: Any) -> Any:
    """Wait inside a ``worker`` until every thread of the team has come here."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        builder.call(_external(builder.module, "GOMP_barrier", []), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at ``address``; returns what stood there before.

    A thread that sees another's addition sees all that was written before it.
    """

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


def _external(module: ir.Module, name: str, arguments: list[Any]) -> ir.Function:
    typ = ir.FunctionType(ir.VoidType(), arguments)
    return cgutils.get_or_insert_function(module, typ, name)
