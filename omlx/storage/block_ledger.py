"""Which blocks a cache root holds, and what is to be done about it: decisions only, no file is touched here."""

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from omlx.storage.block_table import BlockTable, Change, Entry, Packed, Pending, Row, WriteFile
from omlx.storage.bookkeeping import SHARE_OF_TOO_LARGE, Gone, GoneBlocks, Key, Pins
from omlx.storage.eviction import EvictionOrder
from omlx.storage.folder import block_path
from omlx.storage.siblings import FEW, FamilyIndex
from omlx.storage.snapshot import snapshot_bytes
from omlx.storage.tensor_file import BlockBuffer, BlockMeta
from omlx.storage.write_queue import WriteQueue

RESERVE_BYTES, RESERVE_SHARE = 2 << 30, 0.05  # free space that is left on the disk: whichever is less
_COMMIT_WITHIN_S = 1.0  # how long only memory may know of a change in the order of use

PutResult = Literal["queued", "waiting", "declined"]


@dataclass(slots=True)
class FolderCounts:
    """What happened to one model's blocks on disk since the store was opened."""

    evictions: int = 0
    expired: int = 0
    damaged: int = 0
    write_errors: int = 0
    dropped_writes: int = 0
    files_written: int = 0
    bytes_written: int = 0


class FolderFigures(NamedTuple):
    """What a model has on disk. `last_used_ns`: nanoseconds since the epoch, 0 if that is not known."""

    blocks: int
    tokens: int
    bytes: int
    last_used_ns: int


class SimilarBlocks(NamedTuple):
    """Children of a block, by `BlockLedger.similar_children`. `unread`: nobody has read the tokens of all of them yet,
    and nobody else was asked to."""

    entries: list[Entry]
    unread: bool


class _Waiting(NamedTuple):
    """A block whose write found no room, or failed; queued later if it is in RAM still."""

    meta: BlockMeta
    block: "weakref.ref[BlockBuffer]"
    write: WriteFile


class BlockLedger:
    """The blocks of all models under one root, within `max_bytes` of files; thread-safe.

    Decisions become tasks of the queue, in an order that keeps the files within the limit at every
    moment: what makes room is removed before the block that needs it is written. An EvictionOrder says
    what goes first; pinned blocks never do.
    """

    def __init__(self, root: Path, max_bytes: int, reserve_bytes: int | None, queue: WriteQueue) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._queue = queue
        self._lock = threading.Lock()
        self._table = BlockTable()
        self._pins = Pins()
        self._gone = GoneBlocks()
        self._families = FamilyIndex()
        self._waiting: dict[Key, _Waiting] = {}
        self._doomed: set[Path] = set()  # files whose removal is queued
        self._failing = False  # whether a write failed and none was done since
        self._eviction = EvictionOrder(self._table)
        self._stuck: dict[Key, int] = {}  # bytes of files that could not be removed
        self._removals_fail = False
        self._counts: defaultdict[str, FolderCounts] = defaultdict(FolderCounts)
        self._index_bytes = 0
        self._other_bytes: dict[str, int] = {}
        self._space: int | None = None  # what the disk has left for us, what we have already included
        self._closed = False

    # ---- questions

    def entry(self, key: Key) -> Entry | None:
        with self._lock:
            return self._table.get(key)

    def in_force(self, entry: Entry) -> bool:
        """Whether this very entry counts: not evicted, deleted or replaced since it was asked for."""
        with self._lock:
            return self._table.holds(entry)

    def meta(self, key: Key) -> BlockMeta | None:
        with self._lock:
            return self._table.meta(key)

    def metas_of(self, folder: str, hashes: Sequence[bytes]) -> list[BlockMeta | None]:
        """`meta` of many blocks of a folder."""
        with self._lock:
            return self._table.metas(folder, hashes)

    def metas(self, folder: str) -> list[BlockMeta]:
        """A model's blocks, least recently used first."""
        with self._lock:
            entries = self._table.entries()
            return [e.meta for e in entries if e.folder == folder and not e.stale and e.identified]

    def children(self, folder: str, parent: bytes, most: int) -> list[Entry]:
        """Blocks that follow a block, the last one added first; at most so many, the latest."""
        with self._lock:
            return self._table.children((folder, parent), most)

    def similar_children(self, folder: str, parent: bytes, tokens: bytes) -> SimilarBlocks:
        """Of the children of a block that has many, those with tokens similar to `tokens` (see `Siblings.similar`).

        As long as the tokens of some are not known, also the latest ones.
        """
        key = folder, parent
        with self._lock:
            opened = self._families.open(key)
            similar, complete = self._families.similar(key, tokens)
            found: dict[bytes, Entry] = {}
            for known, name in similar:
                entry = self._table.get((folder, name))
                if entry is None:
                    self._families.remove(key, name)
                else:
                    entry.meta = entry.meta._replace(tokens=known)
                    found[name] = entry
            for entry in [] if complete else self._table.children(key, FEW):
                found.setdefault(entry.meta.block_hash, entry)
            return SimilarBlocks(list(found.values()), opened)

    def child_names(self, folder: str, parent: bytes) -> list[bytes]:
        """The hashes of all blocks that follow a block."""
        with self._lock:
            return self._table.child_names((folder, parent))

    def learn_tokens(self, entry: Entry, tokens: bytes) -> bool:
        """Takes in the tokens of a block with many siblings. False if there is no room for more of them."""
        with self._lock:
            parent = entry.folder, entry.meta.parent
            return not self._table.holds(entry) or self._families.add(parent, tokens, entry.meta.block_hash)

    def learned_all(self, folder: str, parent: bytes) -> None:
        """The tokens of all children of a block have been learned."""
        with self._lock:
            self._families.completed((folder, parent))

    def state(self, key: Key) -> Literal["writing", "ssd"] | None:
        entry = self.entry(key)
        return None if entry is None else "writing" if entry.pending else "ssd"

    def counts(self, folder: str) -> FolderCounts:
        with self._lock:
            return replace(self._counts[folder])

    @property
    def write_errors(self) -> int:
        with self._lock:
            return sum(counts.write_errors for counts in self._counts.values())

    def usage(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes of each model's folder."""
        with self._lock:
            blocks = self._table.folder_blocks
            return {folder: (n, self._table.folder_bytes[folder]) for folder, n in blocks.items() if n}

    def tokens(self, folder: str) -> int:
        """Tokens in a model's blocks."""
        with self._lock:
            return self._table.folder_tokens[folder]

    def figures(self) -> dict[str, FolderFigures]:
        """What each model's folder holds."""
        with self._lock:
            t = self._table
            return {
                folder: FolderFigures(n, t.folder_tokens[folder], t.folder_bytes[folder], t.folder_used.get(folder, 0))
                for folder, n in t.folder_blocks.items()
                if n
            }

    def gone_after(self, folder: str, parent: bytes) -> list[Gone]:
        """The blocks with this parent that were given up of late, the last one last."""
        with self._lock:
            return self._gone.after(folder, parent)

    @property
    def bytes(self) -> int:
        """Of all files that omlx keeps under the root, as they will be when the queue is done."""
        with self._lock:
            return self._table.bytes + self._overhead()

    @property
    def queue_bytes(self) -> int:
        return self._queue.bytes

    def fits(self, nbytes: int) -> bool:
        """Whether a file of that size may be kept at all."""
        with self._lock:
            return not self._closed and nbytes <= self._limit()

    def has_share(self, upto: int, total: int) -> bool:
        """Whether a request that stores `total` bytes of files may store the first `upto`: see `HotTier.has_share`."""
        with self._lock:
            return total <= self._limit() or upto <= self._limit() * SHARE_OF_TOO_LARGE

    # ---- keeping blocks

    def put(
        self,
        folder: str,
        meta: BlockMeta,
        block: BlockBuffer,
        write: WriteFile,
        *,
        may_wait: bool,
        only_copy: bool = False,
    ) -> PutResult:
        """Queues a block's file; the block is readable from now on.

        A block that is here already is left alone. With the queue full the answer is "waiting" if it
        `may_wait`: it is queued when there is room, if somebody else still keeps the buffer then. So it is
        while writes fail if it is the `only_copy`, which whoever asks gives up on any other answer.
        """
        key = (folder, meta.block_hash)
        with self._lock:
            if self._table.get(key) is not None:
                return "queued"
            if self._closed or meta.file_size > self._limit():
                return "declined"
            if self._queue.has_room(meta.file_size) and not (only_copy and self._failing):
                return self._enqueue(key, meta, block, write)
            if may_wait:
                self._wait(key, meta, block, write)
                self._queue.wake_in(0)
                return "waiting"
            self._counts[folder].dropped_writes += 1
            return "declined"

    def _enqueue(self, key: Key, meta: BlockMeta, block: BlockBuffer, write: WriteFile) -> PutResult:
        self._delete(key)
        block.unsaved = False
        if not self._make_room(meta.file_size):
            return "declined"
        entry = Entry(key[0], meta, self._table.stamp(), pending=Pending(block, write, meta.tokens))
        self._table.add(entry)
        self._families.add((key[0], meta.parent), meta.tokens, meta.block_hash)
        self._queue.append(("write", entry), meta.file_size)
        return "queued"

    def _wait(self, key: Key, meta: BlockMeta, block: BlockBuffer, write: WriteFile) -> None:
        block.unsaved = True
        self._waiting[key] = _Waiting(meta, weakref.ref(block), write)

    def queue_waiting(self) -> bool:
        """Queues what waits, as far as there is room. True if nothing waits any more."""
        with self._lock:
            while self._waiting:
                key, waiting = next(iter(self._waiting.items()))
                block = waiting.block()
                if block is not None and not self._queue.has_room(waiting.meta.file_size):
                    return False
                del self._waiting[key]
                if block is None or self._enqueue(key, waiting.meta, block, waiting.write) == "declined":
                    self._counts[key[0]].dropped_writes += 1
            return True

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def make_room(self, nbytes: int = 0) -> bool:
        """Evicts blocks until `nbytes` more fit under the limit. False, and nothing evicted, if they cannot fit."""
        with self._lock:
            return self._make_room(nbytes)

    def _make_room(self, nbytes: int) -> bool:
        excess = self._table.bytes + nbytes - self._limit()
        if nbytes and excess > 0 and self._removals_fail:
            return False  # more of what can be read would be given up, and nothing gained
        if not nbytes:
            excess -= sum(self._stuck.values())
        victims: dict[Key, Entry] = {}
        held: list[Key] = []
        for entry in self._eviction if excess > 0 else ():
            if entry.key in self._pins:
                held.append(entry.key)
            elif entry.key not in self._stuck and entry.key not in victims:
                victims[entry.key] = entry
                excess -= entry.meta.file_size
                if excess <= 0:
                    break
        for key in held:  # in use now; and out of the way of the next that looks for the oldest
            self._table.touch(key)
        if excess > 0 and nbytes:
            return False
        for entry in victims.values():
            self._counts[entry.folder].evictions += 1
            self._gone.add(entry.folder, entry.meta, "evicted")
            self._delete(entry.key)
        return excess <= 0

    def use_numerics(self, folder: str, numerics: str | None) -> None:
        """Says under which numerics a model's blocks can be used now; None under any."""
        with self._lock:
            self._eviction.use_numerics(folder, numerics)

    def _limit(self) -> int:
        """What block files may take up; closing the store needs room for a snapshot of the index."""
        total = self._max_bytes if self._space is None else min(self._max_bytes, self._space)
        return total - self._overhead() - snapshot_bytes(len(self._table))

    def _overhead(self) -> int:
        return self._index_bytes + sum(self._other_bytes.values())

    def lower_limit(self, max_bytes: int) -> None:
        """Evicts what no longer fits. A limit is never raised: that of every user holds."""
        with self._lock:
            self._max_bytes = min(self._max_bytes, max_bytes)
            self._make_room(0)

    def count_other_files(self, owner: str, nbytes: int) -> None:
        """Says how many bytes somebody else keeps under the root: they count towards the limit."""
        with self._lock:
            self._other_bytes[owner] = nbytes
            self._make_room(0)

    def room_for_others(self, owner: str) -> int:
        """How many bytes somebody else may keep under the root at most, if all blocks went."""
        with self._lock:
            return self._limit() + self._other_bytes.get(owner, 0)

    def reserve_for_others(self, owner: str, nbytes: int) -> bool:
        """`count_other_files`, if blocks can be evicted for it. Else False, and nothing is changed."""
        with self._lock:
            more = nbytes - self._other_bytes.get(owner, 0)
            if more > 0 and not self._make_room(more):
                return False
            self._other_bytes[owner] = nbytes
            return True

    def delete(self, key: Key) -> bool:
        """Drops a block; its file is removed in the background. False if there was none."""
        with self._lock:
            return self._delete(key)

    def _delete(self, key: Key) -> bool:
        waited = self._waiting.pop(key, None) is not None
        if not self._table.known(key):
            return waited
        meta = self._table.meta(key)
        if meta is not None:
            self._families.remove((key[0], meta.parent), key[1])
        self._table.remove(key)
        self._stuck.pop(key, None)
        path = block_path(self._root, key)
        self._doomed.add(path)
        self._queue.append(("unlink", path))
        return True

    def clear(self, folder: str | None) -> dict[Key, int]:
        """Deletes a model's blocks, or all, but for the pinned ones; returns them with their bytes."""
        with self._lock:
            entries = [e for e in self._table.entries() if folder in (None, e.folder) and e.key not in self._pins]
            for key in [key for key in self._waiting if folder in (None, key[0]) and key not in self._pins]:
                del self._waiting[key]
            for entry in entries:
                self._gone.add(entry.folder, entry.meta, "cleared")
                self._delete(entry.key)
            return {entry.key: entry.meta.file_size for entry in entries}

    def remove_unused(
        self, before_ns: int, reason: str, folder: str | None = None, most: int | None = None
    ) -> dict[Key, int]:
        """Deletes the blocks of a model, or of all, that were last used before then and are not pinned.

        Before then: nanoseconds since the epoch. At most so many, least recently used first; returns them with
        their bytes.
        """
        with self._lock:
            self._table.set_future_uses_to_now()
            old = takewhile(lambda entry: entry.used < before_ns, self._table.entries())
            wanted = (e for e in old if folder in (None, e.folder))
            gone = list(islice((e for e in wanted if e.key not in self._pins and e.key not in self._stuck), most))
            for entry in gone:
                self._counts[entry.folder].expired += reason == "expired"
                self._gone.add(entry.folder, entry.meta, reason)
                self._delete(entry.key)
            return {entry.key: entry.meta.file_size for entry in gone}

    def drop_damaged(self, entry: Entry) -> bool:
        """Deletes a block that could not be read. False if it is not in force any more."""
        with self._lock:
            if not self._table.holds(entry):
                return False
            self._counts[entry.folder].damaged += 1
            self._gone.add(entry.folder, entry.meta, "its file was damaged or gone")
            return self._delete(entry.key)

    def touch(self, keys: Iterable[Key]) -> None:
        """Marks blocks as used, the last one most recently."""
        with self._lock:
            for key in keys:
                self._table.touch(key)
        self._queue.wake_in(_COMMIT_WITHIN_S)

    def pin(self, *keys: Key) -> None:
        with self._lock:
            self._pins.add(keys)

    def unpin(self, *keys: Key) -> None:
        """Raises ValueError for one that is not pinned."""
        with self._lock:
            self._pins.remove(keys)

    def close(self) -> None:
        """Declines new blocks from now on."""
        with self._lock:
            self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- what the writer thread found

    def pending(self, entry: Entry) -> Pending | None:
        """What is to be written; None if the entry is not in force any more."""
        with self._lock:
            return self._table.pending(entry)

    def written(self, entry: Entry) -> None:
        with self._lock:
            self._failing = False
            self._counts[entry.folder].files_written += 1
            self._counts[entry.folder].bytes_written += entry.meta.file_size
            if self._table.holds(entry):
                self._table.written(entry)

    def write_failed(self, entry: Entry, pending: Pending, *, for_good: bool = False) -> None:
        """The entry goes; the block is tried again later if RAM has it, unless it failed `for_good`."""
        with self._lock:
            self._counts[entry.folder].write_errors += 1
            self._failing = self._failing or not for_good
            if self._table.holds(entry):
                self._table.remove(entry.key)
                if not for_good:
                    self._wait(entry.key, entry.meta, pending.block, pending.write)

    def unlinked(self, path: Path) -> None:
        with self._lock:
            self._doomed.discard(path)

    def doomed(self) -> list[Path]:
        """The files whose removal is queued."""
        with self._lock:
            return list(self._doomed)

    def removal_failed(self, entry: Entry) -> None:
        """A file that could not be removed counts on, as this stale entry, and is tried again by `retry_removals`.

        Until then nothing is kept that more removals would have to make room for.
        """
        with self._lock:
            self._removals_fail = True
            if not self._table.known(entry.key):
                self._table.add(entry)
                self._stuck[entry.key] = entry.meta.file_size

    @property
    def removals_fail(self) -> bool:
        return self._removals_fail

    @property
    def within_limit(self) -> bool:
        with self._lock:
            return self._table.bytes <= max(0, self._limit())

    def retry_removals(self) -> None:
        with self._lock:
            self._removals_fail = False
            for key in list(self._stuck):
                self._delete(key)

    def add_found(self, entry: Entry) -> None:
        """A file that nobody knew; `in_order` has to follow."""
        with self._lock:
            if not self._table.known(entry.key):
                self._table.add(entry)

    def identified(self, entry: Entry, result: Entry | None) -> bool:
        """A found file's header was read; None: it is damaged, and goes. False if the file went meanwhile."""
        with self._lock:
            if not self._table.holds(entry):
                return False
            if result is None:
                self._counts[entry.folder].damaged += 1
                self._delete(entry.key)
            else:
                self._table.add(result)
                self._families.add((result.folder, result.meta.parent), result.meta.tokens, result.meta.block_hash)
            return True

    def see(self, key: Key) -> bool:
        """Notes that a file is there. False if its fate is open: it has no entry, and is not to be removed."""
        with self._lock:
            return self._table.see(key) or block_path(self._root, key) in self._doomed

    def forget_unless_size(self, key: Key, nbytes: int) -> None:
        """Forgets a block on disk whose file has another size than we know."""
        with self._lock:
            entry = self._table.get(key)
            if entry is not None and entry.pending is None and entry.meta.file_size != nbytes:
                self._table.remove(key)

    def keep_only_seen(self) -> None:
        """Forgets the blocks whose files were not seen since the folder was opened."""
        with self._lock:
            self._table.keep_only_seen()

    def in_order(self) -> None:
        """Sorts by last use and meets the limit, after blocks were found."""
        with self._lock:
            self._table.sort()
            self._eviction.refresh()
            self._families.clear()
            self._make_room(0)

    def load(self, packed: Packed, index_bytes: int) -> None:
        """The blocks of a folder that was just opened; of what was known before, only queued ones stay."""
        with self._lock:
            self._index_bytes = index_bytes
            self._stuck.clear()  # it may be another folder; what still cannot be removed comes back
            self._table.load(packed)
            self._table.set_future_uses_to_now()
            self._eviction.refresh()
            self._families.clear()

    def set_space(self, disk_bytes: int, free_bytes: int) -> float:
        """How large the disk is and what is free on it; meets the limit that follows from it.

        Not used while removals are queued: their bytes would count as neither ours nor free. Returns how many
        bytes may be written now.
        """
        with self._lock:
            if not disk_bytes:
                return math.inf
            reserve = self._reserve_bytes
            if reserve is None:
                reserve = min(RESERVE_BYTES, int(disk_bytes * RESERVE_SHARE))
            if not self._doomed:
                written = self._table.bytes - self._queue.bytes + self._overhead()
                self._space = written + free_bytes - reserve
                self._make_room(0)
            return free_bytes - reserve

    def set_index_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._index_bytes = nbytes
            self._make_room(0)

    @property
    def changes(self) -> int:
        """How much SQLite has not been told."""
        return self._table.changes

    @property
    def settled(self) -> bool:
        """Whether files and SQLite are as the ledger has them."""
        with self._lock:
            return not self._doomed and not self._table.changes

    def take_changes(self, limit: int) -> list[Change]:
        with self._lock:
            return self._table.take_changes(limit)

    def give_back(self, changes: list[Change]) -> None:
        with self._lock:
            self._table.give_back(changes)

    def mark_all_changed(self) -> None:
        with self._lock:
            self._table.mark_all_changed()

    def pack(self) -> Packed | None:
        """All blocks, for the next start; None if files and SQLite are not as the ledger has them."""
        with self._lock:
            return None if self._doomed or self._table.changes or not self._table.is_told else self._table.pack()

    def audit(self) -> tuple[list[str], dict[Key, Row], dict[Key, int]]:
        """Contradictions, the rows that SQLite should have, and the sizes that files should have."""
        with self._lock:
            found = self._table.check()
            if self._table.bytes > max(0, self._limit()):
                found.append(f"blocks take up {self._table.bytes} bytes, {self._limit()} are allowed")
            sizes = {e.key: e.meta.file_size for e in self._table.entries() if e.pending is None}
            return found, self._table.rows(), sizes
