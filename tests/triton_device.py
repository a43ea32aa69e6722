"""Where tests of Triton kernels run: on a GPU, or else in Triton's interpreter.

Whether a kernel is interpreted is settled when its module is imported, for the whole process.
So without a GPU the files marked with ``needs_device`` are skipped, and
``test_triton_interpreter`` runs each in a pytest of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["DEVICE", "IS_INTERPRETED", "needs_device"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")

needs_device = pytest.mark.skipif(
    DEVICE.type == "cpu" and not IS_INTERPRETED,
    reason="no GPU: test_triton_interpreter runs this file",
)
