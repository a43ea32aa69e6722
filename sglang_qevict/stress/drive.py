"""Sends a workload to a running server, and notes how it fares.

Requests go to SGLang's native `/generate` as streams, at temperature 0 and with `ignore_eos`, so
that lengths are those of the mix. One task is a session; one more asks the server about itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import signal
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from qevict_monitoring import table as metrics
from sglang_qevict.live.top import Scrape
from sglang_qevict.stress.mix import Mix, Process, Tenant
from sglang_qevict.stress.problem import Problem
from sglang_qevict.stress.records import Outcome, Record, Run, Sample, flat_tiering
from sglang_qevict.stress.workload import Session, Texts, Turn, Workload

__all__ = ["Driver", "Target", "connect", "load_texts"]

_ANSWER_SECONDS = 30.0
_SAMPLE_SECONDS = 1.0
_DEAD_SECONDS = 10.0
"""How long a server may be unreachable before it counts as dead."""

_METRICS = {
    "token_usage": "sglang:token_usage",
    "ledger_ratio": metrics.LEDGER_RATIO.name,
    "churn_sum": f"{metrics.CHURN.name}_sum",
    "churn_count": f"{metrics.CHURN.name}_count",
    "lir_sum": f"{metrics.LIR.name}_sum",
    "lir_count": f"{metrics.LIR.name}_count",
}
"""What is kept of `/metrics`: name here, name there."""


@dataclass(frozen=True)
class Target:
    """A server that answers. priorities: it takes them. tiered: its KV cache is in tiers."""

    address: str
    api_key: str | None
    model: str
    version: str
    max_context: int
    priorities: bool
    tiered: bool

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def connect(address: str, api_key: str | None) -> Target:
    """Find out what answers at an address.

    Raises ``Problem``.
    """
    address = address.rstrip("/")
    if "://" not in address:
        address = f"http://{address}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=address, headers=headers, timeout=_ANSWER_SECONDS) as client:
            model, info, served = (
                _json(client.get(path), address)
                for path in ("/model_info", "/server_info", "/v1/models")
            )
    except httpx.TimeoutException:
        raise Problem(f"{address} did not answer in {_ANSWER_SECONDS:g} s: is it busy?") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise Problem(
            f"nothing answers at {address} ({error or type(error).__name__}): start a server, or "
            "name its address"
        ) from None
    try:
        return Target(
            address,
            api_key,
            model=str(model["model_path"]).rstrip("/").rpartition("/")[2],
            version=str(info.get("version", "unknown")),
            max_context=int(served["data"][0]["max_model_len"]),
            priorities=bool(info.get("enable_priority_scheduling")),
            tiered=bool(flat_tiering(info["internal_states"])),
        )
    except (KeyError, IndexError, TypeError, ValueError):
        raise Problem(f"{address} does not answer as SGLang does: name an SGLang server") from None


def _json(response: httpx.Response, address: str) -> Any:
    if response.status_code in (401, 403):
        raise Problem(f"{address} refuses this key: give the one of the server by --api-key")
    try:
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPStatusError, ValueError):
        raise Problem(
            f"{address} answers {response.url.path} with status {response.status_code}: name an "
            "SGLang server"
        ) from None


def load_texts(target: Target) -> Texts:
    """The texts as token ids of the server's model, by its own tokenizer.

    Raises ``Problem``.
    """
    with httpx.Client(base_url=target.address, headers=target.headers, timeout=120) as client:

        def tokenize(texts: Sequence[str], special: bool = False) -> list[list[int]]:
            body = {"prompt": list(texts), "add_special_tokens": special}
            try:
                ids: list[list[int]] = _json(client.post("/tokenize", json=body), target.address)[
                    "tokens"
                ]
            except httpx.HTTPError as error:
                raise Problem(
                    f"{target.address} does not tokenize ({error or type(error).__name__}): start "
                    "it with its tokenizer"
                ) from None
            return ids

        return Texts.load(tokenize, begin=tokenize([""], special=True)[0])


@dataclass
class _Stream:
    """What came of one request so far.

    stamps: when tokens came. first_tokens: how many came together as the first.
    """

    sent_at: float
    stamps: list[float] = field(default_factory=list)
    first_tokens: int = 0
    tokens: int = 0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Note an event of the stream: all of the answer so far, or, from a server with
        ``--incremental-streaming-output``, what is new of it."""
        self.meta = event["meta_info"]
        tokens = int(self.meta["completion_tokens"])
        if tokens > self.tokens:
            self.stamps.append(now)
            self.first_tokens = self.first_tokens or tokens
            self.tokens = tokens
        text, ids = event.get("text") or "", event["output_ids"]
        if len(ids) < tokens:
            self.text, self.ids = self.text + text, self.ids + ids
        else:
            self.text, self.ids = text, ids

    def times(self) -> dict[str, Any]:
        """Fields of ``Record``."""
        ended = time.monotonic() - self.sent_at
        if not self.stamps:
            return {"ended_seconds": ended}
        first, last = self.stamps[0], self.stamps[-1]
        gaps = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        rest = self.tokens - self.first_tokens
        return {
            "first_seconds": first - self.sent_at,
            "latency_seconds": last - self.sent_at,
            "ended_seconds": ended,
            "token_seconds": (last - first) / rest if rest else None,
            "gap_seconds": max(gaps, default=None),
        }


class _Refused(Exception):
    """The server's own error."""


class Driver:
    """One run against one server: first, if asked, sessions alone, then all together.

    ``run`` can be read at any time; ``watch`` is called a few times a second.
    """

    def __init__(
        self, target: Target, workload: Workload, watch: Callable[[Driver], None] = lambda _: None
    ) -> None:
        self.target = target
        self.workload = workload
        self.run = Run(workload.mix, {})
        self.phase = ""
        self.streams: dict[str, tuple[Tenant, _Stream]] = {}
        self.sent: Counter[str] = Counter()
        self.tokens = 0
        self._watch = watch
        self._start = time.monotonic()
        self._nonce = secrets.token_hex(4)
        self._stop = asyncio.Event()
        self._client: httpx.AsyncClient

    @property
    def mix(self) -> Mix:
        """What is sent."""
        return self.workload.mix

    @property
    def elapsed(self) -> float:
        """Seconds of this phase."""
        return time.monotonic() - self._start

    async def drive(self, baseline: bool) -> Run:
        """Send everything; returns early when a user stops it or the server dies."""
        self._heed_signals(True)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        try:
            async with httpx.AsyncClient(
                base_url=self.target.address,
                headers=self.target.headers,
                # How long an answer may take is for ``_request`` to say.
                timeout=httpx.Timeout(None, connect=_ANSWER_SECONDS),
                limits=limits,
            ) as self._client:
                phases = [self._alone] if baseline else []
                for phase in (*phases, self._together):
                    await self._until_stopped(phase)
        finally:
            self._heed_signals(False)
        return self.run

    def _stop_by_user(self) -> None:
        """End with a report; who asks a second time gets none."""
        self.run.stopped = True
        self._stop.set()
        self._heed_signals(False)

    def _heed_signals(self, heed: bool) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if heed:
                loop.add_signal_handler(number, self._stop_by_user)
            else:
                loop.remove_signal_handler(number)

    async def _until_stopped(self, phase: Callable[[], Any]) -> None:
        """A phase beside its watcher; both end when ``_stop`` is set."""
        if self._stop.is_set():
            return
        work = asyncio.ensure_future(phase())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        stop.cancel()
        with suppress(asyncio.CancelledError):
            await work

    # --- phases ---

    async def _alone(self) -> None:
        """Some sessions of each tenant, one request at a time on the whole server, each session
        with nothing of others in the prefix cache."""
        self._begin("alone")
        show = asyncio.ensure_future(self._show())
        try:
            for tenant in self.mix.tenants:
                before = await self._look()
                for number in self.workload.sample(tenant, self.mix.baseline_sessions):
                    session = self.workload.session(tenant, number)
                    await self._converse(session, self.run.alone, alone=True)
                after = await self._look()
                if before and after:
                    self.run.alone_moves[tenant.name] = {
                        key: total - before.tiering.get(key, 0.0)
                        for key, total in after.tiering.items()
                        if key.startswith("counters.")
                    }
        finally:
            await _end([show])
        failed = sum(record.outcome.is_error for record in self.run.alone)
        if failed:
            self.run.notes.append(
                f"{failed} of {len(self.run.alone)} requests failed that were served alone: "
                "slowdowns are over the others."
            )

    async def _together(self) -> None:
        """Everybody; sessions begin for ``mix.seconds``, and what runs then may end."""
        self._begin("together")
        watchers = [asyncio.ensure_future(self._sample()), asyncio.ensure_future(self._show())]
        tasks: list[asyncio.Future[None]] = []
        for tenant in self.mix.tenants:
            tasks += [
                asyncio.ensure_future(self._later(tenant, number, at_seconds))
                for number, at_seconds in enumerate(self.workload.times(tenant))
            ]
            if tenant.trace is None and tenant.arrival.process is Process.CLOSED:
                tasks += [
                    asyncio.ensure_future(self._loop(tenant, user))
                    for user in range(tenant.arrival.users)
                ]
        if not tasks:
            self.run.notes.append("No session begins within the time of the mix.")
        try:
            if tasks:
                patience = self.mix.seconds + self.mix.drain_seconds
                await asyncio.wait(tasks, timeout=patience)
        finally:
            await _end(tasks)
            await _end(watchers)
            self.run.seconds = self.elapsed

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self._start = time.monotonic()
        self.tokens = 0
        self.sent.clear()

    async def _later(self, tenant: Tenant, number: int, at_seconds: float) -> None:
        await asyncio.sleep(max(0.0, at_seconds - self.elapsed))
        await self._converse(self.workload.session(tenant, number), self.run.records)

    async def _loop(self, tenant: Tenant, user: int) -> None:
        """One user of a closed loop: session after session while the mix lasts."""
        number = user
        while self.elapsed < self.mix.seconds:
            session = self.workload.session(tenant, number)
            last = await self._converse(session, self.run.records)
            await asyncio.sleep(session.turns[-1].think_seconds)
            number += tenant.arrival.users
            if last.is_error:
                await asyncio.sleep(1.0)  # a server that refuses is not asked as fast as possible

    async def _converse(
        self, session: Session, records: list[Record], alone: bool = False
    ) -> Outcome:
        """All turns of a session, until one fails or is left, or the time is over.

        Returns how the last one ended.
        """
        history: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            if number and not alone:
                await asyncio.sleep(session.turns[number - 1].think_seconds)
                if self.elapsed > self.mix.seconds:
                    break
            prompt = history + turn.tokens
            record = await self._request(session, number, turn, prompt, records, alone)
            if record.outcome is not Outcome.DONE:
                return record.outcome
            history = prompt + record.output_ids
        return Outcome.DONE

    # --- one request ---

    async def _request(
        self,
        session: Session,
        number: int,
        turn: Turn,
        prompt: tuple[int, ...],
        records: list[Record],
        alone: bool,
    ) -> Record:
        tenant = session.tenant
        rid = f"{self._nonce}-{self.phase}-{tenant.name}-{session.number}-{number}"
        abort_after = None if alone else turn.abort_after
        stream = _Stream(time.monotonic())
        at_seconds = stream.sent_at - self._start
        self.streams[rid] = tenant, stream
        self.sent[tenant.name] += 1
        outcome, error = Outcome.CUT, ""
        try:
            salt = f"{tenant.name}/{session.number}" if alone else tenant.salt or ""
            body = self._body(tenant, turn, prompt, rid, salt)
            async with asyncio.timeout(self.mix.request_seconds):
                outcome = await self._receive(body, stream, abort_after)
        except _Refused as refusal:
            outcome, error = Outcome.REFUSED, str(refusal)
        except TimeoutError:
            outcome, error = Outcome.TIMEOUT, f"no end after {self.mix.request_seconds:g} s"
        except httpx.HTTPError as lost:
            outcome, error = Outcome.LOST, str(lost) or type(lost).__name__
        except (ValueError, KeyError, TypeError) as wrong:
            outcome, error = Outcome.LOST, f"no answer of SGLang's: {wrong!r}"
        finally:
            del self.streams[rid]
            done = outcome is Outcome.DONE
            record = Record(
                tenant=tenant.name,
                session=session.number,
                turn=number,
                outcome=outcome,
                at_seconds=at_seconds,
                prompt_tokens=len(prompt),
                output_tokens=stream.tokens,
                prompt_hash=_hash(prompt),
                output_ids=tuple(stream.ids),
                cached_tokens=int(stream.meta.get("cached_tokens") or 0),
                retractions=int(stream.meta.get("num_retractions") or 0),
                check=turn.check.share(stream.text) if done and turn.check else None,
                error=error,
                **stream.times(),
            )
            records.append(record)
        if outcome is Outcome.LOST:
            await self._find_out_if_dead(error)
        return record

    def _body(
        self, tenant: Tenant, turn: Turn, prompt: Sequence[int], rid: str, salt: str
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": turn.output_tokens,
            "ignore_eos": True,
        }
        if turn.grammar:
            sampling["ebnf"] = turn.grammar
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "stream": True,
            "routing_key": tenant.name,
            # Neither an earlier run nor what was served alone has warmed the cache.
            "cache_salt": f"{self._nonce}/{self.phase}/{salt}",
        }
        if tenant.priority is not None and self.target.priorities:
            body["priority"] = tenant.priority
        return body

    async def _receive(
        self, body: Mapping[str, Any], stream: _Stream, abort_after: int | None
    ) -> Outcome:
        """The stream to its end, or to where the client leaves; closing it makes SGLang abort."""
        async with self._client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                raise _Refused(_message(await response.aread(), response.status_code))
            async for event in _events(response):
                if "error" in event:
                    raise _Refused(str(event["error"].get("message", event["error"])))
                before = stream.tokens
                stream.take(event, time.monotonic())
                self.tokens += stream.tokens - before
                if abort_after is not None and stream.tokens >= abort_after:
                    return Outcome.ABORTED
        reason = stream.meta.get("finish_reason")
        if not reason:
            raise httpx.ReadError("the stream ended before the answer did")
        if reason["type"] == "abort":
            raise _Refused(str(reason.get("message") or "aborted by the server"))
        return Outcome.DONE

    async def _find_out_if_dead(self, error: str) -> None:
        """Stops the run when nobody answers any more."""
        deadline = time.monotonic() + _DEAD_SECONDS
        while time.monotonic() < deadline:
            try:
                await self._client.get("/model_info", timeout=_DEAD_SECONDS)
            except httpx.TransportError:
                await asyncio.sleep(0.5)
            else:
                return
        if not self._stop.is_set():
            self.run.died = (
                f"the server at {self.target.address} does not answer any more ({error})"
            )
            self._stop.set()

    # --- what the server says of itself ---

    async def _sample(self) -> None:
        while True:
            if sample := await self._look():
                self.run.samples.append(sample)
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _show(self) -> None:
        while True:
            self._watch(self)
            await asyncio.sleep(0.25)

    async def _look(self) -> Sample | None:
        """The server now, or None of one that does not answer, or not as it did before."""
        with suppress(TimeoutError, httpx.HTTPError, ValueError, KeyError, TypeError):
            # A busy server may answer later.
            async with asyncio.timeout(self.mix.request_seconds):
                return await self._ask()
        return None

    async def _ask(self) -> Sample:
        tiering: dict[str, float] = {}
        if self.target.tiered:
            info = (await self._client.get("/server_info")).raise_for_status().json()
            tiering = flat_tiering(info["internal_states"])
        page = await self._client.get("/metrics")
        values: dict[str, float] = {}
        churn: dict[str, tuple[float, float]] = {}
        if page.status_code == 200:
            scrape = Scrape.parse(page.text, time.monotonic())
            found = ((key, scrape.total(name)) for key, name in _METRICS.items())
            values = {key: value for key, value in found if value is not None}
            churn = self._tenant_churn(scrape)
        running = sum(1 for _, stream in self.streams.values() if stream.tokens)
        waiting = len(self.streams) - running
        return Sample(self.elapsed, running, waiting, self.tokens, tiering, values, churn)

    def _tenant_churn(self, scrape: Scrape) -> dict[str, tuple[float, float]]:
        totals = (
            (tenant.name, [scrape.total(metric.name, tenant=tenant.name) for metric in
                           (metrics.TENANT_CHURN, metrics.TENANT_CHURN_OBSERVATIONS)])
            for tenant in self.mix.tenants
        )  # fmt: skip
        return {
            name: (both[0], both[1])
            for name, both in totals
            if both[0] is not None and both[1] is not None
        }


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def _end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and wait for it; a request that is cut is noted as it ends."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _message(content: bytes, status: int) -> str:
    """What an error answer says, in a line."""
    text = content.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        error = json.loads(text).get("error", text)
        text = str(error.get("message", error) if isinstance(error, Mapping) else error)
    return f"status {status}: {' '.join(text.split())[:200]}"


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()
