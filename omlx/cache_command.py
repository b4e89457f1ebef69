"""`omlx cache stats | list | verify | clear`: what lies in a cache folder, with and without a running server.

Reading takes no lock. A folder that a server works on is cleared by that server, which is asked over HTTP.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from omlx.access.keys import admin_credential
from omlx.api.responses.archive import ARCHIVE_NAME, clear_archive
from omlx.errors import NotFound, OmlxError, SettingError
from omlx.settings import Settings, reachable
from omlx.sizes import format_size, parse_duration, quoted
from omlx.storage import clearing, survey
from omlx.storage.block_table import Entry
from omlx.storage.folder import StoreLocked, folder_name, model_of
from omlx.storage.survey import FeatureUsage, FolderUsage

_SHOWN = 100  # rows of `omlx cache list`, unless another number is asked for
_CLEAR_TIMEOUT_S = 60.0
_STATS_TIMEOUT_S = 5.0


def stats(settings: Settings, model: str | None, as_json: bool, url: str | None) -> int:
    """Shows blocks, tokens and bytes of each model; returns the exit status."""
    root, limit = _root(settings), settings.paged_ssd_cache_max_size
    holder = survey.holder(root)
    ram = _in_ram(settings, root, url, model)
    found = _with_those_in_ram(survey.usage(_blocks(root, model)), ram)
    images = survey.feature_usage(survey.features(root, _wanted(model)))
    if as_json:
        _print_json(
            _stats_json(found, images, ram)
            | {"folder": str(root), "in_use_by": holder, "limit_bytes": None if holder else limit}
        )
        return 0
    if found:
        _print_usage(found, ram)
    if images:
        _say(f"features of {sum(u.images for u in images)} images, {format_size(sum(u.nbytes for u in images))}")
    # A server has a limit of its own; these settings are those of this command.
    state = f"in use by process {holder}" if holder else f"not in use, limit {format_size(limit)}"
    _say(f"{root}: {state}{'' if found else ', no blocks'}")
    return 0


def list_blocks(settings: Settings, model: str | None, as_json: bool, limit: int | None) -> int:
    """Shows every block, the last used first, and what there is of pictures; returns the exit status."""
    root = _root(settings)
    found = _blocks(root, model)[::-1]
    images = survey.feature_usage(survey.features(root, _wanted(model)))
    most = (None if as_json else _SHOWN) if limit is None else limit or None
    if as_json:
        _print_json([*(_block_json(entry) for entry in found[:most]), *map(_features_json, images)])
        return 0
    table = _table("model", "block", ">from", ">tokens", ">size", "last used")
    for e in found[:most]:
        name = e.meta.block_hash.hex()[:16] + (" (of no use)" if e.stale else "")
        sizes = (str(e.meta.start), str(e.meta.token_count), format_size(e.meta.file_size))
        table.add_row(escape(_shown(e.folder)), name, *sizes, _when(e.used))
    Console().print(table)
    hidden = len(found[most:]) if most else 0
    _say(f"{len(found)} blocks" + (f", {hidden} more than shown here (--limit 0 shows all)" if hidden else ""))
    if images:
        _print_features(images)
    return 0


def verify(settings: Settings, model: str | None, as_json: bool) -> int:
    """Compares index and files and checks every checksum; returns 1 if something is wrong, after a line for each."""
    root = _root(settings)
    blocks = _blocks(root, model)
    images = len(survey.features(root, _wanted(model)))
    problems = [problem.text for problem in survey.verify(root, _wanted(model))]
    if as_json:
        _print_json({"folder": str(root), "blocks": len(blocks), "images": images, "problems": problems})
    else:
        for text in problems:
            _say(" ".join(text.split("\n")))
        if not problems:
            features = f" and the features of {images} images" if images else ""
            _say(f"{root}: {len(blocks)} blocks{features}, all as they should be")
    return 1 if problems else 0


def clear(
    settings: Settings,
    model: str | None,
    as_json: bool,
    url: str | None,
    older_than: str | None,
    conversation: Path | None,
) -> int:
    """Deletes the blocks of a model, or all, or those not used for some time, or of a conversation.

    Returns the exit status.
    """
    root, age_s = _root(settings), _age(older_than)
    if conversation is not None:
        if older_than is not None:
            raise SettingError("--conversation and --older-than do not go together")
        done = _forget(settings, root, _read_body(conversation, model), url)
    else:
        done = _clear(settings, root, model, url, age_s, older_than)
    if as_json:
        _print_json(done)
    else:
        images = f" and the features of {done['images']} images" if done.get("images") else ""
        _say(f"{done['blocks']} blocks{images} deleted, {format_size(done['bytes'])}")
        if done.get("responses"):
            _say(f"{done['responses']} stored responses deleted")
        if done.get("kept_tokens"):
            _say(f"{done['kept_tokens']} of {done['prompt_tokens']} prompt tokens stay: {done['kept_because']}")
    return 0


def _clear(
    settings: Settings, root: Path, model: str | None, url: str | None, age_s: int | None, older_than: str | None
) -> dict[str, Any]:
    try:
        if model is not None:
            _blocks(root, model)  # a name that is not there is most likely misspelt
        before_ns = None if age_s is None else time.time_ns() - age_s * 10**9
        done = clearing.clear(root, _wanted(model), before_ns)._asdict()
        responses = clear_archive(root / ARCHIVE_NAME, before_ns) if model is None else 0
        return done | ({"responses": responses} if responses else {})
    except StoreLocked as error:
        age = {} if older_than is None else {"older_than": older_than}
        return _Server(settings, url, error).clear(root, {"model": model} | age)


def _forget(settings: Settings, root: Path, body: dict[str, Any], url: str | None) -> dict[str, Any]:
    holder = survey.holder(root)
    if holder is None:
        raise OmlxError(
            f"no server works on {root}: only a running one can delete a conversation, since that needs the model's "
            "tokenizer and chat template"
        )
    locked = StoreLocked(f"the cache folder {root} is in use by process {holder}")
    return _Server(settings, url, locked).clear(root, body)


def _age(older_than: str | None) -> int | None:
    try:
        return None if older_than is None else parse_duration(older_than)
    except ValueError as error:
        raise SettingError(f"--older-than {error}") from None


def _read_body(file: Path, model: str | None) -> dict[str, Any]:
    """A conversation as in the body of a chat completion, with the model that is meant."""
    try:
        body = json.loads(file.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--conversation {quoted(file)} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingError(f"--conversation {quoted(file)} is not valid JSON: {error}") from None
    if not isinstance(body, dict) or not body.keys() & {"messages", "prompt"}:
        raise SettingError(f'--conversation {quoted(file)} must hold a JSON object with "messages" (or "prompt")')
    if model is not None and body.setdefault("model", model) != model:
        raise SettingError(f"--model {quoted(model)} is not the model of the conversation, {quoted(body['model'])}")
    if "model" not in body:
        raise SettingError(f'--conversation {quoted(file)} names no "model"; give it there, or with --model')
    return body


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


class _InRam(NamedTuple):
    """What a server has of a model in RAM."""

    blocks: int
    tokens: int
    bytes: int
    used_ns: int


_Ram = dict[str, _InRam] | None  # by folder; None: no server can be asked


def _in_ram(settings: Settings, root: Path, url: str | None, model: str | None) -> _Ram:
    if survey.holder(root) is None:
        return None
    try:
        stored = _Server(settings, url, StoreLocked(), timeout_s=_STATS_TIMEOUT_S).stored(root)
        found = {folder_name(e["model"]): _InRam(**e["ram"], used_ns=e["last_used_ns"]) for e in stored}
    except (OmlxError, KeyError, TypeError):
        return None
    return {folder: held for folder, held in found.items() if _wanted(model)(folder)}


def _with_those_in_ram(found: list[FolderUsage], ram: _Ram) -> list[FolderUsage]:
    """Models with blocks that have no files yet are shown as well."""
    on_disk = {usage.folder for usage in found}
    more = [(folder, held) for folder, held in (ram or {}).items() if folder not in on_disk and held.blocks]
    return sorted(found + [FolderUsage(folder, 0, 0, 0, 0, held.used_ns) for folder, held in more])


def _blocks(root: Path, model: str | None) -> list[Entry]:
    """The blocks of a model, or all. Raises NotFound for a model that has none."""
    found = survey.blocks(root, _wanted(model))
    if model is not None and not found and not survey.features(root, _wanted(model)):
        models = {_shown(entry.folder) for entry in survey.blocks(root)}
        models |= {usage.model for usage in survey.feature_usage(survey.features(root))}
        there = ", ".join(sorted(models)) or "none"
        raise NotFound(f"no blocks of model {model!r} in {root}; models there: {there}")
    return found


# ---- the server that works on the folder


class _Server:
    """The server that holds the lock, asked over HTTP to clear its own folder."""

    def __init__(
        self, settings: Settings, url: str | None, locked: StoreLocked, timeout_s: float = _CLEAR_TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._url = (url or f"http://{reachable(settings.host)}:{settings.port}").rstrip("/")
        self._locked = locked
        key = admin_credential(settings)
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def clear(self, root: Path, wanted: dict[str, Any]) -> dict[str, Any]:
        """The server's answer: blocks and bytes deleted.

        Raises OmlxError, saying what to do, if that server cannot be asked.
        """
        self._figures(root)
        done = self._ask("POST", "/admin/cache/clear", wanted)
        if not all(isinstance(done.get(name), int) for name in ("blocks", "bytes")):
            raise self._cannot(f"what answers at {self._url} is no omlx server")
        return done

    def stored(self, root: Path) -> list[dict[str, Any]]:
        """Who has how many blocks in which tier. Raises OmlxError, KeyError."""
        return list(self._figures(root)["stored"])

    def _figures(self, root: Path) -> dict[str, Any]:
        """At that address another server may answer, with another cache: that one is left alone."""
        try:
            figures = self._ask("GET", "/admin/cache_probe")
            folder = figures["settings"]["paged_ssd_cache_dir"]["value"]
        except (KeyError, TypeError):
            raise self._cannot(f"what answers at {self._url} is no omlx server") from None
        if folder is None or os.path.realpath(folder) != str(root):
            raise self._cannot(f"the server at {self._url} works on another folder ({folder or 'none'})")
        return figures

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=self._timeout_s, trust_env=False
            )
            found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._cannot(f"at {self._url} nobody answers ({error})") from error
        except ValueError:
            raise self._cannot(f"what answers at {self._url} is no omlx server") from None
        if answer.status_code != 200:
            hint = _NEEDS_KEY if answer.status_code in (401, 403) else None
            raise self._cannot(f"{self._url} answers {answer.status_code}: {_message(answer)}", hint)
        return found

    def _cannot(self, why: str, hint: str | None = None) -> OmlxError:
        return OmlxError(f"{self._locked}, and {why}; {hint or _NEEDS_URL}, or stop it first")


_NEEDS_URL = "give that server's address with --url"
_NEEDS_KEY = "give the server's --admin-key, or its --api-keys-file with a key marked admin"


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


def _print_usage(found: list[FolderUsage], ram: _Ram) -> None:
    table = _table("model", ">blocks", ">tokens", ">size", "last used", *((">in RAM",) if ram is not None else ()))
    for u in found:
        blocks = f"{u.blocks} ({u.stale} of no use)" if u.stale else str(u.blocks)
        row = [escape(_shown(u.folder)), blocks, str(u.tokens), format_size(u.nbytes), _when(u.used_ns)]
        if ram is not None:
            held = ram.get(u.folder, _InRam(0, 0, 0, 0))
            row.append(f"{held.blocks} blocks, {format_size(held.bytes)}")
        table.add_row(*row)
    table.add_section()
    sums = (sum(u.blocks for u in found), sum(u.tokens for u in found), format_size(sum(u.nbytes for u in found)))
    table.add_row("total", *map(str, sums))
    Console().print(table)


def _print_features(found: list[FeatureUsage]) -> None:
    table = _table("model", "features of", ">images", ">size", "last used")
    for u in found:
        table.add_row(escape(u.model), escape(u.model_name), str(u.images), format_size(u.nbytes), _when(u.used_ns))
    Console().print(table)


def _features_json(u: FeatureUsage) -> dict[str, Any]:
    return {
        "model": u.model, "features_of": u.model_name, "images": u.images, "bytes": u.nbytes, "last_used_ns": u.used_ns,
    }  # fmt: skip


def _stats_json(found: list[FolderUsage], images: list[FeatureUsage], ram: _Ram) -> dict[str, Any]:
    features: dict[str, Any] = {"images": sum(u.images for u in images), "bytes": sum(u.nbytes for u in images)}
    features["models"] = [_features_json(u) for u in images]
    total = {"blocks": sum(u.blocks for u in found), "bytes": sum(u.nbytes for u in found)}
    models = [_usage_json(u) | {"ram": _ram_json(u.folder, ram)} for u in found]
    return {"models": models, "features": features, "total": total}


def _ram_json(folder: str, ram: _Ram) -> dict[str, int] | None:
    if ram is None:
        return None
    held = ram.get(folder, _InRam(0, 0, 0, 0))
    return {"blocks": held.blocks, "tokens": held.tokens, "bytes": held.bytes}


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
