"""Marks count where the model meant them: over HTTP, with a model whose answer is a chosen text."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omlx.api.answer_format import answer_format
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.grammar_anthropic import read
from tests.api.grammar_openai import read_chat, same_as_whole
from tests.api.serving import call
from tests.api.test_answer_parser import in_every_way
from tests.families.answers import FAMILIES, OTHERS, Scripted
from tests.small_tokenizers import with_marks

NAME = "say"
TEMPLATE = "{# <think></think><tool_call> #}{{ tools }}"
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ODD = "a </tool_call> b <tool_call> </think> <|im_end|> c"


class Spelling(FakeEngine):
    """Answers with texts and, where an item is a number, that token."""

    answer: tuple[str | int, ...] = ()

    def _answer(self, request) -> list[int]:
        tokens: list[int] = []
        for item in self.answer:
            # One character after the other: a mark in a text is then no token of its own.
            tokens += [item] if isinstance(item, int) else [id for char in item for id in self.tokenizer.encode(char)]
        return [*tokens, self.tokenizer.eos_token_id]


def engine_of(*, tokens: bool) -> Spelling:
    engine = Spelling()
    engine.tokenizer = with_marks(TEMPLATE, MARKS if tokens else ())
    engine.vocab_size = len(engine.tokenizer)
    return engine


def app_of(engine: FakeEngine, tmp_path):
    return create_app(FakePool(engine), Settings(home=tmp_path))


def chat(engine, tmp_path, **fields):
    """The choice, which was the same streamed."""
    app = app_of(engine, tmp_path)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    whole = call(app, "POST", "/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    stream = call(app, "POST", "/v1/chat/completions", json=body | {"stream": True})
    same_as_whole(read_chat(stream.text), whole.json())
    return whole.json()["choices"][0]


def tool(schema: dict) -> dict:
    return {"type": "function", "function": {"name": NAME, "parameters": schema}}


CONST = {"type": "object", "properties": {"text": {"const": ODD}}, "required": ["text"]}
BODY = f'\n{{"name": "{NAME}", "arguments": {{"text": "{ODD}"}}}}\n'


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_quotes_the_marks_is_whole(tokens, choice, tmp_path):
    engine = engine_of(tokens=tokens)
    engine.answer = marked(engine, "<tool_call>", BODY, "</tool_call>")
    found = chat(engine, tmp_path, tools=[tool(CONST)], tool_choice=choice)
    assert found["finish_reason"] == "tool_calls"
    (made,) = found["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"text": ODD}


def test_the_same_in_messages(tmp_path):
    engine = engine_of(tokens=False)
    engine.answer = (f"<tool_call>{BODY}</tool_call>",)
    body = {
        "model": "tiny", "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": NAME, "input_schema": CONST}], "tool_choice": {"type": "any"},
    }  # fmt: skip
    app = app_of(engine, tmp_path)
    assert call(app, "POST", "/v1/messages", json=body).json()["content"][0]["input"] == {"text": ODD}
    assert read(call(app, "POST", "/v1/messages", json=body | {"stream": True}).text).message["content"][0][
        "input"
    ] == {"text": ODD}


def marked(engine, *items: str) -> tuple[str | int, ...]:
    """Marks as tokens where the tokenizer has them."""
    added = engine.tokenizer.get_added_vocab()
    return tuple(added.get(item, item) for item in items)


def test_tokens_begin_and_end_thoughts_and_their_text_does_not(tmp_path):
    engine = engine_of(tokens=True)
    quoted = "Is </think> a mark? <tool_call> is."
    engine.answer = marked(engine, "<think>", quoted, "</think>", "It is: <think> and </think>.")
    message = chat(engine, tmp_path, tools=[tool({"type": "object"})])["message"]
    assert (message["reasoning_content"], message["content"]) == (quoted, "It is: <think> and </think>.")


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        (" \n<think>a</think>b", "a", "b"),
        ("Write <think> first, then </think>.", None, "Write <think> first, then </think>."),
        ("<think>It ends with `</think>`.</think>Yes.", "It ends with `</think>`.", "Yes."),
        ('"<think>" begins it', None, '"<think>" begins it'),
        ("The mark `<tool_call>` begins a call.", None, "The mark `<tool_call>` begins a call."),
    ],
)
def test_marks_that_are_plain_text(answer, reasoning, content, tmp_path):
    engine = engine_of(tokens=False)
    engine.answer = (answer,)
    message = chat(engine, tmp_path, tools=[tool({"type": "object"})])["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_an_enforced_call_that_ends_too_early_is_reported_as_cut(tmp_path):
    engine = engine_of(tokens=False)
    engine.answer = (f'<tool_call>\n{{"name": "{NAME}", "arguments": {{"text": "a ',)
    found = chat(engine, tmp_path, tools=[tool(CONST)], tool_choice="required")
    assert found["finish_reason"] == "length"


# ---- whatever comes, in whatever pieces

FORMATS = {
    name: answer_format(item.tokenizer(), item.prompt_end, [tool({})]) for name, item in {**FAMILIES, **OTHERS}.items()
}


def fragments(scripted: Scripted) -> st.SearchStrategy[str]:
    """Pieces of an answer of this format, and what may stand between them."""
    answer = scripted.answer
    cuts = st.tuples(st.integers(0, len(answer)), st.integers(1, 60)).map(lambda at: answer[at[0] : at[0] + at[1]])
    odd = st.sampled_from(['"', "`", "\n", "{", "}", "<", "a", *scripted.tokens, "<think>", "</think>", "</tool_call>"])
    return st.lists(st.one_of(cuts, odd, st.just(answer)), max_size=6).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_answer_is_read_the_same_in_any_pieces(name, data):
    scripted = {**FAMILIES, **OTHERS}[name]
    text = data.draw(fragments(scripted))
    in_every_way(FORMATS[name], text, cut=data.draw(st.booleans()), sizes=(1, 4, 30))
