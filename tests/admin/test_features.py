"""What operators see of the features of pictures, and clear. The tiny model takes none: its stack is told otherwise."""

import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.admin import routes
from omlx.cache.tiered_manager import TieredCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.engine import pool
from omlx.request import ImageStart, Request
from omlx.storage.folder import VISION_FOLDER
from tests.admin.test_routes import CLEAR, PROBE, TEXT, Bench, cached, fake, serving

__all__ = ["cached"]


def digest(n: int) -> bytes:
    return bytes([n]) * 32


class Pictures:
    """Two pictures in front of a prompt's text, and one at its end; the features of one are nowhere."""

    starts = (ImageStart(0, digest(1)), ImageStart(4, digest(2)), ImageStart(30, digest(3)))
    rope_delta = 0

    def __init__(self, tokens: int) -> None:
        self.keys = [(1 << 31) + n if n < 8 else n for n in range(tokens)]

    def prepare(self, start: int, stop: int, wait_s: float) -> bool:
        raise AssertionError("a probe computes nothing")

    def release(self) -> None:
        return None


def with_pictures(pictures: Pictures, *args: Any, **options: Any) -> Request:
    """A request whose prompt has these, whatever the route found in it."""
    return Request(*args, **options | {"vision": pictures})


@pytest.fixture
async def bench(tiny_model_dir, tmp_path, cached, monkeypatch) -> AsyncIterator[Bench]:
    def with_features(*args: Any, **options: Any) -> TieredCacheManager:
        return TieredCacheManager(*args, **options | {"vision": True})  # whatever the pool says of this text model

    monkeypatch.setattr(pool, "TieredCacheManager", with_features)
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        yield bench


def stack(bench: Bench) -> tuple[VisionFeatureSSDCache, str]:
    tiers = bench.pool._loaded["tiny"].tiers
    return tiers.vision_features, tiers.feature_model


def put(bench: Bench, *numbers: int) -> None:
    cache, model = stack(bench)
    for n in numbers:
        cache.put(digest(n).hex(), model, mx.full((100,), n))
    assert cache.flush(5)


def on_disk(tmp_path: Path) -> int:
    return len(list((tmp_path / "cache" / VISION_FOLDER).glob("*.npy")))


async def test_figures_of_features_are_shown_for_the_model_and_in_total(bench):
    put(bench, 1, 2)
    cache, model = stack(bench)
    assert cache.get(digest(1).hex(), model) is not None and cache.get(digest(9).hex(), model) is None
    cache.put("h", "another model's", mx.ones((100,)))
    assert cache.flush(5)
    figures = await bench.get()
    mine, total = figures["models"]["tiny"]["features"], figures["total"]["features"]
    assert (mine["hits"], mine["misses"], mine["disk_entries"], mine["ram_entries"]) == (1, 1, 2, 3)
    assert total == mine | {"disk_entries": 3, "disk_bytes": cache.usage.disk_bytes}
    assert figures["total"]["bytes"]["ssd"] > total["disk_bytes"] > mine["disk_bytes"] > 800


async def test_a_server_without_such_models_shows_zeros(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        assert set((await bench.get())["total"]["features"].values()) == {0}


async def test_a_server_counts_the_features_of_models_that_are_not_loaded(tiny_model_dir, tmp_path, cached):
    features = VisionFeatureSSDCache(tmp_path / "cache" / VISION_FOLDER, free_reserve_bytes=0)
    features.put("h", "gone-0123456789abcdef", mx.ones((100_000,)))
    features.close()
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        total = (await bench.get())["total"]
        assert total["features"]["disk_entries"] == 1 and total["bytes"]["ssd"] > 400_000
        assert (await bench.post(CLEAR, model="gone"))["images"] == 1 and on_disk(tmp_path) == 0
        assert (await bench.get())["total"]["bytes"]["ssd"] < 400_000


async def test_clearing_takes_features_by_model_and_by_age(bench, tmp_path):
    put(bench, 1, 2)
    assert await bench.post(CLEAR, older_than="1h") == {"blocks": 0, "bytes": 0, "images": 0}
    done = await bench.post(CLEAR)
    assert done["images"] == 2 and done["bytes"] > 800 and on_disk(tmp_path) == 0
    cache, model = stack(bench)
    assert cache.get(digest(1).hex(), model) is None
    put(bench, 3)
    assert (await bench.post(CLEAR, model=None, older_than="0s"))["images"] == 1 and on_disk(tmp_path) == 0


async def test_clearing_a_conversation_leaves_features(bench, tmp_path):
    put(bench, 1)
    await bench.complete(TEXT)
    assert (await bench.post(CLEAR, prompt=TEXT))["blocks"] > 0 and on_disk(tmp_path) == 1


async def test_a_probe_says_of_every_picture_where_its_features_are(bench, monkeypatch):
    tokens = list(range(40))
    assert "images" not in await bench.post(tokens=tokens)
    put(bench, 1, 3)
    stack(bench)[0].evict_from_ram(1)  # of number 1
    monkeypatch.setattr(routes, "Request", functools.partial(with_pictures, Pictures(len(tokens))))
    before = await bench.get()
    found = await bench.post(tokens=tokens)
    assert found["images"] == [
        {"token": 0, "hash": digest(1).hex(), "features": "ssd"},
        {"token": 4, "hash": digest(2).hex(), "features": None},
        {"token": 30, "hash": digest(3).hex(), "features": "ram"},
    ]
    assert found["tokens"] == 40 and found["first_miss"]["token"] == 0
    after = await bench.get()
    assert after["models"]["tiny"]["features"] == before["models"]["tiny"]["features"]


async def test_a_probe_of_pictures_looks_for_the_prompt_as_the_cache_sees_it(bench, monkeypatch):
    tokens = list(range(40))
    await bench.complete(tokens)
    assert (await bench.post(tokens=tokens))["cached_tokens"] > 30  # the text is stored
    monkeypatch.setattr(routes, "Request", functools.partial(with_pictures, Pictures(len(tokens))))
    assert (await bench.post(tokens=tokens))["cached_tokens"] == 0  # but not these pictures


async def test_a_model_without_a_cache_has_no_features(tiny_model_dir, tmp_path, monkeypatch):
    async with serving(tmp_path, tiny_model_dir, hot_cache_max_size=0) as bench:
        monkeypatch.setattr(routes, "Request", functools.partial(with_pictures, Pictures(40)))
        found = await bench.post(tokens=list(range(40)))
        assert [image["features"] for image in found["images"]] == [None] * 3


async def test_a_proxy_learns_nothing_of_pictures(tmp_path):
    assert (await fake(tmp_path).call("POST", PROBE, json={"model": "tiny"}, peer="192.168.1.5")).status_code == 403
