"""The definition of every kernel, in plain torch and float32: slow, and meant to be obvious.

Also the record codec (``encode_windows``, ``pack``, ``unpack``, ``decode_windows``), which tests of
the fast backends use to look into their records.

Quantiser
    A *row* is what shares one scale and zero: the ``W`` values of a key channel, or the ``D``
    values of a token. The zero is the row's minimum rounded down to a number that can be stored;
    the scale is computed from that stored zero and rounded up, so the stored range
    ``[zero, zero + (2**bits - 1) * scale]`` covers the row, and the error of a value is at most
    half a stored step. All rows of a window share the second level of ``ParamFormat.UINT8``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from qevict_kernels.interface import FullArena, LayerView, Lengths
from qevict_kernels.layout import ParamFormat, WindowGeometry
from qevict_kernels.rope import RotaryTable

__all__ = [
    "CodedWindows",
    "Params",
    "ReferenceKernels",
    "decode_windows",
    "encode_windows",
    "make_params",
    "pack",
    "quantize_rows",
    "rows_of",
    "unpack",
]

# Margins (relative) that outweigh the few float32 roundings between a row's range and its
# stored scale: the second level is a little wider still, so that byte 255 always suffices.
SCALE_MARGIN = 1.0 + 2.0**-21
STEP_MARGIN = 1.0 + 2.0**-20


class Params(NamedTuple):
    """Scales and zeros of the rows of a window, as stored.

    ``scales``, ``zeros``: ``[..., rows]``, float16, or uint8 with ``header`` float32 ``[..., 3]``:
    scale step, zero base, zero step (``None`` with float16).
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    header: torch.Tensor | None

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The float32 (scales, zeros) that the stored form stands for."""
        if self.header is None:
            return self.scales.float(), self.zeros.float()
        scale_step, zero_base, zero_step = self.header.unsqueeze(-1).unbind(-2)
        return self.scales.float() * scale_step, zero_base + self.zeros.float() * zero_step


class CodedWindows(NamedTuple):
    """Coded records taken apart: codes uint8 ``[..., W, D]`` and the stored parameters."""

    key_codes: torch.Tensor
    value_codes: torch.Tensor
    key_params: Params
    value_params: Params


# -- quantiser ----------------------------------------------------------------------------


def make_params(rows: torch.Tensor, bits: int, params: ParamFormat) -> Params:
    """Stored parameters that cover ``rows`` ``[..., num_rows, row_length]`` (float32)."""
    low, high = rows.amin(-1) + 0.0, rows.amax(-1) + 0.0  # of two zeros the positive one
    levels = 2**bits - 1
    if params is ParamFormat.FP16:
        zeros = _half_down(low)
        return Params(_half_up((high - zeros.float()) / levels * SCALE_MARGIN), zeros, None)
    base = low.amin(-1, keepdim=True)
    zero_step = (low.amax(-1, keepdim=True) - base) / 255
    zeros = _quotient(low - base, zero_step).floor().clamp(0, 255)
    zeros = zeros - (base + zeros * zero_step > low).float()
    need = (high - (base + zeros * zero_step)) / levels
    scale_step = need.amax(-1, keepdim=True) * (STEP_MARGIN / 255)
    scales = _quotient(need * SCALE_MARGIN, scale_step).ceil().clamp(0, 255)
    header = torch.cat([scale_step, base, zero_step], dim=-1)
    return Params(_byte(scales), _byte(zeros), header)


def quantize_rows(rows: torch.Tensor, params: Params, bits: int) -> torch.Tensor:
    """Codes (uint8) of ``rows`` ``[..., num_rows, row_length]`` under given parameters."""
    scales, zeros = params.numbers()
    steps = _quotient(rows - zeros.unsqueeze(-1), scales.unsqueeze(-1))
    return _byte(steps.round().clamp(0, 2**bits - 1))


def rows_of(codes: torch.Tensor, params: Params) -> torch.Tensor:
    """float32 numbers that codes ``[..., num_rows, row_length]`` stand for."""
    scales, zeros = params.numbers()
    return zeros.unsqueeze(-1) + codes.float() * scales.unsqueeze(-1)


def encode_windows(
    keys: torch.Tensor, values: torch.Tensor, geometry: WindowGeometry
) -> tuple[CodedWindows, torch.Tensor]:
    """Quantise float32 windows ``[..., W, D]`` (keys before RoPE).

    Returns the codes and a bool tensor ``[...]``: which windows hold, or would need in their
    parameters, a number that is not finite. Those get parameters of NaN and codes of 0.
    """
    key_rows = keys.transpose(-1, -2)
    key_params = make_params(key_rows, geometry.key_bits, geometry.params)
    value_params = make_params(values, geometry.value_bits, geometry.params)
    bad = torch.zeros(keys.shape[:-2], dtype=torch.bool)
    for tensor, params in ((keys, key_params), (values, value_params)):
        finite = [tensor.flatten(-2), *params.numbers()]
        bad |= ~torch.cat([f.isfinite() for f in finite], dim=-1).all(-1)
    key_params, value_params = _spoil(key_params, bad), _spoil(value_params, bad)
    key_codes = quantize_rows(key_rows, key_params, geometry.key_bits).transpose(-1, -2)
    value_codes = quantize_rows(values, value_params, geometry.value_bits)
    return CodedWindows(key_codes, value_codes, key_params, value_params), bad


def decode_windows(windows: CodedWindows) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (keys before RoPE, values), each ``[..., W, D]``."""
    keys = rows_of(windows.key_codes.transpose(-1, -2), windows.key_params)
    return keys.transpose(-1, -2), rows_of(windows.value_codes, windows.value_params)


# -- records ------------------------------------------------------------------------------


def pack(windows: CodedWindows, geometry: WindowGeometry) -> torch.Tensor:
    """uint8 records ``[..., record_bytes]``; padding is 0."""
    record = geometry.record
    shape = windows.key_codes.shape[:-2]
    out = torch.zeros(*shape, record.record_bytes, dtype=torch.uint8)

    def put(offset: int, tensor: torch.Tensor) -> None:
        data = tensor.contiguous().view(torch.uint8).flatten(len(shape))
        out[..., offset : offset + data.shape[-1]] = data

    put(record.key_codes, _to_words(windows.key_codes, geometry, geometry.key_bits))
    put(record.value_codes, _to_words(windows.value_codes, geometry, geometry.value_bits))
    put(record.key_scales, windows.key_params.scales)
    put(record.key_zeros, windows.key_params.zeros)
    put(record.value_scales, windows.value_params.scales)
    put(record.value_zeros, windows.value_params.zeros)
    if windows.key_params.header is not None and windows.value_params.header is not None:
        put(record.header, torch.cat([windows.key_params.header, windows.value_params.header], -1))
    return out


def unpack(records: torch.Tensor, geometry: WindowGeometry) -> CodedWindows:
    """The inverse of ``pack``; ``records`` is uint8 ``[..., record_bytes]``."""
    record = geometry.record
    dtype = torch.float16 if geometry.params is ParamFormat.FP16 else torch.uint8

    def take(offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        part = records[..., offset : offset + count * dtype.itemsize]
        return part.clone().view(dtype)

    def codes(offset: int, bits: int) -> torch.Tensor:
        num_bytes = geometry.head_dim * geometry.window * bits // 8
        return _from_words(take(offset, num_bytes, torch.uint8), geometry, bits)

    headers: list[torch.Tensor | None] = [None, None]
    if geometry.params is ParamFormat.UINT8:
        header = take(record.header, 6, torch.float32)
        headers = [header[..., :3], header[..., 3:]]
    dim, window = geometry.head_dim, geometry.window
    return CodedWindows(
        codes(record.key_codes, geometry.key_bits),
        codes(record.value_codes, geometry.value_bits),
        Params(take(record.key_scales, dim, dtype), take(record.key_zeros, dim, dtype), headers[0]),
        Params(
            take(record.value_scales, window, dtype),
            take(record.value_zeros, window, dtype),
            headers[1],
        ),
    )


def _to_words(codes: torch.Tensor, geometry: WindowGeometry, bits: int) -> torch.Tensor:
    """Codes ``[..., W, D]`` as the bytes ``[..., num_bytes]`` of their words (see ``layout``)."""
    group = geometry.code_group
    shape = (*codes.shape[:-2], geometry.window // group, group, geometry.head_dim)
    grouped = codes.reshape(shape).long()
    shifts = (torch.arange(group) * bits).unsqueeze(-1)
    words = (grouped << shifts).sum(-2)  # [..., groups, D]
    byte_shifts = torch.arange(0, group * bits, 8)
    return _byte((words.unsqueeze(-1) >> byte_shifts) & 255).flatten(-3)


def _from_words(data: torch.Tensor, geometry: WindowGeometry, bits: int) -> torch.Tensor:
    group = geometry.code_group
    word_bytes = group * bits // 8
    shape = (*data.shape[:-1], geometry.window // group, geometry.head_dim, word_bytes)
    split = data.reshape(shape).long()
    words = (split << torch.arange(0, group * bits, 8)).sum(-1)
    shifts = (torch.arange(group) * bits).unsqueeze(-1)
    return _byte((words.unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-3, -2)


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, torch.zeros(()), a / b)


def _byte(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0).to(torch.uint8) if x.is_floating_point() else x.byte()


def _half_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is not above ``x``."""
    half = x.to(torch.float16)
    below = torch.nextafter(half, torch.tensor(-math.inf, dtype=torch.float16))
    return torch.where(half.float() > x, below, half)


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that is not below ``x``."""
    return -_half_down(-x)


def _spoil(params: Params, bad: torch.Tensor) -> Params:
    """NaN parameters where ``bad``: in the header where there is one (bytes become 0)."""
    bad = bad.unsqueeze(-1)
    if params.header is None:
        return Params(
            params.scales.masked_fill(bad, math.nan), params.zeros.masked_fill(bad, math.nan), None
        )
    return Params(
        params.scales.masked_fill(bad, 0),
        params.zeros.masked_fill(bad, 0),
        params.header.masked_fill(bad, math.nan),
    )


# -- kernels ------------------------------------------------------------------------------


class ReferenceKernels:
    """``AttentionKernels`` in plain torch; see ``interface`` for what each method does."""

    def __init__(self, geometry: WindowGeometry, rotary: RotaryTable) -> None:
        rotary.require_linear()
        self.geometry = geometry
        self.rotary = rotary

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the codes of FULL windows; returns which hold NaN or infinity, ``[n]``."""
        keep = full_slots >= 0
        source, target, windows = full_slots[keep], coded_slots[keep], windows[keep]
        keys = self.rotary.unrotate(full.keys[source.long()], self._positions(windows))
        codes, bad = encode_windows(keys, full.values[source.long()].float(), self.geometry)
        coded[target.long()] = pack(codes, self.geometry)
        refused = torch.zeros_like(keep)
        refused[keep] = bad.any(-1)
        return refused

    def dequantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> None:
        """Rebuild FULL windows from codes."""
        keep = full_slots >= 0
        target, source, windows = full_slots[keep].long(), coded_slots[keep], windows[keep]
        keys, values = self._coded_windows(coded, source, windows)
        full.keys[target] = keys.to(full.keys.dtype)
        full.values[target] = values.to(full.values.dtype)

    def decode(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
    ) -> None:
        """Attention of one new token per request over its FULL and coded windows."""
        for b, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
            last = torch.tensor([length - 1])
            self._attend(
                query[b : b + 1], full, coded, view, row, last, scale, out[b : b + 1], scores, 0
            )

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
        start = 0
        for b, row in enumerate(rows.tolist()):
            end = start + int(extend_lens[b])
            positions = int(prefix_lens[b]) + torch.arange(end - start)
            first = math.inf if score_starts is None else int(score_starts[b])
            self._attend(
                query[start:end], full, coded, view, row, positions, scale, out[start:end],
                scores, first,
            )  # fmt: skip
            start = end

    def _attend(
        self,
        query: torch.Tensor,
        full: FullArena,
        coded: torch.Tensor,
        view: LayerView,
        row: int,
        positions: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        scores: torch.Tensor | None,
        score_start: float,
    ) -> None:
        """Queries ``[T, Hq, D]`` of one row over the keys at or before their ``positions``."""
        windows, keys, values = self._row_windows(full, coded, view, row)
        if not len(windows):
            out.zero_()
            return
        geometry = self.geometry
        heads = torch.arange(geometry.num_q_heads) // geometry.group_size
        seen = self._positions(windows).flatten() <= positions.unsqueeze(-1)  # [T, n * W]
        logits = torch.einsum("thd,nhwd->htnw", query.float(), keys[:, heads]).flatten(2) * scale
        logits = logits.masked_fill(~seen, -math.inf)
        # A query that sees nothing gets zeros.
        mass = logits.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        mass = mass.view(*mass.shape[:2], len(windows), geometry.window)
        # The arena holds anything, NaN too, where no token has been written yet.
        unseen = ~seen.any(0).view(-1, 1, geometry.window, 1)
        values = values.masked_fill(unseen, 0.0)
        out.copy_(torch.einsum("htnw,nhwd->thd", mass, values[:, heads]))
        if scores is not None:
            scored = mass[:, positions >= score_start]
            scores[row, windows.long()] += scored.mean(0).sum((0, 2))

    def _row_windows(
        self, full: FullArena, coded: torch.Tensor, view: LayerView, row: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Window indices ``[n]`` of a row, float32 keys and values ``[n, Hkv, W, D]``."""
        listed = view.windows[row]
        full_windows = listed[: int(view.num_full[row])]
        coded_windows = listed[len(listed) - int(view.num_coded[row]) :].flip(0)
        pages = view.page_table[row].long()
        full_slots = view.full_slot[pages[full_windows.long()]].long()
        coded_slots = view.coded_slot[pages[coded_windows.long()]]
        keys, values = self._coded_windows(coded, coded_slots, coded_windows)
        return (
            torch.cat([full_windows, coded_windows]),
            torch.cat([full.keys[full_slots].float(), keys]),
            torch.cat([full.values[full_slots].float(), values]),
        )

    def _coded_windows(
        self, coded: torch.Tensor, slots: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 keys after RoPE and values ``[n, Hkv, W, D]`` of coded slots."""
        keys, values = decode_windows(unpack(coded[slots.long()], self.geometry))
        return self.rotary.rotate(keys, self._positions(windows)), values

    def _positions(self, windows: torch.Tensor) -> torch.Tensor:
        """Absolute positions ``[n, 1, W]`` of the tokens of windows ``[n]``."""
        offsets = torch.arange(self.geometry.window)
        return windows.long().view(-1, 1, 1) * self.geometry.window + offsets
