"""Loading models on the MLX thread, in steps, between which the other models' requests go on.

What could not be loaded is not tried again until its folder changes.
"""

import asyncio
import errno
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import mlx.core as mx

from omlx.engine.core import MLXThread
from omlx.errors import ModelError, release_frames
from omlx.model.folder import folder_state
from omlx.model.foreign import refusing
from omlx.model.progress import Progress
from omlx.model.steps import LOADING, Steps
from omlx.sizes import format_size

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_S = 30.0
# What another try may well do without: memory, file descriptors, a disk that answers, room for temporary files.
_PASSING = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EAGAIN})


class _Failure(NamedTuple):
    """`state` is that of the folders when they could not be loaded; tried again from `until` on (monotonic), at once if
    the state has changed."""

    state: object
    reason: str
    until: float


class ModelLoader:
    """Loads models, each on the MLX thread; remembers those that failed."""

    def __init__(self, thread: MLXThread) -> None:
        self._thread = thread
        self._failures: dict[str, _Failure] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._bytes: dict[str, tuple[int, int]] = {}

    def loading(self) -> dict[str, str]:
        """The models that are being loaded, and how far each is: "1.2 GB of 4.0 GB", "" if that is not known."""
        return {name: " of ".join(map(format_size, self._bytes.get(name, ()))) for name in sorted(self._running)}

    def progress_of(self, name: str) -> Progress:
        """A Progress for the load of a model, for any thread. What else is done counts once its weights are loaded."""

        def report(stage: str, done: int, total: int | None) -> None:
            loaded, whole = self._bytes.get(name, (0, 0))
            if total and (stage == LOADING or (whole and loaded >= whole)):
                self._bytes[name] = done, total

        return report

    def cancel(self) -> None:
        """Ends the waiting for models that are being loaded."""
        for task in self._running.values():
            task.cancel()

    async def load(
        self, name: str, folders: Sequence[Path], work: Callable[[], Steps[T]], keep: Callable[[T], object]
    ) -> None:
        """Gives what the steps of `work` return to `keep`, on the event loop. They load a model, on the MLX thread.

        All that ask for a model share one load, which goes on when one of them is cancelled. Raises ModelError.
        """
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = asyncio.create_task(self._load(name, folders, work, keep))
            task.add_done_callback(partial(self._ended, name))
        await asyncio.shield(task)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        self._bytes.pop(name, None)
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits any more

    async def _load(
        self, name: str, folders: Sequence[Path], work: Callable[[], Steps[T]], keep: Callable[[T], object]
    ) -> None:
        """One load.

        Whatever goes wrong is a ModelError, is logged as one warning, and is raised again without another try while the
        files of the folders stay the same; for 30 seconds if it was a lack of memory or the like.
        """
        state = await asyncio.to_thread(lambda: tuple(map(folder_state, folders)))
        known = self._failures.get(name)
        if known is not None and known.state == state and time.monotonic() < known.until:
            raise _unavailable(name, known.reason)
        try:
            attempt = _Attempt(self._thread, folders[0], work)
            self._thread.post(partial(self._thread.attach, attempt))
            loaded = await asyncio.wrap_future(attempt.result)
        except ModelError as error:
            reason = str(error)
            log.warning("model %s cannot be loaded: %s", name, reason)
            until = time.monotonic() + _RETRY_S if _passes(error) else float("inf")
            self._failures[name] = _Failure(state, reason, until)
        else:
            self._failures.pop(name, None)
            keep(loaded)
            return
        raise _unavailable(name, reason)


def _unavailable(name: str, reason: str) -> ModelError:
    return ModelError(reason, public=f"model {name!r} cannot be loaded; the server's log has the reason")


class _Attempt(Generic[T]):
    """A Worker of the MLX thread that takes the steps of one load, then leaves; `result` is what they return.

    A step that needs what another thread does is taken when that is done.
    """

    def __init__(self, thread: MLXThread, folder: Path, work: Callable[[], Steps[T]]) -> None:
        self.result: Future[T] = Future()
        self._thread = thread
        self._folder = folder
        self._steps = work()
        self._waiting: Future[Any] | None = None

    @property
    def has_work(self) -> bool:
        return self._waiting is None or self._waiting.done()

    def step(self, share: float = 1.0) -> None:
        del share  # steps are short
        if self.result.cancelled():
            self._thread.detach(self)
            self._steps.close()
            return
        try:
            with refusing(self._folder):
                ended = self._next()
        except ModelError as error:
            self.fail_all(error)
            return
        if ended:
            self._thread.detach(self)
        elif self._waiting is not None:
            self._waiting.add_done_callback(lambda _: self._thread.post(_wake))

    def _next(self) -> bool:
        """Takes a step. True if it was the last."""
        try:
            self._waiting = next(self._steps)
        except StopIteration as end:
            with suppress(InvalidStateError):  # nobody waits any more
                self.result.set_result(end.value)
            return True
        return False

    def fail_all(self, error: Exception) -> None:
        self._thread.detach(self)
        log.debug("loading failed", exc_info=error)
        release_frames(error)
        self._steps.close()
        # The weights that were loaded: a tree of modules refers to itself, and MLX keeps what is freed.
        gc.collect()
        mx.clear_cache()
        with suppress(InvalidStateError):
            self.result.set_exception(error)

    def close(self) -> None:
        """The thread ends: nobody waits any more."""
        self._steps.close()
        self.result.cancel()


def _wake() -> None:
    """Posted to the MLX thread so that it looks for work."""


def _passes(error: ModelError) -> bool:
    """Whether the machine rather than the folder may have caused it."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno in _PASSING)
        or (isinstance(cause, RuntimeError) and "alloc" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__
