"""What a process opens once for each path, however many use it."""

import atexit
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

_EXIT_TIMEOUT_S = 30.0


class Shareable(Protocol):
    """Something that is opened, used by many, and closed."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all is written; False if that took too long."""

    def close(self, timeout_s: float) -> bool:
        """Writes what is left and ends; False if that took too long."""

    def leave_to_parent(self) -> None:
        """In a forked child: writes nothing any more."""


T = TypeVar("T", bound=Shareable)


class OpenOnce(Generic[T]):
    """The open ones by path, with the number of their users; thread-safe.

    An interpreter that just ends closes them, those of the registry made last first: it loses nothing, and does
    not wait for ever. A forked child lets go of them. `lock` may be held to have no other opened or closed meanwhile.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[Path, tuple[T, int]] = {}
        atexit.register(self._close_all)
        os.register_at_fork(after_in_child=self._after_fork_in_child)

    def open(self, path: Path, make: Callable[[Path], T], join: Callable[[T], None]) -> T:
        """Opened by the first of its users with `make`, which gets the real path; `join` is called for each later one.

        Both are called under the lock. Raises what they raise.
        """
        path = Path(os.path.realpath(path))
        with self.lock:
            thing, users = self._open.get(path, (None, 0))
            if thing is None:
                thing = make(path)
            else:
                join(thing)
            self._open[path] = (thing, users + 1)
            return thing

    def release(self, thing: T, timeout_s: float) -> bool:
        """Ends one use: waits until all is written. The last user closes it. False if that took too long.

        False too if it is not open: closed already, or in a forked child that let go of it.
        """
        with self.lock:
            path, users = next(((path, n) for path, (one, n) in self._open.items() if one is thing), (None, 0))
            if path is None:
                return False
            if users == 1:
                del self._open[path]
                return thing.close(timeout_s)
            self._open[path] = (thing, users - 1)
        return thing.flush(timeout_s)

    def all(self) -> dict[Path, T]:
        """All that are open, by path."""
        return {path: thing for path, (thing, _) in list(self._open.items())}

    def _close_all(self) -> None:
        for thing in self.all().values():
            thing.close(_EXIT_TIMEOUT_S)

    def _after_fork_in_child(self) -> None:
        self.lock = threading.Lock()  # another thread may have held it
        for thing, _ in self._open.values():
            thing.leave_to_parent()
        self._open.clear()
