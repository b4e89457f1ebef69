"""Embeddings and scores beside text generation: small batches of inputs, on the MLX thread, in turn with the others.

Inputs of all requests wait in one list by length, and a batch takes neighbours of it: so they are padded little, and
short requests ride along with long ones.
"""

import asyncio
import itertools
import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omlx.engine.core import MLXThread
from omlx.engine.loading import ModelLoader
from omlx.errors import EngineError, OmlxError, Overloaded
from omlx.metrics import ChunkTime
from omlx.model.encoder import Encoder, Vectors, encoder_steps
from omlx.model.model_kind import ModelKind
from omlx.model.steps import Steps
from omlx.request import EncoderInput, Text
from omlx.scheduler import SchedulerConfig

log = logging.getLogger(__name__)

# Tokens of a batch, padding included.
_FIRST_BATCH = 256  # before anything is known of the model's speed
_LARGEST_BATCH = 8192


@dataclass(slots=True)
class EncodeStats:
    """Totals since start; written by the MLX thread. `padded_tokens` are those of all batches, padding included."""

    requests: int = 0
    finished: int = 0
    dropped: int = 0
    failed: int = 0
    inputs: int = 0
    tokens: int = 0
    batches: int = 0
    padded_tokens: int = 0


class Place(NamedTuple):
    """Where an input waits: by length, then by the order of requests, then by its place `at` in its request."""

    tokens: int
    order: int
    at: int


@dataclass(slots=True)
class EncodeJob:
    """One request. The future gets a row for each input, in their order; who cancels it gives the request up.

    `tokens_left` are those of inputs that have no row yet.
    """

    inputs: Sequence[EncoderInput]
    future: Future[Vectors] = field(default_factory=Future)
    rows: dict[int, Vectors] = field(default_factory=dict)
    tokens_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_left = sum(len(item.ids) for item in self.inputs)

    def places(self, order: int) -> Iterator[Place]:
        """Those of the inputs that have no row yet."""
        rest = (index for index in range(len(self.inputs)) if index not in self.rows)
        return (Place(len(self.inputs[index].ids), order, index) for index in rest)

    def claim(self) -> bool:
        """Whether somebody wants the rows; if so the request cannot be given up any more."""
        return self.future.set_running_or_notify_cancel()

    def answer(self) -> None:
        """Hands the rows out."""
        self.future.set_result(np.stack([self.rows[index] for index in range(len(self.inputs))]))

    def fail(self, error: OmlxError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EncodeScheduler:
    """The inputs that wait for one model; everything here runs on the MLX thread, a batch to a `step`.

    A batch is to take at most `max_stall_s`, or its share of that while others are at work; one input is always
    computed.
    """

    def __init__(self, run: Callable[[list[EncoderInput]], Vectors], max_stall_s: float) -> None:
        self.stats = EncodeStats()
        self._run = run
        self._max_stall_s = max_stall_s
        self._order = itertools.count()
        self._jobs: dict[int, EncodeJob] = {}
        self._waiting: list[Place] = []
        self._time = ChunkTime()
        self._oldest_next = False

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def waiting_inputs(self) -> int:
        return len(self._waiting)

    def add(self, job: EncodeJob) -> None:
        """Queues a request of at least one input, none of them empty."""
        order = next(self._order)
        self._jobs[order] = job
        for place in job.places(order):
            insort(self._waiting, place)
        self.stats.requests += 1
        self.stats.inputs += len(job.inputs)

    def step(self, share: float = 1.0) -> None:
        """Drops who has gone, and computes one batch."""
        for order in [order for order, job in self._jobs.items() if job.future.cancelled()]:
            self._forget(order)
            self.stats.dropped += 1
        if not self._jobs:
            return
        batch = self._next_batch(self._max_stall_s * share)
        try:
            self._compute(batch)
        except Exception as error:
            log.exception("a batch of embeddings failed")
            for order in {place.order for place in batch}:
                self._fail(order, error)

    def fail_all(self, error: Exception) -> None:
        """Ends every request with `error`, after a fault that cannot be pinned on one of them."""
        for order in list(self._jobs):
            self._fail(order, error)

    def close(self) -> None:
        """Ends what is left."""
        for order in list(self._jobs):
            self._forget(order).fail(Overloaded("the server is shutting down; try again later"))

    def _forget(self, order: int) -> EncodeJob:
        self._waiting = [place for place in self._waiting if place.order != order]
        return self._jobs.pop(order)

    def _fail(self, order: int, error: Exception) -> None:
        self.stats.failed += 1
        self._forget(order).fail(EngineError(f"{type(error).__name__}: {error}"))

    # ---- batches

    def _next_batch(self, seconds: float) -> list[Place]:
        """The longest input of a request whose turn it is, and as many neighbours as there is time for: first longer
        ones, then shorter ones, none less than half as long as the longest. They still wait in the list."""
        order, waiting = self._turn(), self._waiting
        first = max(self._jobs[order].places(order))
        start = bisect_left(waiting, first)
        end = start + 1
        while end < len(waiting) and waiting[end].tokens <= 2 * first.tokens:
            if not self._fits(end + 1 - start, waiting[end].tokens, seconds):
                break
            end += 1
        longest = waiting[end - 1].tokens
        while start > 0 and 2 * waiting[start - 1].tokens >= longest and self._fits(end + 1 - start, longest, seconds):
            start -= 1
        return waiting[start:end]

    def _turn(self) -> int:
        """The request with least left to do; every second turn belongs to the oldest, so that it is not starved."""
        self._oldest_next = not self._oldest_next
        if not self._oldest_next:
            return next(iter(self._jobs))
        return min(self._jobs, key=lambda order: self._jobs[order].tokens_left)

    def _fits(self, rows: int, tokens: int, seconds: float) -> bool:
        """Whether a batch of so many inputs, padded to `tokens`, takes no longer than that."""
        # Each token looks at all of its input: as in a chunk whose middle stands at `tokens`.
        each = self._time.seconds(1, tokens)
        most = _FIRST_BATCH if each is None else min(_LARGEST_BATCH, seconds / each)
        return rows * tokens <= most

    def _compute(self, batch: list[Place]) -> None:
        inputs = [self._jobs[place.order].inputs[place.at] for place in batch]
        longest = batch[-1].tokens
        padded = longest * len(batch)
        started = time.monotonic()
        rows = self._run(inputs)
        self._time.observe(padded, longest - padded // 2, time.monotonic() - started)
        self.stats.batches += 1
        self.stats.padded_tokens += padded
        self.stats.tokens += sum(place.tokens for place in batch)
        begin = bisect_left(self._waiting, batch[0])
        del self._waiting[begin : begin + len(batch)]
        for place, row in zip(batch, rows, strict=True):
            self._computed(place, row)

    def _computed(self, place: Place, row: Vectors) -> None:
        job = self._jobs[place.order]
        job.rows[place.at] = row
        job.tokens_left -= place.tokens
        if len(job.rows) == len(job.inputs):
            del self._jobs[place.order]
            wanted = job.claim()
            self.stats.finished += wanted  # first: who has the answer finds it counted
            self.stats.dropped += not wanted
            if wanted:
                job.answer()


class EmbeddingEngine:
    """One served model of kind "embedding" or "rerank". Used from the event loop; `tokenize` from any thread.

    `dimensions`: of a vector. No input may be longer than `context_length` tokens.
    """

    def __init__(self, encoder: Encoder, scheduler: EncodeScheduler, thread: MLXThread, most_requests: int) -> None:
        self.name = encoder.name
        self.kind: ModelKind = encoder.kind
        self.context_length = encoder.context_length
        self.vocab_size = encoder.vocab_size
        self.dimensions = encoder.dimensions
        self.scheduler = scheduler
        self._encoder = encoder
        self._thread = thread
        self._most_requests = most_requests
        self._open = 0

    def tokenize(self, texts: Sequence[Text], cut: bool = False) -> list[EncoderInput]:
        """See `Encoder.tokenize`."""
        return self._encoder.tokenize(texts, cut)

    async def encode(self, inputs: Sequence[EncoderInput]) -> Vectors:
        """A row for each input, in their order. Cancelling this gives the request up.

        Raises Overloaded when too many requests wait, EngineError when the model failed.
        """
        if self._open >= self._most_requests:
            raise Overloaded(f"{self._open} requests are running or waiting; try again later")
        if not self._thread.alive:
            raise EngineError("the engine is not running")
        job = EncodeJob(inputs)
        self._thread.post(lambda: self.scheduler.add(job))
        self._open += 1
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            self._open -= 1


class Embedders:
    """The engines of the models that give vectors or scores, loaded on first use, all on one MLX thread."""

    def __init__(self, thread: MLXThread, config: SchedulerConfig, loader: ModelLoader) -> None:
        self._thread = thread
        self._loader = loader
        self._config = config
        self._loaded: dict[str, EmbeddingEngine] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def __getitem__(self, name: str) -> EmbeddingEngine:
        """The engine of a model that is loaded."""
        return self._loaded[name]

    async def get(self, name: str, path: Path) -> EmbeddingEngine:
        """The engine of a model, loaded if it is not yet. Raises ModelError."""
        if name not in self._loaded:
            keep = partial(self._loaded.__setitem__, name)
            await self._loader.load(name, [path], lambda: self._load(name, path), keep)
        return self._loaded[name]

    def _load(self, name: str, path: Path) -> Steps[EmbeddingEngine]:
        """On the MLX thread."""
        started = time.monotonic()
        encoder = yield from encoder_steps(path, name, self._loader.progress_of(name))
        scheduler = EncodeScheduler(encoder.run, self._config.max_stall_s)
        most = self._config.max_concurrent_requests + self._config.max_waiting_requests
        engine = EmbeddingEngine(encoder, scheduler, self._thread, most)
        self._thread.attach(scheduler)
        log.info("model %s loaded in %.1f s", name, time.monotonic() - started)
        return engine

    def figures(self) -> dict[str, dict[str, Any]]:
        """What each loaded model has done; on the MLX thread."""
        engines = list(self._loaded.items())
        return {
            name: asdict(engine.scheduler.stats) | {"waiting_inputs": engine.scheduler.waiting_inputs}
            for name, engine in engines
        }
