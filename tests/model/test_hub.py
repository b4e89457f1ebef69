"""Downloads from the hub, through huggingface_hub and a stand-in server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.errors import ModelError
from omlx.model import loader
from omlx.model.folder import list_models, models_folder
from omlx.model.hub import pull_from_hub
from tests.embeddings.tiny import make_tiny_encoder
from tests.model.hub_server import Hub, running_hub

REPO = "org/tiny"
UNWANTED = {
    "README.md": b"hello",
    "modeling_tiny.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same once more",
    "onnx/model.safetensors": b"another format",
    "original/params.json": b"{}",
}


@pytest.fixture
def files(tiny_model_dir: Path) -> dict[str, bytes]:
    model = {path.name: path.read_bytes() for path in tiny_model_dir.iterdir()}
    return {**model, "chat_template.jinja": b"{{ messages }}", **UNWANTED}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub(Hub(REPO, files)) as hub:
        yield hub


def test_a_model_is_downloaded_into_a_plain_folder(hub: Hub, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int | None]] = []
    folder = pull_from_hub(REPO, tmp_path, lambda *report: reports.append(report), endpoint=hub.url)
    assert folder == models_folder(tmp_path) / "org" / "tiny"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in hub.files.items() if name not in UNWANTED
    }
    assert [info.name for info in list_models(tmp_path)] == [REPO]
    assert loader.load(folder).vocab_size == 260
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert reports[-1] == ("downloading org/tiny", size, size)


def test_layers_behind_an_embedding_model_come_along(tmp_path: Path) -> None:
    model = make_tiny_encoder(tmp_path / "vectors", pooling="cls_token")
    files = {path.relative_to(model).as_posix(): path.read_bytes() for path in model.rglob("*") if path.is_file()}
    layers = {"2_Dense/config.json": b"{}", "2_Dense/model.safetensors": b"weights"}
    more = {"2_Dense/pytorch_model.bin": b"pickle", "1_Pooling/more/config.json": b"{}"}
    with running_hub(Hub(REPO, files | layers | more | UNWANTED)) as hub:
        folder = pull_from_hub(REPO, tmp_path, endpoint=hub.url)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == files.keys() | layers.keys() and "1_Pooling/config.json" in found
    assert not (folder / "onnx").exists() and not (folder / ".cache").exists()


def test_a_second_call_asks_nothing(hub: Hub, tmp_path: Path) -> None:
    folder = pull_from_hub(REPO, tmp_path, endpoint=hub.url)
    hub.requests.clear()
    assert pull_from_hub(REPO, tmp_path, endpoint=hub.url) == folder
    assert hub.requests == []


def test_an_interrupted_download_is_no_model_and_is_continued(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it tries again
    hub.broken.add("model.safetensors")
    with pytest.raises(ModelError, match="org/tiny: download failed") as error:
        pull_from_hub(REPO, tmp_path, endpoint=hub.url)
    assert "\n" not in str(error.value)
    assert list_models(tmp_path) == []
    hub.broken.clear()
    hub.requests.clear()
    assert loader.load(pull_from_hub(REPO, tmp_path, endpoint=hub.url)).vocab_size == 260
    assert "config.json" not in hub.downloads()


def test_files_of_an_older_revision_do_not_stay(hub: Hub, tmp_path: Path) -> None:
    partial = models_folder(tmp_path) / "org" / ".tiny.partial"
    partial.mkdir(parents=True)
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"old")
    folder = pull_from_hub(REPO, tmp_path, endpoint=hub.url)
    assert not (folder / "model-00001-of-00009.safetensors").exists()


def test_a_model_that_does_not_exist(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="org/other: no such model on the hub"):
        pull_from_hub("org/other", tmp_path, endpoint=hub.url)
    assert list(tmp_path.iterdir()) == []


def test_a_repository_without_mlx_weights_is_refused_before_any_download(tmp_path: Path) -> None:
    with running_hub(Hub(REPO, {"config.json": b"{}", "model.gguf": b"x"})) as hub:
        with pytest.raises(ModelError, match="not a model that MLX loads"):
            pull_from_hub(REPO, tmp_path, endpoint=hub.url)
        assert hub.downloads() == []


def test_a_model_with_its_own_code_is_refused_before_the_weights(tmp_path: Path, files: dict[str, bytes]) -> None:
    config = b'{"model_type": "llama", "model_file": "modeling_tiny.py"}'
    with running_hub(Hub(REPO, {**files, "config.json": config})) as hub:
        with pytest.raises(ModelError, match="its own code"):
            pull_from_hub(REPO, tmp_path, endpoint=hub.url)
        assert hub.downloads() == ["config.json"]


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    with running_hub(Hub(REPO, {})) as hub:
        closed = hub.url
    with pytest.raises(ModelError, match="org/tiny: download failed") as error:
        pull_from_hub(REPO, tmp_path, endpoint=closed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "repo", ["", "tiny", "../tiny", "org/..", "/org/tiny", "org/tiny/x", "org/ti\0ny", "org/.tiny"]
)
def test_names_that_could_leave_the_models_folder_are_refused(tmp_path: Path, repo: str) -> None:
    with pytest.raises(ModelError):
        pull_from_hub(repo, tmp_path, endpoint="http://127.0.0.1:9")
    assert list(tmp_path.iterdir()) == []
