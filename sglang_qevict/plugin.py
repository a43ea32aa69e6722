"""What SGLang runs in each of its processes before it reads any argument."""

from __future__ import annotations

import functools
import sys
from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.mem_cache.registry import register_radix_cache_backend

from sglang_qevict import arguments, hooks
from sglang_qevict.cpu_native import choose_attention_backend
from sglang_qevict.runtime import NAME


def register() -> None:
    """Registers tiering with SGLang; nothing of it acts unless its platform or flag is in use."""
    register_resolution_hook("handle_cpu_backends")(choose_attention_backend)
    register_resolution_hook("handle_model_source_paths")(arguments.check_model)
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create_backend)
    register_radix_cache_backend(NAME, _create_cache)
    hooks.register_hooks()
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        # Engine(...) builds its record from keywords, before any hook on it could apply.
        engine.Engine.server_args_class = staticmethod(
            functools.partial(_engine_arguments, engine.Engine.server_args_class)
        )


def _engine_arguments(server_args_class: Any, **keywords: Any) -> Any:
    return arguments.from_keywords(server_args_class, keywords)


def _create_backend(runner: Any) -> Any:
    from sglang_qevict.attention import QEvictAttentionBackend

    return QEvictAttentionBackend(runner)


def _create_cache(context: Any) -> Any:
    from sglang_qevict.radix import create_cache

    return create_cache(context)
