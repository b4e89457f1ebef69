"""Counters of one scheduler, and the fit of how long a prefill chunk takes."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since start; written by the MLX thread."""

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
