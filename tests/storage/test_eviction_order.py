"""What goes first when the limit asks for room: files of no use, blocks of no use now, the least recently used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx.storage.block_table import BlockTable
from omlx.storage.disk_store import DiskStore
from omlx.storage.folder import INDEX_NAME, block_path
from omlx.storage.open_stores import open_store, release_store
from omlx.storage.tensor_file import write_block_file
from tests.storage.blocks import block, meta, name

MB = 1 << 20
Opener = Callable[..., DiskStore]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    stores = []

    def opener(max_bytes: int = 64 * MB) -> DiskStore:
        stores.append(open_store(tmp_path / "root", max_bytes, 64 * MB, 0))
        return stores[-1]

    yield opener
    for store in stores:
        release_store(store, 60)


def put(store: DiskStore, n: int, numerics: str, folder: str = "m") -> None:
    result = store.blocks.put(folder, meta(n, numerics=numerics), block(n), write_block_file, may_wait=False)
    assert result == "queued"


def held(store: DiskStore, folder: str = "m") -> set[int]:
    return {n for n in range(30) if store.blocks.entry((folder, name(n))) is not None}


def make_room_for_one(store: DiskStore) -> None:
    """As if a block asked for one byte more than there is."""
    usage = store.blocks.usage().values()
    assert store.blocks.make_room(store.blocks.room_for_others("") - sum(size for _, size in usage) + 1)


def leave(store: DiskStore, keep: int) -> None:
    """Makes room until only so many blocks are left."""
    while sum(blocks for blocks, _ in store.blocks.usage().values()) > keep:
        make_room_for_one(store)
    assert store.flush(60) and store.check() == []


def test_blocks_under_other_numerics_than_those_in_force_go_before_older_ones(opened: Opener) -> None:
    store = opened()
    for n, numerics in enumerate(("new", "old", "new", "old", "old", "new")):
        put(store, n, numerics)
    store.blocks.use_numerics("m", "new")
    for left, keep in ((5, {0, 2, 3, 4, 5}), (4, {0, 2, 4, 5}), (3, {0, 2, 5}), (2, {2, 5})):
        leave(store, left)
        assert held(store) == keep
    assert store.blocks.counts("m").evictions == 4


def test_with_any_numerics_they_are_ordinary_blocks(opened: Opener) -> None:
    store = opened()
    for n, numerics in enumerate(("new", "old", "new", "old")):
        put(store, n, numerics)
    store.blocks.use_numerics("m", "new")
    store.blocks.use_numerics("m", None)  # exact mode is off
    leave(store, 2)
    assert held(store) == {2, 3}


def test_other_models_have_numerics_of_their_own(opened: Opener) -> None:
    store = opened()
    put(store, 0, "new")
    put(store, 1, "old", folder="not loaded")
    put(store, 2, "old")
    put(store, 3, "old", folder="not loaded")
    store.blocks.use_numerics("m", "new")
    leave(store, 3)
    assert held(store) == {0} and held(store, "not loaded") == {1, 3}
    leave(store, 1)
    assert held(store) == set() and held(store, "not loaded") == {3}


def test_a_block_that_was_stored_again_or_is_in_use_is_spared(opened: Opener) -> None:
    store = opened()
    for n in range(3):
        put(store, n, "old")
    store.blocks.use_numerics("m", "new")
    put(store, 3, "new")
    store.blocks.delete(("m", name(0)))
    put(store, 0, "new")
    store.blocks.pin(("m", name(1)))
    leave(store, 3)
    assert held(store) == {0, 1, 3}
    leave(store, 2)
    assert held(store) == {0, 1}


def stale_file(root: Path, n: int) -> Path:
    """A block file as another version would write it."""
    path = block_path(root, ("m", name(n)))
    write_block_file(path, block(n), meta(n, numerics="new"))
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"2"'))
    return path


def test_files_of_other_versions_go_before_all_others(opened: Opener, tmp_path: Path) -> None:
    store = opened()
    for n, numerics in enumerate(("new", "old", "new")):
        put(store, n, numerics)
    store.flush(60)
    root = tmp_path / "root"
    path = block_path(root, ("m", name(9)))
    path.parent.mkdir(exist_ok=True)
    release_store(store, 60)
    stale_file(root, 9)
    (root / INDEX_NAME).unlink()
    store = opened()
    store.blocks.use_numerics("m", "new")
    leave(store, 3)
    assert not path.exists() and held(store) == {0, 1, 2}
    leave(store, 2)
    assert held(store) == {0, 2}


def test_the_order_is_the_same_after_a_restart_and_after_a_search_of_the_folder(opened: Opener, tmp_path: Path) -> None:
    for spoil in (lambda: None, (tmp_path / "root" / INDEX_NAME).unlink):
        store = opened()
        for n, numerics in enumerate(("new", "old", "new", "old")):
            put(store, n, numerics)
        store.flush(60)
        release_store(store, 60)
        spoil()
        store = opened()
        store.blocks.use_numerics("m", "new")
        leave(store, 2)
        assert held(store) == {0, 2}
        store.blocks.clear(None)
        release_store(store, 60)


def test_a_lower_limit_is_met_in_the_same_order(opened: Opener) -> None:
    store = opened()
    for n, numerics in enumerate(("new", "old", "new", "old")):
        put(store, n, numerics)
    store.blocks.use_numerics("m", "new")
    store.flush(60)
    store.blocks.lower_limit(store.blocks.bytes - 1000)
    assert 1 not in held(store) and 0 in held(store)


def test_an_eviction_does_not_look_through_all_blocks(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    for n in range(28):
        put(store, n, "new" if n % 2 else "old")
    store.blocks.use_numerics("m", "new")
    looked: list[Any] = []
    entries = store.blocks._table.entries

    def watched() -> Iterator[Any]:
        for entry in entries():
            looked.append(entry)
            yield entry

    monkeypatch.setattr(store.blocks._table, "entries", watched)
    for _ in range(27):
        looked.clear()
        make_room_for_one(store)
        assert len(looked) <= 2
    assert held(store) == {27}


def test_blocks_in_use_are_not_gone_through_for_every_block_that_goes(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    for n in range(30):
        put(store, n, "")
    keys = [("m", name(n)) for n in range(20)]
    store.blocks.pin(*keys)
    make_room_for_one(store)
    seen, entry = [], BlockTable._entry
    monkeypatch.setattr(BlockTable, "_entry", lambda table, slot: seen.append(slot) or entry(table, slot))
    make_room_for_one(store)
    assert len(seen) < 5
    monkeypatch.undo()
    assert held(store) == set(range(30)) - {20, 21}
    store.blocks.unpin(*keys)
    leave(store, 20)
    assert held(store) == set(range(20))  # used last
