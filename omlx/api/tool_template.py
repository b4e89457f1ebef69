"""What a chat template makes of tools and calls, found out by rendering a short conversation with two calls."""

from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

from omlx.errors import BadRequest
from omlx.model import chat_template

# "several": calls of one message are all written; "single": only one of a message is; "none": tools are not shown.
Calls = Literal["several", "single", "none"]

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_WORDS = ("firstword", "secondword")


class _Known(NamedTuple):
    template: Any
    calls: Calls


_KNOWN: "WeakKeyDictionary[Any, _Known]" = WeakKeyDictionary()


def calls_written(tokenizer: Any) -> Calls:
    """How many calls of one message the template writes, if it shows tools at all. Tried once for each template."""
    template = getattr(tokenizer, "chat_template", None)
    known = _KNOWN.get(tokenizer)
    if known is None or known.template != template:
        known = _KNOWN[tokenizer] = _Known(template, _tried(tokenizer))
    return known.calls


def _tried(tokenizer: Any) -> Calls:
    user = {"role": "user", "content": "hi"}
    if "probe_tool" not in _rendered(tokenizer, [user]):
        return "none"
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": "probe_tool", "arguments": {"word": word}}}
        for index, word in enumerate(_WORDS)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "probe_tool", "content": "done"} for call in calls
    ]
    if _shows(tokenizer, [user, _message(calls), *results]):
        return "several"
    if _shows(tokenizer, [user, _message(calls[:1]), results[0], _message(calls[1:]), results[1]]):
        return "single"
    # It shows tools and no calls: what was called before is then known from the results alone, however it is sent.
    return "several"


def _message(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _shows(tokenizer: Any, messages: list[dict[str, Any]]) -> bool:
    text = _rendered(tokenizer, messages)
    return all(word in text for word in _WORDS)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The conversation with a tool; "" if the template refuses it."""
    try:
        return chat_template.render(tokenizer, "", messages, {}, [_TOOL])
    except BadRequest:
        return ""
