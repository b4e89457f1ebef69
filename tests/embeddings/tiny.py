"""Tiny random BERTs as model folders, and what they should give: the same arithmetic in numpy and double precision."""

import json
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

HIDDEN, HEADS, LAYERS, MLP, POSITIONS = 32, 4, 2, 64, 96
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, " "]
PAD, UNKNOWN, CLS, SEP = range(4)

Array = NDArray[np.float64]


def make_tiny_encoder(
    folder: Path, kind: str = "embedding", *, seed: int = 0, pooling: str | None = None, **config: Any
) -> Path:
    """A random BERT of kind "embedding" or "rerank" whose tokens are lower-case letters; returns the folder.

    `pooling` ("cls", "mean", ...) is written as sentence-transformers does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = "BertForSequenceClassification" if kind == "rerank" else "BertModel"
    fields: dict[str, Any] = {
        "architectures": [head], "model_type": "bert", "vocab_size": len(_WORDS), "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": MLP, "pad_token_id": PAD,
        "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }  # fmt: skip
    if kind == "rerank":
        fields["id2label"] = {"0": "LABEL_0"}
    (folder / "config.json").write_text(json.dumps(fields | config))
    save_file(_weights(kind, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def _weights(kind: str, seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    weights: dict[str, NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        weights[f"{name}.weight"] = (rng.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    def linear(name: str, columns: int, rows: int) -> None:
        matrix(name, rows, columns)
        weights[f"{name}.bias"] = (rng.standard_normal(rows) * 0.3).astype(np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = (1 + rng.standard_normal(HIDDEN) * 0.1).astype(np.float32)
        weights[f"{name}.bias"] = (rng.standard_normal(HIDDEN) * 0.1).astype(np.float32)

    prefix = "bert." if kind == "rerank" else ""
    for name, rows in (("word", len(_WORDS)), ("position", POSITIONS), ("token_type", 2)):
        matrix(f"{prefix}embeddings.{name}_embeddings", rows, HIDDEN)
    norm(f"{prefix}embeddings.LayerNorm")
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{at}.attention.self.{part}", HIDDEN, HIDDEN)
        linear(f"{at}.attention.output.dense", HIDDEN, HIDDEN)
        linear(f"{at}.intermediate.dense", HIDDEN, MLP)
        linear(f"{at}.output.dense", MLP, HIDDEN)
        norm(f"{at}.attention.output.LayerNorm")
        norm(f"{at}.output.LayerNorm")
    linear(f"{prefix}pooler.dense", HIDDEN, HIDDEN)
    if kind == "rerank":
        linear("classifier", HIDDEN, 1)
    return weights


def _tokenizer() -> Tokenizer:
    """With a truncation and a padding of its own, as some models' files have; omlx uses neither."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def ids_of(text: str) -> list[int]:
    """The token ids of a text, without the special ones."""
    return [_WORDS.index(letter) if letter in _WORDS[4:] else UNKNOWN for letter in text]


class Reference:
    """What a folder of `make_tiny_encoder` gives, computed one text at a time."""

    def __init__(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        self._weights = {name.removeprefix("bert."): value.astype(np.float64) for name, value in weights.items()}

    def vector(self, text: str, pooling: str = "mean") -> Array:
        """A text's embedding, of length 1."""
        tokens = self._tokens([CLS, *ids_of(text), SEP])
        pooled: Array = tokens[0] if pooling == "cls" else tokens.mean(axis=0)
        return pooled / np.linalg.norm(pooled)

    def score(self, query: str, document: str) -> float:
        """The sigmoid of the classifier's logit for a pair."""
        first, second = [CLS, *ids_of(query), SEP], [*ids_of(document), SEP]
        tokens = self._tokens(first + second, [0] * len(first) + [1] * len(second))
        logit = self._linear(np.tanh(self._linear(tokens[0], "pooler.dense")), "classifier")
        return 1 / (1 + math.exp(-float(logit[0])))

    def _tokens(self, ids: Sequence[int], types: Sequence[int] | None = None) -> Array:
        """The last layer's state of each token."""
        w = self._weights
        x = w["embeddings.word_embeddings.weight"][list(ids)] + w["embeddings.position_embeddings.weight"][: len(ids)]
        x = x + w["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}"
            attended = self._linear(self._attention(x, f"{at}.attention.self"), f"{at}.attention.output.dense")
            x = self._norm(x + attended, f"{at}.attention.output.LayerNorm")
            inner = self._linear(x, f"{at}.intermediate.dense")
            inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
            x = self._norm(x + self._linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        return x

    def _attention(self, x: Array, name: str) -> Array:
        q, k, v = (self._linear(x, f"{name}.{part}") for part in ("query", "key", "value"))
        heads = []
        for head in np.split(np.arange(HIDDEN), HEADS):
            scores = q[:, head] @ k[:, head].T / math.sqrt(HIDDEN // HEADS)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head])
        return np.concatenate(heads, axis=1)

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
