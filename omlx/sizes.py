"""Sizes ("200GB", "20%") and durations ("7d") as people write them; the only copy of these rules."""

import contextlib
import json
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import psutil

GB = 1024**3

_UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": GB, "T": 1024**4}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?P<unit>%|[KMGT](?:I?B)?|B)?", re.IGNORECASE)
_LONGEST = 40  # characters; a longer text is no size, and its digits need not be counted
_LIKELY_BYTES = 1024**2  # a smaller number is most likely meant as GB or MB
_LARGEST = 2**63 - 1  # what files and SQLite can count
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?P<unit>[smhdw])?", re.IGNORECASE)
_LONGEST_S = 100 * 365 * _SECONDS["d"]  # in nanoseconds it still is a number that SQLite can hold
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def parse_size(text: str | int, *, percent_of: int | None = None) -> int:
    """Bytes of a size such as "200GB", "1.5 GiB", "512mb", "4096B", "20%" or 4096.

    GB and GiB are both 1024**3. A percentage (0 to 100) needs `percent_of`, the bytes it is
    of. Exact arithmetic; a fraction of a byte is dropped. An int is bytes; a text needs a unit, unless it is 0. Raises
    ValueError, one line that begins with the text in quotes.
    """
    shown = quoted(text)
    plain = str(text).strip()
    match = _SIZE.fullmatch(plain) if len(plain) <= _LONGEST else None
    if match is None or isinstance(text, bool):
        raise ValueError(f"{shown} is not a size (examples: 200GB, 20%, 0)")
    number, unit = Fraction(match["number"]), (match["unit"] or "").upper()
    if unit == "%":
        return int(_percent(number, percent_of, shown))
    if isinstance(text, str) and not unit and number:
        likely = f"{plain}GB or {plain}MB" if number < _LIKELY_BYTES else f"{plain}B if that many bytes are meant"
        raise ValueError(f"{shown} has no unit; write {likely}")
    if not unit and number.denominator != 1:
        raise ValueError(f"{shown} is not a whole number of bytes (examples: 1.5GB, 512MB)")
    size = int(number * _UNITS[unit[:1] or "B"])
    if size > _LARGEST:
        raise ValueError(f"{shown} is too large")
    return size


def _percent(number: Fraction, whole: int | None, shown: str) -> Fraction:
    if whole is None:
        raise ValueError(f"{shown} is a percentage of nothing; give a size here (example: 200GB)")
    if number > 100:
        raise ValueError(f"{shown} is more than 100%")
    return number * whole / 100


def format_size(size: int) -> str:
    """`size` in bytes for people: "100 GB", "1.5 GB", "512 B"; `parse_size` reads it back.

    One decimal at most, so reading back is exact only where that says it all.
    """
    if abs(size) < 1024:
        return f"{size} B"
    for unit, factor in (("KB", 1024), ("MB", 1024**2), ("GB", GB), ("TB", 1024**4)):
        # Rounded before it is compared: 1023.96 MB is shown as 1 GB, not as 1024 MB.
        rounded = round(size / factor, 1)
        if abs(rounded) < 1024 or unit == "TB":
            break
    return f"{rounded:.1f}".removesuffix(".0") + f" {unit}"


def parse_duration(text: str | int, *, off: bool = False) -> int:
    """Seconds of a duration such as "7d", "12h", "30m", "90s", "2w", "1.5h" or "0".

    `off`: the word "off" is taken as well, and is 0. Raises ValueError, one line that begins with the text in
    quotes; a number without a unit is refused, unless it is 0.
    """
    shown = quoted(text)
    plain = str(text).strip()
    if off and plain.lower() == "off":
        return 0
    match = _DURATION.fullmatch(plain) if len(plain) <= _LONGEST else None
    if match is None or isinstance(text, bool):
        raise ValueError(f"{shown} is not a duration (examples: 7d, 12h, 30m{', off' if off else ''})")
    number = Fraction(match["number"])
    if match["unit"] is None and number:
        raise ValueError(f"{shown} has no unit (examples: 7d, 12h, 30m)")
    seconds = number * _SECONDS[(match["unit"] or "s").lower()]
    if seconds.denominator != 1:
        raise ValueError(f"{shown} is not a whole number of seconds")
    if seconds > _LONGEST_S:
        raise ValueError(f"{shown} is too long")
    return int(seconds)


def format_duration(seconds: int) -> str:
    """`seconds` for people, in the largest unit that says it exactly: "7d", "90m"; `parse_duration` reads it back."""
    unit = next((unit for unit in "dhm" if seconds and not seconds % _SECONDS[unit]), "s")
    return f"{seconds // _SECONDS[unit]}{unit}"


def quoted(text: object) -> str:
    """`text` in double quotes on one line, as it appears in error messages; long ones cut."""
    plain = str(text)
    return json.dumps(plain if len(plain) <= 80 else plain[:77] + "...", ensure_ascii=False)


def total_memory() -> int:
    """Bytes of RAM that this process may count on: the machine's, or its container's limit."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return total


def total_disk(folder: Path) -> int:
    """Bytes of the whole disk that holds `folder`, which need not exist yet. Raises OSError if it cannot be reached."""
    with contextlib.suppress(FileNotFoundError):
        folder.stat()
    return shutil.disk_usage(existing_parent(folder)).total


def existing_parent(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    absolute = folder.absolute()
    return next((path for path in (absolute, *absolute.parents) if os.path.isdir(path)), Path(absolute.anchor))
