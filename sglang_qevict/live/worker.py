"""SGLang's app with the live page, for the processes of ``--tokenizer-worker-num``.

Each of them imports its app by name, without any plugin, so the name is this module's then
(``SGLANG_HTTP_SERVER_APP_PATH``).
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app, get_global_state

from sglang_qevict.live.routes import add_routes

__all__ = ["APP_PATH", "app"]

APP_PATH = f"{__name__}:app"

add_routes(app, lambda: get_global_state().tokenizer_manager)
