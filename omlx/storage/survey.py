"""A cache root seen from outside: what its files hold, what its index says, where they differ.

Nothing is changed, and no lock is taken: a server may work on the folder meanwhile.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from omlx.storage.block_table import Entry
from omlx.storage.bookkeeping import Key
from omlx.storage.disk_index import read_index
from omlx.storage.feature_file import feature_name, read_feature_file, served_model
from omlx.storage.feature_listing import FeatureFile, abandoned_files, feature_files, strangers
from omlx.storage.folder import (
    INDEX_NAME,
    LOCK_NAME,
    VISION_FOLDER,
    block_path,
    folder_name,
    folders,
    read_lock,
    walk,
)
from omlx.storage.recovery import stale_entry
from omlx.storage.tensor_file import DamagedBlock, UnknownFormat, read_block_file, read_meta

_LOOKS, _SETTLE_S = 5, 2.0  # how often and after how long a difference in a folder in use is looked at again

Wanted = Callable[[str], bool]  # which models' folders


class FolderUsage(NamedTuple):
    """What one model has under the root. `used_ns` is the last use; `stale` blocks are files that are never read."""

    folder: str
    blocks: int
    tokens: int
    nbytes: int
    stale: int
    used_ns: int


def holder(root: Path) -> int | None:
    """The process that works on the root now, None if nobody does."""
    try:
        fd = os.open(root / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text, _ = read_lock(fd)
        pid = int(text) if text.isdecimal() else 0
        # The lock is tried only if that process lives: trying it might refuse one that is starting.
        if not psutil.pid_exists(pid):
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return pid
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def everything(folder: str) -> bool:
    """Wants all models' folders."""
    return True


def folder_of(root: Path, shard: Path) -> str:
    """The model's folder, as in a block's key, that a shard lies in."""
    folder = shard.parent.relative_to(root).as_posix()
    return "" if folder == "." else folder


def blocks(root: Path, wanted: Wanted = everything) -> list[Entry]:
    """Every block file there is, with its real size, least recently used first.

    What the index does not know is described from the file's header.
    """
    indexed = _index_or_nothing(root)
    found = [_describe(file.path, file.key, indexed) for file in walk(root) if file.key and wanted(file.key[0])]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.used)


def features(root: Path, wanted: Wanted = everything) -> list[FeatureFile]:
    """Every file of image features under the root, of the models whose folder is wanted; in the order of names."""
    found: list[FeatureFile] = []
    for folder in folders(root):
        with contextlib.suppress(OSError):
            found += sorted(feature_files(folder))
    return [file for file in found if wanted(folder_name(served_model(file.label.key.model_name)))]


class FeatureUsage(NamedTuple):
    """What there is under one of the names of a model's features: other weights, or numerics, have another."""

    model: str
    model_name: str
    images: int
    nbytes: int
    used_ns: int


def feature_usage(files: Iterable[FeatureFile]) -> list[FeatureUsage]:
    """The features summed up by model name, in the order of names."""
    sums: dict[str, FeatureUsage] = {}
    for file in files:
        name = file.label.key.model_name
        old = sums.get(name, FeatureUsage(served_model(name), name, 0, 0, 0))
        nbytes, used = old.nbytes + file.nbytes, max(old.used_ns, file.used_ns)
        sums[name] = FeatureUsage(old.model, name, old.images + 1, nbytes, used)
    return sorted(sums.values())


def usage(entries: Iterable[Entry]) -> list[FolderUsage]:
    """The blocks summed up by folder, in the order of names."""
    sums: dict[str, FolderUsage] = {}
    for e in entries:
        old = sums.get(e.folder, FolderUsage(e.folder, 0, 0, 0, 0, 0))
        tokens, size = old.tokens + e.meta.token_count, old.nbytes + e.meta.file_size
        used = max(old.used_ns, e.used)
        sums[e.folder] = FolderUsage(e.folder, old.blocks + 1, tokens, size, old.stale + e.stale, used)
    return sorted(sums.values())


def _index_or_nothing(root: Path) -> dict[Key, Entry]:
    with contextlib.suppress(OSError, ValueError):
        return {entry.key: entry for entry in read_index(root / INDEX_NAME)}
    return {}


def _describe(path: Path, key: Key, indexed: dict[Key, Entry]) -> Entry | None:
    """None if the file is gone meanwhile."""
    try:
        stat = path.stat()
        known = indexed.get(key)
        if known is not None:
            return replace(known, meta=known.meta._replace(file_size=stat.st_size))
        try:
            return Entry(key[0], read_meta(path)._replace(block_hash=key[1]), stat.st_mtime_ns)
        except DamagedBlock:
            return replace(stale_entry(key, stat.st_size), used=stat.st_mtime_ns)
    except OSError:
        return None


# ---- verify


class Problem(NamedTuple):
    """Something that is not as it should be; `subject` is the block or the file that it is about."""

    subject: Key | Path
    text: str


def verify(root: Path, wanted: Wanted = everything) -> list[Problem]:
    """Index against files, both ways, and every checksum; reads all files.

    If a process works on the root, what is wrong is looked at again for some seconds, and counts if it stays so:
    files and index are a moment apart while blocks are written and removed.
    """
    found = [*_index_problem(root), *_temporary_files(root, wanted)]
    found += _feature_problems(root, wanted)
    rows = _index_or_nothing(root)
    keys = {file.key for file in walk(root) if file.key} | rows.keys()
    found += _block_problems(root, sorted(key for key in keys if wanted(key[0])), rows)
    for _ in range(_LOOKS if found and holder(root) is not None else 0):
        time.sleep(_SETTLE_S)
        found = _still_there(root, wanted, found)
        if not found:
            break
    return found


def _still_there(root: Path, wanted: Wanted, before: list[Problem]) -> list[Problem]:
    suspects = [problem.subject for problem in before if not isinstance(problem.subject, Path)]
    now = [*_index_problem(root), *_temporary_files(root, wanted)]
    now += _feature_problems(root, wanted)
    return [p for p in now if p in before] + list(_block_problems(root, suspects, _index_or_nothing(root)))


def _index_problem(root: Path) -> Iterator[Problem]:
    path = root / INDEX_NAME
    try:
        read_index(path)
    except FileNotFoundError:
        if any(file.key for file in walk(root)):
            yield Problem(path, f"{path} is missing")
    except (OSError, ValueError) as error:
        yield Problem(path, str(error))


def _temporary_files(root: Path, wanted: Wanted) -> Iterator[Problem]:
    found = [f.path for f in walk(root) if f.key is None and wanted(folder_of(root, f.path.parent))]
    if wanted is everything:  # whose features they were to be cannot be seen
        with contextlib.suppress(OSError):
            found += abandoned_files(root / VISION_FOLDER)
    for path in found:
        with contextlib.suppress(OSError):  # renamed meanwhile, as it should be
            # With its time: another write under the same name is another problem.
            since = time.strftime("%F %T", time.localtime(path.stat().st_mtime))
            yield Problem(path, f"{path} is a temporary file that nobody finished, of {since}")


def _feature_problems(root: Path, wanted: Wanted) -> Iterator[Problem]:
    with contextlib.suppress(OSError):
        for path, model_name, holds in sorted(strangers(root / VISION_FOLDER)):
            if wanted(folder_name(served_model(model_name))):
                found = f"holds what {feature_name(holds)} should" if holds else "is cut off, or no features file"
                yield Problem(path, f"{path} {found}")
    for file in features(root, wanted):
        try:
            read_feature_file(file.path, file.label.key, lambda spec: memoryview(bytearray(spec.nbytes)))
        except (FileNotFoundError, UnknownFormat):  # evicted meanwhile; of another version, which is no damage
            continue
        except DamagedBlock as error:
            yield Problem(file.path, f"{file.path} is damaged: {error}")
        except OSError as error:
            yield Problem(file.path, f"{file.path} cannot be read: {error.strerror or error}")


def _block_problems(root: Path, keys: Iterable[Key], rows: dict[Key, Entry]) -> Iterator[Problem]:
    for key in keys:
        text = _examine(block_path(root, key), key, rows.get(key))
        if text is not None:
            yield Problem(key, text)


def _examine(path: Path, key: Key, row: Entry | None) -> str | None:
    """What is wrong with a block, None if all is well."""
    try:
        size = path.stat().st_size
        if row is None:
            return f"{path} is not in the index{_contents(path, key)}"
        if size != row.meta.file_size:
            return f"{path} has {size} bytes, the index says {row.meta.file_size}"
        if not row.stale:
            read_block_file(path, row.meta)
    except FileNotFoundError:
        return f"{path} is in the index and not there" if row else None
    except DamagedBlock as error:
        return f"{path} is damaged: {error}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def _contents(path: Path, key: Key) -> str:
    """What is to be said of a file that the index does not know."""
    try:
        meta = read_meta(path)
        if meta.block_hash != key[1]:
            return ", and holds another block"
        read_block_file(path, meta)
    except UnknownFormat:
        return ", and of another version"
    except DamagedBlock as error:
        return f", and damaged: {error}"
    return ""
