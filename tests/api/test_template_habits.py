"""Conversations of every shape reach templates of every habit, in all three dialects.

The templates are short ones of our own, each with the habits of a family that is in use.
"""

import json
import re
from typing import Any

import pytest

from omlx.model.template_habits import FREE, habits_of
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import call
from tests.small_tokenizers import with_tools

Json = dict[str, Any]

TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
WALKED = (
    "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</tool_call>{% endfor %}"
)
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
END = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
FREE_BODY = TOOLS + LOOP + CALLS + END
WALKED_BODY = TOOLS + LOOP + WALKED + END
NO_TOOLS = LOOP + END


def refuse(condition: str, text: str) -> str:
    raised = f"{{{{ raise_exception('{text}') }}}}"
    return f"{{% for m in messages %}}{{% if {condition} %}}{raised}{{% endif %}}{{% endfor %}}"


SYSTEM_FIRST = refuse("m.role == 'system' and not loop.first", "System message must be at the beginning.")
NO_SYSTEM = refuse("m.role == 'system'", "System role not supported")
IN_TURN = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == ns.last and m.role != 'tool' and not m.tool_calls %}{{ raise_exception('alternate') }}{% endif %}"
    "{% if m.role != 'system' %}{% set ns.last = m.role %}{% endif %}{% endfor %}"
)
USER_FIRST = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if not rest or rest[0].role != 'user' %}{{ raise_exception('a user message comes first') }}{% endif %}"
)
NEEDS_USER = (
    "{% set u = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if not u %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
)
ONE_CALL = refuse("m.tool_calls and m.tool_calls | length > 1", "only single tool-calls at once")
SHORT_IDS = refuse("m.role == 'tool' and m.tool_call_id | length != 9", "ids must have length 9")
NO_ORPHANS = (
    "{% set ns2 = namespace(open=0) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if ns2.open < 1 %}{{ raise_exception('a result needs a call') }}{% endif %}"
    "{% set ns2.open = ns2.open - 1 %}"
    "{% else %}{% if ns2.open > 0 %}{{ raise_exception('a call needs a result') }}{% endif %}"
    "{% set ns2.open = m.tool_calls | default([], true) | length %}{% endif %}{% endfor %}"
)
KNOWN_ROLES = refuse("m.role not in ['system', 'user', 'assistant', 'tool']", "unexpected role")
TEXT_ARGUMENTS = TOOLS + LOOP + CALLS.replace("| tojson", "+ ''") + END
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPS_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_USER_AFTER_RESULT = (
    "{% for m in messages %}{% if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('an answer follows a result') }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "free": FREE_BODY,
    "free without tools": NO_TOOLS,
    "Qwen3.5": SYSTEM_FIRST + NEEDS_USER + KNOWN_ROLES + WALKED_BODY,
    "Qwen2.5": SYSTEM_FIRST + FREE_BODY,
    "Gemma 2": NO_SYSTEM + USER_FIRST + IN_TURN + NO_TOOLS,
    "Gemma 3": SYSTEM_FIRST + USER_FIRST + IN_TURN + NO_TOOLS,
    "Mistral": SYSTEM_FIRST + USER_FIRST + IN_TURN + NO_ORPHANS + SHORT_IDS + FREE_BODY,
    "Mistral without tools": USER_FIRST + IN_TURN + NO_TOOLS,
    "Llama 3": ONE_CALL + FREE_BODY,
    "Llama 2": SYSTEM_FIRST + USER_FIRST + IN_TURN + NO_TOOLS.replace("<{{ m.role }}>", "[INST:{{ m.role }}]"),
    "ChatML": NO_TOOLS.replace("<{{ m.role }}>", "<|im_start|>{{ m.role }}\n"),
    "Phi": DROPS_LATE_SYSTEM,
    "DeepSeek": TEXT_ARGUMENTS,
    "Command-R": SYSTEM_FIRST + IN_TURN + FREE_BODY,
    "GLM": WALKED_BODY,
    "MiniMax": ONE_CALL + NO_ORPHANS + WALKED_BODY,
    "Granite": NO_ORPHANS + FREE_BODY,
    "a result ends in an answer": NO_USER_AFTER_RESULT + FREE_BODY,
    "parts": PARTS,
    "all at once": SYSTEM_FIRST + USER_FIRST + IN_TURN + NO_ORPHANS + ONE_CALL + NO_USER_AFTER_RESULT + WALKED_BODY,
}

# A letter for each message, as in template_habits: s, u, a; c a call and its result, d two and theirs, j a call whose
# arguments are no object, o a result without a call, e a call without a result.
SHAPES = [
    "u", "ssu", "sus", "suasu", "suau", "uuau", "auau", "sucau", "sudu", "ujau", "ucsu", "uoau", "ueu", "s", "saacuu",
]  # fmt: skip
WRONG_ARGUMENTS = ('"{word}"', "[\"{word}\"]", "{{\"city\": \"{word}", "null{word}")


class Conversation:
    """A shape in each dialect, with a word of its own in every message (`words`)."""

    def __init__(self, shape: str) -> None:
        self.chat: list[Json] = []
        self.items: list[Json] = []
        self.words: list[str] = []
        self._calls = 0
        for letter in shape:
            getattr(self, f"_{letter}")()

    def _word(self) -> str:
        self.words.append(f"word{chr(ord('a') + len(self.words))}")
        return self.words[-1]

    def _said(self, role: str) -> None:
        word = self._word()
        self.chat.append({"role": role, "content": word})
        self.items.append({"role": role, "content": word})

    def _s(self) -> None:
        self._said("system")

    def _u(self) -> None:
        self._said("user")

    def _a(self) -> None:
        self._said("assistant")

    def _call(self, *arguments: str) -> list[str]:
        ids = []
        for _ in arguments:
            self._calls += 1
            ids.append(f"call_number_{self._calls}")
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "look", "arguments": given}}
            for call_id, given in zip(ids, arguments, strict=True)
        ]
        self.chat.append({"role": "assistant", "content": None, "tool_calls": calls})
        self.items += [
            {"type": "function_call", "call_id": call_id, "name": "look", "arguments": given}
            for call_id, given in zip(ids, arguments, strict=True)
        ]
        return ids

    def _result(self, call_id: str) -> None:
        word = self._word()
        self.chat.append({"role": "tool", "tool_call_id": call_id, "content": word})
        self.items.append({"type": "function_call_output", "call_id": call_id, "output": word})

    def _c(self) -> None:
        self._result(*self._call(json.dumps({"city": self._word()})))

    def _d(self) -> None:
        for call_id in self._call('{"city": "x"}', '{"city": "y"}'):
            self._result(call_id)

    def _j(self) -> None:
        wrong = WRONG_ARGUMENTS[len(self.words) % len(WRONG_ARGUMENTS)]
        self._result(*self._call(wrong.format(word=self._word())))

    def _o(self) -> None:
        self._result("call_nobody_made")

    def _e(self) -> None:
        self._call(json.dumps({"city": self._word()}))

    @property
    def messages_body(self) -> Json | None:
        """As /v1/messages has it, None where that dialect cannot say it: a result without a call, other arguments."""
        messages: list[Json] = []
        for message in self.chat:
            if message["role"] == "tool":
                block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
                messages.append({"role": "user", "content": [block]})
            elif calls := message.get("tool_calls"):
                if any(not call["function"]["arguments"].startswith('{"city": "') for call in calls):
                    return None
                try:
                    inputs = [json.loads(call["function"]["arguments"]) for call in calls]
                except ValueError:
                    return None
                blocks = [
                    {"type": "tool_use", "id": call["id"], "name": "look", "input": given}
                    for call, given in zip(calls, inputs, strict=True)
                ]
                messages.append({"role": "assistant", "content": blocks})
            else:
                messages.append(message)
        return {"max_tokens": 9, "messages": messages, "tools": [{"name": "look", "input_schema": SCHEMA}]}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def engine_of(template: str) -> FakeEngine:
    engine = FakeEngine(context_length=100_000)
    engine.tokenizer = with_tools(template=TEMPLATES[template])
    engine.vocab_size = len(engine.tokenizer)
    return engine


def prompts(engine: FakeEngine, conversation: Conversation, tmp_path: Any) -> dict[str, str]:
    """What the model reads, by dialect."""
    app = create_app(FakePool(engine), Settings(home=tmp_path))
    bodies = {
        "/v1/chat/completions": {"messages": conversation.chat, "tools": [TOOL]},
        "/v1/responses": {"input": conversation.items, "tools": [{**TOOL["function"], "type": "function"}]},
        "/v1/messages": conversation.messages_body,
    }
    shown = {}
    for path, body in bodies.items():
        if body is None:
            continue
        engine.seen.clear()
        response = call(app, "POST", path, json={"model": "tiny"} | body)
        assert response.status_code == 200, (path, response.text)
        shown[path] = engine.tokenizer.decode(engine.seen[0].prompt)
    return shown


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_word_reaches_the_prompt_in_order(template, shape, tmp_path):
    conversation = Conversation(shape)
    for path, shown in prompts(engine_of(template), conversation, tmp_path).items():
        said = re.sub(r"<tools>.*?</tools>", "", shown, flags=re.DOTALL)
        places = [said.find(word) for word in conversation.words]
        assert -1 not in places, (path, conversation.words, shown)
        assert places == sorted(places), (path, shown)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_that_grows_keeps_its_prefix(template, tmp_path):
    """Up to the message that a turn ended with, what follows changes nothing."""
    engine = engine_of(template)
    growing = ["su", "suasu", "suasucau", "suasucauaus"]
    texts = [prompts(engine, Conversation(shape), tmp_path)["/v1/chat/completions"] for shape in growing]
    for shape, before, after in zip(growing, texts, texts[1:], strict=False):
        last = Conversation(shape).words[-1]
        kept = before[: before.index(last) + len(last)]
        assert after.startswith(kept), (before, after)


@pytest.mark.parametrize("shape", ["su", "suau", "sucau"])
def test_what_a_template_takes_is_not_changed(shape, tmp_path):
    engine = engine_of("free")
    assert habits_of(engine.tokenizer) == FREE
    conversation = Conversation(shape)
    shown = prompts(engine, conversation, tmp_path)["/v1/chat/completions"]
    for message in conversation.chat:
        assert not message["content"] or f"<{message['role']}>{message['content']}" in shown


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("Qwen3.5", {"systems", "late_systems", "only_system", "any_arguments"}),
        ("Llama 3", {"several_calls"}),
        ("Granite", {"unanswered", "orphans"}),
        ("DeepSeek", {"mappings"}),
        ("a result ends in an answer", {"user_after_result"}),
    ],
)
def test_habits_are_found(template, wrong):
    habits = habits_of(engine_of(template).tokenizer)
    assert {name for name in habits.__slots__ if not getattr(habits, name)} == wrong


@pytest.mark.parametrize("arguments", ["null", '{"city": "Par', '"Paris"', "[]", "", "5"])
def test_past_arguments_that_are_no_object_end_no_session(arguments, tmp_path):
    engine = engine_of("Qwen3.5")
    conversation = Conversation("uc")
    conversation.chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
    app = create_app(FakePool(engine), Settings(home=tmp_path))
    response = call(app, "POST", "/v1/chat/completions", json={"model": "tiny", "messages": conversation.chat})
    assert response.status_code == 200, response.text
    shown = engine.tokenizer.decode(engine.seen[0].prompt)
    assert arguments in ("", "null") or arguments.strip('"[]') in shown


def test_what_even_the_plainest_form_does_not_satisfy_is_refused_with_the_templates_words(tmp_path):
    engine = FakeEngine()
    response = call(
        create_app(FakePool(engine), Settings(home=tmp_path)), "POST", "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "refuse"}]},
    )  # fmt: skip
    assert response.status_code == 400
    assert "no such turn" in response.json()["error"]["message"]
