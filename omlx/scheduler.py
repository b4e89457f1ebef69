"""Which request does what next: admission, chunked prefill, continuous batching, abort.

Everything here runs on the MLX thread, one `step` at a time. A step prefills for a bounded time,
then gives each running stream one token:

    admit    room? -> wait for a prefill of the same tokens, or match and restore the prompt's stored prefix
    prefill  chunks of one request -> store the blocks that became full
             at the prompt's last token: sample the first answer token, hand it out, join the batch
    decode   one token for every running row
    finish   store (the unfinished tail too), release

When the KV of running requests passes its bound the newest one is paused: its state is stored like a
finished one's and read back when there is room, to the same token.
"""

import itertools
import logging
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import mlx.core as mx

from omlx.admission import SharedPrefills, StoredPrefixes
from omlx.cache import layer_state
from omlx.cache.factory import GB, CacheConfig
from omlx.cache.grid import ExactMode, PrefillGrid
from omlx.cache.layer_state import CacheLayout
from omlx.cache.prefix_cache import BlockAwarePrefixCache, Restored
from omlx.errors import BadRequest, EngineError, OmlxError, release_frames
from omlx.metrics import ChunkTime, SchedulerStats
from omlx.model.decode_batch import DecodeBatch, DecodeFailure, DecodeOutput, DecodeRow
from omlx.model.grammar import Constraint
from omlx.model.runner import ModelRunner
from omlx.model.sampling import (
    LogitsProcessor,
    Sampler,
    first_token,
    logprobs_of_tokens,
    make_processors,
    make_sampler,
    pick_logprobs,
)
from omlx.request import FinishReason, Request, RequestState, TokenOutput, http_request_id

log = logging.getLogger(__name__)
T = TypeVar("T")
D = TypeVar("D")

# mlx-lm's caches grow by this many tokens at a time.
_KV_STEP = 256
_FIRST_CHUNK = 32  # before anything is known of the model's speed
_LONGEST_CHUNK = 2048
_LONGEST_LOGITS_CHUNK = 64  # logits of 256Ki tokens in 32 bits: 64 MB, and some copies of them
_MOST_STEPS = 1 << 32
_IDLE_WAIT_S = 0.05
_IDLE_CHUNK_S = 1.0  # without running streams: how long a chunk may keep an abort waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(CacheConfig):
    """`max_kv_cache_memory` (bytes) bounds the KV of running requests, batch padding included.

    `max_stall_s`: how long running streams may wait for their next token while prompts are
    prefilled; one chunk is always computed. `kv_bits` (8 or 4): plain KV layers are kept quantised; None: as the
    model computes them.
    """

    max_concurrent_requests: int = 16
    max_waiting_requests: int = 64
    max_kv_cache_memory: int = 8 * GB
    max_stall_s: float = 0.5
    kv_bits: int | None = None


def scheduler_config(exact: ExactMode | Literal["auto"], **options: Any) -> SchedulerConfig:
    """A configuration for this machine: `exact` "auto" is "on" for the CPU, "off" elsewhere."""
    if exact == "auto":
        exact = "on" if mx.default_device().type == mx.DeviceType.cpu else "off"
    return SchedulerConfig(exact=exact, **options)


class Failure(NamedTuple):
    """A request that ended with an error instead of an answer."""

    request_id: str
    error: OmlxError


Emit = Callable[[TokenOutput | Failure], None]


@dataclass(slots=True)
class _Row:
    """A request from admission to its end; `order` counts admissions.

    `tokens` have to be computed before the next token of the answer can be sampled: the prompt, and
    after a pause also the answer so far. `position` of them are in `caches` while prefilling.
    """

    request: Request
    order: int
    seed: int
    processors: list[LogitsProcessor]
    tokens: list[int]
    answer: list[int] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    position: int = 0
    exact_upto: int = 0
    constraint: Constraint | None = None
    uses_cache: bool = True

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def prefill_end(self) -> int:
        """The last token is computed together with the next one of the answer."""
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Tokens to compute before that one."""
        return self.prefill_end - self.position

    @property
    def more(self) -> int:
        """Tokens that the answer may still get."""
        return self.request.sampling.max_tokens - len(self.answer)


def _place_of(error: Exception) -> str:
    """The error's type and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__} {where}"


def _rounded(tokens: int) -> int:
    """Tokens that a cache allocates for `tokens`."""
    return -(-tokens // _KV_STEP) * _KV_STEP


class Scheduler:
    """The requests of one model. `emit` receives each token, or the error, as soon as it is known.

    While `squeezed` (the process is short of memory) nothing is admitted beside what runs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        prefix_cache: BlockAwarePrefixCache | None,
        emit: Emit,
    ) -> None:
        self.stats = SchedulerStats()
        self.config = config
        self._runner = runner
        self._cache = prefix_cache
        self._emit = emit
        self._exact = config.exact != "off"
        self._grid = PrefillGrid(config.block_size) if self._exact and not runner.cut_anywhere else None
        self._waiting: deque[Request] = deque()
        self._shared = SharedPrefills(prefix_cache, self._grid, self.stats)
        self._admissions = itertools.count()
        self._prefilling: list[_Row] = []
        self._paused: list[_Row] = []
        self._decoding: dict[str, _Row] = {}
        self._batch = DecodeBatch(runner.decoder, runner.takes_rope_deltas, alone=runner.alone_because is not None)
        self._chunk_time = ChunkTime()
        self._stored = StoredPrefixes(prefix_cache, self._chunk_time, self.stats) if prefix_cache else None
        self._logged_cache_errors: set[str] = set()
        self._oldest_next = False
        self._unready: _Row | None = None  # its pictures had the last turn, and are to have more
        self.squeezed = False
        self._layout = runner.layout if isinstance(runner.layout, CacheLayout) else None

    # ---- questions

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding or self._paused)

    @property
    def request_ids(self) -> list[str]:
        """All requests that have not ended."""
        return [r.request_id for r in self._waiting] + [row.id for row in (*self._paused, *self._running)]

    @property
    def running_requests(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting_requests(self) -> int:
        """Requests without KV: not admitted yet, or paused."""
        return len(self._waiting) + len(self._paused)

    @property
    def _running(self) -> list[_Row]:
        return [*self._prefilling, *self._decoding.values()]

    @property
    def kv_tokens(self) -> int:
        """Tokens held by running requests, padding not counted."""
        return sum(self._batch.lengths) + sum(row.position for row in self._prefilling)

    @property
    def kv_bytes(self) -> int:
        """Bytes of running requests' KV, padding and room to grow included."""
        return self._batch.nbytes + sum(layer_state.nbytes(r.caches) for r in self._prefilling if r.position)

    @property
    def most_tokens(self) -> int:
        """The most tokens, prompt and answer together, that a single request may have."""
        limit = self.config.max_kv_cache_memory
        # A window stops growing, so this cannot be divided.
        steps = bisect_right(range(_MOST_STEPS), limit, key=lambda steps: self._nbytes(steps * _KV_STEP)) - 1
        return max(steps, 0) * _KV_STEP

    def _nbytes(self, tokens: int) -> int:
        """Bytes that the caches of one request with `tokens` take up; 0 if they are of an unknown kind."""
        chunk = _LONGEST_CHUNK if self._grid is None else self._grid.longest_cell
        return self._layout.nbytes(tokens, chunk) if self._layout else 0

    def _growth(self, row: _Row) -> int:
        """Bytes that a running request's caches are going to grow by soon."""
        held = row.position + len(row.answer)
        return self._nbytes(held + row.remaining + min(row.more, _KV_STEP)) - self._nbytes(held)

    @property
    def prefill_speed(self) -> float | None:
        """Tokens a second at the beginning of a prompt; None until one was computed."""
        seconds = self._chunk_time.seconds(_FIRST_CHUNK, 0)
        return _FIRST_CHUNK / seconds if seconds else None

    @property
    def decoded_one_by_one(self) -> str | None:
        """Why requests are not decoded together; None if they are."""
        return self._runner.alone_because

    @property
    def restore_speeds(self) -> dict[str, float]:
        """Bytes a second that stored blocks were read at of late, by tier, as far as it is known."""
        return self._cache.restore_time.bytes_per_s if self._cache else {}

    # ---- what callers ask for

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.stats.requests += 1
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; what it computed so far is stored. Unknown ids are ignored."""
        row = next((row for row in (*self._running, *self._paused) if row.id == request_id), None)
        if row is not None:
            self.stats.aborted += 1
            self._end(row, "abort", self._take_back)
            return
        waiting = next((r for r in self._waiting if r.request_id == request_id), None)
        if waiting is not None:
            self.stats.aborted += 1
            self._waiting.remove(waiting)
            self._shared.forget(request_id)
            self._finished(waiting, "abort")

    def step(self, share: float = 1.0) -> None:
        """Advances everybody; returns after a bounded time, `share` of it if others work on this thread as well."""
        self._prefill_step(share)
        self._decode_step()
        while self.kv_bytes > self.config.max_kv_cache_memory and self.pause_newest():
            pass

    def pause_newest(self) -> bool:
        """Frees the KV of the request that was admitted last. False if it is the only one that runs."""
        running = self._running
        if len(running) < 2:
            return False
        self._guard(max(running, key=lambda row: row.order), self._pause)
        return True

    def fail_all(self, error: Exception) -> None:
        """Ends every request with `error`, after a fault that cannot be pinned on one of them."""
        for row in [*self._running, *self._paused]:
            self._fail(row, error)
        while self._waiting:
            request = self._waiting.popleft()
            self._shared.forget(request.request_id)
            self._emit(Failure(request.request_id, EngineError(f"{type(error).__name__}: {error}")))

    def close(self) -> None:
        """Aborts what is left and lets go of the decode batch."""
        for request_id in self.request_ids:
            self.abort(request_id)
        self._batch.close()

    # ---- admission

    def _has_room(self, tokens: int, more: int) -> bool:
        """Whether a request that will hold `tokens`, with `more` to come, may run beside the others.

        Prompts are counted whole, answers as far as the caches grow at a time: what comes after that
        may pause the newest. The padding of a batch at most doubles a row.
        """
        running = self._running
        if not running:
            return True
        if self.squeezed or len(running) >= self.config.max_concurrent_requests:
            return False
        ahead = sum(map(self._growth, running))
        need = self._nbytes(_rounded(2 * tokens) + min(more, _KV_STEP))
        return self.kv_bytes + need + ahead <= self.config.max_kv_cache_memory

    def _admit(self) -> _Row | None:
        """The next request, its stored prefix restored: a paused one before those that wait."""
        row = min(self._paused, key=lambda row: row.order, default=None)
        if row is None:
            row = self._next_waiting()
        elif not self._has_room(len(row.tokens), row.more):
            return None
        if row is None:
            return None
        if row in self._paused:
            self._paused.remove(row)
        else:
            row.request.stats.admitted = time.monotonic()
            self.stats.prompt_tokens += len(row.request.prompt)
        row.request.state = RequestState.PREFILLING
        self._prefilling.append(row)
        self._guard(row, self._restore)
        return row

    def _next_waiting(self) -> _Row | None:
        """The first request that nothing keeps waiting: neither room nor a prefill that it shares."""
        for request in self._waiting:
            if not self._has_room(len(request.prompt), request.sampling.max_tokens):
                return None
            if not self._cached_or(False, partial(self._shared.waits, request, self._prefilling)):
                self._waiting.remove(request)
                self._shared.forget(request.request_id)
                return self._new_row(request)
        return None

    def _new_row(self, request: Request) -> _Row:
        sampling, seed = request.sampling, request.sampling.seed
        row = _Row(
            request,
            next(self._admissions),
            secrets.randbits(63) if seed is None else seed,
            make_processors(sampling, len(request.prompt)),
            request.prompt,
        )
        if request.grammar is not None:
            row.constraint = Constraint(request.grammar, len(request.prompt), self._runner.eos_token_ids)
            row.processors.append(row.constraint)
        row.uses_cache = self._cache is not None and request.use_cache
        return row

    def _restore(self, row: _Row) -> None:
        restored = self._with_cache(row, partial(self._load, row))
        if restored is None:
            row.caches = self._runner.new_cache()
            return
        row.caches, row.position, row.exact_upto = restored.caches, restored.tokens, restored.exact_upto
        stats = row.request.stats
        if not stats.prefilled_tokens:  # else it was paused: its prompt was paid for before
            stats.cached_ram_tokens, stats.cached_ssd_tokens = restored.ram_tokens, restored.ssd_tokens
            stats.prefilled_tokens = restored.tokens
            self.stats.cached_ram_tokens += restored.ram_tokens
            self.stats.cached_ssd_tokens += restored.ssd_tokens

    def _load(self, row: _Row) -> Restored | None:
        assert self._stored is not None
        capacity = _rounded(len(row.tokens) + 1)
        return self._stored.load(row.request, row.tokens, capacity, resumes=bool(row.answer))

    # ---- errors of the cache

    def _with_cache(self, row: _Row, call: Callable[[], T]) -> T | None:
        """What a call of the prefix cache gives for a request; None if the request does not use the cache.

        An error costs the request its cache, never its answer.
        """
        return self._cached_or(None, call, row) if row.uses_cache else None

    def _cached_or(self, otherwise: D, call: Callable[[], T], row: _Row | None = None) -> T | D:
        """What `call` gives; if it raises, the error is counted, logged once for each place, and `otherwise` given."""
        try:
            return call()
        # Whatever it is: the cache only makes answers faster.
        except Exception as error:
            self.stats.cache_errors += 1
            if row is not None:
                row.uses_cache = False
            place = _place_of(error)
            if place not in self._logged_cache_errors:
                self._logged_cache_errors.add(place)
                log.exception("prefix cache failed; the request is answered without it")
            release_frames(error)
            return otherwise

    # ---- prefill

    def _prefill_step(self, share: float) -> None:
        """Prefills for as long as running streams (or others at work) may wait, at least one chunk."""
        started = time.monotonic()
        budget = self.config.max_stall_s * share if self._decoding or share < 1 else _IDLE_CHUNK_S
        while (row := self._next_row()) is not None:
            if row.remaining:
                left, before = budget - (time.monotonic() - started), row.position
                self._guard(row, partial(self._chunk, seconds=left))
                self._unready = row if row in self._prefilling and row.position == before else None
                if self._unready is not None:
                    return  # a piece of work on its pictures: now others have a turn
            if not row.remaining and row in self._prefilling:
                self._guard(row, self._start_answer)
            left = budget - (time.monotonic() - started)
            if not self._decoding or left <= 0 or not self._fits_soon(left):
                return

    def _fits_soon(self, left: float) -> bool:
        """Whether another chunk is expected to end within `left` seconds."""
        row = self._peek()
        if row is None:
            return bool(self._waiting)
        if not row.remaining:
            return True
        seconds = self._chunk_time.seconds(self._smallest_chunk(row), row.position)
        return seconds is not None and seconds <= left

    def _next_row(self) -> _Row | None:
        """A request to work on: a new one at once (it may be all cached), else by `_peek`."""
        row = self._admit()
        if row is not None and row in self._prefilling and not row.remaining:
            return row
        row = self._peek()
        self._oldest_next = not self._oldest_next
        return row

    def _peek(self) -> _Row | None:
        """Shortest remaining prompt first (of a row or of one that waits for it), so that short questions do
        not wait for long documents; every second turn goes to the oldest, so that those are not starved. None of
        this for a row whose pictures had the last turn: others come first."""
        rows = [row for row in self._prefilling if row is not self._unready] or self._prefilling
        if not rows:
            return None
        return rows[0] if self._oldest_next else min(rows, key=self._shared.remaining)

    def _smallest_chunk(self, row: _Row) -> int:
        if self._grid is None:
            return min(_FIRST_CHUNK, row.remaining)
        return min(self._grid.next_edge(row.position), row.prefill_end) - row.position

    def _chunk_tokens(self, row: _Row, seconds: float) -> int:
        if self._grid is not None:
            return self._smallest_chunk(row)
        tokens = self._chunk_time.tokens_within(seconds, row.position)
        if tokens is None:
            tokens = _FIRST_CHUNK
        longest = _LONGEST_LOGITS_CHUNK if row.request.lacks_prompt_logprobs else _LONGEST_CHUNK
        size = min(max(tokens, _FIRST_CHUNK), longest, row.remaining)
        stop = self._with_cache(row, partial(self._chunk_end, row))
        return size if stop is None else min(size, stop - row.position)

    def _chunk_end(self, row: _Row) -> int | None:
        assert self._cache is not None
        return self._cache.chunk_end(row.id, row.position)

    def _chunk(self, row: _Row, seconds: float) -> None:
        """One forward pass over the next prompt tokens; the blocks that became full are stored."""
        size = self._chunk_tokens(row, seconds)
        end, vision = row.position + size, row.request.vision
        if vision is not None and not vision.prepare(row.position, end, self._wait_s):
            return
        if row.request.lacks_prompt_logprobs:
            self._compute_logprobs(row, end)
        else:
            started = time.monotonic()
            self._runner.prefill(row.tokens[row.position : end], row.caches, row.position, vision)
            self._chunk_time.observe(size, row.position, time.monotonic() - started)
        on_edge = self._grid is None or self._grid.floor(end) == end
        if self._exact and row.exact_upto == row.position and on_edge:
            row.exact_upto = end
        row.position = end
        row.request.stats.prefilled_tokens = min(end, len(row.request.prompt) - 1)
        self.stats.prefilled_tokens += size
        self._store(row, row.tokens[:end], row.caches)

    def _compute_logprobs(self, row: _Row, end: int) -> None:
        """Prefills up to `end` for the log-probabilities of the tokens that follow each.

        After a pause it computes again what was computed before; those log-probabilities are there already.
        """
        request, start = row.request, row.position
        logits = self._runner.prefill_logits(row.tokens[start:end], row.caches, start, request.vision)
        done = len(request.prompt_logprobs)
        first, stop = max(start, done), min(end, len(request.prompt) - 1)
        if first < stop:
            best = request.sampling.top_logprobs or 0
            following = request.prompt[first + 1 : stop + 1]
            request.prompt_logprobs += logprobs_of_tokens(logits[first - start : stop - start], following, best)
        mx.clear_cache()

    @property
    def _wait_s(self) -> float:
        """How long a step may wait for what other threads do: not at all while anybody else could go on."""
        return _IDLE_WAIT_S if len(self._running) == 1 else 0.0

    def _start_answer(self, row: _Row) -> None:
        """All but the last token are computed: on to the answer's next token, which is handed out at once.

        Beside running streams the last token is fed by their next step. Alone it has a pass of its own,
        as always one token long; BatchGenerator would hand the answer's token out only after starting
        another step, which doubles a warm time to first token.
        """
        tokens, sampler = row.tokens, self._sampler(row)
        prefill_end = None if row.answer else row.prefill_end  # after a pause decoding ended here
        layer_state.evaluate(row.caches)
        if row.request.vision is not None:
            row.request.vision.release()
        if self._decoding and tokens[-1] not in self._stops(row):
            self._store(row, tokens[:-1], row.caches, prefill_end=prefill_end)
            self._join(row, tokens[-1], tokens[:-1], sampler, prompts=True)
            return
        before = layer_state.frozen(row.caches)
        logits = self._runner.logits(tokens[-1], row.caches, row.prefill_end, row.request.vision)
        token, logprobs = first_token(logits, tokens, sampler, row.processors)
        reason = self._reason(row, token)
        self._hand_out(row, token, logprobs, reason)
        layer_state.evaluate(row.caches)
        self._store(row, tokens[:-1], before, prefill_end=prefill_end)
        if reason is not None:
            self._end(row, reason, lambda row: (row.caches, tokens))
        else:
            self._join(row, token, tokens, sampler, prompts=False)

    def _join(self, row: _Row, token: int, context: list[int], sampler: Sampler, *, prompts: bool) -> None:
        """Hands the row to the decode batch: its caches hold `context`, `token` comes next."""
        self._prefilling.remove(row)
        self._decoding[row.id] = row
        row.request.state = RequestState.DECODING
        stops, vision = self._stops(row), row.request.vision
        delta = vision.rope_delta if vision is not None else 0
        self._batch.add(
            DecodeRow(row.id, token, prompts, context, row.caches, row.more, sampler, row.processors, stops, delta)
        )
        row.caches = []  # the batch's now

    def _stops(self, row: _Row) -> frozenset[int]:
        free = row.constraint is None  # a complete answer of a given form can only end
        return frozenset() if row.request.sampling.ignore_eos and free else self._runner.eos_token_ids

    def _sampler(self, row: _Row) -> Sampler:
        return make_sampler(row.request.sampling, self._runner.vocab_size, seed=row.seed, drawn=len(row.answer))

    def _reason(self, row: _Row, token: int) -> FinishReason | None:
        if token in self._stops(row):
            return "stop"
        return "length" if row.more <= 1 else None

    # ---- decode

    def _decode_step(self) -> None:
        if not self._decoding:
            return
        for result in self._batch.step():
            if isinstance(result, DecodeFailure):
                for row_id in result.row_ids:
                    if row_id in self._decoding:  # else it was aborted after its group was lost
                        self._fail(self._decoding[row_id], result.error)
            else:
                self._guard(self._decoding[result.row_id], partial(self._decoded, output=result))

    def _decoded(self, row: _Row, output: DecodeOutput) -> None:
        reason: FinishReason | None = output.finish_reason  # type: ignore[assignment]
        if output.first:
            reason = self._reason(row, output.token)
        self._hand_out(row, output.token, output.logprobs, reason)
        if reason is not None and output.first:
            self._end(row, reason, self._take_back)
        elif reason is not None:
            self._end(row, reason, lambda row: (output.caches or [], output.tokens or []))

    def _hand_out(self, row: _Row, token: int, logprobs: Any, reason: FinishReason | None) -> None:
        request = row.request
        if row.constraint is not None and row.constraint.error and reason is None:
            raise BadRequest(f"the answer could not be held to its form: {row.constraint.error}")
        row.answer.append(token)
        request.stats.first_token = request.stats.first_token or time.monotonic()
        request.stats.generated_tokens += 1
        self.stats.generated_tokens += 1
        if reason is not None:
            request.state, request.stats.finished = RequestState.FINISHED, time.monotonic()
        best = request.sampling.top_logprobs
        if best is None:
            self._emit(TokenOutput(row.id, token, reason))
        else:
            logprob, top = pick_logprobs(logprobs, token, best)
            self._emit(TokenOutput(row.id, token, reason, logprob, top))

    # ---- the end of a request

    def _end(self, row: _Row, reason: FinishReason, state: Callable[[_Row], tuple[list[Any], list[int]]]) -> None:
        """Stores the request's state (caches and the tokens that they hold) and forgets it."""
        try:
            caches, tokens = state(row)
            layer_state.evaluate(caches)
            self._store(row, tokens, caches, final=True)
        # The answer is out already: a failure to keep its state must not reach the client.
        except Exception:
            log.exception("request %s: its state could not be stored", row.id)
        self._let_go(row)
        if reason == "abort":
            self._finished(row.request, reason)
        else:
            self.stats.finished += 1

    def _take_back(self, row: _Row) -> tuple[list[Any], list[int]]:
        """The state of a row that is still at work."""
        if row.id in self._batch:
            return self._batch.remove(row.id)
        if row.id in self._decoding:  # lost with its group
            return [], []
        return row.caches, row.tokens[: row.position]

    def _pause(self, row: _Row) -> None:
        """Stores the row's state and frees it."""
        caches, held = self._take_back(row)
        self._remove(row)
        row.tokens = row.request.prompt + row.answer
        layer_state.evaluate(caches)
        self._store(row, held, caches, final=True)
        self._release(row)
        row.caches, row.position, row.exact_upto = [], 0, 0
        row.request.state = RequestState.PAUSED
        self._paused.append(row)
        self.stats.paused += 1

    def _finished(self, request: Request, reason: FinishReason) -> None:
        request.state, request.stats.finished = RequestState.FINISHED, time.monotonic()
        self._emit(TokenOutput(request.request_id, None, reason))

    def _store(self, row: _Row, tokens: list[int], caches: list[Any], **kinds: Any) -> None:
        if tokens and row.uses_cache:
            # Outside of what costs only the cache: values that a failed GPU never wrote must fail the request.
            layer_state.raise_late_errors()
            self._with_cache(row, partial(self._store_in_cache, row, tokens, caches, **kinds))

    def _store_in_cache(self, row: _Row, tokens: list[int], caches: list[Any], **kinds: Any) -> None:
        assert self._cache is not None
        keys = row.request.cache_tokens(tokens)
        self._cache.store(row.id, keys, caches, exact_upto=row.exact_upto, **kinds)

    def _let_go(self, row: _Row) -> None:
        """Frees what an ended request holds. Raises nothing: other requests must not end with it."""
        try:
            self._remove(row)
        except Exception:
            log.exception("request %s: what it held could not be freed", row.id)
        self._release(row)

    def _remove(self, row: _Row) -> None:
        decoding = self._decoding.pop(row.id, None) is not None
        if row in self._prefilling:
            self._prefilling.remove(row)
        if row in self._paused:
            self._paused.remove(row)
        if row is self._unready:
            self._unready = None
        if decoding:
            self._batch.drop(row.id)
        if row.request.vision is not None:
            row.request.vision.release()

    def _release(self, row: _Row) -> None:
        if self._cache is not None:
            self._cached_or(None, partial(self._cache.release, row.id))

    def _guard(self, row: _Row, work: Callable[[_Row], None]) -> None:
        """Runs a piece of work for one request; whatever it raises fails that request alone."""
        token = http_request_id.set(row.request.http_id)
        try:
            work(row)
        except Exception as error:
            self._fail(row, error)
        finally:
            http_request_id.reset(token)

    def _fail(self, row: _Row, error: Exception) -> None:
        log.error("request %s failed", row.id, exc_info=error)
        release_frames(error)
        self.stats.failed += 1
        row.request.state, row.request.stats.finished = RequestState.FINISHED, time.monotonic()
        if not isinstance(error, OmlxError):
            wrapped = EngineError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        # First: what follows may fail as well, and nobody else would end the client's wait.
        self._emit(Failure(row.id, error))
        self._let_go(row)
