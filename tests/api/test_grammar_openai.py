"""The validator of streams takes a log of the published form, and notices every change that breaks a rule."""

from pathlib import Path

import pytest

from tests.api.grammar_openai import Call, StreamError, read_chat

LOG = (Path(__file__).parent / "golden" / "openai_tools.sse").read_text(encoding="utf-8")
EVENTS = LOG.removesuffix("\n\n").split("\n\n")


def log(events: list[str]) -> str:
    return "".join(f"{event}\n\n" for event in events)


def test_the_golden_log_is_read():
    read = read_chat(LOG, include_usage=True)
    choice = read.choices[0]
    assert (choice.content, choice.reason) == ("Let me look.", "tool_calls")
    assert choice.calls == [Call("call_a", "get_weather", '{"city":"Paris"}'), Call("call_b", "now", "{}")]
    assert read.usage is not None and read.usage["total_tokens"] == 21
    assert read_chat(": a comment\n" + LOG, include_usage=True).comments == ["a comment"]


@pytest.mark.parametrize("left_out", [0, 2, 3, 6, 7, 8])
def test_an_event_that_is_missing_is_noticed(left_out):
    with pytest.raises((StreamError, ValueError)):
        read_chat(log(EVENTS[:left_out] + EVENTS[left_out + 1 :]), include_usage=True)


@pytest.mark.parametrize("twice", [0, 2, 4, 6, 7, 8])
def test_an_event_that_comes_twice_is_noticed(twice):
    with pytest.raises((StreamError, ValueError)):
        read_chat(log(EVENTS[: twice + 1] + EVENTS[twice:]), include_usage=True)


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 6, 7])
def test_events_in_another_order_are_noticed(first):
    order = [*EVENTS[:first], EVENTS[first + 1], EVENTS[first], *EVENTS[first + 2 :]]
    if first == 1:  # text may stand between calls as well
        return
    with pytest.raises((StreamError, ValueError)):
        read_chat(log(order), include_usage=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"id":"chatcmpl-1","object"', '"id":"chatcmpl-2","object"'),
        ('"role":"assistant",', ""),
        ('"index":0,"id":"call_a"', '"index":1,"id":"call_a"'),
        ('"call_b"', '"call_a"'),
        ('"finish_reason":"tool_calls"', '"finish_reason":"stop"'),
        ('"finish_reason":"tool_calls"', '"finish_reason":"done"'),
        ('"total_tokens":21', '"total_tokens":22'),
        ('\\"Paris\\"}', '\\"Paris\\"'),
        (',"usage":null}', "}"),
        ("Let me look.", "Let me look\ufffd"),
        ('"content":"Let me look."', '"words":"Let me look."'),
        ("data: [DONE]\n\n", "data: [DONE]"),
        ("data: [DONE]", "event: done"),
    ],
)
def test_a_changed_event_is_noticed(old, new):
    assert old in LOG
    with pytest.raises((StreamError, ValueError)):
        read_chat(LOG.replace(old, new, 1), include_usage=True)


def test_a_blank_line_after_a_comment_is_noticed():
    with pytest.raises(StreamError):
        read_chat(": a comment\n\n" + LOG, include_usage=True)
