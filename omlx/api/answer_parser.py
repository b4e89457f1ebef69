"""Takes an answer apart while it is written: text, reasoning, tool calls.

Nothing that the model wrote is lost: what cannot be read as a call is text. Left out are only the markers themselves
and white space beside them, which templates put there (around calls, around reasoning).
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from omlx.api.answer_format import AnswerFormat, Edge, State, new_call_id, read_calls
from omlx.api.events import CallArguments, CallEnd, CallStart, ToolCall
from omlx.api.stop_strings import first_stop, overlap

# What stands before the arguments of a call.
_JSON_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Span(NamedTuple):
    """Text of one kind, and which characters of the answer it is: from `start` up to `end`."""

    kind: Literal["text", "reasoning"]
    text: str
    start: int
    end: int


Found = Span | CallStart | CallArguments | CallEnd


class AnswerParser:
    """One choice, piece by piece. `stop` strings are looked for in its text only, not in reasoning or calls."""

    def __init__(self, form: AnswerFormat, stop: tuple[str, ...] = (), choice: int = 0) -> None:
        self.stopped_by: str | None = None
        self.calls = 0
        self._form = form
        self._stop = stop
        self._choice = choice
        self._state: State = form.start
        self._buffer = ""  # may end with a part of a marker
        self._held = ""  # text or reasoning: may be a part of a stop string, or white space beside a marker
        self._raw = ""  # a call, or a header, from its marker on
        self._at = 0  # characters of the answer before `_held`, which `_raw` and then `_buffer` follow
        self._back: State = "content"  # what the call stands in
        self._stream: _JsonCall | None = None  # a call that is handed on while it is written
        self._fresh = form.start == "reasoning"  # a marker was just passed: newlines behind it belong to it
        self._behind_call = False
        self._cut = False

    @property
    def position(self) -> int:
        """How many characters of the answer were handed out or passed over."""
        return self._at

    @property
    def done(self) -> bool:
        """Whether the answer has come to its end, though the model may go on."""
        return self.stopped_by is not None or (self._form.one_call and self._behind_call and not self._cut)

    def push(self, text: str) -> list[Found]:
        """The next characters of the answer; what is certain by now."""
        found: list[Found] = []
        self._buffer += text
        while not self.done and (edge := self._next_edge()) is not None:
            before, _, self._buffer = self._buffer.partition(edge.marker)
            found += self._take(before)
            if not self.done:
                found += self._cross(edge)
        if not self.done:
            keep = max((overlap(self._buffer, edge.marker) for edge in self._edges()), default=0)
            cut = len(self._buffer) - keep
            before, self._buffer = self._buffer[:cut], self._buffer[cut:]
            found += self._take(before)
        return found

    def finish(self, *, cut: bool) -> list[Found]:
        """The end of the answer; `cut`: at its token limit, not because the model was done."""
        if self.done:
            return []
        self._cut = cut  # a call that this ends is not the end that one call would be
        rest, self._buffer = self._buffer, ""
        found = self._take(rest)
        if self._state == "call":
            found += self._end_call("", complete=not cut)
        elif self._state == "header":
            found += self._as_text("content")
        return found + self._release(all_of_it=True, space=not self._behind_call or bool(self._held.strip()))

    # ---- markers

    def _edges(self) -> tuple[Edge, ...]:
        return self._form.edges.get(self._state, ())

    def _next_edge(self) -> Edge | None:
        """The marker that comes first; of two at one place the longer one."""
        found = [(at, -len(edge.marker), edge) for edge in self._edges() if (at := self._buffer.find(edge.marker)) >= 0]
        return min(found)[2] if found else None

    def _cross(self, edge: Edge) -> list[Found]:
        if self._state == "call":
            return self._end_call(edge.marker, complete=True)
        # White space before a marker is kept only in case that the call is none.
        found = self._release(all_of_it=True, space=False) if self._state != "header" else []
        if self._state == "header" or edge.to != "call":
            self._drop(len(self._raw))
        if edge.to == "call":
            self._back = "reasoning" if self._state == "reasoning" else "content"
            self._raw = edge.marker
            self._stream = self._new_stream()
        else:
            self._drop(len(edge.marker))
            self._fresh = edge.to != self._state
        self._state = edge.to
        return found

    def _drop(self, more: int) -> None:
        """Passes over what is held and `more` characters behind it."""
        self._at += len(self._held) + more
        self._held = self._raw = ""

    # ---- text and reasoning

    def _take(self, text: str) -> list[Found]:
        if self._state in ("content", "reasoning"):
            self._held += text
            return self._release()
        self._raw += text
        return self._stream.push(self._raw) if self._stream is not None else []

    def _release(self, *, all_of_it: bool = False, space: bool | None = None) -> list[Found]:
        """What of the held text is certain; all, if nothing like it follows (`space`: with white space at its end)."""
        self._drop_newlines()
        end = len(self._held)
        if self._state == "content" and self._stop:
            certain, self.stopped_by = first_stop(self._held, self._stop)
            end = end if all_of_it and self.stopped_by is None else certain
        if self.stopped_by is not None:
            return self._emit(end)
        space = self._form.plain if space is None else space
        return self._emit(end if space else len(self._held[:end].rstrip()))

    def _drop_newlines(self) -> None:
        if self._fresh:
            kept = self._held.lstrip("\n")
            self._at += len(self._held) - len(kept)
            self._held, self._fresh = kept, not kept

    def _emit(self, end: int) -> list[Found]:
        text, self._held = self._held[:end], self._held[end:]
        start, self._at = self._at, self._at + end
        if not text:
            return []
        self._behind_call = False
        return [Span("reasoning" if self._state == "reasoning" else "text", text, start, self._at)]

    # ---- calls

    def _end_call(self, marker: str, *, complete: bool) -> list[Found]:
        """The end of a call, or of the answer within one: then `marker` is "".

        `complete`: what there is may be taken for the whole call.
        """
        calls = self._form.calls
        assert calls is not None
        stream, self._stream = self._stream, None
        if stream is not None and stream.begun:
            return self._after_calls(marker, stream.finish())
        inside = self._raw.removeprefix(calls.start)
        read = read_calls(inside, self._form) if complete or not calls.end else None
        if read is None:
            self._raw += marker
            return self._as_text(self._back)
        found = self._after_calls(marker, [part for call in read.calls for part in self._whole(call)])
        self._at -= len(read.rest)
        self._held = read.rest
        return found

    def _as_text(self, state: State) -> list[Found]:
        """What was collected is no call."""
        self._state = state
        self._held += self._raw
        self._raw = ""
        return self._release()

    def _after_calls(self, marker: str, found: list[Found]) -> list[Found]:
        self._drop(len(self._raw) + len(marker))
        self._state = self._back
        self._behind_call = True
        return found

    def _whole(self, call: ToolCall) -> list[Found]:
        start = self._begin_call(call.name, call.call_id)
        return [start, CallArguments(start.index, call.arguments, self._choice), CallEnd(start.index, self._choice)]

    def _begin_call(self, name: str, call_id: str | None = None) -> CallStart:
        index, self.calls = self.calls, self.calls + 1
        return CallStart(index, call_id or new_call_id(self._form), name, self._choice)

    def _new_stream(self) -> "_JsonCall | None":
        calls = self._form.calls
        if calls is None or not (self._form.enforced and calls.plain_json):
            return None
        return _JsonCall(len(calls.start), self._begin_call)


class _JsonCall:
    """A call that is handed on while it is written: its syntax is enforced, so it cannot turn out to be none."""

    def __init__(self, read: int, begin: Callable[[str], CallStart]) -> None:
        self._read = read  # characters that were looked at
        self._begin = begin
        self._start: CallStart | None = None
        self._object = _JsonObject()

    @property
    def begun(self) -> bool:
        return self._start is not None

    def push(self, raw: str) -> list[Found]:
        """`raw` is all of the call so far, with its marker."""
        found: list[Found] = []
        if self._start is None:
            head = _JSON_HEAD.match(raw, self._read)
            if head is None:
                return []
            self._start = self._begin(head[1])
            self._read = head.end()
            found.append(self._start)
        fresh = self._object.push(raw[self._read :])
        self._read = len(raw)
        if fresh:
            found.append(CallArguments(self._start.index, fresh, self._start.choice))
        return found

    def finish(self) -> list[Found]:
        assert self._start is not None
        return [CallEnd(self._start.index, self._start.choice)]


class _JsonObject:
    """Finds where an object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = self._done = False

    def push(self, text: str) -> str:
        """The beginning of `text` that belongs to the object."""
        if self._done:
            return ""
        end = next((at for at, char in enumerate(text, 1) if self._ends_with(char)), None)
        self._done = end is not None
        return text[:end]

    def _ends_with(self, char: str) -> bool:
        if self._quoted:
            self._quoted = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
