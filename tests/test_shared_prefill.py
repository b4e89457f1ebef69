"""Requests that begin with the same new tokens compute them once."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.request import RequestState
from tests.dict_store import DictStore
from tests.test_scheduler import Breaking, close, cold, prompt
from tests.tiny import Bench, TinyRunner

SHARED = 230  # inside a block of 64 and between grid edges (cells of 32: the last one is at 224)
GRID = {"on": 32, "strict": 32, "off": 1}


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


def bench_of(runner: Any, **config: Any) -> Bench:
    runner.chunks.clear()
    return Bench(runner, DictStore(), **({"block_size": 64} | config))


def computed(runner: TinyRunner) -> int:
    """Tokens that went through prefill chunks."""
    return sum(tokens for _, tokens in runner.chunks)


def branch(n: int, shared: int = SHARED) -> list[int]:
    return prompt(shared) + prompt(10 + n, seed=100 + n)


def step_until(bench: Bench, condition: Any) -> None:
    for _ in range(2000):
        if condition():
            return
        bench.scheduler.step()
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
@pytest.mark.parametrize("count", [2, 5])
def test_a_new_prefix_that_arrives_several_times_at_once_is_computed_once(runner, exact, count):
    bench = bench_of(runner, exact=exact)
    requests = [bench.add(branch(n)) for n in range(count)]
    bench.run()
    own = sum(len(r.prompt) - 1 - SHARED for r in requests)
    assert computed(runner) <= SHARED + own + (count - 1) * (GRID[exact] - 1)
    assert bench.scheduler.stats.shared_prefills == count - 1
    for request in requests:
        assert close(bench.answer(request), cold(runner, request.prompt), 1e-3)


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
@pytest.mark.parametrize("length", [5, 64, 65, 200])
def test_equal_prompts_compute_one_prompt_and_a_last_token_each(runner, exact, length):
    bench = bench_of(runner, exact=exact)
    requests = [bench.add(prompt(length)) for _ in range(5)]
    bench.run()
    assert computed(runner) == length - 1
    assert sorted(r.stats.cached_tokens for r in requests) == [0] + [length - 1] * 4
    for request in requests:
        assert close(bench.answer(request), cold(runner, prompt(length)), 1e-3)


def test_branches_of_branches_share_what_each_has_in_common(runner):
    bench = bench_of(runner, exact="off")
    stem = prompt(150)
    twigs = [stem + prompt(100, seed=n) for n in (1, 2)]
    for twig in twigs:
        for n in range(3):
            bench.add(twig + prompt(9, seed=50 + n))
    bench.run()
    assert computed(runner) <= 150 + 2 * 100 + 6 * 9


def test_who_waits_holds_no_kv_no_slot_and_no_blocks(runner):
    bench = bench_of(runner, max_concurrent_requests=2)
    leader, follower, other = bench.add(branch(0)), bench.add(branch(1)), bench.add(prompt(300, seed=9))
    bench.scheduler.step()
    bench.scheduler.step()
    assert [r.state for r in (leader, follower)] == [RequestState.PREFILLING, RequestState.WAITING]
    assert other.state is RequestState.PREFILLING  # it came later, and takes the place
    assert not bench.paged.block_ids(follower.request_id) and bench.scheduler.waiting_requests == 1
    bench.run()
    assert bench.scheduler.stats.shared_prefills == 1 and bench.store.pinned == {}


@pytest.mark.parametrize("how", ["abort", "pause", "fail"])
def test_when_the_leader_ends_early_the_follower_goes_on_from_there(runner, how, caplog):
    runner = Breaking() if how == "fail" else runner
    bench = bench_of(runner, exact="on", block_size=16)
    shared = [t for t in prompt(600) if t != 13]
    if how == "pause":  # only the newest of several is paused
        bench.add([7, *prompt(1500, seed=3)], max_tokens=1)
        bench.scheduler.step()
    leader = bench.add(shared[:300] + ([13] if how == "fail" else []) + shared[300:] + [1, 2, 3])
    follower = bench.add(shared[:300] + shared[300:] + [4, 5])
    step_until(bench, lambda: leader.stats.prefilled_tokens >= 160)
    assert follower.state is RequestState.WAITING
    if how == "abort":
        bench.scheduler.abort(leader.request_id)
    elif how == "pause":
        assert bench.scheduler.pause_newest() and leader.state is RequestState.PAUSED
    bench.run()
    assert close(bench.answer(follower), cold(runner, follower.prompt), 1e-3)
    assert follower.stats.cached_tokens >= 160 and bench.store.pinned == {}
    assert (how == "fail") == (leader.request_id in bench.failures)


def test_an_aborted_follower_is_forgotten(runner):
    bench = bench_of(runner)
    leader, follower = bench.add(branch(0)), bench.add(branch(1))
    bench.scheduler.step()
    bench.scheduler.abort(follower.request_id)
    assert follower.state is RequestState.FINISHED
    bench.run()
    assert close(bench.answer(leader), cold(runner, leader.prompt), 1e-3) and not bench.scheduler.has_work


def test_a_leader_that_gets_no_turns_is_waited_for_no_longer(runner):
    bench = bench_of(runner, block_size=16, exact="on")
    bench.add(prompt(3900, seed=1), max_tokens=1)  # the oldest: has every second turn
    bench.scheduler.step()
    leader, follower = bench.add(branch(0, 400)), bench.add(branch(1, 400))
    step_until(bench, lambda: leader.state is RequestState.PREFILLING)
    for n in range(700):  # ever new shorter prompts have the others
        if n % 2 == 0:
            bench.add(prompt(20, seed=1000 + n), max_tokens=1)
        bench.scheduler.step()
        if follower.state is not RequestState.WAITING:
            break
    assert follower.state is RequestState.PREFILLING and leader.state is RequestState.PREFILLING
    bench.run()
    for request in (leader, follower):
        assert close(bench.answer(request), cold(runner, request.prompt), 1e-3)


def test_many_prefixes_are_each_computed_once_however_many_there_are(runner):
    """A leader that has to wait for its turn is no slow one: alone the follower would wait as well."""
    bench = bench_of(runner, block_size=16, exact="on")
    for round_ in range(2):
        for n in range(8):
            bench.add(prompt(300, seed=n) + prompt(5, seed=100 + 8 * round_ + n), max_tokens=2)
    bench.run()
    assert computed(runner) <= 8 * 300 + 16 * 5 + 8 * 15 and bench.scheduler.stats.shared_prefills >= 6


def test_a_leader_goes_first_when_a_short_prompt_waits_for_it(runner):
    bench = bench_of(runner, block_size=16, max_stall_s=1e-6)
    bench.add(prompt(2500, seed=1), max_tokens=1)
    leader = bench.add(branch(0, 100) + prompt(2000, seed=2), max_tokens=1)
    short = bench.add(branch(1, 100), max_tokens=1)
    middle = bench.add(prompt(400, seed=3), max_tokens=1)
    step_until(bench, lambda: short.state is RequestState.FINISHED)
    assert middle.state is not RequestState.FINISHED and leader.stats.prefilled_tokens < 300
    bench.run()


@pytest.mark.parametrize("apart", [{"salt": "b"}, {"cache": False}])
def test_nobody_waits_for_what_it_may_not_use(runner, apart):
    bench = bench_of(runner)
    leader, other = bench.add(branch(0)), bench.add(branch(1), **apart)
    bench.run()
    assert bench.scheduler.stats.shared_prefills == 0 and other.stats.cached_tokens == 0
    assert computed(runner) == len(leader.prompt) + len(other.prompt) - 2


def test_a_short_head_in_common_is_not_waited_for(runner):
    """A template's first words are computed sooner than another's first block."""
    bench = bench_of(runner, exact="off")
    bench.add(prompt(12) + prompt(800, seed=1)), bench.add(prompt(12) + prompt(30, seed=2))
    bench.run()
    assert bench.scheduler.stats.shared_prefills == 0


def test_a_request_that_comes_late_waits_for_the_rest(runner):
    bench = bench_of(runner, exact="off", block_size=16)
    leader = bench.add(branch(0, 900))
    step_until(bench, lambda: leader.stats.prefilled_tokens >= 300)
    late = bench.add(branch(1, 900))
    bench.run()
    assert bench.scheduler.stats.shared_prefills == 1 or leader.stats.prefilled_tokens > 900
    assert computed(runner) <= 900 + 10 + 11 and late.stats.cached_tokens == 900


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["on", "strict", "off"]))
def test_any_mix_of_branches_aborts_and_pauses_ends_with_the_right_answers(seed, exact):
    runner = TinyRunner()
    rng = random.Random(seed)
    bench = bench_of(runner, exact=exact, block_size=16, max_concurrent_requests=rng.randrange(1, 5))
    stems = [prompt(rng.randrange(1, 150), seed=n) for n in range(2)]
    asked, gone = [], set()
    for _ in range(rng.randrange(2, 7)):
        stem = rng.choice(stems)
        tokens = stem[: rng.randrange(1, len(stem) + 1)] + prompt(rng.randrange(1, 40), seed=rng.randrange(3))
        asked.append(bench.add(tokens, max_tokens=rng.randrange(1, 6), salt=rng.choice(["", "", "t"])))
        for _step in range(rng.randrange(3)):
            bench.scheduler.step()
        if rng.random() < 0.2:
            victim = rng.choice(asked)
            gone.add(victim.request_id)
            bench.scheduler.abort(victim.request_id)
        if rng.random() < 0.2:
            bench.scheduler.pause_newest()
    bench.run()
    assert bench.store.pinned == {} and not bench.failures
    for request in asked:
        if request.request_id not in gone:
            alone = cold(runner, request.prompt, max_tokens=request.sampling.max_tokens)
            assert close(bench.answer(request), alone, 1e-3)
