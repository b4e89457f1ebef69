"""From token ids to text that is safe to send: whole characters.

mlx-lm's streaming detokenizers are not used: they drop a space at the beginning of an answer (which
belongs to a completion), raise on an added token after half a character, and end an answer that was
cut inside a character with U+FFFD.
"""

import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from omlx.errors import EngineError, Overloaded
from omlx.request import Request, TokenOutput

REPLACEMENT = "\ufffd"

# A character has at most 4 bytes, so at most 4 tokens: what is still undecodable after more tokens
# than this will never become a character.
_MAX_HELD_TOKENS = 8
# Tokens of the prompt that are looked at where an answer continues its text.
_CONTEXT_TOKENS = 12
_CONTINUATION_BYTE = re.compile("<0x[89AB].>")


class Tokenizer(Protocol):
    """What is used of mlx-lm's TokenizerWrapper (and so of a transformers tokenizer) here."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...


class TextEngine(Protocol):
    """What is used of an Engine here."""

    @property
    def tokenizer(self) -> Any: ...

    def generate(self, request: Request) -> AsyncIterator[TokenOutput]: ...


class _Decoder:
    """Decodes one token after the other as if all were decoded together.

    A token is decoded with those before it, because decoders treat the beginning of a text in their
    own way (a SentencePiece one drops its first space). The window is as short as that allows.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = self._aligned(list(context[-_CONTEXT_TOKENS:]))
        # Where the tokens begin that were not followed by a complete text yet.
        self._group = len(self._window)
        self._sent = self._complete_chars(self._window)
        self._idle = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that are not complete yet."""
        return len(self._decode(self._window)) - self._sent

    def push(self, token: int) -> str:
        """The text that is complete with this token, often empty inside a character."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = text.rstrip(REPLACEMENT)
        self._idle = 0 if len(complete) > self._sent else self._idle + 1
        hopeless = self._idle > _MAX_HELD_TOKENS
        if hopeless:
            complete = text
        fresh = complete[self._sent :]
        self._sent += len(fresh)
        if hopeless or (fresh and complete == text):
            self._restart()
        return fresh

    def _restart(self) -> None:
        """Forgets all but the last tokens that gave text; they are the next token's context."""
        self._window = self._window[self._group :]
        self._group = len(self._window)
        self._sent = len(self._decode(self._window))
        self._idle = 0

    def _decode(self, tokens: list[int]) -> str:
        return _plain(self._tokenizer, tokens)

    def _aligned(self, tail: list[int]) -> list[int]:
        """Drops leading byte tokens that end a character cut in two: they would spoil the whole run of bytes."""
        pieces = self._tokenizer.convert_ids_to_tokens(tail)
        cut = next((at for at, piece in enumerate(pieces) if not _CONTINUATION_BYTE.fullmatch(piece or "")), 0)
        return tail[cut:]

    def _complete_chars(self, tokens: list[int]) -> int:
        """Characters of `tokens` without half a character at their end, which the answer will complete."""
        texts = [self._decode(tokens[: len(tokens) - cut]) for cut in range(min(4, len(tokens) + 1))]
        whole = next((text for text in texts if not text.endswith(REPLACEMENT)), texts[0].rstrip(REPLACEMENT))
        return len(whole)


def _plain(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def continued_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text that an answer goes on with: half a character at its end comes with the answer that completes it."""
    text = _plain(tokenizer, tokens)
    return text[: len(text) - _Decoder(tokenizer, tokens).held]


def token_offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[list[int], str]:
    """The characters before each token, and the text of all; a token inside a character begins where that does."""
    decoder, texts, offsets, count = _Decoder(tokenizer, ()), [], [], 0
    for token in tokens:
        offsets.append(count)
        texts.append(decoder.push(token))
        count += len(texts[-1])
    return offsets, "".join(texts)


class TextStream:
    """The text of one answer, token by token.

    Half a character is held back, and dropped at the end. End-of-text tokens have no text. `context` are the tokens
    before the answer if the answer continues their text, as a completion does: a space at its beginning is then kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int] = ()) -> None:
        self.decoded_chars = 0
        self._end_tokens = tokenizer.eos_token_ids
        self._decoder = _Decoder(tokenizer, context)

    def push(self, token: int) -> str:
        """Takes the next token; returns text that can be sent now."""
        if token in self._end_tokens:
            return ""
        text = self._decoder.push(token)
        self.decoded_chars += len(text)
        return text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of an answer.

    `outputs` are the tokens whose text begins inside what has been sent by now, each once, without
    the end-of-text token that ends an answer; `offsets` are the characters of the answer before each.
    `generated_tokens` counts every token so far. `token` is the last one, whose text ends `text`.
    """

    text: str
    outputs: tuple[TokenOutput, ...]
    finish_reason: Literal["stop", "length"] | None = None
    offsets: tuple[int, ...] = ()
    generated_tokens: int = 0
    token: int | None = None


class _Answer:
    """Keeps text and tokens of one answer together: both wait until the text may be sent."""

    def __init__(self, stream: TextStream, end_tokens: Collection[int]) -> None:
        self.stream = stream
        self._end_tokens = end_tokens
        self._waiting: deque[tuple[int, TokenOutput]] = deque()
        self._sent_chars = 0
        self._generated = 0

    def add(self, output: TokenOutput) -> TextDelta:
        if output.token is None or output.finish_reason == "abort":
            raise Overloaded("the answer was broken off because the server is shutting down")
        self._generated += 1
        start = self.stream.decoded_chars
        text = self.stream.push(output.token)
        if output.finish_reason != "stop" or output.token not in self._end_tokens:
            self._waiting.append((start, output))
        return self._delta(text, output.token, output.finish_reason)

    def _delta(self, text: str, token: int, reason: Literal["stop", "length"] | None) -> TextDelta:
        self._sent_chars += len(text)
        ready: list[tuple[int, TokenOutput]] = []
        while self._waiting and (reason or self._waiting[0][0] < self._sent_chars):
            ready.append(self._waiting.popleft())
        return TextDelta(
            text,
            outputs=tuple(output for _, output in ready),
            finish_reason=reason,
            offsets=tuple(start for start, _ in ready),
            generated_tokens=self._generated,
            token=token,
        )


async def stream_text(
    engine: TextEngine, request: Request, *, context: Sequence[int] = ()
) -> AsyncGenerator[TextDelta, None]:
    """The answer as text; the last delta, and only it, has a `finish_reason`.

    Closing this generator ends generation in the engine. Raises what `engine.generate` raises, Overloaded when the
    engine aborted the request (it only does so when it stops), EngineError when it ended without a reason.
    """
    answer = _Answer(TextStream(engine.tokenizer, context=context), engine.tokenizer.eos_token_ids)
    last: TextDelta | None = None
    async with aclosing(cast(AsyncGenerator[TokenOutput, None], engine.generate(request))) as outputs:
        async for output in outputs:
            delta = answer.add(output)
            if delta.finish_reason:
                last = delta
            elif delta.text or delta.outputs:
                yield delta
    if last is None:
        raise EngineError("the engine ended an answer without a reason")
    yield last
