"""What lies under a cache root, compared with what should: after a crash, and in `check`. File work only."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from omlx.storage.block_ledger import BlockLedger
from omlx.storage.block_table import Entry
from omlx.storage.bookkeeping import Key
from omlx.storage.folder import block_path, remove, walk
from omlx.storage.tensor_file import BlockMeta, DamagedBlock, UnknownFormat, read_meta

log = logging.getLogger(__name__)

_PROGRESS_EVERY = 10_000
_READERS = 4  # a cold disk answers several questions at once
_BATCH = 1024


def stale_entry(key: Key, file_size: int, made_ns: int = 0) -> Entry:
    """A file that counts towards the limit but is never read; its last use is that it was made."""
    return Entry(key[0], BlockMeta(key[1], 0, file_size=file_size), made_ns, stale=True)


def find_blocks(root: Path, seen: Callable[[Key], bool]) -> Iterator[Entry]:
    """The block files under `root` of which `seen` says that they are not known, not identified yet: no file is read.

    Removes temporary files that a killed process left.
    """
    for file in walk(root):
        with contextlib.suppress(OSError):
            if file.key is None:
                remove(file.path)
            elif not seen(file.key):
                stat = file.path.stat()
                meta = BlockMeta(file.key[1], 0, file_size=stat.st_size)
                yield Entry(file.key[0], meta, min(stat.st_mtime_ns, time.time_ns()), identified=False)


class Recovery:
    """Brings a ledger up to what lies in its folder. `count_files` is quick, `identify` runs beside everything else."""

    def __init__(self, root: Path, blocks: BlockLedger) -> None:
        self._root = root
        self._blocks = blocks
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def count_files(self, *, distrust: bool) -> list[Entry]:
        """Gives every file an entry with its size, and removes the entries without a file.

        Returns those that are still to be identified. `distrust`: the index may be of another time than the files,
        so sizes are compared.
        """
        found = []
        for entry in find_blocks(self._root, self._see_unless_changed if distrust else self._blocks.see):
            self._blocks.add_found(entry)
            found.append(entry)
        self._blocks.keep_only_seen()
        self._blocks.in_order()
        return found

    def _see_unless_changed(self, key: Key) -> bool:
        with contextlib.suppress(OSError):
            self._blocks.forget_unless_size(key, block_path(self._root, key).stat().st_size)
        return self._blocks.see(key)

    def identify(self, found: list[Entry], done: Callable[[], None]) -> None:
        """Reads the headers of these files in the background; `done` is called unless `end` comes first."""
        self._thread = threading.Thread(target=self._run, args=[found, done], name="omlx-recovery", daemon=True)
        self._thread.start()

    def _run(self, found: Sequence[Entry], done: Callable[[], None]) -> None:
        """Several at once, the last used first."""
        waiting = iter(sorted(found, key=lambda entry: -entry.used))
        count = 0
        with ThreadPoolExecutor(_READERS, thread_name_prefix="omlx-recovery") as readers:
            while not self._stop.is_set() and (batch := list(islice(waiting, _BATCH))):
                for entry, result in zip(batch, readers.map(lambda e: _identity(self._root, e), batch), strict=True):
                    self._settle(entry, result)
                count += len(batch)
                self._say(count, len(batch), len(found))
        if not self._stop.is_set():
            self._blocks.in_order()
            done()

    def _settle(self, entry: Entry, result: Entry | DamagedBlock) -> None:
        if not isinstance(result, DamagedBlock):
            self._blocks.identified(entry, result)
        elif self._blocks.identified(entry, None):
            path = block_path(self._root, entry.key)
            log.warning("block file %s is damaged (%s): it is removed", path, result)

    def _say(self, count: int, batch: int, total: int) -> None:
        if count // _PROGRESS_EVERY > (count - batch) // _PROGRESS_EVERY or count == total > _PROGRESS_EVERY:
            log.info("cache folder %s: %d of %d blocks identified", self._root, count, total)

    def end(self) -> None:
        """Stops reading headers."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._stop.clear()
            self._thread = None


def _identity(root: Path, entry: Entry) -> Entry | DamagedBlock:
    try:
        meta = read_meta(block_path(root, entry.key))
    except DamagedBlock as exc:
        return stale_entry(entry.key, entry.meta.file_size, entry.used) if isinstance(exc, UnknownFormat) else exc
    except FileNotFoundError:  # evicted meanwhile, most likely; then nobody asks for it any more
        return DamagedBlock("it is gone")
    except OSError as exc:
        log.warning("%s cannot be read: %s", block_path(root, entry.key), exc)
        return stale_entry(entry.key, entry.meta.file_size, entry.used)
    if meta.block_hash != entry.meta.block_hash:
        return DamagedBlock("it holds another block")
    return Entry(entry.folder, meta._replace(block_hash=entry.meta.block_hash), entry.used)


def compare(root: Path, sizes: Mapping[Key, int]) -> list[str]:
    """Where the block files under `root` and the `sizes` that an index has of them differ."""
    found = []
    seen = set()
    for file in walk(root):
        if file.key is None:
            found.append(f"{file.path} is a temporary file that nobody writes")
        elif file.key not in sizes:
            found.append(f"{file.path} is not in the index")
        else:
            seen.add(file.key)
            size = file.path.stat().st_size
            if size != sizes[file.key]:
                found.append(f"{file.path} has {size} bytes, the index says {sizes[file.key]}")
    return found + [f"{block_path(root, key)} is in the index and not there" for key in sizes if key not in seen]
