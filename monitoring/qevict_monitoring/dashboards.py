"""The two Grafana dashboards, made with Grafana's own SDK.

``python -m qevict_monitoring.dashboards FOLDER`` writes them as JSON. Datasource and model are
variables. Prometheus may have stored SGLang's own names with their colon or, escaped, with an
underscore: ``_sglang`` selects either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    VariableRefresh,
    VariableSort,
)

__all__ = ["COLORS", "DASHBOARDS", "Query", "to_json"]

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_MODEL = 'model_name=~"$model"'

COLORS = {
    "FULL": "#5794F2",
    "coded": "#73BF69",
    "evicted": "#8E8E9C",
    "used": "#5794F2",
    "reclaimable": "#B877D9",
    "free": "#3A3F4B",
    "codes": "#73BF69",
    "parameters": "#FADE2A",
    "alignment": "#FF9830",
    "shadow": "#F2495C",
    "reuse": "#B877D9",
    "tables": "#8AB8FF",
    "demoted": "#73BF69",
    "evicted from FULL": "#F2495C",
    "evicted from coded": "#8E8E9C",
    "promoted by rank": "#FADE2A",
    "promoted physically": "#5794F2",
    "stored": "#B877D9",
    "waiting to be written": "#FF9830",
    "written": "#B877D9",
    "read": "#5794F2",
}
"""What a series looks like on every panel that shows it, by its legend."""


@dataclass(frozen=True)
class Query:
    """One expression; ``legend``: as Grafana writes it, ``{{label}}`` replaced."""

    expr: str
    legend: str


def _ours(name: str, labels: str = "") -> str:
    return f"sglang_qevict_{name}{{{_MODEL}{labels}}}"


def _sglang(name: str) -> str:
    return f'{{__name__=~"sglang[:_]{name}", {_MODEL}}}'


def _rate(selector: str, by: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({selector}[$__rate_interval]))"


def _mean(histogram: str) -> str:
    return f"{_rate(_ours(f'{histogram}_sum'))} / {_rate(_ours(f'{histogram}_count'))}"


def _quantile(q: float, buckets: str) -> str:
    return f"histogram_quantile({q:g}, {_rate(buckets, 'le')})"


def _total(name: str, by: str = "", labels: str = "") -> str:
    total = f"sum by ({by})" if by else "sum"
    return f"{total} ({_ours(name, labels)})"


def _by_value(name: str, label: str, *values: str) -> Iterator[Query]:
    """A query for each value of a label, so that they are stacked in this order."""
    for value in values:
        yield Query(_total(name, labels=f', {label}="{value}"'), value)


def _targets(panel: Any, queries: tuple[Query, ...]) -> Any:
    for index, query in enumerate(queries):
        panel.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + index))
        )
        if query.legend in COLORS:
            color = {"mode": "fixed", "fixedColor": COLORS[query.legend]}
            panel.override_by_name(query.legend, [DynamicConfigValue("color", color)])
    return panel


def _graph(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 12,
    stacked: bool = False,
) -> Any:
    """A graph over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .min(0)
        .line_width(1.5)
        .fill_opacity(70 if stacked else 8)
        .gradient_mode(GraphGradientMode.NONE if stacked else GraphGradientMode.OPACITY)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return _targets(panel, queries)


def _number(title: str, description: str, unit: str, query: Query) -> Any:
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .graph_mode(BigValueGraphMode.AREA)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("#5794F2"))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return _targets(panel, (query,))


def _bars(title: str, description: str, unit: str, query: Query) -> Any:
    panel = (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .span(12)
        .height(8)
        .min(0)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return _targets(panel, (query,))


def _dashboard(uid: str, title: str, description: str) -> Any:
    model = (
        dashboard.QueryVariable("model")
        .label("Model")
        .datasource(_SOURCE)
        .query("label_values(sglang_qevict_build_info, model_name)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["sglang", "sglang-qevict"])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
        )
        .with_variable(model)
    )


def _tiers() -> Any:
    board = _dashboard(
        "sglang-qevict-tiers",
        "SGLang KV tiers",
        "Where the KV cache lies, what moves, what it costs, and how fast the server is.",
    )
    by_requests = _total("claimed_bytes", labels=', holder="requests"')
    claimed = f"{by_requests} / {_total('arena_bytes')}"
    board.with_panel(
        _number(
            "Compression",
            "How many times less running requests take than at full precision.",
            "x",
            Query(f"{_total('context_bytes')} / {_total('logical_bytes')}", "compression"),
        )
    ).with_panel(
        _number(
            "Claimed",
            "Share of the arena that running requests may come to need.",
            "percentunit",
            Query(claimed, "claimed"),
        )
    ).with_panel(
        _number(
            "Ledger",
            "Share of the KV bytes that codes, their parameters, shadows and tables take.",
            "percentunit",
            Query(f"avg ({_ours('ledger_ratio')})", "ledger"),
        )
    ).with_panel(
        _number(
            "Churn",
            "Mean share of what a request keeps that a routing event changes.",
            "percentunit",
            Query(_mean("selection_churn_ratio"), "churn"),
        )
    ).with_panel(
        _number(
            "Requests",
            "Running requests.",
            "none",
            Query(f"sum (max by (instance, dp_rank) ({_ours('requests')}))", "running"),
        )
    ).with_panel(
        _number(
            "Throughput",
            "Generated tokens a second, as SGLang counts them.",
            "none",
            Query(f"sum ({_sglang('gen_throughput')})", "tokens/s"),
        )
    )
    board.with_row(dashboard.Row("Occupancy"))
    board.with_panel(
        _graph(
            "Windows by tier",
            "Windows that running requests see, over all layers (and all ranks).",
            "short",
            Query(_total("logical_windows", labels=', tier="full"'), "FULL"),
            Query(_total("logical_windows", labels=', tier="coded"'), "coded"),
            Query(_total("logical_windows", labels=', tier="evicted"'), "evicted"),
            stacked=True,
        )
    ).with_panel(
        _graph(
            "Arena",
            "Where windows lie: used by running requests, reclaimable (kept for requests to "
            "come), free.",
            "bytes",
            *_by_value("arena_bytes", "state", "used", "reclaimable", "free"),
            stacked=True,
        )
    )
    board.with_row(dashboard.Row("Ledger"))
    board.with_panel(
        _graph(
            "Ledger by kind",
            "Bytes of codes, of what decodes them, of copies that no running request sees, and "
            "of tables.",
            "bytes",
            *_by_value(
                "ledger_bytes",
                "kind",
                *("tables", "codes", "parameters", "alignment", "shadow", "reuse"),
            ),
            stacked=True,
        )
    ).with_panel(
        _graph(
            "KV bytes of running requests",
            "What they take by tier, beside what their contexts would take at full precision.",
            "bytes",
            Query(_total("logical_bytes", labels=', tier="full"'), "FULL"),
            Query(_total("logical_bytes", labels=', tier="coded"'), "coded"),
            Query(_total("context_bytes"), "at full precision"),
        )
    )
    board.with_row(dashboard.Row("Movement"))
    board.with_panel(
        _graph(
            "Promotions, demotions, evictions",
            "Windows a second that change their tier. A rank promotion is a window that rises "
            "among those for which FULL has room; a physical one gets its FULL copy.",
            "wps",
            Query(_rate(_ours("demotions_total")), "demoted"),
            Query(_rate(_ours("evictions_total", ', tier="full"')), "evicted from FULL"),
            Query(_rate(_ours("evictions_total", ', tier="coded"')), "evicted from coded"),
            Query(_rate(_ours("rank_promotions_total")), "promoted by rank"),
            Query(_rate(_ours("physical_promotions_total")), "promoted physically"),
        )
    ).with_panel(
        _graph(
            "Churn and LIR",
            "Churn: how much of what a request keeps changes at a routing event. LIR: share of "
            "the windows that rank FULL which have come back to it.",
            "percentunit",
            Query(_mean("selection_churn_ratio"), "churn, mean"),
            Query(_quantile(0.95, _ours("selection_churn_ratio_bucket")), "churn, p95"),
            Query(_mean("lir_ratio"), "LIR, mean"),
            Query(_quantile(0.95, _ours("lir_ratio_bucket")), "LIR, p95"),
        )
    )
    board.with_row(dashboard.Row("Speed"))
    for title, name in (
        ("Time to first token", "time_to_first_token_seconds_bucket"),
        ("Time per output token", "inter_token_latency_seconds_bucket"),
    ):
        board.with_panel(
            _graph(
                title,
                "As SGLang measures it.",
                "s",
                Query(_quantile(0.5, _sglang(name)), "p50"),
                Query(_quantile(0.95, _sglang(name)), "p95"),
                span=8,
            )
        )
    board.with_panel(
        _graph(
            "Throughput",
            "Tokens a second, as SGLang counts them.",
            "none",
            Query(_rate(_sglang("generation_tokens_total")), "generated"),
            Query(_rate(_sglang("prompt_tokens_total")), "prompts"),
            span=8,
        )
    )
    board.with_row(dashboard.Row("Cost of attention and routing"))
    decode = ', phase="decode"'
    launches = _rate(_ours("sampled_launches_total", decode))
    seconds = _rate(_ours("sampled_attention_seconds_total"), "phase")
    board.with_panel(
        _graph(
            "Attention of a launch",
            "Mean time of attention in all layers, of the launches that are sampled.",
            "s",
            Query(f"{seconds} / {_rate(_ours('sampled_launches_total'), 'phase')}", "{{phase}}"),
            span=8,
        )
    ).with_panel(
        _graph(
            "KV bytes that a decode step reads",
            "By tier, of the launches that are sampled.",
            "bytes",
            *(
                Query(f"{_rate(_ours('sampled_read_bytes_total', tier))} / {launches}", legend)
                for tier, legend in ((', tier="full"', "FULL"), (', tier="coded"', "coded"))
            ),
            span=8,
            stacked=True,
        )
    ).with_panel(
        _graph(
            "Time in routing",
            "Share of time that routing events take.",
            "percentunit",
            Query(f"avg (rate({_ours('routing_seconds_total')}[$__rate_interval]))", "routing"),
            span=8,
        )
    )
    board.with_row(dashboard.Row("Admission and reuse"))
    for title, description, unit, name, label in (
        ("Waits", "Scheduling passes a second that leave a request waiting.", "ops",
         "admission_waits_total", "reason"),
        ("Retractions", "Running requests a second that go back to the queue.", "reqps",
         "retractions_total", "reason"),
        ("Prompts", "Requests a second by how their prompt is routed.", "reqps",
         "prefills_total", "routing"),
        ("Prefixes cut short", "Requests a second that reuse less than was found.", "reqps",
         "prefix_cuts_total", "reason"),
    ):  # fmt: skip
        query = Query(_rate(_ours(name), label), f"{{{{{label}}}}}")
        board.with_panel(_graph(title, description, unit, query, span=6))
    _add_ssd_tier(board)
    return board


def _add_ssd_tier(board: Any) -> None:
    """A row that is empty for servers without an SSD tier."""
    board.with_row(dashboard.Row("SSD tier"))
    written, read = (_rate(_ours(f"spill_{what}_bytes_total")) for what in ("written", "read"))
    board.with_panel(
        _graph(
            "SSD tier",
            "Originals on the disk, those that wait in memory to be written, and what the file "
            "takes, free space inside included.",
            "bytes",
            Query(_total("spill_bytes", labels=', state="stored"'), "stored"),
            Query(_total("spill_bytes", labels=', state="queued"'), "waiting to be written"),
            Query(_total("spill_file_bytes"), "file"),
            span=8,
        )
    ).with_panel(
        _graph(
            "Writes and reads",
            "Bytes of originals a second.",
            "binBps",
            Query(written, "written"),
            Query(read, "read"),
            span=8,
        )
    ).with_panel(
        _graph(
            "Bandwidth at work",
            "Bytes of originals for each second that a thread spent writing or reading them.",
            "binBps",
            Query(f"{written} / {_rate(_ours('spill_write_seconds_total'))}", "written"),
            Query(f"{read} / {_rate(_ours('spill_read_seconds_total'))}", "read"),
            span=8,
        )
    ).with_panel(
        _graph(
            "Requests whose beginning is in the SSD tier",
            "Requests a second, of all ranks together, by what became of them: recalled, or why "
            "they were computed again.",
            "reqps",
            Query(_rate(_ours("spill_recalls_total"), "outcome"), "{{outcome}}"),
        )
    ).with_panel(
        _graph(
            "Dropped originals and errors",
            "Windows a second that were not written, by reason, and errors by kind.",
            "wps",
            Query(_rate(_ours("spill_dropped_records_total"), "reason"), "dropped: {{reason}}"),
            Query(_rate(_ours("spill_errors_total"), "kind"), "error: {{kind}}"),
        )
    )


def _tenants() -> Any:
    board = _dashboard(
        "sglang-qevict-tenants",
        "SGLang KV tiers by tenant",
        "Who holds the KV cache, and whose attention wanders. A tenant is SGLang's routing key, "
        "else an allowed custom label, else default.",
    )
    churn = f"{_rate(_ours('tenant_churn_total'), 'tenant')} / " + _rate(
        _ours("tenant_churn_observations_total"), "tenant"
    )
    # Ranks of tensor parallelism serve the same requests.
    tenant_requests = f"max by (tenant, instance, dp_rank) ({_ours('tenant_requests')})"
    held = _total("tenant_bytes", "tenant")
    full = _total("tenant_bytes", "tenant", ', tier="full"')
    board.with_panel(
        _graph(
            "KV bytes by tenant",
            "Logical bytes of running requests.",
            "bytes",
            Query(held, "{{tenant}}"),
            stacked=True,
        )
    ).with_panel(
        _graph(
            "Running requests by tenant",
            "Requests that hold a claim.",
            "none",
            Query(f"sum by (tenant) ({tenant_requests})", "{{tenant}}"),
            stacked=True,
        )
    ).with_panel(
        _graph(
            "Churn by tenant",
            "Mean share of what a request keeps that a routing event changes.",
            "percentunit",
            Query(churn, "{{tenant}}"),
        )
    ).with_panel(
        _graph(
            "FULL share by tenant",
            "Share of a tenant's KV bytes that are at full precision.",
            "percentunit",
            Query(f"{full} / {held}", "{{tenant}}"),
        )
    ).with_panel(
        _bars(
            "Largest tenants",
            "KV bytes of the ten that hold most.",
            "bytes",
            Query(f"topk(10, {held})", "{{tenant}}"),
        )
    ).with_panel(
        _bars(
            "Most restless tenants",
            "Mean churn of the ten that have most.",
            "percentunit",
            Query(f"topk(10, {churn})", "{{tenant}}"),
        )
    )
    return board


DASHBOARDS: dict[str, Callable[[], Any]] = {"tiers.json": _tiers, "tenants.json": _tenants}
"""How each file is made."""


def to_json(name: str) -> str:
    """The text of a dashboard's file."""
    built = DASHBOARDS[name]().build()
    for number, panel in enumerate(built.panels, 1):
        panel.id = number
    return JSONEncoder(sort_keys=True, indent=2).encode(built) + "\n"


def main() -> None:
    """Write all dashboards to the folder that is named."""
    for name in DASHBOARDS:
        Path(sys.argv[1], name).write_text(to_json(name))


if __name__ == "__main__":
    main()
