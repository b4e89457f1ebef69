"""What configs say of a model's context length, in the shapes that published models have."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.layer_kinds import grows, new_cache
from omlx.engine.pool import EnginePool
from omlx.errors import BadRequest
from omlx.model.context import DEFAULT_CONTEXT_LENGTH, UNLIMITED, context_length
from omlx.model.options import ModelOptions
from omlx.request import Request, SamplingParams
from omlx.scheduler import SchedulerConfig
from tests.families.zoo import tiny

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def linear(factor: Any = 4.0, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": "linear", "factor": factor} | more}


TABLE: dict[str, tuple[dict[str, Any], object, int, str]] = {
    # name: config, the tokenizer's model_max_length, tokens, a part of the source
    "plain": ({"max_position_embeddings": 8192}, 1e30, 8192, "max_position_embeddings in"),
    "gpt2": ({"n_positions": 1024, "n_ctx": 2048}, 1024, 1024, "n_positions"),
    "mpt": ({"max_seq_len": 2048}, None, 2048, "max_seq_len"),
    "Command-R": ({"max_position_embeddings": 8192, "model_max_length": 131072}, 1e30, 131072, "model_max_length in"),
    "a smaller model_max_length": ({"max_position_embeddings": 8192, "model_max_length": 2048}, None, 8192, "max_pos"),
    "the tokenizer's is larger": ({"max_position_embeddings": 32768}, 131072, 32768, "max_position_embeddings"),
    "Qwen2.5 with yarn": ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072, 131072, "yarn: original"),
    "Qwen3 with yarn": (
        {"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn"} | YARN}, None, 131072, "32768 x 4"
    ),
    "DeepSeek-V3": (
        {
            "max_position_embeddings": 163840,
            "rope_scaling": YARN | {"factor": 40, "original_max_position_embeddings": 4096},
        },
        131072, 163840, "4096 x 40",
    ),
    "gpt-oss": (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        },
        None, 131072, "4096 x 32",
    ),
    "yarn without an original": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 16}}, None, 65536, "yarn: max_pos"
    ),
    "yarn alone": ({"rope_scaling": YARN}, None, 131072, "yarn"),
    "yarn of parameters": ({"max_position_embeddings": 32768, "rope_parameters": YARN}, None, 131072, "yarn"),
    "yarn by type of layer": (
        {
            "max_position_embeddings": 65536,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
        },
        None, 65536, "8192 x 8",
    ),
    "deepseek_yarn": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "deepseek_yarn", "factor": 2}}, None, 8192, "yarn"
    ),
    "of a text part": (
        {"text_config": {"max_position_embeddings": 32768, "rope_scaling": YARN}}, None, 131072, "yarn"
    ),
    "vicuna-16k, linear": ({"max_position_embeddings": 4096} | linear(), 16384, 16384, "linear: max_position_emb"),
    "deepseek-coder, linear": ({"max_position_embeddings": 16384} | linear(), 16384, 16384, "at most the tokenizer's"),
    "linear, a tokenizer of less": ({"max_position_embeddings": 4096} | linear(), 2048, 4096, "at most"),
    "linear with an original": (
        {"max_position_embeddings": 16384} | linear(original_max_position_embeddings=4096), 1e30, 16384, "4096 x 4"
    ),
    "gemma3, linear": (
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 131072} | linear(8),
        },
        1e30, 131072, "max_position_embeddings in",
    ),
    "dynamic": (
        {"max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, 65536, "dynamic"
    ),
    "Llama 3.1": (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        },
        131072, 131072, "max_position_embeddings in",
    ),
    "Phi-3, longrope": (
        {
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.1]},
        },
        4096, 131072, "max_position_embeddings in",
    ),
    "mrope": (
        {"max_position_embeddings": 32768, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        None, 32768, "max_position_embeddings",
    ),
    "no scaling": ({"max_position_embeddings": 512, "rope_scaling": None}, None, 512, "max_position_embeddings"),
    "a factor below 1": ({"max_position_embeddings": 512} | linear(0.5), None, 512, "max_position_embeddings in"),
    "a factor of words": ({"max_position_embeddings": 512} | linear("4"), None, 512, "max_position_embeddings in"),
    "a factor without end": ({"max_position_embeddings": 512} | linear(1e300), None, 512, "max_position_embeddings in"),
    "scaling that is no object": ({"max_position_embeddings": 512, "rope_scaling": [4]}, None, 512, "max_pos"),
    "no usable number": ({"max_position_embeddings": "many", "n_positions": -1, "n_ctx": True}, 77, 77, "tokenizer"),
    "nothing": ({}, 1e30, DEFAULT_CONTEXT_LENGTH, "assumed"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_length_that_a_config_says(name: str) -> None:
    config, tokenizer_length, tokens, source = TABLE[name]
    found = context_length(config, tokenizer_length)
    assert found.tokens == tokens and source in found.source


@pytest.mark.parametrize(("family", "limited"), [("mamba2", False), ("llama", True), ("gemma3_text", True)])
def test_recurrent_models_without_a_length_are_limited_by_memory_only(family: str, limited: bool) -> None:
    model = tiny(family)
    found = context_length({}, 2048, lambda: grows(new_cache(model)))
    assert found.tokens == (2048 if limited else UNLIMITED)
    assert context_length({"max_position_embeddings": 64}, None, lambda: grows(new_cache(model))).tokens == 64


@pytest.mark.parametrize("asked", [50, 100_000])
async def test_max_model_len_goes_before_what_the_files_say(
    asked: int, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024} | linear(2.0)))
    caplog.set_level(logging.INFO, logger="omlx")
    for override, length in ((None, 2048), (asked, asked)):
        caplog.clear()
        pool = EnginePool(
            SchedulerConfig(block_size=16), tmp_path, str(model), options=ModelOptions(max_model_len=override)
        )
        await pool.start()
        try:
            engine = await pool.get("tiny")
            assert engine.context_length == length
            (line,) = [entry.getMessage() for entry in caplog.records if "context length" in entry.getMessage()][-1:]
            source = "linear: max_position_embeddings 1024 x 2 in config.json"
            start = "" if override is None else "--max-model-len instead of 2048 by "
            assert line.startswith(f"model tiny: context length {length} tokens ({start}{source}")
            warned = [entry for entry in caplog.records if "more than its own" in entry.getMessage()]
            assert len(warned) == (length == 100_000)
            if override == 50:
                long = Request("r", [1] * 40, SamplingParams(max_tokens=11))
                with pytest.raises(BadRequest, match="over the context length of 50"):
                    await anext(engine.generate(long))
        finally:
            await pool.stop(5.0)
