"""Real servers for tests: each in a session of its own, its log in a file, nothing left after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_qevict import local_server
from sglang_qevict.local_server import LAUNCH_SERVER, SERVE, ServerFailed

__all__ = [
    "BASE_FLAGS",
    "LAUNCH_SERVER",
    "LEAK_TEXT",
    "SERVE",
    "Server",
    "ServerFailed",
    "ServerPool",
]

LEAK_TEXT = "memory leak detected"

# What every server gets; a flag that a test gives again wins, since the last one counts.
BASE_FLAGS = (
    *("--page-size", "8"),
    *("--max-total-tokens", "32768"),
    *("--max-running-requests", "16"),
    *("--random-seed", "0"),
    "--enable-metrics",
    # A waiting scheduler would otherwise poll, and take a core from the server that is tested.
    "--sleep-on-idle",
)

# Threads that sleep at a barrier instead of spinning: tests share their cores with other programs,
# and a team that spins while one member waits for a core is ten times slower.
_BASE_ENV = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "QEVICT_CHECK_INTEGRITY": "1"}


class Server(local_server.Server):
    """A server with `BASE_FLAGS`, and ``flags`` after them.

    It fails a test that it leaves processes behind: once it has ended, or been stopped.
    """

    def __init__(
        self,
        *flags: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = SERVE,
        model: Path | None = None,
    ) -> None:
        super().__init__(
            *BASE_FLAGS,
            *flags,
            log_path=log_path,
            env={**_BASE_ENV, **(env or {})},
            command=command,
            model=model,
        )

    def assert_clean(self) -> None:
        """The server runs, and its log tells of no leak and no exception."""
        log = self.log_text()
        assert self.exit_code() is None, self.log_tail()
        assert LEAK_TEXT not in log, self.log_tail()
        assert "Traceback (most recent call last)" not in log, self.log_tail()


class ServerPool:
    """Servers by flags, shared by test modules; at most ``max_alive`` run, the oldest one goes."""

    def __init__(self, log_directory: Path, max_alive: int = 3) -> None:
        self._log_directory = log_directory
        self._max_alive = max_alive
        self._alive: OrderedDict[tuple[object, ...], Server] = OrderedDict()
        self._started = 0

    def get(
        self, *flags: str, env: Mapping[str, str] | None = None, command: Sequence[str] = SERVE
    ) -> Server:
        """A healthy server with these flags, its cache empty. Ask again in each test."""
        key = (flags, frozenset((env or {}).items()), tuple(command))
        server = self._alive.get(key)
        if server is not None and server.exit_code() is not None:
            self._alive.pop(key).stop()
            server = None
        if server is None:
            while len(self._alive) >= self._max_alive:
                self._alive.popitem(last=False)[1].stop()
            self._started += 1
            log_path = self._log_directory / f"server-{self._started}.log"
            server = Server(*flags, log_path=log_path, env=env, command=command).start()
            self._alive[key] = server
        self._alive.move_to_end(key)
        server.flush_cache()
        return server

    def close(self) -> None:
        """Stops all servers.

        Raises:
            ServerFailed: the first complaint of a `Server.stop`, after all have been stopped.
        """
        failures = []
        while self._alive:
            try:
                self._alive.popitem()[1].stop()
            except ServerFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
