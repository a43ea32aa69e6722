"""A real server and real Prometheuses that scrape it, whose rules do not wait for minutes."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from qevict_monitoring.prometheus import Prometheus
from server.harness import Server
from server.tiering import prompts, text_tokens
from sglang_qevict.local_server import _free_port

ROOT = Path(__file__).parents[2] / "monitoring"
RULES = ROOT / "prometheus" / "rules"
DASHBOARDS = ROOT / "grafana" / "dashboards"

TENANT_LABEL = "team"

_FLAGS = (
    *("--kv-tiering", "qevict"),
    # Short requests are routed, seldom: so their churn is large.
    *("--kv-tiering-route-every", "16"),
    *("--kv-tiering-min-context", "256"),
    *("--chunked-prefill-size", "1024"),
    *("--tokenizer-metrics-allowed-custom-labels", TENANT_LABEL),
)


def flags(folder: Path) -> tuple[str, ...]:
    """Of the server that is scraped; its SSD tier is in ``folder``."""
    return (*_FLAGS, "--kv-tiering-ssd-dir", str(folder / "ssd"))


def speed_up(rules: str) -> str:
    """Rules that look back one minute instead of five, and alert after 2 s."""
    return re.sub(r"for: \d+m", "for: 2s", rules.replace("[5m]", "[1m]"))


@contextmanager
def prometheus(target: str, folder: Path, escaped: bool = False) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``target`` each second, by the shipped configuration and rules.

    ``escaped``: it stores names with an underscore for their colon, as newer ones may.
    """
    folder.mkdir(parents=True)
    config = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    if escaped:
        job["metric_relabel_configs"] = [
            {
                "source_labels": ["__name__"],
                "regex": "sglang:(.*)",
                "target_label": "__name__",
                "replacement": "sglang_$1",
            }
        ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "rules").mkdir()
    for path in RULES.iterdir():
        (folder / "rules" / path.name).write_text(speed_up(path.read_text()))
    port = _free_port()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [
                shutil.which("prometheus") or "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 60
        while not _answers(server):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _answers(server: Prometheus) -> bool:
    try:
        return bool(server.query("vector(1)"))
    except Exception:  # not listening yet
        return False


def ask(server: Server, prompt: Sequence[int], tokens: int, **fields: Any) -> None:
    """One request, with more fields (``routing_key``, ``custom_labels``).

    It streams: SGLang measures the time between tokens of answers that arrive in parts.
    """
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": params, "stream": True, **fields}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=1200) as answer:
        answer.raise_for_status()
        assert answer.read().rstrip().endswith(b"[DONE]")


def ask_all(server: Server, requests: Sequence[tuple[Sequence[int], int, dict[str, Any]]]) -> None:
    """Requests at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        for _ in threads.map(lambda x: ask(server, x[0], x[1], **x[2]), requests):
            pass


def calm(server: Server) -> None:
    """Long contexts of two tenants, one named by each way, and of nobody."""
    tenants: list[dict[str, Any]] = [
        {"routing_key": "red"},
        {"custom_labels": {TENANT_LABEL: "blue"}},
        {},
    ]
    long = prompts([1100, 900, 800])
    ask_all(server, [(prompt, 40, tenant) for prompt, tenant in zip(long, tenants, strict=True)])
    # Once more, so that it is recalled.
    ask(server, long[1], 40)


def swing(server: Server, number: int) -> None:
    """Contexts that have just begun to be routed and go to and fro between two texts: what a
    request keeps of its history is little, and seldom what it kept before."""
    text, start = text_tokens(), 20_000 + 400 * number
    places = [(start, start + 50_000)[piece % 2] + 16 * piece for piece in range(17)]
    swinging = [token for place in places for token in text[place : place + 16]]
    requests = [(swinging[i:], 48, {"routing_key": f"swing-{i}"}) for i in range(4)]
    ask_all(server, requests)
