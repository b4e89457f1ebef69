"""Deleting the blocks of a cache root that no process works on."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from omlx.errors import OmlxError
from omlx.storage.bookkeeping import Key
from omlx.storage.disk_index import IndexFile
from omlx.storage.feature_listing import abandoned_files
from omlx.storage.folder import (
    INDEX_NAME,
    VISION_FOLDER,
    FolderLock,
    block_path,
    closing_note,
    compare_note,
    walk,
)
from omlx.storage.survey import Wanted, blocks, everything, features, folder_of


class Cleared(NamedTuple):
    """How many blocks and images' features were deleted, and the bytes of all these files."""

    blocks: int
    bytes: int
    images: int


def clear(root: Path, wanted: Wanted = everything, before_ns: int | None = None) -> Cleared:
    """Deletes the blocks in the wanted folders with their index entries, and image features; else nothing.

    With `before_ns` (nanoseconds since the epoch) only what was last used before then; of a file of another
    version the time counts at which it was made. A time in the future, from before the clock was set back, becomes now,
    so that it is old some day.

    Raises StoreLocked if a process works on the root, OmlxError if something cannot be deleted.
    """
    try:
        with _locked(root) as lock:
            state = compare_note(root, lock.note)
            index = IndexFile(root / INDEX_NAME)
            try:
                spared = set[Key]()
                if before_ns is not None:
                    now_ns = time.time_ns()
                    index.set_future_uses_to(now_ns)
                    spared = _used_since(root, wanted, before_ns, now_ns)
                cleared = _delete_files(root, wanted, spared, before_ns)
                gone = [key for key in index.rows() if wanted(key[0]) and key not in spared]
                index.save([(key, None) for key in gone])
            except BaseException:
                index.close(None)  # the next start compares files and index
                raise
            index.close_as_found()
            if index.clean and all(state):
                lock.leave(closing_note(root))
    except OSError as error:
        raise OmlxError(f"the cache folder {root} cannot be cleared: {error}") from error
    return cleared


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[FolderLock]:
    lock = FolderLock(root)
    try:
        yield lock
    finally:
        lock.release()


def _used_since(root: Path, wanted: Wanted, since_ns: int, now_ns: int) -> set[Key]:
    """The blocks used since then. Sets the times of files that lie in the future to now, those of features too."""

    def time_of(path: Path) -> int:
        time_ns = path.lstat().st_mtime_ns
        if time_ns > now_ns:
            os.utime(path, ns=(now_ns, now_ns), follow_symlinks=False)
        return min(time_ns, now_ns)

    for file in features(root, wanted):
        time_of(file.path)
    found = [(entry, time_of(block_path(root, entry.key))) for entry in blocks(root, wanted)]
    return {entry.key for entry, file_ns in found if min(entry.used or file_ns, now_ns) >= since_ns}


def _delete_files(root: Path, wanted: Wanted, spared: set[Key], before_ns: int | None) -> Cleared:
    count = size = 0
    shards = set()
    for file in list(walk(root)):
        shard = file.path.parent
        if not wanted(folder_of(root, shard)) or os.path.isdir(file.path) or file.key in spared:
            continue
        if file.key is not None:
            count, size = count + 1, size + file.path.lstat().st_size
        file.path.unlink(missing_ok=True)
        shards.add(shard)
    images = [file for file in features(root, wanted) if before_ns is None or file.used_ns < before_ns]
    for image in images:
        image.path.unlink(missing_ok=True)
    if wanted is everything and before_ns is None and os.path.isdir(root / VISION_FOLDER):
        for path in list(abandoned_files(root / VISION_FOLDER)):
            path.unlink(missing_ok=True)
            shards.add(path.parent)
    _remove_empty(root, shards | {image.path.parent for image in images})
    return Cleared(count, size + sum(image.nbytes for image in images), len(images))


def _remove_empty(root: Path, emptied: set[Path]) -> None:
    """The folders that held our files, as far as nothing else is in them."""
    for inner in emptied:
        for folder in (inner, *inner.parents):
            if folder == root:
                break
            with contextlib.suppress(OSError):
                os.rmdir(folder)
