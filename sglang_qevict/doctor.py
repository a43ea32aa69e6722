"""What `sglang-qevict doctor` looks at: one function a subject, which yields findings."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from sglang_qevict.models import find_damage, model_path

# The SGLang releases whose inside this version was tested against.
TESTED_SGLANG = ("0.5.23",)

_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


class Level(Enum):
    """How much a finding matters: OK, worth knowing, or in the way of serving at all."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    subject: str
    detail: str


def check_packages() -> Iterator[Finding]:
    """Versions of what serving rests on; Triton and FlashInfer matter on a GPU only."""
    for name, essential in (
        ("sglang", True),
        ("torch", True),
        ("numba", True),
        ("triton", False),
        ("flashinfer-python", False),
    ):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            level = Level.MISSING if essential else Level.NOTE
            yield Finding(level, name, "not installed")
            continue
        if name == "sglang" and version not in TESTED_SGLANG:
            tested = ", ".join(TESTED_SGLANG)
            yield Finding(Level.NOTE, name, f"{version}, untested; tested: {tested}")
        else:
            yield Finding(Level.OK, name, version)


def check_platform() -> Iterator[Finding]:
    """The platform that SGLang chooses on this machine, and what chose it."""
    try:
        from sglang.srt.platforms import current_platform
        from sglang.srt.platforms.device_mixin import PlatformEnum
    except (ImportError, RuntimeError) as error:
        yield Finding(Level.MISSING, "platform", f"SGLang can't choose one: {error}")
        return
    name = f"{type(current_platform).__name__} (device {current_platform.device_type})"
    if current_platform._enum is PlatformEnum.UNSPECIFIED:
        yield Finding(
            Level.MISSING,
            "platform",
            f"{name}: SGLang found neither an accelerator nor this project's CPU platform; "
            "unset SGLANG_PLATFORM and SGLANG_PLUGINS, or reinstall sglang-qevict",
        )
    else:
        yield Finding(Level.OK, "platform", name)


def check_cpu() -> Iterator[Finding]:
    """Cores that this process may use, and the vector units that the kernels can profit from."""
    flags = _cpu_flags()
    features = [feature for feature in _CPU_FEATURES if feature in flags] or ["no vector unit"]
    cores = len(os.sched_getaffinity(0))
    yield Finding(Level.OK, "cpu", f"{platform.machine()}, {cores} cores, {', '.join(features)}")


def check_memory() -> Iterator[Finding]:
    """Free and total main memory."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    yield Finding(Level.OK, "memory", f"{free:.1f} GiB free of {total:.1f} GiB")


def check_model() -> Iterator[Finding]:
    """The embedded model's directory; its absence is no fault, since `make serve` fetches it."""
    path = model_path()
    if not path.exists():
        yield Finding(Level.NOTE, "embedded model", f"not fetched yet; it goes to {path}")
    elif damage := find_damage(path):
        detail = f"{path} is damaged ({damage}); `sglang-qevict fetch-model` repairs it"
        yield Finding(Level.NOTE, "embedded model", detail)
    else:
        yield Finding(Level.OK, "embedded model", str(path))


# In the order of the report. A check of hooks or of server flags is one more function here.
CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_packages,
    check_platform,
    check_cpu,
    check_memory,
    check_model,
)


def diagnose() -> list[Finding]:
    """All findings, in the order of `CHECKS`."""
    return [finding for check in CHECKS for finding in check()]


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()
