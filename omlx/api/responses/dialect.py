"""From the answer to a response: whole, and as events."""

import time
from collections.abc import Callable
from typing import Any

from omlx.api.events import (
    Answer,
    CallArguments,
    CallEnd,
    CallStart,
    ChoiceEnd,
    Event,
    Fault,
    Finished,
    Progress,
    ReasoningPiece,
    TextPiece,
    Usage,
)
from omlx.api.openai import compact_json, keep_alive
from omlx.api.responses.output import Output, new_id, pieces_of
from omlx.api.responses.tools import Tools

Json = dict[str, Any]
Keep = Callable[[Json], None]


class ResponsesDialect:
    """Tells of one answer. One that came to its end is given to `keep`."""

    def __init__(self, echo: Json, tools: Tools, logprobs: bool, writes_cache: bool, keep: Keep) -> None:
        self.request_id = new_id("resp")
        self._created = int(time.time())
        self._echo = echo
        self._output = Output(tools, logprobs=logprobs)
        self._writes_cache = writes_cache
        self._keep = keep
        self._number = 0
        self._cut = False

    def frames(self, event: Event) -> list[str]:
        """Server-sent events for one event of the answer. Whatever comes first, the response has begun then."""
        begun = [] if self._number else self._begin()
        match event:
            case Progress():
                return [*begun, keep_alive(event)]
            case Fault():
                return begun + self._fail(event)
            case Finished():
                return begun + self._finish(event.usage)
            case ChoiceEnd():
                return begun + self._numbered(self._end(event))
            case TextPiece() | ReasoningPiece() | CallStart() | CallArguments() | CallEnd():
                return begun + self._numbered(self._output.take(event))
        return begun

    def body(self, answer: Answer) -> Json:
        """The whole answer as one object."""
        (choice,) = answer.choices
        for piece in pieces_of(choice.parts):
            self._output.take(piece)
        self._end(choice.end)
        return self._finished(answer.usage)

    def _begin(self) -> list[str]:
        response = self._response("in_progress")
        names = ("response.created", "response.in_progress")
        return self._numbered([{"type": name, "response": response} for name in names])

    def _end(self, end: ChoiceEnd) -> list[Json]:
        self._cut = end.reason == "length"
        return self._output.end(cut=self._cut)

    def _finish(self, usage: Usage) -> list[str]:
        response = self._finished(usage)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def _finished(self, usage: Usage) -> Json:
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if self._cut else {}
        more = {"completed_at": int(time.time()), "usage": usage_body(usage, self._writes_cache)} | details
        response = self._response("incomplete" if self._cut else "completed", more)
        self._keep(response)
        return response

    def _fail(self, fault: Fault) -> list[str]:
        error = {"code": _error_code(fault), "message": fault.message}
        return self._numbered(
            [
                {"type": "error", "code": error["code"], "message": fault.message, "param": fault.param},
                {"type": "response.failed", "response": self._response("failed", {"error": error})},
            ]
        )

    def _response(self, status: str, more: Json | None = None) -> Json:
        head = {"id": self.request_id, "object": "response", "created_at": self._created, "status": status}
        rest = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return head | rest | self._echo | {"output": list(self._output.items)} | (more or {})

    def _numbered(self, events: list[Json]) -> list[str]:
        frames = []
        for event in events:
            body = {"type": event["type"], "sequence_number": self._number} | event
            frames.append(f"event: {event['type']}\ndata: {compact_json(body)}\n\n")
            self._number += 1
        return frames


def usage_body(usage: Usage, writes_cache: bool) -> Json:
    """What an answer took, as the endpoint tells it."""
    written = usage.prompt_tokens - usage.cached_tokens if writes_cache else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(fault: Fault) -> str:
    """OpenAI's codes of failed responses; a prompt that is too long has the code that agents look for."""
    if fault.status == 400:
        return fault.code or "invalid_prompt"
    return "rate_limit_exceeded" if fault.status in (429, 503) else "server_error"
