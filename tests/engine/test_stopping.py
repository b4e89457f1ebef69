"""SIGTERM while a chat template loops and a grammar compiles for ever."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from omlx.testing.tiny_model import make_tiny_model
from tests.support import wait_until

# The command itself, but for the bound on time, which would end the work before the signal comes.
PROGRAM = """
import sys
from omlx import worker
from omlx.cli import main
from omlx.model import chat_template, grammar
chat_template._PROCESSES = worker.WorkerPool("omlx.model.template_worker", cpu_s=10_000, memory=4 << 30)
grammar._TRIALS = worker.WorkerPool("omlx.model.grammar_worker", cpu_s=10_000, memory=16 << 30)
sys.exit(main(sys.argv[1:]))
"""
ENDLESS_TEMPLATE = """
{%- if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}{{ messages[0].content }}"""
ENDLESS_SCHEMA = {"allOf": [{"type": "string", "pattern": f"a{number}b"} for number in range(22)]}


@pytest.fixture
def server(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": ENDLESS_TEMPLATE}))
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--model", str(model)]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMLX_HOME": str(tmp_path / "home")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environ, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    yield process
    process.kill()
    process.communicate()


def send(url: str, **body: object) -> threading.Thread:
    def post() -> None:
        with contextlib.suppress(httpx.TransportError):  # the server ends its connections
            httpx.post(url, json={"model": "tiny", "max_tokens": 4} | body, timeout=None)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def busy(process: psutil.Process, module: str) -> list[psutil.Process]:
    """The worker processes that have computed for more than their start takes."""
    children = [child for child in process.children() if f"omlx.model.{module}" in child.cmdline()]
    return [child for child in children if child.cpu_times().user > {"template_worker": 4, "grammar_worker": 1}[module]]


def test_endless_work_does_not_outlive_the_server(server):
    url = next(line.split()[1] for line in server.stdout if line.startswith("curl "))
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ENDLESS_SCHEMA, "strict": True}}
    threads = [
        send(url, messages=[{"role": "user", "content": "loop"}]),
        send(url, messages=[{"role": "user", "content": "hi"}], response_format=form),
    ]
    parent = psutil.Process(server.pid)
    wait_until(lambda: busy(parent, "template_worker") and busy(parent, "grammar_worker"), 120)
    children = parent.children()
    # Others are answered meanwhile.
    other = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(url, json=other, timeout=60).status_code == 200
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0
    for thread in threads:
        thread.join()
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_second_interrupt_ends_the_server_and_its_workers_at_once(server):
    """The first one gives the request, whose template never ends, some seconds."""
    url = next(line.split()[1] for line in server.stdout if line.startswith("curl "))
    thread = send(url, messages=[{"role": "user", "content": "loop"}])
    parent = psutil.Process(server.pid)
    wait_until(lambda: busy(parent, "template_worker"), 120)
    children = parent.children()
    server.send_signal(signal.SIGINT)
    wait_until(lambda: server.send_signal(signal.SIGINT) or server.poll() is not None, 60)
    assert server.returncode == 130
    thread.join()
    assert not psutil.wait_procs(children, timeout=60)[1]
