"""Whatever a client sends, it is told what is wrong with it; nothing is a 5xx."""

import json

import pytest

from tests.api.serving import CHAT, COMPLETION, call

MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}

# Fields of both endpoints, and the `param` that the error names.
BOTH = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "x" * 501}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x", None]}, "stop[1]"),
    ({"stop": "x" * 1001}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"cache": "off"}, "cache"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 81}, "n"),
    ({"n": True}, "n"),
    ({"n": "x"}, "n"),
]

CHAT_ONLY = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [MESSAGE, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": ["x"], "text": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}]}, "messages[0].reasoning_content"),
    ({"messages": [MESSAGE | {"name": 5}]}, "messages[0].name"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "mcp", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": "x"}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"response_format": 5}, "response_format"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}, "chat_template_kwargs"),
]

COMPLETION_ONLY = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 81}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5] * 1000}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [10**12]}, "prompt[0]"),
    ({"prompt": [999_999]}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
]

NO_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"5",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}',
    # Taken for infinity, they would be no JSON in an answer that repeats them, or where a response is kept.
    *(
        b'{"model": "tiny", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "metadata":'
        b' null, "tool_choice": {"type": "function", "name": "f", "function": {"name": "f"}, "x": ' + huge + b"}}"
        for huge in (b"1e999", b"-1.5E+400", b"9" * 400 + b".0", b"[1e0999]")
    ),
]


def check(response, param=None):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
        assert param.split("[")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), [*BOTH, *CHAT_ONLY], ids=lambda value: json.dumps(value)[:50])
def test_a_wrong_chat_body_is_told_which_field_is_wrong(app, fields, param):
    check(call(app, "POST", "/v1/chat/completions", json=CHAT | fields), param)


@pytest.mark.parametrize(("fields", "param"), [*BOTH, *COMPLETION_ONLY], ids=lambda value: json.dumps(value)[:50])
def test_a_wrong_completion_body_is_told_which_field_is_wrong(app, fields, param):
    check(call(app, "POST", "/v1/completions", json=COMPLETION | fields), param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: repr(body[:30]))
def test_a_body_that_is_no_json_object_is_refused(app, path, body):
    check(call(app, "POST", path, content=body))


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_what_was_expected_and_repeats_no_text(app, stream):
    bodies = [CHAT | {"stop": 5, "stream": stream}, CHAT | {"messages": [{"role": "private words"}], "stream": stream}]
    stop, role = (call(app, "POST", "/v1/chat/completions", json=body).json()["error"]["message"] for body in bodies)
    assert stop == "stop: input should be a valid string, or input should be a valid list"
    assert "private words" not in role


def test_there_are_so_many_messages_at_most(app):
    response = call(app, "POST", "/v1/chat/completions", json=CHAT | {"messages": [MESSAGE] * 20_001})
    check(response, "messages")
    assert "at most 20000 items" in response.json()["error"]["message"]


def test_numbers_that_only_look_huge_are_taken(app):
    for number in (b"1e308", b"1e000", b"0." + b"0" * 400 + b"1", b"1e-999", b'"a [1e999"'):
        body = b'{"model": "tiny", "prompt": "hi", "x": [' + number + b"]}"
        assert call(app, "POST", "/v1/completions", content=body).status_code == 200


def test_odd_text_is_only_text(app):
    for text in ("\0", "\u2028", "<eos>", "{{ 7*7 }}", "{% raise %}", "﷽" * 100, "a\r\nb"):
        messages = [{"role": "user", "content": text}]
        assert call(app, "POST", "/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200


def test_odd_template_arguments_are_the_clients_fault(app, engine):
    engine.tokenizer.chat_template = "{{ style.upper() + (1 / style | length) | string + messages[0].content[9] }}"
    for style in (5, [], {}, None, "", "x", [[1]], True):
        body = CHAT | {"chat_template_kwargs": {"style": style}}
        assert call(app, "POST", "/v1/chat/completions", json=body).status_code == 400
