"""File descriptors: how many this process may have, and how many of them connections may use.

Each connection needs one, and so does each file of the cache. A client that opens connections and sends nothing could
otherwise use them all: then nobody gets in, and asyncio logs every attempt.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

logger = logging.getLogger("omlx.server")

MAX_DESCRIPTORS = 65_536
MAX_CONNECTIONS = 4096
_LOG_EVERY_S = 60.0
# Some systems accept no limit over this one (macOS: kern.maxfilesperproc may be larger, OPEN_MAX always works).
_ALWAYS_ACCEPTED = 10_240
_RESERVED = 32  # sockets, pipes and libraries of the process itself


def raise_limit() -> None:
    """Raises this process's soft limit of open files to the hard one, to MAX_DESCRIPTORS at most. Never lowers it."""
    for wanted in (MAX_DESCRIPTORS, _ALWAYS_ACCEPTED):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays at %d: %s", soft, error)


@contextmanager
def unchanged_limits() -> Iterator[None]:
    """Keeps what is imported meanwhile from changing this process's limits.

    mlx_lm.utils sets 2,048 open files, and 4,096 as the hard limit, when it is imported. That lowers larger limits for
    good, and raises ValueError where the hard limit is smaller.
    """
    before = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = before


class Waiter(Protocol):
    """A connection: `abort` closes it at once."""

    def abort(self) -> None: ...


class Connections:
    """The connections of a server, bounded by what the limit of open files leaves beside files.

    Room for a new one is made by closing the one that has waited longest for a client to send a request. Where all
    have requests running, up to `spare` more are let in, for the paths that always answer.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
        # asyncio accepts so many at a time before it looks at any of them, and some rounds overlap.
        self.backlog = min(128, max(4, soft // 32))
        self.limit = max(8, min(MAX_CONNECTIONS, soft - min(256, soft // 4) - 4 * self.backlog - _RESERVED))
        self.spare = self.backlog
        self._descriptors = soft
        self._idle: dict[Waiter, None] = {}  # the longest first
        self._busy: dict[Waiter, None] = {}
        self._log = Seldom()

    def add(self, connection: Waiter) -> bool:
        """Takes a new connection in, which is idle. False if there is no room for it but for paths that always answer.

        Closes others, or the new one itself.
        """
        self._idle[connection] = None
        if len(self._idle) + len(self._busy) <= self.limit:
            return True
        self._log(
            "%d connections are open, all that %d open files allow (ulimit -n); closing the idle ones first",
            self.limit,
            self._descriptors,
        )
        has_room = len(self._busy) < self.limit
        if has_room or len(self._busy) + len(self._idle) > self.limit + self.spare:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.abort()
        return has_room

    def set_idle(self, connection: Waiter, idle: bool) -> None:
        """Notes whether a connection has no request running. One that has been closed is not counted again."""
        if idle and connection in self._busy:
            del self._busy[connection]
            self._idle[connection] = None
        elif not idle and connection in self._idle:
            del self._idle[connection]
            self._busy[connection] = None

    def remove(self, connection: Waiter) -> None:
        """Forgets a connection that is closed; safe for one that is not here."""
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)


class Seldom:
    """Logs a warning at most once a minute, with the number of those left out."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def __call__(self, message: str, *values: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more times since the last such line)" if self._left_out else ""
        self._next, self._left_out = now + _LOG_EVERY_S, 0
        logger.warning(message + more, *values)


def log_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """Has the event loop log a want of file descriptors once a minute, where asyncio logs each failed attempt."""
    log = Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if str(context.get("message")).startswith("socket.accept() out of system resource"):
            log("no new connections for a second: %s; raise the limit of open files (ulimit -n)", context["exception"])
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
