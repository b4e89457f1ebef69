"""Vision features in files: one `FeatureFolder` per folder and process, with one writer thread.

What waits to be written is readable at once, by everybody who shares the folder. `open_features` hands out
the folder that there is.
"""

import atexit
import contextlib
import logging
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import psutil

from omlx.sizes import format_size
from omlx.storage.block_ledger import RESERVE_BYTES, RESERVE_SHARE
from omlx.storage.expiry import Expiry
from omlx.storage.feature_file import (
    SUFFIX,
    FeatureKey,
    FeatureLabel,
    feature_file_size,
    feature_name,
    read_feature_file,
    read_label,
    write_feature_file,
)
from omlx.storage.folder import make_folder, remove
from omlx.storage.open_stores import count_side_files, reserve_side_files, side_room
from omlx.storage.tensor_file import TEMP_PREFIX, TEMP_SUFFIX, BlockBuffer, DamagedBlock, TensorSpec, UnknownFormat
from omlx.storage.troubles import Troubles
from omlx.storage.write_queue import Task, WriteQueue

log = logging.getLogger(__name__)

_OPEN_WAIT_S = 2.0  # a start waits this long for the list of files, then goes on without
_RETRY_S = 1.0  # after a failed write
_MOST_EVICTED = 4096
_TOUCH_WITHIN_S = 1.0  # how long only memory may know of a change in the order of use
_EXIT_TIMEOUT_S = 30.0
_TEMP_NAME = re.compile(rf"{re.escape(TEMP_PREFIX)}(\d+){re.escape(TEMP_SUFFIX)}")

PutResult = Literal["queued", "later", "declined"]
Place = Callable[[TensorSpec], memoryview]


class FeatureUser(Protocol):
    """Somebody who keeps features of a folder in RAM."""

    def forget(self, key: FeatureKey) -> None:
        """Drops what RAM has of them: another user has put new ones."""


@dataclass(slots=True)
class FeatureCounts:
    """What happened to the files of a folder since it was opened.

    `damaged`: files that were not what they should be. `declined`: features too large for the limit.
    `dropped_writes`: features that found no room in the write queue; they are queued when next used.
    """

    evictions: int = 0
    expired: int = 0
    damaged: int = 0
    read_errors: int = 0
    write_errors: int = 0
    declined: int = 0
    dropped_writes: int = 0

    @property
    def errors(self) -> int:
        return self.damaged + self.read_errors + self.write_errors


@dataclass(slots=True, eq=False)
class Entry:
    """One image's features: `file_bytes` on disk now, and what is still to be written.

    A `gone` entry is not read any more; its file is still to be removed.
    """

    key: FeatureKey
    file_bytes: int = 0
    pending: BlockBuffer | None = None
    gone: bool = False


class Found(NamedTuple):
    """What `fetch` found: the features themselves if they wait for their write, else they went into the place."""

    entry: Entry
    waiting: BlockBuffer | None


class FeatureFolder:
    """Features under `path`, in files of at most `max_bytes` in total, least recently used first to go; thread-safe.

    If the folder lies under the root of a `DiskStore` in this process, its files are part of that root's
    byte count and limit. A folder that cannot be used is no error: the log says so once, and it is tried again.
    Other processes may use the folder as well: their files are found when they are asked for.
    """

    def __init__(
        self, path: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None, ttl_s: float = 0
    ) -> None:
        self.path = path
        self.counts = FeatureCounts()
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[FeatureKey, Entry] = OrderedDict()
        self._evicted: dict[FeatureKey, None] = {}  # the last ones that made room, oldest first
        self._bytes = 0  # of the files that are there
        self._used: dict[FeatureKey, int] = {}  # last uses that the files' times do not show yet
        self._users: weakref.WeakSet[FeatureUser] = weakref.WeakSet()
        self._unsure = True  # whether the files have to be listed before the next write
        self._closed = False
        self._retry_at = 0.0
        self._troubles = Troubles(f"features folder {path}", "features stay in RAM")
        self._said_declined = False
        self._queue = WriteQueue("omlx-features", queue_bytes, self._work, self._rest, lambda: None)
        self._expiry = Expiry(ttl_s, self._queue.wake_in)
        listed = threading.Event()
        self._queue.append(("call", lambda: self._start(listed)))
        self._queue.start()
        listed.wait(_OPEN_WAIT_S)

    def _start(self, listed: threading.Event) -> None:
        try:
            self._rest()
        finally:
            listed.set()

    # ---- keep

    def put(self, key: FeatureKey, features: BlockBuffer) -> PutResult:
        """Queues the file of a block of one tensor; it is readable from now on, by every user. Never waits.

        "later": the queue is full, or the folder closed. "declined": larger than the limit. What was there before
        is not read any more in any case.
        """
        size = feature_file_size(key, features.specs[0])
        with self._lock:
            self._evicted.pop(key, None)
            if self._closed:
                return "later"
            old = self._entries.get(key)
            if size <= self._max_bytes and self._queue.has_room(size):
                self._entries[key] = entry = Entry(key, old.file_bytes if old else 0, features)
                self._entries.move_to_end(key)
                self._queue.append(("write", entry), size)
                return "queued"
            if old is not None:
                self._drop(old)
            if size <= self._max_bytes:
                self.counts.dropped_writes += 1
                return "later"
        self._decline(size)
        return "declined"

    def announce(self, key: FeatureKey, user: FeatureUser) -> None:
        """Has all other users forget what they hold of this key. To be called without a lock, after `put`."""
        with self._lock:
            others = [other for other in self._users if other is not user]
        for other in others:
            other.forget(key)

    def add_user(self, user: FeatureUser) -> None:
        """Users are held weakly."""
        with self._lock:
            self._users.add(user)

    def touch(self, key: FeatureKey) -> bool:
        """Marks features as used. False if they have no file and none is queued: they should be put again."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.gone:
                return self._closed or time.monotonic() < self._retry_at
            self._mark_used(entry)
        self._queue.wake_in(_TOUCH_WITHIN_S)
        return True

    def lacks(self, key: FeatureKey) -> bool:
        """Whether there should be a file: there is none, none is queued, and it did not just have to make room."""
        with self._lock:
            entry = self._entries.get(key)
            return (entry is None or entry.gone) and key not in self._evicted

    def _mark_used(self, entry: Entry) -> None:
        self._entries.move_to_end(entry.key)
        if not self._closed:
            self._used[entry.key] = time.time_ns()

    def _drop(self, entry: Entry) -> None:
        entry.gone, entry.pending = True, None
        self._entries.move_to_end(entry.key, last=False)
        if not self._closed:
            self._queue.append(("remove", entry.key))

    def _decline(self, size: int) -> None:
        with self._lock:
            self.counts.declined += 1
            said, self._said_declined = self._said_declined, True
        if not said:
            log.warning("vision features of %s do not fit into %s: such are not kept", format_size(size), self.path)

    # ---- read

    def fetch(self, key: FeatureKey, place: Place) -> Found | None:
        """The features: those that wait for their write, or read from the file into the memory that `place` has.

        None if there are none. A file that is damaged or gone is a miss: it is counted and removed.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.pending is not None:
                self._mark_used(entry)
                return Found(entry, entry.pending)
            if entry is not None and entry.gone:
                return None
        try:
            size = read_feature_file(self._path(key), key, place)
        except FileNotFoundError:
            self._forget(key, entry)
        except UnknownFormat:
            return None  # it counts, and is the first to go
        except DamagedBlock as exc:
            self._damaged(key, entry, exc)
        except OSError as exc:
            with self._lock:
                self.counts.read_errors += 1
            self._troubles.note("read", exc)
        else:
            self._troubles.mended("read")
            return Found(self._seen(key, entry, size), None)
        return None

    def in_force(self, entry: Entry) -> bool:
        """Whether this very entry counts: not evicted or replaced since it was found."""
        with self._lock:
            return self._entries.get(entry.key) is entry and not entry.gone

    def _seen(self, key: FeatureKey, entry: Entry | None, size: int) -> Entry:
        """Marks a file as used that was just read; one that another process wrote gets an entry."""
        with self._lock:
            if entry is None:
                entry = Entry(key, size)
                if self._entries.setdefault(key, entry) is entry:
                    self._bytes += size
            if self._entries.get(key) is entry:
                self._mark_used(entry)
        self._queue.wake_in(_TOUCH_WITHIN_S)
        return entry

    def _forget(self, key: FeatureKey, entry: Entry | None) -> None:
        """Somebody else took the file away."""
        with self._lock:
            if entry is not None and self._entries.get(key) is entry and not entry.gone:
                self._bytes -= entry.file_bytes
                del self._entries[key]

    def _damaged(self, key: FeatureKey, entry: Entry | None, error: DamagedBlock) -> None:
        with self._lock:
            if self._entries.get(key) is not entry:
                return  # written again meanwhile
            self.counts.damaged += 1
            if entry is None:
                entry = self._entries[key] = Entry(key)
            self._drop(entry)
        log.warning("features file %s is damaged (%s): it is removed", self._path(key), error)

    def _path(self, key: FeatureKey) -> Path:
        return self.path / feature_name(key)

    # ---- the writer thread: it alone changes files

    def _work(self, task: Task) -> None:
        kind, subject = task
        if kind == "write":
            self._write(subject)
        elif kind == "remove":
            try:
                self._remove(subject)
            except OSError as exc:
                self._troubles.note("write", exc)
        else:
            subject()

    def _write(self, entry: Entry) -> None:
        with self._lock:
            features = entry.pending if self._entries.get(entry.key) is entry else None
        if features is None:
            return  # replaced before its turn
        size = feature_file_size(entry.key, features.specs[0])
        try:
            written = self._write_file(entry.key, features, size)
        except OSError as exc:
            self.counts.write_errors += 1
            self._unsure = True
            self._give_up(entry)
            self._troubles.note("write", exc)
            return
        if written:
            self._written(entry, size)
            self._troubles.mended("write")
        else:
            self._give_up(entry)
            self._decline(size)

    def _write_file(self, key: FeatureKey, features: BlockBuffer, size: int) -> bool:
        """False if there is no room for it."""
        if self._unsure or not self.path.is_dir():
            self._list()
        if not self._make_room(key, size):
            return False
        path, temporary = self._path(key), self.path / f"{TEMP_PREFIX}{os.getpid()}{TEMP_SUFFIX}"
        try:
            write_feature_file(path, temporary, key, features)
        except IsADirectoryError:
            remove(path)
            write_feature_file(path, temporary, key, features)
        return True

    def _written(self, entry: Entry, size: int) -> None:
        with self._lock:
            now = self._entries[entry.key]  # only this thread takes away an entry that waits for its write
            self._bytes += size - now.file_bytes
            now.file_bytes = size
            entry.pending = None

    def _give_up(self, entry: Entry) -> None:
        """An entry whose file could not be written goes, and an older file of its name with it."""
        with self._lock:
            self._retry_at = time.monotonic() + _RETRY_S
            if self._entries.get(entry.key) is not entry:
                return
            self._drop(entry)

    def _remove(self, key: FeatureKey) -> None:
        """Removes the file of an entry that is gone or will be written again. Raises OSError."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or (not entry.gone and entry.pending is None):
                return
        remove(self._path(key))
        with self._lock:
            entry = self._entries[key]
            self._bytes -= entry.file_bytes
            entry.file_bytes = 0
            if entry.gone:
                del self._entries[key]

    def _make_room(self, key: FeatureKey, size: int) -> bool:
        """Evicts features, and blocks of the root, until the file fits under every limit. False if it cannot."""
        limit = self._limit()
        if size > limit:
            return False
        self._shrink(limit - size, key)
        with self._lock:
            total = self._bytes - self._entries[key].file_bytes + size
        return total <= limit and reserve_side_files(self.path, total)

    def _shrink(self, allowed: int, besides: FeatureKey | None = None) -> None:
        while (victim := self._victim(allowed, besides)) is not None:
            self._remove(victim.key)
            self.counts.evictions += victim.gone

    def _note_evicted(self, key: FeatureKey) -> None:
        self._evicted[key] = None
        while len(self._evicted) > _MOST_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def _victim(self, allowed: int, besides: FeatureKey | None) -> Entry | None:
        """The features whose file goes next, marked as gone unless new ones wait; None if no more have to go."""
        with self._lock:
            own = self._entries.get(besides) if besides else None
            if self._bytes - (own.file_bytes if own else 0) <= allowed:
                return None
            victim = next((e for e in self._entries.values() if e.file_bytes and e.key != besides), None)
            if victim is not None and victim.pending is None and not victim.gone:
                victim.gone = True
                self._note_evicted(victim.key)
            return victim

    def _limit(self) -> int:
        """What the files may take up: the own limit, what the disk has room for, what the root leaves."""
        disk = os.statvfs(self.path)
        reserve = self._reserve_bytes
        if reserve is None:
            reserve = min(RESERVE_BYTES, int(disk.f_blocks * disk.f_frsize * RESERVE_SHARE))
        room = disk.f_bavail * disk.f_frsize - reserve + self._bytes
        root = side_room(self.path)
        return min(self._max_bytes, room) if root is None else min(self._max_bytes, room, root)

    def _rest(self) -> None:
        """Nothing is left to do for now: order of use to the files, limits that others changed."""
        try:
            if self._unsure or not self.path.is_dir():
                self._list()
            self._save_order()
            self._expire()
            self._shrink(self._limit())
        except OSError as exc:
            self._unsure = True
            self._troubles.note("write", exc)
        count_side_files(self.path, self._bytes)

    def _expire(self) -> None:
        """Removes features that were not used for too long, if it is time to look for that."""
        before_ns = self._expiry.due()
        while before_ns is not None and (entry := self._oldest_before(before_ns)) is not None:
            self._remove(entry.key)
            self.counts.expired += 1
            for user in list(self._users):
                user.forget(entry.key)

    def _oldest_before(self, before_ns: int) -> Entry | None:
        """The features used longest ago, marked as gone, if that was before then. Their file's time says it."""
        with self._lock:
            entry = next((e for e in self._entries.values() if e.file_bytes and not e.gone), None)
            if entry is None or entry.pending is not None or entry.key in self._used:
                return None
        with contextlib.suppress(FileNotFoundError):
            if self._path(entry.key).stat().st_mtime_ns >= before_ns:
                return None
        with self._lock:
            if self._entries.get(entry.key) is not entry or entry.key in self._used:
                return None
            entry.gone = True
            return entry

    def _save_order(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        for key, ns in used.items():
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(ns, ns))

    def _list(self) -> None:
        """Makes the entries what the folder holds; those that wait for their write stay. Raises OSError."""
        make_folder(self.path)
        found = sorted(self._files(), key=lambda file: (file[0].known, file[1].st_mtime_ns))
        with self._lock:
            old, self._entries = self._entries, OrderedDict()
            for (key, _), stat in found:
                self._entries[key] = entry = old.pop(key, Entry(key))
                entry.file_bytes = stat.st_size
            for key, entry in old.items():
                if entry.pending is not None:
                    entry.file_bytes = 0
                    self._entries[key] = entry
            self._bytes = sum(entry.file_bytes for entry in self._entries.values())
        self._unsure = False

    def _files(self) -> Iterator[tuple[FeatureLabel, os.stat_result]]:
        """Every whole features file, of any version. Removes what a process that is no more left half written."""
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            path = self.path / name
            with contextlib.suppress(OSError):
                if name.endswith(SUFFIX):
                    label = read_label(path)
                    if label is not None and feature_name(label.key) == name:
                        yield label, path.stat()
                elif (temporary := _TEMP_NAME.fullmatch(name)) and not _is_written(path, int(temporary[1])):
                    remove(path)

    # ---- the whole folder

    @property
    def usage(self) -> tuple[int, int]:
        """Files and their bytes, those included that are queued."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.file_bytes or entry.pending is not None]
            waiting = sum(feature_file_size(e.key, e.pending.specs[0]) for e in entries if e.pending is not None)
            return len(entries), waiting + sum(entry.file_bytes for entry in entries if entry.pending is None)

    def lower_limit(self, max_bytes: int, ttl_s: float = 0) -> None:
        """Evicts what no longer fits. A limit is never raised: that of every user holds."""
        with self._lock:
            self._max_bytes = min(self._max_bytes, max_bytes)
            self._expiry.lower(ttl_s)
        self._queue.wake_in(0)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything queued so far is on disk. False if it took too long or could not be written."""
        errors = self.counts.write_errors
        return self._queue.call(self._rest, timeout_s) and self.counts.write_errors == errors

    def check(self, timeout_s: float = 60.0) -> list[str]:
        """Contradictions between memory and files, in both directions, and damaged files; for a folder at rest."""
        found = [] if self.flush(timeout_s) else ["not everything could be written"]
        with self._lock:
            sizes = {key: entry.file_bytes for key, entry in self._entries.items() if entry.file_bytes}
        there = {label.key: stat.st_size for label, stat in self._files()}
        for key in sizes.keys() | there.keys():
            if sizes.get(key) != there.get(key):
                found.append(f"{self._path(key)} has {there.get(key, 'no')} bytes, the index says {sizes.get(key)}")
        for key in there:
            try:
                read_feature_file(self._path(key), key, lambda spec: memoryview(bytearray(spec.nbytes)))
            except UnknownFormat:
                continue
            except (DamagedBlock, OSError) as exc:
                found.append(f"{self._path(key)}: {exc}")
        return found

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued. False if that took too long: the rest is lost."""
        if self._closed:
            return True
        deadline = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        with self._lock:
            self._closed = True
        return self._queue.close(max(0.1, deadline - time.monotonic())) and flushed

    def leave_to_parent(self) -> None:
        """In a forked child, which has no writer thread: what is there can be read, nothing is written."""
        self._lock = threading.Lock()  # another thread may have held it
        self._closed = True


def _is_written(path: Path, pid: int) -> bool:
    """Whether the process that a temporary file is named after still writes it. Another one may have its number by now.

    Our own temporary file is one of a process before us.
    """
    if pid == os.getpid():
        return False
    try:
        return psutil.Process(pid).create_time() <= path.stat().st_mtime + 1
    except psutil.AccessDenied:
        return True
    except (psutil.Error, OverflowError):
        return False


# ---- one per folder and process

_open_folders: dict[Path, tuple[FeatureFolder, int]] = {}
_registry_lock = threading.Lock()


def open_features(
    path: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None = None, ttl_s: float = 0
) -> FeatureFolder:
    """The folder at this path, opened by the first of its users; the lowest limits hold."""
    path = Path(os.path.realpath(path))
    with _registry_lock:
        folder, users = _open_folders.get(path, (None, 0))
        if folder is None:
            folder = FeatureFolder(path, max_bytes, queue_bytes, reserve_bytes, ttl_s)
        else:
            folder.lower_limit(max_bytes, ttl_s)
        _open_folders[path] = (folder, users + 1)
        return folder


def release_features(folder: FeatureFolder, timeout_s: float) -> bool:
    """Ends one use: waits until all is written. The last user closes the folder. False if that took too long."""
    with _registry_lock:
        registered, users = _open_folders.get(folder.path, (None, 0))
        if registered is not folder:
            return False  # closed already, or a forked child that let go of it
        if users == 1:
            del _open_folders[folder.path]
            return folder.close(timeout_s)
        _open_folders[folder.path] = (folder, users - 1)
    return folder.flush(timeout_s)


def _close_all() -> None:
    """An interpreter that just ends loses nothing, and does not wait for ever."""
    for folder, _ in list(_open_folders.values()):
        folder.close(_EXIT_TIMEOUT_S)


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()  # another thread may have held it
    for folder, _ in _open_folders.values():
        folder.leave_to_parent()
    _open_folders.clear()


# Registered after the block store's, so called before it.
atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
