"""The one reader of JSON that came with a model: anybody can publish a model folder, so nothing in it is trusted."""

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omlx.errors import ModelError

MOST_BYTES = 8 << 20
"""Of a JSON file that describes a model. Real ones have some kilobytes, a few with every token's text megabytes."""

MOST_VALUES = 1 << 20
"""Of such a file: a parsed value needs up to 70 times the bytes that it has in the file."""

MOST_DEPTH = 64


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError, one line that names the file, for anything else."""
    content = parse_json(read_bytes(file), str(file))
    if not isinstance(content, dict):
        raise ModelError(f"{file}: not a JSON object")
    return content


def read_json(file: Path) -> Any:
    """The JSON value in a file. Raises ModelError, one line that names the file."""
    return parse_json(read_bytes(file), str(file))


def read_bytes(file: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises ModelError.

    Not opened unless it is a regular file: opening a pipe would wait forever.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ModelError(f"{file}: not a regular file")
        with open(file, "rb") as opened:
            content = opened.read(most + 1)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:
        raise ModelError(f"{file}: larger than {most >> 20} MiB, the most that is read of such a file")
    return content


def parse_json(data: bytes, name: str, most_values: int = MOST_VALUES) -> Any:
    """The JSON value in `data`. Raises ModelError, which calls the data `name`, unless it is JSON within the bounds."""
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > most_values:
        raise ModelError(f"{name}: more than {most_values:,} JSON values")
    try:
        content = json.loads(data)
    except RecursionError:
        raise ModelError(f"{name}: JSON nested more than {MOST_DEPTH} deep") from None
    except (ValueError, MemoryError) as error:
        raise ModelError(f"{name}: not valid JSON ({error})") from error
    _check_depth(content, name)
    return content


def _check_depth(content: Any, name: str) -> None:
    level: list[Any] = [content]
    for _ in range(MOST_DEPTH + 1):
        level = [item for value in level for item in _items(value)]
        if not level:
            return
    raise ModelError(f"{name}: JSON nested more than {MOST_DEPTH} deep")


def _items(value: Any) -> Iterable[Any]:
    """The lists and objects directly inside a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (item for item in inner if isinstance(item, dict | list))
