"""Requests at random, by the server's own OpenAPI schema: none ends it or leaves anything."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from server.harness import Server, ServerPool
from server.tiering import TIERED, answer, assert_idle, prompts

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = 15
"""Requests for each operation of the schema, as it wants them and as it does not."""

OPERATORS = re.compile(
    "weight|memory_occupation|profile|expert_distribution|lora|hicache|external_corp|trace_level"
    "|configure_logging|freeze_gc|slow_down|pause_generation|set_internal_state|dumper|role_switch"
    "|remote_instance"
)
"""Paths by which whoever runs a server stops it, loads other weights or writes files."""

AMOUNTS = {"n", "best_of", "max_tokens", "max_new_tokens", "max_completion_tokens", "num_predict"}
MOST = 8


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_random_requests_end_nothing_and_leave_nothing(
    mode: GenerationMode, servers: ServerPool
) -> None:
    server = servers.get(*TIERED, "--context-length", "2048")
    (prompt,) = prompts([700], start=30_000)
    before = answer(server, prompt, 16)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    tried = [one for one in operations if not OPERATORS.search(one.path)]
    assert {"/generate", "/v1/chat/completions", "/flush_cache"} <= {one.path for one in tried}
    for operation in tried:
        _abuse(server, operation, mode)
    server.flush_cache()
    assert answer(server, prompt, 16).tokens == before.tokens
    assert_idle(server)


def _abuse(server: Server, operation: Any, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.body = _bounded(case.body)
        # It may hang up, or turn out to be nothing that can be sent.
        with suppress(requests.RequestException, UnicodeError, ValueError):
            case.call(base_url=server.url, timeout=5)
        assert server.exit_code() is None, (case.as_curl_command(), server.log_tail())

    send()


def _bounded(body: Any) -> Any:
    """The same with small amounts, so that what takes long is not what is asked for."""
    if isinstance(body, dict):
        return {
            key: min(value, MOST) if key in AMOUNTS and isinstance(value, int) else _bounded(value)
            for key, value in body.items()
        }
    return [_bounded(one) for one in body] if isinstance(body, list) else body
