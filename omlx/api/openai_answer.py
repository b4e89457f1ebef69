"""Answers of the OpenAI dialect, as far as /openapi.json promises them; there may be more fields."""

from typing import Any, Literal

from pydantic import BaseModel


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class CalledFunction(BaseModel):
    """`arguments` are JSON as the model wrote it."""

    name: str
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """`content` is null where the model only called tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Call] | None = None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatAnswer(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelAnswer(BaseModel):
    """`context_length` is what is enforced, and so are its other names; it is known of models in memory only.

    `kind` says what the model is for: text, vision (text about images too), embedding or rerank. `note` is there for a
    vision model that is served as a text model, and says why.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: Literal["text", "vision", "embedding", "rerank"]
    status: Literal["loaded", "loading", "not loaded"]
    note: str | None = None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    context_length: int | None = None
    max_model_len: int | None = None
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class ModelsAnswer(BaseModel):
    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: bool
    first_id: str | None
    last_id: str | None


class StatusAnswer(BaseModel):
    status: str
    loading: list[str] | None = None
