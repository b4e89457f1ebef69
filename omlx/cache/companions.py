"""Companions: what is stored beside a block of a model whose layers cannot all be cut anywhere.

A block proper holds the layers that can. Beside it, in blocks of their own that come and go on their
own, lie the tokens of each sliding window, and at some places the recurrent states at the block's
end. To go on behind position P takes all blocks before P, of a window's companions those that cover its last
tokens, and the states at P itself. So a restore reads no more than the model needs.

A companion's name is made of its block's name, and so is its `parent`, which is no block: among a block's
children are blocks proper only. It counts no tokens of its own (`tokens` and `token_count` are empty);
`start` is the position from which on it has what it holds, up to the block's end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from omlx.cache.block import block_hash
from omlx.cache.interface import BlockMeta
from omlx.cache.layer_state import CacheLayout, HeldWindow, Move, WindowGroup, part_of
from omlx.storage.tensor_file import BlockBuffer

_STATE = b"state"


class Stretch(Protocol):
    """A stored block of which the tokens up to position `end` are used (see MatchedBlock)."""

    @property
    def meta(self) -> BlockMeta: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Companion(NamedTuple):
    """One that has to be read: `moves` say which tokens of a window (its number) go where; None: the states."""

    meta: BlockMeta
    window: int | None
    tokens: int
    moves: tuple[Move, ...]


def companions_of(block: bytes) -> bytes:
    """What a block's companions have as their parent."""
    return block_hash(block, b"", b"companions")


def state_name(block: bytes) -> bytes:
    """The companion with the recurrent states at the end of a block."""
    return block_hash(block, b"", _STATE)


def window_name(block: bytes, group: WindowGroup) -> bytes:
    """The companion with a window's tokens of a block."""
    return block_hash(block, b"", str(group).encode())


def companion_names(layout: CacheLayout, block: bytes) -> list[bytes]:
    """All that a block may have."""
    names = [window_name(block, group) for group in layout.windows]
    return [*names, state_name(block)] if layout.states else names


Look = Callable[[bytes], BlockMeta | None]


def companions_at_end(
    layout: CacheLayout, blocks: Sequence[Stretch], block_size: int, look: Look
) -> list[Companion] | None:
    """What has to be read beside `blocks` to go on behind the last one; None if not all of it is stored.

    `look` gives the metadata of a block that may be used.
    """
    found: list[Companion] = []
    if layout.states:
        last = blocks[-1]
        meta = look(state_name(last.meta.block_hash)) if last.end == _end(last.meta) else None
        if meta is None:
            return None
        found.append(Companion(meta, None, 0, ()))
    for number, group in enumerate(layout.windows):
        window = list(_window(number, group, blocks, block_size, look))
        if not all(window):
            return None
        found += [companion for companion in window if companion]
    return found


def _window(
    number: int, group: WindowGroup, blocks: Sequence[Stretch], block_size: int, look: Look
) -> Iterator[Companion | None]:
    """The companions that cover what a window needs, from the last one back; None for one that is missing."""
    end = blocks[-1].end
    runs = group.needs(end)
    indices = {i for start, stop in runs for i in range(start // block_size, -(-stop // block_size))}
    for index in sorted(indices, reverse=True):
        block = blocks[index]
        wanted = [(max(start, block.start), min(stop, block.end)) for start, stop in runs]
        wanted = [(start, stop) for start, stop in wanted if start < stop]
        meta = look(window_name(block.meta.block_hash, group))
        if meta is None or meta.start > wanted[0][0]:
            yield None
            return
        moves = tuple(Move(a - meta.start, _slot(group, end, a), b - a) for a, b in wanted)
        yield Companion(meta, number, _end(block.meta) - meta.start, moves)


def _slot(group: WindowGroup, end: int, position: int) -> int:
    """Where a token lies in a window that is in order, when the text has `end` tokens."""
    if end <= group.size or position < group.keep:
        return position
    return position - (end - group.size)


def _end(meta: BlockMeta) -> int:
    return meta.start + meta.token_count


# ---- taking windows while their tokens are there


@dataclass(slots=True)
class _Stage:
    """A window's tokens [first, end) of one block, so far."""

    block: BlockBuffer
    first: int
    end: int


class WindowStages:
    """Collects the windows' tokens of one running request, chunk by chunk, before the rings give them up."""

    def __init__(self, layout: CacheLayout, block_size: int, at: int = 0) -> None:
        self._groups = layout.windows
        self._block_size = block_size
        self._at = at
        self._stages: dict[tuple[int, int], _Stage] = {}

    def take(self, held: Sequence[HeldWindow], end: int) -> None:
        """Copies what is new up to position `end`; of the block at work also what the rings still have from before."""
        size = self._block_size
        for number, window in enumerate(held):
            for index in range(self._at // size, -(-end // size)):
                self._fill(number, index, window, min((index + 1) * size, end))
        self._at = end

    def _fill(self, number: int, index: int, window: HeldWindow, stop: int) -> None:
        start = index * self._block_size
        first = max(start, window.first)
        stage = self._stages.get((number, index))
        if stage is None:
            if first >= stop:
                return
            stage = _Stage(BlockBuffer.empty(self._groups[number].specs(self._block_size)), first, first)
            self._stages[number, index] = stage
        elif first > stage.end:  # what lies between was given up meanwhile
            stage.first = stage.end = min(first, stop)
        if stage.end < stop:
            window.copy(stage.block, stage.end - start, stage.end, stop)
            stage.end = stop

    def of(self, index: int, stop: int) -> Iterator[tuple[WindowGroup, int, BlockBuffer]]:
        """For each window what there is of block `index` up to position `stop`: (group, first position, tokens).

        A full block's are given away, and may be taken once.
        """
        size = self._block_size
        start = index * size
        for number, group in enumerate(self._groups):
            stage = self._stages.get((number, index))
            if stage is None or stage.first >= stop or stage.end < stop:
                continue
            if stop == start + size:
                del self._stages[number, index]
            if stage.first == start and stop == start + size:
                yield group, start, stage.block
            else:
                yield group, stage.first, part_of(stage.block, group.specs(stop - stage.first), stage.first - start)
