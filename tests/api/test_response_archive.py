"""Stored responses on disk: they survive a restart and a kill, each key's apart, and what is deleted is gone."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx.api.responses.archive import ARCHIVE_NAME, Archive, clear_archive
from omlx.api.responses.store import ResponseStore
from omlx.errors import NotFound, Overloaded
from tests.api.test_response_store import ME, OTHER, keep, names, there

PROGRAM = "import sys; from omlx.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ARCHIVE_NAME


def opened(path: Path, **bounds: Any) -> ResponseStore:
    store = ResponseStore(archive=Archive(path), **bounds)
    store.open()
    return store


def test_responses_are_there_after_a_restart(path: Path) -> None:
    store = opened(path)
    keep(store, "a")
    keep(store, "b", "a")
    keep(store, "c", owner=OTHER)
    store.close()
    store = opened(path)
    assert there(store, "a", "b", "c") == ["a", "b"] and store.response(OTHER, "c")["id"] == "c"
    assert names(store.conversation(ME, "b")) == ["a.in", "a.out", "b.in", "b.out"]
    assert set(store.items(ME, ["a.out", "c.out"])) == {"a.out"}
    with pytest.raises(NotFound):
        store.delete(ME, "c")
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_deleted_is_gone_from_the_file_at_once(path: Path) -> None:
    store = opened(path)
    store.keep(ME, {"id": "a", "previous_response_id": None, "output": [{"id": "o", "text": "secret words"}]}, [])
    store.open()  # behind the write
    assert there(ResponseStore(archive=Archive(path)), "a") == ["a"]
    assert b"secret words" in path.read_bytes()
    store.delete(ME, "a")
    assert b"secret words" not in path.read_bytes()
    store.close()
    assert there(opened(path), "a") == []


def test_the_bounds_and_the_order_of_use_hold_over_a_restart(path: Path) -> None:
    store = opened(path, max_responses=3)
    for name in "abc":
        keep(store, name)
    assert there(store, "a") == ["a"]
    store.close()
    store = opened(path, max_responses=3)
    keep(store, "d")
    assert there(store, "a", "b", "c", "d") == ["a", "c", "d"]
    store.close()
    assert there(opened(path, max_responses=2), "a", "b", "c", "d") == ["c", "d"]


def test_what_was_not_used_for_long_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(path, ttl_s=100)
    keep(store, "a")
    store.close()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 99 * 10**9)
    store = opened(path, ttl_s=100)
    assert there(store, "a") == ["a"]
    monkeypatch.setattr(time, "time_ns", lambda: now + 250 * 10**9)
    assert there(store, "a") == []
    store.close()
    assert there(opened(path), "a") == []


def test_a_time_in_the_future_becomes_now(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**18)
    store = opened(path, ttl_s=100)
    keep(store, "a")
    store.close()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    store = opened(path, ttl_s=100)
    assert there(store, "a") == ["a"]
    monkeypatch.setattr(time, "time_ns", lambda: now + 200 * 10**9)
    assert there(store, "a") == []
    store.close()


def test_a_server_finds_what_another_one_wrote_meanwhile(path: Path) -> None:
    first, second = opened(path), opened(path)
    keep(first, "a")
    first.close()
    assert there(second, "a") == ["a"]
    second.close()


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(200), None])
def test_a_file_that_is_not_ours_is_set_aside(
    content: bytes | None, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is None:
        db = sqlite3.connect(path)
        db.execute("CREATE TABLE mine (x)")
        db.commit()
        db.close()
        content = path.read_bytes()
    path.write_bytes(content)
    store = opened(path)
    keep(store, "a")
    store.close()
    (aside,) = path.parent.glob(f"{ARCHIVE_NAME}.set-aside-*")
    assert aside.read_bytes() == content and "renamed to" in caplog.text
    assert there(opened(path), "a") == ["a"]


def test_damage_of_a_row_costs_one_response(path: Path) -> None:
    store = opened(path)
    keep(store, "a")
    keep(store, "b")
    keep(store, "c")
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE responses SET data = x'00' WHERE name = 'a'")
        db.execute("UPDATE responses SET items = '{' WHERE name = 'b'")
    store = opened(path)
    assert there(store, "a", "b", "c") == ["c"]
    store.close()


def test_a_folder_that_cannot_be_written_costs_the_copy_alone(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()  # stands where the file should be
    store = opened(path)
    keep(store, "a")
    assert there(store, "a") == ["a"]
    with pytest.raises(Overloaded, match="could not be deleted on disk"):
        store.delete(ME, "a")
    store.close()
    lines = [entry.getMessage() for entry in caplog.records]
    assert len(lines) == 1 and "kept in memory only" in lines[0]


def test_clearing_deletes_all_or_what_was_not_used_since(path: Path) -> None:
    store = opened(path)
    keep(store, "a")
    between = time.time_ns()
    keep(store, "b")
    assert store.clear(between) == 1 and there(store, "a", "b") == ["b"]
    store.close()
    assert clear_archive(path, between) == 0
    assert clear_archive(path, None) == 1 and there(opened(path), "b") == []
    assert clear_archive(path.with_name("none"), None) == 0


@pytest.fixture
def serve(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Any]:
    """Starts a server over one cache folder; gives the process and its address."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "keys").write_text("me: key-one\nother: key-two\n")

    def start() -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--model", str(tiny_model_dir)]
        command += ["--paged-ssd-cache-dir", str(tmp_path / "cache"), "--api-keys-file", str(tmp_path / "keys")]
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMLX_HOME": str(tmp_path / "home")}
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("curl "))
        return process, url.removesuffix("/chat/completions")

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_conversation_goes_on_after_a_kill(serve: Any, tmp_path: Path) -> None:
    process, url = serve()
    mine = {"Authorization": "Bearer key-one"}
    body = {"model": "tiny", "input": "remember the word marble", "max_output_tokens": 4}
    first = httpx.post(f"{url}/responses", json=body, headers=mine, timeout=60).json()
    unstored = httpx.post(f"{url}/responses", json=body | {"store": False}, headers=mine, timeout=60).json()
    # The answer may come before the file is written: a second server sees when it is.
    waiting = ResponseStore(archive=Archive(tmp_path / "cache" / ARCHIVE_NAME))
    deadline = time.monotonic() + 60
    while waiting._archive is not None and waiting._archive.find(first["id"]) is None:
        assert time.monotonic() < deadline
    waiting.close()
    process.kill()
    process.wait()
    _, url = serve()
    assert httpx.get(f"{url}/responses/{first['id']}", headers=mine).json() == first
    items = httpx.get(f"{url}/responses/{first['id']}/input_items", headers=mine).json()["data"]
    assert "marble" in json.dumps(items)
    more = body | {"input": "which word?", "previous_response_id": first["id"]}
    second = httpx.post(f"{url}/responses", json=more, headers=mine, timeout=60).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 4
    assert httpx.get(f"{url}/responses/{unstored['id']}", headers=mine).status_code == 404
    others = {"Authorization": "Bearer key-two"}
    for method in ("GET", "DELETE"):
        assert httpx.request(method, f"{url}/responses/{first['id']}", headers=others).status_code == 404
    assert httpx.delete(f"{url}/responses/{first['id']}", headers=mine).json()["deleted"]
    assert httpx.get(f"{url}/responses/{first['id']}", headers=mine).status_code == 404
