"""What happens while an answer is made, in words that belong to no dialect."""

import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from omlx.engine.detokenize import REPLACEMENT, token_offsets
from omlx.errors import BadRequest, ModelError, NotFound, OmlxError, Overloaded
from omlx.request import Request, TokenOutput

# What SentencePiece vocabularies write for a space.
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token for people: its text, its bytes, its natural log-probability.

    `offset` counts the characters of the answer before it, `top` are the likeliest tokens there. The first token of a
    prompt has no log-probability.
    """

    text: str
    data: bytes
    logprob: float | None
    offset: int = 0
    top: tuple["TokenText", ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; each prompt is counted once, every choice is.

    `cached_tokens` are those of the prompts that were not computed, `reasoning_tokens` those of the answers that
    are no part of their text.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A stream begins: tokens of its prompts, and how many of them need not be computed as far as is known by now."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt is still being worked on (or waits): tokens done, of all. Also sent while a long call is collected."""

    prefilled_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next piece of the answer's text; `tokens` only if logprobs were asked for."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next piece of what the model thought before it answered."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called: the `index`-th call of the choice. Its arguments follow, then CallEnd, before anything else."""

    index: int
    call_id: str
    name: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: all of them together are JSON (unless the answer was cut at its limit)."""

    index: int
    text: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    choice: int = 0


EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The last event of one choice. `stop` is the stop string that ended it, None if none did."""

    reason: EndReason
    stop: str | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer that came to its end: after the ChoiceEnd of every choice."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no (more) answer: what a client is told, and the HTTP status if it can still be set.

    `too_long` is of a prompt that has more tokens than it may have: both numbers.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    too_long: tuple[int, int] | None = None


Piece = TextPiece | ReasoningPiece | CallStart | CallArguments | CallEnd
AnswerEvent = Piece | ChoiceEnd | Finished
Event = Started | Progress | AnswerEvent | Fault


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A finished call; `arguments` is JSON text as the model wrote it (cut short if the answer was)."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer: its parts in the order in which they came. Neighbours are never both text or both reasoning."""

    parts: tuple[TextPiece | ReasoningPiece | ToolCall, ...]
    end: ChoiceEnd

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPiece))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPiece))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def tokens(self) -> tuple[TokenText, ...]:
        """Those of the text."""
        return tuple(token for part in self.parts if isinstance(part, TextPiece) for token in part.tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, for a client that did not ask for a stream: its choices in the order of their indices."""

    choices: tuple[Choice, ...]
    usage: Usage


class Dialect(Protocol):
    """How one API writes one answer. Made for a request by the dialect's parse function.

    `request_id` goes into every part of the answer. `frames` turns the events of one answer, in their
    order, into server-sent-event frames (the first is Started); `body` makes the JSON of a whole answer.
    """

    @property
    def request_id(self) -> str: ...

    def frames(self, event: Event) -> list[str]: ...

    def body(self, answer: Answer) -> dict[str, Any]: ...


def fault_of(error: OmlxError) -> Fault:
    """What a client is told about an error; the class decides, never the text."""
    if isinstance(error, BadRequest):
        return Fault(400, str(error), param=error.param, code=error.code, too_long=error.too_long)
    if isinstance(error, NotFound):
        return Fault(404, str(error), param=error.param, code=error.code)
    if isinstance(error, Overloaded):
        return Fault(503, str(error), "overloaded_error", code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, ModelError):
        return Fault(503, error.public, "server_error", code="model_unavailable")
    return Fault(500, str(error), "server_error")


INTERNAL_FAULT = Fault(500, "internal error; the server's log has the details", "server_error", code="internal_error")


def token_text(tokenizer: Any, output: TokenOutput, offset: int) -> TokenText:
    """What is told of a token that was generated behind `offset` characters."""
    top = tuple(TokenText(*spell(tokenizer, token), logprob) for token, logprob in output.top_logprobs)
    logprob = output.logprob if output.logprob is not None else 0.0
    return TokenText(*spell(tokenizer, output.token), logprob, offset, top)


def prompt_token_texts(tokenizer: Any, request: Request, text: str) -> tuple[TokenText, ...]:
    """The tokens of a prompt, whose `text` is given back, with their log-probabilities. Slow for a long prompt.

    Special tokens that the tokenizer put around the text have their places at its ends.
    """
    offsets, whole = token_offsets(tokenizer, request.prompt)
    before = max(whole.find(text), 0)
    tokens = []
    for index, (token, offset) in enumerate(zip(request.prompt, offsets, strict=True)):
        known = request.prompt_logprobs[index - 1] if index else None
        top = tuple(TokenText(*spell(tokenizer, best), value) for best, value in known.top) if known else ()
        place = min(max(offset - before, 0), len(text))
        tokens.append(TokenText(*spell(tokenizer, token), known.logprob if known else None, place, top))
    return tuple(tokens)


def spell(tokenizer: Any, token: int | None) -> tuple[str, bytes]:
    """Text and bytes of one token by itself.

    A token that is part of a character is spelled `bytes:\\xe2\\x82`, as OpenAI does.
    """
    piece = tokenizer.convert_ids_to_tokens([token])[0] or ""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if piece.startswith(_SPACE):
        text = piece.replace(_SPACE, " ")  # alone, its leading space would be dropped
    if REPLACEMENT in text:
        data = _bytes_of_piece(piece)
        if data is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data
    return text, text.encode()


def _bytes_of_piece(piece: str) -> bytes | None:
    """Bytes behind a piece of a byte-level or byte-fallback vocabulary; None if it is neither."""
    if fallback := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(fallback[1])
    values = [_BYTE_OF_CHAR.get(char) for char in piece]
    return bytes(value for value in values if value is not None) if None not in values else None


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
