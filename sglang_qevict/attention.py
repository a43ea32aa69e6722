"""The ``qevict`` attention backend."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType

from qevict_kernels import make_kernels
from qevict_kernels.interface import Lengths
from qevict_kernels.transfers import to_device
from qevict_kernels.warm_up import compile_kernels
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Promotion
from qevict_tiers.manager import StorePlaces, TierManager
from qevict_tiers.observer import Attends
from sglang_qevict.arguments import refusing
from sglang_qevict.capacity import describe
from sglang_qevict.hooks import require_hooks
from sglang_qevict.logs import extend_decode_line
from sglang_qevict.metrics import make_observer
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


def build_state(runner: Any) -> TieringState:
    """The state of tiering for SGLang's model runner, with kernels that are ready.

    A model that can't be tiered, which only its modules tell, ends the server (``refusing``).
    """
    plan = runtime.require_plan()
    pool, req_to_token = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    with refusing(runner.server_args):
        _require_plain_attention(runner.model, plan.budget, pool.start_layer)
        rotary = find_rotary(runner.model, runner.device)
        started = time.perf_counter()
        device = torch.device(runner.device)
        kernels = make_kernels(plan.budget.geometry, rotary, device, pool.dtype)
    # The largest batch: all decode launches share it, those of captured graphs among them. Row 0
    # is for padding.
    kernels.reserve(req_to_token.shape[0] - 1, plan.max_windows)
    compile_kernels(kernels, pool.dtype, plan.budget.config.promote is Promotion.DEQUANTIZE)
    observer = make_observer(plan, req_to_token.shape[0], device)
    manager = TierManager(
        plan.budget,
        kernels,
        pool.storage,
        num_pages=plan.num_pages,
        num_rows=req_to_token.shape[0],
        max_windows=plan.max_windows,
        dtype=pool.dtype,
        observer=observer,
    )
    manager.warm_up()
    logger.info("KV tiering kernels are ready after %.1f s", time.perf_counter() - started)
    state = TieringState(plan, manager, req_to_token)
    if observer is not None:
        observer.watch(state)
    return state


class QEvictAttentionBackend(AttentionBackend):
    """Attention over FULL and coded windows, which scores the windows as it reads them.

    Routing of decoding rows happens once a step, before the first layer; rows whose prompt
    ends are routed layer by layer, right after each layer's attention.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        require_hooks()
        pool, requests = runner.token_to_kv_pool, runner.req_to_token_pool
        # SGLang's models find the pools through the backend (its ``forward_context``).
        self.token_to_kv_pool, self.req_to_token_pool = pool, requests
        runtime.state = build_state(runner)
        requests.attach_aux_cache(runtime.state)
        extend_decode_line(runtime.state)
        self.serve(runtime.state, pool.start_layer)
        logger.info(describe(runtime.state.plan))

    def serve(self, state: TieringState, first_layer: int) -> None:
        """Attend over a state's windows; ``first_layer``: SGLang's number of its first layer."""
        self._state, self._manager, self._first_layer = state, state.manager, first_layer
        self._kernels: Attends = state.manager.kernels
        self._chunks: list[Chunk] = []
        self._places: StorePlaces
        self._score_starts: torch.Tensor | None = None
        self._whole: Lengths | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: views, arenas and scratch stay where they are from the start."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Apply what the scheduler decided, then route and grow the views of this launch.

        Eager launches call it as well (the base class's ``init_forward_metadata``). What is
        captured into a graph is for no request. A graph's view of its batch is padded.
        """
        self._kernels = self._manager.kernels
        if in_capture:
            return
        is_decode = forward_batch.forward_mode.is_decode()
        self._kernels = self._state.observer.attending(self._kernels, is_decode=is_decode)
        self._chunks = []
        if is_decode:
            padding = getattr(forward_batch, "num_padding", None) or 0
            self._state.start_decode(*self._state.take_decoding(forward_batch.batch_size - padding))
        elif forward_batch.forward_mode.is_extend():
            self._start_extend(forward_batch)

    def _start_extend(self, forward_batch: Any) -> None:
        if forward_batch.req_pool_indices_cpu is None:
            # A warm-up: no query scores.
            self._score_starts, self._whole = forward_batch.seq_lens, None
            return
        rows = forward_batch.req_pool_indices_cpu.tolist()
        starts = forward_batch.extend_prefix_lens_cpu
        ends = [
            start + length
            for start, length in zip(starts, forward_batch.extend_seq_lens_cpu, strict=True)
        ]
        self._chunks = self._state.start_extend(rows, starts, ends)
        is_whole = len(self._chunks) == len(rows) and all(c.is_whole for c in self._chunks)
        self._whole = Lengths(starts, ends) if is_whole else None
        by_row = {chunk.row: chunk.score_start for chunk in self._chunks}
        self._score_starts = to_device(
            [by_row.get(row, end) for row, end in zip(rows, ends, strict=True)],
            forward_batch.seq_lens.device,
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
        self._kernels.decode(
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
        self._kernels.extend(
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
            self._whole,
        )
        self._state.route_layer(index, self._chunks)
        return out.view(q.shape[0], -1)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Until when SGLang's scheduler must not change its table of a request's tokens.

        A decode launch copies what it needs of it into views before the first layer; a prefill
        may read it in every layer (``TieringState.allocate_layer``).
        """
        return SharedReadEnds.PRE_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding rows: they see nothing."""
        return 0
