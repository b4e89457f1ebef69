"""What operators see of the features of pictures, and clear, over a real engine with a tiny vision model."""

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.storage.folder import VISION_FOLDER
from omlx.testing import make_tiny_vlm
from tests.admin.test_routes import CLEAR, Bench, cached, serving

pytest.importorskip("mlx_vlm")
Image = pytest.importorskip("PIL.Image")

__all__ = ["cached"]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("models") / "tiny", "llava")


@pytest.fixture
async def bench(vlm: Path, tmp_path: Path, cached: dict[str, str]) -> AsyncIterator[Bench]:
    async with serving(tmp_path, vlm, **cached) as bench:
        yield bench


def picture(colour: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (24, 24), colour).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*colours: str) -> list[dict[str, Any]]:
    """A conversation about pictures of these colours."""
    return [{"role": "user", "content": [*map(picture, colours), {"type": "text", "text": "What is it?"}]}]


async def ask(bench: Bench, *colours: str, **fields: Any) -> None:
    body = {"messages": asking(*colours), "max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
    await bench.post("/v1/chat/completions", **body)


async def where(bench: Bench, *colours: str, **fields: Any) -> list[str | None]:
    """Where a probe says that the features of these pictures are."""
    return [image["features"] for image in (await bench.post(messages=asking(*colours), **fields))["images"]]


def features(bench: Bench) -> VisionFeatureSSDCache:
    cache = bench.pool._loaded["tiny"].tiers.vision_features
    assert cache is not None and cache.flush(60)
    return cache


def on_disk(tmp_path: Path) -> int:
    return len(list((tmp_path / "cache" / VISION_FOLDER).glob("*.npy")))


async def test_figures_of_features_are_shown_for_the_model_and_in_total(bench):
    await ask(bench, "red", "blue")
    cache = features(bench)
    cache.put("h", "another model's", mx.ones((100,)))
    assert cache.flush(60)
    figures = await bench.get()
    mine, total = figures["models"]["tiny"]["features"], figures["total"]["features"]
    assert (mine["hits"], mine["misses"], mine["disk_entries"], mine["ram_entries"]) == (0, 2, 2, 3)
    assert total == mine | {"disk_entries": 3, "disk_bytes": cache.usage.disk_bytes}
    assert figures["total"]["bytes"]["ssd"] > total["disk_bytes"] > mine["disk_bytes"] > 0
    await bench.post(CLEAR, messages=asking("red", "blue"))
    await ask(bench, "red", "blue")
    assert (await bench.get())["models"]["tiny"]["features"]["hits"] == 2


async def test_a_server_without_such_models_shows_zeros(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        assert set((await bench.get())["total"]["features"].values()) == {0}


async def test_a_server_counts_the_features_of_models_that_are_not_loaded(tiny_model_dir, tmp_path, cached):
    kept = VisionFeatureSSDCache(tmp_path / "cache" / VISION_FOLDER, free_reserve_bytes=0)
    kept.put("h", "gone-0123456789abcdef", mx.ones((100_000,)))
    kept.close()
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        total = (await bench.get())["total"]
        assert total["features"]["disk_entries"] == 1 and total["bytes"]["ssd"] > 400_000
        assert (await bench.post(CLEAR, model="gone"))["images"] == 1 and on_disk(tmp_path) == 0
        assert (await bench.get())["total"]["bytes"]["ssd"] < 400_000


async def test_clearing_takes_features_by_model_and_by_age(bench, tmp_path):
    await ask(bench, "red", "blue")
    features(bench)
    assert await bench.post(CLEAR, older_than="1h") == {"blocks": 0, "bytes": 0, "images": 0}
    done = await bench.post(CLEAR)
    assert done["images"] == 2 and done["blocks"] > 0 and on_disk(tmp_path) == 0
    assert await where(bench, "red", "blue") == [None, None]
    await ask(bench, "red")
    features(bench)
    assert (await bench.post(CLEAR, model=None, older_than="0s"))["images"] == 1 and on_disk(tmp_path) == 0


async def test_clearing_a_conversation_leaves_features(bench, tmp_path):
    await ask(bench, "red")
    assert (await bench.post(CLEAR, messages=asking("red")))["blocks"] > 0
    features(bench)
    assert on_disk(tmp_path) == 1 and await where(bench, "red") == ["ram"]


async def test_a_probe_says_of_every_picture_where_its_features_are_and_changes_nothing(bench):
    await ask(bench, "red")
    await ask(bench, "blue")
    features(bench).evict_from_ram(1)  # of the first
    before = await bench.get()
    found = await bench.post(messages=asking("red", "green", "blue"))
    assert [image["features"] for image in found["images"]] == ["ssd", None, "ram"]
    starts = [image["token"] for image in found["images"]]
    assert starts == sorted(starts) and starts[0] < starts[1] and len({i["hash"] for i in found["images"]}) == 3
    assert found["first_miss"]["token"] >= starts[0] and found["tokens"] > starts[2]
    assert "images" not in await bench.post(messages=[{"role": "user", "content": "No picture."}])
    after = await bench.get()
    assert after["models"]["tiny"]["features"] == before["models"]["tiny"]["features"]


async def test_a_probe_of_another_picture_finds_no_blocks_of_this_one(bench):
    await ask(bench, "red")
    await bench.get()  # its state is stored
    same, other = [await bench.post(messages=asking(colour)) for colour in ("red", "blue")]
    assert same["cached_tokens"] > other["cached_tokens"] and "in a picture" in other["first_miss"]["reason"]


async def test_tenants_do_not_learn_of_each_others_pictures(bench):
    await ask(bench, "red", cache_salt="mine")
    assert await where(bench, "red", cache_salt="mine") == ["ram"]
    assert await where(bench, "red", cache_salt="yours") == [None] == await where(bench, "red")


async def test_a_model_without_a_cache_has_no_features(vlm, tmp_path):
    async with serving(tmp_path, vlm, hot_cache_max_size=0) as bench:
        await ask(bench, "red")
        assert await where(bench, "red") == [None]


async def test_features_are_found_after_a_restart(vlm, tmp_path, cached):
    async with serving(tmp_path, vlm, **cached) as bench:
        await ask(bench, "red")
    async with serving(tmp_path, vlm, **cached) as bench:
        assert await where(bench, "red", "blue") == ["ssd", None]
        await bench.post(CLEAR, messages=asking("red"))
        await ask(bench, "red")
        figures = (await bench.get())["models"]["tiny"]
        assert figures["features"]["disk_loads"] == 1 and figures["vision_encoder_calls"] == 0
