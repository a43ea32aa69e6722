"""A scheduler and a model's attention in miniature, around the real tiering state.

It does what SGLang does with ``TieringState`` (rows, pages, chunks, decode steps, frees) on
random keys and values, remembers every original, and so can say what attention must be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from mini_tree import MiniTree
from qevict_kernels.interface import AttentionKernels
from qevict_kernels.layout import WindowGeometry
from qevict_kernels.reference import decode_windows, encode_windows
from qevict_kernels.rope import RotaryTable
from qevict_tiers.budget import WindowBudget
from qevict_tiers.claims import Terms
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.manager import TierManager
from qevict_tiers.observer import Observer
from qevict_tiers.policy import Tier
from qevict_tiers.spill.keys import KeySpace, LayerSpan, SpillKey
from qevict_tiers.spill.records import Reading, ReadStatus, Record, as_bytes
from qevict_tiers.spill.store import SpillStore
from sglang_qevict.admission import Continued, TieredPrefillBudget
from sglang_qevict.attention import QEvictAttentionBackend
from sglang_qevict.capacity import CapacityPlan, plan_capacity
from sglang_qevict.fairness import FairPrefillBudget
from sglang_qevict.spill import SpilledRequest, SpillTier
from sglang_qevict.state import MayGo, TieringState
from sglang_qevict.terms import BUDGET

AllocateSlots = Callable[[torch.Tensor], torch.Tensor]
Watch = Callable[[CapacityPlan, int], Observer]
MakeKernels = Callable[[WindowGeometry, RotaryTable], AttentionKernels]

SMALL: dict[str, Any] = {
    "budget": Fraction(3, 10),
    "quant_fraction": Fraction(7, 10),
    "key_bits": 2,
    "value_bits": 2,
    "min_context": 112,
    "local": 16,
}
"""Options with which a request of a few hundred tokens has windows in all tiers."""


def rotary_table(
    head_dim: int,
    positions: int = 4096,
    theta: float = 10_000.0,
    scaling: str = "default",
    is_neox: bool = True,
) -> RotaryTable:
    """A table as models have them: ``default``, ``linear``, ``llama3``, ``yarn`` or ``partial``."""
    rotary_dim = head_dim // 2 if scaling == "partial" else head_dim
    half = rotary_dim // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    magnitude = 1.0
    if scaling == "linear":
        frequencies /= 4
    elif scaling in ("llama3", "yarn"):
        # Low frequencies are stretched 8 times, high ones kept, with a ramp between.
        turns = 1024 * frequencies / (2 * torch.pi)
        keep = ((turns - 1) / 3).clamp(0, 1)
        frequencies = frequencies * (keep + (1 - keep) / 8)
        magnitude = 1.2 if scaling == "yarn" else 1.0
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    table = magnitude * torch.cat([angles.cos(), angles.sin()], -1)
    return RotaryTable(table.float(), is_neox=is_neox)


class Text(NamedTuple):
    """What a request begins with: so many tokens of a document, under a salt; then its own."""

    document: int = 0
    tokens: int = 0
    salt: int = 0


OWN_TEXT = Text()
"""Nothing that another request has, too."""


@dataclass
class Request:
    """One request: its length, its row, and every original it has."""

    name: int
    prompt: int
    text: Text = OWN_TEXT
    row: int = -1
    shared: int = 0
    """Windows of a reused prefix."""
    stored: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    coded: set[tuple[int, int]] = field(default_factory=set)
    """(layer, window) that were coded at some time."""
    spilled: SpilledRequest | None = None
    terms: Terms | None = None

    def source(self, position: int) -> int:
        """Whose token is at a position: the document's or its own."""
        return -self.text.document if position < self.text.tokens else self.name

    def tokens(self) -> list[int]:
        """Token ids of all that is stored or prompt: the same where pages hold the same."""
        count = max(self.prompt, self.stored)
        return [self.source(position) * 100_000 + position for position in range(count)]

    def page_keys(self, count: int, window: int) -> list[Hashable]:
        """What the first so many windows hold, as a prefix cache tells pages apart."""
        return [
            (self.text.salt, *(self.source(i * window + j) for j in range(window)))
            for i in range(count)
        ]


class Waiting(NamedTuple):
    """A request that is not admitted yet; ``new``: how much it may generate.

    tenant, budget: whose it is, and what it asks for; None: nothing is said.
    """

    name: int
    prompt: int
    text: Text = OWN_TEXT
    new: int = 1
    tenant: str | None = None
    budget: Fraction | None = None


class MemoryStore:
    """As much of a spill store as recalls ask, in memory and done at once."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

    def put(self, records: Sequence[Record]) -> Future[int]:
        """Keep copies."""
        self.records.update({one.key: bytes(as_bytes(one.payload)) for one in records})
        return _done(len(records))

    def contains(self, keys: Sequence[SpillKey]) -> Future[list[bool]]:
        """Which of them are there."""
        return _done([key in self.records for key in keys])

    def get(
        self, keys: Sequence[SpillKey], into: Sequence[torch.Tensor], deadline_seconds: float = 0
    ) -> Future[list[Reading]]:
        """Copies into buffers."""
        readings = []
        for key, buffer in zip(keys, into, strict=True):
            found = self.records.get(key)
            if found is not None:
                as_bytes(buffer)[:] = found
            readings.append(Reading(ReadStatus.MISS if found is None else ReadStatus.HIT))
        return _done(readings)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _Backend(QEvictAttentionBackend):
    """The attention backend around the engine's state, without SGLang's model runner."""

    def __init__(self, state: TieringState) -> None:
        self.serve(state, first_layer=0)


def _layer(index: int, geometry: WindowGeometry) -> RadixAttention:
    heads, dim = geometry.num_q_heads, geometry.head_dim
    return RadixAttention(heads, dim, dim**-0.5, geometry.num_kv_heads, layer_id=index)


class _LivePages:
    """As much of SGLang's allocator and tree as a prefill budget asks; changes with the engine."""

    def __init__(self, engine: MiniEngine) -> None:
        self.page_size = engine.geometry.window
        self._engine = engine

    def available_size(self) -> int:
        """Tokens of free pages."""
        return len(self._engine.free_pages) * self.page_size

    def supports_mamba(self) -> bool:
        """No."""
        return False

    def evictable_size(self) -> int:
        """Tokens that are cached and not locked."""
        return self._engine.tree.unlocked() * self.page_size


class MiniEngine:
    """Serves requests whose queries, keys and values are drawn from their name and position.

    So a request is the same whatever is served beside it; of a document's tokens, every
    request draws the same. ``outputs[name]`` collects its
    attention outputs, ``worst_error`` the largest deviation from the dense oracle (if
    ``check`` is set). ``watch`` makes an observer of a plan and a number of rows.
    """

    def __init__(
        self,
        make_kernels: MakeKernels,
        config: TieringConfig,
        heads: Heads,
        num_layers: int = 2,
        kv_tokens: int = 600,
        context: int = 512,
        rows: int = 6,
        check: bool = False,
        rotary: RotaryTable | None = None,
        fixed_shapes: bool = False,
        store: MemoryStore | SpillStore | None = None,
        watch: Watch | None = None,
    ) -> None:
        geometry = config.geometry(heads)
        self.geometry, self.config, self.check = geometry, config, check
        budget = WindowBudget(config, geometry, num_layers)
        self.plan = plan_capacity(budget, kv_tokens * budget.token_bytes, context, 64, rows, rows)
        self.req_to_token = torch.zeros((rows + 1, context), dtype=torch.int32)
        self.rotary = rotary or rotary_table(geometry.head_dim)
        kernels = make_kernels(geometry, self.rotary)
        manager = TierManager(
            budget,
            kernels,
            torch.zeros(self.plan.arena_bytes, dtype=torch.uint8),
            self.plan.num_pages,
            rows + 1,
            self.plan.max_windows,
            torch.bfloat16,
            fixed_shapes,
            watch and watch(self.plan, rows + 1),
        )
        spill = None
        if store is not None:
            space = KeySpace("model", "bfloat16", geometry.window)
            spill = SpillTier(manager, store, space, LayerSpan(0, num_layers))  # type: ignore[arg-type]
        self.state = TieringState(self.plan, manager, self.req_to_token, spill)
        self.manager, self.kernels, self.num_layers = manager, kernels, num_layers
        self.free_rows = list(range(rows, 0, -1))
        self.free_pages = list(range(self.plan.num_pages, 0, -1))
        self.tree = MiniTree()
        self.running: dict[int, Request] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.worst_error = 0.0
        self.backend = _Backend(self.state)
        self._layers = [_layer(index, geometry) for index in range(num_layers)]
        self._covered = self._granted = 0
        """Bytes that claims covered when the last launch was decided, and the one before."""
        self._watch_allocations()

    def _watch_allocations(self) -> None:
        """No copy is ever made beyond what claims cover: before a launch changes anything, what
        the last one was granted; after that, its own."""
        arena = self.manager.arena
        for side in (arena.full, arena.coded):

            def allocate(
                owners: torch.Tensor, original: AllocateSlots = side.allocate
            ) -> torch.Tensor:
                slots = original(owners)
                covered = max(self._covered, self._granted)
                assert arena.used_bytes <= covered <= arena.capacity_bytes
                return slots

            side.allocate = allocate  # type: ignore[method-assign]

    def _cover(self) -> None:
        """A launch was decided: what is granted now covers it."""
        self._granted, self._covered = self._covered, self.state.ledger.total_bytes

    # -- what a scheduler does ---------------------------------------------------------

    def admit(self, waiting: Sequence[Waiting], limit: int) -> dict[int, int]:
        """One scheduling pass as SGLang makes it: the next chunk of the prompt in progress first,
        then as many of those that wait as it lets in, in their order.

        Returns how many tokens each has in this pass; those that waited are running then.
        """
        window = self.geometry.window
        pages, turns = _LivePages(self), self.state.turns
        kind = TieredPrefillBudget if turns is None else FairPrefillBudget
        budget = kind(pages, pages, self.state.ledger, observer=self.state.observer)
        queue = [self._waiting_request(one) for one in waiting]
        if turns is not None:
            turns.begin(queue, SimpleNamespace(batch_is_full=False))
            adder = SimpleNamespace(memory_budget=budget, _swa_new_tokens=lambda one: one.asked.new)
            turns.order(adder)
        chunks: dict[int, int] = {}
        for request in [r for r in self.running.values() if r.stored < r.prompt]:
            left = request.prompt - request.stored
            budget.continued = Continued(request.row, request.prompt)
            most = budget.available_chunk_tokens(limit)
            fitting = budget.fit_chunk(extend_input_len=left, max_new_tokens=1, chunk_limit=most)
            if fitting:
                chunks[request.name] = tokens = min(left, fitting)
                budget.reserve(tokens, int(tokens == left), is_chunked_continuation=True)
                limit -= budget.ceil_paged_tokens(tokens)
        for waits in queue:
            name, prompt, text, new, *_ = waits.asked
            if limit <= 0 or not self.free_rows or not budget.has_capacity():
                break
            budget.terms = terms = self.state.terms.of(waits)
            request = Request(name, prompt, text, terms=terms)
            shared = self._match(request, new)
            if recalled := self._to_recall(request, len(shared)):
                shared = []
            budget.prefix = shared
            tokens = self._check_prefill(budget, request, recalled or len(shared), new, limit)
            if tokens and recalled and not self.state.spill.read(request.spilled, recalled):
                # Nothing was loaded, and to compute it may not fit.
                recalled = 0
                tokens = self._check_prefill(budget, request, 0, new, limit)
            if isinstance(budget, FairPrefillBudget) and budget.passes_over():
                continue
            if not tokens:
                break
            left = prompt - (recalled or len(shared)) * window
            budget.reserve(tokens, new if tokens == left else 0)
            limit -= budget.ceil_paged_tokens(tokens)
            self._begin(request, shared, recalled)
            chunks[name] = tokens
        return chunks

    def _check_prefill(
        self, budget: TieredPrefillBudget, request: Request, cached: int, new: int, limit: int
    ) -> int:
        """Tokens of a prompt, all or a chunk, that a pass lets in behind so many windows."""
        window = self.geometry.window
        left = request.prompt - cached * window
        locked = request.page_keys(len(budget.prefix), window)
        self.tree.lock(locked, 1)
        fits, most = budget.check_prefill(
            extend_input_len=left,
            total_tokens=request.prompt - len(budget.prefix) * window + new + window,
            max_new_tokens=new,
            input_tokens=request.prompt,
            chunk_limit=limit,
        )
        self.tree.lock(locked, -1)
        if not fits or not most:
            return 0
        return left if budget.ceil_paged_tokens(left) <= most else most // window * window

    def _waiting_request(self, asked: Waiting) -> Any:
        """As much of SGLang's request as tiering looks at while it waits."""
        params = {} if asked.budget is None else {BUDGET: float(asked.budget)}
        request = SimpleNamespace(
            asked=asked,
            origin_input_ids=range(asked.prompt),
            output_ids=[],
            routing_key=asked.tenant,
            sampling_params=SimpleNamespace(custom_params=params),
        )
        self.state.terms.take_in(request)
        return request

    def _match(self, request: Request, new: int) -> list[int]:
        """Pages of the reused prefix; at least one token is always computed."""
        window = self.geometry.window
        count = (request.prompt - 1) // window
        pages = self.tree.match(request.page_keys(count, window))
        final = request.prompt + new
        usable = self.state.ledger.usable_pages(pages, request.prompt, final, request.terms)
        return pages[:usable]

    def start(
        self,
        name: int,
        prompt: int,
        text: Text = OWN_TEXT,
        new: int = 1,
        terms: Terms | None = None,
    ) -> int:
        """Admit a request; its prompt is extended chunk by chunk. Returns its cached tokens."""
        request = Request(name, prompt, text, terms=terms)
        shared = self._match(request, new)
        if recalled := self._to_recall(request, len(shared)):
            # What is not read after all is computed.
            shared = []
            recalled *= self.state.spill.read(request.spilled, recalled)
        return self._begin(request, shared, recalled)

    def _begin(self, request: Request, shared: list[int], recalled: int) -> int:
        """A request runs, behind pages that it shares or windows that it has read."""
        request.row = self.free_rows.pop()
        self.running[request.name] = request
        self.outputs[request.name] = []
        request.pages = shared + [self._take_page() for _ in range(recalled)]
        request.shared = len(shared)
        self.tree.lock(request.page_keys(request.shared, self.geometry.window), 1)
        cached = len(request.pages) * self.geometry.window
        for layer in range(self.num_layers):
            for position in range(cached):
                self._draw(request, layer, position)
        self._point(request, 0, cached)
        return cached

    def _to_recall(self, request: Request, matched: int) -> int:
        """Windows of a request that are to come from the store."""
        spill = self.state.spill
        request.spilled = spill.request(
            str(request.text.salt), None, lambda start, stop: request.tokens()[start:stop]
        )
        windows = (request.prompt - 1) // self.geometry.window
        if request.spilled is None or not windows or not self.state.claims.is_exact(request.prompt):
            return 0
        return spill.find(request.spilled, windows, matched)

    def can_decode(self, names: list[int]) -> bool:
        """Whether these requests' next tokens fit, by claims and by pages."""
        rows = [self.running[name].row for name in names]
        return self._have_pages(len(names)) and self.state.can_decode(rows, self._evict_until)

    def _have_pages(self, count: int) -> bool:
        """Evict for so many free pages, as the prefix cache does; whether there are as many."""
        for gives in self.state.ledger.givers(must=True):
            self._evict_until(lambda: len(self.free_pages) >= count, self.state.may_go(gives))
        return len(self.free_pages) >= count

    def _evict_until(self, enough: Callable[[], bool], may_go: MayGo | None = None) -> None:
        while not enough() and self.evict(may_go):
            pass

    def evict(self, may_go: MayGo | None = None) -> bool:
        """Evict one page from the tree; False if there is none that may go."""
        page = self.tree.evict(may_go)
        if page is None:
            return False
        window = self.geometry.window
        self.state.drop(torch.arange(page * window, (page + 1) * window))
        self.free_pages.append(page)
        return True

    def extend(self, chunks: dict[int, int], decode: list[int] = []) -> None:  # noqa: B006
        """Prefill so many tokens of each request (fewer at a routing point), and decode others."""
        requests = [self.running[name] for name in (*chunks, *decode)]
        starts = [request.stored for request in requests]
        for request in requests:
            left = request.prompt - request.stored
            tokens = min(chunks.get(request.name, 1), left) if left > 0 else 1
            if left > 0:
                tokens = min(tokens, self.state.claims.chunk_limit(request.prompt, request.stored))
            self._allocate(request, request.stored + tokens)
        self._announce(requests)
        for request, start in zip(requests, starts, strict=True):
            if start < request.prompt:
                shared = request.pages[: request.shared]
                self.state.extend_prepared(
                    request.row,
                    request.prompt,
                    request.stored,
                    shared,
                    spilled=request.spilled,
                    terms=request.terms,
                )
        assert self.state.make_room(self._evict_until)
        self._launch_extend(requests, starts)

    def decode(self, names: list[int]) -> None:
        """One token of each request."""
        requests = [self.running[name] for name in names]
        for request in requests:
            self._allocate(request, request.stored + 1)
        self._announce(requests)
        self._cover()
        tokens = [(request, request.stored - 1) for request in requests]
        self.launch_decode(
            torch.tensor([r.row for r in requests]),
            torch.tensor([r.stored for r in requests]),
            self._locations(tokens),
            tokens,
        )

    def launch_decode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        locations: torch.Tensor,
        tokens: list[tuple[Request, int]],
    ) -> None:
        """What SGLang's eager runner does with a batch that decodes ``tokens``."""
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            req_pool_indices=rows,
            seq_lens=lengths,
            out_cache_loc=locations,
        )
        self.backend.init_forward_metadata(batch)
        for layer in range(self.num_layers):
            query, key, value = self._draw_tokens(layer, tokens)
            expected = self._expect(layer, query, tokens)
            out = self.backend.forward_decode(query, key, value, self._layers[layer], batch)
            self._collect(out, tokens, expected)

    def finish(self, name: int, publish: bool = False) -> None:
        """A request ends, is aborted or is retracted; it may leave its windows for others."""
        request = self.running.pop(name)
        window, kept = self.geometry.window, request.shared
        locked = request.page_keys(request.shared, window)
        if publish:
            self.state.finish(request.row, request.stored)
            tokens = min(request.stored, self.state.publishable_tokens(request.row))
            kept = max(kept, tokens // window)
            keys = request.page_keys(kept, window)
            known = self.tree.insert(keys, request.pages[:kept])
            new = max(known, request.shared)
            found = self.tree.match(keys)[request.shared : new]
            self.state.raise_kept(request.row, request.shared, found)
            if new < kept:
                self.state.publish(request.row, new, request.pages[new:kept])
            self.free_pages.extend(request.pages[request.shared : new])
        self.tree.lock(locked, -1)
        self.state.free(request.row)
        self.free_rows.append(request.row)
        self.free_pages.extend(request.pages[kept:])

    def flush(self) -> None:
        """SGLang's flush, which needs an idle server."""
        assert not self.running
        self.free_pages.extend(self.tree.pages())
        self.tree.clear()
        self.state.clear()

    # -- checks -------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What ``check_integrity`` says now, and whether every page is somewhere, once."""
        problems = self.state.check_integrity()
        own = [page for r in self.running.values() for page in r.pages[r.shared :]]
        pages = sorted([*self.free_pages, *self.tree.pages(), *own])
        if pages != list(range(1, self.plan.num_pages + 1)):
            problems.append("a page is lost, or in two places")
        if len(self.tree.pages()) != self.state.ledger.kept.num_pages:
            problems.append("the tree and the ledger differ in what is kept")
        return problems

    def tiers(self, name: int) -> torch.Tensor:
        """Tiers of a running request, ``[L, windows]``."""
        request = self.running[name]
        n = -(-request.stored // self.geometry.window)
        return self.manager.views.tier[:, request.row, :n].clone()

    def dense_attention(
        self, layer: int, request: Request, query: torch.Tensor, position: int
    ) -> torch.Tensor:
        """What attention of one query must give, ``[Hq, D]`` float32, from originals and tiers."""
        window, heads = self.geometry.window, self.geometry.num_q_heads
        tiers = self.manager.views.tier[layer, request.row]
        keys, values = request.keys[layer].float(), request.values[layer].float()
        count = -(-keys.shape[0] // window)
        visible = torch.zeros(keys.shape[0], dtype=torch.bool)
        for index in range(count):
            span = slice(index * window, min((index + 1) * window, keys.shape[0]))
            tier = Tier(int(tiers[index]))
            visible[span] = tier in (Tier.FULL, Tier.CODED)
            if tier is Tier.CODED:
                request.coded.add((layer, index))
            restored = tier is Tier.FULL and self.config.promote is Promotion.RESTORE
            if visible[span.start] and (layer, index) in request.coded and not restored:
                # Once coded, a window has lost its original: a FULL copy of it is rebuilt.
                rebuilt = self._coded(layer, request, index)
                keys[span], values[span] = (
                    rebuilt if tier is Tier.CODED else (x.bfloat16().float() for x in rebuilt)
                )
        visible &= torch.arange(keys.shape[0]) <= position
        keys, values = keys[visible], values[visible]
        group = torch.arange(heads) // self.geometry.group_size
        logits = torch.einsum("hd,nhd->hn", query.float(), keys[:, group])
        mass = (logits * self.geometry.head_dim**-0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", mass, values[:, group])

    def _coded(self, layer: int, request: Request, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A window's keys and values as its codes give them, ``[W, Hkv, D]``."""
        window = self.geometry.window
        span = slice(index * window, (index + 1) * window)
        positions = torch.arange(span.start, span.stop)
        keys = self.rotary.unrotate(request.keys[layer][span].transpose(0, 1), positions)
        codes, _ = encode_windows(
            keys[None], request.values[layer][span].transpose(0, 1)[None].float(), self.geometry
        )
        coded_keys, coded_values = decode_windows(codes)
        return (
            self.rotary.rotate(coded_keys[0], positions).transpose(0, 1),
            coded_values[0].transpose(0, 1),
        )

    # -- plumbing -------------------------------------------------------------------------

    def _allocate(self, request: Request, length: int) -> None:
        window = self.geometry.window
        while len(request.pages) * window < length:
            request.pages.append(self._take_page())
        self._point(request, request.stored, length)

    def _take_page(self) -> int:
        assert self._have_pages(1)
        return self.free_pages.pop()

    def _point(self, request: Request, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a row lie in its pages."""
        window = self.geometry.window
        positions = torch.arange(start, end)
        pages = torch.tensor(request.pages, dtype=torch.int64)[positions // window]
        self.req_to_token[request.row, positions] = (pages * window + positions % window).int()
        request.stored = end

    def _announce(self, requests: list[Request]) -> None:
        self.state.alloc_to_lengths(
            req_pool_indices_cpu=torch.tensor([r.row for r in requests]),
            target_seq_lens_cpu=torch.tensor([r.stored for r in requests]),
        )

    def _locations(self, tokens: list[tuple[Request, int]]) -> torch.Tensor:
        return torch.stack([self.req_to_token[r.row, p] for r, p in tokens]).to(torch.int64)

    def _launch_extend(self, requests: list[Request], starts: list[int]) -> None:
        tokens = [
            (request, position)
            for request, start in zip(requests, starts, strict=True)
            for position in range(start, request.stored)
        ]
        rows, ends = [r.row for r in requests], [r.stored for r in requests]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            req_pool_indices_cpu=torch.tensor(rows),
            seq_lens=torch.tensor(ends),
            extend_prefix_lens=torch.tensor(starts),
            extend_prefix_lens_cpu=starts,
            extend_seq_lens=torch.tensor(lengths),
            extend_seq_lens_cpu=lengths,
            out_cache_loc=self._locations(tokens),
        )
        self._cover()
        self.backend.init_forward_metadata(batch)
        for layer in range(self.num_layers):
            query, key, value = self._draw_tokens(layer, tokens)
            # Beforehand, since the layer routes what has attended.
            expected = self._expect(layer, query, tokens)
            out = self.backend.forward_extend(query, key, value, self._layers[layer], batch)
            self._collect(out, tokens, expected)

    def _draw_tokens(
        self, layer: int, tokens: list[tuple[Request, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """New tokens of a layer, flat as models hand them over."""
        drawn = [self._draw(request, layer, position) for request, position in tokens]
        query, key, value = (torch.stack(parts).flatten(1) for parts in zip(*drawn, strict=True))
        return query, key, value

    def _draw(
        self, request: Request, layer: int, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = self.geometry
        seed = ((request.source(position) + 1000) * 64 + layer) * 100_003 + position
        shape = (g.num_q_heads + 2 * g.num_kv_heads, g.head_dim)
        drawn = np.random.default_rng(seed % 2**64).standard_normal(shape, np.float32)
        rows = torch.from_numpy(drawn).bfloat16()
        query, key, value = rows.split([g.num_q_heads, g.num_kv_heads, g.num_kv_heads])
        while len(request.keys) <= layer:
            empty = torch.empty((0, g.num_kv_heads, g.head_dim), dtype=torch.bfloat16)
            request.keys.append(empty)
            request.values.append(empty)
        request.keys[layer] = torch.cat([request.keys[layer], key[None]])
        request.values[layer] = torch.cat([request.values[layer], value[None]])
        return query * 2, key, value

    def _expect(
        self, layer: int, query: torch.Tensor, tokens: list[tuple[Request, int]]
    ) -> list[torch.Tensor] | None:
        """What attention of these tokens must give, if that is checked."""
        if not self.check:
            return None
        queries = query.view(len(tokens), -1, self.geometry.head_dim)
        return [
            self.dense_attention(layer, request, row, position)
            for row, (request, position) in zip(queries, tokens, strict=True)
        ]

    def _collect(
        self,
        out: torch.Tensor,
        tokens: list[tuple[Request, int]],
        expected: list[torch.Tensor] | None,
    ) -> None:
        used, capacity = self.manager.arena.used_bytes, self.state.ledger.capacity_bytes
        assert used <= self._covered <= capacity, (used, self._covered, capacity)
        for i, (request, _) in enumerate(tokens):
            row = out[i].view(-1, self.geometry.head_dim)
            self.outputs[request.name].append(row.clone())
            if expected is not None:
                error = (row.float() - expected[i]).abs().max().item()
                self.worst_error = max(self.worst_error, error)
