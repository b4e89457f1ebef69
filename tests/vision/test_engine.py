"""The engine whole, with pictures: MLX thread, cache folder, restart, and what operators see."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from omlx.api.answering import Generation, answer_events
from omlx.engine.core import Engine
from omlx.engine.pool import EnginePool
from omlx.errors import BadRequest
from omlx.request import Request, SamplingParams
from omlx.testing import make_tiny_model
from tests.engine.test_pool import running
from tests.vision.models import folder, messages
from tests.vision.pictures import noise

A, B = noise(1), noise(2, 64, 33)
TURNS: list[tuple[Any, ...]] = [([A, "What is this?"],), ([A, "What is this?"], "A square.", ["Like ", B, "?"])]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for family in ("idefics3", "qwen3_vl"):
        shutil.copytree(folder(family), tmp_path / "models" / family)
    make_tiny_model(tmp_path / "models" / "text")
    return tmp_path


async def show(engine: Engine, *turns: Any, cache: bool = True) -> tuple[list[Any], Request]:
    asked, pictures = messages(*turns)
    tokens, vision = await asyncio.to_thread(engine.vision.prompt, asked, {}, pictures, use_cache=cache)
    params = SamplingParams(max_tokens=6, temperature=0, top_logprobs=3, ignore_eos=True)
    request = Request(f"r{time.monotonic_ns()}", tokens, params, use_cache=cache, vision=vision)
    return [(o.token, o.logprob, o.top_logprobs) async for o in engine.generate(request)], request


async def figures(pool: EnginePool, name: str) -> dict[str, Any]:
    return (await pool.cache_figures())["models"][name]


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
async def test_cold_ram_ssd_and_after_restart_are_identical(home: Path, family: str) -> None:
    cache = {"paged_ssd_cache_dir": home / "cache"}
    async with running(None, home, hot_cache_max_size=0) as pool:  # keeps nothing
        engine = await pool.get(family)
        cold = [(await show(engine, *turns))[0] for turns in TURNS]
        assert (await figures(pool, family))["vision_encoder_calls"] == 3  # A again for the second prompt
    async with running(None, home, **cache) as pool:
        engine = await pool.get(family)
        for _ in range(2):
            assert [(await show(engine, *turns))[0] for turns in TURNS] == cold
        seen = await figures(pool, family)
        assert (seen["vision_encoder_calls"], seen["vision_feature_misses"]) == (2, 2)
        assert seen["vision_encoder_s"] > 0
        total = (await pool.cache_figures())["total"]
        assert total["vision_encoder_calls"] == 2
    async with running(None, home, **cache) as pool:
        engine = await pool.get(family)
        for turns, answer in zip(TURNS, cold, strict=True):
            said, request = await show(engine, *turns)
            assert said == answer and request.stats.cached_ssd_tokens > 0
        await pool.clear_cache(family)
    async with running(None, home, **cache) as pool:
        engine = await pool.get(family)
        said, request = await show(engine, *TURNS[1])
        assert said == cold[1] and request.stats.cached_tokens == 0
        assert (await figures(pool, family))["vision_encoder_calls"] == 2  # cleared with the rest


async def test_features_alone_survive_for_prompts_that_are_new(home: Path) -> None:
    cache = {"paged_ssd_cache_dir": home / "cache"}
    async with running(None, home, **cache) as pool:
        await show(await pool.get("idefics3"), *TURNS[1])
    async with running(None, home, **cache) as pool:
        said, request = await show(engine := await pool.get("idefics3"), ["Another question: ", B, A, "?"])
        assert (request.vision.encoded, request.vision.reused) == (0, 2)
        seen = await figures(pool, "idefics3")
        assert (seen["vision_encoder_calls"], seen["vision_feature_hits"]) == (0, 2)
        assert said == (await show(engine, ["Another question: ", B, A, "?"], cache=False))[0]


async def test_without_the_cache_features_are_neither_used_nor_stored(home: Path) -> None:
    async with running(None, home) as pool:
        engine = await pool.get("idefics3")
        alone, _ = await show(engine, *TURNS[0], cache=False)
        assert (await figures(pool, "idefics3"))["features"]["ram_entries"] == 0
        for count in (1, 2):
            assert (await show(engine, *TURNS[0]))[0] == (await show(engine, *TURNS[0], cache=False))[0] == alone
            seen = await figures(pool, "idefics3")
            assert seen["vision_encoder_calls"] == 2 + count  # one of them for the cache
            assert (seen["vision_feature_hits"], seen["vision_feature_misses"]) == (0, 1)


async def test_many_at_once_with_and_without_pictures(home: Path) -> None:
    turns = [([A, "What is this?"],), ("Only words.",), ([B, A, "Which is larger?"],), (["Well, ", B, "?"],)]
    async with running(None, home) as pool:
        engine = await pool.get("qwen3_vl")
        alone = [(await show(engine, *turn, cache=False))[0] for turn in turns]
        together = await asyncio.gather(*(show(engine, *turn) for turn in turns * 3))
        assert [[t for t, *_ in said] for said, _ in together] == [[t for t, *_ in said] for said in alone] * 3
        assert (await figures(pool, "qwen3_vl"))["vision_encoder_calls"] <= 6


async def test_a_client_that_goes_away_stops_the_work_on_its_picture(home: Path) -> None:
    async with running(None, home) as pool:
        engine = await pool.get("idefics3")
        task = asyncio.create_task(show(engine, [A, "What is this?"]))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.ready()
        assert not engine.scheduler.has_work and engine._encodings == {}
        assert (await show(engine, [A, "What is this?"]))[0]


async def test_a_text_model_takes_no_pictures_and_counts_none(home: Path) -> None:
    async with running(None, home) as pool:
        engine = await pool.get("text")
        assert engine.vision is None and "vision_encoder_calls" not in await figures(pool, "text")


async def test_a_prompt_with_pictures_that_does_not_fit_is_refused(home: Path) -> None:
    async with running(None, home) as pool:
        engine = await pool.get("idefics3")
        asked, pictures = messages([*[A] * 3000, "x"])
        with pytest.raises(BadRequest, match="more than the context"):
            engine.vision.prompt(asked, {}, pictures)


async def test_the_log_says_what_was_done_for_pictures(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = []
    async with running(None, home) as pool:
        engine = await pool.get("idefics3")
        for turn in ([A, B, "Which?"], [B, "Well?"], "Only words."):
            asked, pictures = messages(turn)
            tokens, vision = engine.vision.prompt(asked, {}, pictures)
            request = Request("r", tokens, SamplingParams(max_tokens=2, ignore_eos=True), vision=vision)
            with caplog.at_level("INFO", logger="omlx"):
                async for _ in answer_events(engine, Generation((request,)), model="m"):
                    pass
            lines.append(caplog.records[-1].getMessage())
    assert " images=2 encoded=2 reused=0 " in lines[0] and " images=1 encoded=0 reused=1 " in lines[1]
    assert "images" not in lines[2]
