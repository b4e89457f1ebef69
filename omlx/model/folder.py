"""Model folders on disk: their names, their files, and how a new one comes into being.

A model folder holds config.json, `model*.safetensors` (the names that mlx-lm loads) and a
tokenizer; an adapter's folder holds adapter_config.json and adapters.safetensors. Folders under
`<home>/models` are known by their path below it: "name" or "org/name".
Nothing here needs MLX, so listing models is quick.
"""

import fcntl
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omlx.errors import ModelError, NotFound
from omlx.model.json_file import parse_json, read_bytes, read_object
from omlx.model.progress import folder_bytes
from omlx.model.weights import WEIGHT_PATTERN, WeightFile, read_weight_file, weight_paths

MICRO_VLM = "micro-vlm"
"""The vision-language model that comes with omlx itself."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"

_SHIPPED = Path(__file__).parents[1] / "data"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEXT_FILES = ("json", "jinja", "txt", "model", "tiktoken")
_MOST_TEXT = 128 << 20  # the longest tokenizer.json that is known has 40 MB
_MOST = {"layers": 1024, "experts": 16384, "others": 4096}
_MOST_MODULES = 1 << 17  # layers times experts; the largest published model has 23,424
_OTHER_COUNTS = frozenset({
    "blocks", "codebooks", "cycles", "groups", "heads", "levels", "loops", "quantizers", "stages", "tiles",
})  # fmt: skip


class ModelInfo(NamedTuple):
    """A model on disk. `name` is what requests call it."""

    name: str
    path: Path
    size_bytes: int


class Adapter(NamedTuple):
    """What was trained on top of a model: its adapter_config.json as stored, and its weights."""

    path: Path
    config: bytes
    weights: WeightFile


def hashes_folder(home: Path) -> Path:
    """Where the hashes of models' weights are remembered under the home folder of omlx."""
    return home / "weight-hashes"


def models_folder(home: Path) -> Path:
    """Where models are kept under the home folder of omlx."""
    return home / "models"


def check_name(name: str) -> str:
    """`name` if it can name a model below the models folder ("name" or "org/name"), else ModelError."""
    parts = name.split("/")
    if len(parts) > 2 or not all(map(_NAME.fullmatch, parts)):
        raise ModelError(f"{name!r} is not a model name: letters, digits, '.', '_' and '-', with at most one '/'")
    return name


def safe_name(text: str) -> str:
    """A model name made from any text, such as a title in a file's metadata ("model" if nothing is left)."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "model"


def is_model(path: Path) -> bool:
    """Whether `path` looks like a model folder: a config and weights are there. False if that cannot be seen."""
    return os.path.isfile(path / "config.json") and bool(weight_paths(path))


def folder_name(path: Path) -> str:
    """What a model is called that is served from a folder: the folder's name, ORG/NAME for a Hugging Face snapshot.

    The Hub's cache has a snapshot at models--ORG--NAME/snapshots/HASH.
    """
    kind, *parts = path.parent.parent.name.split("--") if path.parent.name == "snapshots" else [""]
    return "/".join(parts) if kind == "models" and 1 <= len(parts) <= 2 and all(parts) else path.name


def list_models(home: Path) -> list[ModelInfo]:
    """Every model under the home folder, in name order; folders that begin with a dot are unfinished."""
    return scan_models(home).models


class Scan(NamedTuple):
    """The models under a home folder in name order, and one line for each folder there that cannot be read."""

    models: list[ModelInfo]
    unreadable: list[str]


def scan_models(home: Path) -> Scan:
    """`list_models`, and what it leaves out because it cannot be read. Raises nothing for such folders."""
    root, found = models_folder(home), Scan([], [])
    for path in _visible_folders(root, found.unreadable):
        if is_model(path):
            found.models.append(ModelInfo(path.name, path, folder_bytes(path)))
            continue
        for inner in _visible_folders(path, found.unreadable):
            if is_model(inner):
                found.models.append(ModelInfo(f"{path.name}/{inner.name}", inner, folder_bytes(inner)))
            elif not os.access(inner, os.R_OK | os.X_OK):
                _visible_folders(inner, found.unreadable)
    found.models.sort()
    return found


def _visible_folders(parent: Path, unreadable: list[str]) -> list[Path]:
    """The folders in a folder that begin with no dot; adds a line to `unreadable` if it cannot be read."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
        os.stat(os.path.join(parent, "."))  # names may be listed of a folder that nobody may enter
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unreadable.append(f"{parent}: {error.strerror or error}")
        return []
    return [parent / name for name in names if os.path.isdir(parent / name)]


def shipped_models() -> list[ModelInfo]:
    """The models that come with the package. One of the same name under the home folder goes before them."""
    folders = sorted(path for path in _SHIPPED.glob("*") if is_model(path))
    return [ModelInfo(path.name, path, folder_bytes(path)) for path in folders]


def find_model(name_or_path: str, home: Path) -> Path:
    """The folder of a model, given its name (under the home folder, else in the package) or a path to any folder.

    A known name goes before a path. Paths are for the operator: names that come from clients have to
    be looked up in `list_models` instead. Raises NotFound if there is no such folder, ModelError if
    the folder holds no model.
    """
    if "\0" in name_or_path or not name_or_path:
        raise NotFound(f"{name_or_path!r} names no model")
    parts = name_or_path.split("/")
    known = models_folder(home).joinpath(*parts)
    if len(parts) <= 2 and not any(part == "" or part.startswith(".") for part in parts) and is_model(known):
        return known
    for shipped in shipped_models():
        if shipped.name == name_or_path:
            return shipped.path
    path = _expanded(name_or_path)
    if not os.path.isdir(path):
        raise NotFound(
            f"no model {name_or_path!r} under {models_folder(home)}, and no such folder; "
            "`omlx models` lists what is there, `omlx pull smollm2-135m` fetches the starter model"
        )
    check_folder(path)
    return path


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~nobody
        raise NotFound(f"no model {path!r}: {error}") from None


def check_folder(path: Path) -> None:
    """Raise ModelError, in one line, unless `path` is a folder with a config and weights that can be read."""
    try:
        os.stat(os.path.join(path, "."))
        os.listdir(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such model folder") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    if not os.path.isfile(path / "config.json"):
        raise ModelError(f"{path}: not a model folder (no config.json)")
    if not weight_paths(path):
        raise ModelError(f"{path}: no weights ({WEIGHT_PATTERN})")


def folder_state(path: Path) -> object:
    """A value that changes whenever a file in a folder, or in a folder of it, does, or who may read it."""
    found: list[object] = []
    for folder in (path, *_subfolders(path)):
        try:
            with os.scandir(folder) as entries:
                found.append((folder.name, sorted((entry.name, _file_state(Path(entry.path))) for entry in entries)))
        except OSError as error:
            found.append((folder.name, error.errno, _file_state(folder)))
    return found


def _subfolders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if os.path.isdir(entry))
    except OSError:
        return []


def _file_state(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def check_files(path: Path) -> None:
    """Raise ModelError if a file that other libraries read whole is no regular file, or larger than any real one."""
    for name in sorted(os.listdir(path)):
        kind = name.rpartition(".")[2].lower()
        if os.path.isdir(path / name) or kind not in (*_TEXT_FILES, "safetensors"):
            continue
        if not os.path.isfile(path / name):  # opening a pipe would wait forever
            raise ModelError(f"{path}: {name} is not a regular file")
        if kind in _TEXT_FILES and os.path.getsize(path / name) > _MOST_TEXT:
            raise ModelError(f"{path}: {name} is larger than {_MOST_TEXT >> 20} MiB")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelError if it is not JSON, names no usable model type, asks for code, or
    describes more layers, heads or experts than any model has.

    The type becomes part of a module name in mlx-lm, hence the check of its characters.
    """
    file = path / "config.json"
    config = read_object(file)
    if "model_file" in config:
        raise ModelError(f"{file}: the model wants to run its own code ({config['model_file']!r}); omlx never does")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", str(config.get("model_type", ""))):
        raise ModelError(f"{file}: no usable model_type ({str(config.get('model_type'))[:100]!r})")
    _check_counts(config, file)
    return config


def _check_counts(config: dict[str, Any], file: Path) -> None:
    """Modules are made from the config alone, before its weights can tell that they are not there."""
    modules = {"experts": 1, "layers": 1}
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        for key, value in part.items() if isinstance(part, dict) else ():
            counted = _counted(str(key))
            if counted is None or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not value <= _MOST[counted]:
                raise ModelError(f"{file}: {key} is {value}; omlx builds at most {_MOST[counted]:,}")
            if counted in modules:
                modules[counted] = max(modules[counted], int(value))
    if math.prod(modules.values()) > _MOST_MODULES:
        raise ModelError(f"{file}: {modules['layers']} layers of {modules['experts']} experts; omlx builds fewer")


def _counted(key: str) -> str | None:
    """What a key of a config counts, if that is something of which a module is built each."""
    words = set(re.split(r"[^a-z]+", key.lower()))
    if words & {"per"}:  # chosen of those that are counted elsewhere, or sizes
        return None
    if words & {"experts"}:
        return "experts"
    if words & {"layers", "depth", "depths"} or words >= {"n", "layer"} or words >= {"num", "layer"}:
        return "layers"
    return "others" if words & _OTHER_COUNTS else None


def read_adapter(path: Path) -> Adapter:
    """An adapter as mlx-lm's training leaves it. Raises ModelError, in one line, for a folder that is none."""
    config, weights = path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS
    if not os.path.isdir(path):
        raise ModelError(f"{path}: no such adapter folder")
    for file in (config, weights):
        if not os.path.isfile(file):
            raise ModelError(f"{path}: not an adapter of mlx-lm (no {file.name})")
    content = read_bytes(config)
    if not isinstance(described := parse_json(content, str(config)), dict):
        raise ModelError(f"{config}: not a JSON object")
    _check_counts(described, config)
    return Adapter(path, content, read_weight_file(weights))


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the right to create `target`; a second process waits here until the first is done.

    The lock file stays, empty: removing it would let two processes lock two different files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _hidden(target, "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block succeeds, all at once.

    Call it inside `locked(target)`: what an earlier, killed run left is removed first. When the block
    fails nothing is left. Raises ModelError if something else already has the name.
    """
    prefix = _hidden(target, "new-").name
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        folder.chmod(0o755)
        yield folder
        put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a finished folder to `target`. Raises ModelError if a non-empty `target` is in the way."""
    try:
        folder.rename(target)
    except OSError as error:
        raise ModelError(
            f"{target}: cannot put the model there ({error.strerror}); remove what is in the way"
        ) from error


def unfinished_folder(target: Path) -> Path:
    """The hidden folder beside `target` for a download that a later run continues."""
    return _hidden(target, "partial")


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}")
