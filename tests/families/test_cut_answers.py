"""An enforced call that `max_tokens` cuts is no call or has incomplete arguments, and the answer says so."""

import json

import pytest

from tests.api import grammar_anthropic, grammar_openai, grammar_responses
from tests.families.answers import FAMILIES, NAME, OTHERS
from tests.families.test_answers import EXPECTED, PARAMETERS, USER, app_of, ask

ANSWERS = {**FAMILIES, **OTHERS}
FUNCTION = {"name": NAME, "parameters": PARAMETERS}


def chat(app, limit: int) -> tuple[bool, list]:
    """Whether the answer says that it was cut, and its calls."""
    body = {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    whole, stream = ask(app, "/v1/chat/completions", body | {"max_tokens": limit})
    grammar_openai.same_as_whole(grammar_openai.read_chat(stream), whole)
    calls = [item["function"] for item in whole["choices"][0]["message"].get("tool_calls") or []]
    return whole["choices"][0]["finish_reason"] == "length", [(call["name"], call["arguments"]) for call in calls]


def responses(app, limit: int) -> tuple[bool, list]:
    body = {"input": USER, "tools": [FUNCTION | {"type": "function"}], "tool_choice": "required"}
    whole, stream = ask(app, "/v1/responses", body | {"max_output_tokens": limit})
    grammar_responses.same_as_whole(grammar_responses.read_response(stream), whole)
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    return whole["status"] == "incomplete", [(call["name"], call["arguments"]) for call in calls]


def messages(app, limit: int) -> tuple[bool, list]:
    body = {"messages": USER, "tools": [{"name": NAME, "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
    whole, stream = ask(app, "/v1/messages", body | {"max_tokens": limit})
    streamed = grammar_anthropic.read(stream)
    for block in streamed.message["content"]:
        if block["type"] == "tool_use":  # as its text, which may be incomplete
            block["input"] = _loaded(block["input"])
    grammar_anthropic.same_as_whole(streamed, whole)
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    return whole["stop_reason"] == "max_tokens", [(call["name"], json.dumps(call["input"])) for call in calls]


def _loaded(text) -> dict:
    """The arguments, {} for incomplete ones."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return {}


@pytest.mark.parametrize("dialect", [chat, responses, messages])
@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_a_cut_answer_says_so_and_has_no_call_that_was_not_written(name, dialect, tmp_path):
    app = app_of(ANSWERS[name], tmp_path)
    length = len(ANSWERS[name].tokenizer().encode(ANSWERS[name].answer, add_special_tokens=False))
    expected = [(called, json.dumps(arguments)) for called, arguments in EXPECTED]
    for limit in sorted({max(1, length * part // 5) for part in range(2, 5)} | {length - 1}):
        cut, calls = dialect(app, limit)
        assert cut, limit
        for (called, arguments), (right, whole) in zip(calls, expected, strict=False):
            assert called == right
            assert arguments == whole or _loaded(arguments) == {} or json.loads(arguments) == json.loads(whole)
