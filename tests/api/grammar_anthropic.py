"""The grammar of Anthropic's streams, as published, and the message that their events add up to.

It knows nothing of omlx. `read` takes the body of an event stream, checks every rule and returns the message that a
whole answer would be; a stream that breaks a rule raises StreamError.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

REASONS = {
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "model_context_window_exceeded",
}  # fmt: skip
ERRORS = {
    "invalid_request_error", "authentication_error", "billing_error", "permission_error", "not_found_error",
    "request_too_large", "rate_limit_error", "timeout_error", "api_error", "overloaded_error",
}  # fmt: skip
# What a block holds when it begins, beside what names it.
BEGINNINGS: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
# The member of each kind of delta, and the kind of block that it belongs to.
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "thinking"),
    "input_json_delta": ("partial_json", "tool_use"),
}
COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


class StreamError(Exception):
    """A rule that a stream breaks."""


@dataclass
class Read:
    message: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    events: list[str] = field(default_factory=list)
    start_usage: dict[str, Any] = field(default_factory=dict)
    _block: dict[str, Any] | None = None  # the one that is open
    _json: str = ""
    _ended: str = ""  # the event behind which only certain others come


def rule(holds: Any, text: str) -> None:
    if not holds:
        raise StreamError(text)


def events(body: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data. Events end with an empty line, and have a name and one line of data."""
    rule(body.endswith("\n\n"), "the last event is not ended by an empty line")
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        lines = re.fullmatch(r"event: (\w+)\ndata: ([^\n\r]+)", block)
        rule(lines, f"not a name and one line of data: {block[:80]!r}")
        assert lines is not None
        data = json.loads(lines[2])
        rule(data.get("type") == lines[1], "a name that is not the type of the data")
        found.append((lines[1], data))
    return found


def read(body: str, *, fails: bool = False) -> Read:
    """The message of a stream that ends as it should: with `fails` by an error."""
    rule("\ufffd" not in body, "half a character")
    found = Read()
    for name, data in events(body):
        rule(found._ended not in ("message_stop", "error"), f"{name} behind the end")
        rule(found.message or name == "message_start", f"{name} before message_start")
        rule(name in _TAKE, f"an unknown event: {name}")
        found.events.append(name)
        _TAKE[name](found, data)
    rule(found._ended == ("error" if fails else "message_stop"), "the end is missing")
    return found


def _message_start(found: Read, data: dict[str, Any]) -> None:
    rule(not found.message, "message_start again")
    message = data["message"]
    rule(message["id"] and message["model"], "no id or model")
    rule((message["type"], message["role"]) == ("message", "assistant"), "another type or role")
    empty = {"content": [], "stop_reason": None, "stop_sequence": None}
    rule({name: message[name] for name in empty} == empty, "a message that does not begin empty")
    _check_usage(message["usage"])
    found.start_usage = dict(message["usage"])
    found.message = message


def _ping(found: Read, data: dict[str, Any]) -> None:
    rule(data == {"type": "ping"}, "a ping that says something")


def _block_start(found: Read, data: dict[str, Any]) -> None:
    rule(found._block is None, "a block begins in another one")
    rule(not found._ended, "a block behind message_delta")
    rule(data["index"] == len(found.message["content"]), "an index that is not the next one")
    block = data["content_block"]
    rule(block["type"] in BEGINNINGS, f"an unknown block: {block['type']}")
    beginning = BEGINNINGS[block["type"]]
    names = {"id", "name"} if block["type"] == "tool_use" else set()
    rule({name: block.get(name) for name in beginning} == beginning, "a block that does not begin empty")
    rule(set(block) == {"type", *beginning, *names}, "other members than a block has")
    rule(all(block[name] for name in names), "a call without id or name")
    rule(re.fullmatch(r"[a-zA-Z0-9_-]+", block.get("id", "x")), "an id that cannot be sent back")
    found._block, found._json = block, ""
    found.message["content"].append(block)


def _block_delta(found: Read, data: dict[str, Any]) -> None:
    block = _open_block(found, data)
    delta = data["delta"]
    rule(delta["type"] in DELTAS, f"an unknown delta: {delta['type']}")
    member, kind = DELTAS[delta["type"]]
    rule(kind == block["type"], f"{delta['type']} in a block of another kind")
    rule(set(delta) == {"type", member} and isinstance(delta[member], str), "other members than the delta has")
    rule(not block.get("signature"), "a delta behind the signature")
    if kind == "tool_use":
        found._json += delta[member]
    else:
        block[member] += delta[member]


def _block_stop(found: Read, data: dict[str, Any]) -> None:
    block = _open_block(found, data)
    if block["type"] == "thinking":
        rule(block["signature"], "a thought without a signature")
    if block["type"] == "tool_use":
        block["input"] = found._json
    found._block = None


def _open_block(found: Read, data: dict[str, Any]) -> dict[str, Any]:
    block = found._block
    rule(block is not None, "no block is open")
    rule(data["index"] == len(found.message["content"]) - 1, "the index of another block")
    assert block is not None
    return block


def _message_delta(found: Read, data: dict[str, Any]) -> None:
    rule(found._block is None, "message_delta in a block")
    delta, usage, message = data["delta"], data["usage"], found.message
    rule(delta["stop_reason"] in REASONS, f"an unknown stop_reason: {delta['stop_reason']}")
    stopped = delta["stop_reason"] == "stop_sequence"
    rule((delta["stop_sequence"] is not None) == stopped, "a stop_sequence for another reason, or none")
    _check_usage(usage)
    rule(usage["output_tokens"] >= message["usage"]["output_tokens"], "usage that is not cumulative")
    # What is there replaces what was said before: as the clients of the API do it.
    message["usage"] |= usage
    message |= {"stop_reason": delta["stop_reason"], "stop_sequence": delta["stop_sequence"]}
    found._ended = "message_delta"


def _check_usage(usage: dict[str, Any]) -> None:
    for name in COUNTS:
        rule(isinstance(usage[name], int) and usage[name] >= 0, f"{name} is no count")


def _message_stop(found: Read, data: dict[str, Any]) -> None:
    rule(found._ended == "message_delta", "message_stop without message_delta")
    content, reason = found.message["content"], found.message["stop_reason"]
    calls = [block for block in content if block["type"] == "tool_use"]
    rule(bool(calls) or reason != "tool_use", "tool_use without calls")
    rule(not calls or reason not in ("end_turn", "stop_sequence"), "calls, but another stop_reason")
    rule(len({call["id"] for call in calls}) == len(calls), "calls with one id")
    for call in calls:
        if reason == "tool_use":
            call["input"] = json.loads(call["input"] or "{}")
            rule(isinstance(call["input"], dict), "input that is no object")
    found._ended = "message_stop"


def _error(found: Read, data: dict[str, Any]) -> None:
    error = data["error"]
    rule(error["type"] in ERRORS and error["message"], "an error without a known type, or a message")
    found.error, found._ended = error, "error"


_TAKE = {
    "message_start": _message_start,
    "ping": _ping,
    "content_block_start": _block_start,
    "content_block_delta": _block_delta,
    "content_block_stop": _block_stop,
    "message_delta": _message_delta,
    "message_stop": _message_stop,
    "error": _error,
}


def same_as_whole(read: Read, whole: dict[str, Any]) -> None:
    """The stream says what a whole answer says (ids apart)."""
    assert _without_ids(read.message) == _without_ids(whole)


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: block[name] for name in block if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}
