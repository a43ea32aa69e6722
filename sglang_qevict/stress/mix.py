"""A mix of tenants, read from a YAML file: who sends what, how often.

What a file says is checked as a whole before anything is sent; ``Problem`` names the file, the key,
the value and the remedy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from sglang_qevict.stress.problem import Problem
from sglang_qevict.stress.trace import read_trace

__all__ = [
    "KIND_DEFAULTS", "MAX_LINES", "Arrival", "CheckKind", "Distribution", "Kind", "Mix", "Process",
    "Requirements", "Tenant", "TraceFile", "read_mix", "trace_mix",
]  # fmt: skip


MAX_LINES = 64
"""Of an oscillator, in each half."""


class Kind(Enum):
    """What a tenant's prompts look like; the values are those of the file."""

    CHAT = "chat"
    DOCUMENT = "document"
    AGENT = "agent"
    BATCH = "batch"
    OSCILLATOR = "oscillator"
    THRASHER = "thrasher"
    FLOODER = "flooder"
    TRACE = "trace"


class Process(Enum):
    """How sessions begin."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURSTS = "bursts"
    CLOSED = "closed"


class CheckKind(Enum):
    """What an answer is checked for: nothing, a planted fact, or lines to copy."""

    NONE = "none"
    NEEDLE = "needle"
    COPY = "copy"


@dataclass(frozen=True)
class Distribution:
    """Numbers at random, never below ``least`` nor above ``most``.

    shape: constant (value), uniform (both ends included), lognormal (median, sigma), exponential
    (mean) or choice (values, all alike likely).
    """

    shape: str
    values: tuple[float, ...]
    least: float
    most: float = math.inf

    def draw(self, rng: random.Random) -> float:
        """One number."""
        match self.shape:
            case "uniform":
                number = rng.uniform(*self.values)
            case "lognormal":
                number = rng.lognormvariate(math.log(self.values[0]), self.values[1])
            case "exponential":
                number = rng.expovariate(1 / self.values[0])
            case _:
                number = rng.choice(self.values)
        return min(max(number, self.least), self.most)

    def draw_count(self, rng: random.Random) -> int:
        """One number, rounded."""
        return round(self.draw(rng))


@dataclass(frozen=True)
class Arrival:
    """When sessions begin.

    rate: sessions a second (poisson, constant). size, every_seconds: of bursts. users: sessions of
    a closed loop at the same time, each followed by the next.
    """

    process: Process
    rate: float = 0.0
    size: int = 0
    every_seconds: float = 0.0
    users: int = 0


@dataclass(frozen=True)
class TraceFile:
    """A Mooncake trace. speed: how many times faster than recorded. scale: of all lengths."""

    path: Path
    speed: float = 1.0
    scale: float = 1.0
    block_tokens: int = 512


@dataclass(frozen=True)
class Tenant:
    """One tenant.

    prompt_tokens: of a session's first message, after the system prompt; turn_tokens: of each later
    one. think_seconds: from an answer to the next message, and in a closed loop to the next
    session. system: tenants that name the same one share it. salt: of the prefix cache; None shares
    it with all that have none. abort_rate: share of requests whose client leaves before the end.
    lines, period_tokens: an oscillator's. prefixes: how many a thrasher takes turns with.
    """

    name: str
    kind: Kind
    arrival: Arrival
    prompt_tokens: Distribution
    turn_tokens: Distribution
    output_tokens: Distribution
    turns: Distribution
    think_seconds: Distribution
    system: str
    system_tokens: int = 0
    priority: int | None = None
    salt: str | None = None
    abort_rate: float = 0.0
    check: CheckKind = CheckKind.NONE
    lines: int = 0
    period_tokens: int = 0
    prefixes: int = 0
    trace: TraceFile | None = None


@dataclass(frozen=True)
class Requirements:
    """What a run has to reach, or the exit status is 1; None asks for nothing.

    needle, copy: share of checked answers that are right. error_rate: at most this share fails.
    """

    needle: float | None = None
    copy: float | None = None
    error_rate: float | None = None


@dataclass(frozen=True)
class Mix:
    """A whole file.

    seconds: how long sessions begin. drain_seconds: how long requests may go on afterwards.
    request_seconds: how long one may take. baseline_sessions: of each tenant, served alone with
    ``--baseline``.
    """

    name: str
    tenants: tuple[Tenant, ...]
    seed: int = 0
    seconds: float = 60.0
    drain_seconds: float = 60.0
    request_seconds: float = 600.0
    baseline_sessions: int = 2
    require: Requirements = Requirements()


KIND_DEFAULTS: Mapping[Kind, Mapping[str, Any]] = {
    Kind.CHAT: {
        "arrival": {"process": "poisson", "rate": 0.2},
        "system_tokens": 128,
        "prompt_tokens": {"uniform": [40, 200]},
        "turn_tokens": {"uniform": [20, 80]},
        "output_tokens": {"lognormal": [96, 0.5], "max": 256},
        "turns": {"uniform": [1, 4]},
        "think_seconds": {"exponential": 2},
    },
    Kind.DOCUMENT: {
        "arrival": {"process": "poisson", "rate": 0.05},
        "prompt_tokens": {"uniform": [2000, 4000]},
        "output_tokens": 64,
        "turns": 2,
        "think_seconds": 1,
        "check": "needle",
    },
    Kind.AGENT: {
        "arrival": {"process": "closed", "users": 1},
        "system_tokens": 512,
        "prompt_tokens": {"uniform": [100, 300]},
        "turn_tokens": {"uniform": [60, 200]},
        "output_tokens": {"uniform": [16, 64]},
        "turns": {"uniform": [4, 10]},
        "think_seconds": 0.1,
    },
    Kind.BATCH: {
        "arrival": {"process": "bursts", "size": 8, "every_seconds": 30},
        "prompt_tokens": {"uniform": [300, 800]},
        "output_tokens": 256,
    },
    Kind.OSCILLATOR: {
        "arrival": {"process": "closed", "users": 1},
        "prompt_tokens": 2048,
        "output_tokens": 256,
        "lines": 4,
        "period_tokens": 8,
    },
    Kind.THRASHER: {
        "arrival": {"process": "constant", "rate": 1},
        "prompt_tokens": 512,
        "output_tokens": 8,
        "prefixes": 64,
    },
    Kind.FLOODER: {
        "arrival": {"process": "constant", "rate": 2},
        "prompt_tokens": {"uniform": [2000, 4000]},
        "output_tokens": 8,
    },
    # What a trace sends is in its own file.
    Kind.TRACE: {"prompt_tokens": 1, "output_tokens": 1},
}
"""What a kind takes where the file says nothing, written as the file would."""

_OF_ALL: Mapping[str, Any] = {"turns": 1, "think_seconds": 0, "turn_tokens": 48}
_ONLY = {
    "lines": Kind.OSCILLATOR, "period_tokens": Kind.OSCILLATOR, "prefixes": Kind.THRASHER,
    "trace": Kind.TRACE, "speed": Kind.TRACE, "scale": Kind.TRACE, "block_tokens": Kind.TRACE,
}  # fmt: skip
"""Keys that one kind alone has."""

_SAID_BY_TRACES = (
    "arrival", "prompt_tokens", "turn_tokens", "output_tokens", "turns", "think_seconds", "system",
    "system_tokens", "check",
)  # fmt: skip
"""Keys of a tenant that the file of a trace has the say in."""

_CHECKED = {Kind.CHAT, Kind.DOCUMENT, Kind.AGENT, Kind.BATCH}
_PROCESS_KEYS = {
    Process.POISSON: ("rate",),
    Process.CONSTANT: ("rate",),
    Process.BURSTS: ("size", "every_seconds"),
    Process.CLOSED: ("users",),
}
_SHAPES = {"uniform": 2, "lognormal": 2, "exponential": 1, "choice": 0}
"""How many numbers a shape takes; 0 is any number of them."""

_E = TypeVar("_E", bound=Enum)


def read_mix(path: Path) -> Mix:
    """The mix of a YAML file, or of a trace (``.jsonl``) replayed as it is.

    Raises ``Problem``.
    """
    if path.suffix == ".jsonl":
        return trace_mix(path)
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Problem(f"{path} can't be read ({reason}): name a mix, a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "somewhere"
        raise Problem(f"{path} is no YAML at {where}: mend it there") from None
    return _Reader(path).mix(content)


def trace_mix(path: Path) -> Mix:
    """One tenant that replays a trace at its own pace and lengths, to its end."""
    return _Reader(path).mix(
        {
            "seconds": read_trace(path)[-1].at_seconds + 1,
            "tenants": [{"name": "trace", "kind": "trace", "trace": str(path.resolve())}],
        }
    )


class _Reader:
    """Turns what YAML gives into a mix; every error names the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mix(self, content: Any) -> Mix:
        data = self._keys(content, "", (
            "seed", "seconds", "drain_seconds", "request_seconds", "baseline_sessions", "require",
            "tenants",
        ))  # fmt: skip
        entries = data.get("tenants")
        if not isinstance(entries, list) or not entries:
            raise self._wrong("tenants", "a list of one tenant or more", entries)
        tenants: list[Tenant] = []
        for number, entry in enumerate(entries):
            tenants += self._tenants(entry, f"tenants[{number}]")
        names = [tenant.name for tenant in tenants]
        for name in names:
            if names.count(name) > 1:
                raise Problem(f"{self._path}: two tenants are called {name!r}: rename one")
        share = self._between(0, 1)
        require = self._keys(data.get("require", {}), "require", ("needle", "copy", "error_rate"))
        return Mix(
            name=self._path.stem,
            tenants=tuple(tenants),
            seed=self._integer(-(2**63))(data.get("seed", 0), "seed"),
            seconds=self._positive(data.get("seconds", 60), "seconds"),
            drain_seconds=self._between(0, math.inf)(
                data.get("drain_seconds", 60), "drain_seconds"
            ),
            request_seconds=self._positive(data.get("request_seconds", 600), "request_seconds"),
            baseline_sessions=self._integer(1)(
                data.get("baseline_sessions", 2), "baseline_sessions"
            ),
            require=Requirements(
                **{key: share(value, f"require.{key}") for key, value in require.items()}
            ),
        )

    def _tenants(self, entry: Any, where: str) -> list[Tenant]:
        """The tenants of one entry: ``count`` of them, with numbers behind the name."""
        data = self._keys(entry, where, (
            "name", "kind", "count", "arrival", "prompt_tokens", "turn_tokens", "output_tokens",
            "turns", "think_seconds", "system", "system_tokens", "priority", "salt", "abort_rate",
            "check", *_ONLY,
        ))  # fmt: skip
        kind = self._member(Kind, data.get("kind"), f"{where}.kind")
        name = self._text(data.get("name", kind.value), f"{where}.name")
        for key in data:
            if _ONLY.get(key, kind) is not kind:
                raise Problem(
                    f"{self._path}: {where}.{key} is for kind {_ONLY[key].value} only, not "
                    f"{kind.value}: leave it out"
                )
            if kind is Kind.TRACE and key in _SAID_BY_TRACES:
                raise Problem(f"{self._path}: {where}.{key} is what the trace says: leave it out")
        count = self._integer(1)(data.get("count", 1), f"{where}.count")
        data = {**_OF_ALL, **KIND_DEFAULTS[kind], **data}
        names = [f"{name}-{number}" for number in range(1, count + 1)] if count > 1 else [name]
        return [self._tenant(one, kind, data, where) for one in names]

    def _tenant(self, name: str, kind: Kind, data: Mapping[str, Any], where: str) -> Tenant:
        def tokens(key: str) -> Distribution:
            return self._distribution(data[key], f"{where}.{key}", least=1)

        def number(key: str, least: int, most: float = math.inf) -> int:
            return self._integer(least, most)(data.get(key, 0), f"{where}.{key}")

        trace = self._trace(data, where) if kind is Kind.TRACE else None
        priority, salt = data.get("priority"), data.get("salt")
        if salt is not None:
            salt = name if salt == "own" else self._text(salt, f"{where}.salt")
        check = self._member(CheckKind, data.get("check", "none"), f"{where}.check")
        if check is not CheckKind.NONE and kind not in _CHECKED:
            raise Problem(
                f"{self._path}: {where}.check is {check.value}, but a prompt of kind {kind.value} "
                "has nothing to ask for: leave it out"
            )
        return Tenant(
            name=name,
            kind=kind,
            arrival=self._arrival(data["arrival"], f"{where}.arrival") if not trace
            else Arrival(Process.POISSON),
            prompt_tokens=tokens("prompt_tokens"),
            turn_tokens=tokens("turn_tokens"),
            output_tokens=tokens("output_tokens"),
            turns=tokens("turns"),
            think_seconds=self._distribution(
                data["think_seconds"], f"{where}.think_seconds", least=0
            ),
            system=self._text(data.get("system", name), f"{where}.system"),
            system_tokens=number("system_tokens", 0),
            priority=None if priority is None else number("priority", -(2**31)),
            salt=salt,
            abort_rate=self._between(0, 1)(data.get("abort_rate", 0), f"{where}.abort_rate"),
            check=check,
            lines=number("lines", 1, MAX_LINES) if kind is Kind.OSCILLATOR else 0,
            period_tokens=number("period_tokens", 6) if kind is Kind.OSCILLATOR else 0,
            prefixes=number("prefixes", 1) if kind is Kind.THRASHER else 0,
            trace=trace,
        )  # fmt: skip

    def _trace(self, data: Mapping[str, Any], where: str) -> TraceFile:
        if "trace" not in data:
            raise self._wrong(f"{where}.trace", "the file of a Mooncake trace", None)
        return TraceFile(
            self._path.parent / self._text(data["trace"], f"{where}.trace"),
            self._positive(data.get("speed", 1), f"{where}.speed"),
            self._positive(data.get("scale", 1), f"{where}.scale"),
            self._integer(1)(data.get("block_tokens", 512), f"{where}.block_tokens"),
        )

    def _arrival(self, value: Any, where: str) -> Arrival:
        every = tuple(key for keys in _PROCESS_KEYS.values() for key in keys)
        data = self._keys(value, where, ("process", *dict.fromkeys(every)))
        process = self._member(Process, data.get("process"), f"{where}.process")
        allowed = _PROCESS_KEYS[process]
        for key in data:
            if key != "process" and key not in allowed:
                raise Problem(
                    f"{self._path}: {where}.{key} does not fit process {process.value}, which "
                    f"takes {' and '.join(allowed)}: leave it out"
                )
        parsers: dict[str, Callable[[Any, str], Any]] = {
            "rate": self._positive, "size": self._integer(1),
            "every_seconds": self._positive, "users": self._integer(1),
        }  # fmt: skip
        given = {key: parsers[key](data.get(key), f"{where}.{key}") for key in allowed}
        return Arrival(process, **given)

    def _distribution(self, value: Any, where: str, least: float) -> Distribution:
        wanted = (
            "a number, {uniform: [a, b]}, {lognormal: [median, sigma]}, {exponential: mean} or "
            "{choice: [...]}, with max: if need be"
        )
        if not isinstance(value, Mapping):
            if not _is_number(value) or value < least:
                raise self._wrong(where, f"{wanted}, {least:g} or more", value)
            return Distribution("constant", (value,), least)
        data = dict(value)
        most = data.pop("max", math.inf)
        if len(data) != 1 or next(iter(data)) not in _SHAPES or (
            "max" in value and not (_is_number(most) and most >= least)
        ):  # fmt: skip
            raise self._wrong(where, wanted, value)
        [(shape, given)] = data.items()
        numbers = tuple(given) if isinstance(given, list) else (given,)
        length = _SHAPES[shape]
        if not numbers or (length and len(numbers) != length) or not all(map(_is_number, numbers)):
            raise self._wrong(f"{where}.{shape}", wanted, given)
        amounts = numbers[:1] if shape == "lognormal" else numbers
        if min(amounts) < least or (shape == "lognormal" and numbers[1] < 0) or (
            shape in ("lognormal", "exponential") and numbers[0] <= 0
        ):  # fmt: skip
            raise self._wrong(f"{where}.{shape}", f"numbers of {least:g} or more", given)
        if shape == "uniform" and numbers[0] > numbers[1]:
            raise self._wrong(f"{where}.uniform", "[a, b] with a not above b", given)
        return Distribution(shape, numbers, least, most)

    # --- values ---

    def _keys(self, value: Any, where: str, allowed: Sequence[str]) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self._wrong(
                where or "the file", f"a mapping with keys {', '.join(allowed)}", value
            )
        for key in value:
            if key not in allowed:
                place = f"{where}.{key}" if where else str(key)
                raise Problem(f"{self._path}: unknown key {place}: use one of {', '.join(allowed)}")
        return value

    def _member(self, kind: type[_E], value: Any, where: str) -> _E:
        names = [member.value for member in kind]
        if value not in names:
            raise self._wrong(where, f"one of {', '.join(names)}", value)
        return kind(value)

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(where, "a text (quote numbers)", value)
        return value

    def _positive(self, value: Any, where: str) -> float:
        if not _is_number(value) or value <= 0:
            raise self._wrong(where, "a number above 0", value)
        return float(value)

    def _between(self, least: float, most: float) -> Callable[[Any, str], float]:
        def parse(value: Any, where: str) -> float:
            if not _is_number(value) or not least <= value <= most:
                upper = "or more" if most == math.inf else f"to {most:g}"
                raise self._wrong(where, f"a number, {least:g} {upper}", value)
            return float(value)

        return parse

    def _integer(self, least: int, most: float = math.inf) -> Callable[[Any, str], int]:
        def parse(value: Any, where: str) -> int:
            if type(value) is not int or not least <= value <= most:
                upper = "or more" if most == math.inf else f"to {most:g}"
                raise self._wrong(where, f"a whole number, {least} {upper}", value)
            return value

        return parse

    def _wrong(self, where: str, wanted: str, value: Any) -> Problem:
        got = "nothing" if value is None else repr(value)
        return Problem(f"{self._path}: {where} must be {wanted}; it is {got}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
