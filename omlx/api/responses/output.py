"""The output of a response while it is made: from the pieces of an answer to items, and the events about them."""

import json
import uuid
from collections.abc import Iterable
from typing import Any, Literal

from omlx.api.custom_tools import custom_input
from omlx.api.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenText,
    ToolCall,
)
from omlx.api.openai import logprobs_of
from omlx.api.responses.tools import Tools

Body = dict[str, Any]
_Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def pieces_of(parts: Iterable[TextPiece | ReasoningPiece | ToolCall]) -> Iterable[Piece]:
    """The parts of a whole answer as the pieces that they were made of."""
    calls = 0
    for part in parts:
        if isinstance(part, ToolCall):
            yield CallStart(calls, part.call_id, part.name)
            yield CallArguments(calls, part.arguments)
            yield CallEnd(calls)
            calls += 1
        else:
            yield part


class Output:
    """Takes the pieces of one answer in their order. `items` are those that are complete.

    Events are bodies without their sequence number. With `logprobs` texts have those of their tokens.
    """

    def __init__(self, tools: Tools, *, logprobs: bool) -> None:
        self.items: list[Body] = []
        self._tools = tools
        self._logprobs = logprobs
        self._open: _OpenItem | None = None

    def take(self, piece: Piece) -> list[Body]:
        """What there is to tell of the next piece."""
        match piece:
            case TextPiece():
                return self._write(_Message, piece.text, piece.tokens)
            case ReasoningPiece():
                return self._write(_Reasoning, piece.text)
            case CallStart():
                origin = self._tools.origin(piece.name)
                space = {} if origin.namespace is None else {"namespace": origin.namespace}
                head = {"call_id": piece.call_id, "name": origin.name} | space
                return self._begin(_CustomCall(head) if origin.custom else _Call(head))
            case CallArguments():
                assert self._open is not None
                return self._placed(self._open.write(piece.text))
            case CallEnd():
                return self._close("completed")

    def end(self, *, cut: bool) -> list[Body]:
        """The end of the answer; `cut`: at its limit. An answer without anything in it is an empty message."""
        begun = [] if self.items or self._open else self._begin(_Message({}, logprobs=self._logprobs))
        return begun + self._close("incomplete" if cut else "completed")

    def _write(self, kind: type["_Text"], text: str, tokens: tuple[TokenText, ...] = ()) -> list[Body]:
        begun: list[Body] = []
        if not isinstance(self._open, kind):
            if not text:  # half a character at the end: no text comes of it
                return []
            begun = self._begin(kind({}, logprobs=self._logprobs))
        assert self._open is not None
        return begun + self._placed(self._open.write(text, tokens))

    def _begin(self, item: "_OpenItem") -> list[Body]:
        closed = self._close("completed")
        self._open = item
        added = {"type": "response.output_item.added", "item": item.body("in_progress", begun=True)}
        return closed + [self._indexed(added)] + self._placed(item.begin())

    def _close(self, status: _Status) -> list[Body]:
        item = self._open
        if item is None:
            return []
        events = self._placed(item.finish())
        body = item.body(status)
        events.append(self._indexed({"type": "response.output_item.done", "item": body}))
        self.items.append(body)
        self._open = None
        return events

    def _indexed(self, event: Body) -> Body:
        return event | {"output_index": len(self.items)}

    def _placed(self, events: list[Body]) -> list[Body]:
        assert self._open is not None
        return [self._indexed(event | {"item_id": self._open.id}) for event in events]


class _OpenItem:
    """An item that is being written."""

    prefix = ""

    def __init__(self, head: Body) -> None:
        self.id = new_id(self.prefix)
        self._head = head
        self._written: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._written)

    def begin(self) -> list[Body]:
        return []

    def write(self, text: str, tokens: tuple[TokenText, ...] = ()) -> list[Body]:
        raise NotImplementedError

    def finish(self) -> list[Body]:
        raise NotImplementedError

    def body(self, status: _Status, *, begun: bool = False) -> Body:
        """The item; `begun`: as it is told when it begins, with nothing in it."""
        raise NotImplementedError


class _Text(_OpenItem):
    """An item with one part, which is a text."""

    event = ""

    def __init__(self, head: Body, *, logprobs: bool) -> None:
        super().__init__(head)
        self._logprobs = logprobs
        self._tokens: list[TokenText] = []

    def begin(self) -> list[Body]:
        return [self._part("added", "", [])]

    def write(self, text: str, tokens: tuple[TokenText, ...] = ()) -> list[Body]:
        self._written.append(text)
        self._tokens += tokens
        return [self._event("delta", {"delta": text}, tokens)]

    def finish(self) -> list[Body]:
        done = self._event("done", {"text": self.text}, self._tokens)
        return [done, self._part("done", self.text, self._tokens)]

    def _part(self, what: str, text: str, tokens: Iterable[TokenText]) -> Body:
        return {"type": f"response.content_part.{what}", "content_index": 0, "part": self.part(text, tokens)}

    def _event(self, what: str, body: Body, tokens: Iterable[TokenText]) -> Body:
        return {"type": f"response.{self.event}.{what}", "content_index": 0} | body

    def part(self, text: str, tokens: Iterable[TokenText]) -> Body:
        raise NotImplementedError

    def content(self, *, begun: bool) -> list[Body]:
        return [] if begun else [self.part(self.text, self._tokens)]


class _Message(_Text):
    prefix = "msg"
    event = "output_text"

    def part(self, text: str, tokens: Iterable[TokenText]) -> Body:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._of(tokens)}

    def body(self, status: _Status, *, begun: bool = False) -> Body:
        content = self.content(begun=begun)
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _event(self, what: str, body: Body, tokens: Iterable[TokenText]) -> Body:
        return super()._event(what, body, tokens) | {"logprobs": self._of(tokens)}

    def _of(self, tokens: Iterable[TokenText]) -> list[Body]:
        return logprobs_of(tokens) if self._logprobs else []


class _Reasoning(_Text):
    """No summary is made of what the model thought."""

    prefix = "rs"
    event = "reasoning_text"

    def part(self, text: str, tokens: Iterable[TokenText]) -> Body:
        return {"type": "reasoning_text", "text": text}

    def body(self, status: _Status, *, begun: bool = False) -> Body:
        content = self.content(begun=begun)
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
                "encrypted_content": None}  # fmt: skip


class _Call(_OpenItem):
    """A call is complete when its arguments are: the limit of the answer may cut them."""

    prefix = "fc"

    def write(self, text: str, tokens: tuple[TokenText, ...] = ()) -> list[Body]:
        self._written.append(text)
        return [{"type": "response.function_call_arguments.delta", "delta": text}]

    def finish(self) -> list[Body]:
        return [{"type": "response.function_call_arguments.done", "arguments": self.text}]

    def body(self, status: _Status, *, begun: bool = False) -> Body:
        head = {"id": self.id, "type": "function_call", "status": self._status(status)}
        return head | self._head | {"arguments": self.text}

    def _status(self, status: _Status) -> _Status:
        return "incomplete" if status == "completed" and not _is_json(self.text) else status


class _CustomCall(_Call):
    """Its input is handed on as a whole: while it is written, it is a string within JSON."""

    prefix = "ctc"

    def write(self, text: str, tokens: tuple[TokenText, ...] = ()) -> list[Body]:
        self._written.append(text)
        return []

    def finish(self) -> list[Body]:
        given = custom_input(self.text)
        return [
            {"type": "response.custom_tool_call_input.delta", "delta": given},
            {"type": "response.custom_tool_call_input.done", "input": given},
        ]

    def body(self, status: _Status, *, begun: bool = False) -> Body:
        head = {"id": self.id, "type": "custom_tool_call", "status": self._status(status)}
        return head | self._head | {"input": "" if begun else custom_input(self.text)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
