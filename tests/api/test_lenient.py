"""Values that mean no harm are read as what they stand for, in each dialect."""

import json
from typing import Any

import mlx.core as mx
import pytest

from omlx.model.sampling import make_sampler
from omlx.request import SamplingParams
from tests.api.serving import call

SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASES: dict[str, dict[str, Any]] = {
    CHAT: SAID,
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: SAID | {"max_tokens": 5},
}
LIMITS = {
    CHAT: "max_completion_tokens",
    COMPLETIONS: "max_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
FUNCTION = {"type": "object", "properties": {}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": {"name": "now"}}],
    RESPONSES: [{"type": "function", "name": "now"}],
    MESSAGES: [{"name": "now", "input_schema": FUNCTION}],
}


def seen(app, engine, path: str, fields: dict[str, Any]):
    """What reaches the engine."""
    engine.seen.clear()
    response = call(app, "POST", path, json={"model": "tiny"} | BASES[path] | fields)
    assert response.status_code == 200, response.text
    return [(request.prompt, request.sampling) for request in engine.seen]


@pytest.mark.parametrize("path", sorted(BASES))
def test_a_float_without_a_fraction_is_an_integer(app, engine, path):
    usual = {LIMITS[path]: 8, "seed": 7, "top_k": 4}
    assert seen(app, engine, path, {name: float(value) for name, value in usual.items()}) == seen(
        app, engine, path, usual
    )
    for wrong in (8.5, True, 1e300):
        body = {"model": "tiny"} | BASES[path] | {LIMITS[path]: wrong}
        assert call(app, "POST", path, json=body).status_code == 400


def test_token_ids_may_be_floats(app, engine):
    for floats, usual in (([1.0, 2], [1, 2]), ([[1.0], [2.0]], [[1], [2]])):
        assert seen(app, engine, COMPLETIONS, {"prompt": floats}) == seen(app, engine, COMPLETIONS, {"prompt": usual})
    assert call(app, "POST", "/detokenize", json={"model": "tiny", "tokens": [1.0]}).status_code == 200


@pytest.mark.parametrize("path", sorted(BASES))
def test_minus_one_is_as_many_tokens_as_fit(app, engine, path):
    for value in (-1, -1.0):
        ((prompt, sampling),) = seen(app, engine, path, {LIMITS[path]: value})
        assert len(prompt) + sampling.max_tokens == engine.context_length
    assert call(app, "POST", path, json={"model": "tiny"} | BASES[path] | {LIMITS[path]: -2}).status_code == 400


@pytest.mark.parametrize("path", sorted(BASES))
def test_an_empty_stop_stops_nothing(app, engine, path):
    name = "stop_sequences" if path == MESSAGES else "stop"
    for value in ("", [], [""], None):
        ((_, sampling),) = seen(app, engine, path, {name: value})
        assert sampling.stop == ()
    ((_, sampling),) = seen(app, engine, path, {name: ["", "x"]})
    assert sampling.stop == ("x",)


@pytest.mark.parametrize("top_p", [0.0, 1e-30, 1e-9])
def test_top_p_0_is_the_most_likely_token(top_p):
    logprobs = mx.log(mx.array([[0.2, 0.5, 0.3]]))
    sample = make_sampler(SamplingParams(max_tokens=1, top_p=top_p), 3, seed=1)
    assert {int(sample(logprobs).item()) for _ in range(50)} == {1}


@pytest.mark.parametrize("path", sorted(BASES))
def test_top_p_0_is_taken(app, engine, path):
    ((_, sampling),) = seen(app, engine, path, {"top_p": 0})
    assert sampling.top_p == 0


def messages_with(role: str, content: Any, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"role": role} | ({} if content is Ellipsis else {"content": content}) | more
    return {"messages": [*SAID["messages"], said, *SAID["messages"]]}


@pytest.mark.parametrize("content", [None, [], ...], ids=["null", "[]", "missing"])
def test_messages_of_the_assistant_and_of_tools_may_be_empty(app, engine, content):
    for path in (CHAT, MESSAGES):
        assert seen(app, engine, path, messages_with("assistant", content)) == seen(
            app, engine, path, messages_with("assistant", "")
        )
    call_of = {"tool_call_id": "c"}
    assert seen(app, engine, CHAT, messages_with("tool", content, **call_of)) == seen(
        app, engine, CHAT, messages_with("tool", "", **call_of)
    )
    given = {} if content is Ellipsis else {"content": content}
    output = {} if content is Ellipsis else {"output": content}

    def items(content: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
        answered = {"role": "assistant"} | content
        called = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
        return {"input": [answered, called, {"type": "function_call_output", "call_id": "c"} | output]}

    assert seen(app, engine, RESPONSES, items(given, output)) == seen(
        app, engine, RESPONSES, items({"content": ""}, {"output": ""})
    )


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("content", [None, []])
def test_a_message_of_the_user_may_not(app, path, content):
    body = {"model": "tiny", "max_tokens": 5} | messages_with("user", content)
    response = call(app, "POST", path, json=body)
    assert response.status_code == 400
    assert "messages[1].content" in response.text


@pytest.mark.parametrize("path", sorted(TOOLS))
@pytest.mark.parametrize(
    ("usual", "spellings"),
    [
        ("auto", ["auto", {"type": "auto"}]),
        ("none", ["none", {"type": "none"}]),
        ("required", ["any", "required", {"type": "any"}, {"type": "required"}]),
        (
            "now",
            [
                {"type": "function", "name": "now"},
                {"type": "function", "function": {"name": "now"}},
                {"type": "tool", "name": "now"},
            ],
        ),
    ],
)
def test_a_tool_choice_is_understood_in_any_dialects_spelling(app, engine, path, usual, spellings):
    native = {
        CHAT: {"now": {"type": "function", "function": {"name": "now"}}}.get(usual, usual),
        RESPONSES: {"now": {"type": "function", "name": "now"}}.get(usual, usual),
        MESSAGES: {"now": {"type": "tool", "name": "now"}, "required": {"type": "any"}}.get(usual, {"type": usual}),
    }[path]
    expected = seen(app, engine, path, {"tools": TOOLS[path], "tool_choice": native})
    for spelling in spellings:
        assert seen(app, engine, path, {"tools": TOOLS[path], "tool_choice": spelling}) == expected
    for wrong in ("always", {"type": "always"}, {"type": "function"}, {"type": "tool", "name": 5}, 5, [], {"type": []}):
        body = {"model": "tiny"} | BASES[path] | {"tools": TOOLS[path], "tool_choice": wrong}
        assert call(app, "POST", path, json=body).status_code == 400


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", ""])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_text_part_may_have_any_dialects_type(app, engine, path, role, kind):
    field = "input" if path == RESPONSES else "messages"

    def said(content: Any) -> dict[str, Any]:
        return {field: [{"role": role, "content": content}, {"role": "user", "content": "hi"}]}

    assert seen(app, engine, path, said([{"type": kind, "text": "a"}])) == seen(app, engine, path, said("a"))


def test_an_empty_type_is_as_good_as_none(app, engine):
    called = {"id": "c", "type": "", "function": {"name": "now", "arguments": "{}"}}
    past = messages_with("assistant", "", tool_calls=[called])
    usual = messages_with("assistant", "", tool_calls=[called | {"type": "function"}])
    assert seen(app, engine, CHAT, past) == seen(app, engine, CHAT, usual)
    for path, tools in TOOLS.items():
        assert seen(app, engine, path, {"tools": [tools[0] | {"type": ""}]}) == seen(
            app, engine, path, {"tools": tools}
        )
    assert seen(app, engine, CHAT, {"response_format": {"type": ""}}) == seen(app, engine, CHAT, {})
    item = {"type": "", "role": "user", "content": "hi"}
    assert seen(app, engine, RESPONSES, {"input": [item]}) == seen(app, engine, RESPONSES, {})


@pytest.mark.parametrize("path", sorted(BASES))
def test_a_byte_order_mark_is_skipped(app, path):
    body = b"\xef\xbb\xbf" + json.dumps({"model": "tiny"} | BASES[path]).encode()
    assert call(app, "POST", path, content=body).status_code == 200
