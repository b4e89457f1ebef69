"""Threads that read stored blocks, with an eye on the time that takes."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from omlx.metrics import RestoreTime

_READERS = 2  # two threads read and check faster than one; more gained nothing on 2 cores
_TICK_S = 0.05
_SILENCE_S = 10.0  # a disk that takes longer for a block hangs, whatever computing would take

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


class _Left(NamedTuple):
    """Readers whose restore was given up; so many bytes are what they have been at since `started`."""

    readers: Sequence["Future[None]"]
    nbytes: int
    started: float


class BlockReaders:
    """Reads blocks side by side."""

    def __init__(self) -> None:
        self._speed = RestoreTime()
        self._pool = self._threads()
        self._left: list[_Left] = []

    @property
    def speed(self) -> RestoreTime:
        """What each tier was measured at. Files are slow for as long as a read of them that was given up goes on:
        each further one would take two threads and the memory that they write into, perhaps for ever."""
        self._left = [left for left in self._left if not all(reader.done() for reader in left.readers)]
        for left in self._left:
            self._speed.observe("ssd", left.nbytes, time.monotonic() - left.started)
        return self._speed

    @staticmethod
    def _threads() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_READERS, thread_name_prefix="omlx-read")

    def read(self, blocks: Sequence[BlockRead], worth: Worth | None = None) -> list[str | None]:
        """The tier of each block, None where it could not be read. All reads have ended when this returns.

        With `worth` it raises RestoreTooSlow as soon as what is left is going to take longer than computing it.
        """
        started = time.monotonic()
        done: list[_Done | None] = [None] * len(blocks)
        waiting = iter(range(len(blocks)))

        def reader() -> None:
            for index in waiting:
                done[index] = _timed(blocks[index].read)

        # A task a thread, not one a block: handing over a task costs as much as a tenth of a small block.
        readers = [self._pool.submit(reader) for _ in range(_READERS)]
        while wait(readers, None if worth is None else _TICK_S).not_done:
            if worth is not None and self._too_slow(blocks, done, worth, time.monotonic() - started):
                deque(waiting, maxlen=0)  # nobody begins another one
                self._leave_behind()
                left = [block.nbytes for block, read in zip(blocks, done, strict=True) if read is None]
                self._left.append(_Left(readers, sum(left[:_READERS]), started))
                raise RestoreTooSlow
        for ended in readers:
            ended.result()
        reads = [read for read in done if read is not None]
        self._observe(blocks, reads, time.monotonic() - started)
        return [read.tier for read in reads]

    def _too_slow(
        self, blocks: Sequence[BlockRead], done: Sequence[_Done | None], worth: Worth, seconds: float
    ) -> bool:
        """Projects the time of files from those read so far; what the threads are at counts as read."""
        left = [block for block, read in zip(blocks, done, strict=True) if read is None]
        if seconds < RestoreTime.LONG_S or not left:
            return False
        read_so_far = [(block.nbytes, read) for block, read in zip(blocks, done, strict=True) if read is not None]
        nbytes = sum(size for size, read in read_so_far if read.tier != "ram")
        nbytes += sum(block.nbytes for block in left[:_READERS])
        compute_s = worth(left[0].start)
        if compute_s is None:
            slow = seconds > _SILENCE_S * (1 + len(read_so_far))
        else:
            slow = seconds * sum(block.nbytes for block in left) > compute_s * nbytes
        if not slow:
            return False
        self._speed.observe("ssd", nbytes, seconds)
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
            self._speed.observe(tier, nbytes[tier], seconds * spent[tier] / whole)

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
