import logging
import threading
import time
from types import SimpleNamespace

import pytest

from omlx.storage import disk_store, recovery
from omlx.storage.folder import INDEX_NAME, block_path
from omlx.storage.open_stores import release_store
from omlx.storage.tensor_file import DamagedBlock, UnknownFormat, read_header, read_meta, with_size, write_block_file
from tests.storage.blocks import DAMAGES, SPECS, block, damage, meta, name, our_bytes, same, write
from tests.storage.test_disk_store import get, held, opened, put  # noqa: F401 (the fixture)


def unindexed(store, numbers):
    """Blocks whose index is lost."""
    for n in numbers:
        put(store, n, parent=name(n - 1))
    release_store(store, 60)
    (store.root / INDEX_NAME).unlink()
    (store.root / "index.snapshot").unlink()


def test_serving_does_not_wait_for_headers_and_sizes_count_at_once(opened, monkeypatch):  # noqa: F811
    unindexed(opened(), range(10))
    go_on, real = threading.Event(), recovery.read_meta
    monkeypatch.setattr(disk_store, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(recovery, "read_meta", lambda path: go_on.wait(60) and real(path))
    store = opened()
    assert held(store) == set() and store.blocks.bytes >= 10 * meta(0).file_size
    put(store, 20)
    assert store.flush(60) and same(get(store, 20), block(20))  # written while headers are still to be read
    go_on.set()
    assert store._complete.wait(60)
    assert held(store) == {*range(10), 20} and same(get(store, 3), block(3)) and store.check() == []


def test_a_limit_is_met_before_headers_are_read(opened, monkeypatch):  # noqa: F811
    unindexed(opened(), range(10))
    go_on, real = threading.Event(), recovery.read_meta
    monkeypatch.setattr(disk_store, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(recovery, "read_meta", lambda path: go_on.wait(60) and real(path))
    store = opened(5 * meta(0).file_size)
    assert store.settle(5) and our_bytes(store.root) <= 5 * meta(0).file_size + 32768
    go_on.set()
    assert store._complete.wait(60)
    assert store.flush(60) and held(store) and store.check() == []


def test_a_store_that_closes_before_all_is_identified_looks_again(opened, monkeypatch):  # noqa: F811
    unindexed(opened(), range(10))
    go_on, real = threading.Event(), recovery.read_meta
    monkeypatch.setattr(recovery, "_BATCH", 1)
    monkeypatch.setattr(disk_store, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(recovery, "read_meta", lambda path: go_on.wait(60) and real(path))
    store = opened()
    threading.Timer(0.2, go_on.set).start()
    release_store(store, 60)
    assert not (store.root / "index.snapshot").exists()
    store = opened()
    assert store._complete.wait(60)
    assert held(store) == set(range(10)) and store.check() == []


def test_progress_is_said_for_many_blocks(opened, monkeypatch, caplog):  # noqa: F811
    unindexed(opened(), range(25))
    monkeypatch.setattr(recovery, "_PROGRESS_EVERY", 10)
    monkeypatch.setattr(recovery, "_BATCH", 5)
    with caplog.at_level(logging.INFO):
        store = opened()
        assert store._complete.wait(60)
    said = [r.message.rpartition(": ")[2] for r in caplog.records if "identified" in r.message]
    assert said == ["10 of 25 blocks identified", "20 of 25 blocks identified", "25 of 25 blocks identified"]


def test_children_have_their_tokens_which_are_read_from_files_once(opened, monkeypatch):  # noqa: F811
    store = opened()
    for n in range(4):
        put(store, n, parent=b"head")
    assert all(m.tokens == meta(0).tokens for m in store.children("m", b"head"))  # while their writes are queued
    release_store(store, 60)
    store, reads, real = opened(), [], disk_store.read_meta
    monkeypatch.setattr(disk_store, "read_meta", lambda path: reads.append(path) or real(path))
    for _ in range(2):
        found = store.children("m", b"head")
        assert sorted(m.block_hash for m in found) == sorted(name(n) for n in range(4))
        assert all(m == meta(n, parent=b"head") for m in found for n in range(4) if m.block_hash == name(n))
    assert len(reads) == 4


def test_on_a_slow_disk_some_children_are_left_for_the_next_time(opened, monkeypatch):  # noqa: F811
    store = opened()
    for n in range(8):
        put(store, n, parent=b"head")
    release_store(store, 60)
    store, real = opened(), disk_store.read_meta
    now = [0.0]
    monkeypatch.setattr(disk_store, "time", SimpleNamespace(time_ns=time.time_ns, monotonic=lambda: now[0]))
    monkeypatch.setattr(disk_store, "_HEADS_S", 0.05)

    def slow(path):
        now[0] += 0.03
        return real(path)

    monkeypatch.setattr(disk_store, "read_meta", slow)
    seen = [len(store.children("m", b"head")) for _ in range(9)]
    assert 1 <= seen[0] < 8 == seen[-1] and seen == sorted(seen)


@pytest.mark.parametrize("how", ["deleted", "swapped", "empty", "half"])
def test_a_child_whose_file_was_spoiled_is_none_and_counts_as_damaged(opened, how):  # noqa: F811
    store = opened()
    put(store, 1, parent=b"head")
    put(store, 2)
    release_store(store, 60)
    store = opened()
    path = block_path(store.root, ("m", name(1)))
    if how == "deleted":
        path.unlink()
    elif how == "swapped":
        path.write_bytes(block_path(store.root, ("m", name(2))).read_bytes())
    else:
        damage(path, how)
    assert store.children("m", b"head") == [] and store.blocks.counts("m").damaged == 1
    assert store.flush(60) and held(store) == {2} and store.check() == []


# ---- reading the head of a file


@pytest.mark.parametrize("tokens", [0, 8, 600, 5000])
def test_the_head_of_a_file_says_what_its_header_says(tmp_path, tokens):
    write(tmp_path / "b", 1, numerics='é"tokens":"', cuts=(1, 3))
    assert read_meta(tmp_path / "b") == read_header(tmp_path / "b")[1]
    many = with_size(SPECS, meta(2)._replace(tokens=bytes(4 * tokens)))
    write_block_file(tmp_path / "c", block(2), many)
    assert read_meta(tmp_path / "c") == many


@pytest.mark.parametrize("how", DAMAGES)
def test_a_spoiled_head_is_damage_or_shows_when_the_block_is_read(tmp_path, how):
    write(tmp_path / "b", 1)
    damage(tmp_path / "b", how)
    try:
        found = read_meta(tmp_path / "b")
    except DamagedBlock:
        assert how not in ("checksum", "payload", "last byte", "zeroed tail")
    else:
        assert found.file_size == meta(1).file_size


def test_another_version_is_told_from_damage(tmp_path):
    write(tmp_path / "b", 1)
    raw = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(raw.replace(b'"format":"1"', b'"format":"2"'))
    with pytest.raises(UnknownFormat):
        read_meta(tmp_path / "b")
