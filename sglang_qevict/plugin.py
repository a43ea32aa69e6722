"""What SGLang runs in each of its processes before it reads any argument."""

from __future__ import annotations

from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_qevict.platform import choose_attention_backend


def register() -> None:
    """Registers the plugin's hooks; each does nothing unless its platform or its flag is in use."""
    register_resolution_hook("handle_cpu_backends")(choose_attention_backend)
