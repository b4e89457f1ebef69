"""The grammar of OpenAI's Responses streams, as published, and what their events add up to.

It knows nothing of omlx. `read_response` takes the body of an event stream, checks every rule and returns the response
that the last event has; a stream that breaks a rule raises StreamError.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.api.grammar_openai import StreamError, rule, without_comments

ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
TEXTS = {"response.output_text": "output_text", "response.reasoning_text": "reasoning_text"}
PART_OF = {"message": "output_text", "reasoning": "reasoning_text"}
# Of the items that are no parts: the event's name, and the field that the pieces add up to.
CALLS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
HEAD = ("id", "object", "created_at", "model")


@dataclass
class Item:
    """One that is open: its pieces so far, and what has to come next."""

    body: dict[str, Any]
    index: int
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    stage: str = "added"


@dataclass
class Read:
    response: dict[str, Any]
    events: list[dict[str, Any]]
    comments: list[str]
    error: dict[str, Any] | None = None
    deltas: list[str] = field(default_factory=list)

    @property
    def output(self) -> list[dict[str, Any]]:
        return self.response["output"]


def events(body: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Events and comments. Each event has its type twice: as the event's name, and in its data."""
    rule(body.endswith("\n\n"), "the last event is not ended by an empty line")
    rule("\ufffd" not in body, "half a character")
    body, comments = without_comments(body)
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        rule(len(lines) == 2 and "\r" not in block, f"not two lines: {block[:80]!r}")
        rule(lines[0].startswith("event: ") and lines[1].startswith("data: "), f"not an event: {block[:80]!r}")
        event = json.loads(lines[1].removeprefix("data: "))
        rule(event.get("type") == lines[0].removeprefix("event: "), "an event with two names")
        found.append(event)
    return found, comments


def read_response(body: str) -> Read:
    found, comments = events(body)
    rule([event.get("sequence_number") for event in found] == list(range(len(found))), "numbers that are not in order")
    rule(len(found) >= 3, "no beginning or no end")
    first, second, *middle, last = found
    rule(first["type"] == "response.created" and second["type"] == "response.in_progress", "it does not begin")
    for event in (first, second):
        response = event["response"]
        rule(response["status"] == "in_progress" and response["output"] == [], "it begins with something in it")
        rule(response["usage"] is None and response["error"] is None, "it begins with its end")
    rule(last["type"] in ENDS, f"it ends with {last['type']}")
    read = Read(last["response"], found, comments)
    reader = _Reader(read)
    for event in middle:
        reader.take(event)
    reader.check_end(first["response"], last)
    return read


class _Reader:
    def __init__(self, read: Read) -> None:
        self.read = read
        self.done: list[dict[str, Any]] = []
        self.item: Item | None = None

    def take(self, event: dict[str, Any]) -> None:
        rule(self.read.error is None, "it goes on after an error")
        kind = event["type"]
        if kind == "error":
            rule(isinstance(event["message"], str) and {"code", "param"} <= set(event), "an error without its fields")
            self.read.error = event
        elif kind == "response.output_item.added":
            self._add(event)
        else:
            item = self._at_hand(event)
            if kind == "response.output_item.done":
                self._finish(item, event)
            else:
                rule(event.get("item_id") == item.body["id"], "an event of another item")
                (self._call if item.body["type"] in CALLS else self._part)(item, kind, event)

    def _at_hand(self, event: dict[str, Any]) -> Item:
        if self.item is None:
            raise StreamError(f"{event['type']} outside of an item")
        rule(event.get("output_index") == self.item.index, "an event of another index")
        return self.item

    def _add(self, event: dict[str, Any]) -> None:
        rule(self.item is None, "an item within another one")
        body = event["item"]
        rule(event["output_index"] == len(self.done), "an item out of its turn")
        rule(body["id"] and body["id"] not in [item["id"] for item in self.done], "an item without an id of its own")
        rule(body["status"] == "in_progress", "an item that begins at its end")
        rule(body["type"] in PART_OF or body["type"] in CALLS, f"an unknown item: {body['type']}")
        if body["type"] in PART_OF:
            rule(body["content"] == [], "an item that begins with something in it")
        else:
            rule(body[CALLS[body["type"]][1]] == "" and body["name"] and body["call_id"], "a call without its head")
        self.item = Item(body, len(self.done))

    def _part(self, item: Item, kind: str, event: dict[str, Any]) -> None:
        rule(event.get("content_index") == 0, "another part than the first")
        what = PART_OF[item.body["type"]]
        name, _, step = kind.rpartition(".")
        if name == "response.content_part":
            before, after = ("added", "open") if step == "added" else ("written", "closed")
            rule(item.stage == before, f"a part is {step} too early, too late or twice")
            rule(event["part"]["type"] == what and event["part"]["text"] == item.text, "another part")
            item.stage = after
            return
        rule(TEXTS.get(name) == what, f"{kind} in a {item.body['type']}")
        rule(item.stage == "open", "text outside of a part")
        if what == "output_text":
            rule(isinstance(event["logprobs"], list), "no list of logprobs")
        if step == "delta":
            item.text += event["delta"]
            item.logprobs += event.get("logprobs", [])
            self.read.deltas.append(event["delta"])
        else:
            rule(event["text"] == item.text, "a text that is not its pieces")
            rule(event.get("logprobs", []) == item.logprobs, "logprobs that are not those of the pieces")
            item.stage = "written"

    def _call(self, item: Item, kind: str, event: dict[str, Any]) -> None:
        name, value = CALLS[item.body["type"]]
        rule(kind in (f"{name}.delta", f"{name}.done"), f"{kind} in a {item.body['type']}")
        rule(item.stage == "added", "a call goes on after its end")
        if kind.endswith("delta"):
            item.text += event["delta"]
        else:
            rule(event[value] == item.text, f"{value} that is not its pieces")
            item.stage = "closed"

    def _finish(self, item: Item, event: dict[str, Any]) -> None:
        body = event["item"]
        rule(item.stage == "closed", "an item ends in its middle")
        rule(body["status"] in ("completed", "incomplete"), "an item without an end")
        fixed = {"id", "type", "role", "name", "call_id", "namespace"} & set(item.body)
        rule(all(body.get(key) == item.body[key] for key in fixed), "an item that became another one")
        if body["type"] in PART_OF:
            (part,) = body["content"]
            rule(part["text"] == item.text and part["type"] == PART_OF[body["type"]], "an item that is not its pieces")
        else:
            rule(body[CALLS[body["type"]][1]] == item.text, "an item that is not its pieces")
            if body["type"] == "function_call" and body["status"] == "completed":
                rule(isinstance(json.loads(body["arguments"]), dict), "arguments that are no object")
        self.done.append(body)
        self.item = None

    def check_end(self, first: dict[str, Any], last: dict[str, Any]) -> None:
        response, status = last["response"], ENDS[last["type"]]
        rule({key: response.get(key) for key in HEAD} == {key: first.get(key) for key in HEAD}, "another response")
        rule(response["status"] == status, "an end with two names")
        rule((response["error"] is not None) == (status == "failed"), "an error that is none, or a failure without one")
        rule((self.read.error is not None) <= (status == "failed"), "it goes on after an error")
        rule((response["incomplete_details"] is not None) == (status == "incomplete"), "no reason why it is incomplete")
        rule(response["output"] == self.done, "an output that is not its items")
        if status != "failed":
            rule(self.item is None, "it ends within an item")
            _check_usage(response["usage"])
        if status == "completed":
            rule(all(item["status"] == "completed" for item in self.done), "completed, but for an item")


def _check_usage(usage: dict[str, Any]) -> None:
    rule(usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"], "usage that does not add up")
    inside = usage["input_tokens_details"]
    rule(inside["cached_tokens"] + inside["cache_write_tokens"] <= usage["input_tokens"], "more cached than there is")
    rule(usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"], "more reasoning than there is")


def same_as_whole(read: Read, whole: dict[str, Any]) -> None:
    """The stream says what a whole answer says (ids and times apart)."""
    assert _without_ids(read.response) == _without_ids(whole)


def _without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    left_out = {"id", "call_id", "created_at", "completed_at"}
    return {key: _without_ids(item) for key, item in value.items() if key not in left_out}
