"""docs/DOCUMENTS.md names code and tests that exist."""

import ast
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_YET = "not there yet"


class Row(NamedTuple):
    promise: str
    code: str
    test: str


def rows() -> list[Row]:
    lines = (ROOT / "docs" / "DOCUMENTS.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines if line.startswith("| ")]
    return [Row(*(cell.strip() for cell in row)) for row in cells if row[0] != "document"]


def exists(code: str) -> bool:
    """Whether `package.module.Class.name` is there."""
    parts = code.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name, None)
        return found is not None
    return False


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_has_a_row_for_each_document() -> None:
    assert len(rows()) > 40


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.promise[:60])
def test_a_row_names_code_and_a_test_that_exist(row: Row) -> None:
    if row.code.startswith(NOT_YET):
        assert row.test == ""
        return
    assert exists(row.code.strip("`"))
    named = re.fullmatch(r"`(?P<file>[\w/]+\.py)::(?P<test>test_\w+)`(?: \(`(?P<example>\w+\.py)`\))?", row.test)
    assert named is not None, row.test
    assert named["test"] in functions_of(ROOT / "tests" / named["file"])
    assert named["example"] is None or (ROOT / "examples" / named["example"]).is_file()
