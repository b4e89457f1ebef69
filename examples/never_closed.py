"""A program that saves blocks and just ends: they are on disk all the same, and it does not hang.

python never_closed.py [FOLDER]     with a folder: only save into it, and end
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from omlx.cache.factory import CacheConfig, CacheFactory

HASHES = [bytes([number]) * 32 for number in range(20)]


def save(folder: Path) -> None:
    """What the program does; there is no close() and no flush()."""
    config = CacheConfig(paged_ssd_cache_dir=folder)
    paged = CacheFactory.create_paged_cache(config, num_layers=2)
    store = CacheFactory.create_paged_ssd_cache(config, model_name="tiny")
    assert store is not None
    prefix_cache = CacheFactory.create_prefix_cache(config, model=None, paged_cache=paged, paged_ssd_cache=store)
    for block_hash in HASHES:
        block = [(mx.full((1, 64, 32), layer), mx.full((1, 64, 32), -layer)) for layer in range(2)]
        assert prefix_cache.save_block(block_hash, block, token_count=64)


def main() -> None:
    if sys.argv[1:]:
        save(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, folder], check=True, timeout=60)
        store = CacheFactory.create_paged_ssd_cache(CacheConfig(paged_ssd_cache_dir=Path(folder)), model_name="tiny")
        assert store is not None
        assert all(store.load_block(block_hash) is not None for block_hash in HASHES)
        assert store.stats().hits_ssd == len(HASHES) and store.check() == []
        store.close()
        print(f"{len(HASHES)} blocks were on disk when the program had ended")


if __name__ == "__main__":
    main()
