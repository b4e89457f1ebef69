"""What a model thought comes back in the next prompt, where its template looks for it."""

import pytest

from omlx.model.chat_template import render
from omlx.model.template_habits import FREE, adapted, habits_of
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import call
from tests.small_tokenizers import with_marks

BEGIN = "{% for m in messages %}<{{ m.role }}>"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
HEAD = "{{ tools }}"


def field(name: str) -> str:
    thought = "{% if m.NAME %}[THINK]{{ m.NAME }}[/THINK]{% endif %}".replace("NAME", name)
    return HEAD + BEGIN + thought + "{{ m.content }}" + CALLS + END


PARTS = (
    HEAD + BEGIN + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}" + CALLS + END
)  # fmt: skip
# As gpt-oss's: a thought only before calls, which must not have a text as well.
BEFORE_CALLS = (
    HEAD + BEGIN + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.tool_calls and m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content }}" + CALLS + END
)
TEMPLATES = {
    "reasoning_content": field("reasoning_content"),
    "thinking": field("thinking"),
    "reasoning": field("reasoning"),
    "parts": PARTS,
}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": {}}}
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "9"}


def shown(tokenizer, messages, tools=()) -> str:
    return render(tokenizer, "m", adapted(messages, habits_of(tokenizer)).messages, {}, tools)


@pytest.mark.parametrize("place", sorted(TEMPLATES))
def test_the_next_prompt_goes_on_from_the_thought(place):
    tokenizer = with_marks(TEMPLATES[place])
    habits = habits_of(tokenizer)
    # The renderer itself gives `thinking` to a template that has it.
    assert habits.reasoning == (place if place != "thinking" else FREE.reasoning) and habits.reasoning_beside_text
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm\n {1}"}
    first = shown(tokenizer, [USER])
    assert shown(tokenizer, [USER, answer, USER]).startswith(f"{first}[THINK]Hm\n {{1}}[/THINK]Hello.<user>")
    calling = answer | {"content": "", "tool_calls": [CALL]}
    first = shown(tokenizer, [USER], [TOOL])
    second = shown(tokenizer, [USER, calling, RESULT], [TOOL])
    assert second.startswith(f"{first}[THINK]Hm\n {{1}}[/THINK]<tool_call>")
    both = answer | {"tool_calls": [CALL]}
    third = shown(tokenizer, [USER, calling, RESULT, both, RESULT], [TOOL])
    assert third.startswith(second + "[THINK]Hm\n {1}[/THINK]Hello.<tool_call>")
    # A message without a thought is as it was.
    assert adapted([USER, {"role": "assistant", "content": "a"}], habits).messages[1] == {
        "role": "assistant", "content": "a"
    }  # fmt: skip


def test_a_template_that_takes_a_thought_or_a_text_beside_calls_gets_one():
    tokenizer = with_marks(BEFORE_CALLS)
    habits = habits_of(tokenizer)
    assert not habits.reasoning_beside_text
    both = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": [CALL]}
    assert "[THINK]Hm\n\nI look.[/THINK]<tool_call>" in shown(tokenizer, [USER, both, RESULT], [TOOL])


@pytest.mark.parametrize(
    "template",
    [
        BEGIN + "{{ m.content }}" + END,
        BEGIN + "{{ m.content | tojson }}" + END,
        BEGIN + "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}" + END,
    ],
)
def test_a_template_without_a_place_for_thoughts_gets_them_where_it_ignores_them(template):
    tokenizer = with_marks(template)
    assert habits_of(tokenizer).reasoning == FREE.reasoning
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm"}
    assert "Hello." in shown(tokenizer, [USER, answer, USER]) and "Hm" not in shown(tokenizer, [USER, answer, USER])


THOUGHTS = {
    "/v1/chat/completions": {
        "messages": [USER, {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm"}, USER]
    },
    "/v1/responses": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"role": "assistant", "content": "Hello."},
            USER,
        ]
    },
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"}, {"type": "text", "text": "Hello."}
            ]},
            USER,
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(THOUGHTS))
@pytest.mark.parametrize("place", sorted(TEMPLATES))
def test_every_dialect_passes_thoughts_back(place, path, tmp_path):
    engine = FakeEngine(context_length=100_000)
    engine.tokenizer = with_marks(TEMPLATES[place])
    engine.vocab_size = len(engine.tokenizer)
    app = create_app(FakePool(engine), Settings(home=tmp_path))
    response = call(app, "POST", path, json={"model": "tiny"} | THOUGHTS[path])
    assert response.status_code == 200, response.text
    prompt = engine.tokenizer.decode(engine.seen[-1].prompt)
    assert "<assistant>[THINK]Hm[/THINK]Hello.<user>hi" in prompt
