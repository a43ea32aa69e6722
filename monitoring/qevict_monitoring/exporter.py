"""The metrics of the table as objects of ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from qevict_monitoring.table import METRICS, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Exporter"]


class Exporter:
    """Sets and counts the metrics of one process.

    ``labels``: of every series, at least one. ``registry``: where they are registered; the client's
    own if None. ``prometheus_client`` is imported here and not before: it decides by
    ``PROMETHEUS_MULTIPROC_DIR``, when it is imported, whether processes share their values.

    Counters begin at zero and gauges too, in all series whose labels' values are known, but for
    optional metrics: these have no series before they are set or counted.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry | None = None):
        import prometheus_client

        types: dict[Kind, Any] = {
            Kind.GAUGE: prometheus_client.Gauge,
            Kind.COUNTER: prometheus_client.Counter,
            Kind.HISTOGRAM: prometheus_client.Histogram,
        }
        self._labels = dict(labels)
        self._totals: dict[Any, float] = {}
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for metric in METRICS.values():
            options: dict[str, Any] = {}
            if metric.kind is Kind.GAUGE:
                options["multiprocess_mode"] = "mostrecent"
            elif metric.kind is Kind.HISTOGRAM:
                options["buckets"] = metric.buckets
            self._metrics[metric.name] = types[metric.kind](
                metric.name,
                metric.help,
                [*self._labels, *(label.name for label in metric.labels)],
                registry=registry or prometheus_client.REGISTRY,
                **options,
            )
            if not metric.optional:
                for values in product(*(label.values for label in metric.labels)):
                    self._child(metric, *values)

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge; ``labels``: values of the metric's own labels, in their order."""
        self._child(metric, *labels).set(value)

    def count(self, metric: Metric, amount: float, *labels: str) -> None:
        """Add to a counter."""
        self._child(metric, *labels).inc(amount)

    def count_to(self, metric: Metric, total: float, *labels: str) -> None:
        """Bring a counter to a total that is kept elsewhere and never falls."""
        child = self._child(metric, *labels)
        child.inc(total - self._totals.get(child, 0.0))
        self._totals[child] = total

    def gather(self, metric: Metric, counts: Sequence[float], total: float) -> None:
        """Bring a histogram to so many observations by bucket, the unbounded one last.

        ``total``: sum of the observed values. As with ``count_to``, both never fall.
        """
        child = self._child(metric)
        # Observing one by one, as its interface wants, would take seconds for large batches.
        parts = [*zip(child._buckets, counts, strict=True), (child._sum, total)]
        for part, new in parts:
            part.inc(new - self._totals.get(part, 0.0))
            self._totals[part] = new

    def _child(self, metric: Metric, *labels: str) -> Any:
        key = (metric.name, *labels)
        if key not in self._children:
            self._children[key] = self._metrics[metric.name].labels(*self._labels.values(), *labels)
        return self._children[key]
