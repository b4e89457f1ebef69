"""Load a model folder: weights, tokenizer, and what the rest of omlx has to know about them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model, load_adapters, load_model, load_tokenizer

from omlx.cache import layer_kinds
from omlx.errors import ModelError
from omlx.model.chat_template import check_templates
from omlx.model.context import DEFAULT_CONTEXT_LENGTH, ContextLength, context_length, lookup
from omlx.model.end_of_turn import end_of_turn
from omlx.model.fingerprint import WeightHashes, fingerprint
from omlx.model.folder import (
    Adapter,
    ModelInfo,
    check_files,
    check_folder,
    find_model,
    list_models,
    read_adapter,
    read_config,
)
from omlx.model.foreign import refusing
from omlx.model.generation_config import end_tokens, read_generation_config
from omlx.model.json_file import read_object
from omlx.model.progress import Progress, silent
from omlx.model.steps import Steps, elsewhere, evaluate, finish
from omlx.model.template_files import read_templates
from omlx.model.weights import WeightFile, only_these_weights, read_weight_files

__all__ = ["DEFAULT_CONTEXT_LENGTH", "LoadedModel", "ModelInfo", "as_float32", "find_model", "list_models", "load"]

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_PROBES = ("a", "Hello, world 123", "\n\t ", "é 你好 🙂 \u200d\ufffd", "<|x|> </s> [INST]")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    `model` has evaluated weights; `dtype` is what most of its floating-point weights are ("float32").
    `vocab_size` is the width of its logits, which can exceed the tokenizer's vocabulary.
    `context_length` is in tokens, `context_source` says where it comes from. `fingerprint` is 32 bytes of
    `folder.fingerprint`. `eos_token_ids` are those of config.json, generation_config.json, the tokenizer and the chat
    template's end of turn. `sampling_defaults`: the fields of SamplingParams that generation_config.json gives.
    `template_defaults`: arguments of the chat template.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    context_length: int
    context_source: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    fingerprint: bytes
    dtype: str
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    template_defaults: Mapping[str, Any] = field(default_factory=dict)


def load(
    path: Path,
    name: str | None = None,
    adapter_path: Path | None = None,
    records: Path | None = None,
    progress: Progress = silent,
) -> LoadedModel:
    """Load a model folder. `name` defaults to the folder's. `adapter_path`: an adapter (LoRA, DoRA or full) of mlx-lm.

    On the CPU device the weights are dequantised and made float32, because quantised and half
    precision kernels are far slower there. Nothing in the folder is ever executed. `records` and `progress` are those
    of WeightHashes. Raises ModelError, in one line, for a folder that cannot be used.
    """
    return finish(load_steps(path, name, adapter_path, records, progress))


def load_steps(
    path: Path,
    name: str | None = None,
    adapter_path: Path | None = None,
    records: Path | None = None,
    progress: Progress = silent,
) -> Steps[LoadedModel]:
    """`load` in steps, for the MLX thread."""
    path = path.expanduser()
    files = yield from elsewhere(check_loadable, path)
    adapter = None if adapter_path is None else (yield from elsewhere(read_adapter, adapter_path.expanduser()))
    name = name or path.name
    with WeightHashes([*files, *([adapter.weights] if adapter else [])], records, progress, name) as hashes:
        model, config = yield from _load_weights(path, files, adapter, progress)
        weights_fingerprint = partial(fingerprint, path, files, adapter, hashes)
        return (yield from assembled(name, path, model, config, weights_fingerprint))


def assembled(
    name: str,
    path: Path,
    model: nn.Module,
    config: dict[str, Any],
    weights_fingerprint: Callable[[], bytes],
) -> Steps[LoadedModel]:
    """A model with its tokenizer, and what its folder says of it.

    `weights_fingerprint` may have to wait; it is called last. Raises ModelError.
    """
    generation = yield from elsewhere(read_generation_config, path, name)
    ends = _end_tokens(path, name, config) | generation.eos_token_ids
    tokenizer = yield from elsewhere(_load_tokenizer, path, name, ends)
    with refusing(path):
        length = _context_length(model, config, tokenizer)
    named = yield from elsewhere(weights_fingerprint)
    return LoadedModel(
        name=name,
        path=path,
        model=model,
        tokenizer=tokenizer,
        config=config,
        context_length=length.tokens,
        context_source=length.source,
        vocab_size=_vocab_size(config, tokenizer),
        eos_token_ids=frozenset(int(token) for token in tokenizer.eos_token_ids),
        dtype=_main_dtype(model),
        fingerprint=named,
        sampling_defaults=generation.sampling,
    )


def check_loadable(path: Path) -> list[WeightFile]:
    """The weight files of a folder that seems to hold all that a model needs. Raises ModelError, in one line."""
    check_folder(path)
    read_config(path)
    check_files(path)
    files = read_weight_files(path)
    if not any((path / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES[:3])})")
    return files


def _load_weights(
    path: Path, files: list[WeightFile], adapter: Adapter | None, progress: Progress
) -> Steps[tuple[nn.Module, dict[str, Any]]]:
    """Lazily up to the end, so that quantised weights can be freed while float32 ones are made."""
    with only_these_weights(path, files) as view:
        with refusing(path, str(view)):
            model, config = load_model(view, lazy=True, strict=True, trust_remote_code=False)
            if mx.default_device() == mx.cpu:
                model = as_float32(model)
        with refusing(path if adapter is None else adapter.path, str(view)):
            if adapter is not None:
                model = _with_adapter(model, adapter)
            yield from evaluate(model, progress)
    return model, config


def _with_adapter(model: nn.Module, adapter: Adapter) -> nn.Module:
    """The adapter's layers stay layers of their own, as in mlx-lm; their dropout is for training."""
    model = load_adapters(model, str(adapter.path))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    model.eval()
    return model


def as_float32(model: nn.Module) -> nn.Module:
    """The model for the CPU: float32, and nothing quantised if that can be.

    Scales become float32 first, so that the weights are not rounded to half precision on the way.
    """
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    left = {type(module).__name__ for _, module in model.named_modules() if "scales" in module}
    if left:
        log.warning("layers of kind %s stay quantised, which is slow on CPU", ", ".join(sorted(left)))
    return model


def _end_tokens(path: Path, name: str, config: dict[str, Any]) -> frozenset[int]:
    """Those that config.json names, for the whole model and for the part that is its language model."""
    ignored: list[str] = []
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    ends = frozenset[int]().union(*(end_tokens(part.get("eos_token_id"), ignored) for part in parts))
    if ignored:
        log.warning("model %s: values in config.json ignored: %s", name, "; ".join(ignored))
    return ends


def _load_tokenizer(path: Path, name: str, ends: frozenset[int]) -> TokenizerWrapper:
    """A tokenizer whose `eos_token_ids` are `ends`, its own, and the one that ends a turn in its chat template.

    trust_remote_code is given as False because transformers would otherwise ask on the terminal."""
    subject = f"{path}: tokenizer"
    if _has_own_code(path):
        subject = f"{path}: tokenizer: it needs its own code, which omlx never runs"
    with only_these_weights(path, []) as view, refusing(subject, str(view)):
        templates = read_templates(path, name)
        options = {"trust_remote_code": False} | ({} if templates is None else {"chat_template": templates})
        tokenizer = load_tokenizer(view, options, eos_token_ids=sorted(ends) or None)
        for text in _PROBES:
            # A damaged one panics (no Exception) at a text; that it refuses some texts is said to who sends them.
            with suppress(Exception):
                tokenizer.decode(tokenizer.encode(text))
        known = frozenset(tokenizer.eos_token_ids)
        if (end := end_of_turn(tokenizer, name, known)) is not None and end not in known:
            log.info("model %s: answers also end with the token %d, as its chat template's turns do", name, end)
            tokenizer.eos_token_ids = known | {end}
        check_templates(tokenizer, name)
    return tokenizer


def _has_own_code(path: Path) -> bool:
    """Whether the tokenizer names a class in a file of the folder."""
    try:
        return "AutoTokenizer" in read_object(path / "tokenizer_config.json").get("auto_map", {})
    except (ModelError, TypeError):
        return False


def _context_length(model: nn.Module, config: dict[str, Any], tokenizer: TokenizerWrapper) -> ContextLength:
    def grows() -> bool:
        return layer_kinds.grows(layer_kinds.new_cache(getattr(model, "language_model", model)))

    return context_length(config, getattr(tokenizer, "model_max_length", None), grows)


def _vocab_size(config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    size = lookup(config, "vocab_size")
    return size if isinstance(size, int) and size > 0 else len(tokenizer)


def _main_dtype(model: nn.Module) -> str:
    sizes: Counter[str] = Counter()
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")
