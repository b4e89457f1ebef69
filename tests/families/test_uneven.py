"""Families whose code in mlx-lm does not work in batches, or depends on where a prompt is cut: right all the same."""

import asyncio
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx.engine.core import Engine
from omlx.engine.pool import EnginePool
from omlx.model import batch_check
from omlx.model.runner import TextRunner
from omlx.model.steps import finish
from omlx.request import Request, SamplingParams
from omlx.scheduler import SchedulerConfig
from tests.dict_store import DictStore
from tests.families import zoo
from tests.tiny import Bench

ALONE = ["gemma2", "phi3small", "gpt_bigcode", "afm7", "minimax_m3_vl"]
STRICT = ["phi3small", "plamo3"]
LENGTHS = (20, 31, 45, 12)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
TEXT = [(7 * i + i * i) % zoo.EOS for i in range(90)]


@lru_cache(maxsize=2)
def runner(family: str) -> TextRunner:
    return zoo.runner(family)


def steps(bench: Bench, request: Request) -> list[tuple[Any, ...]]:
    assert bench.failures == {}
    return bench.answer(request)


def assert_equal(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    assert all(abs(a[2] - b[2]) <= 1e-3 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", zoo.UNEVEN)
def test_rows_of_any_number_get_the_answers_that_they_get_alone(family: str) -> None:
    heads = batch_check._kv_heads(runner(family).layout)
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "cache": False}
    bench = Bench(runner(family), DictStore())
    alone = {n: steps(bench, bench.ask(TEXT[:n], **options)) for n in LENGTHS}
    for count in sorted({2, 3, heads, 4}):
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
        requests = [bench.add(TEXT[:n], **options) for n in lengths]
        bench.run()
        for n, request in zip(lengths, requests, strict=True):
            assert_equal(steps(bench, request), alone[n])


@pytest.mark.parametrize("family", [*zoo.CONFIGS, *zoo.UNEVEN])
def test_which_families_are_decoded_one_by_one(family: str) -> None:
    reason = runner(family).alone_because
    assert (reason is not None) == (family in ALONE), reason
    assert (runner(family).strict_because is not None) == (family in STRICT)


def test_sixteen_bit_rounding_does_not_separate_rows() -> None:
    for dtype in (mx.bfloat16, mx.float16):
        assert zoo.runner("llama", dtype=dtype).alone_because is None
        assert zoo.runner("gemma2", dtype=dtype).alone_because is not None


@pytest.mark.parametrize("family", ["gemma2", "phi3small", "gpt_bigcode", "afm7"])
def test_batches_that_make_a_difference_are_found_by_trying(family: str) -> None:
    assert finish(batch_check.check_batches(runner(family), "a new name")).alone_because is not None


def test_cuts_that_make_a_difference_are_found_by_trying() -> None:
    assert finish(batch_check.check_batches(runner("plamo3"), "a new name")).strict_because is not None
    assert finish(batch_check.check_batches(runner("gemma3_text"), "a new name")) == (None, None)


@pytest.mark.parametrize("family", STRICT)
def test_a_family_that_depends_on_cuts_answers_as_cold_from_the_cache(family: str) -> None:
    store = DictStore()
    bench = Bench(runner(family), store, exact="strict")
    options = {"max_tokens": 8, "ignore_eos": True}
    talk = list(TEXT[:50])
    talk += bench.tokens(bench.ask(talk, **options)) + [3, 1, 4]
    for n in (50, 33, 49, len(talk)):
        for tail in ([], [9, 8, 7] * 6):
            prompt = talk[:n] + tail
            fresh = Bench(runner(family), DictStore(), exact="strict")
            cold = steps(fresh, fresh.ask(prompt, cache=False, **options))
            assert steps(bench, bench.ask(prompt, **options)) == cold, n


async def answer(engine: Engine, request: Request) -> list[int | None]:
    return [output.token async for output in engine.generate(request)]


@pytest.mark.parametrize(("family", "alone", "strict"), [("gemma2", True, False), ("plamo3", False, True)])
async def test_a_server_says_once_what_it_does_about_such_a_family(
    family: str, alone: bool, strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = EnginePool(SchedulerConfig(block_size=16, exact="on"), tmp_path, str(zoo.folder(tmp_path / "odd", family)))
    with caplog.at_level(logging.WARNING):
        await pool.start()
        try:
            engine = await pool.get("odd")
            answers = []
            for group in ([0], [1], [2], [0, 1, 2]):
                made = [Request(f"{group}{n}", TEXT[: 20 + 9 * n], GREEDY, use_cache=False) for n in group]
                answers += await asyncio.gather(*(answer(engine, request) for request in made))
            figures = (await pool.cache_figures())["models"]["odd"]
        finally:
            await pool.stop(5.0)
    assert answers[:3] == answers[3:]
    assert (figures["decoded_one_by_one"] is not None) == alone
    assert figures["exact"] == ("strict" if strict else "on")
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "decoded one by one" in line]) == alone
    assert len([line for line in said if "--exact strict" in line]) == strict
