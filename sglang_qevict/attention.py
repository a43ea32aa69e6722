"""The ``qevict`` attention backend."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType

from qevict_kernels import make_kernels
from qevict_kernels.interface import AttentionKernels, FullArena, LayerView
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion
from qevict_tiers.manager import StorePlaces, TierManager
from sglang_qevict.arguments import refusing
from sglang_qevict.capacity import describe
from sglang_qevict.hooks import require_hooks
from sglang_qevict.rotary import attention_layers, find_rotary
from sglang_qevict.runtime import runtime
from sglang_qevict.state import Chunk, TieringState

__all__ = ["QEvictAttentionBackend"]

logger = logging.getLogger(__name__)


def _require_plain_attention(
    model: torch.nn.Module, budget: WindowBudget, first_layer: int
) -> None:
    """Check each attention layer, since a configuration does not tell everything.

    Raises ``ValueError``, in one sentence, for a layer that windows would get wrong.
    """
    geometry = budget.geometry
    planned = (geometry.num_q_heads, geometry.num_kv_heads, geometry.head_dim)
    for name, layer in attention_layers(model):
        shape = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim)
        features = {
            "cross-attention": layer.is_cross_attention,
            "bidirectional attention": layer.attn_type is not AttentionType.DECODER,
            "an attention logit cap": layer.logit_cap > 0,
            "a temperature by position": layer.xai_temperature_len > 0,
            "a sliding window": layer.sliding_window_size > -1,
            "values of another width than keys": layer.v_head_dim != layer.head_dim,
            f"{shape} query heads, KV heads and channels of a head where the model's "
            f"configuration has {planned}": shape != planned,
        }
        found = [feature for feature, present in features.items() if present]
        if found:
            raise ValueError(
                f"--kv-tiering qevict serves plain causal attention, but {name} has "
                f"{' and '.join(found)}: drop --kv-tiering, or serve another model"
            )
    layers = sorted(layer.layer_id for _, layer in attention_layers(model))
    expected = list(range(first_layer, first_layer + budget.num_layers))
    if layers != expected:
        raise ValueError(
            f"--kv-tiering qevict serves one attention in each of {len(expected)} layers, but this "
            f"model has {len(layers)}, in layers {layers}: drop --kv-tiering, or serve another "
            "model"
        )


def _require_nothing_else(layer: Any, save_kv_cache: bool, options: dict[str, Any]) -> None:
    """Raise ``TypeError`` for what a model asks of attention that would not be done."""
    if not save_kv_cache:
        raise TypeError(
            f"--kv-tiering qevict stores keys and values itself, but layer {layer.layer_id} has "
            "stored them already: drop --kv-tiering, or serve another model"
        )
    asked = [name for name, value in options.items() if value is not None]
    if asked:
        raise TypeError(
            f"--kv-tiering qevict serves plain causal attention, but layer {layer.layer_id} asks "
            f"for {', '.join(asked)}: drop --kv-tiering, or serve another model"
        )


def compile_kernels(kernels: AttentionKernels, dtype: torch.dtype, promote: Promotion) -> None:
    """Run each kernel that serving needs once, on one window of one request.

    Those that compile at their first use do so here, or load what an earlier start compiled.
    """
    geometry = kernels.geometry
    device = kernels.rotary.cos_sin.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    window = zeros(1, 2, geometry.num_kv_heads, geometry.window, geometry.head_dim, dtype=dtype)
    full = FullArena(keys=window[:, 0], values=window[:, 1])
    coded = zeros(1, geometry.num_kv_heads, geometry.record.record_bytes, dtype=torch.uint8)
    slot, row, one = zeros(1), zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64) + 1
    view = LayerView(
        page_table=zeros(1, 1),
        full_slot=slot,
        coded_slot=slot,
        windows=zeros(1, 1),
        num_full=zeros(1) + 1,
        num_coded=zeros(1),
    )
    query = zeros(1, geometry.num_q_heads, geometry.head_dim, dtype=dtype)
    token = zeros(1, geometry.num_kv_heads, geometry.head_dim, dtype=dtype)
    out, scores = torch.empty_like(query), zeros(1, 1, dtype=torch.float32)
    kernels.store(full, slot, slot, token, token)
    kernels.extend(query, full, coded, view, row, row, one, 1.0, out, scores, row)
    kernels.decode(query, full, coded, view, row, one, 1.0, out, scores)
    kernels.quantize(full, coded, slot, slot, slot)
    if promote is Promotion.DEQUANTIZE:
        kernels.dequantize(full, coded, slot, slot, slot)


class QEvictAttentionBackend(AttentionBackend):
    """Attention over FULL and coded windows, which scores the windows as it reads them.

    Routing of decoding rows happens once a step, before the first layer; rows whose prompt
    ends are routed layer by layer, right after each layer's attention.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        require_hooks()
        plan = runtime.require_plan()
        pool, requests = runner.token_to_kv_pool, runner.req_to_token_pool
        # SGLang's models find the pools through the backend (its ``forward_context``).
        self.token_to_kv_pool, self.req_to_token_pool = pool, requests
        with refusing(runner.server_args):
            _require_plain_attention(runner.model, plan.budget, pool.start_layer)
            rotary = find_rotary(runner.model, runner.device)
            kernels = make_kernels(plan.budget.geometry, rotary, torch.device(runner.device))
        started = time.perf_counter()
        compile_kernels(kernels, pool.dtype, plan.budget.config.promote)
        logger.info("KV tiering kernels are ready after %.1f s", time.perf_counter() - started)
        manager = TierManager(
            plan.budget,
            kernels,
            pool.storage,
            num_pages=plan.num_pages,
            num_rows=requests.req_to_token.shape[0],
            max_windows=plan.max_windows,
            dtype=pool.dtype,
        )
        self._state = TieringState(plan, manager, requests.req_to_token)
        self._manager = manager
        self._first_layer = pool.start_layer
        self._chunks: list[Chunk] = []
        self._places: StorePlaces
        self._score_starts: torch.Tensor | None = None
        runtime.state = self._state
        requests.attach_aux_cache(self._state)
        logger.info(describe(plan))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Apply what the scheduler decided, then route and grow the views of this launch."""
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        self._chunks = []
        if forward_batch.forward_mode.is_decode():
            self._state.start_decode(rows, lengths)
        elif forward_batch.forward_mode.is_extend():
            starts = forward_batch.extend_prefix_lens.tolist()
            self._chunks = self._state.start_extend(rows, starts, lengths)
            by_row = {chunk.row: chunk.score_start for chunk in self._chunks}
            self._score_starts = torch.tensor(
                [by_row.get(row, length) for row, length in zip(rows, lengths, strict=True)]
            )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One new token of each request: ``q`` ``[B, Hq * D]`` -> ``[B, Hq * D]``."""
        _require_nothing_else(layer, save_kv_cache, kwargs)
        index = layer.layer_id - self._first_layer
        if index == 0:
            # By the first layer and not before all of them, so that a captured graph repeats it.
            self._places = self._manager.locate(forward_batch.out_cache_loc)
        self._manager.store_at(index, self._places, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(query.shape, dtype=q.dtype, device=q.device)
        self._manager.kernels.decode(
            query,
            self._manager.full_arena,
            self._manager.coded_arena,
            self._manager.layer_view(index),
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            layer.scaling,
            out,
            self._manager.layer_scores(index),
        )
        return out.view(q.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """New tokens of each request: ``q`` ``[T, Hq * D]`` -> ``[T, Hq * D]``."""
        _require_nothing_else(layer, save_kv_cache, kwargs)
        index = layer.layer_id - self._first_layer
        self._state.allocate_layer(index, self._chunks)
        self._manager.store(index, forward_batch.out_cache_loc, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(query.shape, dtype=q.dtype, device=q.device)
        self._manager.kernels.extend(
            query,
            self._manager.full_arena,
            self._manager.coded_arena,
            self._manager.layer_view(index),
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            layer.scaling,
            out,
            self._manager.layer_scores(index),
            self._score_starts,
        )
        self._state.route_layer(index, self._chunks)
        return out.view(q.shape[0], -1)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Tables are read until the last layer has attended."""
        return SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding rows: they see nothing."""
        return 0
