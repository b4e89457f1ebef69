"""What does not work with a folder, said in one line until it works again."""

import logging
import threading
import time

log = logging.getLogger(__name__)

_SAY_AGAIN_S = 60.0


class Troubles:
    """The troubles of one folder now; thread-safe. `meanwhile` is what the log says of how things go on."""

    def __init__(self, folder: str, meanwhile: str) -> None:
        self._folder, self._meanwhile = folder, meanwhile
        self._lock = threading.Lock()
        self._now: dict[str, int | None] = {}  # what fails, and the error's number
        self._said_at: dict[str, float] = {}

    def note(self, what: str, error: Exception, *, follows: bool = False) -> None:
        """Says that `what` fails, unless it is known: it failed before, or something else did with the same error.

        `follows`: it fails because of whatever else does. Nothing is said more often than now and then.
        """
        now, number = time.monotonic(), getattr(error, "errno", None)
        with self._lock:
            same = number is not None and number in self._now.values()
            known = what in self._now or same or (follows and bool(self._now))
            say = not known and now - self._said_at.get(what, -_SAY_AGAIN_S) >= _SAY_AGAIN_S
            self._now[what] = number
            if say:
                self._said_at[what] = now
        if say:
            # As text: whoever keeps log records would keep the error's frames with it, and their blocks.
            log.warning("%s, %s: %s; %s until it works", self._folder, what, str(error), self._meanwhile)

    def mended(self, *what: str) -> None:
        """Some things work."""
        with self._lock:
            ended = [name for name in what if name in self._now]
            for name in ended:
                del self._now[name]
        for name in ended:
            log.info("%s works again (%s)", self._folder, name)
