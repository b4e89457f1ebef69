"""A server as a process of its own: ports, signals, exit status."""

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from omlx.server import bind, serve, warn_if_open
from omlx.settings import Settings
from tests.api.serving import CHAT

PROGRAM = """
import socket, sys
from omlx import server
from omlx.errors import ModelError
from omlx.settings import Settings
from tests.api.fakes import FakeEngine, FakePool

class Pool(FakePool):
    async def start(self):
        if sys.argv[1] == "broken":
            raise ModelError("the weights are gone")
        await super().start()

pool = Pool(FakeEngine(token_s=0.02, endless=True, context_length=10**6), stop_s=0.1)
settings = Settings.load({"port": "0"})
status = server.run(pool, settings, server.bind("127.0.0.1", 0))
print("calls:", *pool.calls, "aborted:", len(pool.engine.aborted))
sys.exit(status)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the program; gives the process. Whatever is left is killed at the end."""
    processes = []

    def run(kind: str = "good") -> subprocess.Popen:
        root = Path(__file__).parents[2]
        environ = os.environ | {"PYTHONPATH": str(root), "OMLX_HOME": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM, kind]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=root, env=environ, stdout=pipe, stderr=pipe, text=True)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen) -> str:
    """The address in the usage hint, which comes when the server is ready."""
    for line in process.stdout:
        if line.startswith("curl "):
            return line.split()[1].removesuffix("/v1/chat/completions")
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_server_at_once(start, number):
    process = start()
    assert httpx.get(f"{address_of(process)}/health").status_code == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "calls: start stop" in out
    assert "Traceback" not in err


def test_a_signal_ends_long_answers_with_an_error(start):
    process = start()
    address = address_of(process)
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=CHAT | {"stream": True}, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        process.send_signal(signal.SIGTERM)
        last = list(lines)[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "calls: start stop aborted: 1" in out


def test_short_answers_are_finished_before_the_server_stops(start):
    process = start()
    body = CHAT | {"stream": True, "max_tokens": 10}
    with httpx.stream("POST", f"{address_of(process)}/v1/chat/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert list(lines)[-1] == "data: [DONE]"
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_start_that_fails_is_one_line(start):
    process = start("broken")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "omlx: the weights are gone"
    assert "Traceback" not in err
    assert "curl" not in out


def test_a_port_in_use_is_one_line(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve(Settings(home=tmp_path, port=port)) == 1
    assert capsys.readouterr().err == f"omlx: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_clients_are_refused_until_the_server_is_ready():
    with bind("127.0.0.1", 0) as listener, socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) == errno.ECONNREFUSED


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "127.0.0.1"])
def test_names_and_addresses_can_be_listened_on(host):
    with bind(host, 0) as listener:
        assert listener.getsockname()[1] > 0


# ---- reachable from elsewhere without a key


@pytest.mark.parametrize(
    ("host", "options", "levels"),
    [
        ("127.0.0.1", {}, []),
        ("localhost", {}, []),
        ("0.0.0.0", {}, ["WARNING", "WARNING"]),
        ("0.0.0.0", {"allow_unauthenticated": True}, ["INFO"]),
        ("0.0.0.0", {"api_key": "s3cret"}, []),
        ("0.0.0.0", {"admin_key": "s3cret"}, ["WARNING", "WARNING"]),  # an admin key guards the admin routes alone
    ],
)
def test_a_server_that_others_reach_without_a_key_says_so_loudly(tmp_path, caplog, host, options, levels):
    caplog.set_level(logging.INFO, "omlx")
    with bind(host, 0) as listener:
        warn_if_open(Settings(home=tmp_path, **options), listener.getsockname()[0])
    assert [record.levelname for record in caplog.records] == levels
    assert all("0.0.0.0" in record.getMessage() for record in caplog.records)
    assert ("--allow-unauthenticated" in caplog.text) == bool(levels)
