"""API keys: where they come from, what each may, and that they are shown nowhere."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from omlx.access import keys as keys_module
from omlx.access.keys import KeyRing, admin_credential, read_keys
from omlx.cli import main
from omlx.errors import SettingError
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import CHAT, COMPLETION, call, served

FILE = """\
# our keys
alice: sk-alice-1   # her laptop
bob:  sk-bob#2 requests=2 cache_salt=auto

sk-nameless requests=0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "_LOOK_EVERY_S", 0.0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def models(app: FastAPI, **options: Any) -> int:
    return call(app, "GET", "/v1/models", **options).status_code


# ---- where they come from


def test_keys_of_options_and_file_open_side_by_side(tmp_path: Path, file: Path) -> None:
    settings = Settings(home=tmp_path, api_key="first,second", api_keys_file=file, max_requests_per_key=7)
    assert [(key.name, key.max_requests) for key in read_keys(settings)] == [
        ("key1", 7), ("key2", 7), ("alice", 7), ("bob", 2), ("line5", 0),
    ]  # fmt: skip
    app = create_app(FakePool(), settings)
    for key in ("first", "second", "sk-alice-1", "sk-bob#2", "sk-nameless"):
        assert models(app, headers=bearer(key)) == models(app, headers={"x-api-key": key}) == 200
    for key in ("", "first,second", "alice", "alice:", "sk-bob", "SK-ALICE-1", "sk-alice-1 sk-bob#2"):
        assert models(app, headers=bearer(key)) == models(app, headers={"x-api-key": key}) == 401


def test_a_key_in_the_address_is_no_key(tmp_path: Path, file: Path) -> None:
    app = create_app(FakePool(), Settings(home=tmp_path, api_keys_file=file))
    for name in ("api_key", "key", "x-api-key", "authorization", "access_token"):
        assert models(app, params={name: "sk-alice-1"}) == 401


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("s3cret: ", "line 1: there is no key"),
        ("a b: s3cret", "line 1: only admin"),
        ("na/me: s3cret", "line 1: a name has"),
        (f"{'x' * 65}: s3cret", "line 1: a name has"),
        ("a: s3cret requests=-1", "line 1: only admin"),
        ("a: s3cret requests=٣", "line 1: only admin"),
        ("a: s3cret cache_salt=mine", "line 1: only admin"),
        ("a: one s3cret", "line 1: only admin"),
        ("a: s3cret admin=yes", "line 1: only admin"),
        ("a: s3crét", "line 1: a key must be ASCII"),
        ("a: s3cret\na: other", "two API keys have the name 'a'"),
        ("a: s3cret\nb: s3cret", "the API keys 'a' and 'b' are the same"),
        ("a: adm1n-s3cret", "the admin key must be another key than the API key 'a'"),
        ("# nothing", "holds no key"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_without_a_key(tmp_path: Path, file: Path, line: str, said: str) -> None:
    file.write_text(line + "\n", "utf-8")
    with pytest.raises(SettingError) as refused:
        read_keys(Settings(home=tmp_path, api_keys_file=file, admin_key="adm1n-s3cret"))
    assert said in str(refused.value)
    assert "s3c" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMLX_HOME", str(tmp_path))
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        assert main(["serve", "--api-keys-file", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"omlx: the API keys cannot be read from {path}: {why}")
    (tmp_path / "latin").write_bytes(b"a: \xff")
    assert main(["serve", "--api-keys-file", str(tmp_path / "latin")]) == 2
    assert "it is not UTF-8" in capsys.readouterr().err


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    KeyRing(Settings(home=tmp_path, api_keys_file=file))
    assert caplog.text == ""
    file.chmod(0o644)
    KeyRing(Settings(home=tmp_path, api_keys_file=file))
    assert f"{file} is open to every user" in caplog.text and "alice" not in caplog.text


@pytest.mark.usefixtures("looks_at_once")
def test_a_changed_file_is_read_again(tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "omlx")
    app = create_app(FakePool(), Settings(home=tmp_path, api_keys_file=file))
    assert models(app, headers=bearer("sk-alice-1")) == 200
    replace_file(file, "alice: sk-alice-2\ncarol: sk-carol")
    assert models(app, headers=bearer("sk-alice-2")) == models(app, headers=bearer("sk-carol")) == 200
    assert models(app, headers=bearer("sk-alice-1")) == models(app, headers=bearer("sk-bob#2")) == 401
    assert "2 API keys in force: alice, carol" in caplog.text and "sk-" not in caplog.text


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize("spoil", [os.remove, lambda path: replace_file(path, "alice: x y")])
def test_a_file_that_is_broken_later_leaves_the_keys_as_they_were(
    tmp_path: Path, file: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(FakePool(), Settings(home=tmp_path, api_keys_file=file))
    spoil(file)
    for _ in range(3):
        assert models(app, headers=bearer("sk-alice-1")) == 200
        assert models(app) == 401
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the API keys stay as they were" in caplog.text


def replace_file(path: Path, text: str) -> None:
    """As an editor does it: another file under the same name."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.chmod(0o600)
    other.replace(path)


def test_every_key_is_compared_whichever_was_given(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(Settings(home=tmp_path, api_key="first", api_keys_file=file))
    compared: list[bytes] = []
    compare = keys_module.hmac.compare_digest

    def noted(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", noted)
    for given in (b"first", b"sk-nameless", b"wrong", b"", b"\xff" * 10_000):
        compared.clear()
        ring.find(given)
        assert len(compared) == 4 and {len(digest) for digest in compared} == {32}


# ---- keys for operators


def admin_answer(app: FastAPI, key: str = "", **headers: str) -> tuple[int, str]:
    given = bearer(key) if key else {}
    answer = call(app, "GET", "/admin/cache_probe", headers=given | {"host": "127.0.0.1"} | headers)
    return answer.status_code, answer.text


def test_with_api_keys_a_loopback_peer_is_no_operator(tmp_path: Path, file: Path) -> None:
    """A proxy on this machine looks like that, also one that adds no header, as nginx does by default."""
    for options in ({"api_key": "s3cret"}, {"api_keys_file": file}):
        app = create_app(Figures(), Settings(home=tmp_path, **options))
        for key in ("", "s3cret", "sk-alice-1", "admin"):
            status, text = admin_answer(app, key)
            assert status == 403 and "--admin-key" in text and "--api-keys-file with admin" in text


@pytest.mark.usefixtures("looks_at_once")
def test_a_key_marked_admin_opens_admin_routes_and_the_others_do_not(tmp_path: Path, file: Path) -> None:
    file.write_text("alice: sk-alice\nroot: sk-root requests=3 admin cache_salt=auto\n")
    app = create_app(Figures(), Settings(home=tmp_path, api_key="one", api_keys_file=file))
    assert admin_answer(app, "sk-root")[0] == models(app, headers=bearer("sk-root")) == 200
    assert call(app, "GET", "/admin/cache_probe", headers={"x-api-key": "sk-root"}).status_code == 200
    for key in ("", "one", "sk-alice", "admin", "sk-root admin"):
        status, text = admin_answer(app, key)
        assert status == 401 and "invalid_admin_key" in text
    replace_file(file, "alice: sk-alice admin\nroot: sk-root")  # counts from the next request on
    assert admin_answer(app, "sk-alice")[0] == 200 and admin_answer(app, "sk-root")[0] == 401
    replace_file(file, "alice: sk-alice")
    assert admin_answer(app, "sk-alice")[0] == 403


def test_the_admin_key_and_a_key_marked_admin_open_side_by_side(tmp_path: Path, file: Path) -> None:
    file.write_text("alice: sk-alice\nroot: sk-root admin")
    app = create_app(Figures(), Settings(home=tmp_path, api_keys_file=file, admin_key="0perator"))
    assert [admin_answer(app, key)[0] for key in ("0perator", "sk-root", "sk-alice", "")] == [200, 200, 401, 401]


def test_the_command_line_finds_a_key_for_the_admin_routes(tmp_path: Path, file: Path) -> None:
    assert admin_credential(Settings(home=tmp_path, api_key="one")) is None
    assert admin_credential(Settings(home=tmp_path, api_keys_file=file)) is None
    file.write_text("alice: sk-alice\nroot: sk-root admin")
    assert admin_credential(Settings(home=tmp_path, api_keys_file=file)) == "sk-root"
    assert admin_credential(Settings(home=tmp_path, api_keys_file=file, admin_key="0perator")) == "0perator"


# ---- nowhere to be seen


def test_keys_are_in_no_log_answer_error_or_listing(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    settings = Settings(home=tmp_path, api_key="sk-one,sk-two", api_keys_file=file, admin_key="sk-admin")
    pool = Figures()
    app = create_app(pool, settings)
    shown = [repr(settings), settings.model_dump_json(), str(settings.rows()), str(settings.describe())]
    shown += [repr(read_keys(settings)), repr(vars(KeyRing(settings)))]
    for key in ("sk-one", "sk-bob#2", "sk-wrong"):
        for body in (CHAT, CHAT | {"model": "no"}, CHAT | {"stop": 5}, {}):
            path = f"/v1/chat/completions?api_key={key}"
            shown.append(call(app, "POST", path, json=body, headers=bearer(key)).text)
    figures = call(app, "GET", "/admin/cache_probe", headers=bearer("sk-admin"))
    assert figures.status_code == 200
    probe = {"model": "tiny", "prompt": "hi", "api_key_name": "nobody"}
    shown += [figures.text, call(app, "POST", "/admin/cache_probe", json=probe, headers=bearer("sk-admin")).text]
    monkeypatch.setenv("OMLX_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["settings", "--api-key", "sk-one", "--api-key", "sk-two", "--admin-key", "sk-admin"]) == 0
    captured = capsys.readouterr()
    assert "********" in captured.out
    logged = [record.getMessage() for record in caplog.records if record.name != "httpx"]  # that is the client
    assert not [text for text in [*shown, *logged, captured.out, captured.err] if "sk-" in text]
    assert "key=bob" in caplog.text and "key=key1" in caplog.text


def test_the_servers_own_log_has_no_query(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with served(create_app(FakePool(), Settings(home=tmp_path, api_key="sk-one"))) as url:
        for key in ("sk-one", "sk-other"):
            answer = httpx.get(f"{url}/v1/models", params={"api_key": key}, headers=bearer("sk-one"))
            assert answer.status_code == 200
            assert httpx.get(f"{url}/v1/models", params={"api_key": key}).status_code == 401
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]  # the client's
    assert logged and not any("sk-" in line for line in logged)


class Figures(FakePool):
    async def cache_figures(self) -> dict[str, Any]:
        return {"total": {}, "models": {}, "stored": []}


# ---- a cache of its own


def test_salts_are_equal_only_for_the_same_key_and_the_same_salt(tmp_path: Path, file: Path) -> None:
    shared = read_keys(Settings(home=tmp_path, api_keys_file=file))
    assert [key.cache_salt("x") for key in shared if key.name != "bob"] == ["x", "x"]
    own = read_keys(Settings(home=tmp_path, api_key="a1,a2", api_keys_file=file, api_key_cache_salt="auto"))
    salts = {key.cache_salt(asked) for key in own for asked in ("", "x", "y", "\0", "x\0")}
    assert len(salts) == 5 * len(own) and all(len(salt) == 64 for salt in salts)
    again = read_keys(Settings(home=tmp_path, api_key="a1", api_key_cache_salt="auto"))
    assert again[0].cache_salt("x") == own[0].cache_salt("x")  # also after a restart
    file.write_text("carol: sk-carol cache_salt=none")
    plain = read_keys(Settings(home=tmp_path, api_keys_file=file, api_key_cache_salt="auto"))
    assert plain[0].cache_salt("x") == "x"


def test_the_salt_reaches_the_engine_with_the_clients_within_it(tmp_path: Path, file: Path) -> None:
    engine = FakeEngine()
    settings = Settings(home=tmp_path, api_keys_file=file)
    app = create_app(FakePool(engine), settings)
    bob = next(key for key in read_keys(settings) if key.name == "bob")
    for key, asked in (("sk-alice-1", {}), ("sk-alice-1", {"cache_salt": "x"}), ("sk-bob#2", {"cache_salt": "x"})):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            assert call(app, "POST", path, json=body | asked, headers=bearer(key)).status_code == 200
    assert [request.cache_salt for request in engine.seen] == ["", "", "x", "x", *[bob.cache_salt("x")] * 2]
    assert [request.key_name for request in engine.seen] == ["alice"] * 4 + ["bob"] * 2


# ---- as many as it may


class Slow:
    """An application over an engine whose answers end when they are told to, and a client that goes on meanwhile."""

    def __init__(self, app: FastAPI) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def chat(self, key: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
        request = self._client.post("/v1/chat/completions", json=CHAT | fields, headers=bearer(key))
        return asyncio.create_task(request)

    async def get(self, path: str, key: str) -> httpx.Response:
        return await self._client.get(path, headers=bearer(key))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_has_no_more_requests_at_work_than_it_may(tmp_path: Path, file: Path, stream: bool) -> None:
    engine = FakeEngine(token_s=0.05)
    slow = Slow(create_app(FakePool(engine), Settings(home=tmp_path, api_keys_file=file)))
    running = [slow.chat("sk-bob#2", stream=stream) for _ in range(2)]
    others = [slow.chat("sk-alice-1", stream=stream, max_tokens=2) for _ in range(4)]
    while len(engine.seen) < 6:
        await asyncio.sleep(0.01)
    refused = await slow.chat("sk-bob#2", stream=stream)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests" in error["message"]
    assert (await slow.get("/v1/models", "sk-bob#2")).status_code == 200  # looking is not counted
    assert [(await answer).status_code for answer in [*running, *others]] == [200] * 6
    assert (await slow.chat("sk-bob#2", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_place_is_free_again_after_an_error_or_a_client_that_left(
    tmp_path: Path, file: Path, stream: bool
) -> None:
    engine = FakeEngine(token_s=0.05, failure=ZeroDivisionError(), fail_after=1)
    slow = Slow(create_app(FakePool(engine), Settings(home=tmp_path, api_keys_file=file)))
    for _ in range(3):
        await slow.chat("sk-bob#2", stream=stream)
        assert (await slow.chat("sk-bob#2", stop=5)).status_code == 400
    engine.failure = None
    for _ in range(3):
        left = slow.chat("sk-bob#2", stream=stream)
        while not engine.running:
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    assert (await slow.chat("sk-bob#2", max_tokens=1)).status_code == 200


# ---- as options


@pytest.mark.parametrize("field", ["api_key", "cors_origin"])
def test_a_repeated_flag_a_list_and_commas_are_the_same(tmp_path: Path, field: str) -> None:
    values = {"api_key": ["sk-one", "sk-two"], "cors_origin": ["https://a.example", "http://b.example:81"]}[field]
    env = {"OMLX_HOME": str(tmp_path)}

    def found(settings: Settings) -> Any:
        return settings.api_keys if field == "api_key" else settings.cors_origin

    assert found(Settings.load({field: ",".join(values)}, env)) == tuple(values)
    assert found(Settings.load({}, env | {f"OMLX_{field.upper()}": ",".join(values)})) == tuple(values)
    for written in (",".join(values), values):
        (tmp_path / "settings.json").write_text(json.dumps({field: written}))
        assert found(Settings.load({}, env)) == tuple(values)
    for wrong in ([True], [["a"]], [None]):
        (tmp_path / "settings.json").write_text(json.dumps({field: wrong}))
        with pytest.raises(SettingError, match="must be a text or a number"):
            Settings.load({}, env)


def test_the_command_line_takes_keys_and_origins_more_than_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMLX_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMLX_CORS_ORIGIN", "https://c.example")
    assert main(["settings", "--cors-origin", "https://a.example", "--cors-origin", "https://B.example/"]) == 0
    assert "https://a.example, https://b.example" in capsys.readouterr().out
    assert main(["settings"]) == 0
    assert "https://c.example" in capsys.readouterr().out
    assert main(["settings", "--api-key", "one", "--api-key", ""]) == 2
    assert "must not hold an empty key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["*", "null", "chat.example.com", "https://a.example/path", "https://*.example", "", "a,b"]
)
def test_what_is_no_origin_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match=r"--cors-origin .*is not an origin") as refused:
        Settings.load({"cors_origin": text}, {"OMLX_HOME": str(tmp_path)})
    assert "\n" not in str(refused.value)


def test_the_admin_key_is_none_of_the_api_keys(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="another key than the API key"):
        Settings.load({"api_key": "one,two", "admin_key": "two"}, {"OMLX_HOME": str(tmp_path)})
