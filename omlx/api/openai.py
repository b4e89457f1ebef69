"""The OpenAI dialect: chat completions and completions, streamed and whole."""

import json
import math
import time
import uuid
from typing import Any

from omlx.api.chat import ChatPrompt, ChatRequest
from omlx.api.events import Answer, Event, Fault, Finished, Progress, TextPiece, TokenText, Usage
from omlx.api.openai_body import ChatBody, CompletionBody, GenerationBody, Message, validated
from omlx.errors import BadRequest
from omlx.request import SamplingParams

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOWEST_LOGPROB = -9999.0
# Below this the best token wins anyway, and dividing by it would overflow.
_GREEDY_BELOW = 1e-4


def parse_chat(body: dict[str, Any]) -> tuple[ChatRequest, "ChatDialect"]:
    """A body of POST /v1/chat/completions. Raises BadRequest, which names the field."""
    fields = validated(ChatBody, body)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    prompt = ChatPrompt(
        [_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)],
        fields.chat_template_kwargs or {},
    )
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _request(fields, prompt, top_logprobs, "messages"), ChatDialect(fields, top_logprobs is not None)


def parse_completion(body: dict[str, Any]) -> tuple[ChatRequest, "CompletionDialect"]:
    """A body of POST /v1/completions. Raises BadRequest, which names the field."""
    fields = validated(CompletionBody, body)
    request = _request(fields, _one_prompt(fields), fields.logprobs, "prompt")
    return request, CompletionDialect(fields, fields.logprobs is not None)


def error_body(fault: Fault) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": fault.code,
        }
    }


def model_body(name: str, created: int, context_length: int | None) -> dict[str, Any]:
    """One entry of /v1/models; the context length where it is known, by the two names clients look for."""
    body: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "omlx"}
    if context_length is not None:
        body |= {"context_length": context_length, "max_model_len": context_length}
    return body


def _request(
    fields: GenerationBody, prompt: ChatPrompt | str | list[int], top_logprobs: int | None, prompt_field: str
) -> ChatRequest:
    return ChatRequest(
        model=fields.model,
        prompt=prompt,
        sampling=_sampling(fields, top_logprobs),
        stream=bool(fields.stream),
        use_cache=fields.cache is not False,
        cache_salt=fields.cache_salt or "",
        prompt_field=prompt_field,
        max_tokens_field="max_completion_tokens" if fields.max_completion_tokens else "max_tokens",
    )


def _sampling(fields: GenerationBody, top_logprobs: int | None) -> SamplingParams:
    temperature = _default(fields.temperature, 1.0)
    return SamplingParams(
        max_tokens=fields.max_completion_tokens or fields.max_tokens or 0,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
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


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _message(message: Message, path: str) -> dict[str, Any]:
    """A message for the chat template. Templates know "system", not its later name "developer"."""
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise BadRequest(
                f"{path}.{name} is not supported yet", param=f"{path}.{name}", code="unsupported_parameter"
            )
    role = "system" if message.role == "developer" else message.role
    rendered = {"role": role, "content": _text(message.content, f"{path}.content")}
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return rendered | {name: value for name, value in extras.items() if value is not None}


def _text(content: str | list[dict[str, Any]] | None, path: str) -> str:
    """The text of a message; parts are put on lines of their own."""
    if content is None or content == []:
        raise BadRequest(f"{path}: a text is required", param=path)
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: dict[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind in ("image_url", "input_audio", "file", "refusal"):
        raise BadRequest(f"{path}: {kind} parts are not supported yet", param=path, code="unsupported_parameter")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRequest(f'{path}: expected {{"type": "text", "text": "..."}}', param=path)
    return str(part["text"])


def _one_prompt(fields: CompletionBody) -> str | list[int]:
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BadRequest("prompt: lists of prompts are not supported yet", param="prompt")
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("prompt: must not be empty", param="prompt")
    return prompt  # type: ignore[return-value]  # a list here holds ints only


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
        if isinstance(event, Progress):
            return [f": prefill {event.prefilled_tokens}/{event.prompt_tokens}\n\n"]
        if isinstance(event, Fault):
            return [_frame(error_body(event))]
        if isinstance(event, TextPiece):
            return [self._chunk(choice) for choice in self._piece_choices(event)]
        return [*(self._chunk(choice) for choice in self._end_choices(event)), *self._end(event.usage)]

    def body(self, answer: Answer) -> dict[str, Any]:
        """The whole answer as one object."""
        choice = self._choice(answer) | {"finish_reason": answer.end.reason}
        return self._head(self.object_name) | {"choices": [choice], "usage": usage_body(answer.end.usage)}

    def _piece_choices(self, piece: TextPiece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _end_choices(self, end: Finished) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _choice(self, answer: Answer) -> dict[str, Any]:
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

    def __init__(self, fields: GenerationBody, logprobs: bool) -> None:
        super().__init__(fields, logprobs)
        self._begun = False

    def _piece_choices(self, piece: TextPiece) -> list[dict[str, Any]]:
        return [*self._opening(), self._delta({"content": piece.text}, self._token_list(piece.tokens))]

    def _end_choices(self, end: Finished) -> list[dict[str, Any]]:
        return [*self._opening(), self._delta({}, None, end.reason)]

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._token_list(answer.tokens)}

    def _opening(self) -> list[dict[str, Any]]:
        """The role goes before everything else, once."""
        if self._begun:
            return []
        self._begun = True
        return [self._delta({"role": "assistant", "content": ""}, None)]

    def _delta(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _token_list(self, tokens: tuple[TokenText, ...]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [_token(token) | {"top_logprobs": [_token(best) for best in token.top]} for token in tokens]
        return {"content": content, "refusal": None}


class CompletionDialect(OpenAIDialect):
    """POST /v1/completions."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def _piece_choices(self, piece: TextPiece) -> list[dict[str, Any]]:
        return [self._text(piece.text, piece.tokens) | {"finish_reason": None}]

    def _end_choices(self, end: Finished) -> list[dict[str, Any]]:
        return [self._text("", ()) | {"logprobs": None, "finish_reason": end.reason}]

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return self._text(answer.text, answer.tokens)

    def _text(self, text: str, tokens: tuple[TokenText, ...]) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._columns(tokens)}

    def _columns(self, tokens: tuple[TokenText, ...]) -> dict[str, Any] | None:
        """The older form of logprobs: a list for each property; the chosen token is among the best."""
        if not self._logprobs:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [{best.text: _finite(best.logprob) for best in (*token.top, token)} for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.data)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _frame(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
