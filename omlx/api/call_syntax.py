"""How models write tool calls, and how that is read. String arguments are returned exactly as they were written.

A syntax reads *marked text* (see `omlx.api.marks`): what stands between the marks that begin and end the calls. It
gives each call as a dict with `name`, `arguments` (a dict, or its JSON) and perhaps `id`, and raises ValueError for
what is no call. Finding the end mark is `AnswerParser`'s work; it asks `ends_after` whether one belongs to a value.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from omlx.api.lenient_json import value_at
from omlx.api.marks import Marks
from omlx.api.value_types import typed, types_of

Tools = Sequence[dict[str, Any]]
# Makes a regular expression's source of a mark's text.
Pattern = Callable[[Callable[[str], str]], str]

_BETWEEN = re.compile(r"[\s,;]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"|"', re.DOTALL)


class Read(NamedTuple):
    """Calls, and how many characters of the text they take."""

    calls: list[dict[str, Any]]
    end: int


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A syntax whose calls stand between `start` and one of `ends`; without `ends` the answer's end ends them.

    `inner` are further marks, inside. `bare`: `start` is no mark but the beginning of the calls, which counts only at
    the beginning of an answer. `declared`: only calls of tools that the request has count. `plain`: each call is
    exactly a JSON object with `name` and `arguments`. `alone`: `start` counts only at the beginning of a line, outside
    of code fences. `closing`: a mark that may follow the end.
    """

    start: str
    ends: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: bool = False
    declared: bool = False
    plain: bool = False
    alone: bool = False
    closing: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start, *self.ends, *self.inner)

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        """The calls that `text` begins with."""
        raise NotImplementedError

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        """Whether an end mark that follows `text` ends the calls, and is not part of a value."""
        raise NotImplementedError

    def begins(self, text: str, marks: Marks) -> bool:
        """Whether `text` begins as calls do, so that a mark before it was meant as one."""
        return _is_json(text)

    def hopeful(self, text: str) -> bool:
        """Whether calls without an end mark may begin with `text`."""
        return True


@dataclass(frozen=True, slots=True)
class JsonCalls(CallSyntax):
    """JSON objects that hold a name and arguments, or lists of them; bare ones may follow a `prefix`."""

    prefix: str = ""

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        return read_json(marks.read(text), len(self.prefix) if text.startswith(self.prefix) else 0)

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        return not _in_json_string(text)

    def hopeful(self, text: str) -> bool:
        head = "".join(text[:80].removeprefix(self.prefix).split()).lower()
        if _FENCE.startswith(head):
            return True
        head = head.removeprefix(_FENCE).removeprefix("```").lstrip("[")
        return any(head.startswith(key) or key.startswith(head) for key in _FIRST_KEYS)


def read_json(text: str, at: int = 0) -> Read:
    """The calls that stand one after the other from `at` on. Raises ValueError if the first thing there is no JSON."""
    calls: list[dict[str, Any]] = []
    end = at
    while at < len(text):
        try:
            value, end = value_at(text, at)
            calls += [_json_call(item) for item in (value if isinstance(value, list) else [value])]
        except ValueError:
            if not calls:
                raise
            break
        at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return Read(calls, end)


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[", "`")


_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "input")
_IDS = ("id", "tool_call_id", "call_id")
_FENCE = "```json"
_FIRST_KEYS = tuple(f'{{"{key}"' for key in (*_NAMES, *_ARGUMENTS[:2], *_IDS, "type"))


def _json_call(item: Any) -> dict[str, Any]:
    """A call from an object, whatever its members are called."""
    if not isinstance(item, dict):
        raise ValueError("not an object")
    if isinstance(inside := item.get("function"), dict):
        item = item | inside
    name = next((item[key] for key in _NAMES if isinstance(item.get(key), str)), None)
    call: dict[str, Any] = {"name": name, "arguments": next((item[key] for key in _ARGUMENTS if key in item), {})}
    return call | {"id": next((item[key] for key in _IDS if isinstance(item.get(key), str)), None)}


def _in_json_string(text: str) -> bool:
    return any(found[0] == '"' for found in _STRING.finditer(text))


@dataclass(frozen=True, slots=True)
class HeadedCalls(CallSyntax):
    """A header that has the `name` (and perhaps the `id`) of a call, its arguments as JSON, and `tail`; repeated.

    A list of JSON calls is read as well.
    """

    header: Pattern = lambda mark: ""
    tail: Pattern = lambda mark: ""

    def begins(self, text: str, marks: Marks) -> bool:
        return _is_json(text) or _compiled(self.header, marks).match(text) is not None

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        if _is_json(text):
            return read_json(marks.read(text))
        header, tail = (_compiled(pattern, marks) for pattern in (self.header, self.tail))
        calls: list[dict[str, Any]] = []
        end = 0
        while found := header.match(text, end):
            arguments, end = value_at(text, found.end())
            closing = tail.match(text, end)
            end = closing.end() if closing else end
            calls.append({"name": found["name"], "arguments": _read_all(arguments, marks)} | _group(found, "id"))
        return Read(calls, end)

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        return not _in_json_string(text)


def _group(found: re.Match[str], name: str) -> dict[str, str]:
    value = found.groupdict().get(name)
    return {name: value} if value else {}


def _read_all(value: Any, marks: Marks) -> Any:
    """A JSON value with the marks in its strings read."""
    if isinstance(value, str):
        return marks.read(value)
    if isinstance(value, list):
        return [_read_all(item, marks) for item in value]
    if isinstance(value, dict):
        return {marks.read(key): _read_all(item, marks) for key, item in value.items()}
    return value


def _compiled(pattern: Pattern, marks: Marks) -> re.Pattern[str]:
    return re.compile(pattern(lambda mark: re.escape(marks.write(mark))), re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaggedCalls(CallSyntax):
    """A tag that opens a call and has its `name`, a tagged value for each argument, a tag that closes the call.

    `argument` opens a value and has its `key`, perhaps a `kind`: "string"/"true" for text as it is. `value_end` closes
    it. `padded`: the template puts a line break on either side of a value. `whole`: arguments may also be one JSON
    object, between these two marks.
    """

    call: Pattern = lambda mark: ""
    close: Pattern = lambda mark: r"\Z"
    argument: Pattern = lambda mark: ""
    value_end: str = ""
    padded: bool = False
    whole: tuple[Pattern, str] | None = None

    def begins(self, text: str, marks: Marks) -> bool:
        return _is_json(text) or _compiled(self.call, marks).match(text) is not None

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        if _is_json(text):
            return read_json(marks.read(text))
        return _TagReader(self, marks, tools).read(text)

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        if _is_json(text):
            return not _in_json_string(text)
        reader = _TagReader(self, marks, tools)
        if not reader.call.match(text):
            return True
        if reader.in_value(text):
            return False
        try:
            return not text[reader.read(text).end :].strip()
        except ValueError:
            return False


class _TagReader:
    """One syntax with tags, in the marked text of one answer."""

    def __init__(self, syntax: TaggedCalls, marks: Marks, tools: Tools) -> None:
        self.call = _compiled(syntax.call, marks)
        self._syntax = syntax
        self._marks = marks
        self._tools = tools
        self._close = _compiled(syntax.close, marks)
        self._argument = _compiled(syntax.argument, marks)
        value_end = marks.write(syntax.value_end)
        self._value_end = re.compile(re.escape(value_end))
        # A value ends where another one, or the call's end, follows: its own text may hold the same tag.
        follows = rf"(?=\s*+(?:{_searched(self._argument)}|{_searched(self._close)}|\Z))"
        self._real_end = re.compile(re.escape(value_end) + follows, re.DOTALL)
        self._opens = re.compile(_searched(self._argument), re.DOTALL)
        self._edge = re.compile(rf"(?P<opens>{self._opens.pattern})|{self._real_end.pattern}", re.DOTALL)

    def in_value(self, text: str) -> bool:
        return len(self._opens.findall(text)) > len(self._value_end.findall(text))

    def read(self, text: str) -> Read:
        calls: list[dict[str, Any]] = []
        end = 0
        while found := self.call.match(text, end):
            name = _attribute(self._marks.read(found["name"]))
            arguments, end = self._arguments(text, found.end(), types_of(name, self._tools))
            calls.append({"name": name, "arguments": arguments})
            if end == found.start():
                break
        if not calls:
            raise ValueError("no call")
        return Read(calls, end)

    def _arguments(self, text: str, at: int, types: Callable[[str], set[str]]) -> tuple[Any, int]:
        arguments: dict[str, Any] = {}
        if (whole := self._whole(text, at)) is not None:
            arguments, at = whole
        while found := self._argument.match(text, at):
            key = _attribute(self._marks.read(found["key"]))
            start = found.end()
            end, at = self._value(text, start)
            value = _unpadded(text[start:end]) if self._syntax.padded else text[start:end]
            arguments[key] = typed(self._marks.read(_without_cdata(value)), types(key), found.groupdict().get("kind"))
        closing = self._close.match(text, at)
        if closing is None:
            raise ValueError("a call is not closed")
        return arguments, closing.end()

    def _whole(self, text: str, at: int) -> tuple[Any, int] | None:
        if self._syntax.whole is None:
            return None
        opening = _compiled(self._syntax.whole[0], self._marks).match(text, at)
        if opening is None:
            return None
        value, end = value_at(text, opening.end())
        closing = self._marks.write(self._syntax.whole[1])
        if not isinstance(value, dict) or not text.startswith(closing, end):
            raise ValueError("arguments are no object")
        return _read_all(value, self._marks), end + len(closing)

    def _value(self, text: str, start: int) -> tuple[int, int]:
        """Where a value and where its end tag end. A value may hold a whole call."""
        depth = 0
        for found in self._edge.finditer(text, start):
            if found["opens"]:
                depth += 1
            elif depth == 0:
                return found.start(), found.end()
            else:
                depth -= 1
        last = self._real_end.search(text, start)
        if last is None:
            raise ValueError("a value is not closed")
        return last.start(), last.end()


def _searched(pattern: re.Pattern[str]) -> str:
    """A pattern to be found anywhere: without groups, and without white space before it, which takes quadratic time."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern.removeprefix(r"\s*"))


def _attribute(text: str) -> str:
    return text.strip().replace("&quot;", '"').replace("&amp;", "&")


def _unpadded(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def _without_cdata(value: str) -> str:
    found = _CDATA.fullmatch(value)
    return found[1] if found else value


@dataclass(frozen=True, slots=True)
class BraceCalls(CallSyntax):
    """`call:name{key:value,...}` where strings stand between two `quote` marks and keys have no quotes (Gemma)."""

    quote: str = '"'

    def begins(self, text: str, marks: Marks) -> bool:
        return _GEMMA_CALL.match(text) is not None

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        quote = marks.write(self.quote)
        calls: list[dict[str, Any]] = []
        at = end = 0
        while found := _GEMMA_CALL.match(text, at):
            reader = _BraceReader(text, quote, marks)
            arguments, end = reader.members(found.end())
            calls.append({"name": found["name"], "arguments": arguments})
            at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
        return Read(calls, end)

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        return text.count(marks.write(self.quote)) % 2 == 0


_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w.:/-]+)\{")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:\s*")
_BARE_VALUE = re.compile(r"[^,{}\[\]]*")
_NEXT = re.compile(r"\s*([,}\]])\s*")


class _BraceReader:
    def __init__(self, text: str, quote: str, marks: Marks) -> None:
        self._text = text
        self._marks = marks
        self._quote = quote
        # A string ends where something follows that may follow one.
        self._string = re.compile(rf"{re.escape(quote)}(.*?){re.escape(quote)}(?=\s*(?:[,}}\]:]|\Z))", re.DOTALL)

    def members(self, at: int) -> tuple[dict[str, Any], int]:
        """The members of an object, and where they end, past the brace."""
        found: dict[str, Any] = {}
        if closing := re.compile(r"\s*\}").match(self._text, at):
            return found, closing.end()
        while True:
            key, at = self._key(at)
            found[key], at = self._value(at)
            separator, at = self._separator(at, "}")
            if separator == "}":
                return found, at

    def _key(self, at: int) -> tuple[str, int]:
        if quoted := self._string.match(self._text, at):
            colon = re.compile(r"\s*:\s*").match(self._text, quoted.end())
            if colon is None:
                raise ValueError("no value")
            return self._marks.read(quoted[1]), colon.end()
        found = _KEY.match(self._text, at)
        if found is None:
            raise ValueError("no name of an argument")
        return self._marks.read(found[1]).strip('"'), found.end()

    def _value(self, at: int) -> tuple[Any, int]:
        if quoted := self._string.match(self._text, at):
            return self._marks.read(quoted[1]), quoted.end()
        if self._text.startswith(self._quote, at):
            raise ValueError("a string is not closed")
        if self._text.startswith("{", at):
            return self.members(at + 1)
        if self._text.startswith("[", at):
            return self._items(at + 1)
        found = _BARE_VALUE.match(self._text, at)
        assert found is not None
        return self._literal(found[0]), found.end()

    def _items(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        if closing := re.compile(r"\s*\]").match(self._text, at):
            return items, closing.end()
        while True:
            item, at = self._value(at)
            items.append(item)
            separator, at = self._separator(at, "]")
            if separator == "]":
                return items, at

    def _separator(self, at: int, closing: str) -> tuple[str, int]:
        found = _NEXT.match(self._text, at)
        if found is None or found[1] not in (",", closing):
            raise ValueError("brackets do not match")
        return found[1], found.end() if found[1] == "," else found.start(1) + 1

    def _literal(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return self._marks.read(text.strip())


@dataclass(frozen=True, slots=True)
class PythonCalls(CallSyntax):
    """A list of calls with named arguments, as in Python: `[name(key=value), ...]`, or of JSON calls."""

    def read(self, text: str, marks: Marks, tools: Tools) -> Read:
        if _JSON_LIST.match(text):
            return read_json(marks.read(text))
        return _PythonReader(marks.read(text)).calls()

    def ends_after(self, text: str, marks: Marks, tools: Tools) -> bool:
        return all(len(found[0]) > 1 for found in _PYTHON_STRING.finditer(text))

    def hopeful(self, text: str) -> bool:
        return _BARE_LIST.match(text) is not None


_JSON_LIST = re.compile(r"\s*+(```(json)?\s*+)?\[?\s*+\{")
_BARE_LIST = re.compile(r"\s*+\[\s*+(\{|[A-Za-z_][\w.]*\s*(\(|\Z)|\Z)")


_PYTHON_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+"""|' + r"'''(?:[^'\\]|\\.|'(?!''))*+'''|"
    r'"(?:[^"\\]|\\.)*+"|' + r"'(?:[^'\\]|\\.)*+'|[\"']",
    re.DOTALL,
)
_PYTHON_PIECE = re.compile(_PYTHON_STRING.pattern + r"|\s+|[{}\[\](),:]|[^\s{}\[\](),:\"']+", re.DOTALL)
_PYTHON_CALL = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*)\s*\(\s*")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|x[0-9A-Fa-f]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}
_LITERALS = {"True": "true", "False": "false", "None": "null"}


class _PythonReader:
    def __init__(self, text: str) -> None:
        self._text = text

    def calls(self) -> Read:
        opening = re.compile(r"\s*\[?").match(self._text)
        assert opening is not None
        listed = opening[0].endswith("[")
        calls, at = [], opening.end()
        while found := _PYTHON_CALL.match(self._text, at):
            arguments, at = self._arguments(found.end())
            calls.append({"name": found["name"], "arguments": arguments})
            at = _BETWEEN.match(self._text, at).end()  # type: ignore[union-attr]
        if listed:
            if not self._text.startswith("]", at):
                raise ValueError("the list is not closed")
            at += 1
        if not calls:
            raise ValueError("no call")
        return Read(calls, at)

    def _arguments(self, at: int) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        while found := _KEYWORD.match(self._text, at):
            written, at = self._value(found.end())
            arguments[found[1]] = json.loads(written)
            if self._text.startswith(",", at):
                at += 1
        closing = re.compile(r"\s*\)").match(self._text, at)
        if closing is None:
            raise ValueError("arguments without names")
        return arguments, closing.end()

    def _value(self, at: int) -> tuple[str, int]:
        """A value as JSON, and where it ends: at a comma or a bracket of its own level."""
        pieces: list[str] = []
        brackets: list[str] = []
        while found := _PYTHON_PIECE.match(self._text, at):
            piece = found[0]
            if not brackets and piece in ",)":
                break
            if piece in ("{", "[", "("):
                brackets.append(piece)
            elif piece in ("}", "]", ")"):
                if not brackets or brackets.pop() + piece not in ("{}", "[]", "()"):
                    raise ValueError("brackets do not match")
                if pieces[-1] == ",":
                    pieces.pop()
            pieces.append(_as_json(piece))
            at = found.end()
        return " ".join(piece for piece in pieces if piece), at


def _as_json(piece: str) -> str:
    if piece[0] in "\"'":
        size = 3 if piece[:3] in ('"""', "'''") and len(piece) >= 6 else 1
        if len(piece) < 2 * size:
            raise ValueError("a string is not closed")
        text = _ESCAPE.sub(_unescaped, piece[size:-size])
        # Two escapes may be the halves of one character.
        return json.dumps(text.encode("utf-16", "surrogatepass").decode("utf-16"))
    if piece.isspace():
        return ""
    return {"(": "[", ")": "]"}.get(piece) or _LITERALS.get(piece, piece)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, found[0])
