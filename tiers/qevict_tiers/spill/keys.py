"""What names a spilled record: the model, the shape of what is kept, and all tokens so far.

Every key is a BLAKE2b digest over msgpack, which writes lengths and types down: no two different
lists of parts give the same bytes, so ("ab", "c") and ("a", "bc"), or None and "", never meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NewType

import msgpack
import numpy as np

__all__ = ["KeyChain", "KeySpace", "Kind", "LayerSpan", "SpillKey", "model_fingerprint"]

SpillKey = NewType("SpillKey", bytes)
"""32 bytes that name one record."""

ChainHash = NewType("ChainHash", bytes)
"""32 bytes that name all tokens of a request up to the end of one window, and its tenant."""

_DIGEST_BYTES = 32
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class Kind(Enum):
    """What the bytes of a record are: keys and values as computed, or their code."""

    ORIGINAL = "original"
    CODES = "codes"


class LayerSpan(NamedTuple):
    """Layers ``first`` up to, not including, ``stop``."""

    first: int
    stop: int


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(msgpack.packb(parts), digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True)
class KeySpace:
    """What all records of one store have in common; records of another one are never found.

    model: identity of the weights, see ``model_fingerprint``.
    dtype: of the originals, and the format of the codes beside it (``bfloat16+int2/2-uint8``).
    window: tokens a window (``W``).
    tp_rank, tp_size: which part of the heads.
    made: what else decides which keys and values come out, such as options under which attention
        sees less than everything. Records made otherwise share the file, and are never found.
    """

    model: str
    dtype: str
    window: int
    tp_rank: int = 0
    tp_size: int = 1
    made: str = ""

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that name the file; ``made`` is no part of them."""
        return _digest("space", self.model, self.dtype, self.window, self.tp_rank, self.tp_size)

    def chain(self, cache_salt: str | None, extra_key: str | None) -> KeyChain:
        """The chain of one request's tokens, at its beginning."""
        return KeyChain(self, cache_salt, extra_key)


class KeyChain:
    """The hashes of a request's windows, each over all tokens up to the window's end.

    Two requests with another ``cache_salt`` or ``extra_key`` differ from the first window on.
    """

    def __init__(self, space: KeySpace, cache_salt: str | None, extra_key: str | None) -> None:
        self.window = space.window
        self.hashes: list[ChainHash] = []
        self._root = ChainHash(
            _digest("chain", space.fingerprint, space.made, cache_salt, extra_key)
        )

    def extend(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Add whole windows: the token ids that follow those of before.

        Raises ``ValueError`` for a number of tokens that is no multiple of the window.
        """
        ids = np.ascontiguousarray(tokens, dtype="<i8")
        if ids.ndim != 1 or len(ids) % self.window:
            raise ValueError(
                f"a chain grows by whole windows of {self.window} tokens, got shape {ids.shape}"
            )
        last = self.hashes[-1] if self.hashes else self._root
        for window in ids.reshape(-1, self.window):
            last = ChainHash(_digest("window", last, window.tobytes()))
            self.hashes.append(last)

    def key(self, window: int, layers: LayerSpan, kind: Kind) -> SpillKey:
        """The key of a window's record; windows count from 0."""
        return SpillKey(_digest("record", self.hashes[window], *layers, kind.value))


def model_fingerprint(directory: Path, *settings: object) -> str:
    """Identity of a model from its files: 64 hexadecimal digits.

    Hashes the name, the size and evenly spaced samples of each JSON and weights file, so that it
    takes milliseconds and still tells a fine-tuned model from its base. ``settings`` is whatever
    else changes keys or values (overridden configuration, quantisation), as msgpack can write it.

    Raises ``ValueError`` where there is no such file.
    """
    suffixes = {".json", ".safetensors", ".bin", ".pt", ".gguf"}
    files = sorted(path for path in directory.iterdir() if path.suffix in suffixes)
    if not files:
        raise ValueError(f"{directory} holds no model: no file ends in {', '.join(suffixes)}")
    described = [(path.name, path.stat().st_size, *_samples(path)) for path in files]
    return _digest("model", described, settings).hex()


def _samples(path: Path) -> Iterator[bytes]:
    last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(last * sample // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
