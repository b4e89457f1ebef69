"""Vision features in files: one `FeatureFolder` per folder and process, with one writer thread.

What waits to be written is readable at once, by everybody who shares the folder. `open_features` has those that
are open.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from omlx.sizes import format_size
from omlx.storage.block_ledger import RESERVE_BYTES, RESERVE_SHARE
from omlx.storage.expiry import Expiry
from omlx.storage.feature_file import (
    FeatureKey,
    feature_file_size,
    feature_name,
    read_feature_file,
    write_feature_file,
)
from omlx.storage.feature_index import Entry, FeatureCounts, FeatureIndex, FileUsage, Found
from omlx.storage.feature_listing import abandoned_files, feature_files, temporary_file
from omlx.storage.folder import make_folder, remove
from omlx.storage.open_stores import check_held, count_side_files, reserve_side_files, side_room
from omlx.storage.tensor_file import BlockBuffer, DamagedBlock, TensorSpec, UnknownFormat
from omlx.storage.troubles import Troubles
from omlx.storage.write_queue import Task, WriteQueue

log = logging.getLogger(__name__)

_OPEN_WAIT_S = 2.0  # a start waits this long for the list of files, then goes on without
_RETRY_S = 1.0  # after a failed write
_REST_AGAIN_S = 5.0  # while the folder cannot be used
_MOST_EVICTED = 4096
_TOUCH_WITHIN_S = 1.0  # how long only memory may know of a change in the order of use

PutResult = Literal["queued", "later", "declined"]
Place = Callable[[TensorSpec], memoryview]


class FeatureUser(Protocol):
    """Somebody who keeps features of a folder in RAM."""

    def forget(self, key: FeatureKey) -> None:
        """Drops what RAM has of them: another user has put new ones."""


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
        self._index = FeatureIndex()
        self._evicted: dict[FeatureKey, None] = {}  # the last ones that made room, oldest first
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
            old = self._index.get(key)
            if size <= self._max_bytes and self._queue.has_room(size):
                self._index.put(entry := Entry(key, old.file_bytes if old else 0, features))
                self._mark_used(entry)  # now, not when its turn comes to be written
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
            entry = self._index.get(key)
            if entry is None or entry.gone:
                return self._closed or time.monotonic() < self._retry_at
            self._mark_used(entry)
        self._queue.wake_in(_TOUCH_WITHIN_S)
        return True

    def lacks(self, key: FeatureKey) -> bool:
        """Whether there should be a file: there is none, none is queued, and it did not just have to make room."""
        with self._lock:
            entry = self._index.get(key)
            return (entry is None or entry.gone) and key not in self._evicted

    def _mark_used(self, entry: Entry) -> None:
        self._index.touch(entry)
        if not self._closed:
            self._used[entry.key] = time.time_ns()

    def _drop(self, entry: Entry) -> None:
        with self._index.changing(entry):
            entry.gone, entry.pending = True, None
        self._index.make_first(entry)
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
            entry = self._index.get(key)
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

    def has(self, key: FeatureKey) -> bool:
        """Whether there is a file, or one will be written; changes nothing. The file is not read."""
        with self._lock:
            entry = self._index.get(key)
        return os.path.isfile(self._path(key)) if entry is None else not entry.gone

    def in_force(self, entry: Entry) -> bool:
        """Whether this very entry counts: not evicted or replaced since it was found."""
        with self._lock:
            return self._index.holds(entry) and not entry.gone

    def _seen(self, key: FeatureKey, entry: Entry | None, size: int) -> Entry:
        """Marks a file as used that was just read; one that another process wrote gets an entry."""
        with self._lock:
            if entry is None:
                entry = Entry(key, size)
                if self._index.get(key) is None:
                    self._index.put(entry)
            if self._index.holds(entry):
                self._mark_used(entry)
        self._queue.wake_in(_TOUCH_WITHIN_S)
        return entry

    def _forget(self, key: FeatureKey, entry: Entry | None) -> None:
        """Somebody else took the file away."""
        with self._lock:
            if entry is not None and self._index.holds(entry) and not entry.gone:
                self._index.remove(key)

    def _damaged(self, key: FeatureKey, entry: Entry | None, error: DamagedBlock) -> None:
        with self._lock:
            if self._index.get(key) is not entry:
                return  # written again meanwhile
            self.counts.damaged += 1
            if entry is None:
                self._index.put(entry := Entry(key))
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
            features = entry.pending if self._index.holds(entry) else None
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
        check_held(self.path)
        if self._unsure or not os.path.isdir(self.path):
            self._list()
        if not self._make_room(key, size):
            return False
        path, temporary = self._path(key), temporary_file(self.path)
        try:
            write_feature_file(path, temporary, key, features)
        except IsADirectoryError:
            remove(path)
            write_feature_file(path, temporary, key, features)
        return True

    def _written(self, entry: Entry, size: int) -> None:
        with self._lock:
            now = self._index.get(entry.key)
            assert now is not None  # only this thread takes away an entry that waits for its write
            with self._index.changing(now):
                now.file_bytes = size
                entry.pending = None

    def _give_up(self, entry: Entry) -> None:
        """An entry whose file could not be written goes, and an older file of its name with it."""
        with self._lock:
            self._retry_at = time.monotonic() + _RETRY_S
            if self._index.holds(entry):
                self._drop(entry)

    def _remove(self, key: FeatureKey) -> None:
        """Removes the file of an entry that is gone or will be written again. Raises OSError."""
        with self._lock:
            entry = self._index.get(key)
            if entry is None or (not entry.gone and entry.pending is None):
                return
        check_held(self.path)
        remove(self._path(key))
        with self._lock:
            entry = self._index.get(key)
            assert entry is not None  # as in `_written`
            with self._index.changing(entry):
                entry.file_bytes = 0
            if entry.gone:
                self._index.remove(key)

    def _make_room(self, key: FeatureKey, size: int) -> bool:
        """Evicts features, and blocks of the root, until the file fits under every limit. False if it cannot."""
        limit = self._limit()
        if size > limit:
            return False
        self._shrink(limit - size, key)
        with self._lock:
            own = self._index.get(key)
            total = self._index.file_bytes - (own.file_bytes if own else 0) + size
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
            own = self._index.get(besides) if besides else None
            if self._index.file_bytes - (own.file_bytes if own else 0) <= allowed:
                return None
            victim = next((e for e in self._index if e.file_bytes and e.key != besides), None)
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
        room = disk.f_bavail * disk.f_frsize - reserve + self._index.file_bytes
        root = side_room(self.path)
        return min(self._max_bytes, room) if root is None else min(self._max_bytes, room, root)

    def _rest(self) -> None:
        """Nothing is left to do for now: order of use to the files, limits that others changed."""
        try:
            check_held(self.path)
            if self._unsure or not os.path.isdir(self.path):
                self._list()
            self._save_order()
            self._expire()
            self._shrink(self._limit())
        except OSError as exc:
            self._unsure = True
            self._troubles.note("write", exc)
            self._queue.wake_in(_REST_AGAIN_S)
        count_side_files(self.path, self._index.file_bytes)

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
            entry = next((e for e in self._index if e.file_bytes and not e.gone), None)
            if entry is None or entry.pending is not None or entry.key in self._used:
                return None
        with contextlib.suppress(FileNotFoundError):
            if self._used_ns(entry.key) >= before_ns:
                return None
        with self._lock:
            if not self._index.holds(entry) or entry.key in self._used:
                return None
            entry.gone = True
            return entry

    def _clear(self, wanted: Callable[[FeatureKey], bool], before_ns: int | None, found: dict[FeatureKey, int]) -> None:
        try:
            if self._unsure:
                self._list()
            self._save_order()  # the files' times say then when they were used
            with self._lock:
                candidates = [entry for entry in self._index if wanted(entry.key) and not entry.gone]
        except OSError as exc:
            self._troubles.note("write", exc)
            return
        for entry in candidates:
            if before_ns is None or self._used_before(entry, before_ns):
                self._forsake(entry, found, again=before_ns is None)

    def _used_before(self, entry: Entry, before_ns: int) -> bool:
        with self._lock:
            if entry.pending is not None or entry.key in self._used:
                return False
        with contextlib.suppress(FileNotFoundError):
            return self._used_ns(entry.key) < before_ns
        return True

    def _used_ns(self, key: FeatureKey) -> int:
        """When the file was last used. A time in the future, from before the clock was set back, becomes now."""
        path, now = self._path(key), time.time_ns()
        used = path.stat().st_mtime_ns
        if used > now:
            os.utime(path, ns=(now, now))
        return min(used, now)

    def _forsake(self, entry: Entry, found: dict[FeatureKey, int], *, again: bool) -> None:
        """`again`: also features that were used since they were looked at."""
        with self._lock:
            if not self._index.holds(entry) or (entry.key in self._used and not again):
                return
            nbytes = entry.bytes
            self._drop(entry)
        for user in list(self._users):
            user.forget(entry.key)
        try:
            self._remove(entry.key)
            found[entry.key] = nbytes
        except OSError as exc:
            self._troubles.note("write", exc)

    def _save_order(self) -> None:
        with self._lock:
            entries = [entry for key in self._used if (entry := self._index.get(key)) and entry.pending is None]
            used = {entry.key: self._used[entry.key] for entry in entries}
            self._used = {key: ns for key, ns in self._used.items() if key not in used and self._index.get(key)}
        for key, ns in used.items():
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(ns, ns))

    def _list(self) -> None:
        """Makes the entries what the folder holds; those that wait for their write stay. Raises OSError."""
        check_held(self.path)
        make_folder(self.path)
        for path in abandoned_files(self.path):
            with contextlib.suppress(OSError):
                remove(path)
        found = sorted(feature_files(self.path), key=lambda file: (file.label.known, file.used_ns))
        with self._lock:
            old, self._index = self._index, FeatureIndex()
            for file in found:
                entry = old.get(file.label.key) or Entry(file.label.key)
                old.remove(entry.key)
                entry.file_bytes = file.nbytes
                self._index.put(entry)
            for entry in old:
                if entry.pending is not None:
                    entry.file_bytes = 0
                    self._index.put(entry)
        self._unsure = False

    # ---- the whole folder

    def usage(self, model_name: str | None = None) -> FileUsage:
        """Files and their bytes, those included that are queued: of one model's features, or of all."""
        with self._lock:
            return self._index.usage(model_name)

    def clear(
        self, wanted: Callable[[FeatureKey], bool], before_ns: int | None, timeout_s: float
    ) -> dict[FeatureKey, int]:
        """Removes the wanted features, from the users' RAM too; with `before_ns` those last used before then.

        Before then: nanoseconds since the epoch. Waits until the files are removed, for `timeout_s` at most. Returns
        them with their bytes; not those whose files cannot be removed, which are not read any more.
        """
        found: dict[FeatureKey, int] = {}
        self._queue.call(lambda: self._clear(wanted, before_ns, found), timeout_s)
        return dict(found)

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
            sizes = {entry.key: entry.file_bytes for entry in self._index if entry.file_bytes}
        there = {file.label.key: file.nbytes for file in feature_files(self.path)}
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
