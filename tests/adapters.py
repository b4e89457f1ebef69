"""Adapters for the tiny model, as mlx-lm's training leaves them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK, SCALE = 4, 2.0
_HIDDEN, _HEADS_OUT = 64, 64


def make_adapter(folder: Path, *, seed: int = 0, layers: int = 2, **config: Any) -> Path:
    """Random LoRA weights for every query projection of `make_tiny_model`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_a"] = rng.standard_normal((_HIDDEN, RANK)).astype(np.float32) / 8
        weights[f"{name}.lora_b"] = rng.standard_normal((RANK, _HEADS_OUT)).astype(np.float32) / 2
    save_file(weights, folder / "adapters.safetensors")
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.5, "keys": ["self_attn.q_proj"]}
    content = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": lora} | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder
