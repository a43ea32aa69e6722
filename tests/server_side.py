"""What a server under test loads, as a plugin of SGLang: tokens are forced, codes can be spoiled.

`install` copies this file to where the server finds it; nothing else of the tests is imported.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

__all__ = ["BIAS", "ForcedTokens", "install", "spoiling"]

BIAS = 100.0
"""What is added to a forced token's logit: more than logits differ, yet float32 keeps 1e-5."""

_SPOILING = "QEVICT_TEST_SPOILING"


class ForcedTokens(CustomLogitProcessor):
    """Each step takes the next one of ``custom_params["forced"]``."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """``logits`` ``[rows, vocabulary]``; a step after the last token changes nothing."""
        for row, params in enumerate(custom_param_list or ()):
            if params["forced"]:
                logits[row, params["forced"].pop(0)] += BIAS
        return logits


def install(directory: Path) -> dict[str, str]:
    """Variables with which a server loads this file from a directory; see `spoiling`."""
    name = Path(__file__).stem
    about = directory / f"{name}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    shutil.copy(__file__, directory)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), _SPOILING: str(directory / "spoiling")}


def spoiling(env: dict[str, str]) -> Path:
    """The file that makes a server write random codes as long as it exists."""
    return Path(env[_SPOILING])


def register() -> None:
    """The plugin: codes are random while they are spoiled; their ranges stay right."""
    from qevict_kernels.numba import NumbaKernels

    quantize, flag = NumbaKernels.quantize, Path(os.environ[_SPOILING])

    def spoil(
        kernels: NumbaKernels,
        full: Any,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> torch.Tensor:
        bad = quantize(kernels, full, coded, full_slots, coded_slots, windows)
        if flag.exists():
            written = coded_slots[full_slots >= 0].long()
            end = kernels.geometry.record.key_scales
            coded[written, :, :end] = torch.randint_like(coded[written, :, :end], 256)
        return bad

    NumbaKernels.quantize = spoil  # type: ignore[method-assign]
