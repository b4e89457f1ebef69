"""Sizes as people write them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx import sizes
from omlx.sizes import (
    GB,
    existing_parent,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    total_disk,
    total_memory,
)
from tests.storage.children import become_nobody, open_folder, run_in_child


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GB", 200 * GB),
        ("200gb", 200 * GB),
        ("200 GiB", 200 * GB),
        ("1.5 GiB", 3 * GB // 2),
        ("512MB", 512 * 1024**2),
        ("512m", 512 * 1024**2),
        ("7K", 7 * 1024),
        ("2TB", 2 * 1024**4),
        ("10B", 10),
        ("0", 0),
        ("0GB", 0),
        ("4194304B", 4194304),
        (4096, 4096),
        (" 1GB ", GB),
        ("0.1GB", GB // 10),
    ],
)
def test_sizes_are_read_with_1024_to_the_step(text: str | int, size: int) -> None:
    assert parse_size(text) == size


NO_SIZES = [
    *("-1", "1e3", "", " ", "5 apples", "auto", "GB", "1,5GB", "1.GB", ".5GB"),
    *("1 2", "٣GB", "inf", "nan", "0x10", "1" * 41),
]


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as refused:
        parse_size(text, percent_of=GB)
    assert str(refused.value).startswith('"' + text[:30])


@pytest.mark.parametrize("value", [-1, True, None, 1.5])
def test_values_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "likely"),
    [("4", "4GB or 4MB"), ("0.5", "0.5GB or 0.5MB"), ("4194304", "4194304B if that many bytes are meant")],
)
def test_a_text_needs_a_unit(text: str, likely: str) -> None:
    with pytest.raises(ValueError, match=f'^"{text}" has no unit; write {likely}$'):
        parse_size(text)


def test_a_size_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        parse_size("9999999999TB")


@pytest.mark.parametrize(("text", "size"), [("20%", 200), ("0%", 0), ("100%", 1000), ("12.5 %", 125), ("0.05%", 0)])
def test_a_percentage_is_of_what_the_caller_says(text: str, size: int) -> None:
    assert parse_size(text, percent_of=1000) == size


def test_a_percentage_above_100_is_refused() -> None:
    with pytest.raises(ValueError, match='"200%" is more than 100%'):
        parse_size("200%", percent_of=1000)


def test_a_percentage_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match='"20%" is a percentage of nothing'):
        parse_size("20%")


def test_a_refused_text_stays_on_one_line_and_is_cut() -> None:
    with pytest.raises(ValueError, match="is not a size") as refused:
        parse_size("5\napples" * 1000)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 150


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KB"),
        (100 * GB, "100 GB"),
        (3 * GB // 2, "1.5 GB"),
        (GB - 1, "1 GB"),
        (5000 * 1024**4, "5000 TB"),
    ],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(min_value=0, max_value=2**62))
def test_a_shown_size_reads_back_to_within_its_last_digit(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.051


@given(st.integers(min_value=2**20, max_value=2**63 - 1))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_size(f"{size}B") == size


def test_memory_is_the_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, unlimited = tmp_path / "limit", tmp_path / "unlimited"
    limit.write_text("12345678\n")
    unlimited.write_text("max\n")
    monkeypatch.setattr(sizes, "_CGROUP_LIMITS", (tmp_path / "absent", unlimited))
    assert total_memory() > 12345678
    monkeypatch.setattr(sizes, "_CGROUP_LIMITS", (unlimited, limit))
    assert total_memory() == 12345678


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert total_disk(tmp_path / "a" / "b") == total_disk(tmp_path) > 0


# ---- durations

DAY = 86_400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7d", 7 * DAY),
        ("12h", 12 * 3600),
        ("30m", 1800),
        ("90s", 90),
        ("2w", 14 * DAY),
        ("1.5h", 5400),
        ("7 D", 7 * DAY),
        (" 1d ", DAY),
        ("0", 0),
        (0, 0),
        ("0d", 0),
        ("0.1h", 360),
        ("36500d", 36500 * DAY),
    ],
)
def test_durations_are_read(text: str | int, seconds: int) -> None:
    assert parse_duration(text) == parse_duration(text, off=True) == seconds


@pytest.mark.parametrize(
    "text", ["", " ", "-1d", "d", "7days", "1e3s", "inf", "1d12h", "1,5h", ".5h", "1.h", "٣d", "never"]
)
def test_what_is_no_duration_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration \(examples: 7d, 12h, 30m\)") as refused:
        parse_duration(text)
    assert str(refused.value).startswith(f'"{text}"')


@pytest.mark.parametrize("value", [True, None, -5, [7]])
def test_durations_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3600", "has no unit"),
        (3600, "has no unit"),
        ("1.5", "has no unit"),
        ("0.5s", "is not a whole number of seconds"),
        ("36501d", "is too long"),
        ("9" * 39 + "d", "is too long"),
    ],
)
def test_a_duration_that_could_be_misunderstood_is_refused(text: str | int, why: str) -> None:
    with pytest.raises(ValueError, match=f'^"{str(text)[:20]}.*{why}'):
        parse_duration(text)


def test_off_is_no_duration_but_where_that_is_said() -> None:
    assert parse_duration("off", off=True) == parse_duration("OFF ", off=True) == 0
    with pytest.raises(ValueError, match=r'^"off" is not a duration'):
        parse_duration("off")
    with pytest.raises(ValueError, match=r"\(examples: 7d, 12h, 30m, off\)"):
        parse_duration("on", off=True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (7 * DAY, "7d"), (12 * 3600, "12h"), (5400, "90m"), (61, "61s"), (36 * 3600, "36h")],
)
def test_a_duration_is_shown_in_the_largest_unit_that_says_it(seconds: int, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 10**9))
def test_a_shown_duration_reads_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("name", ["n" * 256, "loop/inner", "file/inner", "proc-like\0"])
def test_the_parent_of_a_folder_that_cannot_be_reached_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    assert existing_parent(tmp_path / name) == tmp_path


def look_past_a_closed_folder(folder: Path) -> None:
    become_nobody()
    assert existing_parent(folder / "closed" / "cache") == folder / "closed"


def test_the_parent_of_a_folder_nobody_may_search_is_found() -> None:
    with open_folder() as folder:
        (folder / "closed").mkdir(mode=0o700)
        (folder / "closed" / "cache").mkdir()
        run_in_child(look_past_a_closed_folder, folder)
