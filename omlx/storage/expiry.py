"""When what was not used for some time has to go."""

import time
from collections.abc import Callable

_PERIOD_S = (0.1, 3600.0)  # shortest and longest time between two looks


def look_period_s(ttl_s: float) -> float:
    """Seconds between two looks for what was not used for `ttl_s`."""
    return min(max(ttl_s / 50, _PERIOD_S[0]), _PERIOD_S[1])


class Expiry:
    """Says when to look for what was not used for `ttl_s` seconds (0: never), and from when on it is too old.

    A look comes late by a fiftieth of that time, or an hour. `wake_in(seconds)` asks for the next one. No lock of
    its own.
    """

    def __init__(self, ttl_s: float, wake_in: Callable[[float], object] = lambda seconds: None) -> None:
        self._ttl_s = ttl_s
        self._wake_in = wake_in
        self._next_look = 0.0

    def lower(self, ttl_s: float) -> None:
        """The shortest time of all users holds."""
        if ttl_s and (not self._ttl_s or ttl_s < self._ttl_s):
            self._ttl_s = ttl_s
            self.look_again()

    def look_again(self, in_s: float = 0.0) -> None:
        """Brings the next look forward."""
        if self._ttl_s:
            self._next_look = min(self._next_look, time.monotonic() + in_s)
            self._wake_in(in_s)

    def due(self) -> int | None:
        """What was last used before this time (nanoseconds since the epoch) has expired; None: not time to look."""
        if not self._ttl_s:
            return None
        early_s = self._next_look - time.monotonic()
        if early_s > 0:
            self._wake_in(early_s)  # who was woken for something else has forgotten what was asked for before
            return None
        period_s = look_period_s(self._ttl_s)
        self._next_look = time.monotonic() + period_s
        self._wake_in(period_s)
        return time.time_ns() - int(self._ttl_s * 1e9)
