"""The features of one image as a file: a .npy file that every reader of such files takes, and a trailer behind it.

The trailer, which those readers pass over, names the features and holds a checksum. docs/FORMAT.md describes it.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from omlx.storage.folder import escaped
from omlx.storage.idle_processor import has_idle_processor
from omlx.storage.tensor_file import (
    ALIGNMENT,
    DTYPES,
    BlockBuffer,
    DamagedBlock,
    TensorSpec,
    UnknownFormat,
    fill,
    opened,
    replace_file,
)

FORMAT_VERSION = "1"
SUFFIX = ".npy"

_NAME_BYTES = 255  # what file systems allow
_MARK = b"omlxfeat"
_END = struct.Struct("<16sI8s")  # checksum, length of the label in front of it, mark
_MAX_LABEL = 1 << 20
_SEGMENT = 1 << 18  # bytes read before they are hashed: they are in the processor's cache then
_SHARED = 16  # segments from which on a second thread helps
_HEADER_READ = 1024
_MODEL_NAME = re.compile(r"(.*)-[0-9a-f]{16}(?:\.[0-9a-f]{16})?", re.DOTALL)
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|]\w\d)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \} *\n", re.DOTALL
)
# As MLX writes them: numpy has no bfloat16 and calls it two bytes of anything.
_DESCR = {name: "<V2" if name == "BF16" else dtype.str for name, dtype in DTYPES.items()}
_DTYPE_OF = {descr: name for name, descr in _DESCR.items()}
_helper = ThreadPoolExecutor(1, thread_name_prefix="omlx-reads-features")


class FeatureKey(NamedTuple):
    image_hash: str
    model_name: str


def feature_model_name(name: str, fingerprint: bytes, numerics: str | None = None) -> str:
    """The `model_name` of a served model's features, which other weights under the same name do not have.

    With `numerics`, which is what changes last bits, it is of features under these alone.
    """
    made = f"{name}-{fingerprint[:8].hex():0<16}"
    return made if numerics is None else f"{made}.{hashlib.sha256(numerics.encode()).hexdigest()[:16]}"


def served_model(model_name: str) -> str:
    """The `name` that `feature_model_name` was given; the whole of a name that it did not make."""
    found = _MODEL_NAME.fullmatch(model_name)
    return found[1] if found else model_name


class FeatureLabel(NamedTuple):
    """Whose features a file holds, and in which format."""

    key: FeatureKey
    format: str

    @property
    def known(self) -> bool:
        """Whether the format is this version's."""
        return self.format == FORMAT_VERSION


def feature_name(key: FeatureKey) -> str:
    """`<image_hash>_<model_name>.npy`, safe in every folder and distinct for distinct keys.

    What is not a letter, digit, "-" or "." is written as %XX of its UTF-8 bytes, except "_" in the model's
    name. A name too long for a file system ends with "~" and the SHA-256 of the whole one.
    """
    name = f"{escaped(key.image_hash, '-.')}_{escaped(key.model_name, '-._')}"
    if len(name) + len(SUFFIX) > _NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _NAME_BYTES - len(SUFFIX) - len(digest) - 1]}~{digest}"
    return name + SUFFIX


def feature_file_size(key: FeatureKey, spec: TensorSpec) -> int:
    """Exact bytes of the file."""
    return len(_header(spec)) + spec.nbytes + len(_label(key)) + _END.size


def write_feature_file(path: Path, temporary: Path, key: FeatureKey, features: BlockBuffer) -> None:
    """Writes a block of one tensor under the `temporary` name, then renames it. Raises OSError."""
    header, label, data = _header(features.specs[0]), _label(key), memoryview(features.data)
    digests = [xxhash.xxh3_128_digest(data[at : at + _SEGMENT]) for at in range(0, data.nbytes, _SEGMENT)]
    trailer = _trailer(header, label, digests)
    replace_file(path, temporary, [memoryview(header), data, memoryview(trailer)])


def read_feature_file(path: Path, key: FeatureKey, place: Callable[[TensorSpec], memoryview]) -> int:
    """Reads the features into the memory (1-D, format "B") that `place` has for them; returns the file's size.

    Raises DamagedBlock unless the file holds the features of this key and all its bytes are as they were
    written, UnknownFormat if it is one of another version, OSError if it cannot be read. The memory then holds
    garbage.
    """
    with opened(path) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedBlock("it is no file")
        try:
            _read_checked(fd, status.st_size, key, place)
        except DamagedBlock:
            found = _read_label(fd)
            if found is not None and found.key == key and not found.known:
                raise UnknownFormat(f"its format is {found.format!r}") from None
            raise
        return status.st_size


def _read_checked(fd: int, size: int, key: FeatureKey, place: Callable[[TensorSpec], memoryview]) -> None:
    spec, header = _read_header(fd)
    label = _label(key)
    if size != len(header) + spec.nbytes + len(label) + _END.size:
        raise DamagedBlock(f"its length is {size}")
    digests = _read_segments(fd, place(spec), len(header))
    trailer = os.pread(fd, len(label) + _END.size, len(header) + spec.nbytes)
    if trailer != _trailer(header, label, digests):
        raise DamagedBlock("it was changed, or holds the features of another image")


def _read_segments(fd: int, data: memoryview, offset: int) -> list[bytes]:
    """Fills `data` from `offset` on; the digest of each segment. Raises DamagedBlock, OSError.

    Where a processor has nothing to do, another thread reads and hashes some of them.
    """
    digests = [b""] * -(-data.nbytes // _SEGMENT)
    left = iter(range(len(digests)))
    failures: list[Exception] = []

    def work() -> None:
        try:
            for index in left:
                segment, at = data[index * _SEGMENT : (index + 1) * _SEGMENT], offset + index * _SEGMENT
                if (got := os.preadv(fd, [segment], at)) < segment.nbytes:
                    fill(fd, [segment[got:]], at + got)
                digests[index] = xxhash.xxh3_128_digest(segment)
        except (OSError, DamagedBlock) as error:
            failures.append(error)

    helper = _ask_for_help(work) if len(digests) >= _SHARED and has_idle_processor() else None
    work()
    if helper is not None and not helper.cancel():  # if it has not begun by now, nobody waits for it
        helper.result()
    data = memoryview(b"")  # a task that was cancelled is in the queue still, and would keep the memory
    if failures:
        raise failures[0]
    return digests


def _ask_for_help(work: Callable[[], None]) -> "Future[None] | None":
    with contextlib.suppress(RuntimeError):  # when the interpreter ends, there is none any more
        return _helper.submit(work)
    return None


def _trailer(header: bytes, label: bytes, digests: list[bytes]) -> bytes:
    checksum = xxhash.xxh3_128_digest(header + label + b"".join(digests))
    return label + _END.pack(checksum, len(label), _MARK)


def read_label(path: Path) -> FeatureLabel | None:
    """What the file says of itself; None if it is no whole file of ours. Raises OSError."""
    with opened(path) as fd:
        return _read_label(fd)


def _read_label(fd: int) -> FeatureLabel | None:
    size = os.fstat(fd).st_size
    if size < _END.size:
        return None
    _, length, mark = _END.unpack(os.pread(fd, _END.size, size - _END.size))
    if mark != _MARK or length > min(_MAX_LABEL, size - _END.size):
        return None
    label = os.pread(fd, length, size - _END.size - length)
    try:
        fields = json.loads(label)
        return FeatureLabel(FeatureKey(str(fields["image_hash"]), str(fields["model_name"])), str(fields["format"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _label(key: FeatureKey) -> bytes:
    fields = {"format": FORMAT_VERSION, "image_hash": key.image_hash, "model_name": key.model_name}
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def _header(spec: TensorSpec) -> bytes:
    """The head of a .npy file of version 1.0, padded so that the data begins at a multiple of 64."""
    text = f"{{'descr': '{_DESCR[spec.dtype]}', 'fortran_order': False, 'shape': {tuple(spec.shape)!r}, }}"
    size = -(-(10 + len(text) + 1) // ALIGNMENT) * ALIGNMENT
    return b"\x93NUMPY\x01\x00" + (size - 10).to_bytes(2, "little") + text.ljust(size - 11).encode("ascii") + b"\n"


def _read_header(fd: int) -> tuple[TensorSpec, bytes]:
    """What the data is, and the header, which is one that `_header` makes. Raises DamagedBlock."""
    raw = os.pread(fd, _HEADER_READ, 0)
    found = _HEADER.match(raw)
    dtype = _DTYPE_OF.get(found[1].decode("latin-1")) if found else None
    if found is None or dtype is None:
        raise DamagedBlock("it has no header of ours")
    spec = TensorSpec("features", dtype, tuple(int(n) for n in found[2].replace(b",", b" ").split()))
    header = _header(spec)
    if raw[: len(header)] != header:
        raise DamagedBlock("its header was changed")
    return spec, header
