"""How many tokens a model takes, as its files say, and which of them says so."""

from collections.abc import Callable
from typing import Any, NamedTuple

DEFAULT_CONTEXT_LENGTH = 4096
"""Assumed, in tokens, for a model whose files do not say."""

UNLIMITED = (1 << 31) - 1
"""For recurrent models, whose state does not grow: positions are counted in 32 bits."""

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "n_ctx",
)
_UNBOUNDED = 10_000_000  # transformers writes absurdly large lengths for "not known"

# In their configs max_position_embeddings is the length after the scaling.
_SCALED_ALREADY = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text")


class ContextLength(NamedTuple):
    """In tokens, prompt and answer together; `source` says where the number comes from."""

    tokens: int
    source: str


def context_length(
    config: dict[str, Any], tokenizer_length: object = None, grows: Callable[[], bool] = lambda: True
) -> ContextLength:
    """The context length of a config.json.

    `tokenizer_length` is the tokenizer's model_max_length, if it has one. `grows` says whether the model's state grows
    with the text, as it does unless all layers are recurrent or have a window; asked only if the config says no length.
    """
    base = _base(config)
    scaled = _scaled(config, base, tokenizer_length)
    if scaled is not None:
        return scaled
    if base is not None:
        return base
    if not grows():
        return ContextLength(UNLIMITED, "recurrent, limited by memory only")
    if (length := _length(tokenizer_length)) is not None:
        return ContextLength(length, "the tokenizer's model_max_length")
    return ContextLength(DEFAULT_CONTEXT_LENGTH, "assumed, as no file of the model says it")


def lookup(config: dict[str, Any], key: str) -> Any:
    """A value of the config, or of the part of it that describes the language model."""
    text = config.get("text_config")
    nested = text.get(key) if isinstance(text, dict) else None
    return config[key] if config.get(key) is not None else nested


def _length(value: object) -> int | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < _UNBOUNDED
    return int(value) if usable else None  # type: ignore[call-overload]


def _base(config: dict[str, Any]) -> ContextLength | None:
    """The length without regard to how positions are scaled."""
    lengths = {key: _length(lookup(config, key)) for key in _KEYS}
    key = next((key for key, length in lengths.items() if length is not None), None)
    # Command-R: max_position_embeddings is less than what it was trained for.
    if key is not None and (lengths["model_max_length"] or 0) > (lengths[key] or 0):
        key = "model_max_length"
    return None if key is None else ContextLength(lengths[key] or 0, f"{key} in config.json")


def _scaled(config: dict[str, Any], base: ContextLength | None, tokenizer_length: object) -> ContextLength | None:
    """The length where positions are scaled by a factor; None for kinds whose max_position_embeddings is the result
    (llama3, longrope, ...) and for what cannot be read.

    yarn, linear and dynamic stretch `original_max_position_embeddings`, or else max_position_embeddings. A linear or
    dynamic factor without an original length counts only as far as the tokenizer's length does not contradict it:
    some configs were changed to the result.
    """
    scaling = _scaling(config)
    kind, factor = str(scaling.get("rope_type") or scaling.get("type")), scaling.get("factor")
    plain = kind in ("linear", "dynamic")
    if not ("yarn" in kind or plain) or isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    original = _length(scaling.get("original_max_position_embeddings"))
    if original is None and plain and {config.get("model_type"), lookup(config, "model_type")} & set(_SCALED_ALREADY):
        return None
    start = original or (base.tokens if base is not None else None)
    if start is None or (tokens := _length(start * factor)) is None or tokens < start:
        return None
    name = "original_max_position_embeddings" if original else "max_position_embeddings"
    source = f"{kind}: {name} {start} x {factor:g} in config.json"
    most = _length(tokenizer_length) if plain and original is None else None
    if most is not None and most < tokens:
        return ContextLength(max(most, start), f"{source}, at most the tokenizer's model_max_length {most}")
    return ContextLength(tokens, source)


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    """How positions are scaled; of a config that says it for each type of layer, those that see all tokens."""
    for key in ("rope_scaling", "rope_parameters"):
        found = lookup(config, key)
        if isinstance(found, dict) and isinstance(found.get("full_attention"), dict):
            found = found["full_attention"]
        if isinstance(found, dict) and (found.get("rope_type") or found.get("type")):
            return found
    return {}
