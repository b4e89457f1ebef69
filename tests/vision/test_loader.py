"""Folders of vision models: what is loaded, and what is said of those that cannot be."""

import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import save_file

from omlx.errors import ModelError
from omlx.model.loader import LoadedModel
from omlx.model.model_kind import VISION_TYPES, model_kind, model_use
from omlx.model.steps import finish
from omlx.model.vision_families import FAMILIES as FAMILY_CLASSES
from omlx.model.vlm_loader import VisionModel, load_any, load_vision
from omlx.model.vlm_runner import VLMRunner
from omlx.testing import make_tiny_model, make_tiny_vlm
from tests.dict_store import DictStore
from tests.vision.models import FAMILIES, VisionBench, folder, loaded
from tests.vision.pictures import noise


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: shutil.copytree(folder(family), tmp_path / "model")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def contents(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_and_left_as_it_is(family: str, copy: Callable[[str], Path]) -> None:
    path = copy(family)
    before = contents(path)
    model = finish(load_any(path, "m"))
    assert isinstance(model, VisionModel) and model_kind(path) == "vision"
    assert model.loaded.name == "m" and model.loaded.dtype == "float32" and model.loaded.context_length == 4096
    assert model.loaded.eos_token_ids == {257}
    assert contents(path) == before


def test_the_same_arguments_make_the_same_model(tmp_path: Path) -> None:
    one, two, three = (make_tiny_vlm(tmp_path / str(n), "qwen3_vl", seed=n // 2) for n in range(3))
    assert contents(one) == contents(two) != contents(three)


def test_text_models_and_text_parts_of_vision_models_take_no_pictures(
    tmp_path: Path, copy: Callable[[str], Path]
) -> None:
    assert model_use(make_tiny_model(tmp_path / "text")) == ("text", "")
    path = copy("gemma3")
    weights = {name: array for name, array in mx.load(str(path / "model.safetensors")).items() if "vision" not in name}
    weights = {name: array for name, array in weights.items() if not name.startswith("multi_modal")}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    assert model_use(path) == ("text", "its weight files hold only the language part")
    assert isinstance(finish(load_any(path, "m")), LoadedModel)


# ---- without the extra, and with an adapter


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("omlx.model.model_kind.find_spec", lambda name: None if name == "mlx_vlm" else find(name))


@pytest.mark.usefixtures("no_extra")
def test_without_the_extra_a_model_that_mlx_lm_knows_is_served_as_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="omlx"):
        model = finish(load_any(folder("gemma3"), "m"))
    assert isinstance(model, LoadedModel)
    assert [record.getMessage() for record in caplog.records] == [
        "vision model m is served as a text model: images need the extra vision (pip install 'omlx[vision]')"
    ]


@pytest.mark.usefixtures("no_extra")
def test_without_the_extra_other_models_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"idefics3 not supported.*images need the extra vision \(pip inst"):
        finish(load_any(folder("idefics3"), "m"))


def test_with_an_adapter_a_vision_model_is_a_text_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such adapter folder \(this is a vision model: images do not work with"):
        finish(load_any(folder("gemma3"), "m", tmp_path / "none"))


def test_the_extra_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, omlx.server, omlx.engine.pool; sys.exit('mlx_vlm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- vision models of other families


def test_the_types_that_are_named_are_those_of_the_families() -> None:
    assert sorted(VISION_TYPES) == sorted(FAMILY_CLASSES)


SIGNS: dict[str, tuple[dict[str, object], dict[str, object] | None]] = {
    "mistral3": ({"vision_config": {"hidden_size": 8}}, None),
    "kimi_vl": ({"image_token_index": 7}, None),
    "qwen3_5": ({"image_token_id": 0}, None),
    "llava_bunny": ({"mm_vision_tower": "google/siglip"}, None),
    "gemma4": ({}, {"image_processor_type": "Gemma4ImageProcessor"}),
    "pixtral": ({"vision_config": None}, {"image_mean": [0.5, 0.5, 0.5]}),
}


@pytest.mark.parametrize("model_type", SIGNS)
def test_a_vision_model_of_another_family_is_text_with_a_note(model_type: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    config, preprocessor = SIGNS[model_type]
    change(path / "config.json", model_type=model_type, **config)
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    kind, note = model_use(path)
    assert kind == "text"
    assert f"gemma3, idefics3, llava, qwen2_5_vl, qwen2_vl, qwen3_vl, smolvlm, not for {model_type}" in note


@pytest.mark.parametrize("config", [{}, {"vision_config": None}, {"vision_config": {}}, {"image_token": ""}])
def test_a_text_model_has_no_note(config: dict[str, object], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    change(path / "config.json", **config)
    (path / "preprocessor_config.json").write_text('{"feature_extractor_type": "WhisperFeatureExtractor"}')
    assert model_use(path) == ("text", "")


def test_a_vision_model_that_is_served_as_text_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_tiny_model(tmp_path / "m")
    change(path / "config.json", vision_config={"hidden_size": 8})
    with caplog.at_level(logging.WARNING, logger="omlx"):
        assert isinstance(finish(load_any(path, "m")), LoadedModel)
    (record,) = caplog.records
    assert record.getMessage().startswith("vision model m is served as a text model: images are supported for")
    change(path / "config.json", model_type="paligemma")
    with pytest.raises(ModelError, match=r"paligemma not supported.*this is a vision model: images are"):
        finish(load_any(path, "m"))


# ---- folders that cannot be used


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        finish(load_any(path, "m"))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_folder_without_settings_for_its_pictures(copy: Callable[[str], Path]) -> None:
    path = copy("gemma3")
    (path / "preprocessor_config.json").unlink()
    refused(path, "no preprocessor_config.json, so it is not known what its pictures have to be like")


WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "tile": ("gemma3", "preprocessor_config", {"size": {"height": 48, "width": 48}}, "of 48 pixels a side, the enc"),
    "no tile": ("gemma3", "preprocessor_config", {"size": {"shortest_edge": 32}}, "of varying pixels a side"),
    "crop": ("llava", "preprocessor_config", {"crop_size": 40}, "of 40 pixels a side"),
    "no crop": ("llava", "preprocessor_config", {"do_center_crop": False}, "of varying pixels a side"),
    "layers": ("llava", "config", {"vision_feature_layer": [-2, -1]}, r"vision_feature_layer \[-2, -1\] is no single"),
    "split": ("idefics3", "preprocessor_config", {"max_image_size": {"longest_edge": 40}}, "of 40 pixels a side"),
    "length": ("smolvlm", "processor_config", {"image_seq_len": 64}, "image_seq_len 64, but tiles give 16 features"),
    "patch": ("qwen2_vl", "preprocessor_config", {"patch_size": 14}, "patch_size 14, but the encoder's is 4"),
    "merge": ("qwen3_vl", "preprocessor_config", {"merge_size": 3}, "merge_size 3, but the encoder's is 2"),
    "no token": ("idefics3", "config", {"image_token_id": 400}, "which stands for pictures, is no token"),
    "class": ("llava", "preprocessor_config", {"image_processor_type": "Own"}, "image processor 'Own' is none of"),
    "own code": ("qwen2_vl", "config", {"model_file": "model.py"}, "wants to run its own code"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit_the_encoder(case: str, copy: Callable[[str], Path]) -> None:
    family, file, values, message = WRONG[case]
    path = copy(family)
    change(path / f"{file}.json", **values)
    refused(path, message)


def test_files_that_are_no_json_objects(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2_vl")
    (path / "preprocessor_config.json").write_text("[1]")
    refused(path, "preprocessor_config.json: not a JSON object")
    (path / "preprocessor_config.json").write_text("{")
    refused(path, "preprocessor_config.json: ")


def test_weights_that_the_fingerprint_does_not_cover_are_not_loaded(copy: Callable[[str], Path]) -> None:
    path = copy("llava")
    (path / "adapters.safetensors").write_bytes(b"no weights at all")
    assert load_vision(path).loaded.name == path.name


def test_weights_that_mlx_vlm_would_rewrite(copy: Callable[[str], Path]) -> None:
    path = copy("llava")
    data = (path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["note"] = "F8_E8M0"
    new = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(new).to_bytes(8, "little") + new + data[8 + length :])
    before = contents(path)
    refused(path, "weights of type F8_E8M0 cannot be loaded")
    assert contents(path) == before


def test_code_in_a_folder_is_not_run(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path, ran = copy("smolvlm"), tmp_path / "ran"
    (path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    auto = {"AutoImageProcessor": "evil.Evil", "AutoProcessor": "evil.Evil"}
    for file in ("preprocessor_config.json", "processor_config.json"):
        change(path / file, auto_map=auto)
    model = load_vision(path)
    model.family.pixels(noise(1).rgb())
    assert not ran.exists()


def test_a_missing_weight_is_said(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2_5_vl")
    weights = mx.load(str(path / "model.safetensors"))
    weights.pop("vision_tower.merger.ln_q.weight")
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    refused(path, "Missing 1 parameters")


# ---- where else templates are


@pytest.mark.parametrize("place", ["chat_template.json", "chat_template.jinja", "processor_config.json"])
def test_the_chat_template_is_found_where_folders_keep_it(place: str, copy: Callable[[str], Path]) -> None:
    path = copy("qwen2_vl")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    template = "the other one " + settings.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = template if place.endswith(".jinja") else json.dumps({"chat_template": template})
    (path / place).write_text(text)
    assert load_vision(path).loaded.tokenizer.chat_template == template


def test_the_end_of_an_utterance_ends_an_answer(copy: Callable[[str], Path]) -> None:
    path = copy("idefics3")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_text((path / file).read_text().replace("<row_2_col_2>", "<end_of_utterance>"))
    model = load_vision(path)
    assert model.loaded.eos_token_ids == {257, model.loaded.tokenizer.convert_tokens_to_ids("<end_of_utterance>")}


# ---- precision


def quantised(path: Path) -> Path:
    """The folder with its linear layers in 4 bits, as mlx-vlm's own conversion leaves them."""
    model = load_vision(path).loaded.model

    def wide(path: str, layer: nn.Module) -> bool:
        """Gemma's head is its embedding: mlx-vlm takes its weight from there."""
        return isinstance(layer, nn.Linear) and layer.weight.shape[1] % 32 == 0 and "lm_head" not in path

    nn.quantize(model, 32, 4, class_predicate=wide)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    change(path / "config.json", quantization={"group_size": 32, "bits": 4})
    return path


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "gemma3"])
def test_on_the_cpu_quantised_weights_become_float32(
    family: str, copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = quantised(copy(family))
    model = load_vision(path)
    assert {array.dtype for _, array in tree_flatten(model.loaded.model.parameters())} == {mx.float32}
    assert "stay quantised" not in caplog.text
    assert model.family.dtype == mx.float32 and model.loaded.fingerprint != loaded(family).loaded.fingerprint


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl"])
def test_kv_can_be_quantised(family: str, copy: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="its heads have 16 values, not a multiple of 32"):
        VLMRunner(loaded(family), 8)
    path = copy(family)
    with_heads_of_32(path / "config.json")
    bench = VisionBench(family, DictStore(), model=load_vision(path), kv_bits=8)
    assert {layer.kind.name for layer in bench.runner.layout.layers} == {"quantised"}
    turn = [noise(1), "What is this?"]
    cold, warm = bench.see(turn, cache=False), [bench.see(turn) for _ in range(2)]
    assert [bench.answer(request) for request in warm] == [bench.answer(cold)] * 2
    assert warm[1].stats.cached_tokens == len(cold.prompt) - 1


def with_heads_of_32(file: Path) -> None:
    """Half as many heads, which are twice as wide: the weights' shapes stay."""
    text = file.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 2')
    text = text.replace('"num_key_value_heads": 2', '"num_key_value_heads": 1')
    config = json.loads(text)
    if "rope_scaling" in config:
        config["rope_scaling"]["mrope_section"] = [4, 6, 6]
    file.write_text(json.dumps(config))


def test_weights_saved_by_others_load_too(copy: Callable[[str], Path]) -> None:
    """As transformers names and shapes them: convolutions with channels first."""
    path = copy("llava")
    weights = mx.load(str(path / "model.safetensors"))
    patches = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    weights[patches] = weights[patches].transpose(0, 3, 1, 2)
    save_file({name: np.asarray(array) for name, array in weights.items()}, path / "model.safetensors")
    assert load_vision(path).loaded.fingerprint != loaded("llava").loaded.fingerprint
