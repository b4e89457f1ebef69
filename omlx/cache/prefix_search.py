"""Finds the longest stored prefix of a prompt. Changes nothing in the store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from omlx.cache.block import block_hash, block_hashes, common_tokens, root_hash, slice_tokens, sure_tokens
from omlx.cache.companions import Companion, companions_at_end
from omlx.cache.grid import ExactMode, PrefillGrid
from omlx.cache.interface import BlockMeta, CacheManager
from omlx.cache.layer_state import CacheLayout
from omlx.request import ImageStart

FORMAT = "1"
# Blocks that hold more than whole grid cells have names of their own, and so do all that build on
# them: what a prompt's prefill gives and what an answer's decoding left never replace each other.
CELLS, DECODED = b"", b"decoded"
_FIRST_BATCH, _MORE = 32, 4  # blocks looked up at once, and how many times more the next time


def names(parent: bytes, tokens: bytes, pictures: bytes = b"") -> list[bytes]:
    """What the block with these tokens may be called; `pictures`: see `Sought.pictures`."""
    return [block_hash(parent, tokens, lineage + pictures) for lineage in (CELLS, DECODED)]


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Everything but the tokens that decides whether KV values may be reused.

    `fingerprint` names the weights by content. `numerics` names what changes only the last bits
    (device, versions, BLAS and its threads, prefill grid): it is kept with each block and compared
    in the exact modes, but it is not part of the hash, so `off` can use such blocks. `cut_anywhere`: whether prefill
    gives equal bits wherever it is cut, so that no grid is needed.
    """

    fingerprint: bytes
    layout: CacheLayout
    numerics: str
    cut_anywhere: bool = False

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


class Sought(NamedTuple):
    """What is looked for: the first `limit` of some packed tokens, in the world that `salt` names.

    `resumes`: they are the text of a paused request with its answer so far, which continues from its own
    state, wherever it was cut. `images` begin in it, in this order. `tenant` decides nothing here: what the request
    stores counts for it.
    """

    packed: bytes
    limit: int
    salt: str
    resumes: bool = False
    images: tuple[ImageStart, ...] = ()
    tenant: str = ""

    def pictures(self, start: int, stop: int) -> bytes:
        """What a block of the tokens [start, stop) has in its name: the digests of the images that begin there."""
        return b"".join(image.digest for image in self.images if start <= image.position < stop)


class Found(NamedTuple):
    """The stored `blocks` of a prompt: `hashes` of the full ones in a row, and perhaps a part of one more.

    `companions` are what has to be read beside them to go on behind the last one.
    """

    root: bytes
    hashes: list[bytes]
    blocks: list[MatchedBlock]
    companions: list[Companion]

    @property
    def end(self) -> int:
        """Tokens."""
        return self.blocks[-1].end if self.blocks else 0


@dataclass(slots=True)
class _Walk:
    """One search on its way: `hashes` of the full blocks so far; blocks in `avoid` count as gone."""

    sought: Sought
    mode: ExactMode
    root: bytes
    avoid: frozenset[bytes]
    hashes: list[bytes] = field(default_factory=list)

    @property
    def parent(self) -> bytes:
        return self.hashes[-1] if self.hashes else self.root


class PrefixSearch:
    """Looks for prefixes in the store of one model. From any thread."""

    def __init__(self, store: CacheManager, identity: CacheIdentity, block_size: int, exact: ExactMode) -> None:
        self._store = store
        self._who = identity
        self._block_size = block_size
        self._exact = exact
        self._grid = None if identity.cut_anywhere else PrefillGrid(block_size)

    def mode(self, sought: Sought) -> ExactMode:
        """What decides where the match may end."""
        return "off" if sought.resumes else self._exact

    def usable(self, meta: BlockMeta) -> bool:
        """Whether a block's numerics allow its use."""
        return self._exact == "off" or meta.numerics == self._who.numerics

    def longest(self, sought: Sought, avoid: Iterable[bytes] = ()) -> Found:
        """The longest match: walks back from the last full block in a row to a place that can be gone on from."""
        root = self._who.root(self._block_size, sought.salt)
        walk = _Walk(sought, self.mode(sought), root, frozenset(avoid))
        full = self._full_blocks(walk)
        while full:
            found = self._best_end(walk, full)
            if found is not None:
                return found
            full.pop()
            walk.hashes.pop()
        return self._best_end(walk, []) or Found(root, [], [], [])

    def _best_end(self, walk: _Walk, full: list[MatchedBlock]) -> Found | None:
        """The longest match that has just these full blocks, and perhaps a part of one more."""
        for tail in (*self._tails(walk), None):
            blocks = [*full, tail] if tail else full
            if not blocks:
                return None
            beside = companions_at_end(self._who.layout, blocks, self._block_size, lambda name: self._meta(walk, name))
            if beside is not None and not (
                walk.mode == "on" and self.ends_before_the_answer(blocks, walk.sought.limit)
            ):
                return Found(walk.root, walk.hashes, blocks, beside)
        return None

    def _full_blocks(self, walk: _Walk) -> list[MatchedBlock]:
        """The full blocks that are stored, one after the other. Lineages come in long runs."""
        blocks: list[MatchedBlock] = []
        lineages = [CELLS] if walk.mode == "strict" else [CELLS, DECODED]
        while any(self._run(walk, blocks, lineage) for lineage in lineages):
            lineages.reverse()  # the one whose run has ended comes last
        return blocks

    def _run(self, walk: _Walk, blocks: list[MatchedBlock], lineage: bytes) -> bool:
        """Adds the stored blocks of one lineage that come next. False if there is none.

        Many are looked up at once, which is much faster for each; first a few, since most prompts end soon.
        """
        size, found, batch = self._block_size, len(blocks), _FIRST_BATCH
        packed = slice_tokens(walk.sought.packed, found * size, walk.sought.limit)
        begin = {(image.position // size) - found for image in walk.sought.images}
        more = {at: walk.sought.pictures((found + at) * size, (found + at + 1) * size) for at in begin if at >= 0}
        waiting = block_hashes(walk.parent, packed, size, lineage, more)
        while wanted := list(islice(waiting, batch)):
            metas = self._usable_run(walk, self._store.get_metas(wanted))
            walk.hashes += wanted[: len(metas)]
            start = len(blocks) * size
            blocks += [MatchedBlock(meta, at, size) for meta, at in zip(metas, count(start, size), strict=False)]
            if len(metas) < len(wanted):
                break
            batch *= _MORE
        return len(blocks) > found

    def _usable_run(self, walk: _Walk, metas: Sequence[BlockMeta | None]) -> list[BlockMeta]:
        """The blocks before the first that is not stored or may not be used."""
        run: list[BlockMeta] = []
        for meta in metas:
            if meta is None or meta.block_hash in walk.avoid or not self.usable(meta):
                break
            run.append(meta)
        return run

    def _meta(self, walk: _Walk, name: bytes) -> BlockMeta | None:
        return next(iter(self._usable_run(walk, [self._store.get_meta(name)])), None)

    def _tails(self, walk: _Walk) -> list[MatchedBlock]:
        """Parts of blocks that come next and have some of the remaining tokens, longest first."""
        start = len(walk.hashes) * self._block_size
        wanted = slice_tokens(walk.sought.packed, start, walk.sought.limit)
        found: dict[tuple[bytes, int], MatchedBlock] = {}
        for meta in self._store.children(walk.parent, wanted):
            if meta.block_hash not in walk.avoid and self.usable(meta):
                shared = sure_tokens(wanted, common_tokens(meta.tokens or b"", wanted))
                takes = self._valid_ends(meta, shared, start + shared == walk.sought.limit, walk.mode)
                found |= {(meta.block_hash, take): MatchedBlock(meta, start, take) for take in takes if take > 0}
        return sorted(found.values(), key=lambda block: (-block.take, not block.exact))

    def _valid_ends(self, meta: BlockMeta, shared: int, at_limit: bool, mode: ExactMode) -> list[int]:
        """How many of a block's first `shared` tokens may be used, as far as that depends on this block alone."""
        takes = [self._valid_end(meta, shared, at_limit, mode)]
        if mode == "on":
            takes.append(self._valid_end(meta, shared, at_limit, "strict"))
        if mode != "strict" and not self._who.layout.cut_anywhere and shared == meta.token_count:
            takes.append(shared)  # the end of an answer: its state is there, perhaps nowhere else
        return takes

    def _valid_end(self, meta: BlockMeta, shared: int, at_limit: bool, mode: ExactMode) -> int:
        """How many of a block's first `shared` tokens may be used.

        In the exact modes a match ends on a grid edge, so that what follows is cut as in a cold
        prefill; or where the prefill of an identical prompt ended, whose last cell was cut there.
        """
        if mode == "off":
            return shared
        if at_limit and shared in meta.cuts and (mode == "on" or self._floor(meta, shared) <= meta.exact_tokens):
            return shared
        if mode == "strict":
            shared = min(shared, meta.exact_tokens)
        return self._floor(meta, shared)

    def _floor(self, meta: BlockMeta, tokens: int) -> int:
        """The most of a block's first `tokens` tokens that prefill may be cut behind."""
        return tokens if self._grid is None else self._grid.floor(meta.start + tokens) - meta.start

    def ends_before_the_answer(self, blocks: Sequence[MatchedBlock], limit: int) -> bool:
        """Whether a match uses what no cold prefill would give without being a turn of a conversation.

        Such values are a prompt's last, cut cell, its last token (computed alone), and its answer
        (from decode). They may be used where the answer is a part of the new prompt, since that
        really continues from this state, and for an identical prompt.
        """
        first = _first_inexact(blocks)
        if first is None:
            return False
        end = blocks[-1].end
        prefill_end = min((c for c in first.meta.cuts if c >= first.meta.exact_tokens), default=first.meta.exact_tokens)
        repeats = end == limit and first is blocks[-1] and first.take in first.meta.cuts
        return not repeats and end <= first.start + prefill_end + 1


def _first_inexact(blocks: Iterable[MatchedBlock]) -> MatchedBlock | None:
    """The first block of which more is used than whole grid cells."""
    for block in blocks:
        if block.take > block.meta.exact_tokens:  # written out: there may be thousands
            return block
    return None


def exact_upto(blocks: Sequence[MatchedBlock]) -> int:
    """Up to this position the values are those of a prefill in whole grid cells."""
    first = _first_inexact(blocks)
    if first is not None:
        return first.start + first.meta.exact_tokens
    return blocks[-1].end if blocks else 0
