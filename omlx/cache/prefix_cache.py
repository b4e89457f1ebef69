"""The prefix cache: what do you have for these tokens, and keep these.

It names blocks (hash chain), finds the longest stored prefix of a prompt, restores it into KV
arrays of the final shape, and cuts a running request's state into blocks to store. The bytes are
the block store's affair, who holds what the PagedCacheManager's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from omlx.arrays import ArrayPool
from omlx.cache.block import TOKEN_BYTES, block_hash, common_tokens, pack_tokens, root_hash, slice_tokens
from omlx.cache.conversation import Conversation, Forgotten, forget
from omlx.cache.grid import ExactMode, PrefillGrid
from omlx.cache.interface import BlockMeta, CacheManager
from omlx.cache.layer_state import CacheLayout, KVSlabs, extract
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.probe import BlockState, FirstMiss, MatchEnd, PrefixProbe
from omlx.cache.reading import BlockRead, BlockReaders, RestoreTooSlow, Worth
from omlx.metrics import RestoreTime

FORMAT = "1"
# Blocks that hold more than whole grid cells have names of their own, and so do all that build on
# them: what a prompt's prefill gives and what an answer's decoding left never replace each other.
_CELLS, _DECODED = b"", b"decoded"
_IDLE_SLAB_BYTES = 512 << 20  # what may stay of the slabs of earlier restores, for the next one


def _names(parent: bytes, tokens: bytes) -> list[bytes]:
    """What the block with these tokens may be called."""
    return [block_hash(parent, tokens, lineage) for lineage in (_CELLS, _DECODED)]


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything but the tokens that decides whether KV values may be reused.

    `fingerprint` names the weights by content. `numerics` names what changes only the last bits
    (device, versions, BLAS and its threads, prefill grid): it is kept with each block and compared
    in the exact modes, but it is not part of the hash, so `off` can use such blocks.
    """

    fingerprint: bytes
    layout: CacheLayout
    numerics: str

    def root(self, block_size: int, salt: str) -> bytes:
        return root_hash(FORMAT, self.fingerprint, str(self.layout), str(block_size), salt)


class MatchedBlock(NamedTuple):
    """The first `take` tokens of a stored block, wanted at position `start`."""

    meta: BlockMeta
    start: int
    take: int

    @property
    def end(self) -> int:
        return self.start + self.take

    @property
    def exact(self) -> bool:
        """Whether all tokens used come from whole grid cells."""
        return self.take <= self.meta.exact_tokens


class PrefixMatch(NamedTuple):
    """What is stored of a prompt: `tokens` leading tokens in `blocks`, all pinned.

    Up to position `exact_upto` the values are those of a prefill in whole grid cells. `mode` is what
    it was found by.
    """

    request_id: str
    blocks: tuple[MatchedBlock, ...]
    tokens: int
    exact_upto: int
    mode: ExactMode


class StoredPart(NamedTuple):
    """A block of a match: it ends at token `end`, and lies in `tier` now. `may_end`: the match may be cut behind it."""

    end: int
    tier: Literal["ram", "ssd"]
    nbytes: int
    may_end: bool


class Restored(NamedTuple):
    """Layer caches that hold the first `tokens` tokens, and where they came from."""

    caches: list[Any]
    tokens: int
    exact_upto: int
    ram_tokens: int
    ssd_tokens: int


@dataclass(slots=True)
class _Chain:
    """The blocks of one running request.

    `hashes` of its full blocks so far; `cuts`, the positions where a prefill ended whose state this
    request carries on; `cold`, the full blocks that were read from files.
    """

    root: bytes
    hashes: list[bytes] = field(default_factory=list)
    cuts: set[int] = field(default_factory=set)
    cold: list[int] = field(default_factory=list)

    def parent(self, index: int) -> bytes:
        return self.hashes[index - 1] if index else self.root


class BlockAwarePrefixCache:
    """Prefix cache of one model over a block store; `identity` None serves the documents' calls only.

    match, restore, store and release are called from the MLX thread, one request at a time;
    save_block, load_block and the rest from anywhere.
    """

    def __init__(
        self,
        paged_cache: PagedCacheManager,
        store: CacheManager,
        *,
        block_size: int,
        identity: CacheIdentity | None = None,
        exact: ExactMode = "off",
    ) -> None:
        self.block_size = block_size
        self.exact = exact
        self._paged = paged_cache
        self._store = store
        self._identity = identity
        self._grid = PrefillGrid(block_size)
        self._chains: dict[str, _Chain] = {}
        self._slabs = ArrayPool(_IDLE_SLAB_BYTES)
        self._readers = BlockReaders()

    @property
    def _who(self) -> CacheIdentity:
        if self._identity is None:
            raise ValueError("this prefix cache was built without a model: only save_block and load_block work")
        return self._identity

    # ---- what do you have for these tokens?

    def match(self, request_id: str, prompt: Sequence[int], salt: str = "", *, resumes: bool = False) -> PrefixMatch:
        """The longest stored prefix of `prompt` that leaves at least one token to compute.

        Its blocks are pinned until `release(request_id)`. `resumes`: the prompt is that of a paused
        request with its answer so far, which continues from its own state, wherever it was cut.
        """
        chain, blocks = self._longest(pack_tokens(prompt), len(prompt) - 1, salt, resumes)
        self._chains[request_id] = chain
        self._take(request_id, chain, blocks)
        end = blocks[-1].end if blocks else 0
        mode = "off" if resumes else self.exact
        return PrefixMatch(request_id, tuple(blocks), end, self._exact_upto(blocks), mode)

    def _longest(
        self, packed: bytes, limit: int, salt: str, resumes: bool = False
    ) -> tuple[_Chain, list[MatchedBlock]]:
        """The stored blocks of the first `limit` tokens, and the chain of the full ones. Changes nothing."""
        mode = "off" if resumes else self.exact
        chain = _Chain(self._who.root(self.block_size, salt))
        blocks = self._full_blocks(chain, packed, limit, mode)
        blocks += self._partial_block(chain, packed, limit, mode)
        if mode == "on" and self._ends_before_the_answer(blocks, limit):
            first = next(i for i, block in enumerate(blocks) if not block.exact)
            del blocks[first:], chain.hashes[first:]
            blocks += self._partial_block(chain, packed, limit, "strict")
        return chain, blocks

    def _take(self, request_id: str, chain: _Chain, blocks: Sequence[MatchedBlock]) -> None:
        for block in blocks:
            self._hold(request_id, block.meta.block_hash)
        for block in blocks[len(chain.hashes) :]:
            chain.cuts.update(block.start + cut for cut in block.meta.cuts if cut <= block.take)

    def _full_blocks(self, chain: _Chain, packed: bytes, limit: int, mode: ExactMode) -> list[MatchedBlock]:
        """Fills the chain with the full blocks that are stored, one after the other."""
        blocks: list[MatchedBlock] = []
        for start in range(0, limit - self.block_size + 1, self.block_size):
            tokens = slice_tokens(packed, start, start + self.block_size)
            meta = self._find(chain.parent(len(blocks)), tokens, mode)
            if meta is None:
                break
            chain.hashes.append(meta.block_hash)
            blocks.append(MatchedBlock(meta, start, self.block_size))
        return blocks

    def _find(self, parent: bytes, tokens: bytes, mode: ExactMode) -> BlockMeta | None:
        for lineage in (_CELLS,) if mode == "strict" else (_CELLS, _DECODED):
            meta = self._store.get_meta(block_hash(parent, tokens, lineage))
            if meta is not None and self._usable(meta):
                return meta
        return None

    def _partial_block(self, chain: _Chain, packed: bytes, limit: int, mode: ExactMode) -> list[MatchedBlock]:
        """The child of the last full hit that gives most of the remaining tokens; none or one."""
        start = len(chain.hashes) * self.block_size
        wanted = slice_tokens(packed, start, limit)
        best: list[MatchedBlock] = []
        for meta in self._store.children(chain.parent(len(chain.hashes))):
            shared = common_tokens(meta.tokens or b"", wanted) if self._usable(meta) else 0
            take = self._valid_end(meta, shared, start + shared == limit, mode)
            if take > (best[0].take if best else 0):
                best = [MatchedBlock(meta, start, take)]
        return best

    def _usable(self, meta: BlockMeta) -> bool:
        return self.exact == "off" or meta.numerics == self._who.numerics

    def _valid_end(self, meta: BlockMeta, shared: int, at_limit: bool, mode: ExactMode) -> int:
        """How many of a block's first `shared` tokens may be used.

        In the exact modes a match ends on a grid edge, so that what follows is cut as in a cold
        prefill; or where the prefill of an identical prompt ended, whose last cell was cut there.
        """
        if mode == "off":
            return shared
        if at_limit and shared in meta.cuts:
            cell_start = self._grid.floor(meta.start + shared) - meta.start
            if mode == "on" or cell_start <= meta.exact_tokens:
                return shared
        if mode == "strict":
            shared = min(shared, meta.exact_tokens)
        return self._grid.floor(meta.start + shared) - meta.start

    def _ends_before_the_answer(self, blocks: Sequence[MatchedBlock], limit: int) -> bool:
        """Whether a match uses what no cold prefill would give without being a turn of a conversation.

        Such values are a prompt's last, cut cell, its last token (computed alone), and its answer
        (from decode). They may be used where the answer is a part of the new prompt, since that
        really continues from this state, and for an identical prompt.
        """
        first = next((block for block in blocks if not block.exact), None)
        if first is None:
            return False
        end = blocks[-1].end
        prefill_end = min((c for c in first.meta.cuts if c >= first.meta.exact_tokens), default=first.meta.exact_tokens)
        repeats = end == limit and first is blocks[-1] and first.take in first.meta.cuts
        return not repeats and end <= first.start + prefill_end + 1

    @staticmethod
    def _exact_upto(blocks: Sequence[MatchedBlock]) -> int:
        upto = 0
        for block in blocks:
            upto = block.start + min(block.take, block.meta.exact_tokens)
            if not block.exact:
                break
        return upto

    def stored_tokens(self, prompt: Sequence[int], salt: str = "") -> int:
        """How many tokens `match` would give now. Pins, marks and counts nothing."""
        blocks = self._longest(pack_tokens(prompt), len(prompt) - 1, salt)[1]
        return blocks[-1].end if blocks else 0

    def parts(self, match: PrefixMatch) -> list[StoredPart]:
        """A match block by block, for who may want less of it (see `shorten`).

        In the exact modes it may end behind whole cells only: then the bits are those of a cold prefill. What
        decoding left is taken whole or not at all.
        """
        exact = len(list(takewhile(lambda block: block.exact, match.blocks)))
        last = len(match.blocks) - 1
        found = []
        for i, block in enumerate(match.blocks):
            tier = self._store.tier_of(block.meta.block_hash)
            may_end = match.mode == "off" or i < exact or i == last
            found.append(StoredPart(block.end, "ssd" if tier == "ssd" else "ram", block.meta.file_size, may_end))
        return found

    def shorten(self, match: PrefixMatch, end: int) -> PrefixMatch:
        """The match cut behind a block that ends at `end` (see `parts`; 0 for nothing); the rest is let go of."""
        blocks = tuple(block for block in match.blocks if block.end <= end)
        self._forget_after(match, end)
        return match._replace(blocks=blocks, tokens=end, exact_upto=min(match.exact_upto, end))

    # ---- what would you have? (from any thread)

    def probe(self, prompt: Sequence[int], salt: str = "") -> PrefixProbe:
        """What `match` would give for `prompt` now, block by block, and why not more.

        Pins, marks and counts nothing. May look through all that is stored, if nothing of the prompt is.
        """
        if len(prompt) == 0:
            return PrefixProbe((), 0, None)
        packed, limit = pack_tokens(prompt), len(prompt) - 1
        chain, matched = self._longest(packed, limit, salt)
        cached = matched[-1].end if matched else 0
        miss = None
        if cached < limit:
            index = len(chain.hashes)
            start = index * self.block_size
            end = MatchEnd(
                self._store, self._who, self.block_size, salt, chain.parent(index), start, cached - start,
                slice_tokens(packed, start, limit), self._usable, _names,
            )  # fmt: skip
            miss = FirstMiss(cached, end.reason())
        return PrefixProbe(tuple(self._states(packed, chain, matched)), cached, miss)

    def _states(self, packed: bytes, chain: _Chain, matched: Sequence[MatchedBlock]) -> Iterator[BlockState]:
        """Every block of the prompt; behind the match under the name that a prefill would store it by."""
        parent = chain.root
        for index, at in enumerate(range(0, len(packed), self.block_size * TOKEN_BYTES)):
            tokens = packed[at : at + self.block_size * TOKEN_BYTES]
            name, take = self._stored_name(parent, tokens), 0
            parent = chain.hashes[index] if index < len(chain.hashes) else name
            if index < len(matched):
                name, take = matched[index].meta.block_hash, matched[index].take
            state = self._store.tier_of(name) or "absent"
            yield BlockState(index, name, len(tokens) // TOKEN_BYTES, take, state)

    def _stored_name(self, parent: bytes, tokens: bytes) -> bytes:
        names = _names(parent, tokens)
        return next((name for name in names if self._store.contains(name)), names[0])

    # ---- restore

    @property
    def restore_time(self) -> RestoreTime:
        """How fast blocks were read so far."""
        return self._readers.speed

    def restore(self, match: PrefixMatch, capacity: int, worth: Worth | None = None) -> Restored | None:
        """Reads a match into fresh layer caches with room for `capacity` tokens.

        A block that is gone or damaged ends the match before it. None when nothing is left. `worth(k)`: seconds that
        computing the match from token k on would take; when reading it is going to take longer, RestoreTooSlow is
        raised, and nothing of the match is held any more.
        """
        if not match.blocks:
            return None
        slabs = KVSlabs(self._who.layout, max(capacity, match.tokens), self._slabs)
        reads = [BlockRead(b.start, b.meta.file_size, partial(self._read, slabs, b)) for b in match.blocks]
        try:
            # All blocks are read, also behind one that is damaged, so that all such are stored again at once.
            tiers = self._readers.read(reads, worth)
        except RestoreTooSlow:
            self._forget_after(match, 0)
            raise
        blocks = self._unbroken(match, tiers)
        end = blocks[-1].end if blocks else 0
        self._forget_after(match, end)
        if not end:
            return None
        tokens = {"ram": 0, "ssd": 0}
        for block, tier in zip(blocks, tiers, strict=False):
            tokens[str(tier)] += block.take
            if tier == "ssd" and block.take == self.block_size:
                self._chains[match.request_id].cold.append(block.start // self.block_size)
        return Restored(slabs.caches(end), end, min(match.exact_upto, end), tokens["ram"], tokens["ssd"])

    def _read(self, slabs: KVSlabs, block: MatchedBlock) -> str | None:
        target = slabs.target(block.start, block.take, block.meta.token_count)
        return self._store.read_block(block.meta.block_hash, target)

    def _unbroken(self, match: PrefixMatch, tiers: Sequence[str | None]) -> list[MatchedBlock]:
        """The blocks before the first that could not be read, as far as they may be used without it."""
        blocks = [block for block, _ in takewhile(lambda pair: pair[1], zip(match.blocks, tiers, strict=True))]
        broken = len(blocks) < len(match.blocks)
        if broken and match.mode == "on" and self._ends_before_the_answer(blocks, limit=-1):
            return list(takewhile(lambda block: block.exact, blocks))
        return blocks

    def _forget_after(self, match: PrefixMatch, end: int) -> None:
        """Lets go of matched blocks that could not be read, so that they are stored again."""
        chain = self._chains[match.request_id]
        del chain.hashes[end // self.block_size :]
        chain.cuts = {cut for cut in chain.cuts if cut <= end}
        for block in match.blocks:
            if block.start >= end:
                self._let_go(match.request_id, block.meta.block_hash)

    # ---- keep these

    def store(
        self,
        request_id: str,
        tokens: Sequence[int],
        caches: Sequence[Any],
        *,
        exact_upto: int,
        prefill_end: int | None = None,
        final: bool = False,
    ) -> None:
        """Stores what `caches` (evaluated, holding exactly `tokens`) has that is not stored yet.

        `exact_upto`: up to here the values come from whole grid cells. `prefill_end`: the prompt's
        prefill ended here, one token before the prompt's end; an identical prompt may be resumed
        there. With either of `prefill_end` and `final` the unfinished last block is stored too;
        `final` also puts what was read from files back into RAM.
        """
        run = _Run(request_id, self._chains[request_id], tokens, caches, exact_upto)
        if prefill_end is not None:
            run.chain.cuts.add(prefill_end)
        if final and self._store.keeps_ram:
            for index in run.chain.cold:
                self._save(run, run.chain.hashes[index], index)
        for index in range(len(run.chain.hashes), len(tokens) // self.block_size):
            run.chain.hashes.append(self._save_new(run, index))
        if (final or prefill_end is not None) and len(tokens) % self.block_size:
            tail = self._save_new(run, len(run.chain.hashes))
            self._hold(request_id, tail)

    def _save_new(self, run: "_Run", index: int) -> bytes:
        whole = self.exact == "off" or run.exact_upto >= self._stop(run, index)
        name = block_hash(run.chain.parent(index), self._packed(run, index), _CELLS if whole else _DECODED)
        self._save(run, name, index)
        return name

    def _stop(self, run: "_Run", index: int) -> int:
        return min((index + 1) * self.block_size, len(run.tokens))

    def _packed(self, run: "_Run", index: int) -> bytes:
        start = index * self.block_size
        return pack_tokens(run.tokens[start : start + self.block_size])

    def _save(self, run: "_Run", name: bytes, index: int) -> None:
        """Saves block `index` unless the store has it already, at least as good."""
        start = index * self.block_size
        stop = self._stop(run, index)
        exact = min(max(run.exact_upto - start, 0), stop - start)
        known = self._store.get_meta(name)
        stale = known is not None and not self._usable(known)
        if known is None or stale or (self._store.keeps_ram and self._store.tier_of(name) == "ssd"):
            saved = self._store.save_block(
                name,
                extract(self._who.layout, run.caches, start, stop),
                stop - start,
                parent=run.chain.parent(index),
                tokens=self._packed(run, index),
                start=start,
                exact_tokens=exact,
                cuts=tuple(sorted(cut - start for cut in run.chain.cuts if start < cut <= stop)),
                numerics=self._who.numerics,
                group=run.request_id,
                replace=stale,
            )
            if not saved:
                return
        self._hold(run.request_id, name)
        self._drop_covered(run, name, self._packed(run, index))

    def _drop_covered(self, run: "_Run", name: bytes, tokens: bytes) -> None:
        """Deletes tails that the block contains: same tokens, and every place to resume them."""
        new = self._store.get_meta(name)
        for old in self._store.children(new.parent) if new else ():
            shorter = new is not None and old.token_count < new.token_count and tokens.startswith(old.tokens or b"")
            if new and shorter and self._covers(new, old):
                self._let_go(run.request_id, old.block_hash)
                if not self._paged.holders(old.block_hash):
                    self._store.delete_block(old.block_hash)

    def _covers(self, new: BlockMeta, old: BlockMeta) -> bool:
        resumable = old.exact_tokens <= new.exact_tokens and set(old.cuts) <= set(new.cuts)
        return self.exact == "off" or (resumable and old.numerics == new.numerics)

    # ---- holding and letting go

    def _hold(self, request_id: str, name: bytes) -> None:
        if self._paged.acquire(request_id, name):
            self._store.pin(name)

    def _let_go(self, request_id: str, name: bytes) -> None:
        if self._paged.drop(request_id, name):
            self._store.unpin(name)

    def release(self, request_id: str) -> None:
        """Unpins the request's blocks and marks them used, heads most recently.

        A chain is only as useful as its head, so heads are the last to be evicted.
        """
        chain = self._chains.pop(request_id, None)
        table = self._paged.hashes(request_id)
        for name in self._paged.release(request_id):
            self._store.unpin(name)
        if chain is not None:
            in_chain = set(chain.hashes)
            self._store.touch([name for name in table if name not in in_chain])
            self._store.touch(chain.hashes[::-1])

    def conversation(self, prompt: Sequence[int], salt: str = "") -> Conversation:
        """What is stored of a conversation; from any thread, reads files."""
        return Conversation(self._store, self._who.root(self.block_size, salt), pack_tokens(prompt))

    def forget(self, conversation: Conversation) -> Forgotten:
        """Deletes it, but for what others share or running requests hold; on the MLX thread."""
        return forget(self._store, conversation, lambda name: self._paged.holders(name) > 0)

    # ---- the documents' calls

    def save_block(self, block_hash: bytes, kv_data: Sequence[Sequence[Any]], token_count: int) -> bool:
        """Keeps one block under a hash of the caller's choice; the file is written in the background.

        `kv_data` has one tuple of arrays a layer, any rank. False if the block fits no tier.
        """
        return self._store.save_block(block_hash, [tuple(layer) for layer in kv_data], token_count)

    def load_block(self, block_hash: bytes) -> list[tuple[Any, ...]] | None:
        """The block's layers as saved, from RAM or else from its file; None for a miss."""
        return self._store.load_block(block_hash)

    def drop_idle_slabs(self) -> None:
        """Gives back the memory that is kept for restores to come. From any thread."""
        self._slabs.clear()

    def close(self) -> None:
        """Ends the reader threads. The store is closed by whoever made it."""
        self._readers.close()


PrefixCache = BlockAwarePrefixCache
"""The documents' name for it."""


class _Run(NamedTuple):
    """One request's state at the moment of storing."""

    request_id: str
    chain: _Chain
    tokens: Sequence[int]
    caches: Sequence[Any]
    exact_upto: int
