"""Counters of one scheduler, and the speeds it has measured: of prefill chunks and of reading stored blocks."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since start; written by the MLX thread.

    `shared_prefills`: requests that waited for another's prefill of the same tokens. `recomputed_tokens`: stored
    tokens that were computed instead of loaded, because that is faster; `abandoned_restores`: times that this
    was found out while loading. `cache_errors`: calls of the prefix cache that raised; their requests went on without.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    paused: int = 0
    prompt_tokens: int = 0
    cached_ram_tokens: int = 0
    cached_ssd_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    shared_prefills: int = 0
    recomputed_tokens: int = 0
    abandoned_restores: int = 0
    cache_errors: int = 0


class ChunkTime:
    """Seconds of a prefill chunk, modelled as n x (a + b x context) and fitted while running.

    Weighted least squares over what was observed, older chunks counting less; two unknowns, so the
    normal equations are solved directly. Until there is something to fit, `seconds` is None.
    """

    _KEEP = 0.95  # weight of the past at each new observation

    def __init__(self) -> None:
        self._nn = self._nx = self._xx = self._nt = self._xt = 0.0

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """A chunk of `tokens` after `context` tokens took `seconds`."""
        n, x = float(tokens), float(tokens) * (context + tokens / 2)
        for name, value in (
            ("_nn", n * n), ("_nx", n * x), ("_xx", x * x), ("_nt", n * seconds), ("_xt", x * seconds),
        ):  # fmt: skip
            setattr(self, name, self._KEEP * getattr(self, name) + value)

    def _fit(self) -> tuple[float, float] | None:
        if not self._nn:
            return None
        determinant = self._nn * self._xx - self._nx * self._nx
        if determinant > 1e-6 * self._nn * self._xx:
            a = (self._nt * self._xx - self._xt * self._nx) / determinant
            b = (self._xt * self._nn - self._nt * self._nx) / determinant
            if a > 0 and b >= 0:
                return a, b
        return self._nt / self._nn, 0.0  # one kind of chunk seen so far: its time a token

    def seconds(self, tokens: int, context: int) -> float | None:
        """How long a chunk of `tokens` after `context` tokens will take."""
        fit = self._fit()
        return None if fit is None else tokens * (fit[0] + fit[1] * (context + tokens / 2))

    def tokens_within(self, seconds: float, context: int) -> int | None:
        """The most tokens that take at most `seconds` after `context` tokens (0 if one is too many)."""
        fit = self._fit()
        if fit is None:
            return None
        a, b = fit
        per_token = a + b * context
        seconds = max(seconds, 0.0)
        if b == 0:
            return int(seconds / per_token)
        # n (per_token + b n / 2) = seconds
        return int(((per_token**2 + 2 * b * seconds) ** 0.5 - per_token) / b)


class RestoreTime:
    """Seconds that stored blocks take to be read, by tier ("ram", "ssd"), from the last restores.

    The median of the last few speeds, so that a single stall of the machine changes nothing; a restore from files of
    over `LONG_S` says more than all before it (one from RAM only that the machine stood still). Nothing is claimed
    before that or three restores were seen, nor when the last one is `FORGET_S` ago: a disk that was slow once gets
    another chance.
    """

    LONG_S = 0.25
    FORGET_S = 60.0
    _FIXED_S = 0.01  # what a restore costs whatever its size; it is not worth saving
    _ENOUGH, _KEPT = 3, 9

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, deque[float]] = {}
        self._last: dict[str, float] = {}

    def observe(self, tier: str, nbytes: int, seconds: float) -> None:
        """Blocks of `nbytes` together were read in `seconds`."""
        if nbytes <= 0:
            return
        seen = self._seen.setdefault(tier, deque(maxlen=self._KEPT))
        if seconds >= self.LONG_S and tier != "ram":
            seen.clear()
            seen.extend([seconds / nbytes] * self._ENOUGH)
        else:
            seen.append(max(seconds - self._FIXED_S, 0.0) / nbytes)
        self._last[tier] = self._clock()

    def seconds(self, tier: str, nbytes: int) -> float | None:
        """How long `nbytes` of blocks will take; None if that is not known."""
        seen = self._seen.get(tier, ())
        if len(seen) < self._ENOUGH or self._clock() - self._last[tier] > self.FORGET_S:
            return None
        return statistics.median(seen) * nbytes

    def at_most(self, nbytes: int) -> float:
        """Seconds for `nbytes` at the slowest speed that is known, 0 if none is."""
        return max((self.seconds(tier, nbytes) or 0.0 for tier in self._seen), default=0.0)

    @property
    def bytes_per_s(self) -> dict[str, float]:
        """The speed of each tier, as far as it is known."""
        speeds = {tier: self.seconds(tier, 1) for tier in self._seen}
        return {tier: 1 / seconds for tier, seconds in speeds.items() if seconds}
