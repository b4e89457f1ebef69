"""The code of the three documents, run as it stands.

Put in front of it or in its place is only what it lacks: `mx` in document 000, the tensors for `kv_data = [...]` in
003. Document 000's lost line ends are put back. Nothing closes a cache: each program just ends.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from omlx.testing import make_tiny_model
from tests.documents.conftest import Document, read_document

pytestmark = pytest.mark.usefixtures("documents_folders")

MX = "import mlx.core as mx"
KV = "[(mx.ones((1, 64, 32)), mx.ones((1, 64, 32)))] * 32"
SSD = Path("/tmp/omlx_ssd_cache")


@pytest.fixture(scope="module")
def features() -> Document:
    """Document 000."""
    return read_document("000")


@pytest.fixture(scope="module")
def tiered() -> Document:
    """Document 001."""
    return read_document("001")


@pytest.fixture(scope="module")
def paged() -> Document:
    """Document 003."""
    return read_document("003")


def run(*parts: str) -> list[str]:
    """The lines that one program of these parts prints; it has to end well, and soon."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMLX_")}
    command = [sys.executable, "-W", "error", "-c", "\n".join(parts)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


# ---- 000: vision features


def test_vision_features_are_found_again(features: Document) -> None:
    said = run(MX, *features.python, "assert mx.array_equal(retrieved, features)")
    assert said == ["Cache hits: 1", "Cache misses: 0"]


def test_vision_features_are_on_disk_when_the_program_has_ended(features: Document) -> None:
    run(MX, *features.python)
    assert [path.name for path in Path("/tmp/omlx_vision_cache").rglob("*.npy")] == ["a1b2c3d4e5f6_clip_vit_large.npy"]
    # The document's own lines again, without those that compute and store.
    lines = [line for line in features.python[0].splitlines() if not line.startswith(("features =", "cache.put"))]
    said = run(MX, *lines, "assert retrieved.shape == (1, 768)")
    assert said == ["Cache hits: 1", "Cache misses: 0"]


# ---- 001: hot and cold


def test_the_tiered_cache_says_what_the_document_prints(tiered: Document) -> None:
    assert run(*tiered.python) == [
        "Moved 0 bytes to cold SSD storage",
        "Cache miss: Recomputing KV tensors",
        "Hot tier usage: 0 bytes",
        "Cold blocks stored: 0 (0 tokens)",
    ]


def test_the_tiered_cache_moves_and_restores_blocks_that_are_there(tiered: Document) -> None:
    create, evict, restore, stats = tiered.python
    save = (
        "block_hash = b'\\x12\\x34\\x56...'\n"
        "block = [(mx.ones((1, 4, 1024, 1024)),) * 2] * 2\n"  # 64 MB
        "for name in (block_hash, *(bytes([n]) * 32 for n in range(3))):\n"
        "    tiered_cache.prefix_cache.save_block(name, block, token_count=64)\n"
    )
    said = run(MX, create, save, evict, restore, stats)
    moved = 4 * 64 * 1024**2  # 200 MB are three blocks and a bit
    assert said == [
        f"Moved {moved} bytes to cold SSD storage",
        "Successfully restored KV block from SSD",
        f"Hot tier usage: {64 * 1024**2} bytes",
        "Cold blocks stored: 4 (256 tokens)",
    ]


# ---- 003: the paged SSD cache


def own_kv(code: str) -> str:
    """The document's `[...]` as tensors."""
    assert code.count("kv_data = [...]") == 1
    return code.replace("kv_data = [...]", f"kv_data = {KV}")


def test_the_whole_document_runs_in_one_program(paged: Document) -> None:
    stack, *rest = paged.python
    said = run(MX, own_kv(stack), "assert ssd_cache.load_block(block_hash) is not None", *rest)
    path = SSD / "tiny" / "0" / ("00" * 32 + ".safetensors")
    assert said == ["Restored block with 2 layers", f"Hash: 00000000... Size: {path.stat().st_size} bytes"]
    assert len(mx.load(str(path))) == 4
    assert len(mx.load(str(SSD / "llama-3b" / "1" / ("1234" * 16 + ".safetensors")))) == 64


def test_the_stack_of_the_python_api_keeps_a_block_in_its_models_folder(paged: Document) -> None:
    run(MX, own_kv(paged.python[0]))
    assert [path.name for path in SSD.iterdir() if path.is_dir()] == ["llama-3b"]
    assert len(list(SSD.rglob("*.safetensors"))) == 1


def test_hot_cache_only_writes_nothing(paged: Document) -> None:
    threads = "import threading; assert threading.active_count() == 1"
    run(MX, paged.python[1], f"ssd_cache.save_block(b'x' * 32, {KV}, 64)", threads)
    assert not SSD.exists()


def test_the_complete_example_works_again_after_a_restart(paged: Document) -> None:
    example = paged.python[2]
    assert run(example) == ["Restored block with 2 layers"]
    first = next(SSD.rglob("*.safetensors")).read_bytes()
    load_only, _, _ = example.partition("# 3. Simulate")
    load = "loaded = prefix_cache.load_block(bytes(32)); print(len(loaded), ssd_cache.stats().hits_ssd)"
    assert run(load_only, load) == ["2 1"]
    assert run(example) == ["Restored block with 2 layers"]
    assert next(SSD.rglob("*.safetensors")).read_bytes() == first


# ---- 003: the command line


def omlx_on_the_path(folder: Path) -> Path:
    """A folder with the command `omlx` of this Python, installed or not."""
    folder.mkdir()
    command = folder / "omlx"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m omlx.cli "$@"\n')
    command.chmod(0o700)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("the server is not ready after a minute")


def ask(url: str) -> int:
    """One completion; how many of its prompt's tokens came from the cache."""
    body = {"model": "tiny", "prompt": "The sea was calm. " * 20, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_the_shell_command_serves_and_keeps_blocks_in_a_folder_of_the_model(paged: Document, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "models" / "tiny")
    programs, port = omlx_on_the_path(tmp_path / "bin"), free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMLX_")}
    env |= {"OMLX_HOME": str(tmp_path), "OMLX_PORT": str(port), "PATH": f"{programs}{os.pathsep}{env['PATH']}"}
    cached = []
    for _ in range(2):
        with subprocess.Popen(
            ["bash", "-c", paged.shell[0]], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as server:  # fmt: skip
            try:
                wait_for(f"http://127.0.0.1:{port}", server)
                cached.append(ask(f"http://127.0.0.1:{port}"))
            finally:
                os.killpg(server.pid, signal.SIGTERM)  # bash and the server: a session of their own
            out, _ = server.communicate(timeout=60)
        assert server.returncode in (0, -signal.SIGTERM)
        assert b"paged_ssd_cache_max_size: 200 GB [flag]" in out
    assert cached == [0, 359]
    assert [path.name for path in SSD.iterdir() if path.is_dir()] == ["tiny"]
