"""What a server under test loads, as a plugin of SGLang: tokens are forced, codes can be spoiled,
and faults injected.

`install` copies this file to where the server finds it; nothing else of the tests is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

__all__ = ["BIAS", "Faults", "ForcedTokens", "inject", "install", "spoiling"]

BIAS = 100.0
"""What is added to a forced token's logit: more than logits differ, yet float32 keeps 1e-5."""

_SPOILING = "QEVICT_TEST_SPOILING"
_FAULTS = "QEVICT_TEST_FAULTS"


@dataclass(frozen=True)
class Faults:
    """What goes wrong from now on.

    rank: of which tensor-parallel rank, None for all; the disk's faults are of all. routing_fails:
    the next event raises. routing_seconds: an event takes so much longer. disk_fails: reads and
    writes raise. disk_seconds: these take so much longer. no_memory: there is none for originals.
    """

    rank: int | None = None
    routing_fails: bool = False
    routing_seconds: float = 0.0
    disk_fails: bool = False
    disk_seconds: float = 0.0
    no_memory: bool = False


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
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        _SPOILING: str(directory / "spoiling"),
        _FAULTS: str(directory / "faults"),
    }


def inject(env: dict[str, str], faults: Faults = Faults()) -> None:
    """From now on a server goes wrong like this; in nothing, unless it is told."""
    path = Path(env[_FAULTS])
    written = path.with_suffix(".new")
    written.write_text(json.dumps(asdict(faults)))
    written.replace(path)


def spoiling(env: dict[str, str]) -> Path:
    """The file that makes a server write random codes as long as it exists."""
    return Path(env[_SPOILING])


def register() -> None:
    """The plugin."""
    _make_codes_spoilable()
    _make_routing_faulty()
    _make_disks_faulty()
    _make_memory_scarce()


def _faults() -> Faults:
    try:
        return Faults(**json.loads(Path(os.environ[_FAULTS]).read_text()))
    except FileNotFoundError:
        return Faults()


def _faults_here() -> Faults:
    """Those of this rank."""
    from sglang.srt.runtime_context import get_parallel

    faults = _faults()
    return faults if faults.rank in (None, get_parallel().attn_tp_rank) else Faults()


def _make_routing_faulty() -> None:
    from qevict_tiers.manager import TierManager

    route = TierManager.route

    def faulty(manager: TierManager, *arguments: Any, **options: Any) -> None:
        faults = _faults_here()
        time.sleep(faults.routing_seconds)
        if faults.routing_fails:
            raise RuntimeError("injected: this routing event fails")
        route(manager, *arguments, **options)

    TierManager.route = faulty  # type: ignore[method-assign]


def _make_disks_faulty() -> None:
    from qevict_tiers.spill.local import LocalMedium

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_faults(*arguments: Any, **options: Any) -> Any:
            faults = _faults()
            time.sleep(faults.disk_seconds)
            if faults.disk_fails:
                raise OSError("injected: the disk fails")
            return call(*arguments, **options)

        return with_faults

    for name in ("read", "write"):
        setattr(LocalMedium, name, faulty(getattr(LocalMedium, name)))


def _make_memory_scarce() -> None:
    empty = torch.empty

    def scarce(*arguments: Any, **options: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == "sglang_qevict.spill" and _faults_here().no_memory:
            raise RuntimeError("injected: can't allocate memory")
        return empty(*arguments, **options)

    torch.empty = scarce


def _make_codes_spoilable() -> None:
    """Codes are random while they are spoiled; their ranges stay right."""
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
