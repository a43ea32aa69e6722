"""What a user chooses of the spill store, and the checks on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qevict_tiers.config import _check

__all__ = ["SPILL_BACKENDS", "SpillConfig"]

SPILL_BACKENDS = ("local", "file", "mooncake", "nixl", "hf3fs", "lmcache", "dynamic")
"""Where spilled windows go: our own store on a local disk, or SGLang's storage backends by name."""

MIN_SSD_BYTES = 64 << 20


@dataclass(frozen=True)
class SpillConfig:
    """The options of the spill store, checked.

    ssd_dir: where the local stores of all ranks have their directories.
    ssd_size: bytes that the local store of each rank may take.
    ssd_persist: whether records outlive the server.
    spill_backend: one of ``SPILL_BACKENDS``.
    spill_config: the extra configuration of a backend of SGLang's.

    Raises ``ValueError`` with the option, the value and the remedy.
    """

    ssd_dir: Path | None = None
    ssd_size: int = 16 << 30
    ssd_persist: bool = False
    spill_backend: str = "local"
    spill_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        local = self.spill_backend == "local"
        _check(
            self.spill_backend in SPILL_BACKENDS,
            "spill-backend",
            self.spill_backend,
            f"one of {', '.join(SPILL_BACKENDS)}",
        )
        _check(
            local or self.ssd_dir is None,
            "ssd-dir",
            self.ssd_dir,
            f"left out with --kv-tiering-spill-backend {self.spill_backend}, "
            "which has its own place",
        )
        _check(
            self.ssd_size >= MIN_SSD_BYTES,
            "ssd-size",
            self.ssd_size,
            f"at least {MIN_SSD_BYTES} bytes",
        )
        _check(
            not (local and self.spill_config),
            "spill-config",
            dict(self.spill_config),
            "left out with --kv-tiering-spill-backend local",
        )
