"""Triton kernels compiled ahead of time, as for a real launch. No GPU is needed.

Pointers, and those integers that are multiples of 16 in serving, are declared so.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["SHARED", "compiled", "is_without_spills", "resources", "tool"]

# Bytes of shared memory that a program may have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_HALVES = ("query", "out", "full_keys", "full_values", "keys", "values")


def compiled(
    kernel: Any,
    options: Mapping[str, Any],
    half: str,
    arch: int,
    types: Mapping[str, str],
    aligned: Collection[str],
) -> Any:
    """A kernel compiled for an architecture.

    ``options``: keyword arguments of its launch. ``types``: of its other arguments, int32 where
    none is named; tensors in the model's dtype are ``half``. ``aligned``: integers that are
    multiples of 16.
    """
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in options:
            signature[name], constants[name] = "constexpr", options[name]
            continue
        signature[name] = f"*{half}" if name in _HALVES else types.get(name, "i32")
        if signature[name].startswith("*") or name in aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    launch = {name: value for name, value in options.items() if name not in constants}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def tool(name: str, *arguments: str) -> str:
    """What one of the tools that come with Triton prints."""
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: Path) -> dict[str, int]:
    """Registers, and bytes of stack, local and shared memory, of a compiled kernel."""
    listing = tool("cuobjdump", "-res-usage", str(cubin))
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", listing)}


def is_without_spills(found: dict[str, int]) -> bool:
    """No stack, or a few bytes that are no lack of registers: those were given for occupancy."""
    return found["STACK"] == 0 or (found["STACK"] <= 32 and found["REG"] <= 128)
