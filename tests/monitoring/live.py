"""A real server and real Prometheuses that scrape it, sped up: their rules look back seconds."""

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

import yaml

from qevict_monitoring.prometheus import Prometheus
from server.harness import Server
from server.tiering import prompts, text_tokens
from sglang_qevict.local_server import _free_port

ROOT = Path(__file__).parents[2] / "monitoring"
RULES = ROOT / "prometheus" / "rules"
DASHBOARDS = ROOT / "grafana" / "dashboards"

TENANT_LABEL = "team"

FLAGS = (
    *("--kv-tiering", "qevict"),
    # Events are rare, and short requests are routed: so their churn is large, if they get there.
    *("--kv-tiering-route-every", "32"),
    *("--kv-tiering-min-context", "256"),
    *("--chunked-prefill-size", "1024"),
    *("--tokenizer-metrics-allowed-custom-labels", TENANT_LABEL),
)


def speed_up(rules: str) -> str:
    """Rules that look back 30 s instead of minutes, and alert after 4 s."""
    return re.sub(r"for: \d+m", "for: 4s", rules.replace("[5m]", "[30s]"))


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
    """One request, with more fields (``routing_key``, ``custom_labels``)."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    server.post("/generate", {"input_ids": list(prompt), "sampling_params": params, **fields})


def ask_all(server: Server, requests: Sequence[tuple[Sequence[int], int, dict[str, Any]]]) -> None:
    """Requests at the same time."""
    with ThreadPoolExecutor(len(requests)) as threads:
        for _ in threads.map(lambda x: ask(server, x[0], x[1], **x[2]), requests):
            pass


def calm(server: Server, tokens: int = 96) -> None:
    """Two long contexts of two tenants, one named by each way, and one of nobody."""
    long = prompts([2400, 1800, 900])
    tenants: list[dict[str, Any]] = [
        {"routing_key": "red"},
        {"custom_labels": {TENANT_LABEL: "blue"}},
        {},
    ]
    ask_all(server, [(p, tokens, t) for p, t in zip(long, tenants, strict=True)])


def oscillate(server: Server, rounds: int = 1, start: int = 20_000) -> None:
    """Short contexts that swing between two texts every few tokens, so that what one part
    attends to the next does not."""
    text = text_tokens()
    for number in range(rounds):
        here = start + 700 * number
        swinging = [
            token
            for piece in range(18)
            for token in text[
                (here, here + 50_000)[piece % 2] + 16 * piece : (here, here + 50_000)[piece % 2]
                + 16 * piece
                + 16
            ]
        ]
        requests = [(swinging[i:], 200, {"routing_key": f"swing-{i % 3}"}) for i in range(6)]
        ask_all(server, requests)
