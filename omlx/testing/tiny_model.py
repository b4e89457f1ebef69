"""A tiny model for tests: an ordinary model folder with random weights, made in milliseconds."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from omlx.testing.byte_tokenizer import write_byte_tokenizer, write_json

_HIDDEN = 64
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 16
_MLP = 128
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Queries and keys are large, so that attention is sharp and the answer depends on the whole prompt.
_LAYER_SHAPES = (
    ("self_attn.q_proj", _HEADS * _HEAD_DIM, _HIDDEN, 2.0),
    ("self_attn.k_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0),
    ("self_attn.v_proj", _KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0),
    ("self_attn.o_proj", _HIDDEN, _HEADS * _HEAD_DIM, 2.0),
    ("mlp.gate_proj", _MLP, _HIDDEN, 2.0),
    ("mlp.up_proj", _MLP, _HIDDEN, 2.0),
    ("mlp.down_proj", _HIDDEN, _MLP, 2.0),
)


def make_tiny_model(folder: Path, *, seed: int = 0, layers: int = 2, vocab: int = 260, context: int = 4096) -> Path:
    """Write a random llama with 64-wide layers (4 heads of 16, 2 KV heads, float32) into `folder`; return it.

    Its tokens 0 to 255 are bytes, 256 to 258 <|endoftext|>, <|im_start|> and <|im_end|> (the end of an
    answer); the chat format is ChatML. Weights are large enough that greedy answers vary with the
    prompt. Only printable ASCII and the newline are ever likely, so that texts are readable and an
    answer goes on up to its token limit. The same arguments give the same bytes.
    """
    if vocab < 256 + len(_SPECIAL):
        raise ValueError(f"vocab must be at least {256 + len(_SPECIAL)}, not {vocab}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed, layers, vocab), folder / "model.safetensors", metadata={"format": "mlx"})
    write_json(folder / "config.json", _config(layers, vocab, context))
    _write_tokenizer(folder, context)
    return folder


def _config(layers: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 257,
        "eos_token_id": 258,
    }


def _weights(seed: int, layers: int, vocab: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float) -> NDArray[np.float32]:
        values: NDArray[np.float32] = (rng.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)
        return values

    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {"model.embed_tokens.weight": matrix(vocab, _HIDDEN, _HIDDEN**0.5), "model.norm.weight": ones}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns, gain in _LAYER_SHAPES:
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns, gain)
        weights[f"{prefix}.input_layernorm.weight"] = ones
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones
    head = matrix(vocab, _HIDDEN, 4.0)
    head[[token for token in range(vocab) if not (token == 10 or 32 <= token < 127)]] = 0.0
    weights["lm_head.weight"] = head
    return weights


def _write_tokenizer(folder: Path, context: int) -> None:
    end, start, stop = _SPECIAL
    tokens = {"bos_token": start, "eos_token": stop, "unk_token": end, "pad_token": end}
    write_byte_tokenizer(folder, _SPECIAL, tokens | {"model_max_length": context, "chat_template": _CHAT_TEMPLATE})
