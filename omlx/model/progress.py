"""Progress of long work (downloads, conversions), from whoever does it to whoever shows it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, the bytes done so far, and the bytes in all (None if unknown)."""

_POLL_S = 0.2


def silent(stage: str, done: int, total: int | None) -> None:
    """A Progress that shows nothing."""


@contextmanager
def console_progress(console: Console | None = None) -> Iterator[Progress]:
    """A Progress shown as one bar per stage; on stderr unless a console is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console or Console(stderr=True)) as rich:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                bars[stage] = rich.add_task(stage, total=total)
            rich.update(bars[stage], completed=done, total=total)

        yield show


@contextmanager
def watching(folder: Path, stage: str, total: int | None, progress: Progress) -> Iterator[None]:
    """Report the growth of `folder`, in bytes, while the block runs; the end only if it succeeds.

    For downloads by other programs, whose own reports differ from version to version.
    """
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(_POLL_S):
            done = folder_bytes(folder)
            progress(stage, done if total is None else min(done, total), total)

    progress(stage, 0, total)
    watcher = threading.Thread(target=report, name="omlx-progress")
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    size = folder_bytes(folder) if total is None else total
    progress(stage, size, size)


def folder_bytes(folder: Path) -> int:
    """Bytes in all files below `folder`; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
