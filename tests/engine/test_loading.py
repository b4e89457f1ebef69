"""What others see while a model is loaded. The load is held up by an event, so that nothing depends on speed."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omlx.api import sse
from omlx.engine import pool as pool_module
from omlx.engine.pool import EnginePool
from omlx.errors import ModelError
from omlx.model.vlm_loader import load_any
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import served


class SlowLoad:
    """The real loader, which waits for `go` first, 1.1 of 3.7 GB done."""

    def __init__(self) -> None:
        self.go, self.begun, self.count, self.fails = threading.Event(), threading.Event(), 0, False

    def __call__(self, path, name, adapter, records, progress):
        self.count += 1
        progress("hashing weights", 1_200_000_000, 4_000_000_000)
        self.begun.set()
        assert self.go.wait(30)
        if self.fails:
            raise ModelError("no good")
        return load_any(path, name, adapter, records, progress)


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
    (tmp_path / "models" / "tiny").symlink_to(tiny_model_dir)
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
