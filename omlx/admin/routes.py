"""The routes under /admin: what the caches hold, what they have of a prompt, and how to empty them.

Who may come here is decided before, by `access.checks.AdminCheck`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from omlx import __version__
from omlx.access.keys import ANYBODY, ApiKey, KeyRing
from omlx.api import anthropic, openai
from omlx.api.bounded import Deferred, Small
from omlx.api.chat import ChatPrompt, ChatRequest, EnginePool, in_prompt_thread, prompt_tokens, template_changes
from omlx.api.json_text import ReadBody
from omlx.api.message_places import where_it_differs
from omlx.api.openai_body import Body, TokenIds, validated
from omlx.api.openapi import documented
from omlx.api.pictures import Source, with_pictures
from omlx.api.responses.parse import parse as parse_response
from omlx.api.responses.store import ResponseStore
from omlx.errors import BadRequest, NotFound
from omlx.request import ImageStart, Request
from omlx.settings import Settings, option_fields, option_name
from omlx.sizes import parse_duration

if TYPE_CHECKING:  # they load MLX, which takes seconds: the server listens before that
    from omlx.cache.conversation import Forgotten
    from omlx.cache.probe import PrefixProbe
    from omlx.storage.clearing import Cleared

ModelName = Annotated[str, Field(min_length=1, max_length=500)]

_NO_CACHE = {
    "blocks": [],
    "cached_tokens": 0,
    "first_miss": {"token": 0, "reason": "this model is served without a cache"},
}


class AdminPool(EnginePool, Protocol):
    """What operators ask of all served models (omlx.engine.pool has the real one)."""

    async def cache_figures(self) -> dict[str, Any]: ...

    async def cache_probe(
        self, name: str, tokens: Sequence[int], salt: str = "", images: Sequence[ImageStart] = ()
    ) -> "PrefixProbe | None": ...

    async def feature_tiers(self, name: str, keys: Sequence[str]) -> list[Literal["ram", "ssd"] | None]: ...

    async def clear_cache(self, name: str | None = None, older_than_s: float | None = None) -> "Cleared": ...

    async def forget_conversation(self, name: str, tokens: Sequence[int], salt: str = "") -> "Forgotten": ...


class ProbeBody(Body):
    """POST /admin/cache_probe: a prompt as in a chat completion, in a completion, or as token ids.

    With `dialect` anthropic it is one as in POST /v1/messages, with responses one as in POST /v1/responses.
    """

    model: ModelName
    dialect: Literal["openai", "anthropic", "responses"] | None = None
    messages: Deferred = None
    prompt: Deferred = None
    tokens: Annotated[TokenIds, Field(min_length=1)] | None = None
    chat_template_kwargs: Deferred = None
    reasoning_effort: Deferred = None
    tools: Deferred = None
    cache_salt: Deferred = None
    api_key_name: Small = None


class ClearBody(Body):
    """POST /admin/cache/clear without a prompt: null stands for all models, and has to be written out."""

    model: ModelName | None
    older_than: Small = None


class AnyClearBody(ProbeBody):
    """Both that /admin/cache/clear takes: all of a model's blocks (or of all), or a conversation."""

    model: ModelName | None  # type: ignore[assignment]
    older_than: Small = None


class FiguresAnswer(BaseModel):
    """Counters and bytes, in total and by model, and the settings in force."""

    version: str
    total: dict[str, Any]
    models: dict[str, dict[str, Any]]
    stored: list[dict[str, Any]]
    embedders: dict[str, Any]
    settings: dict[str, dict[str, Any]]


class ShownBlock(BaseModel):
    index: int
    hash: str
    tokens: int
    cached_tokens: int
    state: str


class Miss(BaseModel):
    """Of a conversation that differs from what is cached also in which message: its number, its role and a hint."""

    token: int
    reason: str
    message: int | None = None
    role: str | None = None
    hint: str | None = None


class ShownImage(BaseModel):
    token: int
    hash: str
    features: Literal["ram", "ssd"] | None


class ProbeAnswer(BaseModel):
    """`images` are there for a prompt that has some, `adapted` for messages that had to be adapted to the template."""

    model: str
    tokens: int
    blocks: list[ShownBlock]
    cached_tokens: int
    first_miss: Miss | None
    images: list[ShownImage] | None = None
    adapted: list[str] | None = None


class ClearAnswer(BaseModel):
    """What is deleted, images' features too unless it was a conversation, of which also why the rest stayed.

    `responses`: how many stored ones, where all models are cleared.
    """

    blocks: int
    bytes: int
    images: int | None = None
    responses: int | None = None
    prompt_tokens: int | None = None
    kept_tokens: int | None = None
    kept_because: str | None = None


# With one of these it is a conversation that goes, and the body may be all that a completion's may.
_PROMPTS = ("messages", "prompt", "tokens")


def router(
    pool: AdminPool,
    settings: Settings,
    read_body: ReadBody,
    source: Source,
    keys: KeyRing,
    responses: ResponseStore,
) -> APIRouter:
    """GET and POST /admin/cache_probe, POST /admin/cache/clear. `read_body` gives what a request's body says.

    Images of prompts come from `source`, earlier turns from `responses`.
    """

    async def figures() -> Response:
        return JSONResponse({"version": __version__, **await pool.cache_figures(), "settings": _in_force(settings)})

    async def prompt_of(asked: ChatRequest) -> tuple[ChatRequest, Request]:
        engine = await pool.get(asked.model)
        asked = await with_pictures(engine, asked, source)
        tokens, vision = await in_prompt_thread(engine, prompt_tokens, engine, asked)
        if not tokens:
            raise BadRequest("the prompt is empty", param=asked.prompt_field)
        return asked, Request("admin", tokens, asked.sampling, cache_salt=asked.cache_salt, vision=vision)

    async def probe(http: HttpRequest) -> Response:
        asked, prompt = await prompt_of(await read_body(http, partial(_parse_probe, responses, keys)))
        engine = await pool.get(asked.model)
        found = await pool.cache_probe(
            asked.model, prompt.cache_tokens(prompt.prompt), prompt.cache_salt, prompt.images
        )
        shown: dict[str, Any] = {"model": asked.model, "tokens": len(prompt.prompt)} | _shown(found)
        if isinstance(asked.prompt, ChatPrompt) and (changes := template_changes(engine, asked.prompt)):
            shown["adapted"] = changes
        if found is not None and found.first_miss is not None and isinstance(asked.prompt, ChatPrompt):
            parts = asked.prompt, prompt.prompt, found.first_miss
            place = await in_prompt_thread(engine, where_it_differs, engine, *parts)
            shown["first_miss"] |= place
        return JSONResponse(shown | await _pictures(pool, asked.model, prompt))

    async def clear(http: HttpRequest) -> Response:
        fields = await read_body(http, partial(_parse_clear, responses, keys))
        if isinstance(fields, ChatRequest):
            asked, prompt = await prompt_of(fields)
            gone = await pool.forget_conversation(asked.model, prompt.cache_tokens(prompt.prompt), prompt.cache_salt)
            return JSONResponse(gone._asdict())
        age_s = _age(fields.older_than)
        cleared = await pool.clear_cache(fields.model, age_s)
        count = await asyncio.to_thread(_clear_responses, responses, age_s) if fields.model is None else 0
        if not cleared.blocks and not cleared.images and fields.model is not None:
            await _check_known(pool, fields.model)
        return JSONResponse(cleared._asdict() | ({"responses": count} if count else {}))

    routes = APIRouter(prefix="/admin")
    busy = (404, 503)
    all_of_it = documented("What the caches hold", answer=FiguresAnswer, errors=[503])
    of_a_prompt = documented("What the cache has of a prompt", ProbeBody, ProbeAnswer, errors=busy)
    deleted = documented("Delete blocks", AnyClearBody, ClearAnswer, errors=busy)
    routes.add_api_route("/cache_probe", figures, methods=["GET"], **all_of_it)
    routes.add_api_route("/cache_probe", probe, methods=["POST"], **of_a_prompt)
    routes.add_api_route("/cache/clear", clear, methods=["POST"], **deleted)
    return routes


def _in_force(settings: Settings) -> dict[str, Any]:
    """Every option with its value (sizes in bytes, secrets masked) and where it came from."""
    values, sources = settings.model_dump(mode="json"), settings.resolve_sources()
    return {option_name(name): {"value": values[name], "source": sources[name]} for name in option_fields()}


def _clear_responses(responses: ResponseStore, age_s: int | None) -> int:
    return responses.clear(None if age_s is None else time.time_ns() - age_s * 10**9)


def _parse_probe(responses: ResponseStore, keys: KeyRing, body: dict[str, Any]) -> ChatRequest:
    key = _key_named(body.get("api_key_name"), keys)
    return _asked(body, responses, key).asked_by(key)


def _parse_clear(responses: ResponseStore, keys: KeyRing, body: dict[str, Any]) -> ChatRequest | ClearBody:
    if _is_conversation(body):
        return _parse_probe(responses, keys, _up_to_the_last_question(body))
    return validated(ClearBody, body)


def _is_conversation(body: dict[str, Any]) -> bool:
    """Whether a prompt is named whose blocks are to go. Raises BadRequest for what might delete more than is meant.

    So a field that is not known, or null, is never just passed over.
    """
    for name in (*_PROMPTS, "older_than"):
        if name in body and body[name] is None:
            raise BadRequest(f"{name}: null is no value here; leave it out to delete more", param=name)
    given = [name for name in _PROMPTS if name in body]
    if given and "older_than" in body:
        raise BadRequest(f"older_than: not together with {given[0]}", param="older_than")
    for name in body if "model" in body and not given else ():
        if name not in ClearBody.model_fields:
            raise BadRequest(f"{name[:80]}: no such field here", param=name[:80])
    return bool(given)


def _up_to_the_last_question(body: dict[str, Any]) -> dict[str, Any]:
    """Without the answers at the end: whatever was answered goes, as it was generated and not as it is written here."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    end = len(messages)
    while end > 1 and isinstance(messages[end - 1], dict) and messages[end - 1].get("role") == "assistant":
        end -= 1
    return body | {"messages": messages[:end]}


def _key_named(name: Any, keys: KeyRing) -> ApiKey:
    """The API key whose cache a prompt is looked for in; its own salt is known here alone. Raises BadRequest."""
    if name is None:
        return ANYBODY
    key = keys.named(name) if isinstance(name, str) else None
    if key is None:
        raise BadRequest("api_key_name: there is no API key of this name", param="api_key_name")
    return key


async def _check_known(pool: AdminPool, name: str) -> None:
    """Raises NotFound for a model that is neither served nor has anything stored: it is a slip of the pen."""
    if any(name == model.name or name in model.aliases for model in pool.models()):
        return
    stored = (await pool.cache_figures())["stored"]
    if all(model["model"] != name for model in stored):
        raise NotFound(f"no model {name!r} here, and no blocks of one")


def _age(older_than: Any) -> int | None:
    if older_than is None:
        return None
    try:
        return parse_duration(older_than)
    except ValueError as error:
        raise BadRequest(f"older_than: {error}", param="older_than") from None


def _asked(body: dict[str, Any], responses: ResponseStore, key: ApiKey) -> ChatRequest:
    """The prompt, taken apart as the dialect does it. Raises BadRequest."""
    fields = validated(ProbeBody, body)
    if fields.dialect == "anthropic":
        return anthropic.parse_count(body)
    if fields.dialect == "responses":
        return parse_response(body, responses, key.digest)[0]
    given = [name for name in ("messages", "prompt", "tokens") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise BadRequest("exactly one of messages, prompt and tokens has to be given", param=(given or ["messages"])[0])
    parts = {"model": fields.model, "cache_salt": fields.cache_salt}
    if fields.messages is not None:
        extra = {
            "messages": fields.messages,
            "chat_template_kwargs": fields.chat_template_kwargs,
            "reasoning_effort": fields.reasoning_effort,
            "tools": fields.tools,
        }
        return openai.parse_chat(parts | extra)[0]
    if fields.prompt is not None:
        return openai.parse_completion(parts | {"prompt": fields.prompt})[0]
    return replace(openai.parse_completion(parts | {"prompt": fields.tokens})[0], prompt_field="tokens")


async def _pictures(pool: AdminPool, model: str, prompt: Request) -> dict[str, Any]:
    """Where the features of each picture of the prompt are; nothing for a prompt without pictures."""
    if prompt.vision is None:
        return {}
    tiers = await pool.feature_tiers(model, [prompt.vision.feature_key(image.digest) for image in prompt.images])
    found = zip(prompt.images, tiers, strict=True)
    return {"images": [{"token": i.position, "hash": i.digest.hex(), "features": tier} for i, tier in found]}


def _shown(probe: "PrefixProbe | None") -> dict[str, Any]:
    if probe is None:
        return _NO_CACHE
    blocks = [
        {
            "index": block.index,
            "hash": block.block_hash.hex(),
            "tokens": block.tokens,
            "cached_tokens": block.cached_tokens,
            "state": block.state,
        }
        for block in probe.blocks
    ]
    miss = probe.first_miss
    return {
        "blocks": blocks,
        "cached_tokens": probe.cached_tokens,
        "first_miss": None if miss is None else {"token": miss.token, "reason": miss.reason},
    }
