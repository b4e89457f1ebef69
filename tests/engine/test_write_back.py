"""A server with `--cache-write-policy back` as a process of its own: SIGTERM loses nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from omlx.storage import survey
from omlx.testing import make_tiny_model
from tests.api.test_stopping import address_of

REPOSITORY = Path(__file__).parents[2]
PROMPTS = [f"Question number {n}: " + "what is it good for? " * 20 for n in range(3)]


def serve(home: Path, root: Path, *words: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMLX_")}
    environ |= {"PYTHONPATH": str(REPOSITORY), "OMLX_HOME": str(home)}
    command = [sys.executable, "-m", "omlx.cli", "serve", "--port", "0", "--paged-ssd-cache-dir", str(root), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdout=pipe, stderr=pipe, text=True)


def cached(address: str, prompt: str) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def written(address: str) -> int:
    files: int = httpx.get(f"{address}/admin/cache_probe").json()["total"]["files_written"]
    return files


def test_sigterm_writes_all_that_only_ram_has(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "models" / "tiny")
    root, kept = tmp_path / "cache", 0
    for start in range(2):
        process = serve(tmp_path, root, "--cache-write-policy", "back", "--block-size", "16")
        try:
            address = address_of(process)
            for prompt in PROMPTS:
                assert (cached(address, prompt) > 400) == (start > 0)
            assert written(address) == 0 and len(survey.blocks(root)) == kept
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert "rest is lost" not in err
        finally:
            process.kill()
            process.communicate()
        kept = len(survey.blocks(root))
        assert kept > len(PROMPTS) * 25 and survey.verify(root) == []
