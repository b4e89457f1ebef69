"""What an agent does with the public `openai` client: chats, streams, tools, structured output, errors."""

import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import served
from tests.small_tokenizers import with_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    '<think>two cities</think>\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
ANSWER = "<think>both wet</think>Rain 🌧 in both."


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def agent() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    return engine


@pytest.fixture
def client(agent, tmp_path) -> Iterator[OpenAI]:
    with (
        served(create_app(FakePool(agent), Settings(home=tmp_path))) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_tools_round_trip(client, agent, stream):
    agent.replies = (CALLS, ANSWER)
    messages: list = [{"role": "user", "content": "Is it raining in Köln and Bonn?"}]
    options = {"model": "tiny", "tools": [WEATHER], "messages": messages}
    message = ask(client, stream, **options)
    assert message.content == "I look."
    assert message.reasoning_content == "two cities"
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls]
    assert cities == ["Köln", "Bonn"]
    messages.append(message.model_dump(exclude_none=True))
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": f"rain in {json.loads(call.function.arguments)['city']}"}
        for call in message.tool_calls
    ]
    message = ask(client, stream, **options)
    assert (message.content, message.tool_calls) == ("Rain 🌧 in both.", None)
    prompt = agent.tokenizer.decode(agent.seen[1].prompt)
    assert prompt.endswith("<tool>rain in Köln(get_weather)\n<tool>rain in Bonn(get_weather)\n<assistant>")
    # The first answer is there as it was generated, but for its reasoning, which this template leaves out.
    assert CALLS.split("</think>\n")[1] in prompt


def ask(client: OpenAI, stream: bool, **options):
    """The message, by the client's own accumulation where it is streamed."""
    if not stream:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as events:
        kinds = {event.type for event in events}
        found = events.get_final_completion().choices[0]
    assert "chunk" in kinds
    assert found.finish_reason == ("tool_calls" if found.message.tool_calls else "stop")
    return found.message


def test_structured_output_is_parsed(client, agent):
    agent.reply = '{"name": "Ada", "age": 36}'
    found = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "Ada?"}], response_format=Person
    )
    assert found.choices[0].message.parsed == Person(name="Ada", age=36)
    grammar = agent.seen[0].sampling.grammar
    assert grammar is not None and '"age"' in grammar.text


def test_a_function_is_named_and_parsed(client, agent):
    agent.reply = CALLS.split("\n", 2)[2].split("\n<tool_call>")[0]
    found = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Köln?"}],
        tools=[openai.pydantic_function_tool(Person), WEATHER | {"function": WEATHER["function"] | {"strict": True}}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    (call,) = found.choices[0].message.tool_calls
    assert call.function.parsed_arguments == {"city": "Köln"}
    grammar = agent.seen[0].sampling.grammar
    assert grammar is not None and "get_weather" in grammar.text and "Person" not in grammar.text


def test_choices_prompts_and_echo(client, agent):
    agent.replies = ("one", "two", "three")
    found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], n=2)
    assert [choice.message.content for choice in found.choices] == ["one", "two"]
    agent.seen.clear()
    texts = client.completions.create(model="tiny", prompt=["a", "b"], echo=True).choices
    assert [choice.text for choice in texts] == ["aone", "btwo"]


def test_usage_is_the_same_streamed_and_not(client, agent):
    agent.reply = CALLS
    options = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [WEATHER]}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("two cities")


def test_errors_name_the_field(client, agent):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for fields, param in (
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"n": 500}, "n"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                client.chat.completions.create(**asked, **fields, stream=stream)
            assert error.value.param == param
