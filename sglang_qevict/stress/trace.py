"""Public traces: Mooncake's JSONL (kvcache-ai/Mooncake, FAST25-release).

A line has ``timestamp`` (milliseconds since the beginning), ``input_length``, ``output_length``
(tokens) and ``hash_ids``: one number for each block of 512 tokens of the input, the last one cut
short. Two requests whose lists begin alike have that much of their prompts in common.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_qevict.stress.problem import Problem

__all__ = ["TraceRequest", "read_trace"]

_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceRequest(NamedTuple):
    """One line. at_seconds: since the first one."""

    at_seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests, earliest first.

    Raises ``Problem`` for what is no such trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Problem(f"{path} can't be read ({reason}): name a trace, a JSONL file") from None
    requests = [_parse(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise Problem(f"{path} has no requests: a trace has one on each line")
    start = min(request.at_seconds for request in requests)
    requests = [request._replace(at_seconds=request.at_seconds - start) for request in requests]
    return sorted(requests, key=lambda request: request.at_seconds)


def _parse(line: str, where: str) -> TraceRequest:
    try:
        data: Any = json.loads(line)
    except ValueError:
        raise Problem(f"{where} is no JSON: give a Mooncake trace, one object a line") from None
    if not isinstance(data, Mapping) or not all(key in data for key in _KEYS):
        raise Problem(f"{where} lacks one of {', '.join(_KEYS)}: give a Mooncake trace")
    timestamp, tokens, output, blocks = (data[key] for key in _KEYS)
    lengths = all(type(number) is int and number >= 1 for number in (tokens, output))
    ids = isinstance(blocks, list) and all(type(number) is int for number in blocks)
    if type(timestamp) not in (int, float) or timestamp < 0 or not lengths or not ids:
        raise Problem(
            f"{where}: timestamp must be 0 or more, both lengths whole numbers above 0 and "
            "hash_ids a list of whole numbers: give a Mooncake trace"
        )
    return TraceRequest(timestamp / 1e3, tokens, output, tuple(blocks))
