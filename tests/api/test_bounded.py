"""Every list and object of every request body has a largest size, and one error in it is enough."""

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import create_model

from omlx.admin.routes import AnyClearBody
from omlx.api import bounded
from omlx.api.anthropic_body import CountBody, MessagesBody
from omlx.api.embeddings import EmbeddingsBody, RerankBody
from omlx.api.openai_body import Body, ChatBody, CompletionBody, validated
from omlx.api.responses.body import ResponsesBody
from omlx.api.tokens import DetokenizeBody, TokenizeBody
from omlx.errors import BadRequest
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakePool
from tests.api.serving import CHAT, call

ROUTES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/admin/cache_probe": AnyClearBody,
}
CONTAINERS = ["list", "set", "frozenset", "tuple", "dict", "generator"]  # a field may be called "type": not hashed


def bodies(model: type[Body] = Body) -> Iterator[type[Body]]:
    for made in model.__subclasses__():
        yield made
        yield from bodies(made)


def checks_any(schema: dict[str, Any]) -> bool:
    """Whether this schema is one of the checks that bound a value of any shape."""
    function = schema.get("function", {}).get("function")
    return schema.get("type") == "function-after" and (
        isinstance(function, bounded.Within) or function is bounded._deferred
    )


def unbounded(schema: Any, path: str, inside_check: bool = False) -> Iterator[str]:
    """Where a core schema takes as many values as a client sends."""
    if isinstance(schema, list | tuple):
        for index, item in enumerate(schema):
            yield from unbounded(item, f"{path}[{index}]", inside_check)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in CONTAINERS and not (schema.get("max_length") and schema.get("fail_fast")):
        yield f"{path}: a {kind} needs bounded.at_most"
    if kind == "any" and not inside_check:
        yield f"{path}: Any needs bounded.Within"
    inside = inside_check or checks_any(schema)
    for name, member in schema.items():
        if name not in ("metadata", "cls", "ref", "function", "config"):
            yield from unbounded(member, f"{path}.{name}", inside)


def test_every_container_of_every_body_is_bounded() -> None:
    models = set(bodies())
    assert models >= set(ROUTES.values())
    found = [place for model in models for place in unbounded(model.__pydantic_core_schema__, model.__name__)]
    assert found == []


@pytest.mark.parametrize("annotation", [list[int], dict[str, int], Any, dict[str, Any], set[str], "list[int] | None"])
def test_the_walk_finds_what_is_not(annotation: Any) -> None:
    made = create_model("Made", field=(annotation, None))
    assert list(unbounded(made.__pydantic_core_schema__, "made"))


WRONG = [1] * 200_000
LONG = {
    ChatBody: [
        {"messages": [{"role": "user", "content": WRONG}]},
        {"messages": WRONG},
        {"messages": [{"role": "assistant", "tool_calls": WRONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": WRONG}}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": WRONG}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]},
        {"logit_bias": dict.fromkeys(map(str, range(200_000)), 1)},
        {"logit_bias": dict.fromkeys(map(str, range(200_000)), "x")},
        {"stop": WRONG},
        {"tools": WRONG},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": WRONG}}}]},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": WRONG}}},
        {"chat_template_kwargs": {"x": WRONG}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": WRONG}}}},
    ],
    CompletionBody: [{"prompt": [[1]] * 100_000}, {"prompt": ["a"] * 100_000}, {"prompt": [None] * 100_000}],
    MessagesBody: [
        {"messages": [{"role": "user", "content": WRONG}]},
        {"system": WRONG},
        {"tools": [{"name": "f", "input_schema": {"x": WRONG}}]},
        {"stop_sequences": WRONG},
    ],
    ResponsesBody: [
        {"input": [{"role": "user", "content": WRONG}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": WRONG}]},
        {"input": [{"type": "reasoning", "content": WRONG}]},
        {"include": WRONG},
        {"include": ["web_search_call.results"] * 100_000},
        {"metadata": dict.fromkeys(map(str, range(100_000)), 1)},
        {"tools": [{"type": "namespace", "name": "n", "tools": WRONG}]},
    ],
    EmbeddingsBody: [{"input": [None] * 100_000}, {"input": ["a"] * 100_000}],
    RerankBody: [{"documents": WRONG}, {"documents": ["a"] * 100_000}],
}
BASES: dict[type[Body], dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: {"model": "tiny", "prompt": "hi"},
    MessagesBody: CHAT | {"max_tokens": 5},
    ResponsesBody: {"model": "tiny", "input": "hi"},
    EmbeddingsBody: {"model": "tiny", "input": "hi"},
    RerankBody: {"model": "tiny", "query": "a", "documents": ["a"]},
}


@pytest.mark.parametrize(
    ("model", "fields"),
    [(model, fields) for model, all_fields in LONG.items() for fields in all_fields],
    ids=lambda value: value.__name__ if isinstance(value, type) else json.dumps(value)[:60],
)
def test_a_long_container_costs_little_and_is_named(model: type[Body], fields: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest) as refused:
            validated(model, BASES[model] | fields, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (refused.value.param or "").startswith(next(iter(fields)))
    assert peak < 16 << 20  # one error each would be 100 MB


@pytest.mark.parametrize("path", ["/tokenize", "/admin/cache_probe"])
def test_deferred_fields_are_checked_by_the_dialect(tmp_path: Any, path: str) -> None:
    app = create_app(FakePool(), Settings(home=tmp_path))
    for fields in ({"messages": WRONG}, {"messages": CHAT["messages"], "chat_template_kwargs": {"x": WRONG}}):
        response = call(app, "POST", path, json={"model": "tiny"} | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(list(fields)[-1])


def test_a_value_is_bounded_in_members_characters_and_levels() -> None:
    within = bounded.Within(members=4, characters=10, levels=2)
    for value in ({}, [1, 2, 3, 4], {"a": [1], "b": [2]}, "x" * 10, {"abcde": "abcde"}, None):
        assert within(value) is value
    for value in ([1, 2, 3, 4, 5], {"a": [1, 2], "b": [3]}, "x" * 11, {"abcde": "abcdef"}, {"a" * 11: 1}, [[[1]]]):
        with pytest.raises(ValueError):
            within(value)
