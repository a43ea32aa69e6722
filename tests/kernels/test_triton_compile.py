"""Decode attention compiles ahead of time for every chip. No GPU is needed.

Its loops over tiles spill next to nothing up to 8 query heads a KV head and 128 channels, and
little beyond: ``attend`` uses every register there is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.triton.codes import Spec
from qevict_kernels.triton.decode import attend, attend_options, merge, merge_options
from triton_aot import SHARED, compiled, is_without_spills, resources, tool
from triton_device import IS_INTERPRETED

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels are not compiled")

# Bytes of registers that ``attend`` may spill between the loops over tiles, once an item.
MOST_STACK = 512

FLOATS = ("offsets", "scores", "sums", "stats", "lses", "lse")
TYPES = {
    **dict.fromkeys(FLOATS, "*fp32"), "coded": "*u8", "bases": "*fp16", "scale": "fp32",
    **dict.fromkeys(("rows", "seq_lens"), "*i64"),
    **dict.fromkeys(("page_table", "full_slot", "coded_slot", "windows", "num_full", "num_coded"),
                    "*i32"),
}  # fmt: skip
ALIGNED = ("query_stride", "slot_stride")


def innermost_loops(listing: str) -> list[list[str]]:
    """Instructions of the loops around matrix products that hold no other such loop."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1])
    jumps = [(re.search(r"BRA.*`\((\.L_\w+)\)", text), i) for i, text in enumerate(instructions)]
    spans = [(labels[jump[1]], i + 1) for jump, i in jumps if jump and labels[jump[1]] <= i]
    spans = [(a, b) for a, b in spans if any("HMMA" in text for text in instructions[a:b])]
    return [
        instructions[a:b]
        for a, b in spans
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)
    ]


def check(
    geometry: WindowGeometry,
    arch: int,
    tmp_path: Path,
    most_local: float = 0.005,
    prior: bool = False,
    **style: Any,
) -> None:
    """Both kernels fit. ``most_local``: share of spilled accesses in the loops over tiles."""
    rotary_dim = style.get("rotary_dim", geometry.head_dim)
    spec = Spec(geometry, rotary_dim, style.get("is_neox", True), interpreted=False)
    path = tmp_path / "kernel.cubin"
    for kernel, options, num_loops in (
        # For as many requests as a GPU serves by default.
        (attend, attend_options(spec, 32, 32, batch=256, prior=prior), 2),
        (merge, merge_options(spec, 32, 32, prior), 0),
        (merge, merge_options(spec, 32, 32, prior, wants_lse=not prior), 0),
    ):
        binary = compiled(kernel, options, style.get("half", "bf16"), arch, TYPES, ALIGNED)
        path.write_bytes(binary.asm["cubin"])
        found = resources(path)
        loops = innermost_loops(tool("nvdisasm", "-c", str(path)))
        print(
            arch, kernel.fn.__name__, found, [len(loop) for loop in loops], binary.metadata.shared
        )
        assert found["LOCAL"] == 0
        assert found["STACK"] <= MOST_STACK if num_loops else is_without_spills(found)
        assert binary.metadata.shared <= SHARED[arch]
        # The assembler may make more, of what goes into a loop or comes out of it.
        assert len(loops) >= num_loops
        for loop in loops:
            local = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in loop)
            print(len(loop), local)
            assert local <= most_local * len(loop)


FP16 = ParamFormat.FP16
LLAMA = WindowGeometry(32, 8, 128)


def test_decode_compiles(tmp_path: Path) -> None:
    check(LLAMA, 90, tmp_path, most_local=0.002)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", SHARED)
def test_decode_after_another_kernel_compiles(arch: int, tmp_path: Path) -> None:
    check(LLAMA, arch, tmp_path, prior=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(
    ("geometry", "style"),
    [
        (LLAMA, {}),
        (WindowGeometry(9, 3, 64), {}),
        (WindowGeometry(28, 4, 128, 8, 4, 2, FP16), {"half": "fp16", "most_local": 0.02}),
        (WindowGeometry(64, 4, 128), {"most_local": 0.045}),
        (WindowGeometry(32, 8, 128, 16, 4, 4), {"rotary_dim": 64, "is_neox": False}),
        (WindowGeometry(8, 8, 64, 32, 2, 4, FP16), {"rotary_dim": 32}),
        (WindowGeometry(32, 32, 80, 4, 2, 2), {"rotary_dim": 32}),
        (WindowGeometry(32, 32, 96, 8, 4, 4), {}),
        (WindowGeometry(16, 8, 256), {"most_local": 0.02}),
        (WindowGeometry(17, 1, 64), {"most_local": 0.02}),
    ],
    ids=str,
)
def test_every_shape_compiles_for_every_chip(
    geometry: WindowGeometry, style: dict[str, Any], arch: int, tmp_path: Path
) -> None:
    check(geometry, arch, tmp_path, **style)
