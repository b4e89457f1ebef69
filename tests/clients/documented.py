"""The blocks of docs/CLIENTS.md, for a server at another address and a model of another name."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "CLIENTS.md"


def block(name: str, address: str, model: str) -> str:
    """The code that follows `<!-- run: name -->`."""
    found = re.search(rf"<!-- run: {name} -->\n```\w+\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{DOCUMENT.name} has no block to run for {name}"
    return found[1].replace("http://127.0.0.1:8000", address).replace("smollm2-135m", model)


def variables(name: str, address: str, model: str) -> dict[str, str]:
    """The variables that a block of `export` lines sets."""
    return dict(line.removeprefix("export ").split("=", 1) for line in block(name, address, model).splitlines())
