"""Which blocks there are on disk, in order of use: a table in memory, and what SQLite has to be told of it."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omlx.storage.bookkeeping import Key
from omlx.storage.folder import MAX_HASH_BYTES, check_folder
from omlx.storage.packed import COLUMNS, NAME_BYTES, Array, Chains, Order, Records, Texts, short_key
from omlx.storage.tensor_file import BlockBuffer, BlockMeta

WriteFile = Callable[[Path, BlockBuffer, BlockMeta], None]


class Pending(NamedTuple):
    """A block whose file is still to be written, and what writes it."""

    block: BlockBuffer
    write: WriteFile
    tokens: bytes | None


@dataclass(slots=True, eq=False)
class Entry:
    """A block on disk, or on its way there while `pending` is set.

    `used` orders entries by last use (nanoseconds since the epoch, or a little more to stay
    distinct). A `stale` entry is a file that takes up room but is never read, such as one of another
    version; it is the first to go. One that is not `identified` yet takes up room too: its header will tell what it
    is. Entries are made when they are asked for; `serial` tells whether one is in force still.
    """

    folder: str
    meta: BlockMeta
    used: int = 0
    stale: bool = False
    identified: bool = True
    pending: Pending | None = None
    serial: int = 0

    @property
    def key(self) -> Key:
        return self.folder, self.meta.block_hash


# As in SQLite: folder, hash, parent, token_count, start, exact_tokens, cuts, numerics, file_size, used, stale
Row = tuple[str, bytes, bytes, int, int, int, str, str, int, int, int]
Change = tuple[Key, Row | None]  # None: the row goes
_TYPES = (str, bytes, bytes, int, int, int, str, str, int, int, int)


@dataclass(slots=True)
class Slots:
    """Places in the table with the serials of their entries then, and how many of the first are known to be gone."""

    slots: Array
    serials: Array
    gone: int = 0


_META_COLUMNS = ("parent_length", "token_count", "start", "exact_tokens", "cuts", "numerics", "file_size")
_FEW = 16  # blocks that are found faster one by one
_GROWTH = 1.5
_CLOCK_SLACK_NS = 10**9  # stamps of blocks used at once run a little ahead of the clock
_ROOM = 1024
_OK, _STALE, _UNIDENTIFIED = 0, 1, 2


class Packed:
    """Blocks as columns, in order of use: what is read from disk at once, and a table is filled with."""

    def __init__(self, count: int, folders: list[str], numerics: list[str], cuts: list[str]) -> None:
        """Raises ValueError for folders and cuts that a table cannot have written."""
        self.count = count
        self.records = Records(count + count // 8 + _ROOM)
        self.folders = Texts([check_folder(folder) for folder in folders])
        self.numerics, self.cuts = Texts(numerics), Texts(cuts)
        self.cut_tuples = [cuts_of(text) for text in cuts]

    def check(self) -> None:
        """Raises ValueError for values that a table cannot have written."""
        if not self.count:
            return
        column = {name: self.records.column(name, 1, self.count) for name, _, _ in COLUMNS}
        numbers = {"folder": self.folders, "numerics": self.numerics, "cuts": self.cuts}
        if any(int(column[name].max()) >= len(texts.texts) for name, texts in numbers.items()):
            raise ValueError("a text is missing")
        lengths = column["hash_length"]
        if not 1 <= lengths.min() <= lengths.max() <= MAX_HASH_BYTES or column["parent_length"].max() > NAME_BYTES:
            raise ValueError("a hash has an impossible length")
        if column["used"].min() < 0 or column["stale"].max() > _STALE or int(column["file_size"].max()) >= 1 << 62:
            raise ValueError("a number is out of its range")


def cuts_of(text: str) -> tuple[int, ...]:
    """Raises ValueError for what is not numbers joined by commas."""
    return tuple(int(cut) for cut in text.split(",")) if text else ()


class BlockTable:
    """All entries of a root in order of use, and the changes that SQLite has not seen. No lock of its own."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}
        self._serial = self._last_used = 0
        self._fill(Packed(0, [], [], []))

    def _fill(self, packed: Packed) -> None:
        size, count = packed.records.size, packed.count
        self._records = packed.records
        self._folders, self._numerics, self._cuts = packed.folders, packed.numerics, packed.cuts
        self._cut_tuples = packed.cut_tuples
        self._serials = np.zeros(size + 1, np.int64)
        self._serials[1 : count + 1] = np.arange(1, count + 1) + self._serial
        self._serial += count
        self._seen = np.zeros(size + 1, bool)
        self._by_hash, self._by_parent, self._order = Chains(size), Chains(size), Order(size)
        self._by_hash.load(self._short_keys("hash", count), size)
        self._by_parent.load(self._short_keys("parent", count), size)
        self._order.load(np.arange(1, count + 1), size)
        self._count, self._free, self._fresh = count, list[int](), count + 1
        self._changed: dict[Key, None] = {}
        self._take_views()
        self._sum_up(count)

    def _short_keys(self, name: str, count: int) -> Array:
        """`short_key` of all records' hashes or parents; beyond a hash's end its column holds zeros."""
        return self._records.column(name, 1, count).reshape(count, NAME_BYTES)[:, :8].copy().view("<u8").reshape(count)

    def _take_views(self) -> None:
        v = self._records.views
        self._hash, self._hash_length = v["hash"], v["hash_length"]
        self._parent, self._parent_length = v["parent"], v["parent_length"]
        self._folder, self._numeric, self._cut = v["folder"], v["numerics"], v["cuts"]
        self._tokens, self._start, self._exact = v["token_count"], v["start"], v["exact_tokens"]
        self._size, self._used, self._stale = v["file_size"], v["used"], v["stale"]

    def _sum_up(self, count: int) -> None:
        column = {name: self._records.column(name, 1, count) for name in ("folder", "file_size", "token_count", "used")}
        self.bytes = int(column["file_size"].sum())
        self._last_used = max(self._last_used, int(column["used"].max(initial=0)))
        last = np.zeros(len(self._folders.texts), np.int64)
        np.maximum.at(last, column["folder"], column["used"])
        self.folder_used = dict(zip(self._folders.texts, last.tolist(), strict=True))
        self.folder_blocks, self.folder_bytes, self.folder_tokens = (
            self._sums(column["folder"], weights) for weights in (None, column["file_size"], column["token_count"])
        )

    def _sums(self, folders: Array, weights: Array | None) -> Counter[str]:
        texts = self._folders.texts
        sums = np.bincount(folders, weights, len(texts))
        return Counter({folder: int(number) for folder, number in zip(texts, sums, strict=True)})

    def __len__(self) -> int:
        return self._count

    # ---- questions

    def _slot(self, key: Key) -> int:
        """Where the entry is, 0 if there is none."""
        folder, name = self._folders.find(key[0]), key[1]
        short, chains, hashes = short_key(name), self._by_hash, self._hash
        slot, keys, following = chains.first(short), chains.keys, chains.next
        length = len(name)
        while slot:
            if keys[slot] == short and self._folder[slot] == folder and self._hash_length[slot] == length:
                at = slot * NAME_BYTES
                if hashes[at : at + length] == name:
                    return slot
            slot = following[slot]
        return 0

    def get(self, key: Key) -> Entry | None:
        """The entry, if its block may be read."""
        slot = self._slot(key)
        return self._entry(slot) if slot and not self._stale[slot] else None

    def meta(self, key: Key) -> BlockMeta | None:
        """What is known of a block that may be read."""
        slot = self._slot(key)
        return self._meta(slot) if slot and not self._stale[slot] else None

    def metas(self, folder: str, names: Sequence[bytes]) -> list[BlockMeta | None]:
        """`meta` of many blocks at once, which is faster for each."""
        length = len(names[0]) if names else 0
        if len(names) < _FEW or any(len(name) != length for name in names):
            return [self.meta((folder, name)) for name in names]
        wanted = np.frombuffer(b"".join(names), np.uint8).reshape(-1, length)
        short = np.zeros((len(names), 8), np.uint8)
        short[:, : min(8, length)] = wanted[:, :8]
        a, number = self._records.arrays, self._folders.find(folder)
        hashes = a["hash"].reshape(-1, NAME_BYTES)

        def accept(slots: Array, which: Array) -> Array:
            same = (a["folder"][slots] == number) & (a["hash_length"][slots] == length) & (a["stale"][slots] == _OK)
            return same & (hashes[slots, :length] == wanted[which]).all(1)

        return self._metas(names, self._by_hash.find(short.view("<u8").reshape(-1), accept))

    def _metas(self, names: Sequence[bytes], slots: Array) -> list[BlockMeta | None]:
        a = self._records.arrays
        parents, texts, cuts = a["parent"].reshape(-1, NAME_BYTES)[slots], self._numerics.texts, self._cut_tuples
        columns = (a[name][slots].tolist() for name in _META_COLUMNS)
        return [
            BlockMeta(
                name, count, parent[:length], self._tokens_of(slot), start, exact, cuts[cut], texts[numeric], size
            ) if slot else None
            for name, slot, parent, length, count, start, exact, cut, numeric, size
            in zip(names, slots.tolist(), map(bytes, parents), *columns, strict=True)
        ]  # fmt: skip

    def _tokens_of(self, slot: int) -> bytes | None:
        pending = self._pending.get(slot)
        return pending.tokens if pending else None

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry is in force: not evicted, deleted or replaced since."""
        slot = self._slot(entry.key)
        return bool(slot) and int(self._serials[slot]) == entry.serial

    def known(self, key: Key) -> bool:
        """Whether there is an entry, whatever it is."""
        return self._slot(key) > 0

    def entries(self) -> Iterator[Entry]:
        """Least recently used first. The one given last may be removed meanwhile."""
        return map(self._entry, self._order)

    def children(self, parent: Key, most: int) -> list[Entry]:
        """Blocks that follow a block and may be read, the last one added first; at most so many."""
        folder, name = self._folders.find(parent[0]), parent[1]
        found = []
        for slot in self._by_parent.slots(short_key(name)):
            if self._folder[slot] == folder and not self._stale[slot] and self._parent_of(slot) == name:
                found.append(self._entry(slot))
                if len(found) == most:
                    break
        return found

    def child_names(self, parent: Key) -> list[bytes]:
        """The hashes of all blocks that follow a block and may be read; fast for very many."""
        a, name = self._records.arrays, np.frombuffer(parent[1], np.uint8)
        slots = self._by_parent.all(short_key(parent[1]))
        slots = slots[(self._serials[slots] > 0) & (a["folder"][slots] == self._folders.find(parent[0]))]
        slots = slots[(a["stale"][slots] == _OK) & (a["parent_length"][slots] == len(name))]
        slots = slots[(a["parent"].reshape(-1, NAME_BYTES)[slots, : len(name)] == name).all(1)]
        names = a["hash"].reshape(-1, NAME_BYTES)[slots].tobytes()
        lengths = a["hash_length"][slots].tolist()
        return [names[at : at + length] for at, length in zip(range(0, len(names), NAME_BYTES), lengths, strict=True)]

    def stale(self) -> Slots:
        """Files that are never read, the oldest first."""
        slots = self._slots()
        return self._by_use(slots[self._records.arrays["stale"][slots] == _STALE])

    def under_other_numerics(self, folder: str, numerics: str) -> Slots:
        """The folder's blocks that may be read and were made under other numerics, least recently used first."""
        slots, a = self._slots(), self._records.arrays
        other = (a["folder"][slots] == self._folders.find(folder)) & (a["stale"][slots] == _OK)
        return self._by_use(slots[other & (a["numerics"][slots] != self._numerics.find(numerics))])

    def _by_use(self, slots: Array) -> Slots:
        slots = slots[np.argsort(self._records.arrays["used"][slots], kind="stable")]
        return Slots(slots, self._serials[slots])

    def still_there(self, slots: Slots) -> Iterator[Entry]:
        """Those entries that are in force still."""
        for place in range(slots.gone, len(slots.slots)):
            slot = int(slots.slots[place])
            if self._serials[slot] == slots.serials[place]:
                yield self._entry(slot)
            elif place == slots.gone:
                slots.gone += 1

    def _parent_of(self, slot: int) -> bytes:
        at = slot * NAME_BYTES
        return bytes(self._parent[at : at + self._parent_length[slot]])

    def _hash_of(self, slot: int) -> bytes:
        at = slot * NAME_BYTES
        return bytes(self._hash[at : at + self._hash_length[slot]])

    def _key(self, slot: int) -> Key:
        return self._folders.texts[self._folder[slot]], self._hash_of(slot)

    def _meta(self, slot: int) -> BlockMeta:
        return BlockMeta(
            self._hash_of(slot),
            self._tokens[slot],
            self._parent_of(slot),
            self._tokens_of(slot),
            self._start[slot],
            self._exact[slot],
            self._cut_tuples[self._cut[slot]],
            self._numerics.texts[self._numeric[slot]],
            self._size[slot],
        )

    def _entry(self, slot: int) -> Entry:
        stale = self._stale[slot]
        return Entry(
            self._folders.texts[self._folder[slot]], self._meta(slot), self._used[slot], stale == _STALE,
            stale != _UNIDENTIFIED, self._pending.get(slot), int(self._serials[slot]),
        )  # fmt: skip

    # ---- changes

    def add(self, entry: Entry) -> None:
        """Takes the entry in as the most recently used, in place of an older one.

        Raises ValueError, and has no such entry, if a number or the parent does not fit its column.
        """
        self._serial += 1
        entry.serial = self._serial
        self._insert(entry)

    def _insert(self, entry: Entry) -> None:
        self.remove(entry.key)
        slot = self._new_slot()
        try:
            self._write(slot, entry)
        except BaseException:
            self._free.append(slot)
            raise
        self._serials[slot] = entry.serial
        self._seen[slot] = True
        if entry.pending is not None:
            self._pending[slot] = entry.pending
        self._last_used = max(self._last_used, entry.used)
        self.folder_used[entry.folder] = max(entry.used, self.folder_used.get(entry.folder, 0))
        self._by_hash.add(short_key(entry.meta.block_hash), slot)
        self._by_parent.add(short_key(entry.meta.parent), slot)
        self._order.append(slot)
        self._sum(slot, 1)
        self._note(slot, entry.key)

    def _write(self, slot: int, entry: Entry) -> None:
        meta, at = entry.meta, slot * NAME_BYTES
        self._hash[at : at + NAME_BYTES] = meta.block_hash.ljust(NAME_BYTES, b"\0")
        self._parent[at : at + NAME_BYTES] = meta.parent.ljust(NAME_BYTES, b"\0")
        self._hash_length[slot], self._parent_length[slot] = len(meta.block_hash), len(meta.parent)
        self._folder[slot] = self._folders.number(entry.folder)
        self._numeric[slot] = self._numerics.number(meta.numerics)
        self._cut[slot] = self._cuts.number(_cuts_text(meta))
        if self._cut[slot] == len(self._cut_tuples):
            self._cut_tuples.append(meta.cuts)
        self._tokens[slot], self._start[slot], self._exact[slot] = meta.token_count, meta.start, meta.exact_tokens
        self._size[slot], self._used[slot] = meta.file_size, entry.used
        self._stale[slot] = _STALE if entry.stale else _OK if entry.identified else _UNIDENTIFIED

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._fresh > self._records.size:
            self._grow(int(self._records.size * _GROWTH))
        self._fresh += 1
        return self._fresh - 1

    def _grow(self, size: int) -> None:
        """Only called while all slots are in use."""
        slots = np.arange(1, self._fresh, dtype=np.int32)
        self._records.grow(size)
        self._by_hash.grow(size, slots)
        self._by_parent.grow(size, slots)
        self._order.grow(size)
        self._serials.resize(size + 1, refcheck=False)
        self._seen.resize(size + 1, refcheck=False)
        self._take_views()

    def remove(self, key: Key) -> None:
        slot = self._slot(key)
        if slot:
            self._remove(slot, key)

    def _remove(self, slot: int, key: Key) -> None:
        self._by_hash.remove(slot)
        self._by_parent.remove(slot)
        self._order.remove(slot)
        self._sum(slot, -1)
        self._pending.pop(slot, None)
        self._serials[slot] = 0
        self._free.append(slot)
        self._changed[key] = None

    def written(self, entry: Entry) -> None:
        """The entry's file is there now."""
        slot = self._slot(entry.key)
        self._pending.pop(slot, None)
        self._note(slot, entry.key)

    def touch(self, key: Key) -> None:
        """Makes the entry the most recently used."""
        slot = self._slot(key)
        if slot and not self._stale[slot]:
            self._used[slot] = self.folder_used[key[0]] = self.stamp()
            self._order.remove(slot)
            self._order.append(slot)
            self._note(slot, key)

    def stamp(self) -> int:
        self.set_future_uses_to_now()
        self._last_used = max(self._last_used + 1, time.time_ns())
        return self._last_used

    def set_future_uses_to_now(self) -> None:
        """Gives entries whose last use lies in the future, since the clock was set back, times just before now.

        Their order is unchanged. Without this they would not expire until the clock reaches those times again.
        """
        now = time.time_ns()
        if self._last_used <= now + _CLOCK_SLACK_NS:
            return
        slots, used = self._slots(), self._records.arrays["used"]
        slots = slots[np.argsort(used[slots], kind="stable")]
        late = slots[used[slots] > now]
        used[late] = now - len(late) + 1 + np.arange(len(late))
        # Those used just before now must not come after them.
        early = slots[: len(slots) - len(late)]
        used[early] = np.minimum(used[early], now - len(late))
        for slot in late.tolist():
            entry = self._entry(slot)
            self._note(slot, entry.key)
        self._last_used = now
        self.folder_used = {folder: min(ns, now) for folder, ns in self.folder_used.items()}

    def sort(self) -> None:
        """Puts entries in order after some were added out of it."""
        slots = self._slots()
        self._order.load(slots[np.argsort(self._records.arrays["used"][slots], kind="stable")], self._records.size)

    def load(self, packed: Packed) -> None:
        """Fills the table with what is on disk; only the pending entries of before are kept."""
        pending = [self._entry(slot) for slot in self._pending]
        self._pending.clear()
        self._fill(packed)
        for entry in pending:
            self._insert(entry)  # the same entry: its write is queued
        if pending:
            self.sort()

    def pending(self, entry: Entry) -> Pending | None:
        """What is to be written, if the entry is in force."""
        return self._pending.get(self._slot(entry.key)) if self.holds(entry) else None

    def keep_only_seen(self) -> None:
        """Forgets the entries that were not `see`n since they were loaded, for files that are not there."""
        for slot in list(self._order):
            if not self._seen[slot] and slot not in self._pending:
                self._remove(slot, self._key(slot))

    def see(self, key: Key) -> bool:
        """Notes that the entry's file is there. False if it has none."""
        slot = self._slot(key)
        self._seen[slot] = True
        return slot > 0

    # ---- what SQLite has to be told

    @property
    def changes(self) -> int:
        return len(self._changed)

    def take_changes(self, limit: int) -> list[Change]:
        """The oldest changes, at most `limit`; they count as told."""
        keys = [key for key, _ in zip(self._changed, range(limit), strict=False)]
        for key in keys:
            del self._changed[key]
        slots = ((key, self._slot(key)) for key in keys)
        return [(key, self._row(slot) if slot and self._is_told(slot) else None) for key, slot in slots]

    def give_back(self, changes: Iterable[Change]) -> None:
        """SQLite could not take them."""
        self._changed |= {key: None for key, _ in changes}

    def mark_all_changed(self) -> None:
        self._changed = {self._key(slot): None for slot in self._order}

    def rows(self) -> dict[Key, Row]:
        return {self._key(slot): self._row(slot) for slot in self._order if self._is_told(slot)}

    @property
    def is_told(self) -> bool:
        """Whether every entry has a row: none waits to be written or identified."""
        return not self._pending and not (self._records.arrays["stale"][self._slots()] == _UNIDENTIFIED).any()

    def _is_told(self, slot: int) -> bool:
        return slot not in self._pending and self._stale[slot] != _UNIDENTIFIED

    def _row(self, slot: int) -> Row:
        folder, name = self._key(slot)
        return (
            folder, name, self._parent_of(slot), self._tokens[slot], self._start[slot], self._exact[slot],
            self._cuts.texts[self._cut[slot]], self._numerics.texts[self._numeric[slot]], self._size[slot],
            self._used[slot], self._stale[slot],
        )  # fmt: skip

    def pack(self) -> Packed:
        """A copy of all entries in order of use; for a table without pending and unidentified ones."""
        slots = self._slots()
        slots = slots[np.argsort(self._records.arrays["used"][slots], kind="stable")]
        packed = Packed(len(slots), self._folders.texts, self._numerics.texts, self._cuts.texts)
        for name, _, items in COLUMNS:
            source = self._records.arrays[name].reshape(-1, items)
            packed.records.arrays[name].reshape(-1, items)[1 : len(slots) + 1] = source[slots]
        return packed

    def _slots(self) -> Array:
        """Those in use, in no particular order."""
        return np.flatnonzero(self._serials)

    def check(self) -> list[str]:
        """Contradictions between the parts; empty when all is well."""
        found = []
        slots = list(self._order)
        if self.bytes != sum(self._size[slot] for slot in slots) or self.bytes != self.folder_bytes.total():
            found.append("the index's sum of sizes is wrong")
        if len(slots) != self._count or sorted(slots) != self._slots().tolist():
            found.append("the index's order lists other blocks than there are")
        if any(self._slot(self._key(slot)) != slot for slot in slots):
            found.append("the index does not find its blocks by their hash")
        if any(slot not in self._by_parent.slots(short_key(self._parent_of(slot))) for slot in slots):
            found.append("the index's children are not those of its blocks")
        return found

    def _note(self, slot: int, key: Key) -> None:
        if self._is_told(slot):  # one that is still to be written is noted when it was
            self._changed[key] = None

    def _sum(self, slot: int, sign: int) -> None:
        folder, size = self._folders.texts[self._folder[slot]], sign * self._size[slot]
        self._count += sign
        self.bytes += size
        self.folder_bytes[folder] += size
        self.folder_blocks[folder] += sign
        self.folder_tokens[folder] += sign * self._tokens[slot]


def _cuts_text(meta: BlockMeta) -> str:
    return ",".join(map(str, meta.cuts))


def pack_rows(rows: Iterable[Row]) -> Packed:
    """Rows of SQLite as columns, in order of use. Raises ValueError for rows that a table cannot have written."""
    table = BlockTable()
    try:
        ordered = sorted(rows, key=itemgetter(9))
    except TypeError as exc:
        raise ValueError("a row is damaged") from exc
    for row in ordered:
        table.add(entry_of(row))
    packed = table.pack()
    packed.check()
    return packed


def entry_of(row: tuple[Any, ...]) -> Entry:
    """Raises ValueError for a row that a table cannot have written."""
    if tuple(map(type, row)) != _TYPES:
        raise ValueError("a row is damaged")
    folder, name, parent, count, start, exact, cuts, numerics, size, used, stale = row
    bits = ((count, 32), (start, 63), (exact, 32), (size, 62), (used, 63), (stale, 1))
    if not 1 <= len(name) <= MAX_HASH_BYTES or len(parent) > NAME_BYTES or any(not 0 <= n < 1 << b for n, b in bits):
        raise ValueError("a row is damaged")
    meta = BlockMeta(name, count, parent, None, start, exact, cuts_of(cuts), numerics, size)
    return Entry(check_folder(folder), meta, used, bool(stale))
