"""Every metric of tiering: the table from which the exporter, the docs page and the tests are made.

Names begin with ``PREFIX``. Each series also has the labels that SGLang gives to those of its
scheduler (``SGLANG_LABELS``), so that the two can be joined. A *window* is one of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["METRICS", "PREFIX", "SGLANG_LABELS", "Kind", "Label", "Metric"]

PREFIX = "sglang_qevict_"

SGLANG_LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank")
"""Of SGLang's scheduler metrics; ``dp_rank`` only with data parallelism."""


class Kind(Enum):
    """Prometheus' types."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Label:
    """A label of a metric. values: all that it may have, or () where they are not known before."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One metric.

    name: as Prometheus has it. unit: of its values. buckets: upper bounds, of a histogram.
    optional: whether it has series only where what it tells of is switched on.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[Label, ...]
    help: str
    buckets: tuple[float, ...] = ()
    optional: bool = False

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in the exposition."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))


METRICS: dict[str, Metric] = {}
"""All metrics by name, in the order of the docs."""

_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)

_SEEN = Label("tier", ("full", "coded", "evicted"))
_HELD = Label("tier", ("full", "coded"))
_PHASE = Label("phase", ("decode", "prefill"))
TENANT = Label("tenant")


def _metric(
    kind: Kind,
    name: str,
    unit: str,
    help: str,
    *labels: Label,
    buckets: tuple[float, ...] = (),
    optional: bool = False,
) -> Metric:
    suffix = "_total" if kind is Kind.COUNTER else ""
    metric = Metric(f"{PREFIX}{name}{suffix}", kind, unit, labels, help, buckets, optional)
    METRICS[metric.name] = metric
    return metric


def _gauge(name: str, unit: str, help: str, *labels: Label, optional: bool = False) -> Metric:
    return _metric(Kind.GAUGE, name, unit, help, *labels, optional=optional)


def _counter(name: str, unit: str, help: str, *labels: Label, optional: bool = False) -> Metric:
    return _metric(Kind.COUNTER, name, unit, help, *labels, optional=optional)


def _histogram(name: str, unit: str, help: str, buckets: tuple[float, ...]) -> Metric:
    return _metric(Kind.HISTOGRAM, name, unit, help, buckets=buckets)


BUILD_INFO = _gauge(
    "build_info",
    "1",
    "Version of sglang-qevict and of SGLang, and the options that matter most; always 1.",
    Label("version"),
    Label("sglang_version"),
    Label("preset"),
    Label("budget"),
    Label("promote", ("alias", "dequantize", "restore")),
)

# -- what requests see, and where it lies ---------------------------------------------------

LOGICAL_WINDOWS = _gauge(
    "logical_windows",
    "windows",
    "Windows that running requests see by tier, over all layers. A window that several requests "
    "share is counted for each.",
    _SEEN,
)
LOGICAL_BYTES = _gauge(
    "logical_bytes",
    "bytes",
    "Bytes of the windows that running requests see, each counted for every request that sees it.",
    _HELD,
)
PHYSICAL_WINDOWS = _gauge(
    "physical_windows",
    "windows",
    "Copies in the arena, each counted once, those that are kept for reuse and shadow codes among "
    "them.",
    _HELD,
)
PHYSICAL_BYTES = _gauge("physical_bytes", "bytes", "Bytes of the copies in the arena.", _HELD)
CONTEXT_BYTES = _gauge(
    "context_bytes",
    "bytes",
    "What the contexts of running requests would take if every window were FULL.",
)
COMPRESSION_RATIO = _gauge(
    "compression_ratio",
    "ratio",
    "Context bytes over logical bytes: how many times less running requests take than at full "
    "precision. NaN while none runs.",
)

# -- memory ---------------------------------------------------------------------------------

KV_BYTES = _gauge(
    "kv_bytes",
    "bytes",
    "All that SGLang gave to the KV cache: the arena, tables, and buffers for the longer token "
    "range.",
)
ARENA_BYTES = _gauge(
    "arena_bytes",
    "bytes",
    "The arena, where windows lie: used by running requests, reclaimable (kept for reuse by "
    "requests to come, evicted when room is needed), free.",
    Label("state", ("used", "reclaimable", "free")),
)
CLAIMED_BYTES = _gauge(
    "claimed_bytes",
    "bytes",
    "Arena bytes that are spoken for: what running requests may come to need through their next "
    "routing, and what is kept for reuse.",
    Label("holder", ("requests", "reuse")),
)
LEDGER_BYTES = _gauge(
    "ledger_bytes",
    "bytes",
    "The ledger by kind: codes, parameters (scales and zeros), alignment of records, shadow (codes "
    "kept beside a FULL copy), reuse (copies that no running request sees), tables (where windows "
    "lie and what requests see of them).",
    Label("kind", ("codes", "parameters", "alignment", "shadow", "reuse", "tables")),
)
LEDGER_RATIO = _gauge(
    "ledger_ratio",
    "ratio",
    "Share of all KV bytes that the ledger takes, but for what is kept for reuse.",
)
CAPACITY_TOKENS = _gauge(
    "capacity_tokens", "tokens", "Tokens of context that may be scheduled in all."
)
STOCK_CAPACITY_TOKENS = _gauge(
    "stock_capacity_tokens", "tokens", "Tokens that the same bytes would hold without tiers."
)
REQUESTS = _gauge("requests", "requests", "Requests that hold a claim.")
REUSE_PAGES = _gauge(
    "reuse_pages", "pages", "Pages of finished requests that are kept for requests to come."
)

# -- what routing does ----------------------------------------------------------------------

ROUTINGS = _counter(
    "routings", "events", "Routing events, one for each request and all layers together."
)
ROUTED_WINDOWS = _counter("routed_windows", "windows", "Windows that were ranked.")
RANK_PROMOTIONS = _counter(
    "rank_promotions",
    "windows",
    "Windows that rose among those for which FULL has room, whether they got a FULL copy or not.",
)
PHYSICAL_PROMOTIONS = _counter(
    "physical_promotions",
    "windows",
    "FULL copies that coded windows got back: rebuilt from the codes, or with --kv-tiering-promote "
    "restore their originals (never with alias).",
)
DEMOTIONS = _counter("demotions", "windows", "FULL windows that became coded.")
EVICTIONS = _counter("evictions", "windows", "Windows that were evicted, by tier left.", _HELD)
QUANTIZATIONS = _counter("quantizations", "windows", "Windows whose codes were made.")
REUSE_QUANTIZATIONS = _counter(
    "reuse_quantizations",
    "windows",
    "Those of them that were coded for requests to come only: no running request saw the codes.",
)
CODE_REUSES = _counter("code_reuses", "windows", "Demotions that found codes from before.")
NON_FINITE_WINDOWS = _counter(
    "non_finite_windows",
    "windows",
    "Windows that were evicted because they hold NaN, infinity or a range that no code has.",
)
CHURN = _histogram(
    "selection_churn_ratio",
    "ratio",
    "Selection churn: Jaccard distance of what a request keeps (FULL or coded) after two "
    "consecutive routing events, one observation a layer.",
    _RATIOS,
)
LIR = _histogram(
    "lir_ratio",
    "ratio",
    "LIR: share of the windows that rank FULL at a routing event which have come back to it, one "
    "observation a layer.",
    _RATIOS,
)

# -- time -----------------------------------------------------------------------------------

ROUTING_SECONDS = _counter(
    "routing_seconds",
    "seconds",
    "Time of routing events (on a GPU between two points of its stream).",
)
SAMPLED_LAUNCHES = _counter(
    "sampled_launches",
    "launches",
    "Launches whose attention was measured: of those that decode one in sixteen, of those that "
    "prefill one in four, and none that a CUDA graph replays.",
    _PHASE,
)
SAMPLED_ATTENTION_SECONDS = _counter(
    "sampled_attention_seconds",
    "seconds",
    "Time that attention took in the sampled launches, all layers together.",
    _PHASE,
)
SAMPLED_READ_BYTES = _counter(
    "sampled_read_bytes",
    "bytes",
    "KV bytes that attention read in the sampled decode launches, by tier.",
    _HELD,
)

# -- requests -------------------------------------------------------------------------------

PREFILLS = _counter(
    "prefills",
    "requests",
    "Prompts by how they are routed: whole (once, after their last token), segments (while they "
    "are prefilled), never (too short).",
    Label("routing", ("whole", "segments", "never")),
)
PREFIX_CUTS = _counter(
    "prefix_cuts",
    "requests",
    "Requests that could not use all of the prefix that was found: short_prompt (a prompt of at "
    "most --kv-tiering-min-context uses FULL pages only), room (it could not have grown beside so "
    "long a locked prefix).",
    Label("reason", ("short_prompt", "room")),
)
PREFIX_CUT_TOKENS = _counter(
    "prefix_cut_tokens",
    "tokens",
    "Tokens of a found prefix that were computed again, by the same reasons.",
    Label("reason", ("short_prompt", "room")),
)
REUSE_PAGES_DROPPED = _counter(
    "reuse_pages_dropped", "pages", "Pages kept for reuse that were given up, to make room."
)
ADMISSION_WAITS = _counter(
    "admission_waits",
    "passes",
    "Scheduling passes that left a request waiting: pages (no logical tokens left), bytes (its "
    "prefill does not fit now), growth (all would not fit once they have grown), chunk (it needs "
    "a whole chunk, or another prompt is in progress), cap (its tenant would hold more than it "
    "may), floors (what is free is kept for other tenants).",
    Label("reason", ("pages", "bytes", "growth", "chunk", "cap", "floors")),
)
RETRACTIONS = _counter(
    "retractions",
    "requests",
    "Running requests that were sent back to the queue: pages, or bytes, had run out.",
    Label("reason", ("pages", "bytes")),
)

# -- tenants --------------------------------------------------------------------------------

TENANT_REQUESTS = _gauge(
    "tenant_requests", "requests", "Requests of a tenant that hold a claim.", TENANT
)
TENANT_BYTES = _gauge(
    "tenant_bytes",
    "bytes",
    "Logical bytes of a tenant's running requests by tier.",
    TENANT,
    _HELD,
)
TENANT_CHURN = _counter(
    "tenant_churn",
    "ratio",
    "Sum of a tenant's selection churn; divided by its observations: the mean.",
    TENANT,
)
TENANT_CHURN_OBSERVATIONS = _counter(
    "tenant_churn_observations",
    "observations",
    "How often a tenant's selection churn was observed: once an event and layer.",
    TENANT,
)

# -- the SSD tier ---------------------------------------------------------------------------

_PLACE = Label("state", ("stored", "queued"))
_RECALL = Label(
    "outcome",
    (
        *("recalled", "not_worth_it", "late", "damaged", "foreign", "gone", "failed", "no_room"),
        "other_rank",
    ),
)


def _spill_gauge(name: str, unit: str, help: str, *labels: Label) -> Metric:
    return _gauge(f"spill_{name}", unit, help, *labels, optional=True)


def _spill_counter(name: str, unit: str, help: str, *labels: Label) -> Metric:
    return _counter(f"spill_{name}", unit, help, *labels, optional=True)


SPILL_RECORDS = _spill_gauge(
    "records",
    "records",
    "Windows of the SSD tier, each a record of all its layers: stored (NaN where a storage backend "
    "can't say), queued (waiting in memory to be written).",
    _PLACE,
)
SPILL_BYTES = _spill_gauge("bytes", "bytes", "Bytes of these records.", _PLACE)
SPILL_FILE_BYTES = _spill_gauge(
    "file_bytes",
    "bytes",
    "What the SSD tier's file takes on its disk, free space inside included (NaN for a storage "
    "backend).",
)
SPILL_WRITTEN_RECORDS = _spill_counter("written_records", "records", "Records that were written.")
SPILL_WRITTEN_BYTES = _spill_counter("written_bytes", "bytes", "Bytes of the written records.")
SPILL_MEDIUM_WRITTEN_BYTES = _spill_counter(
    "medium_written_bytes",
    "bytes",
    "All bytes that were written: with headers, padding, indexes, and records that moved since "
    "they had been read. Over the bytes of the written records: the write amplification.",
)
SPILL_WRITE_SECONDS = _spill_counter(
    "write_seconds", "seconds", "Time that the writer's thread spent writing."
)
SPILL_DROPPED_RECORDS = _spill_counter(
    "dropped_records",
    "records",
    "Records that were not written: queue_full (the disk is slower than windows come), disk_full, "
    "write_error, too_large (for a segment, or the queue), closed (they waited when the server "
    "ended).",
    Label("reason", ("queue_full", "disk_full", "write_error", "too_large", "closed")),
)
SPILL_EVICTED_RECORDS = _spill_counter(
    "evicted_records", "records", "Records that made room for newer ones."
)
SPILL_READ_RECORDS = _spill_counter(
    "read_records",
    "records",
    "Records that were asked for, by how the read ended: hit, miss, corrupt (a wrong checksum), "
    "error, late (not begun in time), busy (too many reads under way), wrong_size.",
    Label("result", ("hit", "miss", "corrupt", "error", "late", "busy", "wrong_size")),
)
SPILL_READ_BYTES = _spill_counter("read_bytes", "bytes", "Bytes of the records that were hits.")
SPILL_READ_SECONDS = _spill_counter(
    "read_seconds", "seconds", "Time that the readers' threads spent reading, all together."
)
SPILL_RECALLS = _spill_counter(
    "recalls",
    "requests",
    "Requests whose beginning was in the SSD tier: recalled, or computed again since reading would "
    "have taken longer (not_worth_it), was not done in time (late), found a damaged record or one "
    "of another size (foreign), one that had made room since it was found (gone), failed, found no "
    "pages (no_room), or since another rank could not (other_rank).",
    _RECALL,
)
SPILL_RECALL_RECORDS = _spill_counter(
    "recall_records", "records", "Records of these requests, by the same outcomes.", _RECALL
)
SPILL_RECALLED_BYTES = _spill_counter(
    "recalled_bytes", "bytes", "Bytes of the records that were recalled."
)
SPILL_RECALL_SECONDS = _spill_counter(
    "recall_seconds", "seconds", "Time for which admission waited for the reads of recalls."
)
SPILL_PREFETCHED_RECORDS = _spill_counter(
    "prefetched_records",
    "records",
    "Records that were read since their window came near the FULL tier (--kv-tiering-promote "
    "restore; sglang_qevict_physical_promotions_total counts the windows that got them back).",
)
SPILL_LATE_RECORDS = _spill_counter(
    "late_records",
    "records",
    "Prefetched records that were still being read at a routing event, so that their windows "
    "stayed coded.",
)
SPILL_ERRORS = _spill_counter(
    "errors",
    "errors",
    "What went wrong with records: read and write (the disk, or the backend, failed), damaged (a "
    "wrong checksum), lost (gone with a file that was removed), reclaim (their deletion could not "
    "be written down).",
    Label("kind", ("read", "write", "damaged", "lost", "reclaim")),
)
SPILL_RECOVERED_RECORDS = _spill_counter(
    "recovered_records", "records", "Records of an earlier server that were found at the start."
)
SPILL_REJECTED = _spill_counter(
    "rejected",
    "parts",
    "What was found at the start and not used: torn, damaged or foreign records and segments, and "
    "files of another model or version.",
    Label("part", ("record", "segment", "file")),
)
