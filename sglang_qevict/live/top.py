"""``sglang-qevict top``: what the metrics of a server tell of its tiers, in a terminal.

One frame shows two scrapes: levels are those of the last one, rates lie between the two.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from qevict_monitoring import table as metrics
from qevict_monitoring.table import PREFIX, Kind, Metric
from sglang_qevict import colors

__all__ = ["Between", "Problem", "Scrape", "frame", "metrics_url", "run"]

_TIMEOUT_SECONDS = 10.0
_BAR_WIDTH = 16
_WIDE = 100
"""Columns of a terminal from which on panels stand side by side."""

_TIERS = (("full", "FULL", colors.FULL), ("coded", "coded", colors.CODED),
          ("evicted", "evicted", "bright_black"))  # fmt: skip
_STATES = (("used", colors.FULL), ("reclaimable", colors.PROTECTED), ("free", "bright_black"))
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNKNOWN = "-"


class Problem(Exception):
    """Why there is nothing to show, in one sentence."""


@dataclass(frozen=True)
class Scrape:
    """All samples of a metrics page: by series name, labels and value. at: seconds, monotonic."""

    at: float
    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Raises ``ValueError`` for what is no metrics page."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at, samples)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the series with these labels, over all replicas; None if there is none.

        Of a tensor-parallel group the first rank counts: the others decide alike.
        """
        values = [
            value
            for found, value in self.samples.get(name, ())
            if found.get("tp_rank", "0") == "0" and labels.items() <= found.items()
        ]
        return sum(values) if values else None

    def label(self, name: str, label: str) -> str:
        """The value of a label in the first series of a metric; empty if there is none."""
        return next((found.get(label, "") for found, _ in self.samples.get(name, ())), "")

    @property
    def num_ranks(self) -> int:
        """Data-parallel replicas that tell of tiers."""
        return len({found.get("dp_rank", "0") for found, _ in self.samples.get(_REQUESTS, ())})


_REQUESTS = metrics.REQUESTS.name


class Between(NamedTuple):
    """Two scrapes of a server, one after the other."""

    before: Scrape
    after: Scrape

    def level(self, metric: Metric, **labels: str) -> float | None:
        """A gauge as it is now."""
        assert metric.kind is Kind.GAUGE
        return self.after.total(metric.name, **labels)

    def grown(self, series: str, **labels: str) -> float | None:
        """What a counter gained; None if it is not there, or began afresh with its server."""
        last, first = self.after.total(series, **labels), self.before.total(series, **labels)
        if last is None or first is None or last < first:
            return None
        return last - first

    def rate(self, series: str, **labels: str) -> float | None:
        """What a counter gained a second."""
        grown, seconds = self.grown(series, **labels), self.after.at - self.before.at
        return None if grown is None or seconds <= 0 else grown / seconds

    def mean(self, metric: Metric) -> float | None:
        """The mean of what a histogram observed between the scrapes; None if that is nothing."""
        assert metric.kind is Kind.HISTOGRAM
        total, number = self.grown(f"{metric.name}_sum"), self.grown(f"{metric.name}_count")
        return total / number if total is not None and number else None


def metrics_url(address: str) -> str:
    """The metrics page of an address: a URL, with or without its path, or host and port.

    Raises ``Problem`` for what is no address.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_good = False
    if not is_good:
        raise Problem(f"{address} is no address of a server: give one like http://127.0.0.1:30000")
    path = parts.path if parts.path.strip("/") else "/metrics"
    return parts._replace(path=path, fragment="").geturl()


def run(address: str, api_key: str | None, interval_seconds: float, once: bool) -> None:
    """Show a server until the user has seen enough, or one frame of it.

    Raises ``Problem`` if the server can't be shown at all. One that stops answering later is
    asked again for as long as the user likes.
    """
    url, console = metrics_url(address), Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(headers=headers, timeout=_TIMEOUT_SECONDS, follow_redirects=True) as client:
        if api_key:
            _check_key(client, url)
        pair = Between(*[_scrape(client, url)] * 2)
        if once:
            time.sleep(interval_seconds)
            pair = Between(pair.before, _scrape(client, url))
            console.print(frame(pair, url, console.width))
            return
        if not console.is_terminal:
            raise Problem("top needs a terminal: --once prints one frame anywhere")
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            trouble = ""
            while True:
                live.update(frame(pair, url, console.width, trouble or "q ends"), refresh=True)
                if pressed(interval_seconds) == "q":
                    return
                try:
                    pair, trouble = Between(pair.after, _scrape(client, url)), ""
                except Problem as problem:
                    trouble = str(problem)


def _check_key(client: httpx.Client, url: str) -> None:
    """SGLang shows its metrics to everybody, so a wrong key would go unnoticed."""
    try:
        status = client.get(urlsplit(url)._replace(path="/model_info", query="").geturl())
    except httpx.HTTPError:
        return  # the scrape tells what is wrong
    if status.status_code in (401, 403):
        raise Problem(f"{url} refuses this key: give the one of the server's --api-key")


def _scrape(client: httpx.Client, url: str) -> Scrape:
    try:
        response = client.get(url)
    except httpx.TimeoutException:
        raise Problem(f"{url} did not answer in {_TIMEOUT_SECONDS:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Problem(f"nothing answers at {url}: {error or type(error).__name__}") from None
    if response.status_code in (401, 403):
        raise Problem(f"{url} wants another key: give the one of the server by --api-key")
    if response.status_code == 404:
        raise Problem(f"there are no metrics at {url}: start the server with --enable-metrics")
    if response.status_code != 200:
        raise Problem(f"{url} answers with status {response.status_code}, not with metrics")
    try:
        scrape = Scrape.parse(response.text, time.monotonic())
    except ValueError:
        raise Problem(f"{url} answers with something that is no page of metrics") from None
    if not any(name.startswith(PREFIX) for name in scrape.samples):
        if any(name.startswith("sglang:") for name in scrape.samples):
            raise Problem(f"{url} is a server without tiers: start it with --kv-tiering qevict")
        raise Problem(f"{url} has no metrics of an SGLang server with KV tiering")
    return scrape


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key and returns it, or nothing."""
    try:
        import termios
        import tty

        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
    except (ImportError, OSError, ValueError):  # no terminal to read from
        yield lambda seconds: time.sleep(seconds)
        return

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(file)
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


# -- one frame ------------------------------------------------------------------------------


def frame(pair: Between, url: str, width: int, note: str = "") -> RenderableType:
    """Everything about one moment, for a terminal so many columns wide."""
    panels = [
        Panel(_requests(pair), title="requests", title_align="left"),
        Panel(_arena(pair), title="bytes for windows", title_align="left"),
        Panel(_tiers(pair), title="tiers", title_align="left"),
        Panel(_ledger(pair), title="ledger", title_align="left"),
        Panel(_routing(pair), title="routing", title_align="left"),
    ]
    has_ssd_tier = pair.level(metrics.SPILL_FILE_BYTES) is not None
    spill = [Panel(_spill(pair), title="SSD tier", title_align="left")] if has_ssd_tier else []
    parts: list[RenderableType] = [_head(pair, url, note)]
    if width < _WIDE:
        parts += panels + spill
    else:
        sides = Table.grid(expand=True, padding=(0, 1))
        sides.add_column(ratio=1)
        sides.add_column(ratio=1)
        sides.add_row(Group(panels[0], panels[2], panels[4]), Group(panels[1], panels[3], *spill))
        parts.append(sides)
    return Group(*parts)


def _head(pair: Between, url: str, note: str) -> Text:
    after = pair.after
    model = after.label(_REQUESTS, "model_name").rpartition("/")[2]
    head = Text.assemble(("qevict", "bold"), f"  {model}  ", (url, "dim"))
    budget = after.label(metrics.BUILD_INFO.name, "budget")
    if budget:
        head.append(f"  budget {budget}")
    if after.num_ranks > 1:
        head.append(f"  sum of {after.num_ranks} replicas")
    if note:
        head.append(f"  {note}", "dim")
    return head


def _requests(pair: Between) -> RenderableType:
    grid = _grid()
    grid.add_row("running", _count(pair.after.total("sglang:num_running_reqs")))
    grid.add_row("waiting", _count(pair.after.total("sglang:num_queue_reqs")))
    tokens = pair.after.total("sglang:gen_throughput")
    grid.add_row("generated", _per_second(tokens, "tokens"))
    prompts = pair.rate("sglang:realtime_tokens_total", mode="prefill_compute")
    grid.add_row("prefilled", _per_second(prompts, "tokens"))
    grid.add_row("kept for reuse", f"{_count(pair.level(metrics.REUSE_PAGES))} pages")
    grid.add_row("capacity", f"{_count(pair.level(metrics.CAPACITY_TOKENS))} tokens")
    return grid


def _arena(pair: Between) -> RenderableType:
    amounts = [pair.level(metrics.ARENA_BYTES, state=state) for state, _ in _STATES]
    whole = sum(amount or 0.0 for amount in amounts)
    grid = _grid(columns=3)
    for (state, color), amount in zip(_STATES, amounts, strict=True):
        grid.add_row(state, _bar(amount, whole, color), _bytes(amount))
    claimed = pair.level(metrics.CLAIMED_BYTES)
    grid.add_row("claimed", _bar(claimed, whole, colors.PROTECTED), _bytes(claimed))
    grid.add_row("all", "", _bytes(whole or None))
    return grid


def _tiers(pair: Between) -> RenderableType:
    windows = [pair.level(metrics.LOGICAL_WINDOWS, tier=tier) for tier, _, _ in _TIERS]
    whole = sum(number or 0.0 for number in windows)
    grid = _grid(columns=4)
    grid.add_row("", "", Text("windows", "dim"), Text("bytes", "dim"))
    for (tier, name, color), number in zip(_TIERS, windows, strict=True):
        held = "" if tier == "evicted" else _bytes(pair.level(metrics.LOGICAL_BYTES, tier=tier))
        grid.add_row(name, _bar(number, whole, color), _count(number), held)
    ratio = pair.level(metrics.COMPRESSION_RATIO)
    if ratio is None or isnan(ratio):
        return grid
    return Group(grid, Text(f"At full precision they would take {ratio:.1f} times as much.", "dim"))


def _ledger(pair: Between) -> RenderableType:
    kinds = metrics.LEDGER_BYTES.labels[0].values
    amounts = [pair.level(metrics.LEDGER_BYTES, kind=kind) for kind in kinds]
    whole = sum(amount or 0.0 for amount in amounts)
    grid = _grid(columns=3)
    for kind, amount in zip(kinds, amounts, strict=True):
        grid.add_row(kind, _bar(amount, whole, colors.CODED), _bytes(amount))
    return grid


def _routing(pair: Between) -> RenderableType:
    grid = _grid()
    for name, metric, labels in (
        ("events", metrics.ROUTINGS, {}),
        ("demoted to codes", metrics.DEMOTIONS, {}),
        ("evicted, were FULL", metrics.EVICTIONS, {"tier": "full"}),
        ("evicted, were coded", metrics.EVICTIONS, {"tier": "coded"}),
        ("risen by rank", metrics.RANK_PROMOTIONS, {}),
        ("rebuilt as FULL", metrics.PHYSICAL_PROMOTIONS, {}),
    ):
        grid.add_row(name, _per_second(pair.rate(metric.name, **labels), metric.unit))
    grid.add_row("churn, mean", _share(pair.mean(metrics.CHURN)))
    grid.add_row("returns (LIR), mean", _share(pair.mean(metrics.LIR)))
    return grid


def _spill(pair: Between) -> RenderableType:
    grid = _grid()
    grid.add_row("stored", _bytes(pair.level(metrics.SPILL_BYTES, state="stored")))
    grid.add_row("waiting to be written", _bytes(pair.level(metrics.SPILL_BYTES, state="queued")))
    grid.add_row("written", _bytes_per_second(pair.rate(metrics.SPILL_WRITTEN_BYTES.name)))
    grid.add_row("recalled", _bytes_per_second(pair.rate(metrics.SPILL_RECALLED_BYTES.name)))
    for name, metric, labels in (
        ("requests recalled", metrics.SPILL_RECALLS, {"outcome": "recalled"}),
        ("not worth reading", metrics.SPILL_RECALLS, {"outcome": "not_worth_it"}),
        ("read too late", metrics.SPILL_RECALLS, {"outcome": "late"}),
        ("dropped", metrics.SPILL_DROPPED_RECORDS, {}),
        ("errors", metrics.SPILL_ERRORS, {}),
    ):
        grid.add_row(name, _per_second(pair.rate(metric.name, **labels), metric.unit))
    return grid


def _grid(columns: int = 2) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(min_width=8, no_wrap=True)
    for column in range(1, columns):
        grid.add_column(justify="right" if column > 1 or columns == 2 else "left", no_wrap=True)
    return grid


def _bar(amount: float | None, whole: float, color: str) -> Text:
    filled = round(_BAR_WIDTH * min(1.0, (amount or 0.0) / whole)) if whole else 0
    return Text.assemble(("█" * filled, color), ("·" * (_BAR_WIDTH - filled), "bright_black"))


def _count(number: float | None) -> str:
    return _UNKNOWN if number is None else f"{number:,.0f}"


def _per_second(rate: float | None, unit: str) -> str:
    if rate is None:
        return _UNKNOWN
    return f"{rate:,.{0 if rate >= 10 or not rate else 1 if rate >= 1 else 2}f} {unit}/s"


def _bytes_per_second(rate: float | None) -> str:
    return _UNKNOWN if rate is None else f"{_bytes(rate)}/s"


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.2%}"


def _bytes(amount: float | None) -> str:
    if amount is None or isnan(amount):
        return _UNKNOWN
    unit = 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.{1 if unit and amount < 100 else 0}f} {_UNITS[unit]}"
