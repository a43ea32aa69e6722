"""What ends a stress test before it began."""

from __future__ import annotations

__all__ = ["Problem"]


class Problem(Exception):
    """What a user can mend, in a sentence."""
