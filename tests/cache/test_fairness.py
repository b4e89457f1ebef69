"""Two models under limits that are too small for both: the one that is used keeps its blocks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.storage.hot_tier import HotTier
from tests.tiny import Bench, TinyRunner

BLOCK = 16


class Model(Bench):
    """A scheduler over a store under a shared root, with conversations of its own."""

    def __init__(self, store: PagedSSDCacheManager, seed: int) -> None:
        super().__init__(TinyRunner(seed), store, block_size=BLOCK)
        self.turns = 0

    def fill(self, requests: int, tokens: int = 160) -> None:
        """Asks so many questions that have nothing in common."""
        for _ in range(requests):
            self.turns += 1
            self.ask([(7 * self.turns + i * i) % 250 for i in range(tokens)], max_tokens=2)

    def cached(self, prompt: list[int]) -> int:
        stats = self.ask(prompt, max_tokens=2).stats
        return stats.cached_ram_tokens + stats.cached_ssd_tokens


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., tuple[Model, Model]]]:
    stores: list[PagedSSDCacheManager] = []

    def opener(blocks_ram: int, blocks_ssd: int) -> tuple[Model, Model]:
        block = TinyRunner().layout.bytes_per_token * BLOCK
        hot = HotTier(blocks_ram * block)
        kinds: dict[str, Any] = {"hot_tier": hot, "hot_cache_only": not blocks_ssd, "free_reserve_bytes": 0}
        for name in ("one", "two"):
            limit = blocks_ssd * (block + 4096) + 60_000
            stores.append(PagedSSDCacheManager(tmp_path / name, limit, root_dir=tmp_path, **kinds))
        return Model(stores[-2], 0), Model(stores[-1], 1)

    yield opener
    for store in stores:
        store.close(60)


HEAD = [(i * i + 3) % 250 for i in range(10 * BLOCK)]


@pytest.mark.parametrize(("ram", "ssd"), [(40, 60), (40, 0), (0, 60)])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_in_use_is_not_starved_by_one_that_is_not(pair: Any, ram: int, ssd: int, swapped: bool) -> None:
    models = pair(ram, ssd)
    idle, used = models[::-1] if swapped else models
    used.cached(HEAD)
    idle.fill(6)
    held = idle.store.stats()
    assert held.blocks_ram + held.blocks_ssd > (ram + ssd) / 2  # it has filled what there is ...
    for turn in range(36):  # ... and then says nothing, while the other one works on, always with the same head
        assert used.cached([*HEAD, *range(turn, turn + 2 * BLOCK)]) >= len(HEAD) or turn == 0
        used.store.flush(60)
    assert used.cached([*HEAD, 1]) == len(HEAD)
    now = idle.store.stats()
    assert now.blocks_ram + now.blocks_ssd < (held.blocks_ram + held.blocks_ssd) / 3
    assert used.store.check() == []


def test_blocks_in_ram_that_are_hit_outlive_younger_ones_that_are_not(pair: Any) -> None:
    """First in, first out alone would drop one head while the other is in use, and before the idle model's blocks."""
    used, idle = pair(40, 1000)
    heads = [HEAD[: 7 * BLOCK], HEAD[3 * BLOCK :]]
    for head in heads:
        used.cached([*head, 1])
    idle.fill(2)  # younger than the heads, and RAM is not full yet
    assert idle.store.stats().evictions_ram == 0
    for turn in range(40):
        assert used.cached([*heads[turn % 2], *range(turn, turn + 2 * BLOCK)]) >= 7 * BLOCK
    assert idle.store.stats().blocks_ram == 0 and used.store.stats().evictions_ram > 20
    assert used.scheduler.stats.cached_ssd_tokens == 0 and used.store.stats().hits_ssd == 0


def test_the_shared_head_of_branches_is_the_last_to_leave(pair: Any) -> None:
    model, _ = pair(24, 0)
    for branch in range(30):
        assert model.cached([*HEAD, *[(branch * 5 + i) % 250 for i in range(3 * BLOCK)]]) >= (branch > 0) * len(HEAD)
