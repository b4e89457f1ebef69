"""Functions of test modules in processes of their own: as a user who is not root, or on a small disk."""

import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omlx.metrics import RestoreTime

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


def run_in_child(function: Callable[..., Any], *paths: Path, wrapped_in: tuple[str, ...] = (), timeout_s: float = 240):
    """Calls a module's function with paths in a new Python, started through a command if one is given."""
    script = (
        f"import sys; from pathlib import Path; from {function.__module__} import {function.__name__} as function; "
    )
    script += "function(*map(Path, sys.argv[1:])); print('fine')"
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [*wrapped_in, sys.executable, "-c", script, *map(str, paths)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr


def become_nobody() -> None:
    """Gives root's rights up, in a child. What is needed has to be imported before: sources may be closed to others."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@contextmanager
def open_folder():
    """A folder in which everybody may write; pytest's own lie under one that is closed to others."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o777)
        yield folder
    finally:
        shutil.rmtree(folder)


def run_on_small_disk(function: Callable[..., Any], mount_point: Path, megabytes: int) -> None:
    """Calls a function with the root of a real file system in memory, which goes when the child ends.

    Skips the test where neither root nor a user name space may mount one (containers without rights).
    """
    mount_point.mkdir(exist_ok=True)
    unshare = ("unshare", "-m") if os.getuid() == 0 else ("unshare", "-Urm")
    mount = f'mount -t tmpfs -o size={megabytes}m none "{mount_point}"'
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here, so no small disk to fill")
    tried = subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")
    run_in_child(function, mount_point, wrapped_in=(*unshare, "sh", "-c", f'{mount} && exec "$0" "$@"'))


def trust_the_cache() -> None:
    """Has all that is stored loaded, as tests/conftest.py does for the tests of the parent process."""
    RestoreTime.LONG_S, RestoreTime.FORGET_S = math.inf, -1.0


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far, and worse. Other records are there or not, as other tests left the loggers."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class Said(logging.Handler):
    """The warnings that omlx logs, for a child, which has no caplog."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("omlx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
