"""Choices, templates and the probe over the real engine, with a tiny model."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.grammar_openai import read_chat, same_as_whole

# Leaves out the reasoning of past answers, as most do.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n<think>\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "You are an assistant who answers in few words. " * 4}


class Server:
    def __init__(self, app: Any, pool: EnginePool) -> None:
        self._app = app
        self.pool = pool

    async def post(self, path: str, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app, client=("127.0.0.1", 50_000), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.post(path, json={"model": "tiny"} | body)

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
        response = await self.post("/v1/chat/completions", messages=messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def probe(self, *messages: dict[str, Any]) -> dict[str, Any]:
        response = await self.post("/admin/cache_probe", messages=messages)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
async def server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """With the chat template that the test is parametrised with, if any."""
    async with serving(tmp_path, getattr(request, "param", None)) as found:
        yield found


@contextlib.asynccontextmanager
async def serving(home: Path, template: str | None = None) -> AsyncIterator[Server]:
    folder = make_tiny_model(home / "models" / "tiny")
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    settings = Settings(home=home, block_size=16, exact="on")
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    await pool.start()
    try:
        yield Server(create_app(pool, settings), pool)
    finally:
        await pool.stop(5.0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_choices_share_one_prefill_and_differ_by_their_seeds(server):
    body = await server.chat(SYSTEM, user("hi"), n=3, temperature=1, seed=5)
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    scheduler = (await server.pool.get("tiny")).scheduler
    prompt = body["usage"]["prompt_tokens"]
    # The last token of a prompt is computed for each of them.
    assert scheduler.stats.prefilled_tokens <= prompt + 2
    single = await server.chat(SYSTEM, user("hi"), temperature=1, seed=6)
    assert single["choices"][0]["message"]["content"] == texts[1]
    again = await server.post(
        "/v1/chat/completions", messages=[SYSTEM, user("hi")], n=3, temperature=1, seed=5, stream=True, max_tokens=12,
        ignore_eos=True,
    )  # fmt: skip
    same_as_whole(read_chat(again.text, choices=3), body)


async def test_a_changing_first_line_costs_all_behind_it_and_the_probe_says_where(server):
    def messages(day: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"Today is {day}.\n{SYSTEM['content']}"}, user("hi")]

    await server.chat(*messages("Monday"))
    assert (await server.probe(*messages("Monday")))["first_miss"] is None
    miss = (await server.probe(*messages("Friday")))["first_miss"]
    assert miss["reason"].startswith("differs from the nearest cached prompt at token ")
    at = int(miss["reason"].split()[-1])
    assert at == len("\nsystem\nToday is ")  # characters and marks are tokens here
    assert (miss["message"], miss["role"]) == (0, "system")
    assert "hint" not in miss
    # The rule: what changes goes to the end.
    late = [SYSTEM, user("Today is Monday. hi")], [SYSTEM, user("Today is Friday. hi")]
    await server.chat(*late[0])
    miss = (await server.probe(*late[1]))["first_miss"]
    assert (miss["message"], miss["role"]) == (1, "user")
    usage = (await server.chat(*late[1]))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(SYSTEM["content"]) // 64 * 64


@pytest.mark.parametrize("server", [FORGETFUL], indirect=True)
async def test_a_template_that_drops_reasoning_is_explained_and_the_rest_reused(server):
    first = [SYSTEM, user("hi")]
    body = await server.chat(*first, max_tokens=30)
    message = body["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]  # it never came to an end
    answer = {"role": "assistant", "content": "Hello."}
    second = [*first, answer, user("and now?")]
    found = await server.probe(*second)
    miss = found["first_miss"]
    assert (miss["message"], miss["role"]) == (2, "assistant")
    assert "reasoning" in miss["hint"]
    usage = (await server.chat(*second))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == found["cached_tokens"] > 0
    # All whole cells before the answer are reused.
    before = (await server.post("/tokenize", messages=first)).json()["count"] - len("<think>\n")
    assert found["cached_tokens"] >= before // 64 * 64


async def test_a_conversation_with_tools_keeps_its_prefix(server):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    first = [SYSTEM, user("what time is it?")]
    await server.chat(*first, tools=[tool])
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    second = [
        *first,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    shuffled = {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "now"}, "type": "function"}
    for tools in ([tool], [shuffled]):
        usage = (await server.chat(*second, tools=tools))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 64 * 5


async def test_closing_a_stream_of_several_choices_stops_them_all(server):
    engine = await server.pool.get("tiny")
    body = {"messages": [user("hi")], "n": 3, "stream": True, "max_tokens": 3000, "ignore_eos": True, "model": "tiny"}
    transport = httpx.ASGITransport(server._app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        async with asyncio.timeout(60):
            while len(engine._streams) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            while len(engine._streams) or engine.scheduler.has_work:
                await asyncio.sleep(0.01)
