"""`omlx cache`, on folders that the real store wrote: free ones, and ones that somebody works on."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from omlx.cache.factory import CacheConfig, CacheFactory
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.cli import main
from omlx.engine.pool import EnginePool
from omlx.server import create_app
from omlx.settings import Settings
from omlx.storage import survey
from omlx.storage.disk_index import read_index
from omlx.storage.feature_file import FeatureKey, feature_model_name, feature_name
from omlx.storage.folder import VISION_FOLDER, folder_name, model_of
from omlx.storage.tensor_file import BlockBuffer, TensorSpec
from omlx.testing import make_tiny_model
from tests.api.serving import served
from tests.support import wait_until

MODELS = ("org/big", "small")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, and no settings from outside."""
    for name in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


def open_store(root: Path, model: str) -> PagedSSDCacheManager:
    store = CacheFactory.create_paged_ssd_cache(CacheConfig(paged_ssd_cache_dir=root), model)
    assert store is not None
    return store


def save(store: PagedSSDCacheManager, count: int) -> list[bytes]:
    """Blocks of 2 tokens and 4 KB, named 0000..., 1111... and so on."""
    hashes = [bytes([17 * number]) * 32 for number in range(count)]
    for number, block_hash in enumerate(hashes):
        block = BlockBuffer.empty((TensorSpec("0.0", "U8", (4096,)),))
        block.data[:] = number
        store.save_block(block_hash, block, 2, tokens=bytes(8), start=2 * number)
    return hashes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that nobody works on, with 3 blocks of one model and 2 of another."""
    root = tmp_path / "cache ä"
    for model, count in zip(MODELS, (3, 2), strict=True):
        store = open_store(root, model)
        save(store, count)
        assert store.close()
    return root


@pytest.fixture
def busy(root: Path) -> Iterator[PagedSSDCacheManager]:
    """The same folder while this process works on it."""
    store = open_store(root, "small")
    yield store
    store.close()


def omlx(root: Path, *words: str) -> int:
    return main(["cache", *words, "--paged-ssd-cache-dir", str(root)])


def asked(root: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    """What a command says with --json."""
    assert omlx(root, *words, "--json") == status
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    message = capsys.readouterr().err
    assert message.startswith("omlx: ") and message.count("\n") == 1
    return message


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def block_files(root: Path, model: str) -> list[Path]:
    return sorted((root / folder_name(model)).glob("*/*.safetensors"))


# ---- stats and list


def test_stats_shows_blocks_tokens_and_bytes_of_each_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = asked(root, capsys, "stats")
    sizes = {model: sum(path.stat().st_size for path in block_files(root, model)) for model in MODELS}
    assert [(m["model"], m["blocks"], m["tokens"], m["bytes"]) for m in shown["models"]] == [
        ("org/big", 3, 6, sizes["org/big"]),
        ("small", 2, 4, sizes["small"]),
    ]
    assert shown["total"] == {"blocks": 5, "bytes": sum(sizes.values())}
    assert shown["in_use_by"] is None


def test_the_tables_are_for_people(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omlx(root, "stats", "--paged-ssd-cache-max-size", "7GB") == 0
    shown = capsys.readouterr().out
    assert [cell.strip() for cell in shown.splitlines()[3].split("│")[1:4]] == ["org/big", "3", "6"]
    assert f"{root}: not in use, limit 7 GB" in shown
    assert omlx(root, "list", "--limit", "1") == 0
    shown = capsys.readouterr().out
    assert "1111111111111111" in shown
    assert "5 blocks, 4 more than shown here" in shown


def test_list_has_every_block_the_last_used_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = asked(root, capsys, "list")
    assert [(b["model"], b["hash"][:2], b["start"], b["tokens"]) for b in listed] == [
        ("small", "11", 2, 2), ("small", "00", 0, 2),
        ("org/big", "22", 4, 2), ("org/big", "11", 2, 2), ("org/big", "00", 0, 2),
    ]  # fmt: skip
    assert len(asked(root, capsys, "list", "--limit", "2")) == 2
    assert {b["model"] for b in asked(root, capsys, "list", "--model", "org/big")} == {"org/big"}


def test_reading_needs_no_lock_and_sees_what_the_process_writes(
    busy: PagedSSDCacheManager, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(busy, 4)
    busy.flush()
    shown = asked(root, capsys, "stats", "--model", "small")
    assert shown["in_use_by"] == os.getpid()
    assert shown["total"]["blocks"] == 4
    assert asked(root, capsys, "verify")["problems"] == []
    assert busy.check() == []


def test_reading_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    for command in ("stats", "list", "verify"):
        assert omlx(root, command) == 0
    assert files(root) == before


def test_blocks_are_found_without_an_index(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "index.sqlite").unlink()
    assert [m["tokens"] for m in asked(root, capsys, "stats")["models"]] == [6, 4]


def test_a_file_of_another_version_counts_as_of_no_use(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = block_files(root, "small")[0]
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"9"'))
    (root / "index.sqlite").unlink()
    assert asked(root, capsys, "stats")["models"][1]["stale_blocks"] == 1
    assert omlx(root, "stats") == 0
    assert "2 (1 of no use)" in capsys.readouterr().out


# ---- verify


def test_a_sound_folder_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omlx(root, "verify") == 0
    assert capsys.readouterr().out == f"{root}: 5 blocks, all as they should be\n"


def damage_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xee")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap(path: Path) -> None:
    path.write_bytes(path.parent.parent.joinpath("1", "11" * 32 + ".safetensors").read_bytes())


def other_parent(path: Path) -> None:
    """A whole and valid file, but of another prompt than the index says."""
    data = path.read_bytes()
    with sqlite3.connect(path.parent.parent.parent / "index.sqlite") as db:
        db.execute("UPDATE blocks SET parent = x'01' WHERE folder = 'small' AND hash = ?", (bytes(32),))
    db.close()
    assert path.read_bytes() == data


def forget(path: Path) -> None:
    with sqlite3.connect(path.parent.parent.parent / "index.sqlite") as db:
        db.execute("DELETE FROM blocks WHERE folder = 'small' AND hash = ?", (bytes(32),))
    db.close()


def leave_temporary(path: Path) -> None:
    path.with_name(f".omlx-{path.stem}.tmp").write_bytes(b"half")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_a_byte, "its checksum is wrong"),
        (cut, "bytes, the index says"),
        (swap, "its header is that of another block"),
        (other_parent, "its header is that of another block"),
        (Path.unlink, "is in the index and not there"),
        (forget, "is not in the index"),
        (leave_temporary, "is a temporary file that nobody finished"),
        (replace_by_folder, "the index says"),
    ],
)
def test_each_difference_is_a_line_and_a_status_of_1(
    damage: Any, said: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = block_files(root, "small")[0]
    damage(path)
    assert omlx(root, "verify") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line
    assert path.stem in line
    assert asked(root, capsys, "verify", "--model", "small", status=1)["problems"] == [line]
    assert asked(root, capsys, "verify", "--model", "org/big")["problems"] == []


def test_a_damaged_index_is_a_problem(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "index.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    problems = asked(root, capsys, "verify", status=1)["problems"]
    assert "index.sqlite is damaged" in problems[0]
    assert len(problems) == 6


def test_an_unfinished_transaction_is_read_without_touching_the_file(root: Path) -> None:
    """A killed process leaves a journal that only a writer may roll back."""
    code = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA journal_mode = TRUNCATE'); db.execute('PRAGMA cache_size = 1'); db.execute('BEGIN')\n"
        "db.execute(\"INSERT INTO blocks SELECT 'x', randomblob(32), zeroblob(9000), 0, 0, 0, '', '', 0, 0, 0"
        ' FROM blocks a, blocks b"); os._exit(0)'
    )
    subprocess.run([sys.executable, "-c", code, str(root / "index.sqlite")], check=True)
    assert (root / "index.sqlite-journal").stat().st_size
    before = files(root)
    assert len(read_index(root / "index.sqlite")) == 5
    assert files(root) == before


def test_a_passing_difference_is_no_problem_while_somebody_works_on_the_folder(
    busy: PagedSSDCacheManager, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    temporary = block_files(root, "small")[0].with_name(".omlx-" + "0a" * 32 + ".tmp")
    temporary.write_bytes(b"half")
    monkeypatch.setattr(survey.time, "sleep", lambda seconds: temporary.unlink())
    assert asked(root, capsys, "verify")["problems"] == []
    damage_a_byte(block_files(root, "small")[0])
    monkeypatch.setattr(survey.time, "sleep", lambda seconds: None)
    assert len(asked(root, capsys, "verify", status=1)["problems"]) == 1


# ---- clear


def test_clear_deletes_one_models_blocks_and_their_rows(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(path.stat().st_size for path in block_files(root, "org/big"))
    assert asked(root, capsys, "clear", "--model", "org/big") == {"blocks": 3, "bytes": size, "images": 0}
    assert not (root / folder_name("org/big")).exists()
    assert omlx(root, "verify") == 0
    assert capsys.readouterr().out == f"{root}: 2 blocks, all as they should be\n"
    store = open_store(root, "small")
    assert store.load_block(bytes(32)) is not None
    assert store.check() == []
    store.close()


def test_clear_leaves_everything_that_is_not_ours(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside" / "3"
    outside.mkdir(parents=True)
    kept = [
        root / "notes.txt",
        root / "small" / "0" / "notes.txt",
        root / "small" / "0" / "zz.safetensors",
        root / "small" / "a" / ("ab" * 32 + ".safetensors") / "x",
        outside / ("33" * 32 + ".safetensors"),
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"mine")
    (root / "small" / "3").symlink_to(outside)
    (root / "linked").symlink_to(outside.parent)
    leave_temporary(block_files(root, "small")[0])
    assert omlx(root, "clear") == 0
    assert capsys.readouterr().out.startswith("5 blocks deleted, ")
    assert all(path.read_bytes() == b"mine" for path in kept)
    assert [path for path in root.rglob("*.safetensors") if path.is_file() and len(path.stem) == 64] == []
    assert list(root.rglob("*.tmp")) == []
    assert (root / "small" / "3").is_symlink()


def test_clear_works_without_an_index_and_with_a_damaged_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "index.sqlite").write_bytes(b"broken" * 1000)
    assert asked(root, capsys, "clear", "--model", "small")["blocks"] == 2
    (root / "index.sqlite").unlink()
    assert asked(root, capsys, "clear")["blocks"] == 3
    assert survey.blocks(root) == []


def test_image_features_are_counted_verified_and_cleared(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = VisionFeatureSSDCache(root / "vision", 1)
    for name in ("a", "b"):
        cache.put(name, "small", mx.ones((4,)))
    cache.put("a", "org/big", mx.ones((4,)))
    cache.close()
    (root / "vision" / "mine_small.npy").write_bytes(b"mine")
    assert asked(root, capsys, "stats")["features"]["images"] == 3
    assert asked(root, capsys, "verify")["problems"] == []
    damaged = root / "vision" / "a_small.npy"
    data = damaged.read_bytes()
    damaged.write_bytes(data.replace(b"\x80?", b"\x81?", 1))
    assert asked(root, capsys, "verify", status=1)["problems"] == [
        f"{damaged} is damaged: it was changed, or holds the features of another image"
    ]
    assert omlx(root, "clear", "--model", "small") == 0
    assert capsys.readouterr().out.startswith("2 blocks and the features of 2 images deleted, ")
    assert sorted(path.name for path in (root / "vision").iterdir()) == ["a_org%2Fbig.npy", "mine_small.npy"]


def feature_files(root: Path) -> dict[str, Path]:
    """Features of two pictures for a model, one of them under other weights too, and of one for another model."""
    cache = VisionFeatureSSDCache(root / VISION_FOLDER, free_reserve_bytes=0)
    named = {"a": ("h1", b"\x01" * 32), "b": ("h2", b"\x01" * 32), "c": ("h1", b"\x02" * 32)}
    for key, (image, fingerprint) in named.items():
        cache.put(image, feature_model_name("org/big", fingerprint, "cpu"), mx.full((16,), ord(key)))
    cache.put("h1", feature_model_name("pictures only", b"\x03" * 32), mx.ones((16,)))
    cache.close()
    keys = {
        key: FeatureKey(image, feature_model_name("org/big", print_, "cpu")) for key, (image, print_) in named.items()
    }
    keys["other"] = FeatureKey("h1", feature_model_name("pictures only", b"\x03" * 32))
    found = {key: root / VISION_FOLDER / feature_name(one) for key, one in keys.items()}
    assert all(path.is_file() for path in found.values())
    return found


def test_list_and_stats_show_features_by_the_name_they_are_kept_under(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = feature_files(root)
    sizes = {key: path.stat().st_size for key, path in paths.items()}
    os.utime(paths["b"], ns=(10**18, 10**18))
    listed = asked(root, capsys, "list")
    assert len([entry for entry in listed if "hash" in entry]) == 5
    features = [entry for entry in listed if "images" in entry]
    assert [(f["model"], f["images"]) for f in features] == [("org/big", 2), ("org/big", 1), ("pictures only", 1)]
    assert [f["bytes"] for f in features] == [sizes["a"] + sizes["b"], sizes["c"], sizes["other"]]
    assert features[0]["last_used_ns"] == paths["a"].stat().st_mtime_ns
    assert features[2]["features_of"] == "pictures only-0303030303030303"
    assert asked(root, capsys, "stats")["features"] == {"images": 4, "bytes": sum(sizes.values()), "models": features}
    assert [f["model"] for f in asked(root, capsys, "list", "--model", "pictures only")] == ["pictures only"]
    assert omlx(root, "list") == 0
    shown = capsys.readouterr().out
    assert "5 blocks\n" in shown and "org/big-0202020202020202." in shown and "pictures only-0303030303030303" in shown


def test_clear_takes_the_features_of_a_model_under_all_weights(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = feature_files(root)
    assert asked(root, capsys, "clear", "--model", "org/big")["images"] == 3
    assert [key for key, path in paths.items() if path.exists()] == ["other"]
    assert asked(root, capsys, "clear", "--model", "pictures only")["images"] == 1
    assert not (root / VISION_FOLDER).exists() and len(block_files(root, "small")) == 2
    paths = feature_files(root)
    (root / VISION_FOLDER / ".omlx-4000000.tmp").write_bytes(b"half of it")
    (root / VISION_FOLDER / f".omlx-{os.getppid()}.tmp").write_bytes(b"somebody writes it")
    assert asked(root, capsys, "clear")["images"] == 4
    assert [path.name for path in (root / VISION_FOLDER).iterdir()] == [f".omlx-{os.getppid()}.tmp"]


def test_a_misspelt_model_is_told_of_those_with_features_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feature_files(root)
    assert omlx(root, "clear", "--model", "picture only") == 1
    assert "models there: org/big, pictures only, small" in complaint(capsys)


def test_verify_names_features_files_that_are_damaged_cut_swapped_or_left_half_written(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = feature_files(root)
    assert omlx(root, "verify") == 0 and "5 blocks and the features of 4 images, all as they" in capsys.readouterr().out
    data = paths["a"].read_bytes()
    paths["a"].write_bytes(data[:150] + b"?" + data[151:])
    os.truncate(paths["c"], 100)
    other = paths["other"].read_bytes()
    paths["other"].write_bytes(paths["b"].read_bytes())
    left = root / VISION_FOLDER / ".omlx-4000000.tmp"
    left.write_bytes(b"half of it")
    (root / VISION_FOLDER / "notes.npy").write_bytes(b"mine")  # no name as ours
    problems = asked(root, capsys, "verify", status=1)["problems"]
    assert [problem.split(" is a temporary file that nobody finished, of ")[0] for problem in problems] == [
        str(left),
        f"{paths['c']} is cut off, or no features file",
        f"{paths['other']} holds what {paths['b'].name} should",
        f"{paths['a']} is damaged: it was changed, or holds the features of another image",
    ]
    some = asked(root, capsys, "verify", "--model", "org/big", status=1)["problems"]
    assert some == [problems[1], problems[3]]
    paths["other"].write_bytes(other)
    assert asked(root, capsys, "verify", "--model", "pictures only")["images"] == 1


def test_a_misspelt_model_clears_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    assert omlx(root, "clear", "--model", "smal") == 1
    assert "models there: org/big, small" in complaint(capsys)
    assert omlx(root, "clear", "--model", "../cache ä") == 1
    assert files(root) == before


@pytest.mark.parametrize("command", ["stats", "list", "verify", "clear"])
def test_a_folder_that_is_not_there_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert omlx(tmp_path / "absent", command) == 1
    assert complaint(capsys) == f"omlx: there is no cache folder {tmp_path / 'absent'}\n"
    (tmp_path / "file").touch()
    assert omlx(tmp_path / "file", command) == 1
    assert "Not a directory" in complaint(capsys)
    assert main(["cache", command]) == 2
    assert "--paged-ssd-cache-dir" in complaint(capsys)


def test_the_folder_may_come_from_the_settings_file(root: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "settings.json").write_text(json.dumps({"paged_ssd_cache_dir": str(root), "model": "small"}))
    assert main(["cache", "stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["blocks"] == 5


# ---- by age


def age(root: Path, model: str, numbers: list[int], days: float) -> None:
    """Blocks of a model that were last used so long ago, as the index has it."""
    db = sqlite3.connect(root / "index.sqlite")
    for number in numbers:
        key = (int((time.time() - days * 86_400) * 1e9), folder_name(model), bytes([17 * number]) * 32)
        db.execute("UPDATE blocks SET used = ? WHERE folder = ? AND hash = ?", key)
    db.commit()
    db.close()
    (root / "index.snapshot").unlink(missing_ok=True)


def names(root: Path, model: str) -> list[int]:
    return [int(path.stem[:2], 16) // 17 for path in block_files(root, model)]


def test_clear_deletes_what_was_not_used_for_so_long(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    age(root, "org/big", [0, 2], 8)
    age(root, "small", [1], 30)
    for wanted, model, gone in (("31d", [], 0), ("10d", ["--model", "org/big"], 0), ("7d", ["--model", "org/big"], 2)):
        done = asked(root, capsys, "clear", "--older-than", wanted, *model)
        assert (done["blocks"], done["images"]) == (gone, 0) and (done["bytes"] > 0) == (gone > 0)
    assert (names(root, "org/big"), names(root, "small")) == ([1], [0, 1])
    assert omlx(root, "clear", "--older-than", "1w") == 0
    assert capsys.readouterr().out.startswith("1 blocks deleted, ")
    assert (names(root, "org/big"), names(root, "small")) == ([1], [0])
    assert asked(root, capsys, "verify")["problems"] == []
    assert asked(root, capsys, "clear", "--older-than", "0")["blocks"] == 2


@pytest.mark.parametrize("index", [True, False])
def test_times_in_the_future_become_now_and_grow_old_from_then_on(
    index: bool, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock was a year ahead while the cache was used."""
    age(root, "small", [0, 1], -365)
    for path in [] if index else root.glob("index*"):
        path.unlink()
    for path in block_files(root, "small"):
        os.utime(path, (time.time() + 365 * 86_400,) * 2)
    assert asked(root, capsys, "clear", "--older-than", "1d")["blocks"] == 0
    before = time.time()
    assert all(path.stat().st_mtime <= before for path in block_files(root, "small"))
    assert asked(root, capsys, "clear", "--older-than", "0", "--model", "small")["blocks"] == 2


def test_without_an_index_the_files_times_count(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in root.glob("index*"):
        path.unlink()
    old = block_files(root, "small")[0]
    os.utime(old, (time.time() - 8 * 86_400,) * 2)
    assert asked(root, capsys, "clear", "--older-than", "7d")["blocks"] == 1
    assert not old.exists() and len(block_files(root, "small")) == 1 and len(block_files(root, "org/big")) == 3
    store = open_store(root, "small")
    assert len(store._index.get_all_metadata()) == 1 and store.check() == [] and store.close()


def test_features_of_images_are_cleared_by_age_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = VisionFeatureSSDCache(root / "vision_features", free_reserve_bytes=0)
    for number in range(3):
        vision.put(f"h{number}", "small", mx.ones((8,)))
    assert vision.close()
    os.utime(root / "vision_features" / "h1_small.npy", (time.time() - 8 * 86_400,) * 2)
    done = asked(root, capsys, "clear", "--older-than", "7d")
    assert (done["blocks"], done["images"]) == (0, 1)
    assert sorted(path.name for path in root.rglob("*.npy")) == ["h0_small.npy", "h2_small.npy"]


@pytest.mark.parametrize("wrong", ["", "7", "a week", "-1d", "0.5s", "off"])
def test_a_wrong_age_is_one_line_and_clears_nothing(root: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    before = files(root)
    assert omlx(root, "clear", f"--older-than={wrong}") == 2
    assert complaint(capsys).startswith(f'omlx: --older-than "{wrong}"')
    assert files(root) == before


# ---- one conversation


def write_body(tmp_path: Path, body: Any) -> str:
    path = tmp_path / "conversation.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body), "utf-8")
    return str(path)


def test_a_conversation_needs_a_server(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    file = write_body(tmp_path, {"model": "small", "messages": [{"role": "user", "content": "x"}]})
    assert omlx(root, "clear", "--conversation", file) == 1
    assert "only a running one can delete a conversation" in complaint(capsys)
    assert files(root) == before


@pytest.mark.parametrize(
    ("body", "words", "said"),
    [
        (None, [], "cannot be read"),
        ("{", [], "is not valid JSON"),
        ("[]", [], 'must hold a JSON object with "messages"'),
        ({"model": "small"}, [], 'must hold a JSON object with "messages"'),
        ({"messages": []}, [], 'names no "model"'),
        ({"model": "small", "messages": []}, ["--model", "org/big"], "is not the model of the conversation"),
        ({"model": "small", "messages": []}, ["--older-than", "7d"], "do not go together"),
    ],
)
def test_a_wrong_conversation_is_one_line_and_asks_nobody(
    busy: PagedSSDCacheManager, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: Any,
    words: list[str], said: str,
) -> None:  # fmt: skip
    calls: list[Any] = []
    file = str(tmp_path / "absent.json") if body is None else write_body(tmp_path, body)
    with served(server(root, calls)) as url:
        assert omlx(root, "clear", "--conversation", file, "--url", url, *words) == 2
    assert said in complaint(capsys) and calls == []


def test_the_real_server_deletes_a_conversation_and_what_is_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, home = tmp_path / "cache", tmp_path / "served"
    make_tiny_model(home / "models" / "tiny")
    settings = Settings(home=home, paged_ssd_cache_dir=root, cache_write_policy="back", block_size=16)
    with served(create_app(EnginePool(settings.scheduler_config(), home, "tiny"), settings)) as url:
        texts = ["A beginning that both have. " + text * 8 for text in ("One. ", "Two! ")]
        chats = [{"model": "tiny", "messages": [{"role": "user", "content": text}]} for text in texts]
        for body in chats:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=60)
            assert answer.status_code == 200, answer.text
        (shown,) = asked(root, capsys, "stats", "--url", url)["models"]
        assert (shown["model"], shown["blocks"], shown["bytes"]) == ("tiny", 0, 0)  # all is in RAM
        assert shown["ram"]["blocks"] >= 6 and shown["ram"]["bytes"] > 0 and shown["last_used_ns"] > 0
        done = asked(root, capsys, "clear", "--older-than", "1h", "--url", url)
        assert done == {"blocks": 0, "bytes": 0, "images": 0}
        file = write_body(tmp_path, chats[0] | {"temperature": 0.5})
        assert omlx(root, "clear", "--conversation", file, "--url", url) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith("KB") and "blocks deleted" in lines[0]
        assert lines[1].endswith("prompt tokens stay: shared with other conversations")
        del chats[1]["model"]
        file = write_body(tmp_path, chats[1])
        done = asked(root, capsys, "clear", "--conversation", file, "--model", "tiny", "--url", url)
        assert done["blocks"] > 0 and (done["kept_tokens"], done["kept_because"]) == (0, None)
        assert omlx(root, "stats", "--url", url) == 0
        assert "no blocks" in capsys.readouterr().out
        assert omlx(root, "clear", "--older-than", "7d", "--url", url) == 0
        assert capsys.readouterr().out == "0 blocks deleted, 0 B\n"


def test_stats_without_an_answer_from_a_server_leave_ram_open(
    busy: PagedSSDCacheManager, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path / "other", root):  # the server's answer has no figures of RAM
        with served(server(folder, [])) as url:
            assert [model["ram"] for model in asked(root, capsys, "stats", "--url", url)["models"]] == [None, None]
    assert [model["ram"] for model in asked(root, capsys, "stats", "--url", "http://127.0.0.1:1")["models"]] == [
        None
    ] * 2


# ---- clear, with a server


def server(folder: Path | None, calls: list[Any], status: int = 200) -> FastAPI:
    """What the admin routes of a server with this cache folder answer."""
    app = FastAPI()

    async def figures() -> JSONResponse:
        return JSONResponse({"settings": {"paged_ssd_cache_dir": {"value": None if folder is None else str(folder)}}})

    async def clear(http: Request) -> JSONResponse:
        calls.append((await http.json(), http.headers.get("authorization")))
        if status != 200:
            return JSONResponse({"error": {"message": "the admin key\nis wrong"}}, status)
        return JSONResponse({"blocks": 4, "bytes": 4096})

    app.add_api_route("/admin/cache_probe", figures, methods=["GET"])
    app.add_api_route("/admin/cache/clear", clear, methods=["POST"])
    return app


def test_a_folder_in_use_is_cleared_by_its_server(
    busy: PagedSSDCacheManager, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    before = files(root)
    with served(server(root, calls)) as url:
        assert omlx(root, "clear", "--url", url) == 0
        assert capsys.readouterr().out == "4 blocks deleted, 4 KB\n"
        port = url.rpartition(":")[2]
        assert omlx(root, "clear", "--model", "org/big", "--port", port, "--admin-key", "k") == 0
    assert calls == [({"model": None}, None), ({"model": "org/big"}, "Bearer k")]
    assert files(root) == before


def test_without_an_answer_one_line_says_what_to_do(
    busy: PagedSSDCacheManager, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert omlx(root, "clear", "--url", "http://127.0.0.1:1") == 1
    said = complaint(capsys)
    assert f"is in use by process {os.getpid()}" in said
    assert "at http://127.0.0.1:1 nobody answers" in said
    assert "--url" in said
    assert omlx(root, "clear", "--url", "no address") == 1
    assert "--url" in complaint(capsys)


def test_a_servers_refusal_is_passed_on_in_one_line(
    busy: PagedSSDCacheManager, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(server(root, [], 401)) as url:
        assert omlx(root, "clear", "--url", url) == 1
    assert "answers 401: the admin key is wrong" in complaint(capsys)


def test_a_server_with_another_folder_is_left_alone(
    busy: PagedSSDCacheManager, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    for folder in (tmp_path / "other", None):
        with served(server(folder, calls)) as url:
            assert omlx(root, "clear", "--url", url) == 1
        assert "works on another folder" in complaint(capsys)
    with served(FastAPI(routes=[])) as url:
        assert omlx(root, "clear", "--url", url) == 1
    assert "answers 404" in complaint(capsys)
    assert calls == []


def test_the_real_server_clears_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, home = tmp_path / "cache", tmp_path / "served"
    make_tiny_model(home / "models" / "tiny")
    settings = Settings(home=home, paged_ssd_cache_dir=root, hot_cache_max_size=0)
    pool = EnginePool(settings.scheduler_config(), home, "tiny")
    with served(create_app(pool, settings)) as url:
        body = {"model": "tiny", "prompt": "once upon a time " * 20, "max_tokens": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        # The writer reports to the index every second.
        wait_until(lambda: asked(root, capsys, "stats")["total"]["blocks"] > 5)
        before = asked(root, capsys, "stats")["total"]
        assert asked(root, capsys, "verify")["problems"] == []
        assert asked(root, capsys, "clear", "--model", "tiny", "--url", url) == before | {"images": 0}
        assert omlx(root, "clear", "--model", "absent", "--url", url) == 1
        complaint(capsys)
    assert asked(root, capsys, "stats")["total"]["blocks"] == 0
    assert asked(root, capsys, "verify")["problems"] == []


def test_a_key_is_not_shown(busy: PagedSSDCacheManager, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omlx(root, "clear", "--url", "http://127.0.0.1:1", "--admin-key", "hush-hush") == 1
    assert "hush-hush" not in complaint(capsys)


@pytest.mark.parametrize("name", ["small", "org/big", "a", "..", "%41", "é b"])
def test_a_folders_name_leads_back_to_the_model(name: str) -> None:
    assert model_of(folder_name(name)) == name
