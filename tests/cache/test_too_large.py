"""A request larger than the cache: its beginning is cached, and nobody else's blocks leave for the rest."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from tests.families import zoo
from tests.tiny import Bench, TinyRunner

B = 16
BLOCK = TinyRunner().layout.bytes_per_token * B
FILE = BLOCK + 4096  # more than a block's file takes
BLOCKS = 20
SMALL = [(i * i + 3) % 250 for i in range(3 * B + 5)]
LARGE = [(7 * i + i * i) % 250 for i in range(3 * BLOCKS * B)]

Opener = Callable[..., PagedSSDCacheManager]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    stores: list[PagedSSDCacheManager] = []

    def opened(ram: int, ssd: int, **kinds: Any) -> PagedSSDCacheManager:
        limit = ssd * FILE + 60_000 if ssd else 0
        stores.append(PagedSSDCacheManager(tmp_path, limit, ram * BLOCK, free_reserve_bytes=0, **kinds))
        return stores[-1]

    yield opened
    for store in stores:
        store.close(60)


# One tier, and two of which the prompt exceeds both.
LIMITS = [(BLOCKS, 0), (0, BLOCKS), (BLOCKS // 2, BLOCKS)]


@pytest.mark.parametrize(("ram", "ssd"), LIMITS)
@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_prompt_larger_than_the_cache_leaves_the_others_cached(
    opener: Opener, ram: int, ssd: int, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = opener(ram, ssd, write_policy=policy)
    bench = Bench(TinyRunner(), store, block_size=B)
    bench.ask(SMALL)
    assert store.flush(60)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            bench.ask(LARGE, max_tokens=2)
            assert store.flush(60)
    assert bench.failures == {} and store.stats().declined > BLOCKS
    assert [r.message for r in caplog.records if "exceeds the cache" in r.message][1:] == []
    repeated = bench.ask(LARGE, max_tokens=2).stats.cached_tokens
    assert BLOCKS // 4 * B <= repeated <= BLOCKS * B
    assert bench.prefix.probe(LARGE).first_miss[:3] == (repeated, "larger than the cache", None)
    assert bench.ask(SMALL).stats.cached_tokens == len(SMALL) - 1
    assert store.flush(60) and store.check() == []


@pytest.mark.parametrize(("ram", "ssd"), LIMITS)
def test_a_prompt_that_just_fits_is_cached_whole(opener: Opener, ram: int, ssd: int) -> None:
    store = opener(ram, ssd)
    bench = Bench(TinyRunner(), store, block_size=B)
    prompt = LARGE[: (BLOCKS - 2) * B]
    bench.ask(prompt, max_tokens=2)
    assert store.flush(60) and store.stats().declined == 0
    assert bench.ask(prompt, max_tokens=2).stats.cached_tokens == len(prompt) - 1


def test_a_prompt_larger_than_ram_alone_is_cached_on_ssd_and_leaves_ram_to_others(opener: Opener) -> None:
    store = opener(BLOCKS // 2, 5 * BLOCKS)
    bench = Bench(TinyRunner(), store, block_size=B)
    bench.ask(SMALL)
    bench.ask(LARGE, max_tokens=2)
    assert store.flush(60) and store.stats().declined == 0
    again = bench.ask(SMALL).stats
    assert again.cached_ram_tokens == len(SMALL) - 1
    assert bench.ask(LARGE, max_tokens=2).stats.cached_tokens == len(LARGE) - 1
    assert bench.ask(SMALL).stats.cached_ram_tokens == len(SMALL) - 1


def test_an_answer_that_grows_past_the_limit_evicts_nothing_for_its_end(opener: Opener) -> None:
    store = opener(BLOCKS, 0)
    bench = Bench(TinyRunner(), store, block_size=B)
    bench.ask(SMALL)
    bench.ask(LARGE[: 14 * B], max_tokens=10 * B, ignore_eos=True)
    assert bench.failures == {} and store.stats().declined > 0
    assert bench.ask(SMALL).stats.cached_tokens == len(SMALL) - 1


@pytest.mark.parametrize("family", ["gemma3_text", "mamba2"])
def test_windows_and_recurrent_states_count_towards_the_limit(family: str) -> None:
    runner = zoo.runner(family)
    store = PagedSSDCacheManager(None, 0, 60_000)
    bench = Bench(runner, store, block_size=B)
    small = [x % zoo.EOS for x in SMALL]
    bench.ask(small)
    held = store.stats().ram_bytes
    bench.ask([x % zoo.EOS for x in LARGE] * 2, max_tokens=2)
    assert bench.failures == {} and store.stats().declined > 0 and held <= store.stats().ram_bytes <= 60_000
    assert bench.ask(small).stats.cached_tokens == len(small) - 1
    store.close()
