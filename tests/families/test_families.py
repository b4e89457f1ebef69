"""What is promised for every family of models: the same bits cold and from the cache, whatever its layers keep.

Everything goes through the scheduler over a real block store. Models are minute, so that the loops
over prompt lengths stay short.
"""

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.model.runner import TextRunner
from omlx.request import Request
from tests.dict_store import DictStore
from tests.families import zoo
from tests.tiny import Bench

B = 16
WINDOW = zoo.WINDOW
FAMILIES = list(zoo.CONFIGS)


@lru_cache(maxsize=2)
def runner(family: str) -> TextRunner:
    return zoo.runner(family)


def open_store(root: Path, ram: int = 1 << 26) -> PagedSSDCacheManager:
    return PagedSSDCacheManager(root / "m", 1 << 28, ram, root_dir=root)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PagedSSDCacheManager]:
    opened = open_store(tmp_path / "root")
    yield opened
    assert opened.flush(60) and opened.check() == []
    opened.close(60)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(zoo.EOS) for _ in range(length)]


def ask(bench: Bench, tokens: list[int], max_tokens: int = 2, **options: Any) -> Request:
    request = bench.ask(tokens, max_tokens=max_tokens, ignore_eos=True, **options)
    assert bench.failures == {}
    return request


def cold(family: str, tokens: list[int], **options: Any) -> list[tuple[Any, ...]]:
    """The answer of a server that never saw anything."""
    fresh = Bench(runner(family), DictStore(), exact=options.pop("exact", "on"))
    return fresh.answer(ask(fresh, tokens, cache=False, **options))


def assert_close(a: list[tuple[Any, ...]], b: list[tuple[Any, ...]]) -> None:
    """Equal tokens, log-probabilities within 1e-3."""
    assert [x[:2] for x in a] == [x[:2] for x in b]
    assert all(abs(x[2] - y[2]) <= 1e-3 for x, y in zip(a, b, strict=True))


def lengths(family: str) -> list[int]:
    """Every length up to three windows where there are windows; where there are none, those round block edges."""
    if runner(family).layout.windows:
        return list(range(1, 3 * WINDOW + 1))
    edges = [k * B + d for k in (0, 1, 2, 4, 7) for d in (-1, 0, 1, 2)]
    return sorted({n for n in [*edges, 9, 25, 55, 90] if n > 0})


@pytest.mark.parametrize("family", FAMILIES)
def test_cold_ram_ssd_and_restart_are_equal_to_the_last_bit(family: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    bench = Bench(runner(family), store)
    texts = {n: prompt(n, seed=n) for n in lengths(family)}
    answers = {n: cold(family, text) for n, text in texts.items()}
    for n, text in texts.items():
        assert bench.answer(ask(bench, text)) == answers[n], n
    _repeats(bench, texts, answers, "ram")
    assert store.flush(60)
    store.evict_from_ram(1 << 30)
    # Files differ from RAM only in where bytes come from, so a third of the lengths will do for each.
    _repeats(bench, dict(list(texts.items())[::3]), answers, "ssd")
    assert store.flush(60) and store.check() == [] and store.close(60)
    bench = Bench(runner(family), store := open_store(tmp_path))
    _repeats(bench, dict(list(texts.items())[1::3]), answers, "ssd")
    store.close(60)


def _repeats(bench: Bench, texts: dict[int, list[int]], answers: dict[int, Any], tier: str) -> None:
    for n, text in texts.items():
        request = ask(bench, text)
        assert bench.answer(request) == answers[n], n
        stats = request.stats
        found = {"ram": stats.cached_ram_tokens, "ssd": stats.cached_ssd_tokens}
        assert found.pop(tier) == n - 1 and not any(found.values()), n


def promised(family: str, shared: int, length: int, answer: int) -> int:
    """Tokens that have to be reused of a text of `length` tokens and its `answer`, if `shared` are asked for again."""
    layout = runner(family).layout
    if layout.states and length < shared < length + answer:
        shared = length - 1  # inside an answer no states were kept
    if not layout.cut_anywhere and shared == length + answer:
        return shared  # its end is there
    return shared // B * B


# Every family in the default mode, and in the others one for each way to keep state.
TURNS = [(family, "on") for family in FAMILIES]
TURNS += [(f, exact) for f in ("llama", "gemma3_text", "llama4", "mamba2", "falcon_h1") for exact in ("strict", "off")]


@pytest.mark.parametrize(("family", "exact"), TURNS)
def test_a_second_turn_that_leaves_the_first_one_anywhere(family: str, exact: str, store: PagedSSDCacheManager) -> None:
    length, answer = 3 * B + 5, 22
    first = prompt(length)
    for seed, shared in enumerate([5, B + 7, 2 * B, length - 1, length, length + 9, length + answer], 1):
        bench = Bench(runner(family), store, exact=exact)
        salt = str(seed)
        talk = first + bench.tokens(ask(bench, first, answer, salt=salt))
        tokens = talk[:shared] + [(talk[shared] + 1) % zoo.EOS if shared < len(talk) else 3] + prompt(11, seed=seed)
        request = ask(bench, tokens, 4, salt=salt)
        assert_close(bench.answer(request), cold(family, tokens, max_tokens=4, exact=exact))
        if exact != "off":
            assert bench.answer(ask(bench, tokens, 4, salt=salt)) == bench.answer(request)
        if exact == "strict":
            assert bench.answer(request) == cold(family, tokens, max_tokens=4)
        kept = promised(family, min(shared, length - 1) if exact == "strict" else shared, length, answer)
        assert kept <= request.stats.cached_tokens <= shared, shared
        if exact == "off" and not runner(family).layout.states:
            assert request.stats.cached_tokens == shared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_block_shares_no_memory_with_a_live_cache(family: str, store: PagedSSDCacheManager) -> None:
    bench = Bench(runner(family), store)
    shared = prompt(WINDOW + B)
    a, b = shared + [1, 2, 3], shared + [4, 5, 6]
    first = ask(bench, a, WINDOW)
    ask(bench, b, WINDOW)
    assert bench.answer(ask(bench, a, WINDOW)) == bench.answer(first)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_requests_at_once_on_one_cached_prefix(family: str, store: PagedSSDCacheManager) -> None:
    bench = Bench(runner(family), store)
    shared = prompt(WINDOW + B + 3)
    ask(bench, shared)
    pair = [bench.add(shared + [x] * 5, max_tokens=WINDOW + 5, ignore_eos=True) for x in (1, 2)]
    bench.run()
    assert bench.failures == {}
    for request, last in zip(pair, (1, 2), strict=True):
        assert_close(bench.answer(request), cold(family, shared + [last] * 5, max_tokens=WINDOW + 5))
        assert request.stats.cached_tokens >= (WINDOW + B + 3) // B * B
