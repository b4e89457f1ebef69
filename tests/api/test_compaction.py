"""POST /v1/responses/compact: the user's messages and a summary to go on from."""

from typing import Any

import pytest

from omlx.api.responses.compaction import MOST_TOKENS, QUESTION, message_of, sealed
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import call

INPUT = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "an answer"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "found"},
    {"role": "user", "content": [{"type": "input_text", "text": "second question"}]},
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(reply="they asked twice")


def post(engine: FakeEngine, path: str, **body: Any) -> dict[str, Any]:
    answer = call(create_app(FakePool(engine), Settings()), "POST", path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt(engine: FakeEngine) -> str:
    return str(engine.tokenizer.decode(engine.seen[-1].prompt))


def test_the_users_messages_and_a_summary_come_back(engine: FakeEngine) -> None:
    body = post(engine, "/v1/responses/compact", input=INPUT, instructions="Be brief.", stream=True)
    assert body["object"] == "response.compaction"
    *said, item = body["output"]
    assert [(one["type"], one["role"]) for one in said] == [("message", "user")] * 2
    assert said[0]["content"] == [{"type": "input_text", "text": "first question"}]
    assert item["type"] == "compaction" and item["id"].startswith("cmp_")
    assert message_of(item["encrypted_content"]) == "[Summary of the conversation so far]\nthey asked twice"
    asked = engine.seen[-1]
    assert asked.sampling.max_tokens <= MOST_TOKENS and QUESTION in prompt(engine)
    assert body["usage"]["input_tokens"] == len(asked.prompt)


def test_its_prompt_begins_as_the_next_turn_does(engine: FakeEngine) -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    post(engine, "/v1/responses/compact", input=INPUT, tools=tools)
    compact = prompt(engine)
    post(engine, "/v1/responses", input=[*INPUT, {"role": "user", "content": "and now?"}], tools=tools)
    following = prompt(engine)
    shared = next(at for at, (a, b) in enumerate(zip(compact, following, strict=False)) if a != b)
    assert compact[:shared].endswith("<user>") and "second question" in compact[:shared]


def test_the_next_turn_reads_the_summary(engine: FakeEngine) -> None:
    output = post(engine, "/v1/responses/compact", input=INPUT)["output"]
    post(engine, "/v1/responses", input=[*output, {"role": "user", "content": "go on"}])
    assert "[Summary of the conversation so far]\nthey asked twice" in prompt(engine)
    assert "found" not in prompt(engine)


def test_a_stored_conversation_is_compacted_by_its_name(engine: FakeEngine) -> None:
    app = create_app(FakePool(engine), Settings())
    first = call(app, "POST", "/v1/responses", json={"model": "tiny", "input": "remember marble"}).json()
    body = {"model": "tiny", "previous_response_id": first["id"]}
    answer = call(app, "POST", "/v1/responses/compact", json=body).json()
    assert [item["type"] for item in answer["output"]] == ["message", "compaction"]
    assert "marble" in prompt(engine)
    unknown = call(app, "POST", "/v1/responses/compact", json=body | {"previous_response_id": "resp_x"})
    assert unknown.status_code == 400
    empty = call(app, "POST", "/v1/responses/compact", json={"model": "tiny", "input": []})
    assert empty.status_code == 400


@pytest.mark.parametrize(
    "content",
    [None, 5, "", "gAAAA", "omlx-1:", "omlx-1:%%%", "omlx-1:e30=", sealed("x")[:-3], "omlx-1:" + "A" * (1 << 21)],
)
def test_what_is_not_ours_is_no_summary(content: Any, engine: FakeEngine) -> None:
    assert message_of(content) is None
    item = {"type": "compaction", "id": "c", "encrypted_content": content}
    post(engine, "/v1/responses", input=[item, {"role": "user", "content": "go on"}])
    assert "[compaction omitted]" in prompt(engine)
