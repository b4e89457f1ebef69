"""What an agent does with `client.responses` of the public `openai` client, over HTTP."""

import json
from collections.abc import Iterator
from typing import Annotated

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from pydantic import BaseModel, Field

from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.testing import make_tiny_model
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import served
from tests.small_tokenizers import with_tools

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
# What agents on the command line send along with every request.
AGENT = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "tools": [WEATHER, PATCH, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198c0de",
    "text": {"verbosity": "low"},
}
CALLS = (
    '<think>two cities</think>\nI look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}'
    '\n</tool_call>\n<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
)
ANSWER = "<think>both wet</think>Rain 🌧 in both."


class Person(BaseModel):
    name: Annotated[str, Field(max_length=9)]
    age: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def pool() -> FakePool:
    return FakePool()


@pytest.fixture(scope="module")
def client(pool, tmp_path_factory) -> Iterator[OpenAI]:
    with (
        served(create_app(pool, Settings(home=tmp_path_factory.mktemp("home")))) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


@pytest.fixture
def agent(pool) -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    pool.engines = {"tiny": engine}
    return engine


def ask(client: OpenAI, stream: bool, **options) -> Response:
    """The response, by the client's own accumulation where it is streamed."""
    if not stream:
        return client.responses.create(**options)
    with client.responses.stream(**options) as events:
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(numbers)
        return events.get_final_response()


def outputs_of(response: Response) -> list[dict]:
    outputs = []
    for item in response.output:
        if item.type == "function_call":
            city = json.loads(item.arguments)["city"]
            outputs.append({"type": "function_call_output", "call_id": item.call_id, "output": f"rain in {city}"})
        elif item.type == "custom_tool_call":
            assert item.input == "*** Begin"
            outputs.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"})
    return outputs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_makes_a_tools_round_trip(client, agent, stream, stored):
    agent.replies = (CALLS, ANSWER)
    items: list = [{"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]}]
    response = ask(client, stream, **AGENT, input=items, store=stored)
    kinds = ["reasoning", "message", "function_call", "custom_tool_call"]
    assert [item.type for item in response.output] == kinds
    assert response.output[0].content[0].text == "two cities"
    assert response.output_text == "I look."
    if stored:
        follow = {"input": outputs_of(response), "previous_response_id": response.id}
    else:  # the agent keeps the conversation itself, as it got it
        follow = {"input": [*items, *(item.to_dict() for item in response.output), *outputs_of(response)]}
    response = ask(client, stream, **AGENT, **follow, store=stored)
    assert response.output_text == "Rain 🌧 in both."
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    prompt = agent.tokenizer.decode(agent.seen[1].prompt)
    assert prompt.endswith("<tool>rain in Köln(get_weather)\n<tool>done(apply_patch)\n<assistant>")
    assert CALLS.split("</think>\n")[1] in prompt
    assert prompt.startswith(agent.tokenizer.decode(agent.seen[0].prompt))


def test_responses_are_what_the_client_takes_them_for(client, agent):
    agent.reply = CALLS
    response = client.responses.create(**AGENT, input="Is it raining?", metadata={"run": "7"}, top_logprobs=2)
    # Strictly: the client itself takes whatever comes.
    assert Response.model_validate(response.to_dict()).status == "completed"
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_items_can_be_listed_and_responses_deleted(client, agent):
    agent.reply = "ok"
    first = client.responses.create(model="tiny", input="one")
    second = client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))  # page by page
    assert [item.content[0].text for item in listed] == ["one", "ok", "two"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="tiny", input="three", previous_response_id=second.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")


def test_errors_have_their_classes(client, agent):
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="tiny", input="hi", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input="hi")
    agent.failure, agent.fail_after = RuntimeError("secret"), 2
    events = list(client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.error.code == "server_error" and "secret" not in events[-1].response.error.message


# ---- over the real engine


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[OpenAI]:
    home = tmp_path_factory.mktemp("real")
    make_tiny_model(home / "models" / "tiny")
    settings = Settings(home=home, block_size=16, hot_cache_max_size="64MB")
    pool = EnginePool(settings.scheduler_config(), settings.home, settings.model)
    with (
        served(create_app(pool, settings)) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as made,
    ):
        yield made


def test_a_conversation_finds_its_earlier_turns_in_the_cache(real):
    options = {"model": "tiny", "instructions": "Be brief, and say nothing twice.", "max_output_tokens": 20}
    response = real.responses.create(input="Count to ten, please.", **options, temperature=0)
    assert response.usage.input_tokens_details.cached_tokens == 0
    for turn in range(3):
        before = response.usage
        response = real.responses.create(
            input=f"And on, turn {turn}.", previous_response_id=response.id, **options, temperature=0
        )
        usage = response.usage
        # All that was there, but for the answer's last tokens: a text may be made of other tokens than it was.
        assert before.input_tokens <= usage.input_tokens_details.cached_tokens + 16
        assert usage.input_tokens_details.cached_tokens > before.input_tokens_details.cached_tokens
        written = usage.input_tokens_details.cache_write_tokens
        assert written == usage.input_tokens - usage.input_tokens_details.cached_tokens


def test_structured_output_is_parsed(real):
    options = {"model": "tiny", "input": "Who is it?", "text_format": Person, "max_output_tokens": 900}
    options |= {"temperature": 1, "extra_body": {"seed": 1}}
    person = real.responses.parse(**options).output_parsed
    assert isinstance(person, Person)
    with real.responses.stream(**options) as events:
        response = events.get_final_response()
    assert isinstance(response.output_parsed, Person)


def test_a_tool_that_has_to_be_called_is_called_as_its_schema_says(real):
    tool = openai.pydantic_function_tool(Person)["function"] | {"type": "function"}
    options = {"model": "tiny", "input": "Who is it?", "tools": [tool], "tool_choice": "required", "temperature": 1}
    options |= {"parallel_tool_calls": False, "max_output_tokens": 900, "extra_body": {"seed": 1}}
    for stream in (False, True):
        response = ask(real, stream, **options)
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert Person.model_validate_json(call.arguments)
