"""docs/API.md is true: every row of its tables is tried."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anthropic.types import message_count_tokens_params as counts
from anthropic.types import message_create_params as messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from tokenizers.processors import TemplateProcessing

from omlx.api import anthropic_body
from omlx.api.anthropic_body import CountBody, MessagesBody
from omlx.api.openai_body import NOT_SUPPORTED, Body, ChatBody, CompletionBody
from omlx.api.responses import body as of_responses
from omlx.api.tokens import DetokenizeBody, TokenizeBody
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakePool
from tests.api.serving import CHAT, COMPLETION, call

ROOT = Path(__file__).resolve().parents[2]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": CHAT | {"max_tokens": 100},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/detokenize": {"model": "tiny", "tokens": [1]},
}
# The fields of each body, and of those that OpenAI's client may send.
KNOWN: dict[str, tuple[type[Body], set[str]]] = {
    "/v1/chat/completions": (ChatBody, {*chats.CompletionCreateParamsBase.__annotations__, "stream"}),
    "/v1/completions": (CompletionBody, {*completions.CompletionCreateParamsBase.__annotations__, "stream"}),
    "/v1/messages": (MessagesBody, {*messages.MessageCreateParamsBase.__annotations__, *anthropic_body.NOT_SUPPORTED}),
    "/v1/messages/count_tokens": (CountBody, {*counts.MessageCountTokensParams.__annotations__}),
    "/v1/responses": (
        of_responses.ResponsesBody,
        {*responses.ResponseCreateParamsBase.__annotations__, "stream", *of_responses.NOT_SUPPORTED},
    ),
    "/tokenize": (TokenizeBody, set()),
    "/detokenize": (DetokenizeBody, set()),
}
# The base has them already: another example would be another model.
SAME = {"model"}


class Row(NamedTuple):
    path: str
    field: str
    verdict: str
    example: dict[str, Any]
    wrong: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.field.split("[")[0]


@pytest.fixture(scope="module")
def pool():
    return FakePool()


@pytest.fixture(scope="module")
def app(pool, tmp_path_factory):
    """One for all rows; the tables know a stored response "resp_1" with the item "msg_1"."""
    made = create_app(pool, Settings(home=tmp_path_factory.mktemp("home")))
    said = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "ho"}]}
    made.state.responses.keep(b"", {"id": "resp_1", "previous_response_id": None, "output": []}, [said])
    return made


@pytest.fixture(scope="module")
def engine(pool):
    """The pool's; its texts begin with a token of their own, as those of many models do."""
    tokenizer = pool.engine.tokenizer
    first = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = first
    return pool.engine


def rows() -> list[Row]:
    found, path = [], ""
    for line in (ROOT / "docs" / "API.md").read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"## POST (\S+)", line):
            path = heading[1]
        elif line.startswith("## "):
            path = ""
        elif path and line.startswith("| `"):
            field, verdict, example, wrong, _ = (cell.strip() for cell in line[1:-1].split("|"))
            bad = json.loads(wrong.strip("`")) if wrong else None
            found.append(Row(path, field.strip("` "), verdict, json.loads(example.strip("`")), bad))
    return found


def rows_of(*verdicts: str) -> list[Row]:
    return [row for row in rows() if row.verdict in verdicts and row.path in BASES]


def named(row: Row) -> str:
    return f"{row.path} {row.field}"


def traces(app, engine, row: Row, fields: dict[str, Any]) -> tuple[Any, ...]:
    """What comes of a body: the requests that reach the engine, and the answer without what is new in each."""
    engine.seen.clear()
    response = call(app, "POST", row.path, json=BASES[row.path] | fields)
    assert response.status_code == 200, response.text
    requests = [(r.prompt, r.sampling, r.use_cache, r.cache_salt) for r in engine.seen]
    new = "id|item_id|created|created_at|completed_at"
    answer = re.sub(rf'"({new})": ?("[^"]*"|\d+)', "", response.text)
    return requests, answer, response.headers["content-type"]


def test_there_are_rows_of_every_kind():
    assert {row.verdict for row in rows()} == {"supported", "ignored", "refused"}
    assert len(rows()) > 80


@pytest.mark.parametrize("row", rows_of("supported"), ids=named)
def test_a_supported_field_makes_a_difference(app, engine, row):
    with_it = traces(app, engine, row, row.example)
    assert row.field in SAME or with_it != traces(app, engine, row, {})


@pytest.mark.parametrize("row", rows_of("ignored"), ids=named)
def test_an_ignored_field_makes_none(app, engine, row):
    assert traces(app, engine, row, row.example) == traces(app, engine, row, {})


@pytest.mark.parametrize("row", rows_of("refused"), ids=named)
def test_a_refused_field_is_named(app, row):
    check_refused(app, row, row.example)


@pytest.mark.parametrize("row", [row for row in rows_of("supported") if row.wrong], ids=named)
def test_a_wrong_value_is_told_by_its_field(app, row):
    assert row.wrong is not None
    check_refused(app, row, row.wrong)


def check_refused(app, row: Row, fields: dict[str, Any]) -> None:
    response = call(app, "POST", row.path, json=BASES[row.path] | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if row.path.startswith("/v1/messages"):  # the message names the field there
        assert re.match(re.escape(row.name) + r"[.\[: ]", error["message"]), error
        return
    assert re.match(re.escape(row.name) + r"($|[.\[])", error["param"]), error
    assert row.name in error["message"]


@pytest.mark.parametrize("path", sorted(KNOWN))
def test_every_field_has_a_row(path):
    body, of_client = KNOWN[path]
    fields = {field.alias or name for name, field in body.model_fields.items()} | of_client
    if path.endswith("completions"):
        fields |= NOT_SUPPORTED.keys() & {"prompt_logprobs", *of_client}
    assert {row.name for row in rows() if row.path == path} >= fields


def test_every_supported_field_says_what_is_wrong():
    assert [named(row) for row in rows_of("supported") if row.wrong is None] == []
