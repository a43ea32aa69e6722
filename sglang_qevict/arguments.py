"""Tiering in SGLang's arguments: from flags or keywords to the record that every process gets."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import msgspec
import torch

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, PrefixReuse, TieringConfig
from sglang_qevict.flags import DESTS, config_from
from sglang_qevict.refusals import (
    refused_flags,
    refused_kv_dtype,
    refused_model,
    refused_platform,
)
from sglang_qevict.runtime import NAME, config_of

__all__ = [
    "REFUSED_STATUS",
    "apply_command_line",
    "check_model",
    "check_port",
    "exit_with",
    "from_keywords",
    "is_command_line",
    "refusing",
    "window_geometry",
]

REFUSED_STATUS = 2
"""Exit status of a refusal, as of argparse's own."""

_KV_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
"""What --kv-cache-dtype names; with auto a checkpoint decides, which only its loader knows."""

_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "radix_cache_backend",
)


def apply_command_line(server_args: Any, values: Mapping[str, Any]) -> None:
    """Take parsed flags; what is wrong with them ends the process with one sentence."""
    try:
        _apply(server_args, config_from(values))
    except ValueError as error:
        exit_with(str(error))
    _attach(server_args, "_kv_tiering_cli", True)


def from_keywords(server_args_class: Any, keywords: dict[str, Any]) -> Any:
    """SGLang's record from the keywords of ``sglang.Engine``, tiering's among them.

    Raises ``ValueError`` with one sentence for what is wrong.
    """
    ours = {name: keywords.pop(name) for name in DESTS if name in keywords}
    server_args = server_args_class(**keywords)
    _apply(server_args, config_from(ours))
    return server_args


def check_port(server_args: Any) -> None:
    """End the process if the server's port is taken.

    SGLang finds out when its model is loaded, logs it, and then waits for ever.
    """
    if server_args.node_rank > 0:
        return  # only the first node listens
    try:
        family, _, _, _, address = socket.getaddrinfo(
            server_args.host, server_args.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            exit_with(
                f"--port {server_args.port} is in use on {server_args.host}: stop what listens "
                "there, or choose another port"
            )


def check_model(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook: once the model is known, refuse what can't be tiered."""
    previous(server_args)
    config = config_of(server_args)
    if config is None:
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    kv_cache_dtype = resolving_view(server_args).kv_cache_dtype
    problem = _problem_with(model_config_of(server_args), config, kv_cache_dtype)
    if problem is None:
        return
    if is_command_line(server_args):
        exit_with(problem)
    raise ValueError(problem)


@contextmanager
def refusing(server_args: Any) -> Iterator[None]:
    """End a scheduler process with the sentence of a ``ValueError`` that is raised inside.

    What memory is left and what a loaded model is made of is known in the scheduler alone.
    There SGLang logs an exception with its traceback and has the whole server killed, which
    remains where no launcher looks at the exit status: in ``sglang.Engine``, below a
    data-parallel controller and in a Ray actor.
    """
    try:
        yield
    except ValueError as error:
        if is_command_line(server_args) and server_args.dp_size == 1 and not server_args.use_ray:
            exit_with(str(error))
        raise


def window_geometry(model: Any, config: TieringConfig, tp_size: int = 1) -> WindowGeometry:
    """Windows of SGLang's model configuration, on one of ``tp_size`` ranks.

    Raises ``ValueError`` for a shape that no kernel supports.
    """
    return config.geometry(
        Heads(
            model.num_attention_heads // tp_size,
            model.get_num_kv_heads(tp_size),
            model.head_dim,
        )
    )


def _problem_with(model: Any, config: TieringConfig, kv_cache_dtype: str) -> str | None:
    from sglang.srt.platforms import current_platform

    for sentence in refused_platform(current_platform, config):
        return sentence
    for sentence in refused_model(model):
        return sentence
    for sentence in refused_kv_dtype(model.dtype, _KV_DTYPES.get(kv_cache_dtype, model.dtype)):
        return sentence
    try:
        # The budget rule depends on the ratio of bytes, not on how many heads a rank has.
        WindowBudget(config, window_geometry(model, config), model.num_hidden_layers)
    except ValueError as error:
        return str(error)
    return None


def _apply(server_args: Any, config: TieringConfig | None) -> None:
    """Set what tiering needs of SGLang's raw arguments, before they are resolved."""
    if config is None:
        _require_no_backend_of_ours(server_args)
        return
    for sentence in refused_flags(server_args, config):
        raise ValueError(sentence)
    server_args.page_size = config.window
    server_args.attention_backend = NAME
    server_args.radix_cache_backend = NAME
    if server_args.disable_radix_cache:
        if config.spills:
            raise ValueError(
                "--disable-radix-cache keeps nothing for later requests, but the SSD tier is there "
                "for them: drop one of the two"
            )
        # The tree stays, so that admission has one path; without reuse nothing enters it.
        config = replace(config, prefix_reuse=PrefixReuse.OFF)
        server_args.disable_radix_cache = False
    # Prefills are routed as they run, which a captured graph could not do.
    server_args.disable_prefill_cuda_graph = True
    _attach(server_args, "_kv_tiering", config)


def _require_no_backend_of_ours(server_args: Any) -> None:
    for field in _BACKEND_FIELDS:
        if getattr(server_args, field) == NAME:
            flag = f"--{field.replace('_', '-')} {NAME}"
            raise ValueError(
                f"{flag} is a part of --kv-tiering qevict: add --kv-tiering qevict, or drop {flag}"
            )


def _attach(server_args: Any, name: str, value: Any) -> None:
    """An attribute that is no field; it survives pickling, and the record's seal."""
    msgspec.Struct.__setattr__(server_args, name, value)


def is_command_line(server_args: Any) -> bool:
    """True if SGLang's record comes from a command line, and not from ``sglang.Engine``."""
    return getattr(server_args, "_kv_tiering_cli", False)


def exit_with(sentence: str) -> NoReturn:
    """End the process with one sentence on stderr and ``REFUSED_STATUS``."""
    print(f"sglang-qevict: error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(REFUSED_STATUS)
