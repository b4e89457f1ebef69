"""Tools, reasoning, several choices and several prompts in the OpenAI dialect, streamed and whole."""

import itertools
import json
import logging
import random

import pytest

from omlx.api.tool_prompt import canonical_tools
from tests.api.fakes import REPLY, FakeEngine
from tests.api.grammar_openai import read_chat, read_completion, same_as_whole
from tests.api.serving import call, chat, complete
from tests.small_tokenizers import with_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks out of the window.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2, "city": "Köln"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def agent(engine) -> FakeEngine:
    """A model that knows tools and thinks."""
    engine.tokenizer = with_tools(thinks=True)
    engine.vocab_size = len(engine.tokenizer)
    return engine


def both_ways(app, **fields):
    """The whole answer, which the streamed one was found to be the same as."""
    whole = chat(app, **fields)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = chat(app, **fields, **options)
    body = whole.json()
    same_as_whole(read_chat(stream.text, include_usage=True, choices=fields.get("n", 1)), body)
    return body


def message_of(app, **fields):
    choice = both_ways(app, **fields)["choices"][0]
    return choice["message"], choice["finish_reason"]


def prompt_text(engine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def calls_of(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


# ---- answers


def test_a_call_comes_in_its_own_field_and_form(app, agent):
    agent.reply = CALL
    message, reason = message_of(app, tools=[WEATHER])
    assert reason == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    # In the model's own order: the template will write it as it was generated.
    assert call["function"]["arguments"] == '{"days": 2, "city": "Köln"}'


def test_text_before_between_and_after_calls_is_kept(app, agent):
    agent.reply = f"First this.\n{CALL}\nThen that.\n{NOW_CALL}\nDone."
    message, reason = message_of(app, tools=[WEATHER, NOW])
    assert (message["content"], reason) == ("First this.\nThen that.\nDone.", "tool_calls")
    assert calls_of(message) == [("get_weather", {"days": 2, "city": "Köln"}), ("now", {})]


@pytest.mark.parametrize(
    "inside", ['{"name": "get_weather", "arguments": {"city"', "{]", "", '{"name": "now"} and more']
)
def test_broken_json_is_text_and_a_warning(app, agent, inside, caplog):
    agent.reply = f"a\n<tool_call>\n{inside}\n</tool_call>\nb"
    with caplog.at_level(logging.WARNING):
        message, reason = message_of(app, tools=[WEATHER, NOW])
    assert (message["content"], reason) == (agent.reply, "stop")
    assert "tool_calls" not in message
    assert "could not read a tool call" in caplog.text


def test_a_call_that_the_limit_cuts_is_text(app, agent):
    agent.reply = f"ok {CALL}"
    message, reason = message_of(app, tools=[WEATHER], max_tokens=40)
    assert (message["content"], reason) == (agent.reply[:40], "length")


def test_marks_are_text_where_no_tools_are_or_none_may_be_called(app, agent):
    agent.reply = CALL
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message, reason = message_of(app, **fields)
        assert (message["content"], reason) == (CALL, "stop")
    assert "<tools>" in prompt_text(agent)  # the prompt stays as it is with them, and so does what is cached


def test_allowed_tools_are_those_that_may_be_called_and_the_prompt_has_them_all(app, agent):
    agent.reply = NOW_CALL
    prompts = []
    for mode in (None, "auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed} if mode else None
        message, _ = message_of(app, tools=[WEATHER, NOW], tool_choice=choice)
        assert calls_of(message) == [("now", {})]
        prompts.append(agent.seen[-1].prompt)
        grammar = agent.seen[-1].sampling.grammar
        assert (grammar is None) == (mode is None)
        assert grammar is None or ('"now' in grammar.text and "get_weather" not in grammar.text)
    assert prompts[0] == prompts[1] == prompts[2]
    error = chat(app, tools=[WEATHER], tool_choice=choice).json()["error"]
    assert error["param"] == "tool_choice"


def test_with_none_the_mark_of_a_call_is_held_down_if_it_is_a_token(app, agent):
    agent.tokenizer.add_tokens(["<tool_call>"], special_tokens=True)
    agent.vocab_size = len(agent.tokenizer)
    mark = agent.tokenizer.convert_tokens_to_ids("<tool_call>")
    chat(app, tools=[WEATHER], tool_choice="none", logit_bias={"5": 1})
    assert agent.seen[-1].sampling.logit_bias == ((5, 1), (mark, -100))
    chat(app, tools=[WEATHER])
    assert agent.seen[-1].sampling.logit_bias == ()


def test_without_parallel_calls_the_first_one_ends_the_answer_and_the_work(app, agent):
    agent.reply = f"a\n{NOW_CALL}\n{CALL}\nb"
    message, reason = message_of(app, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert (message["content"], reason, calls_of(message)) == ("a", "tool_calls", [("now", {})])
    assert len(agent.aborted) == 2  # once whole, once streamed


def test_reasoning_has_its_own_field(app, agent):
    agent.reply = f"<think>\nhm, 1 < 2\n</think>\n\nSo it is.\n{CALL}"
    body = both_ways(app, tools=[WEATHER])
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, 1 < 2", "So it is.")
    assert len(message["tool_calls"]) == 1
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm, 1 < 2")


def test_a_template_may_open_the_reasoning(app, agent):
    agent.reply = "hm</think>42"
    message, _ = message_of(app, chat_template_kwargs={"opens": True})
    assert (message["reasoning_content"], message["content"]) == ("hm", "42")
    for off in ({"chat_template_kwargs": {"opens": True, "enable_thinking": False}},
                {"chat_template_kwargs": {"opens": True}, "reasoning_effort": "none"}):  # fmt: skip
        message, _ = message_of(app, **off)
        assert (message["content"], "reasoning_content" in message) == ("hm</think>42", False)


def test_stop_strings_end_the_text_not_the_reasoning(app, agent):
    agent.reply = "<think>a. b</think>c. d"
    message, reason = message_of(app, stop=[". "])
    assert (message["reasoning_content"], message["content"], reason) == ("a. b", "c", "stop")
    assert agent.aborted


def test_logprobs_are_those_of_the_text(app, agent):
    agent.reply = f"<think>hm</think>Grüße {NOW_CALL} 世"
    for stream in (False, True):
        answer = chat(app, tools=[NOW], logprobs=True, stream=stream)
        if stream:
            content = read_chat(answer.text).choices[0].logprobs
        else:
            content = answer.json()["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(token["bytes"]) for token in content).decode() == "Grüße 世"


@pytest.mark.parametrize("seed", range(6))
def test_streams_keep_to_the_grammar_whatever_the_model_writes(app, agent, seed):
    rng = random.Random(seed)
    parts = [CALL, NOW_CALL, "<think>", "</think>", "text 😀 ", "\n\n", "<tool_call>", "</tool_call>", "{", "Grüße"]
    agent.replies = tuple("".join(rng.choices(parts, k=rng.randrange(8))) for _ in range(6)) * 4
    tools = [WEATHER, NOW] if seed % 2 else []
    fields = {"n": 3, "tools": tools, "max_tokens": rng.choice([7, 50, 500]), "parallel_tool_calls": seed != 5}
    both = []
    for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        agent.seen.clear()
        both.append(chat(app, **fields, **options))
    same_as_whole(read_chat(both[1].text, include_usage=True, choices=3), both[0].json())


def test_a_long_call_keeps_the_connection_alive(app, agent, monkeypatch):
    monkeypatch.setattr("omlx.api.sse.SILENCE_S", 0.05)
    agent.reply, agent.token_s = f"I look. {CALL}", 0.01
    read = read_chat(chat(app, tools=[WEATHER], stream=True).text)
    assert "generating" in read.comments
    assert read.choices[0].calls[0].name == "get_weather"


# ---- several choices and prompts


def test_choices_are_answers_of_their_own(app, engine):
    engine.replies = ("one", "two", "three") * 2
    body = both_ways(app, n=3, seed=7)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two", "three"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in engine.seen[:3]] == [7, 8, 9]
    assert len({request.request_id for request in engine.seen[:3]}) == 3
    assert len({tuple(request.prompt) for request in engine.seen}) == 1
    assert body["usage"]["prompt_tokens"] == len(engine.seen[0].prompt)
    assert body["usage"]["completion_tokens"] == len("onetwothree") + 3


def test_a_list_of_prompts_is_answered_in_its_order(app, engine):
    prompts = ["ab", "c", "def"]
    for given in (prompts, [engine.tokenizer.encode(prompt) for prompt in prompts]):
        engine.seen.clear()
        engine.replies = tuple("uvwxyz")
        body = complete(app, prompt=given, n=2, echo=True).json()
        assert [choice["text"] for choice in body["choices"]] == ["abu", "abv", "cw", "cx", "defy", "defz"]
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == 6
        assert len({request.request_id for request in engine.seen}) == 6
        engine.seen.clear()
        stream = complete(app, prompt=given, n=2, echo=True, stream=True, stream_options={"include_usage": True})
        same_as_whole(read_completion(stream.text, include_usage=True, choices=6), body)


def test_half_a_character_at_the_end_of_a_prompt_comes_whole_with_the_answer(app, engine, monkeypatch):
    prompt = engine.tokenizer.encode("a€")
    for kept in (1, 2, 3):  # of the prompt's four tokens, three of which are the sign
        monkeypatch.setattr(engine, "_answer", lambda request: [*prompt[len(request.prompt) :], 0])
        body = complete(app, prompt=prompt[:kept], echo=True, max_tokens=4 - kept).json()
        assert body["choices"][0]["text"] == "a€"
        stream = complete(app, prompt=prompt[:kept], echo=True, max_tokens=4 - kept, stream=True)
        same_as_whole(read_completion(stream.text), body | {"usage": None})
    monkeypatch.setattr(engine, "_answer", lambda request: [engine.tokenizer.eos_token_id])
    assert complete(app, prompt=prompt[:3], echo=True).json()["choices"][0]["text"] == "a"  # nothing completes it


def test_offsets_count_from_the_beginning_of_the_text(app):
    columns = complete(app, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert columns["text_offset"] == [0, 1]


def test_one_choice_that_fails_ends_them_all(app, engine):
    engine.failure, engine.fail_after = ZeroDivisionError("secret"), 2
    assert chat(app, n=3).status_code == 500
    assert len(engine.seen) == 3
    assert not engine.running


def test_more_choices_than_can_ever_run_are_refused(app, engine):
    engine.most_requests = 3
    assert chat(app, n=3).status_code == 200
    error = chat(app, n=4).json()["error"]
    assert error["param"] == "n"
    assert "4" in error["message"]
    assert "3" in error["message"]


# ---- prompts


def shuffled(value, rng):
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {key: shuffled(item, rng) for key, item in items}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("template", [True, False])
def test_the_order_of_keys_does_not_matter(app, engine, template):
    if template:
        engine.tokenizer = with_tools()
    rng = random.Random(1)
    for _ in range(10):
        assert chat(app, tools=shuffled([WEATHER, NOW], rng)).status_code == 200
    assert len({tuple(request.prompt) for request in engine.seen}) == 1
    text = prompt_text(engine)
    # As models were trained to see it; arguments in the order of `required`, then by name.
    places = [text.index(f'"{key}"') for key in ("name", "description", "parameters", "properties", "city", "days")]
    assert places == sorted(places)


def test_canonical_tools_keep_what_they_mean():
    schema = {"anyOf": [{"enum": ["b", "a"]}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "null"}}, "required": 5}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert canonical_tools([tool]) == (tool,)
    orders = {json.dumps(canonical_tools([dict(order)])) for order in itertools.permutations(tool.items())}
    assert len(orders) == 1


def conversation():
    return [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bonn"}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
    ]


def test_calls_and_results_reach_the_template_as_objects(app, agent):
    chat(app, tools=[WEATHER, NOW], messages=conversation(), chat_template_kwargs={"keep": True})
    assert prompt_text(agent).split("</tools>\n")[1] == (
        "<user>weather?\n<assistant><think>hm</think>\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "<tool>rain(get_weather)\n<tool>noon(now)\n<assistant>"
    )


def test_a_call_goes_back_into_the_prompt_as_it_was_generated(app, agent):
    agent.reply = f"I look.\n{CALL}"
    message, _ = message_of(app, tools=[WEATHER])
    agent.seen.clear()
    chat(app, tools=[WEATHER], messages=[{"role": "user", "content": "hi"}, message])
    assert f"<assistant>{agent.reply}\n" in prompt_text(agent)


@pytest.mark.parametrize("arguments", ['{"city": "\\ud83d"}', '{"a":' * 300 + "1" + "}" * 300, "[" * 5000])
def test_arguments_of_past_calls_that_json_can_say_but_text_cannot_are_passed_on(app, agent, arguments):
    call = {"type": "function", "id": "c", "function": {"name": "now", "arguments": arguments}}
    agent.context_length = 20_000
    assert chat(app, messages=[{"role": "assistant", "tool_calls": [call]}]).status_code == 200


def test_a_call_whose_arguments_are_a_text_that_nests_deeply_is_text(app, agent):
    agent.reply = '<tool_call>\n{"name": "now", "arguments": "' + "[" * 3000 + '"}\n</tool_call>'
    agent.context_length = 20_000
    response = chat(app, tools=[NOW])
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, agent.reply)


@pytest.mark.parametrize("parallel", [True, False])
def test_the_only_call_that_the_limit_cuts_ended_at_the_limit(app, agent, parallel):
    agent.reply = CALL
    choice = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": parallel}
    message, reason = message_of(app, **choice, max_tokens=len(CALL.partition("öln")[0]))
    assert (message["tool_calls"][0]["function"]["arguments"], reason) == ('{"days": 2, "city": "K', "length")
    assert message_of(app, **choice, max_tokens=len(CALL.encode()))[1] == ("length" if parallel else "tool_calls")


def test_arguments_that_are_no_json_are_passed_on(app, agent):
    messages = conversation()
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bo'
    assert chat(app, tools=[WEATHER], messages=messages).status_code == 200


def test_a_template_without_tools_gets_them_in_words(app, engine):
    chat(app, tools=[WEATHER, NOW], messages=[{"role": "system", "content": "Be kind."}, *conversation()])
    text = prompt_text(engine)
    assert text.startswith("<system>Be kind.\n\nYou can call tools.")
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}\n' in text
    assert text.endswith(
        '<user>weather?\n<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "<user><tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n<assistant>"
    )
    engine.reply = CALL
    message, reason = message_of(app, tools=[WEATHER])
    assert (reason, message["content"]) == ("tool_calls", None)
    assert prompt_text(engine).startswith("<system>You can call tools.")


def test_system_messages_stay_where_they_are(app, engine):
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    chat(app, messages=messages)
    assert prompt_text(engine) == "<user>a\n<system>b\n<user>c\n<assistant>"


def test_a_billing_header_is_no_part_of_the_prompt(app, engine):
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    for number in range(2):
        messages = [
            {"role": "system", "content": f"{header.format(number)}\nBe kind."},
            {"role": "user", "content": "a"},
        ]
        chat(app, messages=messages)
        assert prompt_text(engine) == "<system>Be kind.\n<user>a\n<assistant>"
    chat(app, messages=[{"role": "system", "content": header}, {"role": "user", "content": "a"}])
    assert prompt_text(engine) == "<user>a\n<assistant>"
    for messages in ([{"role": "user", "content": header}], [{"role": "system", "content": f"Today\n{header}"}]):
        chat(app, messages=messages)
        assert header in prompt_text(engine)  # anywhere else it is text like any other


# ---- /tokenize and /detokenize


def test_tokens_can_be_asked_for_and_turned_back(app, engine):
    body = call(app, "POST", "/tokenize", json={"model": "tiny", "prompt": "hi €", "return_token_strs": True}).json()
    assert body["tokens"] == engine.tokenizer.encode("hi €")
    assert (body["count"], body["max_model_len"], len(body["token_strs"])) == (6, 2000, 6)
    back = call(app, "POST", "/detokenize", json={"model": "tiny", "tokens": body["tokens"]}).json()
    assert back == {"prompt": "hi €"}


def test_token_ids_become_the_text_that_the_tokenizer_decodes(app, engine):
    tokens = [*engine.tokenizer.encode(" hi  ,  it 's €"), *range(engine.vocab_size), 0xE2, 1, 0x82]
    text = engine.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for given, expected in ((tokens, text), ([], "")):
        back = call(app, "POST", "/detokenize", json={"model": "tiny", "tokens": given}).json()
        assert back == {"prompt": expected}


def test_the_tokens_of_a_chat_are_those_that_an_answer_costs(app, engine):
    given = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
    body = call(app, "POST", "/tokenize", json=given).json()
    usage = call(app, "POST", "/v1/chat/completions", json=given).json()["usage"]
    assert (body["tokens"], body["count"]) == (engine.seen[-1].prompt, usage["prompt_tokens"])
    without = call(app, "POST", "/tokenize", json=given | {"add_generation_prompt": False}).json()
    assert body["tokens"][: without["count"]] == without["tokens"] != body["tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 200_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": 5}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [999_999]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, "model"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(app, path, fields, param):
    response = call(app, "POST", path, json={"model": "tiny"} | fields)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_a_plain_answer_is_the_same_text_as_ever(app):
    assert both_ways(app)["choices"][0]["message"] == {"role": "assistant", "content": REPLY, "refusal": None}


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes files."}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+ü"}}\n</tool_call>'


def custom_deltas(stream: str) -> list[dict]:
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    return [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]


def test_a_custom_tool_is_a_function_with_a_text_for_the_model_and_has_an_input_for_the_client(app, agent):
    agent.reply = f"I patch. {PATCH_CALL}"
    fields = {"tools": [PATCH, NOW]}
    choice = chat(app, **fields).json()["choices"][0]
    (called,) = choice["message"]["tool_calls"]
    assert (called["type"], called["custom"]) == ("custom", {"name": "patch", "input": "*** Begin\n+ü"})
    assert choice["finish_reason"] == "tool_calls"
    assert '"input"' in prompt_text(agent) and "Changes files." in prompt_text(agent)
    first, last = custom_deltas(chat(app, **fields, stream=True).text)
    assert first["custom"] == {"name": "patch", "input": ""} and first["type"] == "custom" and first["id"]
    assert last == {"index": 0, "custom": {"input": "*** Begin\n+ü"}}


def test_a_call_of_a_function_beside_a_custom_tool_has_arguments(app, agent):
    agent.reply = NOW_CALL
    message, _ = message_of(app, tools=[PATCH, NOW])
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_a_past_call_of_a_custom_tool_reads_as_the_model_wrote_it(app, agent):
    past = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin\n+ü"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [past]}]
    messages.append({"role": "tool", "content": "ok", "tool_call_id": "c"})
    assert chat(app, messages=messages, tools=[PATCH]).status_code == 200
    assert '"name": "patch"' in prompt_text(agent) and "*** Begin\\n+" in prompt_text(agent)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_custom_tool_may_be_chosen(app, agent, mode):
    named = {"type": "custom", "custom": {"name": "patch"}}
    agent.reply = PATCH_CALL
    for choice in (named, {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}):
        response = chat(app, tools=[PATCH, NOW], tool_choice=choice)
        assert response.status_code == 200, response.text
    wrong = chat(app, tools=[NOW], tool_choice=named).json()["error"]
    assert wrong["param"] == "tool_choice" and "patch" in wrong["message"]


def test_the_grammar_of_a_custom_tool_is_told(app, agent):
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"+'}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    assert chat(app, tools=[tool]).status_code == 200
    assert "(lark)" in prompt_text(agent) and "start:" in prompt_text(agent)
