"""Dashboards, rules, and what brings servers up: each file against what it must agree with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang.srt.observability import metrics_collector

from monitoring.live import DASHBOARDS, ROOT, RULES
from qevict_monitoring.prometheus import read_panels
from qevict_monitoring.table import METRICS, SGLANG_LABELS

REPOSITORY = ROOT.parent
SERIES = {name for metric in METRICS.values() for name in metric.series}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (make test-monitoring)"
)


def _rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.iterdir())]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def _expressions() -> Iterator[str]:
    for path in sorted(DASHBOARDS.iterdir()):
        for panel in read_panels(path):
            yield from (target.expr for target in panel.targets)
    yield from (rule["expr"] for rule in _rules())


def test_dashboards_are_what_the_sdk_makes() -> None:
    dashboards = pytest.importorskip("qevict_monitoring.dashboards")
    assert {path.name for path in DASHBOARDS.iterdir()} == set(dashboards.DASHBOARDS)
    for name in dashboards.DASHBOARDS:
        assert (DASHBOARDS / name).read_text() == dashboards.to_json(name), (
            f"{name}: run python -m qevict_monitoring.dashboards {DASHBOARDS}"
        )


def test_every_name_in_an_expression_exists() -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    sglangs = Path(metrics_collector.__file__).read_text()
    found: set[str] = set()
    for expr in _expressions():
        for name in re.findall(r"\bsglang_qevict[a-z0-9_:]+", expr):
            assert name in SERIES or name in recorded, name
            found.add(name)
        for name in re.findall(r"sglang\[:_\]([a-z0-9_]+)", expr):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert f'name="sglang:{base}"' in sglangs, name
    assert recorded - found <= {"sglang_qevict:ledger_overhead:ratio"}


def test_every_label_in_an_expression_exists() -> None:
    allowed = {label.name: label.values for m in METRICS.values() for label in m.labels}
    several = {m.name: {label.name: label.values for label in m.labels} for m in METRICS.values()}
    for expr in _expressions():
        for name, selector in re.findall(r"(sglang_qevict_[a-z0-9_]+)\{([^}]*)\}", expr):
            metric = re.sub(r"_(bucket|sum|count)$", "", name)
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
                if label in SGLANG_LABELS:
                    continue
                known = several[name if name in several else metric][label]
                assert set(values.split("|")) <= set(known), expr
        for labels in re.findall(r"(?:by|without) \(([^)]*)\)", expr):
            for label in labels.split(", "):
                assert label in {*allowed, *SGLANG_LABELS, "le", "instance"}, expr


def test_panels_choose_by_model_and_by_datasource() -> None:
    for path in DASHBOARDS.iterdir():
        board = json.loads(path.read_text())
        names = [variable["name"] for variable in board["templating"]["list"]]
        assert names == ["datasource", "model"]
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                assert panel["datasource"]["uid"] == "${datasource}"
                selectors = re.findall(r"\{[^}]*\}", target["expr"])
                assert selectors
                assert all('model_name=~"$model"' in selector for selector in selectors)


def test_each_alert_is_explained_and_has_a_remedy() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    alerts = [rule for rule in _rules() if "alert" in rule]
    assert len(alerts) == 7
    for rule in alerts:
        assert f"`{rule['alert']}`" in page
        assert set(rule["annotations"]) == {"summary", "description"}


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules/recording.yml", "rules/alerts.yml"),
        ("test", "rules", "tests/rules_test.yml"),
    ],
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    folder = ROOT / "prometheus"
    done = subprocess.run(
        ["promtool", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_that_makes_it_fire_and_one_that_does_not() -> None:
    tests = yaml.safe_load((ROOT / "prometheus" / "tests" / "rules_test.yml").read_text())
    fired, silent = set(), set()
    for test in tests["tests"]:
        for case in test.get("alert_rule_test", ()):
            (fired if case.get("exp_alerts") else silent).add(case["alertname"])
    expected = {rule["alert"] for rule in _rules() if "alert" in rule}
    assert fired == silent == expected


def test_the_gpu_file_changes_the_server_only() -> None:
    more = yaml.safe_load((REPOSITORY / "docker-compose.gpu.yml").read_text())
    assert set(more) == {"services"}
    assert set(more["services"]) == {"server"}


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    return loaded


def test_compose_mounts_files_that_exist_and_builds_targets_that_exist() -> None:
    compose = _compose()
    assert set(compose["services"]) == {"server", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            # A directory of the user's has a default here.
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            if source == "./models":
                assert volume.endswith(":ro")
            elif source.startswith("."):
                assert (REPOSITORY / source).exists(), source
            else:
                assert source in compose["volumes"]
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    assert {"cpu", "gpu"} <= targets
    assert compose["services"]["server"]["build"]["target"].startswith("${TARGET:-cpu}")
    for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (REPOSITORY / source).exists(), source


def test_grafana_finds_the_prometheus_and_the_dashboards_of_compose() -> None:
    provisioning = ROOT / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    boards = yaml.safe_load((provisioning / "dashboards" / "dashboards.yml").read_text())
    services = _compose()["services"]
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    folder = boards["providers"][0]["options"]["path"]
    mounts = dict(v.split(":")[:2][::-1] for v in services["grafana"]["volumes"])
    assert mounts[folder] == "./monitoring/grafana/dashboards"
    assert "/etc/grafana/provisioning" in mounts
    scraped = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert f"--port {port}" in services[host]["command"]


def _has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return (
        shutil.which("docker") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not _has_compose(), reason="docker compose is not installed")
@pytest.mark.parametrize("more", [[], ["-f", "docker-compose.gpu.yml"]])
def test_docker_compose_accepts_the_files(more: list[str]) -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", "docker-compose.yml", *more, "config", "--quiet"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
