"""JSON schemas from clients, made ready to be enforced: bounded in size, without prose, closed where that is safe.

llguidance bounds its own work, but for what is counted here: some takes time that grows with the square of a
number (patternProperties, oneOf), and a long literal costs time at every token of the answer.
"""

import json
from collections.abc import Callable
from typing import Any

from omlx.errors import BadRequest

MOST_CHARS = 128 * 1024
"""Characters of one schema without its prose."""
_MOST_DEPTH = 50  # llguidance reads JSON of 128 levels; a level here may be two of those
_MOST_LITERAL = 4096  # characters of a name, an enum's value or a pattern
_MOST_PROPERTIES = 500  # of one object: optional ones are all alternatives at every step
_MOST_PATTERNS = 20  # patternProperties of one object are compared pair by pair
_MOST_ONE_OF = 200  # and so are these
_LARGEST_INT = 1 << 53
_PATH_CHARS = 100  # of a path in a message

PROSE = frozenset({
    "description", "title", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
    "x-guidance",  # would set options of llguidance
})  # fmt: skip
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
SINGLE = frozenset({
    "items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
_COMBINERS = ("anyOf", "oneOf", "$ref", "$dynamicRef")
_INTERSECTING = frozenset({"allOf", "if", "dependentSchemas"})
# Beside one of the combiners these restrict no object's properties.
_NEUTRAL = frozenset({"$defs", "definitions", "$schema", "$id", "type", "discriminator", "nullable"})
# With one of these an object's author thought of further properties.
_OPEN = frozenset({
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "propertyNames",
})  # fmt: skip
_LIMITED = (
    ("properties", _MOST_PROPERTIES),
    ("patternProperties", _MOST_PATTERNS),
    ("oneOf", _MOST_ONE_OF),
)

# An object that says no more than this, without names, is one without properties.
_BARE = frozenset({"type", "properties", "required", "$schema", "$id"})


def prepare(schema: Any) -> dict[str, Any]:
    """A copy of `schema` that can be enforced at a bounded cost: what it accepts, `schema` accepts.

    An object that lists `properties` and says nothing about others is closed to others, unless schemas are
    intersected somewhere. Raises BadRequest, which says where it is wrong.
    """
    if not isinstance(schema, dict):
        raise BadRequest("a JSON schema has to be an object")
    copy: dict[str, Any] = _copy(schema, "schema", 0)
    if len(json.dumps(copy)) > MOST_CHARS:
        raise BadRequest(f"the schema is longer than {MOST_CHARS} characters without its descriptions")
    if not _intersects(copy):
        _close(copy)
    return copy


def arguments(parameters: Any) -> dict[str, Any]:
    """Like `prepare`, for the parameters of a function: an object, without any properties if none are listed."""
    schema = prepare({} if parameters is None else parameters)
    if schema.get("type", "object") != "object":
        raise BadRequest('the parameters of a function have to be of type "object"')
    schema["type"] = "object"
    if not schema.keys() - _BARE and not schema.get("properties") and not schema.get("required"):
        schema["additionalProperties"] = False
    return schema


def _copy(node: Any, path: str, depth: int) -> Any:
    """`node`, a schema, without prose."""
    if isinstance(node, bool):
        return node
    if not isinstance(node, dict):
        raise _wrong(path, "a schema has to be an object, true or false")
    if depth > _MOST_DEPTH:
        raise _wrong(path, f"schemas are nested more than {_MOST_DEPTH} deep")
    for key, most in _LIMITED:
        if isinstance(node.get(key), dict | list) and len(node[key]) > most:
            raise _wrong(f"{path}.{key}", f"more than {most} entries")
    said = {key: value for key, value in node.items() if key not in PROSE}
    return {key: _copy_value(key, value, f"{path}.{key}", depth + 1) for key, value in said.items()}


def _copy_value(key: str, value: Any, path: str, depth: int) -> Any:
    if key in MAPS and isinstance(value, dict):
        for name in value:
            _check_literal(name, path)
        return {name: _copy(child, f"{path}.{name}", depth) for name, child in value.items()}
    if key in LISTS and isinstance(value, list):
        return [_copy(child, f"{path}[{index}]", depth) for index, child in enumerate(value)]
    if key in SINGLE and isinstance(value, dict):
        return _copy(value, path, depth)
    for literal in value if isinstance(value, list) else [value]:
        _check_literal(literal, path)
    return value


def check_keyword(keyword: str, value: Any) -> str:
    """Why one keyword of a schema cannot be enforced, "" if it can; schemas inside do not count."""
    most = dict(_LIMITED).get(keyword)
    if most is not None and isinstance(value, dict | list) and len(value) > most:
        return f"more than {most} entries"
    inside = (keyword in MAPS and isinstance(value, dict)) or (keyword in LISTS and isinstance(value, list))
    children = list(value.values() if isinstance(value, dict) else value) if inside else []
    if any(not isinstance(child, dict | bool) for child in children):
        return "a schema has to be an object, true or false"
    if inside or (keyword in SINGLE and isinstance(value, dict)):
        return ""
    try:
        for literal in value if isinstance(value, list) else [value]:
            _check_literal(literal, keyword)
    except BadRequest as error:
        return str(error).removeprefix(f"{keyword}: ")
    return ""


def _check_literal(value: Any, path: str) -> None:
    if not _is_exact(value):
        raise _wrong(path, "an integer beyond 2^53 cannot be told from its neighbours")
    if len(value if isinstance(value, str) else json.dumps(value)) > _MOST_LITERAL:
        raise _wrong(path, f"a value is longer than {_MOST_LITERAL} characters")


def _is_exact(value: Any) -> bool:
    """Whether all integers in a value are ones that a double holds: llguidance keeps numbers in that form."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _LARGEST_INT


def _wrong(path: str, what: str) -> BadRequest:
    shown = path if len(path) <= _PATH_CHARS else f"...{path[-_PATH_CHARS:]}"
    return BadRequest(f"{shown}: {what}")


def _intersects(node: Any) -> bool:
    """Whether two schemas may have to hold for the same object, so that closing one could shut out the other."""
    if not isinstance(node, dict):
        return False
    combiners = [key for key in _COMBINERS if key in node]
    if not _INTERSECTING.isdisjoint(node) or (combiners and node.keys() - _NEUTRAL - {combiners[0]}):
        return True
    return any(_children(node, _intersects))


def _close(node: Any) -> None:
    if not isinstance(node, dict):
        return
    names, required = node.get("properties"), node.get("required", [])
    if isinstance(names, dict) and names and isinstance(required, list) and _OPEN.isdisjoint(node):
        known = list(names)  # a list is asked, as what is required may be no name at all
        node |= {} if any(name not in known for name in required) else {"additionalProperties": False}
    _children(node, _close)


def _children(node: dict[str, Any], visit: Callable[[Any], Any]) -> list[Any]:
    """`visit` called with every schema directly inside `node`."""
    found: list[Any] = []
    for key, value in node.items():
        if key in MAPS and isinstance(value, dict):
            found += map(visit, value.values())
        elif key in LISTS and isinstance(value, list):
            found += map(visit, value)
        elif key in SINGLE:
            found.append(visit(value))
    return found
