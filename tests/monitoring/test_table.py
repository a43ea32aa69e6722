"""The table of metrics, and what is written of it elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from qevict_monitoring import table
from qevict_monitoring.docs import table_lines
from qevict_monitoring.table import METRICS, PREFIX, Kind, Label
from qevict_tiers.config import Promotion
from qevict_tiers.observer import PrefixCut, PromptRouting, Shortage, Wait
from sglang_qevict.spill import Recall

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_docs_has_the_table() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    expected = table_lines()
    start = page.index(expected[0])
    assert page[start : start + len(expected)] == expected
    assert not page[start + len(expected)].startswith("|")


def test_names_follow_the_rules_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert re.fullmatch(f"{PREFIX}[a-z0-9_]+", name)
        assert name.endswith("_total") is (metric.kind is Kind.COUNTER), name
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM), name
        assert metric.help.endswith("."), name
        if metric.unit in ("bytes", "seconds", "tokens"):
            assert metric.unit in name, name


@pytest.mark.parametrize(
    ("label", "kinds"),
    [
        (table.PREFILLS.labels[0], PromptRouting),
        (table.PREFIX_CUTS.labels[0], PrefixCut),
        (table.PREFIX_CUT_TOKENS.labels[0], PrefixCut),
        (table.ADMISSION_WAITS.labels[0], Wait),
        (table.RETRACTIONS.labels[0], Shortage),
        (table.BUILD_INFO.labels[-1], Promotion),
        (table.SPILL_RECALLS.labels[0], Recall),
        (table.SPILL_RECALL_RECORDS.labels[0], Recall),
    ],
)
def test_values_of_labels_are_those_that_observers_are_told(
    label: Label, kinds: type[Enum]
) -> None:
    assert label.values == tuple(kind.value for kind in kinds)


def test_nothing_imports_the_client_before_sglang_has_named_its_directory() -> None:
    imports = "sglang_qevict.plugin, sglang_qevict.metrics, qevict_monitoring.exporter"
    check = f"import {imports}, sys; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
