"""SGLang's arguments as a command line makes them, in this process and without a server."""

from __future__ import annotations

import argparse
from typing import Any

from sglang.srt.server_args import ServerArgs

from sglang_qevict.arguments import apply_command_line
from sglang_qevict.flags import add_flags


def make_parser() -> argparse.ArgumentParser:
    """SGLang's parser with this project's flags."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    add_flags(parser, when_on=lambda: None)
    return parser


def parse(*flags: str, model: str = "no-such-model") -> Any:
    """SGLang's raw record for ``--model-path model`` and these flags.

    Raises:
        SystemExit: with 2, after a sentence on stderr, where tiering refuses a flag.
    """
    namespace = make_parser().parse_args(["--model-path", model, *flags])
    server_args = ServerArgs.from_cli_args(namespace)
    apply_command_line(server_args, vars(namespace))
    return server_args


def tiered(*flags: str, model: str = "no-such-model") -> Any:
    """`parse` with tiering on."""
    return parse("--kv-tiering", "qevict", *flags, model=model)
