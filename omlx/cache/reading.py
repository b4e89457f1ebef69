"""Threads that read stored blocks, with an eye on the time that takes."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from omlx.metrics import RestoreTime

_READERS = 2  # two threads read and check faster than one; more gained nothing on 2 cores
_TICK_S = 0.05

Worth = Callable[[int], float | None]
"""Seconds that the tokens from a position on would take to be computed; None if that is not known."""


class RestoreTooSlow(Exception):
    """Computing is faster than what is left to read. Some reads may still write into their targets."""


class BlockRead(NamedTuple):
    """A block to read: its position, its bytes, and a call that reads it and says where it was."""

    start: int
    nbytes: int
    read: Callable[[], str | None]


class _Done(NamedTuple):
    tier: str | None
    seconds: float


class BlockReaders:
    """Reads blocks side by side; `speed` has what each tier was measured at."""

    def __init__(self) -> None:
        self.speed = RestoreTime()
        self._pool = self._threads()

    @staticmethod
    def _threads() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_READERS, thread_name_prefix="omlx-read")

    def read(self, blocks: Sequence[BlockRead], worth: Worth | None = None) -> list[str | None]:
        """The tier of each block, None where it could not be read. All reads have ended when this returns.

        With `worth` it raises RestoreTooSlow as soon as what is left is going to take longer than computing it.
        """
        started = time.monotonic()
        reads = [self._pool.submit(_timed, block.read) for block in blocks]
        while wait(reads, None if worth is None else _TICK_S).not_done:
            if worth is not None and self._too_slow(blocks, reads, worth, time.monotonic() - started):
                self._leave_behind()
                raise RestoreTooSlow
        done = [read.result() for read in reads]
        self._observe(blocks, done, time.monotonic() - started)
        return [read.tier for read in done]

    def _too_slow(
        self, blocks: Sequence[BlockRead], reads: Sequence["Future[_Done]"], worth: Worth, seconds: float
    ) -> bool:
        """Projects the time of files from those read so far; what the threads are at counts as read."""
        left = [block for block, read in zip(blocks, reads, strict=True) if not read.done()]
        if seconds < RestoreTime.LONG_S or not left:
            return False
        done = [(block.nbytes, read.result().tier) for block, read in zip(blocks, reads, strict=True) if read.done()]
        nbytes = sum(size for size, tier in done if tier != "ram") + sum(block.nbytes for block in left[:_READERS])
        compute_s = worth(left[0].start)
        if compute_s is None or seconds * sum(block.nbytes for block in left) <= compute_s * nbytes:
            return False
        self.speed.observe("ssd", nbytes, seconds)
        return True

    def _leave_behind(self) -> None:
        """Reads under way cannot be stopped: their threads end with them, others take their place."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._threads()

    def _observe(self, blocks: Sequence[BlockRead], done: Sequence[_Done], seconds: float) -> None:
        """Shares the time out among the tiers by the time that their reads took."""
        nbytes: defaultdict[str, int] = defaultdict(int)
        spent: defaultdict[str, float] = defaultdict(float)
        for block, read in zip(blocks, done, strict=True):
            if read.tier is not None:
                nbytes[read.tier] += block.nbytes
                spent[read.tier] += read.seconds
        whole = sum(spent.values()) or 1.0
        for tier in nbytes:
            self.speed.observe(tier, nbytes[tier], seconds * spent[tier] / whole)

    def later(self, calls: Sequence[Callable[[], object]]) -> None:
        """Makes these calls when the threads have nothing else to do."""
        for call in calls:
            self._pool.submit(call)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


def _timed(read: Callable[[], str | None]) -> _Done:
    started = time.monotonic()
    tier = read()
    return _Done(tier, time.monotonic() - started)
