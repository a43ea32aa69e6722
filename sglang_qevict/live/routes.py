"""``/kv_tiering`` and ``/kv_tiering/state`` of SGLang's HTTP server.

Both are routes like SGLang's other info endpoints, ``/server_info`` among them: where the
server has an ``--api-key`` they want it, and an admin key opens nothing more. The page holds no
data, so a browser that brings no key gets it with the refusal, to ask for the key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse

from sglang_qevict.live.look import LOOK
from sglang_qevict.runtime import config_of

__all__ = ["AskForKey", "Looks", "add_routes"]

PATH = "/kv_tiering"

_PATIENCE_SECONDS = 1.0
"""After that a look that has not come is told as a busy scheduler."""
_FRESH_SECONDS = 0.5
"""As long as that a look serves everybody who asks."""

_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    # Nothing comes from anywhere else, and nothing that a request is called by can be a script.
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}

_Ranks = list[dict[str, Any]]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class Looks:
    """Looks for any number of pages: one is under way at a time, however slow the scheduler.

    ``ask`` fetches the looks of all data-parallel ranks. A busy scheduler answers between two
    steps, so an answer may take as long as a prefill; meanwhile everybody gets the last one.
    """

    def __init__(self, ask: Callable[[], Awaitable[_Ranks]]) -> None:
        self._ask = ask
        self._ranks: _Ranks | None = None
        self._asked = self._answered = 0.0
        self._pending: asyncio.Task[None] | None = None

    async def latest(self) -> dict[str, Any]:
        """The looks (``ranks``, None before the first), and how long one has been waited for.

        ``busy_seconds`` is 0 unless the scheduler did not answer in time.
        """
        now = time.monotonic()
        if self._pending is None and now - self._answered >= _FRESH_SECONDS:
            self._asked = now
            self._pending = asyncio.create_task(self._fetch())
        pending = self._pending
        if pending is not None:
            await asyncio.wait({pending}, timeout=_PATIENCE_SECONDS)
            if pending.done():
                pending.result()
        is_busy = pending is not None and not pending.done()
        busy_seconds = time.monotonic() - self._asked if is_busy else 0.0
        return {"ranks": self._ranks, "busy_seconds": busy_seconds}

    async def _fetch(self) -> None:
        try:
            self._ranks = await self._ask()
            self._answered = time.monotonic()
        finally:
            self._pending = None


class AskForKey:
    """Middleware around SGLang's check of keys: a refused ``GET /kv_tiering`` gets the page.

    It stays a refusal, with the same status.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """ASGI."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path != PATH or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        refused = False

        async def send_unless_refused(message: _Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
            if not refused:
                await send(message)

        await self.app(scope, receive, send_unless_refused)
        if refused:
            headers = {**_PAGE_HEADERS, "WWW-Authenticate": "Bearer"}
            await HTMLResponse(_page(), 401, headers)(scope, receive, send)


def add_routes(app: FastAPI, tokenizer_manager: Callable[[], Any]) -> None:
    """Add both routes to SGLang's app; ``tokenizer_manager`` gets its side of the scheduler."""

    async def ask() -> _Ranks:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        manager = tokenizer_manager()
        manager.auto_create_handle_loop()
        answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=LOOK))
        return sorted((answer.internal_state for answer in answers), key=lambda rank: rank["rank"])

    looks = Looks(ask)

    async def page() -> HTMLResponse:
        return HTMLResponse(_page(), headers=_PAGE_HEADERS)

    async def state() -> JSONResponse:
        """What KV tiering holds now, as the page /kv_tiering shows it."""
        manager = tokenizer_manager()
        is_on = config_of(manager.server_args) is not None
        answer = {
            "tiering": "qevict" if is_on else "off",
            "model": manager.served_model_name,
            **(await looks.latest() if is_on else {}),
        }
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    app.add_api_route(PATH, page, include_in_schema=False)
    app.add_api_route(f"{PATH}/state", state)


def _page() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
