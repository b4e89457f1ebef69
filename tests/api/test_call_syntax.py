"""Every known way to write calls returns string arguments exactly as they were written."""

import json
import pkgutil
import re
import sys

import mlx_lm.tool_parsers
import pytest

from omlx.api.answer_format import answer_format
from omlx.api.call_formats import CALL_FORMATS, by_name
from omlx.api.lenient_json import value_at
from tests.api.test_answer_parser import in_every_way
from tests.small_tokenizers import with_marks

NAME = "write_file"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "lines": {"type": "integer"},
                    "more": {"$ref": "#/$defs/more"},
                },
                "$defs": {"more": {"anyOf": [{"type": "object"}, {"type": "null"}]}},
            },
        },
    }
]
NASTY = {
    "leading spaces": "    indented",
    "trailing newline": "line\n",
    "both": "\n\n  x \n\n",
    "null": "null",
    "true": "true",
    "a number": "5",
    "JSON": '{"a": [1, 2]}',
    "a closing tag": "a </parameter> b </param> c </arg_value> d",
    "braces": "} { }} ] [",
    "quotes and backslashes": 'a "quoted" \\n \\ \' word',
    "emoji": "Grüße 世界 😀 \u2028",
    "empty": "",
    "code": "def f(x):\n\tif x:\n\t\treturn {'a': \"b\"}\n\n\treturn None\n",
    "tags": "<b>bold</b> &amp; 1 < 2 > 0",
    "an opening tag": 'see <parameter=x> and <arg_value> and <param name="x">',
}


def as_json(arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def tagged(arguments: dict, call: str, argument: str, close: str) -> str:
    inside = "".join(
        argument.format(key=key, value=value if isinstance(value, str) else as_json(value), kind=kind(value))
        for key, value in arguments.items()
    )
    return f"{call}{inside}{close}"


def kind(value) -> str:
    return "true" if isinstance(value, str) else "false"


def braces(value, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braces(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(braces(item, quote) for item in value) + "]"
    return as_json(value)


def cdata(arguments: dict) -> dict:
    return {
        key: f"<![CDATA[{value}]]>" if isinstance(value, str) and re.search("[<&\n]", value) else value
        for key, value in arguments.items()
    }


def xtml(arguments: dict) -> str:
    kinds = {str: "string", int: "number", dict: "object", type(None): "null"}
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kinds[type(value)]}"<|sep|>'
        f"{value if isinstance(value, str) else as_json(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{NAME}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


# How the templates write a call, by format: what stands between the marks.
WRITERS = {
    "json_tools": lambda a: f'\n{{"name": "{NAME}", "arguments": {as_json(a)}}}\n',
    "qwen3_coder": lambda a: tagged(
        a, f"\n<function={NAME}>\n", "<parameter={key}>\n{value}\n</parameter>\n", "</function>\n"
    ),
    "seed": lambda a: tagged(a, f"\n<function={NAME}>\n", "<parameter={key}>{value}</parameter>\n", "</function>\n"),
    "glm47": lambda a: tagged(a, f"{NAME}\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", ""),
    "longcat": lambda a: tagged(
        a,
        f"{NAME}\n",
        "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n",
        "",
    ),
    "minimax_m2": lambda a: tagged(
        a, f'\n<invoke name="{NAME}">\n', '<parameter name="{key}">{value}</parameter>\n', "</invoke>\n"
    ),
    "minicpm5": lambda a: tagged(cdata(a), f'"{NAME}">', '<param name="{key}">{value}</param>', ""),
    "muse_spark": lambda a: tagged(
        a,
        f'\n<atem:invoke name="{NAME}">\n',
        '<atem:parameter name="{key}">{value}</atem:parameter>\n',
        "</atem:invoke>\n",
    ),
    "deepseek_v32": lambda a: tagged(
        a,
        f'\n<｜DSML｜invoke name="{NAME}">\n',
        '<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
    ),
    "deepseek": lambda a: f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>",
    "function_gemma": lambda a: f"call:{NAME}{braces(a, '<escape>')}",
    "gemma4": lambda a: "call:" + NAME + braces(a, '<|"|>'),
    "pythonic": lambda a: f"[{NAME}({', '.join(f'{key}={value!r}' for key, value in a.items())})]",
    "kimi_k2": lambda a: (
        f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
    ),
    "kimi_k3": xtml,
    "mistral": lambda a: f"{NAME}[ARGS]{as_json(a)}",
    "cohere": lambda a: f'[\n    {{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {as_json(a)}}}\n]',
    "harmony": lambda a: f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{as_json(a)}",
    "phi4": lambda a: f'[{{"name": "{NAME}", "arguments": {as_json(a)}}}]',
    "granite": lambda a: f'[{{"name": "{NAME}", "arguments": {as_json(a)}}}]',
    "command_r": lambda a: f' ```json\n[{{"tool_name": "{NAME}", "parameters": {as_json(a)}}}]\n```',
    "llama": lambda a: f'{{"name": "{NAME}", "parameters": {as_json(a)}}}',
}
STAND_INS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫"
FORMATS = {known.name: known for known in CALL_FORMATS}


def model(name: str, *, tokens: bool):
    """A model whose template shows this format, its marks plain text or tokens of their own."""
    known = FORMATS[name]
    marks = {mark for syntax in known.calls for mark in syntax.marks if not syntax.bare}
    own = {token for mark in marks for token in re.findall(r"<\|?[^<>\s]+\|?>|\[[A-Z_]+\]|｜DSML｜", mark)}
    return with_marks("{{ tools }}" + "".join(known.signs[0]), sorted(own) if tokens else ())


def test_every_parser_of_mlx_lm_has_a_syntax_here_and_every_syntax_is_tried():
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]
    assert [name for name in names if by_name(name) is None] == []
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_values_come_back_exactly(name, tokens):
    form = answer_format(model(name, tokens=tokens), "", TOOLS)
    syntax = form.calls[0]
    end = syntax.ends[0] if syntax.ends else ""
    # Where a mark is a token, its text in a value is spelled by other tokens.
    stand_ins = dict(zip(STAND_INS, sorted(form.marks.tokens.values()), strict=False))
    for label, value in (NASTY | {"the end mark": f"a {end or '</tool_call>'} b"}).items():
        written = value
        for stand_in, mark in stand_ins.items():
            written = written.replace(mark, stand_in)
        rest = {"lines": 5, "more": {"a": [1, True, None]}}
        text = f"{syntax.start}{WRITERS[name]({'text': written} | rest)}{end}"
        assert in_every_way(form, text, spell=stand_ins, sizes=(1, 9)) == [(NAME, {"text": value} | rest)], label


def test_values_have_the_types_that_the_schema_allows():
    form = answer_format(model("qwen3_coder", tokens=False), "", TOOLS)
    for key, written, expected in (
        ("lines", "5", 5),
        ("lines", " 5\n", 5),
        ("lines", "five", "five"),
        ("more", "null", None),
        ("more", '{"a": "x\ty",}', {"a": "x\ty"}),
        ("other", "True", True),
        ("other", "plain words", "plain words"),
    ):
        text = f"<tool_call>\n<function={NAME}>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
        assert in_every_way(form, text) == [(NAME, {key: expected})]


BARE_CALL = f"<function={NAME}>\n<parameter=text>\na\n</parameter>\n<parameter=lines>\n5\n</parameter>\n</function>"


@pytest.mark.parametrize("tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("closing", ["", "\n</tool_call>", "</tool_call>"])
def test_calls_of_qwen3_coder_may_lack_the_opening_mark(tokens, closing):
    form = answer_format(model("qwen3_coder", tokens=tokens), "", TOOLS)
    call, read = BARE_CALL + closing, (NAME, {"text": "a", "lines": 5})
    assert in_every_way(form, call) == [read]
    between = in_every_way(form, f"I write.\n\n{call}\nand\n{call}")
    assert between == [("text", "I write."), read, ("text", "\nand"), read]
    assert in_every_way(form, f"{call}\n{call}") == [read, read]
    assert in_every_way(form, f"```\nx = 1\n```\n{call}") == [("text", "```\nx = 1\n```"), read]
    for label, value in NASTY.items():
        written = f"<function={NAME}>\n<parameter=text>\n{value}\n</parameter>\n</function>{closing}"
        assert in_every_way(form, written, sizes=(1, 9)) == [(NAME, {"text": value})], label
    for at in range(1, len(BARE_CALL)):
        assert in_every_way(form, BARE_CALL[:at], cut=True, sizes=(1,)) == [("text", BARE_CALL[:at])]


@pytest.mark.parametrize(
    "text",
    [
        f"Write `{BARE_CALL}` to call it.",
        f"It is {BARE_CALL} there.",
        f"```xml\n{BARE_CALL}\n```\ndone",
        f"a\n\n~~~\nx\n{BARE_CALL}",
        f"1. so:\n   ```\n   {BARE_CALL}\n   ```",
        BARE_CALL.replace(NAME, "no_such_tool"),
        f"<function={NAME}> is how it begins.",
    ],
)
def test_calls_without_an_opening_mark_that_are_spoken_of_are_text(text):
    form = answer_format(model("qwen3_coder", tokens=True), "", TOOLS)
    assert in_every_way(form, text) == [("text", text)]


def test_a_call_that_writes_a_call_is_one_call():
    form = answer_format(model("qwen3_coder", tokens=False), "", TOOLS)
    inner = f"<tool_call>\n{WRITERS['qwen3_coder']({'text': 'a'})}</tool_call>"
    text = f"<tool_call>{WRITERS['qwen3_coder']({'text': inner})}</tool_call>"
    assert in_every_way(form, f"{text}\ntwice{text}") == [
        (NAME, {"text": inner}), ("text", "\ntwice"), (NAME, {"text": inner})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('{"name": "write_file", "arguments": {"text": "a\n\tb"}}', {"text": "a\n\tb"}),
        ('```json\n{"name": "write_file", "arguments": {"text": "a"}}\n```', {"text": "a"}),
        ('{"name": "write_file", "arguments": {"text": "a", "lines": 1,},}', {"text": "a", "lines": 1}),
        ('{"name": "write_file", "arguments": {"text": "a }"}', {"text": "a }"}),
        ('{"name": "write_file", "arguments": {"text": "a"}}}', {"text": "a"}),
        ('[{"name": "write_file", "arguments": {"text": "a"}]', {"text": "a"}),
        ('{"name": "write_file", "arguments": "{\\"text\\": \\"a\\"}"}', {"text": "a"}),
        ('{"type": "function", "function": {"name": "write_file", "arguments": {"text": "a"}}}', {"text": "a"}),
    ],
)
def test_json_that_can_be_read_in_one_way_only_is_read(inside, arguments):
    form = answer_format(model("json_tools", tokens=False), "", TOOLS)
    assert in_every_way(form, f"<tool_call>\n{inside}\n</tool_call>") == [(NAME, arguments)]


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "write_file", "arguments": {"text": "a"',
        '{"name": "write_file", "arguments": {"text": "a}}',
        '{"name": "write_file" "arguments": {}}',
        '{"name": "write_file", "arguments": {"text": }}',
        '{"name": "write_file", "arguments": {}} and more',
        '{"name": "write_file", "arguments": {"text": [1, 2}]}',
    ],
)
def test_json_that_cannot_be_read_stays_text(inside):
    form = answer_format(model("json_tools", tokens=False), "", TOOLS)
    text = f"a\n<tool_call>\n{inside}\n</tool_call>\nb"
    assert in_every_way(form, text) == [("text", text)]


@pytest.mark.parametrize("text", ['{"a": [1e999, -1e999, 5]}', '{"a": [1e999, -1e999, 5,]}'])
def test_a_number_beyond_all_floats_is_the_largest_one(text: str) -> None:
    assert value_at(text)[0] == {"a": [sys.float_info.max, -sys.float_info.max, 5]}
