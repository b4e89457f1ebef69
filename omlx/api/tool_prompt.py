"""Prompts that stay the same: one text for equal tools, words for templates that know none, no line that only bills."""

import json
import re
from collections.abc import Sequence
from typing import Any

from omlx.model.template_habits import result_text, with_calls_as_text

# How templates have it; everything else follows in the order of the alphabet.
_ORDER = ("type", "function", "name", "description", "parameters", "properties", "required")
# Under these a schema has names that somebody chose, and a schema for each.
_NAMED = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})

_EXPLANATION = """\
You can call tools. They are described by JSON objects, one a line:
{tools}

To call a tool, write its name and arguments as JSON between these marks, once for each call:
<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>."""


# The first line of some agents' system message, other in every request: meant for the provider, not for the model.
_BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*(\n+|$)")


def canonical_tools(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """`tools` with the keys of every object in one order, so that equal tools are equal text in a prompt.

    Arguments come as in `required`, which is a list, then by name.
    """
    return tuple(_ordered(tool) for tool in tools)


def _ordered(value: Any, first: Sequence[Any] = _ORDER, *, named: bool = False) -> Any:
    """`named`: the keys are names that somebody chose. Those in `first` come first."""
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    ranks = {key: rank for rank, key in enumerate(first) if isinstance(key, str)}
    keys = sorted(value, key=lambda key: (ranks.get(key, len(ranks)), key))
    if named:
        return {key: _ordered(value[key]) for key in keys}
    return {key: _member(value, key) for key in keys}


def _member(schema: dict[str, Any], key: str) -> Any:
    if key not in _NAMED:
        return _ordered(schema[key])
    required = schema.get("required")
    return _ordered(schema[key], required if isinstance(required, list) else (), named=True)


def without_billing_line(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the billing header that may be the first line of the first one, a system message."""
    first = messages[0]
    if first["role"] != "system" or not isinstance(first["content"], str):
        return list(messages)
    content = _BILLING_LINE.sub("", first["content"], count=1) if _BILLING_LINE.match(first["content"]) else None
    if content is None:
        return list(messages)
    return [*([first | {"content": content}] if content else []), *messages[1:]]


def spelled_out(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: these, calls and results become text.

    The tools are explained at the end of the first system message, or in one of their own. Results are the user's, and
    one message with what the user says behind them: many templates want user and assistant in turn.
    """
    spelled: list[dict[str, Any]] = []
    results = False
    for message in messages:
        is_result = message["role"] == "tool"
        said = {"role": "user", "content": result_text(message)} if is_result else with_calls_as_text(message)
        if results and said["role"] == "user":
            spelled[-1] = spelled[-1] | {"content": _behind(spelled[-1]["content"], said["content"])}
        else:
            spelled.append(said)
        results = is_result
    if not tools:
        return spelled
    explanation = _EXPLANATION.format(tools="\n".join(_json(tool["function"]) for tool in tools))
    if spelled and spelled[0]["role"] == "system":
        first = spelled[0] | {"content": f"{spelled[0]['content']}\n\n{explanation}"}
        return [first, *spelled[1:]]
    return [{"role": "system", "content": explanation}, *spelled]


def _behind(results: str, said: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Results, and a text behind them or, with images, parts."""
    return f"{results}\n{said}" if isinstance(said, str) else [{"type": "text", "text": results}, *said]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
