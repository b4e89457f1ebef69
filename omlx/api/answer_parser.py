"""Takes an answer apart while it is written: text, reasoning, tool calls.

Nothing that the model wrote is lost: what cannot be read as a call is text. Left out are only the marks themselves
and white space beside them, which templates put there (around calls, around reasoning).
"""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from omlx.api.answer_format import AnswerFormat, Edge, State, new_call_id, read_calls, warn_unreadable
from omlx.api.call_syntax import CallSyntax
from omlx.api.events import CallArguments, CallEnd, CallStart, ToolCall
from omlx.api.lenient_json import is_closed
from omlx.api.marks import Marks
from omlx.api.stop_strings import first_stop, overlap

# A mark that is plain text is a quotation between two of one of these.
_QUOTES = ("`", '"', "'")
_FENCE = re.compile(r"[ \t>*-]*(```|~~~)")
# As many characters of bare calls show whether they are calls.
_LONGEST_HEAD = 200
# What may stand between a message's beginning and calls.
_ADDRESS = re.compile(r"\s*(to=\S+)?\s*")
# What stands before the arguments of a call.
_JSON_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Span(NamedTuple):
    """Text of one kind, and which characters of the answer it is: from `start` up to `end`."""

    kind: Literal["text", "reasoning"]
    text: str
    start: int
    end: int


Found = Span | CallStart | CallArguments | CallEnd


class _OpenCalls:
    """Calls that have begun: their text is at the beginning of the buffer."""

    def __init__(self, syntax: CallSyntax, inside: int, header: int, stream: "_JsonCall | None") -> None:
        self.syntax = syntax
        self.inside = inside  # where the calls begin, after the mark
        self.header = header  # characters of a message's header, which belongs to the calls
        self.scanned = max(inside, header)  # up to here no end mark begins
        self.stream = stream
        self.passed: list[tuple[int, str]] = []  # end marks that were taken for a part of a value


class AnswerParser:
    """One choice, piece by piece. `stop` strings are looked for in its text only, not in reasoning or calls.

    A mark that is a token of its own counts only as that token. One that is plain text does not count between two equal
    quote marks. An end mark inside a value of a call belongs to the value.
    """

    def __init__(self, form: AnswerFormat, stop: tuple[str, ...] = (), choice: int = 0) -> None:
        self.stopped_by: str | None = None
        self.calls = 0
        self.incomplete = False  # the answer ended inside a call that was already handed out in part
        self._form = form
        self._stop = stop
        self._choice = choice
        self._state: State = form.start
        self._at = 0  # characters of the answer before `_held`, which `_buffer` follows
        self._held = ""  # text or reasoning: may be a part of a stop string, or white space beside a mark
        self._buffer = ""  # marked text: calls from their mark on, a header, or what may end with a part of a mark
        self._before = ""  # the character before `_buffer`
        self._back: State = "content"  # what the calls stand in
        self._open: _OpenCalls | None = None
        self._fresh = form.start == "reasoning"  # a mark was just passed: line breaks after it belong to it
        self._begun = False  # text other than white space was found
        self._line = ""  # the last line of the text before `_buffer`
        self._fenced = False  # it is inside a code fence
        self._behind_call = False
        self._cut = False
        self._no_calls = False  # what is left may be inside a call that was cut

    @property
    def position(self) -> int:
        """How many characters of the answer were handed out or passed over."""
        return self._at

    @property
    def done(self) -> bool:
        """Whether the answer has come to its end, though the model may go on."""
        return self.stopped_by is not None or (self._form.one_call and self._behind_call and not self._cut)

    def push(self, text: str, token: int | None = None) -> list[Found]:
        """The next characters of the answer, which end with the text of `token`; returns what is certain by now."""
        self._buffer += self._form.marks.push(text, token)
        return self._advance(final=False)

    def finish(self, *, cut: bool) -> list[Found]:
        """The end of the answer; `cut`: at its token limit, not because the model was done."""
        if self.done:
            return []
        self._cut = cut  # a call that this ends is not the end that one call would be
        found = self._advance(final=True)
        if self.done:
            return found
        return found + self._release(all_of_it=True, space=not self._behind_call or bool(self._held.strip()))

    def _advance(self, *, final: bool) -> list[Found]:
        found: list[Found] = []
        while not self.done:
            if self._state == "call":
                step = self._in_calls(final=final)
            elif self._state == "header":
                step = self._in_header(final=final)
            else:
                step = self._in_text(final=final)
            if step is None:
                break
            found += step
        return found

    # ---- marks

    def _edges(self) -> tuple[Edge, ...]:
        edges = self._form.edges.get(self._state, ())
        return tuple(edge for edge in edges if edge.calls is None) if self._no_calls else edges

    def _next_edge(self, *, final: bool) -> tuple[int, Edge | None]:
        """Where the next mark begins, of two at one place the longer one. Without one: up to where there is none."""
        found = [(*self._find(edge, final=final), edge) for edge in self._edges()]
        at, certain, edge = min(found, key=lambda item: (item[0], -len(item[2].marker)), default=(None, False, None))
        return (len(self._buffer) if at is None else at), edge if certain else None

    def _find(self, edge: Edge, *, final: bool) -> tuple[int, bool]:
        """Where a mark begins, and whether that is certain; the end of the buffer, if it is not there."""
        marker, buffer = edge.marker, self._buffer
        at = buffer.find(marker)
        while at >= 0 and self._may_begin(edge, at):
            if edge.calls is not None and edge.calls.alone and not self._is_alone(at):
                at = buffer.find(marker, at + 1)
                continue
            quote = self._quote(edge, at)
            if not quote or (final and at + len(marker) == len(buffer)):
                return at, True
            if at + len(marker) == len(buffer):
                return at, False
            if buffer[at + len(marker)] != quote:
                return at, True
            at = buffer.find(marker, at + 1)
        rest = len(buffer) - (0 if final else overlap(buffer, marker))
        return (rest if self._may_begin(edge, rest) else len(buffer)), False

    def _may_begin(self, edge: Edge, at: int) -> bool:
        return not edge.first or not (self._begun or self._buffer[:at].strip())

    def _is_alone(self, at: int) -> bool:
        """Whether a place in the buffer begins a line, outside of code fences."""
        *lines, last = (self._line + self._buffer[:at]).split("\n")
        return not last.strip() and self._fenced == (len([line for line in lines if _FENCE.match(line)]) % 2 == 1)

    def _quote(self, edge: Edge, at: int) -> str:
        """The quote mark before a place where a mark may be a quotation."""
        before = self._buffer[at - 1] if at else self._before
        quotable = edge.quotable and not self._form.enforced and self._state != "header"
        return before if quotable and before in _QUOTES else ""

    def _drop(self, characters: int) -> None:
        """Passes over what is held and the beginning of the buffer."""
        self._at += len(self._held) + characters
        self._held, self._buffer, self._before = "", self._buffer[characters:], ""

    # ---- text, reasoning, headers

    def _in_text(self, *, final: bool) -> list[Found] | None:
        at, edge = self._next_edge(final=final)
        if edge is None:
            return self._take(at) if at else None
        found = self._take(at) if at else []
        return found if self.done else found + self._cross(edge)

    def _cross(self, edge: Edge) -> list[Found]:
        """Over the mark that the buffer begins with."""
        # White space before a mark is kept only in case that the call is none.
        found = self._release(all_of_it=True, space=False)
        if self.done:
            return found
        if edge.calls is not None:
            self._open_calls(edge.calls, 0 if edge.calls.bare else len(edge.marker))
        else:
            self._drop(len(edge.marker))
            self._enter(edge.to)  # type: ignore[arg-type]  # "body" is the end of a header
        return found

    def _enter(self, state: State) -> None:
        self._fresh = state != self._state
        self._state = state

    def _in_header(self, *, final: bool) -> list[Found] | None:
        at, edge = self._next_edge(final=final)
        if edge is not None:
            return self._end_header(at, edge)
        if not (final and self._buffer):
            return None
        text = self._form.marks.read(self._buffer)
        headers = self._form.headers
        if headers is None or any(mark in text for mark in (headers.end, *headers.begins)):
            self._drop(len(self._buffer))
        else:
            self._state = "content"
        return []

    def _end_header(self, at: int, edge: Edge) -> list[Found]:
        headers = self._form.headers
        assert headers is not None
        if edge.calls is not None:
            if not _ADDRESS.fullmatch(self._buffer, 0, at):
                self._state = "content"  # no header after all
                return []
            self._drop(at)
            self._open_calls(edge.calls, len(edge.marker))
            return []
        state = headers.state_of(self._form.marks.read(self._buffer[:at]))
        if state == "call" and self._form.calls:
            self._open_calls(self._form.calls[0], 0, at + len(edge.marker))
            return []
        self._drop(at + len(edge.marker))
        self._enter("content" if state == "call" else state)
        return []

    def _take(self, characters: int) -> list[Found]:
        text = self._form.marks.read(self._buffer[:characters])
        self._before, self._buffer = text[-1:], self._buffer[characters:]
        if self._state == "content":
            self._begun = self._begun or bool(text.strip())
            *lines, self._line = (self._line + text).split("\n")
            if len([line for line in lines if _FENCE.match(line)]) % 2:
                self._fenced = not self._fenced
            self._line = self._line[:_LONGEST_HEAD]
        self._held += text
        return self._release()

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

    def _open_calls(self, syntax: CallSyntax, inside: int, header: int = 0) -> None:
        self._back = "reasoning" if self._state == "reasoning" else "content"
        self._state = "call"
        stream = _JsonCall(inside, self._begin_call) if self._form.enforced and syntax.plain else None
        self._open = _OpenCalls(syntax, inside, header, stream)

    def _in_calls(self, *, final: bool) -> list[Found] | None:
        calls = self._open
        assert calls is not None
        found = calls.stream.push(self._buffer, self._form.marks) if calls.stream else []
        while (end := self._next_end(calls)) is not None:
            inside = self._buffer[calls.inside : end[0]]
            if calls.syntax.ends_after(inside, self._form.marks, self._form.tools):
                closing = self._closing(calls.syntax, end[0] + len(end[1]), final=final)
                return (found or None) if closing is None else found + self._close(*end, closing)
            calls.passed.append(end)
            calls.scanned = end[0] + len(end[1])
        if not calls.syntax.ends and not self._hopeful(calls):
            return found + self._as_text(calls, len(calls.syntax.start) if calls.syntax.bare else calls.inside)
        if final:
            return found + self._finish_calls(calls)
        return found or None

    def _next_end(self, calls: _OpenCalls) -> tuple[int, str] | None:
        """Where the next end mark begins, and the mark."""
        ends = [self._form.marks.write(end) for end in calls.syntax.ends]
        found = [(at, end) for end in ends if (at := self._buffer.find(end, calls.scanned)) >= 0]
        if not found:
            longest = max((len(end) for end in ends), default=1)
            calls.scanned = max(calls.scanned, len(self._buffer) - longest + 1)
        return min(found, default=None)

    def _hopeful(self, calls: _OpenCalls) -> bool:
        return calls.syntax.hopeful(self._form.marks.read(self._buffer[calls.inside :][:_LONGEST_HEAD]))

    def _closing(self, syntax: CallSyntax, end: int, *, final: bool) -> int | None:
        """How many characters a mark that may follow the end takes; None if more of the answer will tell."""
        mark = self._form.marks.write(syntax.closing)
        rest = self._buffer[end:].lstrip()
        if mark and rest.startswith(mark):
            return len(self._buffer) - end - len(rest) + len(mark)
        return None if mark and not final and mark.startswith(rest) else 0

    def _close(self, at: int, mark: str, closing: int) -> list[Found]:
        """The end of calls at an end mark, which a closing one may follow."""
        calls = self._open
        assert calls is not None
        if calls.stream is not None and calls.stream.begun:
            return self._after_calls(at + len(mark), calls.stream.finish())
        try:
            read = self._read(calls, at)
        except ValueError as error:
            return self._unreadable(calls, at + len(mark), str(error))
        return self._after_calls(at + len(mark) + closing, read)

    def _finish_calls(self, calls: _OpenCalls) -> list[Found]:
        """The end of the answer inside calls."""
        if calls.stream is not None and calls.stream.begun:
            self.incomplete = not calls.stream.complete
            return self._after_calls(len(self._buffer), calls.stream.finish())
        # Of marks that may belong to a value the last one may end it. What was cut inside a value is no call.
        for at, mark in () if self._cut else reversed(calls.passed):
            try:
                found, end = self._read(calls, at), at + len(mark)
            except ValueError:
                continue
            return self._after_calls(end + (self._closing(calls.syntax, end, final=True) or 0), found)
        reason = "it is not complete"
        if not (self._cut and calls.syntax.ends):
            try:
                return self._read_rest(calls)
            except ValueError as error:
                reason = str(error)
        self._no_calls = self._cut
        if calls.passed:
            at, mark = calls.passed[0]
            return self._unreadable(calls, at + len(mark), reason)
        return self._unreadable(calls, len(self._buffer), reason, mark_only=True)

    def _unreadable(self, calls: _OpenCalls, end: int, reason: str, *, mark_only: bool = False) -> list[Found]:
        """What ends at `end` is text, or the mark alone is. If the mark was only spoken of, a later one may count."""
        warn_unreadable(reason)
        characters = max(calls.inside, 1) if mark_only else end
        inside = self._buffer[calls.inside :]
        if not calls.header and not calls.syntax.bare and not calls.syntax.begins(inside, self._form.marks):
            last = self._buffer.rfind(self._form.marks.write(calls.syntax.start), calls.inside, end)
            characters = last if last > 0 else characters
        return self._as_text(calls, characters)

    def _read(self, calls: _OpenCalls, end: int) -> list[Found]:
        read = read_calls(self._buffer[calls.inside : end], calls.syntax, self._form)
        return [part for call in read.calls for part in self._whole(call)]

    def _read_rest(self, calls: _OpenCalls) -> list[Found]:
        """Calls that the end of the answer ends; what follows them is text."""
        read = read_calls(self._buffer[calls.inside :], calls.syntax, self._form)
        end = len(self._buffer) - read.rest
        if self._cut and not is_closed(self._buffer[calls.inside : end]):
            raise ValueError("it is not complete")
        return self._after_calls(end, [part for call in read.calls for part in self._whole(call)])

    def _as_text(self, calls: _OpenCalls, characters: int) -> list[Found]:
        """The first characters of what looked like calls are text."""
        self._state, self._open = self._back, None
        if calls.header:
            self._drop(calls.header)
            return []
        return self._take(characters)

    def _after_calls(self, characters: int, found: list[Found]) -> list[Found]:
        self._drop(characters)
        self._state, self._open = self._back, None
        self._behind_call = True
        return found

    def _whole(self, call: ToolCall) -> list[Found]:
        start = self._begin_call(call.name, call.call_id)
        return [start, CallArguments(start.index, call.arguments, self._choice), CallEnd(start.index, self._choice)]

    def _begin_call(self, name: str, call_id: str | None = None) -> CallStart:
        index, self.calls = self.calls, self.calls + 1
        return CallStart(index, call_id or new_call_id(self._form), name, self._choice)


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

    @property
    def complete(self) -> bool:
        return self._object.done

    def push(self, marked: str, marks: Marks) -> list[Found]:
        """`marked` is all of the call so far, with its mark."""
        found: list[Found] = []
        if self._start is None:
            head = _JSON_HEAD.match(marked, self._read)
            if head is None:
                return []
            self._start = self._begin(head[1])
            self._read = head.end()
            found.append(self._start)
        fresh = self._object.push(marks.read(marked[self._read :]))
        self._read = len(marked)
        if fresh:
            found.append(CallArguments(self._start.index, fresh, self._start.choice))
        return found

    def finish(self) -> list[Found]:
        assert self._start is not None
        return [CallEnd(self._start.index, self._start.choice)]


class _JsonObject:
    """Finds where an object ends that comes in pieces."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quoted = self._escaped = False

    def push(self, text: str) -> str:
        """The beginning of `text` that belongs to the object."""
        if self.done:
            return ""
        end = next((at for at, char in enumerate(text, 1) if self._ends_with(char)), None)
        self.done = end is not None
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
