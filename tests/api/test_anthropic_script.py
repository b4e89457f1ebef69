"""What an agent does with the public `anthropic` client: chats, streams, tools, images, structured output, errors."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from pydantic import BaseModel

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import served
from tests.api.test_pictures import png
from tests.small_tokenizers import with_tools

WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = (
    '<think>two cities</think>\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
ANSWER = "<think>both wet</think>Rain 🌧 in both."


class Person(BaseModel):
    name: str
    age: int


# ---- with answers made to order


@pytest.fixture
def agent() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    return engine


@pytest.fixture
def client(agent: FakeEngine, tmp_path: Path) -> Iterator[Anthropic]:
    with (
        served(create_app(FakePool(agent), Settings(home=tmp_path))) as address,
        Anthropic(base_url=address, api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def ask(client: Anthropic, stream: bool, **options: Any) -> Any:
    """The message, by the client's own accumulation where it is streamed."""
    options = {"model": "tiny", "max_tokens": 500} | options
    if not stream:
        return client.messages.create(**options)
    with client.messages.stream(**options) as events:
        kinds = [event.type for event in events]
        found = events.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_round_trip(client: Anthropic, agent: FakeEngine, stream: bool) -> None:
    agent.replies = (CALLS, ANSWER)
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Köln and Bonn?"}]
    message = ask(client, stream, tools=[WEATHER], messages=messages)
    thought, said, *calls = message.content
    assert (thought.thinking, said.text, message.stop_reason) == ("two cities", "I look.", "tool_use")
    assert [call.input for call in calls] == [{"city": "Köln"}, {"city": "Bonn"}]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"rain in {call.input['city']}"} for call in calls
    ]
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    message = ask(client, stream, tools=[WEATHER], messages=messages)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[1].text, message.stop_reason) == ("Rain 🌧 in both.", "end_turn")
    prompt = agent.tokenizer.decode(agent.seen[1].prompt)
    assert prompt.endswith("<tool>rain in Köln(get_weather)\n<tool>rain in Bonn(get_weather)\n<assistant>")
    # The first answer is there as it was generated, but for its reasoning, which this template leaves out.
    assert CALLS.split("</think>\n")[1] in prompt


def test_structured_output_is_parsed(client: Anthropic, agent: FakeEngine) -> None:
    agent.reply = '{"name": "Ada", "age": 36}'
    asked: Any = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Ada?"}]}
    assert client.messages.parse(**asked, output_format=Person).parsed_output == Person(name="Ada", age=36)
    grammar = agent.seen[0].sampling.grammar
    assert grammar is not None and '"age"' in grammar.text


def test_pings_are_passed_over(client: Anthropic, agent: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omlx.api.sse.ACCEPT_S", 0.01)
    monkeypatch.setattr("omlx.api.sse.SILENCE_S", 0.01)
    agent.prefill_s, agent.cached_tokens = 0.2, 3
    message = ask(client, True, messages=[{"role": "user", "content": "a"}])
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens == len(agent.seen[0].prompt) - 3


# ---- with a real engine and a tiny model


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    make_tiny_model(home / "models" / "tiny")
    settings = Settings(home=home, block_size=16, api_key="s3cret", admin_key="0perator")
    with served(create_app(EnginePool(settings.scheduler_config(), settings.home), settings)) as url:
        yield url


@pytest.fixture(scope="module")
def real(address: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=address, api_key="s3cret", max_retries=0, timeout=60) as made:
        yield made


def short(text: str, **fields: Any) -> dict[str, Any]:
    extra = {"temperature": 0, "seed": 1}
    return {"max_tokens": 8, "messages": [{"role": "user", "content": text}], "extra_body": extra} | fields


def test_a_chat_is_the_same_streamed_and_not_also_from_the_cache(real: Anthropic) -> None:
    asked = short("What is a cache good for? " * 8, system=[{"type": "text", "text": "You know much. " * 8}])
    cold = ask(real, False, **asked)
    prompt = cold.usage.input_tokens
    assert cold.usage.cache_read_input_tokens == 0
    for stream in (True, False):
        warm = ask(real, stream, **asked)
        assert (warm.content[0].text, warm.stop_reason) == (cold.content[0].text, cold.stop_reason)
        usage = warm.usage
        assert usage.cache_read_input_tokens > prompt // 2
        read = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert (usage.input_tokens + read, usage.output_tokens) == (prompt, cold.usage.output_tokens)
    counted = {name: asked[name] for name in ("messages", "system")}
    assert real.messages.count_tokens(model="tiny", **counted).input_tokens == prompt


def test_the_cache_can_be_asked_about_a_message(real: Anthropic, address: str) -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    words = [line, {"type": "text", "text": "You are patient. " * 8}]
    usage = ask(real, False, **short("Why? " * 20, system=words, extra_body={"cache_salt": "a"})).usage

    def probe(*system: dict[str, str], text: str = "Why? " * 20, **fields: Any) -> Any:
        body = {"dialect": "anthropic", "model": "tiny", "system": system, "cache_salt": "a"} | fields
        asked = body | {"messages": [{"role": "user", "content": text}]}
        key = {"x-api-key": "0perator"}
        return httpx.post(f"{address}/admin/cache_probe", json=asked, headers=key).raise_for_status().json()

    same = probe({"type": "text", "text": "x-anthropic-billing-header: cch=2;"}, words[1])
    assert same["tokens"] == usage.input_tokens
    assert same["cached_tokens"] >= same["tokens"] - 1
    other = probe(*words, text="Because. " * 20)["first_miss"]
    assert (other["message"], other["role"]) == (1, "user")
    assert probe(*words, cache_salt="b")["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_to_be_made_is_a_valid_one(real: Anthropic, stream: bool) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    tool = WEATHER | {"input_schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}}
    message = ask(real, stream, **short("Weather?", tools=[tool], tool_choice=choice, max_tokens=200))
    (call,) = message.content
    assert (call.name, message.stop_reason) == ("get_weather", "tool_use")
    assert call.input in ({"ok": True}, {"ok": False})


def test_models_are_listed(real: Anthropic) -> None:
    assert [model.id for model in real.models.list()] == ["tiny"]
    shown = real.models.retrieve("tiny")
    assert (shown.type, shown.display_name) == ("model", "tiny")
    assert shown.max_input_tokens == 4096


def test_errors_are_those_of_the_client(real: Anthropic, address: str) -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(4)).decode()}
    seeing = [{"role": "user", "content": [{"type": "image", "source": picture}]}]
    too_long = [{"role": "user", "content": "x " * 6000}]
    for fields, place in (
        ({"messages": seeing}, "messages[0].content[0]: model 'tiny' takes no images"),
        ({"messages": too_long}, "prompt is too long: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"temperature": 5}}, "temperature"),
    ):
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as error:
                ask(real, stream, **(short("a") | fields))
            assert error.value.body["error"]["message"].startswith(place)
    with pytest.raises(anthropic.NotFoundError):
        ask(real, False, **short("a", model="none"))
    stranger = real.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        ask(stranger, False, **short("a"))
    with Anthropic(base_url=address, auth_token="s3cret", max_retries=0) as bearer:
        assert json.loads(ask(bearer, False, **short("a")).model_dump_json())["role"] == "assistant"
