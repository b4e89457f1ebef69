"""What a model's code is not trusted with: the library's batch form, and prompts computed in parts.

Some models of mlx-lm fail when several rows are decoded together, or give them wrong logits without an error; some
give other logits when a prompt is computed in two passes. Both are tried with a few tokens when a model is loaded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.sample_utils import greedy_sampler

from omlx.arrays import DTYPES
from omlx.cache import layer_state
from omlx.cache.layer_state import CacheLayout, Uncacheable
from omlx.model.decode_batch import DecodeBatch, DecodeFailure, DecodeOutput, DecodeRow
from omlx.model.steps import Steps

# Families whose error takes texts of thousands of tokens to show, or is as small as 16-bit rounding in short ones.
_NEVER_IN_BATCHES = {
    "afm7": "its last layers count a row's position with the padding",
    "minimax_m3_vl": "it selects blocks of keys by their place in the padded batch",
}
_NEVER_CUT = {
    "phi3small": "its sparse attention counts blocks from the end of each pass",
    "plamo3": "its window is a token longer within a pass than between passes",
}
# Of the largest log-probability: a GPU computes one row and many with other kernels, and 16 bits round each step.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 5e-2
_SHORT, _LONG = 5, 12  # tokens of the rows; the long one is longer than the windows, where those are short
_SHORT_WINDOW = 64
_MOST_ROWS = 64


class Probed(Protocol):
    """The part of a ModelRunner that is tried."""

    decoder: Any
    takes_rope_deltas: bool
    layout: CacheLayout | Uncacheable
    vocab_size: int

    def new_cache(self) -> list[Any]: ...
    def prefill(self, tokens: Sequence[int], caches: list[Any]) -> None: ...


class BatchCheck(NamedTuple):
    """Why the model's rows must be decoded one by one, and why its prompts must always be cut in the same places; None
    if they need not."""

    alone_because: str | None
    strict_because: str | None


def check_batches(runner: Probed, model_type: str) -> Steps[BatchCheck]:
    """Decodes rows together and alone, and computes a prompt in one pass and in two; nine short passes in all."""
    rows = []
    for length in (_SHORT, _long(runner.layout)):
        rows.append(_row(runner, (length,)))
        yield None
    # 2 and 3 rows together, and as many as there are KV heads: where rows and heads are mixed up, equal numbers hide
    # the error. Rows that are decoded alone anyway give no batches.
    together = []
    for count in sorted({2, 3, _kv_heads(runner.layout)}) if layer_state.batchable(rows[0].caches) else ():
        together.append(_decode(runner, rows, count))
        yield None
    # A batch copies the rows' caches, decoding alone changes them: that comes last.
    alone = [_alone(runner, row) for row in rows]
    yield None
    limit = _tolerance(runner.layout, alone[0])
    reason = _NEVER_IN_BATCHES.get(model_type) or _why_alone(together, alone, limit)
    strict = _NEVER_CUT.get(model_type) or _why_strict(runner, alone[-1], limit)
    yield None
    return BatchCheck(reason, strict)


def _why_alone(
    together: Sequence[Sequence[DecodeOutput | DecodeFailure]], alone: Sequence[mx.array], limit: float
) -> str | None:
    for outputs in together:
        for number, output in enumerate(outputs):
            if isinstance(output, DecodeFailure):
                return f"{len(outputs)} rows together raise {type(output.error).__name__}: {output.error}"
            difference = _difference(output.logprobs, alone[number % len(alone)])
            if difference > limit:
                return f"{len(outputs)} rows together differ from the same rows alone by {difference:.1%}"
    return None


def _why_strict(runner: Probed, expected: mx.array, limit: float) -> str | None:
    """The last of two passes has one token: windows are handled in another way there."""
    length = _long(runner.layout)
    difference = _difference(_alone(runner, _row(runner, (length - 1, 1))), expected)
    return f"a prompt computed in two passes differs from one pass by {difference:.1%}" if difference > limit else None


def _alone(runner: Probed, row: DecodeRow) -> mx.array:
    """The log-probabilities of a row's next token. Raises what the model raises."""
    (result,) = _decode(runner, [row], 1, alone=True)
    if isinstance(result, DecodeFailure):
        raise result.error
    return result.logprobs


def _long(layout: CacheLayout | Uncacheable) -> int:
    windows = layout.windows if isinstance(layout, CacheLayout) else ()
    return max([_LONG, *(group.size + 4 for group in windows if group.size <= _SHORT_WINDOW)])


def _kv_heads(layout: CacheLayout | Uncacheable) -> int:
    """The heads of the first keys, 2 if there are none."""
    if not isinstance(layout, CacheLayout):
        return 2
    parts = [*layout.parts, *(part for group in layout.windows for part in group.parts)]
    return min(max(2, parts[0].shape[1]), _MOST_ROWS) if parts else 2


def _tokens(runner: Probed, count: int) -> list[int]:
    return [(7 * i + 1) % runner.vocab_size for i in range(count)]


def _row(runner: Probed, passes: Sequence[int]) -> DecodeRow:
    """A row computed in passes of so many tokens, whose last token is still to be fed."""
    tokens, caches, end = _tokens(runner, sum(passes) + 1), runner.new_cache(), 0
    for size in passes:
        runner.prefill(tokens[end : end + size], caches)
        end += size
    return DecodeRow("", tokens[-1], True, tokens[:-1], caches, 2, greedy_sampler, [], frozenset())


def _decode(
    runner: Probed, rows: Sequence[DecodeRow], count: int, *, alone: bool = False
) -> list[DecodeOutput | DecodeFailure]:
    """One step of `count` rows, which repeat `rows`; for each its output, or what its batch raised."""
    batch = DecodeBatch(runner.decoder, runner.takes_rope_deltas, alone=alone)
    for number in range(count):
        batch.add(rows[number % len(rows)]._replace(row_id=str(number)))
    results: dict[str, DecodeOutput | DecodeFailure] = {}
    for result in batch.step():
        if isinstance(result, DecodeFailure):
            results |= dict.fromkeys(result.row_ids, result)
        else:
            results[result.row_id] = result
    batch.close()
    return [results[str(number)] for number in range(count)]


def _numbers(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


def _difference(found: mx.array, expected: mx.array) -> float:
    """The largest difference, as a share of the largest expected value; of tokens that are ruled out (-inf) none."""
    a, b = _numbers(found), _numbers(expected)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - b[finite]).max() / max(1.0, np.abs(b[finite]).max()))


def _tolerance(layout: CacheLayout | Uncacheable, values: mx.array) -> float:
    dtypes = {values.dtype}
    if isinstance(layout, CacheLayout):
        parts = [*layout.parts, *layout.states, *(part for group in layout.windows for part in group.parts)]
        dtypes |= {DTYPES[part.dtype] for part in parts}
    return _TOLERANCE_16_BIT if dtypes & {mx.float16, mx.bfloat16} else _TOLERANCE
