"""Compact tables for a million small records: typed columns, hash chains, an order of use.

A Python object for each block would take about 700 bytes and several seconds to make for a million of them;
columns take 250 bytes and are read from a file as they are. Slot 0 of every column stands for "none",
so records have the slots from 1 on. Nothing in here is thread-safe.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NAME_BYTES = 64  # room for a hash in its column

# Of a stored record, in the order in which a snapshot holds them: name, dtype, items a record.
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("hash", "u1", NAME_BYTES),
    ("parent", "u1", NAME_BYTES),
    ("hash_length", "u1", 1),
    ("parent_length", "u1", 1),
    ("folder", "<u4", 1),  # numbers of texts: see `Texts`
    ("numerics", "<u4", 1),
    ("cuts", "<u4", 1),
    ("token_count", "<u4", 1),
    ("start", "<u8", 1),
    ("exact_tokens", "<u4", 1),
    ("file_size", "<u8", 1),
    ("used", "<i8", 1),
    ("stale", "u1", 1),
)
RECORD_BYTES = sum(np.dtype(dtype).itemsize * items for _, dtype, items in COLUMNS)


class Texts:
    """Texts by small numbers: most records share theirs."""

    def __init__(self, texts: list[str] | None = None) -> None:
        self.texts: list[str] = texts if texts is not None else []
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def number(self, text: str) -> int:
        """The text's number, a new one if it has none."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def find(self, text: str) -> int:
        """The text's number, -1 if it has none."""
        return self._numbers.get(text, -1)


class Records:
    """Columns with the slots 0 to `size`, of which slot 0 is no record.

    `arrays[name]` has shape (slots,) or (slots x items,); `views` are the same memory as memoryviews, which give
    single items faster.
    """

    def __init__(self, size: int, columns: tuple[tuple[str, str, int], ...] = COLUMNS) -> None:
        self._columns = columns
        self.size = size
        self.arrays: dict[str, Array] = {n: np.zeros((size + 1) * items, dtype) for n, dtype, items in columns}
        self.views = {name: memoryview(array) for name, array in self.arrays.items()}

    def column(self, name: str, first: int, last: int) -> Array:
        """The items of slots `first` to `last`, both included; a view."""
        items = next(items for n, _, items in self._columns if n == name)
        return self.arrays[name][first * items : (last + 1) * items]

    def grow(self, size: int) -> None:
        """Makes room for slots up to `size`. Views taken before are of the old memory."""
        larger = Records(size, self._columns)
        for name in self.arrays:
            larger.column(name, 0, self.size)[:] = self.arrays[name]
        self.size, self.arrays, self.views = size, larger.arrays, larger.views


def short_key(name: bytes) -> int:
    """A number for a hash, for use in `Chains`. Hashes are as good as random."""
    return int.from_bytes(name[:8], "little")


class Chains:
    """Slots by number, as a hash table with chains: three integers and a number a slot, and nothing else.

    Walk a chain with `slot = chains.first(key)`, then `slot = chains.next[slot]` until 0, and compare
    `chains.keys[slot]` with the key: other keys may share the chain. The slot that was added last comes first.
    Chains may be long (all that follows one block has one key), so they are linked both ways.
    """

    def __init__(self, size: int) -> None:
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        heads = 1 << max(4, int(1.5 * size).bit_length())
        self.mask = heads - 1
        self._heads_array = np.zeros(heads, np.int32)
        self._next_array, self._before_array = np.zeros(size + 1, np.int32), np.zeros(size + 1, np.int32)
        self._keys_array = np.zeros(size + 1, np.uint64)
        self._take_views()

    def _take_views(self) -> None:
        self.heads, self.next = memoryview(self._heads_array), memoryview(self._next_array)
        self.keys, self._before = memoryview(self._keys_array), memoryview(self._before_array)

    def load(self, keys: Array, size: int) -> None:
        """Starts over with the slots from 1 on, one for each of `keys`, and room for slots up to `size`."""
        self._allocate(size)
        self._keys_array[1 : len(keys) + 1] = keys
        slots = np.arange(1, len(keys) + 1, dtype=np.int32)
        self._link(slots)

    def _link(self, slots: Array) -> None:
        """Chains all `slots`, later ones first."""
        chain = (self._keys_array[slots] & np.uint64(self.mask)).astype(np.int32)
        order = np.argsort(chain, kind="stable")[::-1]
        slots, chain = slots[order], chain[order]
        leads = np.ones(len(slots), bool)
        leads[1:] = chain[1:] != chain[:-1]
        self._heads_array[chain[leads]] = slots[leads]
        follows = np.flatnonzero(~leads)
        self._next_array[slots[follows - 1]] = slots[follows]
        self._before_array[slots[follows]] = slots[follows - 1]

    def grow(self, size: int, slots: Array) -> None:
        """Makes room for slots up to `size`; `slots` are those in use, in any order."""
        keys = self._keys_array
        self._allocate(size)
        self._keys_array[: len(keys)] = keys
        self._link(slots)

    def first(self, key: int) -> int:
        return self.heads[key & self.mask]

    def add(self, key: int, slot: int) -> None:
        after = self.heads[key & self.mask]
        self.keys[slot] = key
        self.next[slot], self._before[slot] = after, 0
        self._before[after] = self.heads[key & self.mask] = slot

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self.next[slot]
        if before:
            self.next[before] = after
        else:
            self.heads[self.keys[slot] & self.mask] = after
        self._before[after] = before

    def find(self, keys: Array, accept: Callable[[Array, Array], Array]) -> Array:
        """Slots for many keys at once, 0 where there is none. `accept(slots, which)` says which of them are those
        that were meant by the keys at the places `which`."""
        slots = self._heads_array[(keys & np.uint64(self.mask)).astype(np.int64)]
        which = np.flatnonzero(slots)
        while which.size:
            right = self._keys_array[slots[which]] == keys[which]
            right[right] = accept(slots[which[right]], which[right])
            which = which[~right]
            slots[which] = self._next_array[slots[which]]
            which = which[slots[which] > 0]
        return slots

    def all(self, key: int) -> Array:
        """All slots that were added with this key, removed ones included, in no particular order."""
        return np.flatnonzero(self._keys_array == key)

    def slots(self, key: int) -> Iterator[int]:
        """All slots with this key, the last one added first."""
        slot = self.first(key)
        while slot:
            if self.keys[slot] == key:
                yield slot
            slot = self.next[slot]


class Order:
    """Slots in a row: a doubly linked list, closed to a ring by slot 0."""

    def __init__(self, size: int) -> None:
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._after_array, self._before_array = np.zeros(size + 1, np.int32), np.zeros(size + 1, np.int32)
        self._take_views()

    def _take_views(self) -> None:
        self._after, self._before = memoryview(self._after_array), memoryview(self._before_array)

    def load(self, slots: Array, size: int) -> None:
        """Starts over with these slots, the oldest first, and room for slots up to `size`."""
        self._allocate(size)
        ring = np.concatenate(([0], slots, [0])).astype(np.int32)
        self._after_array[ring[:-1]] = ring[1:]
        self._before_array[ring[1:]] = ring[:-1]

    def grow(self, size: int) -> None:
        more = size + 1 - len(self._after_array)
        self._after_array = np.concatenate((self._after_array, np.zeros(more, np.int32)))
        self._before_array = np.concatenate((self._before_array, np.zeros(more, np.int32)))
        self._take_views()

    def append(self, slot: int) -> None:
        last = self._before[0]
        self._after[last], self._before[slot] = slot, last
        self._after[slot], self._before[0] = 0, slot

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self._after[slot]
        self._after[before], self._before[after] = after, before

    def __iter__(self) -> Iterator[int]:
        """Oldest first. The slot given last may be removed meanwhile."""
        slot = self._after[0]
        while slot:
            after = self._after[slot]
            yield slot
            slot = after
