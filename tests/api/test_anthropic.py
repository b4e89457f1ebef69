"""The Anthropic dialect: bodies, answers, streams and errors, over an engine whose answers are made to order."""

import asyncio
import base64
import json
import re
import sys
from typing import Any

import httpx
import pytest

from omlx.api.anthropic_prompt import own_id, told_id
from omlx.engine.detokenize import REPLACEMENT
from omlx.errors import EngineError, Overloaded
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import REPLY, FakeEngine, FakePool
from tests.api.grammar_anthropic import Read, read, same_as_whole
from tests.api.serving import call
from tests.api.test_pictures import SeeingEngine, png
from tests.small_tokenizers import with_tools

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": [USER]}
WEATHER = {
    "name": "get_weather",
    "description": "Looks out of the window.",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["city"],
    },
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "city": "Köln"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def agent(engine: FakeEngine) -> FakeEngine:
    """A model that knows tools and thinks."""
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    return engine


def ask(app, **fields) -> httpx.Response:
    return call(app, "POST", "/v1/messages", json=BODY | fields)


def streamed(app, **fields) -> Read:
    response = ask(app, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return read(response.text)


def both_ways(app, **fields) -> dict[str, Any]:
    """The whole answer, which the streamed one was found to be the same as."""
    whole = ask(app, **fields)
    assert whole.status_code == 200, whole.text
    same_as_whole(streamed(app, **fields), whole.json())
    return whole.json()


def content_of(app, **fields) -> list[dict[str, Any]]:
    return both_ways(app, **fields)["content"]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def prompt_text(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def prompt_of(app, engine: FakeEngine, *messages: dict[str, Any], **fields: Any) -> str:
    assert ask(app, messages=list(messages), **fields).status_code == 200
    return prompt_text(engine)


def message_of(response: httpx.Response, status: int, kind: str) -> str:
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), body
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    return body["error"]["message"]


# ---- answers


def test_a_plain_answer(app, engine):
    body = both_ways(app)
    assert body["id"].startswith("msg_")
    assert {name: body[name] for name in ("type", "role", "model", "content")} == {
        "type": "message", "role": "assistant", "model": "tiny", "content": [text(REPLY)],
    }  # fmt: skip
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


def test_thought_text_and_calls_are_blocks_in_their_order(app, agent):
    agent.reply = f"<think>\nhm, 1 < 2\n</think>\n\nFirst this.\n{CALL}\nThen that.\n{NOW_CALL}"
    body = both_ways(app, tools=[WEATHER, NOW])
    thought, first, weather, then, now = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm, 1 < 2")
    assert thought["signature"]
    assert (first, then) == (text("First this."), text("\nThen that."))
    assert {name: weather[name] for name in ("type", "name", "input")} == {
        "type": "tool_use", "name": "get_weather", "input": {"days": 2, "city": "Köln"},
    }  # fmt: skip
    assert list(weather["input"]) == ["days", "city"]  # the model's own order
    assert (now["name"], now["input"], body["stop_reason"]) == ("now", {}, "tool_use")
    assert weather["id"].startswith("toolu_")
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": len("hm, 1 < 2")}


def test_blocks_are_streamed_as_they_are_written(app, agent):
    agent.reply = f"<think>ab</think>cd{NOW_CALL}"
    events = [event for event in streamed(app, tools=[NOW]).events if event != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_delta"]
    assert events == [
        "message_start", *block, "content_block_delta", "content_block_stop",  # with the signature
        *block, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


def test_what_cannot_be_read_as_a_call_is_text(app, agent):
    agent.reply = "a\n<tool_call>\n{]\n</tool_call>\nb"
    body = both_ways(app, tools=[NOW])
    assert (body["content"], body["stop_reason"]) == ([text(agent.reply)], "end_turn")


def test_an_enforced_call_is_streamed_in_pieces_also_if_the_limit_cuts_it(app, agent):
    agent.reply = CALL
    choice = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    (found,) = content_of(app, **choice)
    assert found["input"] == {"days": 2, "city": "Köln"}
    assert streamed(app, **choice).events.count("content_block_delta") > 20
    limit = len(CALL.partition("öln")[0])
    whole = ask(app, **choice, max_tokens=limit).json()
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({"days": 2}, "max_tokens")
    cut = streamed(app, **choice, max_tokens=limit).message
    assert (cut["content"][0]["input"], cut["stop_reason"]) == ('{"days": 2, "city": "K', "max_tokens")


def test_the_only_call_that_the_limit_cuts_is_told_as_cut(app, agent):
    agent.reply = CALL
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": len(CALL.partition('"city')[0])}
    assert ask(app, **asked).json()["stop_reason"] == "max_tokens"
    assert streamed(app, **asked).message["stop_reason"] == "max_tokens"


def test_half_of_a_surrogate_pair_in_a_call_is_no_500(app, agent):
    agent.reply = '<tool_call>\n{"name": "now", "arguments": {"a": "\\ud83d x \\ud83d\\ude00 \\ude00"}}\n</tool_call>'
    assert content_of(app, tools=[NOW]) == [text(agent.reply)]
    whole = ask(app, tools=[NOW], tool_choice={"type": "any"}).json()
    assert whole["content"][0]["input"] == {"a": "\ufffd x 😀 \ufffd"}


def test_a_number_in_a_call_that_is_too_large_is_no_500(app, agent):
    agent.reply = '<tool_call>\n{"name": "now", "arguments": {"a": [1e999, -1e999, 5]}}\n</tool_call>'
    found = ask(app, tools=[NOW], tool_choice={"type": "any"}).json()["content"][0]["input"]
    assert found == {"a": [sys.float_info.max, -sys.float_info.max, 5]}


def test_a_stop_sequence_is_found_across_tokens_and_told(app, agent):
    agent.reply = "<think>one. two</think>Three. four"
    body = both_ways(app, stop_sequences=["zzz", ". f"])
    assert [block.get("thinking") or block["text"] for block in body["content"]] == ["one. two", "Three"]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ". f")


def test_the_limit_ends_an_answer(app, engine):
    engine.reply = "a" * 50
    body = both_ways(app, max_tokens=5)
    assert (body["content"], body["stop_reason"], body["usage"]["output_tokens"]) == ([text("aaaaa")], "max_tokens", 5)


def test_a_limit_beyond_the_context_is_cut_down_and_the_contexts_end_is_told(app, engine):
    engine.reply = "a" * 3000
    body = both_ways(app, max_tokens=1_000_000)
    used = body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
    assert (used, body["stop_reason"]) == (engine.context_length, "model_context_window_exceeded")


def test_with_no_tokens_asked_for_only_the_prompt_is_computed(app, agent):
    agent.reply = CALL
    body = both_ways(app, max_tokens=0, tools=[WEATHER])
    assert (body["content"], body["stop_reason"], body["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert agent.seen[-1].sampling.max_tokens == 1


def test_characters_are_whole_in_a_stream(app, engine):
    assert REPLACEMENT not in json.dumps(streamed(app).message, ensure_ascii=False)
    engine.reply = "😀" * 3
    cut = both_ways(app, max_tokens=6)
    assert cut["content"] == [text("😀")]


def test_an_empty_answer_has_no_blocks(app, engine):
    engine.reply = ""
    assert content_of(app) == []


def test_usage_adds_up_to_the_prompt_with_and_without_a_cache_hit(app, engine):
    sums = set()
    for cached in (0, 7):
        engine.cached_tokens = cached
        usage = both_ways(app)["usage"]
        assert usage["cache_read_input_tokens"] == cached
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        sums.add(sum(usage[name] for name in names))
        # What is known when the stream begins is told then.
        start = streamed(app).start_usage
        assert {name: start[name] for name in names} == {name: usage[name] for name in names}
    assert sums == {len(engine.seen[0].prompt)}


def test_pings_keep_a_stream_alive_while_the_prompt_is_computed(app, engine, monkeypatch):
    monkeypatch.setattr("omlx.api.sse.ACCEPT_S", 0.01)
    monkeypatch.setattr("omlx.api.sse.SILENCE_S", 0.01)
    engine.prefill_s, engine.cached_tokens = 0.2, 3
    found = streamed(app)
    assert found.events[:3] == ["message_start", "ping", "ping"]
    prompt = len(engine.seen[0].prompt)
    counts = ("input_tokens", "cache_read_input_tokens")
    assert sum(found.start_usage[name] for name in counts) == prompt
    assert [found.message["usage"][name] for name in counts] == [prompt - 3, 3]


# ---- prompts


def test_system_blocks_and_turns_become_a_conversation(app, engine):
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [text("Be kind.") | cached, text("Be short.\n"), text("Be true.")]
    turns = [USER, {"role": "assistant", "content": [text("ho") | cached]}, USER]
    expected = "<system>Be kind.\nBe short.\nBe true.\n<user>hi\n<assistant>ho\n<user>hi\n<assistant>"
    assert prompt_of(app, engine, *turns, system=system) == expected
    assert prompt_of(app, engine, *turns, system="Be kind.\nBe short.\nBe true.", cache_control=cached) == expected
    assert prompt_of(app, engine, USER, system="") == "<user>hi\n<assistant>"


def test_neighbours_of_one_role_are_one_turn_and_late_system_text_stays(app, engine):
    late = {"role": "system", "content": [text("Now"), text("hurry.")]}
    said = {"role": "assistant", "content": "ho"}
    told = prompt_of(app, engine, USER, {"role": "user", "content": [text("you")]}, said, said, late, USER)
    assert told == "<user>hi\nyou\n<assistant>ho\nho\n<system>Now\nhurry.\n<user>hi\n<assistant>"


def test_a_tools_round_trip_gives_the_model_what_it_wrote(app, agent):
    agent.reply = f"<think>two</think>I look.\n{CALL}\n{NOW_CALL}"
    answer = ask(app, tools=[WEATHER, NOW]).json()
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": [text("rain"), text("wind")]},
        {"type": "tool_result", "tool_use_id": calls[1], "content": "no clock", "is_error": True},
        text("Well?"),
    ]
    answered = {"role": "assistant", "content": answer["content"]}
    told = prompt_of(app, agent, USER, answered, {"role": "user", "content": results}, tools=[WEATHER, NOW])
    assert f"<assistant>I look.\n{CALL}\n{NOW_CALL}\n" in told
    assert told.endswith(
        "<tool>rain\nwind(get_weather)\n<tool>Error: no clock(now)\n<user>Well?\n<assistant>"
    )  # the names are found by the calls' ids


def test_a_template_without_tools_gets_results_and_words_in_one_message(app, engine):
    """As many templates want it: user and assistant in turn."""
    calls = [{"type": "tool_use", "id": "toolu_a", "name": "now", "input": {}}]
    results = [{"type": "tool_result", "tool_use_id": "toolu_a", "content": answer} for answer in ("noon", "one")]
    turns = [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": [*results, text("Well?")]}]
    assert prompt_of(app, engine, *turns, USER).endswith(
        "<user><tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>\nWell?\nhi\n<assistant>"
    )


def test_past_thoughts_go_to_the_template_and_encrypted_ones_are_left_out(app, agent):
    thoughts = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "AAAA"},
        text("yes"),
    ]
    args = {"chat_template_kwargs": {"keep": True}}
    told = prompt_of(app, agent, USER, {"role": "assistant", "content": thoughts}, USER, **args)
    assert "<assistant><think>hm</think>yes\n" in told and "AAAA" not in told


@pytest.mark.parametrize("call_id", ["call_12ab", "functions.get_weather:0", "Ab3dE6gH9", "ü"])
def test_the_ids_of_calls_come_back_as_the_model_had_them(call_id):
    told = told_id(call_id)
    assert told.startswith("toolu_") and told.isascii() and told.replace("_", "").replace("-", "").isalnum()
    assert own_id(told) == call_id
    assert (own_id("toolu_01Abc"), own_id("other"), own_id("toolu_hex-zz")) == ("01Abc", "other", "hex-zz")


def test_documents_and_search_results_are_text(app, engine):
    document = {
        "type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "a b"},
    }  # fmt: skip
    found = {"type": "search_result", "title": "T", "source": "http://x", "content": [text("c")]}
    told = prompt_of(app, engine, {"role": "user", "content": [document, found, text("?")]})
    assert told == "<user>Notes\na b\nT\nhttp://x\nc\n?\n<assistant>"


def test_tools_are_equal_text_whatever_the_order_of_their_keys(app, agent):
    turned = {name: WEATHER[name] for name in reversed(WEATHER)} | {"cache_control": {"type": "ephemeral"}}
    tools = (WEATHER, turned, WEATHER | {"type": "custom"})
    (told,) = {prompt_of(app, agent, USER, tools=[tool, NOW]) for tool in tools}
    assert '"function": {"name": "get_weather", "description"' in told


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ({"type": "auto"}, "free"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "enforced"),
        ({"type": "tool", "name": "now"}, "enforced"),
    ],
)
def test_tool_choice(app, agent, choice, mode):
    agent.reply = NOW_CALL
    body = both_ways(app, tools=[WEATHER, NOW], tool_choice=choice)
    assert body["stop_reason"] == ("end_turn" if mode == "none" else "tool_use")
    grammar = agent.seen[-1].sampling.grammar
    assert (grammar is not None) == (mode == "enforced")
    if choice.get("name"):
        assert "get_weather" not in grammar.text


def test_without_parallel_calls_the_first_one_ends_the_answer(app, agent):
    agent.reply = f"{NOW_CALL}\n{CALL}"
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block["name"] for block in content_of(app, tools=[WEATHER, NOW], tool_choice=choice)] == ["now"]


def test_strict_tools_and_output_formats_are_enforced(app, agent):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    agent.reply = '{"age": 5}'
    given = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": given}}, {"output_format": given}):
        assert content_of(app, **fields) == [text(agent.reply)]
        assert '"age"' in agent.seen[-1].sampling.grammar.text
    ask(app, tools=[WEATHER | {"strict": True}])
    assert agent.seen[-1].sampling.grammar is not None
    impossible = {"type": "json_schema", "schema": {"not": {"type": "object"}}}
    for name, fields in (("output_config", {"format": impossible}), ("output_format", impossible)):
        refused = message_of(ask(app, **{name: fields}), 400, "invalid_request_error")
        assert refused.startswith(f"{name}: it cannot be enforced")


@pytest.mark.parametrize(
    ("thinking", "opens"),
    [
        (None, True),  # as the template has it
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_an_argument_of_the_template(app, agent, thinking, opens):
    agent.reply = "hm</think>42"
    args = {"chat_template_kwargs": {"opens": True}}
    content = content_of(app, thinking=thinking, **args)
    assert [block["type"] for block in content] == (["thinking", "text"] if opens else ["text"])


def test_effort_is_an_argument_of_the_template(app, engine):
    for effort, told in (("low", "(low)"), ("max", "(high)")):
        assert told in prompt_of(app, engine, USER, output_config={"effort": effort})


def test_sampling(app, engine):
    ask(app, temperature=0.5, top_p=0.9, top_k=3, seed=7, stop_sequences=["x"], cache=False, cache_salt="s")
    request = engine.seen[-1]
    found = request.sampling
    assert (found.temperature, found.top_p, found.top_k, found.seed, found.stop) == (0.5, 0.9, 3, 7, ("x",))
    assert (request.use_cache, request.cache_salt) == (False, "s")
    ask(app)
    found = engine.seen[-1].sampling
    assert (found.temperature, found.top_p, found.top_k, found.seed, found.stop) == (1.0, 1.0, 0, None, ())


# ---- prompts that stay the same


def test_the_billing_line_of_agents_is_no_part_of_the_prompt(app, engine):
    """It comes as a block of its own or as the first line of a text, with another value in every request."""
    line = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={};"
    rest = "You are an agent.\nToday is Monday."
    for number in range(3):
        header = line.format(number, number)
        for system in ([text(header), text(rest)], f"{header}\n{rest}", [text(f"{header}\n\n"), text(rest)]):
            assert prompt_of(app, engine, USER, system=system) == f"<system>{rest}\n<user>hi\n<assistant>"
    assert prompt_of(app, engine, USER, system=[text(header)]) == "<user>hi\n<assistant>"
    # Anywhere else it is text like any other.
    for system in ([text(rest), text(header)], f" {header}"):
        assert header in prompt_of(app, engine, USER, system=system)
    assert header in prompt_of(app, engine, {"role": "user", "content": header})


# ---- images


PIXEL = base64.b64encode(b"not really a picture").decode()


def image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


def test_a_text_model_refuses_images_by_their_place(app):
    content = [text("see"), image(type="base64", media_type="image/png", data=PIXEL)]
    message = message_of(ask(app, messages=[{"role": "user", "content": content}]), 400, "invalid_request_error")
    assert message == "messages[0].content[1]: model 'tiny' takes no images"


def picture(width: int) -> dict[str, Any]:
    return image(type="base64", media_type="image/png", data=base64.b64encode(png(width)).decode())


def test_images_of_users_and_of_results_keep_their_order(tmp_path):
    """Those of results follow behind all results of the turn, where templates take images."""
    engine = SeeingEngine()
    engine.tokenizer = with_tools()
    seeing = create_app(FakePool(engine), Settings(home=tmp_path))
    calls = [{"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {}} for name in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_a", "content": [text("see"), picture(2), picture(3)]},
        {"type": "tool_result", "tool_use_id": "toolu_b", "content": [text("none")]},
    ]
    turns = [
        {"role": "user", "content": [picture(1), text("look")]},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, text("and"), picture(4)]},
    ]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert call(seeing, "POST", path, json=BODY | {"messages": turns}).status_code == 200
        messages, pictures = engine.prompts[-1]
        assert [found.size[0] for found in pictures] == [1, 2, 3, 4]
        first, _, *told = messages
        assert first["content"] == [{"type": "image"}, text("look")]
        assert [(message["role"], message["content"]) for message in told] == [
            ("tool", "see\n[image]\n[image]"),
            ("tool", "none"),
            ("user", [{"type": "image"}, {"type": "image"}, text("and"), {"type": "image"}]),
        ]
    # A template that knows no tools: all of the turn is one message.
    engine.tokenizer = FakeEngine().tokenizer
    assert ask(seeing, messages=turns).status_code == 200
    messages, _ = engine.prompts[-1]
    assert len(messages) == 3
    assert [part.get("text", "image")[-3:] for part in messages[-1]["content"]] == ["se>", "age", "age", "and", "age"]


def test_images_by_url_follow_the_servers_rules(tmp_path):
    seeing = create_app(FakePool(SeeingEngine()), Settings(home=tmp_path))
    remote = {"role": "user", "content": [image(type="url", url="https://example.com/a.png")]}
    message = message_of(ask(seeing, messages=[remote]), 400, "invalid_request_error")
    assert message.startswith("messages[0].content[0]: images from the web are not allowed here")


# ---- tokens


def test_tokens_are_counted_as_the_answer_counts_them(app, agent):
    fields = {
        "system": [text("x-anthropic-billing-header: cch=1;"), text("Be kind.")],
        "tools": [WEATHER, NOW],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "adaptive"},
        "chat_template_kwargs": {"opens": True},
    }
    usage = ask(app, **fields).json()["usage"]
    agent.seen.clear()
    body = {"model": "tiny", "messages": [USER]} | fields
    counted = call(app, "POST", "/v1/messages/count_tokens", json=body)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": usage["input_tokens"]})
    assert agent.seen == []  # nothing was queued
    ends = [USER, {"role": "assistant", "content": "ho"}]
    assert call(app, "POST", "/v1/messages/count_tokens", json=body | {"messages": ends}).status_code == 200


def test_tokens_beyond_the_context_are_counted_all_the_same(app, engine):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 2500}]}
    assert call(app, "POST", "/v1/messages/count_tokens", json=body).json()["input_tokens"] > engine.context_length


# ---- errors


def test_errors_have_anthropics_shape(app, engine, tmp_path):
    message_of(ask(app, model="nope"), 404, "not_found_error")
    message_of(call(app, "GET", "/v1/messages"), 405, "invalid_request_error")
    engine.refusal = Overloaded("the queue is full")
    for stream in (False, True):
        full = ask(app, stream=stream)
        message_of(full, 503, "overloaded_error")
        assert full.headers["retry-after"] == "5"
    engine.refusal = EngineError("broken")
    message_of(ask(app), 500, "api_error")
    locked = create_app(FakePool(), Settings(home=tmp_path, api_key="k", max_request_size="1KB"))
    message_of(ask(locked), 401, "authentication_error")
    for headers in ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, {"authorization": "Bearer k"}):
        assert call(locked, "POST", "/v1/messages", json=BODY, headers=headers).status_code == 200
        long = BODY | {"system": "x" * 2000}
        message_of(call(locked, "POST", "/v1/messages", json=long, headers=headers), 413, "request_too_large")


async def test_too_many_requests_of_one_key(tmp_path):
    pool = FakePool(FakeEngine(prefill_s=0.5))
    app = create_app(pool, Settings(home=tmp_path, api_key="k", max_requests_per_key=1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        options = {"json": BODY, "headers": {"x-api-key": "k"}}
        first, second = await asyncio.gather(*(client.post("/v1/messages", **options) for _ in range(2)))
    limited = first if first.status_code == 429 else second
    message_of(limited, 429, "rate_limit_error")
    assert limited.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for(app, engine, path):
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 200_000}]}
    message = message_of(call(app, "POST", path, json=body), 400, "invalid_request_error")
    assert re.match(r"prompt is too long: messages: 2000\d\d characters are more than 2000 tokens", message)
    if path == "/v1/messages":
        body["messages"] = [{"role": "user", "content": "x" * 2500}]
        tokens = len("<user>") + 2500 + len("\n<assistant>")
        message = message_of(call(app, "POST", path, json=body), 400, "invalid_request_error")
        assert message == f"prompt is too long: {tokens} tokens > 2000 maximum"


def test_a_failure_in_the_middle_is_an_event_of_its_own(app, engine):
    engine.failure, engine.fail_after = EngineError("the device is gone"), 3
    response = ask(app, stream=True)
    found = read(response.text, fails=True)
    assert found.error == {"type": "api_error", "message": "the device is gone"}
    assert found.message["content"][0]["text"] == REPLY[:2]


# ---- models


def test_models_are_listed_for_both_families_of_clients(app):
    body = call(app, "GET", "/v1/models").json()
    assert (body["object"], body["has_more"]) == ("list", False)
    assert (body["first_id"], body["last_id"]) == ("tiny", "org/unloaded")
    shown = call(app, "GET", "/v1/models/org/unloaded").json()
    assert shown == body["data"][1]
    assert (shown["object"], shown["type"], shown["display_name"]) == ("model", "model", "org/unloaded")
    assert shown["created_at"].endswith("Z")
