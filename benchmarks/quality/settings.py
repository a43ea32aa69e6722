"""The settings of tiering that are compared with others: the paper's, the default, candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from qevict_kernels.layout import ParamFormat
from qevict_tiers.config import PrefillScores, Promotion, TieringConfig

__all__ = ["PAPER", "SETTINGS"]

PAPER = TieringConfig(params=ParamFormat.FP16, promote=Promotion.DEQUANTIZE)
"""QEvict, arXiv 2608.05326: 2 bits, float16 parameters, q = 0.7, promotion from the codes."""

_ALL_CODED = TieringConfig(quant_fraction=Fraction(1))

SETTINGS: Mapping[str, TieringConfig] = {
    "paper": PAPER,
    "default": TieringConfig(),
    "q=1": _ALL_CODED,
    "q=1, 4-bit keys": replace(_ALL_CODED, key_bits=4),
    "q=1, 4 bits": replace(_ALL_CODED, key_bits=4, value_bits=4),
    "q=1, scores of all": replace(_ALL_CODED, prefill_scores=PrefillScores.ALL),
}
