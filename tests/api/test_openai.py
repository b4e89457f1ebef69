"""The OpenAI dialect: what answers look like, and that fields reach the engine."""

import math

import pytest

from omlx.errors import BadRequest, EngineError, ModelError, Overloaded
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import REPLY, FakeEngine, FakePool
from tests.api.serving import call, chat, complete, sse_chunks


def prompt_text(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt)


def test_chat_answers_whole(app, engine):
    engine.cached_tokens = 5
    body = chat(app).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt, generated = len("<user>hi\n<assistant>"), len(REPLY.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_completion_answers_whole(app):
    body = complete(app, max_tokens=4).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Grü", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 4


def test_a_streamed_chat_is_the_whole_one_in_pieces(app):
    chunks = sse_chunks(chat(app, stream=True, stream_options={"include_usage": True}).text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == REPLY
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(app).json()["usage"]


def test_no_chunk_has_half_a_character_or_usage_that_nobody_asked_for(app):
    chunks = sse_chunks(chat(app, stream=True).text)
    assert all("\ufffd" not in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


def test_a_streamed_completion_is_the_whole_one_in_pieces(app):
    chunks = sse_chunks(complete(app, stream=True, logprobs=1).text)
    whole = complete(app, logprobs=1).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert choices[-1]["finish_reason"] == "stop"
    for column, values in whole["logprobs"].items():
        assert [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][column]] == values


def test_chat_logprobs_have_bytes_that_make_up_the_text(app):
    content = chat(app, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == REPLY
    assert content[0]["token"] == "G"
    assert content[2]["token"] == "bytes:\\xc3"
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -0.5


def test_streamed_logprobs_are_the_whole_ones(app):
    fields = {"logprobs": True, "top_logprobs": 1, "stop": ["done"]}
    chunks = sse_chunks(chat(app, stream=True, **fields).text)
    streamed = [
        token
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == chat(app, **fields).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in streamed).decode() == REPLY.removesuffix("done")


def test_completion_logprobs_are_columns_of_equal_length(app):
    columns = complete(app, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert columns == {
        "tokens": ["G", "r"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"G": -0.5}, {"r": -0.5}],
        "text_offset": [0, 1],
    }


def test_a_stop_string_ends_the_answer_and_the_work(app, engine):
    body = chat(app, stop=["😀", "界 "]).json()
    assert body["choices"][0]["message"]["content"] == "Grüße, 世"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert len(engine.aborted) == 1
    assert "".join(
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in sse_chunks(chat(app, stop=["😀", "界 "], stream=True).text)
    ) == "Grüße, 世"  # fmt: skip


def test_messages_reach_the_template(app, engine):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    assert chat(app, messages=messages, chat_template_kwargs={"style": "brief"}).status_code == 200
    expected = (
        "<system>be kind\n<user>one\ntwo\n<assistant>ok\n<user><tool_response>\n4\n</tool_response>\n[brief]<assistant>"
    )
    assert prompt_text(engine) == expected


def test_a_prompt_may_be_text_or_token_ids(app, engine):
    for prompt in ("hi", engine.tokenizer.encode("hi"), ["hi"], [engine.tokenizer.encode("hi")]):
        assert complete(app, prompt=prompt).status_code == 200
        assert prompt_text(engine) == "hi"


def test_sampling_fields_reach_the_engine(app, engine):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -7,
        "max_tokens": 9,
        "max_completion_tokens": 11,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 3, "2": -100},
        "ignore_eos": True,
        "stop": "x",
    }
    chat(app, **given)
    sampling = engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop, sampling.ignore_eos) == (-7, 11, ("x",), True)
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    assert penalties == (1, -1.5, 1.1)
    assert sampling.logit_bias == ((2, -100), (5, 3))
    assert sampling.top_logprobs is None


def test_defaults_are_those_of_openai_and_the_rest_of_the_context(app, engine):
    chat(app, temperature=None, stop=None, seed=None, user="me", metadata={"a": 1}, unheard_of=[1])
    request = engine.seen[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.max_tokens == engine.context_length - len(request.prompt)
    assert (request.use_cache, request.cache_salt) == (True, "")


@pytest.mark.parametrize(("given", "used"), [(0, 0.0), (1e-320, 0.0), (0.01, 0.01), (2, 2)])
def test_a_temperature_next_to_zero_is_greedy(app, engine, given, used):
    chat(app, temperature=given, top_k=-1)
    assert engine.seen[-1].sampling.temperature == used


def test_the_cache_can_be_left_out_and_separated(app, engine):
    chat(app, cache=False, cache_salt="tenant")
    assert (engine.seen[-1].use_cache, engine.seen[-1].cache_salt) == (False, "tenant")


def test_what_asks_for_nothing_is_not_refused(app):
    harmless = {
        "n": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "stream_options": {"include_usage": True},
    }
    assert chat(app, **harmless).status_code == 200
    assert complete(app, echo=False, best_of=1, suffix=None).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1990}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2**31 - 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32_000}),
    ],
)
def test_a_limit_that_does_not_fit_is_as_many_tokens_as_fit(app, engine, path, fields, stream):
    assert call(app, "POST", path, json={"model": "tiny", "stream": stream} | fields).status_code == 200
    (request,) = engine.seen
    assert len(request.prompt) + request.sampling.max_tokens == engine.context_length == 2000


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(app):
    error = complete(app, prompt="x" * 2000).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "2000 prompt tokens" in error["message"]
    assert complete(app, prompt="x" * 1999, max_tokens=1).status_code == 200


def test_a_refusing_template_is_a_bad_request(app, engine):
    response = chat(app, messages=[{"role": "user", "content": "refuse"}])
    assert response.status_code == 400
    assert "no such turn" in response.json()["error"]["message"]
    engine.tokenizer.chat_template = None
    assert "chat template" in chat(app).json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("too big", param="max_tokens", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (Overloaded("full", retry_after_s=7), 503, "overloaded"),
        (EngineError("it broke"), 500, None),
        (ModelError("no weights"), 503, "model_unavailable"),
    ],
)
def test_an_error_before_the_first_token_has_its_status(app, engine, stream, error, status, code):
    engine.refusal = error
    response = chat(app, stream=stream)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == (error.public if isinstance(error, ModelError) else str(error))
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == ("7" if code == "overloaded" else None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_nobody_foresaw_is_a_500_without_details(app, engine, stream):
    engine.failure = ZeroDivisionError("secret")
    response = chat(app, stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("error", [EngineError("it broke"), ZeroDivisionError("secret")])
def test_an_error_in_mid_stream_is_an_event_and_the_end(app, engine, error):
    engine.failure, engine.fail_after = error, 3
    response = chat(app, stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith('data: {"error":{"message":')
    assert "[DONE]" not in response.text
    assert "secret" not in response.text


def test_logprobs_are_finite_json(app, engine):
    engine._output, plain = lambda *given: with_infinity(plain(*given)), engine._output

    def with_infinity(output):
        return type(output)(output.request_id, output.token, output.finish_reason, -math.inf, ((1, math.nan),))

    content = chat(app, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -9999.0


def test_models_are_listed_with_the_context_length_where_it_is_known(app):
    body = call(app, "GET", "/v1/models").json()
    known, unloaded = body["data"]
    assert (known["id"], known["object"], known["owned_by"]) == ("tiny", "model", "omlx")
    assert (known["context_length"], known["max_model_len"]) == (2000, 2000)
    assert unloaded["id"] == "org/unloaded"
    assert "context_length" not in unloaded
    assert call(app, "GET", "/v1/models/org/unloaded").json()["id"] == "org/unloaded"


@pytest.mark.parametrize("name", ["nope", "../tiny", "/etc", "tiny\0", "org/../tiny", "%2e%2e/tiny"])
def test_an_unknown_model_is_a_404(app, name):
    response = chat(app, model=name)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("name", ["nope", "tiny%00", "%2e%2e/tiny", "%2Fetc", "org", "TINY", "tiny/"])
def test_an_unknown_model_cannot_be_looked_up(app, name):
    assert call(app, "GET", f"/v1/models/{name}").status_code == 404


def test_two_models_answer_each_for_itself(settings):
    pool = FakePool(FakeEngine("a", "from a"), FakeEngine("b", "from b"))
    app = create_app(pool, settings)
    answers = [chat(app, model=name).json()["choices"][0]["message"]["content"] for name in "ab"]
    assert answers == ["from a", "from b"]


# ---- suffix


@pytest.mark.parametrize(
    ("marks", "order"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "{0}ab{1}cd{2}"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}ab{1}cd{2}"),
        (("<PRE>", "<SUF>", "<MID>"), "{0}ab{1}cd{2}"),
        (("[PREFIX]", "[SUFFIX]"), "{1}cd{0}ab"),
    ],
)
def test_a_suffix_is_put_where_the_model_was_trained_to_see_it(tmp_path, marks, order):
    pool = FakePool()
    tokenizer = pool.engine.tokenizer
    tokenizer.add_tokens(list(marks), special_tokens=True)
    pool.engine.vocab_size = len(tokenizer)
    app = create_app(pool, Settings(home=tmp_path))
    for prompt in ("ab", tokenizer.encode("ab")):
        assert complete(app, prompt=prompt, suffix="cd").status_code == 200
        assert tokenizer.decode(pool.engine.seen[-1].prompt) == order.format(*marks)
    refused = complete(app, prompt="ab", suffix="cd", echo=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
