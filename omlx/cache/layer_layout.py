"""What a model's layer caches hold, as values: which arrays there are, of which kind, and what they take up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from omlx.arrays import DTYPE_NAMES
from omlx.cache.layer_kinds import TOKEN_AXIS, LayerKind, Storage, is_list, is_unused, kind_of, leaves
from omlx.storage.tensor_file import DTYPES, TensorSpec


class StatePart(NamedTuple):
    """One array of one layer: `name` in files; `shape` with 1 for the number of tokens, if it has that axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes a token, or of the whole array if it has no token axis."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        """Part of the root hash."""
        axes = [n for axis, n in enumerate(self.shape[1:], 1) if axis != TOKEN_AXIS or len(self.shape) != 4]
        return f"{self.name}:{self.dtype}:{'x'.join(map(str, axes))}"


class WindowGroup(NamedTuple):
    """The layers of one window: of `size` tokens, the first `keep` of the text among them."""

    size: int
    keep: int
    parts: tuple[StatePart, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def needs(self, end: int) -> tuple[tuple[int, int], ...]:
        """The runs of tokens [from, to) that a text of `end` tokens needs to go on."""
        if end <= self.size:
            return ((0, end),)
        last = (end - self.size + self.keep, end)
        return ((0, self.keep), last) if self.keep else (last,)

    def specs(self, n_tokens: int) -> tuple[TensorSpec, ...]:
        return token_specs(self.parts, n_tokens)

    def __str__(self) -> str:
        return f"window{self.size}+{self.keep}"


class Layer(NamedTuple):
    """One layer cache: how it is built again, and which window it has (size, keep)."""

    kind: LayerKind
    cls: type
    params: tuple[int, ...]
    arrays: int
    window: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What is stored of a model's state; equal layouts are interchangeable.

    `parts` have a token axis and are cut anywhere (slices), `windows` need their last tokens only, `states`
    are valid at their own position alone. `layers` are the layer caches one by one, and `tree` says
    which of them lie in lists: an index, or (class, trees).
    """

    layers: tuple[Layer, ...]
    tree: tuple[Any, ...]
    parts: tuple[StatePart, ...]
    windows: tuple[WindowGroup, ...] = ()
    states: tuple[StatePart, ...] = ()

    @property
    def cut_anywhere(self) -> bool:
        """Whether the state of every position is there in what is stored of a longer text."""
        return not self.windows and not self.states

    @property
    def bytes_per_token(self) -> int:
        """Of what grows with every token."""
        return sum(part.nbytes for part in self.parts)

    @property
    def state_bytes(self) -> int:
        """Of the recurrent states at one position."""
        return sum(part.nbytes for part in self.states)

    def nbytes(self, n_tokens: int, chunk: int = 0) -> int:
        """Bytes that running caches of `n_tokens` take up; a window may hold a `chunk` more, until the next one."""
        windows = sum(min(n_tokens, group.size + chunk) * group.bytes_per_token for group in self.windows)
        return n_tokens * self.bytes_per_token + windows + self.state_bytes

    def specs(self, n_tokens: int) -> tuple[TensorSpec, ...]:
        """The tensors of a block of `n_tokens`, in file order."""
        return token_specs(self.parts, n_tokens)

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(*part) for part in self.states)

    def __str__(self) -> str:
        """Part of the root hash."""
        windows = [f"{group}[{';'.join(map(str, group.parts))}]" for group in self.windows]
        states = [f"state[{';'.join(map(str, self.states))}]"] if self.states else []
        return ";".join([*map(str, self.parts), *windows, *states])


@lru_cache(maxsize=256)
def token_specs(parts: tuple[StatePart, ...], n_tokens: int) -> tuple[TensorSpec, ...]:
    """The tensors of parts with a token axis."""
    return tuple(
        TensorSpec(p.name, p.dtype, (*p.shape[:TOKEN_AXIS], n_tokens, *p.shape[TOKEN_AXIS + 1 :])) for p in parts
    )


@dataclass(frozen=True, slots=True)
class Uncacheable:
    """A model whose state cannot be stored, and the one line that says why."""

    reason: str


class _Found(NamedTuple):
    layer: Layer
    parts: tuple[StatePart, ...]

    @property
    def storage(self) -> Storage:
        return self.layer.kind.storage


def describe(caches: Sequence[Any]) -> CacheLayout | Uncacheable:
    """The layout of caches that hold at least one token."""
    found: list[_Found] = []
    for name, cache in zip(_names(caches), leaves(caches), strict=True):
        kind = kind_of(cache)
        if kind is None:
            layer = name.partition(".")[0]
            return Uncacheable(f"layer {layer} keeps its state in {type(cache).__name__}, which cannot be stored yet")
        if any(array is None for array in getattr(cache, "cache", ())):
            return Uncacheable(f"layer {name} leaves a part of its recurrent state empty")
        found.append(_describe(name, cache, kind))
    return CacheLayout(
        layers=tuple(entry.layer for entry in found),
        tree=_tree(caches, iter(range(len(found)))),
        parts=_parts(found, "slice"),
        windows=_windows(found),
        states=_parts(found, "state"),
    )


def _describe(name: str, cache: Any, kind: LayerKind) -> _Found:
    arrays = () if is_unused(cache) else kind.arrays(cache)
    parts = tuple(StatePart(f"{name}.{part}", DTYPE_NAMES[a.dtype], _shape(a, kind.storage)) for part, a in arrays)
    params = kind.params(cache)
    window = (params[0], params[1] if len(params) > 1 else 0) if kind.storage == "window" else None
    return _Found(Layer(kind, type(cache), params, len(parts), window), parts)


def _shape(array: mx.array, storage: Storage) -> tuple[int, ...]:
    shape = tuple(array.shape)
    return shape if storage == "state" else (*shape[:TOKEN_AXIS], 1, *shape[TOKEN_AXIS + 1 :])


def _parts(found: Sequence[_Found], storage: Storage) -> tuple[StatePart, ...]:
    return tuple(part for entry in found if entry.storage == storage for part in entry.parts)


def _windows(found: Sequence[_Found]) -> tuple[WindowGroup, ...]:
    """One group for each window, in order of size."""
    ringed = sorted((entry for entry in found if entry.layer.window and entry.parts), key=_window)
    groups = groupby(ringed, key=_window)
    return tuple(WindowGroup(*window, _parts(list(members), "window")) for window, members in groups)


def _window(entry: _Found) -> tuple[int, int]:
    assert entry.layer.window is not None
    return entry.layer.window


def _names(caches: Sequence[Any], prefix: str = "") -> Iterator[str]:
    """Of the leaves: "0", or "0.1" inside a list."""
    for index, cache in enumerate(caches):
        if is_list(cache):
            yield from _names(cache.caches, f"{prefix}{index}.")
        else:
            yield f"{prefix}{index}"


def _tree(caches: Sequence[Any], numbers: Iterator[int]) -> tuple[Any, ...]:
    return tuple((type(c), _tree(c.caches, numbers)) if is_list(c) else next(numbers) for c in caches)
