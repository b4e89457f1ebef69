"""The prefix cache: what do you have for these tokens, and keep these.

It names blocks (hash chain), finds the longest stored prefix of a prompt, restores it into KV
arrays of the final shape, and cuts a running request's state into blocks to store. The bytes are
the block store's affair, who holds what the PagedCacheManager's.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from omlx.arrays import ArrayPool
from omlx.cache.block import TOKEN_BYTES, block_hash, pack_tokens, slice_tokens
from omlx.cache.companions import Companion, WindowStages, companion_names, companions_of, state_name, window_name
from omlx.cache.conversation import Conversation, Forgotten, forget
from omlx.cache.grid import ExactMode, PrefillGrid
from omlx.cache.interface import BlockMeta, CacheManager, ChainPlace, ReadTarget
from omlx.cache.layer_state import KVSlabs, extract, held_windows, snapshot
from omlx.cache.paged_cache import PagedCacheManager
from omlx.cache.prefix_search import (
    CELLS,
    DECODED,
    CacheIdentity,
    Found,
    MatchedBlock,
    PrefixSearch,
    Sought,
    exact_upto,
    names,
)
from omlx.cache.probe import BlockState, FirstMiss, MatchEnd, PrefixProbe
from omlx.cache.reading import BlockRead, BlockReaders, RestoreTooSlow, Worth
from omlx.fair_share import Group
from omlx.metrics import RestoreTime
from omlx.request import ImageStart
from omlx.storage.tensor_file import BlockBuffer, with_size

__all__ = [
    "SNAPSHOT_BYTES_PER_TOKEN", "BlockAwarePrefixCache", "CacheIdentity", "PrefixCache", "PrefixMatch", "Restored",
    "StoredPart",
]  # fmt: skip

log = logging.getLogger(__name__)

_IDLE_SLAB_BYTES = 512 << 20  # what may stay of the slabs of earlier restores, for the next one
# A recurrent state is as large as hundreds of tokens of KV: it is kept at so few places that it adds this much a token.
SNAPSHOT_BYTES_PER_TOKEN = 64 << 10


class PrefixMatch(NamedTuple):
    """What is stored of a prompt: `tokens` leading tokens in `blocks`, all pinned.

    Up to position `exact_upto` the values are those of a prefill in whole grid cells. `mode` is what
    it was found by. `companions` hold what a window or a recurrent state adds at its end, and only there.
    """

    request_id: str
    blocks: tuple[MatchedBlock, ...]
    tokens: int
    exact_upto: int
    mode: ExactMode
    companions: tuple[Companion, ...] = ()


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
    request carries on; `cold`, the full blocks that were read from files, and `cold_companions`;
    `avoid`, the names of what could not be read.
    """

    sought: Sought
    root: bytes
    stages: WindowStages
    hashes: list[bytes]
    cuts: set[int] = field(default_factory=set)
    cold: list[int] = field(default_factory=list)
    cold_companions: list[bytes] = field(default_factory=list)
    avoid: set[bytes] = field(default_factory=set)

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
        snapshot_bytes_per_token: int = SNAPSHOT_BYTES_PER_TOKEN,
    ) -> None:
        self.block_size = block_size
        self.exact = exact
        self._paged = paged_cache
        self._store = store
        self._identity = identity
        PrefillGrid(block_size)  # refuses sizes that it cannot cut
        self._chains: dict[str, _Chain] = {}
        self._slabs = ArrayPool(_IDLE_SLAB_BYTES)
        self._readers = BlockReaders()
        self._snapshot_every = self._snapshot_step(snapshot_bytes_per_token)
        self._bytes_per_block = (0, 0) if identity is None else self._stored_bytes(identity)

    def _snapshot_step(self, bytes_per_token: int) -> int:
        """Tokens between two snapshots of recurrent states, a multiple of the block size; 0 if there are none."""
        if self._identity is None or not self._identity.layout.states:
            return 0
        blocks = self._identity.layout.state_bytes / max(1, bytes_per_token) / self.block_size
        return max(1, math.ceil(blocks)) * self.block_size

    def _stored_bytes(self, identity: CacheIdentity) -> tuple[int, int]:
        """What a full block and all beside it take on average: payload, and files."""
        layout, size = identity.layout, self.block_size
        meta = BlockMeta(bytes(32), size, bytes(32), bytes(size * TOKEN_BYTES), numerics=identity.numerics)
        parts = [layout.specs(size), *(group.specs(size) for group in layout.windows)]
        payload = sum(spec.nbytes for specs in parts for spec in specs)
        file = sum(with_size(specs, meta).file_size for specs in parts)
        if layout.states:
            blocks = self._snapshot_every // size
            payload += layout.state_bytes // blocks
            file += with_size(layout.state_specs, meta).file_size // blocks
        return payload, file

    @property
    def _who(self) -> CacheIdentity:
        if self._identity is None:
            raise ValueError("this prefix cache was built without a model: only save_block and load_block work")
        return self._identity

    # ---- what do you have for these tokens?

    def match(
        self,
        request_id: str,
        prompt: Sequence[int],
        salt: str = "",
        *,
        resumes: bool = False,
        images: Sequence[ImageStart] = (),
        tenant: str = "",
    ) -> PrefixMatch:
        """The longest stored prefix of `prompt` that leaves at least one token to compute.

        Its blocks are pinned until `release(request_id)`. `resumes`: the prompt is that of a paused
        request with its answer so far, which continues from its own state, wherever it was cut. `images` begin in
        the prompt, which has ids made of their digests in their places (see `Request.cache_tokens`). What the request
        uses and stores counts for `tenant`.
        """
        sought = _sought(prompt, salt, images)._replace(resumes=resumes, tenant=tenant)
        return self._take(request_id, sought, set())

    @property
    def _search(self) -> PrefixSearch:
        return PrefixSearch(self._store, self._who, self.block_size, self.exact)

    def _take(self, request_id: str, sought: Sought, avoid: set[bytes]) -> PrefixMatch:
        """Finds what is stored, without what is in `avoid`, and pins it."""
        found = self._search.longest(sought, avoid)
        stages = WindowStages(self._who.layout, self.block_size, found.end)
        self._chains[request_id] = chain = _Chain(sought, found.root, stages, list(found.hashes), avoid=avoid)
        metas = [block.meta for block in found.blocks] + [companion.meta for companion in found.companions]
        self._hold_all(request_id, [meta.block_hash for meta in metas])
        for block in found.blocks[len(chain.hashes) :]:
            chain.cuts.update(block.start + cut for cut in block.meta.cuts if cut <= block.take)
        mode = self._search.mode(sought)
        exact = exact_upto(found.blocks)
        return PrefixMatch(request_id, tuple(found.blocks), found.end, exact, mode, tuple(found.companions))

    def stored_tokens(self, prompt: Sequence[int], salt: str = "", images: Sequence[ImageStart] = ()) -> int:
        """How many tokens `match` would give now. Pins, marks and counts nothing."""
        return self._search.longest(_sought(prompt, salt, images)).end

    def parts(self, match: PrefixMatch) -> list[StoredPart]:
        """A match block by block, for who may want less of it (see `shorten`).

        In the exact modes it may end behind whole cells only: then the bits are those of a cold prefill. What
        decoding left is taken whole or not at all; so is a match that has companions, which belong to its end.
        """
        exact = len(list(takewhile(lambda block: block.exact, match.blocks)))
        pieces = [(block.end, block.meta) for block in match.blocks]
        pieces += [(match.tokens, companion.meta) for companion in match.companions]
        found = []
        for i, (end, meta) in enumerate(pieces):
            tier: Literal["ram", "ssd"] = "ssd" if self._store.tier_of(meta.block_hash) == "ssd" else "ram"
            anywhere = self._who.layout.cut_anywhere and (match.mode == "off" or i < exact)
            found.append(StoredPart(end, tier, meta.file_size, anywhere or i == len(pieces) - 1))
        return found

    def shorten(self, match: PrefixMatch, end: int) -> PrefixMatch:
        """The match cut behind a block that ends at `end` (see `parts`; 0 for nothing); the rest is let go of."""
        blocks = tuple(block for block in match.blocks if block.end <= end)
        self._forget_after(match, end)
        companions = match.companions if end == match.tokens else ()
        exact_upto = min(match.exact_upto, end)
        return match._replace(blocks=blocks, tokens=end, exact_upto=exact_upto, companions=companions)

    # ---- what would you have? (from any thread)

    def probe(self, prompt: Sequence[int], salt: str = "", images: Sequence[ImageStart] = ()) -> PrefixProbe:
        """What `match` would give for `prompt` now, block by block, and why not more.

        Pins, marks and counts nothing. May look through all that is stored, if nothing of the prompt is.
        """
        if len(prompt) == 0:
            return PrefixProbe((), 0, None)
        try:
            return self._probe(prompt, salt, images)
        # As in a request: an error of the cache is a miss.
        except Exception as error:
            log.exception("prefix cache failed in a probe")
            return PrefixProbe((), 0, FirstMiss(0, f"the cache could not be searched ({type(error).__name__})"))

    def _probe(self, prompt: Sequence[int], salt: str, images: Sequence[ImageStart]) -> PrefixProbe:
        sought = _sought(prompt, salt, images)
        packed, limit = sought.packed, sought.limit
        found = self._search.longest(sought)
        cached, miss = found.end, None
        if cached < limit:
            start = len(found.hashes) * self.block_size
            parent = found.hashes[-1] if found.hashes else found.root
            end = MatchEnd(
                self._store, self._who, self.block_size, salt, parent, start, cached - start,
                slice_tokens(packed, start, limit), self._search.usable, partial(_names, sought),
                self._store.declines(self._place_in(start // self.block_size, len(prompt))),
            )  # fmt: skip
            miss = end.first_miss()
        return PrefixProbe(tuple(self._states(sought, found)), cached, miss)

    def _states(self, sought: Sought, found: Found) -> Iterator[BlockState]:
        """Every block of the prompt; behind the match under the name that a prefill would store it by."""
        packed, parent, matched = sought.packed, found.root, found.blocks
        for index, at in enumerate(range(0, len(packed), self.block_size * TOKEN_BYTES)):
            tokens = packed[at : at + self.block_size * TOKEN_BYTES]
            name, take = self._stored_name(_names(sought, parent, at // TOKEN_BYTES, tokens)), 0
            parent = found.hashes[index] if index < len(found.hashes) else name
            if index < len(matched):
                name, take = matched[index].meta.block_hash, matched[index].take
            state = self._store.tier_of(name) or "absent"
            yield BlockState(index, name, len(tokens) // TOKEN_BYTES, take, state)

    def _stored_name(self, known: Sequence[bytes]) -> bytes:
        return next((name for name in known if self._store.contains(name)), known[0])

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
        while match.blocks:
            slabs = KVSlabs(self._who.layout, max(capacity, match.tokens), self._slabs, end=match.tokens)
            reads = self._reads(match, slabs)
            try:
                # All blocks are read, also behind one that is damaged, so that all such are stored again at once.
                read = self._readers.read(list(reads.values()), worth)
            except RestoreTooSlow:
                self._forget_after(match, 0)
                raise
            tiers = dict(zip(reads, read, strict=True))
            lost = [name for name, tier in tiers.items() if tier is None]
            if not lost or self._who.layout.cut_anywhere:
                return self._restored(match, slabs, tiers)
            match = self._match_without(match, lost)  # another end needs other companions
        return None

    def _match_without(self, match: PrefixMatch, lost: Sequence[bytes]) -> PrefixMatch:
        """Matches again, as if what was lost were not stored."""
        chain = self._chains[match.request_id]
        self._forget_after(match, 0)
        return self._take(match.request_id, chain.sought, chain.avoid | set(lost))

    def _restored(self, match: PrefixMatch, slabs: KVSlabs, tiers: Mapping[bytes, str | None]) -> Restored | None:
        """The caches over what was read; `tiers` says where each block was, None for those that are gone."""
        blocks = self._unbroken(match, tiers)
        end = blocks[-1].end if blocks else 0
        self._forget_after(match, end)
        if not end:
            return None
        chain = self._chains[match.request_id]
        chain.cold_companions = [name for c in match.companions if tiers[name := c.meta.block_hash] == "ssd"]
        beside = "ssd" if chain.cold_companions else "ram"  # of a block that is empty itself
        tokens = {"ram": 0, "ssd": 0}
        for block in blocks:
            tier = tiers.get(block.meta.block_hash, beside)
            tokens[str(tier)] += block.take
            if tier == "ssd" and block.take == self.block_size and self._who.layout.parts:
                chain.cold.append(block.start // self.block_size)
        return Restored(slabs.caches(end), end, min(match.exact_upto, end), tokens["ram"], tokens["ssd"])

    def _reads(self, match: PrefixMatch, slabs: KVSlabs) -> dict[bytes, BlockRead]:
        """What has to be read for a match, by name; blocks without tensors have nothing to read."""
        reads: dict[bytes, BlockRead] = {}

        def add(meta: BlockMeta, start: int, target: Callable[[], ReadTarget]) -> None:
            call = partial(self._read, meta.block_hash, target)
            reads[meta.block_hash] = BlockRead(start, meta.file_size, call)

        if self._who.layout.parts:
            for block in match.blocks:
                add(block.meta, block.start, partial(slabs.target, block.start, block.take, block.meta.token_count))
        # Without its companions nothing of a match is of use: what they spare is all of it.
        for companion in match.companions:
            if companion.window is None:
                add(companion.meta, 0, slabs.state_target)
            else:
                window, tokens, moves = companion.window, companion.tokens, companion.moves
                add(companion.meta, 0, partial(slabs.window_target, window, tokens, moves))
        return reads

    def _read(self, name: bytes, target: Callable[[], ReadTarget]) -> str | None:
        return self._store.read_block(name, target())

    def _unbroken(self, match: PrefixMatch, tiers: Mapping[bytes, str | None]) -> list[MatchedBlock]:
        """The blocks before the first that could not be read, as far as they may be used without it."""
        blocks = list(takewhile(lambda block: tiers.get(block.meta.block_hash, "empty"), match.blocks))
        broken = len(blocks) < len(match.blocks)
        if broken and match.mode == "on" and self._search.ends_before_the_answer(blocks, limit=-1):
            return list(takewhile(lambda block: block.exact, blocks))
        return blocks

    def _forget_after(self, match: PrefixMatch, end: int) -> None:
        """Lets go of matched blocks that could not be read, so that they are stored again."""
        chain = self._chains[match.request_id]
        del chain.hashes[end // self.block_size :]
        chain.stages = WindowStages(self._who.layout, self.block_size, end)
        chain.cuts = {cut for cut in chain.cuts if cut <= end}
        for block in match.blocks:
            if block.start >= end:
                self._let_go(match.request_id, block.meta.block_hash)
        for companion in match.companions if end < match.tokens else ():
            self._let_go(match.request_id, companion.meta.block_hash)

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
        ends = final or prefill_end is not None
        if prefill_end is not None:
            run.chain.cuts.add(prefill_end)
        if self._who.layout.windows:
            run.chain.stages.take(held_windows(self._who.layout, caches), len(tokens))
        if final and self._store.keeps_ram:
            self._promote(run)
        for index in range(len(run.chain.hashes), len(tokens) // self.block_size):
            run.chain.hashes.append(self._save_new(run, index))
        last = run.chain.parent(len(run.chain.hashes))
        if ends and len(tokens) % self.block_size:
            last = self._save_new(run, len(run.chain.hashes))
            self._hold(request_id, last)
        if self._who.layout.states and (ends or self._is_snapshot_place(run)):
            snap = partial(snapshot, self._who.layout, caches)
            index = (len(tokens) - 1) // self.block_size
            self._save_companion(run, index, last, state_name(last), len(tokens), snap)

    def _promote(self, run: "_Run") -> None:
        """Puts what was read from files back into RAM; companions in the background: caches hold them no longer."""
        for index in run.chain.cold:
            self._save(run, run.chain.hashes[index], index, as_read=True)
        self._readers.later([partial(self._store.restore_block, name) for name in run.chain.cold_companions])
        run.chain.cold_companions = []

    def chunk_end(self, request_id: str, position: int) -> int | None:
        """Where the next chunk of a prefill should end at the latest, so that a recurrent state can be kept there."""
        if not self._snapshot_every:
            return None
        regular = (position // self._snapshot_every + 1) * self._snapshot_every
        last = self._last_full(self._chains[request_id])
        return min(regular, last) if last > position else regular

    def _is_snapshot_place(self, run: "_Run") -> bool:
        position = len(run.tokens)
        return position % self._snapshot_every == 0 or position == self._last_full(run.chain)

    def _last_full(self, chain: _Chain) -> int:
        """The end of the prompt's last full block: where prompts part that have the most in common with this one."""
        return chain.sought.limit // self.block_size * self.block_size

    def _save_new(self, run: "_Run", index: int) -> bytes:
        whole = self.exact == "off" or run.exact_upto >= self._stop(run, index)
        pictures = run.chain.sought.pictures(index * self.block_size, self._stop(run, index))
        name = block_hash(run.chain.parent(index), self._packed(run, index), (CELLS if whole else DECODED) + pictures)
        self._save(run, name, index)
        return name

    def _stop(self, run: "_Run", index: int) -> int:
        return min((index + 1) * self.block_size, len(run.tokens))

    def _packed(self, run: "_Run", index: int) -> bytes:
        start = index * self.block_size
        return pack_tokens(run.tokens[start : start + self.block_size])

    def _save(self, run: "_Run", name: bytes, index: int, *, as_read: bool = False) -> None:
        """Saves block `index` unless the store has it already, at least as good. `as_read`: this is what it has."""
        start = index * self.block_size
        stop = self._stop(run, index)
        beside = list(run.chain.stages.of(index, stop))  # in any case, or they would stay as long as the request
        exact = min(max(run.exact_upto - start, 0), stop - start)
        cuts = tuple(sorted(cut - start for cut in run.chain.cuts if start < cut <= stop))
        known = self._store.get_meta(name)
        stale = known is not None and not self._search.usable(known)
        worse = known is not None and not (stale or as_read or self._as_good(known, exact, cuts))
        if known is None or stale or (not worse and self._lacks_ram(name)):
            saved = self._store.save_block(
                name,
                extract(self._who.layout, run.caches, start, stop),
                stop - start,
                parent=run.chain.parent(index),
                tokens=self._packed(run, index),
                start=start,
                exact_tokens=exact,
                cuts=cuts,
                numerics=self._who.numerics,
                group=run.group,
                replace=stale,
                place=self._place(run, index),
            )
            if not saved:
                return
        self._hold(run.request_id, name)
        for group, first, tokens in beside if not worse else ():
            self._save_companion(run, index, name, window_name(name, group), first, partial(_given, tokens))
        self._drop_covered(run, name, self._packed(run, index))

    def _place(self, run: "_Run", index: int) -> ChainPlace:
        """Where block `index` ends in what the request stores: its prompt, and its answer so far."""
        return self._place_in(index, max(len(run.tokens), run.chain.sought.limit + 1))

    def _place_in(self, index: int, tokens: int) -> ChainPlace:
        payload, file = self._bytes_per_block
        size = self.block_size
        return ChainPlace((index + 1) * payload, (index + 1) * file, tokens * payload // size, tokens * file // size)

    def _as_good(self, known: BlockMeta, exact: int, cuts: tuple[int, ...]) -> bool:
        """Whether what is known of a stored block is true of this state as well: the store keeps the one for the other.

        Of whole cells all is, in the exact modes: they have the same bits wherever a prefill ended.
        """
        if known.numerics != self._who.numerics:
            return False
        resumable = known.exact_tokens <= exact and set(known.cuts) <= set(cuts)
        return self.exact == "off" or exact == known.token_count or resumable

    def _lacks_ram(self, name: bytes) -> bool:
        """Whether a stored block should be put back into RAM."""
        return self._store.keeps_ram and self._store.tier_of(name) == "ssd"

    def _save_companion(
        self, run: "_Run", index: int, block: bytes, name: bytes, start: int, data: Callable[[], BlockBuffer]
    ) -> None:
        """Saves what goes from position `start` to block `index`'s end, unless the store has it at least as good."""
        if self._store.get_meta(block) is None:
            return  # it fitted no tier
        known = self._store.get_meta(name)
        worse = known is not None and (known.start > start or not self._search.usable(known))
        if known is None or worse or (known.start == start and self._lacks_ram(name)):
            saved = self._store.save_block(
                name, data(), 0, parent=companions_of(block), start=start, numerics=self._who.numerics,
                group=run.group, replace=worse, place=self._place(run, index),
            )  # fmt: skip
            if not saved:
                return
        self._hold(run.request_id, name)

    def _drop_covered(self, run: "_Run", name: bytes, tokens: bytes) -> None:
        """Deletes tails that the block contains: same tokens, and every place to resume them."""
        new = self._store.get_meta(name)
        for old in self._store.children(new.parent, tokens) if new else ():
            shorter = new is not None and old.token_count < new.token_count and tokens.startswith(old.tokens or b"")
            if new and shorter and self._covers(new, old):
                for gone in (old.block_hash, *companion_names(self._who.layout, old.block_hash)):
                    self._let_go(run.request_id, gone)
                    if not self._paged.holders(gone):
                        self._store.delete_block(gone)

    def _covers(self, new: BlockMeta, old: BlockMeta) -> bool:
        resumable = old.exact_tokens <= new.exact_tokens and set(old.cuts) <= set(new.cuts)
        if self.exact != "off" and not (resumable and old.numerics == new.numerics):
            return False
        return self._covers_beside(new, old)

    def _covers_beside(self, new: BlockMeta, old: BlockMeta) -> bool:
        """Whether nothing of the old block's companions would be lost; a recurrent state is nowhere else."""
        layout = self._who.layout
        if layout.states and self._store.contains(state_name(old.block_hash)):
            return False
        for group in layout.windows:
            had = self._store.get_meta(window_name(old.block_hash, group))
            has = self._store.get_meta(window_name(new.block_hash, group))
            if had is not None and (has is None or has.start > had.start):
                return False
        return True

    # ---- holding and letting go

    def _hold_all(self, request_id: str, names: Sequence[bytes]) -> None:
        self._store.pin_all(self._paged.acquire_all(request_id, names))

    def _hold(self, request_id: str, name: bytes) -> None:
        self._hold_all(request_id, [name])

    def _let_go(self, request_id: str, name: bytes) -> None:
        if self._paged.drop(request_id, name):
            self._store.unpin(name)

    def release(self, request_id: str) -> None:
        """Unpins the request's blocks and marks them used, heads most recently."""
        chain = self._chains.pop(request_id, None)
        table = self._paged.hashes(request_id)
        self._store.unpin_all(self._paged.release(request_id))
        if chain is not None:
            self._store.touch(self._tails_first(chain, table), chain.sought.tenant)
        try:
            self._slabs.settle()
        except Exception:
            self._slabs.clear()  # or every release would meet the same arrays
            raise

    def _tails_first(self, chain: _Chain, table: Sequence[bytes]) -> list[bytes]:
        """The request's blocks in the order in which they may be evicted, a block's companions just before it.

        A chain is only as useful as its head, and of no use behind the last place that has its companions.
        """
        held, order = dict.fromkeys(table), list[bytes]()
        for block in reversed(chain.hashes):
            order += [name for name in companion_names(self._who.layout, block) if name in held]
            order.append(block)
        ordered = set(order)
        return [name for name in held if name not in ordered] + order

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


def _given(block: BlockBuffer) -> BlockBuffer:
    return block


def _sought(prompt: Sequence[int], salt: str, images: Sequence[ImageStart]) -> Sought:
    """All of a prompt but its last token."""
    return Sought(pack_tokens(prompt), len(prompt) - 1, salt, images=tuple(images))


def _names(sought: Sought, parent: bytes, start: int, tokens: bytes) -> list[bytes]:
    """What a block of a prompt may be called that has these tokens from position `start` on."""
    return names(parent, tokens, sought.pictures(start, start + len(tokens) // TOKEN_BYTES))


class _Run(NamedTuple):
    """One request's state at the moment of storing."""

    request_id: str
    chain: _Chain
    tokens: Sequence[int]
    caches: Sequence[Any]
    exact_upto: int

    @property
    def group(self) -> Group:
        return Group(self.request_id, self.chain.sought.tenant)
