"""A plain CPU as an SGLang platform.

SGLang's own CPU engine needs a build of its kernels that is not on PyPI. This platform serves a
model with the stock wheel, through the plain-torch path that every SGLang operator has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_qevict.platform import NAME

ATTENTION_BACKEND = "torch_native"

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class CpuNativePlatform(CpuDeviceMixin, SRTPlatform):
    """Serves on a CPU with plain-torch operators, float32 rotation and no graph capture."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = 0) -> str:
        """The torch device string; ``device_id`` does not matter, since all ranks share the CPU."""
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory of this machine, or of this container where that is less."""
        total_bytes = int(psutil.virtual_memory().total)
        try:
            limit = _CGROUP_LIMIT.read_text().strip()
        except OSError:
            return total_bytes
        return min(total_bytes, int(limit)) if limit.isdigit() else total_bytes

    def get_default_attention_backend(self) -> str:
        """The attention backend that SGLang takes when the user names none."""
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        """The suffix of the ``forward_*`` methods that SGLang's operators run here."""
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """The name in ``/start_profile`` of what runs here."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """What torch's profiler records here."""
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Changes of SGLang in this worker; called once, before a model is built.

        The plain-torch rotation rounds cos and sin to the activations' dtype, which CUDA kernels
        never do. Keys would be off by up to 2^-8 of their size and could not be rotated back.
        """
        os.environ.setdefault("SGLANG_ROPE_CACHE_FP32", "1")
        for target, hook in _WORKER_HOOKS:
            source = HookSource(NAME, "sglang-qevict")
            HookRegistry.register(target, hook, HookType.AROUND, source=source)
        HookRegistry.apply_hooks()


def rotate_in_float32(
    rotate: Callable[..., torch.Tensor],
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_neox_style: bool,
) -> torch.Tensor:
    """Rotates ``x`` ([tokens, heads, dim]) in float32 and rounds once, to the dtype of ``x``."""
    return rotate(x.float(), cos, sin, is_neox_style).to(x.dtype)


def get_device_module(original: Callable[[Any], Any], device: Any = None) -> Any:
    """torch's module of a device, by default of the CPU: a build with CUDA takes CUDA's."""
    return original("cpu" if device is None else device)


def validate_prompt(original: Callable[..., str | None], request: Any, *limits: Any) -> str | None:
    """HTTP 400 for a prompt on which plain-torch operators would raise, in the scheduler."""
    tokens, vocabulary = request.origin_input_ids, request.vocab_size
    if not tokens:
        return "The prompt has no token: send at least one."
    if vocabulary is not None and request.multimodal_inputs is None:
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocabulary:
                return (
                    f"The prompt has the token id {token}, but ids go from 0 to {vocabulary - 1}."
                )
    return original(request, *limits)


_WORKER_HOOKS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("sglang.srt.layers.rotary_embedding.utils.apply_rotary_emb", rotate_in_float32),
    ("sglang.srt.managers.scheduler.validate_input_length", validate_prompt),
    ("torch.get_device_module", get_device_module),
)


def choose_attention_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook: no ``--attention-backend`` on this platform means torch's own attention.

    SGLang's step for ``device == "cpu"`` takes ``intel_amx`` on every x86 machine and never asks
    the platform, so the choice has to be declared before it.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.platforms import current_platform

    config = resolving_view(server_args)
    if isinstance(current_platform, CpuNativePlatform) and config.attention_backend is None:
        declare_resolution(server_args, NAME, attention_backend=ATTENTION_BACKEND)
    previous(server_args)
