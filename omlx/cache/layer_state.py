"""Layer caches <-> blocks: state is copied out of running caches, and read into new ones.

`layer_kinds` knows the classes, `layer_layout` what a model's caches hold; this file moves the bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from omlx.arrays import ArrayPool, as_numpy, contiguous, empty_array, raw_bytes
from omlx.cache.layer_kinds import (
    TOKEN_AXIS,
    Storage,
    batchable,
    evaluate,
    frozen,
    head_dims,
    leaves,
    nbytes,
    new_cache,
    raise_late_errors,
    settle,
)
from omlx.cache.layer_layout import CacheLayout, Layer, StatePart, Uncacheable, WindowGroup, describe, token_specs
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

__all__ = [
    "CacheLayout", "HeldWindow", "KVSlabs", "Move", "StatePart", "Uncacheable", "WindowGroup", "batchable", "describe",
    "evaluate", "extract", "frozen", "head_dims", "held_windows", "nbytes", "new_cache", "part_of", "raise_late_errors",
    "settle", "snapshot",
]  # fmt: skip

View = npt.NDArray[Any]
_SMALL_PART = 100_000  # bytes of an array in a block: below, copying head by head takes less than numpy's views


def _stored(layout: CacheLayout, caches: Sequence[Any], storage: Storage) -> Iterator[tuple[Layer, Any]]:
    """The layers of one kind of storage that hold something."""
    for layer, cache in zip(layout.layers, leaves(caches), strict=True):
        if layer.kind.storage == storage and layer.arrays:
            yield layer, cache


def _arrays(layout: CacheLayout, caches: Sequence[Any], storage: Storage) -> list[mx.array]:
    return [array for layer, cache in _stored(layout, caches, storage) for _, array in layer.kind.arrays(cache)]


# ---- out of running caches


def extract(layout: CacheLayout, caches: Sequence[Any], start: int, stop: int) -> BlockBuffer:
    """Copies what is cut anywhere of tokens [start, stop) out of evaluated caches.

    The copy shares no memory with the live caches. No view survives this call: while another
    reference to an array lives, the next update of its cache copies the whole array.
    """
    block = BlockBuffer.empty(layout.specs(stop - start))
    slabs = [_slab(array) for array in _arrays(layout, caches, "slice")]
    if block.nbytes < _SMALL_PART * len(slabs):
        payload, at = memoryview(block.data), 0
        for piece in _pieces(slabs, start, stop - start):
            end = at + len(piece)
            payload[at:end] = piece
            at = end
    else:
        for rows, part, size in _parts(slabs, block, stop - start):
            part[:] = rows[:, start * size : stop * size]
    return block


class _Slab(NamedTuple):
    """The memory of an array (1, heads, capacity, dim), twice; the bytes of a head in it and of a token of that.

    Blocks are copied as bytes: views of the right dtype and shape take longer to make than a small block to copy,
    and MLX makes those of bfloat16.
    """

    memory: npt.NDArray[np.uint8]
    view: memoryview
    heads: int
    head_bytes: int
    token_bytes: int


def _slab(array: mx.array) -> _Slab:
    _, heads, capacity, dim = array.shape
    try:
        memory = raw_bytes(array)
    except BufferError:
        memory = raw_bytes(contiguous(array))
    size = dim * array.itemsize
    return _Slab(memory, memoryview(memory), heads, capacity * size, size)


def _pieces(slabs: Iterable[_Slab], start: int, n_tokens: int) -> list[memoryview]:
    """The memory of these tokens in the order of a block's payload: one piece a head."""
    return [
        view[at : at + n_tokens * size]
        for _, view, heads, head_bytes, size in slabs
        if size  # values of width 0 have no bytes
        for at in range(start * size, heads * head_bytes, head_bytes)
    ]


def _parts(
    slabs: Iterable[_Slab], block: BlockBuffer, n_tokens: int
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]]:
    """Each slab and its part of a block of `n_tokens`, both with a row of bytes a head; the bytes of a token."""
    at = 0
    for memory, _, heads, head_bytes, size in slabs:
        end = at + heads * n_tokens * size
        yield memory.reshape(heads, head_bytes), block.data[at:end].reshape(heads, -1), size
        at = end


def snapshot(layout: CacheLayout, caches: Sequence[Any]) -> BlockBuffer:
    """Copies the recurrent states, which are those after the caches' last token."""
    block = BlockBuffer.empty(layout.state_specs)
    for tensor, array in zip(block.tensors(), _arrays(layout, caches, "state"), strict=True):
        np.copyto(tensor, as_numpy(array))
    return block


class HeldWindow:
    """What running caches hold of one window: the tokens [first, end). To be dropped before the next pass.

    `keep` leading tokens of the text are there as well, whatever `first` is.
    """

    def __init__(self, group: WindowGroup, arrays: Sequence[mx.array], end: int) -> None:
        self.group = group
        self.end = end
        self._views = [as_numpy(array) for array in arrays]
        recent = min(view.shape[TOKEN_AXIS] for view in self._views) - group.keep
        self.first = 0 if recent + group.keep >= end else end - recent

    def copy(self, block: BlockBuffer, at: int, start: int, stop: int) -> None:
        """Copies the tokens [start, stop) into a block, from its token `at` on."""
        for tensor, view in zip(block.tensors(), self._views, strict=True):
            begin = view.shape[TOKEN_AXIS] - (self.end - start)
            tensor[:, :, at : at + stop - start] = view[:, :, begin : begin + stop - start]


def held_windows(layout: CacheLayout, caches: Sequence[Any]) -> list[HeldWindow]:
    """For each of the layout's windows what the caches hold of it."""
    found: dict[tuple[int, int], list[mx.array]] = {(group.size, group.keep): [] for group in layout.windows}
    end = 0
    for layer, cache in _stored(layout, caches, "window"):
        assert layer.window is not None
        found[layer.window] += [array for _, array in layer.kind.arrays(cache)]
        end = cache.offset
    mx.eval(list(found.values()))
    return [HeldWindow(group, found[group.size, group.keep], end) for group in layout.windows]


def part_of(block: BlockBuffer, specs: tuple[TensorSpec, ...], start: int) -> BlockBuffer:
    """A copy of the tokens of `block` from its token `start` on, as many as `specs` say."""
    part = BlockBuffer.empty(specs)
    for tensor, whole in zip(part.tensors(), block.tensors(), strict=True):
        np.copyto(tensor, whole[:, :, start : start + tensor.shape[TOKEN_AXIS]])
    return part


# ---- into new caches


class Move(NamedTuple):
    """`size` tokens of a block, from its token `source` on, go to `target` in the slabs."""

    source: int
    target: int
    size: int


class _Slabs:
    """Arrays (1, heads, capacity, dim) that blocks are read straight into.

    Writing into an evaluated array's memory is safe as long as nobody else holds it and no view
    outlives `hand_over`.
    """

    def __init__(self, parts: tuple[StatePart, ...], capacity: int, pool: ArrayPool | None = None) -> None:
        def make(capacity: int) -> list[mx.array]:
            return [empty_array(spec.dtype, spec.shape) for spec in token_specs(parts, capacity)]

        self._arrays = pool.take(parts, capacity, make) if pool and parts else make(capacity)
        self.each = [_slab(array) for array in self._arrays]

    def hand_over(self) -> Iterator[mx.array]:
        """The arrays; they are the caller's from then on."""
        self.each.clear()
        arrays, self._arrays = self._arrays, []
        return iter(arrays)


class KVSlabs:
    """The arrays of new layer caches: blocks are read straight into them, then they are handed over.

    `capacity` is in tokens: those to restore and room for those to come, so that the first updates
    need no new memory. A `pool` recycles the memory of earlier slabs, and may give some more room.
    `end` tokens will be restored; only windows have to know that beforehand.
    """

    def __init__(self, layout: CacheLayout, capacity: int, pool: ArrayPool | None = None, *, end: int = 0) -> None:
        self._layout = layout
        self._slices = _Slabs(layout.parts, capacity, pool)
        self._windows = [_Slabs(group.parts, min(end, group.size)) for group in layout.windows]
        self._states = [empty_array(part.dtype, part.shape) for part in layout.states]
        self._state_views = [as_numpy(array) for array in self._states]

    def target(self, start: int, take: int, block_tokens: int) -> "SlabTarget":
        """Where a block of `block_tokens` goes whose first `take` tokens are wanted at `start`."""
        return SlabTarget(self._layout.specs(block_tokens), self._slices, (Move(0, start, take),))

    def window_target(self, group: int, block_tokens: int, moves: tuple[Move, ...]) -> "SlabTarget":
        """Where a block of one of the layout's `windows` goes."""
        return SlabTarget(self._layout.windows[group].specs(block_tokens), self._windows[group], moves)

    def state_target(self) -> "StateTarget":
        """Where the recurrent states go."""
        return StateTarget(self._layout.state_specs, self._state_views)

    def caches(self, n_tokens: int) -> list[Any]:
        """The layer caches over the first `n_tokens`; the slabs are theirs from then on."""
        self._state_views.clear()
        slices, states = self._slices.hand_over(), iter(self._states)
        self._states = []
        windows = {
            (group.size, group.keep): slabs.hand_over()
            for group, slabs in zip(self._layout.windows, self._windows, strict=True)
        }

        def build(layer: Layer) -> Any:
            if not layer.arrays:
                return layer.cls(*layer.params)
            source = states if layer.kind.storage == "state" else windows[layer.window] if layer.window else slices
            return layer.kind.build(layer.cls, layer.params, [next(source) for _ in range(layer.arrays)], n_tokens)

        return _planted(self._layout.tree, [build(layer) for layer in self._layout.layers])


def _planted(tree: tuple[Any, ...], built: list[Any]) -> list[Any]:
    """The caches in the lists that they were in."""
    return [built[node] if isinstance(node, int) else node[0](*_planted(node[1], built)) for node in tree]


class SlabTarget:
    """A place in the slabs for one block (the store's ReadTarget)."""

    def __init__(self, specs: tuple[TensorSpec, ...], slabs: _Slabs, moves: tuple[Move, ...]) -> None:
        self.specs = specs
        self._slabs = slabs
        self._moves = moves

    def copy_from(self, block: BlockBuffer) -> None:
        """Takes the wanted tokens out of a block in RAM."""
        # All views before the first copy: a copy lets go of the GIL, and to get it back from the other reader takes
        # longer than a small copy, so as little as possible is done with it between two of them.
        copies = [
            (rows[:, target * size : (target + n) * size], part[:, source * size : (source + n) * size])
            for rows, part, size in _parts(self._slabs.each, block, self._block_tokens)
            for source, target, n in self._moves
        ]
        for wanted, part in copies:
            wanted[:] = part

    @property
    def _block_tokens(self) -> int:
        return self.specs[0].shape[TOKEN_AXIS]

    def pieces(self) -> list[memoryview] | None:
        """Writable memory for the file's payload, in file order: one piece a head.

        None when only a part of the block is wanted: its bytes are not together in the slabs, so
        the store reads the block and calls `copy_from`.
        """
        _, target, size = self._moves[0]
        whole = len(self._moves) == 1 and size == self._block_tokens
        return _pieces(self._slabs.each, target, size) if whole else None


class StateTarget:
    """The place for recurrent states, which are taken as a whole."""

    def __init__(self, specs: tuple[TensorSpec, ...], views: list[View]) -> None:
        self.specs = specs
        self._views = views

    def copy_from(self, block: BlockBuffer) -> None:
        for view, tensor in zip(self._views, block.tensors(), strict=True):
            np.copyto(view, tensor)

    def pieces(self) -> list[memoryview] | None:
        return [memoryview(view.reshape(-1)).cast("B") for view in self._views]
