"""Arguments that a model wrote as bare text, as values of the types that the tool's schema has for them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from omlx.api.lenient_json import value_at

_DEEPEST = 8
_LITERALS = {"True": True, "False": False, "None": None}
_TEXT_KINDS = ("string", "true")


def types_of(tool: str, tools: Sequence[dict[str, Any]]) -> Callable[[str], set[str]]:
    """For the name of an argument of `tool`: the JSON types it may have, none if that is not known."""
    functions = (item.get("function", {}) for item in tools)
    found = next((function.get("parameters") for function in functions if function.get("name") == tool), None)
    schema = found if isinstance(found, dict) else {}
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return lambda key: _types(known.get(key), schema, _DEEPEST)


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth == 0:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, depth - 1)
    named = schema.get("type")
    types = {name for name in ([named] if isinstance(named, str) else named or ()) if isinstance(name, str)}
    if types:
        return types
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    types = {_type_name(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            types |= _types(option, root, depth - 1)
    return types


def _resolved(reference: str, root: dict[str, Any]) -> Any:
    """What a reference inside the same schema points to."""
    found: Any = root
    for part in re.split("/", reference.removeprefix("#/")):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _type_name(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def typed(text: str, types: set[str], kind: str | None = None) -> Any:
    """The value that `text` stands for.

    `kind` is what the model itself said of it: "string" (or "true", for "is a string") is text as it is, anything
    else JSON. Without it a value that may only be a string is text, and one that may be a string is text unless it is
    JSON of another type that it may have. What fits no type stays text: the tool's owner can tell the model.
    """
    if kind in _TEXT_KINDS or (kind is None and types == {"string"}):
        return text
    try:
        value = _value(text)
    except ValueError:
        return text
    if kind is None and "string" in types and not _fits(value, types - {"string"}):
        return text
    return value


def _value(text: str) -> Any:
    stripped = text.strip()
    if stripped in _LITERALS:
        return _LITERALS[stripped]
    value, end = value_at(stripped)
    if end < len(stripped):
        raise ValueError("more than a value")
    return value


def _fits(value: Any, types: set[str]) -> bool:
    name = _type_name(value)
    return name in types or (name == "integer" and "number" in types)
