"""What /openapi.json says of a route: its body, its answer and the errors that it may give.

Bodies are read and checked by the routes themselves (`openai_body.validated`), so FastAPI cannot know them.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is no success, as OpenAI's clients expect it."""

    error: ErrorDetail
    request_id: str


ERRORS = {
    400: "The request can never work; `param` names the field that is wrong.",
    401: "The key is missing or wrong.",
    403: "Not from where this request came.",
    404: "There is no such model (or path).",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "This key has as many requests at work as it may have.",
    431: "Path and headers are too large.",
    500: "The server failed at this request.",
    503: "No room now, or not ready; `retry-after` says when to ask again.",
}
_ANYWHERE = (400, 408, 431, 500)
_GUARDED = (401, 403)
_WITH_BODY = (413, 429)
# Of one event in a stream, as it is usual to write: OpenAPI 3.1 has no other place for it.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def documented(
    summary: str,
    body: type[BaseModel] | None = None,
    answer: type[BaseModel] | None = None,
    *,
    stream: bool = False,
    errors: Iterable[int] = (),
    error: type[BaseModel] = ErrorAnswer,
    path: Iterable[str] = (),
    is_open: bool = False,
) -> dict[str, Any]:
    """Arguments for `add_api_route`. `errors` come on top of those that any route may give.

    `stream`: the answer may be an event stream. `path`: names of the parameters in the path. `is_open`: no key is
    asked for.
    """
    statuses = {*_ANYWHERE, *errors, *(() if is_open else _GUARDED), *(_WITH_BODY if body else ())}
    responses: dict[int, dict[str, Any]] = {
        status: {"model": error, "description": ERRORS[status]} for status in sorted(statuses)
    }
    if answer is not None:
        responses[200] = {"model": answer, "description": "The answer."}
        if stream:
            responses[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": inline_schema(body)}}}
    if names := list(path):
        extra["parameters"] = [_path_parameter(name) for name in names]
    return {"summary": summary, "responses": responses, "openapi_extra": extra}


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema without references: it stands in the middle of another document. No model holds itself."""
    schema = model.model_json_schema()
    known = schema.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(item) for item in part]
        if not isinstance(part, dict):
            return part
        if reference := part.get("$ref"):
            return resolved(known[reference.removeprefix("#/$defs/")])
        return {name: resolved(value) for name, value in part.items()}

    found: dict[str, Any] = resolved(schema)
    return found
