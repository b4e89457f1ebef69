"""What decode_batch relies on in mlx-lm's GenerationBatch, and what it promises itself."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import greedy_sampler

from omlx.cache import layer_state
from omlx.model.decode_batch import DecodeBatch, DecodeFailure, DecodeRow
from tests.tiny import TinyRunner

PROMPTS = [[1, 2, 3], list(range(5, 60)), [9, 8, 7, 6, 5, 4]]


@pytest.fixture(scope="module")
def runner() -> TinyRunner:
    return TinyRunner()


def row(runner, name, prompt, max_tokens=10, stop=frozenset()):
    """A row whose prompt and first token are computed; returns the row and the first token."""
    caches = runner.new_cache()
    if prompt[:-1]:
        runner.prefill(prompt[:-1], caches)
    logits = runner.logits(prompt[-1], caches)
    first = int(mx.argmax(logits).item())
    return DecodeRow(name, first, False, prompt, caches, max_tokens, greedy_sampler, [], stop), first


def alone(runner, prompt, n):
    """n greedy tokens by plain forward passes."""
    caches = runner.new_cache()
    if prompt[:-1]:
        runner.prefill(prompt[:-1], caches)
    tokens = [prompt[-1]]
    for _ in range(n):
        tokens.append(int(mx.argmax(runner.logits(tokens[-1], caches)).item()))
    return tokens[1:]


def drain(batch, results):
    for _ in range(200):
        if not len(batch):
            return
        for output in batch.step():
            results.setdefault(output.row_id, []).append(output)


def test_rows_that_join_a_running_batch_give_the_tokens_they_give_alone(runner):
    batch, results, firsts = DecodeBatch(runner.decoder), {}, {}
    for i, prompt in enumerate(PROMPTS):
        new, firsts[str(i)] = row(runner, str(i), prompt)
        batch.add(new)
        for output in batch.step():
            results.setdefault(output.row_id, []).append(output)
    drain(batch, results)
    for i, prompt in enumerate(PROMPTS):
        assert [firsts[str(i)]] + [o.token for o in results[str(i)]] == alone(runner, prompt, 11)
        assert [o.finish_reason for o in results[str(i)]] == [None] * 9 + ["length"]


def test_a_finished_rows_cache_holds_every_token_handed_out(runner):
    batch, results = DecodeBatch(runner.decoder), {}
    for i, prompt in enumerate(PROMPTS):
        batch.add(row(runner, str(i), prompt, max_tokens=4 + i)[0])
    drain(batch, results)
    for i, prompt in enumerate(PROMPTS):
        last = results[str(i)][-1]
        assert last.tokens == prompt + alone(runner, prompt, 5 + i)
        assert last.caches[0].offset == len(last.tokens)
        again = runner.new_cache()
        runner.prefill(last.tokens, again)
        keys = [mx.contiguous(c[0].keys[:, :, : len(last.tokens)]) for c in (last.caches, again)]
        assert mx.allclose(*keys, atol=1e-4).item()


def test_a_running_rows_cache_can_be_taken_back(runner):
    batch = DecodeBatch(runner.decoder)
    for i, prompt in enumerate(PROMPTS):
        batch.add(row(runner, str(i), prompt, max_tokens=50)[0])
    for _ in range(6):
        batch.step()
    caches, tokens = batch.remove("1")
    layer_state.evaluate(caches)
    assert tokens == PROMPTS[1] + alone(runner, PROMPTS[1], len(tokens) - len(PROMPTS[1]))
    assert caches[0].offset == len(tokens) and "1" not in batch and len(batch) == 2


def test_a_row_can_be_removed_before_its_first_step(runner):
    batch = DecodeBatch(runner.decoder)
    batch.add(row(runner, "a", PROMPTS[0])[0])
    caches, tokens = batch.remove("a")
    assert tokens == PROMPTS[0] and caches[0].offset == 3 and len(batch) == 0


def test_stop_tokens_belong_to_one_row(runner):
    prompt = PROMPTS[1]
    tokens = alone(runner, prompt, 10)
    stop = next(t for i, t in enumerate(tokens) if i > 1 and t not in tokens[:i])
    batch, results = DecodeBatch(runner.decoder), {}
    batch.add(row(runner, "stops", prompt, stop=frozenset({stop}))[0])
    batch.add(row(runner, "goes on", prompt)[0])
    drain(batch, results)
    assert results["stops"][-1].finish_reason == "stop" and results["stops"][-1].token == stop
    assert [o.token for o in results["goes on"]] == alone(runner, prompt, 11)[1:]


def test_long_rows_do_not_pad_short_ones(runner):
    batch = DecodeBatch(runner.decoder)
    lengths = [10, 20, 100, 1500, 30, 1100]
    for i, length in enumerate(lengths):
        batch.add(row(runner, str(i), [i + 1] * length, max_tokens=20)[0])
    for _ in range(3):
        batch.step()
    held = sum(batch.lengths)
    assert held >= sum(lengths)
    assert batch.nbytes <= 2.2 * held * runner.layout.bytes_per_token
    one = DecodeBatch(runner.decoder)
    one.add(row(runner, "x", [1] * 1500, max_tokens=20)[0])
    for _ in range(3):
        one.step()
    assert one.nbytes <= 1.3 * 1500 * runner.layout.bytes_per_token


def test_a_step_that_raises_loses_its_group_only(runner):
    class Fragile:
        layers = runner.decoder.layers
        broken = False

        def __call__(self, tokens, cache):
            if self.broken and cache[0].keys.shape[2] > 1000:
                raise RuntimeError("long rows break")
            return runner.decoder(tokens, cache=cache)

    model = Fragile()
    batch = DecodeBatch(model)
    batch.add(row(runner, "short", PROMPTS[0], max_tokens=20)[0])
    batch.add(row(runner, "long", [1] * 1200, max_tokens=20)[0])
    batch.step()
    model.broken = True
    results = batch.step()
    (failure,) = [r for r in results if isinstance(r, DecodeFailure)]
    assert failure.row_ids == ["long"] and str(failure.error) == "long rows break"
    assert "short" in batch and "long" not in batch
    assert [r.row_id for r in batch.step()] == ["short"]
    batch.close()
    assert len(batch) == 0
