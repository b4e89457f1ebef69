"""What happens while an answer is made, in words that belong to no dialect; and the request's log line."""

import logging
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from omlx.engine.detokenize import REPLACEMENT, TextDelta, TextEngine, stream_text
from omlx.errors import BadRequest, EngineError, NotFound, OmlxError, Overloaded
from omlx.request import Request, TokenOutput

logger = logging.getLogger("omlx.request")

# What SentencePiece vocabularies write for a space.
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token for people: its text, its bytes, its natural log-probability.

    `offset` counts the characters of the answer before it, `top` are the likeliest tokens there.
    """

    text: str
    data: bytes
    logprob: float
    offset: int = 0
    top: tuple["TokenText", ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached_tokens` are those of the prompt that were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The prompt is still being worked on (or waits): tokens done, of all."""

    prefilled_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next piece of the answer; `tokens` only if logprobs were asked for."""

    text: str
    tokens: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer that came to its end."""

    reason: Literal["stop", "length"]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no (more) answer: what a client is told, and the HTTP status if it can still be set."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


Event = Progress | TextPiece | Finished | Fault


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, for a client that did not ask for a stream."""

    text: str
    tokens: tuple[TokenText, ...]
    end: Finished


class Dialect(Protocol):
    """How one API writes one answer. Made for a request by the dialect's parse function.

    `request_id` goes into every part of the answer. `frames` turns the events of one answer, in their
    order, into server-sent-event frames; `body` makes the JSON of a whole answer.
    """

    @property
    def request_id(self) -> str: ...

    def frames(self, event: Event) -> list[str]: ...

    def body(self, answer: Answer) -> dict[str, Any]: ...


def fault_of(error: OmlxError) -> Fault:
    """What a client is told about an error; the class decides, never the text."""
    if isinstance(error, BadRequest):
        return Fault(400, str(error), param=error.param, code=error.code)
    if isinstance(error, NotFound):
        return Fault(404, str(error), param="model", code="model_not_found")
    if isinstance(error, Overloaded):
        return Fault(503, str(error), "overloaded_error", code="overloaded", retry_after_s=error.retry_after_s)
    return Fault(500, str(error), "server_error")


INTERNAL_FAULT = Fault(500, "internal error; the server's log has the details", "server_error", code="internal_error")


async def answer_events(
    engine: TextEngine, request: Request, *, model: str, context: Sequence[int] = ()
) -> AsyncGenerator[TextPiece | Finished, None]:
    """Runs `request` and tells what happens: text pieces, then Finished.

    Raises what the engine raises. However it ends (also closed half-way, which stops the request), one
    line is logged.
    """
    outcome, generated = "disconnected", 0
    try:
        async with aclosing(stream_text(engine, request, context=context)) as deltas:
            async for delta in deltas:
                generated = delta.generated_tokens
                if delta.text or delta.outputs:
                    yield TextPiece(delta.text, _token_texts(engine, request, delta))
                if delta.finish_reason:
                    outcome = delta.finish_reason
                    usage = Usage(len(request.prompt), generated, request.stats.cached_tokens)
                    yield Finished(delta.finish_reason, usage)
    except Exception as error:
        outcome = f"error ({type(error).__name__})"
        raise
    finally:
        logger.info(_summary(model, request, generated, outcome))


async def collect(events: AsyncGenerator[TextPiece | Finished, None]) -> Answer:
    """The whole answer. Cancelling this stops the request."""
    pieces: list[TextPiece] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                tokens = tuple(token for piece in pieces for token in piece.tokens)
                return Answer("".join(piece.text for piece in pieces), tokens, event)
            pieces.append(event)
    raise EngineError("the engine ended an answer without a reason")


def progress(request: Request) -> Progress:
    return Progress(request.stats.prefilled_tokens, len(request.prompt))


def _token_texts(engine: TextEngine, request: Request, delta: TextDelta) -> tuple[TokenText, ...]:
    if request.sampling.top_logprobs is None:
        return ()
    pairs = zip(delta.outputs, delta.offsets, strict=True)
    return tuple(_token_text(engine.tokenizer, output, offset) for output, offset in pairs)


def _token_text(tokenizer: Any, output: TokenOutput, offset: int) -> TokenText:
    top = tuple(TokenText(*spell(tokenizer, token), logprob) for token, logprob in output.top_logprobs)
    logprob = output.logprob if output.logprob is not None else 0.0
    return TokenText(*spell(tokenizer, output.token), logprob, offset, top)


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


def _summary(model: str, request: Request, generated: int, outcome: str) -> str:
    stats = request.stats
    now = time.monotonic()
    waited = (stats.admitted or now) - stats.arrived
    first = f"{stats.first_token - stats.arrived:.3f}s" if stats.first_token else "-"
    return (
        f"model={model!r} prompt={len(request.prompt)} cached_ram={stats.cached_ram_tokens} "
        f"cached_ssd={stats.cached_ssd_tokens} {_images(request)}ttft={first} generated={generated} "
        f"speed={_speed(request, generated, now)} queued={waited:.3f}s finish={outcome}"
    )


def _images(request: Request) -> str:
    vision = request.vision
    return "" if vision is None else f"images={len(vision.starts)} encoded={vision.encoded} reused={vision.reused} "


def _speed(request: Request, generated: int, now: float) -> str:
    """Tokens a second after the first one."""
    stats = request.stats
    elapsed = (stats.finished or now) - (stats.first_token or now)
    return f"{(generated - 1) / elapsed:.1f}tok/s" if generated > 1 and elapsed > 0 else "-"
