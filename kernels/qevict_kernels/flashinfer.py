"""FULL windows attended by FlashInfer: to it the FULL arena is a paged KV cache, a window a page.

FlashInfer plans on the host. ``FlashInferKernels`` uses it where all lengths are known there: for
chunks of requests that have FULL windows only, which are the prefills of all but the longest
prompts. ``PairedDecode`` joins its decode with ours, for whoever knows the counts. Either way
FlashInfer leaves the logs of its sums of weights, to the base 2 as ours are, from which one more
pass over the keys gives the mass of each window.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from qevict_kernels.interface import FullArena, LayerView, Lengths
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_kernels.transfers import to_device
from qevict_kernels.triton import TritonKernels
from qevict_kernels.triton.extend import Chunks

__all__ = ["HEAD_DIMS", "FlashInferKernels", "PairedDecode", "slots_kernel"]

HEAD_DIMS = (64, 128, 256)
"""What FlashInfer's kernels exist for."""

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for the partial results of a split KV cache."""

_SLOTS_BLOCK = 256


class FlashInferKernels(TritonKernels):
    """``TritonKernels``, but ``extend`` over FULL windows alone is FlashInfer's.

    Its results depend in their rounding on how FlashInfer divides a batch.

    Raises ``ImportError`` where FlashInfer isn't installed, ``ValueError`` for a width of heads
    that it does not have, and what it raises itself where its kernels can't be built.
    """

    def __init__(
        self,
        geometry: WindowGeometry,
        rotary: RotaryTable,
        device: torch.device | str = "cuda",
        **options: Any,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if geometry.head_dim not in HEAD_DIMS:
            raise ValueError(f"FlashInfer has no kernels for a head_dim of {geometry.head_dim}")
        super().__init__(geometry, rotary, device, **options)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._lists: _FullLists
        self._planned: tuple[Lengths, float, torch.dtype] | None = None
        self._is_copied: torch.cuda.Event | None = None

    def attend_chunks(self, chunks: Chunks, wants_lse: bool, whole: Lengths | None) -> torch.Tensor:
        """``extend`` without scores."""
        if whole is None or self.is_short(chunks.query, chunks.view):
            return super().attend_chunks(chunks, wants_lse, whole)
        self._plan(whole, chunks.scale, chunks.query.dtype)
        self._lists.find(chunks.view, chunks.rows)
        cache = (chunks.full.keys, chunks.full.values)
        lse: torch.Tensor
        _, lse = self._prefill.run(chunks.query, cache, out=chunks.out, return_lse=True)
        return lse

    def _plan(self, whole: Lengths, scale: float, dtype: torch.dtype) -> None:
        """Plan for a launch, at its first layer."""
        if self._planned is not None:
            planned, *same = self._planned
            if planned is whole and same == [scale, dtype]:
                return
        g = self.geometry
        counts = [-(-end // g.window) for end in whole.ends]
        self._lists = _FullLists(counts, whole.ends, g.window, self._cos_sin.device)
        chunks = [end - start for start, end in zip(whole.starts, whole.ends, strict=True)]
        if self._is_copied is not None:
            # FlashInfer writes its plan into one pinned buffer, which the plan before may not have
            # left yet: it waits behind the launch before its own.
            self._is_copied.synchronize()
        self._prefill.plan(
            _offsets(chunks), *self._lists.paged_cache, g.num_q_heads, g.num_kv_heads, g.head_dim,
            g.window, causal=True, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
        if self._cos_sin.is_cuda:
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()
        self._lists.require_shared_with(self._prefill)
        self._planned = (whole, scale, dtype)

    def try_out(self, dtype: torch.dtype) -> None:
        """Plan and run FlashInfer once, for one window: it raises what keeps it from serving."""
        g, device = self.geometry, self._cos_sin.device
        slots = torch.zeros(1, 2, g.num_kv_heads, g.window, g.head_dim, dtype=dtype, device=device)
        query = torch.zeros(g.window, g.num_q_heads, g.head_dim, dtype=dtype, device=device)
        self._plan(Lengths([0], [g.window]), 1.0, dtype)
        self._lists.clear()
        self._prefill.run(
            query, (slots[:, 0], slots[:, 1]), out=torch.empty_like(query), return_lse=True
        )


class PairedDecode:
    """Decode in which FlashInfer attends to FULL windows, and ``kernels`` to the coded ones.

    ``plan`` once for each new set of counts, then ``decode`` for any layers that have these.
    """

    def __init__(self, kernels: TritonKernels, device: torch.device | str = "cuda") -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._kernels = kernels
        self._device = workspace.device
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True, backend="fa2"
        )
        self._lists: _FullLists

    def plan(
        self, num_full: Sequence[int], seq_lens: Sequence[int], scale: float, dtype: torch.dtype
    ) -> None:
        """For requests of so many FULL windows, the newest of them listed last, and tokens."""
        g = self._kernels.geometry
        self._lists = _FullLists(num_full, seq_lens, g.window, self._device)
        self._wrapper.plan(
            *self._lists.paged_cache, g.num_q_heads, g.num_kv_heads, g.head_dim, g.window,
            sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
        self._lists.require_shared_with(self._wrapper)

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
        """``decode`` of ``AttentionKernels``, for what was planned."""
        self._lists.find(view, rows)
        _, lse = self._wrapper.run(query, (full.keys, full.values), out=out, return_lse=True)
        self._kernels.attend_windows(
            query, full, coded, view, rows, seq_lens, scale, out, scores, lse, prior=True
        )


class _FullLists:
    """The FULL windows of a batch as FlashInfer reads a paged KV cache.

    ``paged_cache``: offsets of the requests int32 ``[B + 1]`` and tokens of their last pages int32
    ``[B]``, on the host, around the pages of all, int32 on the device, which ``find`` fills in.
    """

    def __init__(
        self, counts: Sequence[int], lengths: Sequence[int], window: int, device: torch.device
    ) -> None:
        number = torch.tensor(counts)
        first = _offsets(counts)
        place = torch.arange(int(first[-1])) - first[:-1].repeat_interleave(number)
        request = torch.arange(len(counts)).repeat_interleave(number)
        self._request, self._place = to_device(torch.stack([request, place]), device)
        self._slots = torch.empty(len(place), dtype=torch.int32, device=device)
        last = torch.tensor([(length - 1) % window + 1 for length in lengths], dtype=torch.int32)
        self.paged_cache = (first, self._slots, last)

    def clear(self) -> None:
        """All in slot 0."""
        self._slots.zero_()

    def find(self, view: LayerView, rows: torch.Tensor) -> None:
        """Fill in the slots of one layer, one launch."""
        count = self._slots.shape[0]
        slots_kernel[triton.cdiv(count, _SLOTS_BLOCK),](
            self._slots, self._request, self._place, rows, view.windows, view.page_table,
            view.full_slot, count, view.windows.stride(0), view.page_table.stride(0),
            BLOCK=_SLOTS_BLOCK,
        )  # fmt: skip

    def require_shared_with(self, wrapper: Any) -> None:
        """Raise ``RuntimeError`` unless FlashInfer reads the list that ``find`` fills in.

        It keeps a list that is on its device already as it is, which saves a plan for every layer.
        """
        if wrapper._paged_kv_indices_buf.data_ptr() != self._slots.data_ptr():
            raise RuntimeError("this FlashInfer copies its list of pages")


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    """Where each of some pieces begins, and the last ends: int32 ``[n + 1]``."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@triton.jit(do_not_specialize=["num_entries", "window_stride", "page_stride"])
def slots_kernel(
    slots, requests, places, rows, windows, page_table, full_slot, num_entries, window_stride,
    page_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid ``[blocks of entries]``: slot of the FULL window at ``places`` in the list of a request.

    Bytes: 28 per entry.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = entry < num_entries
    row = tl.load(rows + tl.load(requests + entry, mask=there, other=0), mask=there, other=0)
    place = tl.load(places + entry, mask=there, other=0)
    window = tl.load(windows + row * window_stride + place, mask=there, other=0)
    page = tl.load(page_table + row * page_stride + window, mask=there, other=0)
    tl.store(slots + entry, tl.load(full_slot + page, mask=there, other=0), mask=there)
