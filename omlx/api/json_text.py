"""JSON from a client: how much it may hold, and how a large one is parsed without stopping everyone else.

`pydantic_core.from_json` holds the GIL from the first byte to the last, and its result may be 20 times as large as the
text (`[],` is three bytes, an empty list 56). So the values are counted before they are parsed, in short steps, and
long strings, the only thing that is large without being many, are decoded in pieces. A step holds the GIL for a few
milliseconds, the parser for at most 60; callers run all of it in a thread.
"""

import math
import re
import secrets
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request
from pydantic_core import from_json

from omlx.sizes import format_size

# What each may come to is parsed in less than 50 ms on an idle core. A member takes ten times as long as a number: its
# name is hashed, and the dict grows.
MAX_CONTAINERS = 150_000
MAX_MEMBERS = 120_000
MAX_STRINGS = 300_000
MAX_VALUES = 1_100_000
MAX_STRUCTURE_BYTES = 12 << 20
MAX_REST_BYTES = 16 << 20
MAX_DIGITS = 500
MAX_NAME_BYTES = 16 << 10
# Strings above this size are decoded by themselves, names of members excepted.
LONG_STRING_BYTES = 2 << 10

# A text below this size cannot hold enough to matter.
SMALL_BYTES = 64 << 10
_PIECE_BYTES = 256 << 10

_NAME_BYTES = 16
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_DIGITS + 1))
_CUT_ESCAPE = re.compile(rb"\\u([0-9a-fA-F]{0,3})\Z")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


T = TypeVar("T")


class ReadBody(Protocol):
    """Reads a request's body, a JSON object, and gives what `parse` makes of it (`access.limits` has the real one).

    A large body is parsed in a thread, `parse` included. Raises BadRequest, HTTPException and what `parse` raises.
    """

    async def __call__(self, http: Request, parse: Callable[[dict[str, Any]], T]) -> T: ...


class TooMuchJson(ValueError):
    """The text is over one of the limits; the message names it."""


def parse_json(data: bytes | bytearray) -> Any:
    """The value that a JSON text stands for; a UTF-8 byte order mark before it is skipped.

    Raises ValueError for text that is no JSON: wrong UTF-8, NaN, numbers that no float can hold, half of a surrogate
    pair and more than 200 levels too. Raises TooMuchJson for one that holds too much.
    """
    start = len(_BOM) if data.startswith(_BOM) else 0
    if len(data) <= SMALL_BYTES:
        parsed = from_json(bytes(data[start:]), allow_inf_nan=False)
        return _finished(parsed, {})
    texts: dict[str, str] = {}
    rest: list[bytes] = []
    at = start
    for string in _Scan(data, start).long_strings:
        name = secrets.token_hex(_NAME_BYTES)
        rest += [bytes(data[at : string.start]), b'"', name.encode(), b'"']
        texts[name] = "".join([from_json(b'"%b"' % bytes(data[a:b])) for a, b in pairwise(string.cuts)])
        at = string.end
    rest.append(bytes(data[at:]))
    return _finished(from_json(b"".join(rest), allow_inf_nan=False), texts)


class _LongString(NamedTuple):
    """Where a string is, its quotes included, and the positions between which it can be decoded piece by piece."""

    start: int
    end: int
    cuts: list[int]


class _Scan:
    """Counts what a JSON text holds, and finds its long strings. Raises TooMuchJson.

    It checks nothing else: a text that is no JSON is counted somehow, and refused by the parser.
    """

    def __init__(self, data: bytes | bytearray, start: int) -> None:
        self.long_strings: list[_LongString] = []
        self._data = data
        self._cuts: list[int] = []  # of the string that is not closed yet; they begin with its first byte
        self._containers = self._members = self._commas = self._quotes = self._structure = self._long = 0
        for begin, end in _pieces(data, start):
            self._take(begin, end)
            self._check(end - start)

    def _take(self, begin: int, end: int) -> None:
        # Backslashes are in strings only: without escapes every quote left is the begin or end of one.
        piece = bytes(self._data[begin:end]).replace(b"\\\\", b"__").replace(b'\\"', b"__")
        parts = piece.split(b'"')
        structure = b"".join(parts[bool(self._cuts) :: 2])
        self._quotes += len(parts) - 1
        self._structure += len(structure)
        self._containers += structure.count(b"[") + structure.count(b"{")
        self._members += structure.count(b":")
        self._commas += structure.count(b",")
        if _LONG_NUMBER.search(structure):
            raise TooMuchJson(f"a number in it has more than {MAX_DIGITS} digits")
        self._find_strings(begin, parts)
        if self._cuts:
            self._cuts.append(end)

    def _find_strings(self, begin: int, parts: list[bytes]) -> None:
        """Those of a piece that are long, and what is open at its end."""
        at = begin
        for part in parts[:-1]:
            at += len(part)
            if self._cuts:
                self._close(at)
            else:
                self._cuts = [at + 1]
            at += 1

    def _close(self, quote: int) -> None:
        """The string that is open ends with the quote at this position."""
        start, cuts, self._cuts = self._cuts[0] - 1, [*self._cuts, quote], []
        if quote - start <= LONG_STRING_BYTES:
            return
        if bytes(self._data[quote + 1 : quote + 65]).lstrip(b" \t\r\n").startswith(b":"):
            if quote - start > MAX_NAME_BYTES:
                raise TooMuchJson(f"the name of a member is longer than {format_size(MAX_NAME_BYTES)}")
            return
        self._long += quote - start
        self.long_strings.append(_LongString(start, quote + 1, cuts))

    def _check(self, seen: int) -> None:
        counts = (
            (self._containers, MAX_CONTAINERS, "lists and objects"),
            (self._members, MAX_MEMBERS, "members of objects"),
            (self._quotes // 2, MAX_STRINGS, "strings, names of members included"),
            (self._containers + self._commas, MAX_VALUES, "values"),
        )
        for count, limit, what in counts:
            if count > limit:
                raise TooMuchJson(f"it has more than {limit} {what}")
        if self._structure > MAX_STRUCTURE_BYTES:
            raise TooMuchJson(f"it has more than {format_size(MAX_STRUCTURE_BYTES)} outside of its strings")
        if not self._cuts and seen - self._long > MAX_REST_BYTES:
            short = format_size(LONG_STRING_BYTES)
            raise TooMuchJson(f"its strings of up to {short} have more than {format_size(MAX_REST_BYTES)} together")


def _pieces(data: bytes | bytearray, start: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece: no escape, surrogate pair or UTF-8 sequence of a string is cut by them."""
    while start < len(data):
        end = min(start + _PIECE_BYTES, len(data))
        if end < len(data):
            end = _safe_cut(data, start, end)
        yield start, end
        start = end


def _safe_cut(data: bytes | bytearray, start: int, end: int) -> int:
    piece = bytes(data[start:end])
    end += (len(piece) - len(piece.rstrip(b"\\"))) % 2  # the character that the last backslash escapes
    while True:
        if cut := _CUT_ESCAPE.search(data, max(start, end - 6), end):
            digits = re.compile(rb"[0-9a-fA-F]{0,%d}" % (4 - len(cut[1]))).match(data, end)
            assert digits is not None
            end = digits.end()
        # The other half of a pair. After an escaped backslash it may be an escape of its own, which is passed as well.
        if not (_HIGH_SURROGATE.search(data, max(start, end - 6), end) and data[end : end + 2] == b"\\u"):
            break
        end += 2
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return end


def _finished(parsed: Any, texts: dict[str, str]) -> Any:
    """The value with its long strings put in. Raises ValueError for a number that was read as infinity.

    In Python, since that lets other threads run.
    """
    top = [parsed]
    todo: list[list[Any] | dict[str, Any]] = [top]
    while todo:
        container = todo.pop()
        members = container.items() if isinstance(container, dict) else enumerate(container)
        for place, value in members:
            kind = type(value)
            if kind is dict or kind is list:
                todo.append(value)
            elif kind is float:
                if not math.isfinite(value):
                    raise ValueError("a number is too large")
            elif texts and kind is str and len(value) == 2 * _NAME_BYTES and value in texts:
                container[place] = texts[value]  # type: ignore[index]  # a place of this very container
    return top[0]
