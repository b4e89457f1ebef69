"""What a model folder is for: text, embeddings, or scores of documents. Read from its files, without MLX."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from omlx.errors import ModelError
from omlx.model.folder import read_config
from omlx.model.json_file import read_json, read_object

ModelKind = Literal["text", "embedding", "rerank"]

POOLING_CONFIG = "1_Pooling/config.json"
"""How the vectors of tokens become one, in folders as sentence-transformers writes them."""

LENGTH_CONFIG = "sentence_bert_config.json"

_ENCODERS = frozenset({"bert", "modernbert", "xlm-roberta", "xlm_roberta"})


def model_kind(path: Path) -> ModelKind:
    """What the model in a folder does. A folder that cannot be read counts as text: loading it says what is wrong.

    A model of a chat family that was trained for embeddings is known by sentence-transformers' modules.json.
    """
    return _kind(path, *(_stamp(path / name) for name in ("config.json", "modules.json")))


@lru_cache(maxsize=1024)
def _kind(path: Path, config_stamp: tuple[int, ...], modules_stamp: tuple[int, ...]) -> ModelKind:
    """Read again when a stamp changes: models are listed often, and configs may be large."""
    try:
        config = read_config(path)
    except ModelError:
        return "text"
    encoder = config["model_type"] in _ENCODERS or config["model_type"].endswith("_embedding")
    if encoder and _is_classifier(config):
        return "rerank"
    return "embedding" if encoder or modules_stamp else "text"


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with the file; empty if there is none."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _is_classifier(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def missing_layer(path: Path) -> str | None:
    """A dense layer that sentence-transformers puts behind the pooling and whose weights are not there to be loaded."""
    try:
        modules = read_json(path / "modules.json")
        layers = [str(module["path"]) for module in modules if str(module["type"]).endswith(".Dense")]
    except (ModelError, LookupError, TypeError):
        return None
    return next((layer for layer in layers if not (path / layer / "model.safetensors").is_file()), None)


def trained_length(path: Path) -> int | None:
    """The most tokens that sentence-transformers feeds to the model in this folder, if it says so."""
    try:
        length = read_object(path / LENGTH_CONFIG)["max_seq_length"]
    except (ModelError, LookupError, TypeError):
        return None
    return length if isinstance(length, int) and length > 0 else None
