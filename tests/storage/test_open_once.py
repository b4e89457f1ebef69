import multiprocessing
import os
from pathlib import Path

import pytest

from omlx.storage.open_once import OpenOnce


class Thing:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []

    def flush(self, timeout_s: float | None = None) -> bool:
        self.calls.append("flush")
        return True

    def close(self, timeout_s: float) -> bool:
        self.calls.append("close")
        return True

    def leave_to_parent(self) -> None:
        self.calls.append("leave")


def joined(thing: Thing) -> None:
    thing.calls.append("join")


@pytest.fixture
def registry():
    return OpenOnce[Thing]()


def test_many_users_of_a_path_have_one_which_the_last_of_them_closes(registry, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one = registry.open(tmp_path / "real", Thing, joined)
    two = registry.open(tmp_path / "link", Thing, joined)
    assert one is two and one.path == tmp_path / "real" and registry.all() == {tmp_path / "real": one}
    assert registry.release(one, 1) and one.calls == ["join", "flush"]
    assert registry.release(one, 1) and one.calls == ["join", "flush", "close"] and registry.all() == {}
    assert registry.open(tmp_path / "real", Thing, joined) is not one


def test_what_is_not_open_cannot_be_released(registry, tmp_path):
    one = registry.open(tmp_path, Thing, joined)
    registry.release(one, 1)
    other = registry.open(tmp_path, Thing, joined)
    assert not registry.release(one, 1) and one.calls == ["close"] and other.calls == []


def test_what_cannot_be_opened_is_not_kept_and_the_lock_is_free_again(registry, tmp_path):
    def fails(path: Path) -> Thing:
        raise OSError("no")

    with pytest.raises(OSError):
        registry.open(tmp_path, fails, joined)
    assert registry.all() == {} and registry.open(tmp_path, Thing, joined).calls == []


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_lets_go_of_them_even_if_another_thread_held_the_lock(registry, tmp_path):
    thing = registry.open(tmp_path, Thing, joined)
    with registry.lock:
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(registry, thing))
        child.start()
    child.join(60)
    assert child.exitcode == 0 and thing.calls == [] and registry.all() == {tmp_path: thing}


def _in_child(registry: OpenOnce[Thing], thing: Thing) -> None:
    fine = thing.calls == ["leave"] and registry.all() == {} and not registry.release(thing, 1)
    os._exit(0 if fine else 1)
