"""What the ledger says of a small engine, and what becomes of windows that can't be coded."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from kernel_cases import WITHOUT_STORE
from mini_engine import SMALL, MiniEngine
from qevict_kernels import make_kernels
from qevict_kernels.layout import ParamFormat
from qevict_tiers import manager
from qevict_tiers.arena import Arena
from qevict_tiers.config import Heads, PrefixReuse, Promotion, TieringConfig
from qevict_tiers.ledger import Counter, ledger_bound
from qevict_tiers.manager import TierManager
from qevict_tiers.oscillation import rotated
from qevict_tiers.policy import Tier
from qevict_tiers.views import Views


def make_engine(
    promote: Promotion = Promotion.ALIAS,
    params: ParamFormat = ParamFormat.UINT8,
    fixed_shapes: bool = False,
    **options: Any,
) -> MiniEngine:
    config = TieringConfig(**SMALL | options, promote=promote, params=params)
    return MiniEngine(
        lambda g, r: make_kernels(g, r, torch.device("cpu")),
        config,
        Heads(4, 2, 64),
        kv_tokens=1600,
        context=640,
        fixed_shapes=fixed_shapes,
    )


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_bytes_by_kind_sum_to_what_the_arena_holds(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_AT_ONCE", at_once)
    engine = make_engine(Promotion.DEQUANTIZE)
    engine.start(1, 300)
    engine.extend({1: 300})
    for _ in range(60):
        engine.decode([1])
    ledger = engine.manager.ledger_bytes()
    windows = engine.manager.occupancy()
    budget = engine.plan.budget
    evicted = sum(windows.evicted)
    promoted = engine.manager.arena.coded.count.item() - sum(windows.coded) - evicted
    assert promoted > 0
    assert evicted > 0
    # What is evicted keeps its codes for the request that may come with the same prefix.
    assert ledger.reuse == evicted * budget.coded_bytes
    assert ledger.full == sum(windows.full) * budget.full_bytes
    assert ledger.shadow == promoted * budget.coded_bytes
    assert (
        ledger.codes + ledger.params + ledger.alignment == sum(windows.coded) * budget.coded_bytes
    )


def test_tables_are_those_that_the_plan_sets_bytes_aside_for() -> None:
    engine = make_engine()
    plan, budget = engine.plan, engine.plan.budget
    expected = (
        (plan.num_rows + 1) * Views.row_bytes(budget.num_layers, plan.max_windows)
        + (plan.num_pages + 1) * TierManager.page_bytes(budget.num_layers)
        + Arena.bookkeeping_bytes(plan.arena_bytes, budget.full_bytes, budget.coded_bytes)
    )
    assert engine.manager.ledger_bytes().tables == expected
    assert expected < plan.table_bytes


def test_promotions_by_rank_are_counted_where_none_is_physical() -> None:
    engine = make_engine(Promotion.ALIAS)
    engine.start(1, 300)
    engine.extend({1: 300})
    row = engine.running[1].row
    for _ in range(17):
        engine.decode([1])
    assert engine.manager.counters.read()[Counter.PROMOTED] == 0
    before = engine.manager.counters.read()[Counter.RANK_PROMOTED]
    layer, window = (engine.manager.views.tier[:, row] == Tier.CODED).nonzero()[0].tolist()
    engine.manager.views.score[layer, row, window] = 1e6
    for _ in range(16):
        engine.decode([1])
    assert engine.manager.views.tier[layer, row, window] == Tier.CODED
    assert not engine.manager.views.outranked[layer, row, window]
    counts = engine.manager.counters.read()
    assert counts[Counter.PROMOTED] == 0
    assert counts[Counter.RANK_PROMOTED] > before


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize(
    ("value", "params"),
    [
        (math.nan, ParamFormat.UINT8),
        (math.inf, ParamFormat.UINT8),
        (-math.inf, ParamFormat.FP16),
        (1e6, ParamFormat.FP16),  # finite, but no float16
    ],
)
def test_what_can_not_be_coded_is_evicted_from_its_view_alone(
    value: float, params: ParamFormat, fixed_shapes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer, offset = 1, 3
    runs, windows = [], []
    for spoil in (False, True):
        engine = make_engine(params=params, fixed_shapes=fixed_shapes)
        views = engine.manager.views
        for name in (1, 2):
            engine.start(name, 300)
            engine.extend({name: 296})
        if spoil:
            # Two that would be coded without it.
            windows = (runs[0][0][layer] == Tier.CODED).nonzero()[:2, 0].tolist()
            pages = views.page_table[engine.running[1].row, windows].long()
            slots = engine.manager.layer_view(layer).full_slot[pages].long()
            engine.manager.full_arena.values[slots, 0, offset, 5] = value
        engine.extend({1: 4, 2: 4})
        for _ in range(20):
            engine.decode([1, 2])
        outputs = {name: torch.stack(engine.outputs[name][-40:]) for name in (1, 2)}
        assert engine.problems() == []
        runs.append((engine.tiers(1), outputs))
        counts = engine.manager.read_counters()
        assert counts[Counter.NON_FINITE] == (2 if spoil else 0)
    (_, clean), (tiers, spoiled) = runs
    assert (tiers[layer, windows] == Tier.EVICTED).all()
    assert torch.equal(spoiled[2], clean[2])
    assert spoiled[1].isfinite().all()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"layer {layer} has" in warnings[0]


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_views_end_together_however_many_windows_are_looked_at_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "_AT_ONCE", at_once)
    engine = make_engine(Promotion.ALIAS)
    for name in (1, 2):
        engine.start(name, 150 * name)
        engine.extend({name: 150 * name})
    engine.decode([1, 2])
    windows = engine.manager.occupancy()
    tiers = torch.cat([engine.tiers(1), engine.tiers(2)], 1)
    for found, tier in (
        (windows.full, Tier.FULL),
        (windows.coded, Tier.CODED),
        (windows.evicted, Tier.EVICTED),
    ):
        assert sum(found) > 0
        assert found == (tiers == tier).sum(1).tolist()
    engine.finish(1)
    engine.finish(2)
    assert engine.problems() == []
    assert engine.manager.arena.used_bytes == 0


@pytest.mark.parametrize("reuse", PrefixReuse)
@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_attention_that_wavers_as_much_as_it_can_brings_codes_to_their_bound_and_no_further(
    promote: Promotion, reuse: PrefixReuse
) -> None:
    engine = make_engine(promote, quant_fraction=Fraction(3, 10), prefix_reuse=reuse)
    budget, views = engine.plan.budget, engine.manager.views
    engine.start(1, 393)
    engine.extend({1: 393})
    request = engine.running[1]
    ranked: torch.Tensor | None = None
    for event in range(393 + 8, 393 + 8 * 31, 8):
        while request.stored < event:
            engine.decode([1])
        tiers = engine.tiers(1)
        scores = views.score[:, request.row, : tiers.shape[-1]]
        last, full = budget.history(event - 8), budget.capacities(event - 8).full
        scores.copy_(rotated(scores, tiers, last, full))
        engine.decode([1])
        ranked, before = ranks_full(engine, event), ranked
        if before is not None:  # from then on attention alone ranks nothing
            assert before.sum(-1).tolist() == [full] * budget.num_layers
            assert not (ranked[:, : before.shape[-1]] & before).any()
        ledger = engine.manager.ledger_bytes()
        records = ledger.codes + ledger.params + ledger.alignment + ledger.shadow + ledger.reuse
        bound = ledger_bound(budget, event, publishes=reuse is PrefixReuse.CODES)
        assert records <= bound.total
        assert ledger.shadow <= bound.shadow
    if promote is Promotion.DEQUANTIZE:
        assert records == bound.total
        assert ledger.shadow == bound.shadow > 0
    else:
        # An original stays FULL however it ranks, as long as there is room: nothing is added.
        (start, end), limits = budget.history(event), budget.capacities(event)
        held = end - start - limits.full if reuse is PrefixReuse.CODES else limits.coded
        assert records == budget.num_layers * held * budget.coded_bytes
    assert (ledger.reuse > 0) == (reuse is PrefixReuse.CODES)


def ranks_full(engine: MiniEngine, tokens: int) -> torch.Tensor:
    """Windows of request 1 that ranked among the first ``K_f`` at a length: bool ``[L, N]``."""
    tiers = engine.tiers(1)
    outranked = engine.manager.views.outranked[:, engine.running[1].row, : tiers.shape[-1]]
    window = torch.arange(tiers.shape[-1])
    start, end = engine.plan.budget.history(tokens)
    return (window >= start) & (window < end) & (tiers != Tier.EVICTED) & ~outranked


def test_a_request_that_is_not_routed_has_no_codes() -> None:
    budget = make_engine().plan.budget
    assert ledger_bound(budget, budget.config.min_context, publishes=True) == (0, 0)
    assert ledger_bound(budget, budget.config.min_context + 1, publishes=True) > (0, 0)
