"""The SSD tier: what is written behind, what is recalled, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import SMALL, MemoryStore, MiniEngine, Text
from qevict_kernels import make_kernels
from qevict_kernels.layout import ParamFormat
from qevict_tiers.config import (
    BudgetLimits,
    ByteSize,
    Heads,
    PrefillScores,
    PrefixFidelity,
    PrefixReuse,
    Promotion,
    TieringConfig,
)
from qevict_tiers.ledger import Counter
from qevict_tiers.policy import Tier
from qevict_tiers.spill.keys import SpillKey
from qevict_tiers.spill.records import Reading, ReadStatus
from sglang_qevict import spill as spill_module
from sglang_qevict.spill import BreakEven, Recall, SpillTier, _made_under

DOCUMENT = Text(document=1, tokens=400)
DOCUMENT_TOKENS = [-100_000 + position for position in range(400)]
"""As the engine numbers them."""
WINDOW = 8


def make_engine(store: MemoryStore | None, kv_tokens: int = 3000, **options: Any) -> MiniEngine:
    return MiniEngine(
        lambda g, r: make_kernels(g, r, torch.device("cpu")),
        TieringConfig(**{**SMALL, **options}),
        Heads(4, 2, 64),
        kv_tokens=kv_tokens,
        context=640,
        check=True,
        store=store,
    )


def serve(
    engine: MiniEngine, name: int, prompt: int, text: Text = DOCUMENT, chunk: int = 640
) -> int:
    """A prompt in chunks, then 40 tokens; returns how many tokens were there before."""
    cached = engine.start(name, prompt, text)
    while engine.running[name].stored < prompt:
        engine.extend({name: chunk})
        assert engine.problems() == []
    for _ in range(40):
        engine.decode([name])
    assert engine.problems() == []
    return cached


def last_outputs(engine: MiniEngine, name: int) -> torch.Tensor:
    """Of the last 16 tokens of the prompt in the last layer, and of all 40 that were decoded."""
    return torch.stack(engine.outputs[name][-40 * engine.num_layers - 16 :])


@pytest.mark.parametrize("prompt", [400, 90])
@pytest.mark.parametrize("chunk", [640, 48])
def test_every_whole_window_is_written_once_as_it_was_computed(prompt: int, chunk: int) -> None:
    store = MemoryStore()
    engine = make_engine(store)
    serve(engine, 1, prompt, chunk=chunk)
    request = engine.running[1]
    whole = request.stored // WINDOW
    engine.finish(1, publish=True)
    assert engine.problems() == []
    assert len(store.records) == whole
    assert request.spilled is not None
    for window, key in enumerate(request.spilled.keys(range(whole))):
        found = torch.frombuffer(bytearray(store.records[key]), dtype=torch.bfloat16)
        for layer, original in enumerate(found.view(engine.num_layers, 2, 2, WINDOW, 64)):
            span = slice(window * WINDOW, (window + 1) * WINDOW)
            assert torch.equal(original[0], request.keys[layer][span].transpose(0, 1))
            assert torch.equal(original[1], request.values[layer][span].transpose(0, 1))


@pytest.mark.parametrize("chunk", [640, 48])
@pytest.mark.parametrize("prompt", [400, 90])
def test_a_recalled_request_is_bit_for_bit_one_that_computed_its_prompt(
    prompt: int, chunk: int
) -> None:
    text = Text(document=1, tokens=prompt - 35)
    store = MemoryStore()
    first = make_engine(store)
    serve(first, 1, prompt, text)
    first.finish(1, publish=True)
    first.problems()

    again = make_engine(store)
    cached = serve(again, 2, prompt, text, chunk)
    alone = make_engine(None)
    assert serve(alone, 2, prompt, text, chunk) == 0
    assert cached == (prompt - 35) // WINDOW * WINDOW
    assert torch.equal(last_outputs(again, 2), last_outputs(alone, 2))
    assert torch.equal(again.tiers(2), alone.tiers(2))
    again.finish(2, publish=True)
    assert again.problems() == []


def test_a_flush_right_after_a_request_loses_nothing_of_it() -> None:
    store = MemoryStore()
    engine = make_engine(store)
    engine.start(1, 90, DOCUMENT)
    engine.extend({1: 90})
    engine.finish(1, publish=True)
    engine.flush()
    assert len(store.records) == 90 // WINDOW
    assert engine.problems() == []


def test_what_was_evicted_from_the_view_takes_part_again() -> None:
    store = MemoryStore()
    engine = make_engine(store)
    serve(engine, 1, 400)
    assert (engine.tiers(1) == Tier.EVICTED).any()
    engine.finish(1, publish=True)
    cached = engine.start(2, 400 + 30, DOCUMENT)
    assert cached == 400
    engine.extend({2: 30})
    # The dense oracle of the new tokens saw every original.
    assert engine.worst_error < 0.05
    assert engine.running[2].shared == 0


def test_codes_in_memory_come_first_if_they_are_to() -> None:
    store = MemoryStore()
    engine = make_engine(store, prefix_fidelity=PrefixFidelity.CODES)
    serve(engine, 1, 400)
    engine.finish(1, publish=True)
    engine.start(2, 430, DOCUMENT)
    assert engine.running[2].shared == 50
    engine.extend({2: 430})
    engine.finish(2)
    while engine.evict():
        pass
    assert engine.start(3, 430, DOCUMENT) == 400
    assert engine.running[3].shared == 0


@pytest.mark.parametrize("layer", [0, 1])
def test_a_promoted_window_gets_its_original_back_bit_for_bit(layer: int) -> None:
    engine = make_engine(MemoryStore(), promote=Promotion.RESTORE)
    serve(engine, 1, 400)
    request, views = engine.running[1], engine.manager.views
    coded = (views.tier[layer, request.row] == Tier.CODED).nonzero()[:, 0].tolist()
    window = coded[len(coded) // 2]
    for _ in range(17):  # one event reads it, the next one puts it back
        views.score[layer, request.row, window] = 1e6
        engine.decode([1])
        assert engine.problems() == []
    assert views.tier[layer, request.row, window] == Tier.FULL
    span = slice(window * WINDOW, (window + 1) * WINDOW)
    original = engine.manager.originals(
        slice(layer, layer + 1), request.row, range(window, window + 1)
    )
    keys, values = original.view(torch.bfloat16).view(2, 2, WINDOW, 64)
    assert torch.equal(keys, request.keys[layer][span].transpose(0, 1))
    assert torch.equal(values, request.values[layer][span].transpose(0, 1))
    counts = engine.manager.counters.read()
    assert counts[Counter.PROMOTED] >= 1
    # An original needs no codes beside it.
    assert engine.manager.ledger_bytes().shadow == 0
    assert engine.worst_error < 0.05
    engine.finish(1, publish=True)
    assert engine.problems() == []


def test_a_window_that_is_read_too_late_stays_coded() -> None:
    engine = make_engine(_Slow(), promote=Promotion.RESTORE)
    serve(engine, 1, 400)
    request, views = engine.running[1], engine.manager.views
    window = int((views.tier[0, request.row] == Tier.CODED).nonzero()[5])
    for _ in range(24):
        views.score[0, request.row, window] = 1e6
        engine.decode([1])
    assert views.tier[0, request.row, window] == Tier.CODED
    assert engine.manager.counters.read()[Counter.PROMOTED] == 0
    assert isinstance(engine.state.spill, SpillTier)
    assert engine.state.spill.counters.late > 0


def test_another_salt_finds_nothing() -> None:
    store = MemoryStore()
    engine = make_engine(store)
    serve(engine, 1, 400)
    engine.finish(1, publish=True)
    assert engine.start(2, 430, DOCUMENT._replace(salt=7)) == 0


def test_segments_are_not_recalled() -> None:
    """A prompt that is routed before its end is known sees codes, or computes."""
    store = MemoryStore()
    engine = make_engine(store, exact_prefill_tokens=112)
    serve(engine, 1, 300, chunk=64)
    engine.finish(1, publish=True)
    while engine.evict():
        pass
    assert engine.start(2, 330, DOCUMENT) == 0


def test_reuse_off_leaves_no_use_for_the_tier(tmp_path: Any) -> None:
    with pytest.raises(
        ValueError, match="--kv-tiering-prefix-reuse must be codes with the SSD tier"
    ):
        TieringConfig(ssd_dir=tmp_path, prefix_reuse=PrefixReuse.OFF)


class _Slow(MemoryStore):
    """A disk that never answers."""

    def get(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


class _Failing(MemoryStore):
    """One of the records that are read is not there as it should be."""

    def __init__(self, status: ReadStatus) -> None:
        super().__init__()
        self._status = status

    def get(self, keys: Sequence[SpillKey], *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().get(keys, *args, **kwargs)
        future.result()[len(keys) // 2] = Reading(self._status)
        return future


def written_and_evicted(store: MemoryStore) -> tuple[MiniEngine, SpillTier]:
    """An engine whose store alone has the 50 windows of the document, and its tier."""
    engine = make_engine(store)
    serve(engine, 1, 400)
    engine.finish(1, publish=True)
    while engine.evict():
        pass
    spill = engine.state.spill
    assert isinstance(spill, SpillTier)
    return engine, spill


@pytest.mark.parametrize(
    ("store", "recall"),
    [
        (_Slow(), Recall.LATE),
        (_Failing(ReadStatus.LATE), Recall.LATE),
        (_Failing(ReadStatus.BUSY), Recall.LATE),
        (_Failing(ReadStatus.CORRUPT), Recall.DAMAGED),
        (_Failing(ReadStatus.WRONG_SIZE), Recall.FOREIGN),
        (_Failing(ReadStatus.MISS), Recall.GONE),
        (_Failing(ReadStatus.ERROR), Recall.FAILED),
    ],
)
def test_what_is_not_there_whole_and_in_time_is_computed_and_counted(
    store: MemoryStore, recall: Recall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_module, "_LONGEST_READ_SECONDS", 0.05)
    engine, spill = written_and_evicted(store)
    assert engine.start(2, 430, DOCUMENT) == 0
    assert spill.counters.requests == {recall: 1}
    assert spill.counters.windows == {recall: 50}
    assert spill.counters.bytes == 0
    engine.extend({2: 430})
    assert engine.worst_error < 0.05
    engine.finish(2, publish=True)
    assert engine.problems() == []


def test_recalls_are_counted_with_their_bytes() -> None:
    engine, spill = written_and_evicted(MemoryStore())
    assert engine.start(2, 430, DOCUMENT) == 400
    assert spill.counters.requests == {Recall.RECALLED: 1}
    assert spill.counters.windows == {Recall.RECALLED: 50}
    assert (
        spill.counters.bytes == 50 * engine.plan.budget.num_layers * engine.plan.budget.full_bytes
    )


def test_a_request_that_is_computed_faster_is_counted_once() -> None:
    _, spill = written_and_evicted(MemoryStore())
    spill.break_even.read(1, seconds=1)
    spill.break_even.computed(10**6, seconds=1)
    request = spill.request("0", None, lambda start, stop: DOCUMENT_TOKENS[start:stop])
    for _ in range(3):
        assert spill.find(request, 50, matched=0) == 0
    assert spill.counters.requests == {Recall.NOT_WORTH_IT: 1}
    assert spill.counters.windows == {Recall.NOT_WORTH_IT: 50}


def test_what_other_weights_budgets_or_adapters_made_is_not_found() -> None:
    _, spill = written_and_evicted(MemoryStore())

    def found(tier: SpillTier, **made: Any) -> int:
        request = tier.request("0", None, lambda start, stop: DOCUMENT_TOKENS[start:stop], **made)
        return tier.find(request, 50, matched=0)

    assert found(spill) == 50
    assert found(spill, made="budget 1/2") == found(spill, is_lasting=False) == 0
    other = SpillTier(spill.manager, spill.store, spill.space, spill.layers)
    spill.weights_changed()
    assert found(spill) == 0
    assert found(other) == 50


def test_what_one_rank_can_t_have_no_rank_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    _, spill = written_and_evicted(MemoryStore())
    request = spill.request("0", None, lambda start, stop: DOCUMENT_TOKENS[start:stop])
    assert not spill.read(request, 50, wanted=False)
    least = iter([1, 0])
    monkeypatch.setattr(spill, "_least", lambda number: min(number, next(least)))
    assert not spill.read(request, 50)
    assert spill.counters.requests == {Recall.NO_ROOM: 1, Recall.OTHER_RANK: 1}
    assert spill.counters.bytes == 0


_OTHER_OPTIONS: dict[str, Any] = {
    "budget": Fraction(3, 10),
    "quant_fraction": Fraction(1, 2),
    "window": 16,
    "route_every": 16,
    "sink": 8,
    "local": 64,
    "key_bits": 2,
    "value_bits": 2,
    "params": ParamFormat.FP16,
    "prefill_scores": PrefillScores.ALL,
    "promote": Promotion.DEQUANTIZE,
    "prefix_reuse": PrefixReuse.OFF,
    "min_context": 1024,
    "exact_prefill_tokens": 4096,
    "full_layers": frozenset({0, 1}),
    "prefix_fidelity": PrefixFidelity.CODES,
    "score_decay": Fraction(1, 2),
}
_PLACES: dict[str, Any] = {
    "ssd_dir": Path("/other"),
    "ssd_size": ByteSize(1 << 30),
    "ssd_persist": True,
    "spill_backend": "file",
    "spill_config": '{"a": 1}',
    "budget_limits": BudgetLimits(Fraction(1, 10), Fraction(1, 2)),
    "tenants": "{}",
}


def test_records_are_named_by_all_options_that_change_what_attention_sees() -> None:
    config = TieringConfig()
    assert {*_OTHER_OPTIONS, *_PLACES} == {field.name for field in fields(config)}
    others = [replace(config, **{name: value}) for name, value in _OTHER_OPTIONS.items()]
    assert len({_made_under(other) for other in [config, *others]}) == 1 + len(others)
    for where in (
        {"ssd_dir", "ssd_size", "ssd_persist"},
        {"spill_backend", "spill_config"},
        {"budget_limits", "tenants"},
    ):
        moved = replace(config, **{name: _PLACES[name] for name in where})
        assert _made_under(moved) == _made_under(config)


def test_the_break_even_is_by_what_both_took_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(spill_module.time, "monotonic", lambda: now)
    even = BreakEven(memory_seconds=60)
    assert even.is_worth_it(10**12, 1)
    even.computed(1000, seconds=1)
    assert even.is_worth_it(10**12, 1)
    even.read(10**6, seconds=1)
    assert even.is_worth_it(10**6, 1001)
    assert not even.is_worth_it(10**6, 999)
    assert even.patience_seconds(500) == Fraction(1, 2)
    now += 61
    assert even.is_worth_it(10**6, 999)
