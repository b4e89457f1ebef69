"""Cut into blocks and joined again: any mix of layer kinds, any chunks, any place, any loss.

The layers are mlx-lm's; what is fed to them are numbers that say where they belong, so no model is
needed and every restored value can be known.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from omlx.cache import layer_state
from omlx.cache.companions import companion_names, state_name, window_name
from omlx.cache.layer_kinds import kind_of, leaves
from omlx.cache.layer_state import CacheLayout
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.prefix_cache import BlockAwarePrefixCache, CacheIdentity
from tests.dict_store import DictStore

B = 8

LAYERS = st.one_of(
    st.just(("kv",)),
    st.just(("quantised",)),
    st.tuples(st.just("ring"), st.integers(4, 21), st.integers(0, 3)),
    st.tuples(st.just("chunk"), st.integers(3, 20)),
    st.just(("state",)),
)
MIXES = st.lists(st.one_of(LAYERS, st.tuples(st.just("list"), LAYERS, LAYERS)), min_size=1, max_size=4)


def build(layer: Sequence[Any]) -> Any:
    name, *numbers = layer
    if name == "list":
        return CacheList(*map(build, numbers))
    if name == "quantised":
        return QuantizedKVCache(32, 8)
    return {"kv": KVCache, "ring": RotatingKVCache, "chunk": ChunkedKVCache}.get(name, lambda: ArraysCache(2))(*numbers)


def feed(caches: list[Any], start: int, stop: int) -> None:
    """What a forward pass over the tokens [start, stop) does to the caches."""
    layer_state.settle(caches)
    for number, cache in enumerate(leaves(caches)):
        if isinstance(cache, ArraysCache):
            cache[0] = mx.full((1, 3), stop) + number
            cache[1] = mx.full((1, 2, 2, 1), stop * 2.0) - number
            continue
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()  # as models do
        wide = 32 if isinstance(cache, QuantizedKVCache) else 2
        positions = mx.arange(start, stop, dtype=mx.float32)[None, None, :, None]
        tokens = mx.broadcast_to(positions, (1, 2, stop - start, wide))
        cache.update_and_fetch(tokens + 1000.0 * number, -tokens)
    layer_state.evaluate(caches)


def cold(mix: Sequence[Any], tokens: int) -> list[Any]:
    caches = [build(layer) for layer in mix]
    if tokens:
        feed(caches, 0, tokens)
    layer_state.settle(caches)
    for cache in leaves(caches):
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
    return caches


def contents(caches: list[Any], tokens: int) -> list[Any]:
    """Everything that decides what comes next."""
    found: list[Any] = []
    for cache in leaves(caches):
        kind = kind_of(cache)
        assert kind is not None
        found += [getattr(cache, name, None) for name in ("offset", "start_position", "_idx", "max_size", "keep")]
        for name, array in kind.arrays(cache):
            valid = array[:, :, :tokens] if kind.storage == "slice" else array
            found.append((name, np.array(valid).tolist()))
    return found


class Bench(NamedTuple):
    prefix: BlockAwarePrefixCache
    store: DictStore
    layout: CacheLayout


def bench(mix: Sequence[Any], snapshot_bytes: int = 1 << 20, exact: Any = "off") -> Bench:
    probe = [build(layer) for layer in mix]
    feed(probe, 0, 1)
    layout = layer_state.describe(probe)
    assert isinstance(layout, CacheLayout)
    store = DictStore()
    prefix = BlockAwarePrefixCache(
        PagedCacheManager(B, len(layout.layers)), store, block_size=B, identity=CacheIdentity(b"f", layout, "n"),
        exact=exact, snapshot_bytes_per_token=snapshot_bytes,
    )  # fmt: skip
    return Bench(prefix, store, layout)


def run(made: Bench, mix: Sequence[Any], text: list[int], chunks: Sequence[int], answer: int) -> int:
    """A request: restored, prefilled in these chunks, answered one token at a time, stored. How many were restored."""
    prefix = made.prefix
    end = len(text) - answer - 1
    match = prefix.match("r", text[: end + 1])
    restored = prefix.restore(match, 64)
    caches, at = (restored.caches, restored.tokens) if restored else ([build(layer) for layer in mix], 0)
    found = at
    for size in [*chunks, len(text)]:
        if at < end:
            stop = min(at + size, end, prefix.chunk_end("r", at) or end)
            feed(caches, at, stop)
            at = stop
            prefix.store("r", text[:at], caches, exact_upto=0)
    while at < end:
        stop = min(prefix.chunk_end("r", at) or end, end)
        feed(caches, at, stop)
        at = stop
        prefix.store("r", text[:at], caches, exact_upto=0)
    before = layer_state.frozen(caches)
    if answer:
        feed(caches, end, end + 1)
    prefix.store("r", text[:end], before, exact_upto=0, prefill_end=end)
    for position in range(end + 1, len(text)):
        feed(caches, position, position + 1)
    prefix.store("r", text if answer else text[:end], caches, exact_upto=0, final=True)
    prefix.release("r")
    return found


def check(made: Bench, mix: Sequence[Any], text: list[int]) -> int:
    """What is restored of `text` is what a cold prefill gives; how many tokens that is."""
    match = made.prefix.match("check", text)
    restored = made.prefix.restore(match, 64)
    tokens = restored.tokens if restored else 0
    if restored:
        assert contents(restored.caches, tokens) == contents(cold(mix, tokens), tokens)
    made.prefix.release("check")
    assert made.store.pinned == {}
    return tokens


@settings(max_examples=600, deadline=None)
@given(MIXES, st.integers(2, 70), st.lists(st.integers(1, 40), max_size=6), st.integers(0, 45), st.data())
def test_what_is_restored_is_what_a_cold_prefill_gives(mix, length, chunks, answer, data):
    made = bench(mix)
    text = list(range(100, 100 + length + answer))
    run(made, mix, text, chunks, answer)
    end = length - 1
    assert check(made, mix, text[: end + 1]) == end  # a repeat
    found = check(made, mix, [*text, 1])  # the next turn
    # A ring that keeps first tokens may lose a part of the first block between them and its last ones.
    keeps = any(group.keep for group in made.layout.windows)
    if answer and not keeps:
        assert found == len(text)
    cut = data.draw(st.integers(1, len(text)))
    found = check(made, mix, [*text[:cut], 1, 2])
    if cut <= end and not made.layout.states:
        assert found == cut
    elif cut <= end:
        assert found == cut or found == cut // B * B  # every block has its state here
    lost = data.draw(st.sampled_from(sorted(made.store.blocks)))
    made.store.lose(lost)
    check(made, mix, [*text, 1])
    run(made, mix, [*text, 1, 2, 3], chunks, 2)  # heals
    found = check(made, mix, [*text, 1, 2, 3, 4])
    assert found == len(text) + 3 or keeps


@settings(max_examples=60, deadline=None)
@given(MIXES, st.integers(10, 60), st.integers(10, 60), st.lists(st.integers(1, 30), max_size=4))
def test_a_second_text_that_shares_a_beginning(mix, shared, length, chunks):
    made = bench(mix)
    first = list(range(100, 100 + shared)) + [7] * length
    second = list(range(100, 100 + shared)) + [8] * length
    for text in (first, second, first):
        run(made, mix, text, chunks, 3)
    for text in (first, second):
        found = check(made, mix, [*text, 1])
        assert found == len(text) or any(group.keep for group in made.layout.windows)


RING, STATE = ("ring", 12, 0), ("state",)


def test_a_long_answer_keeps_its_last_window_only():
    made = bench([RING])
    (group,) = made.layout.windows
    run(made, [RING], list(range(20 + 40)), [8, 8], 40)  # 60 in all: the ring has those from 48 on
    mains = [meta for meta, _ in made.store.blocks.values() if meta.token_count]
    beside = [(m.start, m.token_count, made.store.get_meta(window_name(m.block_hash, group))) for m in mains]
    found = sorted((start, count, meta.start) for start, count, meta in beside if meta)
    assert found == [(0, 8, 0), (8, 8, 8), (16, 3, 16), (48, 8, 48), (56, 4, 56)]


def test_a_restore_reads_the_last_window_and_not_more():
    made = bench([("kv",), RING])
    text = list(range(65))
    run(made, [("kv",), RING], text, [16] * 4, 0)
    match = made.prefix.match("r", text)
    assert [len(match.blocks), [c.meta.start for c in match.companions]] == [8, [56, 48]]
    made.prefix.release("r")


def test_states_are_kept_every_so_many_tokens_under_a_budget():
    size = 4 * (3 + 4)  # bytes of both arrays
    for budget, places in ((size, {8, 16, 24, 32, 40, 45}), (1, {28 // 8 * 8 + 8, 40, 45}), (2, {16, 32, 40, 45})):
        made = bench([STATE], snapshot_bytes=budget)
        text = list(range(46))
        run(made, [STATE], text, [100], 0)
        mains = [meta for meta, _ in made.store.blocks.values() if meta.token_count]
        kept = {m.start + m.token_count for m in mains if made.store.contains(state_name(m.block_hash))}
        assert kept == places, budget


def test_a_tail_that_only_a_state_can_be_resumed_from_is_kept():
    made = bench([STATE])
    first = list(range(100, 113))
    run(made, [STATE], first, [8], 0)
    run(made, [STATE], [*first, 1, 2, 3, 4, 5], [8], 3)
    assert check(made, [STATE], first) == 12
    plain = bench([("kv",)])
    run(plain, [("kv",)], first, [8], 0)
    run(plain, [("kv",)], [*first, 1, 2, 3, 4, 5], [8], 3)
    assert sorted(meta.token_count for meta, _ in plain.store.blocks.values()) == [2, 8, 8]


def test_a_dropped_tail_takes_its_companions_along():
    made = bench([RING])
    first = list(range(100, 113))
    run(made, [RING], first, [8], 0)
    run(made, [RING], [*first, 1, 2, 3, 4, 5], [8], 3)
    known = {meta.block_hash for meta, _ in made.store.blocks.values() if meta.token_count}
    beside = {name for block in known for name in companion_names(made.layout, block)}
    assert {meta.block_hash for meta, _ in made.store.blocks.values() if not meta.token_count} <= beside


def test_the_files_of_a_model_that_keeps_states_only_hold_no_tensors():
    made = bench([STATE])
    run(made, [STATE], list(range(20)), [8], 0)
    mains = [block for meta, block in made.store.blocks.values() if meta.token_count]
    assert mains and all(block.nbytes == 0 for block in mains)


@pytest.mark.parametrize("exact", ["on", "strict"])
def test_windows_smaller_than_a_block_lose_no_place_in_the_exact_modes(exact):
    mix = [("ring", 3, 0)]
    made = bench(mix, exact=exact)
    text = list(range(41))
    prefix = made.prefix
    prefix.match("r", text)
    caches = [build(layer) for layer in mix]
    for at in range(0, 40, 8):
        feed(caches, at, at + 8)
        prefix.store("r", text[: at + 8], caches, exact_upto=at + 8)
    prefix.store("r", text[:40], caches, exact_upto=40, prefill_end=40)
    prefix.release("r")
    assert [check(made, mix, text[: 8 * k] + [99, 98]) for k in range(1, 6)] == [8, 16, 24, 32, 40]


class Full(DictStore):
    """Has no room for anything."""

    def save_block(self, *args, **kinds):
        return False


def test_windows_of_blocks_that_fit_no_tier_are_not_kept():
    made = bench([RING])
    full = BlockAwarePrefixCache(
        PagedCacheManager(B, 1), Full(), block_size=B, identity=CacheIdentity(b"f", made.layout, "n")
    )
    full.match("r", list(range(100)))
    caches = [build(RING)]
    for at in range(0, 96, 8):
        feed(caches, at, at + 8)
        full.store("r", list(range(at + 8)), caches, exact_upto=0)
    assert not full._chains["r"].stages._stages
