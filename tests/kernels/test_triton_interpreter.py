"""Runs the tests of the Triton kernels in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_device import DEVICE, IS_INTERPRETED

FILES = [
    path
    for path in sorted(Path(__file__).parent.glob("test_triton_*.py"))
    if "pytestmark = needs_device" in path.read_text()
]


@pytest.mark.skipif(DEVICE.type == "cuda" or IS_INTERPRETED, reason="the files run themselves")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_passes_in_the_interpreter(path: Path, chosen: str) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", chosen, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    nothing_chosen = result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and chosen == "slow"
    assert result.returncode == 0 or nothing_chosen, result.stdout[-5000:]
