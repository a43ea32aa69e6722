"""What every kernel backend offers; ``reference`` is the definition, the others must agree.

Arenas
    ``FullArena``: ``keys`` and ``values`` ``[num_full_slots, num_kv_heads, W, head_dim]``
    in the model's dtype (bfloat16 or float16), keys after RoPE.
    ``coded``: uint8 ``[num_coded_slots, num_kv_heads, record_bytes]`` (see ``layout``).

Views
    What one request sees of one layer is a *window list*: the indices of its FULL
    windows, then, growing from the far end, those of its coded windows. Index ``w``
    stands for the tokens ``[w * W, (w + 1) * W)`` of that request. The slot of a window
    is found through its page: ``full_slot[page_table[row, w]]``.

Invariance
    The result for a request is bit for bit the same whatever else is in the batch,
    however many threads run, and wherever chunk boundaries fall: partial results are
    made over fixed blocks of a request's own lists and merged in list order. On a GPU this holds of
    ``decode``; ``extend`` there is invariant up to rounding, since few tokens, chunks over FULL
    windows alone, and others take different kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable

__all__ = [
    "AttentionKernels",
    "FullArena",
    "LayerView",
    "Lengths",
    "RoutesOnDevice",
    "RoutingEvent",
    "SideTensors",
    "ViewTensors",
]


class Lengths(NamedTuple):
    """Where the chunks of a launch begin and end, known on the host: ``[starts[b], ends[b])``."""

    starts: list[int]
    ends: list[int]


@dataclass(frozen=True)
class FullArena:
    """Storage of FULL windows: ``keys`` and ``values`` ``[slots, Hkv, W, D]``.

    Both are strided in the first dimension only (a slot holds its keys, then its values, so
    that ``stride(0) == 2 * Hkv * W * D``); the inner dimensions are contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class LayerView:
    """The views of all rows in one layer, as int32 tensors on the KV device.

    page_table: ``[rows, N]``, the page of window ``w`` of a row (shared by all layers).
    full_slot, coded_slot: ``[pages]``, slot of a page in this layer, -1 where it has none.
    windows: ``[rows, N]``; the first ``num_full[row]`` entries are FULL windows, the last
        ``num_coded[row]`` entries are coded windows (in order from the end: entry
        ``N - 1 - j`` is the ``j``-th).
    num_full, num_coded: ``[rows]``.
    """

    page_table: torch.Tensor
    full_slot: torch.Tensor
    coded_slot: torch.Tensor
    windows: torch.Tensor
    num_full: torch.Tensor
    num_coded: torch.Tensor


class AttentionKernels(Protocol):
    """One backend, made for one geometry and one rotary table."""

    geometry: WindowGeometry
    rotary: RotaryTable

    def reserve(self, batch: int, columns: int) -> None:
        """Allocate what ``decode`` needs for such batches over lists of ``columns`` windows.

        Whatever is decoded then finds it at the same place: a captured CUDA graph relies on it.
        """
        ...

    def copy_slots(self, slots: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of ``slots`` (uint8 ``[n, bytes]``), ``targets[i] <- sources[i]``.

        ``sources``, ``targets``: int32 ``[m]``; an entry with a negative source is skipped.
        No row is both a source and a target.
        """
        ...

    def store(
        self,
        full: FullArena,
        full_slots: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write new tokens into FULL windows.

        ``full_slots``, ``offsets``: int32 ``[T]``, slot and place in the window; a negative
        slot is skipped. ``keys``, ``values``: ``[T, Hkv, D]``, model dtype, keys after RoPE;
        may be strided in the first dimension.
        """
        ...

    def quantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the codes of FULL windows.

        ``full_slots``, ``coded_slots``, ``windows``: int32 ``[n]``, source slot, target
        slot and window index (for un-rotation at ``window * W + i``); an entry with a
        negative source is skipped. Keys are un-rotated in float32, then quantised per
        channel; values are quantised per token.

        Returns bool ``[n]`` on the same device: which entries can't be coded, since they hold
        NaN or infinity or a range beyond the format of the parameters (never a skipped one).
        Their records decode to NaN and nothing reads them: the tier manager releases them and
        evicts the windows.
        """
        ...

    def dequantize(
        self,
        full: FullArena,
        coded: torch.Tensor,
        full_slots: torch.Tensor,
        coded_slots: torch.Tensor,
        windows: torch.Tensor,
    ) -> None:
        """Rebuild FULL windows from codes; the arguments are those of ``quantize``.

        Entries with a negative ``full_slots`` are skipped. Keys are rotated again.
        """
        ...

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
        """Attention of one new token per request over its FULL and coded windows.

        ``query``, ``out``: ``[B, Hq, D]``, query after RoPE, model dtype (inputs may be
        strided in the first dimension). ``rows``: int64 ``[B]``; ``seq_lens``: int64 or
        int32 ``[B]``, tokens of the request, the new one included: a window's tokens at or
        past ``seq_lens`` are masked. A request of ``seq_lens`` 0 gives zeros.
        ``scores``: float32 ``[rows, N]`` of this layer or None;
        ``scores[row, w] += mean over query heads of the attention mass of window w``.
        """
        ...

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
        """Causal attention of a chunk of new tokens per request.

        ``query``, ``out``: ``[T, Hq, D]``, the requests' new tokens one after another.
        ``prefix_lens``, ``extend_lens``: ``[B]``; the queries of request ``b`` stand at
        positions ``prefix_lens[b] + [0, extend_lens[b])`` and their own keys and values are
        in the FULL arena already. A query sees keys at positions not above its own.
        ``score_starts``: ``[B]``; queries at positions at or past it add their mass to
        ``scores`` as in ``decode``.
        ``whole``: given where every window of all these requests is FULL, once for all layers of
        a launch (the same object). It repeats what the device knows, for kernels that plan.
        """
        ...


class ViewTensors(NamedTuple):
    """The views of all rows in all layers (see ``qevict_tiers.views``), contiguous.

    tier: uint8, score: float32, outranked: bool, windows: int32, ``[L, rows, N]``. num_full,
    num_coded: int32 ``[L, rows]``. page_table: int32 ``[rows, N]``. shared, publishable: int64
    ``[rows]``. is_routed: bool ``[L]``.
    """

    tier: torch.Tensor
    score: torch.Tensor
    outranked: torch.Tensor
    windows: torch.Tensor
    num_full: torch.Tensor
    num_coded: torch.Tensor
    page_table: torch.Tensor
    shared: torch.Tensor
    publishable: torch.Tensor
    is_routed: torch.Tensor


class SideTensors(NamedTuple):
    """One end of the arena (see ``qevict_tiers.arena``).

    slots: uint8 ``[capacity, bytes]``. table: int32 ``[owners]``. owner: int64, references: int32,
    ``[capacity + 1]``. used: int64 ``[]``, slots in use. from_right: where its compact run begins.
    """

    slots: torch.Tensor
    table: torch.Tensor
    owner: torch.Tensor
    references: torch.Tensor
    used: torch.Tensor
    from_right: bool


class RoutingEvent(NamedTuple):
    """Which rows are routed, in which layers, and how.

    rows: int64 ``[B]``. limits: int64 ``[4, B]``: beginning and end of the history, FULL and coded
    windows that it may have. first_layer, num_layers: layers. width: windows of the longest row.
    coded_per_full: numerator and denominator of coded windows for the bytes of a FULL one.
    dequantizes: whether FULL copies are rebuilt. pages_per_layer: owners of a layer.
    """

    rows: torch.Tensor
    limits: torch.Tensor
    first_layer: int
    num_layers: int
    width: int
    coded_per_full: tuple[int, int]
    dequantizes: bool
    pages_per_layer: int


@runtime_checkable
class RoutesOnDevice(Protocol):
    """Kernels that do a whole routing event, in a few launches."""

    def route(
        self,
        event: RoutingEvent,
        views: ViewTensors,
        full: SideTensors,
        coded: SideTensors,
        full_arena: FullArena,
        coded_arena: torch.Tensor,
        totals: torch.Tensor,
        refused_layer: torch.Tensor,
    ) -> None:
        """What ``TierManager.route`` does by ``policy.route``.

        ``totals``: int64 ``[len(Counter)]``. ``refused_layer``: int64 ``[]``, the last layer of a
        window that could not be coded.
        """
        ...
