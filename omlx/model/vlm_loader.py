"""Load a vision-language model: mlx-vlm's model, and its family's way with pictures.

mlx-vlm is the extra `vision`. A vision model whose images omlx cannot handle (`model_kind.model_use`) is served as a
text model if mlx-lm can do that. Nothing in the folder is ever executed, and nothing is written into it.
"""

import logging
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_config

from omlx.errors import ModelError
from omlx.model.fingerprint import WeightHashes, fingerprint
from omlx.model.foreign import refusing
from omlx.model.json_file import read_object
from omlx.model.loader import LoadedModel, as_float32, assembled, check_loadable, load_steps
from omlx.model.model_kind import model_use
from omlx.model.progress import Progress, silent
from omlx.model.steps import Steps, elsewhere, evaluate, finish
from omlx.model.vision_families import FAMILIES
from omlx.model.vision_family import Files, VisionFamily
from omlx.model.weights import WeightFile, only_these_weights

log = logging.getLogger(__name__)

# mlx-vlm would change the file on disk for a moment to read these.
_UNREADABLE = b'"F8_E8M0"'
_EXTRA_END = "<end_of_utterance>"  # of Idefics3, whose config does not always name it


class VisionModel(NamedTuple):
    """A model that takes pictures, and how it does."""

    loaded: LoadedModel
    family: VisionFamily


def load_any(
    path: Path, name: str, adapter: Path | None = None, records: Path | None = None, progress: Progress = silent
) -> Steps[VisionModel | LoadedModel]:
    """A model with its way with pictures, if it is of kind "vision", else like `loader.load`; in steps.

    Logs one warning for a vision model that is served as a text model. Raises ModelError.
    """
    use = model_use(path.expanduser(), adapter is not None)
    if use.kind == "vision":
        return (yield from vision_steps(path, name, records, progress))
    try:
        model = yield from load_steps(path, name, adapter, records, progress)
    except ModelError as error:
        if not use.note:
            raise
        raise ModelError(f"{error} (this is a vision model: {use.note})") from error
    if use.note:
        log.warning("vision model %s is served as a text model: %s", name, use.note)
    return model


def load_vision(
    path: Path, name: str | None = None, records: Path | None = None, progress: Progress = silent
) -> VisionModel:
    """Load a folder of kind "vision". On the CPU device all weights become float32, as in `loader.load`.

    Raises ModelError, in one line, for a folder that cannot be used.
    """
    return finish(vision_steps(path, name, records, progress))


def vision_steps(
    path: Path, name: str | None = None, records: Path | None = None, progress: Progress = silent
) -> Steps[VisionModel]:
    """`load_vision` in steps, for the MLX thread."""
    path = path.expanduser()
    files = yield from elsewhere(check_loadable, path)
    if any(_UNREADABLE in file.header for file in files):
        raise ModelError(f"{path}: weights of type F8_E8M0 cannot be loaded; convert the model first")
    name = name or path.name
    with WeightHashes(files, records, progress, name) as hashes:
        model = yield from _load_model(path, files, progress)
        described = yield from elsewhere(_read_files, path, files)
        of_weights = partial(fingerprint, path, files, None, hashes)
        loaded = yield from assembled(name, path, model, described.config, of_weights)
    try:
        with refusing(f"{path}: its image processor"):
            family = FAMILIES[described.config["model_type"]](model, described, loaded.tokenizer)
    except ModelError as error:
        raise error if str(path) in str(error) else ModelError(f"{path}: {error}") from error
    return VisionModel(_with_end(loaded), family)


def _load_model(path: Path, files: list[WeightFile], progress: Progress) -> Steps[nn.Module]:
    """Lazily up to the end, so that quantised weights can be freed while float32 ones are made."""
    with only_these_weights(path, files) as view, refusing(path, str(view)):
        utils = import_module("mlx_vlm.utils")
        model: nn.Module = utils.load_model(view, lazy=True)
        if mx.default_device() == mx.cpu:
            model = as_float32(model)
        yield from evaluate(model, progress)
    return model


def _read_files(path: Path, weights: list[WeightFile]) -> Files:
    preprocessor = _read(path / "preprocessor_config.json")
    with only_these_weights(path, weights) as view, refusing(path, str(view)):
        config = load_config(view)
    files = Files(config, preprocessor, _read(path / "processor_config.json"))
    if not files.image_settings():
        raise ModelError(f"{path}: no preprocessor_config.json, so it is not known what its pictures have to be like")
    return files


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    return read_object(file) if file.is_file() else {}


def _with_end(loaded: LoadedModel) -> LoadedModel:
    end = loaded.tokenizer.get_vocab().get(_EXTRA_END)
    if end is None:
        return loaded
    ends = loaded.eos_token_ids | {end}
    loaded.tokenizer.eos_token_ids = ends
    return replace(loaded, eos_token_ids=ends)
