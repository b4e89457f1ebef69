"""What many prompts share stays when room is made, in every combination of tiers."""

from pathlib import Path

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from tests.test_scheduler import cold, prompt
from tests.tiny import Bench, TinyRunner

B = 16
HEAD = 10 * B
BRANCH = 8 * B
BRANCHES = 16


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


def branch(n: int) -> list[int]:
    return prompt(HEAD) + [n] + prompt(BRANCH, seed=n + 1)


def store_of(tiers: str, tmp_path: Path, runner: TinyRunner) -> PagedSSDCacheManager:
    """Room for the head and about three branches, of sixteen."""
    tokens = HEAD + 3 * BRANCH + 2 * B
    ram = tokens * runner.layout.bytes_per_token
    ssd = 2 * ram + 200_000  # headers and the index take room as well
    if tiers == "ram":
        return PagedSSDCacheManager(None, 0, ram)
    if tiers == "ssd":
        return PagedSSDCacheManager(tmp_path, ssd, 0, free_reserve_bytes=0)
    return PagedSSDCacheManager(tmp_path, ssd, ram, free_reserve_bytes=0)


@pytest.mark.parametrize("exact", ["on", "off"])
@pytest.mark.parametrize("tiers", ["ram", "ssd", "both"])
def test_a_head_outlives_its_branches(runner, tmp_path, tiers, exact):
    store = store_of(tiers, tmp_path, runner)
    bench = Bench(runner, store, exact=exact)
    for n in range(BRANCHES):
        asked = bench.ask(branch(n), max_tokens=2)
        assert asked.stats.cached_tokens == (HEAD if n else 0)
        store.flush(60)
    stats = store.stats()
    assert stats.evictions_ram + stats.evictions_ssd > BRANCHES * BRANCH // B // 3
    assert bench.ask(branch(0), max_tokens=2).stats.cached_tokens == HEAD  # the branch went, the head did not
    assert bench.answer(bench.ask(branch(BRANCHES))) == cold(runner, branch(BRANCHES)) or exact == "off"
    assert store.check() == []
    assert store.close(60)


@pytest.mark.parametrize("tiers", ["ram", "ssd", "both"])
def test_a_head_that_is_asked_for_between_strangers_stays(runner, tmp_path, tiers):
    store = store_of(tiers, tmp_path, runner)
    bench = Bench(runner, store)
    bench.ask(branch(0), max_tokens=2)
    for n in range(BRANCHES):
        bench.ask(prompt(BRANCH, seed=1000 + n), max_tokens=2)
        store.flush(60)
        if n % 2:
            assert bench.ask(branch(n), max_tokens=2).stats.cached_tokens == HEAD
            store.flush(60)
    assert store.close(60)
