"""The proof: Prometheus scrapes a real server, and answers every expression that is shipped."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.image
import pytest
import yaml

from monitoring.live import (
    DASHBOARDS,
    RULES,
    calm,
    flags,
    prometheus,
    swing,
)
from qevict_monitoring.prometheus import Prometheus, Series, expand, read_panels
from qevict_monitoring.render import render
from qevict_monitoring.table import METRICS
from server.harness import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="Prometheus is not installed (make test-monitoring)",
    ),
]

_START_SECONDS, _ALERT_SECONDS = 900, 900
"""For a machine that is busy with other things."""


class Live(NamedTuple):
    """Prometheuses by how they store names, and the time that the workload took."""

    stores: dict[str, Prometheus]
    start: float
    end: float
    alerts: dict[str, set[str]]
    """Alerts that fired, by workload."""


def _firing(store: Prometheus) -> set[str]:
    alerts = store.get("alerts")["alerts"]
    return {x["labels"]["alertname"] for x in alerts if x["state"] == "firing"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    server = Server(*flags(folder), log_path=folder / "server.log")
    target = f"127.0.0.1:{server.port}"
    with (
        contextlib.ExitStack() as stack,
        prometheus(target, folder / "as-is") as plain,
        prometheus(target, folder / "escaped", escaped=True) as escaped,
    ):
        server.launch()
        stack.callback(server.stop)
        server.wait_until_healthy(_START_SECONDS)
        start = time.time()
        calm(server)
        fired = {"calm": _firing(plain)}
        deadline = time.monotonic() + _ALERT_SECONDS
        rounds, found = 0, set[str]()
        while "QEvictChurnStorm" not in found and time.monotonic() < deadline:
            swing(server, rounds)
            rounds += 1
            found |= _firing(plain)
        fired["swinging"] = found
        time.sleep(3)  # until the last of it is scraped
        server.assert_clean()
        yield Live({"as is": plain, "escaped": escaped}, start, time.time(), fired)


@pytest.fixture(params=["as is", "escaped"])
def store(live: Live, request: pytest.FixtureRequest) -> Prometheus:
    return live.stores[request.param]


def ranged(live: Live, store: Prometheus, expr: str) -> list[Series]:
    """An expression over the whole workload."""
    return store.query_range(expand(expr, rate_seconds=20), live.start, live.end, 1)


def _labels(expr: str) -> set[str]:
    """Labels that the answer to a panel's expression must have."""
    grouped = re.match(r"(?:topk\(\d+, )?(?:sum|max) by \(([^)]*)\)", expr)
    return set(grouped[1].split(", ")) if grouped else set()


@pytest.mark.parametrize("board", sorted(path.name for path in DASHBOARDS.iterdir()))
def test_every_panel_shows_data_of_the_right_labels(
    live: Live, store: Prometheus, board: str
) -> None:
    count = 0
    for panel in read_panels(DASHBOARDS / board):
        for target in panel.targets:
            found = ranged(live, store, target.expr)
            assert found, f"{panel.title}: {target.expr}"
            finite = [s for s in found if any(map(math.isfinite, s.values))]
            assert finite, f"{panel.title} is NaN throughout: {target.expr}"
            for series in found:
                assert set(series.labels) == _labels(target.expr), panel.title
                assert "{{" not in target.name(series.labels), panel.title
            count += 1
    assert count >= 6


def test_models_are_found_for_the_variable(store: Prometheus) -> None:
    found = store.get("label/model_name/values", **{"match[]": "sglang_qevict_build_info"})
    assert len(found) == 1
    model = re.escape(found[0])
    for panel in read_panels(DASHBOARDS / "tiers.json"):
        for target in panel.targets[:1]:
            # As Grafana fills a variable in: a regular expression, in a string.
            assert store.query(expand(target.expr, model.replace("\\", "\\\\"))), panel.title


def _rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.iterdir())]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_every_recording_rule_records(live: Live, store: Prometheus) -> None:
    recorded = [rule for rule in _rules() if "record" in rule]
    assert recorded
    for rule in recorded:
        for found in (ranged(live, store, rule["record"]), ranged(live, store, rule["expr"])):
            assert found, rule
            for series in found:
                assert {"model_name", "tp_rank", "instance"} <= set(series.labels)
                assert not {"le", "kind", "holder", "state", "reason"} & set(series.labels)
            assert any(math.isfinite(v) for series in found for v in series.values), rule


def test_every_alert_compares_what_exists(live: Live, store: Prometheus) -> None:
    alerts = [rule for rule in _rules() if "alert" in rule]
    assert alerts
    for rule in alerts:
        # With `bool` a comparison is 0 or 1 instead of a filter; `and` still joins by labels.
        compared = re.sub(r" (>|==) ", r" \1 bool ", rule["expr"])
        found = ranged(live, store, compared)
        assert found, rule["alert"]
        assert all("model_name" in series.labels for series in found)


def test_a_swinging_workload_raises_the_churn_alert_and_a_calm_one_nothing(live: Live) -> None:
    assert live.alerts["calm"] == set()
    assert "QEvictChurnStorm" in live.alerts["swinging"]


def test_every_metric_of_the_table_is_scraped(live: Live, store: Prometheus) -> None:
    for metric in METRICS.values():
        expected = {label.name for label in metric.labels}
        for name in metric.series:
            found = ranged(live, store, name)
            assert found, name
            for series in found:
                assert expected <= set(series.labels), name
        for label in metric.labels:
            values = {series.labels[label.name] for series in ranged(live, store, metric.series[0])}
            if label.values and metric.name != "sglang_qevict_build_info":
                assert values == set(label.values), metric.name


def test_tenants_are_known_by_routing_key_and_by_label(live: Live, store: Prometheus) -> None:
    found = ranged(live, store, "max by (tenant) (sglang_qevict_tenant_bytes)")
    most = {s.labels["tenant"]: max(s.values) for s in found}
    assert {"default", "red", "blue", *(f"swing-{i}" for i in range(4))} == set(most)
    assert all(value > 0 for value in most.values())


CHECKS = (
    "sglang_qevict_arena_bytes >= 0",
    "sglang_qevict_ledger_ratio < 1",
    "sum without (state) (sglang_qevict_arena_bytes) <= sglang_qevict_kv_bytes",
    "sglang_qevict_stock_capacity_tokens < sglang_qevict_capacity_tokens",
)


@pytest.mark.parametrize("check", CHECKS)
def test_shares_stay_within_their_whole(live: Live, store: Prometheus, check: str) -> None:
    compared = re.sub(r" (>=|<=|<) ", r" \1 bool ", check)
    values = {v for series in ranged(live, store, compared) for v in series.values}
    assert values == {1.0}


def test_dashboards_can_be_drawn(live: Live, tmp_path: Path) -> None:
    for board in sorted(DASHBOARDS.iterdir()):
        out = tmp_path / f"{board.stem}.png"
        render(board, live.stores["as is"], live.start, live.end, out)
        picture = matplotlib.image.imread(out)
        assert picture.shape[1] > 1000
        # Graphs have colours; cards and words alone are grey.
        spread = picture[..., :3].max(-1) - picture[..., :3].min(-1)
        assert (spread > 0.3).mean() > 0.01
