"""The children of a block that has many, sorted by their tokens: the most similar ones are found without a scan."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice, takewhile

from omlx.storage.bookkeeping import Key

FEW = 64  # children that are scanned one by one, and the most that a search returns
_TOKEN_BYTES = 4
_OVERHEAD = 300  # bytes in memory of a sibling, its tokens apart
_MOST_BYTES = 64 << 20

Sibling = tuple[bytes, bytes]  # packed tokens, block hash


class Siblings:
    """Children of one block. Neighbors in the order of their tokens share the longest prefixes."""

    def __init__(self, siblings: Iterable[Sibling] = ()) -> None:
        self._sorted = sorted(siblings)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, tokens: bytes, name: bytes) -> None:
        """The same sibling must not be added twice."""
        insort(self._sorted, (tokens, name))

    def remove(self, tokens: bytes, name: bytes) -> None:
        """Does nothing if there is no such sibling."""
        at = bisect_left(self._sorted, (tokens, name))
        if at < len(self._sorted) and self._sorted[at] == (tokens, name):
            del self._sorted[at]

    def similar(self, tokens: bytes, most: int = FEW) -> list[Sibling]:
        """The `most` siblings that share the longest prefixes with `tokens`, longest first, at least one token each;
        then all others whose tokens are a prefix of `tokens`."""
        at = bisect_left(self._sorted, (tokens,))
        below = ((_shared(self._sorted[i][0], tokens), i) for i in range(at - 1, -1, -1))
        above = ((_shared(self._sorted[i][0], tokens), i) for i in range(at, len(self._sorted)))
        nearest = merge(below, above, key=lambda pair: -pair[0])
        found = [i for _, i in islice(takewhile(lambda pair: pair[0] > 0, nearest), most)]
        return [self._sorted[i] for i in dict.fromkeys((*found, *self._prefixes(tokens)))]

    def _prefixes(self, tokens: bytes) -> Iterator[int]:
        """Where the siblings are whose tokens are a prefix of `tokens`.

        All that are shorter than `tokens` are prefixes of its lower neighbor too, so that is as far as they can go.
        """
        while tokens:
            at = above = bisect_left(self._sorted, (tokens,))
            while above < len(self._sorted) and self._sorted[above][0] == tokens:
                yield above
                above += 1
            tokens = tokens[: _shared(self._sorted[at - 1][0], tokens) * _TOKEN_BYTES] if at else b""


def _shared(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed runs share."""
    n = min(len(a), len(b))
    different = int.from_bytes(a[:n], "big") ^ int.from_bytes(b[:n], "big")
    return (n - (different.bit_length() + 7) // 8) // _TOKEN_BYTES


class _Family:
    """The siblings of one parent, as far as their tokens are known; `complete` if that is all of them."""

    def __init__(self) -> None:
        self.siblings = Siblings()
        self.tokens: dict[bytes, bytes] = {}
        self.bytes = 0
        self.complete = False


class FamilyIndex:
    """Sorted siblings for the parents that have many, by parent; for blocks whose tokens are otherwise only in files.

    Uses 64 MB of memory at most; over that the family that was searched least recently is dropped, and the only one
    takes no more in. May list blocks that are no longer stored. No lock of its own.
    """

    def __init__(self, max_bytes: int = _MOST_BYTES) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._families: OrderedDict[Key, _Family] = OrderedDict()

    def open(self, parent: Key) -> bool:
        """Starts a family for a parent. False if it has one."""
        if parent in self._families:
            return False
        self._families[parent] = _Family()
        return True

    def similar(self, parent: Key, tokens: bytes) -> tuple[list[Sibling], bool]:
        """See `Siblings.similar`, and whether all siblings of the family are known."""
        self._families.move_to_end(parent)
        family = self._families[parent]
        return family.siblings.similar(tokens), family.complete

    def add(self, parent: Key, tokens: bytes | None, name: bytes) -> bool:
        """False if the parent has no family, or no room for more."""
        family = self._families.get(parent)
        if family is None or tokens is None or not self._make_room(parent, len(tokens) + _OVERHEAD):
            return False
        if name not in family.tokens:
            family.tokens[name] = tokens
            family.siblings.add(tokens, name)
            self._count(family, len(tokens) + _OVERHEAD)
        return True

    def _make_room(self, parent: Key, nbytes: int) -> bool:
        while self.bytes + nbytes > self._max_bytes:
            oldest = next(iter(self._families))
            if oldest == parent:
                self._families[parent].complete = False
                return False
            self.drop(oldest)
        return True

    def remove(self, parent: Key, name: bytes) -> None:
        """Does nothing for a parent or a sibling that is not known."""
        family = self._families.get(parent)
        tokens = family.tokens.pop(name, None) if family is not None else None
        if family is not None and tokens is not None:
            family.siblings.remove(tokens, name)
            self._count(family, -len(tokens) - _OVERHEAD)

    def completed(self, parent: Key) -> None:
        """All of the parent's children have been added."""
        if parent in self._families:
            self._families[parent].complete = True

    def drop(self, parent: Key) -> None:
        family = self._families.pop(parent, None)
        if family is not None:
            self.bytes -= family.bytes

    def clear(self) -> None:
        self._families.clear()
        self.bytes = 0

    def _count(self, family: _Family, nbytes: int) -> None:
        family.bytes += nbytes
        self.bytes += nbytes
