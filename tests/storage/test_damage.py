"""Spoiled files under a scheduler: the answer is that of a cold run, the damage is said once, and it heals."""

import random
import shutil

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.storage.folder import INDEX_NAME
from omlx.testing import Fault, FaultyStore
from tests.dict_store import DictStore
from tests.storage.blocks import damage
from tests.storage.children import Said, become_nobody, open_folder, run_in_child, trust_the_cache, warnings_in
from tests.tiny import EOS, Bench, TinyRunner

B = 16
MB = 1 << 20
PROMPT = [random.Random(1).randrange(EOS) for _ in range(5 * B + 9)]

HOWS = (
    "empty", "8 bytes", "half", "one short", "header", "payload", "zeroed tail", "deleted", "swapped", "folder",
)  # fmt: skip


@pytest.fixture(scope="module")
def runner():
    return TinyRunner()


@pytest.fixture(scope="module")
def cold(runner):
    bench = Bench(runner, DictStore())
    return bench.answer(bench.ask(PROMPT, cache=False))


@pytest.fixture
def opened(tmp_path, runner):
    """A scheduler over a store of files alone, on the same folder each time."""
    stores = []

    def opener(hot=0):
        root = tmp_path / "root"
        stores.append(PagedSSDCacheManager(root / "m", 64 * MB, hot, root_dir=root, free_reserve_bytes=0))
        return Bench(runner, stores[-1])

    yield opener
    for store in stores:
        store.close(60)


def files_in_order(store):
    """The files of the prompt's blocks by position; those of tails and answers last."""
    metas = sorted(store.metas(), key=lambda meta: meta.start)
    return [store.get_block_path(meta.block_hash) for meta in metas]


def spoil(path, how, other):
    """`other` is a valid file of the same kind."""
    if how == "swapped":
        shutil.copy(other, path)
    elif how == "deleted":
        path.unlink()
    elif how == "folder":
        path.unlink()
        (path / "inside").mkdir(parents=True)
    else:
        damage(path, how)


def ask_and_flush(bench):
    request = bench.ask(PROMPT)
    assert bench.store.flush(60)
    return request


@pytest.mark.parametrize("when", ["running", "stopped"])
@pytest.mark.parametrize("which", [0, 2, 5])
@pytest.mark.parametrize("how", HOWS)
def test_with_any_spoiled_block_the_answer_is_the_cold_one_and_the_block_comes_back(
    opened, cold, caplog, how, which, when
):
    bench = opened()
    assert bench.answer(ask_and_flush(bench)) == cold
    files = files_in_order(bench.store)
    if when == "stopped":
        bench.store.close()
    spoil(files[which], how, files[which - 1])
    if when == "stopped":
        bench = opened()
    caplog.clear()
    again = ask_and_flush(bench)
    assert bench.answer(again) == cold and again.stats.cached_tokens < len(PROMPT) - 1
    known = (how, when) != ("deleted", "stopped")  # a start does not count a file that is not there
    assert bench.store.stats().damaged == known
    assert [str(files[which]) in line for line in warnings_in(caplog)] == [True] * known
    healed = ask_and_flush(bench)
    assert bench.answer(healed) == cold and healed.stats.cached_ssd_tokens == len(PROMPT) - 1
    assert bench.store.stats().damaged == len(warnings_in(caplog)) == known and bench.store.check() == []
    assert len(list(files[which].parent.glob("*.set-aside-*"))) == (how == "folder")


def test_when_every_block_is_spoiled_each_is_said_once(opened, cold, caplog):
    bench = opened()
    ask_and_flush(bench)
    files = files_in_order(bench.store)
    for path in files:
        damage(path, "payload")
    caplog.clear()
    assert bench.answer(ask_and_flush(bench)) == cold
    assert bench.store.stats().damaged == len(warnings_in(caplog)) >= len(PROMPT) // B
    assert bench.answer(ask_and_flush(bench)) == cold and bench.store.check() == []


def test_a_spoiled_block_that_ram_has_too_is_a_hit(opened, cold):
    bench = opened(hot=MB)
    ask_and_flush(bench)
    for path in files_in_order(bench.store):
        damage(path, "half")
    again = ask_and_flush(bench)
    assert bench.answer(again) == cold and again.stats.cached_ram_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("seed", range(6))
def test_on_a_disk_that_spoils_files_and_fails_at_random_every_answer_is_the_cold_one(opened, runner, cold, seed):
    real = opened().store
    faults = (
        Fault(kind="bit flip", chance=0.1), Fault(kind="short read", chance=0.1), Fault(kind="error", chance=0.1),
        Fault(kind="error", use="write", errno=28, chance=0.2), Fault(kind="delay", seconds=0.001, chance=0.3),
    )  # fmt: skip
    bench = Bench(runner, FaultyStore(real, faults, seed=seed))
    for _ in range(8):
        assert bench.answer(bench.ask(PROMPT)) == cold
        real.flush(60)
    assert {"bit flip", "error"} <= {fault.kind for fault in bench.store.injected}
    bench.store.faults = ()
    ask_and_flush(bench)
    healed = ask_and_flush(bench)
    assert bench.answer(healed) == cold and healed.stats.cached_tokens == len(PROMPT) - 1 and real.check() == []


# ---- the index


def other_index(folder):
    """The index of another store, closed as it should be."""
    store = PagedSSDCacheManager(folder, MB, free_reserve_bytes=0)
    store.close()
    return folder / INDEX_NAME


def spoil_index(path, how, other):
    raw = bytearray(path.read_bytes())
    if how in ("header", "payload"):
        raw[18 if how == "header" else len(raw) // 2] ^= 0x40
        path.write_bytes(raw)
    elif how == "zeroed tail":
        path.write_bytes(raw[:-3000] + bytes(3000))
    else:
        spoil(path, how, other)


@pytest.mark.parametrize("how", HOWS)
def test_an_index_that_was_spoiled_while_stopped_is_made_again(opened, cold, caplog, tmp_path, how):
    bench = opened()
    ask_and_flush(bench)
    bench.store.close()
    spoil_index(tmp_path / "root" / INDEX_NAME, how, other_index(tmp_path / "other"))
    caplog.clear()
    bench = opened()
    again = ask_and_flush(bench)
    assert bench.answer(again) == cold and again.stats.cached_ssd_tokens == len(PROMPT) - 1
    assert bench.store.check() == [] and bench.store.stats().index_damaged == len(warnings_in(caplog)) <= 1
    assert all(INDEX_NAME in line for line in warnings_in(caplog))
    bench.store.close()
    assert ask_and_flush(opened()).stats.cached_ssd_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("how", HOWS)
def test_an_index_that_is_spoiled_while_running_is_made_again(opened, runner, cold, caplog, tmp_path, how):
    bench = opened()
    ask_and_flush(bench)
    spoil_index(tmp_path / "root" / INDEX_NAME, how, other_index(tmp_path / "other"))
    caplog.clear()
    for _ in range(2):
        assert bench.answer(ask_and_flush(bench)) == cold
    assert bench.store.check() == [] and bench.store.stats().index_damaged == 1
    assert [INDEX_NAME in line for line in warnings_in(caplog)] == [True]
    bench.store.close()
    bench = opened()
    again = ask_and_flush(bench)
    assert bench.answer(again) == cold and again.stats.cached_ssd_tokens == len(PROMPT) - 1
    assert bench.store.check() == [] and bench.store.stats().index_damaged == 0


# ---- files without rights


def as_nobody(root):
    """The unreadable cases, by a user who is not root; run by the next test in a process of its own."""
    said = Said()
    trust_the_cache()
    runner = TinyRunner()
    bench = Bench(runner, DictStore())
    expected = bench.answer(bench.ask(PROMPT))
    become_nobody()

    def opened():
        store = PagedSSDCacheManager(root / "m", 64 * MB, root_dir=root, free_reserve_bytes=0)
        return Bench(runner, store)

    for when in ("running", "stopped"):
        for which in (0, 2, 5):
            bench = opened()
            ask_and_flush(bench)
            path = files_in_order(bench.store)[which]
            if when == "stopped":
                bench.store.close()
            path.chmod(0)
            if when == "stopped":
                bench = opened()
            said.lines.clear()
            assert bench.answer(ask_and_flush(bench)) == expected and bench.store.stats().damaged == 1
            assert [str(path) in line for line in said.lines] == [True], said.lines
            healed = ask_and_flush(bench)
            assert bench.answer(healed) == expected and healed.stats.cached_ssd_tokens == len(PROMPT) - 1
            assert bench.store.check() == [] and len(said.lines) == 1
            bench.store.close()
    for index in ("running", "stopped"):
        bench = opened()
        (root / INDEX_NAME).chmod(0)
        if index == "stopped":
            bench.store.close()
            bench = opened()
        again = ask_and_flush(bench)
        assert bench.answer(again) == expected and again.stats.cached_ssd_tokens == len(PROMPT) - 1
        assert bench.store.check() == [] and len(said.lines) <= 3
        bench.store.close()


def test_unreadable_files_are_misses_for_a_user_who_is_not_root():
    with open_folder() as folder:
        run_in_child(as_nobody, folder / "root")
