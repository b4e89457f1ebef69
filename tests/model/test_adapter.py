"""Adapters: what they change, and one clear line for each kind of bad one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omlx.errors import ModelError
from omlx.model import loader
from tests.adapters import SCALE, make_adapter

PROMPT = mx.array([[1, 2, 3, 4]])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter")


def test_an_adapter_adds_its_product_to_the_weights(tiny_model_dir: Path, adapter: Path) -> None:
    base, adapted = loader.load(tiny_model_dir), loader.load(tiny_model_dir, adapter_path=adapter)
    assert (adapted.name, adapted.dtype, adapted.context_length) == ("tiny", "float32", 4096)
    with_adapter = adapted.model(PROMPT)
    assert not mx.allclose(with_adapter, base.model(PROMPT), atol=1e-2)
    assert mx.array_equal(with_adapter, adapted.model(PROMPT))  # no dropout
    trained = load_file(adapter / "adapters.safetensors")
    for number, layer in enumerate(base.model.model.layers):
        name = f"model.layers.{number}.self_attn.q_proj"
        delta = mx.array(trained[f"{name}.lora_a"] @ trained[f"{name}.lora_b"]).T
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight + SCALE * delta
    np.testing.assert_allclose(with_adapter, base.model(PROMPT), atol=1e-3)


def test_the_fingerprint_names_an_adapter_by_its_content(tiny_model_dir: Path, adapter: Path, tmp_path: Path) -> None:
    def content(path: Path | None) -> bytes:
        return loader.load(tiny_model_dir, adapter_path=path).fingerprint

    before, file = content(adapter), adapter / "adapters.safetensors"
    assert before != content(None)
    assert content(Path(shutil.copytree(adapter, tmp_path / "elsewhere"))) == before
    original, stat = file.read_bytes(), file.stat()
    make_adapter(adapter, seed=1)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size and content(adapter) != before
    file.write_bytes(original)
    assert content(adapter) == before
    make_adapter(adapter, lora_parameters={"rank": 4, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    assert content(adapter) != before


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "adapters.safetensors")
    change(weights)
    save_file(weights, folder / "adapters.safetensors")


BAD = {
    "no folder": (shutil.rmtree, "no such adapter folder"),
    "no config": (remove("adapter_config.json"), r"not an adapter of mlx-lm \(no adapter_config\.json\)"),
    "no weights": (remove("adapters.safetensors"), r"not an adapter of mlx-lm \(no adapters\.safetensors\)"),
    "bad json": (config("{"), r"adapter_config\.json: not valid JSON"),
    "no object": (config("[]"), r"adapter_config\.json: not a JSON object"),
    "other kind": (config('{"peft_type": "LORA", "r": 8}'), "num_layers"),
    "no scale": (
        config(json.dumps({"num_layers": 2, "lora_parameters": {"rank": 4, "dropout": 0}})),
        "missing.*scale",
    ),
    "truncated": (
        lambda folder: (folder / "adapters.safetensors").write_bytes(
            (folder / "adapters.safetensors").read_bytes()[:-100]
        ),
        "unfinished download",
    ),
    "of another model": (
        lambda folder: edit_weights(
            folder, lambda w: w.update({"model.layers.7.lora_a": np.zeros((1, 1), np.float32)})
        ),
        r"model\.layers\.7\.lora_a",
    ),
    "wrong shape": (
        lambda folder: edit_weights(
            folder, lambda w: w.update({"model.layers.0.self_attn.q_proj.lora_a": np.zeros((8, 4), np.float32)})
        ),
        "shape",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_gets_one_clear_line(tiny_model_dir: Path, adapter: Path, kind: str) -> None:
    damage, reason = BAD[kind]
    damage(adapter)
    with pytest.raises(ModelError, match=reason) as error:
        loader.load(tiny_model_dir, adapter_path=adapter)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert str(adapter) in str(error.value)
