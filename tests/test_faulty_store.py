"""The disk that fails, over a real store."""

import errno
import threading
import time

import pytest

from omlx.cache.interface import CacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.testing import Fault, FaultyStore
from tests.storage.blocks import NBYTES, block, meta, name
from tests.storage.targets import read, save

SIZE = meta(0).file_size


@pytest.fixture
def opened(tmp_path):
    stores = []

    def opener(*faults, hot=0, seed=0, folder="m"):
        real = PagedSSDCacheManager(tmp_path / folder, 64 << 20, hot, free_reserve_bytes=0)
        stores.append(FaultyStore(real, faults, seed=seed))
        return stores[-1]

    yield opener
    for store in stores:
        store.close(60)


def kinds(store):
    return [fault.kind for fault in store.injected]


def test_without_faults_it_is_the_store(opened):
    store = opened(hot=NBYTES)
    assert isinstance(store, CacheManager) and save(store, 1, parent=b"p") and save(store, 2) and store.flush(60)
    assert (read(store, 1), read(store, 2), read(store, 3)) == ("ssd", "ram", None)
    assert [m.block_hash for m in store.children(b"p")] == [name(1)] and store.specs(name(1)) == block(1).specs
    assert {m.block_hash for m in store.metas()} == {name(1), name(2)} and store.keeps_ram and store.injected == []
    assert store.delete_block(name(1)) and store.check() == [] and store.stats().saves == 2


@pytest.mark.parametrize("kind", ["short read", "bit flip"])
@pytest.mark.parametrize("seed", range(8))
def test_a_spoiled_file_is_really_spoiled_and_found_out(opened, kind, seed):
    store = opened(Fault(kind=kind, at=[1]), seed=seed)
    save(store, 1)
    store.flush(60)
    path = store.get_block_path(name(1))
    raw = path.read_bytes()
    assert read(store, 1) == "ssd"
    assert read(store, 1) is None and store.injected == [(kind, "read", path)]
    assert store.stats().damaged == 1 and store.flush(60) and not path.exists()
    assert save(store, 1) and store.flush(60) and path.read_bytes() == raw and read(store, 1) == "ssd"
    assert store.check() == []


def test_an_error_is_the_files_own_for_reads_and_writes(opened):
    store = opened(Fault(kind="error", use="write", errno=errno.ENOSPC, at=[0]), hot=2 * NBYTES)
    save(store, 1)
    assert not store.flush(60) and store.stats().write_errors == 1 and not store.get_block_path(name(1))
    assert store.flush(60) and store.get_block_path(name(1)).exists()
    store.faults = (Fault(kind="error", errno=errno.EIO),)
    store.store.evict_from_ram(NBYTES)
    assert read(store, 1) is None and kinds(store) == ["error", "error"] and store.stats().damaged == 1


def test_an_error_that_passes_keeps_the_file(opened):
    store = opened(Fault(kind="error", errno=errno.EMFILE, at=[0]))
    save(store, 1)
    store.flush(60)
    assert read(store, 1) is None and read(store, 1) == "ssd" and store.stats().damaged == 0


def test_a_seed_gives_the_same_faults_again_in_any_order(opened):
    def misses(folder, seed, order):
        store = opened(Fault(kind="bit flip", chance=0.5), seed=seed, folder=folder)
        for n in order:
            save(store, n)
        store.flush(60)
        return {n for n in order if read(store, n) is None}

    first = misses("a", 1, range(16))
    assert 2 < len(first) < 14 and misses("b", 1, range(15, -1, -1)) == first and misses("c", 2, range(16)) != first


def test_delays_and_a_throttle_take_their_time(opened):
    store = opened(Fault(kind="delay", seconds=0.05), Fault(kind="throttle", bytes_per_s=SIZE / 0.05))
    for n in range(4):
        save(store, n)
    store.flush(60)
    readers = [threading.Thread(target=read, args=(store, n)) for n in range(4)]
    started = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    # The delays run side by side, the bytes one after the other.
    assert time.monotonic() - started > 0.05 + 4 * 0.05 - 0.01
    assert sorted(kinds(store)) == ["delay"] * 4 + ["throttle"] * 4 and store.stats().hits_ssd == 4


def test_ram_and_the_queue_have_no_faults(opened):
    stalled = threading.Event()
    store = opened(Fault(kind="bit flip"), hot=NBYTES)
    store.store.on_file = lambda use, path, nbytes: stalled.wait(60) and None
    save(store, 1)
    save(store, 2)
    assert store.tier_of(name(1)) == "writing" and read(store, 1) == "ram" and read(store, 2) == "ram"
    stalled.set()
    assert store.flush(60) and store.injected == []


def test_faults_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="not before a write"):
        Fault(kind="bit flip", use="write")
    with pytest.raises(ValueError, match="bytes_per_s"):
        Fault(kind="throttle")


def test_a_whole_read_meets_the_faults_too(opened):
    store = opened(Fault(kind="short read", at=[0]))
    save(store, 1)
    store.flush(60)
    assert read(store, 1, whole=True) is None and save(store, 1) and store.flush(60)
    assert read(store, 1, whole=True) == "ssd"
