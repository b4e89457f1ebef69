"""The grammar of OpenAI's streams, as published, and what their events add up to.

It knows nothing of omlx. `read_chat` and `read_completion` take the body of an event stream, check every rule and
return what a whole answer would say; a stream that breaks a rule raises StreamError.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

REASONS = {"stop", "length", "tool_calls", "content_filter"}
HEAD = ("id", "object", "created", "model")
DELTAS = {"role", "content", "reasoning_content", "tool_calls", "refusal"}


class StreamError(Exception):
    """A rule that a stream breaks."""


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Choice:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None
    begun: bool = False


@dataclass
class Read:
    choices: dict[int, Choice]
    usage: dict[str, Any] | None
    comments: list[str]
    chunks: list[dict[str, Any]]


def rule(holds: Any, text: str) -> None:
    if not holds:
        raise StreamError(text)


def without_comments(body: str) -> tuple[str, list[str]]:
    """The events alone, and the comments. No blank line follows a comment, since some clients count those."""
    rule(not re.search(r"^:.*\n\n", body, re.MULTILINE), "a blank line after a comment")
    comments = [line[1:].strip() for line in re.findall(r"^:.*", body, re.MULTILINE)]
    return re.sub(r"^:.*\n", "", body, flags=re.MULTILINE), comments


def events(body: str) -> tuple[list[str], list[str]]:
    """Data and comments. Events end with an empty line; there are no other fields in this dialect."""
    rule(body.endswith("\n\n"), "the last event is not ended by an empty line")
    body, comments = without_comments(body)
    data = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        rule("\n" not in block and "\r" not in block, f"an event of several lines: {block[:80]!r}")
        rule(block.startswith("data: "), f"neither data nor a comment: {block[:80]!r}")
        data.append(block.removeprefix("data: "))
    return data, comments


def read_chat(body: str, *, include_usage: bool = False, choices: int = 1) -> Read:
    return _read(body, "chat.completion.chunk", _chat_choice, include_usage, choices)


def read_completion(body: str, *, include_usage: bool = False, choices: int = 1) -> Read:
    return _read(body, "text_completion", _completion_choice, include_usage, choices)


def _read(body: str, kind: str, take: Any, include_usage: bool, choices: int) -> Read:
    data, comments = events(body)
    rule("\ufffd" not in body, "half a character")
    rule(data and data[-1] == "[DONE]", "no [DONE] at the end")
    rule("[DONE]" not in data[:-1], "[DONE] before the end")
    chunks = [json.loads(item) for item in data[:-1]]
    rule(chunks, "no chunks")
    _check_heads(chunks, kind)
    usage = _usage(chunks, include_usage)
    found = Read({}, usage, comments, chunks)
    for chunk in chunks[: -1 if include_usage else None]:
        rule(len(chunk["choices"]) == 1, "a chunk that is not about one choice")
        (item,) = chunk["choices"]
        choice = found.choices.setdefault(item["index"], Choice())
        rule(choice.reason is None, "a choice goes on after its finish_reason")
        take(choice, item)
    rule(sorted(found.choices) == list(range(choices)), "other choices than were asked for")
    rule(all(choice.reason for choice in found.choices.values()), "a choice without a finish_reason")
    return found


def _check_heads(chunks: list[dict[str, Any]], kind: str) -> None:
    first = {name: chunks[0].get(name) for name in HEAD}
    rule(first["object"] == kind, "the wrong object")
    rule(isinstance(first["created"], int) and first["id"] and first["model"], "a head that is not whole")
    for chunk in chunks:
        rule({name: chunk.get(name) for name in HEAD} == first, "heads that differ")
        rule(isinstance(chunk.get("choices"), list), "a chunk without choices")


def _usage(chunks: list[dict[str, Any]], asked: bool) -> dict[str, Any] | None:
    if not asked:
        rule(all("usage" not in chunk for chunk in chunks), "usage that nobody asked for")
        return None
    *others, last = chunks
    rule(
        all("usage" in chunk and chunk["usage"] is None for chunk in others), "usage before the last chunk, or no null"
    )
    rule(last["choices"] == [] and isinstance(last["usage"], dict), "no usage in the last chunk")
    usage = last["usage"]
    rule(usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"], "usage that does not add up")
    return usage


def _chat_choice(choice: Choice, item: dict[str, Any]) -> None:
    delta, reason = item["delta"], item["finish_reason"]
    rule(set(delta) <= DELTAS, f"an unknown delta: {sorted(delta)}")
    rule(("role" in delta) is not choice.begun, "the role not in the first delta, or again")
    if not choice.begun:
        rule(delta["role"] == "assistant" and delta.get("content") == "", "an unusual first delta")
        choice.begun = True
    for part in delta.get("tool_calls", ()):
        _take_call(choice, part)
    if "content" in delta and "role" not in delta:
        choice.content += delta["content"]
    choice.reasoning += delta.get("reasoning_content", "")
    if item.get("logprobs"):
        choice.logprobs += item["logprobs"]["content"]
    if reason is not None:
        rule(delta == {}, "a finish_reason beside a delta")
        _finish(choice, reason)


def _take_call(choice: Choice, part: dict[str, Any]) -> None:
    if part["index"] == len(choice.calls):
        rule(part.get("type") == "function" and part.get("id"), "a call that begins without its id")
        rule(part["function"].get("name"), "a call that begins without its name")
        choice.calls.append(Call(part["id"], part["function"]["name"]))
    else:
        rule(part["index"] == len(choice.calls) - 1, "a call out of its turn")
        rule(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}, "a call that begins again")
    rule(isinstance(part["function"].get("arguments"), str), "arguments that are no text")
    choice.calls[-1].arguments += part["function"]["arguments"]


def _finish(choice: Choice, reason: str) -> None:
    rule(reason in REASONS, f"an unknown finish_reason: {reason}")
    rule(bool(choice.calls) or reason != "tool_calls", "tool_calls without calls")
    rule(not choice.calls or reason in ("tool_calls", "length"), "calls, but another finish_reason")
    rule(len({call.id for call in choice.calls}) == len(choice.calls), "calls with one id")
    if reason == "tool_calls":
        for call in choice.calls:
            rule(isinstance(json.loads(call.arguments), dict), "arguments that are no object")
    choice.reason = reason


def _completion_choice(choice: Choice, item: dict[str, Any]) -> None:
    rule(set(item) == {"index", "text", "logprobs", "finish_reason"}, "an unusual choice")
    choice.content += item["text"]
    if item["finish_reason"] is not None:
        _finish(choice, item["finish_reason"])


def same_as_whole(read: Read, whole: dict[str, Any]) -> None:
    """The stream says what a whole answer says (ids apart)."""
    assert [choice["index"] for choice in whole["choices"]] == sorted(read.choices)
    for item in whole["choices"]:
        choice, message = read.choices[item["index"]], item.get("message", item)
        assert choice.content == (message.get("content", message.get("text")) or "")
        assert choice.reasoning == message.get("reasoning_content", "")
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert [(call.name, call.arguments) for call in choice.calls] == calls
        assert choice.reason == item["finish_reason"]
    if read.usage is not None:
        assert read.usage == whole["usage"]
