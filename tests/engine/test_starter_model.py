"""The starter model: answers are identical to the last bit wherever the prompt's KV comes from."""

from typing import Any

import mlx.core as mx
import pytest

from omlx.engine.core import Engine
from omlx.request import Request, SamplingParams
from tests.engine.test_pool import running

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu, reason="exact mode is promised for the CPU only"
)

QUESTIONS = (
    "What is the capital of France?",
    "Summarise: " + "The cat sat on the mat and looked at the moon. " * 8,
    "Continue the list of numbers: " + ", ".join(str(i) for i in range(40)),
)


def requests(engine: Engine, name: str) -> list[Request]:
    made = []
    for i, question in enumerate(QUESTIONS):
        tokens = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True
        )
        params = SamplingParams(max_tokens=10, temperature=0, top_logprobs=5)
        made.append(Request(f"{name}{i}", list(tokens), params))
    return made


async def answers(engine: Engine, asked: list[Request]) -> list[list[tuple[Any, ...]]]:
    return [
        [(o.token, o.logprob, o.top_logprobs, o.finish_reason) async for o in engine.generate(request)]
        for request in asked
    ]


async def test_cold_ram_and_ssd_after_restart_are_identical(starter_model_dir, tmp_path):
    cache = {"paged_ssd_cache_dir": tmp_path / "cache", "block_size": 64}
    async with running(starter_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get(starter_model_dir.name)
        cold = await answers(engine, requests(engine, "cold"))
        text = engine.tokenizer.decode([token for token, *_ in cold[0]])
        assert "Paris" in text
        ram = requests(engine, "ram")
        assert await answers(engine, ram) == cold
        assert [r.stats.cached_ram_tokens for r in ram] == [len(r.prompt) - 1 for r in ram]
    async with running(starter_model_dir, tmp_path, **cache) as pool:
        engine = await pool.get(starter_model_dir.name)
        ssd = requests(engine, "ssd")
        assert await answers(engine, ssd) == cold
        assert [r.stats.cached_tokens for r in ssd] == [len(r.prompt) - 1 for r in ssd]
        assert ssd[1].stats.cached_ssd_tokens > 64
