"""The SSD tier: originals of windows are written behind, and come back when a request begins alike.

A window's original is taken once, with all layers in one record, when it is about to be ranked for
the first time (until then it was protected, so it is FULL in every layer), or when its request
finishes. What is known of lengths decides, so all ranks of a tensor-parallel group write the same
windows. A record is named by the hash of all tokens up to the window's end, so it is found by
whoever begins alike, whatever became of the request and of its pages.

A request whose beginning is in the store is *recalled*: before it is admitted, the originals are
read into host memory; its first launch puts them into FULL copies of its own, layer by layer where
it can, and the new tokens attend to them as if they had been computed. It shares nothing, and is
routed afresh.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from sglang.srt.runtime_context import get_parallel

from qevict_tiers.config import PrefixFidelity, Promotion, TieringConfig
from qevict_tiers.manager import AtHand, TierManager
from qevict_tiers.spill.file import DirectoryInUse
from qevict_tiers.spill.format import RECORD_HEADER_BYTES
from qevict_tiers.spill.keys import KeyChain, KeySpace, Kind, LayerSpan, SpillKey, model_fingerprint
from qevict_tiers.spill.local import LocalMedium
from qevict_tiers.spill.medium import Medium, OneLine
from qevict_tiers.spill.records import Contents, Reading, ReadStatus, Record
from qevict_tiers.spill.store import SpillStore
from sglang_qevict.flags import OPTIONS, typed
from sglang_qevict.spill_hicache import HiCacheMedium

__all__ = [
    "BreakEven",
    "NoSpill",
    "Recall",
    "RecallCounters",
    "SpillTier",
    "SpilledRequest",
    "open_spill",
]

logger = logging.getLogger(__name__)

QUEUE_BYTES = 512 << 20
"""Originals that may wait in memory to be written; what comes beyond is dropped and counted."""

_MAX_READS = 1 << 16
"""More windows than a request has: a recall reads all of them at once."""


class Recall(Enum):
    """What became of a request whose beginning is in the store; all but RECALLED compute it.

    NOT_WORTH_IT: reading would have taken longer. LATE: it was not read in time. DAMAGED, FOREIGN,
    GONE, FAILED: a record had a wrong checksum, was of another size, had made room since it was
    found, or the read failed. NO_ROOM: a rank had no pages or no memory for it. OTHER_RANK: this
    rank has it all, and another one has not.
    """

    RECALLED = "recalled"
    NOT_WORTH_IT = "not_worth_it"
    LATE = "late"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    GONE = "gone"
    FAILED = "failed"
    NO_ROOM = "no_room"
    OTHER_RANK = "other_rank"


_FAILURES = {
    ReadStatus.CORRUPT: Recall.DAMAGED,
    ReadStatus.WRONG_SIZE: Recall.FOREIGN,
    ReadStatus.ERROR: Recall.FAILED,
    ReadStatus.MISS: Recall.GONE,
    ReadStatus.LATE: Recall.LATE,
    ReadStatus.BUSY: Recall.LATE,
}
"""What a reading makes of a recall; of several the first one here."""


@dataclass
class RecallCounters:
    """What recalls did, since the start. ``windows`` are those of ``requests``, in all layers."""

    requests: Counter[Recall] = field(default_factory=Counter)
    windows: Counter[Recall] = field(default_factory=Counter)
    bytes: int = 0
    """Of what was recalled."""
    nanoseconds: int = 0
    """Time for which admission waited for reads."""
    prefetched: int = 0
    """Windows read because they came near the FULL tier (``--kv-tiering-promote restore``)."""
    late: int = 0
    """Windows that were still being read at a routing event, and stayed coded."""
    no_memory: int = 0
    """Times that there was no memory for originals: these were neither written nor read."""

    def add(self, recall: Recall, windows: int) -> None:
        """One request that has so many windows in the store."""
        self.requests[recall] += 1
        self.windows[recall] += windows

    def report(self) -> dict[str, Any]:
        """All of them by name, with all that may become of a request."""
        return {
            "requests": {recall.value: self.requests[recall] for recall in Recall},
            "windows": {recall.value: self.windows[recall] for recall in Recall},
            "bytes": self.bytes,
            "nanoseconds": self.nanoseconds,
            "prefetched": self.prefetched,
            "late": self.late,
            "no_memory": self.no_memory,
        }


TokensOf = Callable[[int, int], Sequence[int]]
"""Tokens of a request from a position up to another, as far as they are known."""


class SpilledRequest:
    """What the store has and gets of one request."""

    def __init__(self, chain: KeyChain, layers: LayerSpan, tokens: TokensOf) -> None:
        self._chain = chain
        self._layers = layers
        self._tokens = tokens
        self._keys: list[SpillKey] = []
        self.recalled = 0
        """Its first windows that come from the store."""
        self.originals: torch.Tensor | None = None
        """Those, uint8 ``[windows, L, bytes]``, until its first launch has put them in place."""
        self.written = 0
        """Its first windows that need not be written any more."""
        self.is_not_worth_it = False
        """Whether it was found to be computed faster than read."""

    def keys(self, windows: range) -> list[SpillKey]:
        """Names of windows, fewer if the host does not know all tokens of them yet."""
        known = len(self._keys)
        if windows.stop > known:
            size = self._chain.window
            tokens = self._tokens(known * size, windows.stop * size)
            self._chain.extend(tokens[: len(tokens) // size * size])
            self._keys += [
                self._chain.key(window, self._layers, Kind.ORIGINAL)
                for window in range(known, len(self._chain.hashes))
            ]
        return self._keys[windows.start : windows.stop]


@dataclass
class _Taken:
    """Originals on their way to the store, layer by layer: uint8 ``[windows, L, bytes]``."""

    request: SpilledRequest
    row: int
    windows: range
    keys: list[SpillKey]
    originals: torch.Tensor


class _Prefetched(NamedTuple):
    """One window's original on its way into memory, uint8 ``[L, bytes]``."""

    original: torch.Tensor
    reading: Future[list[Reading]]
    place: int
    """Among the windows that were read together."""

    @property
    def is_there(self) -> bool:
        """Whether it can be used."""
        return self.reading.done() and self.reading.result()[self.place].status is ReadStatus.HIT


class BreakEven:
    """Whether reading windows is faster than computing them, from what both took lately.

    Nothing measured means that it is. A measurement counts for ``memory_seconds``, so that a disk
    that was slow once is tried again.
    """

    def __init__(self, memory_seconds: float = 60) -> None:
        self._memory_seconds = memory_seconds
        self._bytes_per_second: float | None = None
        self._read_at = 0.0
        self._tokens_per_second: float | None = None

    def read(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were read in so long."""
        self._bytes_per_second, self._read_at = num_bytes / max(seconds, 1e-9), time.monotonic()

    def computed(self, tokens: int, seconds: float) -> None:
        """So many tokens of a prompt were computed in so long."""
        self._tokens_per_second = tokens / max(seconds, 1e-9)

    def is_worth_it(self, num_bytes: int, tokens: int) -> bool:
        """Whether to read so many bytes instead of computing so many tokens."""
        if self._bytes_per_second is None or self._tokens_per_second is None:
            return True
        if time.monotonic() - self._read_at > self._memory_seconds:
            return True
        return num_bytes / self._bytes_per_second < tokens / self._tokens_per_second

    def patience_seconds(self, tokens: int) -> float:
        """How long a read may take: as long as it takes to compute the tokens."""
        if self._tokens_per_second is None:
            return _FIRST_READ_SECONDS
        return min(_LONGEST_READ_SECONDS, tokens / self._tokens_per_second)


_LONGEST_READ_SECONDS = 5.0

_FIRST_READ_SECONDS = 1.0
"""How long a read may take on a server that has not computed a prompt yet."""

_FEWEST_TIMED_TOKENS = 256
"""Launches of fewer tokens say little of how long a prefix takes."""

_CHANGING_FLAGS = (
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "revision"),
    "json_model_override_args",
)
"""Flags of SGLang's under which the same files give other keys and values."""

_LOOKUP_SECONDS = 0.2
"""How long admission waits to hear what a storage backend has; the local store says it at once."""

_NEAR_SHARE = 0.75
"""Of the least score of a FULL window: from there on a coded window is read beforehand."""

_PREFETCH_SPARE = 4
"""Windows that are read beyond what FULL has room for."""


class NoSpill:
    """No SSD tier: nothing is written, and nothing comes back."""

    def request(
        self,
        salt: str | None,
        extra_key: str | None,
        tokens: TokensOf,
        made: str = "",
        is_lasting: bool = True,
    ) -> SpilledRequest | None:
        """A request's windows, whose tokens so far ``tokens`` gives whenever it is asked.

        ``made``: what else its keys and values depend on, beside the server's options.
        ``is_lasting``: False where they depend on what another process may find changed.
        """
        return None

    def find(self, request: SpilledRequest, windows: int, matched: int) -> int:
        """How many of its first windows to recall, 0 for none.

        ``windows``: that it could use. ``matched``: that memory has for it.
        """
        return 0

    def read(self, request: SpilledRequest, windows: int, wanted: bool = True) -> bool:
        """Read the originals of its first windows into memory; False if not all came in time.

        ``wanted``: False if this rank has no use for them, so that no rank has.
        """
        return False

    def open(self, row: int, request: SpilledRequest | None, shared: int) -> None:
        """A row begins, whose first windows are ``shared``, or recalled."""

    def close(self, row: int) -> None:
        """A row ends."""

    def recalled(self, row: int) -> int:
        """First windows of a row that come from the store and are not in place yet."""
        return 0

    def restore(self, layers: slice, row: int) -> None:
        """Put recalled originals into a row's FULL copies; the last layer frees them."""

    def take(self, layers: slice, due: Sequence[tuple[int, int]]) -> None:
        """Take the originals of what is about to be ranked for the first time.

        ``due``: rows and how many tokens of them are ranked. Layers come in order, each once.
        """

    def finish(self, row: int, windows: int) -> None:
        """A row ends well: take what is left of its first windows, all FULL in all layers."""

    def at_hand(self, rows: Sequence[int]) -> AtHand | None:
        """What a routing event of these rows may put back into FULL copies."""
        return None

    def prefetch(self, due: Sequence[tuple[int, int]]) -> None:
        """After a routing event: read what may be FULL at the next one, forget the rest."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A launch has computed so many tokens of prompts in so long."""

    def forget_rows(self) -> None:
        """All rows are gone (a flush); what is in the store stays."""

    def weights_changed(self) -> None:
        """From now on nothing is found that other weights have made."""

    def decide_with(self, group: Any) -> None:
        """Decide as all ranks of a ``torch.distributed`` group: by what the least of them has."""

    def report(self) -> dict[str, Any] | None:
        """What the store holds and did, for ``/server_info``."""
        return None


@dataclass
class SpillTier(NoSpill):
    """Writes originals behind and recalls them, for one rank.

    layers: those of the model that this rank has. The store's threads are the only ones that wait
    for the disk, save that admission waits for the reads of a recall, no longer than it saves.
    """

    manager: TierManager
    store: SpillStore
    space: KeySpace
    layers: LayerSpan

    def __post_init__(self) -> None:
        self.break_even = BreakEven()
        self.counters = RecallCounters()
        self._group: Any = None
        self._rows: dict[int, SpilledRequest] = {}
        self._taken: list[_Taken] = []
        budget = self.manager.budget
        self._window = budget.config.window
        self._record_bytes = budget.num_layers * budget.full_bytes
        self._fidelity = budget.config.prefix_fidelity
        self._restores = budget.config.promote is Promotion.RESTORE
        self._prefetched: dict[int, dict[int, _Prefetched]] = {}
        self._warn = OneLine()
        self._process = secrets.token_hex(16)

    # -- what is in the store ---------------------------------------------------------

    def request(
        self,
        salt: str | None,
        extra_key: str | None,
        tokens: TokensOf,
        made: str = "",
        is_lasting: bool = True,
    ) -> SpilledRequest:
        space = self._space(made, "" if is_lasting else self._process)
        return SpilledRequest(space.chain(salt, extra_key), self.layers, tokens)

    def weights_changed(self) -> None:
        self.space = self._space(secrets.token_hex(16))

    def _space(self, *made: str) -> KeySpace:
        """That of the server, or of what was made otherwise in these ways, too."""
        if not any(made):
            return self.space
        return replace(self.space, made=" ".join(filter(None, (self.space.made, *made))))

    def find(self, request: SpilledRequest, windows: int, matched: int) -> int:
        keys = request.keys(range(windows))
        found = self._contains(keys)
        count = found.index(False) if False in found else len(found)
        enough = matched if self._fidelity is PrefixFidelity.FULL else matched + 1
        worth = self.break_even.is_worth_it(count * self._record_bytes, count * self._window)
        if count and count >= enough and not worth and not request.is_not_worth_it:
            request.is_not_worth_it = True
            self.counters.add(Recall.NOT_WORTH_IT, count)
        count = self._least(count if worth else 0)
        return count if count >= enough else 0

    def _contains(self, keys: Sequence[SpillKey]) -> list[bool]:
        """Which are in the store; none if it takes too long to say."""
        try:
            return self.store.contains(keys).result(_LOOKUP_SECONDS)
        except FutureTimeout:
            return [False] * len(keys)

    def read(self, request: SpilledRequest, windows: int, wanted: bool = True) -> bool:
        originals = self._buffer(windows) if wanted else None
        if not self._least(int(originals is not None)):
            self.counters.add(Recall.NO_ROOM, windows)
            return False
        assert originals is not None
        began = time.monotonic()
        patience = self.break_even.patience_seconds(windows * self._window)
        reading = self.store.get(
            request.keys(range(windows)), list(originals), deadline_seconds=patience
        )
        try:
            recall = _recall_of(reading.result(patience))
        except FutureTimeout:
            recall = Recall.LATE
        seconds = time.monotonic() - began
        self.break_even.read(originals.nbytes, seconds)
        self.counters.nanoseconds += int(seconds * 1e9)
        is_whole = recall is Recall.RECALLED
        if not self._least(int(is_whole)):
            self.counters.add(Recall.OTHER_RANK if is_whole else recall, windows)
            return False
        request.recalled = request.written = windows
        request.originals = originals
        self.counters.add(recall, windows)
        self.counters.bytes += originals.nbytes
        return True

    # -- rows --------------------------------------------------------------------------

    def open(self, row: int, request: SpilledRequest | None, shared: int) -> None:
        if request is None:
            return
        request.written = max(shared, request.recalled)
        self._rows[row] = request

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        self._prefetched.pop(row, None)

    def recalled(self, row: int) -> int:
        request = self._rows.get(row)
        return request.recalled if request is not None and request.originals is not None else 0

    def restore(self, layers: slice, row: int) -> None:
        request = self._rows[row]
        assert request.originals is not None
        self.manager.restore(layers, row, request.originals[:, layers])
        if layers.stop == self.manager.num_layers:
            request.originals = None

    def take(self, layers: slice, due: Sequence[tuple[int, int]]) -> None:
        if layers.start == 0:
            history = self.manager.budget.history
            self._taken = [
                taken for row, tokens in due if (taken := self._begin(row, history(tokens)[1]))
            ]
        self._take(layers)

    def finish(self, row: int, windows: int) -> None:
        self._taken = [taken] if (taken := self._begin(row, windows)) else []
        self._take(slice(0, self.manager.num_layers))

    def at_hand(self, rows: Sequence[int]) -> AtHand | None:
        if not self._restores:
            return None
        windows = torch.zeros((len(rows), self.manager.views.tier.shape[-1]), dtype=torch.bool)
        for index, row in enumerate(rows):
            for window, one in self._prefetched.get(row, {}).items():
                windows[index, window] = one.is_there
                self.counters.late += not one.reading.done()
        return AtHand(windows, lambda index, window: self._prefetched[rows[index]][window].original)

    def prefetch(self, due: Sequence[tuple[int, int]]) -> None:
        if not self._restores:
            return
        for row, tokens in due:
            request = self._rows.get(row)
            if request is not None:
                most = self.manager.budget_of(row).capacities(tokens).full + _PREFETCH_SPARE
                near = self.manager.near_full(row, tokens, _NEAR_SHARE)[:most]
                self._prefetch(request, row, [w for w in near if w < request.written])

    def _prefetch(self, request: SpilledRequest, row: int, near: Sequence[int]) -> None:
        held = self._prefetched.get(row, {})
        kept = {window: held[window] for window in near if window in held}
        missing = [window for window in near if window not in held]
        keys = [key for window in missing for key in request.keys(range(window, window + 1))]
        if keys and (originals := self._buffer(len(missing))) is not None:
            reading = self.store.get(keys, list(originals))
            for place, window in enumerate(missing):
                kept[window] = _Prefetched(originals[place], reading, place)
            self.counters.prefetched += len(missing)
        self._prefetched[row] = kept

    def _begin(self, row: int, stop: int) -> _Taken | None:
        request = self._rows.get(row)
        if request is None or stop <= request.written:
            return None
        windows = range(request.written, stop)
        keys = request.keys(windows)
        windows = windows[: len(keys)]
        request.written = stop
        there = self.store.contains(keys)
        if not windows or (there.done() and all(there.result())):
            return None
        originals = self._buffer(len(windows))
        return None if originals is None else _Taken(request, row, windows, keys, originals)

    def _buffer(self, windows: int) -> torch.Tensor | None:
        """Host memory for the originals of so many windows, uint8 ``[windows, L, bytes]``."""
        budget = self.manager.budget
        try:
            return torch.empty((windows, budget.num_layers, budget.full_bytes), dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            self.counters.no_memory += 1
            self._warn("memory", "no memory for originals, the SSD tier goes without: %s", error)
            return None

    def _take(self, layers: slice) -> None:
        for taken in self._taken:
            taken.originals[:, layers] = self.manager.originals(layers, taken.row, taken.windows)
        if layers.stop < self.manager.num_layers:
            return
        for taken in self._taken:
            size = self._window
            self.store.put(
                [
                    Record(key, original, Contents(Kind.ORIGINAL, size, window * size))
                    for window, key, original in zip(
                        taken.windows, taken.keys, taken.originals, strict=True
                    )
                ]
            )
        self._taken = []

    def computed(self, tokens: int, seconds: float) -> None:
        if tokens >= _FEWEST_TIMED_TOKENS:
            self.break_even.computed(tokens, seconds)

    # -- the whole ---------------------------------------------------------------------

    def decide_with(self, group: Any) -> None:
        self._group = group if group.size() > 1 else None

    def _least(self, number: int) -> int:
        if self._group is None:
            return number
        shared = torch.tensor(number)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MIN, self._group)
        return int(shared)

    def forget_rows(self) -> None:
        self._rows.clear()
        self._prefetched.clear()
        self._taken = []

    def report(self) -> dict[str, Any]:
        return {
            "usage": self.store.usage()._asdict(),
            "counters": self.store.counters.read(),
            "recalls": self.counters.report(),
        }


def _recall_of(readings: Sequence[Reading]) -> Recall:
    """What became of a request with these readings."""
    found = {reading.status for reading in readings}
    return next((_FAILURES[status] for status in _FAILURES if status in found), Recall.RECALLED)


def open_spill(runner: Any, manager: TierManager, first_layer: int) -> SpillTier | None:
    """The SSD tier of SGLang's model runner, in a directory of its own; None where it is off.

    Raises ``ValueError`` with one sentence where the directory can't be used.
    """
    config, server_args = manager.budget.config, runner.server_args
    if not config.spills:
        return None
    parallel = get_parallel()
    rank, size = parallel.attn_tp_rank, parallel.attn_tp_size
    changes = [str(getattr(server_args, name)) for name in _CHANGING_FLAGS]
    space = KeySpace(
        _fingerprint(server_args.model_path, *changes),
        str(manager.full_arena.keys.dtype),
        config.window,
        tp_rank=rank,
        tp_size=size,
        made=_made_under(config),
    )
    medium = _medium(config, space, f"dp{parallel.dp_rank or 0}-tp{rank}", manager)
    store = SpillStore(medium, queue_bytes=QUEUE_BYTES, max_reads=_MAX_READS)
    layers = LayerSpan(first_layer, first_layer + manager.num_layers)
    return SpillTier(manager, store, space, layers)


def _medium(config: TieringConfig, space: KeySpace, rank: str, manager: TierManager) -> Medium:
    """Where records go; ``rank``: the name of a rank's own directory."""
    if config.ssd_dir is None:
        record_bytes = manager.num_layers * manager.budget.full_bytes
        # So that a record is one page.
        page_bytes = record_bytes + RECORD_HEADER_BYTES
        name, settings = config.spill_backend, config.spill_settings
        return HiCacheMedium(name, settings, page_bytes, persist=config.ssd_persist)
    try:
        return LocalMedium(
            config.ssd_dir / rank, space, int(config.ssd_size), persist=config.ssd_persist
        )
    except (OSError, DirectoryInUse) as error:
        raise ValueError(
            f"--kv-tiering-ssd-dir {config.ssd_dir} can't be used: {error}: name another directory"
        ) from None


def _made_under(config: TieringConfig) -> str:
    """The options that decide what attention sees, and so which keys and values come out.

    Those of generated tokens, and of prompts behind a coded prefix or routed in segments, come
    from attention to codes and without what was evicted. A request's own budget names its records
    itself.
    """
    elsewhere = ("ssd_", "spill_", "budget_limits", "tenants")
    seen = [option for option in OPTIONS if not option.field.startswith(elsewhere)]
    return " ".join(f"{option.field}={typed(getattr(config, option.field))}" for option in seen)


def _fingerprint(model: str, *changes: object) -> str:
    """Identity of a model that is a directory, or a name that SGLang has downloaded."""
    directory = Path(model)
    if not directory.is_dir():
        directory = Path(snapshot_download(model, local_files_only=True))
    return model_fingerprint(directory, *changes)
