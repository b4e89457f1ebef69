"""The OpenAI dialect: chat completions and completions, streamed and whole."""

import json
import math
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from omlx.api.chat import ChatPrompt, ChatRequest, ImagePart, unset_fields
from omlx.api.custom_tools import custom_input
from omlx.api.events import (
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    Choice,
    ChoiceEnd,
    Event,
    Fault,
    Finished,
    Piece,
    Progress,
    ReasoningPiece,
    Started,
    TextPiece,
    TokenText,
    ToolCall,
    Usage,
)
from omlx.api.openai_body import ChatBody, CompletionBody, GenerationBody, Message, SamplingBody, validated
from omlx.api.openai_content import content_of, text_of
from omlx.api.openai_tools import called, custom_names, template_args, tool_choice, tools, with_names
from omlx.api.output_formats import output_format
from omlx.api.tool_content import result_content
from omlx.errors import BadRequest
from omlx.request import GREEDY_BELOW, SamplingParams, http_request_id

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOWEST_LOGPROB = -9999.0


def parse_chat(body: dict[str, Any]) -> tuple[ChatRequest, "ChatDialect"]:
    """A body of POST /v1/chat/completions. Raises BadRequest, which names the field."""
    fields = validated(ChatBody, body)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    images: list[ImagePart] = []
    messages = [_message(message, f"messages[{index}]", images) for index, message in enumerate(fields.messages)]
    prompt = ChatPrompt(with_names(messages), _template_args(fields), tools(fields), tuple(images))
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    choice = tool_choice(fields)
    output, field = output_format(fields, choice)
    request = replace(
        _request(fields, prompt, top_logprobs, "messages"),
        tool_choice=choice,
        output_format=output,
        format_field=field,
    )
    return request, ChatDialect(fields, top_logprobs is not None, custom_names(fields))


def parse_completion(body: dict[str, Any]) -> tuple[ChatRequest, "CompletionDialect"]:
    """A body of POST /v1/completions. Raises BadRequest, which names the field."""
    fields = validated(CompletionBody, body)
    if fields.max_tokens == 0 and not fields.echo:
        raise BadRequest("max_tokens: must be at least 1 without echo", param="max_tokens")
    if fields.best_of not in (None, fields.n or 1):
        raise BadRequest("best_of: only as many as n", param="best_of")
    first, *more = _prompts(fields)
    request = _request(fields, first, fields.logprobs, "prompt")
    if fields.echo and fields.suffix:
        raise BadRequest("suffix: not together with echo", param="suffix")
    if fields.echo:
        request = _echoing(request, fields)
    output, field = output_format(fields, request.tool_choice)
    request = replace(
        request,
        more_prompts=tuple(more),
        suffix=fields.suffix or "",
        output_format=output,
        format_field=field,
    )
    return request, CompletionDialect(fields, fields.logprobs is not None)


def _echoing(request: ChatRequest, fields: CompletionBody) -> ChatRequest:
    """The request for a prompt's text and log-probabilities before the answer.

    Where at most one token was asked for it is listed even if it ends the text: lm-eval counts the tokens from the end.
    """
    prompt_only = fields.max_tokens == 0 and fields.max_completion_tokens is None
    logprobs = fields.logprobs is not None
    sampling = replace(request.sampling, prompt_logprobs=logprobs)
    if prompt_only or (logprobs and sampling.max_tokens == 1):
        sampling = replace(sampling, max_tokens=1, ignore_eos=True)
    return replace(request, sampling=sampling, echo=True, prompt_only=prompt_only)


def error_body(fault: Fault) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": fault.code,
        },
        "request_id": http_request_id.get(),
    }


def model_body(name: str, created: int, context_length: int | None) -> dict[str, Any]:
    """One entry of /v1/models, which the clients of Anthropic's API read as well.

    The context length is there where it is known, by the names that clients look for.
    """
    body: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "omlx"}
    body |= {"type": "model", "display_name": name, "created_at": _rfc3339(created), "lifecycle": "active"}
    if context_length is not None:
        body |= dict.fromkeys(("context_length", "max_model_len", "max_input_tokens", "max_tokens"), context_length)
    return body


def models_body(models: list[dict[str, Any]]) -> dict[str, Any]:
    """GET /v1/models: always all of them on one page."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {"first_id": None, "last_id": None}
    return {"object": "list", "data": models, "has_more": False, **ends}


def _rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _request(
    fields: GenerationBody, prompt: ChatPrompt | str | list[int], top_logprobs: int | None, prompt_field: str
) -> ChatRequest:
    return ChatRequest(
        model=fields.model,
        prompt=prompt,
        sampling=sampling_of(fields, fields.max_completion_tokens or fields.max_tokens or 0, top_logprobs),
        stream=bool(fields.stream),
        use_cache=fields.cache is not False,
        cache_salt=fields.cache_salt or "",
        prompt_field=prompt_field,
        n=fields.n or 1,
        unset=unset_fields(fields),
    )


def sampling_of(fields: SamplingBody, max_tokens: int, top_logprobs: int | None) -> SamplingParams:
    """How an answer is sampled; `max_tokens` and `top_logprobs` have other names in each endpoint."""
    temperature = _default(fields.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=_default(fields.top_p, 1.0),
        top_k=max(fields.top_k or 0, 0),
        min_p=_default(fields.min_p, 0.0),
        seed=fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        repetition_penalty=_default(fields.repetition_penalty, 1.0),
        presence_penalty=_default(fields.presence_penalty, 0.0),
        frequency_penalty=_default(fields.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((int(token), bias) for token, bias in (fields.logit_bias or {}).items())),
        top_logprobs=top_logprobs,
        ignore_eos=bool(fields.ignore_eos),
    )


def _template_args(fields: ChatBody) -> dict[str, Any]:
    return template_args(fields.reasoning_effort, fields.chat_template_kwargs)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _message(message: Message, path: str, images: list[ImagePart]) -> dict[str, Any]:
    """A message for the chat template; what it has of images is added to `images`.

    Templates know "system", not its later name "developer".
    """
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise BadRequest(f"{path}.{name} is not supported", param=f"{path}.{name}", code="unsupported_parameter")
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role}
    if message.role == "assistant":
        rendered |= {"content": _answered(message, path)} | called(message)
    else:
        rendered["content"] = _content(message, f"{path}.content", images)
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return rendered | {name: value for name, value in extras.items() if value is not None}


def _answered(message: Message, path: str) -> str:
    """The text of an assistant's message, which may have none."""
    return text_of(message.content or message.refusal or "", f"{path}.content")


def _content(message: Message, path: str, images: list[ImagePart]) -> str | list[dict[str, Any]]:
    if message.role == "tool":
        return result_content(message.content, path, images)
    return content_of(message.content, path, images) if message.role == "user" else text_of(message.content, path)


def _prompts(fields: CompletionBody) -> list[str | list[int]]:
    prompt = fields.prompt
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts: list[Any] = prompt if is_list else [prompt]  # type: ignore[assignment]  # a list of texts or of ids
    if not all(prompts):
        raise BadRequest("prompt: must not be empty", param="prompt")
    return prompts


class OpenAIDialect:
    """What both forms of an answer share; one object for each answer."""

    id_prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(self, fields: GenerationBody, logprobs: bool) -> None:
        self.request_id = self.id_prefix + uuid.uuid4().hex
        self._model = fields.model
        self._created = int(time.time())
        self._logprobs = logprobs
        self._include_usage = bool(fields.stream_options and fields.stream_options.include_usage)

    def frames(self, event: Event) -> list[str]:
        """Server-sent events for one event of the answer."""
        if isinstance(event, Started):
            return []
        if isinstance(event, Progress):
            return [keep_alive(event)]
        if isinstance(event, Fault):
            return [_frame(error_body(event))]
        if isinstance(event, Finished):
            return self._end(event.usage)
        choices = self._end_choices(event) if isinstance(event, ChoiceEnd) else self._piece_choices(event)
        return [self._chunk({"index": event.choice} | choice) for choice in choices]

    def body(self, answer: Answer) -> dict[str, Any]:
        """The whole answer as one object."""
        choices = [
            {"index": choice.end.choice} | self._choice(choice) | {"finish_reason": choice.end.reason}
            for choice in answer.choices
        ]
        return self._head(self.object_name) | {"choices": choices, "usage": usage_body(answer.usage)}

    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _end_choices(self, end: ChoiceEnd) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": name, "created": self._created, "model": self._model}

    def _chunk(self, choice: dict[str, Any]) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return _frame(self._head(self.chunk_name) | {"choices": [choice]} | usage)

    def _end(self, usage: Usage) -> list[str]:
        frames = ["data: [DONE]\n\n"]
        if self._include_usage:
            last = self._head(self.chunk_name) | {"choices": [], "usage": usage_body(usage)}
            frames.insert(0, _frame(last))
        return frames


class ChatDialect(OpenAIDialect):
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, fields: GenerationBody, logprobs: bool, custom: frozenset[str] = frozenset()) -> None:
        """`custom`: names of the custom tools, whose calls have an input instead of arguments."""
        super().__init__(fields, logprobs)
        self._begun: set[int] = set()
        self._custom = custom
        self._inputs: dict[tuple[int, int], str] = {}  # arguments so far of custom calls, by choice and index

    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        delta = self._delta_of(piece)
        tokens = piece.tokens if isinstance(piece, TextPiece) else ()
        body = [_delta(delta, self._token_list(tokens))] if delta is not None else []
        return [*self._opening(piece.choice), *body]

    def _delta_of(self, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case TextPiece():
                return {"content": piece.text}
            case ReasoningPiece():
                return {"reasoning_content": piece.text}
            case CallStart():
                if piece.name in self._custom:
                    self._inputs[piece.choice, piece.index] = ""
                return _call_delta(piece.index, self._call(ToolCall(piece.call_id, piece.name, ""), begun=True))
            case CallArguments():
                if (piece.choice, piece.index) in self._inputs:
                    self._inputs[piece.choice, piece.index] += piece.text
                    return None
                return _call_delta(piece.index, {"function": {"arguments": piece.text}})
            case CallEnd():
                arguments = self._inputs.pop((piece.choice, piece.index), None)
                if arguments is None:
                    return None
                return _call_delta(piece.index, {"custom": {"input": custom_input(arguments)}})

    def _call(self, call: ToolCall, *, begun: bool = False) -> dict[str, Any]:
        head = {"id": call.call_id}
        if call.name in self._custom:
            given = "" if begun else custom_input(call.arguments)
            return head | {"type": "custom", "custom": {"name": call.name, "input": given}}
        return head | {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _end_choices(self, end: ChoiceEnd) -> list[dict[str, Any]]:
        return [*self._opening(end.choice), _delta({}, None, end.reason)]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        calls = [self._call(call) for call in choice.tool_calls]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if calls:
            message |= {"content": choice.text or None, "tool_calls": calls}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {"message": message, "logprobs": self._token_list(choice.tokens)}

    def _opening(self, choice: int) -> list[dict[str, Any]]:
        """The role goes before everything else, once in a choice."""
        if choice in self._begun:
            return []
        self._begun.add(choice)
        return [_delta({"role": "assistant", "content": ""}, None)]

    def _token_list(self, tokens: tuple[TokenText, ...]) -> dict[str, Any] | None:
        return {"content": logprobs_of(tokens), "refusal": None} if self._logprobs else None


class CompletionDialect(OpenAIDialect):
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        assert isinstance(piece, TextPiece)  # an answer without a chat is nothing but text
        return [self._text(piece.text, piece.tokens) | {"finish_reason": None}]

    def _end_choices(self, end: ChoiceEnd) -> list[dict[str, Any]]:
        return [self._text("", ()) | {"logprobs": None, "finish_reason": end.reason}]

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return self._text(choice.text, choice.tokens)

    def _text(self, text: str, tokens: tuple[TokenText, ...]) -> dict[str, Any]:
        return {"text": text, "logprobs": self._columns(tokens)}

    def _columns(self, tokens: tuple[TokenText, ...]) -> dict[str, Any] | None:
        """The older form of logprobs: a list for each property; the chosen token is among the best."""
        if not self._logprobs:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_best(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _best(token: TokenText) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one; None for the first token of a prompt, which nothing precedes."""
    if token.logprob is None:
        return None
    best: dict[str, float | None] = {}
    for one in (*token.top, token):
        best.setdefault(one.text, _finite(one.logprob))  # of two tokens with one text the likelier counts
    return best


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _delta(delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _call_delta(index: int, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": index} | call]}


def keep_alive(event: Progress) -> str:
    """A comment, which clients skip. No blank line follows: some clients count those as events without data."""
    if event.prefilled_tokens < event.prompt_tokens:
        return f": prefill {event.prefilled_tokens}/{event.prompt_tokens}\n"
    return ": generating\n"


def logprobs_of(tokens: Iterable[TokenText]) -> list[dict[str, Any]]:
    """What both chat endpoints tell of the tokens of a text."""
    return [_token(token) | {"top_logprobs": [_token(best) for best in token.top]} for token in tokens]


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.data)}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else _LOWEST_LOGPROB


def _frame(body: dict[str, Any]) -> str:
    return f"data: {compact_json(body)}\n\n"


def compact_json(value: Any) -> str:
    """As it goes over the wire."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
