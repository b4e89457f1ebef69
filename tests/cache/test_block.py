import numpy as np
import pytest

from omlx.cache.block import block_hash, block_hashes, common_tokens, pack_tokens, root_hash, slice_tokens


def test_a_hash_names_tokens_and_everything_before_them():
    first, second = pack_tokens([1, 2]), pack_tokens([3, 4])
    root = root_hash("model")
    a = block_hash(block_hash(root, first), second)
    assert a == block_hash(block_hash(root, first), second) and len(a) == 32
    others = {
        block_hash(block_hash(root_hash("other"), first), second),
        block_hash(block_hash(root, second), second),
        block_hash(block_hash(root, first), first),
        block_hash(block_hash(root, first), second, extra=b"image"),
    }
    assert len(others) == 4 and a not in others


@pytest.mark.parametrize("extra", [b"", b"decoded"])
@pytest.mark.parametrize("tokens", [0, 7, 8, 25])
def test_the_names_of_many_blocks_are_those_of_each(tokens, extra):
    packed, parent, names = pack_tokens(range(tokens)), b"a parent of any length", []
    for start in range(0, tokens - 7, 8):
        parent = block_hash(parent, slice_tokens(packed, start, start + 8), extra)
        names.append(parent)
    assert list(block_hashes(b"a parent of any length", packed, 8, extra)) == names


def test_moving_bytes_between_fields_changes_the_hash():
    assert root_hash("ab", "c") != root_hash("a", "bc") != root_hash("abc")
    assert root_hash("a", "") != root_hash("a")
    assert block_hash(b"p", b"12345678", b"") != block_hash(b"p", b"1234", b"5678")
    assert block_hash(b"p1234", b"5678") != block_hash(b"p", b"12345678")
    assert root_hash(b"x", b"y") != block_hash(b"x", b"y")


def test_python_and_numpy_ids_pack_alike_and_wrong_ids_are_refused():
    assert (
        pack_tokens([0, 7, 2**32 - 1])
        == pack_tokens(np.array([0, 7, 2**32 - 1]))
        == pack_tokens([np.int64(0), np.uint32(7), np.int64(2**32 - 1)])
    )
    assert pack_tokens([1]) == b"\x01\x00\x00\x00"
    for wrong in ([-1], [2**32], [1.5], ["1"], [None]):
        with pytest.raises(ValueError, match="token ids"):
            pack_tokens(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 2, 3], 2), ([1, 2, 9, 4], [1, 2, 3, 4], 2), ([9], [1], 0)],
)
def test_common_tokens_counts_whole_leading_tokens(a, b, shared):
    assert common_tokens(pack_tokens(a), pack_tokens(b)) == common_tokens(pack_tokens(b), pack_tokens(a)) == shared


def test_tokens_that_share_only_some_bytes_are_different():
    assert common_tokens(pack_tokens([5, 0x01020304]), pack_tokens([5, 0x01020305])) == 1
    assert common_tokens(pack_tokens([5, 0x01020304]), pack_tokens([5, 0x02020304])) == 1


def test_slice_tokens_cuts_by_position():
    assert slice_tokens(pack_tokens([4, 5, 6, 7]), 1, 3) == pack_tokens([5, 6])
