"""``make demo``: a chat about a long text, with the KV cache in tiers and without.

Starts a server with tiering, asks it about 4,000 tokens and more of real text, shows what the
tiers hold while it answers, then stops it and asks a server without tiering the same.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sglang_qevict.foreign_load import ForeignLoad
from sglang_qevict.local_server import Server, ServerFailed
from sglang_qevict.models import fetch_model
from sglang_qevict.sample_text import long_text

__all__ = ["main"]

_FLAGS = (
    *("--device", "cpu"),
    *("--page-size", "8"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", "16"),
    *("--chunked-prefill-size", "8192"),
    *("--random-seed", "0"),
    "--enable-cache-report",
)
_QUESTIONS = (
    "In one sentence: what does the `with` statement do?",
    "What is a lambda expression?",
    "Which statement handles exceptions?",
)
_ANSWER_TOKENS = 64
_BUSY_CORES = 0.2
"""What other programs may take before the times count as disturbed."""

_KINDS = (
    ("full", "FULL", "green", "█"),
    ("coded", "CODED", "yellow", "▓"),
    ("evicted", "EVICTED", "red", "·"),
)
"""Of the report: key, label, and how a bar draws it."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    prompt_tokens, cached_tokens: of the whole chat so far, and those of it that a prefix cache
    had. first_seconds: until the first token came; rest_seconds: from then to the last.
    cut: it ended at the limit of tokens.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_seconds: float
    rest_seconds: float
    cut: bool

    @property
    def line(self) -> str:
        """The text in one line, with an ellipsis where it was cut."""
        return " ".join(self.text.split()) + ("…" if self.cut else "")

    @property
    def token_ms(self) -> float:
        """Milliseconds per token after the first."""
        return self.rest_seconds / max(1, self.tokens - 1) * 1e3


@dataclass
class Observer:
    """Samples ``/server_info`` from a second thread while a request runs."""

    url: str
    seconds: float = 0.5
    latest: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample within the block; ``latest`` keeps the last report with a running request."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(5)

    def _watch(self, done: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not done.wait(self.seconds):
                try:
                    info = client.get("/server_info").raise_for_status().json()
                except httpx.HTTPError:
                    continue  # The server is busy or stopping; the next sample may work.
                report = info["internal_states"][0].get("kv_tiering")
                if report and sum(report["layers"]["coded"]):
                    self.latest = report


def ask(server: Server, messages: Sequence[Mapping[str, str]]) -> Answer:
    """One streamed answer of the chat endpoint, at temperature 0."""
    body = {
        "model": "default",
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    parts: list[str] = []
    usage: dict[str, Any] = {}
    cut = False
    with (
        httpx.Client(base_url=server.url, timeout=600) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                cut = cut or choice.get("finish_reason") == "length"
                if choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
                    parts.append(choice["delta"]["content"])
    return Answer(
        text="".join(parts).strip(),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        tokens=usage["completion_tokens"],
        first_seconds=first - start,
        rest_seconds=last - first,
        cut=cut,
    )


def converse(server: Server, console: Console, name: str) -> list[Answer]:
    """Ask all questions in one chat, each turn with the turns before it."""
    with console.status(f"{name}: a first request, not counted"):
        server.chat("Say hello.", max_tokens=8)
    load = ForeignLoad(server.processes)
    instruction = "Answer the questions about this text.\n\n" + long_text()
    messages = [{"role": "system", "content": instruction}]
    answers = []
    for question in _QUESTIONS:
        messages.append({"role": "user", "content": question})
        with console.status(f"{name}: {question}"):
            answer = ask(server, messages)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
        console.print(Text.assemble(("you  ", "bold cyan"), question))
        console.print(Text.assemble((f"{name}  ", "bold green"), answer.line))
        console.print(
            f"[dim]{answer.prompt_tokens:,} tokens in, {answer.tokens} out, first token "
            f"after {answer.first_seconds:.1f} s, then {answer.token_ms:.0f} ms each[/]\n"
        )
    foreign = load.cores()
    if foreign > _BUSY_CORES:
        console.print(
            f"[yellow]Other programs took {foreign:.1f} of {psutil.cpu_count()} cores meanwhile: "
            "these times say little.[/]\n"
        )
    return answers


@contextmanager
def running(name: str, console: Console, *flags: str) -> Iterator[Server]:
    """A server that is healthy, and stopped afterwards whatever happens."""
    with tempfile.TemporaryDirectory(prefix="qevict-demo-") as directory:
        server = Server(*_FLAGS, *flags, log_path=Path(directory) / "log")
        start = time.monotonic()
        try:
            with console.status("") as status:

                def waiting() -> None:
                    seconds = time.monotonic() - start
                    status.update(
                        f"{name}: starting, {seconds:.0f} s (about a minute on two cores)"
                    )

                server.start(waiting=waiting)
            seconds = time.monotonic() - start
            console.print(f"[bold]{name}[/]: ready on {server.url} after {seconds:.0f} s\n")
            yield server
        finally:
            with console.status(f"{name}: stopping"):
                server.stop()


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """What the tiers held in the last sample."""
    console.print(tiers_table(report))
    if len(set(_windows_by_layer(report))) == 1:
        console.print(
            "[dim]Every layer holds the same number of windows; which ones differs from layer to "
            "layer.[/]"
        )
    held, stock = _held_bytes(report), _stock_bytes(report)
    console.print("", bytes_table(report, held, stock))
    if held > report["budget"] * stock:
        # `route-every` and `window` are both 8: one window opens from one routing to the next.
        console.print(
            "[dim]Between two routings a layer may hold one window more than its budget.[/]"
        )
    console.print()


def _windows_by_layer(report: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return list(zip(*(report["layers"][key] for key, *_ in _KINDS), strict=True))


def tiers_table(report: Mapping[str, Any]) -> Table:
    """Windows per tier of each layer, as a bar; neighbours with the same counts share a row."""
    table = Table(
        title="Windows by tier while it answered",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column(
        "  ".join(f"[{color}]{mark} {label}[/]" for _, label, color, mark in _KINDS), no_wrap=True
    )
    for _, label, *_ in _KINDS:
        table.add_column(label, justify="right", no_wrap=True)
    for counts, group in groupby(enumerate(_windows_by_layer(report)), key=itemgetter(1)):
        numbers = [layer for layer, _ in group]
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        table.add_row(span, _bar(counts, 40), *(f"{count:,}" for count in counts))
    return table


def _bar(counts: Sequence[int], width: int) -> Text:
    total = max(1, sum(counts))
    bar = Text()
    drawn = seen = 0
    for count, (_, _, color, mark) in zip(counts, _KINDS, strict=True):
        seen += count
        end = round(seen / total * width)
        bar.append(mark * (end - drawn), style=color)
        drawn = end
    return bar


_BYTES = (
    ("full", "FULL windows"),
    ("codes", "codes"),
    ("params", "scales and zeros"),
    ("alignment", "padding of records"),
)
"""Of the report: key and label of what a request's windows take."""


def _held_bytes(report: Mapping[str, Any]) -> int:
    return sum(report["bytes"][key] for key, _ in _BYTES)


def _stock_bytes(report: Mapping[str, Any]) -> int:
    """Bytes of the same windows, all FULL."""
    windows = sum(map(sum, _windows_by_layer(report)))
    full_bytes: int = report["bytes"]["full"]
    return windows * full_bytes // max(1, sum(report["layers"]["full"]))


def bytes_table(report: Mapping[str, Any], held: int, stock: int) -> Table:
    """The ledger: bytes by kind, beside those of the same windows, all FULL."""
    by_kind = report["bytes"]
    table = Table(title="Bytes in use", title_justify="left", title_style="bold", box=None)
    table.add_column("kind")
    table.add_column("MiB", justify="right")
    for key, label in _BYTES:
        table.add_row(label, _mib(by_kind[key]))
    table.add_row("[bold]windows of this request[/]", f"[bold]{_mib(held)}[/]")
    table.add_row("tables of the whole server", _mib(by_kind["tables"]))
    windows = sum(_windows_by_layer(report)[0])
    table.add_row(
        f"[dim]the same {windows:,} windows a layer, all FULL[/]", f"[dim]{_mib(stock)}[/]"
    )
    table.add_row("share of it", f"{held / max(1, stock):.1%}")
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"


def speed_table(tiered: Sequence[Answer], stock: Sequence[Answer]) -> Table:
    """Both servers' times for each question."""
    table = Table(title="Speed", title_justify="left", title_style="bold", box=None)
    for heading in (
        "question",
        "server",
        "context",
        "cached",
        "first token, s",
        "further, ms each",
    ):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for number, (ours, theirs) in enumerate(zip(tiered, stock, strict=True), 1):
        for name, answer in (("tiered", ours), ("stock", theirs)):
            table.add_row(
                str(number),
                name,
                f"{answer.prompt_tokens:,}",
                f"{answer.cached_tokens:,}",
                f"{answer.first_seconds:.2f}",
                f"{answer.token_ms:.1f}",
            )
    return table


def run(console: Console, budget: str) -> None:
    """The whole demo."""
    console.print(
        Panel(
            f"A chat about {len(long_text().split()):,} words of Python's language reference, by "
            "SmolLM2-135M on this CPU.\nFirst with the KV cache in tiers, at "
            f"{float(budget):.0%} of its bytes, then the same without tiers.",
            title="sglang-qevict",
        )
    )
    fetch_model()
    with running(
        "tiered", console, "--kv-tiering", "qevict", "--kv-tiering-budget", budget
    ) as server:
        observer = Observer(server.url)
        with observer.watching():
            tiered = converse(server, console, "tiered")
    if observer.latest:
        show_report(observer.latest, console)
    with running("stock", console, "--kv-tiering", "none") as server:
        stock = converse(server, console, "stock")
    console.print(speed_table(tiered, stock))
    console.print(
        "[dim]cached: tokens that came from the prefix cache instead of being computed. Each chat "
        "goes on from its own answers. One run each; benchmarks/ measures properly.[/]"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="0.2", help="share of the KV bytes (default: 0.2)")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    # Ctrl-C ends a demo that was started in the background too, where shells make it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(console, options.budget)
    except KeyboardInterrupt:
        console.print("\nstopped")
        return 130
    except ServerFailed as failure:
        console.print(f"the server failed: {failure}", markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
