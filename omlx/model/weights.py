"""The weight files of a model folder: which of them count, and what their headers say."""

import fnmatch
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omlx.errors import ModelError
from omlx.model.json_file import parse_json, read_bytes

WEIGHT_PATTERN = "model*.safetensors"
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor. Where there is one, only the files that it names are loaded."""

MOST_TENSORS = 400_000
"""Of a model. The largest published ones have about 210,000, in some sixty files."""

_MOST_HEADER = 64 << 20
_VALUES_PER_TENSOR = 12  # a name, a dtype, a shape, two offsets, and what stands between them
_MOST_SIDE = 1 << 31  # MLX counts along an axis in 32 bits
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_LEFT_OUT = re.compile(r".*\.(py|pyc|so|dylib)|generation_config\.json", re.IGNORECASE)


class FileIdentity(NamedTuple):
    """Changes whenever a file is written to or replaced: nobody but the system sets the last of these."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def identity_of(path: Path) -> FileIdentity:
    """Of the file that a path leads to. Raises OSError."""
    stat = path.stat()
    return FileIdentity(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file whose header describes exactly the bytes that follow it.

    `header` is the JSON as stored, `tensors` are the names in it. `identity` is what the file was when it was read.
    """

    path: Path
    size: int
    header: bytes
    tensors: tuple[str, ...]
    identity: FileIdentity


def weight_paths(path: Path) -> list[Path]:
    """What looks like a weight file in a folder, in name order; empty for a folder that cannot be read."""
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if fnmatch.fnmatchcase(entry.name, WEIGHT_PATTERN)]
    except OSError:
        return []
    return sorted(path / name for name in names if os.path.isfile(path / name))


def read_weight_files(path: Path) -> list[WeightFile]:
    """The weight files that are loaded from a folder, in name order.

    Raises ModelError, in one line, for a damaged or truncated file, for an index that does not agree with the files,
    and for a tensor that is in two of them: which one counts would depend on the order of the directory.
    """
    index = path / INDEX
    places = _read_index(index) if os.path.lexists(index) else None
    files: list[WeightFile] = []
    owners: dict[str, Path] = {}
    for file in weight_paths(path) if places is None else _named_files(path, places):
        files.append(read_weight_file(file))
        for tensor in files[-1].tensors:
            if (other := owners.setdefault(tensor, file)) != file:
                both = f"both {other.name} and {file.name}"
                raise ModelError(f"{path}: tensor {tensor!r} is in {both}; remove the wrong one")
        if len(owners) > MOST_TENSORS:
            raise ModelError(f"{path}: more than {MOST_TENSORS:,} tensors")
    for tensor, name in (places or {}).items():
        if owners.get(tensor) != path / name:
            raise ModelError(f"{path}: {INDEX} places tensor {tensor!r} in {name}, where it is not")
    return files


def _read_index(file: Path) -> dict[str, str]:
    content = parse_json(read_bytes(file, _MOST_HEADER), str(file), _VALUES_PER_TENSOR * MOST_TENSORS)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{file}: no weight_map from tensors to files")
    return places


def _named_files(path: Path, places: dict[str, str]) -> list[Path]:
    names = sorted(set(places.values()))
    for name in names:
        if "/" in name or not fnmatch.fnmatchcase(name, WEIGHT_PATTERN):
            raise ModelError(f"{path}: {INDEX} names {name!r}, which is no weight file ({WEIGHT_PATTERN})")
        if not os.path.isfile(path / name):
            raise ModelError(f"{path}: {INDEX} names {name}, which is missing (an unfinished download?)")
    if not names:
        raise ModelError(f"{path}: {INDEX} names no weight file")
    return [path / name for name in names]


def read_weight_file(path: Path) -> WeightFile:
    """The header of a safetensors file. Raises ModelError unless it describes all bytes of the file, each once."""
    try:
        identity = identity_of(path)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    header = read_header(path)
    size, length = identity.size, len(header)
    if header.count(b'"data_offsets"') > MOST_TENSORS:
        raise ModelError(f"{path}: more than {MOST_TENSORS:,} tensors")
    content = parse_json(header, f"{path}: damaged safetensors file", _VALUES_PER_TENSOR * MOST_TENSORS)
    end, tensors = 0, sorted(_spans(path, content))
    for start, stop, name in tensors:
        if start != end:
            raise ModelError(f"{path}: damaged safetensors file (tensor {name!r} does not follow the one before it)")
        end = stop
    if size != 8 + length + end:
        raise ModelError(f"{path}: {size} bytes instead of {8 + length + end} (an unfinished download?)")
    return WeightFile(path, size, header, tuple(name for _, _, name in tensors), identity)


def read_header(path: Path) -> bytes:
    """The header of a safetensors file as it is stored, unchecked. Raises ModelError for a file that has none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ModelError(f"{path}: not a safetensors file, or truncated")
            if length > _MOST_HEADER:
                raise ModelError(f"{path}: a header of more than {_MOST_HEADER >> 20} MiB")
            return file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error


def _spans(path: Path, content: Any) -> list[tuple[int, int, str]]:
    """(start, end, name) of each tensor. Raises ModelError where offsets and shape do not agree: MLX trusts them."""
    name = ""
    try:
        spans = []
        for name, entry in content.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape, bits = entry["shape"], _BITS.get(entry["dtype"])
            if not all(type(side) is int and 0 <= side < _MOST_SIDE for side in shape):
                raise ValueError(f"shape {shape}")
            if type(start) is not int or type(end) is not int or not 0 <= start <= end:
                raise ValueError(f"offsets {start} and {end}")
            if bits is not None and math.prod(shape) * bits != 8 * (end - start):
                raise ValueError(f"{end - start} bytes for {entry['dtype']} of shape {shape}")
            spans.append((start, end, name))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ModelError(f"{path}: damaged safetensors file (tensor {name!r}: {reason})") from error
    return spans


@contextmanager
def only_these_weights(path: Path, files: list[WeightFile]) -> Iterator[Path]:
    """A temporary folder of links to what is in a model folder, but for other weight files and for code.

    mlx-lm loads every file that matches a pattern, whatever the index says, and takes a folder's name for a pattern
    too; mlx-vlm loads every safetensors file. Both trust generation_config.json, which says nothing of weights
    (model/generation_config reads it).
    """
    wanted = {file.path.name for file in files}
    with tempfile.TemporaryDirectory(prefix="omlx-model-") as folder:
        view = Path(folder)
        for name in os.listdir(path):
            if name in wanted or not (
                name.startswith(".") or name.endswith(".safetensors") or _LEFT_OUT.fullmatch(name)
            ):
                (view / name).symlink_to((path / name).absolute())
        yield view
