"""The cache stack from one configuration: save, load, look at the files, start again."""

import tempfile
from pathlib import Path

import mlx.core as mx

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache

LAYERS = 4
GB = 1024**3


def build(folder: Path) -> tuple[PagedSSDCacheManager, BlockAwarePrefixCache]:
    """Block ids, the block store of one model, and the prefix cache over both."""
    config = CacheConfig(block_size=64, paged_ssd_cache_dir=folder, max_paged_ssd_cache_size=1 * GB)
    paged = CacheFactory.create_paged_cache(config, num_layers=LAYERS)
    store = CacheFactory.create_paged_ssd_cache(config, model_name="org/example")
    assert store is not None
    return store, CacheFactory.create_prefix_cache(config, model=None, paged_cache=paged, paged_ssd_cache=store)


def kv_block(seed: int) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of 64 tokens for each layer."""
    keys = mx.random.split(mx.random.key(seed), 2 * LAYERS)
    arrays = [mx.random.normal((1, 2, 64, 16), key=key).astype(mx.bfloat16) for key in keys]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def same(a: list[tuple[mx.array, ...]], b: list[tuple[mx.array, mx.array]]) -> bool:
    """Whether two blocks are equal to the last bit."""
    pairs = [(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)]
    return all(x.dtype == y.dtype and bool(mx.array_equal(x, y)) for x, y in pairs)


def save_and_load(folder: Path, block_hash: bytes) -> None:
    """A block is readable and listed at once; its file follows, where plain MLX can read it."""
    store, prefix_cache = build(folder)
    assert prefix_cache.save_block(block_hash, kv_block(1), token_count=64)
    loaded = prefix_cache.load_block(block_hash)
    assert loaded is not None and same(loaded, kv_block(1))

    (meta,) = store._index.get_all_metadata()
    print(f"{meta.block_hash.hex()[:8]}: {meta.token_count} tokens, {meta.file_size} bytes")
    store.flush()
    path = store.get_block_path(block_hash)
    assert path is not None and path.stat().st_size == meta.file_size
    # <cache_dir>/<model>/<first hex digit>/<hash>.safetensors
    assert path.relative_to(folder).parts == ("org%2Fexample", "a", block_hash.hex() + ".safetensors")
    assert len(mx.load(str(path))) == 2 * LAYERS
    assert store.check() == []
    prefix_cache.close()
    store.close()


def start_again(folder: Path, block_hash: bytes) -> None:
    """Blocks survive a restart; the first load reads the file, later ones RAM."""
    store, prefix_cache = build(folder)
    assert store.tier_of(block_hash) == "ssd"
    loaded = prefix_cache.load_block(block_hash)
    assert loaded is not None and same(loaded, kv_block(1))
    assert store.tier_of(block_hash) == "ram"
    assert prefix_cache.load_block(block_hash) is not None
    stats = store.stats()
    print(f"after a restart: {stats.hits_ssd} hit on disk, {stats.hits_ram} in RAM, {stats.restores} block restored")
    assert (stats.hits_ssd, stats.hits_ram, stats.restores) == (1, 1, 1)
    prefix_cache.close()
    store.close()


def survive_damage(folder: Path, block_hash: bytes) -> None:
    """A damaged file is a miss, never a wrong block; saving the block again heals it."""
    path = next(folder.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store, prefix_cache = build(folder)
    assert prefix_cache.load_block(block_hash) is None
    assert store.stats().damaged == 1
    assert prefix_cache.save_block(block_hash, kv_block(1), token_count=64)
    assert store.flush() and path.exists()
    prefix_cache.close()
    store.close()
    print("a damaged file was noticed, and written again")


def main() -> None:
    block_hash = bytes.fromhex("a1" * 32)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        save_and_load(root, block_hash)
        start_again(root, block_hash)
        survive_damage(root, block_hash)


if __name__ == "__main__":
    main()
