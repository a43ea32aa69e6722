"""How many windows of a request are FULL and coded, from its length alone.

Everything here is exact integer or ``Fraction`` arithmetic on the host, the same on
every tensor-parallel rank: the byte budget of QEvict (arXiv 2608.05326, section 4)
with the bytes that this implementation really uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from math import floor

from qevict_kernels.layout import WindowGeometry
from qevict_tiers.config import Promotion, TieringConfig

__all__ = ["Capacities", "WindowBudget", "capacities"]


@dataclass(frozen=True)
class Capacities:
    """Windows of the history of one layer: ``full`` stay FULL, ``coded`` are coded."""

    full: int
    coded: int


def capacities(
    history_bytes: Fraction | int,
    quant_fraction: Fraction,
    full_bytes: int,
    coded_bytes: int,
) -> Capacities:
    """``K_f`` and ``K_q`` of the paper.

    ``history_bytes`` is ``B_hist``; ``full_bytes`` and ``coded_bytes`` are ``M_f`` and
    ``M_q``, all in the same unit (one layer, or all layers).
    """
    return Capacities(
        full=floor((1 - quant_fraction) * history_bytes / full_bytes),
        coded=floor(quant_fraction * history_bytes / coded_bytes),
    )


@dataclass(frozen=True)
class WindowBudget:
    """The budget rule of one model: geometry, number of layers, options.

    The budget counts every layer: layers kept FULL take their bytes from it first, the
    others share the rest evenly.

    Raises ``ValueError`` if the protected windows alone exceed the budget just beyond
    ``min_context``, or the least that a request may ask for.
    """

    config: TieringConfig
    geometry: WindowGeometry
    num_layers: int

    def __post_init__(self) -> None:
        unknown = sorted(x for x in self.config.full_layers if x >= self.num_layers)
        if unknown:
            raise ValueError(
                f"--kv-tiering-full-layers names layers {unknown}, "
                f"but the model has layers 0 to {self.num_layers - 1}"
            )
        least = self.config.least_budget
        if least == 1:
            return
        flag = "--kv-tiering-budget" + "-limits" * (least < self.config.budget)
        if self.num_tiered_layers == 0:
            raise ValueError(
                f"--kv-tiering-full-layers keeps all {self.num_layers} layers FULL, which takes "
                f"all bytes, but {flag} allows {float(least):g}: name fewer layers, or drop both"
            )
        first = self.config.min_context + 1
        floor_tokens = self.max_protected_windows * self.config.window
        layer_budget = self._layer_budget(least)
        left = float(layer_budget * first)
        if layer_budget * self.num_windows(first) < self.max_protected_windows:
            raise ValueError(
                f"{flag} {float(least):g} leaves {left:.0f} tokens a layer at "
                f"a context of {first} tokens, but sink and local windows take {floor_tokens}: "
                f"raise {flag} or --kv-tiering-min-context, or lower --kv-tiering-local, "
                "--kv-tiering-sink or --kv-tiering-full-layers"
            )

    def at(self, budget: Fraction) -> WindowBudget:
        """The same rule for a request whose budget is another."""
        return replace(self, config=replace(self.config, budget=budget))

    @property
    def num_full_layers(self) -> int:
        """Layers whose windows all stay FULL."""
        return len(self.config.full_layers)

    @cached_property
    def num_tiered_layers(self) -> int:
        """Layers that are routed."""
        return self.num_layers - self.num_full_layers

    @cached_property
    def layer_budget(self) -> Fraction:
        """Share of the full-precision bytes that a tiered layer may hold."""
        return self._layer_budget(self.config.budget)

    def _layer_budget(self, budget: Fraction) -> Fraction:
        if self.num_tiered_layers == 0:
            return Fraction(1)
        rest = budget * self.num_layers - self.num_full_layers
        return min(Fraction(1), rest / self.num_tiered_layers)

    @cached_property
    def keeps_everything(self) -> bool:
        """True if no window is ever demoted."""
        return self.layer_budget == 1

    @property
    def full_bytes(self) -> int:
        """``M_f``: bytes of a FULL window of one layer."""
        return self.geometry.full_window_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers while it is FULL."""
        return self.num_layers * self.full_bytes // self.config.window

    @property
    def coded_bytes(self) -> int:
        """``M_q``: bytes of a coded window of one layer."""
        return self.geometry.coded_window_bytes

    @property
    def sink_windows(self) -> int:
        """Windows that hold a sink token."""
        return -(-self.config.sink // self.config.window)

    @property
    def max_local_windows(self) -> int:
        """Windows that hold a local token, at the worst alignment."""
        return (self.config.local + self.config.window - 2) // self.config.window + 1

    @property
    def max_protected_windows(self) -> int:
        """Windows that sink and local keep FULL, at the worst alignment."""
        return self.sink_windows + self.max_local_windows

    def num_windows(self, tokens: int) -> int:
        """Windows that hold ``tokens`` tokens, the last one perhaps in part."""
        return -(-tokens // self.config.window)

    def history(self, tokens: int) -> tuple[int, int]:
        """Half-open range of the windows between sink and local; may be empty."""
        first_local = max(0, tokens - self.config.local) // self.config.window
        start = min(self.sink_windows, self.num_windows(tokens))
        return start, max(start, first_local)

    def is_tiered(self, tokens: int) -> bool:
        """True if a request of this length is routed at all."""
        return tokens > self.config.min_context and not self.keeps_everything

    @cached_property
    def capacities(self) -> Callable[[int], Capacities]:
        """``K_f`` and ``K_q`` of one tiered layer of a routed request, by its length in tokens.

        ``B_total`` is the budget's share of whole windows; what coded windows leave
        unused goes to FULL ones, so that a budget of 1 keeps everything FULL whatever
        ``q`` is.
        """
        # Asked several times for each row that is routed.
        return lru_cache(maxsize=1 << 14)(self._capacities)

    def _capacities(self, tokens: int) -> Capacities:
        start, end = self.history(tokens)
        length = end - start
        protected = self.num_windows(tokens) - length
        total = self.layer_budget * self.num_windows(tokens) * self.full_bytes
        history_bytes = max(Fraction(0), total - protected * self.full_bytes)
        rule = capacities(
            history_bytes, self.config.quant_fraction, self.charged_full_bytes, self.coded_bytes
        )
        if rule.full + rule.coded < length:
            return rule
        spare = history_bytes - length * self.coded_bytes
        promoted = floor(spare / (self.charged_full_bytes - self.coded_bytes))
        if history_bytes >= length * self.full_bytes:
            promoted = length
        full = min(length, max(0, promoted))
        return Capacities(full=full, coded=length - full)

    @property
    def charged_full_bytes(self) -> int:
        """Bytes that a FULL history window is charged: with shadow codes where they are kept."""
        if self.config.promote is Promotion.DEQUANTIZE:
            return self.full_bytes + self.coded_bytes
        return self.full_bytes
