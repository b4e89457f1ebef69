"""Names and places under a cache root: which files are ours, and who may change them.

A file is ours by its place and its name alone, so what others put there is never touched.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from omlx.errors import OmlxError
from omlx.storage.bookkeeping import Key
from omlx.storage.tensor_file import TEMP_PREFIX, TEMP_SUFFIX

_LOOK_S = 0.1  # longer than another process needs to see whether a root is locked
LOCK_NAME = ".lock"
INDEX_NAME = "index.sqlite"
SNAPSHOT_NAME = "index.snapshot"
VISION_FOLDER = "vision_features"  # of image features, beside the models' folders
SUFFIX = ".safetensors"
MAX_HASH_BYTES = 64

_HEX = "0123456789abcdef"
_LONGEST_NAME = 200  # file systems take 255 bytes, or a little less with encryption
_MAX_DEPTH = 3  # a model's folder lies at most this deep: nobody's home folder is searched through
_BLOCK_NAME = re.compile(rf"(?:[0-9a-f]{{2}}){{1,{MAX_HASH_BYTES}}}\.safetensors")
_MAX_LOCK_BYTES = 200
_LOCK_TEXT = re.compile(rb"[\d\s]*(?:\d+\n[\d a-f]*\n?)?")  # what any version writes, or a part of it

log = logging.getLogger(__name__)


class StoreLocked(OmlxError):
    """Another process works on the cache folder."""


class FoundFile(NamedTuple):
    """A file of ours under the root; a block's folder is "" for the root itself, else "a" or "a/b"."""

    path: Path
    key: Key | None  # None for a temporary file


@lru_cache(maxsize=1024)
def check_folder(folder: str) -> str:
    """The folder if it lies under the root and cannot be taken for a shard, else ValueError."""
    parts = folder.split("/") if folder else []
    if len(parts) > _MAX_DEPTH or any(part in ("", ".", "..", *_HEX) for part in parts) or "\0" in folder:
        raise ValueError(f"{folder!r} cannot be a model's folder under a cache root")
    return folder


def folder_name(model_name: str) -> str:
    """A model's folder under the cache root: one safe path component, distinct for distinct names.

    Letters, digits, "-" and "_" stay, and dots that do not lead; the rest is written as %XX of its
    UTF-8 bytes. One-letter names (a shard's name) and those that the root uses itself get a "%" in
    front; names too long for a file system are cut, and end in "~" and a digest.
    """
    name = escaped(model_name, "._-")
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(model_name.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{name[: _LONGEST_NAME - 17]}~{digest[:16]}"
    return f"%{name}" if _is_taken(name) else name


def _is_taken(name: str) -> bool:
    """Whether the root has another use for an entry of this name."""
    lower = name.lower()
    return len(name) < 2 or lower.startswith((INDEX_NAME, SNAPSHOT_NAME)) or lower == VISION_FOLDER


def escaped(text: str, kept: str) -> str:
    """The text with all but letters, digits and `kept`, and a leading dot, as %XX of its UTF-8 bytes."""
    safe = re.sub(rf"[^A-Za-z0-9{re.escape(kept)}]", _percent, text)
    return re.sub(r"^\.", "%2E", safe)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def model_of(folder: str) -> str:
    """The model that `folder_name` made this folder for; for people, since other folders have no such name."""
    return unquote(folder[1:] if folder[:1] == "%" and _is_taken(folder[1:]) else folder)


def check_hash(block_hash: bytes) -> bytes:
    if not 1 <= len(block_hash) <= MAX_HASH_BYTES:
        raise ValueError(f"a block hash has 1 to {MAX_HASH_BYTES} bytes, not {len(block_hash)}")
    return block_hash


def check_token_count(count: int) -> int:
    """Raises ValueError for what the index and the files cannot hold."""
    if type(count) is not int or not 0 <= count < 1 << 32:
        raise ValueError(f"a block's token_count must be an int from 0 to {(1 << 32) - 1}, not {count!r}")
    return count


def block_path(root: Path, key: Key) -> Path:
    """<root>/<folder>/<first hex digit>/<hash in hex>.safetensors"""
    name = key[1].hex()
    return Path(root, key[0], name[:1], name + SUFFIX)


def key_of(root: Path, path: Path) -> Key:
    """The other way round."""
    folder = path.parent.parent.relative_to(root).as_posix()
    return "" if folder == "." else folder, bytes.fromhex(path.stem)


def make_folder(path: Path) -> None:
    """Makes a folder and what is missing above it; only the owner can look into them. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def walk(root: Path) -> Iterator[FoundFile]:
    """Every block file and temporary file of ours under the root; folders that cannot be read are left out."""
    yield from _walk(root, "", _MAX_DEPTH)


def _walk(directory: Path, folder: str, depth: int) -> Iterator[FoundFile]:
    for name in _subfolders(directory):
        if name in _HEX:
            yield from _shard(directory / name, folder)
        elif depth:
            yield from _walk(directory / name, f"{folder}/{name}" if folder else name, depth - 1)


def folders(root: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """The root and the folders under it that may be a model's or hold other files of ours; shards are left out."""
    yield root
    for name in _subfolders(root) if depth else ():
        if name not in _HEX:
            yield from folders(root / name, depth - 1)


def _subfolders(directory: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _shard(shard: Path, folder: str) -> Iterator[FoundFile]:
    try:
        names = os.listdir(shard)
    except OSError:
        return
    for name in names:
        if name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX):
            yield FoundFile(shard / name, None)
        elif name[0] == shard.name and _BLOCK_NAME.fullmatch(name):
            yield FoundFile(shard / name, (folder, bytes.fromhex(name.removesuffix(SUFFIX))))


def remove(path: Path) -> None:
    """Takes a file away; a folder in its place is set aside under another name. Raises OSError."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        if not os.path.isdir(path):
            raise
        set_aside(path)


def set_aside(path: Path) -> Path:
    """Renames what is not ours and stands in the place of a file of ours; returns the new path. Raises OSError."""
    aside = path.with_name(f"{path.name}.set-aside-{time.time_ns()}")
    os.rename(path, aside)
    return aside


def tree_mark(root: Path) -> str:
    """Tells whether block files under the root came or went: a digest of the shard folders and their times.

    Reads no shard, so it takes as long with a million blocks as with one.
    """
    digest = hashlib.sha256()
    for folder in sorted(folders(root)):
        for name in sorted(_subfolders(folder)):
            if name in _HEX:
                with contextlib.suppress(OSError):
                    shard = folder / name
                    digest.update(
                        f"{shard.relative_to(root).as_posix()}\0{shard.stat().st_mtime_ns}\n".encode(
                            "utf-8", "surrogateescape"
                        )
                    )
    return digest.hexdigest()[:32]


def file_mark(path: Path) -> str:
    """Tells whether a file was changed: its size and time; "" if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size} {stat.st_mtime_ns}"


def closing_note(root: Path) -> str:
    """What a process that reported everything to the index leaves in the lock file: the state of index and shards."""
    mark = file_mark(root / INDEX_NAME)
    return f"{mark} {tree_mark(root)}" if mark else ""


class FolderState(NamedTuple):
    """What became of a root since a process closed it."""

    closed: bool  # whether a process closed it at all, with everything reported
    index_same: bool  # whether the index file is the one that was left
    shards_same: bool  # whether no block file came or went


def compare_note(root: Path, note: str) -> FolderState:
    """Compares a root with the note in its lock file. Notes of older versions do not cover the shards."""
    index, _, tree = note.rpartition(" ") if note.count(" ") > 1 else (note, "", "")
    return FolderState(bool(note), index == file_mark(root / INDEX_NAME), tree == tree_mark(root))


class FolderLock:
    """The right to change files under a root: a lock on <root>/.lock, held until `release` or the process's end.

    `note` is what the last holder left with its release. Raises StoreLocked, naming the process that has the lock;
    OSError if the folder cannot be used.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK_NAME
        self._fd = self._locked(root)
        if not _LOCK_TEXT.fullmatch(os.pread(self._fd, _MAX_LOCK_BYTES, 0)):
            try:
                log.warning("%s is no lock file: renamed to %s", self._path, set_aside(self._path))
            finally:
                os.close(self._fd)
            self._fd = self._locked(root)
        _, self.note = read_lock(self._fd)
        self._write()

    def _locked(self, root: Path) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _take(fd)
        except OSError as exc:
            locked = _locked_by(root, fd)
            os.close(fd)
            if isinstance(exc, BlockingIOError):
                raise locked from exc
            raise
        return fd

    def _write(self, note: str = "") -> None:
        with contextlib.suppress(OSError):  # on a full disk the number is missing, the lock holds
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n{note}".encode(), 0)

    def in_place(self) -> bool:
        """Whether the folder still is the one that was locked: not deleted, moved away or unmounted."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def leave(self, note: str) -> None:
        """Leaves the next holder a note of one line (see `closing_note`)."""
        if note:
            self._write(f"{note}\n")

    def release(self) -> None:
        """Frees the folder."""
        os.close(self._fd)


def _take(fd: int) -> None:
    """Takes the lock. Raises BlockingIOError if another process has it, and not only looks (`raise_if_locked`)."""
    until = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_LOOK_S / 10)
        else:
            return


def raise_if_locked(root: Path) -> None:
    """Raises StoreLocked if another process works on the root; takes no lock for longer than the look."""
    with contextlib.suppress(OSError), open(root / LOCK_NAME, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked_by(root, file.fileno()) from None


def _locked_by(root: Path, fd: int) -> StoreLocked:
    holder, _ = read_lock(fd)
    return StoreLocked(f"the cache folder {root} is in use by process {holder or 'unknown'}")


def read_lock(fd: int) -> tuple[str, str]:
    """What an open lock file says: the number of the process that took the lock last, and its note."""
    pid, _, note = os.pread(fd, _MAX_LOCK_BYTES, 0).decode("ascii", "replace").partition("\n")
    return pid.strip(), note.strip()
