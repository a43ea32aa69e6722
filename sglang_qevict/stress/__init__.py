"""`sglang-qevict stress`: a mix of tenants against a running server, and how it fared."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from sglang_qevict.stress.drive import Driver, Target, connect, load_texts
from sglang_qevict.stress.mix import Mix, read_mix
from sglang_qevict.stress.problem import Problem
from sglang_qevict.stress.progress import frame
from sglang_qevict.stress.records import Record, Run
from sglang_qevict.stress.summary import unmet
from sglang_qevict.stress.workload import Workload

__all__ = ["Problem", "run"]

INTERRUPTED = 130


def run(
    mix_path: Path,
    address: str,
    api_key: str | None,
    directory: Path,
    *,
    seed: int | None = None,
    seconds: float | None = None,
    baseline: bool = False,
    baseline_from: Path | None = None,
) -> int:
    """Drive a server with a mix and write a report into ``directory``; returns the exit status.

    0: everything was sent and what the mix requires was reached. 1: the server died, or something
    required was not reached. 130: stopped by a user. A report is written in each case.
    ``seed``, ``seconds``: instead of the mix's own. ``baseline``: serve some requests alone first;
    ``baseline_from``: take those of an earlier report's folder.

    Raises ``Problem``, a sentence with the remedy, before anything is sent, or when the report
    can't be written.
    """
    try:
        from sglang_qevict.stress.report import write_report

        mix = read_mix(mix_path)
    except ImportError as error:
        raise Problem(f"{error.name} is missing: pip install 'sglang-qevict[stress]'") from None
    mix = dataclasses.replace(
        mix,
        seed=mix.seed if seed is None else seed,
        seconds=mix.seconds if seconds is None else seconds,
    )
    alone = _read_baseline(baseline_from) if baseline_from else []
    _require_room_for_a_report(directory)
    target = connect(address, api_key)
    workload = Workload(mix, load_texts(target), target.max_context)
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        driver = Driver(target, workload, lambda driver: live.update(frame(driver)))
        driver.run.facts = _facts(target, mix)
        driver.run.alone = alone
        driver.run.notes += _notes(target, mix)
        result = asyncio.run(driver.drive(baseline))
    console.print(frame(driver))
    try:
        page = write_report(directory, result)
    except OSError as error:
        raise Problem(
            f"the report can't be written to {directory} ({error.strerror}): make room there and "
            "run again"
        ) from None
    print(page)
    return _status(result, console)


def _require_room_for_a_report(directory: Path) -> None:
    """Make the folder of the report, or find that nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise Problem(
            f"{directory} can't be written ({error.strerror}): name another folder by --out"
        ) from None


def _status(result: Run, console: Console) -> int:
    problems = [result.died] if result.died else []
    if result.stopped:
        console.print("stopped: the report has what was measured so far")
    else:
        problems += unmet(result)
    for problem in problems:
        console.print(f"sglang-qevict: {problem}", style="red", markup=False, highlight=False)
    if result.stopped and not result.died:
        return INTERRUPTED
    return 1 if problems else 0


def _facts(target: Target, mix: Mix) -> dict[str, str]:
    return {
        "mix": f"{mix.name}, seed {mix.seed}, {len(mix.tenants)} tenants",
        "model": target.model,
        "server": f"{target.address}, SGLang {target.version}, "
        + ("KV cache in tiers" if target.tiered else "no tiers"),
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _notes(target: Target, mix: Mix) -> list[str]:
    notes = []
    if not target.priorities and any(tenant.priority is not None for tenant in mix.tenants):
        notes.append(
            "Priorities were not sent: the server runs without --enable-priority-scheduling."
        )
    return notes


def _read_baseline(directory: Path) -> list[Record]:
    path = directory / "baseline.json"
    try:
        records = [Record.from_json(data) for data in json.loads(path.read_text())]
    except OSError as error:
        raise Problem(
            f"{path} can't be read ({error.strerror}): name the folder of a report that was made "
            "with --baseline"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Problem(f"{path} is no baseline: make one with --baseline") from None
    return records
