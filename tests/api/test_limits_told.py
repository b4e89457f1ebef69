"""Limits as they are enforced: context length, queue; and the shape of errors by path."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from omlx.api import chat
from omlx.server import create_app
from omlx.settings import Settings
from tests.admin.test_routes import Bench, serving
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import CHAT, COMPLETION, call


@pytest.fixture
def limited() -> dict[str, Any]:
    """Room for fewer tokens than the tiny model's 4,096."""
    return {"max_kv_cache_memory": "512KB"}


async def enforced(bench: Bench) -> int:
    listed = (await bench.get("/v1/models"))["data"][0]
    shown = await bench.get("/v1/models/tiny")
    assert listed == shown and listed["context_length"] == listed["max_model_len"]
    found: int = shown["context_length"]
    return found


async def test_the_context_length_shown_is_the_one_enforced(
    tiny_model_dir: Path, tmp_path: Path, limited: dict[str, Any]
) -> None:
    async with serving(tmp_path, tiny_model_dir, **limited) as bench:
        length = await enforced(bench)
        assert 256 <= length < 4096
        body = {"model": "tiny", "prompt": [7] * (length - 2), "max_tokens": 2, "ignore_eos": True}
        assert (await bench.call("POST", "/v1/completions", json=body)).status_code == 200
        answer = await bench.call("POST", "/v1/completions", json=body | {"max_tokens": 3})
        assert answer.json()["usage"]["total_tokens"] == length
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        answer = await bench.call("POST", "/v1/completions", json=body | {"prompt": [7] * length})
        assert answer.status_code == 400
        assert f"but this model's maximum context length is {length} tokens" in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("characters", [5_000, 500_000])
async def test_an_over_long_prompt_is_a_400_with_both_numbers_everywhere(
    tiny_model_dir: Path, tmp_path: Path, limited: dict[str, Any], stream: bool, characters: int
) -> None:
    text = "x" * characters
    async with serving(tmp_path, tiny_model_dir, **limited) as bench:
        length = await enforced(bench)
        bodies = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
            "/v1/completions": {"prompt": text},
        }
        for path, body in bodies.items():
            answer = await bench.call("POST", path, json={"model": "tiny", "stream": stream} | body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == next(iter(body))
            assert f" {length} tokens" in error["message"] or f"of {length} tokens" in error["message"]
            numbers = [int(word) for word in error["message"].split() if word.isdecimal()]
            assert max(numbers) >= characters


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_503_that_says_when_to_come_again(
    tiny_model_dir: Path, tmp_path: Path, stream: bool
) -> None:
    options = {"max_concurrent_requests": 1, "max_waiting_requests": 1}
    async with serving(tmp_path, tiny_model_dir, **options) as bench:
        long = {"model": "tiny", "prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
        running = [asyncio.create_task(bench.call("POST", "/v1/completions", json=long)) for _ in range(2)]
        while (await bench.get())["total"]["running_requests"] < 1:
            await asyncio.sleep(0.01)
        messages = CHAT | {"max_tokens": 5}
        bodies = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/messages": messages}
        for path, body in bodies.items():
            answer = await bench.call("POST", path, json=body | {"stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
            assert "overloaded" in (error["type"] if path == "/v1/messages" else error["code"])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def test_errors_have_the_shape_of_their_paths_dialect(tmp_path: Path) -> None:
    app = create_app(FakePool(), Settings(home=tmp_path, api_key="s3cret"))
    key = {"x-api-key": "s3cret"}

    def kind(path: str, headers: dict[str, str]) -> Any:
        body = call(app, "POST", path, headers=headers).json()
        assert set(body) == {"type", "error", "request_id"}
        return body["error"]["type"]

    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/none"):
        assert kind(path, {}) == "authentication_error"
        assert kind(path, key) == ("not_found_error" if path.endswith("none") else "invalid_request_error")
        assert kind(path, key | {"x-long": "x" * 40_000}) == "invalid_request_error"
    for path in ("/v1/messagesx", "/v1", "/x/v1/messages"):
        for headers in ({}, key):
            assert set(call(app, "POST", path, headers=headers).json()) == {"error", "request_id"}


@pytest.mark.parametrize("characters", [5_000, 5_010, 100_000])
def test_a_text_of_far_too_many_tokens_is_counted_up_to_twice_the_context_only(
    app: FastAPI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    monkeypatch.setattr(chat, "_UNCOUNTED", 1000)
    monkeypatch.setattr(chat, "_PIECE", 100)
    monkeypatch.setattr(FakeEngine, "longest_token", 1000, raising=False)
    encoded: list[int] = []
    encode = engine.tokenizer.encode

    def counting(text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", counting)
    error = call(app, "POST", "/v1/completions", json={"model": "tiny", "prompt": "x" * characters}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert str(engine.context_length) in error["message"]
    assert max(encoded) == 100 and sum(encoded) <= 2 * engine.context_length + characters // 100 + 200


def test_a_long_text_of_few_tokens_is_tokenized_as_a_whole(
    app: FastAPI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "tiny", "prompt": "abc " * 300}
    assert call(app, "POST", "/v1/completions", json=body).status_code == 200
    monkeypatch.setattr(chat, "_UNCOUNTED", 10)
    monkeypatch.setattr(chat, "_PIECE", 7)
    monkeypatch.setattr(FakeEngine, "context_length", 1201, raising=False)
    assert call(app, "POST", "/v1/completions", json=body).status_code == 200
    assert engine.seen[0].prompt == engine.seen[1].prompt


def test_tools_that_cannot_fit_are_refused_before_they_are_written(app: FastAPI, engine: FakeEngine) -> None:
    most = engine.context_length * engine.longest_token
    tools = [{"type": "function", "function": {"name": f"f{k}", "description": "x" * (most // 4)}} for k in range(5)]
    error = call(app, "POST", "/v1/chat/completions", json=CHAT | {"tools": tools}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "tools")
    assert str(engine.context_length) in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
def test_messages_that_cannot_fit_are_refused_before_a_template_copies_them(
    app: FastAPI, engine: FakeEngine, path: str
) -> None:
    engine.tokenizer.chat_template = "a template that shows nothing of them"
    text = "漢" * (engine.context_length * engine.longest_token // 2)
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "tiny", field: [{"role": "user", "content": text}] * 3}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    answer = call(app, "POST", path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert answer.json().get("type") == "error" or error["param"] == field
    assert re.search(rf"{field}: \d+ characters are more", error["message"])
