"""The three documents that specify the cache, where they lie beside this repository."""

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SEEDS = Path(__file__).resolve().parents[2].parent / "shared" / "seeds"
# Folders that the documents' code writes to.
USED = tuple(Path("/tmp", name) for name in ("omlx_ssd_cache", "omlx_ssd", "omlx_vision_cache"))

_BLOCK = re.compile(r"```(python|bash)\s(.*?)```", re.DOTALL)
# Document 000 lost its line ends; these words begin its statements and comments.
_LOST_LINE_END = re.compile(r" (?=from \w|# |\w+ = |cache\.put|print\()")


class Document(NamedTuple):
    """The code blocks of a document, in order."""

    python: list[str]
    shell: list[str]


def read_document(number: str) -> Document:
    """The code as it stands in the document with this number; skips the test if it is not there."""
    found = sorted(SEEDS.glob(f"{number}_*.txt"))
    if not found:
        pytest.skip(f"the documents are not there: no {SEEDS}/{number}_*.txt")
    text = found[0].read_text("utf-8")
    blocks = [(kind, code if "\n" in text else _LOST_LINE_END.sub("\n", code)) for kind, code in _BLOCK.findall(text)]
    return Document([code for kind, code in blocks if kind == "python"], [c for kind, c in blocks if kind == "bash"])


@pytest.fixture
def documents_folders() -> Iterator[None]:
    """The folders under /tmp are not there at first, and gone again or as they were afterwards."""
    aside = {path: path.with_name(f"{path.name}.aside-{uuid.uuid4().hex}") for path in USED}
    moved = [path for path in USED if path.exists()]
    for path in moved:
        path.rename(aside[path])
    try:
        yield
    finally:
        for path in USED:
            shutil.rmtree(path, ignore_errors=True)
        for path in moved:
            aside[path].rename(path)
