"""Names of blocks: a chain of hashes over token ids.

A block is a run of at most `block_size` consecutive tokens of one prompt. Its hash covers its own
tokens and, through its parent's hash, everything before them, so equal hashes mean equal context.
The first parent is a root hash of all that makes KV values differ (see `root_hash`).

Every input is length-prefixed before it is hashed: moving bytes from one field to the next changes
the hash.

Where the model gets a picture's features, the tokens are ids of 2^31 and above made of the picture's digest
(`image_ids`): the placeholders of all pictures look alike, these do not.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence

TOKEN_BYTES = 4
_LENGTH = struct.Struct("<Q")
_BLOCK = b"omlx-block-1"
_IMAGE_ID = 1 << 31
# Pictures of which fewer ids were compared may be two that look alike there: an id tells 31 bits.
_IDS_THAT_TELL = 5
_NO_EXTRA: Mapping[int, bytes] = {}


def _digest(domain: bytes, *fields: bytes) -> bytes:
    h = hashlib.sha256(domain)
    for field in fields:
        h.update(_LENGTH.pack(len(field)))
        h.update(field)
    return h.digest()


def root_hash(*fields: str | bytes) -> bytes:
    """32 bytes naming a world of KV values: fingerprint, dtype, layout, block size, salt, ..."""
    return _digest(b"omlx-root-1", *(f.encode() if isinstance(f, str) else f for f in fields))


def block_hash(parent: bytes, tokens: bytes, extra: bytes = b"") -> bytes:
    """32 bytes naming the block with these packed `tokens` after `parent`.

    `extra` carries what the token ids do not say, such as the hashes of images that begin here.
    """
    return _digest(_BLOCK, parent, tokens, extra)


def block_hashes(
    parent: bytes, packed: bytes, block_size: int, extra: bytes = b"", more: Mapping[int, bytes] = _NO_EXTRA
) -> Iterator[bytes]:
    """The names of the whole blocks that packed tokens fill, in order: `block_hash` of each, in half the time.

    `more` is added to the `extra` of single blocks, by their number.
    """
    nbytes = block_size * TOKEN_BYTES
    between, plain = _LENGTH.pack(nbytes), _LENGTH.pack(len(extra)) + extra
    for number, at in enumerate(range(0, len(packed) - nbytes + 1, nbytes)):
        end = plain
        if number in more:
            own = extra + more[number]
            end = _LENGTH.pack(len(own)) + own
        fields = (_BLOCK, _LENGTH.pack(len(parent)), parent, between, packed[at : at + nbytes], end)
        parent = hashlib.sha256(b"".join(fields)).digest()
        yield parent


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as uint32 little endian; int and numpy ints give the same bytes.

    Raises ValueError for an id that is negative or does not fit.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids have to be integers from 0 to 2^32-1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def image_ids(digest: bytes, n: int) -> list[int]:
    """What the cache has for the `n` positions of a picture: ids of 2^31 and above that its digest gives."""
    words = array("I", hashlib.shake_256(digest).digest(n * TOKEN_BYTES))
    if sys.byteorder == "big":
        words.byteswap()
    return [word | _IMAGE_ID for word in words]


def is_image_id(packed: bytes, at: int) -> bool:
    """Whether token `at` of packed tokens stands for a part of a picture."""
    return bool(packed[at * TOKEN_BYTES + TOKEN_BYTES - 1] & 0x80)


def sure_tokens(packed: bytes, shared: int) -> int:
    """How many of `shared` tokens, equal in two packed runs, prove to be the same: not the first few of a picture."""
    run = 0
    while run < _IDS_THAT_TELL and run < shared and is_image_id(packed, shared - run - 1):
        run += 1
    return shared if run == _IDS_THAT_TELL else shared - run


def slice_tokens(packed: bytes, start: int, stop: int) -> bytes:
    """The packed tokens at positions [start, stop)."""
    return packed[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed runs share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    low, high = 0, n // TOKEN_BYTES  # a[:low] agrees, a[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
