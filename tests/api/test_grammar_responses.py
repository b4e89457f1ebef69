"""The validator of Responses streams takes a log of the published form, and notices every change that breaks a rule."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.grammar_openai import StreamError
from tests.api.grammar_responses import read_response

LOG = (Path(__file__).parent / "golden" / "responses.sse").read_text(encoding="utf-8")
EVENTS = [json.loads(block.split("\ndata: ")[1]) for block in LOG.removesuffix("\n\n").split("\n\n")]
TYPES = [event["type"] for event in EVENTS]


def log(events: list[dict[str, Any]]) -> str:
    """With numbers of its own, so that another rule has to notice what is wrong."""
    numbered = [event | {"sequence_number": number} for number, event in enumerate(events)]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered)


def refused(body: str) -> None:
    with pytest.raises((StreamError, ValueError, KeyError)):
        read_response(body)


def failed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log of an answer that went wrong behind these events."""
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    fault = {"code": "server_error", "message": "it broke"}
    last = EVENTS[-1]["response"] | {"status": "failed", "error": fault, "output": done, "usage": None}
    told = {"type": "error", "param": None} | fault
    return [*events, told, {"type": "response.failed", "response": last}]


def test_the_golden_log_is_read():
    read = read_response(LOG)
    kinds = ["reasoning", "message", "function_call", "custom_tool_call"]
    assert [item["type"] for item in read.output] == kinds
    assert read.deltas == ["Paris, ", "then.", "Let me", " look."]
    assert read_response(": a comment\n" + LOG).comments == ["a comment"]
    assert log(EVENTS).count("event: ") == len(EVENTS)
    assert read_response(log(EVENTS)).output == read.output


@pytest.mark.parametrize("at", [2, 5, 9, 12, 18, len(EVENTS) - 1])
def test_a_failure_may_come_anywhere_and_nothing_behind_it(at):
    assert read_response(log(failed(EVENTS[:at]))).error["message"] == "it broke"
    refused(log([*failed(EVENTS[:at])[:-1], *EVENTS[at:]]))
    refused(log([*EVENTS[:at], failed([])[-1] | {"response": EVENTS[-1]["response"]}]))


@pytest.mark.parametrize("left_out", range(len(EVENTS)))
def test_an_event_that_is_missing_is_noticed(left_out):
    refused(log(EVENTS[:left_out] + EVENTS[left_out + 1 :]))


@pytest.mark.parametrize("twice", range(len(EVENTS)))
def test_an_event_that_comes_twice_is_noticed(twice):
    refused(log(EVENTS[: twice + 1] + EVENTS[twice:]))


@pytest.mark.parametrize("first", range(len(EVENTS) - 1))
def test_events_in_another_order_are_noticed(first):
    refused(log([*EVENTS[:first], EVENTS[first + 1], EVENTS[first], *EVENTS[first + 2 :]]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("event: response.created", "event: response.made"),
        ("event: response.created\n", ""),
        ('"sequence_number":3,', '"sequence_number":4,'),
        ('"sequence_number":0,', '"sequence_number":1,'),
        ('"item_id":"msg_1","output_index":1,"content_index":0,"delta"', '"item_id":"rs_1","output_index":1,"delta"'),
        ('"output_index":1,"content_index":0,"delta"', '"output_index":0,"content_index":0,"delta"'),
        ('"content_index":0,"delta":"Let me"', '"content_index":1,"delta":"Let me"'),
        ('"delta":"Let me"', '"delta":"Let us"'),
        (',"delta":"Let me","logprobs":[]', ',"delta":"Let me"'),
        ('"delta":"Paris, "', '"delta":"Paris; "'),
        ('"arguments":"{\\"city\\":\\"Paris\\"}"', '"arguments":"{}"'),
        ('\\"Paris\\"}', '\\"Paris\\"'),
        ('"input":"*** Begin"}', '"input":"*** End"}'),
        ('"arguments":"","call_id":"call_1"', '"arguments":"","call_id":"call_9"'),
        ('"item":{"id":"msg_1"', '"item":{"id":"rs_1"'),
        ('"status":"completed","arguments"', '"status":"in_progress","arguments"'),
        ('"type":"response.completed"', '"type":"response.incomplete"'),
        ('"total_tokens":48', '"total_tokens":49'),
        ('"cached_tokens":30', '"cached_tokens":38'),
        ('"reasoning_tokens":3', '"reasoning_tokens":12'),
        ('"status":"completed","error":null', '"status":"completed","error":{}'),
        ("Let me look.", "Let me look\ufffd"),
    ],
)
def test_a_changed_event_is_noticed(old, new):
    assert old in LOG
    refused(LOG.replace(old, new, 1))


def test_another_end_of_the_file_is_noticed():
    refused(LOG.removesuffix("\n"))
    refused(LOG + "data: [DONE]\n\n")
