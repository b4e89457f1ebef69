"""How large a request may be and how long it may take to arrive.

The head is bounded by h11 while it comes in (16 KB would be its own limit) and counted by `HeadCheck` when it is there,
since h11 lets a larger one pass that came in one piece. The body is bounded where it is read.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import h11
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from omlx.access.checks import OPEN_PATHS, RETRY_AFTER_S
from omlx.access.connections import Connections
from omlx.access.request_id import HEADER, new_id
from omlx.api.events import Fault
from omlx.api.json_text import SMALL_BYTES, TooMuchJson, parse_json
from omlx.api.refusal import error_body, refuse
from omlx.errors import BadRequest
from omlx.request import http_request_id
from omlx.sizes import format_size

# Path, query and all headers, together.
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100

# A client has so long to send a request's head, then its body; and what it still sends after its answer.
HEAD_S = 15.0
BODY_S = 120.0
REST_S = 10.0
# What it has not taken in yet of its answer may stand still so long.
STALLED_S = 120.0
# A connection without a request is kept so long for the next one.
KEEP_ALIVE_S = 30

T = TypeVar("T")

# One thread, so that large bodies are parsed one after the other: two would need the memory of two at once, and each
# would take the GIL from the event loop as often.
_parser = ThreadPoolExecutor(1, thread_name_prefix="omlx-body")


async def read_body(http: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body, a JSON object (see `api.json_text.ReadBody`).

    Raises BadRequest; HTTPException 413 when it is too large, 408 when too slow.
    """
    try:
        async with asyncio.timeout(BODY_S):
            body = await _read(http, http.app.state.max_request_size)
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {BODY_S:g} s") from None
    if len(body) <= SMALL_BYTES:
        return _parsed(body, parse)
    work = partial(copy_context().run, _parsed, body, parse)
    return await asyncio.get_running_loop().run_in_executor(_parser, work)


def _parsed(body: bytearray, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        parsed = parse_json(body)
    except TooMuchJson as error:
        raise BadRequest(f"the body is too complex: {error}", code="body_too_complex") from None
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    return parse(parsed)


async def _read(http: Request, limit: int) -> bytearray:
    """At most `limit` bytes, whatever was announced."""
    length = http.headers.get("content-length", "")
    body = bytearray()
    if not (length.isdecimal() and (len(length) > 18 or int(length) > limit)):
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                break
        else:
            return body
    raise HTTPException(413, f"the body is larger than {format_size(limit)} (--max-request-size)")


class HeadCheck:
    """Refuses requests whose path and headers are too large, or whose headers disagree about where the body ends.

    A proxy in front and this server could each believe another header, and what one takes for a body the other would
    take for the next request (request smuggling). The connection is closed, so nothing after such a head is read.
    Differing values of Content-Length, and transfer codings other than chunked, are refused by h11.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif _is_too_large(scope):
            await refuse(scope["path"][:200], _HEAD_TOO_LARGE)(scope, receive, send)
        elif _is_ambiguous(scope):
            await refuse(scope["path"], _AMBIGUOUS_LENGTH, {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_too_large(scope: Scope) -> bool:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
    return len(headers) > MAX_HEADERS or size + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES


def _is_ambiguous(scope: Scope) -> bool:
    names = {name for name, _ in scope["headers"]}
    # Before HTTP/1.1 there are no transfer codings: a proxy that follows that standard passes them on unread.
    return b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0")


_AMBIGUOUS_LENGTH = Fault(
    400, "the length of the body is ambiguous: send Content-Length or Transfer-Encoding, not both", code="invalid_http"
)
_HEAD_TOO_LARGE = Fault(
    431, f"path and headers are more than {format_size(MAX_HEAD_BYTES)} or {MAX_HEADERS} headers", code="head_too_large"
)
_NO_HTTP = Fault(400, "this is not a valid HTTP request", code="invalid_http")
_HEAD_TOO_SLOW = Fault(408, f"the head of the request did not come within {HEAD_S:g} s", code="request_timeout")


_TOO_MANY = Fault(
    503, "too many connections have requests running; try again later", code="overloaded", retry_after_s=RETRY_AFTER_S
)


def _essential_only(app: Any) -> ASGIApp:
    """The application for a connection that is one too many: only the paths that always answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
        else:
            await refuse(scope["path"][:200], _TOO_MANY, {"connection": "close"})(scope, receive, send)

    return answer


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP over h11, that is patient with slow clients for a while only, and refuses in JSON.

    uvicorn itself waits for ever for the rest of a head and for a client that does not read its answer, and reads on
    for ever what a client sends after its answer.
    """

    _has_answered = False
    _room: Connections
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _waits_for = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._room.add(self):
            self.app = _essential_only(self.app)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.remove(self)
        self._stop_timer()
        self._goes_on()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._goes_on()
        super().resume_writing()

    def _goes_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._has_answered = True
        self._watch()

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls this while it handles h11's error, which says what was wrong.
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(_HEAD_TOO_LARGE if hint == 431 else _NO_HTTP)

    def _watch(self) -> None:
        """Sets the timer for what the client is to do now; one that runs for the same thing already goes on."""
        waits_for = self._expected()
        self._room.set_idle(self, bool(waits_for) or self.conn.their_state is h11.IDLE)
        if waits_for == self._waits_for:
            return
        self._stop_timer()
        self._waits_for = waits_for
        if waits_for and not self.transport.is_closing():
            seconds, late = (HEAD_S, self._too_late) if waits_for == "head" else (REST_S, self.transport.close)
            self._timer = self.loop.call_later(seconds, late)

    def _expected(self) -> str:
        """What the client has not sent yet: the first "head", or one that was begun; the "rest" of a request that was
        answered."""
        if self.conn.their_state is h11.IDLE and (self.conn.trailing_data[0] or not self._has_answered):
            return "head"
        return "rest" if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY else ""

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._waits_for = None, ""

    def _too_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(_HEAD_TOO_SLOW)
        else:  # nothing was asked
            self.transport.close()

    def _refuse(self, fault: Fault) -> None:
        """An answer without the application, if one can still be given, and the end of the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            token = http_request_id.set(new_id())
            body = json.dumps(error_body("", fault)).encode()
            headers = [
                (HEADER, http_request_id.get()),
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(
                status_code=fault.status, headers=headers, reason=HTTPStatus(fault.status).phrase.encode()
            )
            events = (response, h11.Data(data=body), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            http_request_id.reset(token)
        self.transport.close()


def limited(connections: Connections) -> type[PatientProtocol]:
    """The protocol for the connections of one server, which count there."""
    return type("LimitedProtocol", (PatientProtocol,), {"_room": connections})
