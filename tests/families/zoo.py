"""Tiny random models of many families, built from a config alone with mlx-lm's model classes."""

import json
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from omlx.model.loader import LoadedModel
from omlx.model.runner import TextRunner
from omlx.testing import make_tiny_model

VOCAB = 120
EOS = VOCAB - 1
WINDOW = 24  # of every sliding-window and chunked layer: one and a half blocks of 16

_PLAIN: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_SLIDING = _PLAIN | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN | _EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3_text": _PLAIN | {"num_hidden_layers": 3, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    "gpt_oss": _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral3": {"text_config": _PLAIN | {"model_type": "llama"}},
    "ministral3": _SLIDING
    | {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        }
    },
    "phi3": _PLAIN,
    "mamba2": _PLAIN
    | {
        "num_heads": 4,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
        "intermediate_size": 32,
    },
    "falcon_h1": _PLAIN
    | {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 1.0,
    },
    "granitemoehybrid": _PLAIN
    | {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.35,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "qwen3_next": _PLAIN
    | _EXPERTS
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "shared_expert_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "lfm2": _PLAIN
    | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "deepseek_v3": _PLAIN
    | {
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "llama4": {
        "text_config": _PLAIN
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,  # the fourth attends to everything
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
            "floor_scale": 64,
        }
    },
    "cohere2": _PLAIN
    | {
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
    },
}


# Families whose code in mlx-lm does not work in batches, or depends on where a prompt is cut.
UNEVEN: dict[str, dict[str, Any]] = {
    "gemma2": _PLAIN,
    "phi3small": _PLAIN
    | {
        "vocab_size": 100400,  # ids from 100256 on are never sampled: part of its code
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 48,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 4,
    },
    "gpt_bigcode": {
        "n_embd": 32,
        "n_layer": 2,
        "n_inner": 48,
        "n_head": 4,
        "n_positions": 4096,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
    },
    "nemotron-nas": _PLAIN
    | {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "plamo3": _PLAIN | {"num_hidden_layers": 3, "window_size": WINDOW, "sliding_window_pattern": 3},
    "afm7": {
        "vocab_size": VOCAB,
        "hidden_dim": 32,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "minimax": _PLAIN
    | {
        "shared_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rotary_dim": 4,
        "head_dim": 8,
    },
    "minimax_m3_vl": {
        "text_config": _PLAIN
        | {
            "model_type": "minimax_m3_vl_text",
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1],
            "sparse_attention_freq": [0, 1],
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        }
    },
}


_WIDE = {"hidden_size": 128, "head_dim": 32, "block_dim": 128, "kv_lora_rank": 32, "qk_rope_head_dim": 32}


def tiny(family: str, *, seed: int = 0, wide: bool = False, window: int = WINDOW, **more: Any) -> Any:
    """A model of the family with random weights, large enough that greedy answers vary with the prompt.

    `wide`: with heads of 32 values, which can be quantised. `more` are other values for its config.
    """
    module = import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    changes: dict[str, Any] = {"sliding_window": window, "attention_chunk_size": window}
    config = _changed((CONFIGS | UNEVEN)[family], changes | (_WIDE if wide and family != "mamba2" else {}) | more)
    model = module.Model(module.ModelArgs.from_dict({"model_type": family} | config))
    model.update(tree_map_with_path(_random, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def folder(path: Path, family: str) -> Path:
    """A model folder of the family, with the byte tokenizer of `omlx.testing`."""
    make_tiny_model(path)
    model = tiny(family, vocab_size=260)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = (CONFIGS | UNEVEN)[family] | {"model_type": family, "vocab_size": 260, "eos_token_id": 258}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The config with other values for keys that it has."""
    return {
        key: _changed(value, changes) if isinstance(value, dict) else changes.get(key, value)
        for key, value in config.items()
    }


def _random(path: str, parameter: mx.array) -> mx.array:
    """Matrices are drawn anew; the vectors that shape a recurrent state are kept as the model made them."""
    del path
    if parameter.ndim < 2 or not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    return mx.random.normal(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)


def runner(family: str, kv_bits: int | None = None, dtype: mx.Dtype = mx.float32, **changes: Any) -> TextRunner:
    """The product's runner over such a model."""
    model = tiny(family, **changes)
    model.set_dtype(dtype)
    loaded = LoadedModel(
        name=family, path=Path(family), model=model, tokenizer=None, config={},
        context_length=4096, context_source="here", vocab_size=VOCAB, eos_token_ids=frozenset({EOS}),
        fingerprint=sha256(f"{family} {changes}".encode()).digest(), dtype="float32",
    )  # fmt: skip
    return TextRunner(loaded, kv_bits)
