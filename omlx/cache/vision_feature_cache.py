"""What a vision encoder made of an image, so that it runs once an image: a RAM tier in front of .npy files."""

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy.typing as npt

from omlx.arrays import DTYPE_NAMES, DTYPES, own_copy, raw_bytes, unpack
from omlx.storage.disk_store import DEFAULT_QUEUE_BYTES
from omlx.storage.feature_file import FeatureKey
from omlx.storage.feature_folder import FeatureCounts, FeatureFolder, open_features, release_features
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

DEFAULT_MEMORY_ENTRIES = 20
DEFAULT_DISK_BYTES = 10 * 1024**3


@dataclass(slots=True)
class VisionFeatureStats:
    """Counters since the cache was opened, always up to date: `stats.hits`, `stats["hits"]` and `dict(stats)`.

    `hits`: from RAM and from disk. `evictions`: from RAM. `disk_loads`: hits that read a file. `errors`: files that
    were damaged, could not be read or could not be written. `files` has the details; it counts for all caches that
    share the folder.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    disk_loads: int = 0
    files: FeatureCounts = field(default_factory=FeatureCounts)

    @property
    def errors(self) -> int:
        return self.files.errors

    @property
    def disk_evictions(self) -> int:
        return self.files.evictions

    def keys(self) -> Iterator[str]:
        return iter(("hits", "misses", "evictions", "disk_loads", "disk_evictions", "errors"))

    def __getitem__(self, name: str) -> int:
        if name not in self.keys():
            raise KeyError(name)
        value: int = getattr(self, name)
        return value


class FeatureUsage(NamedTuple):
    """What a cache holds now; files that are queued count as written."""

    ram_entries: int
    ram_bytes: int
    disk_entries: int
    disk_bytes: int


@dataclass(slots=True, eq=False)
class _Held:
    """Evaluated features that nobody else can change: what goes out are other arrays over the same memory,
    and MLX copies before it changes one of several. `wants_file`: not too large for the disk."""

    array: mx.array
    wants_file: bool = True
    used: float = field(default_factory=time.monotonic)


class VisionFeatureSSDCache:
    """Features by (image hash, model name): the last used in RAM, all in .npy files under `cache_dir`. Thread-safe.

    Args:
        cache_dir: where the files are; None keeps no files and starts no thread.
        max_memory_entries: how many images' features stay in RAM, least recently used first to go; 0 keeps none.
        max_disk_bytes: limit of the files, least recently used first to go; 0 keeps no files. If the folder lies under
            the root of a block store of this process, its files count towards the limit of that root too, and
            blocks make room for them up to this limit.
        max_queue_bytes: bound of what waits for the writer thread; beyond it features are written when next used.
        free_reserve_bytes: free space that is left on the disk (default: 5% of it or 2 GB, whichever is less).
        ttl_s: seconds after which features that were not used are removed from RAM and disk, or a little later;
            0 is never. The shortest that was given for a folder holds.

    Caches on one folder in a process share its files, its writer thread, what is still to be written, and the lowest
    limit. A folder that cannot be used is no error: the log says so once, and features stay in RAM. Raises
    ValueError for a negative `max_memory_entries`.
    """

    def __init__(
        self,
        cache_dir: Path | str | None,
        max_memory_entries: int = DEFAULT_MEMORY_ENTRIES,
        *,
        max_disk_bytes: int = DEFAULT_DISK_BYTES,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        free_reserve_bytes: int | None = None,
        ttl_s: float = 0,
    ) -> None:
        if max_memory_entries < 0:
            raise ValueError(f"max_memory_entries cannot be negative: {max_memory_entries}")
        self.stats = VisionFeatureStats()
        self._max_entries = max_memory_entries
        self._ttl_s = ttl_s
        self._memory_lock = threading.Lock()
        self._memory: OrderedDict[FeatureKey, _Held] = OrderedDict()
        self._closed = False
        self._files: FeatureFolder | None = None
        if cache_dir is not None and max_disk_bytes > 0:
            folder = Path(cache_dir).expanduser()
            self._files = open_features(folder, max_disk_bytes, max_queue_bytes, free_reserve_bytes, ttl_s)
            self._files.add_user(self)
            self.stats.files = self._files.counts

    def put(self, image_hash: str, model_name: str, features: mx.array | npt.NDArray[Any]) -> None:
        """Keeps a copy of the features, of any dtype that MLX has and any shape, in place of older ones.

        They are readable when this returns, also by other caches on the folder; the file is written soon. Evaluates
        `features`. Raises TypeError for a dtype that MLX does not have, and for names that are no strings.
        """
        key = _key(image_hash, model_name)
        held = _Held(own_copy(features))
        with self._memory_lock:
            if self._closed:
                return
            self._expire()
            self._remember(key, held)  # first: what leaves RAM needs room in the queue more than what stays
            self._put_file(key, held)
        if self._files is not None:
            self._files.announce(key, self)

    def get(self, image_hash: str, model_name: str) -> mx.array | None:
        """The features as they were put, to the last bit, evaluated; None if they are not known. May read a file.

        The array is the caller's: changing it changes nothing in here.
        """
        key = _key(image_hash, model_name)
        with self._memory_lock:
            self._expire()
            held = self._memory.get(key)
            if held is not None:
                self._memory.move_to_end(key)
                held.used = time.monotonic()
                if held.wants_file and self._files is not None and not self._files.touch(key):
                    self._put_file(key, held)  # its write had failed, or its file is lost
                self.stats.hits += 1
                return copy.copy(held.array)
        array = self._load(key)
        if array is None:
            with self._memory_lock:
                self.stats.misses += 1
            return None
        return copy.copy(array)

    def _load(self, key: FeatureKey) -> mx.array | None:
        """From a file, or from what waits to become one; and back into RAM."""
        if self._files is None:
            return None
        place = _Place()
        found = self._files.fetch(key, place)
        if found is None:
            return None
        array = place.array if found.waiting is None else unpack(found.waiting)[0][0]
        with self._memory_lock:
            if self._closed:
                return None
            self.stats.hits += 1
            self.stats.disk_loads += found.waiting is None
            if key not in self._memory and self._files.in_force(found.entry):
                self._remember(key, _Held(array))
        return array

    def forget(self, key: FeatureKey) -> None:
        """Drops what RAM has of this key, because another cache on the folder has put new features."""
        with self._memory_lock:
            self._memory.pop(key, None)

    def _remember(self, key: FeatureKey, held: _Held) -> None:
        if not self._max_entries:
            return
        self._memory[key] = held
        self._memory.move_to_end(key)
        while len(self._memory) > self._max_entries:
            oldest, dropped = self._memory.popitem(last=False)
            self.stats.evictions += 1
            if dropped.wants_file and self._files is not None and self._files.lacks(oldest):
                self._put_file(oldest, dropped)

    def _expire(self) -> None:
        """What was not used for too long is not found. The folder says so too, for what has a file."""
        while self._ttl_s and self._memory:
            oldest, held = next(iter(self._memory.items()))
            if time.monotonic() - held.used < self._ttl_s:
                return
            del self._memory[oldest]

    def _put_file(self, key: FeatureKey, held: _Held) -> None:
        # The writer gets the array's memory as bytes and makes no MLX call.
        if self._files is not None:
            spec = TensorSpec("features", DTYPE_NAMES[held.array.dtype], tuple(held.array.shape))
            held.wants_file = self._files.put(key, BlockBuffer((spec,), raw_bytes(held.array))) != "declined"

    @property
    def usage(self) -> FeatureUsage:
        with self._memory_lock:
            ram = [held.array.nbytes for held in self._memory.values()]
        disk = self._files.usage if self._files is not None else (0, 0)
        return FeatureUsage(len(ram), sum(ram), *disk)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all features have files, but those that had to make room. False if it took long or failed."""
        if self._files is None or self._closed:
            return True
        errors = self.stats.files.write_errors
        with self._memory_lock:
            for key, held in self._memory.items():
                if held.wants_file and self._files.lacks(key):
                    self._put_file(key, held)
        return self._files.flush(timeout_s) and self.stats.files.write_errors == errors

    def check(self) -> list[str]:
        """Contradictions between memory and files, and damaged files; for a cache at rest. Reads every file."""
        return self._files.check() if self._files is not None else []

    def close(self, timeout_s: float = 10.0) -> bool:
        """Flushes and lets go of RAM and folder; afterwards nothing is kept or found. False if features were lost.

        Calling it again is safe. An interpreter that ends without it still writes what was put.
        """
        flushed = self.flush(timeout_s)
        with self._memory_lock:
            if self._closed:
                return True
            self._closed = True
            self._memory.clear()
        return (self._files is None or release_features(self._files, timeout_s)) and flushed


class _Place:
    """Memory for features that are read from a file."""

    array: mx.array

    def __call__(self, spec: TensorSpec) -> memoryview:
        self.array = mx.empty(spec.shape, DTYPES[spec.dtype])
        mx.eval(self.array)
        return memoryview(raw_bytes(self.array))


def _key(image_hash: str, model_name: str) -> FeatureKey:
    for name in (image_hash, model_name):
        if not isinstance(name, str):
            raise TypeError(f"image hash and model name have to be strings, not {name!r}")
    return FeatureKey(image_hash, model_name)
