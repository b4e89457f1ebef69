"""Hot and cold: moving blocks out of RAM, bringing them back, and what the statistics say of it."""

import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from omlx.cache.tiered_manager import TieredCacheManager

MB = 1024**2
HASHES = [bytes([17 * number]) * 32 for number in range(4)]


def kv_block(number: int) -> list[tuple[mx.array, mx.array]]:
    """1 MB of keys and values of 64 tokens."""
    return [(mx.full((1, 4, 64, 512), number), mx.full((1, 4, 64, 512), -number))]


def shown(stats: dict[str, Any]) -> str:
    return f"{stats['kv_cache_memory']} bytes hot, {stats['blocks_cold']} blocks cold ({stats['cold_tokens']} tokens)"


def evict_and_restore(cache: TieredCacheManager) -> None:
    """The oldest blocks leave RAM; each is on disk by then, and comes back when it is asked for."""
    for number, block_hash in enumerate(HASHES):
        assert cache.prefix_cache.save_block(block_hash, kv_block(number), token_count=64)
    assert cache.stats()["kv_cache_memory"] == 4 * MB

    freed = cache.evict_blocks_to_cold(2 * MB)
    assert freed == 2 * MB
    stats = cache.stats()
    print(f"freed {freed} bytes: {shown(stats)}")
    assert (stats["kv_cache_memory"], stats["blocks_cold"], stats["cold_tokens"]) == (2 * MB, 4, 256)
    assert [cache.store.tier_of(block_hash) for block_hash in HASHES] == ["ssd", "ssd", "ram", "ram"]

    assert cache.restore_block_from_cold(42, HASHES[0])
    assert cache.store.tier_of(HASHES[0]) == "ram"
    assert cache.stats()["restores"] == 1
    print(f"restored one: {shown(cache.stats())}")


def a_file_that_is_gone(cache: TieredCacheManager) -> None:
    """Restoring answers False, counts a miss, and the block can be computed and saved again."""
    path = cache.store.get_block_path(HASHES[1])
    assert path is not None
    path.unlink()
    misses = cache.stats()["misses"]
    assert not cache.restore_block_from_cold(43, HASHES[1])
    assert not cache.restore_block_from_cold(44, b"\x12\x34\x56...")
    assert cache.stats()["misses"] == misses + 2
    assert cache.prefix_cache.save_block(HASHES[1], kv_block(1), token_count=64)
    assert cache.flush() and path.exists()
    print("a file that was gone was a miss, and is written again")


def blocks_in_use_stay(cache: TieredCacheManager) -> None:
    """What a running request holds is not moved; when it ends, it may be."""
    for block_hash in HASHES:
        assert cache.restore_block_from_cold(50, block_hash)
        cache.paged_cache.acquire("request", block_hash)
        cache.store.pin(block_hash)
    assert cache.evict_blocks_to_cold(4 * MB) == 0
    for block_hash in cache.paged_cache.release("request"):
        cache.store.unpin(block_hash)
    assert cache.evict_blocks_to_cold(4 * MB) == 4 * MB
    assert all(cache.store.tier_of(block_hash) == "ssd" for block_hash in HASHES)
    print(f"blocks in use stayed until their request ended: {shown(cache.stats())}")


def more_than_memory_holds(cache: TieredCacheManager) -> None:
    """The hot tier never passes its budget; every block stays readable."""
    many = [bytes([number]) * 32 for number in range(101, 121)]
    for number, block_hash in enumerate(many):
        assert cache.prefix_cache.save_block(block_hash, kv_block(number), token_count=64)
        assert cache.stats()["kv_cache_memory"] <= 8 * MB
    assert all(cache.prefix_cache.load_block(block_hash) is not None for block_hash in many)
    print(f"20 MB saved within a budget of 8 MB: {shown(cache.stats())}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = TieredCacheManager(max_kv_cache_memory=8 * MB, ssd_dir=Path(folder))
        evict_and_restore(cache)
        a_file_that_is_gone(cache)
        blocks_in_use_stay(cache)
        more_than_memory_holds(cache)
        assert cache.close()


if __name__ == "__main__":
    main()
