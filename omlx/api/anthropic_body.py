"""Bodies of the Anthropic dialect: which fields there are, their types and ranges.

Unknown fields are ignored. null is the same as absent. The blocks of messages are taken apart in `anthropic_prompt`.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from omlx.api import lenient
from omlx.api.bounded import Options, Parts, Schema, at_most
from omlx.api.openai_body import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    OTHER_FORMATS,
    Body,
    NotSupported,
    Seed,
    StopText,
    ToolName,
    Whole,
)

# Fields that ask for what there is not, and what they may hold all the same.
NOT_SUPPORTED: NotSupported = {
    **OTHER_FORMATS,
    "container": lambda value: False,
    "mcp_servers": lambda value: value == [],
}


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Parts | None = None


class Tool(Body):
    """`type` is not looked at here: other types than these have other fields."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1024, le=2**31 - 1), Whole] | None = None


class Format(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class CountBody(Body):
    """What makes the prompt, and what of the rest is shared by both endpoints."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    messages: Annotated[list[Message], at_most(MAX_MESSAGES, least=1)]
    system: str | Parts | None = None
    tools: Annotated[list[Tool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Annotated[Choice | None, BeforeValidator(lenient.anthropic_choice)] = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    chat_template_kwargs: Options | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=500)] | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1), Whole]
    stop_sequences: Annotated[
        Annotated[list[StopText], at_most(MAX_STOPS)] | None, BeforeValidator(lenient.stop_texts)
    ] = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), Whole] | None = None
    seed: Seed | None = None
    cache: bool | None = None
