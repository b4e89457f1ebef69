import threading

import pytest

from omlx.storage.write_queue import WriteQueue
from tests.support import wait_until


@pytest.fixture
def queue():
    """A queue that calls its tasks' subjects; it notes when it rested and ended."""
    log = []
    made = WriteQueue("test", 100, lambda task: task[1](), lambda: log.append("rest"), lambda: log.append("end"))
    made.log = log
    made.start()
    yield made
    made.close(60)


def test_tasks_run_in_order_then_it_rests_then_it_ends(queue):
    gate = threading.Event()
    queue.append(("call", gate.wait))
    for n in range(3):
        queue.append(("call", lambda n=n: queue.log.append(n)))
    gate.set()
    assert queue.close(60)
    assert queue.log[:3] == [0, 1, 2] and queue.log[-1] == "end" and "rest" in queue.log[3:]


def test_bytes_count_until_a_task_is_done_and_an_empty_queue_takes_anything(queue):
    gate = threading.Event()
    assert queue.has_room(1000)
    queue.append(("call", gate.wait), 60)
    assert queue.bytes == 60 and queue.has_room(40) and not queue.has_room(41)
    gate.set()
    assert queue.call(lambda: None, 60)
    assert queue.bytes == 0 and queue.has_room(1000)


def test_a_task_that_fails_does_not_end_the_thread(queue, caplog):
    queue.append(("call", lambda: 1 / 0))
    assert queue.call(lambda: None, 60) and "ZeroDivisionError" in caplog.text


def test_it_rests_when_asked_to_without_a_task(queue):
    assert queue.call(lambda: None, 60)
    wait_until(lambda: queue.log == ["rest"])
    queue.wake_in(0.02)
    queue.wake_in(1000)
    wait_until(lambda: queue.log == ["rest"] * 2)


def test_waiting_has_an_end(queue):
    gate = threading.Event()
    queue.append(("call", gate.wait))
    queue.append(("call", lambda: queue.log.append("dropped")))
    assert not queue.call(lambda: None, 0.05)
    assert not queue.close(0.05)
    gate.set()
    assert queue.close(60) and "dropped" not in queue.log and not queue.call(lambda: None, 1)
