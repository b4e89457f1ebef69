"""The table of docs/API.md is what the routes do."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from omlx.api.embeddings import EmbeddingsBody, RerankBody
from tests.embeddings.serving import post

BODIES = {
    "/v1/embeddings": (EmbeddingsBody, {"model": "vectors", "input": ["hello world", "b"]}),
    "/v1/rerank": (RerankBody, {"model": "vectors", "query": "who", "documents": ["he", "she"]}),
}


class Row(NamedTuple):
    path: str
    field: str
    value: Any
    status: str


def rows() -> list[Row]:
    text = (Path(__file__).parents[2] / "docs" / "API.md").read_text("utf-8")
    section = text.split("## Embeddings and reranking")[1].split("\n## ")[0]
    found = re.findall(r"^\| `POST (\S+)` \| `(\w+)` \| `(.+?)` \| (\w+) \|", section, re.MULTILINE)
    return [Row(path, field, json.loads(value), status) for path, field, value, status in found]


def named(row: Row) -> str:
    return f"{row.path} {row.field}"


def test_all_fields_are_in_the_table():
    for path, (body, _) in BODIES.items():
        assert {row.field for row in rows() if row.path == path and row.status == "supported"} == set(body.model_fields)
    assert {row.status for row in rows()} == {"supported", "ignored"}


def answer(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found = post(address, path.removeprefix("/v1/"), **body)
    assert found.status_code == 200, found.text
    return found.json() | {"id": None}


@pytest.mark.parametrize("row", [row for row in rows() if row.status == "ignored"], ids=named)
def test_what_is_ignored_changes_nothing(address, row):
    plain = BODIES[row.path][1]
    assert answer(address, row.path, plain | {row.field: row.value}) == answer(address, row.path, plain)


@pytest.mark.parametrize("row", [row for row in rows() if row.status == "supported"], ids=named)
def test_what_is_supported_is_taken_null_is_absent_and_a_wrong_type_is_named(address, row):
    plain = BODIES[row.path][1]
    if row.field != "model":
        answer(address, row.path, plain | {row.field: row.value})
    if row.field not in plain:
        assert answer(address, row.path, plain | {row.field: None}) == answer(address, row.path, plain)
    wrong = post(address, row.path.removeprefix("/v1/"), **(plain | {row.field: {"a": 1}}))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == row.field
