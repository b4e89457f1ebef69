"""Whatever a client of the Anthropic dialect sends, it is told what is wrong with it; nothing is a 5xx."""

import json
from typing import Any

import pytest

from tests.api.serving import call
from tests.api.test_anthropic import NOW, USER, ask, image, message_of


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answered(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, USER]}


RESULT = {"type": "tool_result", "tool_use_id": "a"}
CALL = {"type": "tool_use", "id": "a", "name": "b"}
PICTURE = image(type="url", url="http://x")

# Blocks that are wrong, and where in the message.
BLOCKS = [
    (said("a"), "[0]"),
    (said({}), "[0]"),
    (said({"type": "text"}), "[0]"),
    (said({"type": "text", "text": "a"}, {"type": "text", "text": 5}), "[1]"),
    (said({"type": ["text"], "text": "a"}), "[0]"),
    (said({"type": "video"}), "[0]"),
    (said({"type": "image"}), "[0]"),
    (said(image(type="file", file_id="f")), "[0]"),
    (said({"type": "document", "source": {"type": "base64"}}), "[0]"),
    (said({"type": "search_result", "content": [5]}), "[0].content[0]"),
    (said({"type": "tool_result"}), "[0]"),
    (said(RESULT | {"content": 5}), "[0]"),
    (said(RESULT | {"is_error": 1}), "[0]"),
    (said(CALL | {"input": {}}), "[0]"),
    (answered({"type": "thinking"}), "[0]"),
    (answered(CALL | {"name": ""}), "[0]"),
    (answered(CALL | {"input": []}), "[0]"),
    (answered(CALL | {"id": 5}), "[0]"),
    ({"messages": [{"role": "system", "content": [PICTURE]}, USER]}, "[0]"),
]

WRONG = [
    *((fields, f"messages[0].content{place}") for fields, place in BLOCKS),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": ["a"]}, "system[0]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [NOW, NOW]}, "tools[1].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "always"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [NOW]}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "most"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"cache": "off"}, "cache"),
    ({"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "place"), WRONG, ids=lambda value: json.dumps(value)[:50])
def test_a_wrong_body_is_told_which_field_is_wrong(app, fields, place):
    message = message_of(ask(app, **fields), 400, "invalid_request_error")
    assert message.startswith((f"{place}: ", f"{place} ")), message


def test_the_error_for_a_tool_of_a_server_names_it(app):
    message = message_of(ask(app, tools=[{"type": "web_search_20250305", "name": "w"}]), 400, "invalid_request_error")
    assert "'web_search_20250305'" in message


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"max_tokens": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(app, body):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        message_of(call(app, "POST", path, content=body), 400, "invalid_request_error")
