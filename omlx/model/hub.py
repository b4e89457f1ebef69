"""Models from the Hugging Face hub, as plain folders under omlx's home."""

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo as HubModel
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from omlx.errors import ModelError
from omlx.model.folder import (
    check_folder,
    check_name,
    is_model,
    locked,
    models_folder,
    put_in_place,
    read_config,
    unfinished_folder,
)
from omlx.model.progress import Progress, silent, watching
from omlx.model.weights import WEIGHT_PATTERN
from omlx.sizes import format_size

_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
# Subfolders hold other formats of the same weights, as do these files of Mistral's.
_UNWANTED = ("*/*", "consolidated*.safetensors")
# But for what sentence-transformers puts behind an embedding model: how it pools, dense layers.
_LAYER = re.compile(r"[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)")
_LIBRARY = "omlx"


class _NoBar(tqdm):
    """The hub's own progress bars, switched off: `watching` reports instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]


def pull_from_hub(repo: str, home: Path, progress: Progress = silent, *, endpoint: str | None = None) -> Path:
    """Download the model "org/name" into <home>/models/org/name and return the folder.

    Weights, configuration and tokenizer only, never code. At once if the model is there already. An
    interrupted download is continued by the next call. `endpoint` is the hub's URL (default:
    HF_ENDPOINT, or the public hub). Raises ModelError in one line.
    """
    if repo.count("/") != 1:
        raise ModelError(f"{repo!r} is not of the form ORG/NAME")
    target = models_folder(home) / check_name(repo)
    if is_model(target):
        return target
    try:
        found = HfApi(endpoint=endpoint, library_name=_LIBRARY).model_info(repo, files_metadata=True)
        files = _wanted_files(repo, found)
        with locked(target):
            if not is_model(target):
                _download(repo, found.sha or "main", files, target, progress, endpoint)
    except ModelError:
        raise
    except Exception as error:  # broad: its HTTP client, its download helper and the system have errors of their own
        raise ModelError(f"{repo}: {_reason(error)}") from error
    return target


def _wanted_files(repo: str, found: HubModel) -> dict[str, int]:
    """The files to download and their sizes in bytes. Raises ModelError if they are no MLX model."""
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    wanted = {name: size for name, size in sizes.items() if _is_wanted(name)}
    if "config.json" not in wanted or not any(fnmatch(name, WEIGHT_PATTERN) for name in wanted):
        raise ModelError(f"{repo}: not a model that MLX loads (no config.json, or no {WEIGHT_PATTERN})")
    return wanted


def _is_wanted(name: str) -> bool:
    return (_matches(name, _WANTED) and not _matches(name, _UNWANTED)) or _LAYER.fullmatch(name) is not None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _download(
    repo: str, revision: str, files: dict[str, int], target: Path, progress: Progress, endpoint: str | None
) -> None:
    folder, size = unfinished_folder(target), sum(files.values())
    folder.mkdir(exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ModelError(f"{repo}: {format_size(size)} do not fit on the disk ({format_size(free)} free)")
    options: dict[str, Any] = {
        "revision": revision,
        "local_dir": folder,
        "endpoint": endpoint,
        "library_name": _LIBRARY,
        "tqdm_class": _NoBar,
    }
    hf_hub_download(repo, "config.json", **options)
    read_config(folder)  # refuses what omlx would not load, before the weights are fetched
    with watching(folder, f"downloading {repo}", size, progress):
        snapshot_download(repo, allow_patterns=list(files), **options)
    _remove_others(folder, files)
    check_folder(folder)
    put_in_place(folder, target)


def _remove_others(folder: Path, files: dict[str, int]) -> None:
    """The hub's own notes, and files of an older revision that an interrupted download had begun with."""
    for path in list(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not any(file.startswith(f"{name}/") for file in files):
            shutil.rmtree(path)
        elif path.is_file() and name not in files:
            path.unlink()


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "gated: accept its terms on the hub, then set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "no such model on the hub (for a private one, set HF_TOKEN)"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"download failed: {text if len(text) <= 300 else text[:297] + '...'}"
