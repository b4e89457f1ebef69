"""The tiny test model as a GGUF file, the way converters write llama models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.model.gguf_writer import Tensor, plain, quantised, write_gguf

HEADS, KV_HEADS = 4, 2
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_metadata(model: Path) -> dict[str, Any]:
    """What a GGUF file says about the tiny model in the folder `model`."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = dict(sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]))
    special = [token["content"] for token in tokenizer["added_tokens"]]
    template = json.loads((model / "tokenizer_config.json").read_text())["chat_template"]
    tokens = [*vocabulary, *special, "<|spare|>"]
    return {
        "general.architecture": "llama",
        "general.name": "Tiny",
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocabulary) + [3] * (len(tokens) - len(vocabulary)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.unknown_token_id": 256,
        "tokenizer.ggml.padding_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def tiny_tensors(model: Path, kind: str = "F32") -> dict[str, Tensor]:
    """The tiny model's tensors under GGUF's names and in its row order; matrices as `kind`."""
    tensors = {}
    for name, array in load_file(model / "model.safetensors").items():
        gguf_name = _renamed(name.removesuffix(".weight")) + ".weight"
        if ".attn_q." in gguf_name or ".attn_k." in gguf_name:
            array = _permuted(array, HEADS if ".attn_q." in gguf_name else KV_HEADS)
        if array.ndim == 1 or kind in ("F32", "F16", "BF16"):
            tensors[gguf_name] = plain(array, kind if array.ndim > 1 else "F32")
        else:
            tensors[gguf_name], _ = quantised(array, kind)
    return tensors


def tiny_gguf(path: Path, model: Path, kind: str = "F32") -> Path:
    return write_gguf(path, tiny_metadata(model), tiny_tensors(model, kind))


def _renamed(name: str) -> str:
    plain_names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if name in plain_names:
        return plain_names[name]
    number, _, module = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_MODULES[module]}"


def _permuted(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """From halves to pairs: what a converter to GGUF does to rotated rows."""
    rows = array.shape[0] // heads
    halves = array.reshape(heads, 2, rows // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
