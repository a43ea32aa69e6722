"""A model of transformers that attends in tiers, fed with given tokens: no server, no sampling.

A server can't be told which tokens it must have generated; this can. So the logits of a tiered
model and of the full one are compared token by token on the same text. Claims, routing, arenas
and kernels are those that serve; what is left out is SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from qevict_kernels import make_kernels
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.memory import arena_memory
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.config import Heads, TieringConfig
from qevict_tiers.manager import TierManager
from qevict_tiers.scores import Scorer
from sglang_qevict.capacity import plan_capacity
from sglang_qevict.state import TieringState

__all__ = [
    "Divergence",
    "OfflineModel",
    "PrefilledText",
    "Text",
    "causal_attention",
    "divergence",
    "production_kernels",
]

_ATTENTION = "qevict_offline"
_NOT_PLAIN = ("sliding_window", "softcap", "s_aux")

MakeKernels = Callable[[WindowGeometry, RotaryTable], Any]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def production_kernels(geometry: WindowGeometry, rotary: RotaryTable) -> Any:
    """What a server on this machine's CPU would use."""
    return make_kernels(geometry, rotary, torch.device("cpu"))


class Text(NamedTuple):
    """Tokens of which the first ``prompt`` are the prompt and the others are decoded."""

    tokens: Sequence[int]
    prompt: int


class PrefilledText(NamedTuple):
    """What the full model makes of a text, from which runs of the tiered model can begin.

    Their prompt may be any beginning of it, from its own prompt on.

    logits: those of ``full_logits``. layers: of each one queries ``[n, Hq, D]``, the last of the
    prompt, those that score at least, and all after it; keys (after RoPE) and values of all
    tokens but the last ``[T, Hkv, D]``, bfloat16; and the scale of its attention.
    """

    prompt: int
    logits: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]


class OfflineModel:
    """One model on the CPU, full or tiered.

    ``dtype``: of weights and activations. Tiers hold bfloat16, as a server's do.

    Raises ``OSError`` or ``ValueError`` for what is no model that transformers can load.
    """

    def __init__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        return int(self.model.config.num_hidden_layers)

    @property
    def heads(self) -> Heads:
        """The heads of each layer."""
        config = self.model.config
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return Heads(heads, config.num_key_value_heads, dim)

    def tokenize(self, text: str) -> list[int]:
        """Token ids, without special tokens that a chat template would add."""
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def full_logits(self, text: Text) -> torch.Tensor:
        """Next-token logits of the full model before each decoded token, ``[n, vocab]``."""
        self.model.set_attn_implementation("sdpa")
        return self._whole(text)

    @torch.no_grad()
    def prefill(self, text: Text, queries: int) -> PrefilledText:
        """``full_logits``, and the text for many runs with the prompt's last ``queries``."""
        layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
        ) -> torch.Tensor:
            scoring = query[max(0, text.prompt - queries) :]
            layers.append((scoring.bfloat16(), key.bfloat16(), value.bfloat16(), scale))
            return causal_attention(query, key, value, scale)

        with self.attending(attend):
            return PrefilledText(text.prompt, self._whole(text), layers)

    def _whole(self, text: Text) -> torch.Tensor:
        """Next-token logits before each decoded token, by one pass over the text."""
        ids, count = torch.tensor([text.tokens[:-1]]), len(text.tokens) - text.prompt
        logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=count).logits[0]
        return logits

    @torch.no_grad()
    def tiered_logits(
        self,
        texts: Sequence[Text],
        config: TieringConfig,
        make: MakeKernels = production_kernels,
        prefilled: Sequence[PrefilledText] | None = None,
        scorer: Scorer | None = None,
    ) -> list[torch.Tensor]:
        """The same of the tiered model, for a batch of texts that are decoded together.

        Each prompt is prefilled as one chunk, or was with ``prefill``. ``scorer``: what windows are
        ranked by, with text ``t`` in row ``t + 1``; the default is that of the options. Raises
        ``ValueError`` for a configuration that the model can't have.
        """
        logits: list[list[torch.Tensor]] = [[] for _ in texts]
        forced = [iter(text.tokens[text.prompt : -1]) for text in texts]

        def follow(row: int, found: torch.Tensor) -> int | None:
            logits[row].append(found)
            return next(forced[row], None)

        self._decode(texts, self._tiers(texts, 0, config, make, scorer), follow, prefilled)
        return [torch.stack(rows) for rows in logits]

    @torch.no_grad()
    def full_answers(self, texts: Sequence[Text], new_tokens: int) -> list[list[int]]:
        """What the full model generates after each whole text, greedily: at most so many tokens.

        An answer ends before the model's token for the end.
        """
        self.model.set_attn_implementation("sdpa")
        answers = []
        for text in texts:
            ids = torch.tensor([text.tokens])
            found = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                do_sample=False, pad_token_id=0,
            )[0, ids.shape[1] :].tolist()  # fmt: skip
            answers.append([token for token in found if token not in self._ends])
        return answers

    @torch.no_grad()
    def tiered_answers(
        self,
        texts: Sequence[Text],
        new_tokens: int,
        config: TieringConfig,
        make: MakeKernels = production_kernels,
        prefilled: Sequence[PrefilledText] | None = None,
        scorer: Scorer | None = None,
    ) -> list[list[int]]:
        """The same of the tiered model, for a batch; tokens beyond a prompt are decoded first.

        Raises ``ValueError`` as ``tiered_logits``.
        """
        answers: list[list[int]] = [[] for _ in texts]
        forced = [iter(text.tokens[text.prompt :]) for text in texts]

        def follow(row: int, found: torch.Tensor) -> int | None:
            if (token := next(forced[row], None)) is not None:
                return token
            token = int(found.argmax())
            if token in self._ends:
                return None
            answers[row].append(token)
            return token if len(answers[row]) < new_tokens else None

        self._decode(texts, self._tiers(texts, new_tokens, config, make, scorer), follow, prefilled)
        return answers

    @property
    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends if isinstance(ends, list) else [ends])

    def _decode(
        self,
        texts: Sequence[Text],
        tiers: _Tiers,
        follow: Callable[[int, torch.Tensor], int | None],
        prefilled: Sequence[PrefilledText] | None = None,
    ) -> None:
        """Prefill each prompt, then decode together, a token a step.

        ``follow(row, logits)`` gets the logits ``[vocab]`` after a row's last token, and returns
        the next token, or None if the row is done.
        """
        tokens: dict[int, int] = {}
        stored = [text.prompt for text in texts]

        def take(row: int, logits: torch.Tensor) -> None:
            token = follow(row, logits)
            if token is not None:
                tokens[row] = token

        for row, (prompt, length) in enumerate(texts):
            span = (0, length)
            attend = tiers.prefill(row, span)
            if prefilled is None:
                logits = self._forward([prompt[:length]], [span], attend)[0]
            else:
                first, all_logits, layers = prefilled[row]
                logits = all_logits[length - first]
                for layer, (q, k, v, scale) in enumerate(layers):
                    skipped = len(k) - len(q)  # queries that were not kept
                    scoring = q[tiers.state.claims.score_start(length) - skipped : length - skipped]
                    attend(layer, scoring, k[:length], v[:length], scale)
            take(row, logits)
        while tokens:
            rows = list(tokens)
            spans = [(stored[row], stored[row] + 1) for row in rows]
            logits = self._forward(
                [[tokens[row]] for row in rows], spans, tiers.decode(rows, spans)
            )
            tokens.clear()
            for number, row in enumerate(rows):
                stored[row] += 1
                take(row, logits[number])

    def _forward(
        self, tokens: list[Sequence[int]], spans: list[tuple[int, int]], attend: Attend
    ) -> torch.Tensor:
        """Logits after the last of the tokens of each row, which stand at ``spans``."""
        positions = torch.tensor([list(range(start, end)) for start, end in spans])
        with self.attending(attend):
            logits: torch.Tensor = self.model(
                torch.tensor(tokens), position_ids=positions, use_cache=False, logits_to_keep=1
            ).logits[:, -1]
        return logits

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Within, ``attend(layer, query, key, value, scale)`` is the attention of every layer.

        It takes and returns rows ``[tokens, heads, D]``, keys after RoPE, all texts of a batch
        one after another. Raises ``ValueError`` for attention that is not plain softmax.
        """

        def attention(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any,
            scaling: float,
            **options: Any,
        ) -> tuple[torch.Tensor, None]:
            for name in _NOT_PLAIN:
                if options.get(name) is not None:
                    raise ValueError(
                        f"layer {module.layer_idx} attends with {name}, which has no tiers: name "
                        "a model with plain causal attention"
                    )
            batch, _, length, _ = query.shape
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            out = attend(module.layer_idx, q, k, v, scaling)
            return out.view(batch, length, *out.shape[1:]).to(query.dtype), None

        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = attention
        try:
            self.model.set_attn_implementation(_ATTENTION)
            yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[_ATTENTION]

    def _tiers(
        self,
        texts: Sequence[Text],
        new_tokens: int,
        config: TieringConfig,
        make: MakeKernels,
        scorer: Scorer | None,
    ) -> _Tiers:
        geometry = config.geometry(self.heads)
        context = max(len(text.tokens) for text in texts) + new_tokens + 64
        return _Tiers(
            WindowBudget(config, geometry, self.num_layers),
            make(geometry, self._rotary(context)),
            len(texts),
            context,
            scorer,
        )

    def _rotary(self, context: int) -> RotaryTable:
        """cos and sin of the model's own rotary module, which turns halves (neox)."""
        positions = torch.arange(context)[None]
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2
        return RotaryTable(
            torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).float(), is_neox=True
        )


class _Tiers:
    """The tiering state of a batch; row ``r`` of it is row ``r + 1`` of the state."""

    def __init__(
        self,
        budget: WindowBudget,
        kernels: Any,
        batch: int,
        context: int,
        scorer: Scorer | None,
    ) -> None:
        # Every prompt is whole at first, and its codes come beside.
        kv_bytes = 2 * batch * context * budget.token_bytes
        plan = plan_capacity(budget, kv_bytes, context, None, batch, batch)
        window = budget.config.window
        self.manager = TierManager(
            budget,
            kernels,
            arena_memory(plan.arena_bytes),
            plan.num_pages,
            batch + 1,
            plan.max_windows,
            torch.bfloat16,
            scorer=scorer,
        )
        stride = -(-context // window) * window
        self._locations = torch.zeros((batch + 1, stride), dtype=torch.int32)
        self._locations[1:] = window + torch.arange(batch * stride).view(batch, stride)
        self.state = TieringState(plan, self.manager, self._locations)

    def prefill(self, number: int, span: tuple[int, int]) -> Attend:
        """The attention of one row's prompt; of its queries the last ones suffice."""
        rows, spans, row, (_, end) = [number], [span], number + 1, span
        self._allocate(rows, spans)
        self.state.extend_prepared(row, end, end)
        chunks = self.state.start_extend([row], [0], [end])
        row_tensor = torch.tensor([row])
        starts = torch.tensor([chunk.score_start for chunk in chunks])
        places = self._stored_at(rows, spans)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            manager = self.manager
            self.state.allocate_layer(layer, chunks)
            manager.store(layer, places, k.bfloat16(), v.bfloat16())
            query = q.bfloat16().contiguous()
            out, count = torch.empty_like(query), query.shape[0]
            manager.kernels.extend(
                query, manager.full_arena, manager.coded_arena, manager.layer_view(layer),
                row_tensor, torch.tensor([end - count]), torch.tensor([count]), scale, out,
                manager.layer_scores(layer), starts,
            )  # fmt: skip
            self.state.route_layer(layer, chunks)
            return out

        return attend

    def decode(self, rows: list[int], spans: list[tuple[int, int]]) -> Attend:
        """The attention of one new token of each row."""
        self._allocate(rows, spans)
        numbers, ends = [row + 1 for row in rows], [end for _, end in spans]
        self.state.start_decode(numbers, ends)
        row_tensor, lengths = torch.tensor(numbers), torch.tensor(ends)
        places = self._stored_at(rows, spans)

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
        ) -> torch.Tensor:
            manager = self.manager
            manager.store(layer, places, k.bfloat16(), v.bfloat16())
            query = q.bfloat16().contiguous()
            out = torch.empty_like(query)
            manager.kernels.decode(
                query, manager.full_arena, manager.coded_arena, manager.layer_view(layer),
                row_tensor, lengths, scale, out, manager.layer_scores(layer),
            )  # fmt: skip
            return out

        return attend

    def _allocate(self, rows: list[int], spans: list[tuple[int, int]]) -> None:
        self.state.alloc_to_lengths(
            req_pool_indices_cpu=torch.tensor([row + 1 for row in rows]),
            target_seq_lens_cpu=torch.tensor([end for _, end in spans]),
        )

    def _stored_at(self, rows: list[int], spans: list[tuple[int, int]]) -> torch.Tensor:
        places = [self._locations[row + 1, a:b] for row, (a, b) in zip(rows, spans, strict=True)]
        return torch.cat(places).to(torch.int64)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Plain attention of one text, rows ``[T, heads, D]`` in and out."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


class Divergence(NamedTuple):
    """How far logits are from the full model's.

    kl: mean KL(full || other) in nats. top1: share of steps with the same best token.
    """

    kl: float
    top1: float


def divergence(full: torch.Tensor, other: torch.Tensor) -> Divergence:
    """Compare logits ``[n, vocab]`` of the same steps."""
    log_full, log_other = full.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (log_full.exp() * (log_full - log_other)).sum(-1).mean().item()
    return Divergence(kl, (full.argmax(-1) == other.argmax(-1)).float().mean().item())
