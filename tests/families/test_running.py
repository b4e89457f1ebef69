"""Running requests of every kind of layers: decoded alone or together, paused, aborted, cut short by a lost file."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import greedy_sampler

from omlx.admission import StoredPrefixes
from omlx.cache import layer_state
from omlx.cache.companions import companion_names
from omlx.cache.layer_state import Uncacheable
from omlx.model.decode_batch import DecodeBatch, DecodeFailure, DecodeRow
from omlx.model.runner import TextRunner
from omlx.request import Request, RequestState, SamplingParams, TokenOutput
from omlx.scheduler import Failure, Scheduler, SchedulerConfig
from tests.dict_store import DictStore
from tests.families import zoo
from tests.families.test_families import assert_close, cold, open_store, prompt, runner
from tests.tiny import Bench

B = 16
KINDS = ("gemma3_text", "llama4", "mamba2", "falcon_h1", "qwen3_next")


def alone(decoder: Any, caches: list[Any], text: list[int], n: int) -> list[int]:
    """n greedy tokens by plain forward passes."""
    layer_state.settle(caches)
    logits, tokens = decoder(mx.array([text]), cache=caches)[:, -1], []
    for _ in range(n):
        tokens.append(int(mx.argmax(logits).item()))
        layer_state.settle(caches)
        logits = decoder(mx.array([[tokens[-1]]]), cache=caches)[:, -1]
    return tokens


def row(r: Any, name: str, text: list[int], caches: list[Any], n: int = 8, stop: frozenset[int] = frozenset()) -> Any:
    r.prefill(text[:-1], caches)
    return DecodeRow(name, text[-1], True, text[:-1], caches, n, greedy_sampler, [], stop)


def drain(batch: DecodeBatch) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    while len(batch):
        for output in batch.step():
            found.setdefault(output.row_id, []).append(output)
    return found


def keeping(r: TextRunner) -> list[Any]:
    """Caches of a kind that mlx-lm's batches get wrong: rings that keep first tokens."""
    return [RotatingKVCache(24, keep=4) if type(c) is KVCache else c for c in r.new_cache()]


class Private(KVCache):
    """A class that a model brings along: no row in the table."""

    merge = property()  # type: ignore[assignment]  # and no batch form


def private(r: TextRunner) -> list[Any]:
    return [Private() for _ in r.new_cache()]


@pytest.mark.parametrize("make", [keeping, private])
def test_rows_without_a_batch_form_are_decoded_alone_beside_others(make: Any) -> None:
    r = runner("llama")
    texts = {name: prompt(n, seed=n) for name, n in (("a", 10), ("b", 30), ("c", 40), ("d", 12))}
    batch = DecodeBatch(r.decoder)
    made = {name: make(r) if name in "ab" else r.new_cache() for name in texts}
    for name, text in texts.items():
        batch.add(row(r, name, text, made[name], n=20))
    first = {output.row_id: output.token for output in batch.step()}
    assert sorted(batch.groups) == [1, 1, 2]
    caches, tokens = batch.remove("a")
    assert list(map(type, caches)) == list(map(type, made["a"]))
    found = drain(batch)
    for name, text in texts.items():
        expected = alone(r.decoder, make(r) if name in "ab" else r.new_cache(), text, 20)
        assert first[name] == expected[0]
        if name == "a":
            assert tokens == text  # the first token was handed out, and is fed by the next step
        else:
            assert [o.token for o in found[name]] == expected[1:]
            last = found[name][-1]
            assert (last.finish_reason, last.tokens) == ("length", text + expected)
            assert last.caches[0].offset == len(text) + 20


def test_a_row_alone_stops_and_fails_for_itself() -> None:
    r = runner("llama")
    text = prompt(20)
    expected = alone(r.decoder, private(r), text, 9)
    stop = next(token for i, token in enumerate(expected) if i > 1 and token not in expected[:i])
    batch = DecodeBatch(r.decoder)
    batch.add(row(r, "stops", text, private(r), stop=frozenset({stop})))
    broken = private(r)
    batch.add(row(r, "breaks", text, broken))
    batch.step()
    broken[0].update_and_fetch = lambda *_: 1 / 0
    failed = [output for output in batch.step() if isinstance(output, DecodeFailure)]
    assert [failure.row_ids for failure in failed] == [["breaks"]]
    last = drain(batch)["stops"][-1]
    assert (last.token, last.finish_reason) == (stop, "stop")


def test_a_model_with_layers_that_nobody_knows_is_served_without_a_cache() -> None:
    r = zoo.runner("llama")
    layers = len(r.new_cache())
    r.new_cache = lambda: [Private() for _ in range(layers)]  # type: ignore[method-assign]
    r.layout = r._probe()
    assert r.layout == Uncacheable("layer 0 keeps its state in Private, which cannot be stored yet")
    outputs: list[TokenOutput | Failure] = []
    scheduler = Scheduler(r, SchedulerConfig(), None, outputs.append)
    for name in "ab":
        scheduler.add(Request(name, prompt(40), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)))
    while scheduler.has_work:
        scheduler.step()
    expected = alone(r.decoder, r.new_cache(), prompt(40), 6)
    for name in "ab":
        assert [o.token for o in outputs if o.request_id == name] == expected  # type: ignore[union-attr]
    assert scheduler.most_tokens > 1 << 30  # unknown, so not bounded


@pytest.mark.parametrize("family", KINDS)
def test_a_paused_request_goes_on_at_the_same_token(family: str) -> None:
    bench = Bench(runner(family), DictStore())
    texts = [prompt(40, seed=1), prompt(50, seed=2)]
    requests = [bench.add(text, max_tokens=40, ignore_eos=True) for text in texts]
    while len(bench.tokens(requests[1]) if requests[1].request_id in bench.outputs else []) < 12:
        bench.scheduler.step()
    computed, answered = bench.scheduler.stats.prefilled_tokens, len(bench.tokens(requests[1]))
    assert bench.scheduler.pause_newest()
    assert requests[1].state is RequestState.PAUSED
    bench.run()
    # A state cannot be taken back by the one token that is fed again: of such a model the answer is computed again.
    again = answered if runner(family).layout.states else 0
    assert bench.failures == {} and bench.scheduler.stats.prefilled_tokens == computed + again
    for request, text in zip(requests, texts, strict=True):
        assert_close(bench.answer(request), cold(family, text, max_tokens=40))


@pytest.mark.parametrize("exact", ["on", "off"])
@pytest.mark.parametrize("family", KINDS)
def test_an_aborted_prefill_is_resumed_where_it_ended(family: str, exact: str) -> None:
    bench = Bench(runner(family), DictStore(), exact=exact)
    text = prompt(6 * B + 3)
    request = bench.add(text)
    while bench.scheduler.kv_tokens < 2 * B:
        bench.scheduler.step()
    reached = bench.scheduler.kv_tokens
    bench.scheduler.abort(request.request_id)
    assert 2 * B <= reached < len(text) - 1
    again = bench.ask(text, max_tokens=4, ignore_eos=True)
    assert again.stats.cached_tokens == reached
    assert_close(bench.answer(again), cold(family, text, max_tokens=4, exact=exact))


@pytest.mark.parametrize("family", KINDS)
def test_any_file_may_be_lost(family: str, tmp_path: Path) -> None:
    """The match is shorter, the answer the same, and the next one whole again."""
    store = open_store(tmp_path, ram=0)
    bench = Bench(runner(family), store)
    text = prompt(5 * B + 5)
    expected = cold(family, text, max_tokens=4)
    bench.ask(text, max_tokens=4, ignore_eos=True)
    assert store.flush(60)
    rng = random.Random(3)
    for path in rng.sample(sorted((tmp_path / "m").rglob("*.safetensors")), 6):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        request = bench.ask(text, max_tokens=4, ignore_eos=True)
        assert bench.answer(request) == expected
        assert store.flush(60)
    assert bench.ask(text, max_tokens=4, ignore_eos=True).stats.cached_tokens == len(text) - 1
    store.close(60)


def test_a_window_is_counted_up_to_its_size() -> None:
    windows, full = runner("gemma3_text").layout, runner("llama").layout
    chunk = 16
    growth = windows.nbytes(10_000, chunk) - windows.nbytes(5_000, chunk)
    assert growth == 5_000 * windows.bytes_per_token  # of the one layer in three that keeps all tokens
    assert windows.nbytes(10, chunk) == 3 * 10 * windows.bytes_per_token
    assert full.nbytes(10_000) == 10_000 * full.bytes_per_token
    state = runner("mamba2").layout
    assert state.nbytes(1, chunk) == state.nbytes(10_000, chunk) == state.state_bytes > 0


@pytest.mark.parametrize("family", KINDS)
def test_what_is_counted_is_what_caches_take_up(family: str) -> None:
    r = runner(family)
    caches = r.new_cache()
    for n in range(0, 512, 16):
        r.prefill(prompt(16, seed=n), caches)
    layer_state.settle(caches)
    layer_state.evaluate(caches)
    assert layer_state.nbytes(caches) <= r.layout.nbytes(512, 16 + 256)  # a chunked cache grows by 256
    assert layer_state.nbytes(caches) >= r.layout.nbytes(512) * 0.9


def test_windows_let_more_tokens_fit() -> None:
    limit = 1 << 21
    with_windows, without = (
        Bench(runner(family), DictStore(), max_kv_cache_memory=limit).scheduler.most_tokens
        for family in ("gemma3_text", "llama")
    )
    layout = runner("gemma3_text").layout
    chunk = 2048  # the longest, which a window holds beside its own tokens while it is computed
    assert layout.nbytes(with_windows, chunk) <= limit < layout.nbytes(with_windows + 256, chunk)
    assert with_windows > 1.4 * without


@pytest.mark.parametrize("family", KINDS)
def test_a_forgotten_conversation_leaves_no_companions(family: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    bench = Bench(runner(family), store)
    shared = prompt(2 * B)
    one, other = shared + prompt(30, seed=1), shared + prompt(30, seed=2)
    for text in (one, other):
        bench.ask(text, max_tokens=20, ignore_eos=True)
    expected = cold(family, other, max_tokens=4)
    gone = bench.prefix.forget(bench.prefix.conversation(one))
    assert gone.kept_tokens == 2 * B
    again = bench.ask(other, max_tokens=4, ignore_eos=True)
    assert again.stats.cached_tokens == len(other) - 1 and bench.answer(again) == expected
    bench.prefix.forget(bench.prefix.conversation(other))
    assert store.metas() == []
    store.close(60)


def test_a_probe_says_that_a_state_is_missing() -> None:
    bench = Bench(runner("mamba2"), DictStore())
    text = prompt(3 * B)
    bench.ask(text)
    probe = bench.prefix.probe([*text[: B + 7], 1, 2, 3])
    assert probe.cached_tokens == B and probe.first_miss is not None
    reason = f"stored up to token {B + 7}, but windows or recurrent states to go on from only at token {B}"
    assert probe.first_miss[:2] == (B, reason)


@pytest.mark.parametrize("repeats", [0, 1])
def test_a_repeat_from_files_leaves_windows_smaller_than_a_block_whole(tmp_path: Path, repeats: int) -> None:
    """The ring of the repeat has less of the block than the file."""
    store = open_store(tmp_path)
    bench = Bench(runner("gemma3_text"), store, block_size=64)
    text = prompt(100)
    talk = text + bench.tokens(bench.ask(text, max_tokens=60, ignore_eos=True))
    assert store.flush(60)
    store.evict_from_ram(1 << 30)
    for _ in range(repeats):
        assert bench.ask(text, max_tokens=60, ignore_eos=True).stats.cached_tokens == 99
    misses = store.stats().misses
    assert bench.ask([*talk[:98], 5, 6]).stats.cached_tokens == 98
    assert store.stats().misses == misses and store.check() == []
    store.close(60)


def test_windows_that_are_computed_because_that_is_faster_are_in_ram_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    bench = Bench(runner("gemma3_text"), store, exact="off")
    text = prompt(100)
    bench.ask(text)
    assert store.flush(60)
    store.evict_from_ram(1 << 30)
    monkeypatch.setattr(StoredPrefixes, "_worth_loading", lambda self, match, *_: self._cache.shorten(match, 0))
    assert bench.ask(text).stats.cached_tokens == 0
    monkeypatch.undo()
    again = bench.ask([*text[:90], 1, 2]).stats
    assert (again.cached_ram_tokens, again.cached_ssd_tokens) == (90, 0)
    assert store.stats().hits_ssd == 0
    store.close(60)


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2", "falcon_h1"])
def test_companions_may_be_evicted_just_before_their_blocks_tails_first(family: str) -> None:
    """So what is left of a chain that is being evicted can still be gone on from at its last block."""
    store = DictStore()
    bench = Bench(runner(family), store, block_size=B)
    bench.ask(prompt(5 * B + 3))
    at = {name: place for place, name in enumerate(store.used)}
    chain = sorted((meta for meta, _ in store.blocks.values() if meta.token_count == B), key=lambda meta: -meta.start)
    assert len(chain) == 5 and [at[meta.block_hash] for meta in chain] == sorted(at[meta.block_hash] for meta in chain)
    beside = {meta.block_hash: companion_names(bench.runner.layout, meta.block_hash) for meta in chain}
    for block, names in beside.items():
        kept = [at[name] for name in names if name in store.blocks]
        assert kept == list(range(at[block] - len(kept), at[block]))
    assert any(name in store.blocks for names in beside.values() for name in names)
