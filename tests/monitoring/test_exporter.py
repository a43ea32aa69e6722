"""The exporter: what a scrape gets of it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter
from qevict_monitoring.table import METRICS

LABELS = {"model_name": "m", "tp_rank": "0"}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and values of the labels, those of every series apart."""
    return {
        (
            s.name,
            *(value for name, value in sorted(s.labels.items()) if name not in LABELS),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def exporter(registry: CollectorRegistry) -> Exporter:
    return Exporter(LABELS, registry)


def scrape(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return samples(generate_latest(registry).decode())


def test_all_series_with_known_labels_begin_at_zero(
    exporter: Exporter, registry: CollectorRegistry
) -> None:
    found = scrape(registry)
    for metric in METRICS.values():
        if all(label.values for label in metric.labels) and not metric.optional:
            for name in metric.series:
                assert {v for key, v in found.items() if key[0] == name} == {0.0}, name


def test_optional_metrics_have_no_series_before_they_are_set(
    exporter: Exporter, registry: CollectorRegistry
) -> None:
    optional = {name for metric in METRICS.values() if metric.optional for name in metric.series}
    assert optional
    assert not optional & {name for name, *_ in scrape(registry)}
    exporter.count_to(table.SPILL_DROPPED_RECORDS, 0, "disk_full")
    exporter.set(table.SPILL_BYTES, math.nan, "stored")
    found = scrape(registry)
    assert found["sglang_qevict_spill_dropped_records_total", "disk_full"] == 0
    assert math.isnan(found["sglang_qevict_spill_bytes", "stored"])
    assert len(optional & {name for name, *_ in found}) == 2


def test_types_and_help_are_the_tables(exporter: Exporter, registry: CollectorRegistry) -> None:
    exposed = {
        f"{family.name}_total" if family.type == "counter" else family.name: family
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        if not family.name.endswith("_created")
    }
    assert set(exposed) == set(METRICS)
    for name, family in exposed.items():
        assert family.type == METRICS[name].kind.value
        assert family.documentation == METRICS[name].help


def test_counters_follow_totals_that_are_kept_elsewhere(
    exporter: Exporter, registry: CollectorRegistry
) -> None:
    for total in (3, 3, 10):
        exporter.count_to(table.EVICTIONS, total, "coded")
    exporter.count(table.PREFILLS, 2, "whole")
    found = scrape(registry)
    assert found["sglang_qevict_evictions_total", "coded"] == 10
    assert found["sglang_qevict_evictions_total", "full"] == 0
    assert found["sglang_qevict_prefills_total", "whole"] == 2


def test_a_histogram_of_counts_is_that_of_the_same_observations(
    exporter: Exporter, registry: CollectorRegistry
) -> None:
    values = [0.0, 0.03, 0.03, 0.5, 0.9]
    bounds = table.CHURN.buckets
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[next(i for i, bound in enumerate((*bounds, math.inf)) if value <= bound)] += 1
    exporter.gather(table.CHURN, [0] * len(counts), 0.0)
    exporter.gather(table.CHURN, counts, sum(values))
    found = scrape(registry)
    name = "sglang_qevict_selection_churn_ratio"
    assert found[f"{name}_count",] == len(values)
    assert found[f"{name}_sum",] == pytest.approx(sum(values))
    for bound in bounds:
        assert found[f"{name}_bucket", str(float(bound))] == sum(v <= bound for v in values)


_RANK = """
import sys
from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter
exporter = Exporter({"model_name": "m", "tp_rank": sys.argv[1]})
exporter.set(table.PHYSICAL_BYTES, int(sys.argv[2]), "coded")
exporter.count_to(table.DEMOTIONS, int(sys.argv[2]))
exporter.gather(table.CHURN, [1] * (len(table.CHURN.buckets) + 1), 2.0)
"""

_SCRAPE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_every_rank_of_a_server_has_its_own_series(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank, amount in (("0", "7"), ("1", "9")):
        subprocess.run([sys.executable, "-c", _RANK, rank, amount], env=env, check=True)
    scraped = subprocess.run(
        [sys.executable, "-c", _SCRAPE], env=env, check=True, capture_output=True, text=True
    ).stdout
    by_rank = {
        (s.name, s.labels["tp_rank"]): s.value
        for family in text_string_to_metric_families(scraped)
        for s in family.samples
        if s.labels.get("tier") != "full" and not s.name.endswith("_bucket")
    }
    for rank, amount in (("0", 7), ("1", 9)):
        assert by_rank["sglang_qevict_physical_bytes", rank] == amount
        assert by_rank["sglang_qevict_demotions_total", rank] == amount
        assert by_rank["sglang_qevict_selection_churn_ratio_count", rank] == 13
