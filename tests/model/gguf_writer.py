"""GGUF files for tests: written byte by byte, so that every tensor type can be in them."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30, "unknown": 99}


class Tensor(NamedTuple):
    type: str
    shape: tuple[int, ...]
    data: bytes


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    data = b""
    for name, tensor in tensors.items():
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        out += _string(name) + dimensions + struct.pack("<IQ", TYPES[tensor.type], len(data))
        data += _padded(tensor.data)
    path.write_bytes(_padded(out) + data)
    return path


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 32)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    kind, packed = _packed(value)
    return struct.pack("<I", kind) + packed


def _packed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            items = [_packed(item) for item in value]
            return 9, struct.pack("<IQ", items[0][0] if items else 4, len(items)) + b"".join(data for _, data in items)
    raise TypeError(type(value))


def plain(array: NDArray[Any], kind: str = "F32") -> Tensor:
    """A tensor stored as numbers of one type."""
    if kind == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16
        return Tensor(kind, array.shape, bits.astype(np.uint16).tobytes())
    return Tensor(kind, array.shape, array.astype({"F32": np.float32, "F16": np.float16}[kind]).tobytes())


def quantised(array: NDArray[np.float32], kind: str) -> tuple[Tensor, NDArray[np.float32]]:
    """`array` rounded to groups of 32, and the numbers that the result stands for."""
    groups = array.reshape(-1, 32)
    encode = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}[kind]
    data, values = encode(groups)
    return Tensor(kind, array.shape, data), values.reshape(array.shape).astype(np.float32)


def _q4_0(groups: NDArray[np.float32]) -> tuple[bytes, NDArray[Any]]:
    scale = _scale(np.abs(groups).max(1, keepdims=True) / 7)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)) + 8, 0, 15).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), _nibbles(codes)], axis=1)
    return data.tobytes(), (codes.astype(np.float32) - 8) * scale.astype(np.float32)


def _q4_1(groups: NDArray[np.float32]) -> tuple[bytes, NDArray[Any]]:
    low = groups.min(1, keepdims=True).astype(np.float16)
    scale = _scale((groups.max(1, keepdims=True) - low) / 15)
    codes = np.clip(np.rint((groups - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    data = np.concatenate([scale.view(np.uint8), low.view(np.uint8), _nibbles(codes)], axis=1)
    return data.tobytes(), codes * scale.astype(np.float32) + low.astype(np.float32)


def _q8_0(groups: NDArray[np.float32]) -> tuple[bytes, NDArray[Any]]:
    scale = _scale(np.abs(groups).max(1, keepdims=True) / 127)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)), -127, 127).astype(np.int8)
    data = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    return data.tobytes(), codes * scale.astype(np.float32)


def _scale(ideal: NDArray[Any]) -> NDArray[np.float16]:
    """Never 0, which a group of zeros would ask for."""
    return np.maximum(ideal, 1e-4).astype(np.float16)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """GGUF's order: byte i holds number i below and number i + 16 above."""
    packed: NDArray[np.uint8] = codes[:, :16] | (codes[:, 16:] << 4)
    return packed


def random_q6_k(blocks: int, rng: np.random.Generator) -> tuple[Tensor, NDArray[np.float32]]:
    """Random Q6_K blocks of 256 numbers, and those numbers: 6 bits each, a scale for every 16, one for all."""
    low, high = (rng.integers(0, 256, (blocks, n), dtype=np.uint8) for n in (128, 64))
    scales = rng.integers(-128, 128, (blocks, 16)).astype(np.int8)
    scale = (rng.random((blocks, 1)) / 100).astype(np.float16)
    codes = np.empty((blocks, 2, 4, 32), np.uint8)
    for half in range(2):
        nibbles, pairs = low[:, 64 * half : 64 * half + 64], high[:, 32 * half : 32 * half + 32]
        for quarter in range(4):
            part = nibbles[:, 32 * (quarter % 2) : 32 * (quarter % 2) + 32]
            part = part & 15 if quarter < 2 else part >> 4
            codes[:, half, quarter] = part | (((pairs >> (2 * quarter)) & 3) << 4)
    values = (codes.reshape(blocks, 16, 16).astype(np.float32) - 32) * scales[:, :, None] * scale[:, :, None]
    data = np.concatenate([low, high, scales.view(np.uint8), scale.view(np.uint8)], axis=1)
    return Tensor("Q6_K", (blocks, 256), data.tobytes()), values.reshape(blocks, 256).astype(np.float32)
