"""Image features as a part of a model's cache stack: bounds in RAM, figures, clearing."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.layer_state import CacheLayout
from omlx.cache.prefix_cache import CacheIdentity
from omlx.cache.tiered_manager import TieredCacheManager, clear_cache, open_features_folder, open_root
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache, figures
from omlx.memory_monitor import MemoryMonitor
from omlx.storage import feature_folder
from omlx.storage.feature_file import FeatureKey, feature_name, write_feature_file
from omlx.storage.folder import VISION_FOLDER, FolderLock, StoreLocked
from omlx.storage.hot_tier import HotTier
from omlx.storage.open_stores import release_store
from tests.storage.blocks import name
from tests.support import wait_until
from tests.tiny import TinyRunner

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
DAY_NS = 86_400 * 10**9


def identity(fingerprint: bytes = b"\x01" * 32, numerics: str = "cpu") -> CacheIdentity:
    layout = TinyRunner().layout
    assert isinstance(layout, CacheLayout)
    return CacheIdentity(fingerprint, layout, numerics)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., TieredCacheManager]]:
    managers = []

    def opener(model: str = "m", root: Path | None = tmp_path / "root", **options: Any) -> TieredCacheManager:
        exact = options.pop("exact", "off")
        config = CacheConfig(exact=exact, hot_cache_max_size=options.pop("hot", GB), **options.pop("config", {}))
        options = {"vision": True, "identity": identity(), "hot_tier": None} | options
        managers.append(TieredCacheManager(GB, root, config=config, model_name=model, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


def cache_of(tiers: TieredCacheManager) -> VisionFeatureSSDCache:
    assert tiers.vision_features is not None
    return tiers.vision_features


def digest(n: int) -> bytes:
    return bytes([n]) * 32


def put(tiers: TieredCacheManager, *numbers: int, nbytes: int = 4 * KB) -> None:
    for n in numbers:
        cache_of(tiers).put(digest(n).hex(), tiers.feature_model, mx.full((nbytes,), n, mx.uint8))


def has(tiers: TieredCacheManager, n: int) -> bool:
    found = cache_of(tiers).get(digest(n).hex(), tiers.feature_model)
    assert found is None or mx.all(found == n).item()
    return found is not None


def tiers_of(tiers: TieredCacheManager, upto: int) -> list[str | None]:
    return tiers.feature_tiers([digest(n).hex() for n in range(upto)])


def on_disk(root: Path) -> list[str]:
    return sorted(path.name for path in (root / VISION_FOLDER).glob("*.npy"))


# ---- opening


def test_a_model_without_pictures_has_no_features_and_no_folder(opened, tmp_path):
    tiers = opened(vision=False)
    assert tiers.vision_features is None and "features" not in tiers.stats() and tiers_of(tiers, 1) == [None]
    assert tiers.evict_features(GB) == 0 and not (tmp_path / "root" / VISION_FOLDER).exists()


def test_features_lie_under_the_root_count_there_and_are_found_after_a_restart(opened, tmp_path):
    tiers = opened()
    before = tiers.store.stats().ssd_total_bytes
    put(tiers, 1, 2, nbytes=100 * KB)
    assert tiers.flush(60) and len(on_disk(tmp_path / "root")) == 2
    assert tiers.store.stats().ssd_total_bytes >= before + 200 * KB
    assert tiers.close()
    again = opened()
    assert tiers_of(again, 3) == [None, "ssd", "ssd"]
    assert has(again, 1) and not has(again, 0) and tiers_of(again, 3) == [None, "ram", "ssd"]
    assert again.stats()["features"] == {
        "ram_entries": 1, "ram_bytes": 100 * KB, "disk_entries": 2,
        "disk_bytes": sum(path.stat().st_size for path in (tmp_path / "root" / VISION_FOLDER).iterdir()),
        "hits": 1, "misses": 1, "disk_loads": 1, "evictions": 0, "disk_evictions": 0, "expired": 0, "damaged": 0,
        "errors": 0,
    }  # fmt: skip


def test_closing_writes_features_that_only_ram_had(opened, tmp_path):
    tiers = opened()
    put(tiers, *range(30))
    assert tiers.close() and len(on_disk(tmp_path / "root")) == 30 and not has(tiers, 0)


def test_without_a_root_features_are_in_ram_only(opened):
    tiers = opened(root=None)
    put(tiers, 1)
    assert has(tiers, 1) and tiers_of(tiers, 2) == [None, "ram"]
    assert not any(thread.name == "omlx-features" for thread in threading.enumerate())
    assert tiers.stats()["features"]["disk_entries"] == 0


def test_a_root_that_is_in_use_elsewhere_gets_no_features_either(opened, tmp_path):
    (tmp_path / "root").mkdir()
    lock = FolderLock(tmp_path / "root")
    with pytest.raises(StoreLocked):
        opened()
    assert not (tmp_path / "root" / VISION_FOLDER).exists()
    lock.release()
    put(opened(), 1)


def test_other_weights_and_in_the_exact_modes_other_numerics_find_nothing(opened):
    one = opened("m", exact="on")
    put(one, 1)
    assert has(opened("m", exact="on"), 1)
    assert not has(opened("m", exact="on", identity=identity(b"\x02" * 32)), 1)
    assert not has(opened("m", exact="on", identity=identity(numerics="gpu")), 1)
    assert not has(opened("other", exact="on"), 1) and not has(opened("m"), 1)


def test_without_exact_mode_numerics_make_no_difference(opened):
    put(opened("m"), 1)
    assert has(opened("m", identity=identity(numerics="gpu")), 1)


def test_unused_features_expire_with_the_blocks(opened, tmp_path):
    tiers = opened(config={"cache_ttl": 1})
    put(tiers, 1)
    assert tiers.flush(60) and wait_until(lambda: on_disk(tmp_path / "root") == [])
    assert tiers_of(tiers, 2) == [None, None]
    assert tiers.stats()["features"]["expired"] == 1


def test_a_folder_that_no_loaded_model_uses_counts_towards_the_roots_limit_and_expires(opened, tmp_path):
    tiers = opened()
    put(tiers, 1, nbytes=MB)
    tiers.close()
    config = CacheConfig(paged_ssd_cache_dir=tmp_path / "root", cache_ttl=1)
    root = open_root(config)
    assert root is not None
    features = open_features_folder(config)
    assert features is not None and features.usage.disk_entries == 1 and root.blocks.bytes > MB
    assert wait_until(lambda: on_disk(tmp_path / "root") == [] and root.blocks.bytes < MB)
    features.close()
    release_store(root, 60)
    assert open_features_folder(CacheConfig(paged_ssd_cache_dir=tmp_path / "nothing")) is None
    assert open_features_folder(CacheConfig()) is None and not (tmp_path / "nothing").exists()


# ---- bounds in RAM


def test_bytes_in_ram_are_bounded_and_the_last_used_stay(opened):
    tiers = opened(config={"max_vision_memory": "40KB"})
    put(tiers, *range(9))
    assert has(tiers, 0)
    put(tiers, 9, 10)
    assert tiers_of(tiers, 11) == ["ram", "ssd", *["ram"] * 9]
    assert cache_of(tiers).usage[:2] == (10, 40 * KB)
    put(tiers, 11, nbytes=9 * KB)  # takes the room of three
    assert cache_of(tiers).usage[:2] == (8, 37 * KB) and cache_of(tiers).stats.evictions == 4
    assert tiers.flush(60) and all(has(tiers, n) for n in range(12)) and cache_of(tiers).usage.ram_bytes <= 40 * KB


def test_features_larger_than_the_bound_are_in_files_only_and_push_nothing_out():
    cache = VisionFeatureSSDCache(None, 5, max_memory_bytes=10 * KB)
    cache.put("small", "m", mx.zeros((4 * KB,), mx.uint8))
    cache.put("h", "m", mx.zeros((4 * KB,), mx.uint8))
    cache.put("h", "m", mx.ones((11 * KB,), mx.uint8))
    assert cache.tier_of("small", "m") == "ram" and cache.get("h", "m") is None  # not the older ones either
    assert cache.usage[:2] == (1, 4 * KB) and cache.stats.evictions == 0
    with pytest.raises(ValueError, match="max_memory_bytes cannot be negative: -1"):
        VisionFeatureSSDCache(None, max_memory_bytes=-1)


def test_large_features_are_read_back_from_their_files(opened):
    tiers = opened(config={"max_vision_memory": "1KB"})
    put(tiers, 1)
    assert tiers_of(tiers, 2)[1] == "ssd" and tiers.flush(60) and has(tiers, 1) and has(tiers, 1)
    assert cache_of(tiers).stats.disk_loads == 2 and cache_of(tiers).usage.ram_entries == 0


@pytest.mark.parametrize(("hot", "vision", "most"), [(64 * KB, GB, 4), (0, GB, 0), (GB, 8 * KB, 2), (GB, 0, 0)])
def test_features_get_a_quarter_of_the_hot_caches_limit_and_no_more_than_their_own(tmp_path, hot, vision, most):
    config = CacheConfig(hot_cache_max_size=hot, max_vision_memory=vision, paged_ssd_cache_dir=tmp_path)
    cache = CacheFactory.create_vision_feature_cache(config)
    for n in range(6):
        cache.put(f"h{n}", "m", mx.zeros((4 * KB,), mx.uint8))
    assert cache.usage.ram_entries == most and CacheConfig().max_vision_memory == 256 * MB
    cache.close()


@pytest.fixture
def monitored(opened) -> tuple[TieredCacheManager, MemoryMonitor, list[int]]:
    hot = HotTier(GB)
    tiers, over = opened(hot_tier=hot), [0]
    monitor = MemoryMonitor(hot, GB, process_memory=lambda: GB + over[0])
    monitor.watch(tiers)
    return tiers, monitor, over


def test_over_the_process_limit_features_leave_ram_before_blocks_and_have_files(monitored):
    tiers, monitor, over = monitored
    put(tiers, *range(4), nbytes=MB)
    block = mx.zeros((2 * MB,), mx.uint8)
    assert tiers.prefix_cache.save_block(name(1), [(block,)], token_count=64)
    over[0] = 2 * MB
    assert monitor.check(now=True) == 2 * MB and tiers_of(tiers, 4) == ["ssd", "ssd", "ram", "ram"]
    assert tiers.store.tier_of(name(1)) == "ram" and monitor.excess == 0
    over[0] = 3 * MB
    assert monitor.check(now=True) == 4 * MB  # what features could not give, a block did
    assert tiers_of(tiers, 4) == ["ssd"] * 4 and tiers.store.tier_of(name(1)) in ("writing", "ssd")
    assert tiers.flush(60) and all(has(tiers, n) for n in range(4))


def test_a_lowered_hot_budget_is_no_business_of_features(monitored):
    tiers, monitor, _ = monitored
    put(tiers, 1, nbytes=MB)
    tiers.prefix_cache.save_block(name(1), [(mx.zeros((MB,), mx.uint8),)], token_count=64)
    tiers.hot_tier.max_bytes = 0
    assert monitor.check(now=True) == MB and tiers_of(tiers, 2)[1] == "ram"


def test_features_whose_file_cannot_be_queued_stay_in_ram(tmp_path, monkeypatch):
    go = threading.Event()

    def slow(*args):
        assert go.wait(60)
        write_feature_file(*args)

    monkeypatch.setattr(feature_folder, "write_feature_file", slow)
    cache = VisionFeatureSSDCache(tmp_path / "f", 10, max_queue_bytes=10 * KB, free_reserve_bytes=0)
    for n in range(4):
        cache.put(f"h{n}", "m", mx.full((4 * KB,), n, mx.uint8))
    tiers = [cache.tier_of(f"h{n}", "m") for n in range(4)]
    assert tiers == ["ram"] * 4 and cache.evict_from_ram(GB) == 2 * 4 * KB  # two were queued
    assert cache.usage[:2] == (2, 2 * 4 * KB)
    go.set()
    assert cache.flush(60) and cache.evict_from_ram(1) == 4 * KB and cache.evict_from_ram(GB) == 4 * KB
    assert all(mx.all(cache.get(f"h{n}", "m") == n).item() for n in range(4))
    cache.close()


def test_without_files_features_are_lost_when_memory_is_short():
    cache = VisionFeatureSSDCache(None, 10)
    cache.put("h", "m", mx.zeros((KB,)))
    assert cache.evict_from_ram(1) == 4 * KB and cache.get("h", "m") is None and cache.usage.ram_bytes == 0


# ---- where features are


def test_asking_where_features_are_changes_and_counts_nothing(opened, tmp_path):
    tiers = opened(config={"max_vision_memory": "8KB"})
    put(tiers, 0, 1, 2)
    assert tiers.flush(60)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "root" / VISION_FOLDER).iterdir()}
    for _ in range(3):
        assert tiers_of(tiers, 4) == ["ssd", "ram", "ram", None]
    stats = cache_of(tiers).stats
    assert (stats.hits, stats.misses, stats.disk_loads) == (0, 0, 0) and tiers.flush(60)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    put(tiers, 3)  # number 1 is still the least recently used
    assert tiers_of(tiers, 4) == ["ssd", "ssd", "ram", "ram"]
    path = tmp_path / "root" / VISION_FOLDER / feature_name(FeatureKey(digest(4).hex(), tiers.feature_model))
    other = path.with_name(feature_name(FeatureKey(digest(0).hex(), tiers.feature_model)))
    path.write_bytes(other.read_bytes())  # as another process would leave it
    assert tiers_of(tiers, 5)[4] == "ssd"


def test_figures_count_a_folder_that_many_use_once(opened):
    one, two = opened("one"), opened("two")
    put(one, 1, 2)
    put(two, 3)
    assert one.flush(60) and has(one, 1) and not has(two, 1)
    found = [tiers.stats()["features"] for tiers in (one, two)]
    assert [f["disk_entries"] for f in found] == [2, 1] and [f["ram_entries"] for f in found] == [2, 1]
    total = figures([cache_of(one), cache_of(two)])
    assert (total.disk_entries, total.disk_bytes) == (3, sum(f["disk_bytes"] for f in found))
    assert (total.ram_entries, total.hits, total.misses) == (3, 1, 1)
    assert set(figures([])) == {0}


# ---- clearing


def config_of(tmp_path: Path) -> CacheConfig:
    return CacheConfig(paged_ssd_cache_dir=tmp_path / "root")


def test_clearing_a_model_takes_its_features_from_ram_and_disk(opened, tmp_path):
    one, two = opened("one"), opened("two")
    put(one, 1, 2)
    put(two, 3)
    assert one.flush(60)
    size = on_disk_bytes(tmp_path)
    assert clear_cache(config_of(tmp_path), [one, two], "one") == (0, size * 2 // 3, 2)
    assert tiers_of(one, 3) == [None] * 3 and not has(one, 1) and tiers_of(two, 4)[3] == "ram"
    assert clear_cache(config_of(tmp_path), [one, two], "absent") == (0, 0, 0)
    assert clear_cache(config_of(tmp_path), [one, two], None).images == 1 and on_disk(tmp_path / "root") == []
    put(one, 1)
    assert has(one, 1) and one.flush(60) and len(on_disk(tmp_path / "root")) == 1 and cache_of(one).check() == []


def on_disk_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "root" / VISION_FOLDER).iterdir())


def test_features_of_models_that_are_not_loaded_are_cleared_too(opened, tmp_path):
    gone, other = opened("gone", exact="on"), opened("other")
    put(gone, 1)
    put(other, 2)
    gone.close()
    assert clear_cache(config_of(tmp_path), [other], "gone").images == 1 and len(on_disk(tmp_path / "root")) == 1
    other.close()
    assert clear_cache(config_of(tmp_path), [], None).images == 1 and on_disk(tmp_path / "root") == []


def test_what_other_caches_have_in_ram_of_cleared_files_is_forgotten(tmp_path):
    one, two = (VisionFeatureSSDCache(tmp_path / "f", free_reserve_bytes=0) for _ in range(2))
    one.put("h", "m", mx.ones((8,)))
    assert one.flush(60) and two.get("h", "m") is not None and two.usage.ram_entries == 1
    assert list(one.clear(lambda key: key.image_hash == "h")) == [("h", "m")]
    assert two.usage == (0, 0, 0, 0) and two.get("h", "m") is None
    one.close()
    two.close()


def test_features_in_ram_only_are_cleared(opened):
    tiers = opened(root=None)
    put(tiers, 1, 2)
    assert clear_cache(CacheConfig(), [tiers], "m") == (0, 0, 2) and not has(tiers, 1)


def test_what_waits_to_be_written_is_cleared_too(opened, tmp_path, monkeypatch):
    go, reached = threading.Event(), threading.Event()

    def slow(*args):
        reached.set()
        assert go.wait(60)
        write_feature_file(*args)

    monkeypatch.setattr(feature_folder, "write_feature_file", slow)
    tiers = opened()
    put(tiers, 1, 2)
    assert reached.wait(60)
    threading.Timer(0.2, go.set).start()
    assert clear_cache(config_of(tmp_path), [tiers], "m").images == 2
    assert on_disk(tmp_path / "root") == [] and tiers_of(tiers, 3) == [None] * 3


def test_older_features_go_by_their_last_use(opened, tmp_path, monkeypatch):
    tiers = opened(config={"max_vision_memory": "12KB"})
    put(tiers, *range(6))
    assert tiers.flush(60)
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10 * DAY_NS)
    assert has(tiers, 1)  # from its file
    done = clear_cache(config_of(tmp_path), [tiers], None, now + 5 * DAY_NS)
    assert done.images == 5 and tiers_of(tiers, 6)[1] == "ram" and len(on_disk(tmp_path / "root")) == 1
    assert clear_cache(config_of(tmp_path), [tiers], None, now + 5 * DAY_NS).images == 0
