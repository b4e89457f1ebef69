import os
import sqlite3

import pytest

from omlx.storage.block_table import BlockTable, Entry
from omlx.storage.bookkeeping import ChildMap
from omlx.storage.disk_index import IndexFile, snapshot_path
from tests.storage.blocks import meta, name


def entry(n, folder="m", **fields):
    return Entry(folder, meta(n, **fields), used=n + 1)


def test_children_of_one_and_of_many():
    children = ChildMap()
    parent = ("m", b"p")
    assert list(children.of(parent)) == []
    for child in (b"a", b"b", b"a", b"c"):
        children.add(parent, child)
    assert list(children.of(parent)) == [b"a", b"b", b"c"]
    for child in (b"b", b"x", b"a", b"c"):
        children.remove(parent, child)
    assert list(children.of(parent)) == [] and children.pairs() == set()


def other_table(numbers):
    table = BlockTable()
    for n in numbers:
        table.add(entry(n))
    return table


def rows_of(packed):
    table = BlockTable()
    table.load(packed)
    return table.rows()


def tell_all(table, file):
    while changes := table.take_changes(7):
        file.save(changes)


def test_sqlite_gives_back_what_it_was_told(tmp_path):
    table, file = BlockTable(), IndexFile(tmp_path / "index")
    assert not file.clean and file.load().count == 0
    for n in range(100):
        table.add(entry(n, parent=name(n - 1), cuts=(1, 8), numerics="é", start=3))
    table.remove(("m", name(50)))
    tell_all(table, file)
    assert file.rows() == table.rows()
    file.close(None)
    unclean = IndexFile(tmp_path / "index")
    assert not unclean.clean and rows_of(unclean.load()) == table.rows()
    unclean.close(None)


def test_a_clean_close_leaves_a_snapshot_that_the_next_open_takes(tmp_path):
    table, file = other_table(range(10)), IndexFile(tmp_path / "index")
    tell_all(table, file)
    file.close(table.pack())
    snapshot = snapshot_path(tmp_path / "index")
    assert snapshot.exists()
    again = IndexFile(tmp_path / "index")
    assert again.clean and again.nbytes() > snapshot.stat().st_size
    assert rows_of(again.load()) == table.rows() and not snapshot.exists()
    again.close(None)
    unclean = IndexFile(tmp_path / "index")
    assert not unclean.clean and rows_of(unclean.load()) == table.rows()
    unclean.close_as_found()
    third = IndexFile(tmp_path / "index")
    assert not third.clean
    third.close(None)


@pytest.mark.parametrize("how", ["deleted", "damaged", "of before", "folder"])
def test_a_snapshot_that_is_not_the_last_ones_is_not_used(tmp_path, caplog, how):
    snapshot = snapshot_path(tmp_path / "index")
    for upto in (5, 9):
        table, file = other_table(range(upto)), IndexFile(tmp_path / "index")
        tell_all(table, file)
        before = snapshot.read_bytes() if snapshot.exists() else b""
        file.load()
        file.close(table.pack())
    raw = snapshot.read_bytes()
    snapshot.unlink()
    if how == "folder":
        snapshot.mkdir()
    elif how != "deleted":
        snapshot.write_bytes(before if how == "of before" else raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:])
    file = IndexFile(tmp_path / "index")
    assert file.clean and not file.damaged and rows_of(file.load()) == table.rows() and not snapshot.exists()
    assert file.snapshot_damaged == (how in ("damaged", "of before")) == (len(caplog.records) == 1)
    file.close_as_found()
    file = IndexFile(tmp_path / "index")
    assert file.clean and rows_of(file.load()) == table.rows()
    file.close(None)


def test_a_pipe_in_the_snapshots_place_does_not_hold_up_the_start(tmp_path):
    table, file = other_table(range(10)), IndexFile(tmp_path / "index")
    tell_all(table, file)
    file.close(table.pack())
    snapshot = snapshot_path(tmp_path / "index")
    snapshot.unlink()
    os.mkfifo(snapshot)
    again = IndexFile(tmp_path / "index")
    assert again.clean and rows_of(again.load()) == table.rows() and not snapshot.exists()
    again.close(None)


def test_a_failed_transaction_changes_nothing_and_can_be_repeated(tmp_path):
    table, file = BlockTable(), IndexFile(tmp_path / "index")
    table.add(entry(1))
    changes = table.take_changes(10)
    with pytest.raises(sqlite3.Error):
        file.save([*changes, (("m", b"x"), ("too", "short"))])
    assert file.rows() == {}
    table.give_back(changes)
    file.save(table.take_changes(10))
    assert file.rows() == table.rows()
    file.close(None)


@pytest.mark.parametrize("version", [2, 3, 99])
def test_an_index_of_another_version_is_made_anew(tmp_path, version):
    file = IndexFile(tmp_path / "index")
    file.close(None)
    with sqlite3.connect(tmp_path / "index") as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    file = IndexFile(tmp_path / "index")
    assert file.damaged and not file.clean and file.rows() == {} and file.load().count == 0
    file.close(None)


@pytest.mark.parametrize("folder", ["../x", "/etc", "a", "m//n", "m/../n", "m/0", "m\0"])
def test_a_row_that_leads_out_of_the_root_makes_the_index_untrusted(tmp_path, folder):
    file, table = IndexFile(tmp_path / "index"), BlockTable()
    table.add(entry(1, folder))
    file.save(table.take_changes(1))
    file.close(None)
    file = IndexFile(tmp_path / "index")
    assert file.load().count == 0 and file.damaged and not file.clean and file.rows() == {}
    file.close(None)


def test_the_file_shrinks_with_the_cache(tmp_path):
    table, file = BlockTable(), IndexFile(tmp_path / "index")
    for n in range(2000):
        table.add(entry(n))
    file.save(table.take_changes(5000))
    full = file.nbytes()
    for n in range(1990):
        table.remove(("m", name(n)))
    file.save(table.take_changes(5000))
    assert file.nbytes() < full / 5
    file.close(None)
