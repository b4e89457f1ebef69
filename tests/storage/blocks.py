"""Small real blocks for the tests of the storage layer."""

import hashlib
import os
from pathlib import Path

import numpy as np

from omlx.storage.tensor_file import BlockBuffer, BlockMeta, TensorSpec, WholeBlock, with_size, write_block_file

SPECS = tuple(TensorSpec(f"{i}.{part}", "F32", (1, 2, 8, 16)) for i in range(4) for part in ("keys", "values"))
NBYTES = sum(spec.nbytes for spec in SPECS)


def name(n: int) -> bytes:
    return hashlib.sha256(f"block {n}".encode()).digest()


def block(n: int, specs: tuple[TensorSpec, ...] = SPECS) -> BlockBuffer:
    """Another content for each n."""
    buffer = BlockBuffer.empty(specs)
    buffer.data[:] = np.random.default_rng(n).integers(0, 256, buffer.nbytes, np.uint8)
    return buffer


def meta(n: int, **fields) -> BlockMeta:
    return with_size(SPECS, BlockMeta(block_hash=name(n), token_count=8, tokens=bytes(32), **fields))


def same(a: BlockBuffer | WholeBlock | None, b: BlockBuffer) -> bool:
    if isinstance(a, WholeBlock):
        a = a.data
    return a is not None and a.specs == b.specs and np.array_equal(a.data, b.data)


def write(path: Path, n: int, **fields) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_block_file(path, block(n), meta(n, **fields))


def our_bytes(root: Path) -> int:
    """Bytes of all files under a root."""
    total = 0
    for directory, _, files in os.walk(root):
        for file in files:
            try:
                total += os.stat(os.path.join(directory, file)).st_size
            except FileNotFoundError:
                continue
    return total


def damage(path: Path, how: str) -> None:
    """Spoils a block file in one of the DAMAGES."""
    raw = bytearray(path.read_bytes())
    header = int.from_bytes(raw[:8], "little") + 8
    cut = {"empty": 0, "8 bytes": 8, "half": len(raw) // 2, "one short": len(raw) - 1, "header only": header}
    flip = {"length": 0, "checksum": 40, "file length": 85, "header": header // 2, "padding": header - 1}
    flip |= {"payload": header + 5, "last byte": len(raw) - 1}
    if how in cut:
        raw = raw[: cut[how]]
    elif how in flip:
        raw[flip[how]] ^= 1
    elif how == "zeroed tail":
        raw[-300:] = bytes(300)
    elif how == "longer":
        raw += b"\0"
    path.write_bytes(raw)


DAMAGES = (
    "empty", "8 bytes", "half", "one short", "header only", "length", "checksum", "file length", "header", "padding",
    "payload", "last byte", "zeroed tail", "longer",
)  # fmt: skip
