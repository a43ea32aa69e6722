"""Prometheus' HTTP API, and what a dashboard asks of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

__all__ = ["Panel", "Prometheus", "Series", "Target", "expand", "read_panels"]


class Series(NamedTuple):
    """One series of an answer: its labels, times in seconds, and values (NaN among them)."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class Target(NamedTuple):
    """One query of a panel."""

    expr: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """The legend of a series with these labels."""
        text = self.legend
        for label, value in labels.items():
            text = text.replace(f"{{{{{label}}}}}", value)
        return text


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard's file. x, y, width, height: on Grafana's grid of 24 columns."""

    title: str
    kind: str
    unit: str
    stacked: bool
    x: int
    y: int
    width: int
    height: int
    targets: tuple[Target, ...]
    colors: dict[str, str]


class Prometheus:
    """A server at ``url``. Raises ``RuntimeError`` with its reason for what it can't evaluate."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)

    def get(self, path: str, **params: Any) -> Any:
        """The ``data`` of an answer."""
        answer = self._client.get(f"/api/v1/{path}", params=params).json()
        if answer["status"] != "success":
            raise RuntimeError(f"{answer['error']}: {params}")
        return answer["data"]

    def query(self, expr: str) -> list[Series]:
        """An expression now."""
        return [
            Series(x["metric"], [x["value"][0]], [float(x["value"][1])])
            for x in self.get("query", query=expr)["result"]
        ]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """An expression from one time (seconds since the epoch) to another."""
        data = self.get("query_range", query=expr, start=start, end=end, step=step)
        return [
            Series(x["metric"], [t for t, _ in x["values"]], [float(v) for _, v in x["values"]])
            for x in data["result"]
        ]


def expand(expr: str, model: str = ".*", rate_seconds: int = 60) -> str:
    """An expression with Grafana's variables filled in."""
    return expr.replace("$model", model).replace("$__rate_interval", f"{rate_seconds}s")


def read_panels(path: Path) -> Iterator[Panel]:
    """The panels of a dashboard's file, rows among them (without targets)."""
    for panel in json.loads(path.read_text())["panels"]:
        config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
        place = panel["gridPos"]
        yield Panel(
            panel["title"],
            panel["type"],
            config["defaults"].get("unit", "none"),
            "stacking" in config["defaults"].get("custom", {}),
            place["x"],
            place["y"],
            place["w"],
            place["h"],
            tuple(Target(x["expr"], x["legendFormat"]) for x in panel.get("targets", ())),
            {
                override["matcher"]["options"]: prop["value"]["fixedColor"]
                for override in config["overrides"]
                for prop in override["properties"]
                if prop["id"] == "color"
            },
        )
