"""Every answer, error and log line has the id of its request."""

import asyncio
import json
import logging
import re

import httpx
import pytest

from omlx.access.request_id import add_request_id
from omlx.errors import EngineError
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import CHAT, call, chat, served

MADE = re.compile(r"req_[0-9a-f]{24}")
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/responses": {"model": "tiny", "input": "hi"},
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine, tmp_path):
    return create_app(FakePool(engine), Settings(home=tmp_path))


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
def test_an_id_is_made_and_differs_each_time(app, path):
    ids = {call(app, "GET", path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(map(MADE.fullmatch, ids))


def test_the_clients_own_is_taken(app):
    response = call(app, "GET", "/health", headers={"x-request-id": "trace-7/b:1"})
    assert response.headers["x-request-id"] == "trace-7/b:1"


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "a\tb", "naïve"])
def test_what_would_spoil_a_log_line_is_replaced(app, sent):
    response = call(app, "GET", "/health", headers={"x-request-id": sent.encode()})
    assert MADE.fullmatch(response.headers["x-request-id"])


@pytest.mark.parametrize("path", BODIES)
def test_a_refusal_names_it(app, path):
    response = call(app, "POST", path, json=BODIES[path] | {"model": "none"}, headers={"x-request-id": "mine"})
    assert response.status_code == 404
    assert response.json()["request_id"] == response.headers["x-request-id"] == "mine"


def test_an_unexpected_error_names_it(app, engine):
    engine.failure = RuntimeError("never expected")
    response = chat(app)
    assert response.status_code == 500
    assert MADE.fullmatch(response.headers["x-request-id"])
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_an_error_in_a_stream_names_it(app, engine):
    engine.failure, engine.fail_after = EngineError("it broke"), 3
    response = call(app, "POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers={"x-request-id": "mine"})
    last = response.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["request_id"] == "mine"


def test_log_lines_carry_it(app, caplog):
    seen: list[tuple[str, str]] = []

    def note(record: logging.LogRecord) -> bool:
        add_request_id(record)
        seen.append((record.name, record.request_id))  # type: ignore[attr-defined]
        return True

    caplog.set_level("INFO", "omlx")
    caplog.handler.addFilter(note)

    async def both() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await asyncio.gather(
                *(client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": name}) for name in ("a", "b"))
            )

    asyncio.run(both())
    caplog.handler.removeFilter(note)
    assert sorted(name for logger, name in seen if logger == "omlx.request") == ["a", "b"]


def test_what_is_refused_before_the_application_has_one(app):
    with served(app) as address, httpx.Client() as client:
        response = client.get(f"{address}/health", headers={"x-filler": "x" * 70_000})
    assert response.status_code >= 400
    assert MADE.fullmatch(response.headers["x-request-id"])
