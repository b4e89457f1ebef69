"""The fingerprint of a model: every byte counts, and it is computed once for as long as the files stay the same."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.engine.pool import EnginePool
from omlx.errors import ModelError
from omlx.model import fingerprint as module
from omlx.model import loader
from omlx.model.fingerprint import WeightHashes, fingerprint
from omlx.model.folder import read_adapter
from omlx.model.weights import read_weight_files
from omlx.scheduler import SchedulerConfig
from tests.adapters import make_adapter


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are kept of files that were written just now, and of small ones."""
    monkeypatch.setattr(module, "_SETTLED_NS", -1_000_000_000)
    monkeypatch.setattr(module, "_WORTH_BYTES", 0)


def hashed(path: Path, records: Path | None = None) -> tuple[bytes, int]:
    """The fingerprint, and how many bytes were read for it."""
    seen = [0]
    files = read_weight_files(path)
    with WeightHashes(files, records, lambda stage, done, total: seen.append(done)) as hashes:
        return fingerprint(path, files, None, hashes), max(seen)


def flip(file: Path, at: int) -> None:
    """Changes a bit in place, and sets the file's time back."""
    stat = file.stat()
    with file.open("r+b") as data:
        data.seek(at)
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_every_byte_of_a_file_in_many_chunks_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "_READ_BYTES", 5000)
    file = model / "model.safetensors"
    start, seen = 8 + len(read_weight_files(model)[0].header), {hashed(model)[0]}
    starts = range(1 << 14, file.stat().st_size, 1 << 16)
    edges = [edge + by for edge in starts for by in (-1, 0, 1) if edge > start + 1]
    for number, at in enumerate([start, file.stat().st_size - 1, *edges], 2):
        flip(file, at)
        seen.add(hashed(model)[0])
        assert len(seen) == number
    assert len(edges) > 10


def test_permuted_rows_of_a_large_tensor_are_another_model(tmp_path: Path) -> None:
    """In a file of 257 MiB, most of it never written: rows swapped between two places, sums and samples unchanged."""
    (tmp_path / "config.json").write_text("{}")
    rows, width = 257 << 8, 1 << 12
    header = json.dumps({"e": {"dtype": "U8", "shape": [rows, width], "data_offsets": [0, rows * width]}}).encode()
    file = tmp_path / "model.safetensors"
    start = 8 + len(header)

    def write(order: list[int]) -> bytes:
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, start + rows * width)
        with file.open("r+b") as data:
            for place, row in enumerate(order):
                data.seek(start + (1000 + 7 * place) * width)
                data.write(bytes([row + 1]) * width)
        return fingerprint(tmp_path, read_weight_files(tmp_path))

    assert len({write(list(range(30))), write([1, 0, *range(2, 30)]), write(list(range(30))[::-1])}) == 3


@pytest.mark.usefixtures("settled")
def test_a_second_load_reads_nothing_and_gives_the_same(model: Path, tmp_path: Path) -> None:
    plain, size = hashed(model)
    assert size == (model / "model.safetensors").stat().st_size
    assert hashed(model, tmp_path / "records") == (plain, size)
    assert hashed(model, tmp_path / "records") == (plain, 0)
    assert hashed(model) == (plain, size)
    assert not [file for file in (tmp_path / "records").iterdir() if file.suffix != ".json"]
    assert sorted(file.name for file in model.iterdir()) == sorted(
        ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    )


def replaced(file: Path) -> None:
    """By a file of the same size and time, a byte of which differs."""
    stat, other = file.stat(), file.with_suffix(".new")
    shutil.copy(file, other)
    flip(other, stat.st_size - 1)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(file)


CHANGES: dict[str, Callable[[Path], None]] = {
    "a bit in place, time set back": lambda file: flip(file, file.stat().st_size - 1),
    "another file, time set back": replaced,
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CHANGES)
def test_a_record_does_not_outlive_its_file(change: str, model: Path, tmp_path: Path) -> None:
    before, _ = hashed(model, tmp_path / "records")
    CHANGES[change](model / "model.safetensors")
    after, size = hashed(model, tmp_path / "records")
    assert after != before and size > 0
    assert hashed(model, tmp_path / "records") == (after, 0)


@pytest.mark.usefixtures("settled")
def test_a_moved_model_is_hashed_again_to_the_same(model: Path, tmp_path: Path) -> None:
    before, size = hashed(model, tmp_path / "records")
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert hashed(copy, tmp_path / "records") == (before, size)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"files": 5}', '{"files": {"model.safetensors": 1}}', "[" * 99_999])
def test_a_damaged_record_is_made_anew(
    damage: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = hashed(model, tmp_path / "records")
    (record,) = (tmp_path / "records").iterdir()
    record.write_text(damage)
    assert hashed(model, tmp_path / "records") == expected
    assert any("hashing again" in entry.getMessage() for entry in caplog.records)
    assert hashed(model, tmp_path / "records") == (expected[0], 0)


@pytest.mark.usefixtures("settled")
def test_a_record_of_half_a_digest_is_not_used(model: Path, tmp_path: Path) -> None:
    expected = hashed(model, tmp_path / "records")
    (record,) = (tmp_path / "records").iterdir()
    content = json.loads(record.read_text())
    content["files"]["model.safetensors"]["sha256"] = "ab" * 16
    record.write_text(json.dumps(content))
    assert hashed(model, tmp_path / "records") == expected


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("limit", "value"), [("_SETTLED_NS", 1 << 60), ("_WORTH_BYTES", 1 << 20)])
def test_no_record_is_kept_of_a_file_that_was_written_just_now_or_is_small(
    limit: str, value: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, value)
    expected = hashed(model, tmp_path / "records")
    assert hashed(model, tmp_path / "records") == expected
    assert not (tmp_path / "records").exists()


@pytest.mark.usefixtures("settled")
def test_where_no_record_can_be_written_models_load_all_the_same(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("in the way")
    assert hashed(model, tmp_path / "records") == hashed(model)
    assert any("cannot be written" in entry.getMessage() for entry in caplog.records)


def test_a_file_that_changes_while_it_is_loaded_is_refused(model: Path) -> None:
    files = read_weight_files(model)
    flip(model / "model.safetensors", files[0].size - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: changed while it was being loaded"):
        fingerprint(model, files)


@pytest.mark.usefixtures("settled")
def test_an_adapter_counts_to_its_last_byte(model: Path, tmp_path: Path) -> None:
    adapter, records = make_adapter(tmp_path / "adapter"), tmp_path / "records"
    alone = loader.load(model, records=records).fingerprint
    before = loader.load(model, adapter_path=adapter, records=records).fingerprint
    assert before == loader.load(model, adapter_path=adapter).fingerprint != alone
    flip(adapter / "adapters.safetensors", read_adapter(adapter).weights.size - 1)
    assert loader.load(model, adapter_path=adapter, records=records).fingerprint not in (before, alone)


@pytest.mark.usefixtures("settled")
async def test_a_server_hashes_a_model_once_and_says_what_it_costs(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="omlx")
    for _ in range(2):
        pool = EnginePool(SchedulerConfig(block_size=16), tmp_path / "home", str(model))
        await pool.start()
        await pool.stop(5.0)
    lines = [entry.getMessage() for entry in caplog.records if "hashed" in entry.getMessage()]
    assert len(lines) == 1 and "per GB" in lines[0]
