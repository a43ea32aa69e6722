"""Reuse of prefixes: what finished requests leave, and what others see of it."""

from __future__ import annotations

import zlib
from fractions import Fraction

import pytest
import torch

from kernel_cases import WITHOUT_STORE
from mini_engine import SMALL, MiniEngine, Text, Waiting
from qevict_kernels import make_kernels
from qevict_tiers.config import Heads, PrefixReuse, Promotion, TieringConfig
from qevict_tiers.kept import Keep
from qevict_tiers.policy import Tier

DOCUMENT = Text(document=1, tokens=400)


def make_engine(
    kv_tokens: int = 3000, check: bool = False, fixed_shapes: bool = False, **options: object
) -> MiniEngine:
    return MiniEngine(
        lambda g, r: make_kernels(g, r, torch.device("cpu")),
        TieringConfig(**{**SMALL, **options}),
        Heads(4, 2, 64),
        kv_tokens=kv_tokens,
        context=640,
        check=check,
        fixed_shapes=fixed_shapes,
    )


def serve(
    engine: MiniEngine,
    name: int,
    prompt: int,
    text: Text = DOCUMENT,
    steps: int = 40,
    finish: bool = True,
) -> int:
    """A request from its prompt to its end; returns its cached tokens."""
    cached = engine.start(name, prompt, text)
    prefill(engine, name)
    for _ in range(steps):
        engine.decode([name])
    if finish:
        engine.finish(name, publish=True)
    return cached


def prefill(engine: MiniEngine, name: int) -> None:
    """A prompt from its first chunk to its last."""
    request = engine.running[name]
    while request.stored < request.prompt:
        engine.extend({name: request.prompt - request.stored})


def kept_codes(engine: MiniEngine, pages: list[int]) -> list[int]:
    """A checksum of the codes of each page in all layers."""
    engine.state.drain()
    coded = engine.manager.arena.coded
    owners = [
        torch.tensor(pages, dtype=torch.int64) + layer * engine.manager.pages_per_layer
        for layer in range(engine.num_layers)
    ]
    records = torch.cat([coded.slots[coded.slot_of(o).long()] for o in owners], dim=-1)
    return [zlib.crc32(record.numpy().tobytes()) for record in records]


@pytest.mark.parametrize(
    ("promote", "fixed_shapes"),
    [
        (Promotion.ALIAS, True),
        pytest.param(Promotion.ALIAS, False, marks=pytest.mark.slow),
        pytest.param(Promotion.DEQUANTIZE, True, marks=pytest.mark.slow),
        pytest.param(Promotion.DEQUANTIZE, False, marks=pytest.mark.slow),
    ],
)
def test_attention_over_a_reused_prefix_equals_the_dense_oracle(
    promote: Promotion, fixed_shapes: bool
) -> None:
    engine = make_engine(check=True, promote=promote, fixed_shapes=fixed_shapes)
    assert serve(engine, 1, 420) == 0
    assert serve(engine, 2, 450) == 400
    assert serve(engine, 3, 401) == 400
    assert engine.problems() == []
    assert engine.worst_error < 0.02


def test_shared_pages_are_counted_once_however_many_share_them() -> None:
    engine = make_engine()
    serve(engine, 1, 401)
    engine.state.drain()
    before = engine.manager.arena.used_bytes
    for name in (2, 3, 4):
        assert serve(engine, name, 410, steps=1, finish=False) == 400
    own = sum(
        int((engine.tiers(name)[:, 50:] == tier).sum()) * size
        for name in (2, 3, 4)
        for tier, size in (
            (Tier.FULL, engine.plan.budget.full_bytes),
            (Tier.CODED, engine.plan.budget.coded_bytes),
        )
    )
    assert engine.manager.arena.used_bytes == before + own
    assert engine.problems() == []


@pytest.mark.parametrize("promote", WITHOUT_STORE)
def test_a_request_is_routed_beside_others_as_alone_after_the_same_warming(
    promote: Promotion,
) -> None:
    alone, busy = make_engine(promote=promote), make_engine(promote=promote)
    for engine in (alone, busy):
        serve(engine, 1, 410)
    serve(alone, 2, 440, finish=False)
    cached = busy.start(2, 440, DOCUMENT)
    busy.start(3, 420, DOCUMENT)
    busy.start(4, 300, Text(document=2, tokens=200))
    busy.extend({2: 440 - cached, 3: 20, 4: 300})
    for step in range(40):
        busy.decode([2, 3] if step < 20 else [4, 2])
        if step == 20:
            busy.finish(3, publish=True)
    assert torch.equal(alone.tiers(2), busy.tiers(2))
    assert torch.equal(torch.stack(alone.outputs[2]), torch.stack(busy.outputs[2]))


def test_what_is_reused_is_coded_apart_from_the_sink_and_scores_start_at_zero() -> None:
    engine = make_engine()
    serve(engine, 1, 401)
    engine.start(2, 410, DOCUMENT)
    engine.extend({2: 1})
    tiers = engine.tiers(2)
    assert (tiers[:, 0] == Tier.FULL).all()
    assert (tiers[:, 1:50] == Tier.CODED).all()
    assert (tiers[:, 50:] == Tier.FULL).all()


def test_prefixes_under_another_salt_are_not_shared() -> None:
    engine = make_engine()
    serve(engine, 1, 410)
    assert serve(engine, 2, 410, DOCUMENT._replace(salt=1)) == 0
    assert serve(engine, 3, 410, DOCUMENT._replace(salt=1)) == 400
    assert serve(engine, 4, 410) == 400


def test_a_request_leaves_its_answer_too_and_the_next_turn_reuses_both() -> None:
    engine = make_engine()
    assert serve(engine, 1, 300, Text(1, 640), steps=60) == 0
    assert serve(engine, 2, 400, Text(1, 640), steps=60) == 360
    assert serve(engine, 3, 460, Text(1, 640), steps=60) == 456
    assert engine.problems() == []


def test_a_short_request_sees_nothing_but_full_windows_of_its_prefix() -> None:
    engine = make_engine(check=True)
    serve(engine, 1, 401)
    # All that a long request leaves FULL is the sink.
    assert serve(engine, 2, 100, steps=5, finish=False) == 8
    assert (engine.tiers(2) == Tier.FULL).all()
    short = Text(document=5, tokens=90)
    assert serve(engine, 3, 100, short, steps=5) == 0
    assert serve(engine, 4, 100, short, steps=5, finish=False) == 88
    assert (engine.tiers(4) == Tier.FULL).all()
    # A long one sees them FULL as well, and never demotes what is not its own.
    assert serve(engine, 5, 300, short, finish=False) == 88
    assert (engine.tiers(5)[:, :11] == Tier.FULL).all()
    assert engine.problems() == []


@pytest.mark.parametrize("full_layers", [frozenset[int](), frozenset({1})])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_short_requests_reuse_what_a_long_one_left_once_one_of_them_has_ended(
    full_layers: frozenset[int], fixed_shapes: bool
) -> None:
    budget = Fraction(3, 4) if full_layers else Fraction(3, 10)
    engine = make_engine(
        check=True, full_layers=full_layers, budget=budget, fixed_shapes=fixed_shapes
    )
    system = Text(1, 80)
    serve(engine, 1, 300, system)
    kept = engine.state.ledger.kept.num_bytes
    assert serve(engine, 2, 96, system, steps=4) == 8  # the sink's page
    assert engine.problems() == []
    assert engine.state.ledger.kept.num_bytes > kept
    assert serve(engine, 3, 96, system, steps=4) == 80
    assert serve(engine, 4, 300, system) == 80
    assert engine.problems() == []
    assert engine.worst_error < 0.02
    while engine.evict():
        pass
    assert engine.problems() == []
    assert engine.manager.arena.used_bytes == 0


def test_codes_that_a_request_shares_stay_while_it_does() -> None:
    engine = make_engine()
    system = Text(1, 80)
    serve(engine, 1, 300, system)
    serve(engine, 2, 300, system, finish=False)
    tiers = engine.tiers(2)[:, :10].clone()
    serve(engine, 3, 96, system, steps=4)
    assert serve(engine, 4, 96, system, steps=4) == 8
    engine.state.drain()
    assert torch.equal(engine.tiers(2)[:, :10], tiers)
    engine.finish(2, publish=True)
    serve(engine, 5, 96, system, steps=4)
    assert serve(engine, 6, 96, system, steps=4) == 80
    assert engine.problems() == []


def test_at_budget_one_reuse_changes_nothing_but_the_work() -> None:
    options: dict[str, object] = {"budget": Fraction(1), "quant_fraction": Fraction(0)}
    cold, warm = make_engine(**options), make_engine(**options)
    serve(warm, 1, 401)
    assert serve(warm, 2, 440, finish=False) == 400
    assert serve(cold, 2, 440, finish=False) == 0
    decoded = 40 * cold.num_layers
    expected, reused = (torch.stack(engine.outputs[2][-decoded:]) for engine in (cold, warm))
    assert torch.equal(reused, expected)


def test_without_reuse_nothing_is_left() -> None:
    engine = make_engine(prefix_reuse=PrefixReuse.OFF)
    serve(engine, 1, 410)
    engine.state.drain()
    assert engine.manager.arena.used_bytes == 0
    assert serve(engine, 2, 410) == 0


def test_layers_kept_full_are_full_in_what_is_reused() -> None:
    engine = make_engine(check=True, budget=Fraction(3, 4), full_layers=frozenset({1}))
    serve(engine, 1, 401)
    assert serve(engine, 2, 450, finish=False) == 400
    assert (engine.tiers(2)[1] == Tier.FULL).all()
    assert (engine.tiers(2)[0, 1:50] != Tier.FULL).all()
    assert engine.worst_error < 0.02
    assert engine.problems() == []


def test_a_request_that_ends_within_its_prompt_leaves_nothing() -> None:
    engine = make_engine(exact_prefill_tokens=112)
    engine.start(1, 400, DOCUMENT)
    engine.extend({1: 200})
    engine.finish(1, publish=True)
    engine.state.drain()
    assert engine.tree.pages() == []
    assert engine.manager.arena.used_bytes == 0


def test_twins_that_were_cold_together_leave_one_copy() -> None:
    engine = make_engine()
    for name in (1, 2):
        engine.start(name, 410, DOCUMENT)
    engine.extend({1: 410, 2: 410})
    for name in (1, 2):
        engine.finish(name, publish=True)
    assert engine.problems() == []
    assert engine.state.ledger.kept.num_pages == 50 + 1 + 1


def test_a_burst_into_a_full_pool_reuses_no_wrong_byte_and_retracts_nobody() -> None:
    engine = make_engine(kv_tokens=900)
    written: dict[int, int] = {}
    texts = [Text(document, 200) for document in range(1, 6)]
    retracted = 0
    waiting = [Waiting(name, 240, texts[name % 5], new=20) for name in range(1, 31)]
    steps: dict[int, int] = {}
    while waiting or engine.running:
        chunks = engine.admit(waiting, 512)
        waiting = [request for request in waiting if request.name not in chunks]
        for name in chunks:
            shared = engine.running[name].pages[: engine.running[name].shared]
            assert kept_codes(engine, shared[1:]) == [written[page] for page in shared[1:]]
        if chunks:
            engine.extend(chunks)
        for name, request in engine.running.items():
            if request.stored >= request.prompt:
                steps.setdefault(name, 0)
        names = list(steps)
        while not engine.can_decode(names):
            retracted += 1
            engine.finish(names.pop())
        if names:
            engine.decode(names)
        for name in names:
            steps[name] += 1
            if steps[name] == 20:
                del steps[name]
                pages = list(engine.running[name].pages)
                engine.finish(name, publish=True)
                pages = [page for page in pages[1:] if page in engine.tree.pages()]
                for page, checksum in zip(pages, kept_codes(engine, pages), strict=True):
                    assert written.setdefault(page, checksum) == checksum
        for page in set(written) - set(engine.tree.pages()):
            del written[page]
        assert engine.problems() == []
    assert retracted == 0


def test_what_is_kept_makes_room_first_then_what_requests_would_leave() -> None:
    engine = make_engine(kv_tokens=740)
    ledger = engine.state.ledger

    def rights() -> int:
        return min(ledger.publishable(r.row) for r in engine.running.values())

    serve(engine, 1, 400)
    assert ledger.kept.num_pages == 55
    names = [2, 3, 4]
    for name in names:
        engine.extend(engine.admit([Waiting(name, 160, Text(name, 160), new=400)], 512))
        assert engine.running[name].stored == 160
    order = []
    while engine.running[names[0]].stored < 560:
        assert engine.can_decode(names), "room was made for all that was admitted"
        engine.decode(names)
        assert engine.problems() == []
        order.append((ledger.kept.num_pages > 0, rights() > 70))
    # Kept pages go while nobody leaves less; only then does anybody.
    assert order == sorted(order, reverse=True)
    assert (True, False) not in order
    assert order[0] == (True, True)
    assert order[-1] == (False, False)
    for name in names:
        engine.finish(name, publish=True)
        assert engine.problems() == []
    assert 0 < ledger.kept.num_pages < len(names) * 70


def test_kept_pages_count_their_bytes_once_and_locked_ones_apart() -> None:
    kept = make_engine().state.ledger.kept
    kept.keep([3, 4, 5], Keep.CODES)
    kept.keep([6], Keep.FULL)
    codes, full = kept.bytes_of([3]), kept.bytes_of([6])
    assert kept.num_bytes == 3 * codes + full
    kept.lock([3, 6])
    kept.lock([3])
    assert kept.locked_bytes == codes + full
    assert kept.bytes_to_lock([3, 4, 6]) == codes
    kept.unlock([3, 6])
    assert kept.locked_bytes == codes
    kept.unlock([3])
    kept.drop([3, 4])
    assert (kept.num_pages, kept.num_bytes, kept.locked_bytes) == (2, codes + full, 0)
    assert kept.num_full([6, 5, 6]) == 1


def test_a_request_that_ends_just_beyond_min_context_never_makes_more_than_it_claims() -> None:
    """Its last interval ends at min_context, where nothing is routed, so it has no codes yet."""
    engine = make_engine()
    for name, prompt in enumerate(range(88, 118), 1):
        # `MiniEngine` looks at each copy that is made.
        serve(engine, name, prompt, Text(name, 640), steps=113 - prompt if prompt < 113 else 1)
        assert engine.problems() == []


def test_rights_that_were_given_up_leave_every_row_with_what_it_is_granted() -> None:
    """Right after a prefill a row is granted less than a smaller right would make of it anew."""
    for prompt in range(113, 220, 3):
        engine = make_engine(kv_tokens=740)
        engine.start(1, prompt, Text(1, 640))
        prefill(engine, 1)
        ledger = engine.state.ledger
        row = engine.running[1].row
        before, promised = ledger.total_bytes, ledger.total_if_decoded([row])
        ledger.limit_publishing(lambda: 1)
        assert ledger.publishable(row) == 0
        assert ledger.total_bytes <= min(before, promised)
