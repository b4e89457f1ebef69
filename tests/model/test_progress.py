"""Progress of downloads and conversions."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from omlx.model import progress
from omlx.model.progress import console_progress, folder_bytes, watching


class Reports(list[tuple[str, int, int | None]]):
    def __call__(self, stage: str, done: int, total: int | None) -> None:
        self.append((stage, done, total))


def test_the_size_of_a_folder_counts_everything_below(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"12345")
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert folder_bytes(tmp_path) == 7
    assert folder_bytes(tmp_path / "none") == 0


def test_growth_is_reported_and_ends_at_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_POLL_S", 0.001)
    reports = Reports()
    with watching(tmp_path, "fetching", 100, reports):
        (tmp_path / "file").write_bytes(bytes(60))
        while ("fetching", 60, 100) not in reports:
            pass
        (tmp_path / "file").write_bytes(bytes(200))
    assert reports[0] == ("fetching", 0, 100)
    assert reports[-1] == ("fetching", 100, 100)
    assert all(done <= 100 for _, done, _ in reports)


def test_a_failure_is_not_reported_as_the_end(tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(RuntimeError), watching(tmp_path, "fetching", 100, reports):
        raise RuntimeError
    assert reports == [("fetching", 0, 100)]


def test_an_unknown_total_becomes_the_size_that_was_reached(tmp_path: Path) -> None:
    reports = Reports()
    with watching(tmp_path, "fetching", None, reports):
        (tmp_path / "file").write_bytes(bytes(7))
    assert reports[-1] == ("fetching", 7, 7)


def test_each_stage_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), width=100)
    with console_progress(console) as show:
        show("downloading", 50, 100)
        show("downloading", 100, 100)
        show("converting", 1, None)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("downloading") == 1
    assert "converting" in shown
