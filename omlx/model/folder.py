"""Model folders on disk: their names, their files, and how a new one comes into being.

A model folder holds config.json, `model*.safetensors` (the names that mlx-lm loads) and a
tokenizer; an adapter's folder holds adapter_config.json and adapters.safetensors. Folders under
`<home>/models` are known by their path below it: "name" or "org/name".
Nothing here needs MLX, so listing models is quick.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omlx.errors import ModelError, NotFound
from omlx.model.progress import folder_bytes

WEIGHT_PATTERN = "model*.safetensors"
MICRO_VLM = "micro-vlm"
"""The vision-language model that comes with omlx itself."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"

_SHIPPED = Path(__file__).parents[1] / "data"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEADER_LIMIT = 100 << 20  # the safetensors format allows no longer header
_HASH_WHOLE = 256 << 20
_SAMPLE_BYTES = 1 << 10
_SAMPLE_EVERY = 4 << 20


class ModelInfo(NamedTuple):
    """A model on disk. `name` is what requests call it."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file whose length agrees with its header.

    `header` is the JSON as stored; `spans` are the (start, end) of the tensors in the file, in its order.
    """

    path: Path
    size: int
    header: bytes
    spans: tuple[tuple[int, int], ...]


class Adapter(NamedTuple):
    """What was trained on top of a model: its adapter_config.json as stored, and its weights."""

    path: Path
    config: bytes
    weights: WeightFile


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
    """Whether `path` looks like a model folder: a config and weights are there."""
    return (path / "config.json").is_file() and bool(weight_paths(path))


def weight_paths(path: Path) -> list[Path]:
    """The weight files that mlx-lm loads from a folder, in name order."""
    return sorted(file for file in path.glob(WEIGHT_PATTERN) if file.is_file())


def list_models(home: Path) -> list[ModelInfo]:
    """Every model under the home folder, in name order; folders that begin with a dot are unfinished."""
    root = models_folder(home)
    found = []
    for path in sorted([*root.glob("*"), *root.glob("*/*")]):
        name = path.relative_to(root).as_posix()
        inside_model = path.parent != root and is_model(path.parent)
        if not inside_model and not name.startswith(".") and "/." not in name and is_model(path):
            found.append(ModelInfo(name, path, folder_bytes(path)))
    return sorted(found)


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
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise NotFound(
            f"no model {name_or_path!r} under {models_folder(home)}, and no such folder; "
            "`omlx models` lists what is there, `omlx pull smollm2-135m` fetches the starter model"
        )
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raise ModelError, in one line, unless `path` is a folder with a config and weights."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such model folder")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder (no config.json)")
    if not weight_paths(path):
        raise ModelError(f"{path}: no weights ({WEIGHT_PATTERN})")


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelError if it is not JSON, names no usable model type, or asks for code.

    The type becomes part of a module name in mlx-lm, hence the check of its characters.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: not a JSON object")
    if "model_file" in config:
        raise ModelError(f"{file}: the model wants to run its own code ({config['model_file']!r}); omlx never does")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", str(config.get("model_type", ""))):
        raise ModelError(f"{file}: no usable model_type ({config.get('model_type')!r})")
    return config


def read_weight_files(path: Path) -> list[WeightFile]:
    """The headers of a folder's weight files, in name order. ModelError for a damaged or truncated one."""
    return [_read_weight_file(file) for file in weight_paths(path)]


def _read_weight_file(path: Path) -> WeightFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, size):
                raise ModelError(f"{path}: not a safetensors file, or truncated")
            header = file.read(length)
        tensors = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
        expected = 8 + length + max((end for _, end in spans), default=0)
        places = tuple(sorted((8 + length + int(start), 8 + length + int(end)) for start, end in spans))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: damaged safetensors file ({type(error).__name__})") from error
    if size != expected:
        raise ModelError(f"{path}: {size} bytes instead of {expected} (an unfinished download?)")
    return WeightFile(path, size, header, places)


def read_adapter(path: Path) -> Adapter:
    """An adapter as mlx-lm's training leaves it. Raises ModelError, in one line, for a folder that is none."""
    config, weights = path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS
    if not path.is_dir():
        raise ModelError(f"{path}: no such adapter folder")
    for file in (config, weights):
        if not file.is_file():
            raise ModelError(f"{path}: not an adapter of mlx-lm (no {file.name})")
    try:
        content = config.read_bytes()
        if not isinstance(json.loads(content), dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: {error}") from error
    return Adapter(path, content, _read_weight_file(weights))


def fingerprint(path: Path, files: list[WeightFile], adapter: Adapter | None = None) -> bytes:
    """32 bytes that stand for the content of a model: its config and its weights, not names or times.

    sha256 over length-prefixed parts: config.json (and hf_quant_config.json, which mlx-lm reads
    too), the number of weight files, and for each in name order its size, its header, and its data; then the
    same of an adapter. The tokenizer is not part of it: cache keys are made of token ids.

    Of a file up to 256 MiB all data counts, so any change changes the fingerprint. Of a larger one each tensor
    counts with its first, middle and last KiB and one KiB at least every 4 MiB between, so new values
    of any tensor, or of any 4 MiB of it, change it too. That is 0.03% of the bytes: 26,000 reads for 100 GB in
    tensors of 128 MiB, which took 0.2 s from memory and take 2 s at 64 microseconds a read from an SSD (tried by hand).
    """
    digest = hashlib.sha256(b"omlx model fingerprint 2")
    for name in ("config.json", "hf_quant_config.json"):
        file = path / name
        _add(digest, file.read_bytes() if file.is_file() else b"")
    _add(digest, len(files).to_bytes(8, "little"))
    for weights in files:
        _add_weights(digest, weights)
    _add(digest, b"" if adapter is None else b"adapter")
    if adapter is not None:
        _add(digest, adapter.config)
        _add_weights(digest, adapter.weights)
    return digest.digest()


def _add_weights(digest: "hashlib._Hash", weights: WeightFile) -> None:
    _add(digest, weights.size.to_bytes(8, "little"))
    _add(digest, weights.header)
    with weights.path.open("rb", buffering=0) as data:
        if weights.size > _HASH_WHOLE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        for start, length in _sampled_ranges(weights):
            _add(digest, os.pread(data.fileno(), length, start))


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _sampled_ranges(weights: WeightFile) -> Iterator[tuple[int, int]]:
    """(start, length) of what `fingerprint` reads from one file."""
    if weights.size <= _HASH_WHOLE:
        step = 8 << 20
        yield from ((start, step) for start in range(0, weights.size, step))
        return
    for start, end in weights.spans:
        last = end - start - _SAMPLE_BYTES
        if last <= 2 * _SAMPLE_BYTES:
            yield start, end - start
            continue
        steps = 2 * -(-last // (2 * _SAMPLE_EVERY))  # even, so that the middle is among them
        yield from ((start + last * i // steps, _SAMPLE_BYTES) for i in range(steps + 1))


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
