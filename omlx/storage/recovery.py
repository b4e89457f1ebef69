"""What lies under a cache root, compared with what should: after a crash, and in `check`. File work only."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

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
                yield Entry(file.key[0], meta, stat.st_mtime_ns, identified=False)


Identified = Callable[[Entry, Entry | DamagedBlock], None]


def identify(root: Path, entries: Sequence[Entry], identified: Identified, stop: threading.Event) -> None:
    """Reads the headers of what `find_blocks` found, several at once, the last used first, until `stop`.

    `identified(entry, result)` is called for each, from any thread. A file of another version or that cannot
    be read becomes a stale entry. Payloads are not read: they are checked when a block is loaded.
    """
    waiting = iter(sorted(entries, key=lambda entry: -entry.used))
    done = 0
    with ThreadPoolExecutor(_READERS, thread_name_prefix="omlx-recovery") as readers:
        while not stop.is_set() and (batch := list(islice(waiting, _BATCH))):
            for entry, result in zip(batch, readers.map(lambda e: _identity(root, e), batch), strict=True):
                identified(entry, result)
            before, done = done, done + len(batch)
            if done // _PROGRESS_EVERY > before // _PROGRESS_EVERY or (done == len(entries) > _PROGRESS_EVERY):
                log.info("cache folder %s: %d of %d blocks identified", root, done, len(entries))


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
