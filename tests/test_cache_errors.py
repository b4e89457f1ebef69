"""An error in the cache costs the cache, never the answer."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.cache import layer_kinds
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from tests.dict_store import DictStore
from tests.families import zoo
from tests.tiny import Bench, TinyRunner

PROMPT = [(i * i + 5) % 250 for i in range(70)]
IN_PREFIX_CACHE = ["match", "restore", "parts", "store", "release", "chunk_end", "stored_tokens"]
IN_STORE = ["save_block", "read_block", "get_meta", "get_metas", "children", "touch", "pin_all", "unpin_all", "tier_of"]


class Broken(Exception):
    """No error that anything expects."""


def broken(*_: Any, **__: Any) -> Any:
    raise Broken("on purpose")


@pytest.fixture(scope="module")
def answer() -> list[tuple[Any, ...]]:
    bench = Bench(TinyRunner(), DictStore())
    return bench.answer(bench.ask(PROMPT, cache=False))


@pytest.mark.parametrize("exact", ["on", "off"])
@pytest.mark.parametrize("place", [*IN_PREFIX_CACHE, *IN_STORE])
def test_requests_are_answered_though_a_call_of_the_cache_raises(
    place: str, exact: str, answer: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PagedSSDCacheManager(None, 0, 1 << 26)
    bench = Bench(TinyRunner(), store, exact=exact)
    bench.ask(PROMPT[:40])
    target = bench.prefix if place in IN_PREFIX_CACHE else store
    monkeypatch.setattr(target, place, broken)
    with caplog.at_level(logging.ERROR):
        requests = [bench.add(PROMPT) for _ in range(3)]
        bench.run()
    assert bench.failures == {}
    tokens = [step[:2] for step in answer]
    assert all([step[:2] for step in bench.answer(request)] == tokens for request in requests)
    said = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(said) <= bench.scheduler.stats.cache_errors and len(said) <= 2  # once for each place
    monkeypatch.undo()
    bench.ask(PROMPT)
    assert bench.ask(PROMPT).stats.cached_tokens == len(PROMPT) - 1 and bench.failures == {}
    store.close()


def test_an_error_of_the_cache_is_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(TinyRunner(), DictStore())
    monkeypatch.setattr(bench.prefix, "store", broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            bench.ask(PROMPT)
    assert bench.scheduler.stats.cache_errors == 3  # each request gives up on its cache at the first one
    assert [r.message for r in caplog.records] == ["prefix cache failed; the request is answered without it"]


def test_a_probe_that_fails_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(TinyRunner(), DictStore())
    bench.ask(PROMPT)
    monkeypatch.setattr(bench.store, "get_metas", broken)
    found = bench.prefix.probe(PROMPT)
    assert found.cached_tokens == 0 and found.first_miss is not None
    assert found.first_miss.reason == "the cache could not be searched (Broken)"


@pytest.mark.parametrize("family", ["minimax_m3_vl", "nemotron-nas"])
def test_arrays_of_no_width_and_unused_caches_are_cached(family: str, tmp_path: Path) -> None:
    runner = zoo.runner(family)
    prompt = [token % zoo.EOS for token in PROMPT]
    fresh = Bench(runner, DictStore())
    cold = fresh.answer(fresh.ask(prompt, cache=False, ignore_eos=True))
    for ram in (1 << 26, 0):
        store = PagedSSDCacheManager(tmp_path / str(ram), 1 << 26, ram)
        bench = Bench(runner, store)
        for cached in (0, len(prompt) - 1):
            request = bench.ask(prompt, ignore_eos=True)
            assert bench.failures == {} and bench.scheduler.stats.cache_errors == 0
            assert bench.answer(request) == cold and request.stats.cached_tokens == cached
            assert store.flush(60)
        assert store.check() == []
        store.close(60)


def test_a_late_error_of_the_gpu_fails_its_request_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(TinyRunner(), DictStore())
    monkeypatch.setattr(layer_kinds.mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(layer_kinds.mx, "synchronize", broken)
    request = bench.ask(PROMPT)
    assert "Broken" in str(bench.failures[request.request_id]) and bench.store.blocks == {}
    monkeypatch.undo()
    assert bench.ask(PROMPT).stats.cached_tokens == 0
    assert bench.ask(PROMPT).stats.cached_tokens == len(PROMPT) - 1


def test_a_request_that_fails_is_told_even_if_its_release_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(TinyRunner(), DictStore())
    monkeypatch.setattr(bench.runner, "prefill", broken)
    monkeypatch.setattr(bench.prefix, "release", broken)
    request = bench.ask(PROMPT)
    assert "Broken" in str(bench.failures[request.request_id]) and not bench.scheduler.has_work


class Fault:
    """A function that raises once, at the call with the number `at`."""

    def __init__(self, original: Any, at: int) -> None:
        self.calls = 0
        self._original, self._at = original, at

    def __call__(self, *args: Any, **kinds: Any) -> Any:
        self.calls += 1
        if self.calls == self._at + 1:
            raise Broken("on purpose")
        return self._original(*args, **kinds)


CALLS = ["eval", "async_eval", "clear_cache", "contiguous", "concatenate", "zeros", "argmax"]


@pytest.mark.parametrize("call", CALLS)
def test_every_request_ends_and_nothing_wrong_is_stored_whichever_call_of_mlx_raises(
    call: str, answer: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = TinyRunner()
    tokens = [step[:2] for step in answer]
    failing = 0
    while failing >= 0:
        bench = Bench(runner, PagedSSDCacheManager(None, 0, 1 << 26))
        bench.ask(PROMPT[:40])
        fault = Fault(getattr(mx, call), failing)
        monkeypatch.setattr(mx, call, fault)
        requests = [bench.add(PROMPT), bench.add(PROMPT[:33]), bench.add([7, *PROMPT])]
        for _ in range(500):
            bench.scheduler.step()
            if not bench.scheduler.has_work:
                break
        monkeypatch.undo()
        assert not bench.scheduler.has_work and bench.paged.requests() == ()
        for request in requests:
            last = bench.outputs.get(request.request_id, [None])[-1]
            assert request.request_id in bench.failures or (last is not None and last.finish_reason)
        again = bench.ask(PROMPT)
        assert again.request_id not in bench.failures and [step[:2] for step in bench.answer(again)] == tokens
        # Every call once, then ever larger steps: the later ones are decode steps, all alike.
        failing = -1 if fault.calls <= failing else failing + 1 + failing // 12
