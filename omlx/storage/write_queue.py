"""One thread that does a store's changes on disk, in the order in which they were asked for."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Task = tuple[str, Any]  # ("write", entry), ("unlink", path), ("call", function)


class WriteQueue:
    """Tasks in order, bounded in the bytes that they hold in memory.

    `work(task)` does one; `rest()` runs whenever nothing is left to do and when a time set by
    `wake_in` has come; `end()` runs last. All three are called by the thread, without any lock. The
    thread is a daemon, so it never keeps an interpreter from ending: whoever wants the work done calls
    `close` before.
    """

    def __init__(
        self, name: str, max_bytes: int, work: Callable[[Task], None], rest: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self.max_bytes = max_bytes
        self._work, self._rest, self._end = work, rest, end
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Task, int]] = deque()
        self._bytes = 0
        self._due: float | None = None
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Held by tasks that wait or are being done."""
        return self._bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a task of that size fits. One always fits into an empty queue."""
        with self._changed:
            return not self._bytes or self._bytes + nbytes <= self.max_bytes

    def append(self, task: Task, nbytes: int = 0) -> None:
        """Never waits."""
        with self._changed:
            self._tasks.append((task, nbytes))
            self._bytes += nbytes
            self._changed.notify_all()

    def wake_in(self, seconds: float) -> None:
        """Asks for a rest within that time."""
        with self._changed:
            due = time.monotonic() + seconds
            if self._due is None or due < self._due:
                self._due = due
                self._changed.notify_all()

    def call(self, function: Callable[[], None], timeout_s: float | None = None) -> bool:
        """Has `function` called after all tasks so far and waits for it. False if that took too long."""
        done = threading.Event()

        def task() -> None:
            try:
                function()
            finally:
                done.set()

        with self._changed:
            if self._closing:
                return False
            self._tasks.append((("call", task), 0))
            self._changed.notify_all()
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Does what is queued, then ends the thread. False if that took too long: the rest is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._abandoned = True
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            self._one_task()
            if self._idle():
                self._guard(self._rest)
        self._guard(self._end)

    def _wait(self) -> bool:
        """Until there is something to do; False when there never will be."""
        with self._changed:
            while not self._tasks and not self._closing:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            return bool(self._tasks) and not self._abandoned

    def _one_task(self) -> None:
        with self._changed:
            task, nbytes = self._tasks.popleft() if self._tasks else (None, 0)
        if task is not None:
            self._guard(lambda: self._work(task))
            with self._changed:
                self._bytes -= nbytes

    def _idle(self) -> bool:
        with self._changed:
            if not self._tasks:
                self._due = None
            return not self._tasks

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # top of the thread: it must not die, whatever one task meets
            log.exception("the cache's writer thread met an error")
