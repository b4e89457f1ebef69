"""Answers to requests that get none, each in the shape of its path's dialect."""

import logging
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

from omlx.api import anthropic, openai
from omlx.api.events import Fault

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
    if fault.retry_after_s is not None:
        headers["retry-after"] = str(fault.retry_after_s)
    return JSONResponse(error_body(path, fault), fault.status, headers)
