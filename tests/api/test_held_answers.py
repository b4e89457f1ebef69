"""Answers that are held to their form over the real engine and HTTP, streamed and whole."""

import json

import pytest

from tests.api.grammar_openai import read_chat, same_as_whole
from tests.api.test_real_answers import Server, serving, user

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "sex": {"enum": ["f", "m", None]}},
    "required": ["name", "sex"],
    "additionalProperties": False,
}
FREE = {"temperature": 1, "max_tokens": 400, "ignore_eos": False}


@pytest.fixture
async def server(tmp_path):
    async with serving(tmp_path) as found:
        yield found


def as_schema(schema, *, strict):
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}


def check_calls(message, names):
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert arguments["city"] in ("Bonn", "Rome") and 1 <= arguments["days"] <= 9 and len(arguments) == 2
        else:
            assert arguments == {}


@pytest.mark.parametrize("seed", range(3))
async def test_a_random_model_calls_tools_as_it_has_to(server: Server, seed):
    for choice, names in (
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        fields = FREE | {"tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        body = await server.chat(user("hi"), **fields)
        message = body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "tool_calls" and not message["content"]
        check_calls(message, names)
        stream = await server.post("/v1/chat/completions", messages=[user("hi")], stream=True, **fields)
        same_as_whole(read_chat(stream.text), body)


@pytest.mark.parametrize("strict", [True, False])
async def test_a_random_model_writes_json(server: Server, strict):
    body = await server.chat(user("who?"), **FREE, response_format=as_schema(PERSON, strict=strict), seed=1, n=2)
    for choice in body["choices"]:
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"name", "sex"} and found["sex"] in ("f", "m", None)
        assert choice["finish_reason"] == "stop"


async def test_json_that_the_limit_cuts_says_so(server: Server):
    fields = FREE | {"max_tokens": 4}
    body = await server.chat(user("who?"), **fields, response_format={"type": "json_object"})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_strict_schema_that_cannot_be_enforced_is_refused_by_its_field(server: Server, stream):
    unique = {"type": "array", "uniqueItems": True}
    strict_tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": unique}, "required": ["a"], "additionalProperties": False}}}  # fmt: skip
    for fields, field in (
        ({"response_format": as_schema(unique, strict=True)}, "response_format"),
        ({"response_format": as_schema(False, strict=True)}, "response_format"),
        ({"tools": [strict_tool], "tool_choice": "required"}, "tools"),
    ):
        response = await server.post("/v1/chat/completions", messages=[user("hi")], stream=stream, **fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
    body = await server.chat(user("hi"), **FREE, response_format=as_schema(unique, strict=False))
    assert body["choices"][0]["message"]["content"].startswith("[")


@pytest.mark.parametrize(
    ("parameters", "strict", "says"),
    [
        ({"type": "array"}, False, "f: the parameters of a function have to be of type"),
        ({"properties": {"a": 5}}, True, "(f): schema.properties: a schema has to be an object"),
    ],
)
async def test_a_tool_that_can_never_be_called_well_is_named(server: Server, parameters, strict, says):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
    response = await server.post(
        "/v1/chat/completions", messages=[user("hi")], tools=[NOW, tool], tool_choice="required"
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools") and says in error["message"]


async def test_an_argument_may_be_required_without_being_described(server: Server):
    inner = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    outer = {"type": "object", "properties": {"inner": inner}, "required": ["inner", "more"]}
    fields = FREE | {"tools": [{"type": "function", "function": {"name": "f", "parameters": outer}}], "max_tokens": 100}
    body = await server.chat(user("hi"), **fields, tool_choice="required", parallel_tool_calls=False)
    written = body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert written.startswith(('{"inner": {"x": true}, "more": ', '{"inner": {"x": false}, "more": '))


async def test_the_starter_model_calls_tools_as_it_has_to(starter_model_dir, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "starter").symlink_to(starter_model_dir)
    async with serving(tmp_path) as server:
        fields = FREE | {"max_tokens": 400, "temperature": 0}
        question = user("How will the weather be in Rome for the next three days?")
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            body = await server.chat(question, **fields, model="starter", tools=[WEATHER, NOW], tool_choice=choice)
            assert body["choices"][0]["finish_reason"] == "tool_calls"
            check_calls(body["choices"][0]["message"], {"get_weather", "now"})
