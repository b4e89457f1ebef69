"""Paths that cannot be searched, for every command and option that takes one: one line, never a traceback.

As a user without root's rights, who may not look into another one's folder.
"""

import contextlib
import io
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock

from omlx.cli import main
from omlx.testing import make_tiny_model
from tests.storage.children import become_nobody, open_folder, run_in_child

Case = list[str]

# What the commands import later: sources may be closed to others.
for module in ("omlx.cache_command", "omlx.doctor", "omlx.engine.pool", "omlx.model.gguf", "omlx.server"):
    import_module(module)


def closed(place: Path) -> Path:
    return place / "closed" / "x"


def long(place: Path) -> Path:
    return place / ("x" * 256)


def loop(place: Path) -> Path:
    return place / "loop" / "x"


def through_a_file(place: Path) -> Path:
    return place / "file" / "x"


def gone_process(place: Path) -> Path:
    return Path("/proc/999999999/x")


def very_long(place: Path) -> Path:
    return place / "/".join(["x" * 200] * 30)


PATHS: list[Callable[[Path], Path]] = [closed, long, loop, through_a_file, gone_process, very_long]

# Commands that end by themselves; P stands for the path, MODEL for a good model's folder.
COMMANDS: list[Case] = [
    ["models"],
    ["doctor", "--no-measure"],
    ["settings", "--paged-ssd-cache-dir", "P"],
    ["cache", "stats", "--paged-ssd-cache-dir", "P"],
    ["cache", "list", "--paged-ssd-cache-dir", "P"],
    ["cache", "verify", "--paged-ssd-cache-dir", "P"],
    ["cache", "clear", "--paged-ssd-cache-dir", "P"],
    ["cache", "clear", "--paged-ssd-cache-dir", "GOOD", "--conversation", "P"],
    ["import", "P", "--name", "it"],
    ["serve", "--port", "0", "--model", "P"],
    ["serve", "--port", "0", "--model", "MODEL", "--adapter-path", "P"],
    ["serve", "--port", "0", "--model", "MODEL", "--api-keys-file", "P"],
]
HOMES: list[Case] = [["models"], ["settings"], ["serve", "--port", "0"], ["serve", "--port", "0", "--model", "x"]]


def prepare(place: Path) -> None:
    """As root, or as whoever runs the tests."""
    (place / "closed").mkdir(mode=0o700)
    (place / "loop").symlink_to(place / "loop")
    (place / "file").write_text("a file")
    (place / "good").mkdir()
    (place / "home").mkdir()
    make_tiny_model(place / "tiny")
    for path in [place / "good", place / "home", place / "tiny", *(place / "tiny").iterdir()]:
        path.chmod(0o777)


def run(argv: Case, home: Path) -> tuple[int, str]:
    said = io.StringIO()
    quiet = contextlib.redirect_stdout(io.StringIO())
    with mock.patch.dict(os.environ, {"OMLX_HOME": str(home)}), contextlib.redirect_stderr(said), quiet:
        status = main(argv)
    return status, said.getvalue()


def try_all(place: Path) -> None:
    become_nobody()
    wrong = []
    for make in PATHS:
        path = make(place)
        words = {"P": str(path), "MODEL": str(place / "tiny"), "GOOD": str(place / "good")}
        tries = [([words.get(word, word) for word in argv], place / "home") for argv in COMMANDS if "P" in argv]
        tries += [(argv, path) for argv in HOMES]
        for argv, home in tries:
            try:
                status, said = run(argv, home)
            except BaseException as error:
                wrong.append(f"{make.__name__} {argv}: {type(error).__name__}: {error}")
                continue
            lines = [line for line in said.splitlines() if line.startswith("omlx: ")]
            if status not in (0, 1, 2) or len(lines) > 1 or (status and not lines) or "Traceback" in said:
                wrong.append(f"{make.__name__} {argv}: status {status}: {said[-300:]}")
    assert not wrong, "\n".join(wrong)


def test_every_command_with_every_bad_path_is_one_line() -> None:
    with open_folder() as place:
        prepare(place)
        run_in_child(try_all, place)
