"""POST /v1/responses: items become messages, answers become items, streamed and whole; what is refused, and how."""

import json
import logging
import random

import pytest

from omlx.errors import EngineError, Overloaded
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import REPLY, FakeEngine, FakePool
from tests.api.grammar_responses import read_response, same_as_whole
from tests.api.serving import call
from tests.api.test_pictures import SeeingEngine, part, png
from tests.small_tokenizers import with_tools

RESPONSE = {"model": "tiny", "input": "hi"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Looks out of the window.",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["city"],
    },
}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": None}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "patch"'},
}
FILES = {"type": "namespace", "name": "files", "description": "Files.", "tools": [{"type": "function", "name": "read"}]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "city": "Köln"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
KEEP = {"keep": True}  # this template shows past reasoning then


@pytest.fixture(scope="module")
def pool():
    return FakePool()


@pytest.fixture(scope="module")
def app(pool, tmp_path_factory):
    """One for all tests: what differs is the engine."""
    return create_app(pool, Settings(home=tmp_path_factory.mktemp("home")))


@pytest.fixture
def engine(pool) -> FakeEngine:
    pool.engines = {"tiny": FakeEngine()}
    return pool.engine


@pytest.fixture
def agent(engine) -> FakeEngine:
    """A model that knows tools and thinks."""
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    return engine


def respond(app, **fields):
    return call(app, "POST", "/v1/responses", json=RESPONSE | fields)


def whole(app, **fields):
    response = respond(app, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def both_ways(app, **fields):
    """The whole answer, which the streamed one was found to be the same as."""
    body = whole(app, **fields)
    same_as_whole(read_response(respond(app, **fields, stream=True).text), body)
    return body


def refused(app, **fields):
    response = respond(app, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def prompt_text(engine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def said(role, text):
    return {"role": role, "content": text}


# ---- answers


def test_a_response_has_its_form(app, engine):
    engine.cached_tokens = 5
    body = both_ways(app, metadata={"run": "7"}, temperature=0.5, max_output_tokens=100)
    assert body["id"].startswith("resp_") and body["object"] == "response"
    assert (body["status"], body["model"], body["error"]) == ("completed", "tiny", None)
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.5, 1.0, 100)
    assert (body["metadata"], body["store"]) == ({"run": "7"}, True)
    (message,) = body["output"]
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": REPLY, "annotations": [], "logprobs": []}]
    prompt, generated = len("<user>hi\n<assistant>"), len(REPLY.encode()) + 1
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": prompt - 5},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
    assert whole(app, cache=False)["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


def test_reasoning_text_and_calls_are_items_in_their_order(app, agent):
    agent.reply = f"<think>hm</think>First this.\n{CALL}\nThen that.\n{NOW_CALL}"
    body = both_ways(app, tools=[WEATHER, NOW])
    kinds = ["reasoning", "message", "function_call", "message", "function_call"]
    assert [item["type"] for item in body["output"]] == kinds
    thought, first, weather, then, now = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}] and thought["summary"] == []
    assert [item["content"][0]["text"].strip() for item in (first, then)] == ["First this.", "Then that."]
    assert (weather["name"], weather["arguments"]) == ("get_weather", '{"days": 2, "city": "Köln"}')
    assert weather["call_id"] != weather["id"] != now["id"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert body["tools"][0] == WEATHER


def test_an_answer_that_the_limit_cuts_is_incomplete(app, agent):
    body = both_ways(app, max_output_tokens=4)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    agent.reply = "<think>a long story"
    body = both_ways(app, max_output_tokens=8)
    assert [(item["type"], item["status"]) for item in body["output"]] == [("reasoning", "incomplete")]


def test_an_empty_answer_is_an_empty_message(app, engine):
    engine.reply = ""
    assert [item["content"][0]["text"] for item in both_ways(app)["output"]] == [""]


@pytest.mark.parametrize("tool", [WEATHER, PATCH], ids=["function", "custom"])
def test_a_call_that_holds_odd_json_is_no_500(app, agent, tool):
    # The engine here does not hold to the form: a call is taken for what it looks like.
    agent.context_length = 20_000
    for arguments in ('{"input": ' + "[" * 1500, '{"input": ' + "[" * 1500 + "]" * 1500 + "}"):
        agent.reply = f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {arguments}}}\n</tool_call>'
        for choice in ("auto", "required"):
            asked = {"tools": [tool], "tool_choice": choice}
            assert whole(app, **asked)["output"]
            assert "server_error" not in respond(app, **asked, stream=True).text


def test_half_of_a_surrogate_pair_in_a_custom_tools_input_is_replaced(app, agent):
    agent.reply = (
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "a\\ud83d \\ud83d\\ude00"}}\n</tool_call>'
    )
    (item,) = whole(app, tools=[PATCH], tool_choice="required")["output"]
    assert item["input"] == "a\ufffd 😀"
    events = respond(app, tools=[PATCH], tool_choice="required", stream=True).text
    assert events.count("response.completed") == 2 and "error" not in events.replace('"error":null', "")


def test_a_custom_tool_is_called_with_a_text(app, agent):
    agent.reply = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+ö"}}\n</tool_call>'
    (item,) = both_ways(app, tools=[PATCH])["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+ö")
    assert 'start: \\"patch\\"' in prompt_text(agent)
    agent.reply = '<tool_call>\n{"name": "apply_patch", "arguments": {"patch": "a"}}\n</tool_call>'
    (item,) = both_ways(app, tools=[PATCH])["output"]
    assert item["input"] == '{"patch": "a"}'  # nothing of what the model wrote is lost


def test_functions_of_a_namespace_are_called_in_it(app, agent):
    agent.reply = '<tool_call>\n{"name": "files__read", "arguments": {}}\n</tool_call>'
    (item,) = both_ways(app, tools=[FILES])["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "read", "files")
    past = [said("user", "a"), item, {"type": "function_call_output", "call_id": item["call_id"], "output": "b"}]
    whole(app, input=past, tools=[FILES])
    assert '{"name": "files__read", "arguments": {}}' in prompt_text(agent)
    assert "<tool>b(files__read)" in prompt_text(agent)


def test_a_call_whose_arguments_the_limit_cuts_is_incomplete(app, agent):
    agent.reply = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "city": "Köln"}}\n</tool_call>'
    body = both_ways(app, tools=[WEATHER], tool_choice="required", max_output_tokens=60)
    (item,) = body["output"]
    assert (item["type"], item["status"], body["status"]) == ("function_call", "incomplete", "incomplete")
    assert agent.reply.partition('"arguments": ')[2].startswith(item["arguments"])


def test_half_a_character_behind_a_call_is_no_message(app, agent):
    agent.reply = f"{CALL}ö"
    body = both_ways(app, tools=[WEATHER], top_logprobs=1, max_output_tokens=len(CALL.encode()) + 1)
    assert [(item["type"], item["status"]) for item in body["output"]] == [("function_call", "completed")]
    assert body["status"] == "incomplete"


@pytest.mark.parametrize("seed", range(6))
def test_streams_keep_to_the_grammar_whatever_the_model_writes(app, agent, seed):
    rng = random.Random(seed)
    patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "x"}}\n</tool_call>'
    parts = [CALL, NOW_CALL, patch, "<think>", "</think>", "text 😀 ", "\n\n", "<tool_call>", "{", "Grüße"]
    tools = [WEATHER, NOW, PATCH] if seed % 2 else None
    for _ in range(4):
        agent.reply = "".join(rng.choices(parts, k=rng.randrange(8)))
        both_ways(app, tools=tools, max_output_tokens=rng.choice([7, 50, 500]), parallel_tool_calls=seed != 5)


def test_logprobs_are_those_of_the_text(app, agent):
    agent.reply = "<think>hm</think>Grüße"
    for fields, top in (({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2)):
        body = both_ways(app, **fields)
        tokens = body["output"][1]["content"][0]["logprobs"]
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == "Grüße"
        assert [len(token["top_logprobs"]) for token in tokens] == [top] * len(tokens)


def test_a_prompt_that_takes_long_keeps_the_connection_alive(app, engine, monkeypatch):
    monkeypatch.setattr("omlx.api.sse.ACCEPT_S", 0.02)
    monkeypatch.setattr("omlx.api.sse.SILENCE_S", 0.02)
    engine.prefill_s = 0.2
    read = read_response(respond(app, stream=True).text)
    assert [comment for comment in read.comments if comment.startswith("prefill ")]


# ---- failures


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_status(app, engine, stream):
    engine.refusal = Overloaded("full", retry_after_s=7)
    response = respond(app, stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    assert response.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("it broke"), "server_error"), (Overloaded("full"), "rate_limit_exceeded")]
)
def test_an_error_in_mid_stream_is_a_failed_response_that_is_not_kept(app, engine, error, code):
    engine.failure, engine.fail_after = error, 3
    read = read_response(respond(app, stream=True).text)
    assert read.response["status"] == "failed"
    assert read.response["error"] == {"code": code, "message": str(error)}
    assert (read.error["code"], read.error["message"]) == (code, str(error))
    assert call(app, "GET", f"/v1/responses/{read.response['id']}").status_code == 404


# ---- what the model sees


def test_items_become_messages(app, agent):
    items = [
        said("system", "be kind"),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Bonn"}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "secret"},
        said("assistant", [{"type": "refusal", "refusal": "no"}]),
        said("developer", "be brief"),
    ]  # fmt: skip
    whole(app, input=items, chat_template_kwargs=KEEP)
    assert prompt_text(agent) == (
        "<system>be kind\n<user>one\ntwo\n<assistant><think>hm</think>I look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "x"}}\n</tool_call>\n'
        "<tool>rain(get_weather)\n<tool>ok(apply_patch)\n<assistant>no\n<system>be brief\n<assistant>"
    )


def test_an_answer_in_another_order_is_several_messages(app, agent):
    now = {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"}
    whole(app, input=[said("user", "u"), said("assistant", "a"), now, said("assistant", "b"), said("assistant", "c")])
    assert prompt_text(agent) == f"<user>u\n<assistant>a\n{NOW_CALL}\n<assistant>b\n<assistant>c\n<assistant>"


def test_an_answer_that_ended_in_its_reasoning_is_a_message_of_its_own(app, agent):
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    whole(app, input=[said("user", "u"), thought, said("user", "v"), said("assistant", "w")], chat_template_kwargs=KEEP)
    assert prompt_text(agent) == "<user>u\n<assistant><think>hm</think>\n<user>v\n<assistant>w\n<assistant>"


def test_pictures_reach_models_that_take_them_also_from_earlier_turns(app, pool):
    pool.engines = {"tiny": SeeingEngine()}
    picture = {"type": "input_image", "image_url": part(png(2))["image_url"]["url"], "detail": "low"}
    first = whole(app, input=[said("user", [{"type": "input_text", "text": "What?"}, picture])])
    second = [{"type": "message", **said("user", [picture, picture])}]
    whole(app, input=second, previous_response_id=first["id"])
    (once, _), (messages, shown) = pool.engine.prompts[0], pool.engine.prompts[-1]
    assert once == [said("user", [{"type": "text", "text": "What?"}, {"type": "image"}])]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0] == once[0] and messages[2]["content"] == [{"type": "image"}] * 2
    assert [found.size for found in shown] == [(2, 5)] * 3


def test_instructions_come_first_and_take_in_the_system_messages_behind_them(app, agent):
    items = [said("developer", "b"), said("system", "c"), said("user", "u"), said("developer", "d")]
    whole(app, instructions="a", input=items)
    assert prompt_text(agent) == "<system>a\n\nb\n\nc\n<user>u\n<system>d\n<assistant>"
    whole(app, input=items)
    assert prompt_text(agent).startswith("<system>b\n<system>c\n<user>u")
    whole(app, instructions="a", input=[])
    assert prompt_text(agent) == "<system>a\n<assistant>"


def test_a_billing_header_is_no_part_of_the_prompt(app, agent):
    for number in range(2):
        header = f"x-anthropic-billing-header: cch={number};"
        items = [said("developer", f"{header}\na"), said("user", "u")]
        for fields in ({"instructions": f"{header}\na"}, {"input": items}):
            whole(app, **{"input": "u"} | fields)
            assert prompt_text(agent) == "<system>a\n<user>u\n<assistant>"
    whole(app, instructions="a", input=header)
    assert header in prompt_text(agent)


def test_a_conversation_goes_on_behind_a_response_but_for_its_instructions(app, agent):
    agent.reply = f"<think>hm</think>I look.\n{CALL}"
    first = whole(app, instructions="old", input="Is it raining?", tools=[WEATHER])
    before = prompt_text(agent)
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "rain"}
    second = whole(app, previous_response_id=first["id"], input=[output], tools=[WEATHER], instructions="old")
    # Exactly the earlier prompt and the answer as it was generated, but for what this template leaves out of the past.
    assert prompt_text(agent) == f"{before}I look.\n{CALL}\n<tool>rain(get_weather)\n<assistant>"
    assert second["previous_response_id"] == first["id"]
    agent.reply = "Wet."
    third = whole(app, previous_response_id=second["id"], input="And now?")
    assert prompt_text(agent).startswith("<user>Is it raining?\n<assistant>I look.")
    assert prompt_text(agent).count("<tool>rain") == 1
    assert third["instructions"] is None


def test_two_conversations_branch_off_one_response(app, agent):
    agent.reply = "ok"
    root = whole(app, input="a")["id"]
    for turn in ("b", "c"):
        whole(app, previous_response_id=root, input=turn)
        assert prompt_text(agent) == f"<user>a\n<assistant>ok\n<user>{turn}\n<assistant>"


def test_stored_items_can_be_referred_to(app, agent):
    agent.reply = "ok"
    first = whole(app, input=[said("user", "a") | {"id": "msg_mine"}])
    references = [{"type": "item_reference", "id": name} for name in ("msg_mine", first["output"][0]["id"])]
    second = whole(app, input=[*references, said("user", "b")])
    assert prompt_text(agent) == "<user>a\n<assistant>ok\n<user>b\n<assistant>"
    kept = call(app, "GET", f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert kept[1]["content"][0]["text"] == "ok"  # what they stood for
    unknown = respond(app, input=[{"type": "item_reference", "id": "msg_x"}])
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "input[0].id")


def test_sampling_and_the_cache_are_those_of_the_other_endpoints(app, engine):
    whole(app, temperature=0, top_p=0.9, top_k=4, seed=7, stop="x", max_output_tokens=9, cache=False, cache_salt="s")
    request, sampling = engine.seen[-1], engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.9, 4, 7)
    assert (sampling.stop, sampling.max_tokens, request.use_cache, request.cache_salt) == (("x",), 9, False, "s")


def test_effort_is_an_argument_of_the_template(app, agent):
    agent.reply = "hm</think>42"
    for fields, kinds in (
        ({"chat_template_kwargs": {"opens": True}}, ["reasoning", "message"]),
        ({"chat_template_kwargs": {"opens": True}, "reasoning": {"effort": "none"}}, ["message"]),
    ):
        assert [item["type"] for item in both_ways(app, **fields)["output"]] == kinds


def test_equal_tools_are_the_same_prompt(app, agent):
    shuffled = {key: WEATHER[key] for key in ("parameters", "name", "description", "type")}
    prompts = []
    for tools in ([WEATHER], [shuffled | {"strict": False}]):
        whole(app, tools=tools)
        prompts.append(prompt_text(agent))
    assert prompts[0] == prompts[1] and prompts[0].startswith("<tools>")


# ---- tools that may be called


def test_allowed_tools_leave_the_prompt_as_it_is(app, agent):
    agent.reply = CALL
    whole(app, tools=[WEATHER, NOW])
    free = agent.seen[-1]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    whole(app, tools=[WEATHER, NOW], tool_choice=allowed)
    held = agent.seen[-1]
    assert held.prompt == free.prompt and free.sampling.grammar is None
    assert '"now' in held.sampling.grammar.text and "get_weather" not in held.sampling.grammar.text
    whole(app, tools=[WEATHER, NOW], tool_choice=allowed | {"mode": "required"})
    assert "get_weather" not in agent.seen[-1].sampling.grammar.text
    named = {"type": "custom", "name": "apply_patch"}
    whole(app, tools=[WEATHER, PATCH], tool_choice=named)
    assert "apply_patch" in agent.seen[-1].sampling.grammar.text
    assert "get_weather" not in agent.seen[-1].sampling.grammar.text


def test_hosted_tools_that_agents_offer_unasked_are_left_out_and_said_so(app, agent, caplog):
    offered = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    with caplog.at_level(logging.WARNING):
        body = whole(app, tools=[*offered, NOW])
    assert [tool["name"] for tool in body["tools"]] == ["now"]
    assert "image_generation, web_search" in caplog.text
    assert "search" not in prompt_text(agent)
    assert refused(app, tools=offered, tool_choice="required")["param"] == "tool_choice"


@pytest.mark.parametrize(
    "kind", ["local_shell", "shell", "apply_patch", "file_search", "code_interpreter", "mcp", "computer_use_preview"]
)
def test_other_hosted_tools_are_refused_by_name(app, engine, kind):
    error = refused(app, tools=[NOW, {"type": kind}])
    assert (error["param"], error["code"]) == ("tools[1].type", "unsupported_parameter")
    assert kind in error["message"]


# ---- formats


def test_formats_are_enforced_and_named_as_they_are_here(app, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    body = whole(app, text={"format": form, "verbosity": "low"})
    assert body["text"] == {"format": form}
    assert '"integer"' in engine.seen[-1].sampling.grammar.text
    whole(app, text={"format": {"type": "json_object"}})
    assert engine.seen[-1].sampling.grammar.kind == "json_object"
    whole(app, text={"format": {"type": "text"}})
    assert engine.seen[-1].sampling.grammar is None
    form["schema"] = {"type": "array", "uniqueItems": True}
    assert refused(app, text={"format": form})["param"] == "text.format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "x" * 201}]}, "input[0].type"),
        ({"input": [{"type": 5, "role": "user", "content": "a"}]}, "input[0].type"),
        ({"input": [{"type": [], "role": "user", "content": "a"}]}, "input[0].type"),
        ({"input": [{"type": "message", "role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [said("user", "a"), said("user", [])]}, "input[1].content"),
        ({"input": [said("user", [{"type": "texts", "text": "a"}])]}, "input[0].content[0]"),
        ({"input": [said("user", [{"type": "input_file", "file_id": "a"}])]}, "input[0].content[0]"),
        ({"input": [said("user", [{"type": "input_image", "file_id": "a"}])]}, "input[0].content[0]"),
        ({"input": [said("user", [{"type": "input_image", "image_url": "data:,"}])]}, "input[0].content[0]"),
        ({"input": [said("system", [{"type": "input_image", "image_url": "a"}])]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": [5]}]}, "input[0].output[0]"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": {}, "name": "a"}]}, "tools[0].type"),
        ({"tools": [NOW, NOW]}, "tools[1].name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].name"),
        ({"tools": [FILES, {"type": "function", "name": "files__read"}]}, "tools[1].name"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(app, engine, fields, param):
    error = refused(app, **fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"]


def test_an_unknown_response_to_go_on_from_has_the_code_that_clients_know(app, engine):
    assert refused(app, previous_response_id="resp_x")["code"] == "previous_response_not_found"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(app, engine):
    error = refused(app, input="x" * 2000, truncation="auto")
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "2018" in error["message"] and "2000" in error["message"]


def test_fields_that_nobody_knows_are_ignored(app, engine):
    body = whole(app, unheard_of=[1], max_tokens="x", messages=5, n=7)
    assert len(engine.seen) == 1
    assert "unheard_of" not in json.dumps(body)


# ---- counting and canceling


def count(app, **fields):
    return call(app, "POST", "/v1/responses/input_tokens", json={"model": "tiny"} | fields)


def test_input_tokens_are_those_of_the_usage_and_nothing_is_generated(app, agent):
    said = [{"role": "user", "content": "What is it like?"}]
    fields = {"input": said, "instructions": "Be brief.", "tools": [WEATHER]}
    body = whole(app, **fields)
    agent.seen.clear()
    for more in ({}, {"stream": True}):
        response = count(app, **fields, **more)
        assert response.json() == {"object": "response.input_tokens", "input_tokens": body["usage"]["input_tokens"]}
    assert not agent.seen


def test_input_tokens_of_a_conversation_are_counted_with_and_without_more_input(app, engine):
    first = whole(app, input="one")["id"]
    alone = count(app, previous_response_id=first).json()["input_tokens"]
    more = whole(app, input="two", previous_response_id=first)["usage"]["input_tokens"]
    assert count(app, input="two", previous_response_id=first).json()["input_tokens"] == more > alone > 0


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": "hi", "background": True}, 400, "background"),
        ({"previous_response_id": "resp_x"}, 400, "previous_response_id"),
        ({"input": "hi", "model": "unknown"}, 404, "model"),
    ],
)
def test_input_tokens_that_cannot_be_counted_are_refused_by_field(app, engine, fields, status, param):
    response = count(app, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_only_a_background_response_could_be_canceled(app, engine):
    name = whole(app)["id"]
    refused = call(app, "POST", f"/v1/responses/{name}/cancel")
    assert refused.status_code == 400
    assert "background" in refused.json()["error"]["message"]
    assert call(app, "GET", f"/v1/responses/{name}").status_code == 200
    unknown = call(app, "POST", "/v1/responses/resp_x/cancel")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "response_id")
