"""What templates make of tools and calls decides how a conversation is written for them."""

import pytest

from omlx.model.template_habits import habits_of
from tests.api.serving import chat
from tests.small_tokenizers import with_marks

TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}<tool_call>"
CALLS = "{% for call in m.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}"
FIRST = "{% if m.tool_calls %}[{{ m.tool_calls[0].function.arguments | tojson }}]{% endif %}"
REFUSES = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"


def template(call: str, tools: str = TOOLS) -> str:
    return f"{tools}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{call}{{% endfor %}}"


@pytest.mark.parametrize(
    ("text", "tools", "calls", "several"),
    [
        (template(CALLS), True, True, True),
        (template(FIRST), True, True, False),
        (template(REFUSES + CALLS), True, True, False),
        (template(""), True, False, True),
        (template(CALLS, "{% if false %}{{ tools }}{% endif %}<tool_call>"), False, False, True),
    ],
)
def test_a_template_is_tried(text, tools, calls, several):
    habits = habits_of(with_marks(text))
    assert (habits.tools, habits.calls, habits.several_calls) == (tools, calls, several)


@pytest.mark.parametrize("call", [FIRST, REFUSES + CALLS])
def test_calls_of_one_message_get_messages_of_their_own_where_the_template_writes_one(app, engine, call):
    engine.tokenizer = with_marks(template(call))
    engine.vocab_size = len(engine.tokenizer)
    calls = [
        {"id": name, "type": "function", "function": {"name": "now", "arguments": f'{{"at": "{name}"}}'}}
        for name in ("a", "b")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ("b", "a")]
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I look.", "tool_calls": calls}, *results,
        {"role": "user", "content": "so?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    answer = chat(app, messages=messages, tools=tools)
    assert answer.status_code == 200, answer.text
    assert engine.tokenizer.decode(engine.seen[-1].prompt).endswith(
        '<user>hi<assistant>I look.[{"at": "a"}]<tool>result a<assistant>[{"at": "b"}]<tool>result b<user>so?'
    )
