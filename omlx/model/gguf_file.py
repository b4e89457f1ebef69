"""The header of a GGUF file: its metadata, and the names, types and shapes of its tensors.

MLX reads tensors and metadata of GGUF files but not the tensors' types, leaves out tensors of
unknown types without a word, and misreads some (Q4_K); so the types are looked at here first.
The layout: magic "GGUF", u32 version, u64 tensor count, u64 metadata count, the metadata (key,
type, value), then for each tensor name, rank, dimensions (fastest first), type, offset. All little
endian; a string is a u64 length and UTF-8 bytes.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from omlx.errors import ModelError

_MAX_ITEMS = 1 << 24
_MAX_STRING = 1 << 26
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip


class GgufTensor(NamedTuple):
    """`type` is a name such as "Q4_1" ("type 99" if unknown); `shape` has rows first, as in numpy."""

    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata values are plain Python values; arrays are lists."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, versions 2 and 3. Raises ModelError for anything else."""
    try:
        with path.open("rb") as file:
            return _Reader(file).header()
    except (struct.error, UnicodeDecodeError, EOFError, RecursionError) as error:
        raise ModelError(f"{path}: damaged or truncated GGUF file") from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ValueError("not a GGUF file")
        if (version := self._scalar("I")) not in (2, 3):
            raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, metadata_count = self._count(), self._count()
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(metadata_count)}
        return GgufHeader(metadata, dict(self._tensor() for _ in range(tensor_count)))

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        rank = self._scalar("I")
        if rank > 8:
            raise EOFError
        dimensions = struct.unpack(f"<{rank}Q", self._bytes(8 * rank))
        kind = self._scalar("I")
        self._bytes(8)
        return name, GgufTensor(_TYPE_NAMES.get(kind, f"type {kind}"), dimensions[::-1])

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        item, count = self._scalar("I"), self._count()
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(count)]
        code = self._code(item)
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(code))))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise EOFError
        return _SCALARS[kind]

    def _count(self) -> int:
        count: int = self._scalar("Q")
        if count > _MAX_ITEMS:
            raise EOFError
        return count

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > _MAX_STRING:
            raise EOFError
        return self._bytes(length).decode()

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise EOFError
        return data
