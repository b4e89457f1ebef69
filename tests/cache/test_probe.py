import random
from dataclasses import replace
from typing import Any

import pytest

from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from tests.tiny import EOS, Bench, TinyRunner

B = 16


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


@pytest.fixture
def store(tmp_path):
    with_files = PagedSSDCacheManager(tmp_path / "root" / "m", 1 << 26, 1 << 26, root_dir=tmp_path / "root")
    yield with_files
    with_files.close(60)


@pytest.fixture
def bench(runner, store) -> Bench:
    return Bench(runner, store)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS) for _ in range(length)]


def matched(bench: Bench, tokens: list[int], salt: str = "") -> int:
    match = bench.prefix.match("asking", tokens, salt)
    bench.prefix.release("asking")
    return match.tokens


def states(bench: Bench, tokens: list[int]) -> list[str]:
    return [block.state for block in bench.prefix.probe(tokens).blocks]


def reason(bench: Bench, tokens: list[int], **options: Any) -> str:
    return bench.prefix.probe(tokens, **options).first_miss.reason


# ---- agreement with match


@pytest.mark.parametrize("exact", ["on", "strict", "off"])
def test_it_says_what_match_gives_for_any_prompt(runner, store, exact):
    bench = Bench(runner, store, exact=exact)
    first = prompt(77)
    answer = bench.tokens(bench.ask(first, max_tokens=30))
    talk = first + answer
    rng = random.Random(5)
    asked = [first, talk, talk + prompt(9, seed=2), prompt(50, seed=3), [1], first[:16], first[:32], first[:33]]
    asked += [talk[: rng.randrange(1, len(talk))] + prompt(rng.randrange(20), seed=n) for n in range(60)]
    for tokens in asked:
        found = bench.prefix.probe(tokens)
        assert found.cached_tokens == matched(bench, tokens)
        assert sum(block.cached_tokens for block in found.blocks) == found.cached_tokens
        assert sum(block.tokens for block in found.blocks) == len(tokens)
        assert [block.index for block in found.blocks] == list(range(-(-len(tokens) // B)))
        assert (found.first_miss is None) == (found.cached_tokens == len(tokens) - 1)
        assert all(block.state != "absent" for block in found.blocks if block.cached_tokens)


def test_it_changes_nothing(runner, tmp_path, monkeypatch):
    store = PagedSSDCacheManager(tmp_path, 1 << 26, 1 << 26)
    bench = Bench(runner, store)
    bench.ask(prompt(50))
    store.flush(60)
    for call in ("pin", "unpin", "touch", "save_block", "delete_block", "read_block", "load_block"):
        monkeypatch.setattr(store, call, lambda *_, call=call: pytest.fail(f"{call} was called"))
    before, order = store.stats(), store._index.get_all_metadata()
    for tokens in (prompt(50), prompt(50)[:20], prompt(30, seed=1)):
        bench.prefix.probe(tokens)
    assert store.stats() == before and store._index.get_all_metadata() == order
    assert bench.paged.requests() == () and bench.prefix.probe([]) == ((), 0, None)
    monkeypatch.undo()
    store.close(60)


def test_it_shows_where_each_block_is(bench, store):
    tokens = prompt(4 * B)
    bench.ask(tokens, max_tokens=1)
    store.flush(60)
    assert states(bench, tokens) == ["ram"] * 4
    store.evict_from_ram(1)  # the tail goes first
    assert states(bench, tokens) == ["ram", "ram", "ram", "ssd"]
    middle = bench.prefix.probe(tokens).blocks[1]
    store.delete_block(middle.block_hash)
    assert states(bench, tokens) == ["ram", "absent", "ram", "ssd"]
    again = bench.prefix.probe(tokens).blocks[1]
    assert again.block_hash == middle.block_hash and (middle.cached_tokens, again.cached_tokens) == (B, 0)


# ---- why not more


def test_a_difference_is_named_with_its_token(bench):
    bench.ask(prompt(60))
    other = prompt(60)
    other[37] ^= 1
    found = bench.prefix.probe(other)
    assert found.first_miss[:3] == (32, "differs from the nearest cached prompt at token 37", 37)
    other[0] ^= 1
    assert bench.prefix.probe(other).first_miss[:3] == (0, "differs from the nearest cached prompt at token 0", 0)


def test_a_prompt_that_goes_on_ends_where_the_nearest_does(runner, store):
    bench = Bench(runner, store, exact="off")
    known = prompt(40) + bench.tokens(bench.ask(prompt(40), max_tokens=1))
    assert reason(bench, known[:40] + prompt(20, seed=9)).startswith("never stored: the nearest cached prompt ends at")
    assert bench.prefix.probe(prompt(40) + prompt(20, seed=9)).first_miss.token == 40
    bench.ask(prompt(2 * B - 1, seed=4) + [7], max_tokens=1)
    assert reason(bench, prompt(2 * B - 1, seed=4) + [7, 8, 9]) == (
        "never stored: the nearest cached prompt ends at token 32"
    )


def test_what_nobody_asked_was_never_stored(bench):
    assert bench.prefix.probe(prompt(40)).first_miss[:3] == (0, "never stored", None)


def test_evicted_is_said_for_ram_and_for_files(runner, store, tmp_path):
    ram = PagedSSDCacheManager(None, 0, 1 << 26, hot_cache_only=True)
    bench = Bench(runner, ram)
    bench.ask(prompt(60))
    ram.evict_from_ram(1 << 26)
    assert bench.prefix.probe(prompt(60)).first_miss[:3] == (0, "evicted", None)
    bench.ask(prompt(60))
    assert bench.prefix.probe(prompt(60)).first_miss is None
    files = PagedSSDCacheManager(tmp_path / "few", 1 << 26, 0)
    bench = Bench(runner, files)
    bench.ask(prompt(60))
    files._disk.blocks.lower_limit(0)
    assert reason(bench, prompt(60)) == "evicted"
    files.close(60)


def test_a_damaged_file_is_said(bench, store):
    bench.ask(prompt(3 * B))
    store.evict_from_ram(1 << 26, wait_s=5)
    head = bench.prefix.probe(prompt(3 * B)).blocks[0].block_hash
    store.get_block_path(head).write_bytes(b"")
    assert store.load_block(head) is None
    assert reason(bench, prompt(3 * B)) == "its file was damaged or gone"


def test_other_weights_are_told_from_other_settings(runner, store):
    Bench(runner, store).ask(prompt(60))

    class Other(TinyRunner):
        fingerprint = b"other" * 6

    assert reason(Bench(Other(), store), prompt(60)).startswith("other model fingerprint")
    found = Bench(runner, store, block_size=32).prefix.probe(prompt(60))
    assert found.first_miss.token == 0
    assert found.first_miss.reason == "other KV settings: the same tokens are stored with block size 16"
    half = TinyRunner()
    half.layout = replace(half.layout, parts=tuple(part._replace(dtype="BF16") for part in half.layout.parts))
    assert reason(Bench(half, store), prompt(60)).endswith("stored with KV arrays F32")
    assert reason(Bench(runner, store), prompt(60), salt="x").endswith("stored with no cache_salt")
    assert reason(Bench(Other(), store), prompt(60, seed=1)) == "never stored"


def test_other_settings_are_found_in_files_too(runner, store):
    Bench(runner, store).ask(prompt(60))
    store.evict_from_ram(1 << 26, wait_s=5)
    assert reason(Bench(runner, store, block_size=32), prompt(60)).endswith("block size 16")


def test_other_numerics_are_other_settings(runner, store):
    Bench(runner, store, numerics="there").ask(prompt(60))
    assert reason(Bench(runner, store, numerics="here"), prompt(60)) == (
        "other KV settings: stored under other numerics (there)"
    )


def test_what_only_decoding_left_is_said_in_the_strict_mode(runner, store):
    bench = Bench(runner, store, exact="strict")
    answer = bench.tokens(bench.ask(prompt(45), max_tokens=30))
    assert "exact mode" in reason(bench, prompt(45) + answer + [1, 2])
