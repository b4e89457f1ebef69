from omlx.storage.bookkeeping import GoneBlocks, RecentTokens
from omlx.storage.tensor_file import BlockMeta


def meta(n: int, parent: bytes = b"p") -> BlockMeta:
    return BlockMeta(block_hash=n.to_bytes(4, "big"), token_count=1, parent=parent)


def test_what_was_given_up_is_remembered_by_parent_with_the_last_reason():
    gone = GoneBlocks()
    gone.add("m", meta(1), "evicted")
    gone.add("m", meta(2), "evicted")
    gone.add("m", meta(3, b"q"), "evicted")
    gone.add("other", meta(4), "evicted")
    gone.add("m", meta(1), "damaged")
    assert gone.after("m", b"p") == [(meta(2), "evicted"), (meta(1), "damaged")]
    assert gone.after("m", b"nobody") == []


def test_the_record_is_bounded_and_forgets_the_oldest():
    gone = GoneBlocks()
    for n in range(5000):
        gone.add("m", meta(n), "evicted")
    found = gone.after("m", b"p")
    assert len(found) == 4096 and found[0].meta == meta(5000 - 4096)


def test_blocks_with_few_token_ids_or_none_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(RecentTokens, "_MOST_BYTES", 10_000)
    recent = RecentTokens()
    for serial in range(1000):
        recent.put(serial, b"")
    assert sum(recent.get(serial) is not None for serial in range(1000)) < 100
    recent.put(5, bytes(4))
    recent.put(5, bytes(8))
    assert recent.get(5) == bytes(8) and recent.get(999) == b""
