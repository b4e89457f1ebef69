"""`omlx cache stats | list | verify | clear`: what lies in a cache folder, with and without a running server.

Reading takes no lock. A folder that a server works on is cleared by that server, which is asked over HTTP.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from omlx.errors import NotFound, OmlxError, SettingError
from omlx.settings import Settings, reachable
from omlx.sizes import format_size
from omlx.storage import clearing, survey
from omlx.storage.block_table import Entry
from omlx.storage.folder import StoreLocked, folder_name, model_of
from omlx.storage.survey import FeatureFile, FolderUsage

_SHOWN = 100  # rows of `omlx cache list`, unless another number is asked for
_CLEAR_TIMEOUT_S = 60.0


def stats(settings: Settings, model: str | None, as_json: bool) -> int:
    """Shows blocks, tokens and bytes of each model; returns the exit status."""
    root, limit = _root(settings), settings.paged_ssd_cache_max_size
    found, images = survey.usage(_blocks(root, model)), survey.features(root, _wanted(model))
    holder = survey.holder(root)
    if as_json:
        _print_json(
            _stats_json(found, images)
            | {"folder": str(root), "in_use_by": holder, "limit_bytes": None if holder else limit}
        )
        return 0
    if found:
        _print_usage(found)
    if images:
        _say(f"features of {len(images)} images, {format_size(sum(image.nbytes for image in images))}")
    # A server has a limit of its own; these settings are those of this command.
    state = f"in use by process {holder}" if holder else f"not in use, limit {format_size(limit)}"
    _say(f"{root}: {state}{'' if found else ', no blocks'}")
    return 0


def list_blocks(settings: Settings, model: str | None, as_json: bool, limit: int | None) -> int:
    """Shows every block, the last used first; returns the exit status."""
    found = _blocks(_root(settings), model)[::-1]
    most = (None if as_json else _SHOWN) if limit is None else limit or None
    if as_json:
        _print_json([_block_json(entry) for entry in found[:most]])
        return 0
    table = _table("model", "block", ">from", ">tokens", ">size", "last used")
    for e in found[:most]:
        name = e.meta.block_hash.hex()[:16] + (" (of no use)" if e.stale else "")
        sizes = (str(e.meta.start), str(e.meta.token_count), format_size(e.meta.file_size))
        table.add_row(escape(_shown(e.folder)), name, *sizes, _when(e.used))
    Console().print(table)
    hidden = len(found[most:]) if most else 0
    _say(f"{len(found)} blocks" + (f", {hidden} more than shown here (--limit 0 shows all)" if hidden else ""))
    return 0


def verify(settings: Settings, model: str | None, as_json: bool) -> int:
    """Compares index and files and checks every checksum; returns 1 if something is wrong, after a line for each."""
    root = _root(settings)
    blocks = _blocks(root, model)
    problems = [problem.text for problem in survey.verify(root, _wanted(model))]
    if as_json:
        _print_json({"folder": str(root), "blocks": len(blocks), "problems": problems})
    else:
        for text in problems:
            _say(" ".join(text.split("\n")))
        if not problems:
            _say(f"{root}: {len(blocks)} blocks, all as they should be")
    return 1 if problems else 0


def clear(settings: Settings, model: str | None, as_json: bool, url: str | None) -> int:
    """Deletes the blocks of a model, or all; returns the exit status."""
    root = _root(settings)
    try:
        if model is not None:
            _blocks(root, model)  # a name that is not there is most likely misspelt
        done = clearing.clear(root, _wanted(model))._asdict()
    except StoreLocked as error:
        done = _Server(settings, url, error).clear(root, model)
    if as_json:
        _print_json(done)
    else:
        images = f" and the features of {done['images']} images" if done.get("images") else ""
        _say(f"{done['blocks']} blocks{images} deleted, {format_size(done['bytes'])}")
    return 0


# ---- what is asked about


def _root(settings: Settings) -> Path:
    folder = settings.paged_ssd_cache_dir
    if folder is None:
        raise SettingError("no cache folder is set: give --paged-ssd-cache-dir, or set it in settings.json")
    try:
        os.listdir(folder)
    except FileNotFoundError:
        raise OmlxError(f"there is no cache folder {folder}") from None
    except OSError as error:
        raise OmlxError(f"the cache folder {folder} cannot be read: {error.strerror or error}") from error
    return Path(os.path.realpath(folder))


def _wanted(model: str | None) -> Callable[[str], bool]:
    return survey.everything if model is None else lambda folder: folder == folder_name(model)


def _blocks(root: Path, model: str | None) -> list[Entry]:
    """The blocks of a model, or all. Raises NotFound for a model that has none."""
    found = survey.blocks(root, _wanted(model))
    if model is not None and not found and not survey.features(root, _wanted(model)):
        there = ", ".join(sorted({_shown(entry.folder) for entry in survey.blocks(root)})) or "none"
        raise NotFound(f"no blocks of model {model!r} in {root}; models there: {there}")
    return found


# ---- the server that works on the folder


class _Server:
    """The server that holds the lock, asked over HTTP to clear its own folder."""

    def __init__(self, settings: Settings, url: str | None, locked: StoreLocked) -> None:
        self._url = (url or f"http://{reachable(settings.host)}:{settings.port}").rstrip("/")
        self._locked = locked
        key = settings.admin_key
        self._headers = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}

    def clear(self, root: Path, model: str | None) -> dict[str, int]:
        """The server's answer: blocks and bytes deleted.

        Raises OmlxError, saying what to do, if that server cannot be asked.
        """
        self._check_folder(root)
        done = self._ask("POST", "/admin/cache/clear", {"model": model})
        return {name: int(count) for name, count in done.items()}

    def _check_folder(self, root: Path) -> None:
        """At that address another server may answer, with another cache: that one is left alone."""
        try:
            folder = self._ask("GET", "/admin/cache_probe")["settings"]["paged_ssd_cache_dir"]["value"]
        except (KeyError, TypeError):
            raise self._cannot(f"what answers at {self._url} is no omlx server") from None
        if folder is None or os.path.realpath(folder) != str(root):
            raise self._cannot(f"the server at {self._url} works on another folder ({folder or 'none'})")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=_CLEAR_TIMEOUT_S, trust_env=False
            )
            found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._cannot(f"at {self._url} nobody answers ({error})") from error
        except ValueError:
            raise self._cannot(f"what answers at {self._url} is no omlx server") from None
        if answer.status_code != 200:
            raise self._cannot(f"{self._url} answers {answer.status_code}: {_message(answer)}")
        return found

    def _cannot(self, why: str) -> OmlxError:
        return OmlxError(f"{self._locked}, and {why}; give that server's address with --url, or stop it first")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


# ---- how it is shown


def _shown(folder: str) -> str:
    return model_of(folder) or "(no model)"


def _when(used_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(used_ns / 1e9)) if used_ns else ""


def _table(*names: str) -> Table:
    columns = (
        Column(name.removeprefix(">"), justify="right" if name[0] == ">" else "left", no_wrap=name == "last used")
        for name in names
    )
    return Table(*columns)


def _print_usage(found: list[FolderUsage]) -> None:
    table = _table("model", ">blocks", ">tokens", ">size", "last used")
    for u in found:
        blocks = f"{u.blocks} ({u.stale} of no use)" if u.stale else str(u.blocks)
        table.add_row(escape(_shown(u.folder)), blocks, str(u.tokens), format_size(u.nbytes), _when(u.used_ns))
    table.add_section()
    sums = (sum(u.blocks for u in found), sum(u.tokens for u in found), format_size(sum(u.nbytes for u in found)))
    table.add_row("total", *map(str, sums))
    Console().print(table)


def _stats_json(found: list[FolderUsage], images: list[FeatureFile]) -> dict[str, Any]:
    features = {"images": len(images), "bytes": sum(image.nbytes for image in images)}
    total = {"blocks": sum(u.blocks for u in found), "bytes": sum(u.nbytes for u in found)}
    return {"models": [_usage_json(u) for u in found], "features": features, "total": total}


def _usage_json(u: FolderUsage) -> dict[str, Any]:
    return {
        "model": model_of(u.folder), "folder": u.folder, "blocks": u.blocks, "tokens": u.tokens, "bytes": u.nbytes,
        "stale_blocks": u.stale, "last_used_ns": u.used_ns,
    }  # fmt: skip


def _block_json(e: Entry) -> dict[str, Any]:
    m = e.meta
    return {
        "model": model_of(e.folder), "hash": m.block_hash.hex(), "parent": m.parent.hex(), "start": m.start,
        "tokens": m.token_count, "bytes": m.file_size, "last_used_ns": e.used, "stale": e.stale,
    }  # fmt: skip


def _print_json(value: Any) -> None:
    _say(json.dumps(value, indent=2))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
