"""The live page without a server: what a look says, who gets it, and how often one is asked for."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.utils.auth import add_api_key_middleware

from mini_engine import SMALL, MiniEngine
from qevict_kernels import make_kernels
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.policy import Tier
from sglang_qevict import colors, hooks
from sglang_qevict.live import routes
from sglang_qevict.live.look import LOOK, MAX_REQUESTS, look
from sglang_qevict.live.routes import AskForKey, Looks, add_routes

CONFIG = TieringConfig(**SMALL)


def _engine(rows: int = 4) -> MiniEngine:
    return MiniEngine(
        lambda geometry, rotary: make_kernels(geometry, rotary, torch.device("cpu")),
        CONFIG,
        Heads(4, 2, 64),
        kv_tokens=1600,
        context=640,
        rows=rows,
    )


def _names(engine: MiniEngine) -> dict[int, str]:
    return {request.row: f"request {name}" for name, request in engine.running.items()}


# -- a look -----------------------------------------------------------------------------------


def test_a_look_maps_each_request_as_its_view_is() -> None:
    engine = _engine()
    engine.start(1, 300)
    engine.start(2, 40)
    engine.extend({1: 300, 2: 40})
    engine.decode([1, 2])
    found = look(engine.state, _names(engine))
    assert json.loads(json.dumps(found)) is not None
    assert [each["id"] for each in found["maps"]] == ["request 1", "request 2"]
    for name, each in zip((1, 2), found["maps"], strict=True):
        tiers = engine.tiers(name)
        cells = torch.tensor(list(base64.b64decode(each["cells"]))).view(each["layers"], -1)
        assert each["span"] == 1
        assert each["tokens"] == engine.running[name].stored
        assert torch.equal(cells == 0xF0, tiers == Tier.FULL)
        assert torch.equal(cells == 0x0F, tiers == Tier.CODED)
        assert torch.equal(cells == 0x00, tiers == Tier.EVICTED)
    assert [each["is_exact"] for each in found["maps"]] == [False, True]
    assert (engine.tiers(1) == Tier.CODED).any()


def test_a_look_changes_nothing() -> None:
    engine = _engine()
    engine.start(1, 300)
    engine.extend({1: 300})
    before = engine.tiers(1), engine.state.report()
    look(engine.state, _names(engine))
    assert torch.equal(engine.tiers(1), before[0])
    assert engine.state.report() == before[1]
    engine.decode([1])
    assert engine.problems() == []


def test_requests_that_ended_or_began_since_the_last_launch_have_no_map() -> None:
    engine = _engine()
    engine.start(1, 100)
    engine.start(2, 100)
    engine.extend({1: 100, 2: 100})
    row = engine.running[1].row
    engine.finish(1)
    engine.start(3, 100)
    assert engine.running[3].row == row
    names = _names(engine)
    assert [each["id"] for each in look(engine.state, names)["maps"]] == ["request 2"]
    engine.extend({3: 100})
    assert [each["id"] for each in look(engine.state, names)["maps"]] == ["request 2", "request 3"]


def test_of_many_requests_those_that_began_first_are_shown() -> None:
    many = MAX_REQUESTS + 3
    engine = _engine(rows=many)
    for name in range(many):
        engine.start(name, 20)
    engine.extend(dict.fromkeys(range(many), 20))
    found = look(engine.state, _names(engine))
    assert [each["id"] for each in found["maps"]] == [f"request {i}" for i in range(MAX_REQUESTS)]
    assert found["left_out"] == 3


def test_the_scheduler_answers_a_look_and_nothing_else_of_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sglang(controller: Any, request: Any) -> Any:
        return GetInternalStateReqOutput(internal_state={"model_path": "it"})

    def answer(request: Any) -> Any:
        return hooks.get_internal_state(sglang, SimpleNamespace(scheduler=None), request)

    assert answer(GetInternalStateReq(rid=LOOK)).internal_state == {"model_path": "it"}
    state = SimpleNamespace(report=lambda: {"budget": 0.2})
    monkeypatch.setattr(hooks.runtime, "state", state)
    monkeypatch.setattr(hooks, "look_at_scheduler", lambda scheduler, state: {"rank": 0})
    assert answer(GetInternalStateReq(rid=LOOK)).internal_state == {"rank": 0}
    assert answer(GetInternalStateReq()).internal_state == {
        "model_path": "it",
        "kv_tiering": {"budget": 0.2},
    }


# -- how often --------------------------------------------------------------------------------


class _Scheduler:
    """Answers when it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_free = asyncio.Event()

    async def ask(self) -> list[dict[str, Any]]:
        self.asked += 1
        await self.is_free.wait()
        return [{"rank": 0, "number": self.asked}]


def test_however_many_look_a_busy_scheduler_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_PATIENCE_SECONDS", 0.02)

    async def run() -> None:
        scheduler = _Scheduler()
        looks = Looks(scheduler.ask)
        for _ in range(3):
            found = await asyncio.gather(*[looks.latest() for _ in range(20)])
            assert all(each["ranks"] is None and each["busy_seconds"] > 0 for each in found)
        assert scheduler.asked == 1
        scheduler.is_free.set()
        await asyncio.sleep(0.01)
        found = [await looks.latest() for _ in range(20)]
        assert all(each["ranks"][0]["number"] == 1 for each in found)
        assert all(each["busy_seconds"] == 0 for each in found)
        assert scheduler.asked == 1

    asyncio.run(run())


def test_a_busy_scheduler_leaves_the_last_look_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(routes, "_FRESH_SECONDS", 0.0)

    async def run() -> None:
        scheduler = _Scheduler()
        looks = Looks(scheduler.ask)
        scheduler.is_free.set()
        assert (await looks.latest())["ranks"][0]["number"] == 1
        scheduler.is_free.clear()
        began = time.monotonic()
        found = await looks.latest()
        assert found["ranks"][0]["number"] == 1
        assert 0 < found["busy_seconds"] <= time.monotonic() - began

    asyncio.run(run())


def test_a_look_that_failed_is_told_and_asked_for_again() -> None:
    answers = iter([ValueError("no scheduler"), [{"rank": 0}]])

    async def ask() -> list[dict[str, Any]]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run() -> None:
        looks = Looks(ask)
        with pytest.raises(ValueError, match="no scheduler"):
            await looks.latest()
        assert (await looks.latest())["ranks"] == [{"rank": 0}]

    asyncio.run(run())


# -- over HTTP --------------------------------------------------------------------------------


class _Manager:
    """As much of SGLang's tokenizer manager as the routes use; replicas answer in any order."""

    def __init__(self, is_tiered: bool) -> None:
        self.served_model_name = "a-model"
        self.server_args = SimpleNamespace(_kv_tiering=CONFIG if is_tiered else None)
        self.asked: list[str | None] = []

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: GetInternalStateReq) -> list[Any]:
        self.asked.append(request.rid)
        return [SimpleNamespace(internal_state={"rank": rank}) for rank in (1, 0)]


def _app(manager: _Manager, api_key: str | None = None, admin: str | None = None) -> TestClient:
    app = FastAPI()
    app.add_api_route("/server_info", lambda: {})
    add_routes(app, lambda: manager)
    if api_key or admin:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin)
        app.add_middleware(AskForKey)
    return TestClient(app)


def test_the_state_has_all_replicas_in_order() -> None:
    manager = _Manager(is_tiered=True)
    answer = _app(manager).get("/kv_tiering/state").json()
    assert answer == {
        "tiering": "qevict",
        "model": "a-model",
        "ranks": [{"rank": 0}, {"rank": 1}],
        "busy_seconds": 0.0,
    }
    assert manager.asked == [LOOK]


def test_without_tiering_the_state_says_so_and_asks_no_scheduler() -> None:
    manager = _Manager(is_tiered=False)
    client = _app(manager)
    assert client.get("/kv_tiering/state").json() == {"tiering": "off", "model": "a-model"}
    assert client.get("/kv_tiering").status_code == 200
    assert manager.asked == []


@pytest.mark.parametrize(("api_key", "admin"), product([None, "key"], [None, "admin"]))
@pytest.mark.parametrize("sent", [None, "key", "admin", "wrong"])
def test_keys_open_what_they_open_of_server_info(
    api_key: str | None, admin: str | None, sent: str | None
) -> None:
    client = _app(_Manager(is_tiered=True), api_key, admin)
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    expected = client.get("/server_info", headers=headers).status_code
    assert expected == (200 if api_key is None or sent == api_key else 401)
    state = client.get("/kv_tiering/state", headers=headers)
    page = client.get("/kv_tiering", headers=headers)
    assert (state.status_code, page.status_code) == (expected, expected)
    assert ("ranks" in state.json()) == (expected == 200)
    # The page itself knows nothing, so a refused browser gets it, to ask for the key.
    assert "<h2>This server wants its API key</h2>" in page.text


def test_other_refusals_stay_as_they_are() -> None:
    client = _app(_Manager(is_tiered=True), "key")
    for answer in (client.get("/server_info"), client.post("/kv_tiering")):
        assert answer.status_code == 401
        assert answer.json() == {"error": "Unauthorized"}


# -- the page ---------------------------------------------------------------------------------


def test_the_page_has_the_colours_of_tiers_and_nothing_from_elsewhere() -> None:
    page = _app(_Manager(is_tiered=True)).get("/kv_tiering")
    light, dark = re.findall(r":root \{(.*?)\}", page.text, re.DOTALL)[:2]
    for name in ("full", "coded", "protected", "evicted", "spilled"):
        assert f"--{name}: {getattr(colors, name.upper())}" in light
    assert f"--evicted: {colors.EVICTED_ON_DARK}" in dark
    assert not re.findall(r"--(?:full|coded|protected|spilled):", dark)
    addresses = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page.text)
    assert [address for address in addresses if not address.startswith("data:")] == []
    assert re.findall(r"https?://[^\"\s]+", page.text) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
