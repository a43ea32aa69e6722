"""Where tests of Triton kernels run: on a GPU, or else in Triton's interpreter.

Whether a kernel is interpreted is settled when its module is imported, for the whole process.
So without a GPU the files that call `require_device` are skipped, and
``test_triton_interpreter`` runs each in a pytest of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["DEVICE", "IS_INTERPRETED", "require_device"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")


def require_device() -> None:
    """Skip the calling test file where there is neither a GPU nor the interpreter."""
    if DEVICE.type == "cpu" and not IS_INTERPRETED:
        reason = "no GPU: test_triton_interpreter runs this file"
        pytest.skip(reason, allow_module_level=True)
