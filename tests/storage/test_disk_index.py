import sqlite3

import pytest

from omlx.storage.bookkeeping import ChildMap
from omlx.storage.disk_index import BlockTable, Entry, IndexFile
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


def test_the_table_keeps_the_order_of_use_and_the_sums():
    table = BlockTable()
    for n in range(3):
        table.add(entry(n))
    table.touch(("m", name(0)))
    table.touch(("m", b"unknown"))
    assert [e.meta.block_hash for e in table.entries()] == [name(1), name(2), name(0)]
    table.add(entry(1))
    assert len(table) == 3 and table.bytes == 3 * meta(1).file_size and table.check() == []
    table.remove(("m", name(2)))
    table.sort()
    assert [e.meta.block_hash for e in table.entries()] == [name(1), name(0)] and table.check() == []
    used = [table.stamp() for _ in range(1000)]
    assert used == sorted(set(used))


def test_sqlite_gives_back_what_it_was_told(tmp_path):
    table, file = BlockTable(), IndexFile(tmp_path / "index")
    assert not file.clean and file.take_entries() == []
    for n in range(100):
        table.add(entry(n, parent=name(n - 1), cuts=(1, 8), numerics="é", start=3))
    table.remove(("m", name(50)))
    while changes := table.take_changes(7):
        file.save(changes)
    assert file.rows() == table.rows()
    file.close(clean=True)
    again = IndexFile(tmp_path / "index")
    entries = again.take_entries()
    assert again.clean and [e.meta for e in entries] == [e.meta for e in table.entries()] and again.take_entries() == []
    again.close(clean=False)
    unclean = IndexFile(tmp_path / "index")
    assert not unclean.clean and len(unclean.take_entries()) == 99
    unclean.close(clean=False)


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
    file.close(clean=True)


@pytest.mark.parametrize("version", [4, 99])
def test_an_index_of_another_version_is_made_anew(tmp_path, version):
    file = IndexFile(tmp_path / "index")
    file.close(clean=True)
    with sqlite3.connect(tmp_path / "index") as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    file = IndexFile(tmp_path / "index")
    assert file.damaged and not file.clean and file.rows() == {}
    file.close(clean=True)


@pytest.mark.parametrize("folder", ["../x", "/etc", "a", "m//n", "m/../n", "m/0", "m\0"])
def test_a_row_that_leads_out_of_the_root_makes_the_index_untrusted(tmp_path, folder):
    file, table = IndexFile(tmp_path / "index"), BlockTable()
    table.add(entry(1, folder))
    file.save(table.take_changes(1))
    file.close(clean=True)
    file = IndexFile(tmp_path / "index")
    assert file.damaged and file.take_entries() == []
    file.close(clean=True)


def test_the_file_shrinks_with_the_cache(tmp_path):
    table, file = BlockTable(), IndexFile(tmp_path / "index")
    for n in range(2000):
        table.add(entry(n))
    file.save(table.take_changes(5000))
    full = file.nbytes()
    for n in range(1990):
        table.remove(("m", name(n)))
    file.save(table.take_changes(5000))
    assert file.nbytes() < full / 10
    file.close(clean=True)
