"""`omlx run` with a cache folder: a repeated prompt is found in RAM, and on disk after a restart.

python serve.py [MODEL]      a model's folder or name; without it a tiny random one, made on the spot
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from omlx.testing import make_tiny_model

PROMPT = "The sea was calm, and the old lighthouse keeper counted the ships. " * 8


@contextlib.contextmanager
def running(model: str, folder: Path) -> Iterator[str]:
    """The address of a server that runs in here."""
    command = [
        sys.executable, "-m", "omlx.cli", "run", "--model", model, "--port", "0",
        "--paged-ssd-cache-dir", str(folder), "--paged-ssd-cache-max-size", "200MB",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # It prints how to reach it once it is ready.
            curl = next((line for line in process.stdout if line.startswith("curl ")), "")
            assert curl, "the server did not start"
            yield curl.split()[1].partition("/v1")[0]
        finally:
            process.terminate()
            process.stdout.read()


def ask(url: str) -> dict[str, Any]:
    """One answer of the model that is served there."""
    with httpx.Client(base_url=url, timeout=120, headers=_key("OMLX_API_KEY")) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
        return answer


def figures(url: str) -> dict[str, Any]:
    """What operators see: memory, blocks and tokens, of all models together."""
    answer = httpx.get(f"{url}/admin/cache_probe", headers=_key("OMLX_ADMIN_KEY"), timeout=60).raise_for_status()
    total: dict[str, Any] = answer.json()["total"]
    return total


def _key(variable: str) -> dict[str, str]:
    key = os.environ.get(variable)
    return {"authorization": f"Bearer {key}"} if key else {}


def cached(answer: dict[str, Any]) -> int:
    """How many tokens of the prompt were not computed."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        model = sys.argv[1] if sys.argv[1:] else str(make_tiny_model(Path(temporary, "tiny")))
        folder = Path(temporary, "cache")
        with running(model, folder) as url:
            cold, warm, held = ask(url), ask(url), figures(url)
        with running(model, folder) as url:
            restarted = ask(url)
        tokens = cold["usage"]["prompt_tokens"]
        for name, answer in (("cold", cold), ("again", warm), ("after a restart", restarted)):
            print(f"{name}: {cached(answer)} of {tokens} tokens from the cache")
            assert answer["choices"][0]["text"] == cold["choices"][0]["text"]
        assert (cached(cold), cached(warm), cached(restarted)) == (0, tokens - 1, tokens - 1)
        # The answer's tokens are kept as well.
        assert held["cold_tokens"] > tokens and held["blocks_cold"] and held["kv_cache_memory"]
        print(f"{held['kv_cache_memory']} bytes hot, {held['blocks_cold']} blocks cold ({held['cold_tokens']} tokens)")
        files = list(folder.glob("*/?/*.safetensors"))
        print(f"{len(files)} blocks in {files[0].parent.parent.name}")


if __name__ == "__main__":
    main()
