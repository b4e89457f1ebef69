"""Which request holds which blocks. No tensors here: those are in the block store.

A block that a request holds is pinned in the store for as long as the request runs.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable


class PagedCacheManager:
    """Block ids and the block table of each running request; thread-safe.

    A block has an id for as long as somebody holds it. Ids are small integers, never reused within
    a process, and name the same content as the block's hash.
    """

    def __init__(self, block_size: int, num_layers: int) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self._lock = threading.Lock()
        self._next_id = itertools.count(1)
        self._ids: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._holders: Counter[bytes] = Counter()
        self._tables: dict[str, dict[bytes, int]] = {}

    def acquire(self, request_id: str, block_hash: bytes) -> bool:
        """Adds the block to the request's table. True if nobody held it before.

        Holding a block twice is the same as holding it once.
        """
        return bool(self.acquire_all(request_id, [block_hash]))

    def acquire_all(self, request_id: str, hashes: Iterable[bytes]) -> list[bytes]:
        """`acquire` of many blocks; returns those that nobody held before."""
        with self._lock:
            table = self._tables.setdefault(request_id, {})
            return [block_hash for block_hash in hashes if block_hash not in table and self._hold(table, block_hash)]

    def _hold(self, table: dict[bytes, int], block_hash: bytes) -> bool:
        block_id = self._ids.get(block_hash)
        if block_id is None:
            self._ids[block_hash] = block_id = next(self._next_id)
            self._hashes[block_id] = block_hash
        table[block_hash] = block_id
        self._holders[block_hash] += 1
        return self._holders[block_hash] == 1

    def drop(self, request_id: str, block_hash: bytes) -> bool:
        """Takes one block out of the request's table. True if nobody holds it any more."""
        with self._lock:
            table = self._tables.get(request_id, {})
            return table.pop(block_hash, None) is not None and self._let_go(block_hash)

    def release(self, request_id: str) -> list[bytes]:
        """Forgets the request; returns the hashes that nobody holds any more."""
        with self._lock:
            table = self._tables.pop(request_id, {})
            return [h for h in table if self._let_go(h)]

    def _let_go(self, block_hash: bytes) -> bool:
        self._holders[block_hash] -= 1
        if self._holders[block_hash]:
            return False
        del self._holders[block_hash]
        del self._hashes[self._ids.pop(block_hash)]
        return True

    def block_ids(self, request_id: str) -> tuple[int, ...]:
        """The request's block table, in the order of the tokens."""
        with self._lock:
            return tuple(self._tables.get(request_id, {}).values())

    def hashes(self, request_id: str) -> tuple[bytes, ...]:
        """The hashes of the request's blocks, in the order of the tokens."""
        with self._lock:
            return tuple(self._tables.get(request_id, {}))

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash of a held block, None for an unknown id."""
        with self._lock:
            return self._hashes.get(block_id)

    def holders(self, block_hash: bytes) -> int:
        """How many requests hold the block."""
        with self._lock:
            return self._holders.get(block_hash, 0)

    def held(self) -> dict[str, int]:
        """How many blocks each request holds."""
        with self._lock:
            return {request_id: len(table) for request_id, table in self._tables.items()}

    def requests(self) -> tuple[str, ...]:
        """The requests that hold at least one block."""
        with self._lock:
            return tuple(self._tables)
