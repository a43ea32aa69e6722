"""A long real text that every Python brings along: a part of its language reference."""

from __future__ import annotations

__all__ = ["long_text"]

_TOPICS = ("for", "while", "if", "try", "with", "raise", "return", "lambda", "assert")


def long_text() -> str:
    """About 5,500 tokens: Python's help topics on statements."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in _TOPICS)
