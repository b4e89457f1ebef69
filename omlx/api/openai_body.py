"""Bodies of the OpenAI dialect: which fields there are, their types and ranges.

Unknown fields are ignored. null is the same as absent.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omlx.errors import BadRequest

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]

# One error of a list is enough: a long list of a wrong type has a million.
# Far beyond every context; what is longer would keep the event loop busy only to be refused.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
Texts = Annotated[list[str], Field(fail_fast=True)]
ListOfTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]


class Body(BaseModel):
    """Types are taken as they are: "1" is no number, true is no integer."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class GenerationBody(Body):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1, max_length=500)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[TokenIdText, Bias] | None = None
    ignore_eos: bool | None = None
    cache: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=500)] | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    prompt: str | TokenIds | Texts | ListOfTokenIds
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


B = TypeVar("B", bound=Body)

_FIELDS = {name for model in (ChatBody, CompletionBody, Message, StreamOptions) for name in model.model_fields}

# Fields that ask for what is not there yet, and what they may hold all the same.
_NOT_YET: dict[str, Callable[[Any], bool]] = {
    "audio": lambda value: False,
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "function_call": lambda value: value == "none",
    "functions": lambda value: value == [],
    "modalities": lambda value: value == ["text"],
    "n": lambda value: value == 1 and value is not True,
    "prompt_logprobs": lambda value: False,
    "response_format": lambda value: value == {"type": "text"},
    "suffix": lambda value: value == "",
    "tool_choice": lambda value: value == "none",
    "tools": lambda value: value == [],
}


def validated(model: type[B], body: dict[str, Any]) -> B:
    """The body with its types and ranges checked. Raises BadRequest, which names the field."""
    refuse_not_yet(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _bad_request(error) from None


def refuse_not_yet(body: dict[str, Any]) -> None:
    """Raises BadRequest for fields that would be ignored although the answer depends on them."""
    # Tools that must not be called change nothing.
    ignored = {"tools", "functions"} if "none" in (body.get("tool_choice"), body.get("function_call")) else set()
    for name, is_harmless in _NOT_YET.items():
        value = body.get(name)
        if value is not None and name not in ignored and not is_harmless(value):
            raise BadRequest(
                f"{name} is not supported yet (or not with this value)", param=name, code="unsupported_parameter"
            )


def _bad_request(error: ValidationError) -> BadRequest:
    """The first field that is wrong, with all that is wrong with it.

    A union has an error for each member: the ones that looked deepest into the value met the right type.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    places = [_param(item["loc"]) for item in errors]
    inside = [place for place in places if re.match(re.escape(places[0]) + r"([\[.]|$)", place)]
    param = max(inside, key=lambda place: len(re.findall(r"[\[.]", place)))
    messages = [item["msg"] for item, place in zip(errors, places, strict=True) if place == param]
    reasons = dict.fromkeys(message[0].lower() + message[1:] for message in messages)
    return BadRequest(f"{param}: {', or '.join(list(reasons)[:3])}", param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "str") -> "messages[0].content": names of union members are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in _FIELDS or not text:
            text += f".{part}" if text else part
    return re.sub(r"[^\w.\[\]]", "?", text)
