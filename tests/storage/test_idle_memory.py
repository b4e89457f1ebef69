import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.storage import tensor_file
from omlx.storage.idle_memory import IdleMemory
from omlx.storage.tensor_file import BlockBuffer, TensorSpec, read_block_file, write_block_file
from tests.storage.blocks import NBYTES, SPECS, block, name, same

_sizes = itertools.count(12_345)


def odd() -> tuple[TensorSpec]:
    """Of a size that no other test uses, so that no other idle memory fits."""
    return (TensorSpec("odd", "U8", (next(_sizes),)),)


def place(data: np.ndarray) -> int:
    return data.__array_interface__["data"][0]


def test_memory_is_taken_again_if_it_has_the_right_size():
    memory = IdleMemory(2)
    sizes = [memory.take(n) for n in (10, 20, 30)]
    places = [place(data) for data in sizes]
    for data in sizes:
        memory.give(data)
    assert place(memory.take(30)) == places[2]
    assert place(memory.take(20)) == places[1]
    assert place(memory.take(10)) != places[0]  # two are kept, this was the oldest


def test_threads_never_share_memory():
    memory = IdleMemory(4)
    wrong = []

    def work(mark: int) -> None:
        for _ in range(3000):
            data = memory.take(64)
            data[:] = mark
            if (data != mark).any():
                wrong.append(mark)
            memory.give(data)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not wrong


def test_a_block_that_nobody_has_any_more_leaves_its_memory_to_the_next():
    specs = odd()
    first = BlockBuffer.empty(specs)
    before = place(first.data)
    del first
    others = [np.empty(specs[0].nbytes, np.uint8) for _ in range(5)]  # would get it if it had been freed
    assert place(BlockBuffer.empty(specs).data) == before and others


@pytest.mark.parametrize(
    "view",
    [lambda b: b, lambda b: b.data, lambda b: b.data[5:9], lambda b: b.tensor(0), lambda b: memoryview(b.data)],
)
def test_memory_that_somebody_can_see_is_left_alone(view):
    specs = odd()
    first = BlockBuffer.empty(specs)
    first.data[:] = 1
    before = place(first.data)
    seen = view(first)
    del first
    second = BlockBuffer.empty(specs)
    second.data[:] = 2
    assert place(second.data) != before
    assert (np.frombuffer(seen.data if isinstance(seen, BlockBuffer) else seen, np.uint8) == 1).all()


def test_memory_is_given_back_only_when_no_weak_reference_gives_the_block_any_more(monkeypatch):
    """A block that waits for its write is held weakly, and another thread may ask for it at any moment."""
    specs = odd()
    block = BlockBuffer.empty(specs)
    weak, seen = weakref.ref(block), []
    monkeypatch.setattr(IdleMemory, "give", lambda memory, data: seen.append(weak()))
    del block
    assert seen == [None]


def test_memory_of_no_bytes_does_not_push_out_what_is_of_use():
    specs = odd()
    first = BlockBuffer.empty(specs)
    before = place(first.data)
    del first
    for _ in range(9):
        BlockBuffer.empty(())
    assert place(BlockBuffer.empty(specs).data) == before


def test_memory_that_was_never_the_blocks_is_not_kept():
    specs = odd()
    theirs = np.ones(specs[0].nbytes, np.uint8)
    BlockBuffer(specs, theirs[:])
    BlockBuffer.empty(specs).data[:] = 2
    assert (theirs == 1).all()


class Reader:
    """A ReadTarget that holds on to the block."""

    specs = SPECS
    block: BlockBuffer | None = None

    def copy_from(self, block: BlockBuffer) -> None:
        self.block = block

    def pieces(self) -> None:
        return None


def test_blocks_that_left_ram_keep_their_bytes_for_readers_and_for_the_writer(tmp_path, monkeypatch):
    held_up, go_on = threading.Event(), threading.Event()

    def slow(path, block, meta):
        held_up.set()
        assert go_on.wait(60)
        write_block_file(path, block, meta)

    monkeypatch.setattr(PagedSSDCacheManager, "_write_safetensors_no_mx", staticmethod(slow))
    store = PagedSSDCacheManager(tmp_path, 1 << 30, 2 * NBYTES)
    for n in range(3):
        assert store.save_block(name(n), block(n), 8)
    assert held_up.wait(60)
    readers = [Reader(), Reader()]
    assert [store.read_block(name(n), reader) for n, reader in enumerate(readers, 1)] == ["ram", "ram"]
    for n in range(3, 40):
        assert store.save_block(name(n), block(n), 8)
    assert all(same(reader.block, block(n)) for n, reader in enumerate(readers, 1))
    go_on.set()
    assert store.flush(60)
    for n in range(40):
        path = store.get_block_path(name(n))
        assert path is not None and same(read_block_file(path, store.get_meta(name(n))), block(n))
    assert store.close()


def test_a_block_that_waits_for_the_writer_never_comes_back_in_memory_that_was_given_away(tmp_path, monkeypatch):
    held_up, turns = threading.Event(), threading.Semaphore(0)

    def slow(path, block, meta):
        path.parent.mkdir(exist_ok=True)  # or each is written twice
        held_up.set()
        assert turns.acquire(timeout=60)
        write_block_file(path, block, meta)

    monkeypatch.setattr(PagedSSDCacheManager, "_write_safetensors_no_mx", staticmethod(slow))
    store = PagedSSDCacheManager(tmp_path, 1 << 30, 2 * NBYTES, max_queue_bytes=1)
    waiting = store._disk.blocks._waiting
    give = tensor_file._idle.give

    def dies(memory):
        """The writer looks at what waits just while block 1 dies."""
        give(memory)
        if threading.current_thread() is not threading.main_thread():
            return  # the writer is done with block 0
        turns.release()
        deadline = time.monotonic() + 60
        while any(key[1] == name(1) for key in waiting) and time.monotonic() < deadline:
            time.sleep(0.01)

    for n in range(3):  # the writer is at 0, nothing else is queued; 1 and 2 are in RAM and wait
        assert store.save_block(name(n), block(n), 8)
        assert held_up.wait(60)
    fourth = block(3)
    monkeypatch.setattr(tensor_file._idle, "give", dies)
    store.save_block(name(3), fourth, 8)  # 1 has to leave RAM
    monkeypatch.setattr(tensor_file._idle, "give", give)
    others = [BlockBuffer.empty(SPECS) for _ in range(8)]
    for other in others:
        other.data[:] = 99
    turns.release(100)
    assert store.flush(60)
    path = store.get_block_path(name(1))
    assert path is None or same(read_block_file(path, store.get_meta(name(1))), block(1))
    assert store.close()
