"""Output formats by the names of vLLM and llama.cpp's server: enforced in chat and completions, refused elsewhere."""

import json
import re
from typing import Any

import pytest

from omlx.api.chat import OutputFormat
from omlx.api.openai import parse_chat, parse_completion
from omlx.api.openai_body import OTHER_FORMATS
from omlx.errors import BadRequest
from tests.api.serving import CHAT, COMPLETION, call
from tests.api.test_constraints import CALL, Model
from tests.api.test_held_answers import FREE
from tests.api.test_real_answers import Server, serving, user

SCHEMA = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"]}
WORDS = ["yes", 'a "quoted" word', "Grüße 😀\n/"]
LARK = 'start: greeting " " NAME\ngreeting: "hi" | "bye"\nNAME: /[A-C]{2}/\n'
LARK_TEXT = "(hi|bye) [A-C]{2}"
REGEX = r"^[ab]{2}/\d\\$"
GBNF = 'root ::= "a" | item\nitem ::= [0-9]+'
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def server(tmp_path):
    async with serving(tmp_path) as found:
        yield found


def is_choice(text: str) -> bool:
    return text in WORDS


def is_regex(text: str) -> bool:
    return re.fullmatch(REGEX, text) is not None


def is_lark(text: str) -> bool:
    return re.fullmatch(LARK_TEXT, text) is not None


def is_json(text: str) -> bool:
    return json.loads(text) in ({"n": 7}, {"n": 8})


FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_choice": WORDS}, is_choice),
    ({"structured_outputs": {"choice": WORDS}}, is_choice),
    ({"guided_regex": REGEX}, is_regex),
    ({"structured_outputs": {"regex": REGEX}}, is_regex),
    ({"guided_grammar": LARK}, is_lark),
    ({"grammar": LARK}, is_lark),
    ({"structured_outputs": {"grammar": LARK}}, is_lark),
    ({"guided_json": SCHEMA}, is_json),
    ({"guided_json": json.dumps(SCHEMA)}, is_json),
    ({"json_schema": SCHEMA}, is_json),
    ({"structured_outputs": {"json": SCHEMA}}, is_json),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_json),
]


async def test_an_answer_has_the_format(server: Server) -> None:
    for fields, fits in FORMATS:
        body = await server.chat(user("hi"), **FREE, **fields)
        assert fits(body["choices"][0]["message"]["content"]), (fields, body)
        response = await server.post("/v1/completions", prompt="hi", **FREE, **fields)
        assert fits(response.json()["choices"][0]["text"]), (fields, response.text)


@pytest.mark.parametrize("name", ["guided_json", "json_schema", "structured_outputs"])
def test_an_empty_schema_is_any_json_and_null_is_none(name: str) -> None:
    for value, expected in (({}, OutputFormat("json_schema", {})), (None, None)):
        given = {"json": value} if name == "structured_outputs" else value
        assert parse_chat(CHAT | {name: given})[0].output_format == expected
        assert parse_completion(COMPLETION | {name: given})[0].output_format == expected


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"guided_regex": "("}, ["guided_regex"]),
    ({"guided_regex": r"\bword\b"}, ["guided_regex"]),
    ({"structured_outputs": {"regex": "("}}, ["structured_outputs.regex"]),
    ({"guided_grammar": 'start: "a" nowhere'}, ["guided_grammar", "nowhere"]),
    ({"guided_grammar": "start: <|nothing|>"}, ["guided_grammar", "<|nothing|>"]),
    ({"guided_grammar": "start: again\nagain: start"}, ["guided_grammar"]),
    ({"grammar": GBNF}, ["grammar", "Lark", "GBNF"]),
    ({"structured_outputs": {"grammar": GBNF}}, ["structured_outputs.grammar", "Lark", "GBNF"]),
    ({"guided_json": "no JSON"}, ["guided_json"]),
    ({"guided_json": "[]"}, ["guided_json"]),
    ({"guided_json": {"type": 5}, "guided_choice": ["a"]}, ["guided_json", "guided_choice"]),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, ["guided_regex", "response_format"]),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        ["structured_outputs.regex", "structured_outputs.choice"],
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, ["structured_outputs.structural_tag"]),
    ({"guided_choice": []}, ["guided_choice"]),
]


async def test_what_cannot_be_enforced_is_named(server: Server) -> None:
    for fields, names in REFUSED:
        for path, base in (("/v1/chat/completions", {"messages": [user("hi")]}), ("/v1/completions", {"prompt": "hi"})):
            response = await server.post(path, max_tokens=5, **base, **fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] in names and all(name in error["message"] for name in names), error


def test_a_format_is_refused_where_a_tool_has_to_be_called() -> None:
    body = CHAT | {"tools": [TOOL], "guided_choice": ["a"]}
    assert parse_chat(body | {"tool_choice": "auto"})[0].output_format == OutputFormat("choice", choices=("a",))
    with pytest.raises(BadRequest, match=r"guided_choice.*tool_choice"):
        parse_chat(body | {"tool_choice": "required"})


@pytest.mark.parametrize("name", sorted(OTHER_FORMATS))
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_endpoints_refuse_them(app, path: str, name: str) -> None:
    body = CHAT | {"max_tokens": 5} if path == "/v1/messages" else {"model": "tiny", "input": "hi"}
    answer = call(app, "POST", path, json=body | {name: {"json": {}}})
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('%ignore / +/\nstart: "a" "b"', ["ab", "a  b"], ["b", "ab c"]),
        ('start: "a" "b"\n%ignore / +/', ["ab", "a  b"], ["b"]),
        ("%import common.INT\nstart: INT", ["17"], ["x", ""]),
        ('start: %json {"enum": ["}", "{"]}', ['"}"', '"{"'], ["}"]),
        ('start: "a}b" /}/ // }\n', ["a}b}"], ["a}b"]),
        ('start: x\nx: %lark {\nstart: "c}"\n}', ["c}"], ["c"]),
        ('%llguidance {"no_forcing": true}\nstart: "a"', ["a"], ["b"]),
        ('# }\nstart: "a"', ["a"], ["b"]),
    ],
)
def test_a_grammar_means_the_same_inside_another_one(text: str, good: list[str], bad: list[str]) -> None:
    output = OutputFormat("grammar", text=text)
    model = Model(tokens=True)
    alone, _ = model.constrained(tools=(), output=output)
    beside, _ = model.constrained(output=output)
    thinker = Model(thinks=True, tokens=True)
    behind, _ = thinker.constrained(tools=(), output=output)
    for answers, taken in ((good, True), (bad, False)):
        for answer in answers:
            assert model.takes(alone, answer) is taken and model.takes(beside, answer) is taken
            assert thinker.takes(behind, f"<think>so</think>{answer}") is taken


@pytest.mark.parametrize("text", ['start: "a"\n}\nmore: "b"\nlast: %lark {\nstart: "q"', 'start: "a" }'])
def test_a_grammar_that_closes_the_one_around_it_is_refused(text: str) -> None:
    for model, tools in ((Model(thinks=True), ()), (Model(), (TOOL,))):
        with pytest.raises(BadRequest, match=r"line \d of the grammar: } without {"):
            model.constrained(tools=tools, output=OutputFormat("grammar", text=text))


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (OutputFormat("choice", choices=tuple(WORDS)), WORDS[2]),
        (OutputFormat("regex", text=REGEX), "ab/7\\"),
        (OutputFormat("grammar", text=LARK), "bye AC"),
    ],
)
def test_reasoning_and_calls_stand_beside_it(output: OutputFormat, answer: str) -> None:
    thinker = Model(thinks=True, tokens=True)
    spec, _ = thinker.constrained(tools=(), output=output)
    assert thinker.takes(spec, answer) and thinker.takes(spec, f"<think>so\n</think>\n\n{answer}")
    assert not thinker.takes(spec, f"<think>so</think>{answer}x") and not thinker.takes(spec, "so")
    model = Model(tokens=True)
    spec, _ = model.constrained(output=output)
    assert model.takes(spec, answer) and model.takes(spec, CALL) and not model.takes(spec, "so")
