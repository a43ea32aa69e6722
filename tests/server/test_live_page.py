"""The live page in headless Chromium, on servers with and without tiers and with a key."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from sglang.srt.managers.io_struct import GetInternalStateReq

from qevict_tiers.spill.records import SpillCounters, SpillUsage
from server.harness import Server, ServerPool
from server.tiering import TIERED, prompts
from sglang_qevict import cli, colors
from sglang_qevict.live.routes import add_routes
from sglang_qevict.spill import Recall, RecallCounters

selenium = pytest.importorskip("selenium", reason="selenium is not installed (the extra `test`)")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="needs Chromium (Debian: chromium, chromium-driver)"
    ),
]

_SECONDS = 120.0
_MAPS = "#maps canvas"
_PIXELS = """
const canvas = document.querySelector(arguments[0]);
return canvas ? [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data] : null;
"""  # noqa: E501
_NARROW = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


class Browser:
    """A tab; it fails a test in which the page complained or asked another server for something."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(_SECONDS)

    def text(self, css: str) -> str:
        """What can be read in the first element of a kind; empty if it is hidden."""
        return str(self.driver.find_element(By.CSS_SELECTOR, css).text)

    def sees(self, css: str) -> bool:
        """Whether an element of this kind is shown."""
        return any(each.is_displayed() for each in self.driver.find_elements(By.CSS_SELECTOR, css))

    def pixels(self, css: str) -> list[tuple[int, ...]] | None:
        """The colours of a canvas, [red, green, blue, alpha] each; None if there is none."""
        flat = self.driver.execute_script(_PIXELS, css)
        return flat and list(zip(*[iter(flat)] * 4, strict=True))

    def wait(self, what: Callable[[], Any], told: str) -> Any:
        """The first true value of a condition."""
        deadline = time.monotonic() + _SECONDS
        while not (value := what()):
            assert time.monotonic() < deadline, f"waited for {told}: {self.text('body')}"
            time.sleep(0.1)
        return value

    def complaints(self) -> list[str]:
        """Errors on the page's console: exceptions, what the policy of contents refused, ..."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """Whom the page asked for anything."""
        script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        names: list[str] = self.driver.execute_script(script)
        return {httpx.URL(name).netloc.decode() for name in names if not name.startswith("data:")}


@pytest.fixture
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.driver.quit()


@contextmanager
def _running(server: Server, tokens: int, new: int, name: str = "a-request") -> Iterator[None]:
    """A request runs meanwhile; it is aborted in the end."""
    (prompt,) = prompts([tokens])
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "rid": name}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(server.post, "/generate", body)
        yield
        httpx.post(f"{server.url}/abort_request", json={"rid": name}, timeout=60)
        answer.exception()


def _rgb(color: str) -> tuple[int, ...]:
    return (*bytes.fromhex(color[1:]), 255)


def test_the_map_of_a_request_appears_changes_and_goes(tiered: Server, browser: Browser) -> None:
    browser.driver.get(f"{tiered.url}/kv_tiering")
    browser.wait(lambda: "No request runs" in browser.text("#maps"), "an idle server")
    assert browser.text("#status") == "live"
    with _running(tiered, tokens=900, new=1500):
        first = browser.wait(lambda: browser.pixels(_MAPS), "a map")
        routed = browser.wait(
            lambda: _rgb(colors.CODED) in (pixels := browser.pixels(_MAPS) or []) and pixels,
            "coded windows",
        )
        assert {_rgb(colors.PROTECTED), _rgb(colors.EVICTED)} <= {*routed}
        assert {*routed} <= {_rgb(color) for color in (
            colors.PROTECTED, colors.FULL, colors.CODED, colors.EVICTED
        )}  # fmt: skip
        browser.wait(lambda: (browser.pixels(_MAPS) or routed) != routed, "a change of the map")
        assert len(first) <= len(browser.pixels(_MAPS) or first)
        assert "a-request" in browser.text("#maps")
        assert browser.wait(lambda: browser.text("#tiles").startswith("1\n"), "the running request")
    browser.wait(lambda: "No request runs" in browser.text("#maps"), "the end of the request")
    assert browser.complaints() == []
    assert browser.hosts() == {httpx.URL(tiered.url).netloc.decode()}


def test_a_window_is_told_by_its_place_and_tier(tiered: Server, browser: Browser) -> None:
    browser.driver.get(f"{tiered.url}/kv_tiering")
    with _running(tiered, tokens=900, new=1500):
        browser.wait(lambda: browser.sees(_MAPS), "a map")
        canvas = browser.driver.find_element(By.CSS_SELECTOR, _MAPS)
        over = webdriver.ActionChains(browser.driver).move_to_element(canvas)
        over.move_by_offset(-canvas.size["width"] // 2 + 2, 0).perform()
        told = browser.wait(lambda: browser.text("#maps .tell"), "what is under the pointer")
        assert re.fullmatch(r"layer [12]?\d, tokens 0 to 7: protected", told)


def test_a_name_of_a_request_is_text_whatever_it_is(tiered: Server, browser: Browser) -> None:
    name = "<img src=x onerror=document.title='taken'>"
    browser.driver.get(f"{tiered.url}/kv_tiering")
    with _running(tiered, tokens=40, new=2000, name=name):
        browser.wait(lambda: name in browser.text("#maps"), "the request's name")
        assert browser.driver.title == "KV tiers"
        assert not browser.sees("#maps img")
    assert browser.complaints() == []


def test_the_page_fits_a_telephone(tiered: Server, browser: Browser) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", _NARROW)
    browser.driver.get(f"{tiered.url}/kv_tiering")
    with _running(tiered, tokens=900, new=1500, name="a-name-without-a-break" * 20):
        browser.wait(lambda: browser.sees(_MAPS), "a map")
        width = browser.driver.execute_script("return document.documentElement.scrollWidth")
        assert width == _NARROW["width"]


@pytest.mark.slow
def test_a_server_with_a_key_asks_for_it(
    tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(*TIERED, "--api-key", "right", log_path=tmp_path / "server.log") as server:
        _ask_for_the_key(server, browser, capsys)


def _ask_for_the_key(server: Server, browser: Browser, capsys: pytest.CaptureFixture[str]) -> None:
    page = f"{server.url}/kv_tiering"
    for path in ("", "/state"):
        assert httpx.get(page + path).status_code == 401
        assert httpx.get(page + path, headers={"Authorization": "Bearer no"}).status_code == 401
        headers = {"Authorization": "Bearer right"}
        assert httpx.get(page + path, headers=headers).status_code == 200
    browser.driver.get(page)
    browser.wait(lambda: browser.sees("#locked"), "the question for a key")
    assert not browser.sees("#refused, #main, #off")
    for key, opened in (("wrong", "#refused"), ("right", "#main")):
        browser.driver.find_element(By.ID, "key").send_keys(f"{key}\n")
        browser.wait(lambda opened=opened: browser.sees(opened), f"what {key} opens")
    assert not browser.sees("#locked")
    browser.driver.refresh()
    browser.wait(lambda: browser.sees("#main"), "the page with the key that it was given")
    assert cli.main(["top", server.url, "--once", "--api-key", "wrong"]) == 1
    assert "refuses this key" in capsys.readouterr().err
    assert cli.main(["top", server.url, "--once", "--api-key", "right"]) == 0
    assert "bytes for windows" in capsys.readouterr().out


class _Stub:
    """The page's own routes around a scheduler that is made up: it can be busy, or stop."""

    def __init__(self) -> None:
        self.served_model_name, self.server_args = "a-model", SimpleNamespace(_kv_tiering=object())
        self.port, self.started, self.taken, self.is_busy = 0, 0.0, 0.0, False
        self.spill: dict[str, Any] | None = None

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: GetInternalStateReq) -> list[Any]:
        while self.is_busy:
            await asyncio.sleep(0.05)
        self.taken += 1
        kinds = [
            "full",
            "codes",
            "params",
            "alignment",
            "shadow",
            "reuse",
            "tables",
            "arena",
            "claimed",
        ]
        counters = ["routed", "demoted", "evicted_full", "evicted_coded", "rank_promoted"]
        report = {
            "window": 8, "requests": 1, "kept_pages": 0,
            "bytes": dict.fromkeys([*kinds, "claimed"], 1),
            "layers": {tier: [1, 2] for tier in ("full", "coded", "evicted")},
            "counters": dict.fromkeys(counters, self.taken),
            "spill": self.spill,
        }  # fmt: skip
        looks = [
            {
                "rank": rank, "started": self.started, "taken": self.taken, "waiting": 0,
                "tokens_per_second": 1.0, "seconds": 0.001, "observed": {}, "left_out": 7,
                "report": report, "maps": [self._map(f"request of {rank}")],
            }
            for rank in (0, 1)
        ]  # fmt: skip
        return [SimpleNamespace(internal_state=look) for look in looks]

    def _map(self, name: str) -> dict[str, Any]:
        cells = base64.b64encode(bytes([0xF0, 0x0F, 0x00, 0xF0] * 2)).decode()
        return {
            "id": name, "row": 1, "tokens": 100_000, "prompt_tokens": 9, "reused_tokens": 0,
            "is_exact": False, "history": (1, 12_000), "span": 3125, "layers": 2, "cells": cells,
        }  # fmt: skip

    @contextmanager
    def running(self) -> Iterator[str]:
        """The address of the server while it runs; the same one when it runs again."""
        app = FastAPI()
        add_routes(app, lambda: self)
        config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error")
        listening = config.bind_socket()
        self.port = listening.getsockname()[1]
        server = uvicorn.Server(config)
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.should_exit = True
            thread.join()


def test_a_page_lives_through_a_busy_scheduler_and_a_new_server(browser: Browser) -> None:
    stub = _Stub()
    seen = "return Object.values(seen)[0]?.looks.length || 0"
    with stub.running() as url:
        browser.driver.get(f"{url}/kv_tiering")
        browser.wait(lambda: browser.driver.execute_script(seen) > 3, "some looks")
        stub.is_busy = True
        browser.wait(lambda: "busy for" in browser.text("#status"), "a busy scheduler")
        browser.wait(lambda: "long step" in browser.text("#notice"), "the notice of it")
        assert browser.sees(_MAPS)
        stub.is_busy = False
        browser.wait(lambda: browser.text("#status") == "live", "its answer")
        assert not browser.sees("#notice")
        before = browser.driver.execute_script(seen)
    browser.wait(lambda: browser.text("#status") == "no answer", "the end of the server")
    assert "does not answer" in browser.text("#notice")
    assert browser.sees(_MAPS)
    stub.started = 1.0
    with stub.running():
        browser.wait(lambda: browser.text("#status") == "live", "the new server")
        assert browser.driver.execute_script(seen) < before
    exceptions = [told for told in browser.complaints() if "ERR_" not in told]
    assert exceptions == []


def test_of_two_replicas_one_is_shown_and_long_contexts_share_cells(browser: Browser) -> None:
    with _Stub().running() as url:
        browser.driver.get(f"{url}/kv_tiering")
        browser.wait(lambda: "request of 0" in browser.text("#maps"), "the first replica")
        assert "100,000 tokens" in browser.text("#maps")
        assert "a cell is 3125 windows" in browser.text("#maps")
        assert browser.text("#left") == "7 more run: shown are the 1 that began first."
        browser.driver.find_element(By.CSS_SELECTOR, "#rank option[value='1']").click()
        browser.wait(lambda: "request of 1" in browser.text("#maps"), "the second replica")
        assert "request of 0" not in browser.text("#maps")
    assert [told for told in browser.complaints() if "ERR_" not in told] == []


def test_an_ssd_tier_is_shown_where_there_is_one(browser: Browser) -> None:
    stub, recalls = _Stub(), RecallCounters()
    with stub.running() as url:
        browser.driver.get(f"{url}/kv_tiering")
        browser.wait(lambda: browser.sees(_MAPS), "a look")
        assert not browser.sees("#ssd")
        recalls.add(Recall.RECALLED, 500)
        recalls.add(Recall.NOT_WORTH_IT, 3)
        stub.spill = {
            "usage": SpillUsage(1234, 3 << 20, 4 << 20, 5, 6 << 10, 0)._asdict(),
            "counters": SpillCounters(dropped_disk_full=17, read_errors=2).read(),
            "recalls": recalls.report(),
        }
        browser.wait(lambda: browser.sees("#ssd"), "the SSD tier")
        shown = browser.text("#spilled")
        assert "1,234 windows, 3.0 MiB" in shown
        assert "1 with 500 windows" in shown
        assert "1 not worth it" in shown
        assert "dropped, not written 17 windows" in shown
        assert browser.sees("#spill text")
    assert [told for told in browser.complaints() if "ERR_" not in told] == []


def test_a_server_without_tiers_says_so(
    servers: ServerPool, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    server = servers.get()
    browser.driver.get(f"{server.url}/kv_tiering")
    browser.wait(lambda: browser.sees("#off"), "the notice")
    assert browser.text("#status") == "off"
    assert "--kv-tiering qevict" in browser.text("#off")
    assert not browser.sees("#main")
    assert browser.complaints() == []
    assert cli.main(["top", server.url, "--once"]) == 1
    assert "is a server without tiers" in capsys.readouterr().err
