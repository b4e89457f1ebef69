"""Memory of what is gone, for what comes next: fresh memory costs as much as the copy into it."""

from collections import deque

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


class IdleMemory:
    """The last `most` pieces of memory that were given; thread-safe, without a lock.

    Objects give their memory back as they die, which may happen anywhere, also in the middle of `take`.
    """

    def __init__(self, most: int) -> None:
        self._idle: deque[Memory] = deque(maxlen=most)

    def take(self, nbytes: int) -> Memory:
        """`nbytes` (uint8, 1-D, contiguous) with arbitrary content, which are the caller's alone."""
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # others took the rest
                break
            if memory.nbytes == nbytes:
                return memory
            self._idle.append(memory)
        return np.empty(nbytes, np.uint8)

    def give(self, memory: Memory) -> None:
        """Nobody may use the memory any more."""
        self._idle.append(memory)
