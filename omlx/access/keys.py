"""The API keys of a server: from the options and from a file, each with a name, a cache salt and a share of its own.

A line of the file is `NAME: KEY`, or a key alone, optionally followed by `admin`, `requests=N` and `cache_salt=auto`
(or `none`); `#` begins a comment. Errors name a line by its number: nothing that may be a key is ever shown.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from omlx.errors import SettingError
from omlx.settings import Settings

logger = logging.getLogger("omlx.keys")

_LOOK_EVERY_S = 1.0
_SALT_PURPOSE = b"omlx cache salt"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. `max_requests` may run at once (0: no limit). `is_admin`: it also opens the admin routes.

    The key itself is not kept: `digest` is its SHA-256, `salt_secret` made of it where it has a cache salt of its own.
    """

    name: str
    digest: bytes = field(repr=False)
    max_requests: int = 0
    salt_secret: bytes | None = field(default=None, repr=False)
    is_admin: bool = False

    def cache_salt(self, asked: str = "") -> str:
        """What separates this key's cache: the client's `asked` salt, within the key's own if it has one.

        An own salt cannot be guessed, so no other key's client can name it.
        """
        if self.salt_secret is None:
            return asked
        return hmac.digest(self.salt_secret, asked.encode(), "sha256").hex()


# Who asks where no keys are: no name, nothing of its own.
ANYBODY = ApiKey("", b"")


class KeyRing:
    """The keys in force. The file is read again when it has changed, which is looked for once a second at most.

    A file that has become unusable leaves the keys as they were, and is logged. Raises SettingError for one that is
    so at the start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = _stamp(settings.api_keys_file)
        self._keys = read_keys(settings)
        _warn_of_readers(settings.api_keys_file)
        self._next_look = time.monotonic() + _LOOK_EVERY_S

    def __bool__(self) -> bool:
        """Whether a key is asked for at all."""
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        """The key that was given. Takes equally long whichever it is, and whether it is one or not."""
        self._look()
        digest, found = hashlib.sha256(given).digest(), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    @property
    def has_admin(self) -> bool:
        """Whether one of the keys opens the admin routes."""
        self._look()
        return any(key.is_admin for key in self._keys)

    def named(self, name: str) -> ApiKey | None:
        self._look()
        return next((key for key in self._keys if key.name == name), None)

    def _look(self) -> None:
        if self._settings.api_keys_file is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        stamp = _stamp(self._settings.api_keys_file)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._keys = read_keys(self._settings)
        except SettingError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys in force: %s", len(self._keys), ", ".join(key.name for key in self._keys))
            _warn_of_readers(self._settings.api_keys_file)


def read_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """All keys of options and file. Raises SettingError, one line without any key in it."""
    keys = [
        _key(f"API key {number}", _Line(f"key{number}", text), settings)
        for number, text in enumerate(settings.api_keys, 1)
    ]
    if settings.api_keys_file is not None:
        keys += [_key(place, line, settings) for place, line in _read_file(settings.api_keys_file)]
        if not keys:
            raise SettingError(f"{settings.api_keys_file} holds no key")
    _check(keys, settings)
    return tuple(keys)


def admin_credential(settings: Settings) -> str | None:
    """A key that opens the admin routes of a server with these settings, for `omlx cache`; None if there is none.

    Raises SettingError.
    """
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    lines = () if settings.api_keys_file is None else _read_file(settings.api_keys_file)
    return next((line.key for _, line in lines if line.is_admin), None)


class _Line(NamedTuple):
    """A key as written, and what it says of itself; None: the option for all keys applies."""

    name: str
    key: str
    max_requests: int | None = None
    salt: str | None = None
    is_admin: bool = False



def _check(keys: list[ApiKey], settings: Settings) -> None:
    for index, key in enumerate(keys):
        for other in keys[:index]:
            if other.name == key.name:
                raise SettingError(f"two API keys have the name {key.name!r}")
            if other.digest == key.digest:
                raise SettingError(f"the API keys {other.name!r} and {key.name!r} are the same")
        if settings.admin_key and key.digest == _digest(settings.admin_key.get_secret_value()):
            raise SettingError(f"the admin key must be another key than the API key {key.name!r}")


def _read_file(path: Path) -> Iterator[tuple[str, _Line]]:
    """Each line that holds a key, with its place for messages."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"the API keys cannot be read from {path}: {reason}") from None
    for number, line in enumerate(lines, 1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if words:
            place = f"{path}, line {number}"
            yield place, _parse_line(words, number, place)


def _parse_line(words: list[str], number: int, place: str) -> _Line:
    name = words.pop(0)[:-1] if words[0].endswith(":") else f"line{number}"
    if not re.fullmatch(r"[\w.@+-]{1,64}", name, re.ASCII):
        raise SettingError(f"{place}: a name has up to 64 letters, digits and . @ + - _")
    if not words:
        raise SettingError(f"{place}: there is no key behind the name")
    line = _Line(name, words[0])
    for word in words[1:]:
        option, _, value = word.partition("=")
        if word == "admin":
            line = line._replace(is_admin=True)
        elif option == "requests" and re.fullmatch("[0-9]{1,6}", value, re.ASCII):
            line = line._replace(max_requests=int(value))
        elif option == "cache_salt" and value in ("auto", "none"):
            line = line._replace(salt=value)
        else:  # not shown: it may be a part of a key
            raise SettingError(f"{place}: only admin, requests=N and cache_salt=auto or none may follow a key")
    return line


def _key(place: str, line: _Line, settings: Settings) -> ApiKey:
    if not line.key.isascii() or not line.key.isprintable():
        raise SettingError(f"{place}: a key must be ASCII without spaces")
    requests = settings.max_requests_per_key if line.max_requests is None else line.max_requests
    own = (line.salt or settings.api_key_cache_salt) == "auto"
    secret = hmac.digest(line.key.encode(), _SALT_PURPOSE, "sha256") if own else None
    return ApiKey(line.name, _digest(line.key), requests, secret, line.is_admin)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _warn_of_readers(path: Path | None) -> None:
    with suppress(OSError):
        if path is not None and path.stat().st_mode & stat.S_IRWXO:
            logger.warning("%s is open to every user of this machine: chmod 600 keeps its keys private", path)


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Changes when the file does; None if it is not there."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
