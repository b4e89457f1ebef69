"""`--cache-ttl`: what was not used for that long is gone, from RAM and from disk."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage import disk_store, expiry
from omlx.storage.disk_index import IndexFile
from omlx.storage.folder import INDEX_NAME
from tests.cache.test_paged_ssd_cache import on_disk, read, save
from tests.storage.blocks import NBYTES, name
from tests.support import wait_until

MB = 1 << 20
DAY = 86_400.0
Opener = Callable[..., PagedSSDCacheManager]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    managers = []

    def opener(ttl: float = 0.0, folder: str | None = "m", **options: Any) -> PagedSSDCacheManager:
        options = {"root_dir": tmp_path / "root", "free_reserve_bytes": 0, "ttl_s": ttl} | options
        path = None if folder is None else tmp_path / "root" / folder
        managers.append(PagedSSDCacheManager(path, 64 * MB, options.pop("hot", 0) * NBYTES, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock that dates uses forward by so many seconds. Expired blocks are looked for every 0.1 s."""
    monkeypatch.setattr(expiry, "_PERIOD_S", (0.1, 0.1))
    now, late = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: now() + late[0])
    return lambda seconds: late.__setitem__(0, late[0] + int(seconds * 1e9))


def test_unused_blocks_go_from_both_tiers_while_running(opened: Opener) -> None:
    cache = opened(ttl=0.5, hot=20)
    for n in range(4):
        save(cache, n, parent=b"p")
    cache.flush(60)
    path = cache.get_block_path(name(0))
    assert path is not None and path.exists()
    # Nobody asks for anything: the writer thread does it.
    assert wait_until(lambda: cache.stats().blocks_ram == 0 and cache.stats().blocks_ssd == 0)
    stats = cache.stats()
    assert (stats.expired_ram, stats.expired_ssd, stats.evictions_ram, stats.evictions_ssd) == (4, 4, 0, 0)
    assert {gone.reason for gone in cache.gone_after(b"p")} == {"expired"} and len(cache.gone_after(b"p")) == 4
    assert cache.flush(60) and not path.exists() and cache.check() == []


def test_using_a_block_keeps_it(opened: Opener, clock: Callable[[float], None]) -> None:
    cache = opened(ttl=DAY, hot=2)
    for n in range(4):  # 0 and 1 are on disk only, 2 and 3 in RAM too
        save(cache, n)
    uses: list[Callable[[], Any]] = [
        lambda: cache.touch([name(0)]),
        lambda: cache.load_block(name(3)),
    ]
    for _ in range(3):
        clock(0.4 * DAY)
        for use in uses:
            use()
    assert wait_until(lambda: not cache.contains(name(1)) and not cache.contains(name(2)))
    assert on_disk(cache) == {0, 3} and cache.tier_of(name(3)) == "ram"


def test_blocks_in_use_stay(opened: Opener, clock: Callable[[float], None]) -> None:
    cache = opened(ttl=DAY, hot=20)
    for n in range(3):
        save(cache, n)
    cache.pin(name(1))
    clock(2 * DAY)
    assert wait_until(lambda: cache.stats().blocks_ram == cache.stats().blocks_ssd == 1)
    assert cache.tier_of(name(1)) == "ram" and on_disk(cache) == {1}
    cache.unpin(name(1))
    assert wait_until(lambda: not cache.contains(name(1)))


def test_a_start_removes_what_has_expired_meanwhile(opened: Opener, clock: Callable[[float], None]) -> None:
    cache = opened()
    for n in range(3):
        save(cache, n)
    cache.close(60)
    clock(5 * DAY)
    cache = opened()
    cache.load_block(name(1))
    cache.close(60)
    clock(5 * DAY)
    kept = opened(ttl=10.1 * DAY)
    assert on_disk(kept) == {0, 1, 2}
    kept.close(60)
    cache = opened(ttl=7 * DAY)
    assert on_disk(cache) == {1} and cache.stats().expired_ssd == 2 and cache.flush(60) and cache.check() == []


def test_a_start_that_has_to_look_through_the_folder_goes_by_the_files_times(opened: Opener, tmp_path: Path) -> None:
    cache = opened()
    for n in range(3):
        save(cache, n)
    cache.flush(60)
    path = cache.get_block_path(name(0))
    assert path is not None
    cache.close(60)
    (tmp_path / "root" / INDEX_NAME).unlink()
    old = time.time() - 8 * DAY
    os.utime(path, (old, old))
    cache = opened(ttl=7 * DAY)
    assert wait_until(lambda: on_disk(cache) == {1, 2}) and cache.flush(60) and not path.exists()


def test_files_of_another_version_expire_by_the_time_they_were_made(opened: Opener, tmp_path: Path) -> None:
    cache = opened()
    save(cache, 0)
    cache.flush(60)
    path = cache.get_block_path(name(0))
    assert path is not None
    raw = path.read_bytes()
    cache.close(60)
    paths = [path.with_name(f"{path.name[0]}{'0' * 62}{n}.safetensors") for n in (1, 2)]
    for n, other in enumerate(paths):
        other.write_bytes(raw.replace(b'"format":"1"', b'"format":"9"'))
        made = time.time() - (8 if n else 1) * DAY
        os.utime(other, (made, made))
    (tmp_path / "root" / INDEX_NAME).unlink()
    cache = opened(ttl=7 * DAY)
    assert wait_until(lambda: not paths[1].exists()) and paths[0].exists() and cache.contains(name(0))


def test_the_shortest_time_given_for_a_root_holds_for_all_its_models(opened: Opener) -> None:
    one = opened(folder="one")
    save(one, 0)
    two = opened(ttl=0.3, folder="two")
    save(two, 0)
    opened(ttl=DAY, folder="three")
    assert wait_until(lambda: not one.contains(name(0)) and not two.contains(name(0)))


def test_without_files_nothing_that_has_expired_is_found(
    opened: Opener, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "_PERIOD_S", (0.0, 0.0))
    before = set(threading.enumerate())
    cache = opened(ttl=DAY, folder=None, root_dir=None, hot=20)
    for find in (
        lambda: cache.get_meta(name(0)),
        lambda: cache.load_block(name(0)),
        lambda: cache.children(b"p"),
    ):
        save(cache, 0, parent=b"p")
        assert find()
        clock(2 * DAY)
        assert not find()
    assert cache.hot_bytes == 0 and cache.stats().expired_ram == 3 and not set(threading.enumerate()) - before


def test_a_block_that_only_ram_has_expires_unwritten(opened: Opener) -> None:
    cache = opened(ttl=0.3, hot=20, write_policy="back")
    save(cache, 0)
    assert wait_until(lambda: not cache.contains(name(0)))
    assert cache.flush(60) and cache.stats().files_written == 0


def test_expiry_under_load_does_not_wait_for_a_rest(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(ttl=0.3)
    save(cache, 0)
    cache.flush(60)
    monkeypatch.setattr(disk_store.WriteQueue, "_idle", lambda self: False)  # there is always something to do
    numbers = itertools.count(1)
    assert wait_until(lambda: save(cache, next(numbers)) and not cache.contains(name(0)))


def test_looking_for_what_has_expired_does_not_look_at_what_has_not(opened: Opener, tmp_path: Path) -> None:
    """Entries are in order of use: a look costs as much as it finds."""
    cache = opened(ttl=DAY)
    for n in range(50):
        save(cache, n)
    cache.flush(60)
    ledger = cache._disk.blocks  # type: ignore[union-attr]
    looked = []
    entries = ledger._table.entries
    ledger._table.entries = lambda: (looked.append(entry) or entry for entry in entries())  # type: ignore[method-assign, func-returns-value]
    assert ledger.remove_unused(time.time_ns() - int(DAY * 1e9), "expired") == {} and len(looked) == 1


def test_very_much_that_has_expired_goes_in_portions(
    opened: Opener, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with a folder full of old blocks does not wait for all of them."""
    cache = opened()
    for n in range(40):
        save(cache, n)
    cache.close(60)
    clock(8 * DAY)
    monkeypatch.setattr(disk_store, "_PORTION", 10)
    monkeypatch.setattr(disk_store, "_PORTION_EVERY_S", 0.7)
    cache = opened(ttl=7 * DAY)
    assert len(on_disk(cache, 40)) >= 20  # one portion at the start, perhaps another since
    assert wait_until(lambda: on_disk(cache, 40) == set()) and cache.flush(60) and cache.check() == []
    assert cache.stats().expired_ssd == 40


# ---- image features


@pytest.fixture
def features(tmp_path: Path) -> Iterator[Callable[..., VisionFeatureSSDCache]]:
    caches = []

    def opener(ttl: float, folder: str | None = "vision", entries: int = 20) -> VisionFeatureSSDCache:
        where = None if folder is None else tmp_path / folder
        caches.append(VisionFeatureSSDCache(where, entries, free_reserve_bytes=0, ttl_s=ttl))
        return caches[-1]

    yield opener
    for cache in caches:
        cache.close(60)


def held(cache: VisionFeatureSSDCache) -> tuple[int, int]:
    return cache.usage.ram_entries, cache.usage.disk_entries


def test_unused_features_go_from_ram_and_disk(features: Callable[..., VisionFeatureSSDCache], tmp_path: Path) -> None:
    cache = features(0.5)
    for n in range(3):
        cache.put(f"h{n}", "m", mx.ones((4,)))
    assert cache.flush(60) and len(list(tmp_path.rglob("*.npy"))) == 3
    assert wait_until(lambda: held(cache) == (0, 0)) and list(tmp_path.rglob("*.npy")) == []
    assert cache.stats.files.expired == 3 and cache.get("h0", "m") is None and cache.check() == []


def test_used_features_stay(features: Callable[..., VisionFeatureSSDCache], clock: Callable[[float], None]) -> None:
    cache = features(DAY, entries=1)
    for n in range(3):
        cache.put(f"h{n}", "m", mx.ones((4,)))
    for _ in range(3):
        clock(0.4 * DAY)
        assert cache.get("h0", "m") is not None  # from its file
        assert cache.get("h2", "m") is not None
    assert wait_until(lambda: cache.usage.disk_entries == 2) and cache.get("h1", "m") is None


def test_a_start_removes_features_that_have_expired(
    features: Callable[..., VisionFeatureSSDCache], tmp_path: Path
) -> None:
    cache = features(0)
    for n in range(3):
        cache.put(f"h{n}", "m", mx.ones((4,)))
    cache.close(60)
    for path in sorted(tmp_path.rglob("*.npy"))[:2]:
        os.utime(path, (time.time() - 8 * DAY,) * 2)
    cache = features(7 * DAY)
    assert wait_until(lambda: cache.usage.disk_entries == 1) and cache.get("h2", "m") is not None


def test_features_in_ram_only_are_not_found_once_they_have_expired(
    features: Callable[..., VisionFeatureSSDCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("omlx.cache.vision_feature_cache.time", SimpleNamespace(monotonic=lambda: now[0]))
    cache = features(DAY, folder=None)
    cache.put("h", "m", mx.ones((4,)))
    assert cache.get("h", "m") is not None
    now[0] += 2 * DAY
    assert cache.get("h", "m") is None and held(cache) == (0, 0)


def test_the_factory_passes_the_time_on(tmp_path: Path) -> None:
    config = CacheConfig(paged_ssd_cache_dir=tmp_path / "cache", cache_ttl="1s")  # type: ignore[arg-type]
    store = CacheFactory.create_paged_ssd_cache(config, "m")
    vision = CacheFactory.create_vision_feature_cache(config)
    assert store is not None
    save(store, 0)
    vision.put("h", "m", mx.ones((4,)))
    assert read(store, 0) == "ram" and store.flush(60) and vision.flush(60)
    assert wait_until(lambda: not store.contains(name(0)) and held(vision) == (0, 0))
    vision.close(60)
    store.close(60)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == list((tmp_path / "cache").rglob("*.npy")) == []
    index = IndexFile(tmp_path / "cache" / INDEX_NAME)
    assert index.rows() == {} and index.clean
    index.close_as_found()
