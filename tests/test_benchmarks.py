"""benchmarks/storage.py at its smallest: no figure is judged here, but it checks itself what it measures."""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def storage(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("storage")


def test_the_rows_about_copying_are_measured(storage, tmp_path, monkeypatch):
    rows = "restore,ram,save,writer"
    monkeypatch.setattr(sys, "argv", ["storage.py", "--quick", "--rows", rows, "--results", str(tmp_path)])
    asyncio.run(storage.main(storage.options(), tmp_path))
    tables = json.loads((tmp_path / "storage-quick.json").read_text())["tables"]
    assert len(tables) == 4 and all(target["value"] > 0 for table in tables for target in table["targets"])


def test_a_store_made_for_the_rows_about_many_blocks_opens_matches_and_evicts(storage, tmp_path):
    big = importlib.import_module("big_index")
    big.make_store(tmp_path / "root", 500, 4096)
    found = big.measure_open(tmp_path / "root", 4096, 500)
    assert found["open"] > 0 and len(found["match"]) == len(found["sha256"])
    assert big.measure_evict(tmp_path / "root", 4096, 500)["evicted"] >= big.SAVES // 2


def test_an_unknown_row_is_refused_by_name(storage, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["storage.py", "--rows", "restore,lunch"])
    with pytest.raises(SystemExit):
        storage.options()
    assert "no such row: lunch; there are restore," in capsys.readouterr().err


def test_putting_and_reading_features_is_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    vision = importlib.import_module("vision")
    words = ["--quick", "--parts", "features", "--feature-bytes", "200000", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["vision.py", *words])
    asyncio.run(vision.main(vision.options(), tmp_path))
    tables = json.loads((tmp_path / "vision-quick.json").read_text())["tables"]
    assert [len(table["targets"]) for table in tables] == [4, 2]
    assert all(target["value"] > 0 for target in tables[0]["targets"])


def test_questions_about_pictures_are_measured(monkeypatch, tmp_path):
    """With a real server; the figures are the tiny model's."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    vision = importlib.import_module("vision")
    monkeypatch.setattr(sys, "argv", ["vision.py", "--quick", "--parts", "model", "--results", str(tmp_path)])
    asyncio.run(vision.main(vision.options(), tmp_path))
    (table,) = json.loads((tmp_path / "vision-quick.json").read_text())["tables"]
    calls = {row[0]: row[3] for row in table["rows"]}
    assert calls.pop("first about a picture") == "1" and set(calls.values()) == {"0"} and len(calls) == 4
    assert {row[4] for row in table["rows"][1:]} == {"1"}


def test_matches_among_many_siblings_are_measured(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    siblings = importlib.import_module("siblings")
    monkeypatch.setattr(sys, "argv", ["siblings.py", "--quick", "--results", str(tmp_path)])
    asyncio.run(siblings.main(siblings.options(), tmp_path))
    tables = json.loads((tmp_path / "siblings-quick.json").read_text())["tables"]
    assert len(tables) == 2 and all(target["value"] > 0 for table in tables for target in table["targets"])
