"""A server as a child process: for the demo, the benchmarks and the tests.

Each runs in a session of its own, writes its log to a file, and leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from sglang_qevict.models import fetch_model

__all__ = ["LAUNCH_SERVER", "SERVE", "Server", "ServerFailed"]

SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")

_START_SECONDS = 240.0
_STOP_SECONDS = 30.0


class ServerFailed(RuntimeError):
    """A server ended or never got healthy; the message ends with the tail of its log."""


class Server:
    """One running server; a context manager, or `start` and `stop` by hand.

    Args:
        flags: the command line after ``--model-path``, ``--host`` and ``--port``.
        log_path: the file that takes stdout and stderr.
        env: variables to add to this process's own.
        command: `SERVE` or `LAUNCH_SERVER`.
        model: a model directory; the embedded model if None.
        request_seconds: how long a request may take.
    """

    def __init__(
        self,
        *flags: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = SERVE,
        model: Path | None = None,
        request_seconds: float = 300,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self.command = [*command, "--model-path", str(model or fetch_model(progress=False))]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._session_id: int | None = None
        self._client = httpx.Client(base_url=self.url, timeout=request_seconds)

    # --- life ---

    def start(
        self,
        timeout_seconds: float = _START_SECONDS,
        waiting: Callable[[], object] | None = None,
    ) -> Self:
        """Starts the process and returns when it is healthy; calls ``waiting`` until then.

        Raises:
            ServerFailed: the process ended, or is not healthy after the timeout; nothing is left.
        """
        self.launch()
        self.wait_until_healthy(timeout_seconds, waiting)
        return self

    def wait_until_healthy(
        self,
        timeout_seconds: float = _START_SECONDS,
        waiting: Callable[[], object] | None = None,
    ) -> None:
        """Returns when a launched server is healthy, or raises as `start` does."""
        deadline = time.monotonic() + timeout_seconds
        while not self._healthy():
            if (code := self.exit_code()) is not None:
                self.stop()
                raise ServerFailed(f"exit code {code} at start\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise ServerFailed(f"not healthy in {timeout_seconds:g} s\n{self.log_tail()}")
            if waiting is not None:
                waiting()
            time.sleep(0.2)

    def launch(self) -> None:
        """Starts the process and returns at once."""
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
                cwd=self.log_path.parent,
            )
        self._session_id = self._process.pid

    def wait(self, timeout_seconds: float) -> int:
        """The exit code of a server that is expected to end by itself; kills it after the timeout.

        Raises:
            ServerFailed: it was still running, or it left processes behind; they are gone now.
        """
        assert self._process is not None
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            message = f"still running after {timeout_seconds:g} s\n{self.log_tail()}"
            raise ServerFailed(message) from None
        self.stop()
        return code

    def exit_code(self) -> int | None:
        """None while the server's main process runs."""
        return None if self._process is None else self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """All processes of the server that are alive: its session, whoever their parent is now."""
        return [] if self._session_id is None else _session_members(self._session_id)

    def scheduler(self) -> psutil.Process:
        """The process that holds the model and the KV cache (the first one with --tp).

        Raises:
            ServerFailed: there is none.
        """
        for process in self.processes():
            if "sglang::sched" in process.info["name"]:
                return process
        raise ServerFailed(f"no scheduler process\n{self.log_tail()}")

    def suspend(self) -> None:
        """Stops all its processes where they are, so that they take no CPU."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets suspended processes go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            process.send_signal(number)

    def stop(self) -> None:
        """Ends the server politely, then by force.

        Raises:
            ServerFailed: it did not end by itself, or left processes behind; they are gone now.
        """
        if self._process is None:
            return
        self._client.close()
        self.resume()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.processes() and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.1)
        left = self.processes()
        for process in left:
            process.kill()
        self._process.wait()
        self._process = None
        if left:
            names = ", ".join(f"{process.pid} {process.info['name']}" for process in left)
            raise ServerFailed(f"had to kill {names}\n{self.log_tail()}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # --- requests ---

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> dict[str, Any]:
        """`/generate` for a text or token ids; temperature 0 and 32 new tokens unless told.

        Returns SGLang's answer: ``text``, ``output_ids`` and ``meta_info`` with
        ``prompt_tokens``, ``cached_tokens`` and ``finish_reason``.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        params = {"temperature": 0, "max_new_tokens": 32, **sampling}
        answer: dict[str, Any] = self.post(
            "/generate", {key: prompt if key == "text" else list(prompt), "sampling_params": params}
        )
        return answer

    def generate_many(
        self, prompts: Sequence[str | Sequence[int]], **sampling: Any
    ) -> list[dict[str, Any]]:
        """`generate` for all prompts at the same time, each by a request of its own."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def chat(self, messages: str | Sequence[Mapping[str, str]], **options: Any) -> str:
        """The assistant's answer to a question or to a conversation, at temperature 0."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 64}
        answer = self.post("/v1/chat/completions", {**body, **options})
        return str(answer["choices"][0]["message"]["content"])

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a JSON request.

        Raises:
            httpx.HTTPStatusError: the status is not 2xx.
        """
        response = self._client.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def get(self, path: str) -> httpx.Response:
        """The response, whatever its status."""
        return self._client.get(path)

    def metrics(self) -> dict[str, float]:
        """The metrics page: from ``name{labels}`` as printed to the value."""
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def info(self) -> dict[str, Any]:
        """`/server_info`: the resolved arguments and the scheduler's internal state."""
        answer: dict[str, Any] = self.get("/server_info").raise_for_status().json()
        return answer

    def flush_cache(self, timeout_seconds: float = 10.0) -> None:
        """Empties the radix cache; waits until the server is idle enough to allow it.

        Raises:
            ServerFailed: it was refused until the timeout.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._client.post("/flush_cache").status_code != 200:
            if time.monotonic() > deadline:
                raise ServerFailed(f"flush refused for {timeout_seconds:g} s\n{self.log_tail()}")
            time.sleep(0.05)

    # --- log ---

    def log_text(self) -> str:
        """All that the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines, under a heading that names the file."""
        tail = "\n".join(line[:500] for line in self.log_text().splitlines()[-lines:])
        return f"--- end of {self.log_path} ---\n{tail}"

    def _healthy(self) -> bool:
        try:
            return self._client.get("/health", timeout=20).status_code == 200
        except httpx.TransportError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _session_members(session_id: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter(["name", "status"]):
        try:
            of_session = os.getsid(process.pid) == session_id
        except ProcessLookupError:
            continue
        if of_session and process.info["status"] != psutil.STATUS_ZOMBIE:
            members.append(process)
    return members
