"""From the bytes that stock SGLang would give to the KV cache to what tiering makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import torch

from qevict_kernels import scratch_bytes
from qevict_tiers.arena import Arena
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import Prompt, RowClaims
from qevict_tiers.manager import TierManager
from qevict_tiers.presets import preset_name
from qevict_tiers.shares import OTHERS, Shares
from qevict_tiers.views import Views
from qevict_tiers.wavering import Wavering

__all__ = ["CapacityPlan", "plan_capacity"]

_RUNNER_BYTES_PER_TOKEN = 64
"""What SGLang's eager runner allocates for each logical token of capacity."""

_MAX_VIEW_SHARE = 0.05
"""Views may take at most this share of the KV bytes; beyond, fewer requests run at once."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CapacityPlan:
    """How the KV bytes are used.

    total_bytes: what stock would take. arena_bytes: for windows. num_pages: logical pages.
    num_rows: requests that may run at once. max_windows: windows of the longest request.
    """

    total_bytes: int
    arena_bytes: int
    num_pages: int
    num_rows: int
    max_windows: int
    claims: RowClaims

    @property
    def budget(self) -> WindowBudget:
        """The budget rule."""
        return self.claims.budget

    @property
    def max_tokens(self) -> int:
        """Tokens of context."""
        return self.num_pages * self.budget.config.window

    @property
    def table_bytes(self) -> int:
        """Bytes of everything but windows."""
        return self.total_bytes - self.arena_bytes


def plan_capacity(
    budget: WindowBudget,
    total_bytes: int,
    context_tokens: int,
    chunk_tokens: int | None,
    max_running_requests: int | None,
    default_running_requests: int,
    device: torch.device = _CPU,
    is_watched: bool = False,
    mixes_chunks: bool = False,
) -> CapacityPlan:
    """Divide ``total_bytes`` into windows, tables, and what the kernels of a device keep.

    ``chunk_tokens``: SGLang's ``chunked_prefill_size``. ``is_watched``: whether metrics keep
    something about each window, too (``Wavering``). ``mixes_chunks``: whether each decoding
    request takes a token of a chunk.

    Raises ``ValueError`` with what is needed if not even one request of ``min_context``
    tokens fits.
    """
    max_windows = budget.num_windows(context_tokens)
    wanted = max_running_requests or default_running_requests
    row_bytes = Views.row_bytes(budget.num_layers, max_windows)
    row_bytes += scratch_bytes(budget.geometry, device, 1, max_windows)
    if is_watched:
        row_bytes += Wavering.row_bytes(budget.num_layers, max_windows)

    def divide(total: int) -> _Division:
        return _divide(budget, total, context_tokens, row_bytes, wanted)

    division = divide(total_bytes)
    if mixes_chunks:
        chunk_tokens = _left_of_chunk(chunk_tokens, budget.config.window, division.num_rows)
    shares = budget.config.shares
    # What any request may have of it.
    allowance = division.arena_bytes
    if shares is not None:
        allowance = int(shares.least_allowance * allowance)
    claims = _row_claims(budget, allowance, context_tokens, chunk_tokens)
    smallest = claims.peak_bytes(budget.config.min_context, budget.config.min_context)
    if division.num_pages < 1 or division.arena_bytes < smallest:
        needed = _smallest_total(divide, total_bytes, smallest)
        raise ValueError(
            f"KV tiering got {total_bytes / 2**20:.1f} MiB for the KV cache, but one request of "
            f"{budget.config.min_context} tokens (--kv-tiering-min-context) needs "
            f"{ceil(needed / 2**20 * 10) / 10} MiB: raise --mem-fraction-static or "
            "--max-total-tokens, or lower --kv-tiering-min-context, --context-length or "
            "--max-running-requests"
        )
    if shares is not None:
        _require_room_for_tenants(shares, division.arena_bytes, smallest)
    return CapacityPlan(
        total_bytes,
        division.arena_bytes,
        division.num_pages,
        division.num_rows,
        max_windows,
        claims,
    )


def _left_of_chunk(chunk_tokens: int | None, window: int, decoding: int) -> int | None:
    """The tokens that a prompt always gets of a chunk, whole windows, where others decode."""
    if chunk_tokens is None or chunk_tokens < 1:
        return chunk_tokens
    return max(window, (chunk_tokens - decoding) // window * window)


def _require_room_for_tenants(shares: Shares, arena_bytes: int, smallest: int) -> None:
    """Raise ``ValueError`` if a tenant could never be served."""
    for name in (*shares.named, OTHERS):
        most = int(shares.allowance(name) * arena_bytes)
        if most < smallest:
            raise ValueError(
                f"--kv-tiering-tenants leaves {name!r} {most / 2**20:.1f} MiB of "
                f"{arena_bytes / 2**20:.1f} MiB for windows, but one request of "
                f"--kv-tiering-min-context tokens needs {smallest / 2**20:.1f} MiB: raise its cap, "
                "lower the floors of others, or give the KV cache more bytes"
            )


class _Division(NamedTuple):
    num_rows: int
    num_pages: int
    arena_bytes: int


def _divide(
    budget: WindowBudget, total_bytes: int, context_tokens: int, row_bytes: int, wanted: int
) -> _Division:
    """Rows for views first, then pages and the arena in the ratio of the longest contexts."""
    window = budget.config.window
    affordable = int(_MAX_VIEW_SHARE * total_bytes) // row_bytes
    num_rows = max(1, min(wanted, affordable))
    # SGLang keeps one row more, for padding.
    rest = total_bytes - (num_rows + 1) * (row_bytes + 4 * context_tokens)

    # A page of the longest contexts takes at least this many bytes in the arena.
    page_window_bytes = float(budget.config.least_budget) * budget.num_layers * budget.full_bytes
    page_table_bytes = TierManager.page_bytes(budget.num_layers) + (
        _RUNNER_BYTES_PER_TOKEN * window
    )
    slot_bytes = 1 + Arena.bookkeeping_bytes(1 << 20, budget.full_bytes, budget.coded_bytes) / (
        1 << 20
    )
    per_page = page_window_bytes * slot_bytes + page_table_bytes
    num_pages = int(rest / per_page)
    arena_bytes = int((rest - (num_pages + 1) * page_table_bytes) / slot_bytes)
    return _Division(num_rows, num_pages, arena_bytes - arena_bytes % 64)


def _smallest_total(divide: Callable[[int], _Division], too_small: int, arena_bytes: int) -> int:
    """The fewest bytes, to one part in a thousand, whose arena has at least ``arena_bytes``."""
    low, high = too_small, 2 * max(too_small, arena_bytes)
    while divide(high).arena_bytes < arena_bytes:
        low, high = high, 2 * high
    while high - low > high // 1000:
        middle = (low + high) // 2
        if divide(middle).arena_bytes < arena_bytes:
            low = middle
        else:
            high = middle
    return high


def _row_claims(
    budget: WindowBudget, arena_bytes: int, context_tokens: int, chunk_tokens: int | None
) -> RowClaims:
    """Claim formulas with the prompt lengths derived from what a request may have of the arena.

    Raises ``ValueError`` if prompts of ``exact_prefill_tokens`` would not fit.
    """
    window = budget.config.window
    if chunk_tokens is None or chunk_tokens < 1:
        # Chunked prefill is off: every prompt is one chunk, however long.
        longest = budget.num_windows(max(context_tokens, budget.config.min_context)) * window
        return RowClaims(
            budget, exact_prefill_tokens=0, segment_tokens=longest, chunk_tokens=longest
        )
    arena_tokens = arena_bytes // (budget.num_layers * budget.full_bytes) * window
    # What is staged beside the windows of the longest prompts: half of what the budget saves.
    staged = int((1 - budget.layer_budget) / 2 * arena_tokens)
    claims = RowClaims(
        budget,
        exact_prefill_tokens=max(budget.config.min_context, arena_tokens // 2),
        segment_tokens=max(window, min(chunk_tokens, staged) // window * window),
        chunk_tokens=chunk_tokens,
    )
    exact = budget.config.exact_prefill_tokens
    if exact is None:
        return claims
    claims = replace(claims, exact_prefill_tokens=exact)
    longest = min(exact, context_tokens)
    needed = claims.prefill_bytes(Prompt(longest, whole=False))
    if needed > arena_bytes:
        raise ValueError(
            f"--kv-tiering-exact-prefill-tokens {exact}: a prompt of {longest} tokens takes "
            f"{needed / 2**20:.1f} MiB until it is routed, but there are "
            f"{arena_bytes / 2**20:.1f} MiB for windows: lower it, or raise "
            "--mem-fraction-static or --max-total-tokens"
        )
    return claims


def describe(plan: CapacityPlan) -> str:
    """One line for the log: what is active and what capacity it gives."""
    budget, config = plan.budget, plan.budget.config
    stock = plan.total_bytes // budget.token_bytes
    longest = budget.num_windows(4096) * config.window
    running = plan.arena_bytes // plan.claims.decode_bytes(longest, longest)
    staged = plan.claims.prefill_bytes(Prompt(longest, whole=True))
    keys, values = f"{config.key_bits}-bit keys", f"{config.value_bits}-bit values"
    if config.key_bits == config.value_bits:
        values = "values"
    at_most = f", but at most {plan.num_rows} requests at once" if plan.num_rows < running else ""
    return (
        f"KV tiering is on: preset {preset_name(config)}, budget {float(config.budget):g}, "
        f"quant-fraction {float(config.quant_fraction):g}, windows of {config.window}, "
        f"{keys} and {values} ({budget.coded_bytes / budget.full_bytes:.3f} of FULL bytes, "
        f"{config.params.value} parameters), route every {config.route_every}, "
        f"promote {config.promote.value}; "
        f"{plan.total_bytes / 2**20:.0f} MiB hold {plan.max_tokens} tokens of context "
        f"(stock {stock}): room for {running} contexts of 4096 tokens "
        f"(stock {stock // 4096}){at_most}; one prefill of 4096 takes "
        f"{staged / 2**20:.1f} MiB, tables {plan.table_bytes / 2**20:.1f} MiB"
    )
