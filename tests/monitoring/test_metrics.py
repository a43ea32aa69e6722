"""What is exported of a miniature state, against the state itself and the diagnostics."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from kernel_cases import WITHOUT_STORE
from mini_engine import SMALL, MiniEngine, Text, Waiting
from monitoring.test_exporter import LABELS, scrape
from qevict_kernels import make_kernels
from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.diagnostics import Selection, returns, selection_churn
from qevict_tiers.observer import PromptRouting, Shortage
from qevict_tiers.policy import Tier
from qevict_tiers.spill.keys import KeySpace
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.records import SpillCounters, SpillUsage
from qevict_tiers.spill.store import SpillStore
from sglang_qevict import metrics
from sglang_qevict.metrics import MetricsObserver
from sglang_qevict.spill import NoSpill, RecallCounters
from sglang_qevict.tenants import DEFAULT, MAX_TENANTS, OVERFLOW, Tenants, tenant_of

LAYERS = 3
CPU = torch.device("cpu")


def make_engine(
    registry: CollectorRegistry | None,
    promote: Promotion = Promotion.ALIAS,
    fixed_shapes: bool = False,
    kv_tokens: int = 1600,
    full_layers: frozenset[int] = frozenset(),
    store: SpillStore | None = None,
) -> MiniEngine:
    """An engine that is watched, if there is a registry to export to."""
    # Codes so large that windows are still evicted as the budget grows with the context.
    codes = {"key_bits": 4, "value_bits": 4}
    budget = Fraction(30 if not full_layers else 54, 100)
    options = SMALL | codes | {"budget": budget}
    config = TieringConfig(**options, promote=promote, full_layers=full_layers)

    def watch(plan: Any, rows: int) -> MetricsObserver:
        return MetricsObserver(plan, rows, CPU, Exporter(LABELS, registry))

    engine = MiniEngine(
        lambda g, r: make_kernels(g, r, CPU),
        config,
        Heads(4, 2, 64),
        num_layers=LAYERS,
        kv_tokens=kv_tokens,
        context=640,
        fixed_shapes=fixed_shapes,
        watch=watch if registry else None,
        store=store,
    )
    if registry:
        observer = engine.state.observer
        assert isinstance(observer, MetricsObserver)
        observer.watch(engine.state)
    return engine


def serve(engine: MiniEngine) -> None:
    """A long prompt in chunks, a shorter one that decodes beside it, and their ends."""
    engine.start(1, 300)
    engine.extend({1: 300})
    engine.start(2, 150)
    engine.extend({2: 150}, [1])
    for _ in range(60):
        engine.decode([1, 2])


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.mark.parametrize("promote", WITHOUT_STORE)
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_what_is_exported_is_what_the_state_reports(
    registry: CollectorRegistry, promote: Promotion, fixed_shapes: bool
) -> None:
    engine = make_engine(registry, promote, fixed_shapes)
    serve(engine)
    engine.state.observer.idle()
    found, report = scrape(registry), engine.state.report()

    def ours(name: str, *labels: str) -> float:
        return found[f"sglang_qevict_{name}", *labels]

    budget = engine.plan.budget
    for tier in ("full", "coded", "evicted"):
        assert ours("logical_windows", tier) == sum(report["layers"][tier]) > 0
    held = report["bytes"]
    kinds = {"parameters": "params", "tables": "own_tables"}
    for kind in ("codes", "parameters", "alignment", "shadow", "reuse"):
        assert ours("ledger_bytes", kind) == held[kinds.get(kind, kind)]
    # Metrics keep one byte for each window of each row.
    watched = LAYERS * engine.req_to_token.shape[0] * engine.plan.max_windows
    assert ours("ledger_bytes", "tables") == held["own_tables"] + watched
    ledger = sum(ours("ledger_bytes", kind) for kind in ("codes", "parameters", "alignment"))
    ledger += ours("ledger_bytes", "shadow") + ours("ledger_bytes", "tables")
    assert ours("ledger_ratio") == pytest.approx(ledger / ours("kv_bytes"))
    assert (held["shadow"] > 0) is (promote is Promotion.DEQUANTIZE)
    used = engine.manager.arena.used_bytes
    assert ours("physical_bytes", "full") + ours("physical_bytes", "coded") == used
    assert ours("arena_bytes", "used") == used
    assert sum(ours("arena_bytes", x) for x in ("used", "reclaimable", "free")) == held["arena"]
    assert ours("claimed_bytes", "requests") == held["claimed"]
    windows = sum(map(sum, report["layers"].values()))
    assert ours("context_bytes") == windows * budget.full_bytes
    logical = ours("logical_bytes", "full") + ours("logical_bytes", "coded")
    assert ours("compression_ratio") == pytest.approx(ours("context_bytes") / logical)
    assert ours("requests") == 2
    counters = {
        "routed_windows": "routed",
        "demotions": "demoted",
        "rank_promotions": "rank_promoted",
        "physical_promotions": "promoted",
        "quantizations": "quantized",
        "reuse_quantizations": "coded_for_reuse",
        "code_reuses": "codes_reused",
        "non_finite_windows": "non_finite",
    }
    for name, counter in counters.items():
        assert ours(f"{name}_total") == report["counters"][counter], name
    for tier in ("full", "coded"):
        assert ours("evictions_total", tier) == report["counters"][f"evicted_{tier}"]
    assert ours("routings_total") == 2 + 2 * (60 // 8)
    assert ours("routing_seconds_total") > 0
    assert ours("sampled_launches_total", "decode") > 0
    assert ours("sampled_attention_seconds_total", "decode") > 0
    assert ours("sampled_read_bytes_total", "coded") > 0


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("full_layers", [frozenset(), frozenset({1})])
def test_churn_and_lir_are_those_of_the_diagnostics(
    registry: CollectorRegistry, fixed_shapes: bool, full_layers: frozenset[int]
) -> None:
    engine = make_engine(registry, Promotion.DEQUANTIZE, fixed_shapes, full_layers=full_layers)
    budget, views = engine.plan.budget, engine.manager.views
    seen: dict[tuple[int, int], list[Selection]] = {}
    route = engine.manager.route

    def watch(layers: slice, rows: list[int], tokens: list[int], at_hand: Any = None) -> None:
        route(layers, rows, tokens, at_hand)
        for layer in {*range(layers.start, layers.stop)} - full_layers:
            for row, length in zip(rows, tokens, strict=True):
                start, end = budget.history(length)
                width = budget.num_windows(length)
                tiers = views.tier[layer, row, :width].clone()[None]
                window = torch.arange(width)
                ranked = (window >= start) & (window < end) & (tiers != Tier.EVICTED)
                ranked &= ~views.outranked[layer, row, :width]
                selection = Selection(length, tiers, (start, end), ranked)
                seen.setdefault((layer, row), []).append(selection)

    engine.manager.route = watch  # type: ignore[method-assign]
    serve(engine)
    engine.state.observer.idle()
    found = scrape(registry)
    churn = torch.cat([selection_churn(s)[0] for s in seen.values()])
    back = torch.cat([returns(s)[0] for s in seen.values()])
    back = back[~back.isnan()]
    # With a layer kept FULL, what matters is that it is not counted.
    assert full_layers or (churn.sum() > 0 and back.sum() > 0)
    for name, values in (("selection_churn_ratio", churn), ("lir_ratio", back)):
        assert found[f"sglang_qevict_{name}_count",] == len(values) > 0
        assert found[f"sglang_qevict_{name}_sum",] == pytest.approx(float(values.sum()))
        for bound in table.CHURN.buckets:
            expected = int((values <= bound).sum())
            assert found[f"sglang_qevict_{name}_bucket", str(float(bound))] == expected
    assert found["sglang_qevict_tenant_churn_total", DEFAULT] == pytest.approx(float(churn.sum()))
    assert found["sglang_qevict_tenant_churn_observations_total", DEFAULT] == len(churn)


def test_a_row_s_next_request_begins_afresh(registry: CollectorRegistry) -> None:
    engine = make_engine(registry)
    for name in (1, 2):
        engine.start(name, 300)
        engine.extend({name: 300})
        engine.finish(name)
        engine.state.check_when_changed()
    found = scrape(registry)
    # Each was routed once, so there is nothing to compare with.
    assert found["sglang_qevict_routings_total",] == 2
    assert found["sglang_qevict_selection_churn_ratio_count",] == 0
    assert found["sglang_qevict_lir_ratio_sum",] == 0


@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_watching_changes_nothing(registry: CollectorRegistry, promote: Promotion) -> None:
    watched, alone = make_engine(registry, promote), make_engine(None, promote)
    for engine in (watched, alone):
        serve(engine)
    for name, outputs in alone.outputs.items():
        for one, other in zip(outputs, watched.outputs[name], strict=True):
            assert torch.equal(one, other)
    assert torch.equal(watched.manager.views.tier, alone.manager.views.tier)
    assert torch.equal(watched.manager.views.score, alone.manager.views.score)


def test_what_is_kept_is_reclaimable_and_what_is_dropped_is_counted(
    registry: CollectorRegistry,
) -> None:
    engine = make_engine(registry)
    engine.start(1, 300, Text(1, 300))
    engine.extend({1: 300})
    engine.finish(1, publish=True)
    engine.state.check_when_changed()
    found = scrape(registry)
    kept = engine.state.ledger.kept
    assert found["sglang_qevict_reuse_pages",] == kept.num_pages > 0
    assert found["sglang_qevict_arena_bytes", "reclaimable"] == kept.num_bytes
    assert found["sglang_qevict_arena_bytes", "used"] == 0
    assert found["sglang_qevict_claimed_bytes", "reuse"] == kept.num_bytes
    engine.evict()
    assert scrape(registry)["sglang_qevict_reuse_pages_dropped_total",] == 1


def test_a_request_that_does_not_fit_waits_for_a_reason(registry: CollectorRegistry) -> None:
    engine = make_engine(registry, kv_tokens=600)
    waiting = [Waiting(name, 200, new=100) for name in range(1, 6)]
    admitted = engine.admit(waiting, 10_000)
    assert 0 < len(admitted) < 5
    found = scrape(registry)
    waits = {w: found["sglang_qevict_admission_waits_total", w] for w in ("bytes", "growth")}
    assert sum(waits.values()) == 1


def test_requests_are_counted_by_tenant_routing_and_shortage(registry: CollectorRegistry) -> None:
    engine = make_engine(registry)
    observer = engine.state.observer
    engine.start(1, 300)
    observer.admitted(engine.running[1].row, PromptRouting.WHOLE, "red")
    engine.extend({1: 300})
    observer.fell_short(Shortage.PAGES)
    observer.retracted(2)
    observer.idle()
    found = scrape(registry)
    assert found["sglang_qevict_tenant_requests", "red"] == 1
    assert found["sglang_qevict_tenant_requests", DEFAULT] == 0
    for tier in ("full", "coded"):
        held = found["sglang_qevict_tenant_bytes", "red", tier]
        assert held == found["sglang_qevict_logical_bytes", tier] > 0
    assert found["sglang_qevict_prefills_total", "whole"] == 1
    assert found["sglang_qevict_retractions_total", "pages"] == 2


# --- the SSD tier ---


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SpillStore]:
    space = KeySpace("model", "bfloat16", 8)
    made = SpillStore(LocalMedium(tmp_path, space, 64 << 20, segment_bytes=4 << 20))
    yield made
    made.close()


def recall(engine: MiniEngine, store: SpillStore) -> None:
    """A request writes a document of 300 tokens behind, and the next one gets it back."""
    document = Text(document=1, tokens=300)
    engine.start(1, 300, document)
    engine.extend({1: 300})
    engine.finish(1, publish=True)
    engine.state.check_when_changed()
    assert store.flush().result(20) is None
    assert engine.start(2, 330, document) == 296
    engine.extend({2: 330})
    engine.finish(2, publish=True)
    engine.state.check_when_changed()
    assert store.flush().result(20) is None
    engine.state.observer.idle()


def test_what_the_ssd_tier_counts_is_exported(
    registry: CollectorRegistry, store: SpillStore
) -> None:
    engine = make_engine(registry, kv_tokens=3000, store=store)
    recall(engine, store)
    found, report = scrape(registry), engine.state.report()["spill"]
    usage, counters, recalls = report["usage"], report["counters"], report["recalls"]

    def ours(name: str, *labels: str) -> float:
        return found[f"sglang_qevict_spill_{name}", *labels]

    # Of the document and what follows it, each whole window once.
    assert ours("records", "stored") == usage["records"] == 330 // 8
    assert ours("bytes", "stored") == usage["payload_bytes"] > 0
    assert ours("records", "queued") == ours("bytes", "queued") == 0
    assert ours("file_bytes") > 0
    assert ours("written_records_total") == counters["written"] == usage["records"]
    assert ours("written_bytes_total") == usage["payload_bytes"]
    assert ours("medium_written_bytes_total") == counters["medium_written_bytes"]
    assert 0 < ours("write_seconds_total") == pytest.approx(counters["write_nanoseconds"] / 1e9)
    assert ours("read_records_total", "hit") == counters["hits"] == 37
    assert ours("read_bytes_total") == counters["hit_bytes"] > 0
    assert 0 < ours("read_seconds_total") == pytest.approx(counters["read_nanoseconds"] / 1e9)
    assert ours("recalls_total", "recalled") == recalls["requests"]["recalled"] == 1
    assert ours("recall_records_total", "recalled") == recalls["windows"]["recalled"] == 37
    assert ours("recalled_bytes_total") == recalls["bytes"] == ours("read_bytes_total")
    assert 0 < ours("recall_seconds_total") == pytest.approx(recalls["nanoseconds"] / 1e9)
    for metric in table.METRICS.values():
        if metric.optional:
            for values in product(*(label.values for label in metric.labels)):
                assert (metric.name, *values) in found


def test_without_an_ssd_tier_it_has_no_series(registry: CollectorRegistry) -> None:
    engine = make_engine(registry)
    serve(engine)
    engine.state.observer.idle()
    assert not [name for name, *_ in scrape(registry) if "spill" in name]


class _Writing(NoSpill):
    """So many records wait, one less each time that somebody asks."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting

    def report(self) -> dict[str, Any]:
        usage = SpillUsage(0, 0, 0, queued_records=self.waiting, queued_bytes=0, reading=0)
        self.waiting -= 1
        counters = SpillCounters().read()
        return {
            "usage": usage._asdict(),
            "counters": counters,
            "recalls": RecallCounters().report(),
        }


def test_while_the_server_idles_what_is_still_written_is_exported_until_it_is_done(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10.0
    monkeypatch.setattr(metrics, "monotonic", lambda: now)
    engine = make_engine(registry)
    engine.state.spill = _Writing(2)
    engine.state.observer.idle()
    found = []
    for seconds in (0.0, 0.5, 1.0, 1.0, 1.0):
        now += seconds
        assert engine.state.check_when_changed() == []
        found.append(scrape(registry)["sglang_qevict_spill_records", "queued"])
    # One export an interval, and none once nothing is left.
    assert found == [1, 1, 0, 0, 0]
    assert engine.state.spill.waiting == -1


# --- tenants ---


def test_tenants_beyond_the_first_hundred_are_one(caplog: pytest.LogCaptureFixture) -> None:
    tenants = Tenants()
    for i in range(1, MAX_TENANTS):
        tenants.number(f"t{i - 1}")
    assert OVERFLOW not in tenants.names
    numbers = [tenants.number(f"t{i}") for i in range(150)]
    assert caplog.messages == [
        "KV tiering: there are more than 100 tenants; the others together are called overflow"
    ]
    assert numbers[: MAX_TENANTS - 1] == list(range(1, MAX_TENANTS))
    assert set(numbers[MAX_TENANTS - 1 :]) == {MAX_TENANTS}
    assert tenants.number("t3") == 4
    assert tenants.number(DEFAULT) == 0
    assert len(tenants.names) == MAX_TENANTS + 1
    assert tenants.names[-1] == OVERFLOW


@pytest.mark.parametrize(
    ("key", "labels", "allowed", "expected"),
    [
        ("red", {"team": "blue"}, ["team"], "red"),
        (None, {"team": "blue"}, ["team"], "blue"),
        (None, {"team": "blue"}, ["customer"], None),
        (None, {"team": "blue"}, None, None),
        (None, {"a": "x", "b": "y"}, ["b", "a"], "y"),
        ("", None, ["team"], None),
    ],
)
def test_a_tenant_is_the_routing_key_or_else_an_allowed_label(
    key: str | None, labels: dict[str, str] | None, allowed: list[str] | None, expected: str | None
) -> None:
    assert tenant_of(key, labels, allowed) == expected
