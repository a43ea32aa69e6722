"""What is noted of a run: one record for each request, one sample of the server each second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sglang_qevict.stress.mix import Mix

__all__ = ["Outcome", "Record", "Run", "Sample", "flat_tiering"]


class Outcome(Enum):
    """How a request ended."""

    DONE = "done"
    ABORTED = "aborted"  # by its own client, as planned
    REFUSED = "refused"  # the server answered with an error
    LOST = "lost"  # the connection broke
    TIMEOUT = "timeout"
    CUT = "cut"  # the run ended first

    @property
    def is_error(self) -> bool:
        """It failed."""
        return self in (Outcome.REFUSED, Outcome.LOST, Outcome.TIMEOUT)


@dataclass(frozen=True)
class Record:
    """One request.

    at_seconds: when it was sent, since the beginning. first_seconds: until its first token came.
    latency_seconds: until its last. ended_seconds: until its client was done with it, however it
    ended. token_seconds: mean time of a token after the first ones to come. gap_seconds: the
    longest wait within the answer. check: share of the answer that is right, None if nothing is
    asked for. prompt_hash: of all tokens of the prompt.
    """

    tenant: str
    session: int
    turn: int
    outcome: Outcome
    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    prompt_hash: str
    output_ids: tuple[int, ...] = ()
    first_seconds: float | None = None
    latency_seconds: float | None = None
    ended_seconds: float = 0.0
    token_seconds: float | None = None
    gap_seconds: float | None = None
    cached_tokens: int = 0
    retractions: int = 0
    check: float | None = None
    error: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """Which request of the mix it is."""
        return self.tenant, self.session, self.turn

    @property
    def wait_seconds(self) -> float | None:
        """Until its first token, or until nobody waited for it any more; None if it was refused or
        lost before."""
        if self.first_seconds is None and self.outcome in (Outcome.TIMEOUT, Outcome.CUT):
            return self.ended_seconds
        return self.first_seconds

    def as_json(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {**self.__dict__, "outcome": self.outcome.value, "output_ids": list(self.output_ids)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The record that ``as_json`` wrote; ``KeyError``, ``TypeError``, ``ValueError`` if not."""
        ids = tuple(int(i) for i in data["output_ids"])
        return cls(**{**data, "outcome": Outcome(data["outcome"]), "output_ids": ids})


@dataclass(frozen=True)
class Sample:
    """The server at one moment.

    running, waiting: requests with and without a first token, as clients see it. tiering:
    `/server_info`'s `kv_tiering` by ``flat_tiering``, empty without tiers. metrics: some of
    `/metrics`, empty without ``--enable-metrics``. churn: of tenants, (sum, observations).
    """

    at_seconds: float
    running: int
    waiting: int
    tokens: int
    tiering: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    churn: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that was measured. alone: the same requests served alone, or nothing.

    alone_moves: windows that moved while a tenant was served alone, by tenant and counter.
    notes: what a reader has to know. died: why the server counts as dead. stopped: by a user.
    """

    mix: Mix
    facts: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    alone: list[Record] = field(default_factory=list)
    alone_moves: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    died: str = ""
    stopped: bool = False


def flat_tiering(states: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers of `kv_tiering` of all replicas added up; empty where there are no tiers.

    ``windows.full``, ``.coded`` and ``.evicted`` over all layers, ``bytes.*`` and ``counters.*``.
    """
    total: dict[str, float] = {}
    for state in states:
        tiering = state.get("kv_tiering")
        if not tiering:
            continue
        numbers = {f"windows.{tier}": float(sum(n)) for tier, n in tiering["layers"].items()}
        for group in ("bytes", "counters"):
            numbers.update({f"{group}.{key}": float(n) for key, n in tiering[group].items()})
        for key, number in numbers.items():
            total[key] = total.get(key, 0.0) + number
    return total
