"""POST /tokenize and /detokenize, in the form in which vLLM has them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic_core import to_json
from transformers import PreTrainedTokenizerFast

from omlx.api import openai
from omlx.api.bounded import Deferred
from omlx.api.chat import (
    ChatPrompt,
    ChatRequest,
    Engine,
    EnginePool,
    check_length,
    encode,
    in_prompt_thread,
    prompt_tokens,
    render,
    tokenizing,
)
from omlx.api.json_text import ReadBody
from omlx.api.openai_body import Body, TokenIds, validated
from omlx.api.openapi import documented
from omlx.api.pictures import Source, with_pictures
from omlx.errors import BadRequest

_Model = Annotated[str, Field(min_length=1, max_length=500)]


class TokenizeBody(Body):
    """A `prompt` as in a completion, or `messages` (with `tools`) as in a chat completion."""

    model: _Model
    prompt: str | None = None
    messages: Deferred = None
    tools: Deferred = None
    chat_template_kwargs: Deferred = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: _Model
    tokens: TokenIds


class TokenizeAnswer(BaseModel):
    """`token_strs` are the tokenizer's own names of the tokens, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


def router(pool: EnginePool, read_body: ReadBody, source: Source) -> APIRouter:
    """The two routes. `read_body` gives what a request's body says, `source` the images of its messages."""

    async def tokenize(http: Request) -> Response:
        fields, asked = await read_body(http, _parse)
        engine = await pool.get(fields.model)
        if asked is not None:
            asked = await with_pictures(engine, asked, source)
        return await in_prompt_thread(engine, _answer, tokenized, engine, fields, asked)

    async def detokenize(http: Request) -> Response:
        fields = await read_body(http, partial(validated, DetokenizeBody))
        engine = await pool.get(fields.model)
        return await asyncio.to_thread(_answer, detokenized, engine, fields)

    routes = APIRouter()
    busy = (404, 503)
    tokens_of = documented("Token ids of a prompt", TokenizeBody, TokenizeAnswer, errors=busy)
    text_of = documented("The text of token ids", DetokenizeBody, DetokenizeAnswer, errors=busy)
    routes.add_api_route("/tokenize", tokenize, methods=["POST"], **tokens_of)
    routes.add_api_route("/detokenize", detokenize, methods=["POST"], **text_of)
    return routes


def _parse(body: dict[str, Any]) -> tuple[TokenizeBody, ChatRequest | None]:
    """The fields, and the conversation if it is one that is to be tokenized. Raises BadRequest."""
    fields = validated(TokenizeBody, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise BadRequest("exactly one of prompt and messages has to be given", param="prompt")
    return fields, None if fields.messages is None else _conversation(fields)


def _answer(make: Callable[..., dict[str, Any]], *args: Any) -> Response:
    """As JSON; to be called in a thread, since there may be a million tokens."""
    return Response(to_json(make(*args)), media_type="application/json")


def tokenized(engine: Engine, fields: TokenizeBody, asked: ChatRequest | None) -> dict[str, Any]:
    """The answer to POST /tokenize; `asked` are its messages, if it has such. Raises BadRequest."""
    special = fields.add_special_tokens
    if fields.prompt is not None:
        tokens = encode(engine, fields.prompt, "prompt", special=special is not False)
    elif asked is not None and engine.vision is not None:
        tokens, _ = prompt_tokens(engine, asked)
    else:
        assert asked is not None
        assert isinstance(asked.prompt, ChatPrompt)
        check_length(engine, asked.prompt, "messages")
        text = render(engine, asked.prompt, ready=fields.add_generation_prompt is not False)
        tokens = encode(engine, text, "messages", special=bool(special))
    body = {"count": len(tokens), "max_model_len": engine.context_length, "tokens": tokens}
    return body | {"token_strs": engine.tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else None}


def _conversation(fields: TokenizeBody) -> ChatRequest:
    parts = {"messages": fields.messages, "tools": fields.tools, "chat_template_kwargs": fields.chat_template_kwargs}
    return openai.parse_chat({"model": fields.model} | parts)[0]


def detokenized(engine: Engine, fields: DetokenizeBody) -> dict[str, Any]:
    """The answer to POST /detokenize. Raises BadRequest."""
    if fields.tokens and max(fields.tokens) >= engine.vocab_size:
        raise BadRequest(f"tokens: token ids of this model are from 0 to {engine.vocab_size - 1}", param="tokens")
    with tokenizing(engine.name):
        return {"prompt": _text(engine.tokenizer, fields.tokens)}


def _text(tokenizer: Any, tokens: list[int]) -> str:
    inner: Any = tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else getattr(tokenizer, "_tokenizer", None)
    if getattr(type(inner), "_decode", None) is PreTrainedTokenizerFast._decode:
        # The same as `decode`, which holds the GIL for 150 ns a token; a batch is decoded without it.
        texts: list[str] = inner.backend_tokenizer.decode_batch([tokens], skip_special_tokens=False)
        return texts[0]
    text: str = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
