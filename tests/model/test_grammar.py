"""Answers of a given form: grammars compiled, held to in batches, over pauses and restored prefixes."""

import asyncio
import json
import re
import string
import threading
from typing import Any

import hypothesis.strategies as st
import jsonschema
import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from llguidance import LLParserLimits

from omlx import worker
from omlx.errors import BadRequest, Overloaded
from omlx.model import grammar
from omlx.model.grammar import Constraint, Grammars
from omlx.model.loader import load
from omlx.model.runner import TextRunner
from omlx.request import GrammarSpec, Request, RequestState
from tests.dict_store import DictStore
from tests.small_tokenizers import with_marks
from tests.tiny import Bench

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "name": {"enum": ["left", "right"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    return load(tiny_model_dir)


@pytest.fixture(scope="module")
def runner(loaded):
    return TextRunner(loaded)


@pytest.fixture
def grammars(loaded) -> Grammars:
    return Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)


class Asking(Bench):
    """A bench whose requests have grammars."""

    def __init__(self, runner: Any, grammars: Grammars, **config: Any) -> None:
        super().__init__(runner, DictStore(), **config)
        self.grammars = grammars

    def begin(self, prompt: str, spec: GrammarSpec | None, **sampling: Any) -> Request:
        sampling = {"max_tokens": 3000, "temperature": 1.0, "top_logprobs": None} | sampling
        request = self.add(list(prompt.encode()), grammar=spec, **sampling)
        if spec is not None:
            request.grammar = asyncio.run(self.grammars.compile(spec))
        return request

    def text(self, request: Request) -> str:
        assert not self.failures
        return bytes(t for t in self.tokens(request) if t < 256).decode()

    def reason(self, request: Request) -> str | None:
        return self.outputs[request.request_id][-1].finish_reason


@pytest.fixture
def bench(runner, grammars) -> Asking:
    return Asking(runner, grammars)


# ---- schemas


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text(string.ascii_letters + ' "\\é', min_size=1, max_size=6)
    return st.dictionaries(names, inner, min_size=1, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[::2],
            "additionalProperties": False,
        }
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 12}]),
    st.tuples(st.integers(-500, 0), st.integers(1, 500)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
    ),
    st.just({"type": "number", "minimum": -2.5, "exclusiveMaximum": 7}),
    st.lists(st.one_of(st.text(max_size=6), st.integers(-(1 << 53), 1 << 53), st.none()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2,5}$"}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3}),
        st.tuples(inner, inner).map(lambda pair: {"anyOf": list(pair)}),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
def test_what_is_sampled_under_a_schema_is_valid(runner, grammars, schema, seed):
    bench = Asking(runner, grammars)
    request = bench.begin("An answer: ", grammar.json_schema(schema, strict=True), seed=seed)
    bench.run()
    if bench.reason(request) == "stop":
        jsonschema.validate(json.loads(bench.text(request)), schema)
    else:  # digits of a number without end
        assert "number" in json.dumps(schema)


def test_any_object(bench):
    request = bench.begin("{", grammar.json_object(), seed=3, temperature=0.7)
    bench.run()
    assert bench.reason(request) == "length" or isinstance(json.loads(bench.text(request)), dict)
    assert bench.text(request).startswith("{")


def test_strings_take_any_character(bench):
    spec = grammar.json_schema({"const": 'a "quoted" \\ täxt 😀\n'}, strict=True)
    request = bench.begin("x", spec)
    bench.run()
    assert json.loads(bench.text(request)) == 'a "quoted" \\ täxt 😀\n'


def test_an_answer_that_is_complete_ends_and_one_that_is_cut_says_so(bench):
    whole = bench.begin("p", grammar.json_schema(POINT, strict=True), seed=1)
    cut = bench.begin("p", grammar.json_schema(POINT, strict=True), seed=1, max_tokens=5)
    bench.run()
    assert bench.reason(whole) == "stop" and bench.reason(cut) == "length"
    assert bench.text(whole).startswith(bench.text(cut))


# ---- beside others


def test_rows_of_a_batch_do_not_touch_each_other(runner, grammars):
    def texts(*asked: tuple[str, GrammarSpec | None]) -> list[str]:
        bench = Asking(runner, grammars)
        requests = [bench.begin(p, spec, seed=5, max_tokens=600 if spec else 60) for p, spec in asked]
        bench.run()
        return [bench.text(request) for request in requests]

    asked: list[tuple[str, GrammarSpec | None]] = [
        ("one prompt", grammar.json_schema(POINT, strict=True)),
        ("another prompt", None),
        ("a third one", grammar.json_schema({"enum": ["alpha", "beta", "gamma"]}, strict=True)),
    ]
    together = texts(*asked)
    assert together == [texts(one)[0] for one in asked]
    assert set(json.loads(together[0])) == {"x", "name"} and len(together[1]) == 60
    assert json.loads(together[2]) in ("alpha", "beta", "gamma")


def test_a_seed_gives_the_same_answer_again_also_from_a_stored_prefix(bench):
    prompt = "a prompt that is longer than a block of sixteen tokens, by far"
    spec = grammar.json_schema({"type": "array", "items": POINT, "minItems": 3, "maxItems": 3}, strict=True)
    texts, cached = [], []
    for _ in range(2):
        request = bench.begin(prompt, spec, seed=11)
        bench.run()
        texts.append(bench.text(request))
        cached.append(request.stats.cached_tokens)
    assert texts[0] == texts[1] and len(json.loads(texts[0])) == 3
    assert cached[0] == 0 and cached[1] > 0


@pytest.mark.parametrize("steps", [1, 2, 9, 30])
def test_a_pause_keeps_the_place(runner, grammars, steps):
    spec = grammar.json_schema({"type": "array", "items": POINT, "minItems": 4, "maxItems": 4}, strict=True)
    plain = Asking(runner, grammars)
    expected = plain.begin("some prompt", spec, seed=2)
    plain.run()
    bench = Asking(runner, grammars)
    older, request = bench.begin("the older one", None, max_tokens=80), bench.begin("some prompt", spec, seed=2)
    while request.stats.generated_tokens < steps:
        bench.scheduler.step()
    assert bench.scheduler.pause_newest() and request.state is RequestState.PAUSED
    bench.run()
    assert bench.text(request) == plain.text(expected)
    assert len(json.loads(bench.text(request))) == 4 and bench.reason(older) == "length"


def test_it_goes_with_bias_penalties_and_filters(bench):
    options = {"logit_bias": ((ord("["), 50.0),), "repetition_penalty": 1.3, "presence_penalty": 1.0}
    request = bench.begin("p", grammar.json_schema(POINT, strict=True), top_p=0.8, top_k=20, min_p=0.01, **options)
    bench.run()
    jsonschema.validate(json.loads(bench.text(request)), POINT)


def test_logprobs_are_those_of_the_tokens_that_may_come(bench):
    spec = grammar.json_schema({"enum": ["ab", "ac"]}, strict=True)
    request = bench.begin("p", spec, top_logprobs=5)
    bench.run()
    best = [dict(output.top_logprobs) for output in bench.outputs[request.request_id]]
    assert [len(row) for row in best] == [1, 1, 2, 1, 1]  # "a, then b or c, ", the end
    assert sum(2.718281828**value for value in best[2].values()) == pytest.approx(1, abs=1e-4)


# ---- compiling


async def test_a_grammar_is_compiled_once_and_in_a_thread_of_its_own(grammars, monkeypatch):
    threads = []
    real = grammar.LLMatcher

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args, **options)

    monkeypatch.setattr(grammar, "LLMatcher", watched)
    specs = [grammar.json_schema(POINT, strict=True) for _ in range(4)]
    found = await asyncio.gather(*(grammars.compile(spec) for spec in specs))
    assert len(threads) == grammars.compiled == 1 and threads[0].startswith("omlx-grammar")
    assert all(one is found[0] for one in found)
    await grammars.compile(grammar.json_object())
    assert len(threads) == 2


async def test_the_kept_grammars_are_bounded(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "_KEPT", 2)
    specs = [grammar.json_schema({"const": number}, strict=True) for number in range(3)]
    for spec in (specs[0], specs[1], specs[0], specs[2], specs[0]):
        await grammars.compile(spec)
    assert grammars.compiled == 3
    await grammars.compile(specs[1])
    assert grammars.compiled == 4


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "colour"}, "colour"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"const": "x" * grammar.LARGEST_TEXT}, "characters"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(grammars, schema, named):
    with pytest.raises(BadRequest, match=named):
        await grammars.compile(grammar.json_schema(schema, strict=True))


async def test_a_schema_that_is_no_promise_is_held_to_as_far_as_possible(grammars):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequest, match="uniqueItems"):
        await grammars.compile(grammar.json_schema(schema, strict=True))
    await grammars.compile(grammar.json_schema(schema, strict=False))


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "schema",
    [
        _nested(200),
        {"type": "string", "pattern": "(.*a){40}.*(b|c)+.*[^x]{300}"},
        {"type": "array", "items": {"type": "string", "pattern": "(a{1,999}){1,999}"}, "minItems": 10**7},
        {"enum": ["x" * 60 + str(number) for number in range(3500)]},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": True}} for j in range(5)]} for i in range(20)]},
    ],
    ids=["deep", "regex", "long", "enum", "product"],
)
def test_a_hostile_schema_is_refused_or_bounded(bench, schema):
    """Either way nobody waits long: llguidance's counters bound each step, and the request fails alone."""
    other = bench.begin("another", None, max_tokens=20)
    try:
        bench.begin("p", grammar.json_schema(schema, strict=True), max_tokens=20)
    except BadRequest:
        bench.scheduler.abort("r2")
    bench.run()
    assert set(bench.failures) <= {"r2"} and all(isinstance(e, BadRequest) for e in bench.failures.values())
    assert bench.reason(other) == "length"


# ---- the mask


async def test_logits_wider_than_the_vocabulary_are_ruled_out(loaded):
    grammars = Grammars(loaded.tokenizer, 300, loaded.eos_token_ids)
    constraint = Constraint(await grammars.compile(grammar.json_object()), 2)
    row = constraint(mx.array([5, 6]), mx.zeros((1, 300)))
    assert [token for token, value in enumerate(row[0].tolist()) if value == 0] == [ord("{")]


async def test_a_token_that_may_not_come_fails_the_request_alone(loaded, grammars):
    constraint = Constraint(await grammars.compile(grammar.json_object()), 1)
    constraint(mx.array([5, ord("}")]), mx.zeros((1, loaded.vocab_size)))
    assert constraint.error


@pytest.mark.parametrize("mark", ["[END]", "<|im_end|>", "<｜end▁of▁sentence｜>"])
async def test_a_token_that_ends_the_answer_never_comes_inside_it(mark):
    tokenizer = with_marks("", [mark])
    end = tokenizer.get_added_vocab()[mark]
    grammars = Grammars(tokenizer, len(tokenizer), {end})
    escaped = re.escape(f"a{mark}")
    coded = "a" + "".join(f"\\x{{{ord(char):X}}}" for char in mark)
    schemas = [{"const": f"a{mark}"}, {"type": "string", "pattern": f"^{escaped}$"}]
    specs = [(grammar.json_schema(schema, strict=True), f'"a{mark}"') for schema in schemas]
    for pattern in (escaped, coded, f"a({re.escape(mark)})"):
        specs.append((grammar.lark("start: " + grammar.regex_rule(pattern)), f"a{mark}"))
        specs.append((grammar.lark(f"start: out\nout: {grammar.lark_rule(f'start: /{pattern}/')}"), f"a{mark}"))
    for spec, text in specs:
        constraint = Constraint(await grammars.compile(spec), 0, frozenset({end}))
        answer = [token for char in text for token in tokenizer.encode(char)]
        for length in range(len(answer) + 1):
            row = constraint(mx.array(answer[:length], dtype=mx.int32), mx.zeros((1, len(tokenizer))))[0]
            assert (row[end].item() == 0) is (length == len(answer)), spec
            assert length == len(answer) or row[answer[length]].item() == 0, spec
            assert not constraint.error


async def test_a_tokenizer_without_a_fast_form_or_an_end_is_refused(loaded):
    with pytest.raises(BadRequest, match="fast"):
        await Grammars(object(), 300, {1}).compile(grammar.json_object())
    with pytest.raises(BadRequest, match="end of its answer"):
        await Grammars(loaded.tokenizer, 300, ()).compile(grammar.json_object())


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"x":1,"name":"left"}', True),
        ('{"x": 1, "name": "left"}', True),
        ('{\n  "x": 1,\n\t"name": "left"\n}', True),
        ('{"x":  1, "name": "left"}', False),
        ('{\n\n"x": 1, "name": "left"}', False),
        (' {"x": 1, "name": "left"}', False),
    ],
)
async def test_white_space_is_bounded_where_json_has_it_and_absent_around_it(loaded, grammars, text, fits):
    constraint = Constraint(await grammars.compile(grammar.json_schema(POINT, strict=True)), 0)
    tokens = list(text.encode())
    width = loaded.vocab_size
    possible = [constraint(mx.array(tokens[:n], dtype=mx.int32), mx.zeros((1, width)))[0] for n in range(len(tokens))]
    assert all(row[token].item() == 0 for row, token in zip(possible, tokens, strict=True)) is fits


async def test_what_a_client_knows_of_llguidance_does_not_count(grammars):
    schema = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(BadRequest, match="not"):
        await grammars.compile(grammar.json_schema(schema, strict=True))


def test_an_answer_whose_grammar_gives_up_fails_alone(runner, loaded, monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=60))
    bench = Asking(runner, Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids))
    other = bench.begin("another", None, max_tokens=20)
    schema = {"type": "string", "pattern": "^(.*a){10}[^x]{30}$"}
    request = bench.begin("p", grammar.json_schema(schema, strict=True))
    bench.run()
    assert list(bench.failures) == [request.request_id]
    assert "held to its form: lexer error: too many states" in str(bench.failures[request.request_id])
    assert "<state>" not in str(bench.failures[request.request_id])
    assert bench.reason(other) == "length"


# ---- bounds


def _one(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string", "pattern": f".*{name}"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "no text fits it"),
        ({"type": "object", "allOf": [{"anyOf": [_one(f"{i}{j}") for j in "abc"]} for i in "abcdef"]}, "items"),
        ({"type": "string", "pattern": "("}, "regex parse error"),
        ({"not": {}}, "Unimplemented keys"),
        ({"const": "x" * 5000}, "schema.const: a value is longer"),
        ({"patternProperties": {f"^{n}$": True for n in range(1000)}}, "schema.patternProperties: more than 20"),
    ],
)  # fmt: skip
async def test_it_is_refused_in_a_line_before_an_answer_begins(grammars, schema, reason):
    with pytest.raises(BadRequest) as error:
        await grammars.compile(grammar.json_schema(schema, strict=True))
    said = str(error.value)
    assert reason in said and "start:" not in said and "verbose" not in said and "\n" not in said


async def test_who_waits_too_long_is_told_and_the_next_finds_it_ready(grammars, monkeypatch):
    def slow(*args: Any, **options: Any) -> Any:
        assert unblocked.wait(60)
        return compile_grammar(*args, **options)

    unblocked, compile_grammar = threading.Event(), grammar.LLMatcher
    monkeypatch.setattr(grammar, "LLMatcher", slow)
    monkeypatch.setattr(grammar, "_WAIT_S", 0.05)
    with pytest.raises(Overloaded, match="not ready"):
        await grammars.compile(grammar.json_object())
    unblocked.set()
    monkeypatch.setattr(grammar, "_WAIT_S", 30)
    await grammars.compile(grammar.json_object())
    assert grammars.compiled == 1


def test_a_complete_answer_ends_whatever_is_said_of_end_tokens(bench):
    request = bench.begin("p", grammar.json_schema({"const": [1]}, strict=True), ignore_eos=True, max_tokens=30)
    bench.run()
    assert (json.loads(bench.text(request)), bench.reason(request)) == ([1], "stop")


# ---- what compiles for ever


def endless(patterns: int = 24) -> GrammarSpec:
    """Each pattern more doubles the time and the memory."""
    schema = {"allOf": [{"type": "string", "pattern": f"a{index}b"} for index in range(patterns)]}
    return grammar.json_schema(schema, strict=True)


async def test_a_grammar_without_bounds_is_refused_and_delays_no_other(grammars, monkeypatch):
    pool = worker.WorkerPool("omlx.model.grammar_worker", cpu_s=10_000, memory=4 << 30)
    monkeypatch.setattr(grammar, "_TRIALS", pool)
    running = [asyncio.create_task(grammars.compile(endless(patterns))) for patterns in (60, 61)]
    try:
        assert await grammars.compile(grammar.json_schema(POINT, strict=True))
        assert not any(task.done() for task in running)
    finally:
        pool.stop()
    for task in running:
        with pytest.raises(Overloaded):
            await task


@pytest.mark.parametrize(
    ("bounds", "reason"), [((1, 4 << 30), "1 s of processor time"), ((10_000, 64 << 20), "memory")]
)
async def test_bounds_of_time_and_memory(grammars, monkeypatch, bounds, reason):
    pool = worker.WorkerPool("omlx.model.grammar_worker", cpu_s=bounds[0], memory=bounds[1])
    monkeypatch.setattr(grammar, "_TRIALS", pool)
    with pytest.raises(BadRequest, match=f"too complex: .*{reason}"):
        await grammars.compile(endless())
    pool.stop()
    # What was refused is known: no process is asked.
    monkeypatch.setattr(grammar, "_TRIALS", None)
    with pytest.raises(BadRequest, match="too complex"):
        await grammars.compile(endless())
