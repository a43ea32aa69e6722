"""A server that answers as SGLang does, in a thread: for what a real one seldom does on request.

It streams made-up tokens, one every few milliseconds, or refuses, stalls or dies.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeSGLang:
    """A context manager. ``answer`` is what every request gets as text; ``bodies`` keeps them.

    refuse: status of every answer to `/generate`. die_after: requests until it closes for good.
    interval: tokens that come together. incremental: events have what is new only. garbled: events
    have nothing that SGLang's have.
    """

    def __init__(
        self,
        answer: str = " 1009",
        token_seconds: float = 0.002,
        refuse: int | None = None,
        die_after: int | None = None,
        api_key: str | None = None,
        tiered: bool = False,
        priorities: bool = False,
        interval: int = 1,
        incremental: bool = False,
        garbled: bool = False,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.left: list[str] = []
        self.answer = answer
        self._token_seconds = token_seconds
        self._refuse = refuse
        self._die_after = die_after
        self._api_key = api_key
        self._tiered = tiered
        self._priorities = priorities
        self._interval = interval
        self._incremental = incremental
        self._garbled = garbled
        self._routed = 0
        routes = [
            Route("/model_info", self._model_info),
            Route("/server_info", self._server_info),
            Route("/v1/models", self._models),
            Route("/metrics", lambda _: PlainTextResponse("missing", 404)),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def _denied(self, request: Request) -> Response | None:
        expected = f"Bearer {self._api_key}"
        if self._api_key and request.headers.get("authorization") != expected:
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    def _model_info(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"model_path": "/models/made-up"})

    def _server_info(self, request: Request) -> Response:
        state: dict[str, Any] = {}
        if self._tiered:
            self._routed += 100
            names = ("full", "codes", "params", "alignment", "shadow", "reuse", "claimed")
            moves = ("rank_promoted", "promoted", "demoted", "evicted_full", "evicted_coded")
            state["kv_tiering"] = {
                "layers": {"full": [3, 3], "coded": [5, 5], "evicted": [1, 1]},
                "bytes": dict.fromkeys(names, 2**20),
                "counters": {"routed": self._routed, **dict.fromkeys(moves, self._routed // 10)},
            }
        return self._denied(request) or JSONResponse(
            {
                "version": "0",
                "enable_priority_scheduling": self._priorities,
                "internal_states": [state],
            }
        )

    def _models(self, request: Request) -> Response:
        return self._denied(request) or JSONResponse({"data": [{"max_model_len": 2048}]})

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        begin = [1] if body["add_special_tokens"] else []
        ids = [begin + [ord(x) % 4000 for x in text] for text in body["prompt"]]
        return JSONResponse({"tokens": ids})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self._refuse:
            return JSONResponse({"error": {"message": "no room"}}, self._refuse)
        if self._die_after is not None and len(self.bodies) > self._die_after:
            self._server.should_exit = self._server.force_exit = True
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        count = body["sampling_params"]["max_new_tokens"]
        ended, told = False, 0
        with suppress(asyncio.CancelledError):
            for tokens in range(1, count + 1):
                await asyncio.sleep(self._token_seconds)
                if tokens % self._interval and tokens < count:
                    continue
                meta = {
                    "completion_tokens": tokens,
                    "finish_reason": {"type": "length"} if tokens == count else None,
                    "cached_tokens": 8,
                    "num_retractions": 1,
                }
                first, told = told if self._incremental else 0, tokens
                text = self.answer if not first else ""
                ids = list(range(7 + first, 7 + tokens))
                event = {"text": text, "output_ids": ids, "meta_info": meta}
                yield f"data: {json.dumps({} if self._garbled else event)}\n\n"
            ended = True
            yield "data: [DONE]\n\n"
        if not ended:
            self.left.append(body["rid"])
