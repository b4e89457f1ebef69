"""The features of one image as a file: a .npy file that every reader of such files takes, and a trailer behind it.

The trailer, which those readers pass over, names the features and holds a checksum. docs/FORMAT.md describes it.
"""

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import xxhash

from omlx.storage.folder import escaped
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
_SEGMENT = 1 << 20  # bytes read before they are hashed: they are in the processor's cache then
_HEADER_READ = 1024
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|]\w\d)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \} *\n", re.DOTALL
)
# As MLX writes them: numpy has no bfloat16 and calls it two bytes of anything.
_DESCR = {name: "<V2" if name == "BF16" else dtype.str for name, dtype in DTYPES.items()}
_DTYPE_OF = {descr: name for name, descr in _DESCR.items()}


class FeatureKey(NamedTuple):
    image_hash: str
    model_name: str


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
    checksum = xxhash.xxh3_128(header + label)
    for at in range(0, data.nbytes, _SEGMENT):
        checksum.update(xxhash.xxh3_128_digest(data[at : at + _SEGMENT]))
    trailer = label + _END.pack(checksum.digest(), len(label), _MARK)
    replace_file(path, temporary, [memoryview(header), data, memoryview(trailer)])


def read_feature_file(path: Path, key: FeatureKey, place: Callable[[TensorSpec], memoryview]) -> int:
    """Reads the features into the memory (1-D, format "B") that `place` has for them; returns the file's size.

    Raises DamagedBlock unless the file holds the features of this key and all its bytes are as they were
    written, UnknownFormat if it is one of another version, OSError if it cannot be read. The memory then holds
    garbage.
    """
    label = _label(key)
    with opened(path) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedBlock("it is no file")
        found = _read_label(fd)
        if found is not None and found.key == key and not found.known:
            raise UnknownFormat(f"its format is {found.format!r}")
        size = os.fstat(fd).st_size
        spec, header = _read_header(fd)
        if size != feature_file_size(key, spec):
            raise DamagedBlock(f"its length is {size}")
        data = place(spec)
        checksum = xxhash.xxh3_128(header + label)
        for at in range(0, data.nbytes, _SEGMENT):
            segment = data[at : at + _SEGMENT]
            fill(fd, [segment], len(header) + at)
            checksum.update(xxhash.xxh3_128_digest(segment))
        trailer = os.pread(fd, len(label) + _END.size, len(header) + data.nbytes)
    if trailer != label + _END.pack(checksum.digest(), len(label), _MARK):
        raise DamagedBlock("it was changed, or holds the features of another image")
    return size


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
