"""The public `openai` client drives a real server: over a fake engine, and over the real one with a tiny model."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from omlx.api.chat import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import served

KEY = "s3cret"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to ten, please. " * 4}]


@dataclass
class Served:
    client: OpenAI
    address: str
    model: str
    context_length: int

    def chat(self, **options) -> ChatCompletion:
        options = {"model": self.model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0} | options
        return self.client.chat.completions.create(**options)

    def complete(self, prompt, **options):
        options = {"model": self.model, "max_tokens": 24, "temperature": 0} | options
        return self.client.completions.create(prompt=prompt, **options)


def fake_pool(settings: Settings) -> EnginePool:
    return FakePool(FakeEngine(token_s=0.001))


def real_pool(settings: Settings) -> EnginePool:
    # Only here: loading MLX takes longer than all tests of the fake one.
    from omlx.engine.pool import EnginePool as RealPool  # noqa: PLC0415

    config = dataclasses.replace(settings.scheduler_config(), max_concurrent_requests=2, max_waiting_requests=0)
    return RealPool(config, settings.home, settings.model)


@pytest.fixture(scope="module", params=["fake", "real"])
def server(request, tmp_path_factory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    model = str(request.getfixturevalue("tiny_model_dir")) if request.param == "real" else None
    settings = Settings(home=home, model=model, api_key=KEY, max_kv_cache_memory="1GB", hot_cache_max_size="64MB")
    pool = real_pool(settings) if request.param == "real" else fake_pool(settings)
    with served(create_app(pool, settings)) as address:
        client = OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60)
        with client:
            first = client.models.list().data[0]
            yield Served(client, address, first.id, first.context_length)


def test_models_can_be_listed_and_looked_up(server):
    assert server.model in [model.id for model in server.client.models.list()]
    found = server.client.models.retrieve(server.model)
    assert found.object == "model"
    assert found.context_length == server.context_length > 0


def test_a_stream_says_the_same_as_the_whole_answer(server):
    whole = server.chat(extra_body={"cache": False})
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}, extra_body={"cache": False}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_completion_stream_says_the_same_as_the_whole_answer(server):
    whole = server.complete("one two three", logprobs=2)
    chunks = list(server.complete("one two three", logprobs=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    columns = whole.choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.text_offset) > 0
    streamed = [value for chunk in chunks for value in (chunk.choices[0].logprobs or columns.__class__()).tokens or []]
    assert streamed == columns.tokens


def test_token_ids_are_a_prompt_too(server):
    answer = server.complete([5, 6, 7], max_tokens=3)
    assert answer.usage.prompt_tokens == 3
    assert 1 <= answer.usage.completion_tokens <= 3


def test_logprobs_belong_to_the_tokens_of_the_text(server):
    choice = server.chat(logprobs=True, top_logprobs=3).choices[0]
    data = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert data.decode(errors="ignore").startswith(choice.message.content.rstrip("\ufffd"))
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0


def test_max_tokens_ends_an_answer(server):
    answer = server.chat(max_tokens=2, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
    answer = server.chat(max_completion_tokens=1, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 1


def test_a_stop_string_is_not_part_of_the_text(server):
    text = server.complete("a b c").choices[0].text
    stop = text[len(text) // 2 :][:2]
    assert stop
    for stream in (False, True):
        answer = server.complete("a b c", stop=[stop], stream=stream)
        parts = [answer] if not stream else list(answer)
        assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text(server):
    texts = {server.chat(temperature=1, seed=5, top_p=0.9).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


def test_errors_have_their_classes_and_name_the_field(server):
    with pytest.raises(openai.BadRequestError) as bad:
        server.chat(temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        server.complete([1] * server.context_length)
    assert long.value.code == "context_length_exceeded"
    assert str(server.context_length) in long.value.message
    with pytest.raises(openai.BadRequestError) as tools:
        server.chat(tools=[{"type": "function", "function": {}}])
    assert tools.value.param == "tools[0].function.name"
    with pytest.raises(openai.NotFoundError) as unknown:
        server.chat(model="nobody/knows")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        list(server.chat(stream=True, seed="x"))


def test_a_wrong_key_is_an_authentication_error(server):
    with OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"


def test_a_stream_that_is_closed_early_leaves_the_server_well(server):
    with server.chat(stream=True, max_tokens=1500, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert server.chat(max_tokens=3).usage.completion_tokens <= 3


@pytest.mark.parametrize("server", ["real"], indirect=True)
def test_a_repeated_prompt_comes_from_the_cache(server):
    prompt = list(range(20, 100))  # no other test begins with these
    cold = server.complete(prompt, max_tokens=8)
    warm = server.complete(prompt, max_tokens=8)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 79
    assert warm.choices[0].text == cold.choices[0].text
    without = server.complete(prompt, max_tokens=8, extra_body={"cache": False})
    assert without.usage.prompt_tokens_details.cached_tokens == 0
    salted = server.complete(prompt, max_tokens=8, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("server", ["real"], indirect=True)
def test_a_full_server_says_so_and_when_to_come_back(server):
    long = {"stream": True, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with server.chat(**long) as one, server.chat(**long) as two:
        next(iter(one))
        next(iter(two))
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as full:
                server.chat(stream=stream)
            assert full.value.status_code == 503
            assert int(full.value.response.headers["retry-after"]) > 0
