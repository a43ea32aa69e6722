"""What FlashInfer's paged attention does by its documentation, in torch, for where no GPU is.

Layout "HND": a page holds ``[heads, page size, head_dim]``. Logs of sums are to the base 2. Causal
means that the last query sees every key.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch

__all__ = ["MODULE", "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper:
    """Several queries of each request."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "HND"
        assert workspace.dtype == torch.uint8
        self.device = workspace.device

    def plan(
        self,
        queries: torch.Tensor,
        offsets: torch.Tensor,
        pages: torch.Tensor,
        last_page: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Remember the lengths; the list of pages is read when it runs."""
        for tensor in (queries, offsets, pages, last_page):
            assert tensor.dtype == torch.int32
        assert len(offsets) == len(last_page) + 1 == len(queries)
        assert offsets[-1] == len(pages)
        assert bool(((last_page >= 1) & (last_page <= page_size)).all())
        self._paged_kv_indices_buf = pages.to(self.device)
        self._lengths = queries.tolist(), offsets.tolist(), last_page.tolist()
        self._shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._causal, self._scale = causal, sm_scale
        self._dtypes = q_data_type, kv_data_type

    def run(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, log of the sums to the base 2)."""
        assert return_lse
        assert (query.dtype, cache[0].dtype) == self._dtypes
        assert cache[0].stride() == cache[1].stride()
        heads, kv_heads, dim, page_size = self._shape
        assert cache[0].shape[1:] == (kv_heads, page_size, dim)
        queries, offsets, last_page = self._lengths
        assert len(query) == queries[-1]
        lse = torch.empty(len(query), heads)
        for b, last in enumerate(last_page):
            pages = self._paged_kv_indices_buf[offsets[b] : offsets[b + 1]].long()
            length = (len(pages) - 1) * page_size + last
            keys, values = (
                part[pages].transpose(1, 2).flatten(0, 1)[:length].float() for part in cache
            )
            own = slice(queries[b], queries[b + 1])
            group = torch.arange(heads) // (heads // kv_heads)
            logits = torch.einsum("thd,nhd->htn", query[own].float(), keys[:, group]) * self._scale
            if self._causal:
                at = torch.arange(queries[b + 1] - queries[b])[:, None]
                hidden = torch.arange(length) > at + length - len(at)
                logits = logits.masked_fill(hidden, -torch.inf)
            lse[own] = (logits.logsumexp(-1) / math.log(2)).T
            out[own] = torch.einsum("htn,nhd->thd", logits.softmax(-1), values[:, group]).to(
                out.dtype
            )
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """One query of each request."""

    def plan(self, offsets: torch.Tensor, *rest: Any, **options: Any) -> None:  # type: ignore[override]
        """As for a prefill, with one query of each."""
        super().plan(torch.arange(len(offsets), dtype=torch.int32), offsets, *rest, **options)


MODULE = ModuleType("flashinfer")
MODULE.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
MODULE.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]
