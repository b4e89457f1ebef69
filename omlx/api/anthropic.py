"""The Anthropic dialect: messages, streamed and whole, and how many tokens they have."""

import json
import re
import sys
import uuid
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from pydantic_core import from_json

from omlx.api.anthropic_body import NOT_SUPPORTED, CountBody, Format, MessagesBody, Tool
from omlx.api.anthropic_prompt import conversation, told_id
from omlx.api.chat import ChatPrompt, ChatRequest, OutputFormat, ToolChoice, unset_fields
from omlx.api.events import (
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceEnd,
    Event,
    Fault,
    Finished,
    Piece,
    Progress,
    ReasoningPiece,
    Started,
    TextPiece,
    ToolCall,
    Usage,
)
from omlx.api.openai_body import validated
from omlx.api.tool_prompt import canonical_tools
from omlx.errors import BadRequest
from omlx.request import GREEDY_BELOW, SamplingParams, http_request_id

_NO_INPUT = {"type": "object", "properties": {}}
_MODES: dict[str, Literal["auto", "none", "required", "named"]] = {
    "auto": "auto", "none": "none", "any": "required", "tool": "named",
}  # fmt: skip
# Templates that take an effort know these three.
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
# Clients hand it back with the thought, unread; some drop a thought that has none.
_SIGNATURE = "omlx"
# In JSON: the first half without the second, or the second without the first.
_HALF_PAIR = re.compile(r"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]\w\w")
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# ---- bodies


def parse_messages(body: dict[str, Any]) -> tuple[ChatRequest, "MessagesDialect"]:
    """A body of POST /v1/messages. Raises BadRequest, which names the field."""
    fields = validated(MessagesBody, body, NOT_SUPPORTED)
    if fields.messages[-1].role == "assistant":
        raise BadRequest("messages: the last one has to be the user's; answers are not continued", param="messages")
    request = replace(
        _request(fields),
        sampling=_sampling(fields),
        stream=bool(fields.stream),
        use_cache=fields.cache is not False,
        unset=unset_fields(fields),
    )
    return request, MessagesDialect(fields.model, fields.max_tokens)


def parse_count(body: dict[str, Any]) -> ChatRequest:
    """A body of POST /v1/messages/count_tokens. Raises BadRequest, which names the field."""
    return _request(validated(CountBody, body, NOT_SUPPORTED))


def _request(fields: CountBody) -> ChatRequest:
    messages, images = conversation(fields)
    output = fields.output_config.format if fields.output_config else None
    return ChatRequest(
        model=fields.model,
        prompt=ChatPrompt(messages, _template_args(fields), _tools(fields.tools or ()), images),
        sampling=SamplingParams(max_tokens=1),
        cache_salt=fields.cache_salt or "",
        tool_choice=_tool_choice(fields),
        output_format=_output_format(output or fields.output_format),
        format_field="output_config" if output else "output_format",
    )


def _sampling(fields: MessagesBody) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    return SamplingParams(
        max_tokens=0
        if fields.max_tokens < 0
        else max(fields.max_tokens, 1),  # with 0 the prompt alone is wanted; see MessagesDialect
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        seed=fields.seed,
        stop=tuple(fields.stop_sequences or ()),
    )


def _template_args(fields: CountBody) -> dict[str, Any]:
    """Arguments of the chat template. Nothing is said of thinking where the client says nothing."""
    args: dict[str, Any] = {}
    if fields.thinking is not None:
        args["enable_thinking"] = fields.thinking.type != "disabled"
    if fields.output_config is not None and fields.output_config.effort is not None:
        args["reasoning_effort"] = _EFFORTS[fields.output_config.effort]
    return args | (fields.chat_template_kwargs or {})


def _tools(given: "list[Tool] | tuple[()]") -> tuple[dict[str, Any], ...]:
    """What may be called, in the one form in which prompts have it. Raises BadRequest."""
    names: set[str | None] = set()
    for index, tool in enumerate(given):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise BadRequest(
                f"{place}.type: {tool.type[:80]!r} is a tool of Anthropic's models or servers; here tools are given by"
                " name, description and input_schema",
                param=f"{place}.type",
                code="unsupported_parameter",
            )
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise BadRequest(f"{place}.{name}: has to be given", param=f"{place}.{name}")
        if tool.name in names:
            raise BadRequest(f"{place}.name: {tool.name!r} is there twice", param=f"{place}.name")
        names.add(tool.name)
    return canonical_tools([_tool(tool) for tool in given])


def _tool(tool: Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema or _NO_INPUT}
    return {"type": "function", "function": function}


def _tool_choice(fields: CountBody) -> ToolChoice:
    """Raises BadRequest for a choice among tools that are not there."""
    tools, given = fields.tools or [], fields.tool_choice
    strict = any(tool.strict for tool in tools)
    if given is None:
        return ToolChoice(strict=strict)
    if given.type in ("any", "tool") and not tools:
        raise BadRequest(f"tool_choice: {given.type}, but there are no tools", param="tool_choice")
    name = given.name or ""
    if given.type == "tool" and name not in [tool.name for tool in tools]:
        raise BadRequest(f"tool_choice.name: no tool {name[:80]!r} in tools", param="tool_choice.name")
    return ToolChoice(
        _MODES[given.type], name if given.type == "tool" else "", not given.disable_parallel_tool_use, strict
    )


def _output_format(given: Format | None) -> OutputFormat | None:
    return None if given is None else OutputFormat("json_schema", given.schema_, strict=True)


# ---- answers


def error_body(fault: Fault) -> dict[str, Any]:
    """An error as Anthropic's clients expect it. Agents know too long prompts by these words."""
    message = fault.message
    if fault.too_long is not None:
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.too_long)
    elif fault.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    kind = _KINDS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": http_request_id.get(),
    }


class MessagesDialect:
    """POST /v1/messages. With `max_tokens` 0 only the prompt is computed, for the cache: the answer is empty.

    That takes one token all the same, which is not handed out.
    """

    def __init__(self, model: str, max_tokens: int) -> None:
        self.request_id = f"msg_{uuid.uuid4().hex[:24]}"
        self._model = model
        self._max_tokens = max_tokens
        self._index = -1  # of the last block
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._end: ChoiceEnd | None = None

    def frames(self, event: Event) -> list[str]:
        """Server-sent events for one event of the answer."""
        match event:
            case Started():
                return [_frame("message_start", message=self._start(event))]
            case Progress():
                return [_frame("ping")]
            case Fault():
                return [_named("error", error_body(event))]
            case ChoiceEnd():
                self._end = event
                return self._close()
            case Finished():
                return self._finish(event.usage)
            case _:
                return self._piece(event) if self._max_tokens else []

    def body(self, answer: Answer) -> dict[str, Any]:
        """The whole answer as one object."""
        choice = answer.choices[0]
        parts = choice.parts if self._max_tokens else ()
        content = [_block(part) for part in parts if isinstance(part, ToolCall) or part.text]
        return self._message(content, self._usage(answer.usage)) | self._reason(choice.end, answer.usage)

    # ---- what frames are made of

    def _start(self, event: Started) -> dict[str, Any]:
        """What is not known yet of the usage comes with its end."""
        return self._message([], self._usage(Usage(event.prompt_tokens, 0, event.cached_tokens)))

    def _piece(self, piece: Piece) -> list[str]:
        match piece:
            case TextPiece(text=text):
                return self._delta("text", {"type": "text_delta", "text": text}) if text else []
            case ReasoningPiece(text=text):
                return self._delta("thinking", {"type": "thinking_delta", "thinking": text}) if text else []
            case CallStart():
                return self._begin("tool_use", _block(ToolCall(piece.call_id, piece.name, "")))
            case CallArguments(text=text):
                return self._delta("tool_use", {"type": "input_json_delta", "partial_json": text}) if text else []
            case CallEnd():
                return self._close()

    def _delta(self, kind: Literal["text", "thinking", "tool_use"], delta: dict[str, Any]) -> list[str]:
        """A delta in the open block, or in a new one if that is of another kind."""
        opening = self._begin(kind, _EMPTY[kind]) if self._open != kind else []
        return [*opening, _frame("content_block_delta", index=self._index, delta=delta)]

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]) -> list[str]:
        closing = self._close()
        self._open = kind
        self._index += 1
        return [*closing, _frame("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[str]:
        if self._open is None:
            return []
        signature = {"type": "signature_delta", "signature": _SIGNATURE}
        signing = [_frame("content_block_delta", index=self._index, delta=signature)]
        before = signing if self._open == "thinking" else []
        self._open = None
        return [*before, _frame("content_block_stop", index=self._index)]

    def _finish(self, usage: Usage) -> list[str]:
        assert self._end is not None, "an answer's end comes before its usage"
        delta = _frame("message_delta", delta=self._reason(self._end, usage), usage=self._usage(usage))
        return [delta, _frame("message_stop")]

    # ---- what both forms have

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _reason(self, end: ChoiceEnd, usage: Usage) -> dict[str, Any]:
        """A call comes first: whatever ended the answer, it has to be made."""
        reason, stop = "end_turn", None
        if not self._max_tokens:
            reason = "max_tokens"
        elif end.reason == "tool_calls":
            reason = "tool_use"
        elif end.reason == "length":
            # With fewer tokens than asked for it was the context that ended.
            reason = (
                "max_tokens" if usage.completion_tokens >= self._max_tokens > 0 else "model_context_window_exceeded"
            )
        elif end.stop is not None:
            reason, stop = "stop_sequence", end.stop
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The first three are the prompt. All of it is stored by itself, so nothing counts as stored on demand."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens if self._max_tokens else 0,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens if self._max_tokens else 0},
        }


_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def _block(part: TextPiece | ReasoningPiece | ToolCall) -> dict[str, Any]:
    if isinstance(part, TextPiece):
        return {"type": "text", "text": part.text}
    if isinstance(part, ReasoningPiece):
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
    return {
        "type": "tool_use",
        "id": told_id(part.call_id),
        "name": part.name,
        "input": _input(part.arguments),
    }


def _input(arguments: str) -> Any:
    """The arguments as an object. Of what the limit cut, as much as is certain: as clients read it from a stream."""
    whole = _HALF_PAIR.sub(r"\\ufffd", arguments)
    for text in (arguments, whole):
        with suppress(ValueError):
            return _finite(from_json(text, allow_partial=True))
    with suppress(ValueError, RecursionError):
        return _finite(json.loads(whole))  # goes deeper
    return {}


def _finite(value: Any) -> Any:
    """1e999 is read as infinity, which JSON does not have: the largest number stands for it."""
    if isinstance(value, dict):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return max(-sys.float_info.max, min(value, sys.float_info.max)) if isinstance(value, float) else value


def _frame(name: str, **members: Any) -> str:
    return _named(name, {"type": name} | members)


def _named(name: str, body: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
