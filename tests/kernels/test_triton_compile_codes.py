"""The Triton kernels of codes, memory and prefill compile ahead of time.

Without spills at the shapes that most models have; wide heads and long windows fill the
registers, and may spill some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_cases import rotary_table
from qevict_kernels.flashinfer import slots_kernel
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.triton import extend, memory, quantize, routing
from triton_aot import SHARED, compiled, is_without_spills, resources
from triton_device import IS_INTERPRETED

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels are not compiled")

LLAMA = WindowGeometry(32, 8, 128)
SMALL = WindowGeometry(9, 3, 64)
USUAL = [
    LLAMA,
    SMALL,
    WindowGeometry(32, 8, 128, 8, 4, 2, ParamFormat.FP16),
    WindowGeometry(32, 32, 80, 4, 2, 2),
]
LARGE = [
    WindowGeometry(32, 8, 128, 16, 4, 4),
    WindowGeometry(8, 8, 64, 32, 2, 4, ParamFormat.FP16),
    WindowGeometry(32, 32, 96, 8, 4, 4),
    WindowGeometry(16, 8, 256, 8, 2, 2),
    WindowGeometry(16, 2, 256, 32, 4, 4, ParamFormat.FP16),
]
# Bytes a thread, which has 1,020 in registers.
MOST_STACK = 160

# Types of arguments that have the same one in all kernels.
TYPES = {
    **dict.fromkeys(("coded", "refused"), "*u8"),
    **dict.fromkeys(("cos_sin", "lse", "scores"), "*fp32"),
    **dict.fromkeys(("rows", "requests", "places", "token_rows", "token_lens", "prefix_lens",
                     "score_starts"), "*i64"),
    **dict.fromkeys(("slots", "sources", "targets", "full_slots", "coded_slots", "windows",
                     "offsets", "page_table", "full_slot", "coded_slot", "num_full", "num_coded",
                     "extend_lens", "count"), "*i32"),
    "scale_log2": "fp32",
}  # fmt: skip
STRIDES = {"slot_stride", "key_stride", "value_stride", "query_stride", "out_stride", "stride"}


def check(
    kernel: Any,
    constants: dict[str, Any],
    arch: int,
    tmp_path: Path,
    half: str,
    most_stack: int = 0,
) -> None:
    binary = compiled(kernel, constants, half, arch, TYPES, STRIDES)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    found = resources(path)
    print(arch, kernel.fn.__name__, constants.get("G", ""), found)
    assert found["STACK"] <= most_stack or is_without_spills(found), found
    assert found["LOCAL"] == 0, found
    assert binary.metadata.shared <= SHARED[arch]


def kernels(
    geometry: WindowGeometry, rotary_dim: int, is_neox: bool, arch: int
) -> list[tuple[Any, Any]]:
    """All kernels with the constants of their launches."""
    rotary = rotary_table(rotary_dim, is_neox, max_positions=64)
    codes = quantize.code_options(geometry, rotary)
    attend = extend.attend_options(geometry, rotary, arch)
    store = memory.store_options(geometry)
    return [
        (quantize.quantize_kernel, codes | {"COUNTED": True}),
        (quantize.dequantize_kernel, codes | {"COUNTED": True}),
        (extend.extend_kernel, attend | {"HAS_LSE": True}),
        (extend.score_kernel, extend.score_options(geometry, rotary)),
        (memory.store_kernel, store),
        (memory.copy_kernel, {"COUNTED": True, "BLOCK": memory.COPY_WORDS}),
        (slots_kernel, {"BLOCK": 256}),
        (extend.tokens_kernel, {"BLOCK": 128}),
    ]


ROUTING = [
    (routing.keys_kernel, {}),
    *((routing.rank_kernel, {"DEQUANTIZES": dequantizes}) for dequantizes in (False, True)),
    *((routing.release_kernel, {"FROM_RIGHT": from_right}) for from_right in (False, True)),
    (routing.allocate_kernel, {"ONLY_FLAGGED": True, "FROM_RIGHT": True}),
    (routing.allocate_kernel, {"ONLY_FLAGGED": False, "FROM_RIGHT": False}),
    (routing.refuse_kernel, {}),
    (routing.finish_kernel, {}),
]
ROUTING_TYPES = {
    **dict.fromkeys(("order", "rows", "limits", "shared", "publishable", "left", "gone", "totals",
                     "entries", "owners", "count", "dead", "refused_layer", "raised"), "*i64"),
    **dict.fromkeys(("tiers", "outranked", "after", "below", "is_routed", "refused"), "*u8"),
    **dict.fromkeys(("page_table", "coded_table", "num_left", "num_gone", "table", "references",
                     "sources", "targets", "num_moves", "windows", "source_table", "num_full",
                     "num_coded", "num_raised", "length"), "*i32"),
    **dict.fromkeys(("keys", "scores"), "*fp32"),
}  # fmt: skip


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == 90 else pytest.mark.slow) for arch in SHARED]
)
def test_routing_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    for kernel, constants in ROUTING:
        binary = compiled(kernel, constants | {"BLOCK": 1024}, "bf16", arch, ROUTING_TYPES, ())
        path = tmp_path / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        found = resources(path)
        print(arch, kernel.fn.__name__, found)
        assert found["STACK"] <= 32
        assert found["LOCAL"] == 0
        assert binary.metadata.shared <= SHARED[arch]


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == 90 else pytest.mark.slow) for arch in SHARED]
)
@pytest.mark.parametrize("kernel", range(8))
def test_kernels_compile_without_spills(kernel: int, arch: int, tmp_path: Path) -> None:
    function, constants = kernels(LLAMA, 128, True, arch)[kernel]
    check(function, constants, arch, tmp_path, "bf16")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("arch", "half"), [*((arch, "bf16") for arch in SHARED), (80, "fp16"), (90, "fp16")]
)
@pytest.mark.parametrize(
    "geometry", USUAL + LARGE, ids=lambda g: f"d{g.head_dim}w{g.window}k{g.key_bits}"
)
def test_every_shape_compiles_for_every_chip(
    geometry: WindowGeometry, half: str, arch: int, tmp_path: Path
) -> None:
    most_stack = MOST_STACK if geometry in LARGE else 0
    for rotary_dim, is_neox in ((geometry.head_dim, True), (32, False)):
        for function, constants in kernels(geometry, rotary_dim, is_neox, arch):
            check(function, constants, arch, tmp_path, half, most_stack)
