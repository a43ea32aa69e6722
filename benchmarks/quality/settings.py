"""The settings of tiering that are compared with others: presets and what they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from qevict_tiers.config import PrefillScores, TieringConfig
from qevict_tiers.presets import PRESETS

__all__ = ["PAPER", "SETTINGS"]

PAPER = PRESETS["paper"].config

_ALL_CODED = TieringConfig(quant_fraction=Fraction(1))

SETTINGS: Mapping[str, TieringConfig] = {
    **{name: preset.config for name, preset in PRESETS.items()},
    "q=1, 4 bits": _ALL_CODED,
    "q=1, 4-bit keys": replace(_ALL_CODED, value_bits=2),
    "q=1, 4-bit values": replace(_ALL_CODED, key_bits=2),
    "q=1, 2 bits": replace(_ALL_CODED, key_bits=2, value_bits=2),
    "scores of all": TieringConfig(prefill_scores=PrefillScores.ALL),
}
