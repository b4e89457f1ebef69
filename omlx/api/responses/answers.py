"""Answers of the Responses endpoint, as far as /openapi.json promises them; there may be more fields."""

from typing import Any, Literal

from pydantic import BaseModel


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class OutputItem(BaseModel):
    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["completed", "incomplete"]


class ResponseAnswer(BaseModel):
    """A response that came to its end. Others are told of in streams, and not kept."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    previous_response_id: str | None
    output: list[OutputItem]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    metadata: dict[str, str]
    store: bool
    usage: Usage


class CompactedAnswer(BaseModel):
    """`output`: the messages of the user, then one compaction item."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: Usage


class InputTokensAnswer(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedAnswer(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(BaseModel):
    id: str
    type: str


class ItemsAnswer(BaseModel):
    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
