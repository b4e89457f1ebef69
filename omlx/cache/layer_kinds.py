"""The layer caches of mlx-lm and mlx-vlm: the only file that touches `mlx_lm.models.cache`.

A model's cache is a list with one object a layer, which may hold others (CacheList). What can be
stored is decided by one table, `KINDS`: it says which arrays of a layer cache hold its state, how
to build the cache again, and how the state behaves:

- *slice*: it has a token axis (axis 2) and can be cut between any two tokens;
- *window*: so it has, but only the last tokens matter for what follows, and older ones are given up;
- *state*: a recurrent state, which is valid only where it is.

A layer whose class is not in the table makes the whole model uncacheable.

Own layout, never the library's `state` tuple: that changed between patch releases.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

TOKEN_AXIS = 2
Storage = Literal["slice", "window", "state"]
Arrays = tuple[tuple[str, mx.array], ...]  # by name, in the order of storage


class LayerKind(NamedTuple):
    """How one class of layer cache is stored.

    `params(cache)` are the numbers that its constructor takes. `arrays(cache)` gives the arrays that
    hold its state: of a slice (1, heads, capacity, dim), the first `offset` tokens valid; of a
    window (1, heads, n, dim), in the order of the tokens, all valid; of a state any shape.
    `build(cls, params, arrays, n_tokens)` makes a cache that owns such arrays and holds `n_tokens`.
    """

    name: str
    storage: Storage
    params: Callable[[Any], tuple[int, ...]]
    arrays: Callable[[Any], Arrays]
    build: Callable[[type, tuple[int, ...], Sequence[mx.array], int], Any]


def _named(cache: Any) -> Arrays:
    return ("keys", cache.keys), ("values", cache.values)


def _build_kv(cls: type, params: tuple[int, ...], arrays: Sequence[mx.array], n_tokens: int) -> Any:
    cache = cls(*params)
    cache.keys, cache.values = arrays
    cache.offset = n_tokens
    return cache


def _quantized_arrays(cache: Any) -> Arrays:
    """Named by bits and group as well: the shapes alone do not tell them."""
    names = [f"{side}.q{cache.bits}g{cache.group_size}" for side in ("keys", "values")]
    triples = zip(names, (cache.keys, cache.values), strict=True)
    return tuple(
        (name + part, array)
        for name, triple in triples
        for part, array in zip(("", ".scales", ".biases"), triple, strict=True)
    )


def _build_quantized(cls: type, params: tuple[int, ...], arrays: Sequence[mx.array], n_tokens: int) -> Any:
    cache = cls(*params)
    cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
    cache.offset = n_tokens
    return cache


def _ring_arrays(cache: Any) -> Arrays:
    return ("keys", _in_order(cache, cache.keys)), ("values", _in_order(cache, cache.values))


def _in_order(cache: Any, ring: mx.array) -> mx.array:
    """The ring's tokens from the oldest to the newest, the `keep` first ones of the text in front."""
    at, keep = cache._idx, cache.keep
    if at == ring.shape[TOKEN_AXIS]:
        return ring
    if at >= cache.offset:  # not full yet
        return ring[:, :, :at]
    parts = (ring[:, :, :keep], ring[:, :, at:], ring[:, :, keep:at])
    return mx.concatenate([part for part in parts if part.shape[TOKEN_AXIS]], axis=TOKEN_AXIS)


def _build_ring(cls: type, params: tuple[int, ...], arrays: Sequence[mx.array], n_tokens: int) -> Any:
    cache = _build_kv(cls, params, arrays, n_tokens)
    cache._idx = arrays[0].shape[TOKEN_AXIS]
    return cache


def _chunk_arrays(cache: Any) -> Arrays:
    held = cache.offset - cache.start_position
    return ("keys", cache.keys[:, :, :held]), ("values", cache.values[:, :, :held])


def _build_chunk(cls: type, params: tuple[int, ...], arrays: Sequence[mx.array], n_tokens: int) -> Any:
    cache = _build_kv(cls, params, arrays, n_tokens)
    cache.start_position = n_tokens - arrays[0].shape[TOKEN_AXIS]
    return cache


def _state_arrays(cache: Any) -> Arrays:
    return tuple((f"state{i}", array) for i, array in enumerate(cache.cache))


def _build_state(cls: type, params: tuple[int, ...], arrays: Sequence[mx.array], n_tokens: int) -> Any:
    cache = cls(*params)
    cache.cache = list(arrays)
    return cache


KINDS: dict[type, LayerKind] = {
    KVCache: LayerKind("full", "slice", lambda c: (), _named, _build_kv),
    QuantizedKVCache: LayerKind(
        "quantised", "slice", lambda c: (c.group_size, c.bits), _quantized_arrays, _build_quantized
    ),
    RotatingKVCache: LayerKind("window", "window", lambda c: (c.max_size, c.keep), _ring_arrays, _build_ring),
    ChunkedKVCache: LayerKind("chunk", "window", lambda c: (c.chunk_size,), _chunk_arrays, _build_chunk),
    ArraysCache: LayerKind("state", "state", lambda c: (len(c.cache),), _state_arrays, _build_state),
}
# mlx-vlm brings classes of the same names with the same fields. It may be absent, so by name.
_VLM_MODULE = "mlx_vlm.models.cache"
_CLASSES_BY_NAME = {cls.__name__: cls for cls in KINDS}
_KINDS_BY_NAME = {cls.__name__: kind for cls, kind in KINDS.items()}


def kind_of(cache: Any) -> LayerKind | None:
    """The table's row for a layer cache; None for a class that nobody knows."""
    cls = type(cache)
    if cls.__module__ == _VLM_MODULE:
        return _KINDS_BY_NAME.get(cls.__name__)
    return KINDS.get(cls)


def is_list(cache: Any) -> bool:
    """Whether a layer cache only holds others, in `caches`."""
    cls = type(cache)
    return cls is CacheList or (cls.__module__ == _VLM_MODULE and cls.__name__ == CacheList.__name__)


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The layer caches without the lists around them, in order."""
    for cache in caches:
        if is_list(cache):
            yield from leaves(cache.caches)
        else:
            yield cache


def _mapped(caches: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """`caches` with every leaf replaced by what `change` gives for it."""
    return [type(c)(*_mapped(c.caches, change)) if is_list(c) else change(c) for c in caches]


# ---- what callers do with whole caches


def new_cache(model: Any, quantisation: tuple[int, int] | None = None) -> list[Any]:
    """Empty layer caches for one sequence. With a `quantisation` (group size, bits) plain layers are kept in it."""
    caches = _mapped(make_prompt_cache(model), _own)
    if quantisation is None:
        return caches
    return _mapped(caches, lambda c: QuantizedKVCache(*quantisation) if type(c) is KVCache else c)


def _own(cache: Any) -> Any:
    """An empty cache of mlx-vlm as mlx-lm's of the same kind: only these have a form for batches that we decode."""
    cls, kind = type(cache), kind_of(cache)
    if cls.__module__ != _VLM_MODULE or kind is None:
        return cache
    return _CLASSES_BY_NAME[cls.__name__](*kind.params(cache))


def head_dims(caches: Sequence[Any]) -> list[int]:
    """Of the keys and values in the layers that `new_cache` can quantise; they hold at least one token."""
    plain = [cache for cache in leaves(caches) if type(cache) is KVCache and cache.keys is not None]
    return [array.shape[-1] for cache in plain for array in (cache.keys, cache.values)]


def evaluate(caches: Sequence[Any]) -> None:
    """Waits until everything in the caches is computed (and nothing else, such as logits)."""
    mx.eval([cache.state for cache in caches])


def raise_late_errors() -> None:
    """Raises an error of earlier work that the GPU has not reported yet.

    `evaluate` may return before a failed GPU says so, and what it was to compute is garbage then. Nothing on the CPU.
    """
    if mx.default_device().type != mx.DeviceType.cpu:
        mx.synchronize()


def nbytes(caches: Sequence[Any]) -> int:
    """Bytes allocated for these caches, room for tokens to come included."""
    return sum(cache.nbytes for cache in caches)


def grows(caches: Sequence[Any]) -> bool:
    """Whether the state in these caches gets larger with every token: not if all are recurrent or have a window."""
    kinds = [kind_of(cache) for cache in leaves(caches)]
    return not all(kind is not None and (kind.storage == "state" or kind.build is _build_ring) for kind in kinds)


def settle(caches: Sequence[Any]) -> None:
    """Brings caches into the one form that the next forward pass may start from; to be called before each.

    How a ring is turned, and how many tokens too many it holds, depends on the chunks that filled
    it, and the last bits of the next pass depend on both. A restored ring is in order and holds
    its window. So a ring is put in order and cut to its window before every pass, cold and warm alike.
    (A ChunkedKVCache is cut by its model in the same place.) States are made contiguous: as
    slices they would keep the whole chunk's activations alive.
    """
    for cache in leaves(caches):
        kind = kind_of(cache)
        if kind is not None and kind.storage == "state":
            cache.cache = [None if array is None else mx.contiguous(array) for array in cache.cache]
        elif kind is not None and kind.build is _build_ring and cache.keys is not None:
            _settle_ring(cache)


def _settle_ring(cache: Any) -> None:
    size = cache.max_size
    if cache._idx == cache.keys.shape[TOKEN_AXIS] <= size:
        return
    cache.keys, cache.values = (_cut(_in_order(cache, a), size, cache.keep) for a in (cache.keys, cache.values))
    cache._idx = cache.keys.shape[TOKEN_AXIS]


def _cut(ordered: mx.array, size: int, keep: int) -> mx.array:
    """The `keep` first and the last tokens, `size` in all."""
    if ordered.shape[TOKEN_AXIS] <= size:
        return mx.contiguous(ordered)
    last = ordered[:, :, keep - size :]
    if not keep:
        return mx.contiguous(last)
    return mx.concatenate([ordered[:, :, :keep], last], axis=TOKEN_AXIS)


def frozen(caches: Sequence[Any]) -> list[Any]:
    """The same caches, with recurrent states as they are now, whatever is fed to the originals; copies nothing.

    The other layers are shared: what they hold of a position stays readable while later tokens come,
    or was stored before.
    """

    def keep_state(cache: Any) -> Any:
        kind = kind_of(cache)
        if kind is None or kind.storage != "state":
            return cache
        kept = copy.copy(cache)
        kept.cache = list(cache.cache)
        return kept

    return _mapped(caches, keep_state)


def is_unused(cache: Any) -> bool:
    """Whether a layer cache holds nothing though its text has begun: its layer reads another's, or has no attention."""
    return getattr(cache, "keys", ...) is None


def batchable(caches: Sequence[Any]) -> bool:
    """Whether mlx-lm can decode these caches, which hold a text, together with others'.

    The batch form of a ring forgets `keep`, and that of an unused cache cannot be taken apart again.
    """
    return all(
        hasattr(cache, "merge") and not getattr(cache, "keep", 0) and not is_unused(cache) for cache in leaves(caches)
    )
