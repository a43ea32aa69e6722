"""What a kernel is compiled for: a geometry as a numba type.

Every jitted function takes a ``Spec`` as its first argument. It carries no data; its *type*
carries the geometry, so that

* intrinsics read shapes as Python numbers while they generate code,
* numba's own on-disk cache finds a kernel again in another process (closures never hit it),
* a change of any source file of ``qevict_kernels`` changes the type, so stale code is never loaded.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core import config, types
from numba.extending import NativeValue, models, overload_attribute, register_model, unbox

from qevict_kernels.layout import ParamFormat, RecordLayout, WindowGeometry

__all__ = ["Spec", "SpecType", "host_lanes"]


@dataclass(frozen=True)
class Spec:
    """Compile-time constants of one kernel set.

    ``half`` is the storage dtype, ``"bf16"`` or ``"fp16"``. ``lanes`` is the number of float32
    lanes of a vector, a power of two (16 with AVX-512, else 8).
    """

    geometry: WindowGeometry
    rotary_dim: int
    is_neox: bool
    half: str
    lanes: int

    @property
    def _numba_type_(self) -> SpecType:  # the name under which numba looks for it
        return SpecType(self, _source_fingerprint())

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.geometry.window

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.geometry.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.geometry.group_size

    @property
    def num_q_heads(self) -> int:
        """Query heads (of this rank)."""
        return self.geometry.num_q_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads (of this rank)."""
        return self.geometry.num_kv_heads

    @property
    def record_bytes(self) -> int:
        """Bytes of a coded record."""
        return self.record.record_bytes

    @property
    def record(self) -> RecordLayout:
        """Offsets of the fields of a coded record."""
        return self.geometry.record

    @property
    def fp16_params(self) -> bool:
        """Whether scales and zeros are float16 (else bytes with a second level)."""
        return self.geometry.params is ParamFormat.FP16

    @property
    def key_tile(self) -> tuple[int, int]:
        """(tokens, channels) of one vector of coded keys.

        Each 128-bit lane holds four channels of a token of its own: sums over channels then
        stay inside the lanes, and there are few. Where that does not divide, all channels that
        fit and one token.
        """
        channels = math.gcd(self.lanes, self.rotary_dim // 2, self.head_dim - self.rotary_dim)
        tokens = self.lanes // 4
        if channels % 4 or self.geometry.code_group % tokens:
            return 1, channels
        return tokens, 4

    @property
    def name(self) -> str:
        """A symbol-safe name, different for different specs."""
        fields = [str(getattr(x, "value", x)) for x in astuple(self.geometry)]
        fields += [str(self.rotary_dim), str(int(self.is_neox)), self.half, str(self.lanes)]
        return "_".join(fields)


class SpecType(types.Type):  # type: ignore[misc]
    """numba type of a ``Spec``: one type per value."""

    def __init__(self, spec: Spec, fingerprint: str) -> None:
        self.spec = spec
        super().__init__(name=f"Spec({spec.name},{fingerprint})")


@register_model(SpecType)
class _SpecModel(models.OpaqueModel):  # type: ignore[misc]
    pass


@unbox(SpecType)  # type: ignore[untyped-decorator]
def _unbox_spec(typ: SpecType, obj: Any, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())


def _expose(name: str) -> None:
    """Make ``spec.<name>`` a compile-time constant in jitted code."""

    @overload_attribute(SpecType, name)  # type: ignore[untyped-decorator]
    def attribute(spec: Any) -> Any:
        value = getattr(spec.spec, name)

        def get(spec: Any) -> Any:
            return value

        return get


for _name in ("window", "head_dim", "group_size", "num_q_heads", "num_kv_heads", "rotary_dim"):
    _expose(_name)
_expose("record_bytes")


def host_lanes() -> int:
    """float32 lanes of the widest vector of the CPU that numba compiles for."""
    if config.CPU_NAME:  # an explicit target: trust its feature list alone
        return 16 if "+avx512f" in (config.CPU_FEATURES or "") else 8
    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


@cache
def _source_fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
