"""Loading model folders: what is known of a good one, and one clear line for each kind of bad one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from omlx.errors import ModelError
from omlx.model import loader
from omlx.model.context import context_length
from omlx.testing import make_tiny_model

cpu_only = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="only on CPU are weights made float32")


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})


def test_a_good_folder(tiny_model_dir: Path) -> None:
    model = loader.load(tiny_model_dir)
    assert (model.name, model.path) == ("tiny", tiny_model_dir)
    assert (model.context_length, model.vocab_size, model.dtype) == (4096, 260, "float32")
    assert model.eos_token_ids == {258}
    assert len(model.fingerprint) == 32
    assert model.model(mx.array([[1, 2]])).shape == (1, 2, 260)
    assert model.tokenizer.decode(model.tokenizer.encode("hé")) == "hé"


def test_the_name_can_be_given(tiny_model_dir: Path) -> None:
    assert loader.load(tiny_model_dir, "org/tiny").name == "org/tiny"


def test_greedy_answers_vary_with_the_prompt_and_the_seed(tiny_model_dir: Path, tmp_path: Path) -> None:
    def answer(folder: Path, prompt: str) -> list[int]:
        loaded = loader.load(folder)
        tokens = loaded.tokenizer.encode(prompt)
        for _ in range(16):
            tokens.append(int(mx.argmax(loaded.model(mx.array([tokens]))[0, -1])))
        return tokens[-16:]

    answers = [answer(tiny_model_dir, "abc"), answer(tiny_model_dir, "xbc")]
    answers.append(answer(make_tiny_model(tmp_path / "other", seed=1), "abc"))
    assert len(set(map(tuple, answers))) == 3
    assert all(len(set(tokens)) > 4 and all(token == 10 or 32 <= token < 127 for token in tokens) for tokens in answers)


def test_equal_arguments_make_equal_models(tiny_model_dir: Path, tmp_path: Path) -> None:
    again, other = make_tiny_model(tmp_path / "again"), make_tiny_model(tmp_path / "other", seed=1)
    assert loader.load(again).fingerprint == loader.load(tiny_model_dir).fingerprint
    assert loader.load(other).fingerprint != loader.load(tiny_model_dir).fingerprint


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@cpu_only
def test_on_cpu_weights_are_dequantised_to_float32(model: Path, mode: str) -> None:
    quantised = loader.load(model).model
    quantised.set_dtype(mx.float16)
    nn.quantize(quantised, group_size=32, bits=4, mode=mode)
    save_quantised(model, quantised, {"group_size": 32, "bits": 4, "mode": mode})
    loaded = loader.load(model)
    assert loaded.dtype == "float32"
    assert {str(array.dtype) for _, array in tree_flatten(loaded.model.parameters())} == {"mlx.core.float32"}
    layer = quantised.model.layers[0].mlp.up_proj
    if mode == "affine":
        scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        expected = mx.dequantize(layer.weight, scales, biases, group_size=32, bits=4)
        np.testing.assert_array_equal(loaded.model.model.layers[0].mlp.up_proj.weight, expected)


def save_quantised(folder: Path, model: nn.Module, quantization: dict[str, Any]) -> None:
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    edit(folder / "config.json", quantization=quantization)


def test_weights_in_several_files_are_one_model(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[:9], names[9:]), 1):
        save_file({name: weights[name] for name in part}, model / f"model-{number:05d}-of-00002.safetensors")
    assert loader.load(model).vocab_size == 260
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="Missing"):
        loader.load(model)


def test_context_length_comes_from_the_config_or_the_tokenizer_or_a_default(model: Path) -> None:
    edit(model / "config.json", max_position_embeddings=None, n_positions=123)
    assert loader.load(model).context_length == 123
    edit(model / "config.json", n_positions=None)
    edit(model / "tokenizer_config.json", model_max_length=77)
    assert loader.load(model).context_length == 77
    edit(model / "tokenizer_config.json", model_max_length=int(1e30))
    assert loader.load(model).context_length == loader.DEFAULT_CONTEXT_LENGTH


def test_values_of_a_nested_text_config_count(tiny_model_dir: Path) -> None:
    tokenizer = loader.load(tiny_model_dir).tokenizer
    config = {"text_config": {"max_position_embeddings": 99, "vocab_size": 300}}
    assert context_length(config).tokens == 99
    assert loader._vocab_size(config, tokenizer) == 300


def test_end_tokens_of_generation_config_count(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert loader.load(model).eos_token_ids == {256, 258}


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


BAD = {
    "no config": (remove("config.json"), r"no config\.json"),
    "bad json": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: not valid JSON \(Expecting"),
    "unknown type": (lambda folder: edit(folder / "config.json", model_type="nonsense"), "nonsense not supported"),
    "no such model": (lambda folder: edit(folder / "config.json", model_type="cache"), "cache"),
    "no weights": (remove("model.safetensors"), "no weights"),
    "missing size": (lambda folder: edit(folder / "config.json", hidden_size=None), "hidden_size"),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]),
        "unfinished download",
    ),
    "missing tensor": (
        lambda folder: edit_weights(folder, lambda weights: weights.pop("model.norm.weight")),
        r"Missing.*model\.norm\.weight",
    ),
    "extra tensor": (
        lambda folder: edit_weights(folder, lambda weights: weights.update(extra=np.zeros(1, np.float32))),
        "not in model.*extra",
    ),
    "wrong shape": (lambda folder: edit(folder / "config.json", intermediate_size=64), "shape"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    "bad tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer: "),
    "own code": (lambda folder: edit(folder / "config.json", model_file="evil.py"), "its own code"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_gets_one_clear_line(model: Path, kind: str) -> None:
    damage, reason = BAD[kind]
    damage(model)
    with pytest.raises(ModelError, match=reason) as error:
        loader.load(model)
    assert "\n" not in str(error.value)
    assert str(model) in str(error.value)
    assert len(str(error.value)) < 500


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        loader.load(tmp_path / "none")


def test_spaces_and_other_letters_in_the_path_are_fine(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_model_dir, tmp_path / "mödel 1 … ~x"))
    assert loader.load(path).name == "mödel 1 … ~x"


def test_a_path_that_mlx_lm_takes_for_a_pattern_is_fine(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_model_dir, tmp_path / "model[1]*?"))
    assert loader.load(path).name == "model[1]*?"


@pytest.mark.parametrize("known", [True, False])
def test_code_in_the_folder_is_never_run(model: Path, known: bool) -> None:
    marker = model / "was run"
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    code = {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoModel": "evil.Evil"}
    edit(model / "config.json", auto_map=code)
    edit(model / "tokenizer_config.json", auto_map=code)
    if known:  # transformers has a class of its own
        assert loader.load(model).vocab_size == 260
    else:
        edit(model / "tokenizer_config.json", tokenizer_class="Evil")
        with pytest.raises(ModelError, match="its own code"):
            loader.load(model)
    assert not marker.exists()
