"""Runs the tests of the Triton kernels in Triton's interpreter where there is no GPU.

With the Triton that is installed, and with the oldest that the kernels are written for, which
``make test`` puts beside the environment's packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triton_device import DEVICE, IS_INTERPRETED

DIRECTORY = Path(__file__).parent
OLD_TRITON = Path(sys.prefix) / "triton-3.6"
SLOW, WHOLLY_SLOW = "pytest.mark.slow", "pytestmark = pytest.mark.slow"


def _runs() -> Iterator[Any]:
    """Each file, its slow tests apart."""
    for path in sorted(DIRECTORY.glob("test_triton_*.py")):
        text = path.read_text()
        if "\nrequire_device()\n" not in text:
            continue
        if WHOLLY_SLOW not in text:
            yield pytest.param(path.name, "not slow", id=path.stem)
        if SLOW in text:
            yield pytest.param(path.name, "slow", id=f"{path.stem}-slow", marks=pytest.mark.slow)


def _run(name: str, chosen: str, *first: Path, **environment: str) -> None:
    paths = os.pathsep.join(map(str, filter(None, (*first, *sys.path))))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", chosen, str(DIRECTORY / name)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]


@pytest.mark.skipif(DEVICE.type == "cuda" or IS_INTERPRETED, reason="the files run themselves")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "chosen"), list(_runs()))
def test_passes_in_the_interpreter(name: str, chosen: str) -> None:
    _run(name, chosen, TRITON_INTERPRET="1")


@pytest.mark.skipif(not OLD_TRITON.exists(), reason=f"no {OLD_TRITON}: `make test` installs it")
@pytest.mark.skipif(IS_INTERPRETED, reason="starts the interpreter itself")
@pytest.mark.timeout(900)
class TestTriton36:
    """The same with Triton 3.6."""

    @pytest.mark.skipif(DEVICE.type == "cuda", reason="the files run on the GPU")
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param("test_triton_quantize.py"),
            pytest.param("test_triton_decode.py", marks=pytest.mark.slow),
            pytest.param("test_triton_extend.py", marks=pytest.mark.slow),
            pytest.param("test_triton_flashinfer.py", marks=pytest.mark.slow),
        ],
    )
    def test_passes_in_the_interpreter(self, name: str) -> None:
        _run(name, "not slow", OLD_TRITON, TRITON_INTERPRET="1")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["test_triton_compile.py", "test_triton_compile_codes.py"])
    def test_compiles(self, name: str) -> None:
        _run(name, "not slow", OLD_TRITON)
