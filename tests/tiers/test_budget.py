"""The byte budget against its definition, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict_tiers.budget import WindowBudget, capacities
from qevict_tiers.config import Heads, Promotion, TieringConfig

SMOL = Heads(9, 3, 64)


def make(layers: int = 30, **options: object) -> WindowBudget:
    config = TieringConfig(**options)  # type: ignore[arg-type]
    return WindowBudget(config, config.geometry(SMOL), layers)


def test_capacities_match_the_worked_example_to_the_unit() -> None:
    mebibyte = 1 << 20
    result = capacities(100 * mebibyte, Fraction(7, 10), mebibyte, 137_363)
    assert (result.full, result.coded) == (30, 534)


@given(
    tokens=st.integers(513, 20_000),
    budget=st.fractions(Fraction(1, 8), 1, max_denominator=50),
    q=st.fractions(0, 1, max_denominator=20),
    promote=st.sampled_from(Promotion),
)
def test_all_windows_together_never_exceed_the_budget(
    tokens: int, budget: Fraction, q: Fraction, promote: Promotion
) -> None:
    rule = make(budget=budget, quant_fraction=q, promote=promote)
    if not rule.is_tiered(tokens):
        return
    start, end = rule.history(tokens)
    limit = rule.capacities(tokens)
    protected = rule.num_windows(tokens) - (end - start)
    shadows = limit.full if promote is Promotion.DEQUANTIZE and limit.full < end - start else 0
    used = (protected + limit.full) * rule.full_bytes + (limit.coded + shadows) * rule.coded_bytes
    assert limit.full >= 0
    assert 0 <= limit.coded <= end - start
    assert used <= budget * rule.num_windows(tokens) * rule.full_bytes


@pytest.mark.parametrize("q", [Fraction(0), Fraction(7, 10), Fraction(1)])
@pytest.mark.parametrize("tokens", [600, 601, 4095, 4096, 4099])
def test_a_budget_of_one_keeps_every_window_full(tokens: int, q: Fraction) -> None:
    rule = make(budget=Fraction(1), quant_fraction=q)
    start, end = rule.history(tokens)
    assert rule.capacities(tokens).full == end - start
    assert not rule.is_tiered(tokens)


@given(tokens=st.integers(0, 3000), sink=st.integers(0, 20), local=st.integers(1, 100))
def test_history_is_what_sink_and_local_do_not_touch(tokens: int, sink: int, local: int) -> None:
    rule = make(sink=sink, local=local, budget=Fraction(1))
    start, end = rule.history(tokens)
    w = rule.config.window
    for window in range(rule.num_windows(tokens)):
        held = set(range(window * w, min(tokens, (window + 1) * w)))
        protected = held & (set(range(sink)) | set(range(tokens - local, tokens)))
        assert (start <= window < end) == (not protected), window


def test_history_grows_and_capacities_follow_the_context() -> None:
    rule = make()
    kept = [rule.capacities(n) for n in range(600, 8000, 8)]
    assert all(b.full >= a.full and b.coded >= a.coded for a, b in pairwise(kept))
    assert kept[-1].coded > kept[0].coded


def test_layers_kept_full_take_their_bytes_from_the_others() -> None:
    rule = make(full_layers=frozenset({0, 29}))
    assert rule.layer_budget == (Fraction(1, 5) * 30 - 2) / 28
    assert rule.capacities(4096).coded < make().capacities(4096).coded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": Fraction(1, 20)}, "raise --kv-tiering-budget"),
        ({"full_layers": frozenset({30})}, "has layers 0 to 29"),
        ({"full_layers": frozenset(range(6))}, "--kv-tiering-full-layers"),
        ({"full_layers": frozenset(range(30))}, "keeps all 30 layers FULL"),
        ({"local": 480}, "lower --kv-tiering-local"),
    ],
)
def test_floors_that_do_not_fit_are_refused_with_the_remedy(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": Fraction(0)},
        {"budget": Fraction(11, 10)},
        {"quant_fraction": Fraction(-1)},
        {"window": 12},
        {"key_bits": 3},
        {"value_bits": 8},
        {"route_every": 0},
        {"sink": -1},
        {"local": 0},
        {"min_context": 8},
        {"exact_prefill_tokens": 100},
    ],
)
def test_options_out_of_range_name_flag_value_and_range(options: dict[str, object]) -> None:
    (name, value), *_ = options.items()
    flag = "--kv-tiering-" + name.replace("_", "-")
    shown = value if not isinstance(value, Fraction) else float(value)
    with pytest.raises(ValueError, match=f"{flag} must be .*, got {shown}"):
        TieringConfig(**options)  # type: ignore[arg-type]
