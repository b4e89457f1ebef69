"""Folders and disks that fail: serving goes on, the log says so once, and it recovers by itself."""

import ast
import contextlib
import errno
import logging
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

import omlx
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.engine.pool import EnginePool
from omlx.request import Request, SamplingParams
from omlx.scheduler import SchedulerConfig
from omlx.storage import disk_store
from omlx.storage.folder import INDEX_NAME, VISION_FOLDER, block_path
from tests.dict_store import DictStore
from tests.storage.blocks import block, meta, name, our_bytes, write
from tests.storage.children import (
    Said,
    become_nobody,
    open_folder,
    run_in_child,
    run_on_small_disk,
    trust_the_cache,
    warnings_in,
)
from tests.storage.targets import read, save
from tests.support import wait_until
from tests.tiny import EOS, Bench, TinyRunner

B = 16
MB = 1 << 20
SIZE = meta(0).file_size
PROMPTS = [[random.Random(seed).randrange(EOS) for _ in range(3 * B + 9)] for seed in range(4)]


@pytest.fixture(scope="module")
def runner():
    return TinyRunner()


def cold_answers(runner):
    bench = Bench(runner, DictStore())
    return [bench.answer(bench.ask(prompt, cache=False)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def cold(runner):
    return cold_answers(runner)


@pytest.fixture
def opened(tmp_path):
    stores = []

    def opener(hot=0, limit=64 * MB, root=tmp_path / "root", folder="m", **options):
        options = {"free_reserve_bytes": 0} | options
        stores.append(PagedSSDCacheManager(root / folder, limit, hot, root_dir=root, **options))
        return stores[-1]

    yield opener
    for store in stores:
        store.close(60)


# ---- the folder, under a scheduler


def insist(step):
    """Does a step that fails while the store makes the folder again at that very moment."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            return step()
    raise AssertionError("it never worked")


def delete(root):
    gone = root.with_name("gone")
    root.rename(gone)  # at once: the store would make it again during a long deletion
    shutil.rmtree(gone)


def move_away(root):
    root.rename(root.with_name("away"))


def move_back(root):
    def once():
        if root.exists():
            delete(root)
        root.with_name("away").rename(root)

    insist(once)


def put_a_file_in_its_place(root):
    def once():
        if root.exists():
            delete(root)
        root.write_text("mine")

    insist(once)


def take_the_file_away(root):
    assert root.read_text() == "mine"
    root.unlink()


def nothing(root):
    pass


TROUBLES = {
    "deleted": (delete, nothing),
    "moved away and back": (move_away, move_back),
    "a file in its place": (put_a_file_in_its_place, take_the_file_away),
}


@pytest.mark.parametrize("hot", [0, MB], ids=["files", "ram"])
@pytest.mark.parametrize("what", TROUBLES)
def test_a_folder_that_is_lost_while_running_is_survived_and_taken_up_again(
    opened, runner, cold, caplog, tmp_path, what, hot
):
    root = tmp_path / "root"
    lose, mend = TROUBLES[what]
    bench = Bench(runner, opened(hot))
    bench.ask(PROMPTS[0])
    assert bench.store.flush(60)
    caplog.clear()
    lose(root)
    for prompt, expected in zip(PROMPTS, cold, strict=True):
        assert bench.answer(bench.ask(prompt)) == expected
        bench.store.flush(0.05)
    # Where `insist` took a folder away that was just being made again, an index may count as damaged besides.
    said = [line for line in warnings_in(caplog) if f"{INDEX_NAME} is damaged" not in line]
    assert len(said) <= 1 and all(str(root) in line for line in said), said
    mend(root)
    assert wait_until(lambda: bench.store.flush(60))
    for prompt, expected in [*zip(PROMPTS, cold, strict=True)] * 2:
        assert bench.answer(bench.ask(prompt)) == expected and bench.store.flush(60)
    assert bench.store.check() == []
    bench.store.close()
    bench = Bench(runner, opened())
    for prompt, expected in zip(PROMPTS, cold, strict=True):
        again = bench.ask(prompt)
        assert bench.answer(again) == expected and again.stats.cached_ssd_tokens == len(prompt) - 1


def test_a_models_folder_that_is_deleted_while_running_heals_block_by_block(opened, runner, cold, tmp_path):
    bench = Bench(runner, opened())
    for prompt in PROMPTS:
        bench.ask(prompt)
    assert bench.store.flush(60)
    delete(tmp_path / "root" / "m")
    for _ in range(3):  # a block behind one that was found to be gone is met a time later
        again = [bench.ask(prompt) for prompt in PROMPTS]
        assert [bench.answer(request) for request in again] == cold and bench.store.flush(60)
    assert [request.stats.cached_ssd_tokens for request in again] == [len(prompt) - 1 for prompt in PROMPTS]


def test_a_file_in_the_folders_place_at_start_is_said_once_and_recovers_without_being_asked(opened, caplog, tmp_path):
    (tmp_path / "root").write_text("mine")
    store = opened(hot=MB)
    for n in range(5):
        save(store, n)
    store.flush(0.2)
    assert len(warnings_in(caplog)) == 1 and str(tmp_path / "root") in caplog.text
    assert all(read(store, n) == "ram" for n in range(5))
    (tmp_path / "root").unlink()
    assert wait_until(lambda: all(store.get_block_path(name(n)) for n in range(5))) and len(warnings_in(caplog)) == 1
    assert store.flush(60) and store.check() == []


async def test_a_server_whose_cache_folder_is_a_file_answers_and_takes_the_folder_up_later(tiny_model_dir, tmp_path):
    place = tmp_path / "cache"
    place.write_text("mine")
    pool = EnginePool(SchedulerConfig(block_size=16, paged_ssd_cache_dir=place), tmp_path, str(tiny_model_dir))
    await pool.start()
    try:
        engine = await pool.get(tiny_model_dir.name)
        answers = []
        for number in range(2):
            request = Request(f"r{number}", list(range(40, 100)), SamplingParams(max_tokens=4, temperature=0))
            answers.append([output.token async for output in engine.generate(request)])
        assert answers[0] == answers[1] and answers[0] and place.read_text() == "mine"
        place.unlink()
        assert wait_until(lambda: len(list(place.rglob("*.safetensors"))) >= 3)
    finally:
        await pool.stop(5)


# ---- rights, as a user who is not root


def rights(root):  # noqa: C901
    said = Said()
    trust_the_cache()
    runner = TinyRunner()
    cold = cold_answers(runner)
    removals = Counter()
    become_nobody()
    sys.addaudithook(lambda event, args: removals.update([event]) if event == "os.remove" else None)

    def ask_all():
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            assert bench.answer(bench.ask(prompt)) == expected
            bench.store.flush(0.05)

    def open_bench(limit=64 * MB):
        return Bench(runner, PagedSSDCacheManager(root / "m", limit, MB, root_dir=root, free_reserve_bytes=0))

    # Not writable at start: the folder above it, then the folder.
    root.parent.chmod(0o500)
    bench = open_bench()
    ask_all()
    assert len(said.lines) == 1 and str(root) in said.lines[0], said.lines
    root.parent.chmod(0o700)
    assert wait_until(lambda: bench.store.flush(60)), "writable later"
    bench.store.close()
    root.chmod(0o500)
    for file in (".lock", INDEX_NAME):
        (root / file).chmod(0o400)
    said.lines.clear()
    bench = open_bench()
    ask_all()
    assert len(said.lines) == 1 and str(root) in said.lines[0], said.lines
    root.chmod(0o700)
    for file in (".lock", INDEX_NAME):
        (root / file).chmod(0o600)
    assert wait_until(lambda: bench.store.flush(60)) and bench.store.check() == []

    # Read-only while running: what is there can be read, what is new stays in RAM.
    folders = [folder for folder in (root, *root.rglob("*")) if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    said.lines.clear()
    bench.store.evict_from_ram(MB)
    ask_all()
    save(bench.store, 1)
    assert not bench.store.flush(1) and read(bench.store, 1) == "ram"
    assert len(said.lines) == 1 and bench.store.stats().damaged == 0, said.lines
    for folder in folders:
        folder.chmod(0o700)
    assert wait_until(lambda: bench.store.flush(60)) and bench.store.check() == [] and len(said.lines) == 1
    bench.store.close()

    # Files that cannot be removed though they have to go: tried now and then, not all the time; nothing is written.
    shards = list((root / "m").iterdir())
    for folder in shards:
        folder.chmod(0o500)
    said.lines.clear()
    before = set(root.rglob("*.safetensors"))
    bench = open_bench(limit=8 * SIZE)
    removals.clear()
    time.sleep(1.2)
    for n in range(20, 40):
        save(bench.store, n)
    bench.store.flush(0.5)
    assert 0 < removals["os.remove"] < 10 * len(before), removals
    assert set(root.rglob("*.safetensors")) == before and len(said.lines) == 1, said.lines
    for folder in shards:
        folder.chmod(0o700)
    assert wait_until(lambda: our_bytes(root) <= 8 * SIZE), "the limit is met when it can be"
    assert wait_until(lambda: bench.store.flush(60)) and bench.store.check() == []
    bench.store.close()


def test_folders_without_rights_are_survived_by_a_user_who_is_not_root():
    with open_folder() as folder:
        inside = folder / "mine"
        inside.mkdir()
        if os.getuid() == 0:
            os.chown(inside, 65534, 65534)
        run_in_child(rights, inside / "root")


# ---- a small disk


def full_disk(disk):
    said = Said()
    trust_the_cache()
    runner = TinyRunner()
    cold = cold_answers(runner)
    reserve = 2 * MB
    store = PagedSSDCacheManager(disk / "root" / "m", 64 * MB, 0, root_dir=disk / "root", free_reserve_bytes=reserve)
    bench = Bench(runner, store)

    def free():
        found = os.statvfs(disk)
        return found.f_bavail * found.f_frsize

    def ask_all():
        for prompt, expected in zip(PROMPTS, cold, strict=True):
            assert bench.answer(bench.ask(prompt)) == expected

    ask_all()
    for n in range(1900):  # 15 MB of blocks
        save(store, n)
        assert free() >= reserve - SIZE - MB, n  # the index takes some, and its journal for a moment
    assert store.flush(60) and wait_until(lambda: free() >= reserve - MB // 2)
    assert store.check() == [] and said.lines == []
    assert our_bytes(disk) > 12 * MB, "the disk is used, but for the reserve"
    # Others fill it: the cache shrinks.
    filler = disk / "filler"
    for more in range(1, 9):
        with filler.open("ab") as file:
            file.write(bytes(MB))
        for n in range(2000 + more, 2300, 10):
            save(store, n)
        assert wait_until(lambda: store.flush(60) and free() >= reserve - MB // 2)
        found = store.check()
        assert found == [], found
    ask_all()
    # Nothing is left at all.
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass
    assert filler.stat().st_size > 10 * MB  # until there was no more; the cache may have given way since
    for n in range(3000, 3050):
        save(store, n)
    ask_all()
    store.flush(60)
    assert all(read(store, n) in ("ssd", None) for n in range(3050))
    assert len(said.lines) <= 1, said.lines
    filler.unlink()
    assert wait_until(lambda: store.flush(60) and save(store, 5000) and store.flush(60) and read(store, 5000) == "ssd")
    ask_all()
    assert store.check() == []
    store.close()


def test_a_full_disk_of_20_mb_keeps_its_reserve_and_is_survived(tmp_path):
    run_on_small_disk(full_disk, tmp_path / "disk", 20)


def unmounted_disk(disk):
    said = Said()
    store = PagedSSDCacheManager(disk / "m", 64 * MB, MB, root_dir=disk, free_reserve_bytes=0)
    for n in range(5):
        save(store, n)
    assert store.flush(60)
    assert os.system(f"umount -l '{disk}'") == 0
    disk.chmod(0)
    for n in range(5, 9):
        save(store, n)
    store.flush(0.5)
    assert all(read(store, n) == "ram" for n in range(9)) and store.stats().damaged == 0
    disk.chmod(0o700)
    assert os.system(f"mount -t tmpfs -o size=8m none '{disk}'") == 0
    assert wait_until(lambda: store.flush(60))
    for n in range(9):
        save(store, n)
    assert store.flush(60) and store.check() == [] and len(list(disk.rglob("*.safetensors"))) == 9
    assert len(said.lines) <= 1, said.lines
    store.close()


def test_a_disk_that_is_unmounted_and_mounted_again_is_taken_up(tmp_path):
    run_on_small_disk(unmounted_disk, tmp_path / "disk", 8)


# ---- errors below the files


def test_what_could_not_be_removed_is_forgotten_with_the_folder_it_was_in(opened, monkeypatch, tmp_path):
    def refuse(path):
        raise PermissionError(errno.EACCES, "no", str(path))

    store = opened()
    for n in range(5):
        assert store.save_block(name(n), block(n), 8)
    assert store.flush(60)
    with monkeypatch.context() as patched:
        patched.setattr(disk_store, "remove", refuse)
        for n in range(3):
            store.delete_block(name(n))
        assert store.settle(10)
    assert len(store._disk.blocks._stuck) == 3
    delete(tmp_path / "root")
    assert store.save_block(name(9), block(9), 8)  # the folder is made again for it, before removals are tried again
    assert store.flush(60)
    # Else their bytes would be taken off whenever the limit is to be met, and blocks saved again would never go.
    assert store._disk.blocks._stuck == {} and store.check() == []


def test_whatever_a_write_raises_leaves_no_entry_and_the_writer_alive(opened, caplog):
    store = opened(hot=MB)

    def broken(use, path, nbytes):
        raise ValueError("not an error of the system")

    store.on_file = broken
    save(store, 1)
    assert not store.flush(60) and store.get_block_path(name(1)) is None and read(store, 1) == "ram"
    assert "not an error of the system" in caplog.text
    del store.on_file
    store.on_file = lambda use, path, nbytes: None
    assert store.flush(60) and store.get_block_path(name(1)).exists() and store.check() == []


# ---- what is not ours


def test_junk_is_never_deleted_and_never_counted(opened, tmp_path):
    """Our names in wrong places, and links that lead outside."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    hexname = name(3).hex()
    (outside / "m" / hexname[0]).mkdir(parents=True)
    write(outside / "m" / hexname[0] / f"{hexname}.safetensors", 3)
    (outside / "precious.txt").write_text("mine")
    store = opened()
    save(store, 1)
    store.close()
    kept = our_bytes(root)
    shard = block_path(root, ("m", name(1))).parent
    other = "0" if shard.name != "0" else "1"
    places = [
        root / "m" / f"{hexname}.safetensors", root / f".omlx-{hexname}.tmp", root / "m" / f".omlx-{hexname}.tmp",
        shard / f"{other}{hexname[1:]}.safetensors", shard / f"{hexname.upper()}.safetensors", shard / "a.safetensors",
        shard / f"{name(1).hex()}.safetensors.bak", shard / f".omlx-{hexname}.part", shard / f"{hexname}.npy",
        root / "index.sqlite.old", root / "m" / "index.sqlite", root / "notes.npy", root / VISION_FOLDER / "a_b.npy",
        root / "a" / "b" / "c" / "d" / "x" / hexname[0] / f"{hexname}.safetensors",
    ]  # fmt: skip
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"mine" * 1000)
    links = {
        root / "linked": outside / "m",
        root / "m" / other: outside / "m" / hexname[0],
        shard / "link.txt": outside / "precious.txt",
        root / VISION_FOLDER / "c_d.npy": outside / "precious.txt",
    }
    for link, target in links.items():
        link.symlink_to(target)
    (root / INDEX_NAME).unlink()  # everything is looked through
    store = opened(limit=SIZE + 20_000)
    features = VisionFeatureSSDCache(root / VISION_FOLDER, free_reserve_bytes=0)
    assert [m.block_hash for m in store.metas()] == [name(1)] and features.usage.disk_entries == 0
    assert store.ssd_bytes <= kept
    save(store, 2)  # the limit asks for room
    assert store.flush(60) and [m.block_hash for m in store.metas()] == [name(2)]
    assert store.check() == [] and features.check() == []
    store.clear()
    features.close()
    store.close()
    assert all(place.read_bytes() == b"mine" * 1000 for place in places)
    assert all(link.is_symlink() for link in links) and (outside / "precious.txt").read_text() == "mine"
    assert read(opened(root=outside), 3) == "ssd"


def test_a_link_under_our_temporary_name_does_not_lead_writes_outside(opened, tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    store = opened(hot=MB)
    save(store, 1)
    store.flush(60)
    path = store.get_block_path(name(1))
    store.delete_block(name(1))
    store.flush(60)
    path.with_name(f".omlx-{name(1).hex()}.tmp").symlink_to(precious)
    save(store, 1)
    assert wait_until(lambda: store.flush(60)) and read(store, 1) == "ram" and path.is_file() and not path.is_symlink()
    assert precious.read_text() == "mine" and store.check() == []


def test_a_link_in_a_blocks_place_goes_and_what_it_leads_to_stays(opened, tmp_path):
    store = opened()
    save(store, 1)
    save(store, 2)
    store.flush(60)
    path = store.get_block_path(name(1))
    path.rename(tmp_path / "elsewhere")
    other = tmp_path / "other"
    shutil.copy(store.get_block_path(name(2)), other)
    path.symlink_to(other)
    assert read(store, 1) is None and store.stats().damaged == 1
    assert save(store, 1) and store.flush(60) and not path.is_symlink() and read(store, 1) == "ssd"
    assert other.exists() and store.check() == []


# ---- privacy


def test_what_omlx_makes_is_for_its_owner_only_whatever_the_umask(opened, tmp_path):
    old = os.umask(0)
    try:
        root = tmp_path / "a" / "b" / "root"
        store = opened(root=root)
        features = VisionFeatureSSDCache(root / VISION_FOLDER, free_reserve_bytes=0)
        save(store, 1)
        features.put("h", "m", mx.zeros((4, 4)))
        assert store.flush(60) and features.flush(60)
        features.close()
    finally:
        os.umask(old)
    places = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in places if path.is_dir()} == {0o700}
    files = {path.suffix or path.name: path.stat().st_mode & 0o777 for path in places if path.is_file()}
    assert files.keys() >= {".safetensors", ".npy", ".sqlite", ".lock"} and set(files.values()) == {0o600}


def modules(*folders):
    package = Path(omlx.__file__).parent
    return [path for folder in folders for path in sorted((package / folder).rglob("*.py"))]


def test_nothing_in_a_cache_file_can_be_executed_or_unpickled():
    """No module that handles files imports or calls what could."""
    imports = {"pickle", "marshal", "shelve", "dill", "joblib", "torch", "runpy", "importlib"}
    calls = {"eval", "exec", "compile", "__import__", "np.load", "numpy.load", "mx.load", "mx.import_function"}
    for path in modules("storage", "cache"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not imports & {part.split(".")[0] for part in names}, path
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in calls, f"{path}:{node.lineno}"


# ---- versions, numerics, places


def ask_again(runner, store, **options):
    bench = Bench(runner, store, **options)
    request = bench.ask(PROMPTS[0])
    assert bench.store.flush(60)
    return bench.answer(request), request.stats.cached_tokens


def test_a_folder_moved_to_another_place_or_copied_without_its_index_is_used(opened, runner, cold, tmp_path):
    store = opened()
    ask_again(runner, store)
    store.close()
    (tmp_path / "root").rename(tmp_path / "moved")
    store = opened(root=tmp_path / "moved")
    assert ask_again(runner, store) == (cold[0], len(PROMPTS[0]) - 1) and store.check() == []
    store.close()
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    store = opened(root=tmp_path / "copied")
    assert ask_again(runner, store) == (cold[0], len(PROMPTS[0]) - 1) and store.check() == []
    (tmp_path / "part").mkdir()
    shutil.copytree(tmp_path / "moved" / "m", tmp_path / "part" / "m2")
    store = opened(root=tmp_path / "part", folder="m2")
    assert ask_again(runner, store) == (cold[0], len(PROMPTS[0]) - 1) and store.check() == []


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
def test_blocks_under_other_numerics_are_not_used_where_that_matters(opened, runner, cold, exact):
    store = opened()
    ask_again(runner, store, numerics="another machine", exact=exact)
    answer, cached = ask_again(runner, store, exact=exact)
    if exact == "off":
        assert cached == len(PROMPTS[0]) - 1 and [x[0] for x in answer] == [x[0] for x in cold[0]]
    else:
        assert cached == 0 and answer == cold[0]
        assert ask_again(runner, store, exact=exact) == (cold[0], len(PROMPTS[0]) - 1)
    assert store.check() == []


def other_version(path):
    path.write_bytes(path.read_bytes().replace(b'"format":"1"', b'"format":"7"'))


def test_a_folder_of_another_version_counts_is_never_used_and_goes_first(opened, runner, cold, tmp_path):
    store = opened()
    ask_again(runner, store)
    store.close()
    old = list((tmp_path / "root").rglob("*.safetensors"))
    for path in old:
        other_version(path)
    (tmp_path / "root" / INDEX_NAME).unlink()
    taken = sum(path.stat().st_size for path in old)
    store = opened(limit=2 * taken + 60_000)
    assert store.ssd_bytes >= taken and store.metas() == [] and all(path.exists() for path in old)
    for n in range(4):
        save(store, n)
    assert store.flush(60) and all(path.exists() for path in old)
    assert ask_again(runner, store) == (cold[0], 0)  # the blocks take the places of those of the same name
    assert ask_again(runner, store) == (cold[0], len(PROMPTS[0]) - 1)
    assert all(read(store, n) == "ssd" for n in range(4)) and store.check() == [] and store.stats().damaged == 0


def test_files_of_another_version_are_evicted_before_any_that_can_be_used(opened, tmp_path):
    store = opened()
    for n in range(6):
        save(store, n)
    store.close()
    newer = [block_path(tmp_path / "root", ("m", name(n))) for n in (4, 5)]  # the last used
    for path in newer:
        other_version(path)
    (tmp_path / "root" / INDEX_NAME).unlink()
    store = opened(limit=6 * SIZE + 20_000)
    for n in (6, 7):
        save(store, n)
    assert store.flush(60) and [path.exists() for path in newer] == [False, False]
    assert all(read(store, n) == "ssd" for n in (0, 1, 2, 3, 6, 7)) and store.check() == []


def test_a_newer_index_is_made_anew_from_the_blocks(opened, tmp_path, caplog):
    store = opened()
    save(store, 1)
    store.close()
    raw = bytearray((tmp_path / "root" / INDEX_NAME).read_bytes())
    raw[60:64] = (99).to_bytes(4, "big")  # SQLite's user_version
    (tmp_path / "root" / INDEX_NAME).write_bytes(raw)
    caplog.set_level(logging.WARNING)
    store = opened()
    assert read(store, 1) == "ssd" and len(warnings_in(caplog)) == 1 and store.check() == []
