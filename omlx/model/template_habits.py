"""What a chat template takes, found by trying, and conversations changed to fit it.

Templates differ: many take one system message, at the beginning; some want user and assistant strictly in turn; some
walk the arguments of a call as a mapping. Clients send messages in any order. `find_habits` renders small conversations
once, when a model is loaded; `adapted` changes a conversation only where the template would refuse it or leave
something out.

Every change depends on a message and what precedes it (and, for a call, on whether it was answered), so a conversation
that grows keeps its prefix.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from omlx.errors import BadRequest, ModelError
from omlx.model.chat_template import TemplateRefused, render
from omlx.model.template_files import WITH_TOOLS

log = logging.getLogger(__name__)

Message = dict[str, Any]
Content = str | list[dict[str, Any]]

# Where templates look for past reasoning. "parts": parts of the content of type "thinking".
_REASONING = ("reasoning_content", "thinking", "reasoning", "parts")
# Stands in for the user where a template wants one first.
_OPENING = "[The conversation continues.]"
PROBE_NAME = "probe_tool"
PROBE_ARGUMENTS = '{"probe": "probebword"}'
"""The arguments of the call in `TemplateHabits.shown_call`, to the tool `PROBE_NAME`."""

_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}, "required": ["probe"]},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateHabits:
    """What a template takes without refusing it or leaving a message out.

    `text`: contents that are texts (else parts); `tools`: descriptions of tools; `system`: a system message first;
    `systems`: several; `late_systems`: one anywhere; `only_system`: nothing but one; `neighbors`: user or assistant
    messages in a row; `assistant_first`.
    Where the template writes calls (`calls`): `mappings`: their arguments as a mapping (else as JSON text);
    `any_arguments`: those that are no mapping, too; `any_ids`: call ids of any form (else nine letters and digits);
    `several_calls` in a message; `unanswered` calls; `orphans`: results without a call; `user_after_result`.
    `shown_call`: a conversation with a call of `PROBE_NAME`, as the template writes it.
    `reasoning`: the field of a message that has its reasoning, or "parts" for parts of its content;
    `reasoning_beside_text`: in a message with calls and text.
    """

    text: bool = True
    tools: bool = True
    system: bool = True
    systems: bool = True
    late_systems: bool = True
    only_system: bool = True
    neighbors: bool = True
    assistant_first: bool = True
    calls: bool = True
    mappings: bool = True
    any_arguments: bool = True
    any_ids: bool = True
    several_calls: bool = True
    unanswered: bool = True
    orphans: bool = True
    user_after_result: bool = True
    shown_call: str = field(default="", compare=False)
    reasoning: str = "reasoning_content"
    reasoning_beside_text: bool = True


FREE = TemplateHabits()
_HABITS = [habit.name for habit in fields(TemplateHabits) if isinstance(habit.default, bool)]
_STRICT: dict[str, Any] = dict.fromkeys(_HABITS, False) | {"text": True, "mappings": True}
STRICTEST = TemplateHabits(**_STRICT)
"""Of a template about which nothing is certain: system text inside the first user message, strict turns, no calls."""


class Adapted(NamedTuple):
    """Messages for the template, and what was changed of them, a phrase each."""

    messages: list[Message]
    changes: tuple[str, ...]


# ---- finding out


class _Known(NamedTuple):
    template: Any
    habits: TemplateHabits


_KNOWN: "WeakKeyDictionary[Any, dict[bool, _Known]]" = WeakKeyDictionary()


def habits_of(tokenizer: Any, name: str = "", *, tools: bool = False) -> TemplateHabits:
    """What the template of model `name` takes; FREE for a model without one. Tried once for each template.

    A model may have a template of its own for requests with `tools`. That takes about twenty small renderings.
    """
    template = getattr(tokenizer, "chat_template", None)
    tools = tools and isinstance(template, dict) and WITH_TOOLS in template
    every = _KNOWN.setdefault(tokenizer, {})
    known = every.get(tools)
    if known is None or known.template != template:
        habits = _Trial(tokenizer, name, tools=tools).habits() if tokenizer.has_chat_template else FREE
        known = every[tools] = _Known(template, habits)
    return known.habits


class _Trial:
    """Renders conversations of words that occur nowhere else, and looks whether all came through, in order."""

    def __init__(self, tokenizer: Any, name: str, *, tools: bool) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._tools = tools
        self._habits = FREE

    def habits(self) -> TemplateHabits:
        try:
            return self._found()
        except ModelError:  # it does not compile, which was said when the model was loaded
            return FREE
        except BadRequest as error:  # stopped for its time or memory: no further trial would end better
            log.warning("model %s: its chat template could not be tried: %s", self._name, error)
            return FREE

    def _found(self) -> TemplateHabits:
        if not self._takes("u"):
            self._habits = replace(FREE, text=False)
            if not self._takes("u"):
                return FREE  # it takes nothing: no change would help
        self._learn("system", "su")
        lead = "s" if self._habits.system else ""
        self._learn("systems", "ssu", unless=lead == "")
        self._learn("neighbors", f"{lead}uu", f"{lead}uaau")
        self._learn("late_systems", f"{lead}uas{'' if self._habits.neighbors else 'a'}u", f"{lead}us", f"{lead}uasua")
        self._learn("only_system", "s")
        self._learn("assistant_first", "au", f"{lead}au")
        self._learn_calls()
        self._learn_reasoning()
        return self._habits

    def _learn_reasoning(self) -> None:
        """The first place from which the template shows an answer's reasoning, as the last one or before others."""
        shapes = ("ua", "uau", "uaua", *(("ucr", "ucra") if self._habits.calls else ()))
        for place in _REASONING:
            trial = replace(self._habits, reasoning=place)
            if any(self._shows_reasoning(shape, trial) for shape in shapes):
                self._habits = trial
                break
        else:
            return
        if self._habits.calls and self._shows_reasoning("ucr", self._habits):
            beside = self._shows_reasoning("ucr", self._habits, "probetext")
            self._habits = replace(self._habits, reasoning_beside_text=beside)

    def _shows_reasoning(self, shape: str, habits: TemplateHabits, text: str = "") -> bool:
        messages, words = _conversation(shape)
        messages[1] |= {"reasoning_content": "probethought"} | ({"content": text} if text else {})
        shown = self._shown(messages, habits, [_TOOL] if "c" in shape or self._tools else ())
        # Some templates write a list as Python does.
        if re.search(r"type\W{1,6}thinking", shown):
            return False
        return all(word in shown for word in ("probethought", text, *words))

    def _learn_calls(self) -> None:
        """The first way to write calls that works, and what else goes with it."""
        if PROBE_NAME not in self._shown(_conversation("u")[0], self._habits, [_TOOL]):
            self._habits = replace(self._habits, tools=False, calls=False)
            return
        answered = ("ucra", "ucrau")
        for ids, mappings in ((True, True), (False, True), (True, False), (False, False)):
            trial = replace(self._habits, any_ids=ids, mappings=mappings)
            if all(self._takes(shape, trial) for shape in answered):
                self._habits = trial
                break
        else:
            self._habits = replace(self._habits, calls=False)
            return
        shown = self._shown(_conversation("ucra")[0], self._habits, [_TOOL])
        self._habits = replace(self._habits, shown_call=shown)
        self._learn("any_arguments", "ujra", "ulra")
        self._learn("several_calls", "udrra")
        self._learn("unanswered", "ucu", "uc")
        self._learn("orphans", "ura", "uara")
        self._learn("user_after_result", "ucru")

    def _learn(self, habit: str, *shapes: str, unless: bool = False) -> None:
        if unless or not all(map(self._takes, shapes)):
            refused: dict[str, Any] = {habit: False}
            self._habits = replace(self._habits, **refused)

    def _takes(self, shape: str, habits: TemplateHabits | None = None) -> bool:
        messages, words = _conversation(shape)
        calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        shown = self._shown(messages, habits or self._habits, [_TOOL] if calls or self._tools else ())
        position = 0
        for word in words:
            position = shown.find(word, position)
            if position < 0:
                return False
        return True

    def _shown(self, messages: list[Message], habits: TemplateHabits, tools: Sequence[Message]) -> str:
        """"" for what the template refuses."""
        # Only what is known by now is adapted: how contents, arguments and ids are written.
        known = replace(
            FREE,
            text=habits.text,
            mappings=habits.mappings,
            any_ids=habits.any_ids,
            reasoning=habits.reasoning,
            reasoning_beside_text=habits.reasoning_beside_text,
        )
        try:
            return render(self._tokenizer, self._name, adapted(messages, known).messages, {}, tools)
        except TemplateRefused:
            return ""


def _conversation(shape: str) -> tuple[list[Message], list[str]]:
    """A message for each letter, and the words that have to be shown.

    s, u, a, r: system, user, assistant, result of a tool; c: a call, d: two of them, j: one whose arguments are a text,
    l: a list.
    """
    roles = {"s": "system", "u": "user", "a": "assistant", "r": "tool"}
    messages: list[Message] = []
    words: list[str] = []
    results = 0
    for at, letter in enumerate(shape):
        word = f"probe{chr(ord('a') + at)}word"
        words += [word, f"{word}again"] if letter == "d" else [word]
        if letter in roles:
            messages.append({"role": roles[letter], "content": word})
            if letter == "r":
                results += 1
                messages[-1] |= {"name": PROBE_NAME, "tool_call_id": f"call_probe_{results}"}
            continue
        arguments = {"j": word, "l": [word]}.get(letter, {"probe": word})
        calls = [_call(1, arguments)]
        if letter == "d":
            calls.append(_call(2, {"probe": f"{word}again"}))
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    return messages, words


def _call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": PROBE_NAME, "arguments": arguments}
    return {"id": f"call_probe_{number}", "type": "function", "function": function}


# ---- adapting


def adapted(messages: Sequence[Message], habits: TemplateHabits) -> Adapted:
    """The conversation as a template with these habits takes it. No message's text is left out or reordered."""
    work = _Adapter(habits)
    made = list(messages)
    if habits != FREE:
        made = work.turns(work.calls(work.systems(made)))
        if not habits.text:
            made = [message | {"content": _parts(message["content"])} for message in made]
        if habits.reasoning != "reasoning_content" or not habits.reasoning_beside_text:
            made = [_with_reasoning(message, habits) for message in made]
    return Adapted(made, tuple(dict.fromkeys(work.changes)))


def _with_reasoning(message: Message, habits: TemplateHabits) -> Message:
    """The message with its reasoning where the template looks for it."""
    thought = message.get("reasoning_content")
    if not thought:
        return message
    made = {key: value for key, value in message.items() if key != "reasoning_content"}
    content = message["content"]
    if habits.reasoning == "parts":
        return made | {"content": [{"type": "thinking", "thinking": thought}, *(_parts(content) if content else ())]}
    if content and message.get("tool_calls") and not habits.reasoning_beside_text:
        thought, content = f"{thought}\n\n{_text(content)}", ""
    return made | {"content": content, habits.reasoning: thought}


class _Adapter:
    """The steps of `adapted`; `changes` collects what they did."""

    def __init__(self, habits: TemplateHabits) -> None:
        self._habits = habits
        self.changes: list[str] = []

    def systems(self, messages: list[Message]) -> list[Message]:
        """System messages where the template takes them: one, first; the others are parts of user messages."""
        count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        leading, rest = messages[:count], messages[count:]
        if len(leading) > 1 and not self._habits.systems:
            self.changes.append("leading system messages joined")
            leading = [_joined(leading)]
        if leading and not self._habits.system:
            self.changes.append("system message put into the first user message")
            text = _joined(leading)
            first = rest[:1] if rest and rest[0]["role"] == "user" else []
            rest = [_joined([{"role": "user", "content": text["content"]}, *first]), *rest[len(first) :]]
            leading = []
        return [*leading, *self._late_systems(rest)]

    def _late_systems(self, messages: list[Message]) -> list[Message]:
        if self._habits.late_systems:
            return messages
        made: list[Message] = []
        waiting = False  # a user message that was a system message takes in the user message that follows it
        for message in messages:
            if message["role"] == "system":
                self.changes.append("late system message put into a user message")
                note = {"role": "user", "content": f"<system>\n{_text(message['content'])}\n</system>"}
                if made and made[-1]["role"] == "user":
                    made[-1] = _joined([made[-1], note])
                else:
                    made.append(note)
                    waiting = True
            elif waiting and message["role"] == "user":
                made[-1] = _joined([made[-1], message])
                waiting = False
            else:
                made.append(message)
                waiting = False
        return made

    def calls(self, messages: list[Message]) -> list[Message]:
        """Calls and results as the template takes them, else as text."""
        made: list[Message] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            if message.get("tool_calls"):
                end = at
                while end < len(messages) and messages[end]["role"] == "tool":
                    end += 1
                made += self._exchange(message, messages[at:end])
                at = end
            elif message["role"] == "tool" and not self._habits.orphans:
                self.changes.append("tool result without a call written as text")
                made.append(_result_as_text(message))
            elif message["role"] == "user" and self._joins_result(made):
                self.changes.append("user message after a tool result joined to it")
                made[-1] = made[-1] | {"content": _content_of([made[-1], message])}
            else:
                made.append(message)
        return made

    def _joins_result(self, made: list[Message]) -> bool:
        return bool(made) and made[-1]["role"] == "tool" and not self._habits.user_after_result

    def _exchange(self, message: Message, results: list[Message]) -> list[Message]:
        """A message with calls, and the results that follow it."""
        calls = message["tool_calls"]
        answered = len(results) == len(calls) or self._habits.unanswered
        if not self._habits.calls or not answered:
            self.changes.append("tool calls written as text")
            return [with_calls_as_text(message), *map(_result_as_text, results)]
        calls = [self._one_call(call) for call in calls]
        if not self._habits.any_ids:
            results = [
                result | {"tool_call_id": _short(result["tool_call_id"])} if result.get("tool_call_id") else result
                for result in results
            ]
        if len(calls) == 1 or self._habits.several_calls:
            return [message | {"tool_calls": calls}, *results]
        self.changes.append("tool calls of one message split into several")
        ordered = _in_order_of_calls(calls, results)
        first = message | {"tool_calls": calls[:1]}
        more: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
        pairs = zip([first, *more], ordered, strict=True)
        others = [result for result in results if not any(result is one for one in ordered)]
        return [*(part for pair in pairs for part in pair if part is not None), *others]

    def _one_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, dict) and not self._habits.any_arguments:
            self.changes.append("tool call arguments wrapped in an object")
            arguments = {} if arguments in ("", None) else {"arguments": arguments}
        if not self._habits.mappings:
            arguments = json.dumps(arguments, ensure_ascii=False)
        made = call | {"function": function | {"arguments": arguments}}
        return made if self._habits.any_ids else made | {"id": _short(str(call.get("id", "")))}

    def turns(self, messages: list[Message]) -> list[Message]:
        """User and assistant in turn, a user first, where the template wants it."""
        made: list[Message] = []
        for message in messages:
            role = message["role"]
            if made and role == made[-1]["role"] and role in ("user", "assistant") and not self._habits.neighbors:
                self.changes.append(f"neighboring {role} messages joined")
                made[-1] = _joined([made[-1], message])
            else:
                made.append(message)
        begin = 1 if made and made[0]["role"] == "system" else 0
        lacks_user = not self._habits.only_system and begin == len(made)
        if lacks_user or (made[begin:] and made[begin]["role"] == "assistant" and not self._habits.assistant_first):
            self.changes.append("user message added at the beginning")
            made.insert(begin, {"role": "user", "content": _OPENING})
        return made


def _in_order_of_calls(calls: list[dict[str, Any]], results: list[Message]) -> list[Message | None]:
    """The result of each call, by its id where there is one, else by its place."""
    by_id = {result.get("tool_call_id"): result for result in results}
    if all(call.get("id") in by_id for call in calls):
        return [by_id[call["id"]] for call in calls]
    return [*results[: len(calls)], *[None] * (len(calls) - len(results))]


def _short(call_id: str) -> str:
    """Nine letters and digits, as Mistral's templates ask for; the same for the same id."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _joined(messages: Sequence[Message]) -> Message:
    """One message of those; it keeps what the first has, and the calls and reasoning of all."""
    joined = dict(messages[0])
    joined["content"] = _content_of(messages)
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if calls:
        joined["tool_calls"] = calls
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    if thoughts:
        joined["reasoning_content"] = "\n\n".join(thoughts)
    return joined


def _content_of(messages: Sequence[Message]) -> Content:
    """A text, or parts where one of them has parts."""
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    return [part for content in contents for part in _parts(content)]


def _parts(content: Content) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def with_calls_as_text(message: Message) -> Message:
    """An assistant's message whose calls are part of its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join([message["content"], *written] if message["content"] else written)}


def _result_as_text(message: Message) -> Message:
    return {"role": "user", "content": result_text(message)}


def result_text(message: Message) -> str:
    """A tool's result for a template that has no place for one."""
    return f"<tool_response>\n{_text(message['content'])}\n</tool_response>"

