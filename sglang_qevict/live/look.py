"""One look at a scheduler's tiers, taken when the page asks for it."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

from qevict_tiers.threads import single_threaded
from qevict_tiers.tier_map import tier_map
from sglang_qevict.metrics import MetricsObserver
from sglang_qevict.state import TieringState

__all__ = ["LOOK", "MAX_COLUMNS", "MAX_REQUESTS", "look", "look_at_scheduler"]

LOOK = "kv-tiering-look"
"""The id of a request for SGLang's internal state that wants a look, and nothing else of it."""

MAX_REQUESTS = 8
MAX_COLUMNS = 256
"""What a look may weigh: a byte for each layer and column of each request that is shown."""


_STARTED = time.time()


def look_at_scheduler(scheduler: Any, state: TieringState) -> dict[str, Any]:
    """``look``, with the names of requests and the queue that only SGLang's scheduler knows."""
    from sglang.srt.runtime_context import get_parallel

    requests = scheduler.collect_inflight_reqs()
    if scheduler.chunked_req is not None:
        requests.add(scheduler.chunked_req)
    names = {request.kv.req_pool_idx: request.rid for request in requests if request.kv}
    return {
        "rank": get_parallel().dp_rank or 0,
        "started": _STARTED,
        "waiting": len(scheduler.waiting_queue),
        # SGLang reckons it now and then, and not at all when nothing runs.
        "tokens_per_second": scheduler.metrics_reporter.last_gen_throughput if requests else 0.0,
        **look(state, names),
    }


@single_threaded
def look(state: TieringState, names: Mapping[int, str]) -> dict[str, Any]:
    """What tiering holds (``TieringState.report``), and the maps of running requests.

    ``observed``: churn and LIR, where metrics are on (``MetricsObserver.observed``).
    ``names``: the id of each row's request; rows of no name have ended or not begun, and have no
    map. The ``MAX_REQUESTS`` that began first are shown, ``left_out`` says how many are not.
    """
    began, observer = time.perf_counter(), state.observer
    rows = [(row, tokens) for row, tokens in state.rows_in_view().items() if row in names]
    shown = [{"id": names[row], **_map(state, row, tokens)} for row, tokens in rows[:MAX_REQUESTS]]
    return {
        "taken": time.time(),
        "report": state.report(),
        "observed": observer.observed() if isinstance(observer, MetricsObserver) else {},
        "maps": shown,
        "left_out": len(rows) - len(shown),
        "seconds": time.perf_counter() - began,
    }


def _map(state: TieringState, row: int, tokens: int) -> dict[str, Any]:
    budget = state.plan.budget
    cells, span = tier_map(
        state.manager.views.tier[:, row, : budget.num_windows(tokens)], MAX_COLUMNS
    )
    return {
        "row": row,
        "tokens": tokens,
        "prompt_tokens": state.ledger.prompt_tokens(row),
        "reused_tokens": state.ledger.sharing(row).shared * budget.config.window,
        "is_exact": not state.ledger.was_routed(row),
        "history": budget.history(tokens),
        "span": span,
        "layers": cells.shape[0],
        "cells": base64.b64encode(cells.cpu().numpy().tobytes()).decode(),
    }
