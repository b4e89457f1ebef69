"""Turn a GGUF file of the llama architecture into an ordinary MLX model folder.

Quantised tensors keep their numbers: MLX's affine form (groups of 32, a float16 scale and bias
each) holds Q4_0, Q4_1 and Q8_0 exactly. Other types become float16.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from omlx.errors import ModelError
from omlx.model.folder import check_name, locked, models_folder, new_folder, safe_name
from omlx.model.foreign import refusing
from omlx.model.gguf_file import GgufHeader, read_header
from omlx.model.gguf_tokenizer import end_tokens, write_tokenizer
from omlx.model.progress import Progress, silent, watching

_READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")
_GROUP = 32

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"


def import_gguf(path: Path, home: Path, name: str | None = None, progress: Progress = silent) -> Path:
    """Convert a GGUF file into a model under `home` and return its folder.

    The name comes from the file's own unless given. Raises ModelError, in one line, if the file
    cannot be converted or the name is taken; then nothing is left behind.
    """
    target = models_folder(home) / check_name(name or safe_name(path.stem))
    with locked(target):
        if target.exists():
            raise ModelError(f"{target} exists already; give another name, or remove it first")
        with new_folder(target) as folder:
            convert(path, folder, progress)
    return target


def convert(path: Path, folder: Path, progress: Progress = silent) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer of a GGUF file into `folder`."""
    header = read_header(path)
    try:
        with refusing("damaged GGUF file"):
            _check(header)
            config = _config(header)
            write_tokenizer(header.metadata, config["max_position_embeddings"], folder)
            weights = _weights(_load(path), config)
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from error
    config["quantization"] = _quantization(weights)
    _save(weights, folder, progress)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_json(folder / "config.json", config)


def _check(header: GgufHeader) -> None:
    """Refuse what cannot be converted before reading any tensor."""
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"architecture {architecture!r} is not supported (only 'llama')")
    if header.metadata.get("llama.expert_count"):
        raise ModelError("mixture-of-experts models are not supported")
    if header.metadata.get("split.count", 1) > 1:
        raise ModelError("the file is one part of several; merge them first")
    unreadable = sorted({tensor.type for tensor in header.tensors.values()} - set(_READABLE))
    if unreadable:
        raise ModelError(
            f"tensors of type {', '.join(unreadable)} are not supported (supported: {', '.join(_READABLE)})"
        )


def _number(metadata: dict[str, Any], key: str, default: float | None = None) -> Any:
    value = metadata.get(f"llama.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"metadata llama.{key} is {'missing' if value is None else 'not a number'}")
    return value


def _config(header: GgufHeader) -> dict[str, Any]:
    """The config.json that mlx-lm's llama model reads, without the quantisation."""
    metadata = header.metadata
    hidden, heads = _number(metadata, "embedding_length"), _number(metadata, "attention.head_count")
    head_dim = _number(metadata, "attention.key_length", _number(metadata, "rope.dimension_count", hidden // heads))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _number(metadata, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata),
        "max_position_embeddings": _number(metadata, "context_length"),
        "vocab_size": header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "torch_dtype": "float16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(metadata),
    }
    if not 0 < config["num_hidden_layers"] <= len(header.tensors):
        raise ModelError(f"{config['num_hidden_layers']} layers, but {len(header.tensors)} tensors")
    if head_dim * heads != hidden and "llama.attention.key_length" not in metadata:
        raise ModelError(f"{heads} heads of {head_dim} do not fit a width of {hidden}")
    return config


def _rope_scaling(metadata: dict[str, Any]) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": _number(metadata, "rope.scaling.factor")}
    raise ModelError(f"position scaling {kind!r} is not supported (only 'linear')")


def _load(path: Path) -> dict[str, mx.array]:
    try:
        weights = mx.load(str(path), format="gguf")
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"MLX cannot read it ({' '.join(str(error).split())})") from error
    assert isinstance(weights, dict)
    return weights


def _weights(tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, mx.array]:
    """The tensors under mlx-lm's names and in its row order; floats as float16. Sets the scaling of Llama 3."""
    factors = tensors.pop(_ROPE_FACTORS, None)
    if factors is not None:
        config["rope_scaling"] = _llama3_scaling(factors.tolist(), config)
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    weights = {}
    for name, array in tensors.items():
        module, part = _renamed(name)
        if (count := heads.get(module.partition(".layers.")[2].partition(".")[2])) is not None:
            array = _unpermuted(array, count)
        weights[f"{module}.{part}"] = array if array.dtype == mx.uint32 else array.astype(mx.float16)
    missing = sorted(set(_required(config)) - set(weights))
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    return weights


def _renamed(name: str) -> tuple[str, str]:
    """(module, part) in mlx-lm for a GGUF tensor name, for example blk.3.attn_q.weight."""
    stem, _, part = name.rpartition(".")
    if part in ("weight", "bias", "scales", "biases"):
        if stem in _NAMES:
            return _NAMES[stem], part
        block, _, rest = stem.partition(".")
        number, _, kind = rest.partition(".")
        if block == "blk" and number.isdecimal() and kind in _LAYER_NAMES:
            return f"model.layers.{number}.{_LAYER_NAMES[kind]}", part
    raise ModelError(f"tensor {name!r} is not part of a llama model")


def _required(config: dict[str, Any]) -> Iterator[str]:
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    for layer in range(config["num_hidden_layers"]):
        yield from (f"model.layers.{layer}.{module}.weight" for module in _LAYER_NAMES.values())


def _unpermuted(array: mx.array, heads: int) -> mx.array:
    """Rows of a q or k projection, per head from GGUF's pairs (0, 1), (2, 3) to halves, as mlx-lm rotates them."""
    rows = array.shape[0]
    if rows % (2 * heads):
        raise ModelError(f"{rows} rows cannot be {heads} heads")
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _llama3_scaling(factors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """The parameters behind Llama 3's per-frequency factors, which GGUF stores as a tensor.

    Only the factor differs between the published models; the result is checked against the tensor.
    """
    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = list(_llama3_factors(scaling, config["head_dim"], config["rope_theta"]))
    close = (math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=False))
    if len(factors) != len(expected) or not all(close):
        raise ModelError(f"position scaling by {_ROPE_FACTORS} is not that of Llama 3")
    return scaling


def _llama3_factors(scaling: dict[str, Any], head_dim: int, theta: float) -> Iterator[float]:
    """What each rotation's wavelength is stretched by: short ones not, long ones by `factor`, blended in between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    for i in range(0, head_dim, 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (i / head_dim))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - blend) / scaling["factor"] + blend)


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any] | None:
    """The `quantization` entry of config.json: the bits of most layers, and each other layer's own."""
    bits = {}
    for name, scales in weights.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * _GROUP)
    if not bits:
        return None
    usual = max(set(bits.values()), key=list(bits.values()).count)
    own = {module: _affine(value) for module, value in bits.items() if value != usual}
    return {**_affine(usual), **own}


def _affine(bits: int) -> dict[str, Any]:
    return {"group_size": _GROUP, "bits": bits, "mode": "affine"}


def _save(weights: dict[str, mx.array], folder: Path, progress: Progress) -> None:
    total = sum(array.nbytes for array in weights.values())
    try:
        with watching(folder, "converting", total, progress):
            mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    except (RuntimeError, OSError) as error:
        raise ModelError(f"{folder.parent}: cannot write the model ({error})") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
