"""Answers taken apart, whatever pieces they come in. The formats are those of mlx-lm's parsers."""

import itertools
import json
import logging
import pkgutil
import random
import sys

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.api.answer_format import AnswerFormat, answer_format
from omlx.api.answer_parser import AnswerParser, Span
from omlx.api.call_formats import GENERIC_CALLS
from omlx.api.events import CallArguments, CallEnd, CallStart
from tests.small_tokenizers import with_marks

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Looks out of the window.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = ("get_weather", {"city": "Köln {x}", "days": 2})
NOW = ("now", {})

# What each of mlx-lm's parsers reads, with its markers: one call, and two of them.
WRITTEN = {
    "json_tools": ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln {x}", "days": 2}}\n</tool_call>'],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln {x}\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>"
    ],
    "glm47": [
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln {x}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ],
    "longcat": [
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Köln {x}"
        "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n"
        "</longcat_tool_call>"
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln {x}</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ],
    "minicpm5": [
        '<function name="get_weather"><param name="city">Köln {x}</param><param name="days">2</param></function>'
    ],
    "muse_spark": [
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Köln {x}</atem:parameter>'
        '\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    ],
    "function_gemma": [
        "<start_function_call>call:get_weather{city:<escape>Köln {x}<escape>,days:2}<end_function_call>"
    ],
    "gemma4": ['<|tool_call>call:get_weather{city:<|"|>Köln {x}<|"|>,days:2}<tool_call|>'],
    "pythonic": ['<|tool_call_start|>[get_weather(city="Köln {x}", days=2)]<|tool_call_end|>'],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln {x}", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ],
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"'
        '<|sep|>Köln {x}<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument'
        "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    ],
    "mistral": [
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln {x}", "days": 2}',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln {x}", "days": 2}}]',
    ],
}
WRITTEN["laguna"] = WRITTEN["glm47"]


def model(parser: str | None = None, *, thinks: bool = False, template: str = "{{ tools }}", tokens=()):
    """A tokenizer with a model's marks; those for thinking are tokens of their own."""
    return with_marks(template, (*tokens, *(("<think>", "</think>") if thinks else ())), parser)


JSON = answer_format(model("json_tools"), "", TOOLS)
THINKING = answer_format(model("json_tools", thinks=True), "", TOOLS)
CALL = WRITTEN["json_tools"][0]


def parse(form: AnswerFormat, pieces, *, stop=(), cut=False):
    parser = AnswerParser(form, stop)
    found = [part for piece in pieces for part in parser.push(*((piece,) if isinstance(piece, str) else piece))]
    return parser, found + parser.finish(cut=cut)


def summary(found):
    """Text, reasoning and calls in their order, neighbours joined."""
    items = []
    for part in found:
        if isinstance(part, Span):
            if items and items[-1][0] == part.kind:
                items[-1] = (part.kind, items[-1][1] + part.text)
            else:
                items.append((part.kind, part.text))
        elif isinstance(part, CallStart):
            items.append([part.name, ""])
        elif isinstance(part, CallArguments):
            items[-1][1] += part.text
    return [(item[0], json.loads(item[1])) if isinstance(item, list) else item for item in items]


def pieces_of(form: AnswerFormat, text: str, sizes, spell=None) -> list:
    """`text` in pieces of these sizes; the marks that are tokens come whole, at the end of a piece.

    A character that `spell` has becomes its text, which no mark's token is found in.
    """
    spell = spell or {}
    ids = {mark: token for token, mark in form.marks.tokens.items()}
    marks = sorted(ids, key=len, reverse=True)
    pieces, plain = [], ""
    while text:
        mark = next((mark for mark in marks if text.startswith(mark)), None)
        if mark is not None:
            pieces.append((plain + mark, ids[mark]))
            text, plain = text[len(mark) :], ""
            continue
        plain, text = plain + spell.get(text[0], text[0]), text[1:]
        if len(plain) >= next(sizes):
            pieces.append(plain)
            plain = ""
    return [*pieces, plain] if plain else pieces


SIZES = (1, 1, 2, 3, 5, 9, 20, 20, 50, 50)


def in_every_way(form: AnswerFormat, text: str, *, stop=(), cut=False, spell=None, sizes=SIZES):
    """What comes out, which must not depend on the pieces that went in, of up to these `sizes`."""
    rng = random.Random(text)
    whole = summary(parse(form, pieces_of(form, text, itertools.repeat(sys.maxsize), spell), stop=stop, cut=cut)[1])
    for most in sizes:
        lengths = iter(lambda most=most: rng.randint(1, most), None)
        assert summary(parse(form, pieces_of(form, text, lengths, spell), stop=stop, cut=cut)[1]) == whole
    return whole


def test_every_parser_of_mlx_lm_is_tried_here():
    names = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert names == set(WRITTEN)


@pytest.mark.parametrize("parser", sorted(WRITTEN))
def test_a_call_is_read_and_nothing_around_it_is_lost(parser):
    form = answer_format(model(parser), "", TOOLS)
    name, arguments = WEATHER
    for written in WRITTEN[parser]:
        assert in_every_way(form, written) == [(name, arguments)]
        assert in_every_way(form, f"I look.\n{written}") == [("text", "I look."), (name, arguments)]
        assert in_every_way(form, f"{written}\n\nDone.") == [(name, arguments), ("text", "\n\nDone.")]
        if form.calls[0].ends:
            between = in_every_way(form, f"a\n{written}\nand\n{written} b")
            assert between == [("text", "a"), (name, arguments), ("text", "\nand"), (name, arguments), ("text", " b")]


@pytest.mark.parametrize("parser", sorted(WRITTEN))
def test_a_call_that_is_cut_or_garbled_is_text(parser, caplog):
    form = answer_format(model(parser), "", TOOLS)
    for written in WRITTEN[parser]:
        start, end = form.calls[0].start, (*form.calls[0].ends, "")[0]
        for garbled in (f"a {start}{{]nonsense{end} b", f"{start}{end}"):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                assert in_every_way(form, garbled) == [("text", garbled)], garbled
                assert "could not read a tool call" in caplog.text
        for at in range(len(start), len(written) - max(len(end), 1), 7):
            assert in_every_way(form, written[:at], cut=True) == [("text", written[:at])]


def test_calls_side_by_side_have_indices_and_ids():
    _, found = parse(JSON, [CALL + "\n" + CALL.replace("get_weather", "now")])
    starts = [part for part in found if isinstance(part, CallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, "get_weather"), (1, "now")]
    assert len({start.call_id for start in starts}) == 2
    assert all(start.call_id.startswith("call_") for start in starts)
    assert [part.index for part in found if isinstance(part, CallEnd)] == [0, 1]
    assert summary(found) == [WEATHER, ("now", WEATHER[1])]


def test_several_calls_inside_one_pair_of_markers():
    form = answer_format(model("pythonic"), "", TOOLS)
    text = '<|tool_call_start|>[get_weather(city="A"), now()]<|tool_call_end|>'
    assert in_every_way(form, text) == [("get_weather", {"city": "A"}), NOW]
    form = answer_format(model("mistral"), "", TOOLS)
    text = '[TOOL_CALLS]get_weather[ARGS]{"city": "a[ARGS]{}"}[TOOL_CALLS]now[ARGS]{} and so on'
    assert in_every_way(form, text) == [("get_weather", {"city": "a[ARGS]{}"}), NOW, ("text", " and so on")]


def test_ids_are_such_as_the_template_takes():
    _, found = parse(answer_format(model("mistral"), "", TOOLS), [WRITTEN["mistral"][0]])
    assert len(found[0].call_id) == 9
    assert found[0].call_id.isalnum()
    _, found = parse(answer_format(model("kimi_k2"), "", TOOLS), WRITTEN["kimi_k2"])
    assert found[0].call_id == "functions.get_weather:0"


def test_arguments_may_be_written_as_a_text_or_under_another_name():
    for inside in ('{"name": "now", "arguments": "{}"}', '{"name": "now", "parameters": {}}', '{"name": "now"}'):
        assert in_every_way(JSON, f"<tool_call>{inside}</tool_call>") == [NOW]
    for inside in (
        '{"name": "now", "arguments": [1]}',
        '{"name": 5, "arguments": {}}',
        '"now"',
        "[]",
        "null",
        '{"name": "no such name", "arguments": {}}',
        '{"name": "now", "arguments": {"x": NaN}}',
    ):
        text = f"<tool_call>{inside}</tool_call>"
        assert in_every_way(JSON, text) == [("text", text)]


def test_a_tool_that_nobody_declared_is_the_clients_to_refuse():
    assert in_every_way(JSON, CALL.replace("get_weather", "made_up")) == [("made_up", WEATHER[1])]


def test_without_tools_their_marks_are_text():
    form = answer_format(model("json_tools", thinks=True), "", ())
    assert in_every_way(form, f"a\n{CALL}\nb") == [("text", f"a\n{CALL}\nb")]


def test_a_model_without_a_format_of_its_own_uses_the_generic_one():
    form = answer_format(model(), "", TOOLS)
    assert form.calls == (GENERIC_CALLS,)
    assert in_every_way(form, f"ok\n{CALL}") == [("text", "ok"), WEATHER]


def test_an_end_of_text_may_take_the_place_of_the_end_marker():
    assert in_every_way(JSON, CALL.removesuffix("</tool_call>")) == [WEATHER]
    text = CALL.removesuffix("</tool_call>")
    assert in_every_way(JSON, text, cut=True) == [("text", text)]


def test_reasoning_is_never_text():
    assert in_every_way(THINKING, "<think>\nhm\n\nhm\n</think>\n\n42") == [("reasoning", "hm\n\nhm"), ("text", "42")]
    assert in_every_way(THINKING, "\n<think>\n\n</think>\n\n42 ") == [("text", "42 ")]
    assert in_every_way(THINKING, f"<think>a</think>\n{CALL}") == [("reasoning", "a"), WEATHER]
    assert in_every_way(THINKING, "<think>cut sho", cut=True) == [("reasoning", "cut sho")]
    assert in_every_way(THINKING, "1 < 2 <thin") == [("text", "1 < 2 <thin")]


def test_a_prompt_may_have_opened_the_reasoning():
    form = answer_format(model("json_tools", thinks=True), "<|assistant|><think>\n", TOOLS)
    assert in_every_way(form, "hm\n</think>\n\n42") == [("reasoning", "hm"), ("text", "42")]
    form = answer_format(model("json_tools", thinks=True), "<think>\n\n</think>\n\n", TOOLS)
    assert in_every_way(form, "42") == [("text", "42")]
    form = answer_format(model(template="{% if x %}<think>\n</think>{% endif %}"), "a<think>", ())
    assert in_every_way(form, "b</think>c") == [("reasoning", "b"), ("text", "c")]


def test_a_call_may_stand_in_the_reasoning():
    found = in_every_way(THINKING, f"<think>a\n{CALL}\nb</think>c")
    assert found == [("reasoning", "a"), WEATHER, ("reasoning", "\nb"), ("text", "c")]
    found = in_every_way(THINKING, "<think>is <tool_call>x</tool_call> right?</think>c")
    assert found == [("reasoning", "is <tool_call>x</tool_call> right?"), ("text", "c")]


def test_a_format_of_headers_and_several_messages():
    form = answer_format(model("muse_spark", tokens=("<|message|>", "<|eom|>", "<|eot|>")), "", TOOLS)
    text = f" to=self<|message|>hm<|eom|>x to=user<|message|>hi<|eom|> {WRITTEN['muse_spark'][0]}"
    assert in_every_way(form, text) == [("reasoning", "hm"), ("text", "hi"), WEATHER]
    assert in_every_way(form, "neither") == [("text", "neither")]
    assert in_every_way(form, "to=user<|message|>hi<|eot|>") == [("text", "hi")]


@pytest.mark.parametrize("form", [AnswerFormat(), JSON, THINKING], ids=["plain", "tools", "thinking"])
@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("STOP",), "go on STOP no", "go on "),
        (("STOP",), "go on STO", "go on STO"),
        (("STOP",), "SSTOSTOP", "SSTO"),
        (("\n\n", "END"), "one\n\ntwo END", "one"),
        (("END", "\n\n"), "one END two\n\n", "one "),
        (("ab", "b"), "xxab", "xx"),
        (("abcd", "c"), "abcd", "ab"),
        (("😀",), "ok 😀", "ok "),
        (("the",), "in the end", "in "),
        (("s",), "s", ""),
        (("long enough",), "short", "short"),
        ((" \n x",), "a \n x", "a"),
    ],
)
def test_text_ends_before_the_stop_string_that_is_complete_first(form, stops, text, expected):
    assert in_every_way(form, text, stop=stops) == ([("text", expected)] if expected else [])
    parser, _ = parse(form, list(text), stop=stops)
    assert (parser.stopped_by is not None) is (expected != text)
    assert parser.stopped_by in (None, *stops)


def test_what_may_become_a_stop_string_is_held_back():
    parser = AnswerParser(AnswerFormat(), ("stop", "oh"))
    sent = ["".join(span.text for span in parser.push(char)) for char in "a stohx"]
    assert sent == ["a", " ", "", "", "", "st", ""]
    assert parser.stopped_by == "oh"


def test_stop_strings_are_looked_for_in_the_text_only():
    text = f"<think>a, city</think>b{CALL}c, city"
    found = in_every_way(THINKING, text, stop=(", ci",))
    assert found == [("reasoning", "a, city"), ("text", "b"), WEATHER, ("text", "c")]
    # A stop string does not reach over a call, and a call that is none is text.
    assert in_every_way(JSON, f"ab{CALL}cd", stop=("bc",)) == [("text", "ab"), WEATHER, ("text", "cd")]
    assert in_every_way(JSON, "ab<tool_call>x</tool_call>", stop=("x<",)) == [("text", "ab<tool_call>")]


def test_text_is_not_held_back_longer_than_need_be():
    parser = AnswerParser(JSON)
    sent = ["".join(span.text for span in parser.push(char)) for char in "a b<tox"]
    assert sent == ["a", "", " b", "", "", "", "<tox"]


def test_spans_tell_where_their_text_stands():
    text = f"<think>\nhm</think>\n\nso  {CALL} x"
    _, found = parse(THINKING, list(text))
    spans = [part for part in found if isinstance(part, Span)]
    assert all(text[span.start : span.end] == span.text for span in spans)
    assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_an_enforced_call_is_handed_on_while_it_is_written():
    form = answer_format(model("json_tools"), "", TOOLS, enforced=True)
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"]", "days": [{}, 1]}}\n</tool_call>'
    parser = AnswerParser(form)
    pieces = [part for char in text for part in parser.push(char)]
    assert isinstance(pieces[0], CallStart)
    assert len(pieces) > 20
    assert "".join(part.text for part in pieces if isinstance(part, CallArguments)) == text[49:-14]
    assert pieces[-1] == CallEnd(0)
    expected = [("get_weather", {"city": 'a}"]', "days": [{}, 1]})]
    assert in_every_way(form, text) == expected
    # Cut short it is what there is of it, as OpenAI does it.
    _, found = parse(form, list(text[:60]), cut=True)
    assert "".join(part.text for part in found if isinstance(part, CallArguments)) == text[49:60]
    assert found[-1] == CallEnd(0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", "a", "\n", " ", "{", '"']),
                max_size=12))  # fmt: skip
def test_whatever_comes_is_taken_apart_the_same_way_and_text_is_kept(parts):
    text = "".join(parts)
    found = in_every_way(JSON, text)
    kept = "".join(CALL if kind == "get_weather" else value for kind, value in found)
    assert kept.split() == text.split() or "".join(kept.split()) == "".join(text.split())
    thinking = in_every_way(THINKING, text)
    joined = "".join(CALL if kind == "get_weather" else value for kind, value in thinking)
    without = text.replace("<think>", "").replace("</think>", "")
    assert "".join(joined.replace("<think>", "").replace("</think>", "").split()) == "".join(without.split())


def test_a_mark_that_is_only_spoken_of_does_not_hide_a_later_call():
    form = answer_format(model("json_tools"), "", TOOLS)
    text = f"A <tool_call> mark begins it, see: {CALL} Done."
    before = text.partition(" <tool_call>\n")[0]
    assert in_every_way(form, text) == [("text", before.rstrip()), WEATHER, ("text", " Done.")]


def test_a_call_inside_a_call_that_was_cut_is_not_made():
    form = answer_format(model("qwen3_coder"), "", TOOLS)
    inner = WRITTEN["qwen3_coder"][0]
    text = f"<tool_call>\n<function=now>\n<parameter=x>\n{inner}\n{inner}\nand"
    assert in_every_way(form, text, cut=True) == [("text", text)]


def test_many_marks_that_begin_nothing_take_no_long_time():
    for parser in WRITTEN:
        form = answer_format(model(parser), "", TOOLS)
        text = form.calls[0].start * 3000
        assert summary(parse(form, [text])[1]) == [("text", text)]
