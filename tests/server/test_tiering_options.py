"""Options of tiering and of SGLang together: a few requests each, then idle with nothing left."""

from __future__ import annotations

import pytest

from server.harness import ServerPool
from server.tiering import TIERED, assert_idle, prompts, report

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

# Each line is one server; options that do not touch each other share it.
SERVERS: dict[str, tuple[str, ...]] = {
    "chunks of one window, mixed with decodes": (
        *("--chunked-prefill-size", "8", "--enable-mixed-chunk"),
    ),
    "chunks of 64, no overlap, promotion by dequantising": (
        *("--chunked-prefill-size", "64", "--disable-overlap-schedule"),
        *("--kv-tiering-promote", "dequantize", "--kv-tiering-route-every", "4"),
    ),
    "segmented prefill mixed with decodes, a FULL layer": (
        *("--chunked-prefill-size", "512", "--enable-mixed-chunk"),
        *("--kv-tiering-exact-prefill-tokens", "1024", "--kv-tiering-full-layers", "0"),
    ),
    "windows of 16, 4 bits, fp16 parameters, scores of all queries": (
        *("--kv-tiering-window", "16", "--page-size", "16"),
        *("--kv-tiering-key-bits", "4", "--kv-tiering-value-bits", "4"),
        *("--kv-tiering-params", "fp16", "--kv-tiering-prefill-scores", "all"),
    ),
    "no chunks, no radix cache, nothing but coded": (
        *("--chunked-prefill-size", "-1", "--max-prefill-tokens", "4096", "--disable-radix-cache"),
        *("--kv-tiering-quant-fraction", "1", "--kv-tiering-prefix-reuse", "off"),
    ),
}


@pytest.mark.parametrize("name", SERVERS)
def test_requests_of_unequal_length_complete_and_leave_nothing(
    name: str, servers: ServerPool
) -> None:
    server = servers.get(*TIERED, *SERVERS[name])
    longest = 700 if name.startswith("chunks of one window") else 3000
    asked = prompts([1, 7, 9, 29, 300, 600, longest])
    answers = server.generate_many(asked, max_new_tokens=20, ignore_eos=True)
    assert [len(answer["output_ids"]) for answer in answers] == [20] * len(asked)
    found = report(server)
    assert found["counters"]["demoted"] > 0
    alone = [server.generate(prompt, max_new_tokens=12) for prompt in asked[:4]]
    again = [server.generate(prompt, max_new_tokens=12) for prompt in asked[:4]]
    assert [a["output_ids"] for a in alone] == [a["output_ids"] for a in again]
    assert_idle(server)
