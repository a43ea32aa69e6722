"""What `sglang-qevict doctor` looks at: one function a subject, which yields findings."""

from __future__ import annotations

import io
import os
import pkgutil
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
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
    REFUSED = "refused"

    @property
    def prevents_serving(self) -> bool:
        """True if a server could not start."""
        return self in (Level.MISSING, Level.REFUSED)


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


def check_hooks() -> Iterator[Finding]:
    """Whether the SGLang at hand has everything that tiering hooks; nothing is hooked here."""
    try:
        from sglang_qevict.hooks import HOOKS, LAUNCHER_HOOKS
    except ImportError as error:
        yield Finding(Level.MISSING, "hooks", f"SGLang can't be hooked: {error}")
        return
    targets = [target for target, _, _ in (*HOOKS, *LAUNCHER_HOOKS)]
    missing = [target for target in targets if not _exists(target)]
    if missing:
        detail = f"this SGLang has no {', '.join(missing)}: install a tested one"
        yield Finding(Level.MISSING, "hooks", detail)
    else:
        yield Finding(Level.OK, "hooks", f"all {len(targets)} places exist in this SGLang")


def check_server(flags: Sequence[str]) -> Iterator[Finding]:
    """What a server with these flags would refuse before it loads its model.

    Loads SGLang's plugins and applies their hooks in this process, as a launcher does.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_qevict.hooks import HOOKS

    load_plugins()
    missing = [target for target, _, _ in HOOKS if target not in HookRegistry._patched]
    if missing:
        yield Finding(Level.MISSING, "hooks applied", f"not applied: {', '.join(missing)}")
    else:
        yield Finding(Level.OK, "hooks applied", f"all {len(HOOKS)}, in this process")
    yield _try_arguments(flags)


def _try_arguments(flags: Sequence[str]) -> Finding:
    from sglang.srt.server_args import prepare_server_args

    from sglang_qevict.runtime import config_of

    if flags and not flags[0].startswith("-"):
        flags = ["--model-path", *flags]
    told = io.StringIO()
    try:
        # SGLang logs much of what it derives; of that only an error matters here.
        with redirect_stderr(told), redirect_stdout(told):
            server_args = prepare_server_args(list(flags))
            server_args.resolve_once()
            server_args.check_server_args()
    except SystemExit:
        errors = [line for line in told.getvalue().splitlines() if ": error: " in line]
        sentence = errors[-1].partition(": error: ")[2] if errors else told.getvalue().strip()
        return Finding(Level.REFUSED, "server", sentence)
    except (ValueError, AssertionError, OSError, ImportError, RuntimeError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        return Finding(Level.REFUSED, "server", f"SGLang: {sentence}")
    if config_of(server_args) is None:
        return Finding(Level.NOTE, "server", "would start without tiering: add --kv-tiering qevict")
    return Finding(Level.OK, "server", "would start with tiering, if its memory suffices")


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


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


# In the order of the report.
CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_packages,
    check_platform,
    check_hooks,
    check_cpu,
    check_memory,
    check_model,
)


def diagnose(server_flags: Sequence[str] = ()) -> list[Finding]:
    """All findings, in the order of `CHECKS`; then those of a server with these flags, if any."""
    findings = [finding for check in CHECKS for finding in check()]
    return [*findings, *check_server(server_flags)] if server_flags else findings


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()
