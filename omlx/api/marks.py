"""Marks that are tokens of their own, as opposed to the same text spelled by other tokens."""

import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

# A mark is written as one of 1,024 high surrogates, then low ones: no decoded text contains either.
_FIRST, _MOST, _FILL = 0xD800, 1024, "\udc00"
_WRITTEN = re.compile("[\ud800-\udbff]\udc00*")


_ADDED: "WeakKeyDictionary[Any, tuple[int, dict[str, int]]]" = WeakKeyDictionary()


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens of a tokenizer and their ids. Cached: some have thousands, and every answer asks for them."""
    size = len(tokenizer)
    known = _ADDED.get(tokenizer)
    if known is None or known[0] != size:
        known = _ADDED[tokenizer] = (size, tokenizer.get_added_vocab())
    return known[1]


class Marks:
    """The added tokens of one tokenizer that an output format uses as marks, or as parts of them.

    In *marked text* such a token is replaced by as many surrogates as its text has characters, so every position in
    marked text is a position in the text. What is left of marked text was spelled by ordinary tokens.
    """

    def __init__(self, tokens: dict[int, str]) -> None:
        ordered = sorted(tokens.items(), key=lambda item: (-len(item[1]), item))[:_MOST]
        self.tokens = tokens
        self._tokens = {
            token: (text, chr(_FIRST + index) + _FILL * (len(text) - 1)) for index, (token, text) in enumerate(ordered)
        }
        self._written = dict(self._tokens.values())
        self._texts = {written: text for text, written in self._tokens.values()}
        # Longest first: of two tokens that begin alike the longer one is meant.
        self._any = re.compile("|".join(re.escape(text) for text, _ in self._tokens.values()) or r"(?!)")

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str]) -> "Marks":
        """The added tokens of `tokenizer` that occur in `texts`."""
        every = "\n".join(texts)
        return cls({token: text for text, token in added_tokens(tokenizer).items() if text and text in every})

    def push(self, text: str, token: int | None) -> str:
        """The next piece of an answer as marked text; `token` is the one whose text ends the piece."""
        known = self._tokens.get(token) if token is not None else None
        if known is None or not text.endswith(known[0]):
            return text
        return text.removesuffix(known[0]) + known[1]

    def write(self, mark: str) -> str:
        """A mark as it is found in marked text."""
        return self._any.sub(lambda found: self._written[found[0]], mark)

    def read(self, marked: str) -> str:
        """The text of marked text."""
        return _WRITTEN.sub(lambda found: self._texts.get(found[0], found[0]), marked)


def is_token(marked: str) -> bool:
    """Whether a mark, as `Marks.write` gives it, has a token of its own in it."""
    return _WRITTEN.search(marked) is not None


NO_MARKS = Marks({})
