"""Which inputs make a batch, in which order, and what becomes of requests that fail or are given up."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from omlx.engine.embedding import EncodeJob, EncodeScheduler
from omlx.errors import EngineError, Overloaded
from omlx.model.encoder import Vectors
from omlx.request import EncoderInput
from tests.dict_store import DictStore
from tests.tiny import Bench, TinyRunner

AT_ONCE = 1e9  # seconds in which everything fits
ONE_BY_ONE = 1e-12


class Ran:
    """A model that gives an input's first token and length, and remembers the lengths of its batches."""

    def __init__(self, check: Callable[[list[EncoderInput]], None] = lambda inputs: None) -> None:
        self.batches: list[list[int]] = []
        self._check = check

    def __call__(self, inputs: list[EncoderInput]) -> Vectors:
        self._check(inputs)
        self.batches.append([len(item.ids) for item in inputs])
        return np.array([[item.ids[0], len(item.ids)] for item in inputs], np.float32)


def job(*lengths: int, first: int = 0) -> EncodeJob:
    """Inputs of these lengths, numbered from `first`."""
    return EncodeJob([EncoderInput([first + number, *[9] * (length - 1)]) for number, length in enumerate(lengths)])


def finish(scheduler: EncodeScheduler) -> None:
    while scheduler.has_work:
        scheduler.step()


def rows(done: EncodeJob) -> list[list[float]]:
    return done.future.result(timeout=0).tolist()


def warm(max_stall_s: float) -> tuple[EncodeScheduler, Ran]:
    """A scheduler that knows its model's speed."""
    ran = Ran()
    scheduler = EncodeScheduler(ran, max_stall_s)
    scheduler.add(job(1))
    finish(scheduler)
    ran.batches.clear()
    return scheduler, ran


def test_rows_come_in_the_order_of_the_inputs():
    scheduler, ran = warm(AT_ONCE)
    lengths = [5, 40, 7, 41, 6, 80, 5, 300]
    asked = job(*lengths)
    scheduler.add(asked)
    finish(scheduler)
    assert rows(asked) == [[number, length] for number, length in enumerate(lengths)]
    assert sorted(ran.batches) == [[5, 5, 6, 7], [40, 41, 80], [300]]  # padded to twice their length at most


def test_short_requests_ride_along_with_others_of_their_length():
    scheduler, ran = warm(AT_ONCE)
    asked = [job(10, 500), job(9, first=7), job(10, first=8)]
    for one in asked:
        scheduler.add(one)
    finish(scheduler)
    assert ran.batches == [[500], [9, 10, 10]]
    assert [rows(one) for one in asked] == [[[0, 10], [1, 500]], [[7, 9]], [[8, 10]]]


def test_a_short_request_does_not_take_long_ones_along():
    scheduler, ran = warm(AT_ONCE)
    for length in (10, 21, 20, 100):
        scheduler.add(job(length))
    finish(scheduler)
    assert ran.batches == [[10, 20], [21], [100]]


def test_a_batch_that_would_take_too_long_is_made_smaller_down_to_one_input():
    scheduler, ran = warm(ONE_BY_ONE)
    scheduler.add(job(*[20] * 12))
    finish(scheduler)
    assert ran.batches == [[20]] * 12


def test_before_the_speed_is_known_and_at_any_speed_a_batch_has_a_largest_size():
    ran = Ran()
    scheduler = EncodeScheduler(ran, AT_ONCE)
    scheduler.add(job(*[64] * 300))
    finish(scheduler)
    assert [len(batch) for batch in ran.batches] == [4, 128, 128, 40]


def test_the_share_is_a_share_of_the_time():
    """As measured: what fits into a second alone is halved when another is at work too."""
    scheduler, ran = warm(1.0)
    scheduler._time.observe(10_000_000, 0, 1e6)  # 0.1 s a token, beyond all doubt
    for share, fitting in ((1.0, 2), (0.5, 1)):
        scheduler.add(job(*[5] * 4))
        scheduler.step(share)
        assert len(ran.batches[-1]) == fitting
        finish(scheduler)


def test_a_short_request_does_not_wait_for_a_long_one_and_the_long_one_gets_there():
    scheduler, _ = warm(ONE_BY_ONE)
    long, done = job(*[100] * 8), []
    scheduler.add(long)
    for number in range(20):
        short = job(10, first=number)
        scheduler.add(short)
        scheduler.step()
        scheduler.step()
        assert short.future.done()
        done.append(long.future.done())
    assert done.index(True) < 10


def test_who_has_gone_is_dropped_and_not_computed():
    scheduler, ran = warm(ONE_BY_ONE)
    gone, stays = job(*[50] * 6), job(60, 60)
    scheduler.add(gone)
    scheduler.add(stays)
    assert gone.future.cancel()
    finish(scheduler)
    assert ran.batches == [[60], [60]]
    assert stays.future.done() and scheduler.waiting_inputs == 0
    assert (scheduler.stats.dropped, scheduler.stats.finished) == (1, 2)  # with the one that warmed it


def test_who_goes_during_its_last_batch_hurts_nobody():
    asked = job(5)
    scheduler = EncodeScheduler(Ran(lambda inputs: asked.future.cancel() and None), AT_ONCE)
    scheduler.add(asked)
    finish(scheduler)
    assert (scheduler.stats.dropped, scheduler.stats.finished, scheduler.stats.failed) == (1, 0, 0)


def test_a_fault_fails_the_requests_of_its_batch_alone(caplog):
    def refuse(inputs: list[EncoderInput]) -> None:
        if len(inputs[0].ids) == 13:
            raise ArithmeticError("thirteen")

    scheduler = EncodeScheduler(Ran(refuse), ONE_BY_ONE)
    bad, good = job(13, 40, 41), job(39)
    scheduler.add(bad)
    scheduler.add(good)
    finish(scheduler)
    assert rows(good) == [[0, 39]]
    with pytest.raises(EngineError, match="ArithmeticError: thirteen"):
        bad.future.result(timeout=0)
    assert scheduler.waiting_inputs == 0 and scheduler.stats.failed == 1
    assert "a batch of embeddings failed" in caplog.text


def test_everybody_is_told_when_it_ends():
    for end, error in ((lambda s: s.fail_all(OSError("lost")), EngineError), (EncodeScheduler.close, Overloaded)):
        scheduler = EncodeScheduler(Ran(), AT_ONCE)
        asked = [job(5), job(300)]
        for one in asked:
            scheduler.add(one)
        end(scheduler)
        assert not scheduler.has_work and scheduler.waiting_inputs == 0
        for one in asked:
            with pytest.raises(error):
                one.future.result(timeout=0)


def test_what_was_answered_is_counted_already():
    scheduler, _ = warm(AT_ONCE)
    asked, counted = [job(5), job(7), job(2)], []
    for one in asked:
        one.future.add_done_callback(lambda _: counted.append((scheduler.stats.finished, scheduler.stats.dropped)))
        scheduler.add(one)
    asked[2].future.cancel()
    counted.clear()
    finish(scheduler)
    assert sorted(counted) == [(2, 1), (3, 1)]  # one was finished before


# ---- what text generation gives away


@pytest.mark.parametrize(("share", "chunks"), [(1.0, math.inf), (1e-12, 1)])
def test_beside_others_prefill_takes_its_share_of_the_stall(share, chunks):
    bench = Bench(TinyRunner(), DictStore(), max_stall_s=1000)
    bench.add([5, 6, 7], max_tokens=200, ignore_eos=True)
    bench.scheduler.step()
    bench.runner.chunks.clear()
    bench.add([(i * 7) % 250 for i in range(400)])
    bench.scheduler.step(share)
    assert len(bench.runner.chunks) == 1 if chunks == 1 else len(bench.runner.chunks) > 3
