"""Values that clients send in another spelling than the API's, and that can mean only one thing.

Each function is for pydantic's `BeforeValidator`: it returns the usual spelling, and any other value unchanged, so that
the field's own type refuses it.
"""

from typing import Any

# A list up to this length is searched for floats; a longer one is refused for its length.
_MAX_SEARCHED = 2**21

_OPENAI_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_ANTHROPIC_CHOICES = {"auto": "auto", "none": "none", "required": "any", "any": "any"}


def whole(value: Any) -> Any:
    """8.0 -> 8: languages without integers write so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_items(value: Any) -> Any:
    """The same for a list of token ids, which may be long."""
    if isinstance(value, list) and len(value) <= _MAX_SEARCHED and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


def token_limit(value: Any) -> Any:
    """-1 -> None: as many tokens as fit."""
    value = whole(value)
    return None if value == -1 and not isinstance(value, bool) else value


def stop_texts(value: Any) -> Any:
    """Without empty texts, which would end every answer."""
    if isinstance(value, list):
        return [text for text in value if text != ""] if len(value) < 1000 else value
    return None if value == "" else value


def without_empty_type(value: Any) -> Any:
    """An object whose `type` is "": as if it had none."""
    if isinstance(value, dict) and value.get("type") == "":
        return {name: member for name, member in value.items() if name != "type"}
    return value


def chat_choice(value: Any) -> Any:
    """`tool_choice` of chat completions, where the function is an object of its own."""
    named = _named_function(value)
    return _openai_word(value) if named is None else {"type": "function", "function": {"name": named}}


def responses_choice(value: Any) -> Any:
    """`tool_choice` of responses, where the name stands beside the type."""
    named = _named_function(value)
    return _openai_word(value) if named is None else {"type": "function", "name": named}


def anthropic_choice(value: Any) -> Any:
    """`tool_choice` of messages: always an object."""
    named = _named_function(value)
    if named is not None:
        rest = {name: member for name, member in value.items() if name not in ("type", "function", "name")}
        return {"type": "tool", "name": named} | rest
    if isinstance(value, str) and value in _ANTHROPIC_CHOICES:
        return {"type": _ANTHROPIC_CHOICES[value]}
    kind = value.get("type") if isinstance(value, dict) else None
    return value | {"type": _ANTHROPIC_CHOICES[kind]} if isinstance(kind, str) and kind in _ANTHROPIC_CHOICES else value


def _openai_word(value: Any) -> Any:
    """{"type": "auto"} -> "auto", "any" -> "required"."""
    word = value.get("type") if isinstance(value, dict) else value
    return _OPENAI_CHOICES[word] if isinstance(word, str) and word in _OPENAI_CHOICES else value


def _named_function(value: Any) -> str | None:
    """The name in a choice of one function, in any dialect's spelling."""
    if not isinstance(value, dict) or value.get("type") not in ("function", "tool"):
        return None
    inner = value.get("function")
    name = inner.get("name") if isinstance(inner, dict) else value.get("name")
    return name if isinstance(name, str) else None
