"""How much disk and RAM the store takes, under load and on slow disks; and who waits for a disk."""

import logging
import os
import random
import sys
import threading
import weakref

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage import disk_store, recovery
from omlx.storage.folder import INDEX_NAME, VISION_FOLDER
from omlx.storage.hot_tier import HotTier
from omlx.storage.tensor_file import BlockBuffer, TensorSpec
from omlx.testing import Fault, FaultyStore
from tests.storage.blocks import NBYTES, block, meta, name, our_bytes
from tests.storage.children import run_in_child, warnings_in
from tests.storage.targets import Target, read, save
from tests.support import wait_until

MB = 1 << 20
SIZE = meta(0).file_size
LARGE = (TensorSpec("0.keys", "U8", (1 << 16,)),)


@pytest.fixture
def opened(tmp_path):
    stores = []

    def opener(hot=0, limit=64 * MB, root=tmp_path / "root", folder="m", **options):
        options = {"free_reserve_bytes": 0} | options
        stores.append(PagedSSDCacheManager(root / folder, limit, hot, root_dir=root, **options))
        return stores[-1]

    yield opener
    for store in stores:
        store.close(60)


def large(n):
    buffer = BlockBuffer.empty(LARGE)
    buffer.data[:] = np.frombuffer(np.random.default_rng(n).bytes(buffer.nbytes), np.uint8)
    return buffer


# ---- disk


class Sampler(threading.Thread):
    """Walks a folder every few milliseconds; `most` is what lay there for sure at one moment.

    A walk takes a while, and may count a file that went and one that came after it. So what counts is what two walks
    in a row saw: it was there, all of it, between them.
    """

    def __init__(self, root):
        super().__init__()
        self.most = self.samples = 0
        self._root, self._done = root, threading.Event()

    def run(self):
        before = {}
        while not self._done.wait(0.005):
            now = self._walk()
            self.most = max(self.most, sum(min(size, now.get(file, 0)) for file, size in before.items()))
            self.samples += 1
            before = now

    def _walk(self):
        found = {}
        for directory, _, files in os.walk(self._root):
            for file in files:
                try:
                    stat = os.stat(os.path.join(directory, file))
                except FileNotFoundError:
                    continue
                found[stat.st_ino] = stat.st_size
        return found

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self.join()


def load(stores, features, seed, enough):
    dice = random.Random(seed)
    while not enough.is_set():
        store, n = dice.choice(stores), dice.randrange(500)
        what = dice.random()
        if what < 0.7:
            store.save_block(name(n), large(n), 64, tokens=bytes(256), parent=name(n - 1), replace=what < 0.1)
        elif what < 0.8:
            store.load_block(name(n))
        elif what < 0.85:
            store.delete_block(name(n))
        elif what < 0.95:
            features.put(f"h{n % 30}", "m", mx.array(np.random.default_rng(n).random((1 + n % 60, 128), np.float32)))
        else:
            features.get(f"h{n % 30}", "m")


def test_all_files_together_stay_within_the_limit_under_load_but_for_the_one_being_written(opened, tmp_path):
    root, limit = tmp_path / "root", 60 << 16
    stores = [
        opened(hot=4 << 16, limit=limit, folder=folder, max_queue_bytes=16 << 16) for folder in ("ma", "mb", "mc")
    ]
    features = VisionFeatureSSDCache(root / VISION_FOLDER, 2, max_disk_bytes=limit // 10, free_reserve_bytes=0)
    enough = threading.Event()
    with Sampler(root) as sampler:
        threads = [threading.Thread(target=load, args=(stores, features, seed, enough)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            wait_until(
                lambda: sampler.samples > 10
                and sampler.most > limit * 0.8
                and sum(store.stats().evictions_ssd for store in stores) > 50
                and features.stats.disk_evictions > 0,
                timeout_s=240,
            )
        finally:
            enough.set()
        for thread in threads:
            thread.join()
        assert features.flush(60) and all(store.flush(60) for store in stores)
    one = max(m.file_size for store in stores for m in store.metas())
    assert sampler.samples > 10 and limit * 0.8 < sampler.most <= limit + one, (sampler.most - limit, one)
    assert our_bytes(root) <= limit and sum(store.stats().evictions_ssd for store in stores) > 50
    assert features.stats.disk_evictions > 0 and stores[0].check() == [] and features.check() == []
    assert stores[0].ssd_bytes >= our_bytes(root) - 100  # all of it is counted, but for the lock
    features.close()


def lowered(root):
    """What a start with a smaller limit does, by the calls that the system sees."""
    calls, there = [], []

    def hook(event, args):
        if event == "open" and ".safetensors" in str(args[0]):
            calls.append("read")
        elif event == "open" and str(args[0]).endswith(".tmp"):
            calls.append("write")
            there.append(our_bytes(root))
        elif event == "os.remove" and str(args[0]).endswith(".safetensors"):
            calls.append("remove")

    block(0)
    sys.addaudithook(hook)
    store = PagedSSDCacheManager(root / "m", 10 * SIZE + 40_000, MB, root_dir=root, free_reserve_bytes=0)
    save(store, 100)
    assert store.flush(60)
    assert calls.count("remove") > 20 and calls.count("write") == 1 and "read" not in calls, calls
    assert there[0] + SIZE <= 10 * SIZE + 40_000 + 300, "the limit holds before the new block is written, with it"
    assert our_bytes(root) <= 10 * SIZE + 40_000 and read(store, 39) == "ssd" and store.check() == []
    store.close()


def test_a_smaller_limit_at_start_is_met_before_anything_is_written_and_without_reading_blocks(opened, tmp_path):
    store = opened()
    for n in range(40):
        save(store, n)
    store.close()
    run_in_child(lowered, tmp_path / "root")


def test_a_smaller_limit_is_met_before_anything_is_written_also_when_the_index_is_lost(
    opened, tmp_path, monkeypatch, caplog
):
    store = opened()
    for n in range(40):
        save(store, n)
    store.close()
    (tmp_path / "root" / INDEX_NAME).unlink()
    found, go = recovery.find_blocks, threading.Event()

    def slow(*args):
        assert go.wait(60)
        return found(*args)

    monkeypatch.setattr(disk_store, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(recovery, "find_blocks", slow)
    caplog.set_level(logging.WARNING)
    store = opened(limit=10 * SIZE + 40_000)
    there = []
    store.on_file = lambda use, path, nbytes: there.append(our_bytes(tmp_path / "root"))
    assert save(store, 100) and read(store, 100) == "ram"  # serving does not wait for the folder
    go.set()
    assert store.flush(60) and len(there) == 1 and there[0] <= 10 * SIZE + 40_000
    assert read(store, 100) == "ssd" and store.check() == []
    assert wait_until(lambda: read(store, 39) == "ssd")  # its header has been read by now
    # Of the files that had to go nobody says that they cannot be read.
    assert all(INDEX_NAME in line for line in warnings_in(caplog)) and store.stats().damaged == 0


def test_a_start_does_not_wait_for_removals(opened, tmp_path, monkeypatch):
    store = opened()
    for n in range(40):
        save(store, n)
    store.close()
    removed, go = disk_store.remove, threading.Event()
    monkeypatch.setattr(disk_store, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(disk_store, "remove", lambda path: go.wait(60) and removed(path))
    store = opened(hot=MB, limit=10 * SIZE + 40_000)
    assert read(store, 39) == "ssd" and save(store, 100) and read(store, 100) == "ram" and not go.is_set()
    assert len(list((tmp_path / "root").rglob("*.safetensors"))) == 40
    go.set()
    assert store.flush(60) and our_bytes(tmp_path / "root") <= 10 * SIZE + 40_000 and store.check() == []


def test_an_entry_larger_than_the_limit_is_declined_in_one_line_and_evicts_nothing(opened, tmp_path, caplog):
    root = tmp_path / "root"
    store = opened(limit=10 * SIZE + 40_000)
    features = VisionFeatureSSDCache(root / VISION_FOLDER, 0, max_disk_bytes=4 * SIZE, free_reserve_bytes=0)
    for n in range(10):
        save(store, n)
    features.put("h", "m", mx.zeros((SIZE // 8,)))
    assert store.flush(60) and features.flush(60)
    kept = {m.block_hash for m in store.metas()}
    caplog.set_level(logging.WARNING)
    specs = (TensorSpec("0.keys", "U8", (11 * SIZE + 40_000,)),)
    for n in range(20, 25):
        assert not store.save_block(name(n), block(n, specs), 8)
        features.put(f"h{n}", "m", mx.zeros((2 * SIZE,)))
    assert store.flush(60) and features.flush(60)
    assert {m.block_hash for m in store.metas()} == kept and features.usage.disk_entries == 1
    assert len(warnings_in(caplog)) == 2 and store.stats().declined == 5 and features.stats.files.declined == 5
    assert store.check() == [] and features.check() == []
    features.close()


@pytest.mark.parametrize(("disk", "left"), [(10 << 30, (10 << 30) // 20), (1 << 40, 2 << 30)])
def test_without_a_wish_5_percent_of_the_disk_or_2_gb_are_left_free(opened, disk, left):
    assert opened(free_reserve_bytes=None)._disk.blocks.set_space(disk, 3 << 30) == (3 << 30) - left


@pytest.mark.parametrize("policy", ["through", "back"])
def test_blocks_that_only_ram_can_hold_are_said_once(opened, caplog, policy):
    caplog.set_level(logging.WARNING)
    store = opened(hot=MB, limit=SIZE // 2, write_policy=policy)
    for n in range(5):
        assert save(store, n) and read(store, n) == "ram"
    assert store.flush(60) and store.stats().files_written == store.stats().declined == 0
    assert ["RAM only" in line for line in warnings_in(caplog)] == [True]


# ---- RAM


class Alive:
    """The buffers that somebody holds, whoever it is."""

    def __init__(self):
        self._buffers = weakref.WeakSet()
        self.most = 0

    def new(self, n):
        buffer = large(n)
        self._buffers.add(buffer)
        return buffer

    def now(self):
        return sum(buffer.nbytes for buffer in list(self._buffers))

    def measure(self):
        self.most = max(self.most, self.now())


def test_ram_and_queue_stay_within_their_sum_while_the_disk_is_slow(opened):
    alive, hot, queue = Alive(), HotTier(10 << 16), 6 << 16
    stores = [opened(hot_tier=hot, folder=folder, max_queue_bytes=queue) for folder in ("ma", "mb")]
    faulty = [FaultyStore(store, [Fault(kind="delay", use="write", seconds=0.004)]) for store in stores]
    for n in range(300):
        faulty[n % 2].save_block(name(n), alive.new(n), 64, group=n // 10)
        alive.measure()
    one = large(0).nbytes
    assert hot.bytes <= hot.max_bytes and stores[0].stats().queue_bytes <= queue
    assert 14 * one <= alive.most <= hot.max_bytes + queue + one, alive.most / one  # one is with who saves it
    assert all(store.flush(60) for store in stores) and stores[0].check() == []
    assert wait_until(lambda: alive.now() <= hot.max_bytes), "nothing else is kept"


def test_blocks_that_cannot_be_written_are_not_kept_beside_the_hot_tier(opened):
    alive = Alive()
    store = FaultyStore(opened(hot=10 << 16, max_queue_bytes=6 << 16), [Fault(kind="error", use="write", errno=28)])
    for n in range(200):
        store.save_block(name(n), alive.new(n), 64)
        alive.measure()
    store.flush(0.2)
    assert alive.most <= 17 << 16
    assert wait_until(lambda: alive.now() <= 10 << 16), (alive.now(), store.stats())
    store.faults = ()
    assert store.flush(60) and store.check() == [] and store.stats().blocks_ssd == 10


def test_reading_needs_one_buffer_a_reader(opened):
    """Into memory of the caller's there is none at all; a block read as a whole has one while it is copied."""
    store = opened()
    for n in range(8):
        store.save_block(name(n), large(n), 64)
    store.flush(60)
    held, most = set(), [0]
    made = BlockBuffer.__init__

    def counted(self, *args):
        made(self, *args)
        held.add(id(self))
        most[0] = max(most[0], len(held))
        weakref.finalize(self, held.discard, id(self))

    BlockBuffer.__init__ = counted
    try:
        for whole in (False, True):
            threads = [
                threading.Thread(target=lambda n=n, w=whole: store.read_block(name(n), Target(LARGE, whole=w)))
                for n in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert most[0] <= (8 if whole else 0)
    finally:
        BlockBuffer.__init__ = made
    assert store.stats().hits_ssd == 16 and not held


# ---- nobody waits for the disk but the writer


def test_saving_goes_on_beside_a_writer_that_hangs_in_the_system(opened):
    """The writer stands in open(2) of a pipe that nobody reads; whoever saves, reads, pins or counts does not."""
    store = opened(hot=40 * NBYTES, max_queue_bytes=3 * SIZE + 300)
    save(store, 0)
    assert store.flush(60)
    path = store.get_block_path(name(0)).parents[1] / name(1).hex()[0] / f".omlx-{name(1).hex()}.tmp"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    os.mkfifo(path)
    save(store, 1)
    for n in range(2, 30):
        assert save(store, n) and read(store, n) == "ram"
        store.pin(name(n))
        store.touch([name(n)])
        store.unpin(name(n))
        store.delete_block(name(100 + n))
    assert not store.flush(0.05) and len(list(path.parents[1].rglob("*.safetensors"))) == 1  # it hangs still
    assert store.stats().queue_bytes <= 3 * SIZE + 300 and store.stats().dropped_writes == 0
    with path.open("rb") as reader:  # now somebody reads
        reader.read(100)
    store.flush(60)  # a pipe takes no file: that write failed, and the next one is done
    assert store.flush(60) and store.stats().dropped_writes == 0
    assert all(read(store, n) == "ram" and store.get_block_path(name(n)) for n in range(30))
    store.evict_from_ram(MB)
    assert all(read(store, n) == "ssd" for n in range(30)) and store.check() == []


def test_a_hole_from_a_full_queue_is_filled_when_there_is_room(opened):
    go = threading.Event()
    store = opened(hot=30 * NBYTES, max_queue_bytes=2 * SIZE + 300)
    store.on_file = lambda use, path, nbytes: go.wait(60) and None
    for n in range(20):
        save(store, n)
    assert sum(store.get_block_path(name(n)) is not None for n in range(20)) <= 3
    go.set()  # and nobody asks for anything
    assert wait_until(lambda: all(store.get_block_path(name(n)) for n in range(20)))
    assert store.flush(60) and store.check() == [] and store.stats().dropped_writes == 0


def test_a_hole_left_by_a_block_that_went_unwritten_is_filled_when_its_tokens_pass_again(opened):
    go = threading.Event()
    store = opened(hot=3 * NBYTES, max_queue_bytes=SIZE + 300)
    store.on_file = lambda use, path, nbytes: go.wait(60) and None
    for n in range(10):
        save(store, n)
    go.set()
    assert store.flush(60)
    lost = [n for n in range(10) if not store.contains(name(n))]
    assert lost and store.stats().dropped_writes == len(lost)
    for n in lost:
        save(store, n)
        assert store.flush(60)
    assert all(store.get_block_path(name(n)).exists() for n in range(10)) and store.check() == []
