"""Decoding many sequences at once: the one wrapper round mlx-lm's batch generation.

It drives `GenerationBatch`, the part of mlx-lm's BatchGenerator that decodes. BatchGenerator itself would
run a forward pass for each row that joins, alone, and copy its cache twice more; here a row joins the
next step of the running batch.

What is relied on (and checked by tests/model/test_decode_batch.py):
- a new GenerationBatch takes a merged cache, and calls `_step` once if it has rows;
- `extend` joins another batch's rows, which then give the same tokens as alone;
- `next()` feeds each row's pending token, hands it out, and samples the one after; a finished row's
  cache then holds every token handed out, the last one included;
- `extract_cache` and `filter` take a row out;
- the model is called with the caches as they are: with one row that may be caches which were never merged.

Rows are grouped by length. In a batch every row is padded on the left to the longest one, so one
long row would multiply the memory and time of all short ones. Within a group the longest row is
about twice the shortest at most. Rows whose caches have no batch form (quantised, chunked, ...) are groups
of one, decoded on their own caches by the same code.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.utils import maybe_set_recommended_wired_limit

from omlx.cache import layer_state
from omlx.model.sampling import LogitsProcessor, Sampler

# Below this many tokens padding costs less than a second batch.
_SHORT = 256
# On a GPU MLX keeps what a step worked with; sizes change as caches grow.
_CLEAR_STEPS = 256


class DecodeRow(NamedTuple):
    """A sequence to continue. `context` are the tokens in `caches`, `token` comes next; `max_tokens` may follow.

    `prompts`: `token` is the last one of a prompt, and the token after it is to be handed out in the
    very step that feeds it; else it belongs to the answer and was handed out before. `rope_delta`: see
    `request.PromptVision`.
    """

    row_id: str
    token: int
    prompts: bool
    context: list[int]
    caches: list[Any]
    max_tokens: int
    sampler: Sampler
    processors: list[LogitsProcessor]
    stop_tokens: frozenset[int]
    rope_delta: int = 0


class DecodeOutput(NamedTuple):
    """One token of one row; `logprobs` (vocab,). `caches` and `tokens` only when finished.

    The first token after a prompt (`first`) never comes with a `finish_reason`: the caller decides,
    and takes the row out if it was the last.
    """

    row_id: str
    token: int
    logprobs: mx.array
    finish_reason: str | None
    caches: list[Any] | None
    tokens: list[int] | None
    first: bool = False


class DecodeFailure(NamedTuple):
    """A batch step that raised, and the rows that are lost with it."""

    row_ids: list[str]
    error: Exception


class _NewRow(GenerationBatch):
    """One row that has not been stepped yet: the batch it joins does that."""

    def _step(self) -> tuple[list[int], list[mx.array]]:
        return [], []


class _SingleRow(GenerationBatch):
    """A batch of one row whose caches were never merged with others'."""

    def extract_cache(self, idx: int) -> list[Any]:
        return list(self.prompt_cache)


class _Positioned:
    """A decoder that wants to know where each row of a batch stands: `deltas` of the rows that it is called for."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.deltas: list[int] = []

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self._decoder(tokens, cache=cache, rope_deltas=self.deltas)


@dataclass(slots=True)
class _Group:
    batch: GenerationBatch
    alone: bool = False
    rows: dict[int, str] = field(default_factory=dict)  # uid -> row id
    lengths: dict[int, int] = field(default_factory=dict)  # uid -> tokens
    known: set[int] = field(default_factory=set)  # uids whose next token was handed out before
    prompts: set[int] = field(default_factory=set)  # uids whose next token is the last of their prompt
    deltas: dict[int, int] = field(default_factory=dict)  # uid -> rope_delta

    def fits(self, length: int) -> bool:
        if self.alone:
            return False
        lengths = [max(n, _SHORT) for n in (*self.lengths.values(), length)]
        return max(lengths) <= 2 * min(lengths)

    def index(self, uid: int) -> int:
        return int(self.batch.uids.index(uid))


class DecodeBatch:
    """The running rows of one model, on the MLX thread.

    `rope_deltas`: the model wants them with every call. `alone`: its rows must not be decoded together.
    """

    def __init__(self, model: Any, rope_deltas: bool = False, *, alone: bool = False) -> None:
        self._alone = alone
        self._model = _Positioned(model) if rope_deltas else model
        self._groups: list[_Group] = []
        self._where: dict[str, tuple[_Group, int]] = {}
        self._lost: list[DecodeFailure] = []
        self._uids = itertools.count()
        self._steps = 0
        maybe_set_recommended_wired_limit()  # of a GPU's memory; nothing on the CPU

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._where

    @property
    def lengths(self) -> list[int]:
        """Tokens held, a number for each row."""
        return [n for group in self._groups for n in group.lengths.values()]

    @property
    def groups(self) -> list[int]:
        """Rows that are fed together, a number for each forward pass of a step."""
        return [len(group.rows) for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' KV, padding included."""
        return sum(cache.nbytes for group in self._groups for cache in group.batch.prompt_cache)

    def add(self, row: DecodeRow) -> None:
        """Joins `row` to the next step; its caches belong to the batch from now on."""
        length = len(row.context)
        layer_state.settle(row.caches)
        group = self._group_for(length, alone=self._alone or not layer_state.batchable(row.caches))
        uid = next(self._uids)
        group.batch.extend(self._new_row(uid, row, alone=group.alone))
        group.rows[uid] = row.row_id
        group.lengths[uid] = length
        group.deltas[uid] = row.rope_delta
        (group.prompts if row.prompts else group.known).add(uid)
        self._where[row.row_id] = group, uid

    def _group_for(self, length: int, *, alone: bool) -> _Group:
        group = None if alone else next((g for g in self._groups if g.fits(length)), None)
        if group is None:
            kind = _SingleRow if alone else GenerationBatch
            group = _Group(kind.empty(self._model, greedy_sampler), alone)
            self._groups.append(group)
        return group

    def _new_row(self, uid: int, row: DecodeRow, *, alone: bool) -> GenerationBatch:
        new = _NewRow(
            model=self._model,
            uids=[uid],
            inputs=mx.array([row.token], dtype=mx.uint32),
            prompt_cache=list(row.caches) if alone else [cache.merge([cache]) for cache in row.caches],
            tokens=[list(row.context)],
            samplers=[row.sampler],
            fallback_sampler=greedy_sampler,
            logits_processors=[tuple(row.processors)],
            stop_sequences=[StopSequences([(token,) for token in row.stop_tokens])],
            max_tokens=[row.max_tokens + 1],  # it counts `token`
        )
        new._next_logprobs = [mx.zeros(1)]  # of `token`, and nobody asks for them
        return new

    def remove(self, row_id: str) -> tuple[list[Any], list[int]]:
        """Takes a running row out; returns its caches and the tokens that they hold."""
        group, uid = self._where[row_id]
        index = group.index(uid)
        caches, tokens = group.batch.extract_cache(index), group.batch.tokens[index]
        self._take_out(group, uid)
        return caches, tokens

    def drop(self, row_id: str) -> None:
        """Makes sure that a row is gone, its state with it. If it cannot be taken out alone, its group goes too."""
        if row_id not in self._where:
            return
        group, uid = self._where[row_id]
        try:
            self._take_out(group, uid)
        # Whatever it is, the rows of this group cannot go on; the next step tells.
        except Exception as error:
            self._lost.append(DecodeFailure([name for name in group.rows.values() if name != row_id], error))
            self._discard(group)

    def _take_out(self, group: _Group, uid: int) -> None:
        index = group.index(uid)
        group.batch.filter([i for i in range(len(group.batch)) if i != index])
        self._forget(group, [uid])

    def step(self) -> Iterable[DecodeOutput | DecodeFailure]:
        """One token for every row; one that has joined with a known token gives its first a step later."""
        results: list[DecodeOutput | DecodeFailure] = [*self._lost]
        self._lost.clear()
        for group in list(self._groups):
            if isinstance(self._model, _Positioned):
                self._model.deltas = [group.deltas[uid] for uid in group.batch.uids]
            try:
                responses = group.batch.next()
            # Whatever a model raises fails the rows of this group and nobody else.
            except Exception as error:
                results.append(DecodeFailure(list(group.rows.values()), error))
                self._discard(group)
                continue
            results += self._outputs(group, responses)
        self._steps += 1
        if self._steps % _CLEAR_STEPS == 0:
            mx.clear_cache()
        return results

    def _outputs(self, group: _Group, responses: Iterable[Any]) -> list[DecodeOutput]:
        outputs = []
        for response in responses:
            group.lengths[response.uid] += 1
            if response.uid in group.known:
                group.known.remove(response.uid)
            elif response.uid in group.prompts:
                outputs.append(self._first(group, response.uid))
            else:
                outputs.append(self._output(group, response))
        return outputs

    def _first(self, group: _Group, uid: int) -> DecodeOutput:
        """The token that was sampled from a prompt's logits. It would be handed out only after it was fed."""
        group.prompts.remove(uid)
        group.known.add(uid)
        index = group.index(uid)
        token = int(group.batch._next_tokens[index].item())
        return DecodeOutput(group.rows[uid], token, group.batch._next_logprobs[index], None, None, None, first=True)

    def _output(self, group: _Group, response: Any) -> DecodeOutput:
        output = DecodeOutput(
            group.rows[response.uid],
            response.token,
            response.logprobs,
            response.finish_reason,
            response.prompt_cache,
            response.all_tokens,
        )
        if response.finish_reason:
            self._forget(group, [response.uid])
        return output

    def _forget(self, group: _Group, uids: Iterable[int]) -> None:
        for uid in uids:
            del self._where[group.rows.pop(uid)]
            del group.lengths[uid]
            del group.deltas[uid]
            group.known.discard(uid)
            group.prompts.discard(uid)
        if not group.rows:
            self._groups.remove(group)

    def _discard(self, group: _Group) -> None:
        for row_id in group.rows.values():
            del self._where[row_id]
        self._groups.remove(group)

    def close(self) -> None:
        """Drops all rows."""
        self._groups, self._where = [], {}
