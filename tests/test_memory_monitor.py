import gc
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from omlx.cache.tiered_manager import TieredCacheManager
from omlx.memory_monitor import MemoryMonitor
from omlx.storage.hot_tier import HotTier
from tests.storage.blocks import name

MB = 1 << 20
GB = 1 << 30


@pytest.fixture
def hot() -> HotTier:
    return HotTier(GB)


@pytest.fixture
def opened(tmp_path, hot):
    managers = []

    def opener(model: str = "m", **options: Any) -> TieredCacheManager:
        managers.append(TieredCacheManager(GB, tmp_path / "cache", model_name=model, hot_tier=hot, **options))
        return managers[-1]

    yield opener
    for manager in managers:
        manager.close(60)


def save(tiers: TieredCacheManager, *numbers: int, nbytes: int = MB) -> None:
    for n in numbers:
        data = np.full(nbytes, n % 256, np.uint8)
        assert tiers.prefix_cache.save_block(name(n), [(mx.array(data),)], token_count=64)


def in_ram(tiers: TieredCacheManager, upto: int = 20) -> list[int]:
    return [n for n in range(upto) if tiers.store.tier_of(name(n)) == "ram"]


def test_the_figures_are_those_of_the_process_and_of_all_models(opened, hot):
    one, two = opened("one"), opened("two")
    monitor = MemoryMonitor(hot, 123 * GB)
    monitor.watch(one)
    monitor.watch(two)
    save(one, 0, 1)
    save(two, 0)
    kept = mx.zeros(MB, mx.uint8)
    mx.eval(kept)
    figures = monitor.figures()
    assert (figures.kv_cache_memory, figures.kv_cache_memory_limit) == (3 * MB, GB)
    assert (figures.blocks_cold, figures.cold_tokens) == (3, 192)
    assert figures.mlx_active == mx.get_active_memory() >= MB and figures.mlx_cached == mx.get_cache_memory()
    assert abs(figures.process_rss - psutil.Process().memory_info().rss) < 64 * MB
    assert figures.process_limit == 123 * GB
    monitor.forget(two)
    assert monitor.figures().blocks_cold == 2


def test_within_the_limits_nothing_goes_and_looking_costs_next_to_nothing(opened, hot):
    tiers = opened()
    monitor = MemoryMonitor(hot, 1024 * GB)
    monitor.watch(tiers)
    save(tiers, 0, 1)
    assert monitor.check(now=True) == 0 and in_ram(tiers) == [0, 1] and monitor.excess == 0
    steps = _python_calls(lambda: [monitor.check() for _ in range(50)])
    assert steps < 50 * 5 and _python_calls(lambda: monitor.check(now=True)) < 20


def _python_calls(work: Callable[[], Any]) -> int:
    """How many functions written in Python `work` calls: what a check costs, whatever else the machine does."""
    calls = []
    sys.setprofile(lambda frame, event, what: calls.append(event) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_lowered_hot_budget_is_met_oldest_first(opened, hot):
    tiers = opened()
    monitor = MemoryMonitor(hot)
    monitor.watch(tiers)
    save(tiers, *range(6))
    hot.max_bytes = 4 * MB
    assert monitor.check() == 2 * MB and in_ram(tiers) == [2, 3, 4, 5]
    assert tiers.flush(60) and all(tiers.store.tier_of(name(n)) == "ssd" for n in (0, 1))


def test_memory_of_the_process_over_its_limit_is_really_given_back(opened, hot):
    tiers = opened()
    save(tiers, *range(20), nbytes=8 * MB)
    tiers.flush(60)
    mx.clear_cache()
    gc.collect()
    before = psutil.Process().memory_info().rss
    monitor = MemoryMonitor(hot, before - 80 * MB)
    monitor.watch(tiers)
    assert monitor.check(now=True) >= 80 * MB and in_ram(tiers)[0] >= 10
    assert psutil.Process().memory_info().rss <= before - 60 * MB
    assert all(tiers.restore_block_from_cold(0, name(n)) for n in range(20))


def test_what_mlx_only_keeps_goes_before_blocks(opened, hot):
    tiers = opened()
    save(tiers, 0)
    mx.clear_cache()
    scratch = mx.zeros(MB, mx.uint8) + 1
    mx.eval(scratch)
    del scratch
    assert mx.get_cache_memory() > 0
    monitor = MemoryMonitor(hot, 100, process_memory=lambda: 100 + mx.get_cache_memory())
    monitor.watch(tiers)
    assert monitor.check() == 0 and mx.get_cache_memory() == 0 and in_ram(tiers) == [0] and monitor.excess == 0


def test_idle_models_give_first_then_those_with_most(opened, hot):
    busy, small, large = opened("busy"), opened("small"), opened("large")
    monitor = MemoryMonitor(hot, GB, process_memory=lambda: GB + 3 * MB)
    for tiers in (busy, small, large):
        monitor.watch(tiers)
    save(busy, *range(9))
    save(small, 0)
    save(large, 0, 1)
    busy.paged_cache.acquire("r", name(8))
    busy.store.pin(name(8))
    assert monitor.check(now=True) == 3 * MB and hot.bytes == 9 * MB and len(in_ram(busy)) == 9
    assert monitor.check(now=True) == 3 * MB and in_ram(busy) == [3, 4, 5, 6, 7, 8]


def test_it_looks_at_most_once_an_interval_unless_told_to(opened, hot, monkeypatch):
    tiers, now = opened(), [1000.0]
    monkeypatch.setattr("omlx.memory_monitor.time", SimpleNamespace(monotonic=lambda: now[0]))
    monitor = MemoryMonitor(hot, GB, interval_s=0.2, process_memory=lambda: GB + MB)
    monitor.watch(tiers)
    save(tiers, *range(5))
    assert monitor.check() == MB and monitor.check() == 0 and monitor.check(now=True) == MB
    now[0] += 0.25
    assert monitor.check() == MB


def test_what_eviction_cannot_mend_is_known_and_said_once(opened, hot, caplog):
    tiers = opened()
    over = [5 * MB]
    monitor = MemoryMonitor(hot, GB, process_memory=lambda: GB + over[0])
    monitor.watch(tiers)
    save(tiers, 0, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            monitor.check(now=True)
    assert monitor.excess == 5 * MB and in_ram(tiers) == []
    line = "--max-process-memory (1 GB) by 5 MB; evicting cached blocks and features from RAM: 2 MB so far"
    assert caplog.text.count(line) == 1
    over[0] = 0
    assert monitor.check(now=True) == 0 and monitor.excess == 0
    over[0] = MB
    monitor.check(now=True)
    assert caplog.text.count("exceeds --max-process-memory") == 2


def test_without_a_limit_the_process_may_grow(opened, hot):
    tiers = opened()
    monitor = MemoryMonitor(hot)
    monitor.watch(tiers)
    save(tiers, 0)
    assert monitor.check(now=True) == 0 and in_ram(tiers) == [0]
