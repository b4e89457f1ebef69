"""Answers to requests that get none, each in the shape of its path's dialect."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omlx.api import anthropic, openai
from omlx.api.events import INTERNAL_FAULT, Fault
from omlx.request import http_request_id

logger = logging.getLogger("omlx.server")

ErrorBody = Callable[[Fault], dict[str, Any]]

# Paths whose clients expect errors in another shape than OpenAI's: a path, which stands for those below it too.
ERROR_BODIES: dict[str, ErrorBody] = {"/v1/messages": anthropic.error_body}


def error_body(path: str, fault: Fault) -> dict[str, Any]:
    """A fault as the clients of a path expect it; of the paths that fit, the longest counts."""
    fitting = [known for known in ERROR_BODIES if path == known or path.startswith(known + "/")]
    shape = ERROR_BODIES[max(fitting, key=len)] if fitting else openai.error_body
    return shape(fault)


def refuse(path: str, fault: Fault, headers: dict[str, str] | None = None) -> Response:
    """The response for a request that gets no answer; what was sent is never logged, nor is a query."""
    logger.info("refused path=%r status=%d param=%s code=%s", path, fault.status, fault.param, fault.code)
    headers = dict(headers or {})
    if request_id := http_request_id.get():
        headers["x-request-id"] = request_id
    if fault.retry_after_s is not None:
        headers["retry-after"] = str(fault.retry_after_s)
    return JSONResponse(error_body(path, fault), fault.status, headers)


class PanicCheck:
    """Answers for a request that ends with what is no Exception, such as a panic in a library written in Rust.

    Starlette handles Exceptions only: the client would get plain text, or nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            logger.exception("a library panicked on %r", scope.get("path"))
            if begun or scope["type"] != "http":
                raise RuntimeError(f"a library panicked: {error}") from None
            await refuse(scope["path"], INTERNAL_FAULT)(scope, receive, send)
