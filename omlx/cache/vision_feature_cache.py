"""What a vision encoder made of an image, so that it runs once an image: a RAM tier in front of .npy files."""

import copy
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.arrays import DTYPE_NAMES, DTYPES, ArrayPool, as_numpy, own_copy, raw_bytes, unpack
from omlx.fair_share import in_turn
from omlx.storage.disk_store import DEFAULT_QUEUE_BYTES
from omlx.storage.feature_file import FeatureKey
from omlx.storage.feature_folder import FeatureFolder, PutResult
from omlx.storage.feature_index import FeatureCounts
from omlx.storage.open_features import open_features, release_features
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

DEFAULT_MEMORY_ENTRIES = 20
DEFAULT_MEMORY_BYTES = 256 * 1024**2
DEFAULT_DISK_BYTES = 10 * 1024**3

_MOST_IDLE = 64 * 1024**2  # bytes of former features that may wait for the next ones
_WORTH_KEEPING = 1024**2  # bytes from which on new memory costs more than the care
_CLEAR_TIMEOUT_S = 30.0


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
    """What a cache holds now; files that are queued count as written.

    On disk it is what the folder holds, of one model's features if one was named.
    """

    ram_entries: int
    ram_bytes: int
    disk_entries: int
    disk_bytes: int


class FeatureFigures(NamedTuple):
    """What caches hold now, and what happened since they were opened.

    `hits` and `misses`: of `get`; `disk_loads`: hits that read a file; `evictions`: from RAM. The others count for
    whole folders, which caches may share: `disk_evictions`; `expired`, what was not used for too long; `damaged`,
    files that were not what they should be; `errors`, those and files that could not be read or written.
    """

    ram_entries: int
    ram_bytes: int
    disk_entries: int
    disk_bytes: int
    hits: int
    misses: int
    disk_loads: int
    evictions: int
    disk_evictions: int
    expired: int
    damaged: int
    errors: int


@dataclass(slots=True, eq=False)
class _Held:
    """Evaluated features that nobody else can change: what goes out are other arrays over the same memory,
    and MLX copies before it changes one of several. `wants_file`: not too large for the disk."""

    array: mx.array
    tenant: str = ""
    wants_file: bool = True
    used: float = field(default_factory=time.monotonic)


class VisionFeatureSSDCache:
    """Features by (image hash, model name): the last used in RAM, all in .npy files under `cache_dir`. Thread-safe.

    Args:
        cache_dir: where the files are; None keeps no files and starts no thread.
        max_memory_entries: how many images' features stay in RAM, least recently used first to go; 0 keeps none.
        max_memory_bytes: and how many bytes; larger features are kept in files only.
        max_disk_bytes: limit of the files, least recently used first to go; 0 keeps no files. If the folder lies under
            the root of a block store of this process, its files count towards the limit of that root too, and
            blocks make room for them up to this limit.
        max_queue_bytes: bound of what waits for the writer thread; beyond it features are written when next used.
        free_reserve_bytes: free space that is left on the disk (default: 5% of it or 2 GB, whichever is less).
        ttl_s: seconds after which features that were not used are removed from RAM and disk, or a little later;
            0 is never. The shortest that was given for a folder holds.

    Caches on one folder in a process share its files, its writer thread, what is still to be written, and the lowest
    limit. A folder that cannot be used is no error: the log says so once, and features stay in RAM. Raises
    ValueError for a negative `max_memory_entries` or `max_memory_bytes`. Memory of features that nobody has any
    more, at most 64 MB, is kept for those that come.
    """

    def __init__(
        self,
        cache_dir: Path | str | None,
        max_memory_entries: int = DEFAULT_MEMORY_ENTRIES,
        *,
        max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_disk_bytes: int = DEFAULT_DISK_BYTES,
        max_queue_bytes: int = DEFAULT_QUEUE_BYTES,
        free_reserve_bytes: int | None = None,
        ttl_s: float = 0,
    ) -> None:
        for name, value in (("max_memory_entries", max_memory_entries), ("max_memory_bytes", max_memory_bytes)):
            if value < 0:
                raise ValueError(f"{name} cannot be negative: {value}")
        self.stats = VisionFeatureStats()
        self._max_entries = max_memory_entries
        self._max_bytes = max_memory_bytes
        self._ttl_s = ttl_s
        self._memory_lock = threading.Lock()
        self._memory: OrderedDict[FeatureKey, _Held] = OrderedDict()
        self._memory_bytes = 0
        self._bytes_of: Counter[str] = Counter()  # by tenant
        self._arrays = _Arrays()
        self._closed = False
        self._files: FeatureFolder | None = None
        if cache_dir is not None and max_disk_bytes > 0:
            folder = Path(cache_dir).expanduser()
            self._files = open_features(folder, max_disk_bytes, max_queue_bytes, free_reserve_bytes, ttl_s)
            self._files.add_user(self)
            self.stats.files = self._files.counts

    def put(
        self, image_hash: str, model_name: str, features: mx.array | npt.NDArray[Any], tenant: str = ""
    ) -> None:
        """Keeps a copy of the features, of any dtype that MLX has and any shape, in place of older ones.

        They are readable when this returns, also by other caches on the folder; the file is written soon. Evaluates
        `features`. Raises TypeError for a dtype that MLX does not have, and for names that are no strings. In RAM they
        count for `tenant`, as long as no other one gets them: the tenant that has most makes room.
        """
        key = _key(image_hash, model_name)
        held = _Held(self._arrays.copy(features), tenant)
        with self._memory_lock:
            if self._closed:
                return
            self._expire()
            self._remember(key, held)  # first: what leaves RAM needs room in the queue more than what stays
            self._put_file(key, held)
        if self._files is not None:
            self._files.announce(key, self)

    def get(self, image_hash: str, model_name: str, tenant: str = "") -> mx.array | None:
        """The features as they were put, to the last bit, evaluated; None if they are not known. May read a file.

        The array is the caller's: changing it changes nothing in here.
        """
        key = _key(image_hash, model_name)
        with self._memory_lock:
            self._expire()
            held = self._memory.get(key)
            if held is not None:
                self._memory.move_to_end(key)
                self._bytes_of[held.tenant] -= held.array.nbytes
                self._bytes_of[tenant] += held.array.nbytes
                held.tenant = tenant
                held.used = time.monotonic()
                if held.wants_file and self._files is not None and not self._files.touch(key):
                    self._put_file(key, held)  # its write had failed, or its file is lost
                self.stats.hits += 1
                return copy.copy(held.array)
        array = self._load(key, tenant)
        if array is None:
            with self._memory_lock:
                self.stats.misses += 1
            return None
        return copy.copy(array)

    def _load(self, key: FeatureKey, tenant: str) -> mx.array | None:
        """From a file, or from what waits to become one; and back into RAM."""
        if self._files is None:
            return None
        place = _Place(self._arrays)
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
                self._remember(key, _Held(array, tenant))
        return array

    def forget(self, key: FeatureKey) -> None:
        """Drops what RAM has of this key, because another cache on the folder has put new features."""
        with self._memory_lock:
            self._drop(key)

    def _remember(self, key: FeatureKey, held: _Held) -> None:
        self._drop(key)
        if not self._max_entries or held.array.nbytes > self._max_bytes:
            return
        self._memory[key] = held
        self._memory_bytes += held.array.nbytes
        self._bytes_of[held.tenant] += held.array.nbytes
        for leaving in self._leaving():
            if len(self._memory) <= self._max_entries and self._memory_bytes <= self._max_bytes:
                break
            self._evict(leaving)

    def _leaving(self) -> Iterator[FeatureKey]:
        """What is in RAM, in the order in which it leaves; entries may be dropped meanwhile."""
        queues: dict[str, list[FeatureKey]] = {}
        for key, held in self._memory.items():
            queues.setdefault(held.tenant, []).append(key)
        return in_turn({tenant: iter(keys) for tenant, keys in queues.items()}, self._bytes_of)

    def _evict(self, key: FeatureKey) -> None:
        held = self._memory[key]
        self._want_file(key, held)
        self._drop(key)
        self.stats.evictions += 1
        self._arrays.give(held.array)

    def _drop(self, key: FeatureKey) -> None:
        held = self._memory.pop(key, None)
        if held is not None:
            self._memory_bytes -= held.array.nbytes
            self._bytes_of[held.tenant] -= held.array.nbytes
            if not self._bytes_of[held.tenant]:
                del self._bytes_of[held.tenant]

    def expire(self) -> None:
        """Drops from RAM what was not used for too long."""
        with self._memory_lock:
            self._expire()

    def _expire(self) -> None:
        """What was not used for too long is not found. The folder says so too, for what has a file."""
        while self._ttl_s and self._memory:
            oldest, held = next(iter(self._memory.items()))
            if not self._is_too_old(held):
                return
            self._drop(oldest)

    def _is_too_old(self, held: _Held) -> bool:
        return bool(self._ttl_s) and time.monotonic() - held.used >= self._ttl_s

    def evict_from_ram(self, nbytes: int) -> int:
        """Frees so many bytes of RAM, or a little more, least recently used first; returns how many. Never waits.

        Features whose file cannot be queued now stay; those that can have none are lost. What still waits for its write
        is freed by that. The memory kept for features to come goes too, and is not counted.
        """
        freed = 0
        with self._memory_lock:
            for key in self._leaving():
                if freed >= nbytes:
                    break
                held = self._memory[key]
                if self._want_file(key, held):
                    self._evict(key)
                    freed += held.array.nbytes
        self._arrays.clear()
        return freed

    def _want_file(self, key: FeatureKey, held: _Held) -> bool:
        """Queues the file of features that should have one and have not; False if that cannot be done now."""
        if not held.wants_file or self._files is None or not self._files.lacks(key):
            return True
        return self._put_file(key, held) != "later"

    def _put_file(self, key: FeatureKey, held: _Held) -> PutResult:
        if self._files is None:
            return "declined"
        # The writer gets the array's memory as bytes and makes no MLX call.
        spec = TensorSpec("features", DTYPE_NAMES[held.array.dtype], tuple(held.array.shape))
        done = self._files.put(key, BlockBuffer((spec,), raw_bytes(held.array)))
        held.wants_file = done != "declined"
        return done

    @property
    def usage(self) -> FeatureUsage:
        return self.usage_of(None)

    def usage_of(self, model_name: str | None) -> FeatureUsage:
        """What RAM holds, and of this model's features (None: of all) the folder."""
        disk = self._files.usage(model_name) if self._files is not None else (0, 0)
        with self._memory_lock:
            return FeatureUsage(len(self._memory), self._memory_bytes, *disk)

    def tier_of(self, image_hash: str, model_name: str) -> Literal["ram", "ssd"] | None:
        """Where `get` would find the features now, None if nowhere; changes and counts nothing, reads no file."""
        key = _key(image_hash, model_name)
        with self._memory_lock:
            held = self._memory.get(key)
            if held is not None and not self._is_too_old(held):
                return "ram"
        return "ssd" if self._files is not None and self._files.has(key) else None

    def clear(
        self,
        wanted: Callable[[FeatureKey], bool],
        before_ns: int | None = None,
        timeout_s: float = _CLEAR_TIMEOUT_S,
    ) -> dict[FeatureKey, int]:
        """Deletes the wanted features from RAM and folder; with `before_ns` those that were last used before then.

        Before then: nanoseconds since the epoch. Returns them with the bytes of their files. Waits for the files to be
        removed. Whoever got the features keeps them.
        """
        found = {} if self._files is None else self._files.clear(wanted, before_ns, timeout_s)
        with self._memory_lock:
            for key, held in list(self._memory.items()):
                used_ns = time.time_ns() - int((time.monotonic() - held.used) * 1e9)
                if wanted(key) and (before_ns is None or used_ns < before_ns):
                    self._drop(key)
                    found.setdefault(key, 0)
        return found

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all features have files, but those that had to make room. False if it took long or failed."""
        if self._files is None or self._closed:
            return True
        errors = self.stats.files.write_errors
        with self._memory_lock:
            for key, held in self._memory.items():
                self._want_file(key, held)
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
            self._memory_bytes = 0
            self._bytes_of.clear()
        self._arrays.clear()
        return (self._files is None or release_features(self._files, timeout_s)) and flushed


def figures(caches: Collection[VisionFeatureSSDCache], model_name: str | None = None) -> FeatureFigures:
    """Of all these caches together, each folder once; with a `model_name` files are those of that model's features."""
    usages = [cache.usage_of(model_name) for cache in caches]
    stats = [cache.stats for cache in caches]
    folders = {id(s.files): (s.files, usage) for s, usage in zip(stats, usages, strict=True)}.values()
    return FeatureFigures(
        ram_entries=sum(usage.ram_entries for usage in usages),
        ram_bytes=sum(usage.ram_bytes for usage in usages),
        disk_entries=sum(usage.disk_entries for _, usage in folders),
        disk_bytes=sum(usage.disk_bytes for _, usage in folders),
        hits=sum(s.hits for s in stats),
        misses=sum(s.misses for s in stats),
        disk_loads=sum(s.disk_loads for s in stats),
        evictions=sum(s.evictions for s in stats),
        disk_evictions=sum(files.evictions for files, _ in folders),
        expired=sum(files.expired for files, _ in folders),
        damaged=sum(files.damaged for files, _ in folders),
        errors=sum(files.errors for files, _ in folders),
    )


class _Arrays:
    """Memory for features; that of large ones is used again. Thread-safe."""

    def __init__(self) -> None:
        self._pool = ArrayPool(_MOST_IDLE)
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Evaluated, with arbitrary content, the caller's alone."""

        def make(_: int) -> list[mx.array]:
            array = mx.empty(shape, dtype)
            mx.eval(array)
            return [array]

        if prod(shape) * dtype.size < _WORTH_KEEPING:
            return make(1)[0]
        with self._lock:
            return self._pool.take((shape, dtype), 1, make)[0]

    def give(self, array: mx.array) -> None:
        """For the next of its kind, once nobody has it any more."""
        if array.nbytes >= _WORTH_KEEPING:
            with self._lock:
                self._pool.give((tuple(array.shape), array.dtype), [array])

    def copy(self, features: mx.array | npt.NDArray[Any]) -> mx.array:
        """An evaluated copy of its own. Raises TypeError as `own_copy` does."""
        if not isinstance(features, mx.array) or features.nbytes < _WORTH_KEEPING:
            return own_copy(features)
        mx.eval(features)
        made = self.take(tuple(features.shape), features.dtype)
        np.copyto(as_numpy(made), as_numpy(features))
        return made

    def clear(self) -> None:
        self._pool.clear()


class _Place:
    """Memory for features that are read from a file."""

    array: mx.array

    def __init__(self, arrays: _Arrays) -> None:
        self._arrays = arrays

    def __call__(self, spec: TensorSpec) -> memoryview:
        self.array = self._arrays.take(spec.shape, DTYPES[spec.dtype])
        return memoryview(raw_bytes(self.array))


def _key(image_hash: str, model_name: str) -> FeatureKey:
    for name in (image_hash, model_name):
        if not isinstance(name, str):
            raise TypeError(f"image hash and model name have to be strings, not {name!r}")
    return FeatureKey(image_hash, model_name)
