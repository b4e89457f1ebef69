"""An engine and a pool without a model: what the HTTP side sees of omlx.engine, made to order.

The answer, its pace and what goes wrong are attributes, so that a test can say them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omlx.errors import BadRequest, EngineError, NotFound, OmlxError
from omlx.model.grammar import Grammars
from omlx.request import GrammarMatcher, GrammarSpec, Request, RequestState, TokenLogprob, TokenOutput
from tests.small_tokenizers import byte_level

REPLY = "Grüße, 世界 😀 done"


@dataclass
class FakeEngine:
    """Answers every request with `reply` (the k-th with the k-th of `replies`), then the end-of-text token.

    `refusal` is raised at once; `failure` after `fail_after` tokens.
    """

    name: str = "tiny"
    reply: str = REPLY
    replies: tuple[str, ...] = ()
    context_length: int = 2000
    context_note: str = ""
    longest_token: int = 64
    most_requests: int = 80
    vision: Any = None
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    template_defaults: dict[str, Any] = field(default_factory=dict)
    prefill_s: float = 0.0
    token_s: float = 0.0
    cached_tokens: int = 0
    refusal: OmlxError | None = None
    failure: Exception | None = None
    fail_after: int = 0
    endless: bool = False
    seen: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = byte_level()
        self.vocab_size = len(self.tokenizer)
        self.stopping = False

    async def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        return await Grammars(self.tokenizer, self.vocab_size, self.tokenizer.eos_token_ids).compile(spec)

    async def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        self._admit(request)
        ended = False
        try:
            await self._prefill(request)
            for index, token in enumerate(self._answer(request)):
                if self.failure is not None and index == self.fail_after:
                    raise self.failure
                output = self._output(request, index, token)
                ended = output.finish_reason is not None
                yield output
                if ended:
                    return
                await self._pause(self.token_s)
        finally:
            self.running.discard(request.request_id)
            if not ended:
                self.aborted.append(request.request_id)

    def _admit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        if len(request.prompt) + request.sampling.max_tokens > self.context_length:
            raise BadRequest("does not fit")
        self.seen.append(request)
        self.running.add(request.request_id)
        request.state, request.stats.admitted = RequestState.PREFILLING, time.monotonic()

    async def _prefill(self, request: Request) -> None:
        request.stats.cached_ram_tokens = self.cached_tokens
        for step in range(4):
            request.stats.prefilled_tokens = len(request.prompt) * step // 4
            await self._pause(self.prefill_s / 4)
        if request.lacks_prompt_logprobs:
            best = request.sampling.top_logprobs or 0
            tops = [tuple((token + at, -0.25 - at) for at in range(best)) for token in request.prompt[1:]]
            request.prompt_logprobs += [TokenLogprob(-0.25, top) for top in tops]
        request.stats.first_token = time.monotonic()
        request.stats.prefilled_tokens = len(request.prompt)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.stopping:
            raise EngineError("the server is shutting down")

    def _answer(self, request: Request) -> list[int]:
        number = self.seen.index(request)
        tokens = self.tokenizer.encode(self.replies[number] if number < len(self.replies) else self.reply)
        return tokens * 10_000 if self.endless else [*tokens, self.tokenizer.eos_token_id]

    def _output(self, request: Request, index: int, token: int) -> TokenOutput:
        sampling = request.sampling
        reason = None
        if token in self.tokenizer.eos_token_ids:
            reason = "stop"
        elif index + 1 >= sampling.max_tokens:
            reason = "length"
        best = sampling.top_logprobs
        if best is None:
            return TokenOutput(request.request_id, token, reason)
        top = tuple(((token + step) % self.vocab_size, -0.5 - step) for step in range(best))
        return TokenOutput(request.request_id, token, reason, -0.5, top)


@dataclass(frozen=True)
class FakeModel:
    name: str
    path: Path
    loaded: bool
    kind: str = "text"
    note: str = ""
    aliases: tuple[str, ...] = ()


class FakePool:
    """Serves `engines`; "unloaded" is a model that is there but not in memory."""

    def __init__(self, *engines: FakeEngine, stop_s: float = 0.0) -> None:
        self.engines = {engine.name: engine for engine in engines or (FakeEngine(),)}
        self.calls: list[str] = []
        self.answers = True
        self.loads: dict[str, str] = {}
        self._stop_s = stop_s

    @property
    def engine(self) -> FakeEngine:
        return next(iter(self.engines.values()))

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self, timeout_s: float = 10.0) -> None:
        self.calls.append("stop")
        for engine in self.engines.values():
            engine.stopping = True
        await asyncio.sleep(self._stop_s)

    def models(self) -> list[FakeModel]:
        here = Path(__file__).parent
        loaded = [FakeModel(name, here, True) for name in self.engines]
        return [*loaded, FakeModel("org/unloaded", here, False)]

    async def get(self, name: str) -> FakeEngine:
        if name not in self.engines:
            raise NotFound(f"no model {name!r} here")
        return self.engines[name]

    def loading(self) -> dict[str, str]:
        return self.loads

    async def ready(self) -> bool:
        return self.answers
