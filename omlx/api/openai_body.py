"""Bodies of the OpenAI dialect: which fields there are, their types and ranges.

Unknown fields are ignored. null is the same as absent.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from omlx.api import lenient
from omlx.api.bounded import Arguments, Options, Parts, Schema, Small, at_most
from omlx.errors import BadRequest

MAX_STOPS = 16
MAX_ANSWERS = 1000  # of which one is chosen
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
# Of one message.
MAX_CALLS = 128
MAX_TOOLS = 1024
MAX_BIASES = 10_000
MAX_TOKEN_IDS = 2**20
# Of one request: prompts, or inputs of a model for embeddings.
MAX_TEXTS = 2048
# Messages, or items, of a request. Checking more would keep the event loop, and with it every stream, for seconds.
MAX_MESSAGES = 20_000

Whole = BeforeValidator(lenient.whole)
Count = Annotated[int, Field(ge=1, le=2**31 - 1), Whole]
# As many tokens as fit if it is None.
TokenLimit = Annotated[Count | Literal[-1] | None, BeforeValidator(lenient.token_limit)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# Empty texts are left out before (lenient.stop_texts), so the published schema allows them.
StopText = Annotated[str, Field(max_length=1000)]
Stops = Annotated[StopText | Annotated[list[StopText], at_most(MAX_STOPS)] | None, BeforeValidator(lenient.stop_texts)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63), Whole]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
ToolName = Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]

TokenIds = Annotated[list[TokenId], at_most(MAX_TOKEN_IDS), BeforeValidator(lenient.whole_items)]
Texts = Annotated[list[str], at_most(MAX_TEXTS)]
ListOfTokenIds = Annotated[list[TokenIds], at_most(MAX_TEXTS)]

# Names of fields, of all bodies.
_FIELDS: set[str] = set()


class Body(BaseModel):
    """Types are taken as they are: "1" is no number, true is no integer. A `type` that is "" is as good as none."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    _without_empty_type = model_validator(mode="before")(lenient.without_empty_type)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        _FIELDS.update(field.alias or name for name, field in cls.model_fields.items())


class StreamOptions(Body):
    include_usage: bool | None = None


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: str | Arguments | None = None


class MessageCall(Body):
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class CalledCustom(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input: str


class CustomMessageCall(Body):
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["custom"]
    custom: CalledCustom


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class Grammar(Body):
    syntax: Annotated[str, Field(max_length=100)] | None = None
    definition: str | None = None


class CustomFormat(Body):
    """The format of a custom tool's input, which is described to the model and not enforced."""

    type: Literal["text", "grammar"] = "text"
    grammar: Grammar | None = None


class CustomFunction(Body):
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: CustomFunction


def _tool_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom tool" if kind == "custom" else "function tool"


AnyTool = Annotated[
    Annotated[Tool, Tag("function tool")] | Annotated[CustomTool, Tag("custom tool")], Discriminator(_tool_tag)
]
AnyCall = Annotated[
    Annotated[MessageCall, Tag("function tool")] | Annotated[CustomMessageCall, Tag("custom tool")],
    Discriminator(_tool_tag),
]


class NamedFunction(Body):
    name: ToolName


class NamedFunctionTool(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedCustomTool(Body):
    type: Literal["custom"]
    custom: NamedFunction


NamedTool = Annotated[
    Annotated[NamedFunctionTool, Tag("function tool")] | Annotated[NamedCustomTool, Tag("custom tool")],
    Discriminator(_tool_tag),
]


class AllowedNames(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], at_most(MAX_TOOLS, least=1)]


class AllowedTools(Body):
    """All tools stay in the prompt, so that it is the prompt that is cached."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=200)] | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None  # of a json_object, as llama.cpp's server takes it


Choices = Annotated[list[str], at_most(MAX_ANSWERS, least=1)]


class StructuredOutputs(Body):
    """vLLM's field for the format of an answer. A schema may be a text of JSON, here as in the fields of its own."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Small = None


class FormatBody(Body):
    """The format of an answer by the names of vLLM and of llama.cpp's server, in chat and in completions."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | str | None = None
    guided_choice: Choices | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    json_schema: Schema | str | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[AnyCall], at_most(MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Small = None
    audio: Small = None


class SamplingBody(Body):
    """What every endpoint takes that answers with text."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), Whole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Stops = None
    seed: Seed | None = None
    stream: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], at_most(MAX_BIASES)] | None = None
    ignore_eos: bool | None = None
    cache: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=500)] | None = None


class GenerationBody(SamplingBody):
    """What chat completions and completions take."""

    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None


class ChatBody(GenerationBody, FormatBody):
    messages: Annotated[list[Message], at_most(MAX_MESSAGES, least=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None
    chat_template_kwargs: Options | None = None
    tools: Annotated[list[AnyTool], at_most(MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunctionTool | NamedCustomTool | AllowedTools | None,
        BeforeValidator(lenient.chat_choice),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None


class CompletionBody(GenerationBody, FormatBody):
    prompt: str | TokenIds | Texts | ListOfTokenIds
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), Whole] | None = None
    suffix: str | None = None
    echo: bool | None = None
    max_tokens: Annotated[int | None, Field(ge=-1, le=2**31 - 1), BeforeValidator(lenient.token_limit)] = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None


B = TypeVar("B", bound=Body)

# Fields that ask for what there is not, and what they may hold all the same.
NotSupported = Mapping[str, Callable[[Any], bool]]
# Where the format of an answer cannot be given by other servers' names: it must not be ignored.
OTHER_FORMATS: NotSupported = dict.fromkeys(
    (name for name in FormatBody.model_fields if name != "response_format"), lambda value: False
)
NOT_SUPPORTED: NotSupported = {
    "audio": lambda value: False,
    "continue_final_message": lambda value: value is False,
    "function_call": lambda value: value == "none",
    "functions": lambda value: value == [],
    "modalities": lambda value: value == ["text"],
    "prompt_logprobs": lambda value: value is False,
    "web_search_options": lambda value: False,
}


def validated(model: type[B], body: dict[str, Any], not_supported: NotSupported = NOT_SUPPORTED) -> B:
    """The body with its types and ranges checked. Raises BadRequest, which names the field."""
    refuse_not_supported(body, not_supported)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _bad_request(error) from None


def refuse_not_supported(body: dict[str, Any], not_supported: NotSupported = NOT_SUPPORTED) -> None:
    """Raises BadRequest for fields that would be ignored although the answer depends on them."""
    for name, is_harmless in not_supported.items():
        value = body.get(name)
        if value is not None and not is_harmless(value):
            raise BadRequest(
                f"{name} is not supported (or not with this value)", param=name, code="unsupported_parameter"
            )


def _bad_request(error: ValidationError) -> BadRequest:
    """The first field that is wrong, with all that is wrong with it.

    A union has errors for each member: the ones that looked deepest into the value met the right type, and of lists
    the one that got furthest before it met something wrong. A list that is too long is that whatever its members are.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    errors = [item for item in errors if item["type"] == "too_long"] or errors
    places = [_param(item["loc"]) for item in errors]
    firsts: dict[tuple[str, ...], str] = {}  # of each member
    for item, place in zip(errors, places, strict=True):
        firsts.setdefault(tuple(part for part in item["loc"] if isinstance(part, str)), place)
    inside = [place for place in firsts.values() if re.match(re.escape(places[0]) + r"([\[.]|$)", place)]
    param = max(inside, key=_progress)
    messages = [item["msg"] for item, place in zip(errors, places, strict=True) if place == param]
    reasons = dict.fromkeys(message[0].lower() + message[1:] for message in messages)
    return BadRequest(f"{param}: {', or '.join(list(reasons)[:3])}", param=param)


def _progress(place: str) -> tuple[int, ...]:
    """How deep a place lies, and how far along the lists that it lies in."""
    return len(re.findall(r"[\[.]", place)), *map(int, re.findall(r"\[(\d+)\]", place))


def _param(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "str") -> "messages[0].content": names of union members are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in _FIELDS or not text:
            text += f".{part}" if text else part
    return re.sub(r"[^\w.\[\]]", "?", text)
