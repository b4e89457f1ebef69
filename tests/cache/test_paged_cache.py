from omlx.cache.paged_cache import PagedCacheManager


def test_a_block_is_held_until_its_last_request_lets_go():
    paged = PagedCacheManager(64, num_layers=2)
    assert paged.acquire("a", b"x") and not paged.acquire("a", b"x")
    assert not paged.acquire("b", b"x") and paged.acquire("b", b"y")
    assert paged.holders(b"x") == 2 and paged.block_ids("a") == paged.block_ids("b")[:1]
    assert paged.release("a") == [] and paged.holders(b"x") == 1
    assert paged.release("b") == [b"x", b"y"]
    assert paged.release("b") == [] and paged.holders(b"x") == 0 and paged.requests() == ()


def test_ids_name_held_blocks_only_and_are_not_reused():
    paged = PagedCacheManager(64, num_layers=2)
    paged.acquire("a", b"x")
    (first,) = paged.block_ids("a")
    assert paged.block_hash(first) == b"x"
    assert paged.drop("a", b"x") and not paged.drop("a", b"x") and not paged.drop("nobody", b"x")
    assert paged.block_hash(first) is None
    paged.acquire("a", b"x")
    assert paged.block_ids("a") != (first,)


def test_a_block_table_keeps_the_order_of_the_tokens():
    paged = PagedCacheManager(64, num_layers=2)
    for name in (b"head", b"middle", b"tail"):
        paged.acquire("a", name)
    assert paged.hashes("a") == (b"head", b"middle", b"tail")
    paged.drop("a", b"middle")
    assert paged.hashes("a") == (b"head", b"tail")
