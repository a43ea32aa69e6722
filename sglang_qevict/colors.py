"""The colours of tiers, wherever they are drawn: plots, the live page, the terminal.

Blue, orange and grey differ in lightness as well, so that they can be told apart by everybody. On a
dark ground what is evicted is a darker grey: it recedes there, too. What is spilled is drawn apart
from the others.
"""

from __future__ import annotations

__all__ = ["CODED", "EVICTED", "EVICTED_ON_DARK", "FULL", "PROTECTED", "SPILLED"]

PROTECTED = "#8d99ae"
FULL = "#2a6f97"
CODED = "#f4a259"
EVICTED = "#e5e5e5"
EVICTED_ON_DARK = "#39424d"
SPILLED = "#9c5b8f"
