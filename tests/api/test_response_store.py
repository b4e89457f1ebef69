"""Stored responses: what is kept, for whom, how much of it, and that nothing else is."""

from pathlib import Path
from typing import Any

import pytest

from omlx.api.holding import ByteBudget, Held, current
from omlx.api.responses import store as response_store
from omlx.api.responses.store import ResponseStore
from omlx.errors import BadRequest, NotFound, Overloaded
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakePool
from tests.api.serving import call

ME, OTHER = b"me", b"other"


def response(name: str, previous: str | None = None, size: int = 0) -> dict[str, Any]:
    output = [{"id": f"{name}.out", "text": "x" * size}]
    return {"id": name, "previous_response_id": previous, "output": output}


def keep(store: ResponseStore, name: str, previous: str | None = None, *, owner: bytes = ME, size: int = 0) -> None:
    store.keep(owner, response(name, previous, size), [{"id": f"{name}.in"}])


def names(items: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in items]


def there(store: ResponseStore, *wanted: str) -> list[str]:
    """Those of the names that are there; asking for one counts as its use."""
    found = []
    for name in wanted:
        try:
            found.append(store.response(ME, name)["id"])
        except NotFound:
            continue
    return found


# ---- bounds


def test_the_number_is_bounded_and_the_oldest_goes_first():
    store = ResponseStore(max_responses=3)
    for name in "abcd":
        keep(store, name)
    assert there(store, *"abcd") == ["b", "c", "d"]
    assert len(store) == 3
    assert list(store.items(ME, ["a.in", "d.out"])) == ["d.out"]


def test_the_bytes_are_bounded_and_counted_exactly():
    store = ResponseStore(max_bytes=1000)
    keep(store, "a", size=100)
    one = store.bytes
    assert one > 100
    for name in "bcdefghij":
        keep(store, name, size=100)
        assert store.bytes == len(store) * one <= 1000
    assert len(store) == 1000 // one
    keep(store, "big", size=850)
    assert there(store, "big", "j") == ["big"]
    store.delete(ME, "big")
    assert (store.bytes, len(store)) == (0, 0)


def test_one_that_is_larger_than_the_store_is_not_kept_and_costs_nobody_anything(caplog):
    store = ResponseStore(max_bytes=1000)
    keep(store, "a")
    keep(store, "big", size=2000)
    assert there(store, "a", "big") == ["a"]
    assert "not stored" in caplog.text


def test_a_conversation_that_goes_on_keeps_all_its_turns():
    store = ResponseStore(max_responses=4)
    keep(store, "a")
    keep(store, "b", "a")
    for number in range(6):
        keep(store, f"other{number}")
        assert names(store.conversation(ME, "b")) == ["a.in", "a.out", "b.in", "b.out"]


def test_reading_one_keeps_it():
    store = ResponseStore(max_responses=2)
    keep(store, "a")
    keep(store, "b")
    store.response(ME, "a")
    keep(store, "c")
    assert there(store, *"abc") == ["a", "c"]


# ---- turns


def test_a_conversation_whose_turn_is_gone_cannot_go_on_but_be_read():
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        keep(store, name, previous)
    store.delete(ME, "b")
    with pytest.raises(BadRequest) as gone:
        store.conversation(ME, "c")
    assert (gone.value.param, gone.value.code) == ("previous_response_id", "previous_response_not_found")
    assert names(store.given(ME, "c")) == ["c.in"]
    assert names(store.conversation(ME, "a")) == ["a.in", "a.out"]
    assert not store.items(ME, ["b.out"])


def test_an_item_that_came_back_is_found_where_it_was_last():
    store = ResponseStore()
    keep(store, "a")
    store.keep(ME, response("b"), [{"id": "a.out"}])
    store.delete(ME, "b")
    assert not store.items(ME, ["a.out"])  # as deleted as its last place
    assert store.items(ME, ["a.in"])


# ---- over HTTP


def post(app, **fields):
    return call(app, "POST", "/v1/responses", json={"model": "tiny", "input": "hi"} | fields)


def test_a_response_is_read_as_it_was_answered_and_deleted(app):
    body = post(app, input="hi", metadata={"a": "b"}).json()
    path = f"/v1/responses/{body['id']}"
    assert call(app, "GET", path).json() == body
    assert call(app, "DELETE", path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for method, at in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items")):
        gone = call(app, method, at)
        assert gone.status_code == 404
        error = gone.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_id")
        assert body["id"] in error["message"]


def test_a_streamed_response_is_kept_as_well(app):
    stream = post(app, stream=True).text
    name = stream.partition('"id":"')[2].partition('"')[0]
    assert call(app, "GET", f"/v1/responses/{name}").json()["status"] == "completed"


def test_nothing_is_kept_where_that_is_asked_for(app):
    body = post(app, store=False, input=[{"role": "user", "content": "a", "id": "msg_1"}]).json()
    assert body["store"] is False
    assert len(app.state.responses) == 0
    assert call(app, "GET", f"/v1/responses/{body['id']}").status_code == 404
    assert post(app, previous_response_id=body["id"]).status_code == 400
    assert post(app, input=[{"type": "item_reference", "id": "msg_1"}]).status_code == 404


def test_a_response_is_read_once_however_many_of_its_items_are_wanted(monkeypatch):
    read: list[int] = []
    monkeypatch.setattr(response_store, "hold", read.append)
    store = ResponseStore()
    for name in "ab":
        store.keep(ME, response(name), [{"id": f"{name}{number}"} for number in range(50)])
    wanted = [f"{name}{number}" for number in range(50) for name in "ab"]
    assert sorted(store.items(ME, [*wanted, "x"])) == sorted(wanted)
    assert sum(read) == store.bytes and len(read) == 2
    assert store.items(OTHER, wanted) == {}


def test_a_reference_twice_is_refused(app):
    """A few bytes would stand for as many large items as somebody likes."""
    post(app, input=[{"role": "user", "content": "hi", "id": "msg_1"}])
    reference = {"type": "item_reference", "id": "msg_1"}
    assert post(app, input=[reference]).status_code == 200
    refused = post(app, input=[reference, {"role": "user", "content": "hi"}, reference])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2].id")


def test_a_conversation_has_so_many_items_at_most(app):
    thought = {"type": "reasoning"}
    most = 19_990
    assert post(app, input=[thought] * 20_001).json()["error"]["param"] == "input"
    first = post(app, input=[*[thought] * most, {"role": "user", "content": "hi"}]).json()["id"]
    assert post(app, previous_response_id=first, input="and?").status_code == 200
    refused = post(app, previous_response_id=first, input=[thought] * 10)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_what_is_read_counts_like_what_was_sent():
    held = Held(budget := ByteBudget(150_000))
    token = current.set(held)
    try:
        store = ResponseStore()
        keep(store, "a", size=100_000)
        keep(store, "b", "a", size=100_000)
        assert len(store.conversation(ME, "b")) == 4
        assert 130_000 < budget.held < 140_000  # the first 64 KiB are free
        current.set(Held(budget))
        with pytest.raises(Overloaded):
            store.conversation(ME, "b")
    finally:
        current.reset(token)


def test_input_items_are_listed_in_pages(app):
    first = post(app, input=[{"role": "user", "content": f"{number}"} for number in range(3)]).json()
    name = post(app, previous_response_id=first["id"], input="last").json()["id"]

    def page(query: str = "") -> dict[str, Any]:
        return call(app, "GET", f"/v1/responses/{name}/input_items{query}").json()

    texts = [item["content"][0]["text"] for item in page("?order=asc")["data"]]
    assert texts == ["0", "1", "2", first["output"][0]["content"][0]["text"], "last"]
    assert [item["content"][0]["text"] for item in page()["data"]] == texts[::-1]
    assert {item["type"] for item in page()["data"]} == {"message"}
    found, after = [], ""
    for more in (True, True, False):
        part = page(f"?order=asc&limit=2{after}")
        found += [item["content"][0]["text"] for item in part["data"]]
        assert part["has_more"] is more
        assert (part["first_id"], part["last_id"]) == (part["data"][0]["id"], part["data"][-1]["id"])
        after = f"&after={part['last_id']}"
    assert found == texts
    assert page(f"?order=asc{after}")["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=" + "0" * 8 + "1" + "0" * 5000, "limit"),
        ("limit=00000000150", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ],
)
def test_a_wrong_query_is_named(app, query, param):
    name = post(app).json()["id"]
    response = call(app, "GET", f"/v1/responses/{name}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def rows() -> list[list[str]]:
    text = (Path(__file__).resolve().parents[2] / "docs" / "API.md").read_text("utf-8")
    table = text.partition("## Stored responses")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line[1:-1].split("|")][:4] for line in lines]


def test_every_row_of_the_documents_is_tried(app):
    assert len(rows()) == 7
    said = {"role": "user", "content": "hi", "id": "msg_1"}
    name = post(app, input=[said, said | {"id": "msg_2"}]).json()["id"]
    for endpoint, parameter, example, wrong in rows():
        method, path = endpoint.replace("{id}", name).split()
        plain = call(app, method, path)
        assert plain.status_code == 200, endpoint
        if parameter:
            given = call(app, method, f"{path}?{example}")
            assert given.status_code == 200
            assert (given.json() == plain.json()) == (parameter == "stream"), parameter
            refused = call(app, method, f"{path}?{wrong}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter)
    assert call(app, "GET", f"/v1/responses/{name}").status_code == 404  # the last row deletes it


def test_the_events_of_a_stored_response_cannot_be_had(app):
    name = post(app).json()["id"]
    assert call(app, "GET", f"/v1/responses/{name}?stream=true").json()["error"]["param"] == "stream"
    assert call(app, "GET", f"/v1/responses/{name}?stream=false").status_code == 200


def test_each_key_sees_its_own_responses_only(tmp_path):
    app = create_app(FakePool(), Settings(home=tmp_path, api_key="one,two"))

    def ask(key: str, method: str, path: str, **options: Any) -> Any:
        return call(app, method, f"/v1/responses{path}", headers={"authorization": f"Bearer {key}"}, **options)

    body = ask("one", "POST", "", json={"model": "tiny", "input": "hi"}).json()
    item = {"type": "item_reference", "id": body["output"][0]["id"]}
    for key, status in (("two", 404), ("one", 200)):
        assert ask(key, "GET", f"/{body['id']}").status_code == status
        assert ask(key, "GET", f"/{body['id']}/input_items").status_code == status
        assert ask(key, "POST", "", json={"model": "tiny", "input": [item]}).status_code == status
        going_on = {"model": "tiny", "input": "a", "previous_response_id": body["id"]}
        assert ask(key, "POST", "", json=going_on).status_code == (200 if status == 200 else 400)
    assert ask("two", "DELETE", f"/{body['id']}").status_code == 404
    assert ask("one", "DELETE", f"/{body['id']}").status_code == 200
    assert ask("none", "GET", f"/{body['id']}").status_code == 401
