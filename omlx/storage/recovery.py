"""What lies under a cache root, compared with what should: after a crash, and in `check`. File work only."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from omlx.storage.bookkeeping import Key
from omlx.storage.disk_index import Entry
from omlx.storage.folder import block_path, remove, walk
from omlx.storage.tensor_file import BlockMeta, DamagedBlock, UnknownFormat, read_header

log = logging.getLogger(__name__)

_PROGRESS_EVERY = 10_000


def stale_entry(key: Key, file_size: int) -> Entry:
    """A file that counts towards the limit but is never read."""
    return Entry(key[0], BlockMeta(block_hash=key[1], token_count=0, file_size=file_size), stale=True)


def find_blocks(
    root: Path, known: Callable[[Key], bool], damaged: Callable[[Key, DamagedBlock], None]
) -> Iterator[tuple[Key, Entry | None]]:
    """Every block file under `root`; with its entry, made from its header, if it is not `known`.

    Removes temporary files that a killed process left. A file that cannot be a block is handed to
    `damaged`, one of another version or that cannot be read becomes a stale entry. Payloads are
    not read: they are checked when a block is loaded.
    """
    headers = 0
    for file in walk(root):
        if file.key is None:
            with contextlib.suppress(OSError):
                remove(file.path)
        elif known(file.key):
            yield file.key, None
        else:
            entry = _entry(file.path, file.key, damaged)
            headers += 1
            if headers % _PROGRESS_EVERY == 0:
                log.info("cache folder %s: %d blocks found so far that the index did not know", root, headers)
            if entry is not None:
                yield file.key, entry


def _entry(path: Path, key: Key, damaged: Callable[[Key, DamagedBlock], None]) -> Entry | None:
    try:
        stat = path.stat()
        try:
            _, meta = read_header(path)
        except (UnknownFormat, PermissionError):
            return stale_entry(key, stat.st_size)
        if meta.block_hash != key[1]:
            raise DamagedBlock("it holds another block")
        return Entry(key[0], replace(meta, block_hash=key[1]), stat.st_mtime_ns)
    except DamagedBlock as exc:
        damaged(key, exc)
    except OSError as exc:
        log.warning("%s is left alone: %s", path, exc)
    return None


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
