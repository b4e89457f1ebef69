"""Where a model folder keeps its chat templates: one, or several by name."""

import logging
import os
from pathlib import Path
from typing import Any

from omlx.errors import ModelError
from omlx.model.json_file import read_bytes, read_object

log = logging.getLogger(__name__)

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""The names that transformers gives meaning to; one of another name ("rag") is used where there is no default."""

_FOLDER = "additional_chat_templates"


def read_templates(path: Path, name: str) -> str | dict[str, str] | None:
    """The chat template of the folder of model `name`, or several by name, as transformers' tokenizers take them.

    None if it has none. Where several files have one, the first of these counts: chat_template.jinja,
    chat_template.json, tokenizer_config.json, processor_config.json. What cannot be read is left out, with one warning.
    """
    ignored: list[str] = []
    found = _named(path, ignored)
    default: Any = _jinja(path / "chat_template.jinja", ignored)
    for file in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        if default is None:
            default = _templates(_object(path / file, ignored).get("chat_template"), file, ignored)
    if isinstance(default, dict):
        found = default | found
    elif default is not None:
        found[DEFAULT] = default
    if ignored:
        log.warning("model %s: chat templates ignored: %s", name, "; ".join(ignored))
    if found and DEFAULT not in found:
        other = WITH_TOOLS if WITH_TOOLS in found else next(iter(found))
        log.warning("model %s: it has no default chat template; %r is used", name, other)
        return found[other]
    kept = {key: found[key] for key in (DEFAULT, WITH_TOOLS) if key in found}
    return kept if WITH_TOOLS in kept else kept.get(DEFAULT)


def _named(path: Path, ignored: list[str]) -> dict[str, str]:
    try:
        files = sorted((path / _FOLDER).glob("*.jinja"))
    except OSError as error:
        ignored.append(f"{_FOLDER} cannot be read ({error.strerror})")
        return {}
    texts = {file.stem: _jinja(file, ignored) for file in files if file.stem in (DEFAULT, WITH_TOOLS)}
    return {name: text for name, text in texts.items() if text is not None}


def _jinja(file: Path, ignored: list[str]) -> str | None:
    if not os.path.lexists(file):
        return None
    try:
        return read_bytes(file).decode()
    except ModelError as error:
        ignored.append(str(error))
    except UnicodeDecodeError:
        ignored.append(f"{file.name} is not UTF-8 text")
    return None


def _object(file: Path, ignored: list[str]) -> dict[str, Any]:
    if not os.path.lexists(file):
        return {}
    try:
        return read_object(file)
    except ModelError as error:
        ignored.append(str(error))
        return {}


def _templates(value: Any, place: str, ignored: list[str]) -> str | dict[str, str] | None:
    """A template, or a list (an object in some folders) of named ones. Two of one name: the later one, as transformers
    takes it."""
    if value is None or isinstance(value, str):
        return value
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not named or len(named) < len(pairs if isinstance(value, dict) else value):
        ignored.append(f"what {place} has besides texts and named texts")
    return named or None
