import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx.arrays import DTYPES, pack, unpack
from omlx.cache.interface import CacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.storage.folder import INDEX_NAME, StoreLocked
from omlx.storage.hot_tier import HotTier
from omlx.storage.tensor_file import TensorSpec
from tests.storage.blocks import DAMAGES, NBYTES, SPECS, block, damage, meta, name, our_bytes, same, write
from tests.storage.targets import Target, read, save

REPOSITORY = Path(__file__).parents[2]
MB = 1 << 20
SIZE = meta(0).file_size + 128  # with tokens and parents


@pytest.fixture
def opened(tmp_path):
    managers = []

    def opener(folder="m", hot=0, limit=64 * MB, *, kind=PagedSSDCacheManager, root=tmp_path / "root", **options):
        options = {"root_dir": root, "free_reserve_bytes": 0, **options}
        managers.append(kind(root / folder, limit, hot, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


def arrays(n):
    """Two layers of 3-D arrays, as in document 003."""
    rng = np.random.default_rng(n)
    return [(mx.array(rng.random((1, 8, 4))), mx.array(rng.random((1, 8, 4)))) for _ in range(2)]


def equal(a, b):
    return (
        a is not None
        and len(a) == len(b)
        and all(
            x.dtype == y.dtype and mx.array_equal(x, y).item()
            for m, n in zip(a, b, strict=True)
            for x, y in zip(m, n, strict=True)
        )
    )


def in_ram(cache, upto=20):
    return {n for n in range(upto) if cache.tier_of(name(n)) == "ram"}


def on_disk(cache, upto=20):
    return {n for n in range(upto) if cache.get_block_path(name(n))}


# ---- arrays


def test_every_dtype_survives_bit_by_bit():
    layers = []
    for dtype in DTYPES.values():
        array = mx.array(np.arange(-3, 3).reshape(2, 3)).astype(dtype, stream=mx.cpu)
        layers.append((array, array.T, array[0, 0]))
    layers.append((mx.zeros((0, 3)),))
    restored = unpack(pack(layers))
    assert [len(layer) for layer in restored] == [len(layer) for layer in layers]
    for a, b in zip((a for layer in layers for a in layer), (b for layer in restored for b in layer), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


# ---- tiers


def test_a_block_goes_through_ram_queue_and_file(opened):
    gate = threading.Event()

    class Slow(PagedSSDCacheManager):
        @staticmethod
        def _write_safetensors_no_mx(path, buffer, known):
            assert gate.wait(60)
            PagedSSDCacheManager._write_safetensors_no_mx(path, buffer, known)

    cache = opened(hot=NBYTES, kind=Slow)
    assert isinstance(cache, CacheManager) and cache.tier_of(name(1)) is None and read(cache, 1) is None
    assert save(cache, 1) and cache.tier_of(name(1)) == "ram" and read(cache, 1) == "ram"
    assert save(cache, 2) and cache.tier_of(name(1)) == "writing" and read(cache, 1) == "ram"
    assert len(cache._index) == 2 and cache.stats().queue_bytes > 0
    gate.set()
    assert cache.flush(60) and cache.tier_of(name(1)) == "ssd" and read(cache, 1) == "ssd"
    assert read(cache, 1, whole=True) == "ssd" and read(cache, 2) == "ram"
    stats = cache.stats()
    assert (stats.hits_ram, stats.hits_ssd, stats.misses, stats.saves) == (3, 2, 1, 2)
    assert (stats.blocks_ram, stats.blocks_ssd, stats.ram_bytes, stats.evictions_ram) == (1, 2, NBYTES, 1)
    assert stats.ssd_bytes == sum(m.file_size for m in cache._index.get_all_metadata())
    assert stats.ssd_total_bytes == cache.ssd_bytes >= stats.ssd_bytes and cache.check() == []


def test_arrays_come_back_as_saved_from_every_tier_and_plain_mx_load_reads_the_file(opened):
    cache = opened(hot=MB)
    assert cache.save_block(b"\x12\x34" * 16, arrays(1), 8)
    assert equal(cache.load_block(b"\x12\x34" * 16), arrays(1))
    cache.flush(60)
    cache.close()
    cache = opened(hot=MB)
    assert cache.tier_of(b"\x12\x34" * 16) == "ssd"
    assert equal(cache.load_block(b"\x12\x34" * 16), arrays(1)) and cache.stats().restores == 1
    assert cache.tier_of(b"\x12\x34" * 16) == "ram"
    path = cache.get_block_path(b"\x12\x34" * 16)
    assert path.parent.name == "1" and mx.array_equal(mx.load(str(path))["1.0"], arrays(1)[1][0])
    assert cache.load_block(b"\x12\x34\x56\x2e\x2e\x2e") is None and not cache.contains(b"")


def test_saving_a_known_block_puts_it_back_into_ram_and_writes_nothing(opened):
    cache = opened(hot=2 * NBYTES)
    for n in range(3):
        save(cache, n, group=n)
    cache.flush(60)
    written = cache.get_block_path(name(0)).stat().st_mtime_ns
    assert in_ram(cache) == {1, 2} and save(cache, 0) and in_ram(cache) == {0, 2}
    assert cache.flush(60) and cache.get_block_path(name(0)).stat().st_mtime_ns == written
    assert cache.stats().saves == 3 and [m.block_hash for m in cache._index.get_all_metadata()][-1] == name(0)


def test_replacing_changes_every_tier(opened):
    cache = opened(hot=MB)
    cache.save_block(name(1), block(1), 8, parent=b"a", exact_tokens=1)
    assert cache.save_block(name(1), block(2), 8, parent=b"b", exact_tokens=8, cuts=(3,))
    assert cache.get_meta(name(1)).exact_tokens == 1
    assert cache.save_block(name(1), block(2), 8, parent=b"b", exact_tokens=8, cuts=(3,), replace=True)
    cache.close()
    cache = opened()
    known = cache.get_meta(name(1))
    assert known.exact_tokens == 8 and known.cuts == (3,) and known.parent == b"b"
    target = Target()
    assert cache.read_block(name(1), target) == "ssd" and np.array_equal(target.data, block(2).data)
    assert cache.children(b"a") == [] and len(cache.children(b"b")) == 1 and cache.check() == []


def test_children_are_found_in_every_tier(opened):
    cache = opened(hot=2 * NBYTES)
    for n in range(5):
        save(cache, n, parent=b"root", tokens=bytes(4 * n))
    assert {m.block_hash for m in cache.children(b"root")} == {name(n) for n in range(5)}
    assert {len(m.tokens) for m in cache.children(b"root")} == {0, 4, 8, 12, 16}
    cache.delete_block(name(4))
    cache.delete_block(name(0))
    assert len(cache.children(b"root")) == 3 and not cache.delete_block(name(0)) and cache.check() == []
    ram = PagedSSDCacheManager(None, 0, MB, hot_cache_only=True)
    save(ram, 1, parent=b"root")
    assert [m.block_hash for m in ram.children(b"root")] == [name(1)]


def test_pinned_blocks_stay_in_both_tiers(opened):
    cache = opened(hot=2 * NBYTES, limit=4 * SIZE + 20_000)
    cache.pin(name(0))
    for n in range(12):
        save(cache, n)
    assert cache.flush(60) and 0 in in_ram(cache) and 0 in on_disk(cache)
    cache.unpin(name(0))
    for n in range(12, 20):
        save(cache, n)
    assert 0 not in in_ram(cache) | on_disk(cache) and cache.check() == []
    with pytest.raises(ValueError, match="not pinned"):
        cache.unpin(name(0))


def test_loading_marks_as_used_and_reading_does_not(opened):
    cache = opened(limit=4 * SIZE + 24_000)
    for n in range(3):
        save(cache, n)
    cache.flush(60)
    assert cache.load_block(name(0)) and read(cache, 1)
    order = [m.block_hash for m in cache._index.get_all_metadata()]
    assert order == [name(1), name(2), name(0)]
    cache.touch([name(2), b"unknown", name(1)])
    assert [m.block_hash for m in cache._index.get_all_metadata()] == [name(0), name(2), name(1)]


def test_ram_is_freed_on_request_without_losing_what_has_no_other_copy(opened):
    cache = opened(hot=MB)
    for n in range(4):
        save(cache, n, group=n)
    cache.pin(name(0))
    assert cache.evict_from_ram(NBYTES + 1) == 2 * NBYTES and in_ram(cache) == {0, 3}
    assert all(read(cache, n) for n in range(4)) and cache.evict_from_ram(MB) == NBYTES


def test_ram_only_needs_no_folder_and_no_thread():
    before = set(threading.enumerate())
    cache = PagedSSDCacheManager(cache_dir=None, max_size_bytes=0, hot_cache_max_bytes=3 * NBYTES, hot_cache_only=True)
    for n in range(4):
        assert save(cache, n)
    assert not set(threading.enumerate()) - before
    assert in_ram(cache) == {1, 2, 3} and cache.get_block_path(name(1)) is None
    assert read(cache, 1) == "ram" and read(cache, 0) is None and cache.flush() and cache.check() == []
    assert {m.block_hash for m in cache._index.get_all_metadata()} == {name(1), name(2), name(3)}
    assert cache.close() and cache.close() and cache.hot_bytes == 0


def test_without_files_a_parent_outlives_its_children():
    cache = PagedSSDCacheManager(None, 0, 3 * NBYTES)
    for n in range(3):
        save(cache, n, parent=name(n - 1), group=n)
    assert save(cache, 9) and in_ram(cache) == {0, 1, 9}
    assert save(cache, 3, parent=name(1)) and in_ram(cache) == {0, 1, 3}


def test_tiers_that_are_off_keep_nothing(opened, tmp_path):
    nothing = PagedSSDCacheManager(tmp_path / "off", 0, 0)
    assert not save(nothing, 1) and not (tmp_path / "off").exists()
    files_only = opened()
    assert save(files_only, 1) and files_only.hot_bytes == 0 and read(files_only, 1)


def test_a_block_that_is_too_large_is_declined_once_in_the_log_and_evicts_nothing(opened, caplog):
    cache = opened(hot=2 * NBYTES, limit=3 * SIZE + 20_000)
    save(cache, 0)
    specs = (TensorSpec("0.0", "U8", (10 * NBYTES,)),)
    for n in (1, 2):
        assert not cache.save_block(name(n), block(n, specs), 8)
    assert len(caplog.records) == 1 and cache.stats().declined == 2
    assert in_ram(cache) == on_disk(cache) == {0} and cache.tier_of(name(1)) is None
    wide = (TensorSpec("0.0", "U8", (3 * NBYTES // 2,)),)
    assert cache.save_block(name(3), block(3, wide), 8) and cache.check() == []


def test_wrong_hashes_and_folders_are_refused(opened, tmp_path):
    cache = opened(hot=MB)
    for wrong in (b"", bytes(65)):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            cache.save_block(wrong, block(1), 8)
    for folder in ("../other", "a", "x/../.."):
        with pytest.raises(ValueError, match=r"folder|subpath"):
            opened(folder)
    assert not list(tmp_path.glob("other*"))


def test_another_layout_than_asked_for_is_a_miss_and_goes(opened):
    cache = opened(hot=NBYTES)
    save(cache, 1)
    save(cache, 2)
    cache.flush(60)
    other = tuple(spec._replace(shape=(1, 8, 2, 16)) for spec in SPECS)
    assert cache.read_block(name(1), Target(other)) is None and cache.read_block(name(2), Target(other)) is None
    assert not cache.contains(name(1)) and not cache.contains(name(2)) and cache.flush(60) and cache.check() == []


# ---- several managers


def test_models_share_limit_lock_and_thread_but_no_blocks(opened, tmp_path):
    before = set(threading.enumerate())
    hot = HotTier(3 * NBYTES)
    a, b = (opened(folder, limit=6 * SIZE + 20_000, hot_tier=hot) for folder in ("llama-3b", "tiny%2Fx"))
    assert len(set(threading.enumerate()) - before) == 1
    for n in range(4):
        save(a, n)
    assert not b.contains(name(0)) and b._index.get_all_metadata() == []
    save(b, 0)
    assert a.load_block(name(0)) is not None
    for n in range(1, 5):
        save(b, n)
    assert a.flush(60) and our_bytes(tmp_path / "root") <= 6 * SIZE + 20_000
    assert on_disk(a) == {0} and on_disk(b) == {0, 1, 2, 3, 4} and hot.bytes <= 3 * NBYTES
    a.close()
    assert read(b, 3) and save(b, 7) and b.check() == []


def test_the_same_folder_twice_in_a_process_is_one_store(opened):
    a, b = opened(hot=MB), opened(hot=MB)
    save(a, 1)
    assert b.contains(name(1)) and read(b, 1)
    a.close()
    assert save(b, 2) and b.flush(60) and read(b, 1) == "ssd"


def test_another_process_is_named(opened, tmp_path):
    script = "from omlx.cache.paged_ssd_cache import *; import sys\nPagedSSDCacheManager(sys.argv[1], 1 << 20)"
    opened("", root=tmp_path / "r")
    child = run_python(script, tmp_path / "r")
    assert StoreLocked.__name__ in child and f"in use by process {os.getpid()}" in child


def run_python(script, *args):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


# ---- damage and failure


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_a_miss_is_counted_and_heals(opened, how):
    cache = opened()
    save(cache, 1)
    cache.flush(60)
    damage(cache.get_block_path(name(1)), how)
    assert (read(cache, 1) if how < "h" else cache.load_block(name(1))) is None
    stats = cache.stats()
    assert (stats.damaged, stats.misses) == (1, 1) and not cache.contains(name(1))
    assert save(cache, 1) and cache.flush(60) and read(cache, 1) == "ssd" and cache.check() == []


def test_a_failed_write_leaves_ram_only_and_is_written_when_asked_again(opened):
    class Broken(PagedSSDCacheManager):
        broken = True

        @staticmethod
        def _write_safetensors_no_mx(path, buffer, known):
            if Broken.broken:
                raise OSError(28, "no space")
            PagedSSDCacheManager._write_safetensors_no_mx(path, buffer, known)

    cache = opened(hot=2 * NBYTES, kind=Broken)
    assert save(cache, 1) and not cache.flush(60)
    assert len(cache._index) == 0 and read(cache, 1) == "ram" and cache.stats().write_errors >= 1
    Broken.broken = False
    assert save(cache, 1) and cache.flush(60) and cache.get_block_path(name(1)).exists() and cache.check() == []
    cache.evict_from_ram(MB)
    assert read(cache, 1) == "ssd"


def test_saving_never_waits_for_the_disk_and_a_full_queue_leaves_no_hole(opened):
    gate = threading.Event()

    class Stuck(PagedSSDCacheManager):
        @staticmethod
        def _write_safetensors_no_mx(path, buffer, known):
            assert gate.wait(60)
            PagedSSDCacheManager._write_safetensors_no_mx(path, buffer, known)

    cache = opened(hot=20 * NBYTES, kind=Stuck, max_queue_bytes=3 * SIZE)
    for n in range(15):
        assert save(cache, n)
    assert not gate.is_set() and len(cache._index) == 3 and in_ram(cache) == set(range(15))
    assert cache.stats().queue_bytes <= 3 * SIZE
    gate.set()
    assert cache.flush(60) and on_disk(cache) == set(range(15)) and cache.stats().dropped_writes == 0


# ---- the documents


DOCUMENT_003 = """
    import sys
    import mlx.core as mx, numpy as np
    from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
    ssd_cache = PagedSSDCacheManager(sys.argv[1] + "/tiny", 150 * 1024**3, 4 * 1024**3, root_dir=sys.argv[1])
    kv_block = [
        (mx.array(np.random.rand(1, 64, 32)), mx.array(np.random.rand(1, 64, 32))),
        (mx.array(np.random.rand(1, 64, 32)), mx.array(np.random.rand(1, 64, 32))),
    ]
    block_hash = b'\\x00' * 32
    ssd_cache.save_block(block_hash, kv_block, token_count=64)
    loaded = ssd_cache.load_block(block_hash)
    assert loaded is not None
    print(f"Restored block with {len(loaded)} layers")
    for meta in ssd_cache._index.get_all_metadata():
        print(f"Hash: {meta.block_hash.hex()[:8]}... Size: {meta.file_size} bytes")
    """


def test_document_003s_example_and_its_blocks_after_a_script_that_never_closed(opened, tmp_path):
    output = run_python(DOCUMENT_003, tmp_path / "root")
    path = tmp_path / "root" / "tiny" / "0" / f"{'00' * 32}.safetensors"
    assert output == f"Restored block with 2 layers\nHash: 00000000... Size: {path.stat().st_size} bytes\n"
    assert len(opened("tiny").load_block(bytes(32))) == 2


def test_document_003s_size_limit_evicts_before_a_new_block(opened):
    cache = opened(limit=4 * SIZE + 24_000)
    for n in range(3):
        save(cache, n)
    assert cache.flush(60) and cache._enforce_size_limit_for_new_block(3 * SIZE)
    assert on_disk(cache) == {2} and cache.flush(60) and cache.check() == []
    assert not cache._enforce_size_limit_for_new_block(100 * SIZE) and on_disk(cache) == {2}
    for n in range(3, 20):
        save(cache, n)
    assert cache.flush(60) and max(on_disk(cache)) == 19 and cache.stats().evictions_ssd >= 15
    assert our_bytes(cache.get_block_path(name(19)).parents[2]) <= 4 * SIZE + 16_000


def test_a_smaller_limit_at_restart_is_met_and_the_last_used_stay(opened, tmp_path):
    cache = opened()
    for n in range(10):
        save(cache, n)
    cache.touch([name(0)])
    cache.close()
    cache = opened(limit=3 * SIZE + 16_000)
    cache.flush(60)
    assert 0 in on_disk(cache) and our_bytes(tmp_path / "root") <= 3 * SIZE + 16_000 and cache.check() == []


def test_files_copied_in_from_elsewhere_are_found_once_the_index_is_gone(opened, tmp_path):
    write(tmp_path / "root" / "m" / name(5).hex()[0] / f"{name(5).hex()}.safetensors", 5)
    assert read(opened(), 5) == "ssd"


# ---- any order of events against a dictionary


class StoreMachine(RuleBasedStateMachine):
    """A store with both tiers beside a dictionary of what was saved. A block may be forgotten, never be wrong."""

    names = st.integers(0, 7)

    @initialize(
        hot=st.sampled_from([0, 2, 4]), limit=st.sampled_from([3, 5, 50]), policy=st.sampled_from(["through", "back"])
    )
    def start(self, hot, limit, policy):
        self.policy = policy
        self.folder = os.path.join(os.environ["OMLX_TEST_TMP"], f"{time.monotonic_ns()}")
        self.hot, self.limit = hot * NBYTES, limit * SIZE + 20_000
        self.model, self.pins, self.safe = {}, [], set()
        self.errors = {"write": 0, "read": 0}
        self.open()

    def open(self):
        self.cache = self.manager(self.limit)
        self.cache.on_file = self.on_file

    def manager(self, limit):
        options = {"root_dir": self.folder, "max_queue_bytes": 4 * SIZE, "free_reserve_bytes": 0}
        options["write_policy"] = self.policy
        return PagedSSDCacheManager(Path(self.folder) / "m", limit, self.hot, **options)

    def on_file(self, use, path, nbytes):
        if self.errors[use]:
            raise OSError(self.errors[use], os.strerror(self.errors[use]))

    @rule(n=names, version=st.integers(0, 1), group=st.integers(0, 2), parent=names)
    def save(self, n, version, group, parent):
        known = self.cache.get_meta(name(n))
        version = known.start if known else version
        if self.cache.save_block(name(n), block(10 * version + n), 8, start=version, group=group, parent=name(parent)):
            self.model[n] = version

    @rule(n=names)
    def replace(self, n):
        self.forget(n)
        if self.cache.save_block(name(n), block(10 + n), 8, start=1, replace=True):
            self.model[n] = 1

    @rule(n=names, whole=st.booleans())
    def read(self, n, whole):
        target = Target(whole=whole)
        tier = self.cache.read_block(name(n), target)
        if tier is not None:
            assert np.array_equal(target.data, block(10 * self.model[n] + n).data)
        if tier is None:
            assert n not in self.safe or self.errors["read"]
            self.safe.discard(n)

    @rule(n=names)
    def load(self, n):
        loaded = self.cache.load_block(name(n))
        if loaded is not None:
            assert same(pack(loaded), pack(unpack(block(10 * self.model[n] + n))))

    @precondition(lambda self: len(self.pins) < 2)
    @rule(n=names)
    def pin(self, n):
        self.pins.append(n)
        self.cache.pin(name(n))
        if self.cache.flush(60) and self.cache.contains(name(n)):
            self.safe.add(n)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        n = self.pins.pop()
        self.cache.unpin(name(n))
        if n not in self.pins:
            self.safe.discard(n)

    @rule(n=names)
    def delete(self, n):
        self.cache.delete_block(name(n))
        self.forget(n)
        assert not self.cache.contains(name(n))

    def forget(self, n):
        self.model.pop(n, None)
        self.safe.discard(n)

    @rule()
    def evict(self):
        self.cache.evict_from_ram(2 * NBYTES)

    @rule(number=st.sampled_from([0, errno.ENOSPC]))
    def fail_writes(self, number):
        self.errors["write"] = number

    @rule(number=st.sampled_from([0, errno.EIO, errno.EMFILE]))
    def fail_reads(self, number):
        self.errors["read"] = number

    @rule(limit=st.sampled_from([3, 5, 50]))
    def share(self, limit):
        """Another user of the folder comes and goes; the lowest limit holds from then on."""
        other = self.manager(limit * SIZE + 20_000)
        self.limit = min(self.limit, limit * SIZE + 20_000)
        assert all(other.contains(name(n)) for n in on_disk(self.cache))
        other.close(60)

    @rule(limit=st.sampled_from([3, 5, 50]), index=st.sampled_from(["kept", "lost", "cut"]))
    def restart(self, limit, index):
        self.errors = {"write": 0, "read": 0}
        self.cache.close(60)
        path = Path(self.folder) / INDEX_NAME
        if index == "lost":
            path.unlink()
        elif index == "cut":
            os.truncate(path, path.stat().st_size // 2)
        self.pins.clear()
        self.safe.clear()
        self.limit = limit * SIZE + 20_000
        self.open()

    @precondition(lambda self: not any(self.errors.values()))
    @rule(n=names)
    def damage(self, n):
        self.cache.flush(60)
        path = self.cache.get_block_path(name(n))
        if path and self.cache.tier_of(name(n)) == "ssd":
            path.write_bytes(path.read_bytes()[:-1])
            assert self.cache.load_block(name(n)) is None
            self.forget(n)

    @invariant()
    def is_sound(self):
        if hasattr(self, "cache"):
            assert self.cache.check() == []
            assert self.cache.hot_bytes <= self.hot and our_bytes(Path(self.folder)) <= self.limit
            for n in range(8):
                assert not self.cache.contains(name(n)) or n in self.model

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close(60)


def test_any_order_of_events_gives_right_blocks_or_misses(tmp_path, monkeypatch):
    monkeypatch.setenv("OMLX_TEST_TMP", str(tmp_path))
    StoreMachine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    StoreMachine.TestCase("runTest").runTest()


@pytest.mark.parametrize("count", [-1, 1 << 32, 1.5, "64", None, True])
def test_a_bad_token_count_stores_nothing(tmp_path, count):
    store = PagedSSDCacheManager(tmp_path / "cache", 1 << 30, 1 << 20)
    try:
        with pytest.raises(ValueError, match="token_count must be an int"):
            store.save_block(b"hash", [(np.zeros(4, np.float32),)], count)
        assert store.flush(60) and store.get_meta(b"hash") is None and store.stats().blocks_ram == 0
    finally:
        store.close()
