"""A disk that takes its time: saving does not wait for it, and nothing is unreadable meanwhile."""

import tempfile
import threading
from pathlib import Path

import mlx.core as mx

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager

HASHES = [bytes([number]) * 32 for number in range(8)]
disk_is_free = threading.Event()


class OnSlowDisk(PagedSSDCacheManager):
    """Its writer thread gets nowhere until the disk is free."""

    @staticmethod
    def _write_safetensors_no_mx(*block: object) -> None:
        disk_is_free.wait(60)
        PagedSSDCacheManager._write_safetensors_no_mx(*block)  # type: ignore[arg-type]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = OnSlowDisk(folder, 1024**3)  # no RAM tier: only the queue has the blocks
        for block_hash in HASHES:
            assert store.save_block(block_hash, [(mx.full((1, 64, 32), block_hash[0]),) * 2], 64)
        assert not list(Path(folder).rglob("*.safetensors"))
        print(f"{len(HASHES)} blocks saved, no file written yet, {store.stats().queue_bytes} bytes queued")
        # Sizes are exact from the moment a block is queued, and the blocks can be read.
        sizes = [meta.file_size for meta in store._index.get_all_metadata()]
        assert len(sizes) == len(HASHES)
        assert all(store.tier_of(block_hash) == "writing" for block_hash in HASHES)
        assert all(store.load_block(block_hash) is not None for block_hash in HASHES)
        # Evicting a block behind its own write is safe: removals go through the same queue, in order.
        assert store.delete_block(HASHES[0])

        disk_is_free.set()
        assert store.flush(60)
        files = sorted(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
        assert files == sorted(sizes)[1:]
        assert store.load_block(HASHES[0]) is None and store.check() == []
        print(f"{len(files)} files after the disk was free")
        store.close()


if __name__ == "__main__":
    main()
