"""Layer caches of mlx-lm <-> blocks: the only file that touches `mlx_lm.models.cache`.

A model's cache is a list with one object a layer. What can be stored is decided by one table,
`KINDS`: it says which arrays of a layer cache hold its state and how to build the cache again. All
kinds here are *slices*: their arrays have a token axis (axis 2) and can be cut between any two
tokens. A layer whose class is not in the table makes the whole model uncacheable; `describe` then
says why.

Own layout, never the library's `state` tuple: that changed between patch releases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from omlx.arrays import DTYPE_NAMES, ArrayPool, as_numpy, empty_array
from omlx.storage.tensor_file import BlockBuffer, TensorSpec

TOKEN_AXIS = 2


class LayerKind(NamedTuple):
    """How one class of layer cache is stored.

    `names` are the parts of its state. `arrays(cache)` gives one array (1, heads, capacity, dim)
    for each, of which the first `offset` tokens are valid. `build(arrays, n_tokens)` makes a cache
    that owns these arrays and holds `n_tokens`.
    """

    name: str
    names: tuple[str, ...]
    arrays: Callable[[Any], tuple[mx.array, ...]]
    build: Callable[[Sequence[mx.array], int], Any]


def _build_kv(arrays: Sequence[mx.array], n_tokens: int) -> KVCache:
    cache = KVCache()
    cache.keys, cache.values = arrays
    cache.offset = n_tokens
    return cache


KINDS: dict[type, LayerKind] = {
    KVCache: LayerKind("kv", ("keys", "values"), lambda c: (c.keys, c.values), _build_kv),
}


class StatePart(NamedTuple):
    """One array of one layer: `name` in files, heads and dim of (1, heads, tokens, dim)."""

    name: str
    dtype: str
    heads: int
    dim: int


class CacheLayout(NamedTuple):
    """What a block of this model holds; equal layouts are interchangeable."""

    kinds: tuple[LayerKind, ...]
    parts: tuple[StatePart, ...]  # layer by layer, in the order of LayerKind.names

    @property
    def bytes_per_token(self) -> int:
        return sum(spec.nbytes for spec in self.specs(1))

    def specs(self, n_tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors of a block of `n_tokens`, in file order."""
        return _specs(self.parts, n_tokens)

    def __str__(self) -> str:
        """Part of the root hash."""
        return ";".join(f"{p.name}:{p.dtype}:{p.heads}x{p.dim}" for p in self.parts)


@lru_cache(maxsize=256)
def _specs(parts: tuple[StatePart, ...], n_tokens: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(p.name, p.dtype, (1, p.heads, n_tokens, p.dim)) for p in parts)


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """A model whose state cannot be stored, and the one line that says why."""

    reason: str


def new_cache(model: Any) -> list[Any]:
    """Empty layer caches for one sequence."""
    return list(make_prompt_cache(model))


def evaluate(caches: Sequence[Any]) -> None:
    """Waits until everything in the caches is computed (and nothing else, such as logits)."""
    mx.eval([cache.state for cache in caches])


def nbytes(caches: Sequence[Any]) -> int:
    """Bytes allocated for these caches, room for tokens to come included."""
    return sum(cache.nbytes for cache in caches)


def describe(caches: Sequence[Any]) -> CacheLayout | Uncacheable:
    """The layout of caches that hold at least one token."""
    kinds: list[LayerKind] = []
    parts: list[StatePart] = []
    for index, cache in enumerate(caches):
        kind = KINDS.get(type(cache))
        if kind is None:
            return Uncacheable(f"layer {index} keeps its state in {type(cache).__name__}, which cannot be stored yet")
        kinds.append(kind)
        for name, array in zip(kind.names, kind.arrays(cache), strict=True):
            parts.append(StatePart(f"{index}.{name}", DTYPE_NAMES[array.dtype], array.shape[1], array.shape[3]))
    return CacheLayout(tuple(kinds), tuple(parts))


def _live_arrays(layout: CacheLayout, caches: Sequence[Any]) -> list[mx.array]:
    return [array for kind, cache in zip(layout.kinds, caches, strict=True) for array in kind.arrays(cache)]


def extract(layout: CacheLayout, caches: Sequence[Any], start: int, stop: int) -> BlockBuffer:
    """Copies the state of tokens [start, stop) out of evaluated caches.

    The copy shares no memory with the live caches. No view survives this call: while another
    reference to an array lives, the next update of its cache copies the whole array.
    """
    block = BlockBuffer.empty(layout.specs(stop - start))
    for tensor, array in zip(block.tensors(), _live_arrays(layout, caches), strict=True):
        np.copyto(tensor, as_numpy(array)[:, :, start:stop])
    return block


class KVSlabs:
    """Arrays of the final shape that blocks are read straight into, then handed to layer caches.

    `capacity` is in tokens: those to restore and room for those to come, so that the first updates
    need no new memory. A `pool` recycles the memory of earlier slabs, and may give some more room.
    Writing into an evaluated array's memory is safe as long as nobody else holds it and no view
    outlives `caches()`.
    """

    def __init__(self, layout: CacheLayout, capacity: int, pool: ArrayPool | None = None) -> None:
        self._layout = layout

        def make(capacity: int) -> list[mx.array]:
            return [empty_array(p.dtype, (1, p.heads, capacity, p.dim)) for p in layout.parts]

        self._arrays = pool.take(layout.parts, capacity, make) if pool else make(capacity)
        self._views = [as_numpy(array) for array in self._arrays]
        self._rows = [_Row(memoryview(head).cast("B"), head.strides[0]) for view in self._views for head in view[0]]

    def target(self, start: int, take: int, block_tokens: int) -> "SlabTarget":
        """Where a block of `block_tokens` goes whose first `take` tokens are wanted at `start`."""
        return SlabTarget(self._layout.specs(block_tokens), self._views, self._rows, start, take)

    def caches(self, n_tokens: int) -> list[Any]:
        """The layer caches over the first `n_tokens`; the slabs are theirs from then on."""
        self._views.clear()
        self._rows.clear()
        arrays = iter(self._arrays)
        built = [kind.build([next(arrays) for _ in kind.names], n_tokens) for kind in self._layout.kinds]
        self._arrays = []
        return built


class _Row(NamedTuple):
    """The memory of one head in one slab, and the bytes of a token in it."""

    memory: memoryview
    token_bytes: int


class SlabTarget:
    """A place in the slabs for one block (the store's ReadTarget)."""

    def __init__(
        self, specs: tuple[TensorSpec, ...], views: list[npt.NDArray[Any]], rows: list[_Row], start: int, take: int
    ) -> None:
        self.specs = specs
        self._views = views
        self._rows = rows
        self._start = start
        self._take = take

    def copy_from(self, block: BlockBuffer) -> None:
        """Takes the wanted tokens out of a block in RAM."""
        start, stop = self._start, self._start + self._take
        for view, tensor in zip(self._views, block.tensors(), strict=True):
            view[:, :, start:stop] = tensor[:, :, : self._take]

    def pieces(self) -> list[memoryview] | None:
        """Writable memory for the file's payload, in file order: one piece a head.

        None when only a part of the block is wanted: its bytes are not together in the slabs, so
        the store reads the block and calls `copy_from`.
        """
        if self.specs[0].shape[TOKEN_AXIS] != self._take:
            return None
        start, stop = self._start, self._start + self._take
        return [memory[start * size : stop * size] for memory, size in self._rows]
