"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from qevict_tiers.config import TieringConfig
from qevict_tiers.presets import PRESETS
from sglang_qevict.flags import OPTIONS, typed
from sglang_qevict.refusals import FLAG_REFUSALS, MODEL_REFUSALS, REQUEST_REFUSALS

README = (Path(__file__).parents[1] / "README.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its two first lines."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_the_table_of_flags_is_the_parser_s() -> None:
    expected = [[f"`-{o.name}`", o.default_text, o.allowed, o.help] for o in OPTIONS]
    assert rows_of("Flags") == expected


def test_the_table_of_presets_is_complete() -> None:
    assert rows_of("Presets") == [
        [f"`{name}`", preset.purpose, _changes(preset.config)] for name, preset in PRESETS.items()
    ]


def _changes(config: TieringConfig) -> str:
    """Options that are not the defaults, as typed."""
    default = TieringConfig()
    given = {o.name: (getattr(config, o.field), getattr(default, o.field)) for o in OPTIONS}
    texts = [f"`-{name} {typed(one)}`" for name, (one, other) in given.items() if one != other]
    return " ".join(texts) or "the defaults"


def test_the_table_of_refusals_is_complete() -> None:
    refusals = [*FLAG_REFUSALS, *MODEL_REFUSALS, *REQUEST_REFUSALS]
    expected = [[f"`{r.what}`" if r.what[0] == "-" else r.what, r.reason] for r in refusals]
    assert rows_of("What is refused") == expected


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parents[1]
    pages = [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]
    anchors = 0
    for page in pages:
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            found = page.parent / name if name else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _slugs(found.read_text()), f"{page.name}: {target}"
            anchors += bool(anchor)
    assert anchors > 10


def _slugs(page: str) -> set[str]:
    """Names by which GitHub links to the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", page)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_page_waits_for_a_figure() -> None:
    for page in (Path(__file__).parents[1] / "docs").rglob("*.md"):
        assert not re.search(r"(?m)^(?:[A-Z]+_[A-Z_]+|TODO.*|TBD.*)$", page.read_text()), page.name
