"""Deleting one conversation through the scheduler's own blocks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.block import block_hash, pack_tokens
from omlx.cache.companions import companions_of, state_name
from omlx.cache.conversation import Forgotten
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from tests.storage.blocks import block
from tests.tiny import Bench, TinyRunner

BLOCK = 16
MB = 1 << 20
SHARED = "shared with other conversations"


@pytest.fixture(params=["ram", "ssd", "both"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    stores: list[PagedSSDCacheManager] = []

    def opener(**config: Any) -> Bench:
        ram = 0 if request.param == "ssd" else 64 * MB
        kinds: dict[str, Any] = {"hot_cache_only": request.param == "ram", "free_reserve_bytes": 0}
        stores.append(PagedSSDCacheManager(tmp_path / "cache", 64 * MB, ram, **kinds))
        return Bench(TinyRunner(), stores[-1], **config)

    yield opener
    for store in stores:
        store.close(60)


def text(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * i) % 250 for i in range(length)]


SYSTEM = text(1, 3 * BLOCK + 5)


def forget(bench: Bench, prompt: list[int], salt: str = "") -> Forgotten:
    return bench.prefix.forget(bench.prefix.conversation(prompt, salt))


def stored(bench: Bench, prompt: list[int], salt: str = "") -> int:
    return bench.prefix.probe(prompt, salt).cached_tokens


def held(bench: Bench) -> set[bytes]:
    return {meta.block_hash for meta in bench.store.metas()}


def test_a_conversation_goes_whole_with_its_answer_and_the_turns_that_follow(opened: Callable[..., Bench]) -> None:
    bench = opened()
    prompt = text(2, 70)
    first = bench.ask(prompt, max_tokens=40)
    bench.ask([*prompt, *bench.tokens(first), *text(3, 50)], max_tokens=8)
    before = bench.store.metas()
    done = forget(bench, prompt)
    assert done == Forgotten(len(before), sum(meta.file_size for meta in before), 70, 0, None)
    assert held(bench) == set() and stored(bench, [*prompt, 1]) == 0
    assert bench.store.settle(5) and bench.store.check() == []  # type: ignore[attr-defined]
    assert forget(bench, prompt) == Forgotten(0, 0, 70, 0, None)


def test_what_another_conversation_shares_stays(opened: Callable[..., Bench]) -> None:
    bench = opened()
    one, other = [*SYSTEM, *text(2, 60)], [*SYSTEM, *text(3, 60)]
    kept_answer = bench.ask(other, max_tokens=20)
    kept = held(bench)
    bench.ask(one, max_tokens=20)
    done = forget(bench, one)
    assert done.blocks >= 4 and (done.prompt_tokens, done.kept_tokens, done.kept_because) == (113, 3 * BLOCK, SHARED)
    assert held(bench) == kept
    assert stored(bench, [*one, 1]) == 3 * BLOCK
    repeat = bench.ask(other, max_tokens=20)
    assert repeat.stats.cached_ram_tokens + repeat.stats.cached_ssd_tokens == len(other) - 1
    assert bench.answer(repeat) == bench.answer(kept_answer)
    done = forget(bench, other)  # now nobody else is left
    assert (done.kept_tokens, done.kept_because) == (0, None) and held(bench) == set()


def test_only_what_follows_the_branch_goes(opened: Callable[..., Bench]) -> None:
    bench = opened()
    prompt = text(2, 70)
    answer = bench.tokens(bench.ask(prompt, max_tokens=30))
    turns = [[*prompt, *answer, *text(seed, 40)] for seed in (4, 5)]
    for turn in turns:
        bench.ask(turn, max_tokens=4)
    done = forget(bench, turns[0])
    assert done.kept_because == SHARED and 70 <= done.kept_tokens <= len(prompt) + len(answer)
    assert stored(bench, turns[1]) == len(turns[1]) - 1
    assert stored(bench, turns[0]) <= len(prompt) + len(answer)


def test_the_whole_history_with_its_last_answer_may_be_given(opened: Callable[..., Bench]) -> None:
    bench = opened()
    prompt = text(2, 70)
    answer = bench.tokens(bench.ask(prompt, max_tokens=30))
    done = forget(bench, [*prompt, *answer, 7, 7, 7])  # with what a template puts behind it
    assert done.kept_tokens == 0 and held(bench) == set()


def test_a_prompt_that_was_never_asked_deletes_nothing(opened: Callable[..., Bench]) -> None:
    bench = opened()
    bench.ask([*SYSTEM, *text(2, 40)])
    before = held(bench)
    assert forget(bench, text(9, 50)) == Forgotten(0, 0, 50, 0, None)
    done = forget(bench, [*SYSTEM, *text(9, 40)])
    assert (done.blocks, done.kept_tokens, done.kept_because) == (0, 3 * BLOCK, SHARED) and held(bench) == before


def test_salts_are_other_conversations(opened: Callable[..., Bench]) -> None:
    bench = opened()
    prompt = text(2, 70)
    for salt in ("", "tenant"):
        bench.ask(prompt, salt=salt)
    assert forget(bench, prompt, "nobody").blocks == 0
    assert forget(bench, prompt, "tenant").blocks > 0
    assert stored(bench, prompt) == 69 and stored(bench, prompt, "tenant") == 0


def test_a_running_requests_blocks_and_those_before_them_stay(opened: Callable[..., Bench]) -> None:
    bench = opened()
    prompt = text(2, 70)
    longer = [*prompt, *bench.tokens(bench.ask(prompt, max_tokens=4)), *text(5, 20)]
    bench.ask(longer, max_tokens=4)
    running = bench.add(longer, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        bench.scheduler.step()
    done = forget(bench, prompt)
    assert (done.kept_tokens, done.kept_because) == (70, "in use by a running request")
    bench.run()
    cold = bench.ask(longer, cache=False, max_tokens=30, ignore_eos=True)
    assert bench.tokens(running) == bench.tokens(cold)
    assert forget(bench, prompt).kept_tokens == 0 and held(bench) == set()


def test_every_branch_of_a_crowded_head_is_found(opened: Callable[..., Bench]) -> None:
    """A match looks at the latest branches only; who asks to forget one means it."""
    bench = opened()
    root = bench.prefix.conversation([1]).root
    head, tails = pack_tokens(range(BLOCK)), [pack_tokens([n, *range(1, BLOCK)]) for n in range(300)]
    name = block_hash(root, head)
    bench.store.save_block(name, block(0), BLOCK, parent=root, tokens=head)
    for tail in tails:
        bench.store.save_block(block_hash(name, tail), block(1), BLOCK, parent=name, tokens=tail, start=BLOCK)
    bench.store.flush(60)
    done = forget(bench, [*range(BLOCK), 0, *range(1, BLOCK)])
    assert (done.blocks, done.kept_tokens, done.kept_because) == (1, BLOCK, SHARED)
    assert not bench.store.contains(block_hash(name, tails[0])) and bench.store.contains(block_hash(name, tails[1]))


def test_what_lies_beside_a_block_goes_and_stays_with_it(opened: Callable[..., Bench]) -> None:
    """A companion holds no tokens: it is no conversation of its own."""
    bench = opened()
    bench.ask([*SYSTEM, *text(2, 60)], max_tokens=4)
    bench.ask([*SYSTEM, *text(3, 60)], max_tokens=4)
    beside = {meta.block_hash: state_name(meta.block_hash) for meta in bench.store.metas()}
    for parent, companion in beside.items():
        bench.store.save_block(companion, block(0), 0, parent=companions_of(parent))
    forget(bench, [*SYSTEM, *text(2, 60)])
    for parent, companion in beside.items():
        assert bench.store.contains(parent) == bench.store.contains(companion)
    assert stored(bench, [*SYSTEM, *text(3, 60)]) == 112


def test_a_long_conversation_is_no_deep_recursion(opened: Callable[..., Bench]) -> None:
    bench = opened()
    parent = bench.prefix.conversation([1]).root
    prompt = list(range(BLOCK)) * 1500
    tokens = pack_tokens(range(BLOCK))
    for _ in range(1500):
        name = block_hash(parent, tokens)
        bench.store.save_block(name, block(0), BLOCK, parent=parent, tokens=tokens)
        parent = name
    assert forget(bench, prompt).blocks == 1500
