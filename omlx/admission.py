"""What a request gains before it is admitted: a prefix that another one is computing, or one that is stored.

`SharedPrefills` says who had better wait for whom, `StoredPrefixes` loads what is faster to load than to compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from omlx.cache.block import common_tokens, pack_tokens
from omlx.cache.grid import PrefillGrid
from omlx.cache.prefix_cache import BlockAwarePrefixCache, PrefixMatch, Restored, StoredPart
from omlx.cache.reading import RestoreTooSlow
from omlx.metrics import ChunkTime, RestoreTime, SchedulerStats
from omlx.request import EncoderCost, Request

# A wait may cost the leader's work on so many tokens for each token that it saves.
_WORTH = 2
# A leader is too slow when newer prompts got so many times the work that it still had to do.
_PATIENCE = 4
# Times are measured on busy machines: a stored prefix is computed only where that clearly pays.
_GAIN_S, _GAIN_SHARE = 0.02, 0.1


class Prefill(Protocol):
    """A row of the scheduler while its prompt is computed: `position` of its `tokens` are."""

    request: Request
    tokens: list[int]
    position: int

    @property
    def prefill_end(self) -> int: ...

    @property
    def remaining(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A request without KV waits until `leader` has computed `ready` tokens.

    `rest` tokens will be left to compute then. `give_up`: so much prefill work (in tokens, since the start of the
    scheduler) shows that the leader is too slow.
    """

    leader: Prefill
    ready: int
    rest: int
    give_up: int


class SharedPrefills:
    """Requests that begin with the same new tokens compute them once.

    A request that is about to compute what a running prefill computes anyway waits for that, without KV,
    and then finds it in the cache. If the leader ends early (failed, aborted, paused) it finds what the leader
    got to; if the leader is too slow it goes on by itself.
    """

    def __init__(self, cache: BlockAwarePrefixCache | None, grid: PrefillGrid | None, stats: SchedulerStats) -> None:
        self._cache = cache
        self._grid = grid
        self._stats = stats
        self._waits: dict[str, _Wait] = {}
        self._alone: set[str] = set()  # waited in vain

    def waits(self, request: Request, prefilling: Sequence[Prefill]) -> bool:
        """Whether `request`, which would be admitted now, had better wait for one of `prefilling`."""
        name, work = request.request_id, self._stats.prefilled_tokens
        wait = self._waits.get(name)
        if wait is not None:
            running = any(row is wait.leader for row in prefilling)
            if running and wait.leader.position < wait.ready and work < wait.give_up:
                return True
            del self._waits[name]
            if work >= wait.give_up:
                self._alone.add(name)
        wait = None if name in self._alone else self._wait(request, prefilling, work)
        if wait is None:
            return False
        self._waits[name] = wait
        self._stats.shared_prefills += 1
        return True

    def forget(self, request_id: str) -> None:
        """The request was admitted, or is gone."""
        self._waits.pop(request_id, None)
        self._alone.discard(request_id)

    def remaining(self, row: Prefill) -> int:
        """Tokens until somebody's prompt is done who depends on `row`: itself or one that waits for it."""
        waiting = (wait for wait in self._waits.values() if wait.leader is row)
        return min([row.remaining, *(wait.ready - row.position + wait.rest for wait in waiting)])

    def _wait(self, request: Request, prefilling: Sequence[Prefill], work: int) -> _Wait | None:
        """The wait that saves most, if any is worth it."""
        if self._cache is None or not request.use_cache or request.lacks_prompt_logprobs:
            return None
        best, gain, stored = None, 0, -1
        patience = work + sum(row.remaining for row in prefilling)
        prompt, packed, limit = request.cache_tokens(request.prompt), b"", len(request.prompt) - 1
        for row in prefilling:
            if not self._may_lead(row, request):
                continue
            packed = packed or pack_tokens(prompt)
            theirs = pack_tokens(row.request.cache_tokens(row.tokens))
            end = self._end(common_tokens(packed, theirs), limit, row.prefill_end)
            ready = -(-end // self._cache.block_size) * self._cache.block_size  # whole blocks are stored on the way
            if ready <= row.position:
                continue
            if stored < 0:
                stored = self._cache.stored_tokens(prompt, request.cache_salt, request.images)
            cost = min(ready, row.prefill_end) - row.position
            if end - stored > gain and cost <= _WORTH * (end - stored):
                best, gain = _Wait(row, ready, limit - end, patience + _PATIENCE * cost), end - stored
        return best

    @staticmethod
    def _may_lead(row: Prefill, request: Request) -> bool:
        other = row.request
        return other.use_cache and other.cache_salt == request.cache_salt and row.tokens[0] == request.prompt[0]

    def _end(self, shared: int, limit: int, prefill_end: int) -> int:
        """How many of the first `shared` tokens, equal in both prompts, a match will give."""
        shared = min(shared, limit, prefill_end)
        if self._grid is None or shared == limit == prefill_end:
            return shared
        return self._grid.floor(shared)


class StoredPrefixes:
    """Loads of a stored prefix as much as is faster to load than to compute, pictures' features included."""

    def __init__(self, cache: BlockAwarePrefixCache, chunk_time: ChunkTime, stats: SchedulerStats) -> None:
        self._cache = cache
        self._chunk_time = chunk_time
        self._stats = stats

    def load(self, request: Request, tokens: list[int], capacity: int, *, resumes: bool) -> Restored | None:
        """What is stored of all but the last of `tokens`, in layer caches with room for `capacity`.

        Nothing for a request that lacks log-probabilities of its prompt: those come of computing it.
        """
        found, keys = 0, request.cache_tokens(tokens)
        costs = request.vision.encoder_costs() if request.vision is not None else []
        for _ in range(2):  # the second time without what turned out to be slow
            match = self._cache.match(
                request.request_id,
                keys,
                request.cache_salt,
                resumes=resumes,
                images=request.images,
                tenant=request.key_name,
            )
            if request.lacks_prompt_logprobs:
                self._cache.shorten(match, 0)
                return None
            found = max(found, match.tokens)
            match = self._worth_loading(match, len(tokens) - 1, costs)
            try:
                restored = self._cache.restore(match, capacity, partial(self._compute_s, costs, match.tokens))
            except RestoreTooSlow:
                self._stats.abandoned_restores += 1
                continue
            self._stats.recomputed_tokens += found - match.tokens
            return restored
        self._stats.recomputed_tokens += found
        return None

    def _worth_loading(self, match: PrefixMatch, prefill_end: int, costs: Sequence[EncoderCost] = ()) -> PrefixMatch:
        speed, compute_s = self._cache.restore_time, self._compute_s(costs, match.tokens, 0)
        metas = [*(block.meta for block in match.blocks), *(companion.meta for companion in match.companions)]
        nbytes = sum(meta.file_size for meta in metas)
        if compute_s is None or speed.at_most(nbytes) <= compute_s:
            return match
        end = best_end(self._cache.parts(match), speed, partial(self._compute_s, costs, prefill_end))
        return match if end == match.tokens else self._cache.shorten(match, end)

    def _compute_s(self, costs: Sequence[EncoderCost], end: int, start: int) -> float | None:
        """Seconds to compute the tokens [start, end) when nobody else runs; None until a chunk was seen.

        A picture that goes on behind `end` needs its features in any case.
        """
        seconds = self._chunk_time.seconds(end - start, start)
        if seconds is None:
            return None
        return seconds + sum(cost.seconds for cost in costs if start < cost.end <= end)


def best_end(parts: Sequence[StoredPart], load: RestoreTime, compute: Callable[[int], float | None]) -> int:
    """How many leading tokens of a stored prefix to load, for the least expected time until the prompt is computed.

    `compute(k)`: seconds to compute the prompt's tokens from k on, None if the model's speed is not known yet. All
    of it is loaded unless another end is clearly better: what was never measured is trusted.
    """
    everything = parts[-1].end if parts else 0
    cold = compute(0)
    if cold is None or not everything:
        return everything
    spent, best = 0.0, (cold, 0)
    for part in parts:
        spent += load.seconds(part.tier, part.nbytes) or 0.0
        total = spent + (compute(part.end) or 0.0)
        if part.may_end and total < best[0]:
            best = (total, part.end)
    return everything if total - best[0] < max(_GAIN_S, _GAIN_SHARE * total) else best[1]
