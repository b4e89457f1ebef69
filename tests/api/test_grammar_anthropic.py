"""The validator of streams takes a log of the published form, and notices every change that breaks a rule."""

from pathlib import Path

import pytest

from tests.api.grammar_anthropic import StreamError, read

LOG = (Path(__file__).parent / "golden" / "anthropic_tools.sse").read_text(encoding="utf-8")
EVENTS = LOG.removesuffix("\n\n").split("\n\n")
# Events that may be left out, come twice or change places: a ping, a piece of a text.
FREE = {1, 7, 8, 11}
ERROR = 'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'


def log(events: list[str]) -> str:
    return "".join(f"{event}\n\n" for event in events)


def test_the_golden_log_is_read():
    message = read(LOG).message
    assert message["content"] == [
        {"type": "thinking", "thinking": "Two cities.", "signature": "EqQBCgIYAhIM"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_01A", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "toolu_01B", "name": "now", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 20, "output_tokens": 89,
    }  # fmt: skip


def test_pings_may_come_anywhere_and_an_error_ends_a_stream():
    for at in range(1, len(EVENTS)):
        assert read(log([*EVENTS[:at], EVENTS[1], *EVENTS[at:]])).message["stop_reason"] == "tool_use"
        failed = read(log(EVENTS[:at]) + ERROR, fails=True)
        assert failed.error == {"type": "overloaded_error", "message": "Overloaded"}
        with pytest.raises(StreamError):
            read(log(EVENTS[:at]) + ERROR)


@pytest.mark.parametrize("left_out", sorted(set(range(len(EVENTS))) - FREE - {3}))
def test_an_event_that_is_missing_is_noticed(left_out):
    with pytest.raises((StreamError, ValueError)):
        read(log(EVENTS[:left_out] + EVENTS[left_out + 1 :]))


@pytest.mark.parametrize("twice", sorted(set(range(len(EVENTS))) - FREE - {3, 17}))
def test_an_event_that_comes_twice_is_noticed(twice):
    with pytest.raises((StreamError, ValueError)):
        read(log(EVENTS[: twice + 1] + EVENTS[twice:]))


@pytest.mark.parametrize("first", sorted({0, *range(2, len(EVENTS) - 1)} - FREE))
def test_events_in_another_order_are_noticed(first):
    order = [*EVENTS[:first], EVENTS[first + 1], EVENTS[first], *EVENTS[first + 2 :]]
    with pytest.raises((StreamError, ValueError)):
        read(log(order))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("event: ping", "event: pong"),
        ('{"type": "ping"}', '{"type": "ping", "n": 1}'),
        ("event: message_start\n", ""),
        ('"type":"message_start"', '"type":"message_begin"'),
        ('"id":"msg_1"', '"id":""'),
        ('"role":"assistant"', '"role":"user"'),
        ('"content":[]', '"content":[{}]'),
        ('"stop_reason":null', '"stop_reason":"end_turn"'),
        ('"cache_read_input_tokens":20', '"cache_read_input_tokens":-1'),
        ('"output_tokens":89', '"output_tokens":0'),
        ('"index":0', '"index":1'),
        ('"index":2,"content_block"', '"index":1,"content_block"'),
        ('"signature":""', '"signature":"x"'),
        ('"type":"text","text":""', '"type":"text","text":"x"'),
        ('"type":"text","text":""', '"type":"words","text":""'),
        ('"type":"text_delta"', '"type":"thinking_delta"'),
        ('"text":"look."', '"words":"look."'),
        ("toolu_01B", "toolu_01A"),
        ("toolu_01B", "toolu.01B"),
        ('"name":"now",', '"name":"",'),
        ('\\"Paris\\"}', '\\"Paris\\"'),
        ('"stop_reason":"tool_use"', '"stop_reason":"end_turn"'),
        ('"stop_reason":"tool_use"', '"stop_reason":"done"'),
        ('"stop_sequence":null},"usage"', '"stop_sequence":"x"},"usage"'),
        ("look.", "look\ufffd"),
        ('data: {"type":"message_stop"}\n\n', 'data: {"type":"message_stop"}'),
        ('"Two cities."', '"Two\ncities."'),
    ],
)
def test_a_changed_event_is_noticed(old, new):
    assert old in LOG
    with pytest.raises((StreamError, ValueError, KeyError)):
        read(LOG.replace(old, new, 1))
