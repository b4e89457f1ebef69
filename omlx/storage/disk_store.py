"""The block files under one cache root: one `DiskStore` per root and process, with one writer thread.

What is kept and what goes is decided by its `BlockLedger`; here is all that touches files. `open_store`
hands out the store that there is.
"""

import contextlib
import errno
import logging
import math
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from omlx.storage.block_ledger import BlockLedger
from omlx.storage.block_table import Change, Entry, Pending
from omlx.storage.bookkeeping import Key, RecentTokens
from omlx.storage.disk_index import IndexFile, is_lost
from omlx.storage.expiry import Expiry
from omlx.storage.folder import (
    INDEX_NAME,
    FolderLock,
    StoreLocked,
    block_path,
    closing_note,
    compare_note,
    file_mark,
    key_of,
    make_folder,
    raise_if_locked,
    remove,
)
from omlx.storage.recovery import Recovery, compare, stale_entry
from omlx.storage.siblings import FEW
from omlx.storage.tensor_file import BlockMeta, DamagedBlock, WholeBlock, read_meta
from omlx.storage.troubles import Troubles
from omlx.storage.write_queue import Task, WriteQueue

log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_QUEUE_BYTES = 256 << 20

_LEARN_NOW = 1024  # heads of files that a search reads itself, a tenth of a millisecond each
_LEARN_AT_ONCE = 128  # heads of files that are read between two other tasks of the writer thread
_COMMIT_ROWS = 64  # small transactions keep SQLite's journal small
_HEADS_S = 0.25  # for heads of files whose tokens are looked for at once
_OPEN_WAIT_S = 2.0  # a start waits this long for the index to be complete, then goes on without
_RETRY_S = (0.5, 30.0)  # after a failure: first wait, longest wait
_RETRY_LOCK_S = 2.0  # longest wait while another process has the folder
_PORTION, _PORTION_EVERY_S = 1000, 0.1  # expired blocks that are removed at once
# The name or the place of the file is of no use, and will be at every try.
_FOR_GOOD = frozenset((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EINVAL))
# Nothing is wrong with the file: the process or the machine was short of something.
_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN))


class StoreUser(Protocol):
    """Somebody who keeps blocks of a store in RAM."""

    def folder_lost(self) -> None:
        """Puts again what RAM has: the folder is another one, and what was on disk is gone. Never waits."""

    def expire(self, before_ns: int) -> None:
        """Drops what was last used before then (nanoseconds since the epoch)."""


class DiskStore:
    """Blocks of all models under `root`, in files of at most `max_bytes` in total; thread-safe.

    `blocks` takes and answers for them. A folder that cannot be used now is no error: the store is
    empty, says so once in the log, and tries again. If another process has it this raises StoreLocked, or with
    `wait_for_lock` treats it as such a folder: the store takes over when that process ends.
    """

    def __init__(
        self, root: Path, max_bytes: int, queue_bytes: int, reserve_bytes: int | None, ttl_s: float = 0,
        *, wait_for_lock: bool = False,
    ) -> None:  # fmt: skip
        self.root = root
        self.index_damaged = 0  # how often the index file had to be made anew, or its snapshot could not be used
        self._queue = WriteQueue("omlx-writer", queue_bytes, self._work, self._rest, self._end)
        self.blocks = BlockLedger(root, max_bytes, reserve_bytes, self._queue)
        self._users: weakref.WeakSet[StoreUser] = weakref.WeakSet()
        self._pid = os.getpid()
        self._lock_file: FolderLock | None = None
        self._index: IndexFile | None = None
        self._tokens = RecentTokens()
        self._index_mark = ""  # of the index file as we left it last
        self._tree_changed = False  # block files may have come or gone since the index was written
        self._sizes_unknown = False  # the index may be of another time than the files
        self._untold: set[Path] = set()  # removed files that SQLite may still have a row of
        self._complete = threading.Event()
        self._recovery = Recovery(root, self.blocks)
        self._troubles = Troubles(f"cache folder {root}", "serving goes on without it")
        self._retry_s, self._retry_at = _RETRY_S[0], 0.0
        self._said_for_good: set[tuple[str, int | None]] = set()
        self._expiry = Expiry(ttl_s, self._queue.wake_in)
        try:
            self._connect()
        except (OSError, StoreLocked) as exc:
            if isinstance(exc, StoreLocked) and not wait_for_lock:
                raise
            self._trouble("open", exc)
        self._queue.append(("call", self._complete_index))
        self._queue.start()
        self._complete.wait(_OPEN_WAIT_S)

    def raise_if_locked(self) -> None:
        """Raises StoreLocked while another process works on the folder."""
        if not self.connected:
            raise_if_locked(self.root)

    def add_user(self, user: StoreUser) -> None:
        """Users are held weakly."""
        self._users.add(user)

    # ---- reading

    def fetch(self, key: Key, read: Callable[[Path, BlockMeta], T]) -> WholeBlock | T | None:
        """The block itself while its write is queued, else what `read(path, meta)` makes of its file.

        None if there is no such block. A file that is damaged or gone is a miss: it is counted,
        removed and forgotten.
        """
        for _ in range(3):
            entry = self.blocks.entry(key)
            if entry is None:
                return None
            pending = entry.pending
            if pending is not None:
                return WholeBlock(pending.block, entry.meta)
            try:
                return read(block_path(self.root, key), entry.meta)
            except (DamagedBlock, OSError) as exc:
                if self.blocks.in_force(entry):
                    self._read_failed(entry, exc)
                    return None
                # It was evicted or written again meanwhile: look once more.
        return None

    def children(self, folder: str, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        """The blocks that follow a block, with their tokens; may read heads of files.

        Of more than 64 those whose tokens are similar to `like`, or the latest without it. The tokens of all of them
        are read at the first search: of up to 1,024 at once, of more by the writer thread, and the latest are given
        until it has. On a slow disk as many as can be read in a quarter of a second or were before.
        """
        entries = self.blocks.children(folder, parent, FEW + 1)
        if len(entries) > FEW and like is not None:
            entries, unread = self.blocks.similar_children(folder, parent, like)
            if unread and self._learn_now(folder, parent):
                entries, _ = self.blocks.similar_children(folder, parent, like)
            elif unread:
                self._queue.append(("call", partial(self._learn, folder, parent)))
        return self._with_tokens(entries, _HEADS_S)

    def _learn_now(self, folder: str, parent: bytes) -> bool:
        """Reads the tokens of all children if they are not too many, so that the first search finds what is there.

        False if some are left to do.
        """
        names = self.blocks.child_names(folder, parent)
        until = time.monotonic() + _HEADS_S
        if len(names) > _LEARN_NOW:
            return False
        for name in names:
            entry = self.blocks.entry((folder, name))
            tokens = self._read_tokens(entry) if entry is not None else None
            if time.monotonic() > until or (
                entry is not None and tokens is not None and not self.blocks.learn_tokens(entry, tokens)
            ):
                return False
        self.blocks.learned_all(folder, parent)
        return True

    def _learn(self, folder: str, parent: bytes, names: list[bytes] | None = None) -> None:
        """Reads the tokens of all children of a block, a few at a time: `names` are left to do."""
        names = self.blocks.child_names(folder, parent) if names is None else names
        if self.blocks.closed:
            return
        for name in names[-_LEARN_AT_ONCE:]:
            entry = self.blocks.entry((folder, name))
            tokens = self._read_tokens(entry) if entry is not None else None
            if entry is not None and tokens is not None and not self.blocks.learn_tokens(entry, tokens):
                return
        del names[-_LEARN_AT_ONCE:]
        if names:
            self._queue.append(("call", partial(self._learn, folder, parent, names)))
        else:
            self.blocks.learned_all(folder, parent)

    def all_children(self, folder: str, parent: bytes) -> list[BlockMeta]:
        """All of them, however long that takes."""
        return self._with_tokens(self.blocks.children(folder, parent, sys.maxsize), math.inf)

    def _with_tokens(self, entries: Sequence[Entry], seconds: float) -> list[BlockMeta]:
        until = time.monotonic() + seconds
        found = []
        for entry in entries:
            tokens = self._known_tokens(entry)
            if tokens is None and time.monotonic() < until:
                tokens = self.tokens(entry)
            if tokens is not None:
                found.append(entry.meta._replace(tokens=tokens))
        return found

    def _known_tokens(self, entry: Entry) -> bytes | None:
        """A block's token ids, as far as memory has them."""
        return self._tokens.get(entry.serial) if entry.meta.tokens is None else entry.meta.tokens

    def tokens(self, entry: Entry) -> bytes | None:
        """A block's token ids, from memory or the head of its file; None if that cannot be read."""
        tokens = self._read_tokens(entry)
        if tokens is not None:
            self._tokens.put(entry.serial, tokens)
        return tokens

    def _read_tokens(self, entry: Entry) -> bytes | None:
        known = self._known_tokens(entry)
        if known is not None:
            return known
        found = self.fetch(entry.key, lambda path, meta: _matching(read_meta(path), meta))
        meta = found.meta if isinstance(found, WholeBlock) else found
        return None if meta is None else meta.tokens

    def _read_failed(self, entry: Entry, error: DamagedBlock | OSError) -> None:
        if (isinstance(error, OSError) and error.errno in _PASSING) or not self.connected:
            self._trouble("read", error)
            self._queue.wake_in(0)
        elif self.blocks.drop_damaged(entry):
            path = block_path(self.root, entry.key)
            log.warning(
                "block file %s is damaged or gone (%s): it will be stored again when next computed", path, error
            )

    # ---- the writer thread's tasks

    def _work(self, task: Task) -> None:
        kind, subject = task
        if kind == "write":
            self._write(subject)
        elif kind == "unlink":
            self._unlink(subject)
        else:
            subject()
        if self.blocks.changes >= _COMMIT_ROWS:
            self._commit()
        self._queue_waiting()
        self._expire()

    def _write(self, entry: Entry) -> None:
        pending = self.blocks.pending(entry)
        if pending is None:
            return  # evicted or deleted before its turn
        try:
            self._ensure_connected()
            self._make_space(entry.meta.file_size)
            path = block_path(self.root, entry.key)
            if path in self._untold:  # a process killed after this write must not leave a row of the file before
                self._commit()
            self._write_file(path, pending, entry.meta)
        except (OSError, StoreLocked) as exc:
            for_good = isinstance(exc, OSError) and exc.errno in _FOR_GOOD and self.connected
            self._write_failed(entry, pending, for_good=for_good)
            if for_good:
                self._say_for_good(entry.folder, exc)
            else:
                self._trouble("write", exc)
        except BaseException:  # the entry must not stay, whatever this was
            self._write_failed(entry, pending)
            raise
        else:
            self.blocks.written(entry)
            self._works("open", "read", "write")

    def _write_failed(self, entry: Entry, pending: Pending, *, for_good: bool = False) -> None:
        self.blocks.write_failed(entry, pending, for_good=for_good)
        if not for_good:
            self._back_off()

    def _make_space(self, nbytes: int) -> None:
        """Removes what has to go before a file of that size is written. Raises OSError if the disk has no room then.

        Removals that are queued behind the write are done now: others may have filled the disk since they
        were decided.
        """
        if self.blocks.removals_fail and not self.blocks.within_limit:
            raise OSError(errno.EACCES, "files that have to go cannot be removed")
        if self._measure() < nbytes:
            self._unlink_doomed()
            self._measure()
            self._unlink_doomed()
            if self._measure() < nbytes:
                raise OSError(errno.ENOSPC, "the disk is full, but for the space that is left free")

    @staticmethod
    def _write_file(path: Path, pending: Pending, meta: BlockMeta) -> None:
        try:
            pending.write(path, pending.block, meta)
        except FileNotFoundError:
            make_folder(path.parent)
            pending.write(path, pending.block, meta)
        except IsADirectoryError:
            remove(path)
            pending.write(path, pending.block, meta)

    def _unlink(self, path: Path) -> None:
        self.blocks.unlinked(path)
        self._untold.add(path)
        try:
            remove(path)
        except OSError as exc:
            self._trouble("unlink", exc)
            self._keep_stale(path)
            self._back_off()
        else:
            self._works("unlink")

    def _unlink_doomed(self) -> None:
        """Does the removals that are queued, ahead of what is queued before them."""
        for path in self.blocks.doomed():
            self._unlink(path)

    def _keep_stale(self, path: Path) -> None:
        """Counts a file that could not be removed; it is tried again later."""
        with contextlib.suppress(OSError):
            self.blocks.removal_failed(stale_entry(key_of(self.root, path), path.lstat().st_size))

    def _queue_waiting(self) -> None:
        if self.blocks.waits or self.blocks.removals_fail:
            wait_s = self._retry_at - time.monotonic()
            if wait_s > 0:
                self._queue.wake_in(wait_s)
            else:
                self.blocks.retry_removals()
                self.blocks.queue_waiting()

    def _rest(self) -> None:
        """Nothing is left to do for now."""
        self._queue_waiting()
        if not self.connected and time.monotonic() >= self._retry_at:
            try:
                self._ensure_connected()
                self._works("open", "read")
            except (OSError, StoreLocked) as exc:
                if isinstance(exc, StoreLocked):  # a look at the lock costs little, and the other may end any moment
                    self._retry_s = min(self._retry_s, _RETRY_LOCK_S)
                self._back_off()
                self._trouble("open", exc)
        self._measure()
        self._expire()
        self._commit()

    def _end(self) -> None:
        self._commit()
        self._disconnect(clean=self._complete.is_set())

    # ---- the folder: usable, gone, back again

    @property
    def connected(self) -> bool:
        """Whether this process has the folder, and no other."""
        lock = self._lock_file
        return lock is not None and lock.in_place()

    def _ensure_connected(self) -> None:
        """Raises OSError or StoreLocked if the folder cannot be used now."""
        if not self.connected:
            self._connect()
            self._unlink_doomed()
            self._complete_index()
            for user in list(self._users):
                user.folder_lost()

    def _connect(self) -> None:
        """Opens the folder. Until that works, what is known of it is kept: it may come back as it was."""
        make_folder(self.root)
        lock = FolderLock(self.root)
        path = self.root / INDEX_NAME
        state = compare_note(self.root, lock.note)
        replaced = state.closed and not state.index_same
        try:
            index = IndexFile(path)
            packed = index.load(as_left=state.index_same)
            if replaced and not index.damaged:
                log.warning("the cache index %s is not the one that was left here: the folder is looked through", path)
                index.make_again()
        except OSError:
            lock.release()
            raise
        if self._lock_file is not None:
            self._disconnect(clean=False)
        self._tree_changed = not (index.clean and state.closed and state.shards_same)
        self._sizes_unknown = index.damaged or not state.closed
        self.index_damaged += index.damaged + index.snapshot_damaged
        self.blocks.load(packed, index.nbytes())  # before it counts as connected: blocks of a lost folder are no damage
        if replaced:
            self.blocks.mark_all_changed()
        self._lock_file, self._index, self._index_mark = lock, index, file_mark(path)
        self._measure()
        self._expiry.look_again()
        self._expire()
        self.blocks.make_room()

    def _disconnect(self, *, clean: bool) -> None:
        self._recovery.end()
        if self._index is not None and self._lock_file is not None:
            packed = self.blocks.pack() if clean else None
            self._index.close(packed)
            if packed is not None:
                self._lock_file.leave(closing_note(self.root))
            self._lock_file.release()
        self._index = self._lock_file = None

    def _complete_index(self) -> None:
        """Looks through the folder if the last process did not end well, or the index was lost.

        Sizes first, so that the limit holds before anything is written; headers are read beside the work.
        """
        found = []
        if self._index is not None and self._tree_changed:
            found = self._recovery.count_files(distrust=self._sizes_unknown)
            self._unlink_doomed()  # the limit holds before anything new is written
        if found:
            self._complete.clear()  # also when the folder was taken up long after the start
            self._recovery.identify(found, self._all_identified)
        else:
            self._complete.set()
        self._expiry.look_again()

    def _all_identified(self) -> None:
        self._expiry.look_again()
        self._queue.wake_in(0)
        self._complete.set()

    # ---- age

    def lower_ttl(self, ttl_s: float) -> None:
        """Blocks expire after the shortest time that a user gave; 0 is none."""
        self._expiry.lower(ttl_s)

    def _expire(self) -> None:
        """Removes what was not used for too long, if it is time to look for that; very much of it in portions."""
        before_ns = self._expiry.due()
        if before_ns is None:
            return
        if len(self.blocks.remove_unused(before_ns, "expired", most=_PORTION)) == _PORTION:
            self._expiry.look_again(_PORTION_EVERY_S)
        for user in list(self._users):
            user.expire(before_ns)

    def _measure(self) -> float:
        """Tells the ledger how much room the disk has; returns how many bytes may be written now."""
        try:
            disk = os.statvfs(self.root)
        except OSError:
            return math.inf
        return self.blocks.set_space(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)

    def _commit(self) -> None:
        """Tells SQLite what changed, and meets the limit with the index's new size."""
        index = self._index
        if index is None:
            return
        if file_mark(index.path) != self._index_mark and self.connected:
            self._make_index_again(index, OSError(f"somebody changed or removed {INDEX_NAME}"))
        while changes := self.blocks.take_changes(_COMMIT_ROWS):
            try:
                index.save(changes)
                self._works("index")
            except sqlite3.Error as exc:
                self._commit_failed(index, changes, exc)
                break
        else:
            self._untold.clear()
        self._index_mark = file_mark(index.path)
        self.blocks.set_index_bytes(index.nbytes())

    def _commit_failed(self, index: IndexFile, changes: list[Change], error: sqlite3.Error) -> None:
        self._trouble("index", error)
        self._back_off()
        self.blocks.give_back(changes)
        if is_lost(error) and self.connected:
            self._make_index_again(index, error)

    def _make_index_again(self, index: IndexFile, why: Exception) -> None:
        self._trouble("index", why)
        self.blocks.mark_all_changed()
        try:
            index.make_again()
            self.index_damaged += 1
        except (OSError, sqlite3.Error) as exc:
            self._trouble("index", exc)
            self._back_off()

    def _back_off(self) -> None:
        now = time.monotonic()
        if now >= self._retry_at:  # else one of many that fail for the same reason
            self._retry_at = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_S[1])
        self._queue.wake_in(self._retry_at - now)

    def _trouble(self, what: str, error: Exception) -> None:
        # The index fails with the files, and everything without the folder.
        self._troubles.note(what, error, follows=what == "index" or not self.connected)

    def _say_for_good(self, folder: str, error: Exception) -> None:
        """Says once, for each model and kind of error, that a block's file cannot be made."""
        what = folder, getattr(error, "errno", None)
        if what not in self._said_for_good:
            log.warning(
                "cache folder %s, %s: %s; such a block stays in RAM and is not tried again until it is next saved",
                self.root, folder or "no model", error,
            )  # fmt: skip
        self._said_for_good.add(what)

    def _works(self, *what: str) -> None:
        if "open" in what:
            self._retry_s, self._retry_at = _RETRY_S[0], 0.0
        self._troubles.mended(*what)

    # ---- flush, check, close

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until everything kept so far is on disk. False if it took too long or could not be written."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        errors = self.blocks.write_errors
        while True:
            nothing_waits = self.blocks.queue_waiting()
            if not self._queue.call(self._commit, _left(deadline)) or self.blocks.write_errors > errors:
                return False
            if nothing_waits:
                # Removals that this commit asked for come behind it.
                return self.blocks.settled or self._queue.call(self._commit, _left(deadline))

    def settle(self, timeout_s: float) -> bool:
        """Waits until all removals and writes asked for so far were tried. False if that took too long."""
        return self._queue.call(lambda: None, timeout_s)

    def check(self, timeout_s: float = 60.0) -> list[str]:
        """Contradictions between memory, SQLite and the files, in all directions; for a store at rest."""
        found: list[str] = []
        self.flush(timeout_s)
        if not self._queue.call(lambda: found.extend(self._compare()), timeout_s):
            found.append("the writer thread does not answer")
        return found

    def _compare(self) -> list[str]:
        for _ in range(3):  # a rest may have found less room on the disk just now; removals change the index's size
            self._unlink_doomed()
            self._commit()
        found, rows, sizes = self.blocks.audit()
        if self._index is None:
            return [*found, "the folder cannot be used now"]
        try:
            if self._index.rows() != rows:
                found.append("SQLite holds other rows than memory")
        except sqlite3.Error as exc:
            found.append(f"the index file cannot be read: {exc}")
        return found + compare(self.root, sizes)

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued, then gives the folder free. False if that took too long: the rest is lost."""
        if os.getpid() != self._pid:
            return False  # a forked child has no writer thread
        deadline = time.monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        self.blocks.close()
        return self._queue.close(max(0.1, deadline - time.monotonic())) and flushed

    def leave_to_parent(self) -> None:
        """In a forked child: the folder stays the parent's, and is free when the parent ends."""
        if self._lock_file is not None:
            self._lock_file.release()


def _matching(found: BlockMeta, meta: BlockMeta) -> BlockMeta:
    """The metadata in a file's head, if it is that of the block that should be there."""
    if found._replace(tokens=None) != meta._replace(tokens=None):
        raise DamagedBlock("its header is that of another block")
    return found


def _left(deadline: float | None) -> float | None:
    """Seconds until a deadline of `time.monotonic`; None has no end."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
