"""Answers of the Anthropic dialect, as far as /openapi.json promises them; there may be more fields."""

from typing import Any, Literal

from pydantic import BaseModel


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """The prompt has `input_tokens` and both kinds of cached ones."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(BaseModel):
    input_tokens: int


class MessagesError(BaseModel):
    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Every answer that is no success, as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessagesError
    request_id: str
