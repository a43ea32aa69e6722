from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.harness import LAUNCH_SERVER, Server, ServerPool
from server.tiering import assert_idle


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiering_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "serve.yaml"
    # At this level the log tells how each request was routed.
    path.write_text("kv-tiering: qevict\nlog-level: debug\n")
    return path


@pytest.fixture
def tiered(servers: ServerPool, tiering_yaml: Path) -> Iterator[Server]:
    """A server with the default options, which most tests share; idle and empty after each.

    Nothing but a file tells it of tiering, and it is started as a module: `TIERED` with ``sglang
    serve`` is the other way.
    """
    server = servers.get("--config", str(tiering_yaml), command=LAUNCH_SERVER)
    yield server
    assert_idle(server)
