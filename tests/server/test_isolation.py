"""Tenants of one server: with salts none changes, sees, names or times what another one does."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from server.harness import Server, ServerPool
from server.tiering import (
    TIERED,
    Answer,
    answers,
    ask,
    assert_idle,
    assert_routed_alike,
    cached,
    prompts,
    tiers_at_events,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


def reused(
    server: Server, prompt: Sequence[int], salt: str, tokens: int = 1, **request: Any
) -> int:
    """Cached tokens of a request under a salt."""
    return cached(ask(server, prompt, tokens, cache_salt=salt, **request))


def test_a_tenant_beside_others_with_the_same_text_is_answered_and_routed_as_alone(
    tiered: Server,
) -> None:
    """Twice: a new document, and a question about what its own salt has of it."""
    document, question, *others = prompts([1304, 32, 3000, 40, 700], start=74_000)
    turn = document + question
    tokens = 26

    def own_turns(crowd: bool) -> list[tuple[Answer, dict[int, str]]]:
        found = []
        for prompt in (document, turn):
            asked, salts = [prompt], ["mine"]
            if crowd:
                # The same text to the token, under other salts, one longer and one shorter.
                asked += [prompt + others[1], prompt[:-8], *others]
                salts += ["one", "other", "one", "other", "mine too"]
            mine = answers(tiered, asked, tokens, salts)[0]
            found.append((mine, tiers_at_events(tiered, len(prompt))[-1]))
        return found

    alone = own_turns(crowd=False)
    tiered.flush_cache()
    for salt in ("one", "other"):
        reused(tiered, document, salt)
    among = own_turns(crowd=True)
    for prompt, one, other in zip((document, turn), alone, among, strict=True):
        assert len(one[1]) == 4
        assert_routed_alike(one, other, len(prompt))
    # It reuses what its own salt left, and another one nothing.
    assert reused(tiered, turn, "mine") == len(turn) // 8 * 8 - 8
    assert reused(tiered, turn, "nobody's") == 0


def test_salts_are_named_nowhere(tiered: Server) -> None:
    (prompt,) = prompts([700], start=78_000)
    salts = ["salt-of-one-5e1f", "salt-of-other-77ab"]
    for salt in salts:
        reused(tiered, prompt, salt, tokens=40, routing_key=f"tenant-{salts.index(salt)}")
    pages = [tiered.get(path).text for path in ("/metrics", "/server_info", "/kv_tiering/state")]
    assert 'tenant="tenant-1"' in pages[0]
    for text in (*pages, tiered.log_text()):
        for salt in salts:
            assert salt not in text


PAIRS, LENGTH = 40, 600
ALPHA = 1e-3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spills", [False, True])
def test_time_does_not_tell_what_another_tenant_has_cached(
    servers: ServerPool, spills: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A tenant asks for what another one asked for just before, or for what nobody has.

    Both in turn and in random order, ``PAIRS`` times, each time a new text; before either the other
    tenant asks for something of the same length. Are the times different? By the signed ranks of
    the pairs' differences, whose signs would be those of a fair coin if they were not. What the
    tenant has cached itself is told by the same test.
    """
    directory = tmp_path_factory.mktemp("ssd")
    flags = ("--kv-tiering-ssd-dir", str(directory)) if spills else ()
    server = servers.get(*TIERED, *flags)
    texts = prompts([LENGTH] * 3 * PAIRS)
    order = random.Random(0)

    def seconds(prompt: Sequence[int]) -> float:
        start = time.perf_counter()
        reused(server, prompt, "spy")
        return time.perf_counter() - start

    cached_by: dict[str, list[float]] = {"other": [], "nobody": [], "spy": []}
    for pair in range(PAIRS):
        theirs, something, nobodys = texts[3 * pair : 3 * pair + 3]
        server.flush_cache()
        ways = [("other", theirs, theirs), ("nobody", something, nobodys)]
        order.shuffle(ways)
        for who, warmed, wanted in ways:
            reused(server, warmed, "victim")
            cached_by[who].append(seconds(wanted))
        cached_by["spy"].append(seconds(theirs))
    medians = {who: statistics.median(times) for who, times in cached_by.items()}
    p_other, p_own = (
        _p_value(np.subtract(cached_by[who], cached_by["nobody"])) for who in ("other", "spy")
    )
    print(
        f"cached by the other {medians['other'] * 1e3:.1f} ms, by nobody "
        f"{medians['nobody'] * 1e3:.1f} ms (p = {p_other:.3f}), by itself "
        f"{medians['spy'] * 1e3:.1f} ms (p = {p_own:.4f})"
    )
    assert p_own < ALPHA
    assert p_other > ALPHA
    assert_idle(server)


def _p_value(differences: np.ndarray) -> float:
    """Of Wilcoxon's signed-rank test, two-sided, by 20,000 draws of the signs."""
    ranks = np.abs(differences).argsort().argsort() + 1.0
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (20_000, len(ranks)))
    drawn = np.abs(signs @ ranks)
    found = abs(float(np.sign(differences) @ ranks))
    return float((1 + np.count_nonzero(drawn >= found)) / (1 + len(drawn)))
