"""The format of an answer in chat and completions: OpenAI's field, vLLM's and those of llama.cpp's server."""

import re
from typing import Any, Literal

from omlx.api.chat import OutputFormat, ToolChoice
from omlx.api.json_text import parse_json
from omlx.api.openai_body import FormatBody, ResponseFormat, StructuredOutputs
from omlx.api.openai_tools import format_of
from omlx.errors import BadRequest

_Kind = Literal["json_schema", "choice", "regex", "grammar"]
_FIELDS: dict[str, _Kind] = {
    "guided_json": "json_schema",
    "guided_choice": "choice",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "grammar": "grammar",
}
_MEMBERS: dict[str, _Kind] = {"json_": "json_schema", "choice": "choice", "regex": "regex", "grammar": "grammar"}
_GBNF = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)


def output_format(fields: FormatBody, choice: ToolChoice) -> tuple[OutputFormat | None, str]:
    """The format, None for free text, and the field that it comes from.

    Raises BadRequest for two formats, for another server's field where a tool has to be called, for a response_format
    without its schema and for a grammar that is not Lark.
    """
    found: list[tuple[str, OutputFormat]] = []
    if fields.response_format is not None and (output := _response_format(fields.response_format)) is not None:
        found.append(("response_format", output))
    for name, kind in _FIELDS.items():
        if (value := getattr(fields, name)) is not None:
            found.append((name, _format(kind, value, name)))
    if fields.structured_outputs is not None:
        found += _structured(fields.structured_outputs)
    if len(found) > 1:
        raise BadRequest(f"{found[0][0]}, {found[1][0]}: use only one of them", param=found[1][0])
    if not found:
        return None, "response_format"
    name, output = found[0]
    if name != "response_format" and choice.mode in ("required", "named"):
        raise BadRequest(f"{name}, tool_choice: use only one of them, or tool_choice auto", param=name)
    return output, name


def _response_format(given: ResponseFormat) -> OutputFormat | None:
    if given.type == "json_object" and given.schema_ is not None:
        return OutputFormat("json_schema", given.schema_)
    if given.type == "json_schema" and given.json_schema is None:
        raise BadRequest("response_format.json_schema: has to be given", param="response_format.json_schema")
    return format_of(given.type, given.json_schema, "response_format.json_schema.schema")


def _structured(given: StructuredOutputs) -> list[tuple[str, OutputFormat]]:
    if given.structural_tag is not None:
        place = "structured_outputs.structural_tag"
        raise BadRequest(f"{place} is not supported", param=place, code="unsupported_parameter")
    found: list[tuple[str, OutputFormat]] = []
    for name, kind in _MEMBERS.items():
        if (value := getattr(given, name)) is not None:
            place = f"structured_outputs.{name.rstrip('_')}"
            found.append((place, _format(kind, value, place)))
    if given.json_object:
        found.append(("structured_outputs.json_object", OutputFormat("json_object")))
    return found


def _format(kind: _Kind, value: Any, place: str) -> OutputFormat:
    if kind == "json_schema":
        return OutputFormat(kind, _schema(value, place) if isinstance(value, str) else value)
    if kind == "choice":
        return OutputFormat(kind, choices=tuple(value))
    if kind == "grammar" and _GBNF.search(value):
        raise BadRequest(f"{place}: expected a Lark grammar (start: ...), got GBNF (root ::= ...)", param=place)
    return OutputFormat(kind, text=value)


def _schema(text: str, place: str) -> dict[str, Any]:
    try:
        schema = parse_json(text.encode())
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise BadRequest(f"{place}: expected a JSON schema, as an object or as its text", param=place)
    return schema
