"""Schemas of clients: what is too large, what is left out, what is closed, and that closing only takes away."""

import contextlib
import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx.errors import BadRequest
from omlx.model.json_schema import arguments, prepare

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = NAMED | {"additionalProperties": False}


def nested(depth: int) -> Any:
    schema: Any = True
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([], "a JSON schema has to be an object"),
        ({"properties": {"a": 5}}, "schema.properties.a: a schema has to be an object"),
        ({"anyOf": [True, "x"]}, r"schema.anyOf[1]: a schema has to be an object"),
        (nested(60), "more than 50 deep"),
        ({"const": "x" * 5000}, "schema.const: a value is longer than 4096"),
        ({"enum": [1, ["x"] * 2000]}, "schema.enum: a value is longer"),
        ({"type": "string", "pattern": "x" * 5000}, "schema.pattern: a value is longer"),
        ({"properties": {"x" * 5000: True}}, "schema.properties: a value is longer"),
        ({"$defs": {"d": {"properties": {f"{n}": True for n in range(501)}}}}, "$defs.d.properties: more than 500"),
        ({"patternProperties": {f"^{n}$": True for n in range(21)}}, "schema.patternProperties: more than 20"),
        ({"items": {"oneOf": [{"const": n} for n in range(201)]}}, "schema.items.oneOf: more than 200"),
        ({"enum": [f"value number {n}" for n in range(9000)]}, "longer than 131072"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_and_where_it_is_said(schema: Any, says: str):
    with pytest.raises(BadRequest) as error:
        prepare(schema)
    assert says in str(error.value) and len(str(error.value)) < 200


def test_prose_is_left_out_and_does_not_count():
    prose = {"title": "T", "description": "x" * 200_000, "default": 1, "examples": ["y" * 9000], "x-guidance": {}}
    schema = prose | {"properties": {"title": prose | {"const": 1}, "default": True}}
    assert prepare(schema) == {
        "properties": {"title": {"const": 1}, "default": True}, "additionalProperties": False
    }  # fmt: skip


def test_the_schema_of_the_caller_stays_as_it_is():
    schema = {"properties": {"a": NAMED | {"description": "d"}}}
    before = json.dumps(schema)
    prepare(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (NAMED, CLOSED),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"properties": {"b": NAMED}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"$defs": {"n": NAMED}, "$ref": "#/$defs/n"}, {"$defs": {"n": CLOSED}, "$ref": "#/$defs/n"}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    ],
)
def test_objects_that_list_their_properties_are_closed(schema: Any, closed: Any):
    assert prepare(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        NAMED | {"additionalProperties": {"type": "string"}},
        NAMED | {"patternProperties": {"^x": True}},
        NAMED | {"minProperties": 2},
        NAMED | {"required": ["b"]},
        {"allOf": [NAMED, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}]},
        NAMED | {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"$defs": {"n": NAMED}, "$ref": "#/$defs/n", "required": ["b"]},
        NAMED | {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    ],
)
def test_objects_that_may_need_more_stay_open(schema: Any):
    assert prepare(schema) == schema


def test_what_fits_the_prepared_schema_fits_the_given_one():
    schema = {"properties": {"a": NAMED, "b": {"anyOf": [NAMED, {"type": "string"}]}}, "required": ["a"]}
    found = 0
    for value in ({"a": {}}, {"a": {"a": 1}, "b": "x"}, {"a": {"c": 1}}, {"a": {}, "d": 1}, {"b": 1}, {}):
        if jsonschema.Draft202012Validator(prepare(schema)).is_valid(value):
            jsonschema.validate(value, schema)
            found += 1
    assert found == 2


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"properties": {}, "required": []}, {"$schema": "https://json-schema.org/draft-07"}],
)  # fmt: skip
def test_a_function_without_parameters_takes_none(parameters: Any):
    assert not jsonschema.Draft202012Validator(arguments(parameters)).is_valid({"a": 1})
    assert jsonschema.Draft202012Validator(arguments(parameters)).is_valid({})


def test_arguments_are_an_object():
    assert arguments({"properties": {"a": True}})["type"] == "object"
    assert arguments({"required": ["a"]}) == {"required": ["a"], "type": "object"}
    with pytest.raises(BadRequest, match="have to be of type"):
        arguments({"type": "array"})


def test_the_largest_is_prepared_in_no_time():
    objects = [{"properties": {f"{n}-{name}": {"type": "string"} for name in range(400)}} for n in range(8)]
    started = time.monotonic()
    prepare({"prefixItems": objects})
    assert time.monotonic() - started < 60


keywords = st.sampled_from([
    "type", "properties", "required", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum", "const", "if", "not",
    "additionalProperties", "patternProperties", "prefixItems", "minProperties", "x",
])  # fmt: skip
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(keywords, children, max_size=4),
    max_leaves=12,
)


@given(documents)
def test_what_is_no_schema_is_refused_or_left_for_the_compiler(document: Any):
    for make in (prepare, arguments):
        with contextlib.suppress(BadRequest):
            make(document)


@pytest.mark.parametrize("schema", [{"enum": [1, [{"a": 2**53 + 1}]]}, {"const": -(2**53) - 1}, {"maximum": 2**60}])
def test_integers_that_no_double_holds_are_refused(schema: dict[str, Any]):
    with pytest.raises(BadRequest, match=r"2\^53"):
        prepare(schema)
    assert prepare({"enum": [2**53, -(2**53), True]})
