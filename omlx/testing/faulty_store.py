"""A block store on a disk that fails: files are really spoiled, errors really raised, below the store's own checks."""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from omlx.cache.interface import BlockData, BlockMeta, CacheManager, ChainPlace, Gone, ReadTarget, StoreStats, Tier
from omlx.cache.paged_ssd_cache import FileUse, PagedSSDCacheManager
from omlx.storage.tensor_file import TensorSpec

FaultKind = Literal["delay", "throttle", "error", "short read", "bit flip"]
_SPOILS = ("short read", "bit flip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong when a block's file is used.

    `kind`: "delay" takes `seconds` longer; "throttle" lets `bytes_per_s` through, for all threads together; "error"
    raises OSError with the number `errno`; before a read, "short read" cuts the file and "bit flip" changes one of its
    bits. `use`: on reads or on writes. It happens to each use with the probability `chance`, or, with `at`, to
    just these uses of the store (the first read is 0, the first write is 0).
    """

    kind: FaultKind
    use: FileUse = "read"
    chance: float = 1.0
    at: Collection[int] | None = None
    seconds: float = 0.0
    bytes_per_s: float = 0.0
    errno: int = errno.EIO

    def __post_init__(self) -> None:
        if self.kind in _SPOILS and self.use != "read":
            raise ValueError(f"a {self.kind} happens before a read, not before a {self.use}")
        if self.kind == "throttle" and self.bytes_per_s <= 0:
            raise ValueError("a throttle needs bytes_per_s above 0")


class Injected(NamedTuple):
    """A fault that happened to a file."""

    kind: FaultKind
    use: FileUse
    path: Path


class FaultyStore(CacheManager):
    """`store`, with `faults` on its files. Blocks in RAM, and those that wait for the writer, have none.

    The same `seed` gives the same faults to the n-th use of a file, whatever thread it comes from. `faults` may be
    replaced at any time; `injected` lists what happened. Only this manager's files are touched, not those of others
    on the same root. What is not in `CacheManager` is asked of `store` itself.
    """

    def __init__(self, store: PagedSSDCacheManager, faults: Sequence[Fault] = (), *, seed: int = 0) -> None:
        self.store = store
        self.faults = tuple(faults)
        self.injected: list[Injected] = []
        self._seed = seed
        self._lock = threading.Lock()
        self._uses: Counter[FileUse] = Counter()
        self._uses_of: Counter[tuple[FileUse, str]] = Counter()
        self._free_at = 0.0  # when the throttled disk has done what it was asked for
        store.on_file = self._on_file

    # ---- faults

    def _on_file(self, use: FileUse, path: Path, nbytes: int) -> None:
        """In the thread that is about to use the file."""
        with self._lock:
            number, of_file = self._uses[use], self._uses_of[use, path.name]
            self._uses[use] += 1
            self._uses_of[use, path.name] += 1
        for position, fault in enumerate(self.faults):
            dice = random.Random(f"{self._seed} {position} {use} {path.name} {of_file}")
            happens = dice.random() < fault.chance if fault.at is None else number in fault.at
            if fault.use == use and happens:
                self._inject(fault, path, nbytes, dice)

    def _inject(self, fault: Fault, path: Path, nbytes: int, dice: random.Random) -> None:
        with self._lock:
            self.injected.append(Injected(fault.kind, fault.use, path))
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "throttle":
            self._wait_for_disk(nbytes / fault.bytes_per_s)
        elif fault.kind == "error":
            raise OSError(fault.errno, os.strerror(fault.errno), str(path))
        else:
            _spoil(path, fault.kind, dice)

    def _wait_for_disk(self, seconds: float) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            wait_s = self._free_at - time.monotonic()
        time.sleep(wait_s)

    # ---- the store

    def save_block(self, block_hash: bytes, data: BlockData, token_count: int, **fields: Any) -> bool:
        return self.store.save_block(block_hash, data, token_count, **fields)

    def load_block(self, block_hash: bytes) -> list[tuple[mx.array, ...]] | None:
        return self.store.load_block(block_hash)

    def read_block(self, block_hash: bytes, target: ReadTarget) -> Literal["ram", "ssd"] | None:
        return self.store.read_block(block_hash, target)

    def tier_of(self, block_hash: bytes) -> Tier | None:
        return self.store.tier_of(block_hash)

    def get_meta(self, block_hash: bytes) -> BlockMeta | None:
        return self.store.get_meta(block_hash)

    def declines(self, place: ChainPlace) -> bool:
        return self.store.declines(place)

    def children(self, parent: bytes, like: bytes | None = None) -> list[BlockMeta]:
        return self.store.children(parent, like)

    def touch(self, hashes: Sequence[bytes], tenant: str = "") -> None:
        self.store.touch(hashes, tenant)

    def pin(self, block_hash: bytes) -> None:
        self.store.pin(block_hash)

    def unpin(self, block_hash: bytes) -> None:
        self.store.unpin(block_hash)

    def delete_block(self, block_hash: bytes) -> bool:
        return self.store.delete_block(block_hash)

    def get_block_path(self, block_hash: bytes) -> Path | None:
        return self.store.get_block_path(block_hash)

    def flush(self, timeout_s: float | None = None) -> bool:
        return self.store.flush(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        return self.store.close(timeout_s)

    def stats(self) -> StoreStats:
        return self.store.stats()

    def check(self) -> list[str]:
        return self.store.check()

    def metas(self) -> list[BlockMeta]:
        return self.store.metas()

    def specs(self, block_hash: bytes) -> tuple[TensorSpec, ...] | None:
        return self.store.specs(block_hash)

    def gone_after(self, parent: bytes) -> list[Gone]:
        return self.store.gone_after(parent)

    @property
    def keeps_ram(self) -> bool:
        return self.store.keeps_ram


def _spoil(path: Path, kind: FaultKind, dice: random.Random) -> None:
    """Raises OSError if the file cannot be changed: then it cannot be read either."""
    size = path.stat().st_size
    if kind == "short read":
        os.truncate(path, dice.randrange(size) if size else 0)
    elif size:
        with path.open("r+b") as file:
            at = dice.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << dice.randrange(8)]))
