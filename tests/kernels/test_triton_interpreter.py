"""Runs the tests of the Triton kernels in Triton's interpreter where there is no GPU."""

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


@pytest.mark.skipif(DEVICE.type == "cuda" or IS_INTERPRETED, reason="the files run themselves")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "chosen"), list(_runs()))
def test_passes_in_the_interpreter(name: str, chosen: str) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", chosen, str(DIRECTORY / name)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
