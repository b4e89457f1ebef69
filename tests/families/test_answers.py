"""What models of each family write is taken apart over HTTP: streamed and whole, in all three dialects."""

import json

import pytest

from omlx.server import create_app
from omlx.settings import Settings
from tests.api import grammar_anthropic, grammar_openai, grammar_responses
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import call
from tests.families import zoo
from tests.families.answers import CITIES, FAMILIES, NAME, OTHERS, THOUGHT, Scripted

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EXPECTED = [(NAME, {"city": city}) for city in CITIES]
USER = [{"role": "user", "content": "Is it raining in Köln and Bonn?"}]


def app_of(scripted: Scripted, tmp_path, reply: str | None = None):
    engine = FakeEngine(reply=scripted.answer if reply is None else reply, context_length=8000)
    engine.tokenizer = scripted.tokenizer()
    engine.vocab_size = len(engine.tokenizer)
    return create_app(FakePool(engine), Settings(home=tmp_path))


def ask(app, path: str, body: dict) -> tuple[dict, str]:
    """The whole answer, and the streamed one."""
    whole, stream = (call(app, "POST", path, json=body | {"model": "tiny", "stream": on}) for on in (False, True))
    assert whole.status_code == stream.status_code == 200, whole.text
    return whole.json(), stream.text


def chat(app, **fields) -> tuple[str, str | None, list]:
    """Reasoning, text and calls of a chat completion, which were the same streamed."""
    tools = [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}]
    whole, stream = ask(app, "/v1/chat/completions", {"messages": USER, "tools": tools} | fields)
    grammar_openai.same_as_whole(grammar_openai.read_chat(stream), whole)
    message = whole["choices"][0]["message"]
    calls = [item["function"] for item in message.get("tool_calls") or []]
    assert whole["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    return (
        message.get("reasoning_content") or "",
        message["content"],
        [(item["name"], json.loads(item["arguments"])) for item in calls],
    )


def responses(app) -> tuple[str, str | None, list]:
    tools = [{"type": "function", "name": NAME, "parameters": PARAMETERS}]
    whole, stream = ask(app, "/v1/responses", {"input": USER, "tools": tools})
    grammar_responses.same_as_whole(grammar_responses.read_response(stream), whole)
    items = whole["output"]
    thoughts = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    return "".join(thoughts), "".join(texts) or None, calls


def messages(app) -> tuple[str, str | None, list]:
    tools = [{"name": NAME, "input_schema": PARAMETERS}]
    body = {"messages": USER, "tools": tools, "max_tokens": 2000}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole, stream = ask(app, "/v1/messages", body)
    grammar_anthropic.same_as_whole(grammar_anthropic.read(stream), whole)
    blocks = whole["content"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return (
        "".join(thoughts),
        "".join(texts) or None,
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
    )


def test_every_family_of_the_table_has_an_answer():
    assert set(FAMILIES) == set(zoo.CONFIGS)


@pytest.mark.parametrize("dialect", [chat, responses, messages])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_thinks_and_calls(family, dialect, tmp_path):
    scripted = FAMILIES[family]
    assert dialect(app_of(scripted, tmp_path)) == (THOUGHT if scripted.thinks else "", None, EXPECTED)


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_read(name, tmp_path):
    scripted = OTHERS[name]
    assert chat(app_of(scripted, tmp_path)) == (THOUGHT if scripted.thinks else "", None, EXPECTED)


@pytest.mark.parametrize(
    ("family", "reply", "reasoning", "text"),
    [
        ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Rain.", "hm",
         "Rain."),
        ("gpt_oss", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Rain.",
         "", "I look.Rain."),
        ("gpt_oss", "Rain.", "", "Rain."),
        ("gpt_oss", "<|channel|>commentary to=functions.get_weather<|message|>{oops<|call|>", "", "{oops"),
        ("cohere2", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Rain.<|END_RESPONSE|>", "hm", "Rain."),
        ("llama", '{"rain": true}', "", '{"rain": true}'),
        ("llama", '{"name": "Ada", "parameters": {}}', "", '{"name": "Ada", "parameters": {}}'),
        ("llama4", "[1, 2]", "", "[1, 2]"),
        ("falcon_h1", "A thought stands between <think> and </think>.", "",
         "A thought stands between <think> and </think>."),
        ("falcon_h1", "<think>It ends with `</think>`, I think.</think>Yes.", "It ends with `</think>`, I think.",
         "Yes."),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(family, reply, reasoning, text, tmp_path):
    assert chat(app_of(FAMILIES[family], tmp_path, reply)) == (reasoning, text, [])
