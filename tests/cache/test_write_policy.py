"""`--cache-write-policy back`: a block's file is written when the block leaves RAM, and at the end."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.storage.hot_tier import HotTier
from tests.cache.test_paged_ssd_cache import SIZE, on_disk, read, save
from tests.storage.blocks import NBYTES, name
from tests.support import wait_until

MB = 1 << 20
REPOSITORY = Path(__file__).parents[2]
Opener = Callable[..., PagedSSDCacheManager]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    managers = []

    def opener(hot: int = 4, policy: str = "back", folder: str = "m", **options: Any) -> PagedSSDCacheManager:
        kind = options.pop("kind", PagedSSDCacheManager)
        limit = options.pop("limit", 64 * MB)
        options = {"root_dir": tmp_path / "root", "free_reserve_bytes": 0, "write_policy": policy} | options
        managers.append(kind(tmp_path / "root" / folder, limit, hot * NBYTES, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


class Gated(PagedSSDCacheManager):
    """Writes only while `gate` is set; fails with `error` if there is one."""

    gate = threading.Event()
    error: OSError | None = None

    @staticmethod
    def _write_safetensors_no_mx(path: Any, buffer: Any, known: Any) -> None:
        Gated.gate.wait(60)
        if Gated.error is not None:
            raise Gated.error
        PagedSSDCacheManager._write_safetensors_no_mx(path, buffer, known)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    Gated.gate.clear()
    Gated.error = None
    yield Gated.gate
    Gated.gate.set()
    Gated.error = None


def settled(cache: PagedSSDCacheManager) -> set[int]:
    """The blocks that have files when everything that was queued is done."""
    assert cache.settle(10)
    return on_disk(cache, 40)


def test_nothing_is_written_before_a_block_leaves_ram(opened: Opener) -> None:
    cache = opened(hot=4)
    for n in range(4):
        save(cache, n)
    assert settled(cache) == set() and cache.stats().files_written == 0
    assert [meta.block_hash for meta in cache._index.get_all_metadata()] == [name(n) for n in range(4)]
    assert cache.stats().unsaved_bytes == 4 * NBYTES
    save(cache, 4)
    save(cache, 5)
    assert settled(cache) == {0, 1} and [cache.tier_of(name(n)) for n in range(6)] == ["ssd"] * 2 + ["ram"] * 4
    stats = cache.stats()
    assert (stats.files_written, stats.bytes_written) == (2, stats.ssd_bytes)
    assert (stats.unsaved_bytes, stats.dropped_writes) == (4 * NBYTES, 0)
    assert read(cache, 0) == "ssd" and cache.check() == [] and on_disk(cache) == {0, 1}


def test_what_is_deleted_before_it_leaves_is_never_written(opened: Opener) -> None:
    """The SSD wear that is saved: a conversation's tails, each replaced by the next, cost nothing."""
    written = {}
    for policy in ("through", "back"):
        cache = opened(hot=10, policy=policy, folder=policy)
        for n in range(20):
            save(cache, n)
            cache.settle(10)  # the writer has all the time it needs
            if n:
                cache.delete_block(name(n - 1))
        assert cache.close(60)
        written[policy] = cache.stats().files_written
    assert written == {"through": 20, "back": 1}


def test_flush_and_close_write_what_only_ram_has(opened: Opener) -> None:
    cache = opened(hot=10)
    for n in range(4):
        save(cache, n)
    assert cache.flush(60) and on_disk(cache) == {0, 1, 2, 3} and cache.stats().unsaved_bytes == 0
    save(cache, 4)
    assert cache.close(60)
    again = opened(hot=10)
    assert on_disk(again) == set(range(5)) and all(read(again, n) == "ssd" for n in range(5))


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_clean_block_is_never_written_again(opened: Opener, policy: str) -> None:
    first = opened(hot=10, policy=policy)
    for n in range(4):
        save(first, n)
    first.close(60)
    cache = opened(hot=2, policy=policy)
    for _ in range(3):
        for n in range(4):
            assert cache.load_block(name(n)) is not None and cache.tier_of(name(n)) == "ram"
            assert save(cache, n)
    assert cache.stats().evictions_ram >= 10 and cache.close(60)
    assert (cache.stats().files_written, cache.stats().bytes_written) == (0, 0)


def test_a_block_is_readable_while_it_leaves(opened: Opener, gate: threading.Event) -> None:
    cache = opened(hot=1, kind=Gated)
    save(cache, 0)
    save(cache, 1)
    assert cache.tier_of(name(0)) == "writing" and read(cache, 0) == "ram"
    gate.set()
    assert settled(cache) == {0} and read(cache, 0) == "ssd"


def test_with_a_full_queue_unsaved_blocks_leave_last_and_nobody_waits(opened: Opener, gate: threading.Event) -> None:
    cache = opened(hot=4, kind=Gated, max_queue_bytes=2 * SIZE)
    gate.set()
    save(cache, 10)
    cache.flush(60)
    gate.clear()
    save(cache, 20)
    save(cache, 21)
    assert cache.evict_from_ram(MB) == 3 * NBYTES and cache.tier_of(name(20)) == "writing"  # the queue is full
    for n in range(3):
        save(cache, n)
    cache.load_block(name(10))
    save(cache, 3)
    assert cache.tier_of(name(10)) == "ssd"  # the youngest, but it has a file
    save(cache, 4)
    assert cache.load_block(name(10)) is not None and cache.tier_of(name(10)) == "ssd"  # not worth one of the others
    assert [cache.tier_of(name(n)) for n in range(5)] == [None, "ram", "ram", "ram", "ram"]
    gate.set()
    assert cache.flush(60) and cache.check() == []
    assert on_disk(cache, 30) == {1, 2, 3, 4, 10, 20, 21} and cache.stats().dropped_writes == 1


def test_while_writes_fail_a_block_that_only_ram_has_is_not_given_up(opened: Opener, gate: threading.Event) -> None:
    cache = opened(hot=4, kind=Gated)
    gate.set()
    for n in range(10, 13):
        save(cache, n)
    cache.flush(60)
    Gated.error = OSError(28, "no space")
    save(cache, 0)
    assert not cache.flush(60) and cache.tier_of(name(0)) == "ram"
    assert cache.evict_from_ram(4 * NBYTES, wait_s=5) == 3 * NBYTES and cache.tier_of(name(0)) == "ram"
    for n in (1, 2, 3):
        save(cache, n)
    assert cache.load_block(name(10)) is not None  # finds no room: 0 to 3 stay
    assert {n for n in range(4) if cache.tier_of(name(n)) == "ram"} == {0, 1, 2, 3}
    Gated.error = None
    assert cache.flush(60) and on_disk(cache) == {0, 1, 2, 3, 10, 11, 12} and cache.check() == []


def test_without_a_ram_tier_it_is_through(opened: Opener) -> None:
    cache = opened(hot=0)
    save(cache, 0)
    assert settled(cache) == {0}
    small = opened(hot=1, folder="s")
    save(small, 0)
    small.pin(name(0))
    save(small, 1)  # finds no room in RAM
    assert settled(small) == {1} and small.tier_of(name(0)) == "ram"


def test_models_that_share_the_ram_tier_write_each_others_blocks_out(opened: Opener) -> None:
    hot = HotTier(2 * NBYTES)
    one, two = (opened(folder=folder, hot_tier=hot) for folder in ("one", "two"))
    save(one, 0)
    save(one, 1)
    save(two, 0)
    assert settled(one) == {0} and settled(two) == set() and read(one, 0) == "ssd"
    assert one.close(60) and on_disk(opened(folder="one")) == {0, 1}


def test_heads_are_younger_than_tails_on_disk(opened: Opener) -> None:
    """Also when they were queued before them, and some had to wait for room in the queue."""
    cache = opened(hot=20, max_queue_bytes=3 * SIZE)
    for n in range(10):
        save(cache, n, group="request")
    assert cache.flush(60)
    assert [meta.block_hash for meta in cache._index.get_all_metadata()] == [name(n) for n in range(9, -1, -1)]


def test_a_block_whose_file_is_gone_is_written_when_it_is_saved_again(opened: Opener) -> None:
    cache = opened(hot=2)
    save(cache, 0)
    cache.flush(60)
    path = cache.get_block_path(name(0))
    assert path is not None
    path.unlink()
    cache.evict_from_ram(MB)
    assert read(cache, 0) is None
    save(cache, 0)
    for n in (1, 2):
        save(cache, n)
    assert settled(cache) == {0}


def test_a_folder_that_is_lost_makes_blocks_in_ram_unsaved_again(opened: Opener, tmp_path: Path) -> None:
    cache = opened(hot=10)
    for n in range(3):
        save(cache, n)
    assert cache.flush(60) and cache.stats().unsaved_bytes == 0
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    save(cache, 3)
    assert wait_until(lambda: cache.flush(60) and on_disk(cache) == {0, 1, 2, 3}) and cache.close(60)
    assert on_disk(opened()) == {0, 1, 2, 3}


def test_too_large_for_the_disk_is_kept_in_ram_and_leaves_like_any_other(opened: Opener) -> None:
    cache = opened(hot=2, limit=1000)
    for n in range(4):
        save(cache, n)
    assert settled(cache) == set() and {n for n in range(4) if cache.contains(name(n))} == {2, 3}
    assert cache.stats().unsaved_bytes == 0


def test_the_factory_passes_the_policy_on(tmp_path: Path) -> None:
    for policy, written in (("through", 1), ("back", 0)):
        config = CacheConfig(paged_ssd_cache_dir=tmp_path / policy, cache_write_policy=policy)  # type: ignore[arg-type]
        cache = CacheFactory.create_paged_ssd_cache(config, "m")
        assert cache is not None
        save(cache, 0)
        cache.settle(5)
        assert cache.stats().files_written == written
        cache.close(60)
    with pytest.raises(ValueError, match='"forth" is no write policy'):
        CacheConfig(cache_write_policy="forth")  # type: ignore[arg-type]


SCRIPT = """
    import sys
    from pathlib import Path
    from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
    from tests.cache.test_paged_ssd_cache import save
    cache = PagedSSDCacheManager(Path(sys.argv[1], "m"), 1 << 30, 1 << 30, root_dir=sys.argv[1], write_policy="back")
    for n in range(100):
        save(cache, n)
    cache.settle(10)
    assert cache.stats().files_written == 0
    {end}
    """


@pytest.mark.parametrize("end", ["", "import os; os.fork() or exit(0)"])
def test_an_interpreter_that_just_ends_writes_what_only_ram_has(tmp_path: Path, opened: Opener, end: str) -> None:
    script = textwrap.dedent(SCRIPT).format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "root")], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    cache = opened()
    assert on_disk(cache, 100) == set(range(100)) and read(cache, 99) == "ssd" and cache.check() == []
