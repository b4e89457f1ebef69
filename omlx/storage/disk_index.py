"""Which blocks there are on disk: a table in memory in order of use, and its copy in SQLite."""

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omlx.storage.bookkeeping import ChildMap, Key
from omlx.storage.folder import MAX_HASH_BYTES, check_folder, remove
from omlx.storage.tensor_file import BlockBuffer, BlockMeta

log = logging.getLogger(__name__)

WriteFile = Callable[[Path, BlockBuffer, BlockMeta], None]


class Pending(NamedTuple):
    """A block whose file is still to be written, and what writes it."""

    block: BlockBuffer
    write: WriteFile


@dataclass(slots=True, eq=False)
class Entry:
    """A block on disk, or on its way there while `pending` is set.

    `used` orders entries by last use (nanoseconds since the epoch, or a little more to stay
    distinct). A `stale` entry is a file that takes up room but is never read, such as one of another
    version; it is the first to go.
    """

    folder: str
    meta: BlockMeta
    used: int = 0
    stale: bool = False
    pending: Pending | None = None

    @property
    def key(self) -> Key:
        return self.folder, self.meta.block_hash


Row = tuple[str, bytes, bytes, bytes, int, int, int, str, str, int, int, int]
Change = tuple[Key, Row | None]  # None: the row goes


class BlockTable:
    """All entries of a root in order of use, and the changes that SQLite has not seen. No lock of its own."""

    def __init__(self) -> None:
        self.bytes = 0
        self.folder_bytes: Counter[str] = Counter()
        self.folder_blocks: Counter[str] = Counter()
        self.folder_tokens: Counter[str] = Counter()
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._children = ChildMap()
        self._changed: dict[Key, None] = {}
        self._last_used = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry, unless it is stale."""
        entry = self._entries.get(key)
        return None if entry is None or entry.stale else entry

    def holds(self, entry: Entry) -> bool:
        """Whether this very entry is in force: not evicted, deleted or replaced since."""
        return self._entries.get(entry.key) is entry

    def known(self, key: Key) -> bool:
        """Whether there is an entry, stale or not."""
        return key in self._entries

    def entries(self) -> Iterator[Entry]:
        """Least recently used first."""
        return iter(self._entries.values())

    def children(self, parent: Key) -> list[BlockMeta]:
        return [self._entries[parent[0], child].meta for child in self._children.of(parent)]

    def add(self, entry: Entry) -> None:
        """Takes the entry in as the most recently used, in place of an older one."""
        self.remove(entry.key)
        self._entries[entry.key] = entry
        self._last_used = max(self._last_used, entry.used)
        if not entry.stale:
            self._children.add((entry.folder, entry.meta.parent), entry.meta.block_hash)
        self._count(entry, 1)
        self._note(entry)

    def remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            if not entry.stale:
                self._children.remove((entry.folder, entry.meta.parent), entry.meta.block_hash)
            self._count(entry, -1)
            self._changed[key] = None

    def written(self, entry: Entry) -> None:
        """The entry's file is there now."""
        entry.pending = None
        self._note(entry)

    def touch(self, key: Key) -> None:
        """Makes the entry the most recently used."""
        entry = self.get(key)
        if entry is not None:
            entry.used = self.stamp()
            self._entries.move_to_end(key)
            self._note(entry)

    def stamp(self) -> int:
        self._last_used = max(self._last_used + 1, time.time_ns())
        return self._last_used

    def sort(self) -> None:
        """Puts entries in order after some were added out of it."""
        self._entries = OrderedDict((e.key, e) for e in sorted(self._entries.values(), key=lambda e: e.used))

    def keep_only_pending(self) -> None:
        """Forgets what was on disk, for a folder that is gone."""
        for entry in [entry for entry in self._entries.values() if entry.pending is None]:
            self.remove(entry.key)
        self._changed.clear()

    # ---- what SQLite has to be told

    @property
    def changes(self) -> int:
        return len(self._changed)

    def take_changes(self, limit: int) -> list[Change]:
        """The oldest changes, at most `limit`; they count as told."""
        keys = [key for key, _ in zip(self._changed, range(limit), strict=False)]
        for key in keys:
            del self._changed[key]
        entries = ((key, self._entries.get(key)) for key in keys)
        return [(key, _row(entry) if entry is not None and entry.pending is None else None) for key, entry in entries]

    def give_back(self, changes: Iterable[Change]) -> None:
        """SQLite could not take them."""
        self._changed |= {key: None for key, _ in changes}

    def mark_all_changed(self) -> None:
        self._changed = dict.fromkeys(self._entries)

    def forget_changes(self) -> None:
        self._changed.clear()

    def rows(self) -> dict[Key, Row]:
        return {key: _row(entry) for key, entry in self._entries.items() if entry.pending is None}

    def check(self) -> list[str]:
        """Contradictions between the parts; empty when all is well."""
        found = []
        if self.bytes != sum(e.meta.file_size for e in self.entries()) or self.bytes != self.folder_bytes.total():
            found.append("the index's sum of sizes is wrong")
        linked = {((e.folder, e.meta.parent), e.meta.block_hash) for e in self.entries() if not e.stale}
        if self._children.pairs() != linked:
            found.append("the index's children are not those of its blocks")
        return found

    def _note(self, entry: Entry) -> None:
        if entry.pending is None:  # one that is still to be written is noted when it was
            self._changed[entry.key] = None

    def _count(self, entry: Entry, sign: int) -> None:
        self.bytes += sign * entry.meta.file_size
        self.folder_bytes[entry.folder] += sign * entry.meta.file_size
        self.folder_blocks[entry.folder] += sign
        self.folder_tokens[entry.folder] += sign * entry.meta.token_count


# ---- SQLite

_SCHEMA = 1
_COLUMNS = (
    "folder TEXT, hash BLOB, parent BLOB, tokens BLOB, token_count INTEGER, start INTEGER, exact_tokens INTEGER, "
    "cuts TEXT, numerics TEXT, file_size INTEGER, used INTEGER, stale INTEGER"
)
_NAMES = ", ".join(column.split()[0] for column in _COLUMNS.split(", "))
_UPSERT = f"INSERT OR REPLACE INTO blocks ({_NAMES}) VALUES ({', '.join('?' * len(_NAMES.split(', ')))})"
_TYPES = (str, bytes, bytes, bytes, int, int, int, str, str, int, int, int)
# The file holds something else than we wrote, or is not in its place; other errors may pass (a full disk, say).
_LOST = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH)


class IndexFile:
    """The table's copy on disk. Used by one thread at a time.

    Small transactions and a rollback journal that is cut to nothing after each: what lies on disk
    stays bounded, and a killed process leaves a file that SQLite repairs. No fsync: after a power
    loss the file may be broken, and is then built again from the blocks' headers.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file; makes it anew if it is damaged. Raises OSError if neither works.

        `clean` is True when the last process closed it: then its rows are all there is. `damaged` is
        True when it was made anew.
        """
        self.path = path
        self.clean = self.damaged = False
        try:
            try:
                self._db, self._entries = self._load()
            except (sqlite3.Error, ValueError, OverflowError, PermissionError, IsADirectoryError) as exc:
                if isinstance(exc, sqlite3.Error) and not is_lost(exc):
                    raise
                log.warning("the cache index %s is damaged (%s): it is built again from the blocks' headers", path, exc)
                self.damaged = True
                self._remove()
                self._db, self._entries = self._load()
        except sqlite3.Error as exc:
            raise OSError(f"the cache index {path} cannot be used: {exc}") from exc

    def _load(self) -> tuple[sqlite3.Connection, list[Entry]]:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA auto_vacuum = FULL")  # it shrinks with the cache
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA synchronous = OFF")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 2 * _SCHEMA, 2 * _SCHEMA + 1):
                raise ValueError(f"version {version // 2}")
            db.execute(f"CREATE TABLE IF NOT EXISTS blocks ({_COLUMNS}, PRIMARY KEY (folder, hash)) WITHOUT ROWID")
            entries = [_entry(row) for row in db.execute(f"SELECT {_NAMES} FROM blocks ORDER BY used")]
            db.execute(f"PRAGMA user_version = {2 * _SCHEMA}")
        except BaseException:
            db.close()
            raise
        self.clean = version == 2 * _SCHEMA + 1
        return db, entries

    def take_entries(self) -> list[Entry]:
        """What the file held when it was opened, least recently used first; only once."""
        entries, self._entries = self._entries, []
        return entries

    def save(self, changes: list[Change]) -> None:
        """Writes some changes, all or none. Raises sqlite3.Error."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(_UPSERT, [row for _, row in changes if row is not None])
            gone = [key for key, row in changes if row is None]
            self._db.executemany("DELETE FROM blocks WHERE folder = ? AND hash = ?", gone)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def make_again(self) -> None:
        """Starts over with an empty file. Raises OSError, sqlite3.Error."""
        self._db.close()
        self._remove()
        self._db, _ = self._load()

    def rows(self) -> dict[Key, Row]:
        """What the file holds. Raises sqlite3.Error."""
        return {(row[0], row[1]): row for row in self._db.execute(f"SELECT {_NAMES} FROM blocks")}

    def nbytes(self) -> int:
        """Bytes of the file and its journal."""
        total = 0
        for path in (self.path, self._journal):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        return total

    def close(self, *, clean: bool) -> None:
        """`clean` promises that the rows are all there is. Raises nothing: without the promise the next start looks."""
        try:
            if clean:
                self._db.execute(f"PRAGMA user_version = {2 * _SCHEMA + 1}")
            self._db.close()
        except sqlite3.Error as exc:
            log.warning("the cache index %s could not be closed: %s", self.path, exc)

    @property
    def _journal(self) -> Path:
        return self.path.with_name(self.path.name + "-journal")

    def _remove(self) -> None:
        remove(self.path)
        remove(self._journal)


def read_index(path: Path) -> list[Entry]:
    """What an index file says, least recently used first; nothing is changed, and no lock is needed.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or of another version, OSError if it
    cannot be read now.
    """
    journal = path.with_name(path.name + "-journal")
    try:
        return _read_only(path)
    except sqlite3.Error as exc:
        if not path.exists():
            raise FileNotFoundError(f"there is no cache index {path}") from None
        if not journal.exists() or not journal.stat().st_size:
            raise _unreadable(path, exc) from exc
    # A killed process left half a transaction. To take it back changes the file, so that is done to a copy.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        shutil.copyfile(path, copy)
        shutil.copyfile(journal, copy.with_name(journal.name))
        try:
            return _read_only(copy, "rw")
        except sqlite3.Error as exc:
            raise _unreadable(path, exc) from exc


def _read_only(path: Path, mode: str = "ro") -> list[Entry]:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if not version and not db.execute("SELECT * FROM sqlite_schema").fetchall():
            return []
        if version not in (2 * _SCHEMA, 2 * _SCHEMA + 1):
            raise ValueError(f"the cache index {path} has another version: {version // 2}")
        # All at once: the process that has the folder open cannot commit while this reads.
        rows = db.execute(f"SELECT {_NAMES} FROM blocks ORDER BY used").fetchall()
    return [_entry(row) for row in rows]


def _unreadable(path: Path, error: sqlite3.Error) -> Exception:
    if is_lost(error):
        return ValueError(f"the cache index {path} is damaged: {error}")
    return OSError(f"the cache index {path} cannot be read: {error}")


def is_lost(error: sqlite3.Error) -> bool:
    """Whether the index has to be made anew, not just tried again later."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code == sqlite3.SQLITE_READONLY_DBMOVED or code & 0xFF in _LOST


def _row(entry: Entry) -> Row:
    m = entry.meta
    cuts = ",".join(map(str, m.cuts))
    sizes = (m.token_count, m.start, m.exact_tokens)
    return (
        entry.folder, m.block_hash, m.parent, m.tokens, *sizes, cuts, m.numerics, m.file_size, entry.used, entry.stale
    )  # fmt: skip


def _entry(row: tuple[Any, ...]) -> Entry:
    """Raises ValueError for a row that `_row` cannot have made."""
    if tuple(map(type, row)) != _TYPES or not 1 <= len(row[1]) <= MAX_HASH_BYTES or min(row[4:7] + row[9:12]) < 0:
        raise ValueError("a row is damaged")
    folder, block_hash, parent, tokens, token_count, start, exact, cuts, numerics, size, used, stale = row
    meta = BlockMeta(
        block_hash=block_hash, parent=parent, tokens=tokens, token_count=token_count, start=start, exact_tokens=exact,
        cuts=tuple(map(int, cuts.split(","))) if cuts else (), numerics=numerics, file_size=size,
    )  # fmt: skip
    return Entry(check_folder(folder), meta, used, bool(stale))
