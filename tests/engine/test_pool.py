"""The engine whole: MLX thread, scheduler and cache, over a tiny model folder."""

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from omlx import server
from omlx.engine.core import Engine
from omlx.engine.pool import EnginePool
from omlx.errors import BadRequest, ModelError, NotFound, Overloaded
from omlx.request import Request, RequestState, SamplingParams
from omlx.scheduler import SchedulerConfig
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.adapters import make_adapter
from tests.support import wait_until

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 97]


@contextlib.asynccontextmanager
async def running(
    model: Path | None, home: Path, adapter: Path | None = None, **config: Any
) -> AsyncIterator[EnginePool]:
    config = {"block_size": 16, "exact": "on"} | config
    pool = EnginePool(SchedulerConfig(**config), home, str(model) if model else None, adapter)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop(5.0)


def request(length: int, name: str = "r", **options: Any) -> Request:
    params = SamplingParams(**({"max_tokens": 6, "temperature": 0, "top_logprobs": 3} | options))
    return Request(f"{name}{time.monotonic_ns()}", [(i * i + 7) % 250 for i in range(length)], params)


async def ask(engine: Engine, asked: Request) -> list[tuple[Any, ...]]:
    return [(o.token, o.logprob, o.top_logprobs, o.finish_reason) async for o in engine.generate(asked)]


async def test_cold_ram_ssd_and_after_restart_are_identical(tiny_model_dir, tmp_path):
    cache = {"paged_ssd_cache_dir": tmp_path / "cache"}
    cold = {}
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get("tiny")
        for length in LENGTHS:
            first, repeat = request(length), request(length)
            first.use_cache = False
            cold[length] = await ask(engine, first)
            assert await ask(engine, request(length)) == cold[length]
            assert await ask(engine, repeat) == cold[length]
            assert (repeat.stats.cached_ram_tokens, repeat.stats.cached_ssd_tokens) == (length - 1, 0)
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get("tiny")
        for length in LENGTHS[::-1]:  # the longest first: what it reads comes from files
            again = request(length)
            assert await ask(engine, again) == cold[length]
            assert again.stats.cached_tokens == length - 1
            if length == LENGTHS[-1]:
                assert (again.stats.cached_ram_tokens, again.stats.cached_ssd_tokens) == (0, length - 1)
    async with running(tiny_model_dir, tmp_path, hot_cache_max_size=0, **cache) as pool:
        engine = await pool.get("tiny")
        for length in LENGTHS:
            again = request(length)
            assert await ask(engine, again) == cold[length]
            assert (again.stats.cached_ram_tokens, again.stats.cached_ssd_tokens) == (0, length - 1)


async def test_what_was_read_from_files_is_in_ram_the_next_time(tiny_model_dir, tmp_path):
    cache = {"paged_ssd_cache_dir": tmp_path / "cache"}
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        await ask(await pool.get("tiny"), request(97))
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get("tiny")
        await ask(engine, request(97))
        again = request(97)
        await ask(engine, again)
        assert (again.stats.cached_ram_tokens, again.stats.cached_ssd_tokens) == (96, 0)


async def test_closing_the_iterator_aborts_and_what_was_computed_is_kept(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path) as pool:
        engine = await pool.get("tiny")
        endless = request(40, max_tokens=2000, ignore_eos=True)
        stream = engine.generate(endless)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(wait_until, lambda: not engine.scheduler.has_work)
        assert engine.scheduler.stats.aborted == 1
        again = request(40)
        await ask(engine, again)
        assert again.stats.cached_tokens == 39


async def test_a_cancelled_task_aborts_its_request(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path) as pool:
        engine = await pool.get("tiny")
        asked = request(10, max_tokens=3000, ignore_eos=True)
        task = asyncio.create_task(ask(engine, asked))
        while not asked.stats.generated_tokens:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wrap_future(engine._thread.call(lambda: None))
        assert not engine.scheduler.has_work


async def test_requests_that_cannot_run_are_refused_before_they_are_queued(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path, max_concurrent_requests=1, max_waiting_requests=1) as pool:
        engine = await pool.get("tiny")
        for bad, words in (
            (request(0), "empty"),
            (request(10, max_tokens=5000), "10 prompt tokens and 5000 new ones are 5010"),
            (Request("x", [260], SamplingParams(max_tokens=1)), "from 0 to 259"),
        ):
            with pytest.raises(BadRequest, match=words):
                await ask(engine, bad)
        tasks = [asyncio.create_task(ask(engine, request(20, name=str(i), max_tokens=300))) for i in range(2)]
        while not (engine.scheduler.running_requests and engine.scheduler.waiting_requests):
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="2 requests"):
            await ask(engine, request(5))
        assert [len(answer) for answer in await asyncio.gather(*tasks)] == [300, 300]
        assert len(await ask(engine, request(5))) == 6


async def test_a_small_kv_budget_shortens_the_context(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path, max_kv_cache_memory=1024 * 1024) as pool:
        engine = await pool.get("tiny")
        assert engine.context_length == 2048 and "--max-kv-cache-memory is 1 MB" in engine.context_note
        with pytest.raises(BadRequest, match=r"2048.*4096.*--max-kv-cache-memory"):
            await ask(engine, request(2000, max_tokens=100))


async def test_models_are_loaded_on_first_use_and_share_the_cache_root(tmp_path):
    home = tmp_path / "home"
    for seed, name in enumerate(("one", "org/two")):
        make_tiny_model(home / "models" / name, seed=seed)
    cache = {"paged_ssd_cache_dir": tmp_path / "cache"}
    async with running(None, home, **cache) as pool:
        assert [(m.name, m.loaded) for m in pool.models()] == [("one", False), ("org/two", False)]
        one, two = await pool.get("one"), await pool.get("org/two")
        assert await pool.get("one") is one
        first = await ask(one, request(50))
        asked = request(50)
        assert await ask(two, asked) != first and asked.stats.cached_tokens == 0
        assert all(m.loaded for m in pool.models()) and await pool.ready()
        with pytest.raises(NotFound, match=r"'three'.*one, org/two"):
            await pool.get("three")
    assert (tmp_path / "cache" / "org%2Ftwo").is_dir()


async def test_a_bad_model_is_one_error_and_the_others_work(tmp_path):
    home = tmp_path / "home"
    make_tiny_model(home / "models" / "good")
    make_tiny_model(home / "models" / "bad")
    weights = home / "models" / "bad" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with running(None, home) as pool:
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            await pool.get("bad")
        assert len(await ask(await pool.get("good"), request(5))) == 6 and await pool.ready()


async def test_weights_swapped_under_the_same_name_find_nothing(tmp_path):
    home = tmp_path / "home"
    cache = {"paged_ssd_cache_dir": tmp_path / "cache"}
    cached = []
    for seed in (0, 1, 0):
        shutil.rmtree(home, ignore_errors=True)
        make_tiny_model(home / "models" / "m", seed=seed)
        async with running(None, home, **cache) as pool:
            asked = request(50)
            await ask(await pool.get("m"), asked)
            cached.append(asked.stats.cached_tokens)
    assert cached == [0, 0, 49]


async def test_a_process_over_its_memory_limit_pauses_all_but_the_oldest(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path, max_process_memory=2**40) as pool:
        engine = await pool.get("tiny")
        long = [request(30 + i, name=f"{i}-", max_tokens=400, ignore_eos=True) for i in range(3)]
        tasks = [asyncio.create_task(ask(engine, asked)) for asked in long]
        while any(asked.stats.generated_tokens < 5 for asked in long):
            await asyncio.sleep(0.01)
        pool.memory._interval_s, pool.memory._process_memory = 0.02, lambda: 2**41
        while engine.scheduler.waiting_requests < 2:
            await asyncio.sleep(0.01)
        assert long[0].state is RequestState.DECODING and engine.scheduler.running_requests == 1
        pool.memory._process_memory = lambda: 0
        assert [len(answer) for answer in await asyncio.gather(*tasks)] == [400] * 3


async def test_stop_ends_running_requests_and_keeps_their_work(tiny_model_dir, tmp_path):
    cache = {"paged_ssd_cache_dir": tmp_path / "cache"}
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get("tiny")
        stream = engine.generate(request(60, max_tokens=3000, ignore_eos=True))
        await anext(stream)
        await pool.stop(10.0)
        with pytest.raises(Overloaded, match="shutting down"):
            async for _ in stream:
                pass
        assert not await pool.ready()
    async with running(tiny_model_dir, tmp_path, **cache) as pool:
        again = request(60)
        await ask(await pool.get("tiny"), again)
        assert again.stats.cached_ssd_tokens == 59


async def test_a_second_server_on_the_folder_serves_without_it(tiny_model_dir, tmp_path, caplog):
    folder = tmp_path / "cache"
    script = (
        "import sys, time; from omlx.cache.paged_ssd_cache import PagedSSDCacheManager as P\n"
        f"store = P({str(folder)!r}, 10**9); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with caplog.at_level(logging.WARNING):
            async with running(tiny_model_dir, tmp_path, paged_ssd_cache_dir=folder) as pool:
                engine = await pool.get("tiny")
                await ask(engine, request(40))
                again = request(40)
                await ask(engine, again)
                assert again.stats.cached_ram_tokens == 39
                assert f"{other.pid}" in caplog.text and "serving goes on without it" in caplog.text
                other.kill()
                other.wait()
                # It takes over, and what was computed meanwhile gets its files.
                assert await asyncio.to_thread(wait_until, lambda: list(folder.rglob("*.safetensors")), 60)


def test_an_interpreter_that_just_ends_keeps_its_blocks_and_does_not_hang(tiny_model_dir, tmp_path):
    script = f"""
import asyncio
from pathlib import Path
from omlx.engine.pool import EnginePool
from omlx.request import Request, RequestState, SamplingParams
from omlx.scheduler import SchedulerConfig
async def main():
    config = SchedulerConfig(block_size=16, paged_ssd_cache_dir=Path({str(tmp_path / "cache")!r}))
    pool = EnginePool(config, Path({str(tmp_path)!r}), {str(tiny_model_dir)!r})
    await pool.start()
    stream = (await pool.get("tiny")).generate(Request("r", list(range(100)), SamplingParams(max_tokens=3000)))
    for _ in range(3):
        await anext(stream)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
    files = list((tmp_path / "cache").rglob("*.safetensors"))
    assert len(files) >= 100 // 16


async def test_the_server_serves_the_model_with_its_adapter(tiny_model_dir, tmp_path):
    adapter = make_adapter(tmp_path / "adapter")
    texts = []
    for path in (None, adapter):
        settings = Settings(home=tmp_path, model=str(tiny_model_dir), adapter_path=path)
        pool = server._make_pool(settings)
        await pool.start()
        texts.append(await ask(await pool.get("tiny"), request(30)))
        assert [model.name for model in pool.models()] == ["tiny"]
        await pool.stop(5.0)
    assert texts[0] != texts[1]


async def test_blocks_in_ram_expire_on_an_idle_server_without_files(tiny_model_dir, tmp_path):
    async with running(tiny_model_dir, tmp_path, cache_ttl=1) as pool:
        await ask(await pool.get("tiny"), request(60))
        figures = (await pool.cache_figures())["models"]["tiny"]
        assert figures["saves"] and not figures["blocks_cold"]
        async with asyncio.timeout(60):
            while (await pool.cache_figures())["models"]["tiny"]["blocks_hot"]:
                await asyncio.sleep(0.01)
