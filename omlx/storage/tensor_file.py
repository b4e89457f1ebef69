"""One block as bytes: its tensors in one buffer, and the file that holds them.

docs/FORMAT.md describes the file. Its header is a function of the tensors' specs and the block's
metadata, so a reader that knows both compares bytes instead of parsing: a file that was swapped,
cut or changed cannot pass for the one that was asked for.
"""

import base64
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from omlx.storage.idle_memory import IdleMemory

FORMAT_VERSION = "1"
ALIGNMENT = 64
TEMP_PREFIX, TEMP_SUFFIX = ".omlx-", ".tmp"

_IDLE_BLOCKS = 4  # so much memory of former blocks may lie idle
_IOV_MAX = 1024
_STRIDE = 1 << 19  # bytes read or written at a time and hashed while they are in the processor's cache
_MAX_HEADER = 64 << 20
_LENGTH_BYTES = 8
_META_BYTES = 8192  # read at first to learn a block's metadata: enough for more than 1,000 tokens
_DECODER = json.JSONDecoder()
_START = '{"__metadata__":{"checksum":"'
_TOKENS = b'"tokens":"'
_SUM = slice(_LENGTH_BYTES + len(_START), _LENGTH_BYTES + len(_START) + 32)

# numpy has no bfloat16: its bytes are handled as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in (
        ("BOOL", "?"), ("U8", "u1"), ("I8", "i1"), ("U16", "<u2"), ("I16", "<i2"), ("F16", "<f2"), ("BF16", "<u2"),
        ("U32", "<u4"), ("I32", "<i4"), ("F32", "<f4"), ("U64", "<u8"), ("I64", "<i8"), ("F64", "<f8"), ("C64", "<c8"),
    )
}  # fmt: skip


class DamagedBlock(Exception):
    """A file is not the whole and unchanged block that it should be; the message says how."""


class UnknownFormat(DamagedBlock):
    """A block file in the format of another version."""


class TensorSpec(NamedTuple):
    """One tensor of a block: `dtype` is a safetensors name ("F32", "BF16", "U32", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


Specs = tuple[TensorSpec, ...]


class Layout(NamedTuple):
    """Where the tensors lie in the payload: byte offsets (one more than tensors), JSON for the header."""

    offsets: tuple[int, ...]
    json: str

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]


@lru_cache(maxsize=512)
def layout(specs: Specs) -> Layout:
    """Raises ValueError for unknown dtypes, negative sizes and names that are used twice."""
    names = {spec.name for spec in specs}
    if len(names) < len(specs) or "__metadata__" in names:
        raise ValueError("the tensors of a block need distinct names")
    if any(spec.dtype not in DTYPES or min(spec.shape, default=0) < 0 for spec in specs):
        raise ValueError(f"unknown dtype or negative size in {specs}")
    offsets = tuple(accumulate((spec.nbytes for spec in specs), initial=0))
    fields = (
        {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets[i : i + 2]} for i, spec in enumerate(specs)
    )
    return Layout(offsets, "".join(f",{_dump(s.name)}:{_dump(f)}" for s, f in zip(specs, fields, strict=True)))


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


_idle = IdleMemory(_IDLE_BLOCKS)
Payload = npt.NDArray[np.uint8]


class _Memory:
    """What a block's bytes lie in; used for another block once nobody has them any more.

    An object of its own, and without weak references: Python runs a `__del__` before it clears an object's weak
    references, so a block could come back to life while its memory is given away.
    """

    __slots__ = ("data",)

    def __init__(self, data: Payload) -> None:
        self.data = data

    # By default arguments: when the interpreter ends, a module's names are gone before its objects.
    def __del__(self, idle: IdleMemory = _idle, references: Callable[[object], int] = sys.getrefcount) -> None:
        # Not a view of somebody's memory, and no view of ours: a reader's, the writer's.
        if self.data.nbytes and self.data.base is None and references(self.data) == _ALONE:
            idle.give(self.data)


class BlockBuffer:
    """A block in memory: `data` (uint8, 1-D, contiguous) is the payload of its file, byte for byte.

    Nobody changes it once it was given to a store. `unsaved` is True while this is the only copy,
    because its file could not be queued yet: it leaves RAM after all others. The memory of a block that
    nobody has any more is used for another one, unless there is a view of it somewhere.
    """

    __slots__ = ("__weakref__", "_memory", "specs", "unsaved")

    def __init__(self, specs: Specs, data: Payload) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes != layout(specs).nbytes:
            raise ValueError(f"{layout(specs).nbytes} bytes are needed, not {data.dtype} of shape {data.shape}")
        self.specs = specs
        self._memory = _Memory(data)
        self.unsaved = False

    @property
    def data(self) -> Payload:
        return self._memory.data

    def tensors(self) -> list[npt.NDArray[Any]]:
        """`tensor` of all, which is much faster than one by one."""
        offsets = layout(self.specs).offsets
        return [
            np.ndarray(spec.shape, DTYPES[spec.dtype], self.data, offset)
            for spec, offset in zip(self.specs, offsets, strict=False)
        ]

    @classmethod
    def empty(cls, specs: Specs) -> "BlockBuffer":
        """A buffer with arbitrary content, to be filled through `tensor`."""
        return cls(specs, _idle.take(layout(specs).nbytes))

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def tensor(self, index: int) -> npt.NDArray[Any]:
        """A view of one tensor in its shape (bfloat16 as uint16)."""
        start, stop = layout(self.specs).offsets[index : index + 2]
        spec = self.specs[index]
        return self.data[start:stop].view(DTYPES[spec.dtype]).reshape(spec.shape)


_nobodys = _Memory(np.empty(0, np.uint8))
_ALONE = sys.getrefcount(_nobodys.data)  # where nothing else has it


class BlockMeta(NamedTuple):
    """What is known of a block without its tensors.

    `block_hash`: 1 to 64 bytes. `parent`: the hash of the block before it, at most 64 bytes. `tokens`: its
    token ids as uint32 little endian, None where they were left on disk: the block's file has them. `start`:
    the absolute position of the first. `exact_tokens`, `cuts` and `numerics` belong to the prefix cache.
    `file_size`: exact bytes of its file.
    """

    block_hash: bytes
    token_count: int
    parent: bytes = b""
    tokens: bytes | None = b""
    start: int = 0
    exact_tokens: int = 0
    cuts: tuple[int, ...] = ()
    numerics: str = ""
    file_size: int = 0


class WholeBlock(NamedTuple):
    """A block's payload, and all that is known of it, token ids included."""

    data: BlockBuffer
    meta: BlockMeta


def build_header(specs: Specs, meta: BlockMeta) -> bytes:
    """Everything in front of the payload, with zeros where the checksum goes. Needs the block's tokens."""
    assert meta.tokens is not None
    tensors = layout(specs)
    fields = _dump({
        "format": FORMAT_VERSION,
        "hash": meta.block_hash.hex(),
        "parent": meta.parent.hex(),
        "token_count": str(meta.token_count),
        "tokens": base64.b64encode(meta.tokens).decode(),
        "start": str(meta.start),
        "exact_tokens": str(meta.exact_tokens),
        "cuts": ",".join(map(str, meta.cuts)),
        "numerics": meta.numerics,
    })  # fmt: skip
    lead = _START + "0" * 32 + '","file_length":"'
    used = _LENGTH_BYTES + len(lead) + 20 + len('",') + len(fields) - 1 + len("}") - 1 + len(tensors.json) + len("}")
    size = -(-used // ALIGNMENT) * ALIGNMENT
    text = f'{lead}{size + tensors.nbytes:020d}",{fields[1:]}{tensors.json}}}'
    return (size - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(size - _LENGTH_BYTES).encode("ascii")


def with_size(specs: Specs, meta: BlockMeta) -> BlockMeta:
    """`meta` with the exact size of its file."""
    return meta._replace(file_size=len(build_header(specs, meta)) + layout(specs).nbytes)


# ---- writing


def temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMP_PREFIX}{path.stem}{TEMP_SUFFIX}")


def write_block_file(path: Path, block: BlockBuffer, meta: BlockMeta) -> None:
    """Writes the block under a temporary name in the same folder, then renames it. Raises OSError.

    No fsync: after a power loss the file may be torn, and a torn file does not pass its checksum.
    """
    header = build_header(block.specs, meta)
    checksum = xxhash.xxh3_128(header)
    payload = memoryview(block.data)
    with _replacing(path, temporary_path(path)) as fd:
        _reserve(fd, len(header) + len(payload))
        _write_all(fd, [memoryview(header)])
        for at in range(0, len(payload), _STRIDE):
            _write_all(fd, [payload[at : at + _STRIDE]])
            checksum.update(payload[at : at + _STRIDE])
        if os.pwrite(fd, checksum.hexdigest().encode(), _SUM.start) < _SUM.stop - _SUM.start:
            raise OSError(f"the checksum of {path} could not be written")


def replace_file(path: Path, temporary: Path, views: list[memoryview]) -> None:
    """Writes bytes under a `temporary` name, then renames it: `path` is the old file or the new one. Raises OSError."""
    with _replacing(path, temporary) as fd:
        _write_all(fd, views)


@contextlib.contextmanager
def _replacing(path: Path, temporary: Path) -> Iterator[int]:
    """A descriptor of a new file that takes the place of `path` at the end; after an OSError it is gone."""
    try:
        # Not through a link that lies in its place.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _reserve(fd: int, nbytes: int) -> None:
    """Asks for a file's room at once, which makes writing it cheaper. Raises OSError if there is none."""
    if sys.platform == "linux":
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
                raise


def _write_all(fd: int, views: list[memoryview]) -> None:
    while views:
        views = _behind(views, os.writev(fd, views))


def _behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after the first `done` bytes."""
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


# ---- reading


def read_into(path: Path, specs: Specs, meta: BlockMeta, pieces: Sequence[memoryview]) -> None:
    """Reads the payload straight into `pieces` (writable bytes, in file order, exactly its size).

    Raises DamagedBlock unless the file holds exactly this block and all its bytes are as they were
    written, OSError if it cannot be read. The pieces then hold garbage.
    """
    if sum(map(len, pieces)) != layout(specs).nbytes:
        raise ValueError(f"the pieces hold other than {layout(specs).nbytes} bytes")
    with opened(path) as fd:
        _read_checked(fd, specs, meta, pieces)


def read_block_file(path: Path, meta: BlockMeta) -> WholeBlock:
    """The block with this metadata; its specs come from the file. Raises like `read_into`."""
    with opened(path) as fd:
        specs, found = _parse(_read_raw_header(fd), os.fstat(fd).st_size)
        block = BlockBuffer.empty(specs)
        _read_checked(fd, specs, meta, [memoryview(block.data)])
        return WholeBlock(block, meta._replace(tokens=found.tokens))


def read_header(path: Path) -> tuple[Specs, BlockMeta]:
    """What the file says of itself; its payload is not read. Raises DamagedBlock, OSError."""
    with opened(path) as fd:
        return _parse(_read_raw_header(fd), os.fstat(fd).st_size)


def read_meta(path: Path) -> BlockMeta:
    """The metadata of `read_header` in a tenth of its time: the part of the header about tensors is passed over.

    What is wrong there comes out when the block is read. Raises DamagedBlock, OSError.
    """
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, _LENGTH_BYTES + _META_BYTES, 0)
        try:
            text = head[_LENGTH_BYTES:].decode("ascii")
            if not text.startswith(_START):
                raise ValueError("it begins otherwise")
            fields, _ = _DECODER.raw_decode(text, text.index(":") + 1)
            meta = _meta(fields, size)
            whole = fields["format"] == FORMAT_VERSION and int(fields["file_length"]) == size
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False  # cut off, longer than was read, or no header of ours
        return meta if whole else _parse(_read_raw_header(fd), size)[1]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor to read from."""
    # O_NONBLOCK: something that is no regular file must not hold up the reader.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_checked(fd: int, specs: Specs, meta: BlockMeta, pieces: Sequence[memoryview]) -> None:
    size, nbytes = os.fstat(fd).st_size, layout(specs).nbytes
    if size != meta.file_size or size <= nbytes:
        raise DamagedBlock(f"its length is {size}")
    offset = size - nbytes
    found = os.pread(fd, offset, 0)
    checksum = xxhash.xxh3_128(_checked_header(found, specs, meta))
    for batch in _batches(pieces, nbytes):
        offset += fill(fd, batch, offset)
        for piece in batch:
            checksum.update(piece)
    if checksum.hexdigest().encode() != found[_SUM]:
        raise DamagedBlock("its checksum is wrong")


def _checked_header(found: bytes, specs: Specs, meta: BlockMeta) -> bytes:
    """The header with zeros for its checksum. Raises DamagedBlock unless it is that of this very block."""
    if meta.tokens is None:
        meta = meta._replace(tokens=_tokens_in(found))
    header = build_header(specs, meta)
    if found[: _SUM.start] != header[: _SUM.start] or found[_SUM.stop :] != header[_SUM.stop :]:
        raise DamagedBlock("its header is that of another block or was changed")
    return header


def _tokens_in(header: bytes) -> bytes:
    """What a header says of the tokens. Nothing else is looked at: the whole header is compared afterwards."""
    start = header.find(_TOKENS) + len(_TOKENS)
    try:
        return base64.b64decode(header[start : header.index(b'"', start)], validate=True)
    except ValueError as exc:
        raise DamagedBlock("its header has no tokens") from exc


def _batches(pieces: Sequence[memoryview], nbytes: int) -> Iterator[Sequence[memoryview]]:
    """Runs of about `_STRIDE` bytes of pieces that hold `nbytes`: for one preadv, and the hashing after it.

    By number, not by size: the pieces of a block are alike, and there are hundreds.
    """
    if nbytes and not 0 < min(map(len, pieces)) <= max(map(len, pieces)) <= _STRIDE:
        pieces = [piece[at : at + _STRIDE] for piece in pieces for at in range(0, len(piece), _STRIDE)]
    count = min(_IOV_MAX, max(1, _STRIDE * len(pieces) // max(1, nbytes)))
    for first in range(0, len(pieces), count):
        yield pieces[first : first + count]


def fill(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Reads into at most 1024 `views` (bytes) from `offset` on; returns how many bytes they hold.

    Raises DamagedBlock if the file ends before they are full.
    """
    nbytes = left = sum(map(len, views))
    while left:
        got = os.preadv(fd, views, offset)
        if not got:
            raise DamagedBlock("it ends early")
        offset += got
        left -= got
        if left:
            views = _behind(views, got)
    return nbytes


def _read_raw_header(fd: int) -> bytes:
    size = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little") + _LENGTH_BYTES
    if size > min(_MAX_HEADER, os.fstat(fd).st_size):
        raise DamagedBlock("it has no header")
    raw = os.pread(fd, size, 0)
    if len(raw) < size:
        raise DamagedBlock("it ends early")
    return raw


def _parse(raw: bytes, file_size: int) -> tuple[Specs, BlockMeta]:
    """Raises DamagedBlock unless the header is one that `build_header` makes and fits the file's size."""
    try:
        entries = json.loads(raw[_LENGTH_BYTES:])
        fields = entries.pop("__metadata__")
        if fields["format"] != FORMAT_VERSION:
            raise UnknownFormat(f"its format is {fields['format']!r}")
        specs = tuple(TensorSpec(name, e["dtype"], tuple(map(int, e["shape"]))) for name, e in entries.items())
        meta = _meta(fields, file_size)
        expected = build_header(specs, meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise DamagedBlock(f"its header cannot be read: {exc!r}") from exc
    if raw[: _SUM.start] + b"0" * 32 + raw[_SUM.stop :] != expected or file_size != len(raw) + layout(specs).nbytes:
        raise DamagedBlock("its header was changed or its length is wrong")
    return specs, meta


def _meta(fields: dict[str, str], file_size: int) -> BlockMeta:
    return BlockMeta(
        block_hash=bytes.fromhex(fields["hash"]),
        parent=bytes.fromhex(fields["parent"]),
        token_count=int(fields["token_count"]),
        tokens=base64.b64decode(fields["tokens"], validate=True),
        start=int(fields["start"]),
        exact_tokens=int(fields["exact_tokens"]),
        cuts=tuple(int(cut) for cut in fields["cuts"].split(",") if cut),
        numerics=fields["numerics"],
        file_size=file_size,
    )
