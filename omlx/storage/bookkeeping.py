"""Small records that both tiers keep. The caller's lock protects them."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from omlx.storage.tensor_file import BlockMeta

Key = tuple[str, bytes]  # a name space (a store's name, a model's folder) and a block hash

# What a request gets of a tier that all its blocks together do not fit into.
SHARE_OF_TOO_LARGE = 0.5


class ChildMap:
    """Which blocks follow a block. Most have one child, so one is kept without a container."""

    def __init__(self) -> None:
        self._children: dict[Key, bytes | dict[bytes, None]] = {}

    def add(self, parent: Key, child: bytes) -> None:
        known = self._children.get(parent)
        if known is None or known == child:
            self._children[parent] = child
        elif isinstance(known, bytes):
            self._children[parent] = {known: None, child: None}
        else:
            known[child] = None

    def remove(self, parent: Key, child: bytes) -> None:
        known = self._children.get(parent)
        if isinstance(known, dict):
            known.pop(child, None)
        if known == child or known == {}:
            del self._children[parent]

    def of(self, parent: Key) -> Iterator[bytes]:
        """The children, oldest first."""
        known = self._children.get(parent)
        return iter(()) if known is None else iter((known,) if isinstance(known, bytes) else known)

    def count(self, parent: Key) -> int:
        known = self._children.get(parent)
        return len(known) if isinstance(known, dict) else int(known is not None)

    def pairs(self) -> set[tuple[Key, bytes]]:
        return {(parent, child) for parent in self._children for child in self.of(parent)}


class Pins:
    """How many holders each block has."""

    def __init__(self) -> None:
        self._counts: Counter[Key] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._counts

    def add(self, keys: Iterable[Key]) -> None:
        self._counts.update(keys)

    def remove(self, keys: Iterable[Key]) -> None:
        """Raises ValueError for a block that is not pinned, after the others were unpinned."""
        strays = []
        for key in keys:
            left = self._counts[key] - 1
            if left > 0:
                self._counts[key] = left
            elif self._counts.pop(key, 0) == 0:
                strays.append(key[1].hex())
        if strays:
            raise ValueError(f"block {strays[0]} is not pinned")


class RecentTokens:
    """The token ids of the blocks that were asked for last, by an entry's serial; thread-safe, bounded."""

    _MOST_BYTES = 16 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, serial: int) -> bytes | None:
        with self._lock:
            return self._tokens.get(serial)

    def put(self, serial: int, tokens: bytes) -> None:
        """Keeps them as the most recent ones."""
        with self._lock:
            old = self._tokens.pop(serial, None)
            self._bytes += self._held(tokens) - (0 if old is None else self._held(old))
            self._tokens[serial] = tokens
            while self._bytes > self._MOST_BYTES:
                self._bytes -= self._held(self._tokens.popitem(last=False)[1])

    @staticmethod
    def _held(tokens: bytes) -> int:
        """Companions have no tokens, and take up room all the same."""
        return len(tokens) + 200


class Gone(NamedTuple):
    """A block that a tier gave up, and what happened to it."""

    meta: BlockMeta
    reason: str


class GoneBlocks:
    """The last blocks that a tier gave up, so that a miss can be explained. Only in memory, and bounded."""

    _MOST = 4096

    def __init__(self) -> None:
        self._gone: OrderedDict[Key, Gone] = OrderedDict()
        self._children = ChildMap()

    def add(self, name: str, meta: BlockMeta, reason: str) -> None:
        self._forget((name, meta.block_hash))
        self._gone[name, meta.block_hash] = Gone(meta, reason)
        self._children.add((name, meta.parent), meta.block_hash)
        while len(self._gone) > self._MOST:
            self._forget(next(iter(self._gone)))

    def after(self, name: str, parent: bytes) -> list[Gone]:
        """Those that followed a block, the last one last."""
        return [self._gone[name, block_hash] for block_hash in self._children.of((name, parent))]

    def _forget(self, key: Key) -> None:
        gone = self._gone.pop(key, None)
        if gone is not None:
            self._children.remove((key[0], gone.meta.parent), key[1])
