"""A real model with its attention replaced by the tiering state, fed with given tokens.

A server can't be told which token it must have generated; this can. So the logits of the
tiered model and of the full one can be compared token by token on the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mini_engine import MakeKernels
from qevict_kernels import make_kernels
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import TieringConfig
from qevict_tiers.manager import TierManager
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.state import TieringState

_ATTENTION = "qevict_test"
ROW = 1


def production_kernels(geometry: WindowGeometry, rotary: RotaryTable) -> Any:
    """What a server on this machine would use."""
    return make_kernels(geometry, rotary, torch.device("cpu"))


class TeacherForcing:
    """One model, full or tiered; ``logits`` runs a prompt and then forced tokens."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, self._attend)
        self.state: TieringState | None = None
        self._launch: Callable[..., torch.Tensor] | None = None

    @torch.no_grad()
    def full_logits(self, tokens: list[int], prompt: int) -> torch.Tensor:
        """Logits of the full model for the tokens after ``prompt``, ``[n, vocab]``."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.tensor([tokens])
        return self.model(ids, use_cache=False).logits[0, prompt - 1 : -1]

    @torch.no_grad()
    def tiered_logits(
        self,
        tokens: list[int],
        prompt: int,
        config: TieringConfig,
        make: MakeKernels = production_kernels,
    ) -> torch.Tensor:
        """The same of the tiered model: the prompt prefilled, the other tokens decoded."""
        self.model.set_attn_implementation(_ATTENTION)
        self.state = self._make_state(config, len(tokens), make)
        logits = [self._step(tokens[:prompt], 0, prompt)[-1:]]
        logits += [self._step([tokens[n]], n, prompt) for n in range(prompt, len(tokens) - 1)]
        return torch.cat(logits)

    def _make_state(self, config: TieringConfig, context: int, make: MakeKernels) -> TieringState:
        c = self.model.config
        head_dim = c.head_dim
        geometry = WindowGeometry(
            c.num_attention_heads, c.num_key_value_heads, head_dim, config.window,
            config.key_bits, config.value_bits, config.params,
        )  # fmt: skip
        budget = WindowBudget(config, geometry, c.num_hidden_layers)
        plan = plan_capacity(
            budget, 4 * (context + 64) * budget.token_bytes, context + 64, None, 1, 1
        )
        frequencies = self.model.model.rotary_emb.inv_freq.double()
        angles = torch.arange(context + 64, dtype=torch.float64)[:, None] * frequencies
        rotary = RotaryTable(torch.cat([angles.cos(), angles.sin()], -1).float(), is_neox=True)
        manager = TierManager(
            budget,
            make(geometry, rotary),
            torch.zeros(plan.arena_bytes, dtype=torch.uint8),
            plan.num_pages,
            2,
            plan.max_windows,
            torch.bfloat16,
        )
        req_to_token = torch.zeros((2, context + 64), dtype=torch.int32)
        req_to_token[ROW] = config.window + torch.arange(context + 64)
        return TieringState(plan, manager, req_to_token)

    def _step(self, tokens: list[int], start: int, prompt: int) -> torch.Tensor:
        state, end = self.state, start + len(tokens)
        assert state is not None
        state.alloc_to_lengths(
            req_pool_indices_cpu=torch.tensor([ROW]), target_seq_lens_cpu=torch.tensor([end])
        )
        if start == 0:
            state.extend_prepared(ROW, prompt, end)
            chunks = state.start_extend([ROW], [0], [end])
        else:
            state.start_decode([ROW], [end])
            chunks = []
        manager = state.manager
        rows, lengths = torch.tensor([ROW]), torch.tensor([end])
        locations = state._req_to_token[ROW, start:end].to(torch.int64)

        def launch(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                   scale: float) -> torch.Tensor:  # fmt: skip
            state.allocate_layer(layer, chunks)
            manager.store(layer, locations, key.bfloat16(), value.bfloat16())
            query = query.bfloat16().contiguous()
            out = torch.empty_like(query)
            arguments = (
                query, manager.full_arena, manager.coded_arena, manager.layer_view(layer), rows,
            )  # fmt: skip
            scores = manager.layer_scores(layer)
            if start == 0:
                starts = torch.tensor([chunk.score_start for chunk in chunks])
                manager.kernels.extend(
                    *arguments, torch.tensor([0]), lengths, scale, out, scores, starts
                )
                state.route_layer(layer, chunks)
            else:
                manager.kernels.decode(*arguments, lengths, scale, out, scores)
            return out

        self._launch = launch
        ids = torch.tensor([tokens])
        positions = torch.arange(start, end)[None]
        return self.model(ids, position_ids=positions, use_cache=False).logits[0]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert self._launch is not None
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        out = self._launch(module.layer_idx, *rows, scaling)
        return out[None].to(query.dtype), None


def divergence(full: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean KL(full || other) in nats and top-1 agreement."""
    log_full, log_other = full.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (log_full.exp() * (log_full - log_other)).sum(-1).mean().item()
    agreement = (full.argmax(-1) == other.argmax(-1)).float().mean().item()
    return kl, agreement
