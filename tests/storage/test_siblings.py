"""Many children of one block: a search finds what a scan of all of them would, and looks at few."""

import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from omlx.cache import layer_state
from omlx.cache.block import block_hash, common_tokens
from omlx.cache.grid import ExactMode
from omlx.cache.interface import CacheManager
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, CacheIdentity
from omlx.storage.siblings import FEW, FamilyIndex, Siblings
from omlx.storage.tensor_file import BlockBuffer
from tests.dict_store import DictStore
from tests.storage.blocks import block, name

MANY = 4 * FEW
PARENT = b"parent"
B = 16
TOKENS = st.lists(st.integers(0, 2), max_size=7).map(lambda ids: packed(ids))


def packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def one_layer() -> CacheIdentity:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    return CacheIdentity(bytes(32), layer_state.describe([cache]), "")


IDENTITY = one_layer()


def cache_over(store: CacheManager, exact: ExactMode) -> BlockAwarePrefixCache:
    return BlockAwarePrefixCache(PagedCacheManager(B, 1), store, block_size=B, identity=IDENTITY, exact=exact)


@settings(max_examples=300, deadline=None)
@given(st.lists(TOKENS, max_size=40), st.sets(st.integers(0, 39)), TOKENS, st.integers(1, 5))
def test_the_most_similar_siblings_are_those_of_a_scan(
    runs: list[bytes], removed: set[int], query: bytes, most: int
) -> None:
    siblings, left = Siblings(), []
    for n, tokens in enumerate(runs):
        siblings.add(tokens, name(n))
    for n, tokens in enumerate(runs):
        if n in removed:
            siblings.remove(tokens, name(n))
        else:
            left.append((tokens, name(n)))
    assert len(siblings) == len(left)
    found = siblings.similar(query, most)
    shared = sorted((common_tokens(tokens, query) for tokens, _ in left), reverse=True)
    best = [n for n in shared if n][:most]
    assert [common_tokens(tokens, query) for tokens, _ in found[: len(best)]] == best
    prefixes = {sibling for sibling in left if sibling[0] and query.startswith(sibling[0])}
    assert prefixes <= set(found) <= set(left) and len(set(found)) == len(found)
    assert set(found[len(best) :]) <= prefixes


def ids(n: int) -> list[int]:
    """Short prompts whose first tokens are those of many others."""
    rng = random.Random(n)
    return [rng.randrange(3) for _ in range(rng.randrange(1, 16))] + [1000 + n]


@pytest.fixture(params=["RAM", "SSD", "restart", "both"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PagedSSDCacheManager]:
    """Many children of one block, in each tier."""
    ram = 0 if request.param in ("SSD", "restart") else 1 << 26
    opened = PagedSSDCacheManager(None if request.param == "RAM" else tmp_path, 1 << 26, ram)
    if request.param == "SSD":
        opened.children(PARENT, packed([0]))
    for n in range(MANY):
        assert opened.save_block(name(n), block(n), 8, parent=PARENT, tokens=packed(ids(n)))
    assert opened.flush(60)
    if request.param == "restart":
        opened.close(60)
        opened = PagedSSDCacheManager(tmp_path, 1 << 26, ram)
    yield opened
    assert opened.flush(60) and opened.check() == []
    opened.close(60)


def longest(store: PagedSSDCacheManager, query: bytes) -> tuple[int, int]:
    """Tokens that the best child shares with a query, and how many children were looked at."""
    found = store.children(PARENT, query)
    return max((common_tokens(meta.tokens or b"", query) for meta in found), default=0), len(found)


def read_all(store: PagedSSDCacheManager) -> None:
    """Has the tokens of all children read, as the first search of a process does in the background."""
    store.children(PARENT, packed([0]))
    for _ in range(MANY // FEW + 2):
        assert store.flush(60)


def test_a_store_finds_the_child_that_shares_most_among_many(store: PagedSSDCacheManager) -> None:
    read_all(store)
    left = set(range(MANY))
    for n in range(0, MANY, 3):
        store.delete_block(name(n))
        left.remove(n)
    for seed in range(MANY, MANY + 40):
        query = packed(ids(seed)[:-1] + ids(seed % MANY))
        best = max(common_tokens(packed(ids(n)), query) for n in left)
        assert longest(store, query)[0] == best
    for n in (1, 2, MANY - 2):
        assert name(n) in {meta.block_hash for meta in store.children(PARENT, packed(ids(n)))}


def test_a_search_looks_at_few_of_many_children(store: PagedSSDCacheManager) -> None:
    read_all(store)
    for seed in range(20):
        assert longest(store, packed(ids(seed)))[1] <= 2 * (FEW + 16)


def test_a_block_that_was_evicted_is_no_longer_among_the_children(tmp_path: Path) -> None:
    store = PagedSSDCacheManager(tmp_path, 1 << 26)
    for n in range(MANY):
        store.save_block(name(n), block(n), 8, parent=PARENT, tokens=packed([n]))
    read_all(store)
    assert [m.block_hash for m in store.children(PARENT, packed([7]))] == [name(7)]
    store.delete_block(name(7))
    assert store.children(PARENT, packed([7])) == []
    store.save_block(name(7), block(7), 8, parent=PARENT, tokens=packed([7]))
    assert [m.block_hash for m in store.children(PARENT, packed([7]))] == [name(7)]
    assert store.flush(60) and store.check() == []
    store.close(60)


def test_the_memory_for_sorted_siblings_is_bounded() -> None:
    index = FamilyIndex(max_bytes=10_000)
    first, second = ("m", b"1"), ("m", b"2")
    assert index.open(first) and not index.open(first)
    assert all(index.add(first, packed([n]), name(n)) for n in range(20))
    index.completed(first)
    assert index.open(second)
    added = [index.add(second, packed([n]), name(n)) for n in range(60)]
    assert index.bytes <= 10_000 and added.index(False) > 20  # the other family made room, then no more is taken in
    assert not index.add(first, packed([1]), name(1))  # it was dropped
    assert index.open(first)
    index.drop(first)
    assert index.similar(second, packed([3]))[0] == [(packed([3]), name(3))]
    index.clear()
    assert index.bytes == 0


@pytest.mark.parametrize("exact", ["off", "on", "strict"])
def test_a_prompt_matches_as_much_as_if_all_siblings_were_scanned(exact: ExactMode, tmp_path: Path) -> None:
    ram = PagedSSDCacheManager(None, 0, 1 << 26)
    ssd = PagedSSDCacheManager(tmp_path, 1 << 26)
    scanned = DictStore()
    caches = [cache_over(store, exact) for store in (ram, ssd, scanned)]
    root = IDENTITY.root(B, "")
    for n in range(MANY):
        tokens, rng = ids(n)[:B], random.Random(n)
        fields = {"parent": root, "tokens": packed(tokens), "exact_tokens": rng.choice((0, 8, len(tokens)))}
        fields["exact_tokens"] = min(fields["exact_tokens"], len(tokens)) // 8 * 8
        for store in (ram, ssd, scanned):
            data = BlockBuffer.empty(IDENTITY.layout.specs(len(tokens)))
            data.data.fill(0)
            lineage = b"" if fields["exact_tokens"] == len(tokens) else b"decoded"
            store.save_block(
                block_hash(root, packed(tokens), lineage), data, len(tokens), cuts=(len(tokens) - 1,), **fields
            )
    ssd.children(root, packed([0]))
    for _ in range(MANY // FEW + 2):
        assert ssd.flush(60)
    for seed in range(300):
        prompt = ids(MANY + seed)[:-1] + ids(seed % MANY)
        found = [cache.stored_tokens(prompt) for cache in caches]
        assert found[0] == found[1] == found[2], seed
    for cache in caches:
        cache.close()
    ssd.close(60)
