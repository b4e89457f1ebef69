"""From requests to the events of one answer, which may have several choices; and each request's log line."""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from omlx.api.answer_format import PLAIN, AnswerFormat
from omlx.api.answer_parser import AnswerParser, Found, Span
from omlx.api.events import (
    Answer,
    AnswerEvent,
    CallArguments,
    CallStart,
    Choice,
    ChoiceEnd,
    Finished,
    Piece,
    Progress,
    ReasoningPiece,
    Started,
    TextPiece,
    TokenText,
    ToolCall,
    Usage,
    prompt_token_texts,
    token_text,
)
from omlx.engine.detokenize import TextDelta, TextEngine, stream_text
from omlx.errors import EngineError
from omlx.request import Request, TokenOutput

logger = logging.getLogger("omlx.request")


@dataclass(frozen=True, slots=True)
class Generation:
    """The work for one answer: a request for each choice, in their order, `per_prompt` of them for each prompt.

    `echoes` are texts that come before the choices of each prompt. `continues_prompt`: the answers go on in the middle
    of the prompt's text. `stop` strings end a choice. `prompt_only`: a choice is its echo alone; the one token that the
    engine needs to generate is left out.
    """

    requests: tuple[Request, ...]
    form: AnswerFormat = PLAIN
    per_prompt: int = 1
    continues_prompt: bool = False
    echoes: tuple[str, ...] = ()
    prompt_only: bool = False

    @property
    def prompts(self) -> tuple[Request, ...]:
        """The first request of each prompt."""
        return self.requests[:: self.per_prompt]

    def echo(self, choice: int) -> str:
        return self.echoes[choice // self.per_prompt] if self.echoes else ""


async def answer_events(engine: TextEngine, generation: Generation, *, model: str) -> AsyncGenerator[AnswerEvent, None]:
    """Runs the requests and tells what happens: pieces of the choices, a ChoiceEnd for each, then Finished.

    Raises what the engine raises. However it ends (also closed half-way, which stops the requests), one
    line is logged for each.
    """
    runs = [_ChoiceRun(engine, generation, index, model) for index in range(len(generation.requests))]
    events = runs[0].events() if len(runs) == 1 else _merged([run.events() for run in runs])
    async with aclosing(events):
        async for event in events:
            yield event
    yield Finished(_usage(generation, runs))


def started(generation: Generation) -> Started:
    requests = generation.prompts
    return Started(sum(len(request.prompt) for request in requests), sum(r.stats.cached_tokens for r in requests))


def progress(generation: Generation) -> Progress:
    requests = generation.prompts
    done = sum(request.stats.prefilled_tokens for request in requests)
    return Progress(done, sum(len(request.prompt) for request in requests))


def _usage(generation: Generation, runs: Iterable["_ChoiceRun"]) -> Usage:
    return Usage(
        sum(len(request.prompt) for request in generation.prompts),
        sum(run.generated for run in runs),
        sum(request.stats.cached_tokens for request in generation.prompts),
        sum(run.reasoning_tokens for run in runs),
    )


async def _merged(streams: Sequence[AsyncGenerator[Piece | ChoiceEnd, None]]) -> AsyncGenerator[Any, None]:
    """The events of all streams as they come. The first error ends all of them."""
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece | ChoiceEnd, None]) -> None:
        async with aclosing(stream):
            async for event in stream:
                queue.put_nowait(event)

    def ended(task: asyncio.Task[None]) -> None:
        queue.put_nowait(task)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ChoiceRun:
    """One choice while it is made."""

    def __init__(self, engine: TextEngine, generation: Generation, index: int, model: str) -> None:
        self.generated = 0
        self._engine = engine
        self._generation = generation
        self._index = index
        self._model = model
        self._request = generation.requests[index]
        self._parser = AnswerParser(generation.form, self._request.sampling.stop, index)
        self._echoes = bool(generation.echoes)
        shift = len(generation.echo(index))
        self._tokens = _Tokens(engine.tokenizer, self._request.sampling.top_logprobs is not None, shift)

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens.reasoning

    async def events(self) -> AsyncGenerator[Piece | ChoiceEnd, None]:
        outcome = "disconnected"
        try:
            context = self._request.prompt if self._generation.continues_prompt else ()
            async with aclosing(stream_text(self._engine, self._request, context=context)) as deltas:
                async for delta in deltas:
                    if self._echoes:
                        self._echoes = False
                        yield await asyncio.to_thread(self._echo)
                    for event in () if self._generation.prompt_only else self._events_of(delta):
                        yield event
                    if reason := self._reason(delta):
                        outcome = reason
                        break
            # Only now, when the engine has stopped working on it.
            yield self._end(outcome)
        except Exception as error:
            outcome = f"error ({type(error).__name__})"
            raise
        finally:
            logger.info(_summary(self._model, self._request, self.generated, outcome))

    def _events_of(self, delta: TextDelta) -> list[Piece]:
        self.generated = delta.generated_tokens
        self._tokens.add(delta)
        found = self._parser.push(delta.text, delta.token)
        if delta.finish_reason:
            found += self._parser.finish(cut=delta.finish_reason == "length")
        pieces = [self._piece(part) for part in found]
        if delta.finish_reason and not self._parser.done:
            pieces += self._left_over()
        return pieces

    def _echo(self) -> TextPiece:
        """The prompt's text, as a piece of the answer; in a thread, since a long prompt has many tokens."""
        text, request = self._generation.echo(self._index), self._request
        wanted = request.sampling.prompt_logprobs
        tokens = prompt_token_texts(self._engine.tokenizer, request, text) if wanted else ()
        return TextPiece(text, tokens, self._index)

    def _piece(self, part: Found) -> Piece:
        if not isinstance(part, Span):
            return part
        tokens = self._tokens.take(part.start, part.end, reasoning=part.kind == "reasoning")
        kind = TextPiece if part.kind == "text" else ReasoningPiece
        return kind(part.text, tokens, self._index)

    def _left_over(self) -> list[Piece]:
        """Tokens that gave no text: half a character at the end."""
        tokens = self._tokens.take(self._parser.position, sys.maxsize, reasoning=False)
        return [TextPiece("", tokens, self._index)] if tokens else []

    def _reason(self, delta: TextDelta) -> str | None:
        return "stop" if self._parser.done else delta.finish_reason

    def _end(self, reason: str) -> ChoiceEnd:
        if reason not in ("stop", "length"):
            raise EngineError("the engine ended an answer without a reason")
        if self._parser.incomplete:
            reason = "length"
        if reason == "stop" and self._parser.calls:
            return ChoiceEnd("tool_calls", self._parser.stopped_by, self._index)
        return ChoiceEnd("stop" if reason == "stop" else "length", self._parser.stopped_by, self._index)


@dataclass(slots=True)
class _Tokens:
    """The tokens of a choice, each until the text that it begins in is handed out."""

    tokenizer: Any
    wanted: bool
    shift: int
    reasoning: int = 0
    _waiting: deque[tuple[int, TokenOutput]] = field(default_factory=deque)

    def add(self, delta: TextDelta) -> None:
        self._waiting.extend(zip(delta.offsets, delta.outputs, strict=True))

    def take(self, start: int, end: int, *, reasoning: bool) -> tuple[TokenText, ...]:
        """Those whose text begins in characters [start, end); the ones before belong to markers."""
        ready: list[tuple[int, TokenOutput]] = []
        while self._waiting and self._waiting[0][0] < end:
            ready.append(self._waiting.popleft())
        ready = [(offset, output) for offset, output in ready if offset >= start]
        self.reasoning += len(ready) if reasoning else 0
        return self._texts(ready)

    def _texts(self, tokens: Iterable[tuple[int, TokenOutput]]) -> tuple[TokenText, ...]:
        if not self.wanted:
            return ()
        return tuple(token_text(self.tokenizer, output, self.shift + offset) for offset, output in tokens)


@dataclass(slots=True)
class _Parts:
    """Puts the pieces of one choice together; neighbours of one kind become one."""

    groups: list[list[Piece]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        last = self.groups[-1][0] if self.groups else None
        if isinstance(piece, TextPiece | ReasoningPiece):
            joins = isinstance(last, type(piece))
        else:
            joins = not isinstance(piece, CallStart)
        if joins:
            self.groups[-1].append(piece)
        else:
            self.groups.append([piece])

    def choice(self, end: ChoiceEnd) -> Choice:
        return Choice(tuple(_joined(group) for group in self.groups), end)


def _joined(group: list[Piece]) -> TextPiece | ReasoningPiece | ToolCall:
    first = group[0]
    if isinstance(first, CallStart):
        arguments = "".join(piece.text for piece in group if isinstance(piece, CallArguments))
        return ToolCall(first.call_id, first.name, arguments)
    texts = [piece for piece in group if isinstance(piece, TextPiece | ReasoningPiece)]
    tokens = tuple(token for piece in texts for token in piece.tokens)
    kind = TextPiece if isinstance(first, TextPiece) else ReasoningPiece
    return kind("".join(piece.text for piece in texts), tokens, first.choice)


async def collect(events: AsyncGenerator[AnswerEvent, None]) -> Answer:
    """The whole answer. Cancelling this stops the requests."""
    parts: dict[int, _Parts] = {}
    choices: dict[int, Choice] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished):
                return Answer(tuple(choices[index] for index in sorted(choices)), event.usage)
            gathered = parts.setdefault(event.choice, _Parts())
            if isinstance(event, ChoiceEnd):
                choices[event.choice] = gathered.choice(event)
            else:
                gathered.add(event)
    raise EngineError("the engine ended an answer without a reason")


def _summary(model: str, request: Request, generated: int, outcome: str) -> str:
    stats = request.stats
    now = time.monotonic()
    waited = (stats.admitted or now) - stats.arrived
    key = f"key={request.key_name} " if request.key_name else ""
    first = f"{stats.first_token - stats.arrived:.3f}s" if stats.first_token else "-"
    return (
        f"model={model!r} {key}prompt={len(request.prompt)} cached_ram={stats.cached_ram_tokens} "
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
