"""The MLX thread, and a stream for each request out of it.

Arrays that are not evaluated belong to the thread that made them, so one thread does all MLX work:
loading models and stepping every model's scheduler. The event loop posts commands to it and gets
tokens back through asyncio queues.
"""

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from omlx.errors import BadRequest, EngineError, Overloaded, release_frames
from omlx.model.grammar import Grammars
from omlx.model.loader import LoadedModel
from omlx.request import GrammarMatcher, GrammarSpec, Request, TokenOutput
from omlx.scheduler import Failure, Scheduler
from omlx.sizes import format_size

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = Callable[[], object]


class Worker(Protocol):
    """Who has work for the MLX thread. `step` does a bounded piece of it, of the time that it may take alone at most
    `share` (above 0, up to 1); `fail_all` ends all work after a fault of `step`'s own."""

    @property
    def has_work(self) -> bool: ...

    def step(self, share: float = 1.0) -> None: ...

    def fail_all(self, error: Exception) -> None: ...

    def close(self) -> None: ...


class MLXThread:
    """The one thread that touches MLX. Commands run between steps, in the order they were posted.

    All that have work step in turn, so each gets a part of the time that running streams may be kept waiting.
    `between_steps(idle)` is called after every round of steps; with True before the thread waits for work.
    """

    def __init__(self, between_steps: Callable[[bool], object] = lambda idle: None) -> None:
        self._between_steps = between_steps
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="omlx-mlx", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # An interpreter that just ends must not tear MLX down under a running step.
        atexit.register(self.stop, 5.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Runs `command` soon, result and errors unseen (errors are logged)."""
        self._commands.put(command)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` soon; the future has its result or its error."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            # The caller gets whatever it was, without the arrays in the frames of its traceback.
            except BaseException as error:
                release_frames(error)
                future.set_exception(error)

        self.post(command)
        return future

    def attach(self, worker: Worker) -> None:
        """Steps `worker` whenever it has work. Called on this thread."""
        self._workers.append(worker)

    def detach(self, worker: Worker) -> None:
        """Steps `worker` no more. Called on this thread."""
        self._workers.remove(worker)

    def stop(self, timeout_s: float) -> bool:
        """Aborts all requests, stores what they computed, ends the thread. True if it ended in time."""
        atexit.unregister(self.stop)
        if not self.alive:
            return True
        self.post(self._shut_down)
        self._thread.join(timeout_s)
        return not self.alive

    def _shut_down(self) -> None:
        self._stopping = True
        for worker in self._workers:
            worker.close()

    def _run(self) -> None:
        while not self._stopping:
            busy = [worker for worker in self._workers if worker.has_work]
            self._do(partial(self._between_steps, not busy))
            self._run_commands(wait=not busy)
            for worker in busy:
                self._step(worker, 1 / len(busy))
        mx.clear_streams()

    def _run_commands(self, wait: bool) -> None:
        try:
            while not self._stopping:
                self._do(self._commands.get(block=wait))
                wait = False
        except queue.Empty:
            pass

    def _do(self, command: Command) -> None:
        try:
            command()
        except Exception:
            log.exception("a command on the MLX thread failed")

    def _step(self, worker: Worker, share: float) -> None:
        if self._stopping:
            return
        try:
            worker.step(share)
        # A scheduler fails single requests by itself; this is for its own faults, and keeps the
        # thread alive: no request may take the engine down.
        except Exception as error:
            log.exception("a step failed")
            release_frames(error)
            self._do(partial(worker.fail_all, error))


class Engine:
    """One served model: requests in, streams of tokens out. Used from the event loop.

    `context_length` is what is enforced: the model's, or less if the KV of running requests may not take as much;
    `context_note` then says so. `context_source` says where it comes from. No token stands for more than
    `longest_token` characters. `vision` makes prompts with pictures (omlx.engine.vlm); None for a model without.
    At most `most_requests` run or wait at a time. `sampling_defaults`, `template_defaults`: see LoadedModel.
    """

    vision: Any = None

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, thread: MLXThread, streams: "Streams") -> None:
        self.name = loaded.name
        self.tokenizer: Any = loaded.tokenizer
        self.context_length = min(loaded.context_length, scheduler.most_tokens)
        self.context_note, self.context_source = "", loaded.context_source
        if self.context_length < loaded.context_length:
            limit = format_size(scheduler.config.max_kv_cache_memory)
            self.context_note = f" (of the model's {loaded.context_length}, as --max-kv-cache-memory is {limit})"
            said = f"{loaded.context_length} by {loaded.context_source}"
            self.context_source = f"--max-kv-cache-memory {limit} instead of {said}"
        self.vocab_size = loaded.vocab_size
        self.sampling_defaults = loaded.sampling_defaults
        self.template_defaults = loaded.template_defaults
        # In vocabularies of bytes a character stands for a byte, so no token gives more characters.
        self.longest_token = max(map(len, loaded.tokenizer.get_vocab()), default=1)
        self.most_requests = scheduler.config.max_concurrent_requests + scheduler.config.max_waiting_requests
        self.scheduler = scheduler
        self._grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._thread = thread
        self._streams = streams

    async def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """A request's grammar. Raises BadRequest for one that cannot be enforced. Not on the MLX thread."""
        return await self._grammars.compile(spec)

    @property
    def figures(self) -> dict[str, float]:
        """Counters that only this kind of engine has."""
        return {}

    async def generate(self, request: Request) -> AsyncIterator[TokenOutput]:
        """The answer's tokens, as they are made; the last one has a `finish_reason`.

        Closing the iterator early aborts the request. Raises BadRequest for one that can never run
        and Overloaded when the queue is full, both before anything is queued; EngineError when the
        engine failed on it.
        """
        self._check(request)
        if request.sampling.grammar is not None and request.grammar is None:
            request.grammar = await self.compile(request.sampling.grammar)
            self._check(request)  # others came meanwhile
        stream = self._streams.open(request.request_id)
        self._thread.post(lambda: self.scheduler.add(request))
        ended = False
        try:
            while not ended:
                item = await stream.get()
                ended = isinstance(item, Failure) or item.finish_reason is not None
                if isinstance(item, Failure):
                    raise item.error
                if item.finish_reason == "abort":
                    raise Overloaded("the server is shutting down; try again later")
                yield item
        finally:
            self._streams.close(request.request_id)
            if not ended:
                self._thread.post(lambda: self.scheduler.abort(request.request_id))

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise BadRequest("the prompt is empty")
        if not all(0 <= token < self.vocab_size for token in request.prompt):
            raise BadRequest(f"token ids have to be from 0 to {self.vocab_size - 1}", param="prompt")
        total = len(request.prompt) + request.sampling.max_tokens
        if total > self.context_length:
            raise BadRequest(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_tokens} new ones are {total}, "
                f"over the context length of {self.context_length}{self.context_note}",
                code="context_length_exceeded",
            )
        if len(self._streams) >= self.most_requests:
            raise Overloaded(f"{len(self._streams)} requests are running or waiting; try again later")
        if not self._thread.alive:
            raise EngineError("the engine is not running")


class Streams:
    """The open streams of one engine: from the MLX thread to asyncio queues."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[TokenOutput | Failure]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> asyncio.Queue[TokenOutput | Failure]:
        stream: asyncio.Queue[TokenOutput | Failure] = asyncio.Queue()
        self._open[request_id] = asyncio.get_running_loop(), stream
        return stream

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def emit(self, item: TokenOutput | Failure) -> None:
        """Hands an item to whoever waits for it; called on the MLX thread."""
        found = self._open.get(item.request_id)
        if found is None:
            return
        loop, stream = found
        try:
            loop.call_soon_threadsafe(stream.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self.close(item.request_id)
