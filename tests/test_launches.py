"""Launches as SGLang's runners make them: eager, replayed from a captured graph, warming up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from mini_engine import SMALL, MiniEngine, Request
from qevict_kernels import make_kernels
from qevict_tiers.config import Heads, TieringConfig

HEADS = Heads(4, 2, 64)
SLOTS = 8


class GraphEngine(MiniEngine):
    """Decodes from padded buffers that stay where they are, as a captured graph does.

    What SGLang's graph runner shows the backend of a batch then has neither rows nor lengths on
    the host; the captured part reads the buffers alone.
    """

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.buffers = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=SLOTS,
            req_pool_indices=torch.zeros(SLOTS, dtype=torch.int64),
            seq_lens=torch.zeros(SLOTS, dtype=torch.int64),
            out_cache_loc=torch.zeros(SLOTS, dtype=torch.int64),
        )

    def launch_decode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        locations: torch.Tensor,
        tokens: list[tuple[Request, int]],
    ) -> None:
        n, buffers = len(tokens), self.buffers
        for buffer, numbers in (
            (buffers.req_pool_indices, rows),
            (buffers.seq_lens, lengths),
            (buffers.out_cache_loc, locations),
        ):
            buffer.zero_()
            buffer[:n] = numbers
        view = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, batch_size=SLOTS, num_padding=SLOTS - n
        )
        self.backend.init_forward_metadata_out_graph(view)
        for layer in range(self.num_layers):
            drawn = self._draw_tokens(layer, tokens)
            self._collect(self.replay(layer, *drawn)[:n], tokens, None)

    def replay(self, layer: int, *drawn: torch.Tensor) -> torch.Tensor:
        """The captured part of one layer."""
        padded = (torch.cat([x, x[:1].expand(SLOTS - len(x), -1)]) for x in drawn)
        out: torch.Tensor = self.backend.forward_decode(*padded, self._layers[layer], self.buffers)
        return out

    def capture(self) -> None:
        """What SGLang's graph runner does for each size: zeros for numbers, twice to warm up."""
        for tensor in (
            self.buffers.req_pool_indices,
            self.buffers.seq_lens,
            self.buffers.out_cache_loc,
        ):
            tensor.zero_()
        self.backend.init_forward_metadata_out_graph(self.buffers, in_capture=True)
        for layer in range(self.num_layers):
            query = torch.ones(SLOTS, 256, dtype=torch.bfloat16)
            key = torch.ones(SLOTS, 128, dtype=torch.bfloat16)
            assert not self.replay(layer, query, key, key).any()


def _engine(kind: type[MiniEngine]) -> MiniEngine:
    config = TieringConfig(**SMALL, route_every=4)
    return kind(
        lambda geometry, rotary: make_kernels(geometry, rotary, torch.device("cpu")),
        config,
        HEADS,
        kv_tokens=1600,
    )


def _live(engine: MiniEngine) -> dict[str, torch.Tensor]:
    """Three requests that come and go at different times; what became of them."""
    result = {}
    for name, prompt in ((1, 200), (2, 17), (3, 120)):
        engine.start(name, prompt)
        while engine.running[name].stored < prompt:
            engine.extend({name: 64})
        for _ in range(11):
            engine.decode(sorted(engine.running))
        if name == 2:
            result["tiers of 1"] = engine.tiers(1)
            result["output of 1"] = torch.stack(engine.outputs[1])
            engine.finish(1)
    for name in engine.running:
        result[f"tiers of {name}"] = engine.tiers(name)
        result[f"output of {name}"] = torch.stack(engine.outputs[name])
        result[f"scores of {name}"] = engine.manager.views.score[:, engine.running[name].row]
    return result


def test_replays_of_a_graph_give_bit_for_bit_what_eager_launches_give() -> None:
    eager, graph = _engine(MiniEngine), _engine(GraphEngine)
    expected, found = _live(eager), _live(graph)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert graph.problems() == []
    # Padding is for row 0, which no request has.
    assert not graph.manager.views.score[:, 0].any()


def test_a_capture_changes_nothing_that_requests_have() -> None:
    graph = _engine(GraphEngine)
    assert isinstance(graph, GraphEngine)
    graph.start(1, 100)
    while graph.running[1].stored < 100:
        graph.extend({1: 64})
    state = graph.state
    before = [t.clone() for t in (state.manager.views.score, state.manager.arena.full.slots)]
    graph.capture()
    assert torch.equal(state.manager.views.score, before[0])
    assert torch.equal(state.manager.arena.full.slots, before[1])
    assert graph.problems() == []


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_launch_that_nobody_prepared_is_for_no_request(mode: ForwardMode) -> None:
    engine = _engine(MiniEngine)
    engine.start(1, 40)
    engine.extend({1: 40})
    before = engine.manager.views.score.clone()
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=2,
        req_pool_indices=zeros,
        req_pool_indices_cpu=None,
        seq_lens=zeros + 1,
        extend_prefix_lens=zeros,
        extend_seq_lens=zeros + 1,
        out_cache_loc=zeros,
    )
    engine.backend.init_forward_metadata(batch)
    query = torch.ones(2, 256, dtype=torch.bfloat16)
    key = torch.ones(2, 128, dtype=torch.bfloat16)
    forward = engine.backend.forward_extend if mode.is_extend() else engine.backend.forward_decode
    assert not forward(query, key, key, engine._layers[0], batch).any()
    assert torch.equal(engine.manager.views.score, before)
    assert engine.problems() == []


def test_a_decode_launch_for_another_number_of_requests_than_were_prepared_is_an_error() -> None:
    engine = _engine(MiniEngine)
    engine.start(1, 40)
    engine.extend({1: 40})
    engine._announce([engine.running[1]])
    with pytest.raises(RuntimeError, match="prepared 1 requests to decode, but decodes 2"):
        engine.state.take_decoding(2)
