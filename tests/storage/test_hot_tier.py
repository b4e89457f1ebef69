import pytest

from omlx.storage.hot_tier import HotTier
from omlx.storage.tensor_file import BlockMeta
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


def test_the_budget_is_exact_and_too_large_a_block_is_declined():
    hot = HotTier(3 * NBYTES - 1)
    assert put(hot, 0, 0) and put(hot, 1, 1) and put(hot, 2, 2)
    assert held(hot) == {1, 2} and hot.bytes == 2 * NBYTES
    assert not put(HotTier(NBYTES - 1), 0, 0)
    assert put(HotTier(NBYTES), 0, 0)
    assert not put(HotTier(0), 0, 0)


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
