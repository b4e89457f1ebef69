"""Tools, calls and output formats in bodies of the OpenAI dialect."""

import json
from collections.abc import Sequence
from typing import Any

from omlx.api.chat import OutputFormat, ToolChoice
from omlx.api.openai_body import ChatBody, Message, MessageCall, NamedTool, Tool
from omlx.api.tool_prompt import canonical_tools
from omlx.errors import BadRequest

_NO_PARAMETERS = {"type": "object", "properties": {}}


def tools(fields: ChatBody) -> tuple[dict[str, Any], ...]:
    """What may be called, in the one form in which prompts have it. Raises BadRequest."""
    names = [tool.function.name for tool in fields.tools or ()]
    for index, name in enumerate(names):
        if name in names[:index]:
            place = f"tools[{index}].function.name"
            raise BadRequest(f"{place}: {name!r} is there twice", param=place)
    return canonical_tools([_tool(tool) for tool in fields.tools or ()])


def _tool(tool: Tool) -> dict[str, Any]:
    """Without what no model was trained to see."""
    given = tool.function
    described = {} if given.description is None else {"description": given.description}
    function = {"name": given.name, **described, "parameters": given.parameters or _NO_PARAMETERS}
    return {"type": "function", "function": function}


def tool_choice(fields: ChatBody) -> ToolChoice:
    """Raises BadRequest for a choice among tools that are not there."""
    parallel = fields.parallel_tool_calls is not False
    strict = any(tool.function.strict for tool in fields.tools or ())
    given = fields.tool_choice
    if isinstance(given, NamedTool):
        name = given.function.name
        if name not in [tool.function.name for tool in fields.tools or ()]:
            raise BadRequest(f"tool_choice: no tool {name!r} in tools", param="tool_choice")
        return ToolChoice("named", name, parallel, strict)
    if given == "required" and not fields.tools:
        raise BadRequest("tool_choice: required, but there are no tools", param="tool_choice")
    return ToolChoice(given or "auto", "", parallel, strict)


def output_format(fields: ChatBody) -> OutputFormat | None:
    """Raises BadRequest for a json_schema without its schema."""
    given = fields.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return OutputFormat("json_object")
    if given.json_schema is None or given.json_schema.schema_ is None:
        place = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise BadRequest(f"{place}: has to be given", param=place)
    return OutputFormat("json_schema", given.json_schema.schema_, bool(given.json_schema.strict))


def template_args(fields: ChatBody) -> dict[str, Any]:
    """Arguments of the chat template. `reasoning_effort` is one of some models, and "none" of most."""
    effort = fields.reasoning_effort
    shorthand: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        shorthand["enable_thinking"] = False
    return shorthand | (fields.chat_template_kwargs or {})


def called(message: Message) -> dict[str, Any]:
    """What an assistant's message has besides its text."""
    found: dict[str, Any] = {}
    if reasoning := message.reasoning_content or message.reasoning:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: MessageCall) -> dict[str, Any]:
    identity = {} if call.id is None else {"id": call.id}
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return identity | {"type": "function", "function": function}


def _arguments(given: str | dict[str, Any] | None) -> Any:
    """As an object, in its own order: templates write it as the model had written it.

    What is no JSON (an answer that was cut) goes into the prompt as it is.
    """
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given) if given.strip() else {}
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
