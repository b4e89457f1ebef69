"""What a prefix cache has of a prompt, block by block, and why it does not have more."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from omlx.cache.block import TOKEN_BYTES, common_tokens, is_image_id, slice_tokens
from omlx.cache.interface import BlockMeta, CacheManager, Tier
from omlx.cache.layer_state import CacheLayout, StatePart
from omlx.storage.tensor_file import TensorSpec

if TYPE_CHECKING:
    from omlx.cache.prefix_cache import CacheIdentity

_MOST_LOOKED_AT = 1024  # first blocks of other prompts; each may take the reading of a file's head
_MOST_STORED_TOKENS = 32_768
_BLOCK_SIZES = range(8, 4097, 8)  # all that a server can be started with


@dataclass(frozen=True, slots=True)
class BlockState:
    """One block of a prompt: `tokens` of the prompt lie in it, `cached_tokens` of them would be reused."""

    index: int
    block_hash: bytes
    tokens: int
    cached_tokens: int
    state: Tier | Literal["absent"]


class FirstMiss(NamedTuple):
    """The first position of the prompt that would be computed though it is not the last one, and why.

    `differs_at`: where the prompt differs from the nearest one that is stored, if that is the reason; `stored` are then
    the token ids that are stored from there on (at most 32,768).
    """

    token: int
    reason: str
    differs_at: int | None = None
    stored: tuple[int, ...] = ()


class PrefixProbe(NamedTuple):
    """What `match` would give. `first_miss` is None if all but the prompt's last token would be reused."""

    blocks: tuple[BlockState, ...]
    cached_tokens: int
    first_miss: FirstMiss | None


class _Near(NamedTuple):
    """A block whose first `shared` tokens are those that were looked for."""

    shared: int
    meta: BlockMeta
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MatchEnd:
    """Where a match ended: behind `taken` tokens of the block at `start`, whose parent is stored.

    `wanted` are the prompt's packed tokens from `start` on, without its last. `usable` says whether a block's
    numerics allow its use, `names` what a block may be called by its parent, position and tokens; with `declined` the
    store takes no block there. Changes nothing in the store.
    """

    store: CacheManager
    identity: "CacheIdentity"
    block_size: int
    salt: str
    parent: bytes
    start: int
    taken: int
    wanted: bytes
    usable: Callable[[BlockMeta], bool]
    names: Callable[[bytes, int, bytes], Sequence[bytes]]
    declined: bool

    def first_miss(self) -> FirstMiss:
        """Where and why, as far as it can be known: what was given up is remembered in memory, and not for ever."""
        children = self.store.children(self.parent, self.wanted)
        near = self._nearest(_Near(self._shared(meta), meta) for meta in children)
        gone = self._nearest(
            _Near(self._shared_with_gone(gone.meta), gone.meta, gone.reason)
            for gone in self.store.gone_after(self.parent)
        )
        other = self._nearest(self._of_other_worlds()) if self.start == 0 else None
        shared = near.shared if near else 0
        if gone is not None and gone.shared > max(shared, other.shared if other else 0):
            return self._miss(gone.reason)
        if other is not None and other.shared > shared:
            return self._miss(self._other_world(other.meta))
        return self._of_stored(near)

    def _miss(self, reason: str) -> FirstMiss:
        return FirstMiss(self.start + self.taken, reason)

    def _of_stored(self, near: _Near | None) -> FirstMiss:
        if self.declined and (near is None or near.shared == near.meta.token_count < self.block_size):
            return self._miss("larger than the cache")
        if near is None:
            return self._miss(
                "never stored" + (f": the nearest cached prompt ends at token {self.start}" if self.start else "")
            )
        end = self.start + near.shared
        if near.shared > self.taken and not self.usable(near.meta):
            return self._miss(f"other KV settings: stored under other numerics ({near.meta.numerics})")
        if near.shared > self.taken and not self.identity.layout.cut_anywhere:
            last = self.start + self.taken
            reason = f"stored up to token {end}, but windows or recurrent states to go on from only at token {last}"
            return self._miss(reason)
        if near.shared in (self.block_size, len(self.wanted) // TOKEN_BYTES):
            return self._miss(
                "stored, but its last bits are not those of a prompt computed from its beginning (exact mode)"
            )
        if near.shared < near.meta.token_count:
            what = " in a picture" if is_image_id(self.wanted, near.shared) else ""
            reason = f"differs from the nearest cached prompt{what} at token {end}"
            return FirstMiss(self.start + self.taken, reason, end, self._stored_from(near))
        return self._miss(f"never stored: the nearest cached prompt ends at token {end}")

    def _stored_from(self, near: _Near) -> tuple[int, ...]:
        """The tokens of the nearest stored prompt from where it differs: in one of its continuations, the first."""
        block: BlockMeta | None = near.meta
        packed = bytearray()
        while block is not None and len(packed) < _MOST_STORED_TOKENS * TOKEN_BYTES:
            packed += block.tokens or self.store.tokens(block.block_hash) or b""
            block = next(iter(self.store.children(block.block_hash, b"")), None)
        return tuple(np.frombuffer(packed, "<u4")[near.shared : _MOST_STORED_TOKENS].tolist())

    def _shared(self, meta: BlockMeta) -> int:
        return common_tokens(meta.tokens or b"", self.wanted)

    def _shared_with_gone(self, meta: BlockMeta) -> int:
        """Like `_shared`; where the tokens went with the file, the hash tells whether all of them were wanted."""
        if meta.tokens is not None:
            return self._shared(meta)
        tokens = slice_tokens(self.wanted, 0, meta.token_count)
        return meta.token_count if meta.block_hash in self.names(self.parent, self.start, tokens) else 0

    @staticmethod
    def _nearest(found: Iterable[_Near]) -> _Near | None:
        return max(found, key=lambda near: near.shared, default=None)

    # ---- the same tokens in another world of KV values

    def _of_other_worlds(self) -> Iterator[_Near]:
        """First blocks that hold our tokens, as far as both go, under another root."""
        stored = (meta for meta in self.store.metas() if meta.token_count)  # else it only lies beside another
        first = (meta for meta in stored if meta.start == 0 and meta.parent != self.parent)
        for meta in islice(first, _MOST_LOOKED_AT):
            tokens = meta.tokens if meta.tokens is not None else self.store.tokens(meta.block_hash)
            if tokens:
                shared = common_tokens(tokens, self.wanted)
                if shared == min(meta.token_count, len(self.wanted) // TOKEN_BYTES):
                    yield _Near(shared, meta)

    def _other_world(self, meta: BlockMeta) -> str:
        """What differs. A root is a digest, so this tries what it may have been made of."""
        specs = self.store.specs(meta.block_hash)
        identity = self.identity if specs is None else replace(self.identity, layout=self._layout(specs))
        for salt in dict.fromkeys((self.salt, "")):
            for size in (self.block_size, *_BLOCK_SIZES):
                if identity.root(size, salt) == meta.parent:
                    return self._other_settings(identity, size, salt)
        return "other model fingerprint: the same tokens are stored for other weights (or under another cache_salt)"

    def _other_settings(self, identity: "CacheIdentity", size: int, salt: str) -> str:
        found = []
        if size != self.block_size:
            found.append(f"block size {size}")
        if str(identity.layout) != str(self.identity.layout):
            found.append("KV arrays " + ", ".join(sorted({part.dtype for part in identity.layout.parts})))
        if salt != self.salt:
            found.append("no cache_salt")
        return "other KV settings: the same tokens are stored with " + " and ".join(found)

    def _layout(self, specs: tuple[TensorSpec, ...]) -> CacheLayout:
        """Our layout with the tensors of another block, as far as they are a part of the root."""
        parts = tuple(StatePart(s.name, s.dtype, (*s.shape[:2], 1, *s.shape[3:])) for s in specs)
        return replace(self.identity.layout, parts=parts)
