"""An id for every HTTP request: taken from the client's `x-request-id` or made, returned, and logged."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.request import http_request_id

HEADER = "x-request-id"
# What a client may send: anything that is one word in a log line. Another value is replaced, not refused.
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def new_id() -> str:
    return f"req_{uuid.uuid4().hex[:24]}"


class RequestId:
    """Sets `http_request_id` for the request and the header of every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER, "")
        made = sent if _ID.fullmatch(sent) else new_id()
        # Never reset: an unexpected error is answered outside of this call, in the same task.
        http_request_id.set(made)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = made
            await send(message)

        await self._app(scope, receive, send_with_id)


def add_request_id(record: logging.LogRecord) -> bool:
    """A logging filter: `request_id` of a record is the current request's id, "-" outside of requests."""
    record.request_id = http_request_id.get() or "-"
    return True
