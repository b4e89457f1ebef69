"""The block table's copy on disk: SQLite while the store is open, and a snapshot beside it between two runs."""

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

from omlx.storage.block_table import Change, Entry, Packed, Row, entry_of, pack_rows
from omlx.storage.bookkeeping import Key
from omlx.storage.folder import SNAPSHOT_NAME, remove, set_aside
from omlx.storage.snapshot import is_snapshot, read_snapshot, write_snapshot
from omlx.storage.tensor_file import opened, temporary_path

log = logging.getLogger(__name__)

_SCHEMA = 2
_COLUMNS = (
    "folder TEXT, hash BLOB, parent BLOB, token_count INTEGER, start INTEGER, exact_tokens INTEGER, "
    "cuts TEXT, numerics TEXT, file_size INTEGER, used INTEGER, stale INTEGER"
)
_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 1 << 16  # SQLite's largest page
_NAMES = ", ".join(column.split()[0] for column in _COLUMNS.split(", "))
_UPSERT = f"INSERT OR REPLACE INTO blocks ({_NAMES}) VALUES ({', '.join('?' * len(_NAMES.split(', ')))})"
# The file holds something else than we wrote, or is not in its place; other errors may pass (a full disk, say).
_LOST = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH)


class IndexFile:
    """The table's copy on disk. Used by one thread at a time.

    Small transactions and a rollback journal that is cut to nothing after each: what lies on disk
    stays bounded, and a killed process leaves a file that SQLite repairs. No fsync: after a power
    loss the file may be broken, and is then built again from the blocks' headers.

    The snapshot is written by a clean close and taken away by the next open, which reads it instead of a
    million rows. SQLite holds its checksum, so one that does not belong to its rows is never used.
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file; makes it anew if it is damaged. Raises OSError if neither works.

        `clean` is True when the last process closed it: then its rows are all there is. `damaged` is
        True when it was made anew, `snapshot_damaged` when `load` found the snapshot to be.
        """
        self.path = path
        self.clean = self.damaged = self.snapshot_damaged = False
        self._snapshot = snapshot_path(path)
        try:
            try:
                self._db = self._open()
            except _ForeignFile as exc:
                log.warning("%s: renamed to %s; the cache makes an index of its own", exc, set_aside(path))
                self._db = self._open()
            except (sqlite3.Error, ValueError, PermissionError, IsADirectoryError) as exc:
                if isinstance(exc, sqlite3.Error) and not is_lost(exc):
                    raise
                self._say_damaged(exc)
                self.damaged = True
                self._remove()
                self._db = self._open()
        except sqlite3.Error as exc:
            raise OSError(f"the cache index {path} cannot be used: {exc}") from exc

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            _refuse_foreign(self.path, db)
            db.execute("PRAGMA auto_vacuum = FULL")  # it shrinks with the cache
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA synchronous = OFF")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, 2 * _SCHEMA, 2 * _SCHEMA + 1):
                raise ValueError(f"version {version // 2}")
            db.execute(f"CREATE TABLE IF NOT EXISTS blocks ({_COLUMNS}, PRIMARY KEY (folder, hash)) WITHOUT ROWID")
            db.execute("CREATE TABLE IF NOT EXISTS snapshot (checksum BLOB)")
            self._checksum = [row[0] for row in db.execute("SELECT checksum FROM snapshot")]
            db.execute("DELETE FROM snapshot")
            db.execute(f"PRAGMA user_version = {2 * _SCHEMA}")
        except BaseException:
            db.close()
            raise
        self.clean = version == 2 * _SCHEMA + 1
        return db

    def _say_damaged(self, error: Exception) -> None:
        log.warning("the cache index %s is damaged (%s): it is built again from the blocks' headers", self.path, error)

    def load(self, *, as_left: bool = True) -> Packed:
        """All that the last process told, in order of use. Fast if it closed; to be called once, after opening.

        `as_left`: nobody has changed the file since then; else the snapshot is not of this file.

        Raises OSError if the file is damaged and cannot be made anew.
        """
        try:
            if self.clean and as_left and self._checksum:
                try:
                    return read_snapshot(self._snapshot, self._checksum[0])
                except OSError as exc:
                    log.info("the index snapshot %s is not used: %s", self._snapshot, exc)
                except ValueError as exc:
                    self.snapshot_damaged = True
                    log.warning("the index snapshot %s is damaged (%s): SQLite is read instead", self._snapshot, exc)
            return pack_rows(self._db.execute(f"SELECT {_NAMES} FROM blocks"))
        except (sqlite3.Error, ValueError) as exc:
            if isinstance(exc, sqlite3.Error) and not is_lost(exc):
                raise OSError(f"the cache index {self.path} cannot be read: {exc}") from exc
            self._say_damaged(exc)
            self.make_again()
            return Packed(0, [], [], [])
        finally:
            self._drop_snapshot()

    def _drop_snapshot(self) -> None:
        self._set_aside_foreign_snapshot()
        for path in (self._snapshot, temporary_path(self._snapshot)):
            with contextlib.suppress(OSError):
                remove(path)

    def _set_aside_foreign_snapshot(self) -> None:
        """A file of another program is renamed: only what begins as our snapshots do is deleted."""
        with contextlib.suppress(OSError):
            if self._snapshot.stat().st_size and not is_snapshot(self._snapshot):
                aside = set_aside(self._snapshot)
                log.warning("%s is no index snapshot: renamed to %s", self._snapshot, aside)

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

    def set_future_uses_to(self, now_ns: int) -> None:
        """Blocks whose last use lies in the future (the clock was set back) were used now. Raises sqlite3.Error."""
        with self._db:
            self._db.execute("UPDATE blocks SET used = ? WHERE used > ?", (now_ns, now_ns))

    def make_again(self) -> None:
        """Starts over with an empty file, because this one is damaged or another's. Raises OSError."""
        self._db.close()
        self.clean, self.damaged = False, True
        try:
            self._remove()
            self._db = self._open()
        except sqlite3.Error as exc:
            raise OSError(f"the cache index {self.path} cannot be made again: {exc}") from exc

    def rows(self) -> dict[Key, Row]:
        """What the file holds. Raises sqlite3.Error."""
        return {(row[0], row[1]): row for row in self._db.execute(f"SELECT {_NAMES} FROM blocks")}

    def nbytes(self) -> int:
        """Bytes of the file, its journal and its snapshot."""
        total = 0
        for path in (self.path, self._journal, self._snapshot):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        return total

    def close(self, packed: Packed | None) -> None:
        """`packed`, if there is one, promises that it holds all that SQLite was told, and that this is all there is.

        Raises nothing: without the promise the next start looks.
        """
        try:
            if packed is not None:
                self._promise(packed)
            self._db.close()
        except sqlite3.Error as exc:
            log.warning("the cache index %s could not be closed: %s", self.path, exc)

    def close_as_found(self) -> None:
        """As it was before it was opened, but for what was saved since."""
        self._drop_snapshot()
        with contextlib.suppress(sqlite3.Error):
            if self.clean:
                self._db.execute(f"PRAGMA user_version = {2 * _SCHEMA + 1}")
        self.close(None)

    def _promise(self, packed: Packed) -> None:
        try:
            checksum = write_snapshot(self._snapshot, packed)
        except OSError as exc:
            log.info("no index snapshot was written (%s): the next start reads SQLite instead", exc)
        else:
            self._db.execute("INSERT INTO snapshot VALUES (?)", (checksum,))
        self._db.execute(f"PRAGMA user_version = {2 * _SCHEMA + 1}")

    @property
    def _journal(self) -> Path:
        return self.path.with_name(self.path.name + "-journal")

    def _remove(self) -> None:
        self._set_aside_foreign_snapshot()
        with contextlib.suppress(OSError):
            if not _may_be_ours(self.path):
                log.warning("%s is no cache index: renamed to %s", self.path, set_aside(self.path))
        remove(self.path)
        remove(self._journal)
        remove(self._snapshot)


def _may_be_ours(path: Path) -> bool:
    """Whether a file that SQLite refuses is a damaged index, not something that a user keeps under this name.

    An index names its columns in the first page; an empty or cut-off file holds nothing to lose. Raises OSError.
    """
    if os.path.islink(path):
        return False
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        head = file.read(_HEAD_BYTES)
    return not head.strip(b"\0") or _MAGIC.startswith(head) or _COLUMNS.encode() in head


class _ForeignFile(Exception):
    """A database that somebody else made under our name; nothing in it may be changed."""


def _refuse_foreign(path: Path, db: sqlite3.Connection) -> None:
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    columns = {row[1] for row in db.execute("PRAGMA table_info(blocks)")}
    if set(tables) - {"blocks", "snapshot"} or (tables and not {"folder", "hash"} <= columns):
        raise _ForeignFile(f"{path} is a database of another program")


def snapshot_path(index: Path) -> Path:
    return index.with_name(SNAPSHOT_NAME)


def read_index(path: Path) -> list[Entry]:
    """What an index file says, least recently used first; nothing is changed, and no lock is needed.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or of another version, OSError if it
    cannot be read now.
    """
    journal = path.with_name(path.name + "-journal")
    try:
        return _read_only(path)
    except sqlite3.Error as exc:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no cache index {path}") from None
        if not os.path.exists(journal) or not journal.stat().st_size:
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
    return [entry_of(row) for row in rows]


def _unreadable(path: Path, error: sqlite3.Error) -> Exception:
    if is_lost(error):
        return ValueError(f"the cache index {path} is damaged: {error}")
    return OSError(f"the cache index {path} cannot be read: {error}")


def is_lost(error: sqlite3.Error) -> bool:
    """Whether the index has to be made anew, not just tried again later."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    # A file that the system lets us write, and SQLite calls read-only, has a damaged header.
    return code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_READONLY_DBMOVED) or code & 0xFF in _LOST
