"""Who makes room when a limit is reached: a tenant under its fair share never loses to one above it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx.access import body_budget
from omlx.api.responses.store import ResponseStore
from omlx.cache.paged_ssd_cache import PagedSSDCacheManager
from omlx.cache.vision_feature_cache import VisionFeatureSSDCache
from omlx.errors import NotFound
from omlx.fair_share import Group, in_turn, next_to_lose
from omlx.request import Request, SamplingParams
from omlx.server import create_app
from omlx.settings import Settings
from omlx.storage.hot_tier import HotTier
from omlx.storage.tensor_file import BlockMeta
from tests.api.fakes import FakePool
from tests.api.serving import CHAT
from tests.storage.blocks import NBYTES, block, name
from tests.tiny import Bench, TinyRunner

# ---- the rule


def test_the_tenant_that_has_most_makes_room_and_nobody_takes_from_who_has_less() -> None:
    have = {"a": 5, "b": 9, "c": 2}
    assert next_to_lose(have, have) == "b"
    assert next_to_lose(have, ["a", "c"]) == "a"
    assert next_to_lose(have, ["a", "c"], adder="b") is None  # what b has cannot leave now
    assert next_to_lose(have, ["a", "b"], adder="c") == "b"
    assert next_to_lose({"a": 4, "b": 4}, ["b", "a"], adder="a") == "b"
    assert next_to_lose(have, []) is None


def test_items_leave_in_turn_of_who_has_most_and_of_one_tenant_in_its_order() -> None:
    have = {"a": 5, "b": 3}
    order = []
    for tenant, item in in_turn({"a": iter([("a", 1), ("a", 2), ("a", 3)]), "b": iter([("b", 1)])}, have):
        order.append((tenant, item))
        have[tenant] -= 1
    assert order == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    assert list(in_turn({"x": iter(range(5))}, {})) == [0, 1, 2, 3, 4]


# ---- KV in RAM


def put(hot: HotTier, n: int, tenant: str, group: int | None = None) -> bool:
    meta = BlockMeta(block_hash=name(n), token_count=8)
    return hot.put(("s", name(n)), block(n), meta, group=Group(n if group is None else group, tenant))


def held(hot: HotTier) -> set[int]:
    return {n for n in range(100) if hot.get(("s", name(n)))}


def test_a_tenant_keeps_its_share_of_ram_whatever_another_stores() -> None:
    hot = HotTier(8 * NBYTES)
    for n in range(3):
        put(hot, n, "quiet")
    for n in range(10, 60):
        assert put(hot, n, "flood")
    assert held(hot) == {0, 1, 2, *range(55, 60)}
    for n in range(3, 10):  # and may grow to its share, then makes room itself
        assert put(hot, n, "quiet")
    assert held(hot) == {6, 7, 8, 9, *range(56, 60)} and hot.check() == []


def test_what_cannot_leave_is_not_replaced_by_what_others_have() -> None:
    hot = HotTier(4 * NBYTES)
    put(hot, 0, "quiet")
    for n in (1, 2, 3):
        put(hot, n, "flood")
        hot.pin(("s", name(n)))
    assert not put(hot, 4, "flood") and held(hot) == {0, 1, 2, 3}
    assert put(hot, 5, "quiet") and held(hot) == {5, 1, 2, 3}  # its own, since the others are pinned
    hot.unpin(("s", name(2)))
    assert put(hot, 6, "quiet") and held(hot) == {5, 6, 1, 3}
    assert hot.check() == []


def test_blocks_count_for_the_tenant_that_used_them_last() -> None:
    hot = HotTier(4 * NBYTES)
    for n in range(4):
        put(hot, n, "a")
    hot.renew([("s", name(0)), ("s", name(1)), ("s", name(2))], "b")
    put(hot, 4, "a")  # b has most now, and its last block goes before its head
    assert held(hot) == {1, 2, 3, 4} and hot.check() == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from(["put", "renew", "pin"]))))
def test_nobody_under_its_share_loses_to_who_has_more(steps: list[tuple[str, int, str]]) -> None:
    hot, pinned, owner = HotTier(9 * NBYTES), set[int](), dict[int, str]()
    for tenant, n, what in steps:
        before = held(hot)
        if what == "put":
            if put(hot, n, tenant):
                owner[n] = tenant
            have = [owner[m] for m in before]
            for lost in before - held(hot) - {n}:
                assert owner[lost] == tenant or have.count(owner[lost]) > have.count(tenant) - (n in before)
        elif what == "renew" and n in before:
            hot.renew([("s", name(n))], tenant)
            owner[n] = tenant
        elif what == "pin" and n not in pinned and len(pinned) < 4:
            hot.pin(("s", name(n)))
            pinned.add(n)
        assert hot.check() == []


def test_a_key_that_asks_much_leaves_another_its_cached_prompt_whatever_salts_it_uses(tmp_path: Path) -> None:
    size = 16
    limit = 40 * TinyRunner().layout.bytes_per_token * size
    store = PagedSSDCacheManager(None, 0, limit)
    bench = Bench(TinyRunner(0), store, block_size=size)
    prompt = [(i * i + 3) % 250 for i in range(8 * size + 1)]

    def ask(tokens: list[int], key: str, salt: str = "") -> int:
        request = Request(f"{key}-{ask.count}", tokens, SamplingParams(max_tokens=2), cache_salt=salt, key_name=key)
        ask.count += 1
        bench.scheduler.add(request)
        bench.run()
        return request.stats.cached_tokens

    ask.count = 0
    try:
        assert ask(prompt, "quiet") == 0
        for turn in range(30):
            ask([(7 * turn + i * i) % 250 for i in range(160)], "flood", salt=f"{turn}")
        assert ask(prompt, "quiet") >= 8 * size
        for turn in range(30, 60):  # with one tenant the least recently used goes, as ever
            ask([(7 * turn + i * i) % 250 for i in range(160)], "quiet", salt=f"{turn}")
        assert ask(prompt, "quiet") == 0
    finally:
        store.close(60)


# ---- features of images


def test_features_of_one_tenant_do_not_replace_those_of_another() -> None:
    cache = VisionFeatureSSDCache(None, max_memory_entries=4)
    one = mx.ones((4, 4))
    try:
        cache.put("mine", "m", one, "quiet")
        for n in range(9):
            cache.put(f"{n}", "m", one, "flood")
        assert cache.get("mine", "m", "quiet") is not None
        assert [n for n in range(9) if cache.get(f"{n}", "m", "flood") is not None] == [6, 7, 8]
        assert cache.get("8", "m", "quiet") is not None  # used by another: counts for that one
        cache.evict_from_ram(one.nbytes)
        assert cache.usage[0] == 3
    finally:
        cache.close(60)


# ---- stored responses


def keep(store: ResponseStore, owner: bytes, response: str, nbytes: int = 1000) -> None:
    store.keep(owner, {"id": response, "previous_response_id": None, "output": [{"text": "x" * nbytes}]}, [])


def there(store: ResponseStore, owner: bytes, response: str) -> bool:
    try:
        store.response(owner, response)
    except NotFound:
        return False
    return True


def test_three_large_responses_of_one_key_leave_anothers_alone() -> None:
    store = ResponseStore(max_bytes=130_000)
    for n in range(5):
        keep(store, b"quiet", f"q{n}")
    for n in range(3):
        keep(store, b"flood", f"f{n}", 50_000)
    assert all(there(store, b"quiet", f"q{n}") for n in range(5))
    assert [there(store, b"flood", f"f{n}") for n in range(3)] == [False, True, True]
    assert store.bytes <= 130_000


def test_the_number_of_responses_is_shared_as_well() -> None:
    store = ResponseStore(max_responses=6)
    for n in range(2):
        keep(store, b"quiet", f"q{n}", 5000)  # more bytes, fewer responses
    for n in range(50):
        keep(store, b"flood", f"f{n}", 10)
    assert all(there(store, b"quiet", f"q{n}") for n in range(2)) and len(store) == 6
    store.delete(b"quiet", "q0")
    keep(store, b"quiet", "q2")
    assert there(store, b"quiet", "q1") and there(store, b"flood", "f46")


# ---- bodies of requests


async def test_bodies_of_one_key_leave_others_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "MAX_HELD_BYTES", 800_000)
    app = create_app(FakePool(), Settings(home=tmp_path, api_key="one,two,three,four"))
    taken, go = asyncio.Event(), asyncio.Event()

    async def padded(nbytes: int, wait: bool) -> AsyncIterator[bytes]:
        yield b" " * nbytes
        if wait:
            taken.set()
            await go.wait()
        yield json.dumps(CHAT).encode()

    async def post(key: str, nbytes: int, wait: bool = False) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {key}"}
            content = padded(nbytes, wait)
            return (await client.post("/v1/chat/completions", content=content, headers=headers)).status_code

    flood = []
    for _ in range(2):
        taken.clear()
        flood.append(asyncio.create_task(post("one", 450_000, wait=True)))
        await taken.wait()
    assert await post("one", 200_000) == 503
    assert await post("two", 250_000) == 200  # an equal part: 200,000 bytes, and the first 64 KB are free
    assert await post("two", 350_000) == 503
    go.set()
    assert [await task for task in flood] == [200, 200]
