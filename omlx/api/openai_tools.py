"""Tools, calls and output formats as OpenAI's two chat endpoints have them."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from omlx.api.chat import OutputFormat, ToolChoice
from omlx.api.custom_tools import INPUT_SCHEMA, custom_arguments, explained
from omlx.api.json_text import parse_json
from omlx.api.openai_body import (
    AllowedTools,
    ChatBody,
    CustomMessageCall,
    CustomTool,
    JsonSchema,
    Message,
    MessageCall,
    NamedCustomTool,
    NamedFunctionTool,
    Tool,
)
from omlx.api.tool_prompt import canonical_tools
from omlx.errors import BadRequest

_NO_PARAMETERS = {"type": "object", "properties": {}}


Wanted = tuple[Literal["auto", "none", "required", "named"], tuple[str, ...]]
"""A choice, and what it names: one tool if it is "named", else those that may be called (() for all)."""


class Declared(NamedTuple):
    """A function that may be called, and where in the body its name stands."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    place: str


def tools(fields: ChatBody) -> tuple[dict[str, Any], ...]:
    """What may be called, in the one form in which prompts have it. Raises BadRequest."""
    return described([_declared(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())])


def custom_names(fields: ChatBody) -> frozenset[str]:
    """The names of the custom tools."""
    return frozenset(tool.custom.name for tool in fields.tools or () if isinstance(tool, CustomTool))


def _declared(tool: Tool | CustomTool, place: str) -> Declared:
    if isinstance(tool, Tool):
        given = tool.function
        return Declared(given.name, given.description, given.parameters, f"{place}.function.name")
    custom = tool.custom
    grammar = custom.format.grammar if custom.format else None
    description = explained(
        custom.description, grammar.definition if grammar else None, grammar.syntax if grammar else None
    )
    return Declared(custom.name, description, INPUT_SCHEMA, f"{place}.custom.name")


def _name(tool: Tool | CustomTool | NamedFunctionTool | NamedCustomTool) -> str:
    return tool.custom.name if isinstance(tool, CustomTool | NamedCustomTool) else tool.function.name


def described(declared: Sequence[Declared]) -> tuple[dict[str, Any], ...]:
    """Functions in the one form in which prompts have them. Raises BadRequest for a name that is there twice."""
    names = [tool.name for tool in declared]
    for index, tool in enumerate(declared):
        if tool.name in names[:index]:
            raise BadRequest(f"{tool.place}: {tool.name!r} is there twice", param=tool.place)
    return canonical_tools([_tool(tool) for tool in declared])


def _tool(tool: Declared) -> dict[str, Any]:
    """Without what no model was trained to see."""
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.parameters or _NO_PARAMETERS}
    return {"type": "function", "function": function}


def tool_choice(fields: ChatBody) -> ToolChoice:
    """Raises BadRequest for a choice among tools that are not there."""
    given = fields.tool_choice
    wanted: Wanted = ("auto", ())
    if isinstance(given, NamedFunctionTool | NamedCustomTool):
        wanted = "named", (_name(given),)
    elif isinstance(given, AllowedTools):
        wanted = given.allowed_tools.mode, tuple(map(_name, given.allowed_tools.tools))
    elif given is not None:
        wanted = given, ()
    strict = any(tool.function.strict for tool in fields.tools or () if isinstance(tool, Tool))
    return choice_among(list(map(_name, fields.tools or ())), wanted, fields.parallel_tool_calls, strict=strict)


def choice_among(names: Sequence[str], wanted: Wanted, parallel: bool | None, *, strict: bool) -> ToolChoice:
    """The choice among the tools called `names`. Raises BadRequest for one that is not there."""
    mode, chosen = wanted
    for name in chosen:
        if name not in names:
            raise BadRequest(f"tool_choice: no tool {name!r} in tools", param="tool_choice")
    if mode == "required" and not names:
        raise BadRequest("tool_choice: required, but there are no tools", param="tool_choice")
    if mode == "named":
        return ToolChoice("named", chosen[0], parallel is not False, strict)
    return ToolChoice(mode, "", parallel is not False, strict, chosen)


def format_of(
    kind: Literal["text", "json_object", "json_schema"], given: JsonSchema | None, place: str
) -> OutputFormat | None:
    """The form that a text has to have, None for a free one. `place` is the schema's: BadRequest if it is not there."""
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_object")
    if given is None or given.schema_ is None:
        raise BadRequest(f"{place}: has to be given", param=place)
    return OutputFormat("json_schema", given.schema_, bool(given.strict))


def template_args(effort: str | None, given: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of the chat template. An `effort` of reasoning is one of some models, and "none" of most."""
    shorthand: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        shorthand["enable_thinking"] = False
    return shorthand | (given or {})


def called(message: Message) -> dict[str, Any]:
    """What an assistant's message has besides its text."""
    found: dict[str, Any] = {}
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: MessageCall | CustomMessageCall) -> dict[str, Any]:
    if isinstance(call, CustomMessageCall):
        return past_call(call.id, call.custom.name, custom_arguments(call.custom.input))
    return past_call(call.id, call.function.name, call.function.arguments)


def past_call(call_id: str | None, name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """A call of an earlier answer, for the template."""
    identity = {} if call_id is None else {"id": call_id}
    return identity | {"type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(given: str | dict[str, Any] | None) -> Any:
    """As an object, in its own order: templates write it as the model had written it.

    What is no JSON (an answer that was cut, half of a surrogate pair), is too deep or has too many values goes into the
    prompt as it is.
    """
    if not isinstance(given, str):
        return given or {}
    try:
        return parse_json(given.encode()) if given.strip() else {}
    except ValueError:
        return given


def with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results with the names of their tools, which some templates want and clients need not send."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        known = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        named.append({"name": known} | message if known and "name" not in message else message)
    return named
