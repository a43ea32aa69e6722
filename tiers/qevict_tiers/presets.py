"""Named options: settings that were measured, each with what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from qevict_kernels.layout import ParamFormat
from qevict_tiers.config import Promotion, TieringConfig

__all__ = ["CUSTOM", "DEFAULT_PRESET", "PRESETS", "Preset", "preset_name"]

CUSTOM = "custom"
"""What options are called that are no preset's."""


@dataclass(frozen=True)
class Preset:
    """Options, and in a sentence what they are for."""

    config: TieringConfig
    purpose: str


DEFAULT_PRESET = "balanced"

PRESETS: Mapping[str, Preset] = {
    DEFAULT_PRESET: Preset(
        TieringConfig(),
        "a fifth of the bytes: 4-bit codes for nearly all of the history that is kept",
    ),
    "quality": Preset(
        TieringConfig(budget=Fraction(2, 5)),
        "two fifths of the bytes, in which nothing is evicted",
    ),
    "capacity": Preset(
        TieringConfig(budget=Fraction(1, 10)),
        "a tenth of the bytes",
    ),
    "retrieval": Preset(
        TieringConfig(budget=Fraction(9, 25), quant_fraction=Fraction(1)),
        "any part of the text may be asked for later: as few bytes as hold all of it in 4-bit "
        "codes",
    ),
    "paper": Preset(
        TieringConfig(
            quant_fraction=Fraction(7, 10),
            key_bits=2,
            value_bits=2,
            params=ParamFormat.FP16,
            promote=Promotion.DEQUANTIZE,
        ),
        "QEvict as published (arXiv 2608.05326): 2-bit codes with float16 parameters, three "
        "tenths of the history's bytes FULL, promotion from the codes",
    ),
}
"""By name; the first is the default. docs/decisions/0005 has the measurements."""


def preset_name(config: TieringConfig) -> str:
    """The preset whose options these are, or ``CUSTOM``."""
    return next((name for name, one in PRESETS.items() if one.config == config), CUSTOM)
