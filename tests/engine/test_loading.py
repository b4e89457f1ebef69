"""What others see while a model is loaded. The load is held up by an event, so that nothing depends on speed."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import mlx.nn as nn
import pytest

from omlx.api import sse
from omlx.engine import pool as pool_module
from omlx.engine.pool import EnginePool
from omlx.errors import ModelError
from omlx.model import steps
from omlx.model.steps import LOADING, elsewhere
from omlx.model.vlm_loader import load_any
from omlx.request import Request, SamplingParams, TokenOutput
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import served
from tests.engine.test_broken_folders import client_of


class SlowLoad:
    """The real loader, which waits for `go` first, 1.1 of 3.7 GB done."""

    def __init__(self) -> None:
        self.go, self.begun, self.count, self.fails = threading.Event(), threading.Event(), 0, False
        self.seen: Callable[[], bool] = lambda: True  # the load takes empty steps until then

    def __call__(self, path, name, adapter, records, progress):
        if name == "other":
            return (yield from load_any(path, name, adapter, records, progress))
        self.count += 1
        progress(LOADING, 1_200_000_000, 4_000_000_000)
        self.begun.set()
        assert (yield from elsewhere(self.go.wait, 60))
        while not self.seen():
            yield None
        if self.fails:
            raise ModelError("no good")
        return (yield from load_any(path, name, adapter, records, progress))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLoad]:
    load = SlowLoad()
    monkeypatch.setattr(pool_module, "load_any", load)
    monkeypatch.setattr(sse, "ACCEPT_S", 0.01)
    yield load
    load.go.set()


@pytest.fixture
def home(tiny_model_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("tiny", "other"):
        (tmp_path / "models" / name).symlink_to(tiny_model_dir)
    return tmp_path


BODY = {"model": "tiny", "max_tokens": 2, "stream": True}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_streaming_client_gets_comments_and_then_its_answer(path, more, fails, slow: SlowLoad, home: Path) -> None:
    slow.fails = fails
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    with served(create_app(pool, Settings(home=home))) as address, httpx.Client(base_url=address, timeout=60) as client:
        with client.stream("POST", path, json=BODY | more) as answer:
            lines = answer.iter_lines()
            assert answer.status_code == 200
            assert next(lines).startswith(": loading")
            assert slow.begun.wait(60)
            ready = client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "loading", "loading": ["tiny"]})
            assert client.get("/health").status_code == 200
            slow.go.set()
            rest = "\n".join(lines)
        assert ("cannot be loaded" in rest) is fails
        assert fails or "[DONE]" in rest or "message_stop" in rest
        assert client.get("/ready").json() == {"status": "ready"}


async def test_a_client_that_goes_away_does_not_lose_the_load_for_others(slow: SlowLoad, home: Path) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        first, second = asyncio.create_task(pool.get("tiny")), asyncio.create_task(pool.get("tiny"))
        await asyncio.to_thread(slow.begun.wait, 60)
        assert pool.loading() == {"tiny": "1.1 GB of 3.7 GB"}
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        slow.go.set()
        engine = await second
        assert await pool.get("tiny") is engine and slow.count == 1 and pool.loading() == {}
    finally:
        await pool.stop(5.0)


async def test_a_load_whose_only_client_went_away_is_kept(slow: SlowLoad, home: Path) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        only = asyncio.create_task(pool.get("tiny"))
        await asyncio.to_thread(slow.begun.wait, 60)
        only.cancel()
        await asyncio.gather(only, return_exceptions=True)
        slow.go.set()
        await pool.get("tiny")
        assert slow.count == 1
    finally:
        await pool.stop(5.0)


def asked(tokens: int) -> Request:
    return Request("a", list(range(5, 40)), SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))


async def test_streams_of_other_models_go_on_while_one_is_loaded(slow: SlowLoad, home: Path) -> None:
    """While the load waits for a file or the like, and between its steps on the MLX thread."""
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        other = await pool.get("other")
        received: list[TokenOutput] = []
        slow.seen = lambda: len(received) > 40
        loading = asyncio.create_task(pool.get("tiny"))
        await asyncio.to_thread(slow.begun.wait, 60)
        received += [output async for output in other.generate(asked(20))]
        assert len(received) == 20 and not loading.done()
        slow.go.set()
        received += [output async for output in other.generate(asked(20))]
        assert len(received) == 40 and not loading.done()
        async for output in other.generate(asked(20)):
            received.append(output)
        assert (await loading).name == "tiny" and len(received) == 60
    finally:
        await pool.stop(5.0)


async def test_the_list_of_models_says_which_is_being_loaded(slow: SlowLoad, home: Path) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        async with client_of(pool, home) as client:

            async def status() -> dict[str, str]:
                listed = (await client.get("/v1/models")).json()["data"]
                return {entry["id"]: entry["status"] for entry in listed}

            assert await status() == {"other": "not loaded", "tiny": "not loaded"}
            loading = asyncio.create_task(pool.get("tiny"))
            await asyncio.to_thread(slow.begun.wait, 60)
            assert await status() == {"other": "not loaded", "tiny": "loading"}
            slow.go.set()
            await loading
            assert await status() == {"other": "not loaded", "tiny": "loaded"}
    finally:
        await pool.stop(5.0)


async def test_a_server_stops_while_a_load_waits(slow: SlowLoad, home: Path) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    loading = asyncio.create_task(pool.get("tiny"))
    await asyncio.to_thread(slow.begun.wait, 60)
    await pool.stop(5.0)
    assert not await pool.ready()  # the thread has ended
    with pytest.raises(asyncio.CancelledError):
        await loading


async def test_a_step_that_fails_leaves_the_other_models_as_they_are(slow: SlowLoad, home: Path) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16), home)
    await pool.start()
    try:
        other = await pool.get("other")
        slow.fails = True
        slow.go.set()
        with pytest.raises(ModelError, match="no good"):
            await pool.get("tiny")
        assert len([output async for output in other.generate(asked(3))]) == 3
    finally:
        await pool.stop(5.0)


def test_weights_are_evaluated_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_STEP_BYTES", 4000)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9)))  # 1,024 bytes each
    reports: list[tuple[int, int | None]] = []
    work = steps.evaluate(model, lambda stage, done, total: reports.append((done, total)))
    assert len(list(work)) == 3
    assert reports == [(4096, 9216), (8192, 9216), (9216, 9216)]
