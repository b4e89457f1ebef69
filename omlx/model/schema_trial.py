"""Which keywords of a client's schema cannot be enforced, found by trying each alone.

One look-ahead in one of forty tools is no reason to refuse a request: without `strict` the keyword is left out.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from omlx.errors import BadRequest
from omlx.model.grammar import trial_of_schemas
from omlx.model.json_schema import LISTS, MAPS, PROSE, SINGLE, check_keyword

_MOST = 2000  # keywords that are tried of one schema
# A schema that accepts more inside one of these makes the whole accept less, or something else.
_ALL_OR_NOTHING = frozenset({"not", "if", "then", "else", "oneOf"})
_REFERENCES = frozenset({"$ref", "$dynamicRef"})

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """A keyword that cannot be enforced: where it is, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return f"schema{place if len(place) <= 100 else '...' + place[-100:]}: {self.reason}"


def problems(schema: Any) -> list[Problem]:
    """All keywords of `schema` that cannot be enforced even alone. Blocks. Raises BadRequest if there are too many."""
    found: list[Problem] = []
    tried: list[tuple[Path, dict[str, Any]]] = []
    for path, keyword, value in _keywords(schema, ()):
        if reason := check_keyword(keyword, value) or _lost_reference(schema, keyword, value):
            found.append(Problem(path, reason))
        elif keyword == "patternProperties" and isinstance(value, dict):
            tried += [((*path, name), {"pattern": name}) for name in value]
        elif keyword not in _REFERENCES and (
            keyword not in MAPS | LISTS | SINGLE or not isinstance(value, dict | list | bool)
        ):
            tried.append((path, {keyword: value}))
        if len(tried) > _MOST:
            raise BadRequest(f"the schema has more than {_MOST} keywords")
    reasons = trial_of_schemas([part for _, part in tried])
    return found + [Problem(path, reason) for (path, _), reason in zip(tried, reasons, strict=True) if reason]


def relaxed(schema: dict[str, Any], wrong: list[Problem]) -> dict[str, Any]:
    """A copy of `schema` without those keywords: it accepts all that `schema` accepts."""
    result = copy.deepcopy(schema)
    for problem in wrong:
        path = problem.path
        outer = next((at for at, part in enumerate(path) if part in _ALL_OR_NOTHING and _is_keyword(path, at)), None)
        path = path if outer is None else path[: outer + 1]
        node: Any = result
        try:
            for part in path[:-1]:
                node = node[part]
            del node[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # it was inside one that is left out
        if path[-2:-1] == ("patternProperties",) or path[-1] == "patternProperties":
            _open(result, path)
    return result


def _open(schema: Any, path: Path) -> None:
    """Names that matched a pattern are not "additional" ones."""
    for part in path[: path.index("patternProperties")]:
        schema = schema[part]
    schema.pop("additionalProperties", None)
    schema.setdefault("additionalProperties", True)


def _is_keyword(path: Path, at: int) -> bool:
    """Whether a part of a path is a keyword, and not a property's name."""
    return at == 0 or path[at - 1] not in MAPS or (at >= 2 and path[at - 2] in MAPS)


def _keywords(node: Any, path: Path) -> Iterator[tuple[Path, str, Any]]:
    if not isinstance(node, dict):
        return
    for keyword, value in node.items():
        if keyword in PROSE:
            continue
        yield (*path, keyword), keyword, value
        if keyword in MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield from _keywords(child, (*path, keyword, name))
        elif keyword in LISTS and isinstance(value, list):
            for index, child in enumerate(value):
                yield from _keywords(child, (*path, keyword, index))
        elif keyword in SINGLE:
            yield from _keywords(value, (*path, keyword))


def _lost_reference(schema: Any, keyword: str, value: Any) -> str:
    """Why a `$ref` leads nowhere, "" if it does not."""
    if keyword not in _REFERENCES:
        return ""
    if not isinstance(value, str) or not value.startswith("#"):
        return f"only references inside the schema are followed (got {json.dumps(value)[:60]})"
    node = schema
    for part in value.lstrip("#").strip("/").split("/") if value != "#" else []:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return f"{value[:60]} is not in the schema"
    return ""
