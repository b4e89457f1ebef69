"""What is computed once stays computed, as a client sees it: real server, real sockets, a tiny model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.serving import served

TEXT = " ".join(str(n * n) for n in range(300))  # one token a character


class Client:
    """Talks to one server with one model."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        answer = await self._http.post("/v1/completions", json=body(prompt, **fields))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def figures(self) -> dict[str, Any]:
        return (await self._http.get("/admin/cache_probe")).json()["total"]

    async def until(self, condition: Any) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while not condition(figures := await self.figures()):
                await asyncio.sleep(0.005)
        return figures

    @contextlib.asynccontextmanager
    async def asking(self, prompt: Any) -> AsyncIterator[None]:
        """A request under way; leaving the block closes its connection."""
        sending = asyncio.create_task(self._http.post("/v1/completions", json=body(prompt)))
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough that a client can go away in mid-prompt."""
    return make_tiny_model(tmp_path_factory.mktemp("deep") / "tiny", layers=3)


@contextlib.asynccontextmanager
async def client(model: Path, home: Path, **options: Any) -> AsyncIterator[Client]:
    settings = Settings(home=home, model=str(model), **({"block_size": 64, "exact": "on"} | options))
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    with served(create_app(pool, settings)) as base:
        async with httpx.AsyncClient(base_url=base, timeout=60) as http:
            yield Client(http)


@pytest.mark.parametrize("exact", ["on", "off"])
async def test_a_client_that_goes_away_at_a_third_of_its_prompt_resumes_there(model, tmp_path, exact, monkeypatch):
    monkeypatch.setattr("omlx.scheduler._LONGEST_CHUNK", 8)  # else this model is done before the client is gone
    async with client(model, tmp_path, exact=exact) as asked:
        tokens = (await asked.complete(TEXT, cache=False))["usage"]["prompt_tokens"]
        before = (await asked.figures())["prefilled_tokens"]
        async with asked.asking(TEXT):
            await asked.until(lambda f: f["prefilled_tokens"] - before > 0.3 * tokens)
        figures = await asked.until(lambda f: not f["running_requests"])
        done = figures["prefilled_tokens"] - before
        assert 0.3 * tokens < done < 0.95 * tokens
        retry = await asked.complete(TEXT)
        assert cached(retry) == done
        assert (await asked.figures())["prefilled_tokens"] - before == tokens - 1
        again = await asked.complete(TEXT, cache=False)
        if exact == "on":
            assert retry["choices"] == again["choices"]


async def test_five_clients_with_one_new_document_compute_it_once(model, tmp_path):
    async with client(model, tmp_path) as asked:
        answers = await asyncio.gather(*(asked.complete(f"{TEXT} Question {n}?") for n in range(5)))
        figures = await asked.figures()
        assert figures["shared_prefills"] == 4
        own = sum(answer["usage"]["prompt_tokens"] - 1 - len(TEXT) for answer in answers)
        assert figures["prefilled_tokens"] <= len(TEXT) + own + 4 * 16
        assert sorted(map(cached, answers))[1:] == [len(TEXT + " Question ")] * 4
        alone = [await asked.complete(f"{TEXT} Question {n}?", cache=False) for n in range(5)]
        assert [a["choices"][0]["text"] for a in answers] == [a["choices"][0]["text"] for a in alone]
