"""Image features through the public calls alone: a tight limit, files that go wrong, disks that fail, kills."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage import feature_file
from omlx.storage.feature_file import FeatureKey, feature_name
from omlx.storage.folder import VISION_FOLDER
from omlx.storage.idle_processor import has_idle_processor
from omlx.storage.open_stores import open_store, release_store
from tests.storage.children import (
    REPOSITORY,
    become_nobody,
    open_folder,
    run_in_child,
    run_on_small_disk,
)
from tests.support import wait_until

MODEL = "m-0123456789abcdef"
MB = 1 << 20
LARGE = (3, 1 << 20)  # float32: 12 MB, many segments, read by two threads where a processor is idle
MEDIUM = (2, 1 << 18)  # 2 MB: its memory is used again


def features(n: int, shape: tuple[int, ...] | None = None) -> mx.array:
    """Of many sizes and dtypes, the same for a number every time."""
    rng = np.random.default_rng(n)
    made = mx.array(rng.standard_normal(shape or (1 + n % 37, 64), np.float32))
    return made if n % 3 else made.astype(mx.bfloat16)


def found(cache: VisionFeatureSSDCache, n: int, shape: tuple[int, ...] | None = None) -> bool:
    """Whether there are features of this number; they have to be the right ones."""
    have, should = cache.get(f"h{n}", MODEL), features(n, shape)
    assert have is None or (have.dtype == should.dtype and mx.array_equal(have, should).item()), n
    return have is not None


def put(cache: VisionFeatureSSDCache, *numbers: int, shape: tuple[int, ...] | None = None) -> None:
    for n in numbers:
        cache.put(f"h{n}", MODEL, features(n, shape))


def file_of(folder: Path, n: int) -> Path:
    return folder / feature_name(FeatureKey(f"h{n}", MODEL))


def folder_bytes(folder: Path) -> int:
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
    return total


Opener = Callable[..., VisionFeatureSSDCache]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    caches = []

    def opener(folder: Path = tmp_path / "features", entries: int = 0, **options: int) -> VisionFeatureSSDCache:
        caches.append(VisionFeatureSSDCache(folder, entries, **{"free_reserve_bytes": 0, **options}))
        return caches[-1]

    yield opener
    for cache in caches:
        cache.close(60)


# ---- a tight limit


@pytest.mark.parametrize("under_a_root", [False, True])
def test_300_arrays_under_a_fifth_of_their_bytes_are_hits_or_misses_and_never_over_the_limit(
    opened, tmp_path, under_a_root
):
    sizes = [features(n).nbytes + 400 for n in range(300)]
    limit, largest = sum(sizes) // 5, max(sizes)
    folder = tmp_path / "root" / VISION_FOLDER
    store = open_store(tmp_path / "root", 100 * MB, MB, 0) if under_a_root else None
    cache = opened(folder, 10, max_disk_bytes=limit)
    over, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            total = folder_bytes(folder)
            if total > limit + largest:
                over.append(total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    rng = np.random.default_rng(7)
    try:
        for n in range(300):
            put(cache, n)
            found(cache, int(rng.integers(0, n + 1)))
            if n % 10 == 0:
                cache.flush(60)  # or the queue would take them all, and few files be written
        assert cache.flush(60)
        hits = [n for n in range(300) if found(cache, n)]
    finally:
        done.set()
        watcher.join()
    assert over == [] and 20 < len(hits) < 150 and cache.stats.disk_evictions > 100 and cache.stats.errors == 0
    assert cache.flush(60) and folder_bytes(folder) <= limit and cache.check() == []
    assert cache.usage.disk_bytes == folder_bytes(folder)
    cache.close()
    again = opened(folder, 10, max_disk_bytes=limit)
    assert {n for n in hits if found(again, n)} == set(hits) - {n for n in hits if not file_of(folder, n).exists()}
    if store is not None:
        assert store.flush(60) and store.check() == [] and store.blocks.bytes >= folder_bytes(folder)
        release_store(store, 60)


def test_two_models_in_one_folder_share_the_limit_and_a_restart_knows_the_order_of_use(opened, tmp_path):
    names = ("one-0123456789abcdef", "two-0123456789abcdef")
    one, two = opened(), opened()
    for n in range(6):
        (one if n % 2 else two).put(f"h{n}", names[n % 2], mx.full((1000,), n))
    assert one.get("h0", names[0]) is not None and one.flush(60)
    assert (
        [one.usage_of(name).disk_entries for name in names] == [3, 3] == [two.usage_of(n).disk_entries for n in names]
    )
    size = one.usage_of(names[0]).disk_bytes // 3
    one.close()
    two.close()
    again = opened(max_disk_bytes=3 * size)  # room for half of them
    assert wait_until(lambda: again.usage.disk_entries == 3)
    assert [again.tier_of(f"h{n}", names[n % 2]) for n in range(6)] == ["ssd", None, None, None, "ssd", "ssd"]
    for n in (0, 4, 5):
        assert mx.array_equal(again.get(f"h{n}", names[n % 2]), mx.full((1000,), n)).item()


# ---- files that are not what they should be, also large ones, which one or two threads read


@pytest.fixture(params=[True, False], ids=["a processor is idle", "none is"])
def idle(request, monkeypatch) -> bool:
    monkeypatch.setattr(feature_file, "has_idle_processor", lambda: request.param)
    return request.param


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [200, MB + 200, 5 * MB, -MB, -300, -20])
def test_a_flipped_bit_anywhere_in_a_large_file_is_a_miss_and_heals(opened, tmp_path, idle, at):
    cache = opened()
    put(cache, 1, shape=LARGE)
    cache.flush(60)
    flip(file_of(tmp_path / "features", 1), at)
    assert not found(cache, 1, LARGE) and cache.stats.files.damaged == 1
    put(cache, 1, shape=LARGE)
    cache.flush(60)
    assert found(cache, 1, LARGE) and cache.stats.disk_loads == 1


@pytest.mark.parametrize("left", [0, 100, MB, 7 * MB + 13, -1])
def test_a_large_file_that_was_cut_is_a_miss(opened, tmp_path, idle, left):
    cache = opened()
    put(cache, 1, shape=LARGE)
    cache.flush(60)
    path = file_of(tmp_path / "features", 1)
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    assert not found(cache, 1, LARGE) and cache.stats.files.damaged == 1 and wait_until(lambda: not path.exists())


def test_a_file_that_is_cut_while_it_is_read_is_a_miss(opened, tmp_path, idle, monkeypatch):
    cache = opened()
    put(cache, 1, shape=LARGE)
    cache.flush(60)
    path, preadv, readers, both = file_of(tmp_path / "features", 1), os.preadv, set(), threading.Event()

    def cutting(*args):
        readers.add(threading.current_thread())
        if len(readers) == 1 + idle:
            os.truncate(path, 2 * MB)
            both.set()
        assert both.wait(60)  # for the second thread, if there is to be one
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", cutting)
    assert not found(cache, 1, LARGE) and cache.stats.errors == 1 and len(readers) == 1 + idle


@pytest.mark.parametrize("idle", [True], indirect=True)
def test_features_are_read_without_the_second_thread_where_it_has_no_time(opened, idle, monkeypatch):
    cache, preadv, go, held = opened(), os.preadv, threading.Event(), threading.Event()
    put(cache, 1, 2, shape=LARGE)
    cache.flush(60)
    mine, readers = threading.current_thread(), set()

    def slow(*args):
        if threading.current_thread() is not mine:
            readers.add(threading.current_thread())
            if len(readers) == 2:
                held.set()
            assert go.wait(60)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    other = threading.Thread(target=found, args=(cache, 1, LARGE))
    other.start()
    assert held.wait(60)  # that one stands still, and so does the second thread
    assert found(cache, 2, LARGE) and found(cache, 2, LARGE)
    go.set()
    other.join(60)
    assert cache.stats.disk_loads == 3 and cache.stats.errors == 0


def test_a_processor_is_idle_if_fewer_threads_than_there_are_want_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    load = tmp_path / "loadavg"
    for said, idle in (("9.1 9 9 3/299 1\n", True), ("0.1 0 0 4/299 1\n", False), ("", True), ("1 1 1 x/2 1", True)):
        load.write_text(said)
        assert has_idle_processor(load) is idle
    assert has_idle_processor(tmp_path / "nothing")


def test_swapped_files_of_two_pictures_are_misses(opened, tmp_path):
    cache = opened()
    put(cache, 1, 38, shape=(4, 64))
    cache.flush(60)
    one, two = (file_of(tmp_path / "features", n) for n in (1, 38))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert not found(cache, 1, (4, 64)) and not found(cache, 38, (4, 64)) and cache.stats.files.damaged == 2


# ---- memory that is used again


def test_what_callers_keep_is_never_overwritten_by_what_is_read_later(opened):
    cache = opened(entries=2)
    put(cache, *range(6), shape=MEDIUM)
    assert cache.flush(60)
    kept: list[tuple[int, mx.array]] = []
    rng = np.random.default_rng(3)
    for _ in range(60):
        n = int(rng.integers(6))
        if rng.random() < 0.2:
            put(cache, n, shape=MEDIUM)  # its write goes on while others are read
        have = cache.get(f"h{n}", MODEL)
        assert have is not None
        if rng.random() < 0.4:
            kept = [*kept, (n, have[:, :1000])][-4:]  # a part holds the memory of the whole
        del have
        for number, part in kept:
            assert mx.array_equal(part, features(number, MEDIUM)[:, :1000]).item()
    assert cache.flush(60) and all(found(cache, n, MEDIUM) for n in range(6)) and cache.check() == []


# ---- folders and disks that fail while the cache is at work


def works_again(cache: VisionFeatureSSDCache, folder: Path) -> None:
    put(cache, 5)
    assert wait_until(lambda: cache.flush(60) and file_of(folder, 5).exists())
    assert found(cache, 5) and cache.check() == []


def test_a_folder_that_is_deleted_leaves_ram_at_work_and_is_made_again(opened, tmp_path):
    cache, folder = opened(entries=1), tmp_path / "features"
    put(cache, 0, 1)
    cache.flush(60)
    shutil.rmtree(folder)
    assert found(cache, 1) and not found(cache, 0)
    works_again(cache, folder)


def put_file_in_place(folder: Path) -> bool:
    """False if the writer has made the folder again in between."""
    shutil.rmtree(folder)
    try:
        folder.write_text("mine")
    except IsADirectoryError:
        return False
    return True


def test_a_file_in_the_folders_place_leaves_ram_at_work_until_it_is_gone(opened, tmp_path):
    cache, folder = opened(entries=2), tmp_path / "features"
    put(cache, 0, 1)
    cache.flush(60)
    while not put_file_in_place(folder):
        continue
    assert found(cache, 0) and found(cache, 1)
    put(cache, 2)
    assert not cache.flush(60) and found(cache, 2) and not found(cache, 3) and folder.read_text() == "mine"
    folder.unlink()
    works_again(cache, folder)


def read_only(place: Path) -> None:
    features(0)  # imports what is needed for it
    become_nobody()
    folder = place / "features"
    cache = VisionFeatureSSDCache(folder, 1, free_reserve_bytes=0)
    put(cache, 0, 1)
    assert cache.flush(60)
    folder.chmod(0o500)
    put(cache, 2)
    assert not cache.flush(60) and cache.stats.files.write_errors > 0
    assert found(cache, 2) and found(cache, 0) and found(cache, 1)
    folder.chmod(0o700)
    works_again(cache, folder)
    cache.close()


def test_a_folder_that_becomes_read_only_is_read_and_written_again_later():
    with open_folder() as place:
        run_in_child(read_only, place)


def full_disk(disk: Path) -> None:
    cache = VisionFeatureSSDCache(disk / "features", 2, free_reserve_bytes=0)
    shape = (256, 256)  # 256 or 128 KB
    put(cache, *range(4), shape=shape)
    assert cache.flush(60)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    put(cache, *range(4, 8), shape=shape)
    cache.flush(60)
    assert found(cache, 7, shape) and found(cache, 6, shape)  # from RAM
    for n in range(8):
        found(cache, n, shape)  # right or a miss
    assert folder_bytes(disk / "features") <= 8 * MB - filler.stat().st_size
    filler.unlink()
    put(cache, 9, shape=shape)
    assert wait_until(lambda: cache.flush(60) and file_of(disk / "features", 9).exists())
    assert found(cache, 9, shape) and cache.check() == []
    cache.close()


def test_a_full_disk_is_survived(tmp_path):
    run_on_small_disk(full_disk, tmp_path / "disk", 8)


# ---- kill -9


WRITER = """
    import sys
    from pathlib import Path
    from tests.cache.test_features_in_trouble import LARGE, put
    from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
    cache = VisionFeatureSSDCache(Path(sys.argv[1]), 0, free_reserve_bytes=0)
    put(cache, 0, 1)
    cache.flush()
    print("two are written", flush=True)
    n = 2
    while True:
        put(cache, n, shape=LARGE)
        n += 1
"""


def test_a_process_killed_in_the_middle_of_a_write_leaves_whole_files_and_no_others(opened, tmp_path):
    folder = tmp_path / "features"
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder)]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None and process.stdout.readline() == "two are written\n"
        deadline = time.monotonic() + 60
        while not (left := list(folder.glob(".omlx-*.tmp"))) and time.monotonic() < deadline:
            continue
        process.kill()
    left = list(folder.glob(".omlx-*.tmp"))
    if not left:  # the kill came between two files
        left = [folder / f".omlx-{process.pid}.tmp"]
        left[0].write_bytes(b"half of it")
    cache = opened()
    assert wait_until(lambda: not left[0].exists()) and found(cache, 0) and found(cache, 1)
    there = [n for n in range(2, 200) if file_of(folder, n).exists()]
    assert all(found(cache, n, LARGE) for n in there) and cache.stats.errors == 0 and cache.check() == []
    assert cache.usage.disk_bytes == folder_bytes(folder)


def test_a_process_that_waits_for_the_root_reads_features_and_changes_none(tmp_path):
    """Another one has the root: its files stay, half-written ones too. When it ends this one takes over."""
    folder = tmp_path / VISION_FOLDER
    script = f"""
        import sys, time
        from pathlib import Path
        from omlx.storage.open_stores import open_store
        from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
        import mlx.core as mx
        store = open_store(Path({str(tmp_path)!r}), 64 << 20, 64 << 20, 0)
        cache = VisionFeatureSSDCache({str(folder)!r}, 0)
        from tests.cache.test_features_in_trouble import put
        put(cache, 1, 2)
        assert cache.flush(60)
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        temporary = folder / f".omlx-{other.pid}.tmp"
        temporary.write_bytes(b"half")
        store = open_store(tmp_path, 64 * MB, 64 * MB, 0, wait_for_lock=True)
        small = file_of(folder, 1).stat().st_size + 10
        cache = VisionFeatureSSDCache(folder, 0, max_disk_bytes=small, free_reserve_bytes=0)
        try:
            assert found(cache, 1) and found(cache, 2)
            put(cache, 3)
            assert not cache.flush(60)
            assert temporary.exists() and not file_of(folder, 3).exists()
            assert file_of(folder, 1).exists() and file_of(folder, 2).exists()
            other.kill()
            other.wait()
            wait_until(lambda: store.connected, 60)

            def writes() -> bool:
                put(cache, 3)
                return cache.flush(60) and file_of(folder, 3).exists()

            wait_until(writes, 60)
            assert not temporary.exists() and folder_bytes(folder) <= small
        finally:
            cache.close(60)
            release_store(store, 60)
