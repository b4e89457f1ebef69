"""Two models under one cache root: folders of their own, one limit."""

import tempfile
from pathlib import Path

import mlx.core as mx

from omlx.cache.factory import CacheConfig, CacheFactory

MB = 1024**2
HASH = bytes(32)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        config = CacheConfig(paged_ssd_cache_dir=root, max_paged_ssd_cache_size=3 * MB // 2, hot_cache_max_size=0)
        # A name may hold anything: it becomes one safe folder under the root.
        names = ["llama-3b", "org/llama-3b", "../llama-3b"]
        stores = [CacheFactory.create_paged_ssd_cache(config, model_name=name) for name in names]
        one, two, three = (store for store in stores if store is not None)

        one.save_block(HASH, [(mx.ones((4, 4)), mx.ones((4, 4)))], 4)
        assert two.load_block(HASH) is None and three.load_block(HASH) is None
        two.save_block(HASH, [(mx.zeros((4, 4)), mx.zeros((4, 4)))], 4)
        first, second = one.load_block(HASH), two.load_block(HASH)
        assert first is not None and second is not None
        assert bool(mx.all(first[0][0] == 1)) and bool(mx.all(second[0][0] == 0))
        assert one.flush()
        folders = sorted(path.name for path in root.iterdir() if path.is_dir())
        assert folders == ["llama-3b", "org%2Fllama-3b"]
        print("folders:", ", ".join(folders))

        big = [(mx.zeros((256, 512)), mx.zeros((256, 512)))]  # 1 MB
        three.save_block(b"\x01" * 32, big, 64)
        two.save_block(b"\x02" * 32, big, 64)
        # Room was made among all models: the block of the third was used least recently.
        assert not three.contains(b"\x01" * 32) and two.contains(b"\x02" * 32)
        assert one.ssd_bytes == two.ssd_bytes <= config.max_paged_ssd_cache_size
        print(f"together: {one.ssd_bytes} of {config.max_paged_ssd_cache_size} bytes")
        for store in (one, two, three):
            store.close()


if __name__ == "__main__":
    main()
