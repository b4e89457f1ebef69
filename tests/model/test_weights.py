"""Which weight files of a folder count, and headers that do not agree with their file."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omlx.errors import ModelError
from omlx.model import loader
from omlx.model.weights import INDEX, read_weight_file, read_weight_files

NORM = "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def index(folder: Path, places: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def split(folder: Path) -> dict[str, str]:
    """The weights in two files and no index; returns the file of each tensor."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, folder / file)
    return {name: file for file, part in files.items() for name in part}


@pytest.mark.parametrize("stale", [f"model{end}.safetensors" for end in ("-0", "-9", "", "A")])
def test_a_tensor_in_two_files_is_refused_whatever_they_are_called(model: Path, stale: str) -> None:
    split(model)
    save_file({NORM: np.zeros(64, np.float32)}, model / stale)
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' is in both .*; remove the wrong one") as error:
        loader.load(model)
    assert stale in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("stale", ["model-0.safetensors", "model-9.safetensors", "model.safetensors"])
def test_only_the_files_that_the_index_names_are_loaded(model: Path, stale: str) -> None:
    expected = load_file(model / "model.safetensors")[NORM]
    index(model, split(model))
    alone = loader.load(model).fingerprint
    save_file({NORM: np.full(64, 7, np.float32)}, model / stale)
    loaded = loader.load(model)
    assert mx.array_equal(loaded.model.model.norm.weight, mx.array(expected))
    assert loaded.fingerprint == alone


def test_an_index_of_a_missing_file_is_refused(model: Path) -> None:
    places = split(model)
    index(model, places | {"other": "model-3.safetensors"})
    with pytest.raises(ModelError, match=rf"{INDEX} names model-3\.safetensors, which is missing"):
        loader.load(model)


def test_an_index_that_places_a_tensor_wrongly_is_refused(model: Path) -> None:
    places = split(model)
    for wrong in ({NORM: "model-1.safetensors"}, {"nowhere": "model-1.safetensors"}):
        index(model, places | wrong)
        with pytest.raises(ModelError, match=rf"places tensor '{next(iter(wrong))}' in model-1\.safetensors, where"):
            loader.load(model)


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "sub/model.safetensors", "x.bin", ""])
def test_an_index_names_weight_files_of_its_own_folder_only(model: Path, name: str) -> None:
    index(model, split(model) | {"a": name})
    with pytest.raises(ModelError, match="which is no weight file"):
        loader.load(model)


NO_MAP = [f'{{"weight_map": {places}}}' for places in ("[]", "{}", '{"a": 1}')]


@pytest.mark.parametrize("text", ["[]", "{", "{}", *NO_MAP])
def test_an_index_that_is_none_is_refused(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        read_weight_files(model)


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too large a shape": ({"a": entry(shape=(1 << 20, 1 << 20))}, "16 bytes for F32"),
    "a side beyond 32 bits": ({"a": entry(shape=(1 << 31, 0), offsets=(0, 0)), "b": entry()}, "shape"),
    "a negative side": ({"a": entry(shape=(-4,))}, "shape"),
    "a shape of words": ({"a": entry(shape=("4",))}, "shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, "'a'"),
    "offsets backwards": ({"a": entry(offsets=(16, 0))}, "offsets 16 and 0"),
    "a negative offset": ({"a": entry(offsets=(-16, 0))}, "offsets"),
    "one offset": ({"a": entry(offsets=(16,))}, "'a'"),
    "overlapping": ({"a": entry(), "b": entry((2,), (8, 16))}, "does not follow"),
    "a hole": ({"a": entry((1,), (0, 4)), "b": entry((2,), (8, 16))}, "does not follow"),
    "no entry": ({"a": 5}, "'a'"),
    "a list for a dtype": ({"a": entry(dtype=["F32"])}, "'a'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, kind: str) -> None:
    header, reason = WRONG[kind]
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ModelError, match=reason) as error:
        read_weight_file(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_name_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry())[1:-1]
    two = json.dumps(entry(offsets=(16, 32)))[1:-1]
    text = f'{{"a": {{{one}}}, "a": {{{two}}}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with pytest.raises(ModelError, match="does not follow"):
        read_weight_file(file)
