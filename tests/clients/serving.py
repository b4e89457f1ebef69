"""`omlx serve` as a process of its own, as a user starts it, over tiny models of every kind."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omlx.testing import make_tiny_model, make_tiny_vlm
from tests.embeddings.tiny import make_tiny_encoder

REPOSITORY = Path(__file__).parents[2]
KEY = "a-key-for-clients"
TEXT, PICTURES, VECTORS = "text", "pictures", "vectors"


def make_home(home: Path) -> Path:
    """A home folder with a model that writes, one that takes pictures and one for embeddings."""
    make_tiny_model(home / "models" / TEXT)
    make_tiny_vlm(home / "models" / PICTURES, "llava")
    make_tiny_encoder(home / "models" / VECTORS)
    return home


class ServerProcess:
    """A context manager: ready inside, stopped after. What it says goes to server.log in its home."""

    def __init__(self, home: Path, flags: Sequence[str] = ()) -> None:
        self._home = home
        self._command = [sys.executable, "-m", "omlx.cli", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        ours = {key: value for key, value in os.environ.items() if not key.startswith("OMLX_")}
        environ = ours | {"OMLX_HOME": str(self._home), "OMLX_API_KEY": KEY, "PYTHONPATH": str(REPOSITORY)}
        with (self._home / "server.log").open("ab") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, env=environ, stdout=pipe, stderr=log, text=True)
        self.url = self._address()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()

    def _address(self) -> str:
        """Out of the usage hint, which comes when the server is ready."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("curl "):
                return line.split()[1].removesuffix("/chat/completions").removesuffix("/v1")
        self._process.kill()
        self._process.wait()
        raise AssertionError((self._home / "server.log").read_text())
