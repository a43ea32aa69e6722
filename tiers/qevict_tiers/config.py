"""What a user chooses: the options of tiering, their ranges, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from qevict_kernels.layout import SUPPORTED_BITS, SUPPORTED_WINDOWS, ParamFormat

__all__ = ["PrefillScores", "PrefixReuse", "Promotion", "TieringConfig"]


class PrefillScores(Enum):
    """Which prompt queries give the initial scores."""

    LAST = "last"
    ALL = "all"


class Promotion(Enum):
    """What happens to a coded window that ranks among the FULL ones again.

    ALIAS: it stays coded, since its original is gone.
    DEQUANTIZE: its FULL copy is rebuilt from the codes, which are kept (the paper).
    """

    ALIAS = "alias"
    DEQUANTIZE = "dequantize"


class PrefixReuse(Enum):
    """What later requests with the same prefix get of a finished request.

    CODES: its windows, coded, or FULL where the request kept them all. OFF: nothing.
    """

    CODES = "codes"
    OFF = "off"


SCORING_SPAN_TOKENS = 32
"""Prompt tokens whose queries score with ``PrefillScores.LAST``."""


@dataclass(frozen=True)
class TieringConfig:
    """The options of tiering, checked.

    budget: share of the full-precision bytes of a request's context that it may hold.
    quant_fraction: share of the history's bytes that goes to coded windows (``q``).
    window: tokens a window (``W``); also SGLang's page size.
    route_every: generated tokens between two routing events (``Omega``).
    sink, local: first and last tokens that always stay FULL.
    key_bits, value_bits, params: the code of a coded window.
    prefill_scores: prompt queries that give the initial scores.
    promote: see ``Promotion``.
    prefix_reuse: see ``PrefixReuse``.
    min_context: tokens up to which a request stays FULL altogether.
    exact_prefill_tokens: prompts up to this length are attended in full precision and
        routed once, after their last token; None: whatever fits the memory.
    full_layers: layers whose windows all stay FULL.

    Raises ``ValueError`` with the option, the value and the remedy.
    """

    budget: Fraction = Fraction(1, 5)
    quant_fraction: Fraction = Fraction(7, 10)
    window: int = 8
    route_every: int = 8
    sink: int = 5
    local: int = 32
    key_bits: int = 2
    value_bits: int = 2
    params: ParamFormat = ParamFormat.UINT8
    prefill_scores: PrefillScores = PrefillScores.LAST
    promote: Promotion = Promotion.ALIAS
    prefix_reuse: PrefixReuse = PrefixReuse.CODES
    min_context: int = 512
    exact_prefill_tokens: int | None = None
    full_layers: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        _check(0 < self.budget <= 1, "budget", float(self.budget), "above 0 and at most 1")
        _check(
            0 <= self.quant_fraction <= 1,
            "quant-fraction",
            float(self.quant_fraction),
            "from 0 (nothing coded) to 1 (nothing but coded)",
        )
        _check(self.window in SUPPORTED_WINDOWS, "window", self.window, "one of 4, 8, 16, 32")
        _check(self.key_bits in SUPPORTED_BITS, "key-bits", self.key_bits, "2 or 4")
        _check(self.value_bits in SUPPORTED_BITS, "value-bits", self.value_bits, "2 or 4")
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


def _check(ok: bool, option: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"--kv-tiering-{option} must be {allowed}, got {value}")
