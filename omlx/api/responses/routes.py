"""The routes under /v1/responses."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from omlx.api.chat import ChatRequest, Parse
from omlx.api.openapi import documented
from omlx.api.responses.answers import CompactedAnswer, DeletedAnswer, InputTokensAnswer, ItemsAnswer, ResponseAnswer
from omlx.api.responses.body import CompactBody, InputTokensBody, ResponsesBody
from omlx.api.responses.parse import parse, parse_compact, parse_input_tokens
from omlx.api.responses.store import ResponseStore
from omlx.errors import BadRequest

MOST_LISTED = 100
_LISTED = 20


Count = Callable[[Request, Callable[[dict[str, Any]], ChatRequest]], Awaitable[int]]


def router(
    answer: Callable[[Request, Parse], Awaitable[Response]],
    count: Count,
    owner_of: Callable[[Request], bytes],
    store: ResponseStore,
) -> APIRouter:
    """The routes. `answer` answers a request in a dialect, `count` counts the tokens of a request's prompt.

    `owner_of` says whose responses a request may see.
    """

    async def create(http: Request) -> Response:
        return await answer(http, partial(parse, store=store, owner=owner_of(http)))

    async def compact(http: Request) -> Response:
        return await answer(http, partial(parse_compact, store=store, owner=owner_of(http)))

    async def retrieve(http: Request) -> Response:
        if http.query_params.get("stream", "false") != "false":
            raise BadRequest("stream: the events of a stored response are not kept", param="stream")
        return JSONResponse(store.response(owner_of(http), http.path_params["response_id"]))

    async def input_tokens(http: Request) -> Response:
        tokens = await count(http, partial(parse_input_tokens, store=store, owner=owner_of(http)))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def cancel(http: Request) -> Response:
        store.response(owner_of(http), http.path_params["response_id"])
        raise BadRequest(
            "Cannot cancel a synchronous response: this server has no background responses. "
            "To stop a running one, close its connection."
        )

    async def delete(http: Request) -> Response:
        name = http.path_params["response_id"]
        await asyncio.to_thread(store.delete, owner_of(http), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def items(http: Request) -> Response:
        return JSONResponse(_page(store.given(owner_of(http), http.path_params["response_id"]), http.query_params))

    routes = APIRouter()
    one, listed = "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"
    known: dict[str, Any] = {"errors": [404], "path": ["response_id"]}
    made = documented("Response", ResponsesBody, ResponseAnswer, stream=True, errors=(404, 503))
    routes.add_api_route("/v1/responses", create, methods=["POST"], **made)
    counted = documented("Tokens of a response's input", InputTokensBody, InputTokensAnswer, errors=(404, 503))
    routes.add_api_route("/v1/responses/input_tokens", input_tokens, methods=["POST"], **counted)
    compacted = documented("A conversation made short", CompactBody, CompactedAnswer, errors=(404, 503))
    routes.add_api_route("/v1/responses/compact", compact, methods=["POST"], **compacted)
    cancelled = documented("Cancel a background response", **known)
    cancelled["responses"][200] = {"model": ResponseAnswer, "description": "Never: there are no background responses."}
    routes.add_api_route(f"{one}/cancel", cancel, methods=["POST"], **cancelled)
    got = documented("A stored response", answer=ResponseAnswer, **known)
    gone = documented("Delete a stored response", answer=DeletedAnswer, **known)
    inputs = documented("What a stored response is the answer to", answer=ItemsAnswer, **known)
    routes.add_api_route(one, retrieve, methods=["GET"], **got)
    routes.add_api_route(one, delete, methods=["DELETE"], **gone)
    routes.add_api_route(listed, items, methods=["GET"], **inputs)
    return routes


def _page(items: list[dict[str, Any]], query: Any) -> dict[str, Any]:
    """A part of the items: `limit` of them behind the item `after`, the latest first unless `order` is asc."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_LISTED)), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc", param="order")
    if not (re.fullmatch("[0-9]{1,9}", limit) and 1 <= int(limit) <= MOST_LISTED):
        raise BadRequest(f"limit: a number from 1 to {MOST_LISTED}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        start = 1 + next((at for at, item in enumerate(ordered) if item["id"] == after), -2)
        if start < 0:
            raise BadRequest("after: no such item in this list", param="after")
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }
