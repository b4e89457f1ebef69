import random
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch

from omlx.errors import EngineError
from omlx.request import RequestState
from omlx.scheduler import SchedulerConfig, scheduler_config
from tests.dict_store import DictStore
from tests.tiny import EOS, VOCAB, Bench, TinyRunner

B = 16
LENGTHS = [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 5 * B + 17]


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


@pytest.fixture
def bench(runner: TinyRunner) -> Bench:
    return Bench(runner, DictStore())


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS) for _ in range(length)]


def cold(runner: Any, tokens: list[int], **options: Any) -> list[tuple[Any, ...]]:
    """The answer of a server that never saw anything."""
    fresh = Bench(runner, DictStore())
    return fresh.answer(fresh.ask(tokens, cache=False, **options))


def close(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]], within: float) -> bool:
    """Equal tokens, log-probabilities within a bound."""
    return [x[:2] for x in a] == [x[:2] for x in b] and all(
        abs(x[2] - y[2]) <= within for x, y in zip(a, b, strict=True)
    )


# ---- exactness


@pytest.mark.parametrize("exact", ["on", "strict"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_computes_one_token_and_gives_the_same_bits(runner, exact, length):
    bench = Bench(runner, DictStore(), exact=exact)
    tokens = prompt(length)
    first = bench.ask(tokens)
    runner.computed = 0
    second = bench.ask(tokens)
    assert bench.answer(first) == bench.answer(second) == cold(runner, tokens)
    assert second.stats.cached_tokens == length - 1 and first.stats.cached_tokens == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_a_repeat_is_close_when_exact_is_off(runner, length):
    bench = Bench(runner, DictStore(), exact="off")
    tokens = prompt(length)
    first, second = bench.ask(tokens), bench.ask(tokens)
    assert close(bench.answer(first), bench.answer(second), 1e-3)
    assert second.stats.cached_tokens == length - 1


@pytest.mark.parametrize("shared", [5, B - 1, B, B + 3, 3 * B, 3 * B + 8, 60])
def test_a_prompt_that_leaves_a_stored_one_gives_the_bits_of_a_cold_one(runner, bench, shared):
    bench.ask(prompt(61))
    other = prompt(61)[:shared] + prompt(30, seed=1)
    request = bench.ask(other)
    assert bench.answer(request) == cold(runner, other)
    assert shared - B <= request.stats.cached_tokens <= shared


def test_a_longer_prompt_keeps_the_shorter_ones_tail(runner, bench):
    short, long = prompt(40), prompt(40) + prompt(7, seed=3)
    bench.ask(short, max_tokens=1)
    assert bench.answer(bench.ask(long)) == cold(runner, long)
    again = bench.ask(short, max_tokens=1)
    assert again.stats.cached_tokens == 39
    assert bench.answer(again) == cold(runner, short, max_tokens=1)


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
def test_the_next_turn_of_a_conversation(runner, exact):
    bench = Bench(runner, DictStore(), exact=exact)
    first = prompt(45)
    answer = bench.tokens(bench.ask(first, max_tokens=30))
    turn = first + answer + prompt(11, seed=2)
    request, repeat = bench.ask(turn), bench.ask(turn)
    assert bench.answer(request)[0][0] == bench.answer(repeat)[0][0]
    if exact == "strict":
        assert bench.answer(request) == bench.answer(repeat) == cold(runner, turn)
        assert request.stats.cached_tokens == 32  # the prompt's whole cells
    else:
        known = len(first) + len(answer)
        assert known - B < request.stats.cached_tokens <= known
        assert close(bench.answer(request), cold(runner, turn), 1e-3)
    if exact == "on":
        assert bench.answer(request) == bench.answer(repeat)
    if exact == "off":
        assert request.stats.cached_tokens == 75
    assert repeat.stats.cached_tokens == len(turn) - 1


def test_prefill_is_cut_on_the_grid_only_and_the_last_token_comes_alone(runner, bench):
    runner.chunks.clear()
    bench.ask(prompt(50))
    assert runner.chunks == [(0, 16), (16, 16), (32, 16), (48, 1)]


def test_other_numerics_are_not_used_when_exact_and_replaced(runner):
    store, tokens = DictStore(), prompt(50)
    Bench(runner, store, numerics="there").ask(tokens)
    here = Bench(runner, store, numerics="here")
    assert here.ask(tokens).stats.cached_tokens == 0
    assert here.ask(tokens).stats.cached_tokens == 49
    assert Bench(runner, store, numerics="third", exact="off").ask(tokens).stats.cached_tokens == 49


def test_a_stored_block_is_not_changed_by_decoding(runner, bench):
    shared = prompt(3 * B)
    a, b = shared + [1, 2, 3], shared + [4, 5, 6]
    first = bench.ask(a, max_tokens=40)
    bench.ask(b, max_tokens=40)
    assert bench.answer(bench.ask(a, max_tokens=40)) == bench.answer(first)


# ---- what is stored


def test_tails_are_dropped_when_a_longer_block_contains_them(bench):
    request = bench.ask(prompt(20), max_tokens=30)
    sizes = sorted(meta.token_count for meta, _ in bench.store.blocks.values())
    assert sizes == [2] + [B] * 3  # 20 + 30 tokens, no leftovers of the prompt's tail
    assert bench.store.pinned == {} and bench.paged.requests() == ()
    assert request.state is RequestState.FINISHED


def test_cache_false_neither_reads_nor_writes(bench):
    tokens = prompt(40)
    bench.ask(tokens, cache=False)
    assert not bench.store.blocks
    bench.ask(tokens)
    assert bench.ask(tokens, cache=False).stats.cached_tokens == 0


def test_tenants_with_different_salts_share_nothing(bench):
    tokens = prompt(40)
    bench.ask(tokens, salt="a")
    assert bench.ask(tokens, salt="b").stats.cached_tokens == 0
    assert bench.ask(tokens, salt="a").stats.cached_tokens == 39


def test_heads_are_marked_used_after_tails(bench):
    bench.ask(prompt(3 * B + 2), max_tokens=1)
    starts = [bench.store.blocks[name][0].start for name in bench.store.used]
    assert starts == sorted(starts, reverse=True) and starts[-1] == 0


def test_a_block_that_cannot_be_read_ends_the_match_and_heals(runner, bench):
    tokens = prompt(5 * B)
    bench.ask(tokens)
    middle = next(name for name, (meta, _) in bench.store.blocks.items() if meta.start == 2 * B)
    bench.store.lose(middle)
    request = bench.ask(tokens)
    assert request.stats.cached_tokens == 2 * B
    assert bench.answer(request) == cold(runner, tokens)
    assert bench.ask(tokens).stats.cached_tokens == 5 * B - 1


def test_blocks_in_use_are_pinned(bench):
    request = bench.add(prompt(3 * B))
    bench.scheduler.step()
    bench.scheduler.step()
    assert len(bench.store.pinned) >= 1 and bench.paged.block_ids(request.request_id)
    bench.run()
    assert bench.store.pinned == {}


def test_a_lost_answer_takes_the_end_of_its_prompt_with_it(runner, bench):
    first = prompt(3 * B)
    answer = bench.tokens(bench.ask(first, max_tokens=20, ignore_eos=True))
    turn = first + answer + prompt(5, seed=1)
    lost = [name for name, (meta, _) in bench.store.blocks.items() if meta.start == 3 * B]
    for name in lost:
        bench.store.lose(name)
    request = bench.ask(turn)
    assert request.stats.cached_tokens == 2 * B  # the last block of the prompt was cut before its last token
    assert bench.answer(request) == cold(runner, turn)


class SlowStore(DictStore):
    """Reads of lost blocks take a while, and leave garbage in the target at the end."""

    def read_block(self, block_hash: bytes, target: Any) -> Any:
        if block_hash in self.lost:
            time.sleep(0.05)
            for piece in target.pieces() or ():
                piece[:] = b"\x7f" * piece.nbytes
        return super().read_block(block_hash, target)


def test_a_late_read_writes_into_no_live_cache_and_all_lost_blocks_heal_at_once(runner):
    bench = Bench(runner, SlowStore())
    tokens = prompt(8 * B)
    bench.ask(tokens)
    for meta, _ in list(bench.store.blocks.values()):
        if meta.start in (2 * B, 4 * B, 5 * B):
            bench.store.lose(meta.block_hash)
    request = bench.ask(tokens)
    assert request.stats.cached_tokens == 2 * B
    assert bench.answer(request) == cold(runner, tokens)
    again = bench.ask(tokens)
    assert again.stats.cached_tokens == 8 * B - 1 and bench.answer(again) == bench.answer(request)


# ---- sampling and ends


def test_first_tokens_obey_max_tokens_and_end_of_text(runner, bench):
    one = bench.ask(prompt(20), max_tokens=1)
    ((token, reason, *_),) = bench.answer(one)
    assert reason == "length"
    stops = Bench(TinyRunner(eos=frozenset({token})), DictStore())
    assert [x[:2] for x in stops.answer(stops.ask(prompt(20)))] == [(token, "stop")]
    goes_on = stops.ask(prompt(20), ignore_eos=True)
    assert len(stops.answer(goes_on)) == 8


def test_end_of_text_in_mid_answer_stops(runner, bench):
    tokens = bench.tokens(bench.ask(prompt(33), max_tokens=12))
    stop = next(t for i, t in enumerate(tokens) if i and t not in tokens[:i])
    stops = Bench(TinyRunner(eos=frozenset({stop})), DictStore())
    answer = stops.answer(stops.ask(prompt(33), max_tokens=12))
    assert [x[0] for x in answer] == tokens[: tokens.index(stop) + 1] and answer[-1][1] == "stop"


def test_bias_and_penalties_hold_from_the_first_token(bench):
    forced = bench.ask(prompt(20), logit_bias=((7, 1000.0),), max_tokens=3)
    assert bench.tokens(forced) == [7, 7, 7]
    bias = ((7, 1000.0), (8, 950.0))
    present = bench.ask(prompt(20), logit_bias=bias, presence_penalty=100.0, max_tokens=4)
    assert bench.tokens(present) == [7, 8, 7, 7]
    counted = bench.ask(prompt(20), logit_bias=bias, frequency_penalty=100.0, max_tokens=4)
    assert bench.tokens(counted) == [7, 8, 7, 8]


def test_presence_penalty_does_not_count_the_prompt(bench):
    repeated = bench.ask([7] * 20, logit_bias=((7, 1000.0), (8, 950.0)), presence_penalty=100.0, max_tokens=1)
    assert bench.tokens(repeated) == [7]


def test_logprobs_are_of_the_distribution_and_best_first(bench):
    request = bench.ask(prompt(20), top_logprobs=5)
    for output in bench.outputs[request.request_id]:
        values = [value for _, value in output.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert output.top_logprobs[0] == (output.token, output.logprob)
    assert all(o.logprob is None for o in bench.outputs[bench.ask(prompt(9), top_logprobs=None).request_id])


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 10**6}])
def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(runner, bench, filters):
    alone = bench.tokens(bench.ask(prompt(20), temperature=1.0, seed=5, **filters))
    crowd = [bench.add(prompt(20 + i, seed=i), temperature=0.7, seed=i) for i in range(3)]
    again = bench.add(prompt(20), temperature=1.0, seed=5, **filters)
    bench.run()
    assert bench.tokens(again) == alone
    assert len({tuple(bench.tokens(r)) for r in crowd}) == 3
    assert bench.tokens(bench.ask(prompt(20), temperature=1.0, seed=6, **filters)) != alone


# ---- many at once


def test_overlapping_requests_give_the_text_they_give_alone(runner, bench):
    prompts = [prompt(length, seed=length) for length in (3, 17, 40, 90, 400)]
    alone = [cold(runner, p, max_tokens=20) for p in prompts]
    requests = [bench.add(p, max_tokens=20) for p in prompts]
    bench.run()
    for request, expected in zip(requests, alone, strict=True):
        assert close(bench.answer(request), expected, 1e-3)


def test_two_requests_on_one_cached_prefix(runner, bench):
    shared = prompt(50)
    bench.ask(shared)
    pair = [bench.add(shared + [x]) for x in (1, 2)]
    bench.run()
    for request, last in zip(pair, (1, 2), strict=True):
        assert close(bench.answer(request), cold(runner, [*shared, last]), 1e-3)
        assert request.stats.cached_tokens >= 48


def test_no_more_run_than_allowed_and_the_rest_waits(runner):
    bench = Bench(runner, DictStore(), max_concurrent_requests=2)
    requests = [bench.add(prompt(20, seed=i), max_tokens=6) for i in range(5)]
    most = 0
    while bench.scheduler.has_work:
        bench.scheduler.step()
        states = [r.state for r in requests]
        most = max(most, sum(s in (RequestState.PREFILLING, RequestState.DECODING) for s in states))
    assert most == 2 and all(len(bench.tokens(r)) == 6 for r in requests)


def test_streams_get_tokens_while_a_long_prompt_prefills(runner):
    bench = Bench(runner, DictStore(), max_stall_s=1e-6)
    stream = bench.add(prompt(10), max_tokens=40)
    while not bench.outputs.get(stream.request_id):
        bench.scheduler.step()
    bench.add(prompt(200, seed=1), max_tokens=1)
    runner.chunks.clear()
    for _ in range(5):
        before = len(runner.chunks), len(bench.tokens(stream))
        bench.scheduler.step()
        assert len(runner.chunks) - before[0] == 1 and len(bench.tokens(stream)) > before[1]
    bench.run()


def test_a_short_prompt_does_not_wait_for_a_long_one(runner, bench):
    long = bench.add(prompt(1500), max_tokens=1)
    bench.scheduler.step()
    short = bench.add(prompt(8, seed=1), max_tokens=1)
    while short.state is not RequestState.FINISHED:
        bench.scheduler.step()
    assert long.stats.prefilled_tokens < 200
    bench.run()
    assert long.state is RequestState.FINISHED


def most_kv(bench: Bench) -> int:
    most = 0
    while bench.scheduler.has_work:
        bench.scheduler.step()
        most = max(most, bench.scheduler.kv_bytes)
    return most


CROWD = [(5, 560), (20, 540), (30, 550)]  # prompt and answer tokens


def crowd(bench: Bench, **options: Any) -> list[Any]:
    options = {"presence_penalty": 0.3, "ignore_eos": True, "top_logprobs": None} | options
    return [
        bench.add(prompt(n, seed=i), max_tokens=answer, seed=i, temperature=i % 2, **options)
        for i, (n, answer) in enumerate(CROWD)
    ]


@pytest.fixture(scope="module")
def roomy(runner: TinyRunner) -> tuple[list[list[int]], int]:
    """The crowd's answers with memory for all, and the most KV that took."""
    bench = Bench(runner, DictStore())
    requests = crowd(bench)
    needed = most_kv(bench)
    assert bench.scheduler.stats.paused == 0
    return [bench.tokens(r) for r in requests], needed


@pytest.mark.parametrize(("share", "cache"), [(1.0, True), (0.8, True), (0.7, False), (0.5, True), (0.3, True)])
def test_with_less_memory_requests_pause_and_give_the_same_text(runner, roomy, share, cache):
    expected, needed = roomy
    bench = Bench(runner, DictStore(), max_kv_cache_memory=int(needed * share))
    requests = crowd(bench, cache=cache)
    most = most_kv(bench)
    assert [bench.tokens(r) for r in requests] == expected
    growth = len(CROWD) * 256 * runner.layout.bytes_per_token  # the caches grow by so much at a time
    assert most <= needed * share + growth
    # With a third of the memory they wait for each other instead.
    assert bench.scheduler.stats.paused > 0 or share in (1.0, 0.3)
    assert bench.store.pinned == {} and all(r.stats.cached_tokens == 0 for r in requests)


def test_a_paused_request_goes_on_where_it_was(runner):
    bench = Bench(runner, DictStore())
    requests = [bench.add(prompt(50, seed=i), max_tokens=60) for i in range(2)]
    while len(bench.tokens(requests[1]) if requests[1].request_id in bench.outputs else []) < 20:
        bench.scheduler.step()
    said = len(bench.tokens(requests[1]))
    assert bench.scheduler.pause_newest() and requests[1].state is RequestState.PAUSED
    assert not bench.scheduler.pause_newest()  # the last one always runs
    runner.computed = 0
    bench.scheduler.step()
    assert runner.computed == 0 and len(bench.tokens(requests[1])) > said  # read back whole, in the batch again
    bench.run()
    assert [bench.tokens(r) for r in requests] == [
        [x[0] for x in cold(runner, r.prompt, max_tokens=60)] for r in requests
    ]


def test_the_logprobs_of_a_prompt_outlast_a_pause_in_its_prefill(runner):
    tokens = prompt(300, seed=7)
    alone = Bench(runner, DictStore())
    whole = alone.ask(tokens, prompt_logprobs=True).prompt_logprobs
    assert len(whole) == 299 and all(len(one.top) == 2 for one in whole)
    bench = Bench(runner, DictStore())
    bench.add(prompt(50, seed=1), max_tokens=60)
    bench.scheduler.step()
    request = bench.add(tokens, prompt_logprobs=True)
    while not request.prompt_logprobs:
        bench.scheduler.step()
    assert bench.scheduler.pause_newest() and request.state is RequestState.PAUSED
    bench.run()
    assert [one.logprob for one in request.prompt_logprobs] == pytest.approx([one.logprob for one in whole], abs=1e-3)
    assert bench.store.pinned == {}


def test_a_paused_request_can_be_aborted(runner):
    bench = Bench(runner, DictStore())
    requests = [bench.add(prompt(50, seed=i), max_tokens=60) for i in range(2)]
    for _ in range(5):
        bench.scheduler.step()
    bench.scheduler.pause_newest()
    bench.scheduler.abort(requests[1].request_id)
    bench.run()
    assert bench.outputs[requests[1].request_id][-1].finish_reason == "abort"
    assert len(bench.tokens(requests[0])) == 60 and bench.store.pinned == {}


def test_the_longest_request_that_memory_allows_is_known(runner):
    per_token = runner.layout.bytes_per_token
    assert Bench(runner, DictStore(), max_kv_cache_memory=1100 * per_token).scheduler.most_tokens == 1024


# ---- aborts and faults


def test_an_aborted_prefill_is_stored_and_resumed(runner, bench):
    tokens = prompt(300)
    request = bench.add(tokens)
    while request.stats.prefilled_tokens < 100:
        bench.scheduler.step()
    done = request.stats.prefilled_tokens
    bench.scheduler.abort(request.request_id)
    assert not bench.scheduler.has_work and bench.store.pinned == {}
    assert bench.outputs[request.request_id][-1].finish_reason == "abort"
    again = bench.ask(tokens)
    assert again.stats.cached_tokens == done
    assert bench.answer(again) == cold(runner, tokens)


def test_an_aborted_answer_is_stored_too(bench):
    tokens = prompt(20)
    request = bench.add(tokens, max_tokens=100)
    while len(bench.tokens(request) if request.request_id in bench.outputs else []) < 30:
        bench.scheduler.step()
    bench.scheduler.abort(request.request_id)
    answer = bench.tokens(request)
    assert not bench.scheduler.has_work
    assert bench.ask(tokens + answer + [1]).stats.cached_tokens >= 48


def test_a_waiting_request_can_be_aborted_and_unknown_ones_are_ignored(runner):
    bench = Bench(runner, DictStore(), max_concurrent_requests=1)
    first, second = bench.add(prompt(20)), bench.add(prompt(21))
    bench.scheduler.step()
    bench.scheduler.abort(second.request_id)
    bench.scheduler.abort("nobody")
    bench.run()
    assert len(bench.tokens(first)) == 8 and bench.tokens(second) == []


class Breaking(TinyRunner):
    """Raises when it sees token 13 in a prompt, or decodes while `break_decode` is set."""

    def __init__(self) -> None:
        super().__init__()
        model, self.break_decode = self.decoder, False

        class Decoder:
            layers = model.layers

            def __call__(decoder, tokens: mx.array, cache: Any) -> mx.array:
                if self.break_decode:
                    raise RuntimeError("decode broke")
                return model(tokens, cache=cache)

        self.decoder = Decoder()

    def prefill(self, tokens: Any, caches: Any, *where: Any) -> None:
        if 13 in tokens:
            raise ValueError("token 13")
        super().prefill(tokens, caches)


def test_a_fault_fails_its_own_request_only(caplog):
    bench = Bench(Breaking(), DictStore())
    good, bad = bench.add([1, 2, 3, 4]), bench.add([5, 13, 6, 7])
    bench.run()
    assert len(bench.tokens(good)) == 8
    error = bench.failures[bad.request_id]
    assert isinstance(error, EngineError) and "ValueError: token 13" in str(error)
    assert bench.store.pinned == {} and "token 13" in caplog.text
    assert len(bench.tokens(bench.ask([1, 2, 3]))) == 8


def test_a_broken_decode_step_fails_its_rows_and_the_next_requests_work(caplog):
    runner = Breaking()
    bench = Bench(runner, DictStore())
    rows = [bench.add(prompt(10, seed=i), max_tokens=50) for i in range(2)]
    for _ in range(4):
        bench.scheduler.step()
    runner.break_decode = True
    bench.scheduler.step()
    runner.break_decode = False
    assert set(bench.failures) == {r.request_id for r in rows} and not bench.scheduler.has_work
    assert len(bench.tokens(bench.ask([1, 2, 3]))) == 8 and bench.store.pinned == {}


def test_a_row_that_cannot_be_taken_out_fails_and_the_thread_of_work_goes_on(runner, bench, monkeypatch, caplog):
    rows = [bench.add(prompt(10, seed=i), max_tokens=50) for i in range(3)]
    for _ in range(4):
        bench.scheduler.step()
    with monkeypatch.context() as broken:
        broken.setattr(GenerationBatch, "filter", lambda *_: 1 / 0)
        broken.setattr(GenerationBatch, "extract_cache", lambda *_: 1 / 0)
        assert bench.scheduler.pause_newest()
        bench.scheduler.abort(rows[0].request_id)
    bench.run()
    assert rows[2].request_id in bench.failures and bench.store.pinned == {}
    assert all(r.state is RequestState.FINISHED for r in rows)
    assert len(bench.tokens(bench.ask([1, 2, 3]))) == 8


def test_strict_takes_no_decoded_tokens_from_a_paused_request(runner):
    bench = Bench(runner, DictStore(), exact="strict")
    rows = [bench.add(prompt(41, seed=i), max_tokens=30, ignore_eos=True) for i in range(2)]
    while len(rows_tokens := bench.tokens(rows[1]) if rows[1].request_id in bench.outputs else []) < 5:
        bench.scheduler.step()
    bench.scheduler.pause_newest()
    bench.run()
    assert len(bench.tokens(rows[1])) == 30
    longer = rows[1].prompt + rows_tokens
    assert bench.answer(bench.ask(longer)) == cold(runner, longer)


def test_close_ends_everything(bench):
    for i in range(3):
        bench.add(prompt(30, seed=i), max_tokens=1000)
    bench.scheduler.step()
    bench.scheduler.close()
    assert not bench.scheduler.has_work and bench.store.pinned == {}
    assert [o[-1].finish_reason for o in bench.outputs.values()] == ["abort"] * 3


def test_token_ids_are_never_out_of_the_vocabulary(bench):
    assert all(0 <= t < VOCAB for t in bench.tokens(bench.ask(prompt(30), temperature=2.0, seed=1, max_tokens=50)))


def test_exact_auto_is_on_for_the_cpu():
    wanted = "on" if mx.default_device().type == mx.DeviceType.cpu else "off"
    assert scheduler_config(exact="auto", block_size=32) == SchedulerConfig(exact=wanted, block_size=32)
