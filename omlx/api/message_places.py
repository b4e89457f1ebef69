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

# Tokens by which a message is found again further on.
_RECOGNIZED = 24


class Miss(Protocol):
    """What is used here of omlx.cache.probe.FirstMiss."""

    @property
    def differs_at(self) -> int | None: ...

    @property
    def stored(self) -> Sequence[int]: ...


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
    begin, end = (_end(engine, prompt, tokens, count) if count else 0 for count in (index, index + 1))
    dropped = _dropped(tokens[begin:end], miss.differs_at - begin, miss.stored)
    if dropped:
        last = index + dropped - 1
        which = f"message {index}" if dropped == 1 else f"messages {index} to {last}"
        return place | {"hint": f"the client dropped {which} of the cached conversation; raise its context window"}
    return place | ({"hint": _REWRITTEN} if place["role"] == "assistant" else {})


def _dropped(message: Sequence[int], differs: int, stored: Sequence[int]) -> int:
    """How many messages of the stored prompt are left out, if `message` comes later in it; 0 if it does not.

    `message` are its tokens, of which the first `differs` are also those of the stored message in its place, `stored`
    what is stored from there on. Messages are counted by the token that each of them begins with.
    """
    words = list(message[differs : differs + _RECOGNIZED])
    if len(words) < min(_RECOGNIZED, 4):
        return 0
    found = next((at for at in range(1, len(stored)) if list(stored[at : at + len(words)]) == words), None)
    return 0 if found is None else list(stored[:found]).count(message[0])


def message_at(engine: Engine, prompt: ChatPrompt, tokens: Sequence[int], position: int) -> int:
    """Which message the token at `position` belongs to: the number of those that end before it."""
    counts = range(1, len(prompt.messages) + 1)
    return bisect_right(counts, position, key=lambda count: _end(engine, prompt, tokens, count))


def _end(engine: Engine, prompt: ChatPrompt, tokens: Sequence[int], count: int) -> int:
    """How many tokens the prompt's first messages take.

    They are what the prompt shares with these messages alone, unless the template writes them otherwise where they are
    the last ones (it shows what the last answer was thinking). Then they go up to where other words in the messages
    behind them make a difference, which counts what stands before these words to them.
    """
    messages = prompt.messages
    alone = _rendered(engine, replace(prompt, messages=messages[:count]))
    shared = _common(alone, tokens)
    if shared == len(alone) > 0 or count == len(messages):
        return shared
    others = [*messages[:count], *map(_reworded, messages[count:])]
    return max(shared, _common(_rendered(engine, replace(prompt, messages=others)), tokens))


def _rendered(engine: Engine, prompt: ChatPrompt) -> list[int]:
    try:
        return encode(engine, render(engine, prompt, ready=False), "messages", special=False)
    except BadRequest:  # some templates want a whole turn
        return []


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(a), len(b)))


def _reworded(message: dict[str, Any]) -> dict[str, Any]:
    """The same message with texts that begin otherwise."""
    texts = {name: message[name] for name in ("content", "reasoning_content") if isinstance(message.get(name), str)}
    return message | {name: "b" if text.startswith("a") else "a" for name, text in texts.items()}
