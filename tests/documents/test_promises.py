"""Promises of the documents about the inside, each where a user could rely on it. Runs without the documents."""

import dataclasses
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.interface import CacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheIndex, PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, PrefixCache
from omlx.cache.tiered_manager import TieredCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.scheduler import SchedulerConfig
from omlx.settings import Settings
from omlx.storage.hot_tier import HotCache
from omlx.storage.write_queue import WriteQueue

MB = 1024**2
BLOCK = [(mx.zeros((4, 256, 128)), mx.zeros((4, 256, 128)))]  # 1 MB


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (CacheFactory.create_paged_cache, "config num_layers"),
        (CacheFactory.create_paged_ssd_cache, "config model_name"),
        (CacheFactory.create_prefix_cache, "config model paged_cache paged_ssd_cache"),
        (PagedSSDCacheManager, "cache_dir max_size_bytes hot_cache_max_bytes hot_cache_only"),
        (BlockAwarePrefixCache.save_block, "self block_hash kv_data token_count"),
        (TieredCacheManager, "max_kv_cache_memory ssd_dir"),
        (TieredCacheManager.restore_block_from_cold, "self block_id block_hash"),
        (VisionFeatureSSDCache, "cache_dir max_memory_entries"),
        (VisionFeatureSSDCache.put, "self image_hash model_name features"),
        (VisionFeatureSSDCache.get, "self image_hash model_name"),
    ],
)
def test_calls_take_the_documents_arguments_and_need_no_others(call: Callable[..., Any], names: str) -> None:
    parameters = inspect.signature(call).parameters
    assert list(parameters)[: len(names.split())] == names.split()
    others = [parameter for name, parameter in parameters.items() if name not in names.split()]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in others)


def test_the_ssd_cache_is_a_cache_manager() -> None:
    assert issubclass(PagedSSDCacheManager, CacheManager)
    assert inspect.isabstract(CacheManager)


def test_the_hot_tier_has_the_documents_names(tmp_path: Path) -> None:
    assert PrefixCache is BlockAwarePrefixCache
    store = PagedSSDCacheManager(tmp_path, 100 * MB, 100 * MB)
    try:
        store.save_block(b"a", BLOCK, 64)
        store.flush()
        assert store.evict_from_ram(MB) == MB
        assert store.tier_of(b"a") == "ssd"
        stored: list[bytes] = []
        store_block = HotCache.store_block

        def noted(self: HotCache, block_hash: bytes, *args: Any, **kinds: Any) -> bool:
            stored.append(block_hash)
            return store_block(self, block_hash, *args, **kinds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HotCache, "store_block", noted)
            assert store.load_block(b"a") is not None
        assert stored == [b"a"]  # what is read from a file goes back through it
        assert store.tier_of(b"a") == "ram"
    finally:
        store.close()


def test_the_index_lists_blocks_in_the_order_of_use(tmp_path: Path) -> None:
    store = PagedSSDCacheManager(tmp_path, 100 * MB)
    try:
        for name in (b"a", b"b", b"c"):
            store.save_block(name, BLOCK, 64)
        store.load_block(b"a")
        assert isinstance(store._index, PagedSSDCacheIndex)
        assert [meta.block_hash for meta in store._index.get_all_metadata()] == [b"b", b"c", b"a"]
    finally:
        store.close()


def test_removals_are_tasks_of_the_writer_in_order_with_the_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Any] = []
    append = WriteQueue.append

    def noted(self: WriteQueue, task: Any, nbytes: int = 0) -> None:
        tasks.append(task)
        append(self, task, nbytes)

    store = PagedSSDCacheManager(tmp_path, 2 * MB + MB // 2)
    monkeypatch.setattr(WriteQueue, "append", noted)
    try:
        for name in (b"a", b"b", b"c"):
            store.save_block(name, BLOCK, 64)
        oldest = tmp_path / "6" / "61.safetensors"
        assert [kind for kind, _ in tasks] == ["write", "write", "unlink", "write"]
        assert tasks[2] == ("unlink", oldest)
        assert store.flush()
        assert not oldest.exists()
    finally:
        store.close()


def test_room_is_made_before_a_new_block_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PagedSSDCacheManager(tmp_path, 2 * MB + MB // 2)
    asked: list[int] = []
    enforce = store._enforce_size_limit_for_new_block
    monkeypatch.setattr(store, "_enforce_size_limit_for_new_block", lambda size: (asked.append(size), enforce(size)))
    try:
        for name in (b"a", b"b", b"c"):
            store.save_block(name, BLOCK, 64)
        sizes = [meta.file_size for meta in store._index.get_all_metadata()]
        assert asked[1:] == sizes
        assert len(asked) == 3
    finally:
        store.close()


def test_files_are_written_by_one_thread_from_buffers(tmp_path: Path) -> None:
    threads: list[str] = []

    class Watched(PagedSSDCacheManager):
        @staticmethod
        def _write_safetensors_no_mx(*block: Any) -> None:
            assert not any(isinstance(part, mx.array) for part in block)
            threads.append(threading.current_thread().name)
            PagedSSDCacheManager._write_safetensors_no_mx(*block)

    store = Watched(tmp_path, 100 * MB)
    store.save_block(b"a", BLOCK, 64)
    store.save_block(b"b", BLOCK, 64)
    assert store.flush()
    assert store.close()
    assert set(threads) == {"omlx-writer"}


def test_the_scheduler_takes_the_settings_of_the_cache(tmp_path: Path) -> None:
    settings = Settings(paged_ssd_cache_dir=tmp_path, paged_ssd_cache_max_size=150 * MB, block_size=32)
    config = settings.scheduler_config()
    assert isinstance(config, SchedulerConfig)
    assert isinstance(config, CacheConfig)
    assert config.paged_ssd_cache_dir == tmp_path
    assert (config.max_paged_ssd_cache_size, config.block_size) == (150 * MB, 32)


def test_vision_stats_are_a_dataclass_and_read_both_ways() -> None:
    cache = VisionFeatureSSDCache(cache_dir=None, max_memory_entries=1)
    cache.get("image", "model")
    assert dataclasses.is_dataclass(cache.stats)
    assert cache.stats.misses == cache.stats["misses"] == 1
    assert (cache.stats.hits, cache.stats.evictions) == (0, 0)


def test_vision_features_of_models_are_apart_and_the_last_used_stay() -> None:
    cache = VisionFeatureSSDCache(cache_dir=None, max_memory_entries=2)
    cache.put("image", "one", mx.ones((2,)))
    cache.put("image", "two", mx.zeros((2,)))
    first, second = cache.get("image", "one"), cache.get("image", "two")
    assert first is not None and second is not None
    assert (first.sum().item(), second.sum().item()) == (2, 0)
    cache.get("image", "one")
    cache.put("image", "three", mx.ones((2,)))
    assert cache.get("image", "two") is None
    assert cache.get("image", "one") is not None
    assert cache.stats.evictions == 1


def test_vision_features_may_be_put_and_got_by_many_threads(tmp_path: Path) -> None:
    cache = VisionFeatureSSDCache(tmp_path, max_memory_entries=3)
    failed: list[str] = []

    def work(number: int) -> None:
        for image in range(20):
            name = f"{image % 7}"
            cache.put(name, "m", mx.full((4,), int(name)))
            found = cache.get(name, "m")
            if found is None or found[0].item() != int(name):
                failed.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert cache.close()
    assert failed == []
    assert isinstance(cache._memory_lock, type(threading.Lock()))
