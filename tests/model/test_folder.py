"""Model folders: names, finding, making, and the fingerprint of their content."""

import json
import os
import shutil
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from omlx.errors import ModelError, NotFound
from omlx.model.fingerprint import fingerprint
from omlx.model.folder import (
    check_name,
    find_model,
    is_model,
    list_models,
    locked,
    models_folder,
    new_folder,
    read_config,
    safe_name,
)
from omlx.model.weights import read_weight_files


@pytest.fixture
def home(tmp_path: Path, tiny_model_dir: Path) -> Path:
    for name in ("tiny", "org/other"):
        shutil.copytree(tiny_model_dir, models_folder(tmp_path) / name)
    return tmp_path


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def content(path: Path) -> bytes:
    return fingerprint(path, read_weight_files(path))


@pytest.mark.parametrize("name", ["a", "smollm2-135m", "Org/Name-1.5_x", "a..b"])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "..", "a/..", "../a", "/a", "a/", "a//b", "a/b/c", ".hidden", "a/.b", "a\0b", "a b", "~", "a\\b", "%2e"],
)
def test_names_that_could_leave_the_models_folder_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="is not a model name"):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [("SmolLM2 135M.Q4_1", "smollm2-135m.q4_1"), ("../../x", "x"), ("…", "model"), ("", "model"), ("a/b", "a-b")],
)
def test_any_text_becomes_a_safe_name(text: str, name: str) -> None:
    assert check_name(safe_name(text)) == name


def test_models_are_listed_by_name_with_their_size(home: Path) -> None:
    assert [info.name for info in list_models(home)] == ["org/other", "tiny"]
    for info in list_models(home):
        assert info.size_bytes == sum(file.stat().st_size for file in info.path.iterdir())


def test_what_is_no_finished_model_is_not_listed(home: Path, tiny_model_dir: Path) -> None:
    root = models_folder(home)
    shutil.copytree(tiny_model_dir, root / ".tiny.new-1")
    shutil.copytree(tiny_model_dir, root / "org" / ".other.partial")
    shutil.copytree(tiny_model_dir, root / "tiny" / "inner")
    (root / "empty").mkdir()
    (root / "file").touch()
    assert [info.name for info in list_models(home)] == ["org/other", "tiny"]


def test_without_a_home_folder_there_are_no_models(tmp_path: Path) -> None:
    assert list_models(tmp_path / "none") == []


def test_a_model_is_found_by_name_or_by_path(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model("org/other", home) == models_folder(home) / "org" / "other"
    assert find_model(str(model), home) == model
    monkeypatch.chdir(model.parent)
    assert find_model("model", home) == Path("model")


@pytest.mark.parametrize("name", ["", "none", "none/none", "/none", "a\0b"])
def test_an_unknown_model_is_not_found(home: Path, name: str) -> None:
    with pytest.raises(NotFound):
        find_model(name, home)


def test_a_folder_without_a_model_says_what_is_missing(home: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(str(models_folder(home)), home)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "not a JSON object"),
        ("{}", "no usable model_type"),
        ('{"model_type": "../evil"}', "no usable model_type"),
        ('{"model_type": "llama", "model_file": "evil.py"}', "its own code"),
    ],
)
def test_an_unusable_config_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "grown", "empty", "huge header", "not json", "no offsets"])
def test_a_damaged_weight_file_is_refused(model: Path, damage: str) -> None:
    file = model / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-1],
            "grown": data + b"\0",
            "empty": b"",
            "huge header": struct.pack("<Q", 1 << 60) + data[8:],
            "not json": data[:8] + b"x" + data[9:],
            "no offsets": struct.pack("<Q", 8) + b'{"a":{}}',
        }[damage]
    )
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_weight_files(model)


def test_the_fingerprint_depends_on_content_only(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "another name"))
    (copy / "README.md").write_text("hello")
    os.utime(copy / "model.safetensors", (1, 1))
    assert content(copy) == content(model)
    assert len(content(model)) == 32


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_weights_swapped_in_place_change_the_fingerprint(model: Path, place: str) -> None:
    file, before = model / "model.safetensors", content(model)
    (weights,) = read_weight_files(model)
    offset = {"first": 8 + len(weights.header), "middle": weights.size // 2, "last": weights.size - 1}[place]
    stat = file.stat()
    with file.open("r+b") as data:
        data.seek(offset)
        byte = data.read(1)[0]
        data.seek(offset)
        data.write(bytes([byte ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert content(model) != before


def test_the_config_is_part_of_the_fingerprint(model: Path) -> None:
    before = content(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert content(model) != before


def test_a_new_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with locked(target), suppress(RuntimeError), new_folder(target) as building:
        (building / "part").touch()
        raise RuntimeError
    assert not target.exists()
    with locked(target), new_folder(target) as building:
        (building / "part").touch()
        assert not target.exists()
    assert [file.name for file in target.iterdir()] == ["part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.lock", "new"]


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path) -> None:
    target = tmp_path / "new"
    (tmp_path / ".new.new-killed").mkdir()
    (tmp_path / ".new.new-killed" / "half").touch()
    with locked(target), new_folder(target):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.lock", "new"]


def test_something_in_the_way_is_named_and_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "mine").touch()
    with locked(target), pytest.raises(ModelError, match="remove what is in the way"), new_folder(target):
        pass
    assert (target / "mine").exists()


def test_a_second_maker_waits_for_the_first(tmp_path: Path) -> None:
    target, order = tmp_path / "new", []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with locked(target):
            order.append("second")

    with locked(target):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_tiny_model_is_a_model(tiny_model_dir: Path) -> None:
    assert is_model(tiny_model_dir)
    assert not is_model(tiny_model_dir.parent)
