"""Grammars that answers are held to, on llguidance itself: what they let through, and whether that can be read."""

import itertools
import random

import llguidance
import pytest
from llguidance import hf

from omlx.api.answer_format import answer_format
from omlx.api.answer_parser import AnswerParser
from omlx.api.chat import ChatPrompt, ChatRequest, OutputFormat, ToolChoice
from omlx.api.constraints import MOST_CALLS, constrained
from omlx.api.events import CallStart
from omlx.model.grammar import json_schema
from omlx.request import GrammarSpec, SamplingParams
from tests.api.test_answer_parser import in_every_way, pieces_of
from tests.small_tokenizers import with_marks, with_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "$defs": {"city": {"type": "string", "enum": ["Köln", "Bonn"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


class Model:
    """A tokenizer with the marks of a model, as text or as tokens, and what an answer of it is held to."""

    def __init__(self, *, thinks: bool = False, tokens: bool = False) -> None:
        self.tokenizer = with_tools(thinks=thinks)
        if tokens:
            self.tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
        self._compiled = hf.from_tokenizer(self.tokenizer._tokenizer)

    def constrained(self, choice="auto", *, end="", output=None, tools=(WEATHER, NOW), **fields):
        """`end`: how the prompt ends."""
        wanted = ToolChoice(*choice, **fields) if isinstance(choice, tuple) else ToolChoice(choice, **fields)
        prompt = ChatPrompt([], {}, tuple(tools))
        asked = ChatRequest("m", prompt, SamplingParams(max_tokens=9), tool_choice=wanted, output_format=output)
        allowed = () if wanted.mode == "none" else prompt.tools
        form = answer_format(self.tokenizer, end, allowed, one_call=not wanted.parallel)
        return constrained(asked, form, self.tokenizer)

    def matcher(self, spec: GrammarSpec):
        source = {
            "lark": lambda: llguidance.LLMatcher.grammar_from_lark(spec.text),
            "json_schema": lambda: llguidance.LLMatcher.grammar_from_json_schema(spec.text),
            "json_object": lambda: llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}'),
        }[spec.kind]()
        found = llguidance.LLMatcher(self._compiled, source)
        assert not found.get_error(), (found.get_error(), spec.text)
        return found

    def takes(self, spec: GrammarSpec, text: str) -> bool:
        """Whether this may be a whole answer."""
        matcher = self.matcher(spec)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def wander(self, spec: GrammarSpec, seed: int, most: int = 600) -> str | None:
        """Random allowed tokens to the end; None if it does not come."""
        rng, matcher, tokens = random.Random(seed), self.matcher(spec), []
        while len(tokens) < most:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
            if self.tokenizer.eos_token_id in allowed:
                return self.tokenizer.decode(tokens)
            tokens.append(rng.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        return None


def test_calls_of_allowed_tools_only_and_text_as_ever():
    model = Model(tokens=True)
    spec, _ = model.constrained("auto", allowed=("now",))
    for answer, taken in (("Hm.", True), (f"a {NOW_CALL} b", True), (CALL, False), (f"{NOW_CALL}\n{CALL}", False)):
        assert model.takes(spec, answer) is taken
    spec, _ = model.constrained("required", allowed=("now",))
    for answer, taken in (("Hm.", False), (NOW_CALL, True), (CALL, False)):
        assert model.takes(spec, answer) is taken


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def model(request) -> Model:
    return Model(tokens=request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def thinker(request) -> Model:
    return Model(thinks=True, tokens=request.param)


def test_a_free_answer_has_no_grammar(model):
    assert model.constrained()[0] is None
    assert model.constrained("none")[0] is None
    assert not model.constrained()[1].enforced


def test_with_required_there_is_nothing_but_calls(model):
    spec, form = model.constrained("required")
    assert form.enforced
    for good in (CALL, NOW_CALL, f"{CALL}\n{NOW_CALL}", "\n".join([NOW_CALL] * MOST_CALLS)):
        assert model.takes(spec, good)
    for bad in ("", "hi", f"hi {CALL}", f"{CALL} hi", CALL[:-3], CALL.replace("Bonn", "Rome"), CALL.replace("2", "77"),
                CALL.replace("get_weather", "other"),
                NOW_CALL.replace("{}", '{"a": 1}'), "\n".join([NOW_CALL] * (MOST_CALLS + 1))):  # fmt: skip
        assert not model.takes(spec, bad), bad


def test_a_named_tool_is_called_once(model):
    spec, _ = model.constrained(("named", "now"))
    assert model.takes(spec, NOW_CALL)
    assert not model.takes(spec, CALL)
    assert not model.takes(spec, f"{NOW_CALL}\n{NOW_CALL}")
    spec, _ = model.constrained("required", parallel=False)
    assert model.takes(spec, CALL)
    assert not model.takes(spec, f"{NOW_CALL}\n{NOW_CALL}")


def test_strict_tools_are_held_to_their_schemas_where_they_are_called(model):
    spec, form = model.constrained("auto", strict=True)
    assert form.enforced
    for good in ("", "hi, 1 < 2", CALL, f"I look.\n{CALL}\nand\n{NOW_CALL} done"):
        assert model.takes(spec, good), good
    for bad in (CALL.replace("Bonn", "Rome"), f"a {CALL.replace('2', '77')}", "a <tool_call>hm</tool_call>"):
        assert not model.takes(spec, bad), bad


def test_an_answer_is_json_or_a_call(model):
    spec, _ = model.constrained("auto", output=OutputFormat("json_schema", PERSON))
    assert model.takes(spec, '{"age": 5}')
    assert model.takes(spec, CALL)
    for bad in ("{}", "hi", f'{{"age": 5}}{CALL}'):
        assert not model.takes(spec, bad), bad
    spec, form = model.constrained("none", output=OutputFormat("json_schema", PERSON))
    assert spec == json_schema(PERSON, strict=False)
    assert not form.enforced
    assert model.constrained("auto", tools=(), output=OutputFormat("json_object"))[0] == GrammarSpec("json_object")


@pytest.mark.parametrize("end", ["", "<think>\n"])
def test_a_model_may_think_first(thinker, end):
    opened = "" if end else "<think>"
    thought = f"{opened}\nhm, {{1 < 2\n</think>\n\n"
    for choice, output, good, bad in (
        ("required", None, CALL, "hi"),
        ("none", OutputFormat("json_schema", PERSON), '{"age": 5}', "hi"),
        ("none", OutputFormat("json_object"), '{"a": [1]}', "[]"),
    ):
        spec, form = thinker.constrained(choice, end=end, output=output)
        assert thinker.takes(spec, thought + good)
        assert not thinker.takes(spec, thought + bad)
        assert thinker.takes(spec, good) is (not end)
        found = in_every_way(form, thought + good)
        assert found[0] == ("reasoning", "hm, {1 < 2")


def test_other_forms_of_calls_are_left_to_the_model_or_replaced():
    model = Model()
    model.tokenizer = with_marks("{{ tools }}", parser="minicpm5")
    assert model.constrained("auto", strict=True)[0] is None
    spec, form = model.constrained("required")
    assert model.takes(spec, CALL)
    assert in_every_way(form, CALL) == [("get_weather", {"city": "Bonn", "days": 2})]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_sampled_can_be_read_and_is_valid(model, thinker, seed):
    for tokenizer in (model, thinker):
        spec, form = tokenizer.constrained("required")
        text = tokenizer.wander(spec, seed)
        if text is None:  # random thoughts need not end
            assert tokenizer is thinker
            continue
        parser = AnswerParser(form)
        pieces = pieces_of(form, text, itertools.repeat(7))
        found = [part for piece in pieces for part in parser.push(*((piece,) if isinstance(piece, str) else piece))]
        found += parser.finish(cut=False)
        names = [part.name for part in found if isinstance(part, CallStart)]
        assert names
        assert set(names) <= {"get_weather", "now"}
        for item in in_every_way(form, text):
            if item[0] == "get_weather":
                assert item[1]["city"] in ("Köln", "Bonn")
                assert set(item[1]) <= {"city", "days"}
