import sqlite3
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omlx.storage.block_table import BlockTable, Entry, Pending, entry_of, pack_rows
from omlx.storage.packed import Chains, Order
from omlx.storage.snapshot import read_snapshot, write_snapshot
from omlx.storage.tensor_file import BlockMeta, write_block_file
from tests.storage.blocks import block, meta, name


def entry(n, folder="m", **fields):
    return Entry(folder, meta(n, **fields), used=n + 1)


def without_tokens(m):
    return m._replace(tokens=None)


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


@pytest.mark.parametrize("fields", [{"parent": bytes(65)}, {"start": -1}, {"token_count": 1 << 32}])
def test_what_does_not_fit_a_column_is_refused_and_leaves_nothing(fields):
    table = BlockTable()
    table.add(entry(0))
    with pytest.raises(ValueError, match="memoryview"):
        table.add(Entry("m", meta(1)._replace(**fields)))
    assert table.check() == [] and not table.known(("m", name(1)))
    table.add(entry(2))
    table.sort()
    assert len(table) == 2 and table.check() == []


def test_an_entry_is_in_force_until_it_is_replaced_or_removed():
    table = BlockTable()
    first, second = entry(1), entry(1)
    table.add(first)
    asked_for = table.get(("m", name(1)))
    assert table.holds(first) and table.holds(asked_for)
    table.add(second)
    assert not table.holds(first) and not table.holds(asked_for) and table.holds(second)
    table.remove(("m", name(1)))
    assert not table.holds(second) and table.get(("m", name(1))) is None


def test_blocks_that_are_to_be_written_have_their_tokens_and_survive_a_load():
    table, waiting = BlockTable(), entry(2)
    waiting.pending = Pending(block(2), write_block_file, meta(2).tokens)
    table.add(entry(1))
    table.add(waiting)
    assert table.meta(("m", name(2))) == meta(2) and table.meta(("m", name(1))) == without_tokens(meta(1))
    assert table.rows().keys() == {("m", name(1))} and not table.is_told
    table.load(pack_rows(other_table(3, 4).rows().values()))
    assert [e.meta.block_hash for e in table.entries()] == [name(2), name(3), name(4)] and table.check() == []
    assert table.holds(waiting) and table.pending(waiting) is waiting.pending
    table.written(waiting)
    assert table.pending(waiting) is None and table.is_told and len(table.rows()) == 3


def other_table(*numbers):
    table = BlockTable()
    for n in numbers:
        table.add(entry(n))
    return table


def test_many_are_found_at_once_as_they_are_one_by_one():
    table = BlockTable()
    for n in range(3000):  # so that it grows on the way
        table.add(entry(n, folder=f"m{n % 2}", parent=name(n - 1), cuts=(n % 5,), numerics=f"n{n % 3}", start=n))
    table.add(Entry("m0", meta(5000), stale=True))
    table.add(Entry("m0", BlockMeta(name(0)[:9], 1)))
    assert table.check() == []
    for folder in ("m0", "m1", "unknown"):
        names = [name(n) for n in (*range(0, 4000, 7), 5000)]
        assert table.metas(folder, names) == [table.meta((folder, n)) for n in names]
    assert table.metas("m0", [name(0)[:9]] * 20) == [table.meta(("m0", name(0)[:9]))] * 20
    short = BlockMeta(name(0)[:9], 1, tokens=None)
    assert table.metas("m0", [name(0), name(0)[:9]] * 20)[:2] == [table.meta(("m0", name(0))), short]
    assert table.metas("m0", []) == []


def test_children_come_newest_first_and_no_more_than_asked_for():
    table = BlockTable()
    for n in range(50):
        table.add(entry(n, parent=b"head" if n % 2 else b"other"))
    table.add(Entry("m", meta(99, parent=b"head"), stale=True))
    table.add(entry(98, folder="another", parent=b"head"))
    found = [e.meta.block_hash for e in table.children(("m", b"head"), 5)]
    assert found == [name(n) for n in (49, 47, 45, 43, 41)]
    assert len(table.children(("m", b"head"), 100)) == 25 and table.children(("m", b"nobody"), 5) == []


def test_files_that_were_not_seen_go():
    table = BlockTable()
    table.load(pack_rows(other_table(1, 2, 3).rows().values()))
    assert table.see(("m", name(2))) and not table.see(("m", name(4)))
    table.add(entry(5))
    table.keep_only_seen()
    assert [e.meta.block_hash for e in table.entries()] == [name(2), name(5)] and table.check() == []


def test_a_found_file_takes_up_room_and_is_not_read_until_it_is_identified():
    table = BlockTable()
    table.add(Entry("m", meta(1), used=5, identified=False))
    assert table.bytes == meta(1).file_size and table.known(("m", name(1)))
    assert table.get(("m", name(1))) is None and table.meta(("m", name(1))) is None
    assert table.rows() == {} and not table.is_told and table.take_changes(9) == []
    table.add(entry(1))
    assert table.is_told and table.meta(("m", name(1))) == without_tokens(meta(1)) and len(table.take_changes(9)) == 1


# ---- the parts


def test_chains_find_what_was_added_also_after_they_grew():
    chains, keys = Chains(8), [3, 3 + 16, 3 + 32, 5, 3]
    for slot, key in enumerate(keys, 1):
        chains.add(key, slot)
    chains.remove(2)
    assert list(chains.slots(3)) == [5, 1] and list(chains.slots(19)) == [] and list(chains.slots(35)) == [3]
    chains.grow(5000, np.array([1, 3, 4, 5], np.int32))
    assert sorted(chains.slots(3)) == [1, 5] and list(chains.slots(5)) == [4]
    everything = chains.find(np.array([3, 35, 5, 19], np.uint64), lambda slots, which: slots != 5)
    assert everything.tolist() == [1, 3, 4, 0]


def test_an_order_is_kept_while_slots_come_and_go():
    order = Order(4)
    order.load(np.array([2, 4]), 4)
    order.append(1)
    order.remove(4)
    order.grow(9)
    order.append(9)
    assert list(order) == [2, 1, 9]


# ---- against a dictionary


class TableMachine(RuleBasedStateMachine):
    """A table and an OrderedDict of what it should hold, through restarts by snapshot and by SQLite's rows."""

    numbers = st.integers(0, 12)

    @initialize()
    def start(self):
        self.table, self.model = BlockTable(), OrderedDict()

    @rule(n=numbers, folder=st.sampled_from(["", "m"]), parent=numbers, size=st.integers(1, 9), stale=st.booleans())
    def add(self, n, folder, parent, size, stale):
        m = BlockMeta(name(n)[: 1 + 3 * n], n, name(parent), None, n, n, (n,), f"n{n % 2}", size)
        self.table.add(Entry(folder, m, self.table.stamp(), stale))
        self.model.pop((folder, m.block_hash), None)
        self.model[folder, m.block_hash] = m, stale

    @rule(n=numbers)
    def remove(self, n):
        self.table.remove(("m", name(n)[: 1 + 3 * n]))
        self.model.pop(("m", name(n)[: 1 + 3 * n]), None)

    @rule(n=numbers)
    def touch(self, n):
        key = ("m", name(n)[: 1 + 3 * n])
        self.table.touch(key)
        if key in self.model and not self.model[key][1]:
            self.model.move_to_end(key)

    @rule(by_rows=st.booleans())
    def restart(self, by_rows):
        packed = pack_rows(self.table.rows().values()) if by_rows else self.table.pack()
        self.table = BlockTable()
        self.table.load(packed)

    @invariant()
    def is_the_same(self):
        table = self.table
        assert table.check() == [] and len(table) == len(self.model)
        assert [(e.key, e.meta, e.stale) for e in table.entries()] == [(k, *v) for k, v in self.model.items()]
        for parent in range(13):
            wanted = {k for k, (m, stale) in self.model.items() if m.parent == name(parent) and not stale}
            assert {e.key for e in table.children(("m", name(parent)), 99)} == {k for k in wanted if k[0] == "m"}
        assert table.folder_bytes["m"] == sum(m.file_size for (f, _), (m, _) in self.model.items() if f == "m")


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ---- rows and snapshots


def test_a_snapshot_gives_back_the_table(tmp_path):
    table = BlockTable()
    for n in range(100):
        table.add(entry(n, parent=name(n - 1), cuts=(1, 8) if n % 3 else (), numerics="é", start=3))
    table.remove(("m", name(50)))
    table.touch(("m", name(7)))
    checksum = write_snapshot(tmp_path / "s", table.pack())
    again = BlockTable()
    again.load(read_snapshot(tmp_path / "s", checksum))
    assert again.rows() == table.rows() and again.check() == [] and list(again.rows()) == list(table.rows())
    with pytest.raises(ValueError, match="checksum"):
        read_snapshot(tmp_path / "s", bytes(16))


def test_an_empty_table_has_a_snapshot_too(tmp_path):
    checksum = write_snapshot(tmp_path / "s", BlockTable().pack())
    assert read_snapshot(tmp_path / "s", checksum).count == 0


def test_every_flipped_byte_of_a_snapshot_is_noticed(tmp_path):
    path = tmp_path / "s"
    checksum = write_snapshot(path, other_table(1, 2).pack())
    raw = path.read_bytes()
    for at in (*range(0, len(raw), 37), len(raw) - 1):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(ValueError):
            read_snapshot(path, checksum)
    for size in (0, 8, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(ValueError):
            read_snapshot(path, checksum)
    path.write_bytes(raw + b"x")
    with pytest.raises(ValueError):
        read_snapshot(path, checksum)


GOOD = ("m", b"h", b"p", 1, 0, 0, "1,2", "n", 10, 5, 0)
BAD = [(0, "../x"), (0, b"m"), (1, b""), (1, b"x" * 65), (1, "h"), (2, b"x" * 65), (3, -1), (3, "1"), (6, "x"), (8, -1)]
BAD += [(8, 1 << 62), (9, -5), (9, None), (10, 2), (10, 0.5)]


@pytest.mark.parametrize(("column", "value"), BAD)
def test_a_row_that_no_table_has_written_is_refused(column, value):
    assert entry_of(GOOD).meta.cuts == (1, 2)
    with pytest.raises(ValueError):
        entry_of((*GOOD[:column], value, *GOOD[column + 1 :]))


def test_sqlite_gives_the_types_that_rows_have():
    db = sqlite3.connect(":memory:")
    row = next(iter(other_table(3).rows().values()))
    assert entry_of(db.execute(f"SELECT {','.join('?' * len(row))}", row).fetchone()).meta == without_tokens(meta(3))
    db.close()


class _Counted:
    """A column that counts how often it is read."""

    def __init__(self, column):
        self.column, self.reads = column, 0

    def __getitem__(self, slot):
        self.reads += 1
        return self.column[slot]

    def __setitem__(self, slot, value):
        self.column[slot] = value


@pytest.mark.parametrize("grown", [False, True])
def test_a_block_is_taken_out_as_fast_with_a_thousand_siblings_as_with_one(grown):
    chains = Chains(2000)
    for slot in range(1, 1001):
        chains.add(7, slot)
    if grown:
        chains.grow(5000, np.arange(1, 1001, dtype=np.int32))
    chains.next = counted = _Counted(chains.next)
    for slot in (1, 500, 1000, 499, 2):  # the last, one between, the first
        chains.remove(slot)
    assert counted.reads < 20
    assert list(chains.slots(7)) == [s for s in range(999, 2, -1) if s not in (499, 500)]


def test_rows_that_cannot_be_put_in_order_are_damaged():
    rows = list(other_table(1, 2).rows().values())
    with pytest.raises(ValueError, match="damaged"):
        pack_rows([rows[0], (*rows[1][:9], b"\1", rows[1][10])])
