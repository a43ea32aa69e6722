"""What a user chooses: the options of tiering, their ranges, and the checks on them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from qevict_kernels.layout import (
    SUPPORTED_BITS,
    SUPPORTED_WINDOWS,
    ParamFormat,
    WindowGeometry,
)
from qevict_tiers.shares import Shares

__all__ = [
    "SPILL_BACKENDS",
    "BudgetLimits",
    "ByteSize",
    "Heads",
    "PrefillScores",
    "PrefixFidelity",
    "PrefixReuse",
    "Promotion",
    "TieringConfig",
]


class PrefillScores(Enum):
    """Which prompt queries give the initial scores."""

    LAST = "last"
    ALL = "all"


class Promotion(Enum):
    """What happens to a coded window that ranks among the FULL ones again.

    ALIAS: it stays coded, since its original is gone.
    DEQUANTIZE: its FULL copy is rebuilt from the codes, which are kept (the paper).
    RESTORE: its original comes back from the SSD tier, if it was read in time.
    """

    ALIAS = "alias"
    DEQUANTIZE = "dequantize"
    RESTORE = "restore"


class PrefixFidelity(Enum):
    """What a prefix is reused as where its originals lie on the SSD.

    FULL: the originals, which the new tokens attend to before they are routed by them. CODES:
    the codes that are kept in memory; originals only where these are gone.
    """

    FULL = "full"
    CODES = "codes"


class PrefixReuse(Enum):
    """What later requests with the same prefix get of a finished request.

    CODES: its windows, coded, or FULL where the request kept them all. OFF: nothing.
    """

    CODES = "codes"
    OFF = "off"


class ByteSize(int):
    """A number of bytes that is typed and printed as ``512M`` or ``16G``."""

    _UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))

    @classmethod
    def parse(cls, text: str) -> ByteSize:
        """Raises ``ValueError`` for what is no such number."""
        for suffix, unit in cls._UNITS:
            if text.upper().endswith(suffix):
                return cls(Fraction(text[:-1]) * unit)
        return cls(text)

    def __str__(self) -> str:
        for suffix, unit in self._UNITS:
            if self and self % unit == 0:
                return f"{self // unit}{suffix}"
        return str(int(self))


class BudgetLimits(NamedTuple):
    """The least and the most that a request may ask for as its own budget."""

    least: Fraction
    most: Fraction

    @classmethod
    def parse(cls, text: str) -> BudgetLimits:
        """From ``0.1-0.5`` or ``0.1,0.5``. Raises ``ValueError`` for what is no such text."""
        least, _, most = text.replace(",", "-").partition("-")
        return cls(Fraction(least), Fraction(most))

    def __str__(self) -> str:
        return f"{float(self.least):g}-{float(self.most):g}"


class Heads(NamedTuple):
    """The attention heads of a layer, as one rank has them."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


SCORING_SPAN_TOKENS = 32
"""Prompt tokens whose queries score with ``PrefillScores.LAST``."""


SPILL_BACKENDS = ("local", "file", "mooncake", "nixl", "hf3fs", "lmcache", "dynamic")
"""Where originals are written: our own store on a local disk, or SGLang's backends by name."""

_SSD_SIZE, _LEAST_SSD_SIZE = ByteSize(16 << 30), ByteSize(64 << 20)


@dataclass(frozen=True)
class TieringConfig:
    """The options of tiering, checked.

    budget: share of the full-precision bytes of a request's context that it may hold.
    budget_limits: between which a request may ask for another; None: no request may.
    quant_fraction: share of the history's bytes that goes to coded windows (``q``).
    window: tokens a window (``W``); also SGLang's page size.
    route_every: generated tokens between two routing events (``Omega``).
    sink, local: first and last tokens that always stay FULL.
    key_bits, value_bits, params: the code of a coded window.
    prefill_scores: prompt queries that give the initial scores.
    score_decay: what is left of a score after each routing event (``scores.DecayedScorer``).
    promote: see ``Promotion``.
    prefix_reuse: see ``PrefixReuse``.
    min_context: tokens up to which a request stays FULL altogether.
    exact_prefill_tokens: prompts up to this length are attended in full precision and
        routed once, after their last token; None: whatever fits the memory.
    full_layers: layers whose windows all stay FULL.
    ssd_dir: where each rank writes originals behind, in a directory of its own; None for no
        such tier. ssd_size: bytes that each rank may take there. ssd_persist: whether they
        outlive the server.
    spill_backend: one of ``SPILL_BACKENDS``. spill_config: the extra configuration of a
        backend of SGLang's, JSON.
    prefix_fidelity: see ``PrefixFidelity``.
    tenants: JSON, see ``shares``; None: nobody is told from anybody else.

    Raises ``ValueError`` with the option, the value and the remedy.
    """

    budget: Fraction = Fraction(1, 5)
    budget_limits: BudgetLimits | None = None
    quant_fraction: Fraction = Fraction(19, 20)
    window: int = 8
    route_every: int = 8
    sink: int = 5
    local: int = 32
    key_bits: int = 4
    value_bits: int = 4
    params: ParamFormat = ParamFormat.UINT8
    prefill_scores: PrefillScores = PrefillScores.LAST
    score_decay: Fraction = Fraction(1)
    promote: Promotion = Promotion.ALIAS
    prefix_reuse: PrefixReuse = PrefixReuse.CODES
    min_context: int = 512
    exact_prefill_tokens: int | None = None
    full_layers: frozenset[int] = field(default_factory=frozenset)
    ssd_dir: Path | None = None
    ssd_size: ByteSize = _SSD_SIZE
    ssd_persist: bool = False
    spill_backend: str = "local"
    spill_config: str | None = None
    prefix_fidelity: PrefixFidelity = PrefixFidelity.FULL
    tenants: str | None = None

    def __post_init__(self) -> None:
        _check(0 < self.budget <= 1, "budget", float(self.budget), "above 0 and at most 1")
        limits = self.budget_limits
        _check(
            limits is None or 0 < limits.least <= limits.most <= 1,
            "budget-limits",
            limits,
            "two budgets, such as 0.1-0.5, above 0, at most 1, and the lesser first",
        )
        _check(
            0 <= self.quant_fraction <= 1,
            "quant-fraction",
            float(self.quant_fraction),
            "from 0 (nothing coded) to 1 (nothing but coded)",
        )
        _check(self.window in SUPPORTED_WINDOWS, "window", self.window, "one of 4, 8, 16, 32")
        _check(self.key_bits in SUPPORTED_BITS, "key-bits", self.key_bits, "2 or 4")
        _check(self.value_bits in SUPPORTED_BITS, "value-bits", self.value_bits, "2 or 4")
        _check(
            0 <= self.score_decay <= 1,
            "score-decay",
            float(self.score_decay),
            "from 0 (only the attention since the last routing event counts) to 1 (never)",
        )
        _check(self.route_every >= 1, "route-every", self.route_every, "1 or more")
        _check(self.sink >= 0, "sink", self.sink, "0 or more")
        _check(self.local >= 1, "local", self.local, "1 or more")
        _check(
            self.min_context >= self.sink + self.local,
            "min-context",
            self.min_context,
            f"at least sink + local = {self.sink + self.local}",
        )
        exact = self.exact_prefill_tokens
        _check(
            exact is None or exact >= self.min_context,
            "exact-prefill-tokens",
            exact,
            f"at least min-context = {self.min_context}",
        )
        _check(
            all(layer >= 0 for layer in self.full_layers),
            "full-layers",
            sorted(self.full_layers),
            "layer numbers from 0",
        )
        self._check_spill()
        try:
            _ = self.shares
        except ValueError as error:
            raise ValueError(f"--kv-tiering-tenants must have {error}") from None

    def _check_spill(self) -> None:
        local = self.spill_backend == "local"
        _check(
            self.spill_backend in SPILL_BACKENDS,
            "spill-backend",
            self.spill_backend,
            f"one of {', '.join(SPILL_BACKENDS)}",
        )
        _check(
            local or self.ssd_dir is None,
            "ssd-dir",
            self.ssd_dir,
            f"left out with --kv-tiering-spill-backend {self.spill_backend}, "
            "which has its own place",
        )
        _check(
            self.ssd_size >= _LEAST_SSD_SIZE,
            "ssd-size",
            self.ssd_size,
            f"{_LEAST_SSD_SIZE} or more",
        )
        _check(
            not (local and self.spill_config),
            "spill-config",
            self.spill_config,
            "left out with --kv-tiering-spill-backend local",
        )
        _check(
            isinstance(self.spill_settings, dict),
            "spill-config",
            self.spill_config,
            "a JSON object",
        )
        _check(
            not self.spills or self.prefix_reuse is not PrefixReuse.OFF,
            "prefix-reuse",
            self.prefix_reuse.value,
            "codes with the SSD tier, which is there for reuse",
        )

    @property
    def spills(self) -> bool:
        """Whether originals are written to an SSD, or to a backend of SGLang's."""
        return self.ssd_dir is not None or self.spill_backend != "local"

    @property
    def spill_settings(self) -> Any:
        """What ``spill_config`` says; None where it is no JSON."""
        try:
            return json.loads(self.spill_config or "{}")
        except json.JSONDecodeError:
            return None

    @cached_property
    def shares(self) -> Shares | None:
        """What tenants are promised; None where nothing is."""
        return None if self.tenants is None else Shares.parse(self.tenants)

    @property
    def least_budget(self) -> Fraction:
        """The least that any request may have as its budget."""
        return min(self.budget, self.budget_limits.least) if self.budget_limits else self.budget

    @property
    def most_budget(self) -> Fraction:
        """The most that any request may have as its budget."""
        return max(self.budget, self.budget_limits.most) if self.budget_limits else self.budget

    def geometry(self, heads: Heads) -> WindowGeometry:
        """Windows of a model with these heads.

        Raises ``ValueError`` for a shape that no kernel supports.
        """
        return WindowGeometry(
            *heads,
            window=self.window,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            params=self.params,
        )


def _check(ok: bool, option: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"--kv-tiering-{option} must be {allowed}, got {value}")
