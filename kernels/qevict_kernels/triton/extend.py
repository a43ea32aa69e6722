"""Causal attention of chunks of new tokens over FULL and coded windows.

Two kernels. ``extend_kernel`` attends: a program is one (request, KV head, tile); a tile is
``BLOCK_M`` query rows, (token, query head of the group), as many whole tokens as fit. It visits
its request's list in blocks of ``BLOCK_N`` keys with an online softmax:

1. FULL windows that every query of the tile sees, without masks;
2. the FULL windows up to the last that some query sees, masked by position;
3. coded windows, masked by position, decoded and rotated in registers. Their numbers are rounded
   to the storage dtype before they are multiplied, as those of FULL windows are.

``score_kernel`` adds attention mass to the scores, from the log-sum-exp that the first has left:
a program is one (request, block of windows). It goes through the scored queries in order of
position, their heads in a fixed order, and reads keys only. No atomics.

Channels are taken in three parts, so that nothing is moved in registers to rotate: the first
and the second of each rotated pair, and those that don't turn.

Grids depend on shapes alone: a program finds its request and its tile from the lengths on the
device, and ends at once if there is none.

Invariance. Blocks are cut at fixed positions of the list, a masked key is an exact no-op, and a
row of a matrix product does not depend on the other rows or on which row it is. So neither
chunk boundaries nor the rest of the batch change an output. Mass is added token by token, so
they change no score either. What this takes from the hardware, that all rows of a tile are
multiplied alike, holds on NVIDIA's tensor cores in practice, but nobody specifies it.

Bytes: a tile reads every FULL key and value that it sees, and every code, once; in the second
pass each token tile reads the keys, once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from qevict_kernels.checks import LENGTHS, check, check_heads, check_stores, check_view
from qevict_kernels.interface import FullArena, LayerView, Lengths
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.triton.records import load_codes, load_params

__all__ = [
    "Chunks",
    "TritonExtend",
    "attend_options",
    "extend_kernel",
    "score_kernel",
    "score_options",
    "tokens_kernel",
    "visible",
]

_NEVER = tl.constexpr(1 << 30)
"""The position of a key that is not there."""
_INFINITY = tl.constexpr(float("inf"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LIST_BLOCK = tl.constexpr(1024)
"""Entries of a list that are looked at at a time."""


@dataclass(frozen=True)
class Chunks:
    """What ``extend`` is given to attend with; see ``interface``."""

    query: torch.Tensor
    full: FullArena
    coded: torch.Tensor
    view: LayerView
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    scale: float
    out: torch.Tensor


class TritonExtend:
    """``extend`` of ``AttentionKernels``; see ``interface``.

    Subclasses may attend to some chunks otherwise (``attend_chunks``).

    ``_cos_sin``: the rotary table, contiguous, on the device of the arenas.
    """

    geometry: WindowGeometry
    rotary: RotaryTable
    _cos_sin: torch.Tensor

    def extend(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        prefix_lens: torch.Tensor,
        extend_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
        score_starts: torch.Tensor | None,
        whole: Lengths | None = None,
    ) -> None:
        """Causal attention of a chunk of new tokens per request."""
        chunks = Chunks(query, full, coded, view, rows, prefix_lens, extend_lens, scale, out)
        self._check(chunks, scores, score_starts)
        if not query.shape[0]:
            return
        if scores is None or score_starts is None:
            self.attend_chunks(chunks, False, whole)
        else:
            lse = self.attend_chunks(chunks, True, whole)
            self._add_scores(chunks, lse, scores, score_starts)

    def attend_chunks(self, chunks: Chunks, wants_lse: bool, whole: Lengths | None) -> torch.Tensor:
        """``extend`` without scores, for at least one token.

        Returns the logs (base 2) of the sums of weights, float32 ``[T, Hq]``; anything unless
        ``wants_lse``.
        """
        geometry, view, query, out = self.geometry, chunks.view, chunks.query, chunks.out
        batch, num_tokens = chunks.rows.shape[0], query.shape[0]
        lse = torch.empty(
            (num_tokens, geometry.num_q_heads) if wants_lse else 1,
            dtype=torch.float32,
            device=query.device,
        )
        options = attend_options(geometry, self.rotary, _architecture(self._cos_sin.device))
        tile_tokens = options["BLOCK_M"] // geometry.group_size
        # Each request has at most one tile that is not full.
        num_tiles = num_tokens // tile_tokens + min(batch, num_tokens)
        extend_kernel[num_tiles, geometry.num_kv_heads](
            query, chunks.full.keys, chunks.full.values, chunks.coded, self._cos_sin, out, lse,
            view.page_table, view.full_slot, view.coded_slot, view.windows, view.num_full,
            view.num_coded, chunks.rows, chunks.prefix_lens, chunks.extend_lens,
            chunks.scale / math.log(2), batch, view.windows.shape[1], query.stride(0),
            out.stride(0), chunks.full.keys.stride(0), view.page_table.stride(0),
            view.windows.stride(0), HAS_LSE=wants_lse, **options,
        )  # fmt: skip
        return lse

    def tokens(self, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each new token, and how many tokens it sees, itself included: int64 ``[T]``."""
        rows, count = chunks.rows, chunks.query.shape[0]
        # Two, since compiled kernels depend on whether a tensor begins at a multiple of 16 bytes.
        token_rows, token_lens = (rows.new_empty(count, dtype=torch.int64) for _ in range(2))
        tokens_kernel[rows.shape[0],](
            token_rows, token_lens, rows, chunks.prefix_lens, chunks.extend_lens, BLOCK=128
        )
        return token_rows, token_lens

    def _check(
        self, chunks: Chunks, scores: torch.Tensor | None, score_starts: torch.Tensor | None
    ) -> None:
        """Raise ``ValueError`` for tensors that ``extend`` can't take."""
        g, full, batch = self.geometry, chunks.full, chunks.rows.shape[0]
        check_stores(g, full, chunks.coded, self._cos_sin.device.type)
        shape = chunks.query.shape[0], g.num_q_heads, g.head_dim
        for name, tensor in (("query", chunks.query), ("out", chunks.out)):
            check_heads(name, tensor, *shape, full.keys.dtype)
        check_view(chunks.view, scores)
        check("rows", chunks.rows, (torch.int64,), (batch,))
        check("prefix_lens", chunks.prefix_lens, LENGTHS, (batch,))
        check("extend_lens", chunks.extend_lens, LENGTHS, (batch,))
        if score_starts is not None:
            check("score_starts", score_starts, LENGTHS, (batch,))

    def _add_scores(
        self,
        chunks: Chunks,
        lse: torch.Tensor,
        scores: torch.Tensor,
        score_starts: torch.Tensor,
    ) -> None:
        """Add attention mass to ``scores``; ``lse``: what ``attend_chunks`` has left."""
        geometry, view, full = self.geometry, chunks.view, chunks.full
        options = score_options(geometry, self.rotary)
        num_blocks = triton.cdiv(view.windows.shape[1] * geometry.window, options["BLOCK_N"]) + 1
        score_kernel[num_blocks, chunks.rows.shape[0]](
            chunks.query, full.keys, chunks.coded, self._cos_sin, lse, scores,
            view.page_table, view.full_slot, view.coded_slot, view.windows, view.num_full,
            view.num_coded, chunks.rows, chunks.prefix_lens, chunks.extend_lens, score_starts,
            chunks.scale / math.log(2), view.windows.shape[1], chunks.query.stride(0),
            full.keys.stride(0), view.page_table.stride(0), view.windows.stride(0),
            scores.stride(0), **options,
        )  # fmt: skip


@cache
def _architecture(device: torch.device) -> int:
    """Compute capability of a device as in sm_90, 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def attend_options(
    geometry: WindowGeometry, rotary: RotaryTable, architecture: int
) -> dict[str, Any]:
    """Constants of ``extend_kernel``. They depend on the model and the device alone, so that
    results do too; tiles are the largest whose numbers fit the registers. Blocks are fetched one
    ahead where shared memory has room."""
    is_wide, is_large = geometry.head_dim > 128, architecture // 10 in (9, 10)
    has_room = is_large or architecture == 80 or geometry.head_dim == 64
    rows = (64 if is_large else 32) if is_wide else 128
    return _options(geometry, rotary) | {
        "PAD": triton.next_power_of_2(geometry.head_dim),
        "BLOCK_M": max(rows, triton.next_power_of_2(geometry.group_size)),
        "BLOCK_N": 64 if is_large and not is_wide else 32,
        "CODED_STAGES": 2 if has_room else 1,
        "num_warps": 8,
        "num_stages": 1 if is_wide and not is_large else 2,
    }


def score_options(geometry: WindowGeometry, rotary: RotaryTable) -> dict[str, Any]:
    """Constants of ``score_kernel``; its rows are padded to a power of two of heads a token."""
    group = triton.next_power_of_2(geometry.group_size)
    return _options(geometry, rotary) | {
        "GROUP": group,
        "BLOCK_M": max(64, group),
        "BLOCK_N": 32,
        "num_warps": 8,
        "num_stages": 1,
    }


def _options(geometry: WindowGeometry, rotary: RotaryTable) -> dict[str, Any]:
    still = geometry.head_dim - rotary.rotary_dim
    return {
        "G": geometry,
        "ROTARY_DIM": rotary.rotary_dim,
        "IS_NEOX": rotary.is_neox,
        # A product needs 16 channels.
        "HALF": max(16, triton.next_power_of_2(rotary.rotary_dim // 2)),
        "STILL": max(16, triton.next_power_of_2(still)) if still else 0,
    }


# -- attention ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["batch", "num_columns", "page_table_stride", "windows_stride"])
def extend_kernel(
    query, full_keys, full_values, coded, cos_sin, out, lse,
    page_table, full_slot, coded_slot, windows, num_full, num_coded,
    rows, prefix_lens, extend_lens, scale_log2,
    batch, num_columns, query_stride, out_stride, slot_stride, page_table_stride, windows_stride,
    HAS_LSE: tl.constexpr, G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    HALF: tl.constexpr, STILL: tl.constexpr, PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CODED_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid ``[tiles, Hkv]``; see the module. ``lse``: float32 ``[T, Hq]``, base 2, out."""
    GROUP: tl.constexpr = G.num_q_heads // G.num_kv_heads
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    WINDOWS: tl.constexpr = BLOCK_N // G.window
    # Later tiles have more to do, so they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, tile, first_row = _find_tile(extend_lens, batch, tile, TOKENS)
    if request >= batch:
        return
    row = tl.load(rows + request)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    extend = tl.load(extend_lens + request).to(tl.int32)
    length = prefix + extend
    page_table += row * page_table_stride
    windows += row * windows_stride

    m = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + m // GROUP
    is_row = (m < TOKENS * GROUP) & (token < extend)
    head = kv_head * GROUP + m % GROUP
    q_position = prefix + token
    first_position = prefix + tile * TOKENS
    last_position = tl.minimum(first_position + TOKENS, length) - 1
    place = (first_row + token).to(tl.int64)
    q_pointers = query + place * query_stride + head * G.head_dim
    q1, q2, q3 = _load_parts(
        q_pointers[:, None], is_row[:, None], 1, G, ROTARY_DIM, IS_NEOX, HALF, STILL
    )

    n = tl.arange(0, BLOCK_N)
    offset = n % G.window
    d = tl.arange(0, PAD)
    is_channel = d < G.head_dim
    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, PAD), tl.float32)

    count = tl.load(num_full + row)
    num_clear, num_seen = visible(windows, count, first_position, last_position, G)
    clear_blocks = num_clear // WINDOWS
    for block in range(0, clear_blocks):
        window = tl.load(windows + block * WINDOWS + n // G.window)
        slot = tl.load(full_slot + tl.load(page_table + window)).to(tl.int64)
        start = slot * slot_stride + (kv_head * G.window + offset) * G.head_dim
        k1, k2, k3 = _load_parts(
            (full_keys + start)[None, :], n[None, :] >= 0, 0, G, ROTARY_DIM, IS_NEOX, HALF, STILL
        )
        products = _products(q1, q2, q3, k1, k2, k3, STILL) * scale_log2
        value = tl.load(
            full_values + start[:, None] + d[None, :], mask=is_channel[None, :], other=0.0
        )
        maximum, total, sums = _add_block(products, value, maximum, total, sums)

    for block in range(clear_blocks, tl.cdiv(num_seen, WINDOWS)):
        entry = block * WINDOWS + n // G.window
        # Past the end stands the last window, at a position that nobody sees.
        window = tl.load(windows + tl.minimum(entry, count - 1))
        position = tl.where(entry < count, window * G.window + offset, _NEVER)
        # The arena holds anything, NaN too, where no token has been written yet.
        is_written = position < length
        slot = tl.load(full_slot + tl.load(page_table + window)).to(tl.int64)
        start = slot * slot_stride + (kv_head * G.window + offset) * G.head_dim
        k1, k2, k3 = _load_parts(
            (full_keys + start)[None, :], is_written[None, :], 0, G, ROTARY_DIM, IS_NEOX, HALF,
            STILL,
        )  # fmt: skip
        products = _products(q1, q2, q3, k1, k2, k3, STILL) * scale_log2
        is_seen = position[None, :] <= q_position[:, None]
        products = tl.where(is_seen, products, -_INFINITY)
        value = tl.load(
            full_values + start[:, None] + d[None, :],
            mask=is_written[:, None] & is_channel[None, :],
            other=0.0,
        )
        maximum, total, sums = _add_block(products, value, maximum, total, sums)

    count = tl.load(num_coded + row)
    L: tl.constexpr = G.record
    for block in tl.range(0, tl.cdiv(count, WINDOWS), num_stages=CODED_STAGES):
        entry = block * WINDOWS + n // G.window
        window = tl.load(windows + (num_columns - 1 - tl.minimum(entry, count - 1)))
        position = window * G.window + offset
        slot = tl.load(coded_slot + tl.load(page_table + window)).to(tl.int64)
        record = coded + (slot * G.num_kv_heads + kv_head) * L.record_bytes
        k1, k2, k3 = _decode_keys(
            record, position, offset, cos_sin, query.dtype.element_ty, G, ROTARY_DIM, IS_NEOX,
            HALF, STILL,
        )  # fmt: skip
        products = _products(q1, q2, q3, k1, k2, k3, STILL) * scale_log2
        position = tl.where(entry < count, position, _NEVER)
        is_seen = position[None, :] <= q_position[:, None]
        products = tl.where(is_seen, products, -_INFINITY)
        codes = load_codes(
            record[:, None], offset[:, None], d[None, :], is_channel[None, :], L.value_codes,
            G.value_bits, G,
        )  # fmt: skip
        v_scale, v_zero = load_params(
            record, offset, n >= 0, L.value_scales, L.value_zeros, L.header + 12, G
        )
        value = v_zero[:, None] + codes.to(tl.float32) * v_scale[:, None]
        value = value.to(query.dtype.element_ty)
        maximum, total, sums = _add_block(products, value, maximum, total, sums)

    # A query that sees nothing gets zeros.
    result = tl.where(total[:, None] == 0, 0.0, sums / total[:, None])
    tl.store(
        out + (place * out_stride + head * G.head_dim)[:, None] + d[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_channel[None, :],
    )
    if HAS_LSE:
        logarithm = maximum + tl.log2(total)
        tl.store(lse + place * G.num_q_heads + head, logarithm, mask=is_row)


@triton.jit
def _add_block(products, value, maximum, total, sums):
    """One step of the online softmax: ``products`` ``[M, N]`` in base 2, ``value`` ``[N, D]``."""
    new_maximum = tl.maximum(maximum, tl.max(products, axis=1))
    # Rows that have seen nothing yet subtract 0, not infinity.
    base = tl.where(new_maximum == -_INFINITY, 0.0, new_maximum)
    weight = tl.exp2(products - base[:, None])
    decay = tl.exp2(maximum - base)
    total = total * decay + tl.sum(weight, axis=1)
    sums = _dot(weight.to(value.dtype), value, sums * decay[:, None])
    return new_maximum, total, sums


# -- scores -------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["num_columns", "page_table_stride", "windows_stride", "scores_stride"]
)
def score_kernel(
    query, full_keys, coded, cos_sin, lse, scores,
    page_table, full_slot, coded_slot, windows, num_full, num_coded,
    rows, prefix_lens, extend_lens, score_starts, scale_log2,
    num_columns, query_stride, slot_stride, page_table_stride, windows_stride, scores_stride,
    G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, HALF: tl.constexpr,
    STILL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid ``[blocks of windows, B]``; see the module."""
    WINDOWS: tl.constexpr = BLOCK_N // G.window
    block, request = tl.program_id(0), tl.program_id(1)
    extend = tl.load(extend_lens + request).to(tl.int32)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    first = tl.maximum(tl.load(score_starts + request).to(tl.int32) - prefix, 0)
    if first >= extend:
        return
    row = tl.load(rows + request)
    page_table += row * page_table_stride
    windows += row * windows_stride
    scores += row * scores_stride
    first_row = _sum_before(extend_lens, request)
    query += first_row * query_stride
    lse += first_row * G.num_q_heads
    count = tl.load(num_full + row)
    full_blocks = tl.cdiv(count, WINDOWS)
    if block < full_blocks:
        _score_block(
            query, full_keys, cos_sin, lse, scores, page_table, full_slot, windows, block, count,
            first, prefix, extend, scale_log2, num_columns, query_stride, slot_stride,
            False, G, ROTARY_DIM, IS_NEOX, HALF, STILL, GROUP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        count = tl.load(num_coded + row)
        block -= full_blocks
        if block * WINDOWS < count:
            _score_block(
                query, coded, cos_sin, lse, scores, page_table, coded_slot, windows, block, count,
                first, prefix, extend, scale_log2, num_columns, query_stride, slot_stride,
                True, G, ROTARY_DIM, IS_NEOX, HALF, STILL, GROUP, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _score_block(
    query, copies, cos_sin, lse, scores, page_table, slots, windows, block, count,
    first, prefix, extend, scale_log2, num_columns, query_stride, slot_stride,
    IS_CODED: tl.constexpr, G: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    HALF: tl.constexpr, STILL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the mass of queries ``[first, extend)`` to one block of one tier's list.

    ``copies``, ``slots``: the tier's arena and slot table; ``query``, ``lse`` and ``scores``
    begin with the request.
    """
    WINDOWS: tl.constexpr = BLOCK_N // G.window
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = G.num_q_heads // G.num_kv_heads
    L: tl.constexpr = G.record
    entry = block * WINDOWS + tl.arange(0, WINDOWS)
    is_listed = entry < count
    if IS_CODED:
        entry = num_columns - 1 - entry
    scores += tl.load(windows + entry, mask=is_listed, other=0)
    score = tl.load(scores, mask=is_listed, other=0.0)

    n = tl.arange(0, BLOCK_N)
    offset = n % G.window
    entry = block * WINDOWS + n // G.window
    # Past the end stands the last window, at a position that nobody sees.
    at = tl.minimum(entry, count - 1)
    if IS_CODED:
        at = num_columns - 1 - at
    window = tl.load(windows + at)
    position = tl.where(entry < count, window * G.window + offset, _NEVER)
    slot = tl.load(slots + tl.load(page_table + window)).to(tl.int64)

    m = tl.arange(0, BLOCK_M)
    t = tl.arange(0, TOKENS)
    # Tokens before the block's first key see nothing of it.
    first = tl.maximum(first, tl.min(position, axis=0) - prefix)
    for start in range(first, extend, TOKENS):
        token = start + m // GROUP
        is_row = (m % GROUP < HEADS) & (token < extend)
        mass = tl.zeros((TOKENS, WINDOWS), tl.float32)
        for kv_head in range(G.num_kv_heads):
            head = kv_head * HEADS + m % GROUP
            q_pointers = query + token.to(tl.int64) * query_stride + head * G.head_dim
            q1, q2, q3 = _load_parts(
                q_pointers[:, None], is_row[:, None], 1, G, ROTARY_DIM, IS_NEOX, HALF, STILL
            )
            if IS_CODED:
                record = copies + (slot * G.num_kv_heads + kv_head) * L.record_bytes
                k1, k2, k3 = _decode_keys(
                    record, window * G.window + offset, offset, cos_sin, query.dtype.element_ty,
                    G, ROTARY_DIM, IS_NEOX, HALF, STILL,
                )  # fmt: skip
            else:
                keys = copies + slot * slot_stride + (kv_head * G.window + offset) * G.head_dim
                k1, k2, k3 = _load_parts(
                    keys[None, :], position[None, :] < prefix + extend, 0, G, ROTARY_DIM, IS_NEOX,
                    HALF, STILL,
                )  # fmt: skip
            products = _products(q1, q2, q3, k1, k2, k3, STILL) * scale_log2
            logarithm = tl.load(lse + token * G.num_q_heads + head, mask=is_row, other=float("inf"))
            is_seen = position[None, :] <= prefix + token[:, None]
            weight = tl.exp2(tl.where(is_seen, products, -_INFINITY) - logarithm[:, None])
            by_window = tl.sum(tl.reshape(weight, (BLOCK_M, WINDOWS, G.window)), axis=2)
            mass += tl.sum(tl.reshape(by_window, (TOKENS, GROUP, WINDOWS)), axis=1)
        mass *= 1.0 / G.num_q_heads
        for i in range(TOKENS):
            score += tl.sum(tl.where(t[:, None] == i, mass, 0.0), axis=0)
    tl.store(scores, score, mask=is_listed)


@triton.jit
def tokens_kernel(
    token_rows, token_lens, rows, prefix_lens, extend_lens, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid ``[B]``; see ``TritonExtend.tokens``."""
    request = tl.program_id(0)
    row = tl.load(rows + request)
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    extend = tl.load(extend_lens + request).to(tl.int32)
    first = _sum_before(extend_lens, request)
    for start in range(0, extend, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < extend
        tl.store(token_rows + first + token, tl.zeros_like(token).to(tl.int64) + row, mask=there)
        tl.store(token_lens + first + token, prefix + token + 1, mask=there)


# -- parts --------------------------------------------------------------------------------


@triton.jit
def _find_tile(extend_lens, batch, index, TOKENS: tl.constexpr):
    """Tile ``index`` of a batch: (request, tile within it, the request's first token).

    The request is ``batch`` where there are fewer tiles.
    """
    request, tiles_before, first_token, num_tiles = 0, 0, 0, 0
    for start in range(0, batch, 128):
        b = start + tl.arange(0, 128)
        extend = tl.load(extend_lens + b, mask=b < batch, other=0).to(tl.int32)
        tiles = tl.cdiv(extend, TOKENS)
        is_before = (b < batch) & (num_tiles + tl.cumsum(tiles, axis=0) <= index)
        request += tl.sum(is_before.to(tl.int32), axis=0)
        tiles_before += tl.sum(tl.where(is_before, tiles, 0), axis=0)
        first_token += tl.sum(tl.where(is_before, extend, 0), axis=0)
        num_tiles += tl.sum(tiles, axis=0)
    return request, index - tiles_before, first_token


@triton.jit
def _sum_before(extend_lens, request):
    """int64 tokens of the requests before one."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, request, 128):
        b = start + tl.arange(0, 128)
        extend = tl.load(extend_lens + b, mask=b < request, other=0)
        total += tl.sum(extend.to(tl.int64), axis=0)
    return total


@triton.jit
def visible(windows, count, first_position, last_position, G: tl.constexpr):
    """How many entries of a list, from its beginning, are seen whole by all positions of a
    range, and up to how many are seen in part by some. Any order of the list is right."""
    num_clear, num_seen = count, 0
    for start in range(0, count, _LIST_BLOCK):
        entry = start + tl.arange(0, _LIST_BLOCK)
        window = tl.load(windows + entry, mask=entry < count, other=0)
        is_partly_hidden = (entry < count) & ((window + 1) * G.window - 1 > first_position)
        is_seen = (entry < count) & (window * G.window <= last_position)
        hidden = tl.min(tl.where(is_partly_hidden, entry, count), axis=0)
        num_clear = tl.minimum(num_clear, hidden)
        num_seen = tl.maximum(num_seen, tl.max(tl.where(is_seen, entry + 1, 0), axis=0))
    return num_clear, num_seen


@triton.jit
def _load_parts(
    pointers, mask, AXIS: tl.constexpr, G: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """Three parts of vectors that begin at ``pointers``, channels along ``AXIS``."""
    first, second = _channels(ROTARY_DIM, IS_NEOX, HALF)
    first, second = tl.expand_dims(first, 1 - AXIS), tl.expand_dims(second, 1 - AXIS)
    is_pair = tl.expand_dims(tl.arange(0, HALF) < ROTARY_DIM // 2, 1 - AXIS)
    x1 = tl.load(pointers + first, mask=mask & is_pair, other=0.0)
    x2 = tl.load(pointers + second, mask=mask & is_pair, other=0.0)
    x3 = x1
    if STILL:
        d = tl.expand_dims(tl.arange(0, STILL), 1 - AXIS)
        there = mask & (d < G.head_dim - ROTARY_DIM)
        x3 = tl.load(pointers + ROTARY_DIM + d, mask=there, other=0.0)
    return x1, x2, x3


@triton.jit
def _decode_keys(
    record, position, offset, cos_sin, dtype: tl.constexpr, G: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, HALF: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """Three parts ``[channels, N]`` of coded keys after RoPE; all arguments are ``[N]``."""
    first, second = _channels(ROTARY_DIM, IS_NEOX, HALF)
    j = tl.arange(0, HALF)
    there = (j < ROTARY_DIM // 2)[:, None]
    table = cos_sin + position.to(tl.int64)[None, :] * ROTARY_DIM + j[:, None]
    cos = tl.load(table, mask=there, other=0.0)
    sin = tl.load(table + ROTARY_DIM // 2, mask=there, other=0.0)
    x1 = _coded_keys(record, offset, first, there, G)
    x2 = _coded_keys(record, offset, second, there, G)
    k1 = (x1 * cos - x2 * sin).to(dtype)
    k2 = (x2 * cos + x1 * sin).to(dtype)
    k3 = k1
    if STILL:
        d = tl.arange(0, STILL)
        there = (d < G.head_dim - ROTARY_DIM)[:, None]
        k3 = _coded_keys(record, offset, ROTARY_DIM + d, there, G).to(dtype)
    return k1, k2, k3


@triton.jit
def _coded_keys(record, offset, channel, mask, G: tl.constexpr):
    """float32 keys before RoPE ``[channels, N]``, 0 where no ``mask``."""
    L: tl.constexpr = G.record
    codes = load_codes(
        record[None, :], offset[None, :], channel[:, None], mask, L.key_codes, G.key_bits, G
    )
    scale, zero = load_params(
        record[None, :], channel[:, None], mask, L.key_scales, L.key_zeros, L.header, G
    )
    return zero + codes.to(tl.float32) * scale


@triton.jit
def _channels(ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, HALF: tl.constexpr):
    """The first and second channels of the rotated pairs."""
    j = tl.arange(0, HALF)
    if IS_NEOX:
        return j, j + ROTARY_DIM // 2
    return 2 * j, 2 * j + 1


@triton.jit
def _products(q1, q2, q3, k1, k2, k3, STILL: tl.constexpr):
    """float32 ``[M, N]``."""
    products = _dot(q1, k1, tl.zeros((q1.shape[0], k1.shape[1]), tl.float32))
    products = _dot(q2, k2, products)
    if STILL:
        products = _dot(q3, k3, products)
    return products


@triton.jit
def _dot(a, b, sums):
    """``sums + a b``. The interpreter would multiply bfloat16 as integers."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums)
