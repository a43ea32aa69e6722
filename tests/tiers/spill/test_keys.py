"""What two records must share to have one key, and what keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict_tiers.config import ByteSize, TieringConfig
from qevict_tiers.spill.keys import KeySpace, Kind, LayerSpan, SpillKey, model_fingerprint

SPACE = KeySpace(model="m", dtype="bfloat16", window=4)
LAYERS = LayerSpan(0, 30)
TOKENS = list(range(8))


def the_key(
    space: KeySpace = SPACE,
    salt: str | None = None,
    extra: str | None = None,
    tokens: list[int] = TOKENS,
    layers: LayerSpan = LAYERS,
    kind: Kind = Kind.ORIGINAL,
) -> SpillKey:
    """Of the last window."""
    chain = space.chain(salt, extra)
    chain.extend(tokens)
    return chain.key(len(tokens) // space.window - 1, layers, kind)


def test_any_difference_gives_another_key() -> None:
    others = [
        the_key(),
        the_key(replace(SPACE, model="n")),
        the_key(replace(SPACE, dtype="float16")),
        the_key(replace(SPACE, window=8)),
        the_key(replace(SPACE, tp_size=2)),
        the_key(replace(SPACE, tp_rank=1, tp_size=2)),
        the_key(replace(SPACE, made="budget=0.1")),
        the_key(replace(SPACE, made="budget=0.1"), salt="a"),
        the_key(salt="a"),
        the_key(salt=""),
        the_key(extra="a"),
        the_key(salt="a", extra="a"),
        the_key(tokens=[*TOKENS[:-1], 99]),
        the_key(tokens=[99, *TOKENS[1:]]),
        the_key(tokens=TOKENS[4:]),
        the_key(layers=LayerSpan(0, 29)),
        the_key(layers=LayerSpan(1, 30)),
        the_key(kind=Kind.CODES),
    ]
    assert all(a != b for a, b in combinations(others, 2))
    assert {len(key) for key in others} == {32}


def test_records_made_otherwise_share_the_file() -> None:
    assert replace(SPACE, made="budget=0.1").fingerprint == SPACE.fingerprint
    assert replace(SPACE, window=8).fingerprint != SPACE.fingerprint


@given(st.lists(st.text(max_size=4) | st.none(), min_size=4, max_size=4))
def test_tenants_never_meet(texts: list[str | None]) -> None:
    salt, extra, other_salt, other_extra = texts
    same = (salt, extra) == (other_salt, other_extra)
    assert (the_key(salt=salt, extra=extra) == the_key(salt=other_salt, extra=other_extra)) == same


@given(st.lists(st.integers(0, 2**31 - 1), min_size=12, max_size=12), st.integers(0, 3))
def test_a_chain_is_the_same_however_it_was_extended(tokens: list[int], cut: int) -> None:
    whole, parts = SPACE.chain("s", None), SPACE.chain("s", None)
    whole.extend(tokens)
    parts.extend(tokens[: 4 * cut])
    parts.extend(np.array(tokens[4 * cut :], dtype=np.int32))
    assert whole.hashes == parts.hashes
    assert len(whole.hashes) == 3


def test_a_window_is_named_by_all_tokens_before_it_and_none_after() -> None:
    first, second = SPACE.chain(None, None), SPACE.chain(None, None)
    first.extend([1, 2, 3, 4, 5, 6, 7, 8])
    second.extend([1, 2, 3, 4, 5, 6, 7, 9])
    assert first.hashes[0] == second.hashes[0]
    assert first.hashes[1] != second.hashes[1]


def test_a_chain_grows_by_whole_windows() -> None:
    with pytest.raises(ValueError, match="whole windows of 4 tokens"):
        SPACE.chain(None, None).extend([1, 2, 3])


def test_a_fine_tuned_model_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000_000))
    base = model_fingerprint(tmp_path)
    assert model_fingerprint(tmp_path) == base
    assert model_fingerprint(tmp_path, "rope", 2.0) != base
    tuned = bytearray(1_000_000)
    tuned[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(tuned)
    assert model_fingerprint(tmp_path) != base
    with pytest.raises(ValueError, match="holds no model"):
        model_fingerprint(tmp_path / "..")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"spill_backend": "tape"},
            "--kv-tiering-spill-backend must be one of local, file, mooncake, nixl, hf3fs, "
            "lmcache, dynamic, got tape",
        ),
        (
            {"ssd_dir": Path("/d"), "spill_backend": "file"},
            "--kv-tiering-ssd-dir must be left out with --kv-tiering-spill-backend file, which has "
            "its own place, got /d",
        ),
        (
            {"ssd_size": ByteSize(1 << 20)},
            "--kv-tiering-ssd-size must be 64M or more, got 1M",
        ),
        (
            {"spill_config": '{"a": 1}'},
            "--kv-tiering-spill-config must be left out with --kv-tiering-spill-backend local, "
            'got {"a": 1}',
        ),
        (
            {"spill_backend": "file", "spill_config": "{a}"},
            "--kv-tiering-spill-config must be a JSON object, got {a}",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        TieringConfig(**options)  # type: ignore[arg-type]
    assert str(error.value) == message
