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

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
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
    _, errors = process.communicate(timeout=20)
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


def test_a_server_that_is_asked_to_stop_loses_none_of_100_queued_blocks(start, tiny_model_dir, tmp_path):
    process = start(SERVER, tiny_model_dir, tmp_path / "cache", OMLX_HOME=str(tmp_path / "home"))
    line = next(line for line in process.stdout if line.startswith("curl "))
    body = {"model": tiny_model_dir.name, "prompt": "x" * 1000, "max_tokens": 2}
    address = line.split()[1].removesuffix("/v1/chat/completions") + "/v1/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens = json.load(answer)["usage"]["prompt_tokens"]
    written = len(list((tmp_path / "cache").rglob("*.safetensors")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    files = len(list((tmp_path / "cache").rglob("*.safetensors")))
    assert process.returncode == 0 and files >= tokens // 8 and files - written >= 100
