"""Bodies of POST /v1/responses: the fields, and the items and tools that they hold."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from omlx.api import lenient
from omlx.api.bounded import MAX_PARTS, Options, Parts, Schema, at_most
from omlx.api.openai_body import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    OTHER_FORMATS,
    Body,
    Effort,
    JsonSchema,
    NotSupported,
    SamplingBody,
    TokenLimit,
    ToolName,
    Whole,
    validated,
)
from omlx.errors import BadRequest

MAX_METADATA = 16
MAX_INCLUDED = 100
LOGPROBS = "message.output_text.logprobs"
# Hosted tools that agents offer unasked: the model is not told of them, so it does not call them.
LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
            "image_generation")  # fmt: skip

_Id = Annotated[str, Field(min_length=1, max_length=200)]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(MAX_METADATA)
]


# ---- items


class MessageItem(Body):
    """A message of any role; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: _Id
    name: _Id
    namespace: str | None = None
    arguments: str


class CustomCallItem(Body):
    type: Literal["custom_tool_call"]
    call_id: _Id
    name: _Id
    namespace: str | None = None
    input: str


class CallOutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _Id
    output: str | Parts | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """Only its `content` is used: a summary is not what the model wrote, and encrypted reasoning is not ours."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], at_most(MAX_PARTS)] | None = None


class ReferenceItem(Body):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: _Id


class OtherItem(Body):
    """An item that only another server knows, from a session that began there; its members are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=200)]


_ITEMS = {
    "message": "message item",
    "function_call": "function_call item",
    "custom_tool_call": "custom_tool_call item",
    "function_call_output": "output item",
    "custom_tool_call_output": "output item",
    "reasoning": "reasoning item",
    "item_reference": "item_reference item",
}


def _type_of(value: Any) -> str | None:
    """None for what has no type: it is taken for the usual kind, and what is wrong with it is told as of that one."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) and kind else None


def _item_tag(value: Any) -> str | None:
    return _ITEMS.get(_type_of(value) or "message", "other item")


Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[CallItem, Tag("function_call item")]
    | Annotated[CustomCallItem, Tag("custom_tool_call item")]
    | Annotated[CallOutputItem, Tag("output item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[ReferenceItem, Tag("item_reference item")]
    | Annotated[OtherItem, Tag("other item")],
    Discriminator(_item_tag),
]
ITEM: TypeAdapter[Item] = TypeAdapter(Item)


# ---- tools


class FunctionTool(Body):
    type: Literal["function"] = "function"
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class CustomFormat(Body):
    """A form that the model is told of; it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Body):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS)]


class LeftOutTool(Body):
    type: Literal[LEFT_OUT]  # type: ignore[valid-type]  # the names are needed as a value too


_TOOLS = {kind: f"{kind} tool" for kind in ("function", "custom", "namespace")} | dict.fromkeys(LEFT_OUT, "hosted tool")


def _tool_tag(value: Any) -> str | None:
    return _TOOLS.get(_type_of(value) or "function")


Tool = Annotated[
    Annotated[FunctionTool, Tag("function tool")]
    | Annotated[CustomTool, Tag("custom tool")]
    | Annotated[NamespaceTool, Tag("namespace tool")]
    | Annotated[LeftOutTool, Tag("hosted tool")],
    Discriminator(_tool_tag),
]


class NamedTool(Body):
    type: Literal["function", "custom"]
    name: ToolName


class AllowedTools(Body):
    """All tools stay in the prompt, so that it is the prompt that is cached."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], at_most(MAX_TOOLS, least=1)]


# ---- the rest


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Effort | None = None


class ResponsesBody(SamplingBody):
    input: str | Annotated[list[Item], at_most(MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: _Id | None = None
    store: bool | None = None
    max_output_tokens: TokenLimit = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None, BeforeValidator(lenient.responses_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "message.input_image.image_url",
                    "file_search_call.results",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "computer_call_output.output.image_url",
                    "code_interpreter_call.outputs",
                ]
            ],
            at_most(MAX_INCLUDED),
        ]
        | None
    ) = None
    metadata: _Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: Options | None = None


class InputTokensBody(ResponsesBody):
    """POST /v1/responses/input_tokens: without `input` the conversation of `previous_response_id` alone is counted."""

    input: str | Annotated[list[Item], at_most(MAX_MESSAGES)] | None = None  # type: ignore[assignment]


class CompactBody(InputTokensBody):
    """POST /v1/responses/compact: of what there is in a request those fields that make the prompt."""


# Fields that ask for what there is not, and what they may hold all the same.
NOT_SUPPORTED: NotSupported = {
    **OTHER_FORMATS,
    "background": lambda value: value is False,
    "conversation": lambda value: False,
    "prompt": lambda value: False,
}
_Check = Callable[[Any], str | None]


def validated_body(body: dict[str, Any]) -> ResponsesBody:
    """The body with its types and ranges checked. Raises BadRequest, which names the field."""
    _check_kinds(
        body, "tools", _tool_tag,
        "tools are not supported: what a server would run, or what only OpenAI's models know, is not here. "
        "Declare a function for what the client runs",
    )  # fmt: skip
    return validated(ResponsesBody, body, NOT_SUPPORTED)


def _check_kinds(body: Mapping[str, Any], field: str, tag_of: _Check, reason: str) -> None:
    """Refuses items or tools of a kind that there is not, by name."""
    given = body.get(field)
    for index, value in enumerate(given if isinstance(given, list) else ()):
        kind = _type_of(value)
        if kind is not None and tag_of(value) is None:
            place = f"{field}[{index}].type"
            raise BadRequest(f"{place}: {kind[:100]!r} {reason}", param=place, code="unsupported_parameter")
