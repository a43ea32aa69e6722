"""The SSD tier of a real server: recalls, restarts, kills, full and damaged disks."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from server import tiering
from server.harness import Server, ServerFailed
from server.tiering import (
    TIERED,
    answer,
    assert_idle,
    assert_same_up_to_a_near_tie,
    cached,
    prompts,
    report,
    wait_for,
    wait_for_writes,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LENGTH, TOKENS = 1500, 16


def flags(directory: Path, *more: str) -> tuple[str, ...]:
    return (
        *TIERED,
        "--kv-tiering-ssd-dir",
        str(directory),
        "--kv-tiering-ssd-persist",
        "on",
        *more,
    )


ask = partial(tiering.ask, tokens=TOKENS)


def counts(server: Server) -> dict[str, int]:
    """The store's counters, and how many requests and windows were recalled, or not."""
    spill = report(server)["spill"]
    requests, windows = spill["recalls"]["requests"], spill["recalls"]["windows"]
    recalls = {
        "requests": requests.pop("recalled"),
        "windows": windows["recalled"],
        "failed": sum(requests.values()),
    }
    return {**spill["counters"], **recalls}


def crash(server: Server) -> None:
    """Kill every process at once, as a power cut would."""
    for process in server.processes():
        process.kill()
    server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("spill")
    server = Server(*flags(directory / "ssd"), log_path=directory / "server.log")
    with server:
        yield server
        assert_idle(server)


def test_a_flushed_prefix_comes_back_and_is_answered_as_if_computed(server: Server) -> None:
    (prompt,) = prompts([LENGTH], start=1_000)
    cold = answer(server, prompt, TOKENS)
    server.flush_cache()
    before = counts(server)
    warm = answer(server, prompt, TOKENS)
    assert_same_up_to_a_near_tie(cold, warm)
    after = counts(server)
    assert after["requests"] == before["requests"] + 1
    assert after["windows"] == before["windows"] + (LENGTH - 1) // 8
    assert after["failed"] == 0


def test_a_later_turn_gets_the_originals_of_question_and_answer(server: Server) -> None:
    document, question = prompts([LENGTH, 24], start=4_000)
    first = ask(server, document)
    turn = document + first["output_ids"] + question
    again = ask(server, turn)
    # The last token of an answer has no KV yet.
    assert cached(again) == (LENGTH + TOKENS - 1) // 8 * 8
    assert report(server)["counters"]["non_finite"] == 0


def test_tenants_with_other_salts_find_nothing(server: Server) -> None:
    (prompt,) = prompts([700], start=7_000)
    assert cached(ask(server, prompt, cache_salt="one")) == 0
    server.flush_cache()
    assert cached(ask(server, prompt, cache_salt="other")) == 0
    assert cached(ask(server, prompt, extra_key="one")) == 0
    assert cached(ask(server, prompt)) == 0
    server.flush_cache()
    assert cached(ask(server, prompt, cache_salt="one")) == 696


def test_a_short_prompt_is_recalled_as_well(server: Server) -> None:
    (prompt,) = prompts([90], start=9_000)
    cold = answer(server, prompt, TOKENS)
    server.flush_cache()
    assert_same_up_to_a_near_tie(cold, answer(server, prompt, TOKENS))
    server.flush_cache()
    assert cached(ask(server, prompt)) == 88


def exported(server: Server, name: str) -> float:
    """A metric of the SSD tier, summed over its labels."""
    found = server.metrics().items()
    return sum(value for key, value in found if key.startswith(f"sglang_qevict_spill_{name}{{"))


def test_metrics_follow_what_is_written_after_the_last_launch(server: Server) -> None:
    (prompt,) = prompts([LENGTH], start=72_000)
    ask(server, prompt)
    wait_for_writes(server)
    wait_for(
        lambda: exported(server, "written_records_total") == counts(server)["written"], seconds=30
    )
    usage = report(server)["spill"]["usage"]
    assert exported(server, "records") == usage["records"]
    assert exported(server, "bytes") == usage["payload_bytes"]
    found = counts(server)
    assert exported(server, "recalls_total") == found["requests"] + found["failed"]


@pytest.mark.slow
def test_a_second_server_on_the_directory_is_refused_in_a_sentence(
    server: Server, tmp_path: Path
) -> None:
    directory = server.command[server.command.index("--kv-tiering-ssd-dir") + 1]
    other = Server(*flags(Path(directory)), log_path=tmp_path / "other.log")
    with pytest.raises(ServerFailed):
        other.start()
    assert "--kv-tiering-ssd-dir" in other.log_text()
    assert "Traceback" not in other.log_text()


@pytest.mark.slow
def test_what_was_written_survives_the_server(tmp_path: Path) -> None:
    (prompt,) = prompts([LENGTH], start=11_000)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "first.log") as first:
        cold = answer(first, prompt, TOKENS)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "second.log") as second:
        assert_same_up_to_a_near_tie(cold, answer(second, prompt, TOKENS))
        assert counts(second)["windows"] == (LENGTH - 1) // 8
        assert_idle(second)


@pytest.mark.slow
def test_sglang_s_file_backend_serves_as_well(tmp_path: Path) -> None:
    (prompt,) = prompts([LENGTH], start=12_600)
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "pages")}
    backend = (*TIERED, "--kv-tiering-spill-backend", "file")
    with Server(*backend, log_path=tmp_path / "server.log", env=env) as server:
        cold = answer(server, prompt, TOKENS)
        wait_for_writes(server)
        server.flush_cache()
        assert_same_up_to_a_near_tie(cold, answer(server, prompt, TOKENS))
        assert counts(server)["windows"] == (LENGTH - 1) // 8
        assert len(list((tmp_path / "pages").iterdir())) >= (LENGTH - 1) // 8
        assert_idle(server)
        server.assert_clean()


@pytest.mark.slow
def test_another_model_s_files_are_ignored(tmp_path: Path) -> None:
    (prompt,) = prompts([700], start=13_000)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "first.log") as first:
        ask(first, prompt)
    wider = flags(tmp_path / "ssd", "--kv-tiering-window", "16", "--page-size", "16")
    with Server(*wider, log_path=tmp_path / "second.log") as second:
        assert cached(ask(second, prompt)) == 0
        assert_idle(second)


@pytest.mark.slow
def test_servers_of_other_budgets_share_the_file_and_find_nothing(tmp_path: Path) -> None:
    (prompt,) = prompts([700], start=74_000)
    for budget, found in (("0.2", 0), ("0.5", 0), ("0.2", 696)):
        tiers = flags(tmp_path / "ssd", "--kv-tiering-budget", budget)
        with Server(*tiers, log_path=tmp_path / "server.log") as server:
            assert cached(ask(server, prompt)) == found
            assert_idle(server)
    assert len([*(tmp_path / "ssd").rglob("*.spill")]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_any_moment_leave_nothing_torn(tmp_path: Path) -> None:
    """Twenty times a server is killed while it writes; what the next one recalls is right."""
    known, *others = prompts([LENGTH, *[1200] * 20], start=16_000)
    rng = random.Random(0)
    expected = None
    for number, other in enumerate(others):
        log = tmp_path / f"{number}.log"
        server = Server(*flags(tmp_path / "ssd", "--kv-tiering-ssd-size", "256M"), log_path=log)
        server.start()
        found = answer(server, known, TOKENS)
        if expected is None:
            expected = found
        else:
            assert_same_up_to_a_near_tie(expected, found)
            assert counts(server)["corrupt"] == 0
        assert_clean_log(server)
        writer = threading.Thread(target=_ask_until_it_ends, args=(server, other))
        writer.start()
        time.sleep(rng.uniform(0.2, 4.0))
        crash(server)
        writer.join()
    files = [path for path in (tmp_path / "ssd").rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) <= 260 << 20


def _ask_until_it_ends(server: Server, prompt: list[int]) -> None:
    try:
        for start in range(0, len(prompt), 300):
            ask(server, prompt[start:] + prompt[:start])
    except httpx.HTTPError:
        pass


def assert_clean_log(server: Server) -> None:
    assert "Traceback (most recent call last)" not in server.log_text()


@pytest.mark.slow
def test_a_damaged_file_is_noticed_and_requests_go_on(tmp_path: Path) -> None:
    (prompt,) = prompts([LENGTH], start=45_000)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "first.log") as first:
        cold = answer(first, prompt, TOKENS)
    (file,) = (tmp_path / "ssd").rglob("*.spill")
    data = bytearray(file.read_bytes())
    rng = random.Random(1)
    for _ in range(200):
        data[rng.randrange(len(data) // 20, len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "second.log") as second:
        assert_same_up_to_a_near_tie(cold, answer(second, prompt, TOKENS))
        found = counts(second)
        assert found["corrupt"] + found["rejected_records"] + found["rejected_segments"] > 0
        assert_idle(second)
        second.assert_clean()


@pytest.mark.slow
def test_a_directory_that_goes_away_costs_the_tier_alone(tmp_path: Path) -> None:
    one, two = prompts([LENGTH, LENGTH], start=48_000)
    with Server(*flags(tmp_path / "ssd"), log_path=tmp_path / "server.log") as server:
        cold = answer(server, one, TOKENS)
        wait_for_writes(server)
        shutil.rmtree(tmp_path / "ssd")
        ask(server, two)
        server.flush_cache()
        assert_same_up_to_a_near_tie(cold, answer(server, one, TOKENS))
        assert_idle(server)
        server.assert_clean()


@pytest.mark.slow
def test_a_full_disk_drops_windows_and_says_so_once(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40M", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        one, two = prompts([LENGTH, 3 * LENGTH], start=52_000)
        with Server(*flags(disk), log_path=tmp_path / "server.log") as server:
            for prompt in (one, two):
                ask(server, prompt)
            wait_for_writes(server)
            assert counts(server)["dropped_disk_full"] > 0
            assert cached(ask(server, one)) > 0
            assert_idle(server)
            server.assert_clean()
            assert server.log_text().count("is full") == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_aborts_and_retractions_leave_nothing(tmp_path: Path) -> None:
    """Short of memory, with requests that hang up, and prefixes that are recalled meanwhile."""
    asked = prompts([900] * 6, start=60_000)
    few = flags(tmp_path / "ssd", "--max-total-tokens", "4096")
    with Server(*few, log_path=tmp_path / "server.log") as server:
        with ThreadPoolExecutor(24) as threads:
            answers = []
            for number in range(24):
                answers.append(threads.submit(_hang_up, server, asked[number % 6], number % 3))
                time.sleep(0.2)
        for one in answers:
            one.result()
        assert "Retract requests" in server.log_text()
        assert_idle(server)
        server.assert_clean()
        assert counts(server)["requests"] > 0


def _hang_up(server: Server, prompt: list[int], kind: int) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    timeout = 1.5 if kind == 0 else 120
    try:
        httpx.post(f"{server.url}/generate", json=body, timeout=timeout).raise_for_status()
    except httpx.TimeoutException:
        assert kind == 0
