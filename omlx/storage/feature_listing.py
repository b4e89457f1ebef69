"""The features files of a folder, as the folder itself shows them: there is no index."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import psutil

from omlx.storage.feature_file import SUFFIX, FeatureKey, FeatureLabel, feature_name, read_label
from omlx.storage.tensor_file import TEMP_PREFIX, TEMP_SUFFIX

_TEMP_NAME = re.compile(rf"{re.escape(TEMP_PREFIX)}(\d+){re.escape(TEMP_SUFFIX)}")
_NAME = re.compile(rf"[A-Za-z0-9%.-]+_[A-Za-z0-9%._~-]+{re.escape(SUFFIX)}")


class FeatureFile(NamedTuple):
    """The features of one image, in a file that is whole as far as its name, its trailer and its length say."""

    path: Path
    label: FeatureLabel
    nbytes: int
    used_ns: int


def feature_files(folder: Path) -> Iterator[FeatureFile]:
    """Every features file, of any version. Raises OSError if the folder cannot be read."""
    for name in _names(folder):
        if name.endswith(SUFFIX):
            with contextlib.suppress(OSError):
                found = feature_file(folder / name)
                if found is not None:
                    yield found


def feature_file(path: Path) -> FeatureFile | None:
    """None if it is none. Raises OSError."""
    label = read_label(path)
    if label is None or feature_name(label.key) != path.name:
        return None
    stat = path.stat()
    return FeatureFile(path, label, stat.st_size, stat.st_mtime_ns)


class Stranger(NamedTuple):
    """A file with a name as ours which is none: `holds` is whose features it has, None if it has no trailer.

    `model_name` is what its name says.
    """

    path: Path
    model_name: str
    holds: FeatureKey | None


def strangers(folder: Path) -> Iterator[Stranger]:
    """Files that were cut off, that have another's name, or that somebody else put there. Raises OSError."""
    for name in _names(folder):
        path = folder / name
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                label = read_label(path) if os.path.isfile(path) else None
                if os.path.isfile(path) and (label is None or feature_name(label.key) != name):
                    model_name = unquote(name.partition("_")[2].removesuffix(SUFFIX))
                    yield Stranger(path, model_name, label.key if label else None)


def abandoned_files(folder: Path) -> Iterator[Path]:
    """Temporary files that no process writes any more. Raises OSError."""
    for name in _names(folder):
        if temporary := _TEMP_NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                if not _is_written(folder / name, int(temporary[1])):
                    yield folder / name


def temporary_file(folder: Path) -> Path:
    """What this process writes features into, before they get their name."""
    return folder / f"{TEMP_PREFIX}{os.getpid()}{TEMP_SUFFIX}"


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _is_written(path: Path, pid: int) -> bool:
    """Whether the process that a temporary file is named after still writes it. Another one may have its number by now.

    Our own temporary file is one of a process before us.
    """
    if pid == os.getpid():
        return False
    try:
        return psutil.Process(pid).create_time() <= path.stat().st_mtime + 1
    except psutil.AccessDenied:
        return True
    except (psutil.Error, OverflowError):
        return False
