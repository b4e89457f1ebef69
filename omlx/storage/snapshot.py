"""A block table as one file that is read in a moment: columns as they are in memory. docs/FORMAT.md describes it."""

import json
from pathlib import Path
from typing import Any

import xxhash

from omlx.storage.block_table import Packed
from omlx.storage.packed import COLUMNS, RECORD_BYTES
from omlx.storage.tensor_file import opened, replace_file, temporary_path

_MAGIC = b"omlxidx1"
_HEAD = len(_MAGIC) + 8
_CHECKSUM_BYTES = 16
_MOST_TEXT = 1 << 30
_STRIDE = 1 << 20  # hashed while it is in the processor's cache


def snapshot_bytes(blocks: int) -> int:
    """About as many bytes a snapshot of so many blocks takes up; the texts that they share come on top."""
    return _HEAD + blocks * RECORD_BYTES + _CHECKSUM_BYTES


def write_snapshot(path: Path, packed: Packed) -> bytes:
    """Writes the file and returns its checksum. Raises OSError."""
    texts = {
        "count": packed.count,
        "columns": COLUMNS,
        "folders": packed.folders.texts,
        "numerics": packed.numerics.texts,
        "cuts": packed.cuts.texts,
    }
    text = json.dumps(texts).encode("ascii")
    parts = [_MAGIC + len(text).to_bytes(8, "little"), text]
    views = [memoryview(part) for part in parts]
    for name, _, _ in COLUMNS if packed.count else ():
        views.append(memoryview(packed.records.column(name, 1, packed.count)).cast("B"))
    checksum = xxhash.xxh3_128()
    for view in views:
        checksum.update(view)
    digest = checksum.digest()
    replace_file(path, temporary_path(path), [*views, memoryview(digest)])
    return digest


def is_snapshot(path: Path) -> bool:
    """Whether a file begins as our snapshots of any version do. Raises OSError."""
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        return file.read(len(_MAGIC) - 1) == _MAGIC[:-1]


def read_snapshot(path: Path, checksum: bytes) -> Packed:
    """What was written under this checksum. Raises ValueError if the file holds anything else, OSError."""
    found = xxhash.xxh3_128()
    with opened(path) as fd, open(fd, "rb", buffering=0, closefd=False) as file:

        def take(view: memoryview) -> memoryview:
            if file.readinto(view) != view.nbytes:
                raise ValueError("it ends early")
            found.update(view)
            return view

        head = bytes(take(memoryview(bytearray(_HEAD))))
        size = int.from_bytes(head[len(_MAGIC) :], "little")
        if head[: len(_MAGIC)] != _MAGIC or size > min(_MOST_TEXT, path.stat().st_size):
            raise ValueError("it is no snapshot of this version")
        packed = _prepare(json.loads(bytes(take(memoryview(bytearray(size))))), path.stat().st_size)
        for name, _, _ in COLUMNS if packed.count else ():
            column = packed.records.column(name, 1, packed.count)
            for at in range(0, column.nbytes, _STRIDE):
                take(memoryview(column).cast("B")[at : at + _STRIDE])
        if found.digest() != checksum or file.read() != checksum:
            raise ValueError("its checksum is wrong")
    packed.check()
    return packed


def _prepare(texts: dict[str, Any], file_size: int) -> Packed:
    """Room for the records, once the numbers are plausible: the checksum is known only at the end."""
    try:
        count, columns = texts["count"], [tuple(column) for column in texts["columns"]]
        if columns != list(COLUMNS) or not 0 <= count <= file_size // RECORD_BYTES:
            raise ValueError("its columns are others")
        return Packed(count, texts["folders"], texts["numerics"], texts["cuts"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"its texts cannot be read: {exc!r}") from exc
