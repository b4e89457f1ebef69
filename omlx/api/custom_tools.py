"""Custom tools, whose input is a text: models know functions only, so each is one with a single argument."""

import json
import re
from typing import Any

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def explained(description: str | None, definition: str | None, syntax: str | None) -> str:
    """The description of a custom tool, with the grammar that its input should have."""
    lines = [description] if description else []
    if definition:
        lines += [f"The input has the form of this grammar ({syntax or 'text'}):", definition]
    return "\n".join(lines) or "Takes a text as its input."


def custom_arguments(given: str) -> str:
    """A custom tool's input as arguments of the function that models know."""
    return json.dumps({"input": given}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments that a model wrote; all of them if it is not there.

    Half of a surrogate pair, which JSON can say, is no text.
    """
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    value = found.get("input") if isinstance(found, dict) else None
    return _HALF_PAIR.sub("\ufffd", value) if isinstance(value, str) else arguments
