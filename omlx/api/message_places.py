"""In which message of a conversation a prompt stops being what is cached."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from omlx.api.chat import ChatPrompt, Engine, encode, render
from omlx.errors import BadRequest

_REWRITTEN = (
    "the template writes this past answer otherwise than it was generated (many leave out its reasoning), "
    "or the client changed it"
)


class Miss(Protocol):
    """What is used here of omlx.cache.probe.FirstMiss."""

    @property
    def differs_at(self) -> int | None: ...


def where_it_differs(engine: Engine, prompt: ChatPrompt, tokens: Sequence[int], miss: Miss) -> dict[str, Any]:
    """The message in which the prompt (its `tokens`) differs from what is cached; {} if that is not the reason.

    Renders the conversation a few times.
    """
    if miss.differs_at is None or prompt.images:  # rendered alone, a text has no places for pictures
        return {}
    index = message_at(engine, prompt, tokens, miss.differs_at)
    if index == len(prompt.messages):
        return {}
    place = {"message": index, "role": prompt.messages[index]["role"]}
    return place | ({"hint": _REWRITTEN} if place["role"] == "assistant" else {})


def message_at(engine: Engine, prompt: ChatPrompt, tokens: Sequence[int], position: int) -> int:
    """Which message the token at `position` belongs to: the number of those that end before it."""

    def end(count: int) -> int:
        """Tokens that the prompt shares with its first messages alone."""
        try:
            text = render(engine, replace(prompt, messages=prompt.messages[:count]), ready=False)
            head = encode(engine, text, "messages", special=False)
        except BadRequest:  # some templates want a whole turn
            return 0
        pairs = enumerate(zip(head, tokens, strict=False))
        return next((at for at, (mine, other) in pairs if mine != other), min(len(head), len(tokens)))

    counts = range(1, len(prompt.messages) + 1)
    return bisect_right(counts, position, key=end)
