"""Tools of the Responses endpoint: models know functions only, so custom tools and namespaces are written as such."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omlx.api.chat import ToolChoice
from omlx.api.custom_tools import INPUT_SCHEMA, explained
from omlx.api.openai_tools import Declared, Wanted, choice_among, described
from omlx.api.responses.body import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedTool,
    NamespaceTool,
    ResponsesBody,
)


class Origin(NamedTuple):
    """What a function of the prompt is for the client: its own name for it, and whether it is a custom tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called: as prompts have it, as the client knows it (by the name in the prompt), and which of it."""

    canonical: tuple[dict[str, Any], ...] = ()
    origins: dict[str, Origin] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, Origin(name))


def tools_of(fields: ResponsesBody) -> Tools:
    """Raises BadRequest for names that are there twice, and for a choice among tools that are not there."""
    known = list(_functions(fields))
    canonical = described([declared for declared, _ in known])
    origins = {declared.name: origin for declared, origin in known}
    strict = any(tool.strict for tool in fields.tools or () if isinstance(tool, FunctionTool))
    strict |= any(f.strict for tool in fields.tools or () if isinstance(tool, NamespaceTool) for f in tool.tools)
    choice = choice_among(list(origins), _wanted(fields), fields.parallel_tool_calls, strict=strict)
    return Tools(canonical, origins, choice)


def _functions(fields: ResponsesBody) -> Iterator[tuple[Declared, Origin]]:
    for index, tool in enumerate(fields.tools or ()):
        place = f"tools[{index}].name"
        if isinstance(tool, FunctionTool):
            yield Declared(tool.name, tool.description, tool.parameters, place), Origin(tool.name)
        elif isinstance(tool, CustomTool):
            yield Declared(tool.name, _explained(tool), INPUT_SCHEMA, place), Origin(tool.name, custom=True)
        elif isinstance(tool, NamespaceTool):
            for at, inner in enumerate(tool.tools):
                place = f"tools[{index}].tools[{at}].name"
                name = name_in_prompt(inner.name, tool.name)
                yield Declared(name, inner.description, inner.parameters, place), Origin(inner.name, tool.name)


def name_in_prompt(name: str, namespace: str | None) -> str:
    """Models know no namespaces."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _explained(tool: CustomTool) -> str:
    form = tool.format
    return explained(tool.description, form.definition if form else None, form.syntax if form else None)


def _wanted(fields: ResponsesBody) -> Wanted:
    given = fields.tool_choice
    if isinstance(given, NamedTool):
        return "named", (given.name,)
    if isinstance(given, AllowedTools):
        return given.mode, tuple(tool.name for tool in given.tools)
    return given or "auto", ()
