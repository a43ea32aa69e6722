"""Byte layout of windows: one shape for FULL windows, one record for coded windows.

A *window* is ``W`` consecutive tokens of one layer. It is stored either as FULL
(model dtype, keys after RoPE) or as one *coded record* per KV head (keys before
RoPE). Both live in arenas whose slots serve any layer.

Coded record of one (slot, KV head); every field is 4-byte aligned, the record is
padded to ``RECORD_ALIGNMENT`` bytes::

    +-----------+-------------+------------+-----------+--------------+-------------+--------+-----+
    | key codes | value codes | key scales | key zeros | value scales | value zeros | header | pad |
    +-----------+-------------+------------+-----------+--------------+-------------+--------+-----+

Codes are little-endian words of one channel over a *group* of ``min(W, 8)``
tokens: word ``[g][d]`` holds token ``g * group + i`` in bits
``[i * bits, (i + 1) * bits)``. So an 8-token window at 2 bits has one 16-bit word
per channel, at 4 bits one 32-bit word.

Keys have one scale and zero per channel, values one per token. A number is
rebuilt as ``zero + code * scale``. With ``ParamFormat.FP16`` scales and zeros are
float16. With ``ParamFormat.UINT8`` they are bytes with a second level in the
header (six float32: key scale step, key zero base, key zero step, and the same
three for values): ``scale = byte * scale_step``, ``zero = zero_base + byte *
zero_step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

__all__ = ["HEADER_FLOATS", "RECORD_ALIGNMENT", "ParamFormat", "RecordLayout", "WindowGeometry"]

RECORD_ALIGNMENT = 64
"""Bytes; one cache line, so that a record never shares a line with its neighbour."""

HEADER_FLOATS = 6
"""float32 numbers in the header of a record with ``ParamFormat.UINT8``."""

SUPPORTED_WINDOWS = (4, 8, 16, 32)
SUPPORTED_HEAD_DIMS = (64, 80, 96, 128, 256)
SUPPORTED_BITS = (2, 4)


class ParamFormat(Enum):
    """How the scales and zeros of a coded record are stored."""

    FP16 = "fp16"
    UINT8 = "uint8"


@dataclass(frozen=True)
class RecordLayout:
    """Offsets and sizes in bytes of the fields of one coded record."""

    key_codes: int
    value_codes: int
    key_scales: int
    key_zeros: int
    value_scales: int
    value_zeros: int
    header: int
    payload_bytes: int
    record_bytes: int
    code_bytes: int
    param_bytes: int

    @property
    def alignment_bytes(self) -> int:
        """Padding bytes of one record."""
        return self.record_bytes - self.payload_bytes


@dataclass(frozen=True)
class WindowGeometry:
    """Shapes and code of the windows of one model (per tensor-parallel rank).

    Raises ``ValueError`` for a shape or a code that no kernel supports.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 8
    key_bits: int = 2
    value_bits: int = 2
    params: ParamFormat = ParamFormat.UINT8

    def __post_init__(self) -> None:
        _require("window", self.window, SUPPORTED_WINDOWS)
        _require("head_dim", self.head_dim, SUPPORTED_HEAD_DIMS)
        _require("key_bits", self.key_bits, SUPPORTED_BITS)
        _require("value_bits", self.value_bits, SUPPORTED_BITS)
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, "
                f"got {self.num_q_heads} and {self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def code_group(self) -> int:
        """Tokens whose codes share one word."""
        return min(self.window, 8)

    @property
    def full_window_bytes(self) -> int:
        """Bytes of one FULL window of one layer, keys and values, 2-byte dtype."""
        return 2 * self.num_kv_heads * self.window * self.head_dim * 2

    @property
    def coded_window_bytes(self) -> int:
        """Bytes of one coded window of one layer, parameters and padding included."""
        return self.num_kv_heads * self.record.record_bytes

    @cached_property
    def record(self) -> RecordLayout:
        """Where the fields of a coded record lie."""
        key_codes = self.head_dim * self.window * self.key_bits // 8
        value_codes = self.head_dim * self.window * self.value_bits // 8
        width = 2 if self.params is ParamFormat.FP16 else 1
        sizes = {
            "key_codes": key_codes,
            "value_codes": value_codes,
            "key_scales": self.head_dim * width,
            "key_zeros": self.head_dim * width,
            "value_scales": self.window * width,
            "value_zeros": self.window * width,
            "header": 0 if self.params is ParamFormat.FP16 else HEADER_FLOATS * 4,
        }
        offsets: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            offsets[name] = end
            end = _align(end + size, 4)
        code_bytes = key_codes + value_codes
        return RecordLayout(
            **offsets,
            payload_bytes=end,
            record_bytes=_align(end, RECORD_ALIGNMENT),
            code_bytes=code_bytes,
            param_bytes=end - code_bytes,
        )


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def _require(name: str, value: int, allowed: tuple[int, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
