"""Image features in RAM and on disk: computed once, also across a restart."""

import tempfile
from pathlib import Path

import mlx.core as mx

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache

MODEL = "clip_vit_large"


def features_of(number: int) -> mx.array:
    """What a vision encoder would give for an image."""
    return mx.random.normal((1, 768), key=mx.random.key(number)).astype(mx.bfloat16)


def same(a: mx.array | None, b: mx.array) -> bool:
    return a is not None and a.dtype == b.dtype and bool(mx.array_equal(a, b))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ssd_dir = Path(folder)
        cache = VisionFeatureSSDCache(cache_dir=ssd_dir, max_memory_entries=2)
        for number in range(3):
            cache.put(f"image{number}", MODEL, features_of(number))
        # Three were put and two stay in RAM: the least recently used left it, its file did not.
        assert cache.stats.evictions == 1
        assert same(cache.get("image0", MODEL), features_of(0))
        assert cache.get("image0", "another_model") is None
        assert (cache.stats.hits, cache.stats.misses) == (1, 1)
        assert cache.stats["hits"] == cache.stats.hits
        cache.close()
        print("files:", ", ".join(sorted(path.name for path in ssd_dir.rglob("*.npy"))))
        assert len(list(ssd_dir.rglob(f"image0_{MODEL}.npy"))) == 1

        again = VisionFeatureSSDCache(cache_dir=ssd_dir, max_memory_entries=2)
        assert same(again.get("image1", MODEL), features_of(1))
        # A hit on disk was promoted to RAM: the next one needs no file.
        for path in ssd_dir.rglob("*.npy"):
            path.unlink()
        assert same(again.get("image1", MODEL), features_of(1))
        assert again.get("image2", MODEL) is None
        assert (again.stats.hits, again.stats.misses) == (2, 1)
        print(f"after a restart: {again.stats.hits} hits, {again.stats.misses} miss")
        again.close()

    memory_only = VisionFeatureSSDCache(cache_dir=None, max_memory_entries=1)
    memory_only.put("image0", MODEL, features_of(0))
    memory_only.put("image1", MODEL, features_of(1))
    assert memory_only.get("image0", MODEL) is None
    assert same(memory_only.get("image1", MODEL), features_of(1))


if __name__ == "__main__":
    main()
