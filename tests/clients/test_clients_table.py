"""The table of docs/CLIENTS.md says what the tables that the tests write in docs/MODELS.md and docs/VISION.md say."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def rows(document: str, heading: str) -> dict[str, list[str]]:
    """The cells of a section's table, by the name in its first one."""
    section = (DOCS / document).read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \|(.*)\|$", section.replace(r"\|", "/"), re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in found}


def test_families_and_what_they_can_do():
    shown = rows("CLIENTS.md", "What models can do")
    text = rows("MODELS.md", "Families")
    vision = re.findall(r"^\| `(?!model_type)(\w+)` \|", (DOCS / "VISION.md").read_text("utf-8"), re.MULTILINE)
    assert set(shown) == set(text) | set(vision)
    for name, cells in text.items():
        assert shown[name][:2] == ["no" if mark == "none" else "yes" for mark in cells[-2:]], name
    assert {name for name, cells in shown.items() if cells[3] == "yes"} == set(vision)
