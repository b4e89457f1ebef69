"""From a request's SamplingParams to what picks its tokens. Filters and penalties are mlx-lm's."""

import hashlib
import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler, make_logits_processors

from omlx.request import SamplingParams, TokenLogprob

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_WHOLE_CONTEXT = 1 << 30
# Less is the best token alone: 1 - top_p would be 1 in 32 bits, and no token would be left.
_LEAST_TOP_P = 1e-6


def make_sampler(params: SamplingParams, vocab_size: int, *, seed: int, drawn: int = 0) -> Sampler:
    """Takes log-probabilities (rows, vocab) to token ids (rows,); called once a token.

    Temperature 0 always gives the same function object, so that a batch of greedy rows is sampled
    in one call. Otherwise token i of a request is drawn with a key made of (seed, i) alone: the
    text does not depend on who else is in the batch. `drawn` tokens were handed out before.
    """
    if params.temperature == 0:
        return greedy_sampler
    count = drawn

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal count
        key = _key(seed, count)
        count += 1
        return mx.random.categorical(_filtered(logprobs / params.temperature, params, vocab_size), key=key)

    return sample


def _key(seed: int, index: int) -> mx.array:
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return mx.random.key(int.from_bytes(digest[:8], "little"))


def _filtered(logits: mx.array, params: SamplingParams, vocab_size: int) -> mx.array:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    top_k = 1 if params.top_p < _LEAST_TOP_P else params.top_k
    if 0 < top_k < vocab_size:
        logprobs = apply_top_k(logprobs, top_k)
    if _LEAST_TOP_P <= params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0:
        logprobs = apply_min_p(logprobs, params.min_p)
    return logprobs


def make_processors(params: SamplingParams, prompt_tokens: int) -> list[LogitsProcessor]:
    """Logits processors, called as (all tokens so far (n,), logits (1, vocab)) -> logits.

    Presence and frequency penalties look at generated tokens only, as OpenAI defines them.
    """
    processors = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else None,
        repetition_context_size=_WHOLE_CONTEXT,
    )
    generated_only = make_logits_processors(
        presence_penalty=params.presence_penalty or None,
        presence_context_size=_WHOLE_CONTEXT,
        frequency_penalty=params.frequency_penalty or None,
        frequency_context_size=_WHOLE_CONTEXT,
    )
    return [*processors, *(_from_position(prompt_tokens, p) for p in generated_only)]


def _from_position(start: int, processor: LogitsProcessor) -> LogitsProcessor:
    return lambda tokens, logits: processor(tokens[start:], logits)


def first_token(
    logits: mx.array, tokens: list[int], sampler: Sampler, processors: list[LogitsProcessor]
) -> tuple[int, mx.array]:
    """Samples the first token of an answer from the prompt's last logits (1, vocab).

    Returns the token id and its evaluated log-probabilities (vocab,), computed as mlx-lm's
    GenerationBatch computes those of the tokens that follow.
    """
    if processors:
        context = mx.array(tokens)
        for processor in processors:
            logits = processor(context, logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    token = sampler(logprobs)
    mx.eval(token, logprobs)
    return int(token.item()), logprobs[0]


def pick_logprobs(row: mx.array, token: int, best: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `token` and the `best` most likely (id, log-probability), best first.

    Tokens that a grammar rules out are not among them.
    """
    if not best:
        return float(row[token].item()), ()
    best = min(best, row.size)
    ids = mx.argpartition(-row, kth=best - 1)[:best]
    values = row[ids]
    pairs = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return float(row[token].item()), tuple(pair for pair in pairs if pair[1] > -math.inf)


def logprobs_of_tokens(logits: mx.array, tokens: list[int], best: int) -> list[TokenLogprob]:
    """Of each of `tokens`, given the logits (len(tokens), vocab) that precede it, with the `best` most likely ones."""
    logprobs = logits.astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0].tolist()
    best = min(best, logits.shape[-1])
    if not best:
        return [TokenLogprob(value) for value in own]
    ids = mx.argpartition(-logprobs, kth=best - 1, axis=-1)[:, :best]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    rows = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprob(value, tuple(sorted(zip(row, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))))
        for value, row, row_values in rows
    ]
