"""Directories in memory, where the kernel has such: what is tested is not the disk's speed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spill_cases import MEMORY


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY, ignore_cleanup_errors=True) as name:
        yield Path(name) / "spill"
