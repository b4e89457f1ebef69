"""JSON is counted before it is parsed, and a long text is the same in pieces as in one."""

import json
import random
import threading
from contextlib import suppress

import pytest

from omlx.api import json_text
from omlx.api.json_text import TooMuchJson, parse_json
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakePool
from tests.api.serving import CHAT, call

ODD = (
    '"',
    "\\",
    "\\\\",
    "a",
    "\n",
    "é",
    "漢",
    "😀",
    "u",
    "\\u12",
    "{",
    "[",
    ",",
    "}",
    "d83d",
    "\0",
    "\x7f",
    " ",
    ":",
    "/",
)


@pytest.fixture
def tiny_pieces(monkeypatch):
    """Pieces of a few bytes, so that a short text has all kinds of places where it is cut."""
    monkeypatch.setattr(json_text, "_PIECE_BYTES", 37)
    monkeypatch.setattr(json_text, "LONG_STRING_BYTES", 30)
    monkeypatch.setattr(json_text, "SMALL_BYTES", 0)


def made_up(rng: random.Random, level: int = 0):
    kind = rng.random()
    if level > 4 or kind < 0.4:
        return "".join(rng.choice(ODD) for _ in range(rng.randrange(300 if kind < 0.2 else 10)))
    if kind < 0.5:
        return rng.choice([1, 1.5, None, True, -3e5])
    if kind < 0.75:
        return [made_up(rng, level + 1) for _ in range(rng.randrange(5))]
    return {"".join(rng.choice(ODD) for _ in range(3)): made_up(rng, level + 1) for _ in range(rng.randrange(5))}


@pytest.mark.usefixtures("tiny_pieces")
@pytest.mark.parametrize("seed", range(20))
def test_in_pieces_a_text_is_what_it_is_in_one(seed):
    rng = random.Random(seed)
    for _ in range(60):
        value = made_up(rng)
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only, indent=rng.choice([None, 1]))
            if rng.random() < 0.3:
                text = text.replace("/", "\\/").replace("a", "\\u0061")
            with suppress(TooMuchJson):  # a name that is long for such small pieces
                assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("character", ["a", "é", "漢", "😀", '"', "\\", "\n", ",", "[", "{}", "[],", "\\u", "\\ud83d"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_text_may_hold_anything(character, ascii_only):
    text = "x" + character * (700_000 // len(character))
    body = json.dumps({"a": [text, 1], "b": text}, ensure_ascii=ascii_only).encode()
    assert parse_json(body) == {"a": [text, 1], "b": text}


def test_long_texts_are_not_confused_with_each_other_or_with_names():
    texts = [f"{index}" + "x" * 20_000 for index in range(30)]
    assert parse_json(json.dumps({"t": texts, "k": {"0" * 32: "1" * 32}}).encode()) == {
        "t": texts,
        "k": {"0" * 32: "1" * 32},
    }


PAD = b'"' + b"x" * 70_000 + b'"'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" + b"[]," * 200_000 + b"[]]", "lists and objects"),
        (b'{"a":[' + b"{}," * 200_000 + b"1]}", "lists and objects"),
        (b"[" + b'"",' * 400_000 + b"1]", "strings"),
        (b"{" + b'"a":1,' * 200_000 + b'"b":1}', "members of objects"),
        (b"[" + b"1," * 1_200_000 + b"1]", "values"),
        (b" " * (13 << 20) + b"[]", "outside of its strings"),
        (b"[" + (b'"' + b"x" * 2_000 + b'",') * 9000 + b"1]", "strings of up to 2 KB"),
        (b"[" + PAD + b"," + b"9" * 1000 + b"]", "digits"),
        (b"{" + PAD + b":1}", "name of a member"),
        (b"{" + PAD + b" \n:1}", "name of a member"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_text_holds_is_bounded(body, words):
    with pytest.raises(TooMuchJson, match=words):
        parse_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b'["\xff' + PAD[1:] + b"]",
        b"[" + PAD[:-1] + b"\xc3\"]",
        b"[" + PAD[:-1] + b"\\x\"]",
        b"[" + PAD[:-1] + b"\\ud83d\"]",
        b"[" + PAD[:-1] + b"\\ude00" + b"x" * 300_000 + b'"]',
        b"[" + PAD[:-1] + b"\n\"]",
        b"[" + PAD,
        b"[" + PAD[:-1],
        b"[" + PAD + b",1e999]",
        b"[" + PAD + b",NaN]",
        b"[" + PAD + b"," + b"9" * 400 + b".0]",
        b"[" + PAD + b"," + b"[" * 1000,
        PAD[1:],
        PAD + b'"',
        b"[" + PAD + b"] " + PAD,
        b"\\" + PAD,
        b"\xef\xbb\xbf\xef\xbb\xbf[]",
        b"",
        b"\xef\xbb\xbf",
    ],
    ids=range(19),
)  # fmt: skip
def test_what_is_no_json_is_refused_in_pieces_too(body):
    with pytest.raises(ValueError):
        parse_json(body)


def test_the_search_for_long_numbers_takes_a_step_for_each_byte():
    """A step for each digit before it took minutes for this."""
    numbers = [10**499] * 10_000
    assert parse_json(json.dumps(numbers).encode()) == numbers


@pytest.mark.parametrize("text", ['{"a": 1}', json.dumps({"a": "é" * 100_000})])
def test_a_byte_order_mark_is_skipped(text):
    assert parse_json(b"\xef\xbb\xbf" + text.encode()) == json.loads(text)


def test_a_large_body_is_parsed_in_a_thread_and_its_limits_are_a_400(tmp_path, monkeypatch):
    app = create_app(FakePool(), Settings(home=tmp_path))
    threads = []
    real = json_text.from_json
    monkeypatch.setattr(
        json_text, "from_json", lambda *args, **kw: (threads.append(threading.current_thread()), real(*args, **kw))[1]
    )
    assert call(app, "POST", "/v1/chat/completions", json=CHAT).status_code == 200
    large = CHAT | {"x": "y" * 100_000}
    assert call(app, "POST", "/v1/chat/completions", json=large).status_code == 200
    small_thread, *large_threads = [thread.name.split("_")[0] for thread in threads]
    assert small_thread != "omlx-body" and set(large_threads) == {"omlx-body"}
    response = call(app, "POST", "/v1/chat/completions", json=CHAT | {"x": [[]] * 200_000})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "body_too_complex")
    assert "150000 lists and objects" in error["message"]
