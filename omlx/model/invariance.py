"""Forward passes whose bits do not depend on where a prompt is cut.

On a CPU two things make the last bits of a token's state depend on the other tokens of its pass:

- Attention sums over keys in an order that depends on how many there are. Here it sums over blocks of KEY_BLOCK keys,
  counted from the text's first token, with a running maximum and sum as in FlashAttention (arXiv:2205.14135,
  algorithm 1).
- A BLAS takes other kernels for small products. OpenBLAS does so up to 10^6 multiplications (M x N x K); the rows of
  smaller products are padded here until they have more.

Which models this suffices for is found by trying when they are loaded: `cut_anywhere`.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import base

from omlx.cache.layer_state import CacheLayout, Uncacheable
from omlx.model.steps import Steps

KEY_BLOCK = 256
MULTIPLICATIONS = 1_000_001
"""The least of a matrix product."""

_MASKED = -1e30  # finite, so that a row without any key in a block gives no NaN
_TRIED, _TRIED_RECURRENT = 18, 140  # tokens; recurrent layers may work in pieces of up to 128
_PASSES = 5  # of `_equal`
_MOST_WINDOW = 64

_attention = base.scaled_dot_product_attention
_matmul, _addmm, _array_matmul, _gather_mm = mx.matmul, mx.addmm, mx.array.__matmul__, mx.gather_mm


class InvariantPasses:
    """Runs the passes of one model so that their bits do not depend on each other's sizes.

    Usable on the MLX thread alone: while a pass is built, functions of MLX and of mlx-lm are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {type(module).__module__ for _, module in model.named_modules()}
        loaded = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        self._modules: list[ModuleType] = [
            module for module in loaded if getattr(module, "scaled_dot_product_attention", None) is _attention
        ]
        self.attentions = 0
        """Calls of the attention so far, but for those with quantised caches."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """While a pass is built; it may be evaluated later."""
        self._install(matmul, addmm, matmul, gather_mm, self._counted)
        try:
            yield
        finally:
            self._install(_matmul, _addmm, _array_matmul, _gather_mm, _attention)

    def _install(self, matmul: Any, addmm: Any, operator: Any, gather: Any, attention: Any) -> None:
        mx.matmul, mx.addmm, mx.gather_mm = matmul, addmm, gather
        mx.array.__matmul__ = operator
        for module in self._modules:
            module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]

    def _counted(
        self, queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **options: Any
    ) -> mx.array:
        self.attentions += not hasattr(cache, "bits")
        return attention(queries, keys, values, cache, *args, **options)


class Tried(Protocol):
    """The part of a ModelRunner that is tried."""

    layout: CacheLayout | Uncacheable
    vocab_size: int

    def new_cache(self) -> list[Any]: ...
    def prefill_logits(self, tokens: Sequence[int], caches: list[Any]) -> mx.array: ...


def cut_anywhere(runner: Tried, passes: InvariantPasses) -> Steps[bool]:
    """Whether the runner's passes, which `passes` is used for, give equal bits wherever a text is cut.

    Every layer that keeps keys has to use the attention above: another one may differ in long texts only. What else
    may differ shows with a few tokens, a pass of one among them.
    """
    layout = runner.layout
    if not isinstance(layout, CacheLayout):
        return False
    parts = [*layout.parts, *(part for group in layout.windows for part in group.parts)]
    keeping = len({part.name.partition(".")[0] for part in parts})
    count = max([_TRIED, *(group.size + 8 for group in layout.windows if group.size <= _MOST_WINDOW)])
    before = passes.attentions
    equal = yield from _equal(runner, count)
    if not equal or passes.attentions - before < _PASSES * keeping:
        return False
    return not layout.states or (yield from _equal(runner, _TRIED_RECURRENT))


def _equal(runner: Tried, count: int) -> Steps[bool]:
    """Whether `count` tokens give the same logits in one pass and in several."""
    tokens = [(7 * i + 1) % runner.vocab_size for i in range(count)]
    parts = [1, count // 2 + 1, count - 1, count]
    in_parts = yield from _logits(runner, tokens, parts)
    whole = yield from _logits(runner, tokens, [count])
    return np.array_equal(in_parts, whole)


def _logits(runner: Tried, tokens: Sequence[int], ends: Sequence[int]) -> Steps[Any]:
    """The logits (tokens, vocabulary) after each token, computed in passes that end at `ends`."""
    caches, start, found = runner.new_cache(), 0, []
    for end in ends:
        found.append(np.array(runner.prefill_logits(tokens[start:end], caches).astype(mx.float32)))
        start = end
        yield None
    return np.concatenate(found)


def matmul(a: mx.array, b: mx.array, **options: Any) -> mx.array:
    """`mx.matmul` with rows of zeros added to `a` while the product is small."""
    if a.ndim < 2 or b.ndim < 2 or (least := _least_rows(b)) <= _rows(a, b):
        return _matmul(a, b, **options)
    rows = a.reshape(-1, a.shape[-1]) if b.ndim == 2 else a
    count = rows.shape[-2]
    padded = mx.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, least - count), (0, 0)])
    product = _matmul(padded, b, **options)[..., :count, :]
    return product.reshape(*a.shape[:-1], b.shape[-1]) if b.ndim == 2 else product


def addmm(c: mx.array, a: mx.array, b: mx.array, /, alpha: float = 1.0, beta: float = 1.0, **options: Any) -> mx.array:
    """`mx.addmm` with rows of zeros added to `a` while the product is small."""
    # Always in two steps: whether a sum is fused with its product must not depend on the number of rows.
    product = matmul(a, b, **options)
    product = product if alpha == 1 else alpha * product
    return product + (c if beta == 1 else beta * c)


def gather_mm(
    a: mx.array, b: mx.array, /, lhs_indices: Any = None, rhs_indices: Any = None, **options: Any
) -> mx.array:
    """`mx.gather_mm` in the one form that experts take for a few tokens and for many."""
    if lhs_indices is not None or rhs_indices is None or b.ndim != 3:
        return _gather_mm(a, b, lhs_indices, rhs_indices, **options)
    options.pop("sorted_indices", None)
    shape, rows = rhs_indices.shape, a.reshape(-1, *a.shape[-2:])
    taken = mx.broadcast_to(mx.arange(rows.shape[0]).reshape(a.shape[:-2]), shape).flatten()
    product = _gather_mm(rows[taken], b, rhs_indices=rhs_indices.flatten(), **options)
    return product.reshape(*shape, *product.shape[-2:])


def _least_rows(b: mx.array) -> int:
    return -(-MULTIPLICATIONS // max(1, b.shape[-2] * b.shape[-1]))


def _rows(a: mx.array, b: mx.array) -> int:
    """Rows of one product: a matrix `b` is multiplied with all of `a` at once."""
    return a.size // max(1, a.shape[-1]) if b.ndim == 2 else a.shape[-2]


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """mlx-lm's `scaled_dot_product_attention` over blocks of keys that are counted from the text's first token.

    `queries` (B, H, L, D), `keys` and `values` (B, G, S, D), H a multiple of G; the queries are the last L of the S
    positions. `mask`: None, "causal", or an array that broadcasts to (B, H, L, S), boolean or added to the scores.
    `sinks` (H,). Quantised caches go to mlx-lm's function, whose bits depend on the number of keys.
    """
    if hasattr(cache, "bits"):
        return _attention(queries, keys, values, cache, scale, mask, sinks, **options)
    batch, heads, length, dims = queries.shape
    groups, count = keys.shape[1:3]
    repeats = heads // groups
    keys, values = _in_order(cache, keys, length), _in_order(cache, values, length)
    shift = _first_position(cache, count) % KEY_BLOCK  # keys of the first block that are not there any more
    blocks = -(-(count + shift) // KEY_BLOCK)
    pad = [(0, 0), (0, 0), (shift, blocks * KEY_BLOCK - count - shift), (0, 0)]
    keys, values = mx.pad(keys, pad).swapaxes(-1, -2), mx.pad(values, pad)
    queries = (queries * scale).reshape(batch, groups, repeats, length, dims)
    masks = _Masks(mask, groups, repeats, length, count, shift, blocks)
    sums, start = [], 0
    while start < length:  # queries of one block at a time: they have the same blocks of keys in front
        stop = min(length, (masks.first + start) // KEY_BLOCK * KEY_BLOCK + KEY_BLOCK - masks.first)
        rows = repeats * (stop - start)
        part = queries[..., start:stop, :].reshape(batch, groups, rows, dims)
        top, total, out = _initial(sinks, batch, groups, stop - start, rows)
        for block in range(masks.last_block(stop) + 1):
            at = slice(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
            scores = masks.apply(matmul(part, keys[..., at]), block, start, stop)
            higher = mx.maximum(top, scores.max(-1, keepdims=True))
            weights, shrink = _exp(scores - higher), mx.exp(top - higher)
            product = matmul(weights, values[..., at, :])
            out = product if out is None else out * shrink + product
            total, top = total * shrink + weights.sum(-1, keepdims=True), higher
        assert out is not None
        sums.append((out / total).reshape(batch, groups, repeats, stop - start, -1))
        start = stop
    whole = sums[0] if len(sums) == 1 else mx.concatenate(sums, 3)
    return whole.reshape(batch, heads, length, -1).astype(queries.dtype)


def _exp(values: mx.array) -> mx.array:
    """`mx.exp` takes some 20 ns for a number on a CPU without Accelerate, most of the time of stock attention."""
    if mx.default_device() != mx.cpu or platform.system() == "Darwin" or values.dtype != mx.float32:
        return mx.exp(values)
    return mx.array(np.exp(np.array(values, copy=False)))


def _initial(
    sinks: mx.array | None, batch: int, groups: int, length: int, rows: int
) -> tuple[mx.array, mx.array, mx.array | None]:
    """The maximum and the sum before any key, (B, G, rows, 1) each; a sink is a key without a value."""
    if sinks is None:
        return mx.full((batch, groups, rows, 1), _MASKED), mx.zeros((batch, groups, rows, 1)), None
    top = mx.repeat(sinks.reshape(1, groups, -1, 1), length, 2).reshape(1, groups, rows, 1)
    return mx.broadcast_to(top, (batch, groups, rows, 1)), mx.ones((batch, groups, rows, 1)), None


def _first_position(cache: Any, count: int) -> int:
    """The position in the text of the first of `count` keys."""
    offset = getattr(cache, "offset", count)
    return max(0, offset - count) if isinstance(offset, int) else 0


def _in_order(cache: Any, kept: mx.array, length: int) -> mx.array:
    """Keys or values in the order of the text: a ring that took a single token gives them as it keeps them."""
    order: Callable[[mx.array], mx.array] | None = getattr(cache, "_temporal_order", None)
    if order is None or length > 1 or cache.keys is None or kept.shape[2] != cache.keys.shape[2]:
        return kept
    return order(kept)


class _Masks:
    """Which keys each query sees, for a part of the queries and a block of keys at a time.

    Positions count from the first block's first key; `first` is that of the first query.
    """

    def __init__(
        self,
        mask: mx.array | str | None,
        groups: int,
        repeats: int,
        length: int,
        count: int,
        shift: int,
        blocks: int,
    ) -> None:
        self.first = count - length + shift
        self._causal = isinstance(mask, str)
        self._shift, self._end, self._blocks = shift, count + shift, blocks
        self._array: mx.array | None = None
        if isinstance(mask, mx.array):
            whole = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)[..., -count:]
            whole = mx.pad(whole, [(0, 0)] * 3 + [(shift, blocks * KEY_BLOCK - count - shift)])
            heads = (groups, repeats) if whole.shape[1] > 1 else (1, 1)
            self._array = whole.reshape(whole.shape[0], *heads, *whole.shape[2:])

    def last_block(self, stop: int) -> int:
        """The last block that the queries before `stop` see anything of."""
        return (self.first + stop - 1) // KEY_BLOCK if self._causal else self._blocks - 1

    def apply(self, scores: mx.array, block: int, start: int, stop: int) -> mx.array:
        """`scores` (B, G, R x T, KEY_BLOCK) of the queries from `start` to `stop`, masked."""
        begin, end = block * KEY_BLOCK, (block + 1) * KEY_BLOCK
        positions, seen, added = mx.arange(begin, end), None, None
        if self._causal and end > self.first + start + 1:
            seen = positions[None] <= mx.arange(self.first + start, self.first + stop)[:, None]
        if begin < self._shift or (end > self._end and not self._causal):
            real = (positions >= self._shift) & (positions < self._end)
            seen = real[None] if seen is None else seen & real
        if self._array is not None:
            rows = self._array[..., start:stop, :] if self._array.shape[-2] > 1 else self._array
            part = rows[..., begin:end]
            if part.dtype != mx.bool_:
                added = part
            else:
                seen = part if seen is None else part & seen
        if seen is None and added is None:
            return scores
        shaped = scores.reshape(*scores.shape[:2], -1, stop - start, KEY_BLOCK)
        if added is not None:
            shaped = shaped + added
        if seen is not None:
            shaped = mx.where(seen, shaped, _MASKED)
        return shaped.reshape(scores.shape)


def describe() -> str:
    """Names what these passes do, for the numeric environment."""
    return f"blocks of {KEY_BLOCK} keys, products of {MULTIPLICATIONS} and more"


