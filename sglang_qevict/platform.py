"""Whether this machine needs the project's CPU platform.

SGLang asks while it is being imported. So nothing here imports SGLang, and the platform itself
stands in `sglang_qevict.cpu_native`.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import torch

NAME = "cpu_native"
GROUP = "sglang.srt.platforms"


def activate() -> str | None:
    """The platform's qualified class name, or None where there is better than a plain CPU.

    Better means an accelerator that torch sees, SGLang's own CPU engine
    (``SGLANG_USE_CPU_ENGINE=1``), or another installed platform plugin unless
    ``SGLANG_PLATFORM=cpu_native`` asks for this one.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or find_accelerator() is not None:
        return None
    others = {point.name for point in entry_points(group=GROUP)} - {NAME}
    if others and os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return "sglang_qevict.cpu_native.CpuNativePlatform"


def find_accelerator() -> str | None:
    """The name of an accelerator that torch can use in this process, or None."""
    for name in ("cuda", "xpu", "npu", "musa", "hpu", "mps"):
        device = getattr(torch, name, None)
        if device is not None and device.is_available():
            return "rocm" if name == "cuda" and torch.version.hip else name
    return None
