"""The byte-level BPE tokenizer of a GGUF file, written as the files that mlx-lm reads.

transformers would want torch to read it, so it is built with `tokenizers`.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from omlx.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types in GGUF
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": "words",
    "smollm": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
}  # tokenizer.ggml.pre -> how text is split before BPE
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def write_tokenizer(metadata: dict[str, Any], context_length: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ModelError for a kind that is not supported."""
    tokens, merges = _vocabulary(metadata)
    tokenizer = _build(metadata, tokens, merges)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _SPECIAL_TOKENS.items():
        if key in metadata:
            config[role] = _token(tokens, metadata[key])
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def end_tokens(metadata: dict[str, Any]) -> list[int]:
    """The ids of the tokens that end an answer."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return list(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"tokenizer kind {kind!r} is not supported (only byte-level BPE, 'gpt2')")
    if split not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"pre-tokenizer {split!r} is not supported (supported: {known})")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelError("the tokenizer's tokens or merges are missing")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(set(tokens)) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise ModelError("the tokenizer's tokens or merges are damaged")
    return tokens, [(left, right) for left, right in pairs]


def _build(metadata: dict[str, Any], tokens: list[str], merges: list[tuple[str, str]]) -> Tokenizer:
    style = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style == "llama3"))
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens, style)
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def _pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    if style == "llama3":
        split = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if style == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _post_processor(metadata: dict[str, Any], tokens: list[str], style: str) -> processors.PostProcessor:
    """Puts the begin-of-text token first where the file asks for it (Llama 3 means it even if it does not say so)."""
    plain = processors.ByteLevel(trim_offsets=False)
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is None or not metadata.get("tokenizer.ggml.add_bos_token", style == "llama3"):
        return plain
    token = _token(tokens, begin)
    template = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, begin)])
    return processors.Sequence([plain, template])


def _token(tokens: list[str], number: int) -> str:
    if not 0 <= number < len(tokens):
        raise ModelError(f"special token {number} is outside the vocabulary of {len(tokens)}")
    return tokens[number]
