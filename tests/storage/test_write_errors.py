"""Writes that can never work are said and tried once; those that may work later wait."""

import errno
import os

import pytest

from tests.storage.blocks import block, name
from tests.storage.test_disk_store import failing, held, opened, put

__all__ = ["opened"]


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTDIR])
def test_a_write_that_can_never_work_is_tried_once_and_said_once(opened, caplog, number):
    tries = []

    def never(path, buffer, known):
        tries.append(path)
        raise OSError(number, os.strerror(number), str(path))

    store = opened()
    keep = [block(n) for n in range(3)]  # RAM has them all the time
    for n, buffer in enumerate(keep):
        put(store, n, write_file=never, buffer=buffer)
    assert not store.flush(60) and not store.blocks.waits and store.flush(60)
    put(store, 7)  # other blocks are not held up
    assert store.flush(60) and held(store) == {7}
    assert len(tries) == 3 and not any(buffer.unsaved for buffer in keep)
    assert [r.message for r in caplog.records if os.strerror(number) in r.message] == [caplog.records[0].message]
    assert "not tried again until it is next saved" in caplog.records[0].message
    put(store, 0, buffer=keep[0])
    assert store.flush(60) and held(store) == {0, 7} and store.check() == []
    assert store.blocks.counts("m").write_errors == 3


def test_a_file_in_the_way_of_a_models_folder_is_said_once_and_others_work(opened, tmp_path, caplog):
    store = opened()
    (tmp_path / "root" / "in the way").write_text("not ours")
    (tmp_path / "root" / "m").mkdir()
    (tmp_path / "root" / "m" / name(1).hex()[0]).write_text("not ours either")
    keep = [block(n) for n in range(2)]
    put(store, 0, "in the way", buffer=keep[0])
    put(store, 1, buffer=keep[1])
    assert not store.flush(60) and not store.blocks.waits and not any(buffer.unsaved for buffer in keep)
    put(store, 2, "other")
    assert store.flush(60) and held(store, "other") == {2}
    assert len(caplog.records) == 2 and all("not tried again" in record.message for record in caplog.records)
    (tmp_path / "root" / "in the way").unlink()
    put(store, 0, "in the way", buffer=keep[0])
    assert store.flush(60) and held(store, "in the way") == {0}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_write_that_may_work_later_waits(opened, number):
    store = opened()
    buffer = block(1)
    put(store, 1, write_file=failing(number), buffer=buffer)
    assert not store.flush(60) and store.blocks.waits and buffer.unsaved
