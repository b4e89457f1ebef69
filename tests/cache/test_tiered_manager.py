import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.factory import CacheConfig
from omlx.cache.prefix_cache import CacheIdentity
from omlx.cache.tiered_manager import TieredCacheManager, clear_cache
from omlx.request import Request, SamplingParams
from omlx.scheduler import Scheduler, SchedulerConfig
from omlx.storage.folder import FolderLock, StoreLocked, folder_name
from omlx.storage.hot_tier import HotTier
from tests.storage.blocks import damage, name
from tests.tiny import TinyRunner

GB = 1 << 30
SHAPE = (1, 64, 32)
NBYTES = 2 * 64 * 32 * 4


def kv(n: int) -> list[tuple[mx.array, ...]]:
    rng = np.random.default_rng(n)
    return [tuple(mx.array(rng.random(SHAPE, np.float32)) for _ in range(2))]


def save(tiers: TieredCacheManager, *numbers: int) -> None:
    for n in numbers:
        assert tiers.prefix_cache.save_block(name(n), kv(n), token_count=64)


def in_ram(tiers: TieredCacheManager, upto: int = 30) -> list[int]:
    return [n for n in range(upto) if tiers.store.tier_of(name(n)) == "ram"]


def tier(tiers: TieredCacheManager, n: int) -> str | None:
    return tiers.store.tier_of(name(n))


@pytest.fixture
def opened(tmp_path):
    managers = []

    def opener(hot: int = GB, ssd_dir: Path | None = tmp_path / "cache", **options: Any) -> TieredCacheManager:
        managers.append(TieredCacheManager(max_kv_cache_memory=hot, ssd_dir=ssd_dir, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


# ---- what is built


def test_its_memory_is_the_hot_budget_and_the_bound_of_running_requests(opened):
    tiers = opened(3 * NBYTES)
    save(tiers, *range(5))
    assert in_ram(tiers) == [2, 3, 4] and tiers.max_kv_cache_memory == 3 * NBYTES
    config = CacheConfig(hot_cache_max_size=NBYTES, block_size=32, paged_ssd_cache_dir=Path("not looked at"))
    other = opened(5 * NBYTES, None, config=config)
    save(other, 0, 1)
    assert in_ram(other) == [1] and other.max_kv_cache_memory == 5 * NBYTES
    assert other.prefix_cache.block_size == other.paged_cache.block_size == 32


def test_a_stack_without_any_tier_is_refused():
    with pytest.raises(ValueError, match="room in RAM or a folder"):
        TieredCacheManager(0, None)


def test_models_have_folders_of_their_own_under_the_root(opened, tmp_path):
    one, two = opened(model_name="org/one"), opened(model_name="two")
    save(one, 1)
    assert one.flush(60) and two.prefix_cache.load_block(name(1)) is None
    assert one.store.get_block_path(name(1)).is_relative_to(tmp_path / "cache" / folder_name("org/one"))


def test_close_writes_what_is_queued_and_a_new_one_finds_it(opened):
    tiers = opened()
    save(tiers, *range(20))
    assert tiers.close() and tiers.close()
    again = opened()
    assert all(again.restore_block_from_cold(n, name(n)) for n in range(20))
    assert mx.array_equal(again.prefix_cache.load_block(name(7))[0][1], kv(7)[0][1]).item()


# ---- hot to cold


def test_the_oldest_blocks_go_and_have_their_files_before(opened):
    tiers = opened()
    save(tiers, *range(20))
    assert tiers.evict_blocks_to_cold(5 * NBYTES - 1) == 5 * NBYTES
    assert in_ram(tiers) == list(range(5, 20))
    assert all(tiers.store.get_block_path(name(n)).exists() for n in range(5))
    assert tiers.evict_blocks_to_cold(0) == 0 and tiers.evict_blocks_to_cold(GB) == 15 * NBYTES


def test_a_block_that_the_cold_tier_gave_up_is_written_again_before_it_goes(opened):
    probe = opened(model_name="size")
    save(probe, 0)
    size = probe.store.get_meta(name(0)).file_size
    probe.close()
    config = CacheConfig(hot_cache_max_size=GB, max_paged_ssd_cache_size=3 * size + 30_000)
    tiers = opened(config=config)
    save(tiers, *range(6))
    assert tiers.flush(60) and not tiers.store.get_block_path(name(0))
    assert tiers.evict_blocks_to_cold(NBYTES) == NBYTES
    assert tier(tiers, 0) == "ssd" and tiers.store.check() == []


def test_without_waiting_a_block_can_be_read_throughout(opened, monkeypatch):
    gate = threading.Event()
    tiers = opened()
    write = tiers.store._write_safetensors_no_mx
    monkeypatch.setattr(tiers.store, "_write_safetensors_no_mx", lambda *a: (gate.wait(60), write(*a)))
    save(tiers, 0, 1)
    assert tiers.evict_blocks_to_cold(GB, wait_s=0) == 2 * NBYTES
    assert tier(tiers, 1) == "writing" and tiers.prefix_cache.load_block(name(1)) is not None
    gate.set()


def test_blocks_that_cannot_be_written_stay(opened, monkeypatch):
    tiers = opened()
    monkeypatch.setattr(tiers.store, "_write_safetensors_no_mx", _no_space)
    save(tiers, 0, 1)
    assert tiers.evict_blocks_to_cold(GB, wait_s=0.5) == 0 and in_ram(tiers) == [0, 1]


def _no_space(*_: Any) -> None:
    raise OSError(28, "no space left")


def test_without_a_cold_tier_evicted_blocks_are_lost(opened):
    tiers = opened(ssd_dir=None)
    save(tiers, 0, 1)
    assert tiers.evict_blocks_to_cold(1) == NBYTES and in_ram(tiers) == [1] and tier(tiers, 0) is None
    assert not tiers.restore_block_from_cold(1, name(0))


def test_models_that_share_the_hot_tier_evict_their_own_blocks_only(opened):
    hot = HotTier(GB)
    one, two = opened(model_name="one", hot_tier=hot), opened(model_name="two", hot_tier=hot)
    save(one, 0)
    save(two, 0, 1)
    assert two.evict_blocks_to_cold(GB) == 2 * NBYTES and in_ram(one) == [0] and hot.bytes == NBYTES
    assert one.stats()["kv_cache_memory"] == NBYTES and two.stats()["kv_cache_memory"] == 0


def test_blocks_of_running_requests_stay_and_are_free_when_it_ends(opened):
    runner = TinyRunner()
    config = SchedulerConfig(block_size=16)
    identity = CacheIdentity(runner.fingerprint, runner.layout, "n")
    tiers = opened(config=config, identity=identity, num_layers=2)
    scheduler = Scheduler(runner, config, tiers.prefix_cache, lambda item: None)
    scheduler.add(Request("a", list(range(64)), SamplingParams(max_tokens=1)))
    while scheduler.has_work:
        scheduler.step()
    idle = tiers.stats()["kv_cache_memory"]
    scheduler.add(Request("b", list(range(100, 164)), SamplingParams(max_tokens=50, ignore_eos=True)))
    while not tiers.stats()["blocks_in_use"]:
        scheduler.step()
    assert tiers.stats()["requests_with_blocks"] == 1
    assert tiers.evict_blocks_to_cold(GB) == idle
    assert tiers.stats()["blocks_hot"] == tiers.stats()["blocks_in_use"] > 0
    while scheduler.has_work:
        scheduler.step()
    assert tiers.stats()["blocks_in_use"] == 0 and tiers.evict_blocks_to_cold(GB) > 0
    assert tiers.stats()["kv_cache_memory"] == 0 and tiers.stats()["blocks_cold"] > 0


# ---- cold to hot


def test_restoring_brings_a_block_back_into_ram(opened):
    tiers = opened()
    save(tiers, 0)
    tiers.evict_blocks_to_cold(GB)
    assert in_ram(tiers) == [] and tiers.restore_block_from_cold(42, name(0)) and in_ram(tiers) == [0]
    assert tiers.restore_block_from_cold(42, name(0))
    assert mx.array_equal(tiers.prefix_cache.load_block(name(0))[0][0], kv(0)[0][0]).item()
    assert (tiers.stats()["restores"], tiers.stats()["misses"]) == (1, 0)


@pytest.mark.parametrize("how", ["gone", "half", "payload"])
def test_a_file_that_is_gone_or_damaged_is_a_counted_miss_and_heals(opened, how):
    tiers = opened()
    save(tiers, 0)
    tiers.evict_blocks_to_cold(GB)
    path = tiers.store.get_block_path(name(0))
    path.unlink() if how == "gone" else damage(path, how)
    assert tiers.restore_block_from_cold(42, name(0)) is False
    assert (tiers.stats()["misses"], tiers.stats()["damaged"], tiers.stats()["restores"]) == (1, 1, 0)
    save(tiers, 0)
    tiers.evict_blocks_to_cold(GB)
    assert tiers.restore_block_from_cold(42, name(0)) is True


@pytest.mark.parametrize("block_hash", [b"\x12\x34\x56...", b"", b"x" * 100])
def test_an_unknown_hash_of_any_length_is_a_miss(opened, block_hash):
    tiers = opened()
    assert tiers.restore_block_from_cold(42, block_hash) is False and tiers.stats()["misses"] == 1


def test_an_id_that_a_request_knows_as_another_block_restores_nothing(opened):
    tiers = opened()
    save(tiers, 0, 1)
    tiers.paged_cache.acquire("r", name(0))
    (block_id,) = tiers.paged_cache.block_ids("r")
    assert tiers.restore_block_from_cold(block_id, name(0))
    assert not tiers.restore_block_from_cold(block_id, name(1))


def test_no_room_in_ram_is_said(opened):
    tiers = opened(NBYTES)
    save(tiers, 0, 1)
    tiers.flush(60)
    tiers.store.pin(name(1))
    assert not tiers.restore_block_from_cold(1, name(0)) and in_ram(tiers) == [1]
    tiers.store.unpin(name(1))
    assert tiers.restore_block_from_cold(1, name(0)) and in_ram(tiers) == [0]


# ---- figures


def test_figures_follow_what_happens(opened):
    tiers = opened()
    save(tiers, 0, 1, 2)
    stats = tiers.stats()
    assert (stats["kv_cache_memory"], stats["blocks_cold"], stats["cold_tokens"]) == (3 * NBYTES, 3, 192)
    tiers.evict_blocks_to_cold(2 * NBYTES)
    tiers.restore_block_from_cold(1, name(0))
    tiers.prefix_cache.load_block(name(2))
    tiers.prefix_cache.load_block(name(9))
    stats = tiers.stats()
    assert (stats["hits"], stats["hits_ram"], stats["hits_ssd"], stats["misses"]) == (2, 1, 1, 1)
    assert (stats["restores"], stats["evictions"], stats["blocks_hot"]) == (1, 2, 2)
    sizes = sum(meta.file_size for meta in tiers.store._index.get_all_metadata())
    assert stats["bytes"] == {"ram": 2 * NBYTES, "ssd": sizes}
    tiers.store.delete_block(name(0))
    assert (tiers.stats()["blocks_cold"], tiers.stats()["cold_tokens"]) == (2, 128)


def test_tokens_on_disk_are_known_after_a_restart(opened):
    tiers = opened()
    save(tiers, 0, 1)
    tiers.close()
    assert opened().stats()["cold_tokens"] == 128


def test_many_threads_may_evict_restore_and_save_at_once(opened):
    tiers = opened(8 * NBYTES)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for n in rng.integers(0, 12, 40).tolist():
            save(tiers, n)
            tiers.evict_blocks_to_cold(NBYTES, wait_s=0)
            tiers.restore_block_from_cold(n, name(n))
            found = tiers.prefix_cache.load_block(name(n))
            if found is None or not mx.array_equal(found[0][0], kv(n)[0][0]).item():
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and tiers.flush(60) and tiers.store.check() == [] and tiers.store.hot_bytes <= 8 * NBYTES


# ---- clearing


def test_clearing_takes_one_model_or_all_and_spares_blocks_in_use(opened, tmp_path):
    one, two = opened(model_name="one"), opened(model_name="two")
    gone = opened(model_name="not loaded")
    save(gone, 0, 1)
    gone.close()
    save(one, 0, 1, 2)
    save(two, 0)
    size = one.store.get_meta(name(0)).file_size
    one.store.pin(name(2))
    config = CacheConfig(paged_ssd_cache_dir=tmp_path / "cache")
    assert clear_cache(config, [one, two], "one") == (2, 2 * size, 0)
    assert [tier(one, n) for n in range(3)] == [None, None, "ram"] and tier(two, 0) == "ram"
    one.store.unpin(name(2))
    assert clear_cache(config, [one, two], "not loaded") == (2, 2 * size, 0)
    assert clear_cache(config, [one, two], None).blocks == 2 and clear_cache(config, [one, two], None) == (0, 0, 0)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == [] and two.store.check() == []


def test_clearing_works_when_no_model_is_loaded_and_without_files(opened, tmp_path):
    tiers = opened(model_name="m")
    save(tiers, 0)
    tiers.close()
    assert clear_cache(CacheConfig(paged_ssd_cache_dir=tmp_path / "cache"), [], "m").blocks == 1
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    ram = opened(ssd_dir=None, model_name="m")
    save(ram, 0)
    assert clear_cache(CacheConfig(), [ram], "m").blocks == 1 and tier(ram, 0) is None


def test_a_clear_that_does_not_get_the_folder_leaves_ram_alone(tmp_path):
    config = CacheConfig(hot_cache_max_size=1 << 20, paged_ssd_cache_dir=tmp_path, max_paged_ssd_cache_size=1 << 20)
    tiers = TieredCacheManager(1 << 20, None, config=config)
    tiers.store.save_block(b"a", [(mx.zeros((1, 1, 4, 8)), mx.zeros((1, 1, 4, 8)))], 4)
    lock = FolderLock(tmp_path)
    try:
        with pytest.raises(StoreLocked):
            clear_cache(config, [tiers], None)
        assert tiers.stats()["blocks_hot"] == 1
    finally:
        lock.release()
    assert clear_cache(config, [tiers], None).blocks == 1
    tiers.close()
