"""What makes room: the oldest block in RAM, the least recently used one on disk."""

import tempfile
from pathlib import Path

import mlx.core as mx

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager

MB = 1024**2
BLOCK = [(mx.zeros((1, 4, 64, 512)), mx.zeros((1, 4, 64, 512)))]  # 1 MB of keys and values
NAMES = {name: name.encode() * 32 for name in "abcdef"}


def held(store: PagedSSDCacheManager) -> str:
    """The blocks that are there, in any tier."""
    return "".join(name for name, block_hash in NAMES.items() if store.contains(block_hash))


def first_in_first_out_in_ram() -> None:
    """Use does not matter in RAM: the block that came first goes first."""
    store = PagedSSDCacheManager(cache_dir=None, max_size_bytes=0, hot_cache_max_bytes=3 * MB, hot_cache_only=True)
    for name in "abc":
        store.save_block(NAMES[name], BLOCK, 64)
    assert store.load_block(NAMES["a"]) is not None
    store.save_block(NAMES["d"], BLOCK, 64)
    assert held(store) == "bcd"
    assert store.stats().evictions_ram == 1
    assert store.hot_bytes <= 3 * MB
    store.close()
    print("RAM: a came first and went first")


def least_recently_used_on_disk(folder: Path) -> None:
    """On disk the block goes that was not used for longest."""
    limit = 3 * MB + MB // 2
    store = PagedSSDCacheManager(folder, limit)
    for name in "abc":
        store.save_block(NAMES[name], BLOCK, 64)
    assert store.load_block(NAMES["a"]) is not None
    store.save_block(NAMES["d"], BLOCK, 64)
    store.flush()
    assert held(store) == "acd"
    assert store.stats().evictions_ssd == 1
    files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert files <= limit
    print(f"disk: b was not used for longest and went; {files} of {limit} bytes in use")
    store.close()


def order_and_limit_after_a_restart(folder: Path) -> None:
    """The order of use is remembered, and a smaller limit is met at once."""
    store = PagedSSDCacheManager(folder, 2 * MB + MB // 2)
    assert held(store) == "ad"  # c was the least recently used
    store.close()
    print("disk: a smaller limit was met when the folder was opened")


def too_large_for_everything(folder: Path) -> None:
    """A block that can never fit is declined, and evicts nothing."""
    store = PagedSSDCacheManager(folder, 2 * MB + MB // 2)
    before = held(store)
    assert not store.save_block(NAMES["e"], BLOCK * 4, 64)
    assert held(store) == before
    assert store.stats().declined == 1
    store.close()
    print("a block of 4 MB was declined")


def main() -> None:
    first_in_first_out_in_ram()
    with tempfile.TemporaryDirectory() as folder:
        least_recently_used_on_disk(Path(folder))
        order_and_limit_after_a_restart(Path(folder))
        too_large_for_everything(Path(folder))


if __name__ == "__main__":
    main()
