"""What a model folder is for: text, text about images, embeddings, or scores. Read from its files, without MLX."""

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omlx.errors import ModelError
from omlx.model.folder import read_config
from omlx.model.json_file import read_json, read_object
from omlx.model.weights import read_header, weight_paths

ModelKind = Literal["text", "vision", "embedding", "rerank"]
WRITERS: tuple[ModelKind, ...] = ("text", "vision")
"""The kinds of models that write text; those of kind "vision" take images as well."""

VISION_TYPES = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
"""The model types whose images omlx can handle (`vision_families.FAMILIES`)."""

INSTALL = "pip install 'omlx[vision]'"

POOLING_CONFIG = "1_Pooling/config.json"
"""How the vectors of tokens become one, in folders as sentence-transformers writes them."""

LENGTH_CONFIG = "sentence_bert_config.json"

_ENCODERS = frozenset({"bert", "modernbert", "xlm-roberta", "xlm_roberta"})

# Any of these in a config makes it a vision model's, unless the value is empty.
_VISION_KEYS = (
    "vision_config", "vision_tower", "mm_vision_tower", "vision_encoder", "vision_model", "visual", "img_processor",
    "image_token_id", "image_token_index", "image_token", "image_start_token_id", "vision_start_token_id",
)  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, "", {}, [])
_VISION_TENSORS = (b"vision", b"visual")
_IMAGE_SETTINGS = ("image_processor_type", "image_mean", "patch_size", "do_rescale")


class ModelUse(NamedTuple):
    """What a model is served as. `note`: of a vision model that is served as a text model, why."""

    kind: ModelKind
    note: str = ""


def model_kind(path: Path) -> ModelKind:
    """What the model in a folder does. A folder that cannot be read counts as text: loading it says what is wrong."""
    return model_use(path).kind


def model_use(path: Path, adapter: bool = False) -> ModelUse:
    """What the model in a folder is served as, with an adapter or without; as `model_kind`.

    A model of a chat family that was trained for embeddings is known by sentence-transformers' modules.json.
    """
    files = [path / name for name in ("config.json", "modules.json", "preprocessor_config.json")]
    stamps = tuple(map(_stamp, [*files, *weight_paths(path)]))
    return _use(path, adapter, find_spec("mlx_vlm") is not None, stamps)


@lru_cache(maxsize=1024)
def _use(path: Path, adapter: bool, extra: bool, stamps: tuple[tuple[int, ...], ...]) -> ModelUse:
    """Read again when a stamp changes: models are listed often, and configs may be large."""
    try:
        config = read_config(path)
        encoder = config["model_type"] in _ENCODERS or config["model_type"].endswith("_embedding")
        if encoder and _is_classifier(config):
            return ModelUse("rerank")
        if encoder or (path / "modules.json").is_file():
            return ModelUse("embedding")
        if not _is_vision_model(config, path):
            return ModelUse("text")
        lack = _vision_lack(config, path, adapter, extra)
    except ModelError:
        return ModelUse("text")
    return ModelUse("text", lack) if lack else ModelUse("vision")


def _stamp(file: Path) -> tuple[int, ...]:
    """Changes with the file; empty if there is none."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _is_vision_model(config: dict[str, Any], path: Path) -> bool:
    if any(config.get(key) not in _EMPTY for key in _VISION_KEYS):
        return True
    file = path / "preprocessor_config.json"
    return os.path.isfile(file) and any(key in read_object(file) for key in _IMAGE_SETTINGS)


def _vision_lack(config: dict[str, Any], path: Path, adapter: bool, extra: bool) -> str:
    """Why a vision model can take no images here; empty if it can."""
    model_type = config["model_type"]
    if model_type not in VISION_TYPES:
        return f"images are supported for the model types {', '.join(VISION_TYPES)}, not for {model_type}"
    if not isinstance(config.get("vision_config"), dict):
        return "its config.json has no vision_config"
    if not any(word in read_header(file) for file in weight_paths(path) for word in _VISION_TENSORS):
        return "its weight files hold only the language part"
    if adapter:
        return "images do not work with an adapter"
    return "" if extra else f"images need the extra vision ({INSTALL})"


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
