import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from omlx.storage import folder, open_stores
from omlx.storage.block_table import BlockTable, Entry
from omlx.storage.clearing import clear
from omlx.storage.folder import INDEX_NAME, FolderLock, StoreLocked, block_path, folder_name, model_of
from omlx.storage.open_stores import open_store, release_store
from omlx.storage.recovery import Recovery
from omlx.storage.tensor_file import BlockMeta, read_block_file, write_block_file
from tests.storage.blocks import DAMAGES, block, damage, meta, name, our_bytes, same, write
from tests.support import wait_until

MB = 1 << 20
SIZE = meta(0).file_size
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def opened(tmp_path):
    """Opens stores that are closed at the end; the default root is a folder that is not there yet."""
    stores = []

    def opener(max_bytes=64 * MB, *, root=tmp_path / "root", queue_bytes=64 * MB, reserve_bytes=0):
        stores.append(open_store(root, max_bytes, queue_bytes, reserve_bytes))
        return stores[-1]

    yield opener
    for store in stores:
        if open_stores.is_open(store):
            release_store(store, 60)


def put(store, n, folder="m", write_file=write_block_file, buffer=None, **fields):
    return store.blocks.put(folder, meta(n, **fields), buffer or block(n), write_file, may_wait=buffer is not None)


def get(store, n, folder="m"):
    return store.fetch((folder, name(n)), read_block_file)


def held(store, folder="m", upto=30):
    return {n for n in range(upto) if store.blocks.meta((folder, name(n)))}


def path_of(store, n, folder="m"):
    return block_path(store.root, (folder, name(n)))


def test_a_block_is_readable_from_the_moment_it_is_put(opened):
    store = opened()
    gate = threading.Event()

    def slow(path, buffer, known):
        gate.wait(60)
        write_block_file(path, buffer, known)

    assert put(store, 1, write_file=slow) == "queued"
    assert store.blocks.state(("m", name(1))) == "writing" and same(get(store, 1), block(1))
    assert [m.file_size for m in store.blocks.metas("m")] == [SIZE]
    gate.set()
    assert store.flush(60) and store.blocks.state(("m", name(1))) == "ssd"
    assert same(get(store, 1), block(1)) and path_of(store, 1).stat().st_size == SIZE
    assert get(store, 2) is None and store.check() == []


def test_blocks_and_what_is_known_of_them_survive_a_restart(opened):
    store = opened()
    put(store, 1, parent=b"root", cuts=(3, 8), numerics="x", start=8)
    put(store, 2, "other")
    assert release_store(store, 60)
    store = opened()
    assert same(get(store, 1), block(1)) and same(get(store, 2, "other"), block(2)) and get(store, 2) is None
    known = meta(1, parent=b"root", cuts=(3, 8), numerics="x", start=8)
    assert store.blocks.meta(("m", name(1))) == known._replace(tokens=None)
    assert store.children("m", b"root") == [known]
    assert store.check() == [] and store.blocks.usage().keys() == {"m", "other"}


def test_folders_are_private_and_the_hash_names_the_place(opened):
    store = opened()
    put(store, 1)
    store.flush(60)
    path = path_of(store, 1)
    assert path == store.root / "m" / name(1).hex()[0] / f"{name(1).hex()}.safetensors"
    for place in (store.root, path.parent.parent, path.parent):
        assert place.stat().st_mode & 0o777 == 0o700
    for place in (path, store.root / INDEX_NAME, store.root / ".lock"):
        assert place.stat().st_mode & 0o777 == 0o600


# ---- limits


def test_least_recently_used_blocks_of_any_folder_go_first_also_after_a_restart(opened):
    store = opened()
    for n in range(4):
        put(store, n, ("ma", "mb")[n % 2])
    store.flush(60)
    store.blocks.touch([("mb", name(1)), ("ma", name(0))])
    release_store(store, 60)
    store = opened(2 * SIZE + 20_000)
    assert store.check() == [] and held(store, "ma") == {0} and held(store, "mb") == {1}
    assert not path_of(store, 2, "ma").exists() and store.blocks.counts("ma").evictions == 1


def test_all_files_stay_within_the_limit_while_blocks_come(opened):
    limit = 12 * SIZE + 40_000
    store = opened(limit)
    most, done = 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, our_bytes(store.root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(150):
        put(store, n)
        store.blocks.touch([("m", name(0))])
    assert store.flush(60)
    done.set()
    watcher.join()
    assert 0 in held(store) and len(held(store, upto=150)) >= 10
    assert our_bytes(store.root) <= limit and most <= limit + 2 * SIZE and store.check() == []


def test_pinned_blocks_are_never_evicted_and_a_block_that_cannot_fit_evicts_nothing(opened):
    store = opened(3 * SIZE + 20_000)
    for n in range(3):
        put(store, n)
        store.blocks.pin(("m", name(n)))
    assert put(store, 3) == "declined" and held(store) == {0, 1, 2}
    store.blocks.unpin(("m", name(1)))
    assert put(store, 3) == "queued" and held(store) == {0, 2, 3}
    assert opened(SIZE - 1, root=store.root.parent / "small").blocks.fits(SIZE) is False
    with pytest.raises(ValueError, match="not pinned"):
        store.blocks.unpin(("m", name(1)))


def test_other_files_and_a_lower_limit_count(opened):
    store = opened(20 * SIZE)
    for n in range(10):
        put(store, n)
    store.blocks.count_other_files("pictures", 14 * SIZE)
    assert 0 < len(held(store)) < 6
    second = opened(16 * SIZE)
    assert second is store and held(store) <= {8, 9} and store.check() == []


def test_free_space_is_left_on_the_disk(opened, monkeypatch):
    real = os.statvfs

    def small(path):
        there = list(real(path))
        there[1], there[2], there[4] = 1, 1000 * SIZE, 3 * SIZE  # f_frsize, f_blocks, f_bavail
        return os.statvfs_result(there)

    store = opened(reserve_bytes=SIZE)
    for n in range(8):
        put(store, n)
    store.flush(60)
    used = store.blocks.bytes
    monkeypatch.setattr(os, "statvfs", small)
    put(store, 8)
    store.flush(60)
    put(store, 9)
    store.flush(60)
    assert 9 in held(store) and store.blocks.bytes <= used + 3 * SIZE
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([1, 1, 1000 * SIZE, 0, 0, 0, 0, 0, 0, 255]))
    store.blocks.touch([("m", name(9))])
    put(store, 10)
    store.flush(60)
    assert len(held(store)) < 10


def test_a_full_queue_leaves_blocks_waiting_in_ram_and_writes_them_later(opened):
    store = opened(queue_bytes=2 * SIZE)
    gate = threading.Event()

    def slow(path, buffer, known):
        gate.wait(60)
        write_block_file(path, buffer, known)

    buffers = {n: block(n) for n in range(6)}
    results = [put(store, n, write_file=slow, buffer=buffers[n]) for n in range(6)]
    assert results == ["queued"] * 2 + ["waiting"] * 4 and buffers[5].unsaved and not buffers[0].unsaved
    assert store.blocks.queue_bytes <= 2 * SIZE and held(store) == {0, 1}
    assert put(store, 9) == "declined" and store.blocks.counts("m").dropped_writes == 1
    del buffers[3]  # left RAM
    gate.set()
    assert store.flush(60) and held(store) == {0, 1, 2, 4, 5}
    assert store.blocks.counts("m").dropped_writes == 2 and not any(b.unsaved for b in buffers.values())
    assert put(store, 3) == "queued" and store.check() == []


# ---- damage


@pytest.mark.parametrize("how", [*DAMAGES, "deleted", "swapped", "folder", "pipe"])
def test_a_spoiled_file_is_a_miss_once_and_heals(opened, caplog, how):
    store = opened()
    put(store, 1)
    put(store, 2)
    store.flush(60)
    path = path_of(store, 1)
    if how in DAMAGES:
        damage(path, how)
    elif how == "swapped":
        shutil.copy(path_of(store, 2), path)
    else:
        path.unlink()
    if how == "folder":
        (path / "inside").mkdir(parents=True)
    elif how == "pipe":
        os.mkfifo(path)
    caplog.set_level(logging.WARNING)
    assert get(store, 1) is None and get(store, 1) is None and same(get(store, 2), block(2))
    assert store.blocks.counts("m").damaged == 1 and len(caplog.records) == 1 and str(path) in caplog.text
    assert store.flush(60) and not path.exists() and held(store) == {2}
    put(store, 1)
    store.flush(60)
    assert same(get(store, 1), block(1)) and store.check() == []


@pytest.mark.parametrize("how", [*DAMAGES, "deleted", "swapped"])
@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_file_that_was_spoiled_while_the_store_was_closed_is_a_miss(opened, how, index):
    store = opened()
    put(store, 1)
    put(store, 2)
    release_store(store, 60)
    path = path_of(store, 1)
    if how in DAMAGES:
        damage(path, how)
    elif how == "swapped":
        shutil.copy(path_of(store, 2), path)
    else:
        path.unlink()
    if index == "lost":
        (store.root / INDEX_NAME).unlink()
    store = opened()
    assert get(store, 1) is None and same(get(store, 2), block(2))
    assert store.flush(60) and held(store) == {2}
    assert store.blocks.counts("m").damaged == (how != "deleted")  # a start does not count a file that is not there
    put(store, 1)
    assert store.check() == [] and same(get(store, 1), block(1))


def spoil_index(path, how):
    if how == "deleted":
        path.unlink()
    elif how == "folder":
        path.unlink()
        (path / "x").mkdir(parents=True)
    elif how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "rubbish":
        path.write_bytes(b"no database" * 1000)
    else:
        raw = bytearray(path.read_bytes())
        for at in range(4096, len(raw), 100):
            raw[at] ^= 0x55
        path.write_bytes(raw)


@pytest.mark.parametrize("how", ["deleted", "folder", "half", "empty", "rubbish", "flips"])
def test_a_spoiled_index_is_built_again_from_the_files(opened, how):
    store = opened()
    for n in range(20):
        put(store, n, parent=name(n - 1))
    store.flush(60)
    os.utime(path_of(store, 7), (1, 1))
    release_store(store, 60)
    spoil_index(store.root / INDEX_NAME, how)
    store = opened()
    assert held(store) == set(range(20)) and same(get(store, 3), block(3))
    assert [m.block_hash for m in store.children("m", name(4))] == [name(5)]
    assert store.blocks.metas("m")[0].block_hash == name(7)  # the oldest file
    assert store.check() == [] and store.index_damaged == 1


@pytest.mark.parametrize("how", ["deleted", "rubbish"])
def test_an_index_that_is_spoiled_while_in_use_heals(opened, how):
    store = opened()
    put(store, 1)
    store.flush(60)
    spoil_index(store.root / INDEX_NAME, how)
    for n in range(2, 5):
        put(store, n)
        store.flush(60)
    assert wait_until(lambda: store.flush(60) and store.index_damaged == 1 and store.check() == [])
    release_store(store, 60)
    assert held(opened()) == {1, 2, 3, 4}


def test_every_flipped_byte_of_an_index_gives_right_blocks_or_misses(opened):
    store = opened()
    for n in range(3):
        put(store, n)
    release_store(store, 60)
    path = store.root / INDEX_NAME
    raw = path.read_bytes()
    used = [at for at in range(100, len(raw)) if raw[at]]
    for at in (*range(0, 100, 3), *used[:: len(used) // 40]):  # SQLite's own header has 100 bytes
        changed = bytearray(raw)
        changed[at] ^= 0x40
        path.write_bytes(changed)
        store = opened()
        for n in range(3):
            found = get(store, n)
            assert found is None or same(found, block(n))
            if found is None:
                put(store, n)
        assert store.flush(60)
        assert all(same(get(store, n), block(n)) for n in range(3))
        assert store.check() == [], at
        release_store(store, 60)


# ---- the folder


def test_what_others_put_into_the_folder_is_neither_counted_nor_deleted(opened):
    store = opened()
    put(store, 1)
    release_store(store, 60)
    shard = path_of(store, 1).parent
    junk = [
        shard / "notes.txt", shard / f"{'0' if shard.name != '0' else '1'}abc12.safetensors", shard / ".omlx-x",
        store.root / "readme.safetensors", store.root / "m" / "zz" / "a" / "b" / "c" / "a" / "ab.safetensors",
    ]  # fmt: skip
    for path in junk:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (store.root / INDEX_NAME).unlink()
    store = opened(SIZE + 20_000)
    assert held(store) == {1} and put(store, 2) == "queued"
    assert store.check() == [] and held(store) == {2} and all(path.read_text() == "mine" for path in junk)


def test_temporary_files_of_a_killed_process_go_at_the_next_start(opened, tmp_path):
    stale = tmp_path / "root" / "m" / "a" / f".omlx-{'ab' * 32}.tmp"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"x" * 1000)
    store = opened()
    assert not stale.exists() and store.check() == []


def test_files_of_another_version_count_and_are_the_first_to_go(opened, tmp_path):
    root = tmp_path / "root"
    for n in range(3):
        write(block_path(root, ("m", name(n))), n)
    newer = block_path(root, ("m", name(1)))
    newer.write_bytes(newer.read_bytes().replace(b'"format":"1"', b'"format":"9"'))
    store = opened(3 * SIZE + 30_000)
    assert held(store) == {0, 2} and get(store, 1) is None and newer.exists()
    assert store.blocks.usage() == {"m": (3, 3 * SIZE)} and store.check() == []
    put(store, 4)
    put(store, 5)
    assert store.flush(60) and not newer.exists() and {4, 5} <= held(store) and store.check() == []


def test_a_block_replaces_the_file_of_another_version(opened, tmp_path):
    newer = block_path(tmp_path / "root", ("m", name(1)))
    write(newer, 1)
    newer.write_bytes(newer.read_bytes().replace(b'"format":"1"', b'"format":"9"'))
    store = opened()
    put(store, 1)
    assert store.flush(60) and same(get(store, 1), block(1)) and store.check() == []


def failing(error):
    def write_file(path, buffer, known):
        raise OSError(error, os.strerror(error))

    return write_file


def test_a_failed_write_leaves_no_entry_and_is_tried_again_while_ram_has_the_block(opened, caplog):
    store = opened()
    caplog.set_level(logging.WARNING)
    full = {"now": True}

    def maybe(path, buffer, known):
        if full["now"]:
            raise OSError(errno.ENOSPC, "no space")
        write_block_file(path, buffer, known)

    buffers = [block(n) for n in range(4)]
    for n, buffer in enumerate(buffers):
        put(store, n, write_file=maybe, buffer=buffer)
    put(store, 9, write_file=maybe)  # nobody else keeps this one
    assert not store.flush(60) and held(store) == set()
    assert store.blocks.counts("m").write_errors >= 5 and len(caplog.records) == 1 and "no space" in caplog.text
    full["now"] = False
    assert store.flush(60) and held(store) == {0, 1, 2, 3} and store.blocks.counts("m").dropped_writes == 1
    assert store.check() == []


def test_a_folder_that_is_deleted_while_in_use_comes_back_with_the_next_block(opened, tmp_path):
    store = opened()
    put(store, 1)
    store.flush(60)
    store.root.rename(tmp_path / "gone")  # at once: the store would make it again during a long deletion
    shutil.rmtree(tmp_path / "gone")
    assert get(store, 1) is None
    put(store, 2)
    assert store.flush(60) and same(get(store, 2), block(2)) and held(store) == {2} and store.check() == []


def test_a_folder_that_is_moved_away_and_back_loses_nothing(opened, tmp_path):
    store = opened()
    put(store, 1)
    store.flush(60)
    (tmp_path / "root").rename(tmp_path / "away")
    (tmp_path / "root").write_text("in its place")
    assert get(store, 1) is None
    buffer = block(2)
    put(store, 2, buffer=buffer)
    assert not store.flush(60) and store.blocks.counts("m").damaged == 0
    (tmp_path / "root").unlink()
    (tmp_path / "away").rename(tmp_path / "root")
    assert store.flush(60) and same(get(store, 2), block(2)) and same(get(store, 1), block(1))
    assert store.check() == []


def test_a_file_in_the_folders_place_at_start_is_no_error_and_heals(opened, tmp_path, caplog):
    (tmp_path / "root").write_text("not a folder")
    store = opened()
    assert len(caplog.records) == 1 and get(store, 1) is None
    buffer = block(1)
    put(store, 1, buffer=buffer)
    assert not store.flush(60)
    (tmp_path / "root").unlink()
    assert store.flush(60) and same(get(store, 1), block(1)) and store.check() == []


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a disk")
def test_a_full_disk_is_survived(opened, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        store = opened(root=disk / "root")
        (disk / "filler").write_bytes(bytes(100_000))
        buffers = [block(n) for n in range(30)]
        for n, buffer in enumerate(buffers):
            put(store, n, buffer=buffer)
        del buffer
        store.flush(60)
        assert all(same(get(store, n), block(n)) for n in held(store))
        (disk / "filler").unlink()
        buffers.clear()
        store.flush(60)
        put(store, 40)
        assert store.flush(60) and same(get(store, 40), block(40)) and store.check() == []
        release_store(store, 60)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def run_python(script, *args, **kinds):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kinds
    )


LOCKER = """
    import sys
    from pathlib import Path
    from omlx.storage.open_stores import open_store
    from omlx.storage.folder import StoreLocked
    try:
        open_store(Path(sys.argv[1]), 1 << 20, 1 << 20)
        print("open", flush=True)
        sys.stdin.read()
    except StoreLocked as exc:
        print(exc)
    """


def test_of_two_processes_the_second_is_told_who_has_the_folder(opened):
    store = opened()
    assert opened() is store
    output, _ = run_python(LOCKER, store.root).communicate(timeout=60)
    assert str(os.getpid()) in output and str(store.root) in output and "Traceback" not in output
    release_store(store, 60)
    release_store(store, 60)
    child = run_python(LOCKER, store.root, stdin=subprocess.PIPE)
    assert child.stdout.readline() == "open\n"
    with pytest.raises(StoreLocked, match=str(child.pid)):
        opened()
    child.communicate(timeout=60)
    assert put(opened(), 1) == "queued"


SCRIPT = """
    import sys
    from pathlib import Path
    from omlx.storage.open_stores import open_store
    from omlx.storage.tensor_file import write_block_file
    from tests.storage.blocks import block, meta
    store = open_store(Path(sys.argv[1]), 1 << 30, 1 << 30)
    for n in range(int(sys.argv[2]), int(sys.argv[3])):
        store.blocks.put("m", meta(n), block(n), write_block_file, may_wait=False)
        print(n, flush=True)
    """


def test_a_script_that_never_closes_keeps_its_blocks_and_ends(opened, tmp_path):
    output, _ = run_python(SCRIPT, tmp_path / "root", 0, 100).communicate(timeout=60)
    assert "Traceback" not in output
    store = opened()
    assert held(store, upto=100) == set(range(100)) and store.check() == []


def test_after_a_kill_files_that_were_there_hit_and_nothing_is_left_over(opened, tmp_path):
    opened()
    release_store(opened(), 5)
    release_store(opened(), 5)
    for round_, rows in enumerate((3, 40, 150)):
        child = run_python(SCRIPT, tmp_path / "root", 200 * round_, 200 * round_ + 200)
        for _ in range(rows):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.communicate()
        there = {path.name for path in (tmp_path / "root").rglob("*.safetensors")}
        store = opened()
        assert len(held(store, upto=600)) == len(there) and store.check() == []
        assert all(same(get(store, n), block(n)) for n in held(store, upto=600))
        release_store(store, 60)


AS_NOBODY = """
    import os, shutil, sys
    from pathlib import Path
    from omlx.storage.open_stores import open_store, release_store
    from omlx.storage.folder import block_path
    from omlx.storage.tensor_file import read_block_file, write_block_file
    from tests.storage.blocks import block, meta, name, same
    root = Path(sys.argv[1])
    block(0)
    if os.getuid() == 0:
        os.setgroups([]), os.setgid(65534), os.setuid(65534)
    def put(n, keep=[]):
        keep.append(block(n))
        return store.blocks.put("m", meta(n), keep[-1], write_block_file, may_wait=True)
    def get(n):
        return store.fetch(("m", name(n)), read_block_file)
    store = open_store(root, 1 << 30, 1 << 30, 0)
    put(1), put(2)
    assert store.flush(60)
    os.chmod(block_path(root, ("m", name(1))), 0)
    assert get(1) is None and same(get(2), block(2)) and store.blocks.counts("m").damaged == 1
    put(1)
    assert store.flush(60) and same(get(1), block(1)), "unreadable file"
    folders = [root, root / "m", *(root / "m").iterdir()]
    for folder in folders: os.chmod(folder, 0o500)
    put(3)
    assert not store.flush(60) and same(get(2), block(2)), "read-only"
    for folder in folders: os.chmod(folder, 0o700)
    assert store.flush(60) and same(get(3), block(3)) and store.check() == [], "writable again"
    os.chmod(root, 0)
    assert get(1) is None and store.blocks.counts("m").damaged == 1
    os.chmod(root, 0o700)
    assert same(get(1), block(1)), "readable again"
    release_store(store, 60)
    os.chmod(root / "index.sqlite", 0)
    store = open_store(root, 1 << 30, 1 << 30, 0)
    assert same(get(1), block(1)) and store.check() == [], "unreadable index"
    release_store(store, 60)
    os.chmod(root, 0o500)
    os.chmod(root / ".lock", 0o400)
    store = open_store(root, 1 << 30, 1 << 30, 0)
    put(4)
    assert not store.flush(60), "not writable at start"
    os.chmod(root, 0o700)
    os.chmod(root / ".lock", 0o600)
    assert store.flush(60) and same(get(4), block(4)) and same(get(1), block(1)), "writable later"
    print("fine")
    """


def test_unreadable_files_and_folders_without_rights():
    """As a user who is not root: root may read and write everything."""
    parent = Path(tempfile.mkdtemp())  # tmp_path's parents are closed to others
    try:
        parent.chmod(0o777)
        output, _ = run_python(AS_NOBODY, parent / "cache").communicate(timeout=60)
        assert output.endswith("fine\n"), output
    finally:
        shutil.rmtree(parent)


def test_many_threads_read_and_write_at_once(opened):
    store = opened(20 * SIZE + 40_000, queue_bytes=4 * SIZE)
    wrong = []

    def work(seed):
        n = seed
        for _ in range(300):
            n = (n * 7 + 3) % 31
            found = get(store, n)
            if found is None:
                put(store, n)
            elif not same(found, block(n)):
                wrong.append(n)
            if n % 5 == 0:
                store.blocks.delete(("m", name((n + 1) % 31)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.blocks.counts("m").damaged == 0 and store.check() == []


def test_a_closed_store_declines(opened):
    store = opened()
    put(store, 1)
    assert release_store(store, 60)
    assert put(store, 2) == "declined" and not store.flush(1)


def test_metadata_with_odd_hashes_survives(opened):
    store = opened()
    for n, odd in enumerate((b"\x00", b"\xff" * 64)):
        known = BlockMeta(block_hash=odd, token_count=1, file_size=SIZE)
        assert store.blocks.put("", known, block(n), write_block_file, may_wait=False) == "queued"
    release_store(store, 60)
    (store.root / INDEX_NAME).unlink()
    store = opened()
    assert {m.block_hash for m in store.blocks.metas("")} == {b"\x00", b"\xff" * 64}


# ---- the clock, what others put into the folder


def test_blocks_used_before_the_clock_was_set_back_expire_and_keep_their_order(tmp_path, monkeypatch):
    now = time.time_ns()
    day = 86_400 * 10**9
    table = BlockTable()
    monkeypatch.setattr(time, "time_ns", lambda: now + day)
    for n in range(3):
        table.add(Entry("m", meta(n), table.stamp()))
    monkeypatch.setattr(time, "time_ns", lambda: now)
    table.set_future_uses_to_now()
    used = [entry.used for entry in table.entries()]
    assert used == sorted(set(used)) and used[-1] == now
    assert [entry.key[1] for entry in table.entries()] == [name(n) for n in range(3)]
    assert table.stamp() == now + 1


def test_a_models_folder_that_is_copied_in_is_found_and_counted(opened, tmp_path):
    store = opened()
    for n in range(3):
        put(store, n)
    store.flush()
    release_store(store, 60)
    shutil.copytree(store.root / "m", store.root / "copied")
    store = opened()
    assert wait_until(lambda: held(store, "copied") == {0, 1, 2}) and held(store) == {0, 1, 2}
    assert store.check() == []
    release_store(store, 60)
    shutil.copytree(store.root / "m", store.root / "again")
    store = opened(max_bytes=4 * SIZE)
    store.flush()
    assert sum(path.stat().st_size for path in store.root.rglob("*.safetensors")) <= 4 * SIZE


def test_a_database_of_another_program_is_set_aside_unchanged(opened, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with contextlib.closing(sqlite3.connect(root / INDEX_NAME)) as db:
        db.execute("CREATE TABLE mine (x)")
        db.execute("PRAGMA user_version = 4")
        db.commit()
    content = (root / INDEX_NAME).read_bytes()
    (root / "index.snapshot").write_text("a note of mine")
    store = opened()
    assert put(store, 1) and store.flush()
    release_store(store, 60)
    (database,) = root.glob("index.sqlite.set-aside-*")
    (note,) = root.glob("index.snapshot.set-aside-*")
    assert database.read_bytes() == content and note.read_text() == "a note of mine"


@pytest.mark.parametrize("model", ["index.snapshot", "Index.Snapshot", "index.sqlite", "index.sqlite-journal", ".lock"])
def test_a_model_named_as_a_file_of_ours_keeps_its_blocks(opened, model):
    folder = folder_name(model)
    assert model_of(folder) == model
    for _ in range(2):
        store = opened()
        assert put(store, 1, folder) and store.flush()
        release_store(store, 60)
    store = opened()
    assert held(store, folder) == {1}


def test_a_store_that_waits_for_the_lock_takes_over(opened, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    other = FolderLock(root)
    store = open_store(root, 64 * MB, 64 * MB, 0, wait_for_lock=True)
    try:
        with pytest.raises(StoreLocked, match=str(os.getpid())):
            store.raise_if_locked()
        other.release()
        assert wait_until(lambda: store.check() == [])
        assert put(store, 1) and store.flush() and path_of(store, 1).exists()
        store.raise_if_locked()
    finally:
        release_store(store, 60)


@pytest.mark.parametrize("content", [b"a note of mine", b"SQLite format 3\0, or so", bytes(range(256)) * 300])
@pytest.mark.parametrize("place", [INDEX_NAME, ".lock"])
def test_a_users_file_under_a_name_of_ours_is_renamed_and_never_changed(opened, tmp_path, place, content):
    root = tmp_path / "root"
    root.mkdir()
    (root / place).write_bytes(content)
    store = opened()
    assert put(store, 1) == "queued" and store.flush() and store.check() == []
    release_store(store, 60)
    (aside,) = root.glob(f"{place}.set-aside-*")
    assert aside.read_bytes() == content
    assert held(opened()) == {1}
    assert len(list(root.glob(f"{place}.set-aside-*"))) == 1


def test_a_file_that_was_removed_between_two_runs_is_not_counted(opened):
    store = opened()
    for n in range(3):
        put(store, n)
    store.flush()
    path = path_of(store, 1)
    release_store(store, 60)
    path.unlink()
    store = opened()
    assert held(store) == {0, 2} and store.check() == []


@pytest.mark.parametrize("with_lock", [True, False], ids=["with its lock file", "without"])
def test_an_older_index_that_was_put_back_is_not_believed(opened, tmp_path, with_lock):
    """Its clean marker speaks of files of another time: some are gone, some are new, one has another size."""
    store = opened()
    for n in range(3):
        put(store, n)
    store.flush()
    release_store(store, 60)
    names = [INDEX_NAME, "index.snapshot", *([".lock"] if with_lock else [])]
    for file in names:
        shutil.copy2(store.root / file, tmp_path / file)
    store = opened()
    put(store, 3)
    store.blocks.delete(("m", name(0)))
    store.flush()
    assert store.check() == []
    release_store(store, 60)
    if not with_lock:
        (store.root / ".lock").unlink()
    for file in names:
        shutil.copy2(tmp_path / file, store.root / file)
    store = opened()
    assert wait_until(lambda: held(store) == {1, 2, 3}) and store.check() == []


def test_after_a_killed_process_an_older_index_is_not_believed(opened, tmp_path):
    store = opened()
    put(store, 0)
    store.flush()
    release_store(store, 60)
    for file in (INDEX_NAME, "index.snapshot"):
        shutil.copy2(store.root / file, tmp_path / file)
    run_python(SCRIPT, store.root, 5, 9).communicate(timeout=20)
    (store.root / ".lock").write_text("123\n")  # as a killed process leaves it
    for file in (INDEX_NAME, "index.snapshot"):
        shutil.copy2(tmp_path / file, store.root / file)
    store = opened()
    assert wait_until(lambda: held(store) == {0, 5, 6, 7, 8}) and store.check() == []


def test_the_lock_note_of_an_older_version_leads_to_a_look_and_keeps_the_index(opened, caplog):
    store = opened()
    put(store, 0)
    store.flush()
    release_store(store, 60)
    pid, note = (store.root / ".lock").read_text().splitlines()
    (store.root / ".lock").write_text(f"{pid}\n{note.rsplit(' ', 1)[0]}\n")
    shutil.copytree(store.root / "m", store.root / "copied")
    caplog.clear()
    store = opened()
    assert wait_until(lambda: held(store, "copied") == {0}) and held(store) == {0} and store.check() == []
    assert store.index_damaged == 0 and not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_folder_that_was_cleared_offline_is_not_looked_through(opened, monkeypatch):
    store = opened()
    for n in range(3):
        put(store, n, "m" if n else "other")
    store.flush()
    release_store(store, 60)
    assert clear(store.root, lambda folder: folder == "m").blocks == 2
    monkeypatch.setattr(Recovery, "count_files", lambda *_, **__: pytest.fail("the folder was looked through"))
    store = opened()
    assert held(store, "other") == {0} and held(store) == set() and store.check() == []


def test_another_process_that_looks_at_the_lock_does_not_fail_a_start(tmp_path, monkeypatch):
    """A look takes the lock as well, for a moment; here it ends when the start has met it once."""
    FolderLock(tmp_path).release()
    monkeypatch.setattr(folder, "_LOOK_S", 60.0)
    with open(tmp_path / folder.LOCK_NAME, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(folder.time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        FolderLock(tmp_path).release()
