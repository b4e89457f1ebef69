import random

import pytest

from omlx.metrics import ChunkTime


def seconds(tokens: int, context: int) -> float:
    return tokens * (0.01 + 1e-5 * (context + tokens / 2))


def test_nothing_is_predicted_before_anything_was_seen():
    assert ChunkTime().seconds(8, 0) is None and ChunkTime().tokens_within(1.0, 0) is None


def test_the_fit_finds_the_cost_of_tokens_and_of_context():
    model, rng = ChunkTime(), random.Random(0)
    for context in range(0, 4000, 100):
        n = rng.choice([8, 16, 32])
        model.observe(n, context, seconds(n, context))
    assert model.seconds(64, 3000) == pytest.approx(seconds(64, 3000), rel=1e-3)
    n = model.tokens_within(2.0, 3000)
    assert n is not None and seconds(n, 3000) <= 2.0 < seconds(n + 2, 3000)


def test_one_kind_of_chunk_gives_its_time_a_token():
    model = ChunkTime()
    model.observe(10, 0, 0.5)
    assert model.seconds(20, 0) == pytest.approx(1.0)
    assert model.tokens_within(0.25, 0) == 5


def test_newer_chunks_count_more():
    model = ChunkTime()
    for speed in (0.001, 0.01):
        for _ in range(60):
            model.observe(10, 0, 10 * speed)
    assert model.seconds(10, 0) == pytest.approx(0.1, rel=0.1)


def test_a_fit_that_makes_no_sense_is_not_used():
    model = ChunkTime()
    model.observe(10, 0, 1.0)
    model.observe(10, 1000, 0.1)  # a long context is never faster: noise
    assert (model.seconds(10, 500) or -1) > 0 and (model.tokens_within(1.0, 5000) or -1) > 0
