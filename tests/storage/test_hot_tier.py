import time

import pytest

from omlx.storage.hot_tier import HotTier
from omlx.storage.tensor_file import BlockBuffer, BlockMeta
from tests.storage.blocks import NBYTES, block, name


def put(hot, n, group, parent=b"", store="s", **kinds):
    return hot.put(
        (store, name(n)), block(n), BlockMeta(block_hash=name(n), token_count=8, parent=parent), group=group, **kinds
    )


def held(hot, store="s", upto=20):
    return {n for n in range(upto) if hot.get((store, name(n)))}


def test_the_oldest_group_goes_first_and_its_tail_before_its_head():
    hot = HotTier(4 * NBYTES)
    for n, group in ((0, "a"), (1, "a"), (2, "b"), (3, "b")):
        assert put(hot, n, group)
    put(hot, 4, "c")
    assert held(hot) == {0, 2, 3, 4}
    put(hot, 5, "c")
    assert held(hot) == {2, 3, 4, 5}
    put(hot, 6, "b")  # group b stays the oldest
    assert held(hot) == {2, 6, 4, 5} and hot.evictions("s") == 3 and hot.check() == []


def test_reading_does_not_change_the_order():
    hot = HotTier(2 * NBYTES)
    put(hot, 0, "a")
    put(hot, 1, "b")
    hot.get(("s", name(0)))
    put(hot, 2, "c")
    assert held(hot) == {1, 2}


def test_pinned_blocks_stay_and_a_block_without_room_evicts_nothing():
    hot = HotTier(2 * NBYTES)
    for n in (0, 1):
        put(hot, n, n)
        hot.pin(("s", name(n)))
    assert not put(hot, 2, "c") and held(hot) == {0, 1}
    hot.unpin(("s", name(1)))
    assert put(hot, 2, "c") and held(hot) == {0, 2}
    with pytest.raises(ValueError, match="not pinned"):
        hot.unpin(("s", name(1)))


def test_blocks_in_use_are_not_gone_through_for_every_block_that_goes(monkeypatch):
    hot = HotTier(10 * NBYTES)
    for n in range(10):
        put(hot, n, "running" if n < 8 else n)
    hot.pin(*(("s", name(n)) for n in range(8)))
    put(hot, 10, "c")
    seen, in_order = [], HotTier._in_order
    monkeypatch.setattr(HotTier, "_in_order", lambda *args: (seen.append(key) or key for key in in_order(*args)))
    put(hot, 11, "d")
    assert len(seen) == 1 and held(hot) == {*range(8), 10, 11} and hot.check() == []


def test_the_budget_is_exact_and_too_large_a_block_is_declined():
    hot = HotTier(3 * NBYTES - 1)
    assert put(hot, 0, 0) and put(hot, 1, 1) and put(hot, 2, 2)
    assert held(hot) == {1, 2} and hot.bytes == 2 * NBYTES
    assert not put(HotTier(NBYTES - 1), 0, 0)
    assert put(HotTier(NBYTES), 0, 0)
    assert not put(HotTier(0), 0, 0)


def test_no_tier_keeps_nothing_not_even_blocks_without_bytes():
    """As a model with recurrent states only has them: nothing would ever make them go."""
    off, hot = HotTier(0), HotTier(NBYTES)
    for tier, taken in ((off, False), (hot, True)):
        meta = BlockMeta(name(1), 8)
        assert tier.put(("s", name(1)), BlockBuffer.empty(()), meta, group=1) is taken
        assert (tier.get(("s", name(1))) is not None) is taken


def test_a_parent_outlives_its_children_where_that_is_asked_for():
    hot = HotTier(3 * NBYTES)
    put(hot, 0, "a", keep_parent=True)
    put(hot, 1, "b", parent=name(0), keep_parent=True)
    put(hot, 2, "c", parent=name(1), keep_parent=True)
    assert put(hot, 3, "d", keep_parent=True) and held(hot) == {0, 1, 3}
    assert put(hot, 4, "d", parent=name(1), keep_parent=True) and held(hot) == {0, 1, 4}
    assert not put(HotTier(0), 1, "a")


def test_a_block_that_has_no_other_copy_goes_last():
    hot = HotTier(2 * NBYTES)
    put(hot, 0, "a")
    put(hot, 1, "b")
    hot.get(("s", name(0))).unsaved = True
    put(hot, 2, "c")
    assert held(hot) == {0, 2}
    hot.get(("s", name(2))).unsaved = True
    assert hot.evict(1) == 0
    put(hot, 3, "d")
    assert held(hot) == {2, 3}
    assert hot.evict(1) == NBYTES and held(hot) == {2}


def test_stores_share_one_budget_and_see_only_their_own():
    hot = HotTier(2 * NBYTES)
    put(hot, 0, "a", store="x")
    put(hot, 0, "b", store="y")
    assert hot.usage("x") == hot.usage("y") == (1, NBYTES)
    put(hot, 1, "c", store="y")
    assert held(hot, "x") == set() and held(hot, "y") == {0, 1} and hot.evictions("x") == 1
    assert [m.block_hash for m in hot.metas("y")] == [name(0), name(1)] and hot.metas("x") == []
    hot.clear("y")
    assert hot.bytes == 0 and hot.check() == []


def test_replacing_and_removing_keep_the_sums_right():
    hot = HotTier(4 * NBYTES)
    put(hot, 0, "a", parent=b"p")
    put(hot, 0, "b", parent=b"q")
    assert hot.bytes == NBYTES and [m.parent for m in hot.children("s", b"q")] == [b"q"]
    assert hot.children("s", b"p") == []
    assert hot.remove(("s", name(0))) and not hot.remove(("s", name(0)))
    assert hot.bytes == 0 and hot.children("s", b"q") == [] and hot.check() == []


# ---- use


def test_a_request_that_uses_blocks_takes_them_into_its_group():
    hot = HotTier(6 * NBYTES)
    for n in range(3):
        put(hot, n, "a")
    for n in range(3, 6):
        put(hot, n, "b")
    hot.renew([("s", name(1)), ("s", name(0)), ("s", name(17))])  # as a request lets go: the head last
    order = []
    for n in range(6, 12):
        before = held(hot)
        put(hot, n, "c")
        order += before - held(hot)
    assert order == [2, 5, 4, 3, 1, 0] and hot.check() == []


def test_marking_a_block_as_used_leaves_it_in_its_place():
    hot = HotTier(2 * NBYTES)
    put(hot, 0, "a")
    put(hot, 1, "b")
    hot.mark_used([("s", name(0)), ("s", name(9))])
    put(hot, 2, "c")
    assert held(hot) == {1, 2}


def test_blocks_expire_by_their_last_use_and_not_while_pinned(monkeypatch):
    now = [0]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    hot = HotTier(20 * NBYTES)
    for n in range(4):
        now[0] = n
        put(hot, n, "a")
    put(hot, 9, "a", store="t")
    now[0] = 10
    hot.mark_used([("s", name(0))])
    hot.renew([("s", name(1))])
    hot.pin(("s", name(2)))
    hot.expire("s", 10)
    assert held(hot) == {0, 1, 2} and held(hot, "t") == {9}
    assert (hot.expired("s"), hot.evictions("s"), hot.last_used("s"), hot.tokens("s")) == (1, 0, 10, 24)
    assert [gone.reason for gone in hot.gone_after("s", b"")] == ["expired"] and hot.check() == []
    assert [m.block_hash for m in hot.clear("s", before_ns=10)] == [name(2)]
    assert held(hot) == {0, 1} and hot.check() == []


# ---- blocks whose file is written when they leave


def test_an_unsaved_block_is_saved_when_it_is_its_turn():
    hot, saved = HotTier(3 * NBYTES), []

    def save(buffer, known):
        saved.append(known.block_hash)
        buffer.unsaved = False
        return True

    for n in range(3):
        buffer = put_unsaved(hot, n, save)
    assert saved == [] and [m.block_hash for m, _ in hot.unsaved("s")] == [name(n) for n in range(3)]
    put(hot, 3, 3)
    assert saved == [name(0)] and held(hot) == {1, 2, 3}
    hot.oldest("s", NBYTES)
    assert hot.evict(NBYTES) == NBYTES and held(hot) == {1, 2}  # evicting saves nothing: 3 has no need of it
    assert saved == [name(0)] and buffer.unsaved


def put_unsaved(hot, n, save):
    buffer = block(n)
    buffer.unsaved = True
    meta = BlockMeta(block_hash=name(n), token_count=8)
    assert hot.put(("s", name(n)), buffer, meta, group=n, save=save)
    return buffer


def test_one_refusal_ends_the_asking_and_saved_blocks_leave_instead():
    hot, asked = HotTier(4 * NBYTES), []

    def save(buffer, known):
        asked.append(known.block_hash)
        return False

    for n in range(3):
        put_unsaved(hot, n, save)
    put(hot, 3, 3)
    put(hot, 4, 4)
    assert asked == [name(0)] and held(hot) == {0, 1, 2, 4}
    put_unsaved(hot, 5, save)
    assert held(hot) == {0, 1, 2, 5} and len(asked) == 2
    meta = BlockMeta(block_hash=name(6), token_count=8)
    assert not hot.put(("s", name(6)), block(6), meta, group=6, spare_unsaved=True) and held(hot) == {0, 1, 2, 5}
    put(hot, 6, 6)
    assert held(hot) == {1, 2, 5, 6}  # nothing else is left
