"""How much memory the process takes up, and what is done when that is too much."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import psutil

from omlx.cache.tiered_manager import TieredCacheManager
from omlx.sizes import format_size
from omlx.storage.hot_tier import HotTier

log = logging.getLogger(__name__)

_INTERVAL_S = 0.25  # between looks at the process while there is work
# glibc keeps freed memory that lies below memory in use until it is told to give it back.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes, but for `blocks_cold` and `cold_tokens`; of all models together.

    `kv_cache_memory`: blocks in the hot tier. `blocks_cold`, `cold_tokens`: what has a file or is being
    written. `mlx_active`: arrays in use; `mlx_cached`: memory that MLX keeps for later arrays.
    `process_rss`: what the system counts. A limit of 0 is none.
    """

    kv_cache_memory: int
    kv_cache_memory_limit: int
    blocks_cold: int
    cold_tokens: int
    mlx_active: int
    mlx_cached: int
    process_rss: int
    process_limit: int


class MemoryMonitor:
    """Watches the hot tier of some models and the process; thread-safe.

    `check` is called between the steps of the thread that does all work, where memory is taken. Over a limit, MLX
    gives back what it only keeps, then features of pictures leave RAM, which a prompt with cached blocks does not
    need; then blocks go to the cold tier: of models without running requests first, then of those with most in RAM.

    `process_memory` gives the bytes that are held against the limit, for tests.
    """

    def __init__(
        self,
        hot_tier: HotTier,
        max_process_memory: int = 0,
        *,
        interval_s: float = _INTERVAL_S,
        process_memory: Callable[[], int] | None = None,
    ) -> None:
        self.max_process_memory = max_process_memory
        self.excess = 0
        self.looks = 0
        self._hot = hot_tier
        self._interval_s = interval_s
        self._rss = _rss_reader()
        self._process_memory = process_memory or self._measured
        self._lock = threading.Lock()
        self._managers: list[TieredCacheManager] = []
        self._next_check = 0.0
        self._said = False
        self._evicted = 0  # bytes since the process exceeded its limit

    def watch(self, manager: TieredCacheManager) -> None:
        """Counts a model's stack in, from now on."""
        with self._lock:
            self._managers.append(manager)

    def forget(self, manager: TieredCacheManager) -> None:
        """Leaves a stack out that is about to be closed. Raises ValueError if it was not watched."""
        with self._lock:
            self._managers.remove(manager)

    def figures(self) -> MemoryFigures:
        """The state of things now."""
        stores = [manager.store.stats() for manager in self._watched()]
        return MemoryFigures(
            kv_cache_memory=self._hot.bytes,
            kv_cache_memory_limit=self._hot.max_bytes,
            blocks_cold=sum(stats.blocks_ssd for stats in stores),
            cold_tokens=sum(stats.tokens_ssd for stats in stores),
            mlx_active=mx.get_active_memory(),
            mlx_cached=mx.get_cache_memory(),
            process_rss=self._rss(),
            process_limit=self.max_process_memory,
        )

    def check(self, *, now: bool = False) -> int:
        """Evicts what is over a limit; returns the bytes freed in RAM.

        Looks at the process at most once an interval, unless `now` (`looks` counts). Never waits for a disk.
        `excess` then is what the process still is over its limit: what eviction alone could not mend.
        """
        moment = time.monotonic()
        if moment < self._next_check and not now:
            return 0
        self._next_check = moment + self._interval_s
        self.looks += 1
        self.excess = self._over_process_limit()
        if self.excess and mx.get_cache_memory():
            mx.clear_cache()
            self.excess = self._over_process_limit()
        if max(self.excess, self._over_hot_limit()) <= 0:
            self._report_end()
            return 0
        freed = self._evict_features(self.excess)
        freed += self._evict(max(self.excess - freed, self._over_hot_limit()))
        if self.excess:
            if freed and _malloc_trim is not None:
                _malloc_trim(0)
            self._report(freed)
            self.excess = max(0, self.excess - freed)
        return freed

    def _evict_features(self, nbytes: int) -> int:
        freed = 0
        for manager in self._watched():
            if freed >= nbytes:
                break
            freed += manager.evict_features(nbytes - freed)
        return freed

    def _evict(self, nbytes: int) -> int:
        freed = 0
        for manager in self._in_order():
            if freed >= nbytes:
                break
            freed += manager.evict_blocks_to_cold(nbytes - freed, wait_s=0)
        return freed

    def _in_order(self) -> list[TieredCacheManager]:
        """Who gives first: idle models, then those with most in RAM."""
        held = [(bool(m.paged_cache.requests()), -m.store.stats().ram_bytes, m) for m in self._watched()]
        return [manager for *_, manager in sorted(held, key=lambda entry: entry[:2])]

    def _watched(self) -> list[TieredCacheManager]:
        with self._lock:
            return list(self._managers)

    def _over_hot_limit(self) -> int:
        return self._hot.bytes - self._hot.max_bytes

    def _over_process_limit(self) -> int:
        return max(0, self._process_memory() - self.max_process_memory) if self.max_process_memory else 0

    def _measured(self) -> int:
        """Where CPU and GPU share memory, the system may not count the GPU's arrays: then MLX's own count."""
        rss = self._rss()
        return max(rss, mx.get_active_memory() + mx.get_cache_memory()) if mx.metal.is_available() else rss

    def _report(self, freed: int) -> None:
        """Warns when the limit is exceeded first; what is evicted later, until it is met again, is one line then."""
        self._evicted += freed
        if not self._said:
            log.warning(
                "process memory exceeds --max-process-memory (%s) by %s; evicting cached blocks and features from RAM: "
                "%s so far",
                format_size(self.max_process_memory), format_size(self.excess), format_size(freed),
            )  # fmt: skip
        self._said = True

    def _report_end(self) -> None:
        if self._said:
            log.info("process memory is below its limit again; evicted %s from RAM", format_size(self._evicted))
        self._said, self._evicted = False, 0


@cache
def _rss_reader() -> Callable[[], int]:
    """What gives the process's resident bytes; on Linux by a file that stays open, which is ten times as fast."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        process = psutil.Process()
        return lambda: int(process.memory_info().rss)
    page = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(statm, 256, 0).split()[1]) * page
