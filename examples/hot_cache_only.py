"""The same calls with RAM alone: no file, no thread."""

import os
import tempfile
import threading

import mlx.core as mx

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        threads = set(threading.enumerate())
        store = PagedSSDCacheManager(
            cache_dir=None,
            max_size_bytes=0,
            hot_cache_max_bytes=4 * 1024**3,
            hot_cache_only=True,
        )
        block_hash = b"\x12\x34" * 16
        keys = mx.random.normal((1, 2, 64, 16))
        assert store.save_block(block_hash, [(keys, keys * 2)], 64)
        loaded = store.load_block(block_hash)
        assert loaded is not None and bool(mx.array_equal(loaded[0][1], keys * 2))
        assert store.load_block(b"unknown") is None
        assert store.get_block_path(block_hash) is None
        assert [meta.block_hash for meta in store._index.get_all_metadata()] == [block_hash]
        assert store.flush() and store.check() == []
        assert set(threading.enumerate()) == threads
        assert os.listdir(folder) == []
        stats = store.stats()
        assert (stats.hits_ram, stats.hits_ssd, stats.misses) == (1, 0, 1)
        print(f"{stats.blocks_ram} block, {stats.ram_bytes} bytes, all in RAM")
        assert store.close()
        os.chdir("/")


if __name__ == "__main__":
    main()
