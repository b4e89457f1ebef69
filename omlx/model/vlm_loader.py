"""Load a vision-language model: mlx-vlm's model, and its family's way with pictures.

mlx-vlm is the extra `vision`. Without it a folder that holds such a model is served as a text model if
mlx-lm can do that. Nothing in the folder is ever executed, and nothing is written into it.
"""

import logging
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config

from omlx.errors import ModelError
from omlx.model.folder import read_config
from omlx.model.foreign import refusing
from omlx.model.json_file import read_object
from omlx.model.loader import LoadedModel, as_float32, assembled, check_loadable, load
from omlx.model.vision_families import FAMILIES
from omlx.model.vision_family import Files, VisionFamily
from omlx.model.weights import WeightFile, only_these_weights

log = logging.getLogger(__name__)

INSTALL = "pip install 'omlx[vision]'"
_VISION_TENSORS = (b"vision", b"visual")
# mlx-vlm would change the file on disk for a moment to read these.
_UNREADABLE = b'"F8_E8M0"'
_EXTRA_END = "<end_of_utterance>"  # of Idefics3, whose config does not always name it


class VisionModel(NamedTuple):
    """A model that takes pictures, and how it does."""

    loaded: LoadedModel
    family: VisionFamily


def takes_pictures(path: Path) -> bool:
    """Whether a folder holds a vision-language model of a known family, and not only the text part of one.

    Raises ModelError for a folder that cannot be read.
    """
    path = path.expanduser()
    config = read_config(path)
    if config["model_type"] not in FAMILIES or not isinstance(config.get("vision_config"), dict):
        return False
    return any(word in file.header for file in check_loadable(path) for word in _VISION_TENSORS)


def load_any(path: Path, name: str, adapter: Path | None = None) -> VisionModel | LoadedModel:
    """A model with its way with pictures, if it takes some; else like `loader.load`.

    Without the extra, and with an adapter, it is loaded as a text model, if mlx-lm knows its type. Raises ModelError.
    """
    if not takes_pictures(path):
        return load(path, name, adapter)
    if adapter is None and _extra_installed():
        return load_vision(path, name)
    lack = f"needs the extra vision ({INSTALL})" if adapter is None else "does not work with an adapter"
    try:
        model = load(path, name, adapter)
    except ModelError as error:
        raise ModelError(f"{error}; that it takes images {lack}") from error
    log.warning("model %s is served as a text model: that it takes images %s", name, lack)
    return model


def _extra_installed() -> bool:
    return find_spec("mlx_vlm") is not None


def load_vision(path: Path, name: str | None = None) -> VisionModel:
    """Load a folder that `takes_pictures`. On the CPU device all weights become float32, as in `loader.load`.

    Raises ModelError, in one line, for a folder that cannot be used.
    """
    path = path.expanduser()
    files = check_loadable(path)
    if any(_UNREADABLE in file.header for file in files):
        raise ModelError(f"{path}: weights of type F8_E8M0 cannot be loaded; convert the model first")
    model = _load_model(path, files)
    described = _read_files(path)
    template = _chat_template(path, described)
    loaded = assembled(name or path.name, path, model, described.config, files, chat_template=template)
    try:
        with refusing(f"{path}: its image processor"):
            family = FAMILIES[described.config["model_type"]](model, described, loaded.tokenizer)
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error
    return VisionModel(_with_end(loaded), family)


def _load_model(path: Path, files: list[WeightFile]) -> nn.Module:
    """Lazily up to the end, so that quantised weights can be freed while float32 ones are made."""
    with only_these_weights(path, files) as view, refusing(path, str(view)):
        utils = import_module("mlx_vlm.utils")
        model: nn.Module = utils.load_model(view, lazy=True)
        if mx.default_device() == mx.cpu:
            model = as_float32(model)
        mx.eval(model.parameters())
    return model


def _read_files(path: Path) -> Files:
    preprocessor = _read(path / "preprocessor_config.json")
    with refusing(path):
        config = load_config(path)
    files = Files(config, preprocessor, _read(path / "processor_config.json"))
    if not files.image_settings():
        raise ModelError(f"{path}: no preprocessor_config.json, so it is not known what its pictures have to be like")
    return files


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    return read_object(file) if file.is_file() else {}


def _chat_template(path: Path, files: Files) -> str | None:
    """The chat template where transformers' tokenizers do not look for it; None if they find it themselves."""
    template = _read(path / "chat_template.json").get("chat_template")
    if template is None and not (path / "chat_template.jinja").is_file():
        own = _read(path / "tokenizer_config.json").get("chat_template")
        template = files.processor.get("chat_template") if own is None else None
    return template if isinstance(template, str) else None


def _with_end(loaded: LoadedModel) -> LoadedModel:
    end = loaded.tokenizer.get_vocab().get(_EXTRA_END)
    return loaded if end is None else replace(loaded, eos_token_ids=loaded.eos_token_ids | {end})
