"""Tenants with salts: each is routed and answered as if it were alone, and shares nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mini_engine import SMALL, MemoryStore, MiniEngine, Text
from qevict_kernels import make_kernels
from qevict_tiers.config import Heads, Promotion, TieringConfig
from qevict_tiers.spill.keys import KeySpace, Kind, LayerSpan
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.records import Contents, Record
from qevict_tiers.spill.store import SpillStore

DOCUMENT = Text(document=1, tokens=400)
MINE, OTHERS = 1, (2, 3)
"""Salts."""


def make_engine(store: MemoryStore | None = None, **options: Any) -> MiniEngine:
    return MiniEngine(
        lambda g, r: make_kernels(g, r, torch.device("cpu")),
        TieringConfig(**{**SMALL, **options}),
        Heads(4, 2, 64),
        kv_tokens=6000,
        context=640,
        store=store,
    )


class Seen(NamedTuple):
    """Of one tenant's requests: cached tokens, tiers and scores after each launch, all outputs."""

    cached: list[int]
    tiers: list[torch.Tensor]
    scores: list[torch.Tensor]
    outputs: list[torch.Tensor]


def serve(engine: MiniEngine, salts: tuple[int, ...], shift: int = 0) -> Seen:
    """Two turns of each tenant about the same document, all in the same batches.

    ``shift``: by how much others ask shorter questions. Returns what the tenant ``MINE`` sees.
    """
    seen = Seen([], [], [], [])
    for turn, prompt in enumerate((410, 440)):
        names = {salt: 10 * turn + salt for salt in salts}
        for salt, name in names.items():
            length = prompt if salt == MINE else prompt - shift * salt
            cached = engine.start(name, length, DOCUMENT._replace(salt=salt))
            if salt == MINE:
                seen.cached.append(cached)
        mine, batch = names[MINE], list(names.values())
        engine.extend({name: engine.running[name].prompt for name in batch})
        for step in range(40):
            engine.decode(batch if step % 2 else batch[::-1])
            row, tiers = engine.running[mine].row, engine.tiers(mine)
            seen.tiers.append(tiers)
            seen.scores.append(engine.manager.views.score[:, row, : tiers.shape[1]].clone())
        seen.outputs.extend(engine.outputs[mine])
        for name in batch:
            engine.finish(name, publish=True)
    assert engine.problems() == []
    return seen


@pytest.mark.parametrize(
    ("promote", "spills"),
    [
        (Promotion.ALIAS, False),
        (Promotion.DEQUANTIZE, False),
        (Promotion.ALIAS, True),
        (Promotion.RESTORE, True),
    ],
)
def test_a_tenant_is_routed_and_answered_bit_for_bit_as_alone(
    promote: Promotion, spills: bool
) -> None:
    """Others ask about the same document, under salts of their own, and have warmed it before."""
    alone, among = (
        make_engine(MemoryStore() if spills else None, promote=promote) for _ in range(2)
    )
    expected = serve(alone, (MINE,))
    among.start(99, 410, DOCUMENT._replace(salt=OTHERS[0]))
    among.extend({99: 410})
    among.finish(99, publish=True)
    found = serve(among, (OTHERS[0], MINE, OTHERS[1]), shift=7)
    assert found.cached == expected.cached == [0, 400]
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert len(mine) == len(theirs) > 0
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_tenants_of_the_same_text_have_pages_copies_and_records_of_their_own() -> None:
    stores = [MemoryStore(), MemoryStore()]
    one, three = (make_engine(store) for store in stores)
    serve(one, (MINE,))
    serve(three, (MINE, *OTHERS))
    pages = [three.tree.match(_page_keys(three, salt)) for salt in (MINE, *OTHERS)]
    assert [len(of_tenant) for of_tenant in pages] == [50] * 3
    assert len(set().union(*pages)) == 150
    assert three.manager.arena.used_bytes == 3 * one.manager.arena.used_bytes > 0
    assert len(stores[1].records) == 3 * len(stores[0].records) > 0
    assert set(stores[0].records) < set(stores[1].records)


def _page_keys(engine: MiniEngine, salt: int) -> list[Any]:
    """Of the document, as the tree tells them apart."""
    window = engine.geometry.window
    return [(salt, *([-DOCUMENT.document] * window)) for _ in range(DOCUMENT.tokens // window)]


def test_a_spill_file_has_each_tenants_records_and_names_none(tmp_path: Path) -> None:
    space = KeySpace("model", "bfloat16", window=8)
    store = SpillStore(LocalMedium(tmp_path, space, 64 << 20, persist=True))
    salts = ["tenant-one-secret", "tenant-two-secret"]
    payload, contents = b"\xa5" * 4096, Contents(Kind.ORIGINAL, 8, 0)
    keys = []
    for salt in salts:
        chain = space.chain(salt, "adapter-secret")
        chain.extend(range(8))
        keys.append(chain.key(0, LayerSpan(0, 2), Kind.ORIGINAL))
    assert store.put([Record(key, payload, contents) for key in keys]).result(10) == 2
    store.close()
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert data.count(payload) == len(salts)
    for secret in (*salts, "adapter-secret"):
        assert secret.encode() not in data
