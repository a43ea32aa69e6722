"""Servers side by side, usually stock and tiered, of which only the one that is measured runs.

An idle SGLang scheduler spins on a core. So the server that waits is suspended (SIGSTOP), even
in the middle of a generation: both hold their batch, and measurements take turns.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx
import psutil
from tqdm import tqdm

from qevict_tiers.presets import DEFAULT_PRESET
from report import warn
from sglang_qevict.foreign_load import ForeignLoad
from sglang_qevict.local_server import Server, ServerFailed

FLAGS = (
    *("--device", "cpu"),
    *("--page-size", "8"),
    *("--max-total-tokens", "65536"),
    *("--max-running-requests", "64"),
    *("--chunked-prefill-size", "8192"),
    *("--watchdog-timeout", "3600"),
    "--enable-metrics",
)
"""What both servers get, as in configs/serve.yaml; a suspended server needs a patient watchdog."""

STOCK, TIERED, SSD = "stock", "tiered", "ssd"
NAMES = (STOCK, TIERED)
"""What is usually compared; SSD is a tiered server with an SSD tier, and a preset's name one with
its options."""

OMEGA = 8
"""Steps between two routing events, by default."""

TURN_STEPS, QUICK_TURN_STEPS = 3 * OMEGA, 2 * OMEGA
"""Steps of a turn, and with --quick."""

_SETTLE_STEPS = 3
"""Steps after a resumption that are not measured: a suspended one, and cold caches."""

_SPARE_TOKENS, _SPARE_TOKENS_A_TURN = 64, 16
"""What a server may have decoded ahead of its stream when it is suspended."""

_PILED_UP_SECONDS = 1e-3
"""Tokens that follow each other faster were decoded before the suspension."""


def tiering_flags(name: str, budget: float, directory: Path) -> tuple[str, ...]:
    """The flags in which servers differ; ``directory``: where an SSD tier may have one."""
    if name == STOCK:
        return ("--kv-tiering", "none")
    preset = DEFAULT_PRESET if name in (TIERED, SSD) else name
    return (
        *("--kv-tiering", "qevict"),
        *("--kv-tiering-preset", preset),
        *("--kv-tiering-budget", f"{budget:g}"),
        *(("--kv-tiering-ssd-dir", str(directory / name)) if name == SSD else ()),
    )


class Servers:
    """Servers by name, ``flags`` for all; a context manager that leaves nothing behind."""

    def __init__(self, *flags: str, budget: float, names: Sequence[str] = NAMES) -> None:
        self.names = tuple(names)
        self._directory = tempfile.TemporaryDirectory(prefix="qevict-bench-")
        directory = Path(self._directory.name)
        self._servers = {
            name: Server(
                *FLAGS,
                *tiering_flags(name, budget, directory),
                *flags,
                log_path=directory / f"{name}.log",
                env={"HF_HUB_OFFLINE": "1"},
                request_seconds=3600,
            )
            for name in names
        }

    def __enter__(self) -> Servers:
        try:
            print(f"starting the {' and the '.join(self._servers)} server", flush=True)
            for server in self._servers.values():
                server.launch()
            for server in self._servers.values():
                server.wait_until_healthy()
                server.suspend()
            for name in self._servers:
                with self.running(name) as server:
                    warm_up(server)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        """Stop all at once; one that had to be killed over its requests is worth a line only."""

        def stop(server: Server) -> None:
            try:
                server.stop()
            except ServerFailed as failure:
                warn(str(failure).partition("\n")[0])

        with ThreadPoolExecutor() as threads:
            list(threads.map(stop, self._servers.values()))
        self._directory.cleanup()

    def processes(self) -> list[psutil.Process]:
        """All processes of all servers."""
        return [process for server in self._servers.values() for process in server.processes()]

    @contextmanager
    def running(self, name: str) -> Iterator[Server]:
        """The one server that runs within the block."""
        server = self._servers[name]
        server.resume()
        try:
            yield server
        finally:
            server.suspend()


def warm_up(server: Server) -> None:
    """Compile and touch what the first requests would pay for."""
    for length in (16, 700):
        server.generate([1000 + i % 7000 for i in range(length)], max_new_tokens=12)
    server.flush_cache()


class Texts:
    """Token ids of real English text: Python's own help topics, about 110,000 tokens."""

    def __init__(self, server: Server) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
        body = {"model": "default", "prompt": text}
        self._ids: list[int] = server.post("/tokenize", body)["tokens"]
        self._next = 0

    def prompt(self, tokens: int) -> list[int]:
        """The next passage of so many tokens, each time another one until the text is used up."""
        if self._next + tokens > len(self._ids):
            self._next = (self._next + 611) % 997
        start = self._next
        self._next += tokens
        return self._ids[start : start + tokens]


class Answer(NamedTuple):
    """An answer to a conversation, and what it took: tokens of the prompt, those of them that
    were cached (with ``--enable-cache-report``), seconds to the first token."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_seconds: float


def chat(
    server: Server, messages: Sequence[Mapping[str, str]], max_tokens: int = 32, **options: Any
) -> Answer:
    """The greedy answer to a conversation, streamed."""
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    url, text, first = f"{server.url}/v1/chat/completions", "", None
    usage: dict[str, Any] = {}
    start = time.perf_counter()
    with httpx.stream("POST", url, json=body, timeout=3600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "choices" not in event:
                raise RuntimeError(f"the server refused a question: {event}")
            for choice in event["choices"]:
                first = first or time.perf_counter() - start
                text += choice["delta"].get("content") or ""
            usage = event.get("usage") or usage
    if first is None:
        raise RuntimeError(f"the server did not answer: status {response.status_code}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, usage["prompt_tokens"], cached, first)


class Batch:
    """Requests sent together and streamed; the caller pulls their steps one by one."""

    def __init__(self, server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int):
        self._server = server
        self._prompts = prompts
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)
        self._max_new_tokens = max_new_tokens

    def start(self) -> None:
        """Send the requests; returns when all are decoding."""
        body = {
            "input_ids": [list(prompt) for prompt in self._prompts],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self._max_new_tokens,
                "ignore_eos": True,
            },
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/generate", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        waiting = set(range(len(self._prompts)))
        while waiting:
            waiting.discard(self._event()[0])

    def steps(self, count: int) -> list[float]:
        """Seconds of each of the next ``count`` decode steps, after a few to settle.

        A step is what lies between two tokens of the first request; the others take part in it.
        """
        tokens, since = self._token()
        settled = 0
        while settled < _SETTLE_STEPS:
            now_tokens, now = self._token()
            settled += now - since > _PILED_UP_SECONDS
            tokens, since = now_tokens, now
        durations: list[float] = []
        while len(durations) < count:
            now_tokens, now = self._token()
            passed = now_tokens - tokens
            durations += [(now - since) / passed] * passed
            tokens, since = now_tokens, now
        return durations[:count]

    def finish(self) -> None:
        """Hang up, which aborts what is left, and wait until the server is idle."""
        self._response.close()
        self._connection.close()
        self._server.flush_cache(60)

    def _token(self) -> tuple[int, float]:
        """The first request's next event: its tokens so far, and when it came."""
        while True:
            index, tokens, now = self._event()
            if index == 0:
                return tokens, now

    def _event(self) -> tuple[int, int, float]:
        while True:
            line = self._response.readline()
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the server refused the batch: {event['error']}")
                return event.get("index", 0), event["meta_info"]["completion_tokens"], now
            if not line or line.startswith(b"data: [DONE]"):
                raise RuntimeError("the batch ended before it was measured")


Beside = Callable[[Server], AbstractContextManager[object]]
"""What goes on at a server within a block."""


def take_turns(
    servers: Servers,
    texts: Texts,
    context: int,
    batch: int,
    turns: int,
    turn_steps: int,
    bar: tqdm[Any],
    beside: Beside = nullcontext,
) -> tuple[dict[str, list[list[float]]], float]:
    """Seconds of each step of each turn by server, and the cores that other programs took.

    The servers hold the same batch (see `start_batches`) and decode it in turns, the one that
    begins another one each time. ``bar`` goes on by one for each server and for each turn.
    ``beside``: what else the server does meanwhile; when it ends, none of it is left.
    """
    cell = f"{context} x {batch}"
    bar.set_postfix_str(f"{cell}: prefills")
    batches: dict[str, Batch] = {}
    for name, held in start_batches(servers, texts, context, batch, turns, turn_steps):
        batches[name] = held
        bar.update()
    load = ForeignLoad(servers.processes)
    steps: dict[str, list[list[float]]] = {name: [] for name in servers.names}
    for turn in range(turns):
        bar.set_postfix_str(f"{cell}: turn {turn + 1} of {turns}")
        for name in servers.names if turn % 2 else servers.names[::-1]:
            with servers.running(name) as server, beside(server):
                steps[name].append(batches[name].steps(turn_steps))
        bar.update()
    foreign = load.cores()
    for name, held in batches.items():
        with servers.running(name):
            held.finish()
    return steps, foreign


def start_batches(
    servers: Servers, texts: Texts, context: int, batch: int, turns: int, turn_steps: int
) -> Iterator[tuple[str, Batch]]:
    """Have each server in turn prefill the same prompts and hold them as a batch that decodes.

    Each request has a text of its own, and ``context`` tokens in the middle of so many turns.
    """
    steps = turns * (turn_steps + _SETTLE_STEPS + 1)
    most = steps + _SPARE_TOKENS + turns * _SPARE_TOKENS_A_TURN
    prompts = [texts.prompt(context - steps // 2) for _ in range(batch)]
    for name in servers.names:
        with servers.running(name) as server:
            held = Batch(server, prompts, most)
            held.start()
        yield name, held
