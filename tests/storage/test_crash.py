"""Processes that are killed, and processes that are asked to stop."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest
from fastapi import FastAPI

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.server import Server, http_config
from tests.soak import crash
from tests.storage.targets import read

REPOSITORY = Path(__file__).parents[2]


def test_a_process_killed_at_any_moment_leaves_right_blocks_and_nothing_else(tmp_path):
    total = crash.run(tmp_path / "root", rounds=12, seed=7)
    assert total["rounds"] == 12 and total["seen"] > 100 and total["hits"] == total["files"] > 100


@pytest.fixture
def start():
    """Starts a script; gives the process. Whatever is left is killed at the end."""
    processes = []

    def run(script, *args, **environ):
        command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
        environ = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environ
        processes.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


STOPS = """
    import signal, sys, time
    from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
    from omlx.testing import Fault, FaultyStore
    from tests.storage.targets import save
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = FaultyStore(PagedSSDCacheManager(sys.argv[1], 1 << 30, free_reserve_bytes=0))
    store.faults = (Fault(kind="delay", use="write", seconds=0.02),)
    for n in range(100):
        save(store, n)
    print(sum(store.tier_of(meta.block_hash) == "writing" for meta in store.metas()), flush=True)
    time.sleep(60)
    """


def test_a_process_that_ends_on_sigterm_loses_none_of_100_queued_blocks(start, tmp_path):
    process = start(STOPS, tmp_path / "root")
    assert int(process.stdout.readline()) > 90
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and not errors
    store = PagedSSDCacheManager(tmp_path / "root", 1 << 30, free_reserve_bytes=0)
    assert [n for n in range(100) if read(store, n) != "ssd"] == [] and store.check() == []
    store.close()


SERVER = """
    import sys, time
    from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
    from omlx.cli import main
    write = PagedSSDCacheManager._write_safetensors_no_mx
    def slow(*block):
        time.sleep(0.02)
        write(*block)
    PagedSSDCacheManager._write_safetensors_no_mx = staticmethod(slow)
    sys.argv = ["omlx", "serve", "--model", sys.argv[1], "--port", "0", "--block-size", "8",
                "--paged-ssd-cache-dir", sys.argv[2], "--hot-cache-max-size", "0"]
    main()
    """


def address_of(server):
    """Of a server that is ready; its usage hint says so."""
    line = next(line for line in server.stdout if line.startswith("curl "))
    return line.split()[1].removesuffix("/v1/chat/completions")


def complete(address, **body):
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_server_that_is_asked_to_stop_loses_none_of_100_queued_blocks(start, tiny_model_dir, tmp_path):
    process = start(SERVER, tiny_model_dir, tmp_path / "cache", OMLX_HOME=str(tmp_path / "home"))
    answer = complete(address_of(process), model=tiny_model_dir.name, prompt="x" * 1000, max_tokens=2)
    tokens = answer["usage"]["prompt_tokens"]
    written = len(list((tmp_path / "cache").rglob("*.safetensors")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    files = len(list((tmp_path / "cache").rglob("*.safetensors")))
    assert process.returncode == 0 and files >= tokens // 8 and files - written >= 100


def test_of_two_servers_on_a_folder_the_second_names_the_first_and_serves_without_files(
    start, tiny_model_dir, tmp_path
):
    first, second = (
        start(SERVER, tiny_model_dir, tmp_path / "cache", OMLX_HOME=str(tmp_path / home)) for home in ("a", "b")
    )
    asked = {"model": tiny_model_dir.name, "prompt": "x" * 100, "max_tokens": 4, "temperature": 0}
    answers = [complete(address_of(server), **asked)["choices"][0]["text"] for server in (first, second)]
    assert answers[0] == answers[1] and answers[0]
    errors = {}
    for server in (first, second):
        server.send_signal(signal.SIGTERM)
        _, errors[server.pid] = server.communicate(timeout=60)
    about = {pid: [line for line in text.splitlines() if "in use by process" in line] for pid, text in errors.items()}
    # Which of the two came first is not ours to say.
    (holder,) = [pid for pid, lines in about.items() if not lines]
    (other,) = [pid for pid, lines in about.items() if lines]
    (line,) = about[other]
    assert f"process {holder};" in line and "serving goes on without it" in line


def test_a_closed_terminal_stops_a_server_that_writes_back_without_loss(start, tiny_model_dir, tmp_path):
    folder = tmp_path / "cache"
    process = start(
        SERVER, tiny_model_dir, folder, OMLX_HOME=str(tmp_path / "home"), OMLX_CACHE_WRITE_POLICY="back"
    )
    answer = complete(address_of(process), model=tiny_model_dir.name, prompt="x" * 1000, max_tokens=2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(list(folder.rglob("*.safetensors"))) >= answer["usage"]["prompt_tokens"] // 8


def test_a_second_interrupt_ends_the_server_and_says_what_is_lost(capfd, monkeypatch):
    app = FastAPI()
    server = Server(http_config(app), app, lambda: None)
    pid = os.fork()
    if not pid:
        server.handle_exit(signal.SIGINT, None)
        server.handle_exit(signal.SIGINT, None)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130 and "are lost" in capfd.readouterr().err
