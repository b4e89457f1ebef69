"""Keywords that cannot be enforced: left out and logged without `strict`, refused by name with it."""

import json
import logging
from typing import Any

import pytest

from omlx.api import constraints
from omlx.model.schema_trial import problems, relaxed
from tests.api.fakes import FakeEngine
from tests.api.serving import chat
from tests.small_tokenizers import with_tools

ODD: dict[str, Any] = {
    "ahead": {"type": "string", "pattern": "(?=a)b"},
    "back": {"type": "string", "pattern": r"(a)\1"},
    "word": {"type": "string", "pattern": r"\bx\b"},
    "long": {"type": "string", "minLength": 1.0},
    "large": {"type": "integer", "maximum": 1 << 60},
    "any": {"type": "any"},
    "types": {"type": ["string", "any"]},
    "elsewhere": {"$ref": "https://example.com/x"},
    "lost": {"$ref": "#/$defs/none"},
    "parity": {"type": "integer", "multipleOf": 0},
    "names": {"type": "object", "required": "x"},
    "open": {"type": "object", "patternProperties": {"(?=a)": {"type": "null"}}, "additionalProperties": False},
    "never": {"not": {"pattern": "(?=a)"}},
    "none": {"enum": []},
    "child": {"type": "array", "items": 5},
}


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    constraints._log_once.cache_clear()


@pytest.fixture
def agent(engine: FakeEngine) -> FakeEngine:
    """A model that knows tools."""
    engine.tokenizer = with_tools()
    engine.vocab_size = len(engine.tokenizer)
    return engine


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


@pytest.mark.parametrize("name", ODD)
def test_only_the_keyword_is_left_out(name: str) -> None:
    schema = {"type": "object", "properties": {"fine": {"type": "string", "pattern": "^a$"}, "odd": ODD[name]}}
    found = problems(schema)
    assert [problem.path[:2] for problem in found] == [("properties", "odd")]
    assert problems(relaxed(schema, found)) == []
    assert relaxed(schema, found)["properties"]["fine"] == schema["properties"]["fine"]


def test_a_pattern_of_names_that_is_left_out_leaves_its_object_open() -> None:
    found = problems(ODD["open"])
    assert relaxed(ODD["open"], found)["additionalProperties"] is True


def test_one_odd_keyword_of_many_tools(app, agent, caplog: pytest.LogCaptureFixture) -> None:
    tools = [tool("good", {"a": {"type": "integer"}}), tool("odd", ODD)]
    asked = {"tools": tools, "tool_choice": "required", "max_tokens": 20}
    with caplog.at_level(logging.WARNING):
        assert chat(app, **asked).status_code == 200
        lines = [record.getMessage() for record in caplog.records]
        assert any("tools[1] (odd)" in line and "properties.ahead.pattern" in line for line in lines)
        assert chat(app, **asked).status_code == 200
    assert [record.getMessage() for record in caplog.records] == lines


@pytest.mark.parametrize("name", ["ahead", "long", "large", "any", "elsewhere"])
def test_strict_names_tool_and_place(app, agent, name: str) -> None:
    tools = [tool("good", {}), tool("odd", {"x": ODD[name]}, strict=True)]
    answer = chat(app, tools=tools, tool_choice="required")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "tools[1] (odd)" in message and "properties.x." in message


def test_the_schema_of_an_answer(app) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert chat(app, response_format=form, max_tokens=20).status_code == 200
    form["json_schema"]["strict"] = True
    answer = chat(app, response_format=form)
    assert answer.status_code == 400 and "schema.properties.x.pattern" in answer.json()["error"]["message"]
    assert json.dumps(schema) in json.dumps(form)
