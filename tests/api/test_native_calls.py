"""Enforced calls have the model's own format, can be read whatever they hold, and are never cut."""

import asyncio
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from omlx.api.answer_format import answer_format
from omlx.api.call_formats import CALL_FORMATS
from omlx.api.chat import ChatPrompt, ChatRequest, OutputFormat, ToolChoice
from omlx.api.constraints import constrained
from omlx.api.events import CallArguments
from omlx.model.grammar import Grammars
from omlx.request import GrammarSpec, SamplingParams
from tests.api.test_answer_parser import in_every_way, parse, pieces_of
from tests.api.test_call_syntax import NAME, NASTY, WRITERS
from tests.api.test_call_syntax import model as tokenizer_of
from tests.api.test_constraints import Model
from tests.small_tokenizers import with_marks

NATIVE = sorted(known.name for known in CALL_FORMATS if known.written)
TAGGED = [known.name for known in CALL_FORMATS for way in known.written if way.member]
BARE = ("llama",)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "enum": ["a", "Grüße"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["text", "lines"],
    "additionalProperties": False,
}


class Native(Model):
    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})

    def held(self, schema, *, choice=("required", ""), output=None, **fields):
        """Without reasoning, which is any text."""
        tool = {"type": "function", "function": {"name": NAME, "parameters": schema}}
        wanted = ToolChoice(*choice, **fields)
        asked = ChatRequest(
            "m", ChatPrompt([], {}, (tool,)), SamplingParams(max_tokens=9), tool_choice=wanted, output_format=output
        )
        form = answer_format(self.tokenizer, "", (tool,), one_call=not wanted.parallel)
        return constrained(asked, replace(form, thought=None), self.tokenizer)

    def matcher(self, spec: GrammarSpec) -> Any:
        return asyncio.run(self._grammars.compile(spec)).deep_copy()


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def tokens(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def model(request, tokens) -> Native:
    # harmony's marks are always tokens
    tokenizer = tokenizer_of(request.param, tokens=tokens or request.param == "harmony")
    # What tells the newest way to write them.
    hints = {"mistral": "[ARGS]", "phi4": "<|tool_call|>", "harmony": "<|constrain|>"}
    tokenizer.chat_template += hints.get(request.param, "")
    return Native(tokenizer)


def written(name: str, form, arguments) -> str:
    syntax = form.calls[0]
    end = syntax.ends[0] if syntax.ends else ""
    return f"{'' if name in BARE else syntax.start}{WRITERS[name](arguments)}{end}"


def only(schema, arguments) -> dict:
    """The schema that nothing but these arguments fits."""
    members = {key: {"const": value} for key, value in arguments.items()}
    members["text"]["type"] = "string"
    members["lines"] = {"type": "integer", "minimum": arguments["lines"], "maximum": arguments["lines"]}
    return schema | {"properties": members}


@pytest.mark.parametrize(("model", "name"), [(name, name) for name in NATIVE], indirect=["model"])
def test_a_call_is_written_as_the_model_writes_it(model, name):
    for choice in (("required", ""), ("named", NAME)):
        spec, form = model.held(SCHEMA, choice=choice)
        assert form.enforced
        for arguments, fits in (({"text": "Grüße", "lines": 5}, True), ({"text": "b", "lines": 5}, False)):
            assert model.takes(spec, written(name, form, arguments)) is fits
        assert not model.takes(spec, "hi")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", NATIVE, indirect=True)
def test_what_is_sampled_is_read_as_calls(model, seed):
    spec, form = model.held(SCHEMA)
    text = model.wander(spec, seed, most=4000)
    assert text is not None
    calls = in_every_way(form, text, sizes=(1, 9))
    assert calls
    for name, arguments in calls:
        assert name == NAME and set(arguments) == {"text", "lines"}
        assert arguments["text"] in ("a", "Grüße") and 1 <= arguments["lines"] <= 9


@pytest.mark.parametrize(("model", "name"), [(name, name) for name in NATIVE], indirect=["model"])
def test_any_value_is_delivered_whole(model, name):
    marks = "".join(sorted({mark for known in CALL_FORMATS for syntax in known.calls for mark in syntax.marks}))
    for label, value in (NASTY | {"marks": marks}).items():
        arguments = {"text": value, "lines": 3}
        spec, form = model.held(only(SCHEMA, arguments), parallel=False)
        text = model.wander(spec, 1, most=4000)
        assert text is not None, label
        stand_ins = dict(zip("①②③④⑤⑥⑦⑧⑨⑩⑪⑫", form.marks.tokens.values(), strict=False))
        inside = json.dumps(value, ensure_ascii=False)[1:-1]
        hidden = inside
        for stand_in, mark in stand_ins.items():
            hidden = hidden.replace(mark, stand_in)
        spelled = text.replace(inside, hidden) if inside else text
        assert in_every_way(form, spelled, spell=stand_ins, sizes=(1, 9)) == [(NAME, arguments)], label


@pytest.mark.parametrize("model", NATIVE, indirect=True)
def test_a_call_that_the_limit_cuts_is_no_call_or_reported_incomplete(model):
    arguments = {"text": 'a "}] b', "lines": 3}
    spec, form = model.held(only(SCHEMA, arguments), parallel=False)
    text = model.wander(spec, 1, most=4000)
    for at in range(len(text)):
        parser, found = parse(form, pieces_of(form, text[:at], itertools.repeat(1)), cut=True)
        given = "".join(part.text for part in found if isinstance(part, CallArguments))
        assert not parser.calls or parser.incomplete or json.loads(given) == arguments, text[:at]


@pytest.mark.parametrize("model", NATIVE, indirect=True)
def test_text_or_a_call_where_the_schema_is_strict(model):
    spec, form = model.held(SCHEMA, choice=("auto", ""), strict=True)
    if spec is None:  # nothing tells its calls from text
        assert not form.calls[0].start or "{" in [calls.start for calls in form.calls]
        return
    good, bad = ({"text": text, "lines": 3} for text in ("a", "b"))
    name = next(name for name in NATIVE if form.calls == {k.name: k.calls for k in CALL_FORMATS}[name])
    assert model.takes(spec, "hi") and model.takes(spec, f"hi {written(name, form, good)}")
    assert not model.takes(spec, f"hi {written(name, form, bad)}")


def test_json_or_a_call_of_gpt_oss():
    model = Native(tokenizer_of("harmony", tokens=True))
    spec, form = model.held(SCHEMA, choice=("auto", ""), output=OutputFormat("json_object"))
    head = "<|channel|>final<|message|>"
    assert model.takes(spec, head + "{}")
    generic = f'{head}<tool_call>\n{{"name": "{NAME}", "arguments": {{"text": "a", "lines": 3}}}}\n</tool_call>'
    assert model.takes(spec, generic)
    assert in_every_way(form, generic) == [(NAME, {"text": "a", "lines": 3})]


@pytest.mark.parametrize("model", TAGGED, indirect=True)
def test_any_text_without_tags_is_a_value_as_it_is(model):
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "lines": {"type": "integer"}}}
    spec, form = model.held(schema | {"required": ["text"]}, parallel=False)
    assert not form.calls[0].plain
    name = next(name for name in TAGGED if form.calls == {k.name: k.calls for k in CALL_FORMATS}[name])
    taken = 0
    for label, value in NASTY.items():
        for arguments in ({"text": value}, {"text": value, "lines": 7}):
            text = written(name, form, arguments)
            if model.takes(spec, text):
                taken += 1
                assert in_every_way(form, text, sizes=(1, 9)) == [(NAME, arguments)], label
    assert taken >= 2 * len(NASTY) - 6


PIECES = (
    "a", " ", "\n", "<", "</", ">", "parameter", "</parameter", "</parameter >", "<parameter=", "<parameter =x>",
    "<function",
    "</function", "</function >", "</tool_call", "<tool_call", "<invoke ", "<parameter name", "<parameter  name=x>",
    "</invoke", "<arg_key", "</arg_value", "<![CDATA", "]]>", "'", '"', "`", "```\n", "&quot;", "{", "}", "null",
    "=x>", "<minimax:", "</minimax:tool_call",
)  # fmt: skip


@pytest.mark.parametrize("model", TAGGED, indirect=True)
def test_a_text_that_the_grammar_takes_is_read_as_it_is(model):
    rng = random.Random(5)
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "lines": {"type": "integer"}}}
    spec, form = model.held(schema | {"required": ["text"]}, parallel=False)
    name = next(name for name in TAGGED if form.calls == {k.name: k.calls for k in CALL_FORMATS}[name])
    matcher, taken = model.matcher(spec), 0
    for index in range(300):
        arguments = {"text": "".join(rng.choices(PIECES, k=rng.randint(0, 7)))} | ({"lines": 7} if index % 2 else {})
        text = written(name, form, arguments)
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        trial = matcher.deep_copy()
        if trial.try_consume_tokens(tokens) == len(tokens) and trial.is_accepting():
            taken += 1
            assert in_every_way(form, text, sizes=(4,)) == [(NAME, arguments)]
    assert taken > 200


@pytest.mark.parametrize(
    "member",
    [
        {"type": "array"},
        {"type": ["string", "null"]},
        {"type": "string", "pattern": "a"},
        {"type": "string", "enum": ["a </parameter> b"]},
    ],
)
def test_values_that_cannot_be_told_from_text_make_the_call_generic(member):
    model = Native(tokenizer_of("qwen3_coder", tokens=True))
    _, form = model.held({"type": "object", "properties": {"text": member}})
    assert form.calls[0].plain


# How templates write calls; the marks are those that the format is recognized by.
TEMPLATES = {
    "json_tools": '<tool_call>\n{"name": "@", "arguments": #}\n</tool_call>',
    "mistral": "[TOOL_CALLS]@[ARGS]#",
    "mistral, a list": '[TOOL_CALLS][{"name": "@", "arguments": #}]',
    "harmony": " to=functions.@<|channel|>commentary json<|message|>#<|call|>",
    "harmony, constrained": "<|channel|>commentary to=functions.@ <|constrain|>json<|message|>#<|call|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>@<｜tool▁sep｜>#<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek, older": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>@\n```json\n#\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.@:0<|tool_call_argument_begin|>#<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "@", "parameters": #}\n]<|END_ACTION|>'
    ),
    "phi4": '<|tool_call|>[{"name": "@", "arguments": #}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "@", "arguments": #}]',
    "llama": '{"name": "@", "parameters": #}',
}
SIGNS = {"phi4": "<|tool|><|/tool|>", "llama": '{"name": function name'}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_next_prompt_has_the_call_as_it_was_written(name):
    call = TEMPLATES[name]
    for plain, code in (("@", "c.function.name"), ("#", "c.function.arguments | tojson")):
        call = call.replace(plain, f"' + ({code}) + '", 1)
    body = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    calls = "{% for c in m.tool_calls or [] %}{{ '" + call.replace("\n", "\\n") + "' }}{% endfor %}"
    template = f"{{# {SIGNS.get(name, '')} #}}{{{{ tools }}}}{body}{calls}{{% endfor %}}"
    marks = ("<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|start|>", "<|end|>")
    tokenizer = with_marks(template, marks if "harmony" in name else ())
    model = Native(tokenizer)
    arguments = {"text": 'say "Grüße"', "lines": 3}
    spec, form = model.held(only(SCHEMA, arguments), choice=("named", NAME))
    text = model.wander(spec, 1, most=4000)
    assert in_every_way(form, text, sizes=(1,)) == [(NAME, arguments)]
    check_history(tokenizer, text, arguments)


# What precedes the arguments, an argument, and what follows them.
TAGGED_TEMPLATES = {
    "qwen3_coder": ("<tool_call>\n<function=@>\n", "<parameter=%>\n#\n</parameter>\n", "</function>\n</tool_call>"),
    "seed": ("<seed:tool_call>\n<function=@>\n", "<parameter=%>#</parameter>\n", "</function>\n</seed:tool_call>"),
    "glm47": ("<tool_call>@\n", "<arg_key>%</arg_key>\n<arg_value>#</arg_value>\n", "</tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="@">\n',
        '<parameter name="%">#</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
}


@pytest.mark.parametrize("name", sorted(TAGGED_TEMPLATES))
def test_the_next_prompt_has_the_arguments_as_they_were_written(name):
    before, member, after = (
        part.replace("@", "{{ c.function.name }}").replace("%", "{{ k }}").replace("#", "{{ v }}")
        for part in TAGGED_TEMPLATES[name]
    )
    # A template drops the line break that ends it, not others.
    walked = "{% for k, v in c.function.arguments.items() %}" + member.replace("\n", "{{ '\\n' }}") + "{% endfor %}"
    calls = before.replace("\n", "{{ '\\n' }}") + walked + after.replace("\n", "{{ '\\n' }}")
    signs = "<tool_call><function=" if name == "qwen3_coder" else ""
    tokenizer = with_marks(
        f"{{# {signs} #}}{{{{ tools }}}}{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content or '' }}}}"
        f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}{{% endfor %}}"
    )
    model = Native(tokenizer)
    arguments = {"text": 'say "Grüße"\n', "lines": 3}
    members = only(SCHEMA, arguments)["properties"]
    spec, form = model.held(SCHEMA | {"properties": members}, choice=("named", NAME))
    assert not form.calls[0].plain
    text = model.wander(spec, 1, most=4000)
    assert in_every_way(form, text, sizes=(1,)) == [(NAME, arguments)]
    check_history(tokenizer, text, arguments)


def check_history(tokenizer, text, arguments):
    past = [{"function": {"name": NAME, "arguments": arguments}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": past}]
    assert tokenizer.apply_chat_template(messages, tokenize=False).endswith(f"<assistant>{text}")
