"""Models that read a text whole and give one vector (or, for a question and a document, one score): mlx-vlm's.

The only user of mlx-vlm's embedding models. mlx-vlm is an optional extra, imported when the first one is loaded.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from omlx.errors import ModelError
from omlx.model.context import DEFAULT_CONTEXT_LENGTH
from omlx.model.folder import check_files, check_folder, read_config
from omlx.model.foreign import refusing
from omlx.model.json_file import read_json
from omlx.model.loader import as_float32
from omlx.model.model_kind import POOLING_CONFIG, ModelKind, missing_layer, model_kind, trained_length
from omlx.model.progress import Progress, silent
from omlx.model.steps import Steps, elsewhere, evaluate, finish
from omlx.model.weights import WeightFile, only_these_weights, read_weight_files
from omlx.request import EncoderInput, Text

# Encoded texts are large while the tokenizer holds them, so it gets only so many characters at a time.
_CHARACTERS_AT_A_TIME = 1 << 20

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoder:
    """A loaded model. `run` belongs on the MLX thread, `tokenize` on any.

    `context_length` is in tokens. `dimensions` is the length of what `run` gives for an input: 1 for a model of
    kind "rerank".
    """

    name: str
    kind: ModelKind
    context_length: int
    vocab_size: int
    dimensions: int
    _pad: int
    _forward: Callable[..., mx.array]
    _whole: Tokenizer
    _cut: Tokenizer

    def tokenize(self, texts: Sequence[Text], cut: bool = False) -> list[EncoderInput]:
        """Texts, or (question, document) pairs, as inputs. `cut`: at most `context_length` tokens of each are kept,
        of a pair the whole question. Raises ValueError for a question that alone is too long for that."""
        tokenizer = self._cut if cut else self._whole
        inputs: list[EncoderInput] = []
        refused: Exception | None = None
        with refusing(f"model {self.name}: its tokenizer failed"):  # by a panic
            try:
                for part in _portions(texts):
                    inputs += [self._input(encoding) for encoding in tokenizer.encode_batch(part)]
            except Exception as error:  # tokenizers raises plain Exception
                refused = error
        if refused is not None:
            raise ValueError(" ".join(str(refused).split())) from refused
        return inputs

    def _input(self, encoding: Encoding) -> EncoderInput:
        return EncoderInput(encoding.ids, encoding.type_ids if self.kind == "rerank" else None)

    def run(self, inputs: Sequence[EncoderInput]) -> Vectors:
        """One pass over all inputs, padded to the longest; a row of `dimensions` for each, in their order."""
        shape = len(inputs), max(len(item.ids) for item in inputs)
        ids, mask, types = np.full(shape, self._pad, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, item in enumerate(inputs):
            length = len(item.ids)
            ids[row, :length], mask[row, :length] = item.ids, 1
            if item.types is not None:
                types[row, :length] = item.types
        found = self._forward(mx.array(ids), attention_mask=mx.array(mask), token_type_ids=mx.array(types))
        vectors: Vectors = np.array(found.astype(mx.float32))
        if not np.isfinite(vectors).all():
            raise ArithmeticError("the model gave numbers that are not finite")
        return vectors


def _portions(texts: Iterable[Text]) -> Iterable[list[Text]]:
    portion: list[Text] = []
    characters = 0
    for text in texts:
        portion.append(text)
        characters += len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
        if characters >= _CHARACTERS_AT_A_TIME:
            yield portion
            portion, characters = [], 0
    if portion:
        yield portion


def load_encoder(path: Path, name: str | None = None) -> Encoder:
    """Load a folder of kind "embedding" or "rerank"; on the MLX thread. `name` defaults to the folder's.

    As float32 on the CPU, like every model. Nothing in the folder is ever executed. Raises ModelError, in one line.
    """
    return finish(encoder_steps(path, name))


def encoder_steps(path: Path, name: str | None = None, progress: Progress = silent) -> Steps[Encoder]:
    """`load_encoder` in steps."""
    check_folder(path)
    config, kind = read_config(path), model_kind(path)
    check_files(path)
    files = read_weight_files(path)
    if layer := missing_layer(path):
        raise ModelError(f"{path}: its vectors pass a layer {layer!r} that has no model.safetensors")
    with refusing(path):
        whole = yield from elsewhere(_tokenizer, path)
        length = _context_length(path, config)
        model = yield from _load(path, files, kind, progress)
        encoder = Encoder(
            name=name or path.name, kind=kind, context_length=length, vocab_size=int(config.get("vocab_size", 0)),
            dimensions=0, _pad=int(config.get("pad_token_id") or 0), _forward=partial(_forward, model, kind),
            _whole=whole, _cut=_cutting(whole, length, kind),
        )  # fmt: skip
        return _tried(encoder)


def _tried(encoder: Encoder) -> Encoder:
    """The encoder after a first pass: what its family cannot do (a way of pooling, ...) is told when it is loaded."""
    (row,) = encoder.run(encoder.tokenize([("a", "b") if encoder.kind == "rerank" else "a"]))
    return replace(encoder, dimensions=len(row))


def _forward(model: nn.Module, kind: ModelKind, ids: mx.array, attention_mask: mx.array, **more: mx.array) -> mx.array:
    """On the MLX thread."""
    if kind == "rerank":
        return model(ids, attention_mask=attention_mask, **more).logits
    return model(ids, attention_mask=attention_mask).text_embeds


def _load(path: Path, files: list[WeightFile], kind: ModelKind, progress: Progress) -> Steps[nn.Module]:
    family = "reranker_loader:load_sequence_classification_model"
    load = _mlx_vlm(family if kind == "rerank" else "embedding_loader:load_embedding_model")
    with only_these_weights(path, files) as view, refusing(path, str(view)):
        model = load(view, lazy=True)
        if mx.default_device() == mx.cpu:
            model = as_float32(model)
        yield from evaluate(model, progress)
        if kind == "embedding":
            model.pooling_config = _pooling(path)
    return model


def _mlx_vlm(target: str) -> Callable[..., nn.Module]:
    module, function = target.split(":")
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(f"mlx_vlm.{module}"), function)
    except ImportError as error:
        raise ModelError(f"embeddings and reranking need mlx-vlm: pip install 'omlx[vision]' ({error})") from error
    return found


def _pooling(path: Path) -> dict[str, Any] | None:
    """How the folder says that vectors are pooled; None leaves it to the family."""
    file = path / POOLING_CONFIG
    return read_json(file) if file.is_file() else None


def _tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path}: no tokenizer.json, which embeddings need")
    with refusing(file):
        tokenizer = Tokenizer.from_file(str(file))
    # Some files ask for both, with lengths of their own.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cutting(whole: Tokenizer, length: int, kind: ModelKind) -> Tokenizer:
    """A copy, since truncation is a state of a tokenizer and not of a call."""
    tokenizer = Tokenizer.from_str(whole.to_str())
    tokenizer.enable_truncation(length, strategy="only_second" if kind == "rerank" else "longest_first")
    return tokenizer


def _context_length(path: Path, config: dict[str, Any]) -> int:
    """What the model was trained on, if it is said; else as many positions as it has."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:
        positions = DEFAULT_CONTEXT_LENGTH
    if str(config["model_type"]).replace("-", "_") == "xlm_roberta":
        positions -= int(config.get("pad_token_id") or 0) + 1  # positions are counted from behind the padding's id
    return min(positions, trained_length(path) or positions)
