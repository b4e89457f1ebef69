"""Long work in steps, so that a thread with other work can do that between them: loading a model on the MLX thread."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from omlx.errors import release_frames
from omlx.model.progress import Progress

P = ParamSpec("P")
T = TypeVar("T")

Steps = Generator[Future[Any] | None, None, T]
"""Yields between two steps; a future if the next step has to wait for it."""

LOADING = "loading weights"
_STEP_BYTES = 64 << 20  # of weights that are read and converted in one step


def finish(steps: Steps[T]) -> T:
    """What `steps` return in the end; blocks."""
    while True:
        try:
            waiting = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if waiting is not None:
            waiting.exception()


def elsewhere(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> Steps[T]:
    """Does `work`, which makes no MLX arrays, in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **options))
        except BaseException as error:  # whoever asked gets it, whatever it was
            release_frames(error)
            future.set_exception(error)

    # Not of a pool: a tokenizer that never ends must not keep the interpreter from ending.
    threading.Thread(target=run, name="omlx-load", daemon=True).start()
    yield future
    return future.result()


def evaluate(model: nn.Module, progress: Progress) -> Steps[None]:
    """Evaluates a model's weights, some at a time."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    total, done, evaluated = sum(array.nbytes for array in arrays), 0, 0
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        done += array.nbytes
        if done - evaluated >= _STEP_BYTES or done == total:
            mx.eval(piece)
            piece, evaluated = [], done
            progress(LOADING, done, total)
            yield None
