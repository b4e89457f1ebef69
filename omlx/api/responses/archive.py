"""The copy of stored responses on disk, by which they survive a restart: an SQLite file beside the SSD cache.

SQLite because two servers may have the folder during a rolling restart, and because a response is deleted at once.
"""

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from omlx.errors import OmlxError, Overloaded
from omlx.storage.folder import set_aside

logger = logging.getLogger("omlx.responses")
T = TypeVar("T")

ARCHIVE_NAME = "responses.sqlite"
_COLUMNS = "name TEXT PRIMARY KEY, owner BLOB, previous TEXT, items TEXT, nbytes INTEGER, used INTEGER, data BLOB"
_OURS = 0x6F6D6C78  # "omlx", SQLite's application id
_MOST_QUEUED = 256  # responses that wait to be written; more are in memory only
_RETRY_S = 30.0
_DELETED_WITHIN_S = 10.0
# The file is another program's, or damaged.
_NOT_OURS = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class Row(NamedTuple):
    """A response without its content. `used_ns`: nanoseconds since the epoch."""

    name: str
    owner: bytes
    previous: str | None
    items: tuple[str, ...]
    nbytes: int
    used_ns: int


class Archive:
    """The file `path`; for any thread. What fails is logged once, and tried again with the next write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._lock = Lock()  # of the connection
        self._writer = ThreadPoolExecutor(1, "omlx-responses")
        self._used: dict[str, int] = {}
        self._coming: set[str] = set()  # to be written soon
        self._going: set[str] = set()  # to be deleted soon
        self._next_try = 0.0
        self._failed = False

    # ---- called by whoever has a response

    def rows(self) -> list[Row]:
        """All of them, least recently used first. Blocks."""
        found = self._submit(_rows).result()
        return found or []

    def put(self, row: Row, data: bytes) -> None:
        """Writes a response soon."""
        if len(self._coming) < _MOST_QUEUED:
            self._coming.add(row.name)
            self._submit(lambda db: _put(db, row, data)).add_done_callback(lambda _: self._coming.discard(row.name))

    def touch(self, name: str, used_ns: int) -> None:
        """Writes down with the next response when this one was used."""
        self._used[name] = used_ns

    def read(self, name: str) -> bytes | None:
        """The content of a response; None if it is not there, or cannot be read."""
        return self._guarded(lambda db: _read(db, name))

    def find(self, name: str) -> Row | None:
        """A response that another server wrote meanwhile."""
        if name in self._going:
            return None
        return self._guarded(lambda db: next(iter(_rows(db, name)), None))

    def discard(self, name: str) -> None:
        """Deletes a response soon."""
        self._going.add(name)
        self._submit(lambda db: _delete(db, name)).add_done_callback(lambda _: self._going.discard(name))

    def delete(self, name: str) -> None:
        """Deletes a response now. Raises Overloaded if that cannot be done."""
        try:
            done = self._submit(lambda db: _delete(db, name)).result(_DELETED_WITHIN_S)
        except TimeoutError:
            done = None
        if not done:
            raise Overloaded("the response could not be deleted on disk; try again later")

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        self._submit(lambda db: None)
        self._writer.shutdown(wait=True)
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    # ---- the file

    def _submit(self, work: Callable[[sqlite3.Connection], T]) -> "Future[T | None]":
        return self._writer.submit(self._guarded, work)

    def _guarded(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns, None if it fails."""
        with self._lock:
            try:
                db = self._opened()
                if db is None:
                    return None
                with db:
                    result = work(db)
                    for name in [name for name in list(self._used) if name not in self._coming]:
                        used_ns = self._used.pop(name)
                        db.execute("UPDATE responses SET used = ? WHERE name = ?", (used_ns, name))
            except (sqlite3.Error, OSError) as error:
                self._fail(error)
                return None
            self._failed = False
            return result

    def _opened(self) -> sqlite3.Connection | None:
        if self._db is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + _RETRY_S
            try:
                self._db = self._open()
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _NOT_OURS:
                    raise
                logger.warning("%s cannot be used (%s): renamed to %s", self._path, error, set_aside(self._path))
                self._db = self._open()
        return self._db

    def _open(self) -> sqlite3.Connection:
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # nobody else's to read
        db = sqlite3.connect(self._path, timeout=5.0, check_same_thread=False)
        try:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and db.execute("PRAGMA application_id").fetchone()[0] != _OURS:
                error = sqlite3.DatabaseError("it is another program's database")
                error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
                raise error
            with db:
                db.execute(f"PRAGMA application_id = {_OURS}")
                db.execute(f"CREATE TABLE IF NOT EXISTS responses ({_COLUMNS}) WITHOUT ROWID")
        except BaseException:
            db.close()
            raise
        return db

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            logger.warning(
                "stored responses cannot be written to disk, and are kept in memory only: %s (%s)", self._path, error
            )
        self._failed = True
        if self._db is not None:
            self._db.close()
            self._db = None


def _rows(db: sqlite3.Connection, name: str | None = None) -> list[Row]:
    query = "SELECT name, owner, previous, items, nbytes, used FROM responses"
    found = db.execute(f"{query} ORDER BY used") if name is None else db.execute(f"{query} WHERE name = ?", (name,))
    now_ns = time.time_ns()
    rows: list[Row] = []
    for one, owner, previous, items, nbytes, used in found:
        try:
            rows.append(Row(one, owner, previous, tuple(json.loads(items)), int(nbytes), min(int(used), now_ns)))
        except (TypeError, ValueError):  # damaged: costs this response alone
            continue
    return rows


def _put(db: sqlite3.Connection, row: Row, data: bytes) -> bool:
    values = (row.name, row.owner, row.previous, json.dumps(row.items), row.nbytes, row.used_ns, data)
    db.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    return True


def _read(db: sqlite3.Connection, name: str) -> bytes | None:
    found = db.execute("SELECT data FROM responses WHERE name = ?", (name,)).fetchone()
    return bytes(found[0]) if found is not None and isinstance(found[0], bytes) else None


def _delete(db: sqlite3.Connection, name: str) -> bool:
    db.execute("DELETE FROM responses WHERE name = ?", (name,))
    return True


def clear_archive(path: Path, before_ns: int | None) -> int:
    """Deletes the responses in a file that no server works on, or those last used before then; says how many.

    Raises OmlxError.
    """
    if not os.path.isfile(path):
        return 0
    db = sqlite3.connect(path, timeout=5.0)
    try:
        if db.execute("PRAGMA application_id").fetchone()[0] != _OURS:
            return 0
        db.execute("PRAGMA secure_delete = ON")
        with db:
            gone = db.execute("DELETE FROM responses WHERE ? IS NULL OR used < ?", (before_ns, before_ns))
            return gone.rowcount
    except sqlite3.Error as error:
        raise OmlxError(f"the stored responses in {path} cannot be deleted: {error}") from error
    finally:
        db.close()
