"""File descriptors: clients that open connections and send nothing keep nobody out, and limits are raised only."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from omlx.access import connections
from omlx.access.connections import Connections
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool
from tests.api.serving import CHAT, served, wait_until

ROOT = Path(__file__).parents[2]
LIMIT = 96
PROGRAM = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from omlx.access.connections import unchanged_limits
from omlx.settings import Settings
with unchanged_limits():
    from omlx import server
    from omlx.access import limits
    from tests.api.fakes import FakePool

limits.HEAD_S = 600  # no connection is closed for its age
sys.exit(server.run(FakePool(), Settings.load({{"port": "0"}}), server.bind("127.0.0.1", 0)))
"""


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server with few file descriptors: its address and process."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMLX_HOME": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            hint = next(line for line in process.stdout if line.startswith("curl "))
            yield hint.split()[1].removesuffix("/v1/chat/completions"), process
        finally:
            process.kill()


def test_half_open_requests_keep_nobody_out_and_are_logged_once(
    small_server: tuple[str, subprocess.Popen[str]],
) -> None:
    url, process = small_server
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with ExitStack() as stack:
        for wave in range(3):
            for _ in range(LIMIT):
                client = stack.enter_context(socket.create_connection(address, timeout=60))
                client.sendall(b"GET /health HTT" if wave else b"")
            for path in ("/health", "/v1/models"):
                assert httpx.get(url + path, timeout=60).status_code == 200
    process.terminate()
    _, errors = process.communicate(timeout=60)
    lines = errors.splitlines()
    assert process.returncode == 0 and 1 <= len(lines) <= 2, errors[:2000]
    assert f"all that {LIMIT} open files allow" in lines[0]


def test_running_requests_go_on_and_what_always_answers_still_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    engine = FakeEngine(endless=True, token_s=0.01, context_length=10**6)
    body = json.dumps(CHAT | {"stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with served(create_app(FakePool(engine), Settings(home=tmp_path))) as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        running = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(8)]
        for client in running:
            client.sendall(head + body)
        wait_until(lambda: len(engine.running) == 8, timeout_s=60)
        for _ in range(20):
            refused = httpx.get(f"{url}/v1/models", timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        assert len(engine.running) == 8 and not engine.aborted
        running[0].close()
        wait_until(lambda: httpx.get(f"{url}/v1/models", timeout=60).status_code == 200, timeout_s=60)
        assert len(engine.running) == 7
        for client in running:
            client.close()
        wait_until(lambda: not engine.running, timeout_s=60)


class Client:
    closed = False

    def abort(self) -> None:
        self.closed = True


def test_the_one_that_waits_longest_is_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    room = Connections()
    room.spare = 2
    clients = [Client() for _ in range(8)]
    assert all(room.add(client) for client in clients)
    room.set_idle(clients[0], False)
    room.set_idle(clients[1], False)
    room.set_idle(clients[1], True)  # it has had its answer: the newest that waits
    assert room.add(Client()) and [client.closed for client in clients].index(True) == 2
    for client in clients:
        room.set_idle(client, False)  # closed ones are not counted
    late = [Client() for _ in range(3)]
    assert room.add(late[0])  # in the place of the one that was added above
    room.set_idle(late[0], False)
    assert [room.add(client) for client in late[1:]] == [False, False]
    assert not room.add(Client()) and late[1].closed and not late[2].closed
    assert not any(client.closed for client in clients if client is not clients[2])
    room.remove(late[0])
    room.remove(late[0])
    assert room.add(Client())


@pytest.mark.parametrize("soft", [64, 96, 256, 1024, 4096, 20_000, 10**6, resource.RLIM_INFINITY])
def test_connections_leave_descriptors_for_files(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    room = Connections()
    assert 8 <= room.limit <= 4096 and 4 <= room.backlog <= 128
    if soft != resource.RLIM_INFINITY:
        assert room.limit + room.spare + 2 * room.backlog < soft


LIMITS = """
import resource, sys
from omlx.access.connections import MAX_DESCRIPTORS, raise_limit, unchanged_limits
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with unchanged_limits():
    import mlx_lm.utils
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(soft, min(hard, MAX_DESCRIPTORS)), hard)
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(soft, min(hard, MAX_DESCRIPTORS)), hard)
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1000), (3000, 4000)])
def test_mlx_lm_lowers_no_limit_and_the_soft_one_is_raised(soft: int, hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("the hard limit is lower already")
    subprocess.run([sys.executable, "-c", LIMITS, str(soft), str(hard)], cwd=ROOT, check=True, timeout=300)


def test_a_warning_comes_once_a_minute_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = connections.Seldom()
    for _ in range(500):
        log("full: %d", 5)
    now += 61
    log("full: %d", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "full: 5", "full: 5 (499 more times since the last such line)",
    ]  # fmt: skip
