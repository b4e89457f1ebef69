"""Embedding models in the pool: beside text on one thread, without stalling it."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from omlx.engine.embedding import EmbeddingEngine
from omlx.errors import BadRequest, ModelError, Overloaded
from omlx.request import EncoderInput
from omlx.testing import make_tiny_model
from tests.adapters import make_adapter
from tests.embeddings.tiny import Reference, make_tiny_encoder
from tests.engine.test_pool import ask, request, running

TEXTS = [letter * length for letter, length in zip("abcdefghij" * 3, range(1, 90, 3), strict=True)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "models" / "chat")
    make_tiny_encoder(tmp_path / "models" / "vectors")
    make_tiny_encoder(tmp_path / "models" / "scores", "rerank")
    return tmp_path


async def test_models_say_what_they_are_for_and_each_does_that_alone(home):
    async with running(None, home) as pool:
        assert [(m.name, m.kind, m.loaded) for m in pool.models()] == [
            ("chat", "text", False), ("scores", "rerank", False), ("vectors", "embedding", False),
        ]  # fmt: skip
        with pytest.raises(BadRequest, match=r"'vectors' writes no text; it is for /v1/embeddings and /v1/rerank"):
            await pool.get("vectors")
        with pytest.raises(BadRequest, match=r"'scores' writes no text; it is for /v1/rerank"):
            await pool.get("scores")
        with pytest.raises(BadRequest, match=r"'chat' writes text; .* here: scores, vectors"):
            await pool.get_embedder("chat")
        assert not any(m.loaded for m in pool.models())
        one, other = await pool.get_embedder("vectors"), await pool.get_embedder("scores")
        assert (one.kind, other.kind) == ("embedding", "rerank")
        assert await pool.get_embedder("vectors") is one
        assert [m.loaded for m in pool.models()] == [False, True, True]


async def test_a_server_of_one_embedding_model_loads_it_at_start(home):
    async with running(home / "models" / "vectors", home) as pool:
        assert [(m.name, m.loaded) for m in pool.models()] == [("vectors", True)]


async def test_an_adapter_is_for_text(home, tmp_path):
    with pytest.raises(ModelError, match="--adapter-path"):
        async with running(home / "models" / "vectors", home, adapter=make_adapter(tmp_path / "a")):
            pass


async def test_a_bad_model_is_one_error_and_the_others_work(home):
    (home / "models" / "scores" / "tokenizer.json").unlink()
    async with running(None, home) as pool:
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            await pool.get_embedder("scores")
        await vectors_of(await pool.get_embedder("vectors"), TEXTS[:2])
        assert await pool.ready()


async def vectors_of(engine: EmbeddingEngine, texts: list[str]) -> np.ndarray:
    return await engine.encode(engine.tokenize(texts))


async def test_requests_at_once_get_what_each_gets_alone(home):
    reference = Reference(home / "models" / "vectors")
    expected = np.array([reference.vector(text) for text in TEXTS])
    async with running(None, home) as pool:
        engine = await pool.get_embedder("vectors")
        parts = [TEXTS[start : start + 7] for start in range(0, len(TEXTS), 7)]
        found = await asyncio.gather(*(vectors_of(engine, part) for part in parts))
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-5)
        assert engine.scheduler.stats.batches < len(TEXTS)
        assert engine.scheduler.stats.finished == len(parts)


async def test_between_two_tokens_of_a_stream_there_is_one_small_batch_at_most(home):
    """Counted on the MLX thread: how many tokens the stream had at each batch."""
    async with running(None, home, max_stall_s=1e-9) as pool:
        text, engine = await pool.get("chat"), await pool.get_embedder("vectors")
        run, step, seen, rows, shares = engine.scheduler._run, engine.scheduler.step, [], [], []

        def counting(inputs: list[EncoderInput]) -> np.ndarray:
            seen.append(text.scheduler.stats.generated_tokens)
            rows.append(len(inputs))
            return run(inputs)

        def noting(share: float) -> None:
            shares.append(share)
            step(share)

        engine.scheduler._run, engine.scheduler.step = counting, noting
        await vectors_of(engine, ["a"])
        assert shares == [1.0]
        stream = request(20, max_tokens=3000, ignore_eos=True)
        answer = asyncio.create_task(ask(text, stream))
        while stream.stats.generated_tokens < 2:
            await asyncio.sleep(0.001)
        seen.clear(), rows.clear(), shares.clear()
        await vectors_of(engine, ["b" * 50] * 60)
        assert not answer.done()  # so all of it was beside the stream
        answer.cancel()
    assert rows == [1] * 60 and shares == [0.5] * 60
    assert all(later > earlier for earlier, later in itertools.pairwise(seen))


async def test_a_cancelled_request_is_dropped_and_the_queue_has_its_place_back(home):
    async with running(None, home, max_stall_s=1e-9, max_concurrent_requests=1, max_waiting_requests=1) as pool:
        engine = await pool.get_embedder("vectors")
        await vectors_of(engine, ["a"])
        long = [asyncio.create_task(vectors_of(engine, ["b" * 80] * 400)) for _ in range(2)]
        while engine.scheduler.waiting_inputs < 400:
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded, match="2 requests"):
            await vectors_of(engine, ["c"])
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await vectors_of(engine, ["c"])
        while engine.scheduler.has_work:
            await asyncio.sleep(0.001)
        stats = engine.scheduler.stats
        assert (stats.dropped, stats.finished) == (2, 2) and stats.tokens < 2 * 400 * 82


async def test_stopping_tells_who_waits(home):
    async with running(None, home, max_stall_s=1e-9) as pool:
        engine = await pool.get_embedder("vectors")
        task = asyncio.create_task(vectors_of(engine, ["b" * 80] * 2000))
        while not engine.scheduler.has_work:
            await asyncio.sleep(0.001)
        await pool.stop(5.0)
        with pytest.raises(Overloaded, match="shutting down"):
            await task


async def test_figures_say_what_was_computed(home):
    async with running(None, home) as pool:
        engine = await pool.get_embedder("vectors")
        await vectors_of(engine, ["abc", "abcd"])
        figures = (await pool.cache_figures())["embedders"]
        assert figures["vectors"]["inputs"] == 2 and figures["vectors"]["tokens"] == 5 + 6
        assert figures["vectors"]["waiting_inputs"] == 0
