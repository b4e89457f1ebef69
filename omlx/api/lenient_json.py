"""JSON as models write it: what can be read in one way only is read."""

import json
import re
import sys
from typing import Any

_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n?", re.IGNORECASE)
_FENCE_END = re.compile(r"\s*```")
_SPACE = re.compile(r"\s*")
_PIECE = re.compile(r'\s+|"(?:[^"\\]|\\.)*+"|[{}\[\],:]|[A-Za-z0-9+.-]+', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
_LARGEST = sys.float_info.max


def _number(text: str) -> float:
    """1e999 is infinity to Python, which JSON does not have: the largest number stands for it."""
    return max(-_LARGEST, min(float(text), _LARGEST))


# Raw line breaks and tabs in strings are taken as they are.
_DECODER = json.JSONDecoder(strict=False, parse_float=_number)


def value_at(text: str, at: int = 0) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. Raises ValueError if there is none.

    Accepts what is unambiguous: raw control characters in strings, a code fence around the value, trailing commas,
    and one closing bracket too few.
    """
    fence = _FENCE.match(text, at)
    start = _SPACE.match(text, fence.end() if fence else at).end()  # type: ignore[union-attr]
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        value, end = _repaired(text, start)
    if fence and (closing := _FENCE_END.match(text, end)):
        end = closing.end()
    return value, end


def is_closed(text: str) -> bool:
    """Whether every bracket outside of strings has its counterpart."""
    bare = _STRING.sub("", text)
    return sum(map(bare.count, "{[(")) == sum(map(bare.count, "}])"))


def _repaired(text: str, start: int) -> tuple[Any, int]:
    pieces, open_brackets, end = _Pieces(), [], start
    missing = 0
    while found := _PIECE.match(text, end):
        piece = found[0]
        if piece in _CLOSERS:
            open_brackets.append(piece)
        elif piece in "}]":
            if len(open_brackets) > 1 and piece == _CLOSERS[open_brackets[-2]] != _CLOSERS[open_brackets[-1]]:
                missing += 1
                pieces.close(_CLOSERS[open_brackets.pop()])
            if not open_brackets or piece != _CLOSERS[open_brackets.pop()]:
                raise ValueError("brackets do not match")
            pieces.close(piece)
            end = found.end()
            if not open_brackets:
                break
            continue
        pieces.add(piece)
        end = found.end()
    missing += len(open_brackets)
    if missing > 1:
        raise ValueError("more than one bracket is not closed")
    for bracket in reversed(open_brackets):
        pieces.close(_CLOSERS[bracket])
    try:
        return _DECODER.decode(pieces.text()), end
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _Pieces:
    """JSON put together again, without commas before a closing bracket."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if not piece.isspace():
            self._pieces.append(piece)

    def close(self, bracket: str) -> None:
        if self._pieces and self._pieces[-1] == ",":
            self._pieces.pop()
        self._pieces.append(bracket)

    def text(self) -> str:
        return " ".join(self._pieces)
