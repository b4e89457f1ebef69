"""Loading models on the MLX thread. What could not be loaded is not tried again until its folder changes."""

import asyncio
import errno
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx

from omlx.engine.core import MLXThread
from omlx.errors import ModelError, release_frames
from omlx.model.folder import folder_state
from omlx.model.foreign import refusing

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

    async def load(self, name: str, folders: Sequence[Path], work: Callable[[], T]) -> T:
        """What `work` gives, which loads the model `name` from these folders; on the MLX thread.

        Whatever goes wrong is a ModelError, is logged as one warning, and is raised again without another try while the
        files of the folders stay the same; for 30 seconds if it was a lack of memory or the like.
        """
        state = await asyncio.to_thread(lambda: tuple(map(folder_state, folders)))
        known = self._failures.get(name)
        if known is not None and known.state == state and time.monotonic() < known.until:
            raise _unavailable(name, known.reason)
        try:
            loaded = await asyncio.wrap_future(self._thread.call(lambda: _attempt(folders[0], work)))
        except ModelError as error:
            reason = str(error)
            log.warning("model %s cannot be loaded: %s", name, reason)
            until = time.monotonic() + _RETRY_S if _passes(error) else float("inf")
            self._failures[name] = _Failure(state, reason, until)
        else:
            self._failures.pop(name, None)
            return loaded
        raise _unavailable(name, reason)


def _unavailable(name: str, reason: str) -> ModelError:
    return ModelError(reason, public=f"model {name!r} cannot be loaded; the server's log has the reason")


def _attempt(folder: Path, work: Callable[[], T]) -> T:
    try:
        with refusing(folder):
            return work()
    except ModelError as error:
        log.debug("loading failed", exc_info=error)
        release_frames(error)
        # The weights that were loaded: a tree of modules refers to itself, and MLX keeps what is freed.
        gc.collect()
        mx.clear_cache()
        raise


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
