"""Tiering's metrics on SGLang's own ``/metrics``: an observer, and when its numbers are exported.

What happens on the host is counted as it happens. What only the device knows (windows by tier,
churn, LIR) is gathered there, and read at most once a second, without a wait, at a launch; and when
the scheduler idles. The SSD tier's threads work on when it does, so what they count is exported
until they rest, too. SGLang's processes share their values through files, so every rank exports,
under its own labels.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from time import monotonic
from typing import Any, NamedTuple

import torch

from qevict_kernels.interface import LayerView
from qevict_monitoring import table
from qevict_monitoring.exporter import Exporter
from qevict_tiers.budget import WindowBudget
from qevict_tiers.ledger import Copies, Counter, LedgerBytes
from qevict_tiers.observer import Attends, Observer, PrefixCut, PromptRouting, Shortage, Wait
from qevict_tiers.presets import preset_name
from qevict_tiers.views import Views
from qevict_tiers.wavering import Wavering
from sglang_qevict.capacity import CapacityPlan
from sglang_qevict.late import LateReader, Stopwatch
from sglang_qevict.runtime import runtime
from sglang_qevict.spill_metrics import export_spill, is_busy
from sglang_qevict.state import TieringState
from sglang_qevict.tenants import MAX_TENANTS, Tenants

__all__ = ["MetricsObserver", "make_observer"]

_INTERVAL_SECONDS = 1.0
_DECODES_A_SAMPLE, _PREFILLS_A_SAMPLE = 16, 4
"""Launches of which one has its attention measured."""

_COUNTERS: dict[Counter, tuple[table.Metric, *tuple[str, ...]]] = {
    Counter.ROUTED: (table.ROUTED_WINDOWS,),
    Counter.DEMOTED: (table.DEMOTIONS,),
    Counter.EVICTED_FULL: (table.EVICTIONS, "full"),
    Counter.EVICTED_CODED: (table.EVICTIONS, "coded"),
    Counter.PROMOTED: (table.PHYSICAL_PROMOTIONS,),
    Counter.QUANTIZED: (table.QUANTIZATIONS,),
    Counter.CODES_REUSED: (table.CODE_REUSES,),
    Counter.NON_FINITE: (table.NON_FINITE_WINDOWS,),
    Counter.RANK_PROMOTED: (table.RANK_PROMOTIONS,),
    Counter.CODED_FOR_REUSE: (table.REUSE_QUANTIZATIONS,),
}


class _Rows(NamedTuple):
    """Open rows when numbers were asked for: ``windows`` and tenant of each."""

    rows: list[int]
    windows: list[int]
    tenants: list[int]


@dataclass
class _Sample:
    """Measured attention of the sampled launches; ``read``: windows read by tier, float64 ``[2]``
    on the device, FULL and coded."""

    decode: Stopwatch
    prefill: Stopwatch
    read: torch.Tensor
    launches: Tally[str]


class _Measured:
    """Kernels around those of a launch whose attention is measured."""

    def __init__(self, kernels: Attends, sample: _Sample) -> None:
        self._kernels = kernels
        self._sample = sample
        self._is_first = True

    def decode(
        self,
        query: torch.Tensor,
        full: Any,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        *rest: Any,
    ) -> None:
        """See ``qevict_kernels.interface.AttentionKernels``."""
        self._count("decode")
        with self._sample.decode.measure():
            self._kernels.decode(query, full, coded, view, rows, *rest)
        self._sample.read[0] += view.num_full[rows].sum()
        self._sample.read[1] += view.num_coded[rows].sum()

    def extend(self, *arguments: Any) -> None:
        """See ``qevict_kernels.interface.AttentionKernels``."""
        self._count("prefill")
        with self._sample.prefill.measure():
            self._kernels.extend(*arguments)

    def _count(self, phase: str) -> None:
        self._sample.launches[phase] += self._is_first
        self._is_first = False


def make_observer(
    plan: CapacityPlan, num_rows: int, device: torch.device
) -> MetricsObserver | None:
    """What exports the metrics of this process; None where SGLang exports none."""
    if runtime.metric_labels is None:
        return None
    return MetricsObserver(plan, num_rows, device, Exporter(runtime.metric_labels))


class MetricsObserver(Observer):
    """Counts what it is told, and exports that and what the state holds.

    ``num_rows``: rows of the views. Nothing is exported before ``watch``.
    """

    def __init__(
        self,
        plan: CapacityPlan,
        num_rows: int,
        device: torch.device,
        exporter: Exporter,
    ) -> None:
        self._plan = plan
        self._exporter = exporter
        self._state: TieringState | None = None
        self._next = 0.0
        self._spill_is_busy = False
        self._launches: Tally[bool] = Tally()
        self._tenants = Tenants()
        self._tenant_of = [0] * num_rows
        self._routed_layers = 0
        self._routing = Stopwatch(device)
        self._shortage = Shortage.BYTES
        self._wavering = Wavering(
            plan.budget,
            num_rows,
            plan.max_windows,
            table.CHURN.buckets,
            MAX_TENANTS + 1,
            device,
        )
        self._sample = _Sample(
            Stopwatch(device),
            Stopwatch(device),
            torch.zeros(2, dtype=torch.float64, device=device),
            Tally(),
        )
        self._reader = LateReader[_Rows]()
        self._export_constants()

    def observed(self) -> dict[str, tuple[float, float]]:
        """Selection churn and LIR since the start: how many were observed, and their sums.

        Waits for the device.
        """
        histograms = {"churn": self._wavering.churn, "lir": self._wavering.returns}
        numbers = {name: histogram.tolist() for name, histogram in histograms.items()}
        return {name: (sum(counts), total) for name, (*counts, total) in numbers.items()}

    def watch(self, state: TieringState) -> None:
        """From now on export what this state holds."""
        self._state = state
        self._publish()

    # -- what is told ----------------------------------------------------------------

    def admitted(self, row: int, routing: PromptRouting, tenant: str) -> None:
        self._tenant_of[row] = self._tenants.number(tenant)
        self._exporter.count(table.PREFILLS, 1, routing.value)

    def prefix_cut(self, cut: PrefixCut, tokens: int) -> None:
        self._exporter.count(table.PREFIX_CUTS, 1, cut.value)
        self._exporter.count(table.PREFIX_CUT_TOKENS, tokens, cut.value)

    def waited(self, wait: Wait) -> None:
        self._exporter.count(table.ADMISSION_WAITS, 1, wait.value)

    def fell_short(self, shortage: Shortage) -> None:
        self._shortage = shortage

    def retracted(self, requests: int) -> None:
        self._exporter.count(table.RETRACTIONS, requests, self._shortage.value)

    def dropped(self, pages: int) -> None:
        self._exporter.count(table.REUSE_PAGES_DROPPED, pages)

    def closed(self, rows: Sequence[int]) -> None:
        self._wavering.close(rows)

    @contextmanager
    def routing(
        self, views: Views, layers: slice, rows: Sequence[int], tokens: Sequence[int]
    ) -> Iterator[None]:
        width = max(self._plan.budget.num_windows(n) for n in tokens)
        before = self._wavering.before(views, layers, rows, width)
        with self._routing.measure():
            yield
        groups = [self._tenant_of[row] for row in rows]
        self._wavering.after(before, views, layers, rows, tokens, groups)
        self._routed_layers += len(rows) * (layers.stop - layers.start)

    def attending(self, kernels: Attends, *, is_decode: bool) -> Attends:
        number, self._launches[is_decode] = self._launches[is_decode], self._launches[is_decode] + 1
        every = _DECODES_A_SAMPLE if is_decode else _PREFILLS_A_SAMPLE
        return kernels if number % every else _Measured(kernels, self._sample)

    def launched(self) -> None:
        if self._is_due():
            self._publish()

    def idle(self) -> None:
        self._publish(wait=True)

    def resting(self) -> None:
        if self._spill_is_busy and self._is_due():
            assert self._state is not None
            self._export_spill(self._state)

    def _is_due(self) -> bool:
        """Whether it is time to export again; true once an interval."""
        now = monotonic()
        if now < self._next:
            return False
        self._next = now + _INTERVAL_SECONDS
        return True

    # -- what is exported ------------------------------------------------------------

    @property
    def _budget(self) -> WindowBudget:
        return self._plan.budget

    def _export_constants(self) -> None:
        config, set_ = self._budget.config, self._exporter.set
        set_(
            table.BUILD_INFO,
            1,
            metadata.version("sglang-qevict"),
            metadata.version("sglang"),
            preset_name(config),
            f"{float(config.budget):g}",
            config.promote.value,
        )
        set_(table.KV_BYTES, self._plan.total_bytes)
        set_(table.CAPACITY_TOKENS, self._plan.max_tokens)
        set_(table.STOCK_CAPACITY_TOKENS, self._plan.total_bytes // self._budget.token_bytes)

    def _publish(self, *, wait: bool = False) -> None:
        state = self._state
        if state is None:
            return
        self._export_host(state)
        self._export_spill(state)
        rows = list(state.manager.open_rows)
        note = _Rows(
            rows,
            [state.manager.open_rows[row] for row in rows],
            [self._tenant_of[row] for row in rows],
        )
        if read := self._reader.read(self._device_numbers(state), note, wait=wait):
            self._export_device(state, *read)

    def _device_numbers(self, state: TieringState) -> torch.Tensor:
        """All that only the device knows, float64 ``[n]``, in the order of ``_export_device``."""
        manager = state.manager
        views = manager.views
        parts = (
            manager.count_copies(),
            manager.counters.totals,
            views.num_full.sum(0),
            views.num_coded.sum(0),
            self._wavering.churn,
            self._wavering.returns,
            self._wavering.group_churn[0],
            self._wavering.group_churn[1],
            self._sample.read,
        )
        return torch.cat([part.double() for part in parts])

    def _export_host(self, state: TieringState) -> None:
        ledger, exporter = state.ledger, self._exporter
        kept = ledger.kept
        exporter.set(table.REQUESTS, len(ledger))
        exporter.set(table.REUSE_PAGES, kept.num_pages)
        exporter.set(table.CLAIMED_BYTES, ledger.total_bytes - kept.num_bytes, "requests")
        exporter.set(table.CLAIMED_BYTES, kept.num_bytes, "reuse")
        events = self._routed_layers / self._budget.num_layers
        exporter.count_to(table.ROUTINGS, events)
        exporter.count_to(table.ROUTING_SECONDS, self._routing.seconds)
        for phase, watch in (("decode", self._sample.decode), ("prefill", self._sample.prefill)):
            exporter.count_to(table.SAMPLED_LAUNCHES, self._sample.launches[phase], phase)
            exporter.count_to(table.SAMPLED_ATTENTION_SECONDS, watch.seconds, phase)
        tenants = Tally(self._tenant_of[row] for row in ledger)
        for number, name in enumerate(self._tenants.names):
            exporter.set(table.TENANT_REQUESTS, tenants[number], name)

    def _export_spill(self, state: TieringState) -> None:
        report = state.spill.report()
        if report is not None:
            export_spill(self._exporter, report)
            self._spill_is_busy = is_busy(report)

    def _export_device(self, state: TieringState, numbers: list[float], open_rows: _Rows) -> None:
        rest = iter(numbers)

        def take(count: int) -> list[float]:
            return [next(rest) for _ in range(count)]

        num_rows, size = len(self._tenant_of), len(table.CHURN.buckets) + 1
        self._export_copies(state, Copies(*map(int, take(len(Copies._fields)))))
        for counter, total in zip(Counter, take(len(Counter)), strict=True):
            metric, *labels = _COUNTERS[counter]
            self._exporter.count_to(metric, total, *labels)
        self._export_views(open_rows, take(num_rows), take(num_rows))
        for metric in (table.CHURN, table.LIR):
            self._exporter.gather(metric, take(size), *take(1))
        sums, counts = take(MAX_TENANTS + 1), take(MAX_TENANTS + 1)
        for number, name in enumerate(self._tenants.names):
            self._exporter.count_to(table.TENANT_CHURN, sums[number], name)
            self._exporter.count_to(table.TENANT_CHURN_OBSERVATIONS, counts[number], name)
        read_bytes = zip(("full", "coded"), take(2), self._tier_bytes, strict=True)
        for tier, windows, window_bytes in read_bytes:
            self._exporter.count_to(table.SAMPLED_READ_BYTES, windows * window_bytes, tier)

    @property
    def _tier_bytes(self) -> tuple[int, int]:
        """Bytes of a FULL and of a coded window of one layer."""
        return self._budget.full_bytes, self._budget.coded_bytes

    def _export_copies(self, state: TieringState, copies: Copies) -> None:
        exporter = self._exporter
        physical = dict(zip(("full", "coded"), (copies.full, copies.coded), strict=True))
        held = dict(zip(physical, self._tier_bytes, strict=True))
        for tier, windows in physical.items():
            exporter.set(table.PHYSICAL_WINDOWS, windows, tier)
            held[tier] *= windows
            exporter.set(table.PHYSICAL_BYTES, held[tier], tier)
        in_use, kept = sum(held.values()), state.ledger.kept
        reclaimable = min(in_use, kept.num_bytes - kept.locked_bytes)
        exporter.set(table.ARENA_BYTES, in_use - reclaimable, "used")
        exporter.set(table.ARENA_BYTES, reclaimable, "reclaimable")
        exporter.set(table.ARENA_BYTES, state.ledger.capacity_bytes - in_use, "free")
        tables = state.manager.table_bytes + self._wavering.num_bytes
        ledger = LedgerBytes.of(self._budget.geometry, copies, tables)
        by_kind = {
            "codes": ledger.codes,
            "parameters": ledger.params,
            "alignment": ledger.alignment,
            "shadow": ledger.shadow,
            "reuse": ledger.reuse,
            "tables": ledger.tables,
        }
        for kind, amount in by_kind.items():
            exporter.set(table.LEDGER_BYTES, amount, kind)
        share = (sum(by_kind.values()) - ledger.reuse) / self._plan.total_bytes
        exporter.set(table.LEDGER_RATIO, share)

    def _export_views(
        self, open_rows: _Rows, row_full: list[float], row_coded: list[float]
    ) -> None:
        exporter = self._exporter
        full_bytes, coded_bytes = self._tier_bytes
        full, coded = sum(row_full), sum(row_coded)
        everything = sum(open_rows.windows) * self._budget.num_layers
        exporter.set(table.LOGICAL_WINDOWS, full, "full")
        exporter.set(table.LOGICAL_WINDOWS, coded, "coded")
        exporter.set(table.LOGICAL_WINDOWS, max(0.0, everything - full - coded), "evicted")
        logical = full * full_bytes + coded * coded_bytes
        exporter.set(table.LOGICAL_BYTES, full * full_bytes, "full")
        exporter.set(table.LOGICAL_BYTES, coded * coded_bytes, "coded")
        context = everything * full_bytes
        exporter.set(table.CONTEXT_BYTES, context)
        exporter.set(table.COMPRESSION_RATIO, context / logical if logical else float("nan"))
        tenants: Tally[tuple[int, str]] = Tally()
        for row, tenant in zip(open_rows.rows, open_rows.tenants, strict=True):
            tenants[tenant, "full"] += int(row_full[row]) * full_bytes
            tenants[tenant, "coded"] += int(row_coded[row]) * coded_bytes
        for number, name in enumerate(self._tenants.names):
            for tier in ("full", "coded"):
                exporter.set(table.TENANT_BYTES, tenants[number, tier], name, tier)
